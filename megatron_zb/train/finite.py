"""The end of a run whose loss or gradients are NaN or infinite, as Megatron-LM does by default.

megatron-core checks the gradients of every bucket before they are reduced, and any other tensor it
is given; its exceptions become one sentence here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import get_rerun_state_machine

_REJECTED = re.compile(r"Unexpected result \S+ \(message='(found (?:NaN|Inf) in [^']+)'\)")


class NotFinite(Exception):
    """A NaN or infinite value, which would spoil the weights; the message is one sentence."""


def check_loss(loss: torch.Tensor) -> None:
    """Check a loss for NaN and infinity, as pretrain_gpt.py does; the host waits for it.

    Raises:
        RuntimeError: it is NaN or infinite.
    """
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
