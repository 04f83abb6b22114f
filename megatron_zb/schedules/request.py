"""Request for a schedule: sizes, costs and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_zb.errors import UsageError
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.simulator import Timeline

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


@dataclass(frozen=True)
class MemoryLimit:
    """The most activation memory each rank may hold.

    Either ``fraction`` of 1F1B's peak, which is p microbatches of the first rank's activations, or
    ``rank_bytes[r]`` in the unit of the costs' ``activation`` and ``fixed``, all of it included.
    """

    fraction: float | None = None
    rank_bytes: tuple[float, ...] | None = None

    @classmethod
    def of(
        cls, fraction: float | None, rank_bytes: float | Sequence[float] | None, pipeline_size: int
    ) -> MemoryLimit:
        """Build the limit from the user's values, and check them.

        Raises:
            UsageError: both kinds of limit at once, or a limit that is not a positive number.
        """
        if fraction is not None and rank_bytes is not None:
            raise UsageError(
                "give the memory limit as a fraction of 1F1B or in bytes per rank, not both"
            )
        if fraction is not None and not 0 < fraction < float("inf"):
            raise UsageError(
                f"memory limit {fraction:g} is not a fraction of 1F1B's memory: give, for example, "
                "0.5"
            )
        if isinstance(rank_bytes, int | float):
            rank_bytes = [float(rank_bytes)] * pipeline_size
        if rank_bytes is None:
            return cls(fraction)
        if len(rank_bytes) != pipeline_size or not all(0 < b < float("inf") for b in rank_bytes):
            raise UsageError(
                f"memory limit in bytes: give one positive number, or one for each of the "
                f"{pipeline_size} ranks"
            )
        return cls(None, tuple(rank_bytes))

    def per_rank(self, costs: Costs) -> tuple[float, ...] | None:
        """Return the memory left for activations on every rank; None where there is no limit."""
        if self.rank_bytes is not None:
            return tuple(b - f for b, f in zip(self.rank_bytes, costs.fixed, strict=True))
        if self.fraction is not None:
            return (self.fraction * costs.one_f_one_b_peak(),) * costs.pipeline_size
        return None

    def said(self, needed: float, rank: int, costs: Costs) -> tuple[str, str]:
        """Return the limit, and the smallest that would do on a rank, in the user's terms."""
        if self.rank_bytes is not None:
            return f"{self.rank_bytes[rank]:g} bytes", f"{needed + costs.fixed[rank]:g} bytes"
        given = "its own" if self.fraction is None else f"{self.fraction:g} of 1F1B"
        return given, f"{needed / costs.one_f_one_b_peak():.4g} of 1F1B"


class LimitTooSmall(UsageError):
    """Error for a memory limit that cannot be kept; ``needed`` is the smallest that can."""

    def __init__(self, message: str, needed: float) -> None:
        super().__init__(message)
        self.needed = needed

    def __reduce__(self) -> tuple[type[LimitTooSmall], tuple[str, float]]:
        return type(self), (self.args[0], self.needed)


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
    limit: MemoryLimit
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
        """Return each rank's limit: so many of its largest microbatches, or less if asked for."""
        activation = self.costs.for_placement(placement).largest_activation
        own = [peak_microbatches * sum(activation[s] for s in held) for held in placement.stages_of]
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
