"""``megatron-zb trace``: one step of a run as timed, beside the prediction of its profile.

``--pipeline-profile FILE`` writes, next to the profile, when each pass of its last timed step ran
and how long each message was waited for. Simulated with the profile's median costs, the same order
of passes gives the time that the step should take; the difference has three parts: passes that took
longer than their median, waiting for messages, and the host between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_zb import files
from megatron_zb.errors import UsageError
from megatron_zb.measured.profile import Profile, read_profile
from megatron_zb.schedules import Timeline, simulate
from megatron_zb.schedules.interchange import rules_of
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.rules import TRAINING
from megatron_zb.schedules.schedule import Schedule

_LARGEST = 1 << 28  # bytes of a file
_Count = Annotated[int, Field(ge=0, lt=10_000_000)]
_Seconds = Annotated[float, Field(gt=-1e6, lt=1e6)]
_Kind = Literal["F", "B", "W", "R", "D", "H", "O", "P", "V", "E", "G", "M", "K"]
_Ran = tuple[_Kind, _Count, _Count, _Seconds, _Seconds]
_Waited = tuple[_Seconds, _Seconds]


class RankTrace(BaseModel):
    """One logical rank: passes as (kind, stage, microbatch, start, end), waits as (start, end)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    passes: list[_Ran] = Field(min_length=1)
    waits: list[_Waited]


class Trace(BaseModel):
    """One step; seconds of one clock for all ranks, from the first start of a pass on."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    version: Literal[1]
    ranks: list[RankTrace] = Field(min_length=2)


def trace_path(profile: Path) -> Path:
    """Return the path of a profile's trace: ``run.trace.json`` for ``run.yaml``."""
    return profile.with_suffix(".trace.json")


def write_trace(trace: Trace, profile: Path) -> None:
    """Write a trace next to its profile.

    Raises:
        UsageError: it cannot be written.
    """
    files.write_text(trace_path(profile), trace.model_dump_json() + "\n")


def read_trace(path: Path) -> Trace:
    """Read what :func:`write_trace` has written.

    Raises:
        UsageError: it cannot be read, or is no trace.
    """
    try:
        raw = files.read_bytes(path, _LARGEST)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}; --pipeline-profile writes it next to the "
            "profile"
        ) from error
    try:
        return Trace.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UsageError(
            f"{path}: {where}: {first['msg'][0].lower()}{first['msg'][1:]}; --pipeline-profile "
            "writes it anew"
        ) from error


@dataclass(frozen=True)
class StepDifference:
    """Seconds of one rank from its first start to its last end, and their parts.

    ``rank`` is Megatron's pipeline rank. ``host`` is the time between passes and waits.
    """

    rank: int
    measured: float
    predicted: float
    compute_measured: float
    compute_predicted: float
    waiting_measured: float
    waiting_predicted: float
    host: float


@dataclass(frozen=True)
class ComparedStep:
    """A step as it ran and as the profile predicts it: the same passes in the same order."""

    measured: Timeline
    predicted: Timeline
    waits: tuple[tuple[tuple[float, float], ...], ...]

    def differences(self) -> list[StepDifference]:
        """Return the difference and its parts for every rank."""
        found = (self._difference(rank) for rank in range(len(self.waits)))
        return sorted(found, key=lambda one: one.rank)

    def _difference(self, rank: int) -> StepDifference:
        spans = [_span(timeline, rank) for timeline in (self.measured, self.predicted)]
        computes = [_compute(timeline, rank) for timeline in (self.measured, self.predicted)]
        begin = self.measured.start[rank][0]
        waiting = sum(end - start for start, end in self.waits[rank] if start >= begin)
        return StepDifference(
            self.measured.number(rank),
            spans[0],
            spans[1],
            computes[0],
            computes[1],
            waiting,
            spans[1] - computes[1],
            spans[0] - computes[0] - waiting,
        )


def _span(timeline: Timeline, rank: int) -> float:
    return timeline.end[rank][-1] - timeline.start[rank][0]


def _compute(timeline: Timeline, rank: int) -> float:
    return sum(b - a for a, b in zip(timeline.start[rank], timeline.end[rank], strict=True))


def compare(profile_path: Path) -> ComparedStep:
    """Read a profile and its trace, and simulate the step.

    Raises:
        UsageError: a file is missing or broken, or they are not of one run.
    """
    profile = read_profile(profile_path)
    path = trace_path(profile_path)
    return compared(profile, read_trace(path), str(path))


def compared(profile: Profile, trace: Trace, name: str) -> ComparedStep:
    """Simulate the step of a profile and a trace; ``name`` is the trace's name in errors.

    Raises:
        UsageError: they are not of one run.
    """
    placement = profile.placement
    ranks = tuple(
        tuple(Pass(PassKind(kind), stage, mb) for kind, stage, mb, _, _ in rank.passes)
        for rank in trace.ranks
    )
    schedule = Schedule(
        profile.schedule,
        placement,
        profile.num_microbatches,
        ranks,
        rules=rules_of(ranks) if profile.vocabulary is not None else TRAINING,
    )
    try:
        schedule.validate()
    except UsageError as error:
        raise UsageError(f"{name} is not of the run of the profile: {error}") from error
    costs = profile.costs(placement, host=False)
    if schedule.recomputed:
        costs = profile.with_recomputation(costs)
    if schedule.offloaded:
        costs = profile.with_offload(costs)
    predicted = replace(simulate(schedule, costs), of_job=True)
    measured = replace(predicted, start=_times(trace, 3), end=_times(trace, 4), copies=())
    waits = tuple(tuple(rank.waits) for rank in trace.ranks)
    return ComparedStep(measured, predicted, waits)


def _times(trace: Trace, column: Literal[3, 4]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(ran[column] for ran in rank.passes) for rank in trace.ranks)


def of_spans(ranks: Sequence[Sequence[tuple[Pass | None, float, float]]]) -> Trace:
    """Build a trace from each logical rank's spans, in seconds of one clock; None is a wait."""
    beginning = min(start for rank in ranks for of, start, _ in rank if of is not None)

    def rank_trace(spans: Sequence[tuple[Pass | None, float, float]]) -> RankTrace:
        moved = [(of, start - beginning, end - beginning) for of, start, end in spans]
        return RankTrace.model_validate(
            {
                "passes": [
                    (of.kind.value, of.stage, of.microbatch, start, end)
                    for of, start, end in moved
                    if of is not None
                ],
                "waits": [(start, end) for of, start, end in moved if of is None],
            }
        )

    return Trace(version=1, ranks=[rank_trace(spans) for spans in ranks])
