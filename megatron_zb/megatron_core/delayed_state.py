"""What an update changes beside the weights, where updates come one step late.

Passes of two groups of microbatches run together, and each group computes with what all updates
but the newest one have made. For the weights :mod:`megatron_zb.runtime.weight_banks` sees to that.
Here it is done for the scale of the loss in fp16, and for the biases by which routers balance
experts without an auxiliary loss. Like the weights, both have two versions: after so many updates,
and after one fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_zb.megatron_core.auxiliary_losses import AuxiliaryScales
from megatron_zb.schedules.passes import PassKind

_VERSIONS = 2


class DelayedState:
    """State of which every group has its own version."""

    def __init__(self) -> None:
        self._updates = 0

    def select(self, group: int) -> None:
        """Have the state of a group in place, before a pass of it."""

    def keep(self, kind: PassKind, group: int) -> None:
        """Keep what a pass of a group has made, behind it."""

    def rest(self) -> None:
        """Have the newest state in place, where everybody else expects it."""

    @contextmanager
    def reducing(self, group: int) -> Iterator[None]:
        """Have the state of a group in place while Megatron ends the reduction of its gradients."""
        yield

    def update(self, group: int) -> None:
        """Make the next version from the newest one and what ``reducing`` has found."""

    def forget(self) -> None:
        """Let the older version be equal to the newest one."""

    def _of_group(self, group: int) -> int:
        """Return which version a group has: that after one update fewer than its number."""
        return max(group - 1, 0) % _VERSIONS

    @property
    def _newest(self) -> int:
        return self._updates % _VERSIONS

    @property
    def _next(self) -> int:
        return (self._updates + 1) % _VERSIONS


class LossScales(DelayedState):
    """The loss scales of a training in fp16.

    All passes of a group have one scale, and its gradients are divided by this one. Whether they
    are finite then changes the newest scale, as it does without a delay.

    Args:
        optimizers: Megatron's, some of which have a ``grad_scaler``.
    """

    def __init__(self, optimizers: Iterable[Any]) -> None:
        super().__init__()
        found = (getattr(it, "grad_scaler", None) for it in optimizers)
        self._scalers = [it for it in found if it is not None]
        self._scales = [self._now() for _ in range(_VERSIONS)]
        self._found: dict[int, list[bool]] = {}
        self._auxiliary = AuxiliaryScales()

    def _now(self) -> list[torch.Tensor]:
        return [it.scale for it in self._scalers]

    def _set(self, version: int) -> None:
        for scaler, scale in zip(self._scalers, self._scales[version], strict=True):
            scaler._scale = scale

    def select(self, group: int) -> None:
        self._set(self._of_group(group))
        if self._scalers:
            self._auxiliary.put_back(group % _VERSIONS)

    def keep(self, kind: PassKind, group: int) -> None:
        if self._scalers and kind is PassKind.F:  # it has set the scales of auxiliary losses
            self._auxiliary.keep(group % _VERSIONS)

    def rest(self) -> None:
        self._set(self._newest)

    @contextmanager
    def reducing(self, group: int) -> Iterator[None]:
        found = self._found[group] = []
        self._set(self._of_group(group))
        with ExitStack() as stack:
            for scaler in self._scalers:
                stack.callback(delattr, scaler, "update")
                scaler.update = found.append
            yield
        self.rest()

    def update(self, group: int) -> None:
        self.rest()
        for scaler, found in zip(self._scalers, self._found.pop(group), strict=True):
            scaler.update(found)
        self._scales[self._next] = self._now()
        self._updates += 1

    def forget(self) -> None:
        self._scales[self._next] = self._scales[self._newest]


class RouterBiases(DelayedState):
    """The biases of routers, and the tokens that they have counted for each expert.

    Every group counts its own tokens, in forwards that run beside those of the next group. Their
    sum moves the newest bias by a fixed step, which Megatron computes here from a bias of zero.
    Source: balancing without an auxiliary loss, arXiv 2408.15664.

    Args:
        chunks: of the model on this rank.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        super().__init__()
        modules = (it for chunk in chunks for it in chunk.modules())
        self._routers = [it for it in modules if getattr(it, "expert_bias", None) is not None]
        for router in self._routers:
            router._maintain_float32_expert_bias()  # as its first forward does
        self._biases = [self._copies("expert_bias") for _ in range(_VERSIONS)]
        self._counts = [self._copies("local_tokens_per_expert") for _ in range(_VERSIONS)]
        self._steps: dict[int, list[torch.Tensor]] = {}

    def _copies(self, name: str) -> list[torch.Tensor]:
        return [getattr(it, name).detach().clone() for it in self._routers]

    def _point_to(self, biases: Iterable[torch.Tensor], counts: Iterable[torch.Tensor]) -> None:
        for router, bias, count in zip(self._routers, biases, counts, strict=True):
            router.expert_bias.data, router.local_tokens_per_expert.data = bias, count

    def select(self, group: int) -> None:
        self._point_to(self._biases[self._of_group(group)], self._counts[group % _VERSIONS])

    def rest(self) -> None:
        self._point_to(self._biases[self._newest], self._counts[self._newest])

    @contextmanager
    def reducing(self, group: int) -> Iterator[None]:
        steps = self._steps[group] = [torch.zeros_like(it) for it in self._biases[0]]
        self._point_to(steps, self._counts[group % _VERSIONS])
        yield
        self.rest()

    def update(self, group: int) -> None:
        newest, new = self._biases[self._newest], self._biases[self._next]
        for bias, of, step in zip(new, newest, self._steps.pop(group), strict=True):
            torch.add(of, step, out=bias)
        self._updates += 1

    def forget(self) -> None:
        for older, newest in zip(self._biases[self._next], self._biases[self._newest], strict=True):
            older.copy_(newest)
        for count in (*self._counts[0], *self._counts[1]):
            count.zero_()
