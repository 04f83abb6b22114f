"""The work of a page's schedules: how the page builds others for it, and the flags that ask for it.

Without adapters it is a number of microbatches. With them it is all their steps, so that what the
explorer compares is the same work under each schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zb.schedules import Costs, Schedule, catalog
from megatron_zb.schedules.features.adapters import AdapterRules, Adapters


@dataclass(frozen=True)
class PageWork:
    """Microbatches of one training, or adapters that share the pipeline."""

    microbatches: int
    adapters: Adapters | None = None

    @classmethod
    def of(cls, schedule: Schedule) -> PageWork:
        """Return the work of a schedule."""
        rules = schedule.rules
        adapters = rules.adapters if isinstance(rules, AdapterRules) else None
        return cls(schedule.num_microbatches, adapters)

    def build(self, name: str, pipeline_size: int, costs: Costs | None = None) -> Schedule:
        """Build the schedule of a name for this work."""
        return catalog.build(
            name,
            pipeline_size=pipeline_size,
            num_microbatches=self.microbatches if self.adapters is None else None,
            costs=costs,
            adapters=self.adapters,
        )

    @property
    def update(self) -> float:
        """Seconds of an update on a rank, which the reader cannot change."""
        return 0.0 if self.adapters is None else self.adapters.update

    @property
    def flags(self) -> str | None:
        """Flags of ``megatron-zb show`` in place of a number of microbatches.

        Nothing for one training; None for adapters that the command cannot draw.
        """
        if self.adapters is None:
            return ""
        first, count = self.adapters.each[0], len(self.adapters.each)
        equal = Adapters.equal(count, microbatches=first.microbatches, steps=first.steps)
        if self.adapters != equal:
            return None
        steps = f" --adapter-steps {first.steps}" if first.steps > 1 else ""
        return f"--num-microbatches {first.microbatches} --adapters {count}{steps}"

    @property
    def note(self) -> str:
        """What to say of the number of microbatches; nothing of those of one training."""
        if self.adapters is None:
            return ""
        each = self.adapters.each
        steps = sum(it.steps for it in each)
        return f"These are all microbatches of {len(each)} adapters, in {steps} steps."
