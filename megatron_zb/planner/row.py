"""Row of a plan: a schedule by its name in the table, and as it runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron_zb.planner.candidate import MEGATRON_OWN, ScheduleCandidate
from megatron_zb.schedules import Schedule
from megatron_zb.schedules.layout import Layout
from megatron_zb.schedules.simulator import Timeline


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A schedule in one setting, whatever its costs come from.

    Attributes:
        candidate: name in the table.
        runs: the schedule that runs; for ``auto``, the fastest of all.
        chunks: chunks of a rank, where the schedule has the choice.
        layout: layers of each stage.
        has_by_default: whether a run has this layout without a flag.
        timeline: the simulation; None without a pipeline.
    """

    candidate: str
    runs: ScheduleCandidate
    chunks: int | None
    layout: Layout
    has_by_default: bool
    timeline: Timeline | None = None

    @property
    def family(self) -> str:
        """Name of the schedule in the flags."""
        return self.runs.family

    @property
    def megatron(self) -> bool:
        """Whether Megatron-LM runs it without this package."""
        return self.candidate in MEGATRON_OWN

    @property
    def cuts_vocabulary(self) -> bool:
        """Whether output layer and embedding are vocabulary parallel over all ranks."""
        return self.runs.cuts_vocabulary

    @property
    def overlaps_exchange(self) -> bool:
        """Whether pairs hide the expert all-to-all."""
        return self.runs.overlaps_exchange

    @property
    def schedule(self) -> Schedule | None:
        """Schedule of the timeline."""
        return None if self.timeline is None else self.timeline.schedule

    @property
    def dropped(self) -> float:
        """Share of the forwards whose activations the schedule recomputes."""
        return 0.0 if self.schedule is None else _share(self.schedule, self.schedule.dropped)

    @property
    def moved(self) -> float:
        """Share of the forwards whose activations are offloaded to the host."""
        return 0.0 if self.schedule is None else _share(self.schedule, self.schedule.moved)

    @property
    def name(self) -> str:
        """Name in tables, with the chunks; for ``auto``, with what it runs."""
        named = self.candidate
        if named == "auto":
            named = "auto: searched" if self.family == "auto" else f"auto: {self.family}"
        return named if self.chunks is None else f"{named} ×{self.chunks}"


def _share(schedule: Schedule, units: Collection[tuple[int, int]]) -> float:
    return len(units) / (schedule.num_microbatches * schedule.placement.num_stages)
