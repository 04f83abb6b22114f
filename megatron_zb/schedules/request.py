"""Request for a schedule: sizes, costs and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_zb.errors import UsageError
from megatron_zb.schedules.costs import Costs, most_in_a_row
from megatron_zb.schedules.limit import Limit
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.simulator import Timeline
from megatron_zb.schedules.stage_costs import StageCosts

MOST_FORWARDS = 2**20
"""Most forwards of all stages together; more take minutes to build, and are a slip of the hand."""


def check_size(name: str, stages: int, microbatches: int) -> None:
    """Refuse sizes whose schedule would take too long to build.

    Raises:
        UsageError: names both numbers, and how many passes can be had.
    """
    if stages * microbatches > MOST_FORWARDS:
        raise UsageError(
            f"{name}: {microbatches} microbatches on {stages} stages are too many to be put in "
            f"order: their product can be at most {MOST_FORWARDS}"
        )


def keeps(peaks: Sequence[float], limits: Sequence[float]) -> bool:
    """Return whether no rank holds more than it may, but for rounding."""
    return all(peak <= most * (1 + 1e-9) + 1e-9 for peak, most in zip(peaks, limits, strict=True))


class LimitTooSmall(UsageError):
    """Error for a memory limit that cannot be kept; ``needed`` is the smallest that can."""

    def __init__(self, message: str, needed: float) -> None:
        super().__init__(message)
        self.needed = needed

    def __reduce__(self) -> tuple[type[LimitTooSmall], tuple[str, float]]:
        return type(self), (self.args[0], self.needed)


def _mean_of_most(costs: StageCosts, stages: Sequence[int], p: int, m: int) -> float:
    """Return the mean activation memory of the p consecutive microbatches that hold the most."""
    if not costs.microbatches:
        return sum(costs.activation[s] for s in stages)
    held = [sum(row.activation[s] for s in stages) for row in costs.microbatches]
    return most_in_a_row(held, p) / min(p, m)


@dataclass(frozen=True)
class Request:
    """Sizes, costs and limits; ``chunks`` and ``group_size`` only where a family has the choice.

    ``auto`` leaves out placements whose stages ``num_layers`` layers cannot be spread over evenly
    (with fewer than one layer to a stage, if they divide nowhere), and all but ``placement`` if
    that is given. ``back_to_back`` asks for a short :attr:`Timeline.period`, not a short makespan;
    ``quick`` lets ``auto`` search briefly, where many settings are compared.
    """

    pipeline_size: int
    num_microbatches: int
    costs: Costs
    limit: Limit
    chunks: int | None = None
    group_size: int | None = None
    num_layers: int | None = None
    placement: Placement | None = None
    back_to_back: bool = False
    quick: bool = False

    def seconds(self, timeline: Timeline) -> float:
        """Return the seconds to minimise: of one iteration, or of each of many in a row."""
        return timeline.seconds(back_to_back=self.back_to_back)

    def limits(self, placement: Placement, peak_microbatches: float) -> tuple[float, ...]:
        """Return each rank's limit: memory of ``peak_microbatches``, or less if asked for.

        Unequal microbatches count as the mean of the p consecutive ones that hold the most, so that
        a family keeps the share of 1F1B's memory that it has for equal ones.
        """
        costs, p, m = self.costs.for_placement(placement), self.pipeline_size, self.num_microbatches
        own = [peak_microbatches * _mean_of_most(costs, held, p, m) for held in placement.stages_of]
        users = self.limit.per_rank(self.costs)
        return tuple(own) if users is None else tuple(map(min, own, users))

    def check_feasible(self, name: str, limits: Sequence[float], needed: Sequence[float]) -> None:
        """Refuse limits below what each rank needs.

        Raises:
            LimitTooSmall: names the rank that binds and the smallest limit that would do.
        """
        short = [n - limit for n, limit in zip(needed, limits, strict=True)]
        rank = max(range(len(short)), key=short.__getitem__)
        if short[rank] > 1e-9 * (1 + needed[rank]):
            given, smallest = self.limit.said(needed[rank], rank, self.costs)
            raise LimitTooSmall(
                f"{name} cannot keep the memory limit of {given}: rank {rank} needs at least "
                f"{smallest}",
                needed[rank],
            )
