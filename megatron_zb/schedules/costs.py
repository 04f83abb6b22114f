"""Costs of a model and its links, before it is cut into stages: tables by kind of pass and slice.

What a model may have beside F, B and W, such as a vocabulary-parallel output layer, is a
:class:`Feature` of its costs; each stands in a file of :mod:`features`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import mul
from statistics import median
from typing import ClassVar, NamedTuple, TypeVar

from megatron_zb.errors import UsageError
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.stage_costs import StageCosts, Table

_F, _B, _W, _BW, _R = PassKind.F, PassKind.B, PassKind.W, PassKind.BW, PassKind.R
_D, _H = PassKind.D, PassKind.H

MOST_RANKS = 1024
"""Most ranks of a pipeline; there is a time for every link between two of them."""


def most_in_a_row(values: Sequence[float], count: int) -> float:
    """Return the largest sum of ``count`` consecutive values, or the sum of all if fewer."""
    return max(sum(values[i : i + count]) for i in range(max(1, len(values) - count + 1)))


class Scale(NamedTuple):
    """Relative cost of a microbatch, beside another one.

    Args:
        tokens: factor for W, messages and memory.
        forward: factor for F, and for R, which computes it again.
        backward: factor for B.
    """

    tokens: float
    forward: float
    backward: float


class Feature:
    """Something that costs have beside F, B and W: its numbers, and what it does to a search.

    A subclass is a frozen dataclass in a file of :mod:`features`. Costs have it by
    :meth:`Costs.having`; every schedule that is built for these costs has it, then.
    """

    name: ClassVar[str]
    """Name in the table of :mod:`conflicts`."""
    frees_activations: ClassVar[bool] = False
    """Whether a schedule may drop activations, or move them to the host, between F and B."""

    @property
    def key(self) -> object:
        """What tells the feature from others: costs have one with each."""
        return type(self)

    def said(self) -> Mapping[str, str]:
        """Return what errors call the feature, by its names in the table of conflicts."""
        return {self.name: self.name}

    def completed(self: _F_, costs: Costs) -> _F_:
        """Return the feature with its defaults for some costs.

        Raises:
            UsageError: a number is wrong.
        """
        return self

    def scaled(self: _F_, scale: Scale) -> _F_:
        """Return the feature of a microbatch that takes more or less."""
        return self

    def of_units(self: _F_, units: Sequence[Costs]) -> _F_:
        """Return the feature of a typical unit, from the costs of the parts of all microbatches."""
        return self

    def folded(self, costs: Costs) -> Costs:
        """Return the costs to search an order for that :meth:`added_to` adds passes to."""
        return costs

    def added_to(self, schedule: Schedule, costs: Costs) -> Schedule:
        """Return a schedule of the folded costs with the passes of the feature."""
        return schedule

    def leveled(self) -> Feature | None:
        """Return the feature with the same numbers for all slices, None to leave it out."""
        return None

    def placed(self, costs: Costs, placement: Placement, table: StageCosts) -> StageCosts:
        """Return the costs of the stages of a placement with those of the feature."""
        return table


_F_ = TypeVar("_F_", bound=Feature)


@dataclass(frozen=True)
class Costs:
    """Costs of one microbatch, independent of how the model will be cut into stages.

    The model is described as equal numbers of layers in consecutive *slices* (any number of them,
    often one per pipeline rank or per layer). A placement with more or fewer stages cuts or merges
    the slices.

    Args:
        pipeline_size: pipeline ranks p.
        seconds: of F, B (input gradient) and W (weight gradient), by kind and slice; those of BW, a
            fused backward, where they are known: else it takes as long as both of its halves.
        memory: ``activation`` is what F of each slice holds and ``held_for_weight`` what of that is
            still held between B and W, in any unit of memory.
        p2p: ``p2p[a][b]`` are the seconds of one transfer from rank a to rank b.
        slowdown: a factor of every time on logical rank r.
        fixed: memory of each rank beside activations.
        features: what the model has beside these.
        microbatches: costs of microbatch j, where microbatches are not all alike; the others are
            those of a typical one then: see :meth:`of_lengths`.
    """

    pipeline_size: int
    seconds: Mapping[PassKind, Table]
    memory: Mapping[str, Table]
    p2p: tuple[Table, ...]
    slowdown: Table
    fixed: Table
    features: tuple[Feature, ...] = ()
    microbatches: tuple[Costs, ...] = ()

    @classmethod
    def uniform(
        cls,
        *,
        pipeline_size: int,
        forward: float,
        backward: float,
        weight: float,
        p2p: float = 0.0,
    ) -> Costs:
        """Build costs that are equal everywhere.

        Args:
            pipeline_size: number of pipeline ranks p.
            forward, backward, weight: seconds for one microbatch on one pipeline rank (all of its
                model chunks together).
            p2p: seconds per transfer between two ranks.

        Raises:
            UsageError: a time is negative or not finite, or forward, backward are zero.
        """
        return cls.of_slices(
            pipeline_size=pipeline_size,
            forward=[forward] * pipeline_size,
            backward=[backward] * pipeline_size,
            weight=[weight] * pipeline_size,
            p2p=p2p,
        )

    @classmethod
    def of_slices(
        cls,
        *,
        pipeline_size: int,
        forward: Sequence[float],
        backward: Sequence[float],
        weight: Sequence[float],
        p2p: float | Sequence[Sequence[float]] = 0.0,
        slowdown: Sequence[float] | None = None,
        activation: Sequence[float] | None = None,
        held_for_weight: Sequence[float] | None = None,
        fixed: Sequence[float] | None = None,
        whole: Sequence[float] = (),
    ) -> Costs:
        """Build the costs of consecutive slices of the model (see the class).

        ``activation`` defaults to ``p / slices`` for each slice, so that memory is counted in
        microbatches of a whole rank; ``held_for_weight`` defaults to all of it. ``whole`` are the
        seconds of BW.

        Raises:
            UsageError: lengths do not match, a value is negative or not finite, or there are more
                than :data:`MOST_RANKS` ranks.
        """
        slices = len(forward)
        if pipeline_size < 1 or slices < 1:
            raise UsageError(
                f"costs for {pipeline_size} pipeline ranks and {slices} slices: give 1 or more"
            )
        if pipeline_size > MOST_RANKS:
            raise UsageError(
                f"a pipeline of {pipeline_size} ranks was asked for: give at most {MOST_RANKS}"
            )
        if isinstance(p2p, int | float):
            ranks = range(pipeline_size)
            p2p = [[0.0 if a == b else float(p2p) for b in ranks] for a in ranks]
        held = [pipeline_size / slices] * slices if activation is None else list(activation)
        seconds = {_F: tuple(forward), _B: tuple(backward), _W: tuple(weight)}
        left = held if held_for_weight is None else held_for_weight
        costs = cls(
            pipeline_size=pipeline_size,
            seconds=seconds | ({_BW: tuple(whole)} if whole else {}),
            memory={"activation": tuple(held), "held_for_weight": tuple(left)},
            p2p=tuple(tuple(row) for row in p2p),
            slowdown=tuple([1.0] * pipeline_size if slowdown is None else slowdown),
            fixed=tuple([0.0] * pipeline_size if fixed is None else fixed),
        )
        _check(costs)
        return costs

    def having(self, feature: Feature) -> Costs:
        """Return the costs with a feature, in place of one of the same kind.

        Example::

            costs.having(Recomputation(kept_input=0.05))

        Raises:
            UsageError: a number is wrong, or microbatches have lengths of their own already.
        """
        if self.microbatches:
            raise UsageError(
                "costs: microbatches have lengths of their own already: give the costs of "
                f"{feature.name} before"
            )
        others = (it for it in self.features if it.key != feature.key)
        return replace(self, features=(*others, feature.completed(self)))

    def feature(self, of: type[_F_]) -> _F_ | None:
        """Return the feature of a class, None if the costs have none."""
        return next((it for it in self.features if isinstance(it, of)), None)

    def without(self, leaves_out: Callable[[Feature], bool]) -> Costs:
        """Return the costs without some features, of all microbatches."""
        if not any(map(leaves_out, self.features)):
            return self
        left = tuple(it for it in self.features if not leaves_out(it))
        rows = tuple(row.without(leaves_out) for row in self.microbatches)
        return replace(self, features=left, microbatches=rows)

    @property
    def keeps_all(self) -> bool:
        """Whether activations can be neither recomputed nor offloaded."""
        return not any(it.frees_activations for it in self.features)

    def of_lengths(self, lengths: Sequence[float]) -> Costs:
        """Return the costs of microbatches that take a number of times what this one takes.

        Seconds of passes and of transfers and activations are all in proportion.

        Raises:
            UsageError: there is no length, or one is not a positive number.
        """
        if not lengths or not all(0 < length < float("inf") for length in lengths):
            raise UsageError(
                f"costs: lengths of microbatches are {list(lengths)}: give positive numbers"
            )
        rows = {length: self.scaled(Scale(length, length, length)) for length in lengths}
        return replace(self, microbatches=tuple(rows[length] for length in lengths))

    def scaled(self, scale: Scale) -> Costs:
        """Return the costs of a microbatch that takes more or less than this one."""
        tokens, forward, backward = scale
        by_kind = {_F: forward, _B: backward, _W: tokens, _BW: tokens}
        seconds = {kind: times(table, by_kind[kind]) for kind, table in self.seconds.items()}
        if backward != tokens and _BW in seconds:
            parts = (self.seconds[kind] for kind in (_BW, _B, _W))
            seconds[_BW] = tuple(
                both * (b * backward + w * tokens) / (b + w)
                for both, b, w in zip(*parts, strict=True)
            )
        return replace(
            self,
            seconds=seconds,
            memory={name: times(table, tokens) for name, table in self.memory.items()},
            p2p=tuple(times(row, tokens) for row in self.p2p),
            features=tuple(it.scaled(scale) for it in self.features),
            microbatches=(),
        )

    def in_order(self, order: Sequence[int]) -> Costs:
        """Return the costs of unequal microbatches in another order."""
        return replace(self, microbatches=tuple(self.microbatches[j] for j in order))

    def one_f_one_b_peak(self) -> float:
        """Return 1F1B's peak: p microbatches in a row of the activations of its first rank."""
        p, rows = self.pipeline_size, self.microbatches or (self,)
        held = [resampled(row.memory["activation"], p)[0] for row in rows]
        return most_in_a_row(held, p) if self.microbatches else p * held[0]

    def for_placement(self, placement: Placement) -> StageCosts:
        """Cut or merge the slices into the stages of a placement.

        Raises:
            UsageError: the placement has another pipeline size.
        """
        if placement.pipeline_size != self.pipeline_size:
            raise UsageError(
                f"costs are for {self.pipeline_size} pipeline ranks, "
                f"the placement has {placement.pipeline_size}"
            )
        stages, links = placement.num_stages, [*pairwise(placement.rank_of)]
        there = (*(latency(self, a, b) for a, b in links), 0.0)
        back = (0.0, *(latency(self, b, a) for a, b in links))
        none = (0.0,) * stages
        seconds = {kind: seconds_of(self, of, placement) for kind, of in self.seconds.items()}
        seconds.setdefault(_BW, added(seconds[_B], seconds[_W]))
        rows = {id(row): row.for_placement(placement) for row in self.microbatches}
        table = StageCosts(
            seconds=seconds | {_R: seconds[_F], _D: none, _H: none},
            latency={_F: there, _B: back, _BW: back, _W: none},
            memory={name: resampled(of, stages) for name, of in self.memory.items()},
            microbatches=tuple(rows[id(row)] for row in self.microbatches),
        )
        for feature in self.features:
            table = feature.placed(self, placement, table)
        return table


def with_all_kept(costs: Costs) -> Costs:
    """Return the costs where every activation is kept on its device."""
    return costs.without(lambda feature: feature.frees_activations)


# --- tables


def times(values: Table, factor: float) -> Table:
    """Return a table with all its numbers multiplied."""
    return tuple(value * factor for value in values)


def filled(values: float | Sequence[float] | None) -> Table:
    """Return the table of a feature that has been completed."""
    assert isinstance(values, tuple), "the costs have completed it"
    return values


def added(values: Table, more: Table) -> Table:
    """Return the sums of two tables of one length."""
    return tuple(a + b for a, b in zip(values, more, strict=True))


def resampled(values: Table, parts: int) -> Table:
    """Spread consecutive equal slices over ``parts`` equal stages, keeping the total."""
    slices = len(values)
    if slices == parts:
        return values
    if parts % slices == 0:
        share = parts // slices
        return tuple(v / share for v in values for _ in range(share))
    out = []
    for part in range(parts):  # in units of 1/parts slice, so that all borders are integers
        low, high = part * slices, (part + 1) * slices
        total = 0.0
        for index in range(low // parts, (high - 1) // parts + 1):
            overlap = min(high, (index + 1) * parts) - max(low, index * parts)
            total += values[index] * overlap / parts
        out.append(total)
    return tuple(out)


def latency(costs: Costs, source: int, target: int) -> float:
    """Return the seconds of a transfer between two ranks, 0 on the same rank."""
    return 0.0 if source == target else costs.p2p[source][target]


def seconds_of(costs: Costs, values: Table, placement: Placement) -> Table:
    """Return the seconds of each stage, as slow as its rank is, from those of each slice."""
    slowdown = [costs.slowdown[r] for r in placement.rank_of]
    return tuple(map(mul, resampled(values, placement.num_stages), slowdown))


def by_slice(costs: Costs, values: float | Sequence[float]) -> Table:
    """Return numbers of each slice, where one number is that of a microbatch on a whole rank."""
    slices = len(costs.seconds[_F])
    if isinstance(values, int | float):
        return (values * costs.pipeline_size / slices,) * slices
    return tuple(values)


# --- checks


def check_table(name: str, values: Sequence[float], length: int) -> None:
    """Refuse a table of another length, or with a number that is negative or not finite.

    Raises:
        UsageError: names the table.
    """
    if len(values) != length:
        raise UsageError(f"costs: {name} has {len(values)} entries, {length} are needed")
    if not all(0 <= v < float("inf") for v in values):
        raise UsageError(f"costs: {name} is {list(values)}: give finite values of 0 or more")


def _check(costs: Costs) -> None:
    slices, ranks = len(costs.seconds[_F]), costs.pipeline_size
    words = {_F: "forward", _B: "backward", _W: "weight", _BW: "whole"}
    tables: list[tuple[str, Table, int]] = [
        *((words[kind], costs.seconds[kind], slices) for kind in (_F, _B, _W)),
        *((name, values, slices) for name, values in costs.memory.items()),
        ("slowdown", costs.slowdown, ranks),
        ("fixed", costs.fixed, ranks),
        *((words[_BW], values, slices) for values in [costs.seconds.get(_BW)] if values),
        *(("p2p", row, ranks) for row in costs.p2p),
    ]
    for table in tables:
        check_table(*table)
    if len(costs.p2p) != ranks:
        raise UsageError(f"costs: p2p has {len(costs.p2p)} rows, {ranks} are needed")
    for kind in (_F, _B):
        if not sum(costs.seconds[kind]) > 0:
            raise UsageError(f"costs: {words[kind]} is zero: give a positive time, such as 1.0")
    held = zip(costs.memory["held_for_weight"], costs.memory["activation"], strict=True)
    if any(kept > whole for kept, whole in held):
        raise UsageError("costs: held_for_weight is more than activation: B only frees memory")
    if not all(factor > 0 for factor in costs.slowdown):
        raise UsageError("costs: slowdown is zero: give a positive factor, such as 1.0")


def check_number(costs: Costs | StageCosts, num_microbatches: int) -> None:
    """Refuse costs of another number of microbatches.

    Raises:
        UsageError: names both numbers.
    """
    if costs.microbatches and len(costs.microbatches) != num_microbatches:
        raise UsageError(
            f"costs are for {len(costs.microbatches)} microbatches, "
            f"the schedule has {num_microbatches}"
        )


# --- other costs of the same model


def _rest(costs: Costs, shares: Sequence[float]) -> Callable[[Table], Table]:
    """Return a function that leaves of a table of slices what shares of stages do not take."""
    slices = len(costs.seconds[_W])
    mean = [total * slices / len(shares) for total in resampled(tuple(shares), slices)]
    return lambda values: tuple(
        value * (1 - share) for value, share in zip(values, mean, strict=True)
    )


def with_frozen(costs: Costs, shares: Sequence[float]) -> Costs:
    """Return the costs where nothing computes a share of each stage's weight gradients.

    Args:
        costs: of all weight gradients.
        shares: of the weight gradients of consecutive stages, from 0 to 1.
    """
    rest = _rest(costs, shares)
    weight = rest(costs.seconds[_W])
    seconds = {**costs.seconds, _W: weight}
    if _BW in seconds:
        lost = (w - left for w, left in zip(costs.seconds[_W], weight, strict=True))
        seconds[_BW] = tuple(whole - less for whole, less in zip(seconds[_BW], lost, strict=True))
    return replace(
        costs,
        seconds=seconds,
        memory={**costs.memory, "held_for_weight": rest(costs.memory["held_for_weight"])},
        microbatches=tuple(with_frozen(row, shares) for row in costs.microbatches),
    )


def with_unsplit(costs: Costs, shares: Sequence[float]) -> Costs:
    """Return the costs where B computes a share of each stage's weight gradients, not W.

    Args:
        costs: where W computes all of them.
        shares: of the weight gradients of consecutive stages, from 0 to 1.
    """
    left = with_frozen(costs, shares)
    moved = tuple(w - x for w, x in zip(costs.seconds[_W], left.seconds[_W], strict=True))
    seconds = {**left.seconds, _B: added(costs.seconds[_B], moved)}
    if _BW in seconds:
        seconds[_BW] = costs.seconds[_BW]
    return replace(
        left,
        seconds=seconds,
        microbatches=tuple(with_unsplit(row, shares) for row in costs.microbatches),
    )


def averaged(costs: Costs) -> Costs:
    """Return the same model with one cost for all, as most published schedulers see it.

    Every slice, rank and link gets the median of its kind.
    """
    links = [costs.p2p[a][a + 1] for a in range(costs.pipeline_size - 1)] or [0.0]
    features = (feature.leveled() for feature in costs.features)
    return replace(
        costs,
        seconds={kind: level(table) for kind, table in costs.seconds.items()},
        p2p=_equal_links(costs.pipeline_size, median(links)),
        slowdown=(1.0,) * costs.pipeline_size,
        features=tuple(it for it in features if it is not None),
        microbatches=(),
    )


def level(values: Iterable[float]) -> Table:
    """Return a table with the median of another one in every place."""
    found = tuple(values)
    return (median(found),) * len(found) if found else ()


def _equal_links(ranks: int, seconds: float) -> tuple[Table, ...]:
    return tuple(tuple(0.0 if a == b else seconds for b in range(ranks)) for a in range(ranks))
