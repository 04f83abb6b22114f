"""The schedules of the installed torch.distributed.pipelining, as data for our simulator.

They are built by torch's own classes; no process group is needed. Their orders are as torch runs
them, so they may break our rule 'microbatch order' (LoopedBFS runs backwards from the last
microbatch on): they are checked for completeness and progress, not by Schedule.validate().
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _Action

from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement, looped, v_shape
from megatron_zb.schedules.schedule import Schedule

LOOPED_ONE_CHUNK = ("GPipe", "1F1B")
LOOPED = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
NAMES = (*LOOPED_ONE_CHUNK, *LOOPED, *V_SHAPED)

_KINDS = {"F": PassKind.F, "I": PassKind.B, "W": PassKind.W, "B": PassKind.BW}


class Refused(ValueError):
    """Torch has no such schedule for these sizes; the message is torch's reason."""


@dataclass(frozen=True)
class Offer:
    """What torch has for given sizes: schedules by name, and the reasons why some are missing."""

    schedules: dict[str, Schedule]
    refused: dict[str, str]


def torch_schedules(
    pipeline_size: int, num_microbatches: int, *, chunks: Sequence[int] = (2,)
) -> Offer:
    """All schedules of torch; the looped ones for each number of chunks, as ``NAME`` or ``NAMEx3``.

    Their names here are ``torch-`` and the name that torchtitan's users give.
    """
    offer = Offer({}, {})
    for name in NAMES:
        for count in chunks if name in LOOPED else (None,):
            key = f"torch-{name}" + (f"x{count}" if count not in (None, 2) else "")
            try:
                offer.schedules[key] = torch_schedule(
                    name, pipeline_size, num_microbatches, chunks=count
                )
            except Refused as reason:
                offer.refused[key] = str(reason)
    return offer


def torch_schedule(
    name: str, pipeline_size: int, num_microbatches: int, *, chunks: int | None = None
) -> Schedule:
    """One schedule of torch by the name that torch gives it.

    Raises:
        Refused: torch has none for these sizes, or the one it has cannot run to its end.
    """
    try:
        rows = get_schedule_ops(name, pipeline_size, num_microbatches, chunks)
    except (ValueError, AssertionError) as error:
        raise Refused(str(error)) from error
    ranks = tuple(tuple(_counted_from_0(list(_passes(row)))) for row in rows)
    schedule = Schedule(
        f"torch-{name}", _placement(name, pipeline_size, chunks or 2), num_microbatches, ranks
    )
    _check(schedule)
    return schedule


def _placement(name: str, pipeline_size: int, chunks: int) -> Placement:
    if name in V_SHAPED:
        return v_shape(pipeline_size)
    return looped(pipeline_size, 1 if name in LOOPED_ONE_CHUNK else chunks)


def _passes(actions: Sequence[_Action | None]) -> Iterator[Pass]:
    """The passes of one rank: no idle steps, no reductions, overlapped pairs one by one."""
    for action in actions:
        if action is None:
            continue
        for part in action.sub_actions or (action,):
            kind = _KINDS.get(part.computation_type.value)
            if kind is not None and part.microbatch_index is not None:
                yield Pass(kind, part.stage_index, part.microbatch_index)


def _counted_from_0(passes: list[Pass]) -> list[Pass]:
    """Torch's table of 1F1B counts the forwards of the last rank from 1; it runs them from 0."""
    first: dict[int, int] = {}
    for kind, stage, microbatch in passes:
        if kind is PassKind.F:
            first[stage] = min(microbatch, first.get(stage, microbatch))
    return [
        Pass(kind, stage, microbatch - first[stage] if kind is PassKind.F else microbatch)
        for kind, stage, microbatch in passes
    ]


def _check(schedule: Schedule) -> None:
    """Every stage runs F and either BW or B and W of every microbatch, and the ranks finish."""
    rank_of = schedule.placement.rank_of
    found = sorted(
        (rank, letter, stage, microbatch)
        for rank, passes in enumerate(schedule.ranks)
        for kind, stage, microbatch in passes
        for letter in kind.value
    )
    wanted = sorted(
        (rank, letter, stage, microbatch)
        for stage, rank in enumerate(rank_of)
        for letter in "FBW"
        for microbatch in range(schedule.num_microbatches)
    )
    if found != wanted:
        raise Refused(f"{schedule.name}: its table does not have every pass once")
    if schedule.blocked() is not None:
        raise Refused(f"{schedule.name}: its ranks would wait for one another for ever")
