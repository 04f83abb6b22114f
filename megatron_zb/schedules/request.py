"""Request for a schedule: sizes, costs, and limits of memory.

A limit is a share of 1F1B's activation memory, or bytes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_zb.errors import UsageError
from megatron_zb.parsing import Written, read_size
from megatron_zb.schedules.costs import Costs, most_in_a_row
from megatron_zb.schedules.passes import Pass
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.rules import TRAINING, TrainingRules
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.simulator import Timeline
from megatron_zb.schedules.stage_costs import StageCosts


@dataclass(frozen=True)
class Limit(Written):
    """The most memory of a rank; without a share and bytes, there is none.

    Args:
        share: of 1F1B's peak, which is p microbatches of the first rank's activations.
        bytes: of every rank, or of each, in the unit of the costs' ``activation`` and ``fixed``,
            all of it included. With a share as well, it counts where costs are in bytes.
        written: the limit as the user wrote it.
    """

    share: float | None = None
    bytes: float | tuple[float, ...] | None = None
    written: str = field(default="", compare=False)

    @classmethod
    def parse(cls, text: str) -> Limit:
        """Parse a share, such as 0.5, or a number of bytes with its unit, such as 40GiB."""
        size = read_size(text)
        if size is not None:
            return cls(bytes=size, written=text)
        try:
            return cls(float(text), written=text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"'{text}' is neither a share, such as 0.5, nor a number of bytes, such as 40GiB"
            ) from None

    @classmethod
    def given(cls, value: float | str | Limit) -> Limit:
        """Return a limit that is given as a share, as a text, or as what it is."""
        if isinstance(value, Limit):
            return value
        return cls.parse(value) if isinstance(value, str) else cls(float(value))

    @classmethod
    def of(cls, given: Limit | float | None, pipeline_size: int) -> Limit:
        """Build the limit of a search, which has the bytes of each rank, and check it.

        Raises:
            UsageError: both kinds of limit at once, or a limit that is not a positive number.
        """
        limit = cls() if given is None else cls.given(given)
        share, rank_bytes = limit.share, limit.bytes
        if share is not None and rank_bytes is not None:
            raise UsageError(
                "give the memory limit as a fraction of 1F1B or in bytes per rank, not both"
            )
        if share is not None and not 0 < share < float("inf"):
            raise UsageError(
                f"memory limit {share:g} is not a fraction of 1F1B's memory: give, for example, 0.5"
            )
        if isinstance(rank_bytes, int | float):
            rank_bytes = (float(rank_bytes),) * pipeline_size
        if rank_bytes is None:
            return cls(share)
        if len(rank_bytes) != pipeline_size or not all(0 < b < float("inf") for b in rank_bytes):
            raise UsageError(
                f"memory limit in bytes: give one positive number, or one for each of the "
                f"{pipeline_size} ranks"
            )
        return cls(bytes=tuple(rank_bytes))

    def __str__(self) -> str:
        return self.written or str(self.share)

    def with_share(self, flag: str, whole: float | None) -> Limit:
        """Return the limit with a share, also where it is in bytes.

        Args:
            flag: for errors.
            whole: bytes that 1F1B holds, by the profile of an earlier run; None without one.

        Raises:
            UsageError: it is in bytes, and there is no profile.
        """
        if self.share is not None:
            return self
        if whole is None:
            raise UsageError(
                f"{flag} {self} is in bytes, and only a profile tells how many activations take: "
                "name that of an earlier run with --pipeline-layer-layout FILE.yaml, or give a "
                "share of 1F1B's memory, such as 0.5"
            )
        assert isinstance(self.bytes, float), "a flag gives one number for all ranks"
        return Limit(self.bytes / whole, self.bytes, self.written)

    def in_unit_of(self, costs: Costs, *, is_measured: bool) -> float:
        """Return the limit in the unit of the costs' ``activation``; bytes, if it is measured."""
        if is_measured and isinstance(self.bytes, float):
            return self.bytes
        assert self.share is not None, "it has a share"
        return self.share * costs.one_f_one_b_peak()

    def per_rank(self, costs: Costs) -> tuple[float, ...] | None:
        """Return the memory left for activations on every rank; None where there is no limit."""
        if isinstance(self.bytes, tuple):
            return tuple(b - f for b, f in zip(self.bytes, costs.fixed, strict=True))
        if self.share is not None:
            return (self.share * costs.one_f_one_b_peak(),) * costs.pipeline_size
        return None

    def said(self, needed: float, rank: int, costs: Costs) -> tuple[str, str]:
        """Return the limit, and the smallest that would do on a rank, in the user's terms."""
        if isinstance(self.bytes, tuple):
            smallest = _rounded_up(needed + costs.fixed[rank], 6)
            return f"{self.bytes[rank]:g} bytes", f"{smallest} bytes"
        given = "its own" if self.share is None else f"{self.share:g} of 1F1B"
        return given, f"{_rounded_up(needed / costs.one_f_one_b_peak(), 4)} of 1F1B"


def _rounded_up(value: float, digits: int) -> str:
    """Return a number rounded up to the given digits, so that a limit of it suffices."""
    text = f"{value:.{digits}g}"
    if float(text) >= value * (1 - 1e-9):
        return text
    last = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return f"{value + last / 2:.{digits}g}"


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


def least_refused(refused: Sequence[UsageError]) -> UsageError:
    """Return the error whose limit is the smallest that can be kept, or the first of others."""
    short = [error for error in refused if isinstance(error, LimitTooSmall)]
    return min(short, key=lambda error: error.needed, default=refused[0])


def _memory_of(peak: float, costs: StageCosts, stages: Sequence[int], p: int, m: int) -> float:
    """Return the activation memory of ``peak`` microbatches.

    Each counts as the mean of the p consecutive ones that hold the most; all together hold at least
    what they hold.
    """
    if not costs.microbatches:
        return peak * sum(costs.memory["activation"][s] for s in stages)
    held = [sum(row.memory["activation"][s] for s in stages) for row in costs.microbatches]
    of_most = peak * (most_in_a_row(held, p) / min(p, m))
    return of_most if peak < m else max(of_most, sum(held))


@dataclass(frozen=True)
class Request:
    """Sizes, costs and limits; ``chunks`` and ``group_size`` only where a family has the choice.

    ``auto`` leaves out placements whose stages ``num_layers`` layers cannot be spread over evenly
    (with fewer than one layer to a stage, if they divide nowhere), and all but ``placement`` if
    that is given. ``back_to_back`` requests a short :attr:`Timeline.period`, not a short makespan;
    ``quick`` lets ``auto`` search briefly, where many settings are compared. Under the ``rules`` of
    slices, ``num_microbatches`` and ``costs`` count slices.
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
    rules: TrainingRules = TRAINING

    def seconds(self, timeline: Timeline) -> float:
        """Return the seconds to minimise: of one iteration, or of each of many in a row."""
        return timeline.seconds(back_to_back=self.back_to_back)

    def peak(self, microbatches: float) -> float:
        """Return the units of a peak: those of one microbatch are all held before its first B."""
        return microbatches + self.rules.units_at_once - 1

    def within_one_f_one_b(self) -> Request:
        """Return the request with 1F1B's memory as the limit where it has none."""
        if self.limit.per_rank(self.costs) is not None:
            return self
        return replace(self, limit=replace(self.limit, share=1.0))

    def ordered(self, name: str, placement: Placement, ranks: Sequence[Sequence[Pass]]) -> Schedule:
        """Return the schedule of an order of microbatches, whose passes count units."""
        return self.completed(name, placement, self.rules.in_units(placement, ranks))

    def completed(
        self, name: str, placement: Placement, ranks: Sequence[Sequence[Pass]]
    ) -> Schedule:
        """Return the schedule of an order of units, with the passes that follow from it."""
        found = tuple(map(tuple, self.rules.completed(ranks)))
        return Schedule(name, placement, self.num_microbatches, found, rules=self.rules)

    def keeps_order(self, ranks: Sequence[Sequence[Pass]]) -> bool:
        """Return whether an order of units stays as it is where passes follow from it."""
        for before, after in zip(ranks, self.rules.completed(ranks), strict=True):
            given = set(before)
            if [p for p in after if p in given] != [*before]:
                return False
        return True

    def limits(self, placement: Placement, peak_microbatches: float) -> tuple[float, ...]:
        """Return each rank's limit: memory of ``peak_microbatches``, or less if requested.

        Unequal microbatches count as the mean of the p consecutive ones that hold the most, so that
        a family keeps the share of 1F1B's memory that it has for equal ones. Where a rank has
        stages of several copies of the model, a microbatch counts as the mean of the copies.
        """
        costs, p, m = self.costs.for_placement(placement), self.pipeline_size, self.num_microbatches
        all_copies = (
            _memory_of(peak_microbatches, costs, held, p, m) for held in placement.stages_of
        )
        own = [memory / placement.copies for memory in all_copies]
        users = self.limit.per_rank(self.costs)
        return tuple(own) if users is None else tuple(map(min, own, users))

    def check_feasible(
        self, name: str, placement: Placement, limits: Sequence[float], needed: Sequence[float]
    ) -> None:
        """Refuse limits below what each rank needs.

        Raises:
            LimitTooSmall: names the rank that binds and the smallest limit that would do.
        """
        short = [n - limit for n, limit in zip(needed, limits, strict=True)]
        rank = max(range(len(short)), key=short.__getitem__)
        if short[rank] > 1e-9 * (1 + needed[rank]):
            given, smallest = self.limit.said(needed[rank], rank, self.costs)
            of_job = f" (Megatron's pipeline rank {placement.pipeline_rank(rank)})"
            named = f"{rank}{of_job if placement.mirrored else ''}"
            raise LimitTooSmall(
                f"{name} cannot keep the memory limit of {given}: rank {named} needs at least "
                f"{smallest}",
                needed[rank],
            )
