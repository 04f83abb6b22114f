"""Token slices: a microbatch is cut along the sequence, and stages work on one slice at a time.

Unit ``j * n + i`` is slice i of microbatch j, and stands where passes have their microbatch. With
causal attention, F of a slice needs the keys and values of the slices before it, and B the
gradients that the slices behind it leave for them. So F of a stage takes the slices of a microbatch
in order, and B and W in reverse (*Seq1F1B*, arXiv 2406.03488). W of a microbatch may instead
run once, on all slices put together (as in *2BP*, arXiv 2405.18047).

Known orders of microbatches become orders of slices by *turns*: the k-th B and W of a stage are
those of the unit whose turn it is (:func:`in_units`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, overload

from megatron_zb.errors import UsageError
from megatron_zb.parsing import Written
from megatron_zb.schedules.costs import Costs, Scale, added
from megatron_zb.schedules.kinds import Home, Kind
from megatron_zb.schedules.passes import Message, Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import Request
from megatron_zb.schedules.rules import TRAINING, Sizes, TrainingRules
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.stage_costs import Priced, StageCosts, Table

_F, _B, _W, _BW = PassKind.F, PassKind.B, PassKind.W, PassKind.BW
_OF_LOSS = frozenset({PassKind.O, PassKind.P, PassKind.V})
"""Passes of vocabulary parallelism: they need no other slice, and free the logits at once."""

MOST_SLICES = 1024
LEAST_TOKENS = 1024
"""Least tokens of a slice on a rank of tensor or context parallelism.

A product has as many rows as a slice has tokens, and its columns are divided among the ranks. Of
shorter slices, narrow products, such as that for keys and values, leave multiprocessors idle, which
the rates of a device, of whole microbatches, do not show.
"""
WIDE = 8192
"""Hidden size from which so few tokens are enough: a layer's work by token grows with its square.

On an H200, a step of layers of hidden size 4096 took 1.1 times as long in slices of 4096 tokens as
whole, 1.4 times in slices of 2048, and 2.3 times in slices of 1024: kernels were over before the
host had launched the next ones.
"""
KEPT = 2 / 17
"""Share of a layer's activations that keys and values take, with as many heads as queries.

A layer keeps 34 bytes for each number of its input in 16 bits (Korthikanti et al., arXiv
2205.05198) if its attention keeps no scores; keys and values are 4 of them.
"""
GAIN = 0.02
"""The least share of a step that twice as many slices must save."""
AUTO = "auto"
"""In place of a :class:`Slicing`: as many slices as pay."""


class Unit(int):
    """Slice i of microbatch j as the number ``j * n + i``, written ``j.i``."""

    slices: int

    def __new__(cls, value: int, slices: int) -> Unit:
        """Return a unit of a microbatch that has ``slices`` slices."""
        unit = super().__new__(cls, value)
        unit.slices = slices
        return unit

    def __reduce__(self) -> tuple[type[Unit], tuple[int, int]]:
        return type(self), (int(self), self.slices)

    def __str__(self) -> str:
        return "{}.{}".format(*divmod(int(self), self.slices))


class Turns(Sequence[int]):
    """Units of a stage in the order of one kind of pass: microbatches rise.

    Args:
        slices: of a microbatch.
        units: of all microbatches.
        falls: the slices of a microbatch fall, as for B.
        first_only: only the first slice of each, as for a joined W.
    """

    def __init__(
        self, slices: int, units: int, *, falls: bool = True, first_only: bool = False
    ) -> None:
        self._slices, self._step = slices, slices if first_only else 1
        self._falls, self._length = falls and not first_only, units // self._step

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, turn: int) -> int: ...
    @overload
    def __getitem__(self, turn: slice) -> Sequence[int]: ...
    def __getitem__(self, turn: int | slice) -> int | Sequence[int]:
        if isinstance(turn, slice):
            return [self[k] for k in range(*turn.indices(self._length))]
        if not 0 <= turn < self._length:
            raise IndexError(turn)
        return Unit(self._mirrored(turn * self._step), self._slices)

    def __contains__(self, unit: object) -> bool:
        return (
            isinstance(unit, int) and unit % self._step == 0 and 0 <= unit // self._step < len(self)
        )

    def index(self, unit: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the turn of a unit."""
        return self._mirrored(int(unit)) // self._step

    def _mirrored(self, unit: int) -> int:
        """Return the unit that mirrors another one within its microbatch, if slices fall."""
        return unit + self._falls * (self._slices - 1 - 2 * (unit % self._slices))


@dataclass(frozen=True)
class Slicing(Written):
    """Slices of a microbatch: their lengths, in tokens or as shares, and how W runs.

    Args:
        lengths: of the slices, in the order of the sequence.
        attention: share of the attention between tokens in F of a whole microbatch. It grows with
            the number of tokens before a slice; the rest of F, and W, with the slice's own.
        attention_backward: the same of B; as in F if left out.
        joins_weight: one W for a microbatch, on all slices put together. If left out, a search
            takes what is faster.
        weight_loss: the share by which the W of all slices take longer than one on all of them.
        kept: share of what F holds that keys and values take: it remains where a slice is
            recomputed, or offloaded, since later slices attend to them.
    """

    lengths: tuple[float, ...]
    attention: float = 0.0
    attention_backward: float | None = None
    joins_weight: bool | None = None
    weight_loss: float = 0.0
    kept: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            UsageError: no slice or too many, a length that is not positive, or no share.
        """
        if not 0 < len(self.lengths) <= MOST_SLICES:
            raise UsageError(
                f"a microbatch of {len(self.lengths)} slices: give 1 to {MOST_SLICES} of them"
            )
        if not all(0 < length < math.inf for length in self.lengths):
            raise UsageError(
                f"lengths of slices are {list(self.lengths)}: give positive numbers of tokens"
            )
        shares = {"attention": self.attention, "attention_backward": self.attention_backward or 0.0}
        shares["kept"] = self.kept
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise UsageError(f"slices: {name} is {share}: give a share from 0 to 1")
        if not 0 <= self.weight_loss < math.inf:
            raise UsageError(
                f"slices: weight_loss is {self.weight_loss}: give a share, such as 0.1"
            )

    @classmethod
    def equal(cls, slices: int, **choices: Any) -> Slicing:
        """Return slices of equal length."""
        return cls((1.0,) * slices, **choices)

    @classmethod
    def enough(cls, pipeline_size: int, num_microbatches: int, tokens: int, least: int) -> Slicing:
        """Return a power of two of slices beyond which twice as many gain less than 2 %.

        A step takes as long as ``num_microbatches + (pipeline_size - 1) / slices`` microbatches
        where passes of a rank follow one another, as 1F1B would with slices of equal time.

        Args:
            pipeline_size: number of ranks.
            num_microbatches: of a step.
            tokens: of a sequence, which the slices divide.
            least: tokens of a slice, unless the microbatch stays whole.
        """
        slices, ramp = 1, pipeline_size - 1
        while tokens % (2 * slices) == 0 and tokens >= 2 * slices * least:
            before = num_microbatches + ramp / slices
            if before - ramp / (2 * slices) > (1.0 - GAIN) * before:
                break
            slices *= 2
        return cls.equal(slices)

    @classmethod
    def given(cls, value: Slicing | int | str) -> Slicing:
        """Return slices from a number of equal ones, or from lengths, such as ``2,1,1``.

        Raises:
            UsageError: a number is wrong.
        """
        if isinstance(value, Slicing):
            return value
        try:
            numbers = [float(number) for number in str(value).split(",")]
        except ValueError:
            numbers = []
        if len(numbers) == 1 and numbers[0].is_integer() and 0 < numbers[0] <= MOST_SLICES:
            return cls.equal(int(numbers[0]))
        if len(numbers) < 2:
            raise UsageError(
                f"slices {value!r}: give a number from 1 to {MOST_SLICES}, or lengths, such as "
                "2,1,1"
            )
        return cls(tuple(numbers))

    @classmethod
    def parse(cls, text: str) -> Slicing:
        """Return slices as :meth:`given` does; the type of a flag."""
        try:
            return cls.given(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    def borders(self, tokens: int) -> tuple[int, ...]:
        """Return where the slices of a sequence begin, and where the last one ends.

        Raises:
            UsageError: a slice would have a fraction of a token.
        """
        whole = sum(self.lengths)
        lengths = [tokens * length / whole for length in self.lengths]
        if not all(length.is_integer() for length in lengths):
            raise UsageError(
                f"a sequence of {tokens} tokens cannot be cut into slices {self}: give a number "
                "that divides it, or their lengths"
            )
        return (0, *map(int, accumulate(lengths)))

    def __str__(self) -> str:
        """Write the slices as :meth:`given` reads them."""
        if len(set(self.lengths)) == 1:
            return str(self.slices)
        return ",".join(f"{length:.15g}" for length in self.lengths)

    @classmethod
    def of_equal_time(cls, slices: int, costs: Costs, **choices: Any) -> Slicing:
        """Return slices that take equally long in F, B and W together: later ones are shorter."""
        rough = cls.equal(slices, **choices)
        forward, backward, weight = (sum(costs.seconds[kind]) for kind in (_F, _B, _W))
        grows = rough.attention * forward + rough._attention_backward * backward
        share = grows / (forward + backward + weight)

        def border(time: float) -> float:
            rest = 1.0 - share
            return 2.0 * time / (rest + math.sqrt(rest * rest + 4.0 * share * time))

        borders = [border(i / slices) for i in range(slices + 1)]
        return replace(rough, lengths=tuple(b - a for a, b in pairwise(borders)))

    @property
    def slices(self) -> int:
        """Number of slices n of a microbatch."""
        return len(self.lengths)

    @property
    def _attention_backward(self) -> float:
        return self.attention if self.attention_backward is None else self.attention_backward

    def microbatch_and_slice(self, unit: int) -> tuple[int, int]:
        """Return the microbatch and the slice of a unit."""
        return divmod(int(unit), self.slices)

    @cached_property
    def scales(self) -> tuple[Scale, ...]:
        """Shares of slices in the time and memory of a microbatch."""
        borders = [0.0, *accumulate(self.lengths)]
        shares = [border / borders[-1] for border in borders]
        return tuple(
            Scale(
                end - start,
                *(
                    (1.0 - attention) * (end - start) + attention * (end + start) * (end - start)
                    for attention in (self.attention, self._attention_backward)
                ),
            )
            for start, end in pairwise(shares)
        )

    def costs(self, costs: Costs, num_microbatches: int) -> SlicedCosts:
        """Return the costs of all units of a step: to simulate a sliced schedule."""
        whole = costs.microbatches or (costs,) * num_microbatches
        rows: dict[tuple[int, int], Costs] = {}
        for row in whole:
            for i, scale in enumerate(self.scales):
                if (id(row), i) not in rows:
                    rows[id(row), i] = self._with_loss(row.scaled(scale))
        units = tuple(rows[id(row), i] for row in whole for i in range(self.slices))
        values = {it.name: getattr(costs, it.name) for it in fields(Costs)}
        values["microbatches"] = units
        values["features"] = tuple(it.of_units(units) for it in costs.features)
        return SlicedCosts(**values, slicing=self, whole_peak=costs.one_f_one_b_peak())

    def _with_loss(self, row: Costs) -> Costs:
        if self.joins_weight or not self.weight_loss:
            return row
        more = tuple(self.weight_loss * weight for weight in row.seconds[_W])
        kinds = row.seconds.keys() & {_W, _BW}
        return replace(
            row, seconds={**row.seconds, **{k: added(row.seconds[k], more) for k in kinds}}
        )


def sliced_requests(request: Request, slicing: Slicing, *, may_join: bool) -> list[Request]:
    """Return the requests for units of a request for whole microbatches, one for each form of W.

    Args:
        request: for whole microbatches.
        slicing: of each of them.
        may_join: whether one W may run for a microbatch where ``slicing`` leaves that open, which
            takes a ``weight_loss``.
    """
    forms = [bool(slicing.joins_weight)]
    if slicing.joins_weight is None and may_join and slicing.weight_loss > 0:
        forms = [True, False]
    cuts = [replace(slicing, joins_weight=joined) for joined in forms]
    m = request.num_microbatches
    return [
        replace(
            request,
            num_microbatches=m * cut.slices,
            costs=cut.costs(request.costs, m),
            rules=SlicedRules(cut),
        )
        for cut in cuts
    ]


def given_slices(value: Slicing | int | str) -> Slicing | str:
    """Return :data:`AUTO`, or slices as :meth:`Slicing.given` reads them.

    Raises:
        UsageError: a number is wrong.
    """
    return AUTO if value == AUTO else Slicing.given(value)


def parse_slices(text: str) -> Slicing | str:
    """Return slices as :func:`given_slices` does; the type of a flag."""
    return AUTO if text == AUTO else Slicing.parse(text)


def least_tokens(hidden: int | None) -> int:
    """Return the least tokens of a slice on a rank of tensor or context parallelism.

    Args:
        hidden: hidden size of the model, if known.
    """
    return math.ceil(LEAST_TOKENS * max(1.0, (WIDE / (hidden or WIDE)) ** 2))


# --- what a schedule with slices carries

# tables of memory: what B of all slices has left for their one W, and keys and values
_HELD, _STAYS = "held_by_slices", "kept_by_slices"


@dataclass(frozen=True)
class SlicedRules(TrainingRules):
    """Rules of a training step on slices: ``num_microbatches`` of a schedule counts units.

    With ``slicing.joins_weight``, W of a microbatch is the pass of its slice 0, whose B comes last.
    ``whole`` are the rules of the same passes on whole microbatches.
    """

    slicing: Slicing
    whole: TrainingRules = TRAINING

    @cached_property
    def by_kind(self) -> dict[PassKind, Kind]:
        """Entries of the table; a joined W frees what all slices have left for it.

        The last stage may also recompute or offload slices: B of a microbatch's first slice follows
        that of its last one, not F.
        """
        kinds = {it.kind: it for it in (*self.whole.kinds, *self.more)}
        for kind in (PassKind.R, PassKind.D, PassKind.H):
            kinds[kind] = replace(kinds[kind], home=Home.STAGES)
        for kind, sign in ((PassKind.D, 1), (PassKind.H, -1)):
            memory = (*kinds[kind].memory, (_STAYS, sign))
            kinds[kind] = replace(kinds[kind], memory=memory)
        if self.slicing.joins_weight:
            freed = ((_HELD, -1),)
            kinds[_W] = replace(kinds[_W], memory=freed)
            kinds[_BW] = replace(kinds[_BW], memory=kinds[_B].memory + freed)
        return kinds

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        return self.whole.shard_ranks

    @cached_property
    def falling(self) -> frozenset[PassKind]:
        """Kinds of passes that take the slices of a microbatch from the last one on."""
        gradients = {it.kind for it in self.whole.kinds if it.is_gradient}
        return frozenset(gradients - _OF_LOSS)

    def turns(self, kind: Kind, units: Sequence[int]) -> Sequence[int]:
        """Return the units of a stage in the order of F, of B, or of W."""
        joined = kind.kind is _W and bool(self.slicing.joins_weight)
        falls = kind.kind in self.falling
        return Turns(self.slicing.slices, len(units), falls=falls, first_only=joined)

    def in_units(
        self, placement: Placement, ranks: Sequence[Sequence[Pass]]
    ) -> Sequence[Sequence[Pass]]:
        """Return an order whose passes count turns as one of slices, with the forwards they need.

        All slices of a microbatch have passed the last stage before its first B.
        """
        return self.of_turns(delayed(placement, ranks, self.slicing.slices))

    def of_turns(self, ranks: Sequence[Sequence[Pass]]) -> Sequence[Sequence[Pass]]:
        return in_units(ranks, self)

    @property
    def joins_weight(self) -> bool:
        return bool(self.slicing.joins_weight)

    def regrouped(self, costs: StageCosts) -> StageCosts:
        if not self.slicing.joins_weight:
            return costs
        rows = _by_microbatch(costs.microbatches, self.slicing.slices, _with_held)
        return replace(costs, microbatches=rows)

    def over(self, whole: TrainingRules) -> TrainingRules:
        return replace(self, whole=whole)

    def backward_of(self, unit: int) -> PassKind:
        return _B if self.slicing.joins_weight and unit % self.slicing.slices else _BW

    @property
    def units_at_once(self) -> int:
        return self.slicing.slices

    def unit_name(self, kind: PassKind) -> str:
        return "slice"

    def pass_in_words(self, p: Pass) -> str:
        """Describe a pass, such as ``F of stage 1, microbatch 3, slice 0``."""
        j, i = self.slicing.microbatch_and_slice(p.microbatch)
        part = "" if p.kind is _W and self.slicing.joins_weight else f", slice {i}"
        return self.whole.pass_in_words(p._replace(microbatch=j)) + part

    def message_in_words(self, placement: Placement | None, message: Message) -> str:
        j, i = self.slicing.microbatch_and_slice(message.microbatch)
        words = self.whole.message_in_words(placement, message._replace(microbatch=j))
        return f"{words}, slice {i}"

    def whole_microbatches(self, schedule: Sizes) -> int:
        return schedule.num_microbatches // self.slicing.slices

    def unit_costs(self, schedule: Sizes, costs: Priced) -> Priced:
        if isinstance(costs, Costs) and not isinstance(costs, SlicedCosts):
            return self.slicing.costs(costs, self.whole_microbatches(schedule))
        return costs

    def sizes_in_words(self, schedule: Sizes) -> str:
        slices = self.slicing.slices
        return f"{self.whole_microbatches(schedule)} microbatches of {slices} slices"


def slicing_of(schedule: Schedule) -> Slicing | None:
    """Return how a schedule's microbatches are cut, None if they are whole."""
    rules = schedule.rules
    return rules.slicing if isinstance(rules, SlicedRules) else None


@dataclass(frozen=True)
class SlicedCosts(Costs):
    """Costs of slices: ``microbatches`` has those of every unit. See :meth:`Slicing.costs`."""

    slicing: Slicing = field(kw_only=True)
    whole_peak: float = field(kw_only=True)

    def one_f_one_b_peak(self) -> float:
        """Return 1F1B's peak, of whole microbatches."""
        return self.whole_peak

    def for_placement(self, placement: Placement) -> StageCosts:
        """Return the costs by stage; of a joined W all in the row of slice 0.

        Raises:
            UsageError: the placement has another pipeline size.
        """
        table = super().for_placement(placement)
        if self.slicing.kept and not table.keeps_all:
            table = self._with_kept(table)
        if not self.slicing.joins_weight:
            return table
        rows = _by_microbatch(table.microbatches, self.slicing.slices, _joined)
        return replace(table, microbatches=rows)

    def _with_kept(self, table: StageCosts) -> StageCosts:
        """Return the costs with what stays of slices that are recomputed or offloaded."""
        made: dict[int, StageCosts] = {}
        for row in table.microbatches:
            if id(row) not in made:
                held = row.memory["activation"]
                memory = {**row.memory, _STAYS: tuple(self.slicing.kept * a for a in held)}
                if "kept_input" in memory:
                    whole = zip(memory["kept_input"], memory[_STAYS], held, strict=True)
                    memory["kept_input"] = tuple(min(i + s, a) for i, s, a in whole)
                made[id(row)] = replace(row, memory=memory)
        return replace(table, microbatches=tuple(made[id(row)] for row in table.microbatches))


def _by_microbatch(
    rows: Sequence[StageCosts],
    slices: int,
    joined: Callable[[Sequence[StageCosts]], tuple[StageCosts, ...]],
) -> tuple[StageCosts, ...]:
    """Return the rows of all units, those of each microbatch joined; equal ones are one object."""
    made: dict[tuple[int, ...], tuple[StageCosts, ...]] = {}
    groups = [rows[at : at + slices] for at in range(0, len(rows), slices)]
    for group in groups:
        key = tuple(map(id, group))
        if key not in made:
            made[key] = joined(group)
    return tuple(row for group in groups for row in made[tuple(map(id, group))])


def _joined(group: Sequence[StageCosts]) -> tuple[StageCosts, ...]:
    """Return the rows of a microbatch with all of W, and what it frees, in the first."""
    weight = tuple(map(sum, zip(*(row.seconds[_W] for row in group), strict=True)))

    def of_weight(row: StageCosts, seconds: Table) -> StageCosts:
        return row.with_seconds({_W: seconds, _BW: added(row.seconds[_B], seconds)})

    first, *others = _with_held(group)
    return of_weight(first, weight), *(of_weight(row, (0.0,) * len(weight)) for row in others)


def _with_held(group: Sequence[StageCosts]) -> tuple[StageCosts, ...]:
    """Return the rows of a microbatch with what its one W frees in the first."""
    held = tuple(map(sum, zip(*(row.memory["held_for_weight"] for row in group), strict=True)))
    return replace(group[0], memory={**group[0].memory, _HELD: held}), *group[1:]


# --- from turns to units


def in_units(ranks: Sequence[Sequence[Pass]], rules: SlicedRules) -> list[list[Pass]]:
    """Return an order whose passes count turns as one of units."""
    slicing = rules.slicing
    n, most = slicing.slices, 1 + max(p.microbatch for rank in ranks for p in rank)
    turns = list(Turns(n, most))
    units = [Unit(u, n) for u in range(most)]

    def passes(rank: Sequence[Pass]) -> Iterator[Pass]:
        for kind, stage, k in rank:
            is_early = bool(slicing.joins_weight) and k % n < n - 1  # for a joined W
            if kind not in rules.falling:
                yield Pass(kind, stage, units[k])
            elif not (is_early and kind is _W):
                yield Pass(_B if is_early and kind is _BW else kind, stage, turns[k])

    return [[*passes(rank)] for rank in ranks]


def delayed(placement: Placement, ranks: Sequence[Sequence[Pass]], slices: int) -> list[list[Pass]]:
    """Return an order in turns of F and B, or BW, with as many F before B as slices need.

    1. Doubles the number of further F before each B, from one microbatch's, until no rank waits for
       ever.
    2. Halves the range between the last two numbers.
    """
    fewest = most = slices - 1
    while not _runs(placement, found := [_with_lead(rank, most) for rank in ranks], slices):
        fewest, most = most + 1, 2 * most + 1
    while fewest < most:
        lead = (fewest + most) // 2
        orders = [_with_lead(rank, lead) for rank in ranks]
        if _runs(placement, orders, slices):
            most, found = lead, orders
        else:
            fewest = lead + 1
    return found


def _with_lead(rank: Sequence[Pass], lead: int) -> list[Pass]:
    """Return an order with a number of further F before each B, while there are any."""
    forwards = [p for p in rank if p.kind is PassKind.F]
    found: list[Pass] = []
    count = done = 0
    for p in rank:
        if p.kind is PassKind.F:
            count += 1
        else:
            found += [*forwards[done : count + lead], p]
            done = max(done, min(count + lead, len(forwards)))
    return found + forwards[done:]


def _runs(placement: Placement, ranks: Sequence[Sequence[Pass]], slices: int) -> bool:
    """Return whether no rank waits for ever in an order of F and B in turns."""
    last = placement.num_stages - 1
    there, back = [0] * (last + 1), [0] * (last + 1)  # F and B that have run, by stage
    waiting = [list(reversed(rank)) for rank in ranks]

    def is_ready(p: Pass) -> bool:
        if p.kind is PassKind.F:
            return p.stage == 0 or there[p.stage - 1] > p.microbatch
        if p.stage == last:
            return there[last] > p.microbatch // slices * slices + slices - 1
        return back[p.stage + 1] > p.microbatch

    moved = True
    while moved:
        moved = False
        for rank in waiting:
            while rank and is_ready(rank[-1]):
                p = rank.pop()
                (there if p.kind is PassKind.F else back)[p.stage] += 1
                moved = True
    return not any(waiting)


def of_table(schedule: Schedule, slicing: Slicing) -> Schedule:
    """Return the schedule of slices, not validated, whose table has the passes of another one."""
    n, rules = slicing.slices, schedule.rules
    assert isinstance(rules, TrainingRules)
    units = [Unit(u, n) for u in range(schedule.num_microbatches)]
    ranks = tuple(
        tuple(p._replace(microbatch=units[p.microbatch]) for p in rank) for rank in schedule.ranks
    )
    joined = all(p.microbatch % n == 0 for rank in ranks for p in rank if p.kind in (_W, _BW))
    rules = SlicedRules(replace(slicing, joins_weight=joined), rules)
    return replace(schedule, ranks=ranks, rules=rules)
