"""Pipe-BD: blockwise distillation as a pipeline of teacher relays (arXiv 2301.12443)."""

from __future__ import annotations

from megatron_zb.distill.schedule.distribution import Distribution
from megatron_zb.distill.schedule.relay import Relay
from megatron_zb.errors import UsageError
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import GroupPlacement
from megatron_zb.schedules.request import check_size
from megatron_zb.schedules.schedule import Schedule

NAME = "pipe-bd"


def pipe_bd(
    distribution: Distribution, microbatches: int, steps: int = 1, run_ahead: int = 1
) -> Schedule:
    """Build the schedule in which ranks relay teacher activations and update students on their own.

    A rank runs T and S of each of its microbatches, in order, and U when the last of a step is
    done; then it goes on with the next step, whatever the other stages do.

    Args:
        distribution: the blocks of each rank.
        microbatches: microbatches per step; numbered through all steps (see :class:`Pass`).
        steps: number of consecutive steps.
        run_ahead: no rank begins step n before all have finished step n - 1 - run_ahead.

    Raises:
        UsageError: a number is too small, or a stage has ranks that the microbatches of a step
            cannot be dealt out to evenly.
    """
    _check(distribution, microbatches, steps, run_ahead)
    placement = distribution.placement
    ranks = tuple(
        _passes(placement, rank, microbatches, steps) for rank in range(placement.pipeline_size)
    )
    relay = Relay(microbatches, steps, run_ahead)
    return Schedule(NAME, placement, microbatches, ranks, rules=relay)


def _passes(
    placement: GroupPlacement, rank: int, microbatches: int, steps: int
) -> tuple[Pass, ...]:
    (stage,) = placement.stages_of[rank]
    order: list[Pass] = []
    for step in range(steps):
        for j in range(step * microbatches, (step + 1) * microbatches):
            if placement.rank_at(stage, j) == rank:
                order += [Pass(PassKind.T, stage, j), Pass(PassKind.S, stage, j)]
        order.append(Pass(PassKind.U, stage, step))
    return tuple(order)


def _check(distribution: Distribution, microbatches: int, steps: int, run_ahead: int) -> None:
    for what, number, least in (
        ("microbatches per step", microbatches, 1),
        ("steps", steps, 1),
        ("steps to run ahead", run_ahead, 0),
    ):
        if number < least:
            raise UsageError(f"{NAME}: {number} {what} were asked for: give {least} or more")
    check_size(NAME, len(distribution.ranges), steps * microbatches)
    for stage, ranks in enumerate(distribution.placement.groups):
        if microbatches % len(ranks):
            raise UsageError(
                f"{NAME}: {microbatches} microbatches per step cannot be dealt out evenly to the "
                f"{len(ranks)} ranks of stage {stage}: give a multiple of {len(ranks)}"
            )
