"""The end of a run whose loss or gradients are NaN or infinite, as Megatron-LM does by default.

megatron-core checks the gradients of every bucket before they are reduced, and any other tensor it
is given; its exceptions become one sentence here.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import get_rerun_state_machine

_REJECTED = re.compile(r"Unexpected result \S+ \(message='(found (?:NaN|Inf) in [^']+)'\)")


class NotFinite(Exception):
    """A NaN or infinite value, which would spoil the weights; the message is one sentence."""


class LossCheck:
    """Check of the losses of an iteration for NaN and infinity, as pretrain_gpt.py does.

    Megatron-LM reads each loss at once, so that the host waits for the device in every microbatch
    and the device for the host afterwards. Here a loss is read when the device has computed it.
    """

    def __init__(self) -> None:
        self._copied: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def add(self, loss: torch.Tensor) -> None:
        """Check the losses that are known by now; ``loss`` is checked later if it is not.

        Raises:
            RuntimeError: a loss is NaN or infinite.
        """
        self._copied.append(_copy_to_host(loss.detach()))
        while self._copied and _has_come(self._copied[0][1]):
            _check(self._copied.popleft()[0])

    def finish(self) -> None:
        """Wait for all losses and check them.

        Raises:
            RuntimeError: a loss is NaN or infinite.
        """
        while self._copied:
            loss, copied = self._copied.popleft()
            if copied is not None:
                copied.synchronize()
            _check(loss)


def _copy_to_host(loss: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    if not loss.is_cuda:
        return loss, None
    host = torch.empty_like(loss, device="cpu", pin_memory=True)
    host.copy_(loss, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host, copied


def _has_come(copied: torch.cuda.Event | None) -> bool:
    return copied is None or copied.query()


def _check(loss: torch.Tensor) -> None:
    for what, is_it in (("NaN", torch.isnan), ("Inf", torch.isinf)):
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=is_it,
            message=f"found {what} in local forward loss calculation",
            fatal=True,
        )


@contextmanager
def said_in_a_sentence(iteration: int) -> Iterator[None]:
    """Turn failed checks in forward and backward of an iteration into NotFinite.

    Raises:
        NotFinite: a check has found something.
    """
    try:
        yield
    except RuntimeError as error:
        rejected = _REJECTED.search(str(error))
        if rejected is None:
            raise
        raise NotFinite(
            f"rank {dist.get_rank()} {rejected[1]}, in iteration {iteration}: resume from a "
            "checkpoint before it with a lower --lr or other data, or give "
            "--no-check-for-nan-in-loss-and-grad to train on with it"
        ) from error
