"""Checks of the split backward: its gradients, and the layers that cannot be split.

``--pipeline-verify`` runs the first step of training twice: once with every weight gradient in B,
by Megatron's own functions, and its reductions at the end; then as it will run from then on. Data,
random numbers, logged losses and what forwards change in the model are put back in between. A layer
whose gradient is lost, doubled, computed from the wrong tensors or reduced too early then differs
by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_zb.errors import UsageError
from megatron_zb.job.settings import VERIFY_FLAG
from megatron_zb.megatron_core.model_ends import gradient_of
from megatron_zb.megatron_core.rehearsal import (
    Gradients,
    gradients,
    trained_parameters,
    undone,
)
from megatron_zb.megatron_core.split_backward import SplitBackward
from megatron_zb.megatron_core.step import Step, StepPart, device, say_on_first_rank
from megatron_zb.runtime.observer import NOTHING

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
"""The most that a gradient may differ, as a share of its norm, by the type of its weight. Both
steps run the same kernels in the same order, so only kernels whose sums have no fixed order, such
as those of an attention's backward, give a difference at all."""
TOLERANCE_16_BITS = 2e-3


class GradientDifference(NamedTuple):
    """A parameter whose gradients differ, by a share of the norm of the unsplit one."""

    name: str
    share: float
    norms: tuple[float, float]


class _Checked(NamedTuple):
    """The result of a rank: its difference nearest to the loss, with its stage, if any."""

    found: tuple[int, GradientDifference] | None
    largest: float
    parameters: int
    layers: int


class Verification(StepPart):
    """The comparison of the first step of training; ``splits`` are those of the rank's chunks."""

    def __init__(self, splits: list[SplitBackward]) -> None:
        self._splits = splits
        self._is_due = True
        self._expected: list[Gradients] = []

    def around(self, step: Step) -> AbstractContextManager[None]:
        """Rehearse the first step with nothing split, before the contexts of other parts."""
        if self._is_due and not step.forward_only and not step.is_rehearsal:
            step.is_rehearsal = True
            try:
                self._rehearse(step)
            finally:
                step.is_rehearsal = False
        return NOTHING

    def after_step(self, step: Step) -> None:
        if self._is_due and not step.forward_only:
            self._is_due = False
            say_on_first_rank(self._compare(step))

    def _rehearse(self, step: Step) -> None:
        """Run the step that is compared with, and undo everything that it has changed."""
        for split in self._splits:
            split.is_off = True
        try:
            with undone(step):
                step.run(step)
                self._expected = [gradients(chunk) for chunk in step.model]
        finally:
            for split in self._splits:
                split.is_off = False

    def _compare(self, step: Step) -> str:
        """Return the line to print about the step that has run since; collective over the job.

        Raises:
            UsageError: a gradient differs; on all ranks, with the one that is nearest to the loss,
                as a fault of an input gradient spreads to all layers before it.
        """
        found: list[tuple[int, GradientDifference]] = []
        largest = 0.0
        for number, chunk in enumerate(step.model):
            differ, most = _differences(self._expected[number], chunk)
            stage = step.physical.stage(step.pp_rank, number)
            found += [(stage, one) for one in differ[-1:]]
            largest = max(largest, most)
        mine = _Checked(
            found=max(found, default=None, key=lambda one: one[0]),
            largest=largest,
            parameters=sum(map(len, self._expected)),
            layers=sum(len(split.split_layers) for split in self._splits),
        )
        self._expected = []
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        wrong = [(one.found, rank) for rank, one in enumerate(everyone) if one.found]
        if wrong:
            (_, worst), rank = max(wrong, key=lambda one: one[0][0])
            raise UsageError(_sentence(step.program.schedule.name, rank, worst))
        return (
            f"{VERIFY_FLAG}: the gradients of {sum(one.parameters for one in everyone)} parameters "
            f"on {len(everyone)} ranks, {sum(one.layers for one in everyone)} of split layers, are "
            "those of an unsplit backward; the largest difference is "
            f"{max(one.largest for one in everyone):.1e} of a gradient's norm"
        )


def _sentence(schedule: str, rank: int, worst: GradientDifference) -> str:
    name, share, (expected, ours) = worst
    if not ours:
        wrong = f"is missing, where an unsplit backward has one of norm {expected:.3g}"
    else:
        wrong = (
            f"has a norm of {ours:.3g} and is off by {share:.1%} from that of an unsplit backward, "
            f"of norm {expected:.3g}"
        )
    return (
        f"{VERIFY_FLAG}: with --pipeline-schedule {schedule}, the gradient of {name} on rank "
        f"{rank} {wrong}: leave the schedule out or use 1f1b, and report this layer"
    )


def _differences(expected: Gradients, chunk: Any) -> tuple[list[GradientDifference], float]:
    """Return the gradients that differ by more than is allowed, and the largest difference."""
    found, largest = [], 0.0
    for name, parameter in trained_parameters(chunk):
        mine, theirs = gradient_of(parameter), expected[name]
        if mine is None and theirs is None:
            continue
        zero = torch.zeros(())
        ours = (zero if mine is None else mine).float()
        reference = (zero if theirs is None else theirs.to(ours.device)).float()
        norms = float(reference.norm()), float(ours.norm())
        if not any(norms):
            continue
        share = _off(ours, reference) / (norms[0] or norms[1])
        largest = max(largest, share)
        if not share <= TOLERANCE.get(parameter.dtype, TOLERANCE_16_BITS):
            found.append(GradientDifference(name, share, norms))
    return found, largest


def _off(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the norm of a difference; numbers that are not finite in both are equal."""
    both = ~(mine.isfinite() | theirs.isfinite())
    return float((mine - theirs).masked_fill(both, 0.0).norm())


class UnsplitLayers(StepPart):
    """The unsplit layers of a rank's chunks: named once each, counted after the first step.

    Args:
        splits: one for each chunk.
        count: function called on every rank with the shares of each stage's weights, by their
            sizes, whose gradients B computes and that are frozen; it returns a line about them, if
            there is one.
    """

    def __init__(self, splits: Sequence[SplitBackward], count: _Count) -> None:
        self._splits = splits
        self._count: _Count | None = count

    def after_step(self, step: Step) -> None:
        """Name new layers on the first replica; the first call is collective over the job."""
        if step.forward_only:
            return
        lines = [line for split in self._splits for line in split.news()]
        groups = (getattr(step.pg_collection, name, None) for name in ("tp", "dp_cp"))
        if lines and all(group is None or group.rank() == 0 for group in groups):
            for line in lines:
                print(f"megatron_zb: {line}", flush=True)
        if self._count is not None:
            count, self._count = self._count, None
            if (counted := count(*self._shares(step))) is not None:
                say_on_first_rank(counted)

    def _shares(self, step: Step) -> tuple[list[float], list[float]]:
        """Return the largest shares of each stage on any rank; schedules must be equal on all."""
        shares = torch.zeros(2, step.physical.placement.num_stages, device=device())
        for chunk, split in enumerate(self._splits):
            unsplit, left = split.sizes
            frozen = _frozen_numbers(step.model[chunk])
            whole = max(unsplit + left + frozen, 1)
            stage = step.physical.stage(step.pp_rank, chunk)
            shares[0, stage], shares[1, stage] = unsplit / whole, frozen / whole
        dist.all_reduce(shares, op=dist.ReduceOp.MAX)
        of_b, of_none = shares.tolist()
        return of_b, of_none


_Count = Callable[[list[float], list[float]], str | None]


def _frozen_numbers(chunk: torch.nn.Module) -> int:
    """Count the numbers in frozen matrices, but those of embeddings, which no W multiplies."""
    return sum(
        weight.numel()
        for name, weight in chunk.named_parameters()
        if weight.dim() > 1 and not weight.requires_grad and "embedding" not in name
    )
