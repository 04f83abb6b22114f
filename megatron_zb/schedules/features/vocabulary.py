"""Vocabulary parallelism: every rank holds a shard of the output layer, and of the embedding.

*Balancing Pipeline Parallelism with Vocabulary Parallelism* (arXiv 2411.05288). The passes of the
shards get their places in three steps:

1. An order of F and B is searched for with O and V counted as parts of other passes of their ranks.
2. Every O and P runs in it as soon as its inputs are there, and W and V fill the waits.
3. A search in which O, P and V are passes as others are starts from that order. Orders with pairs
   keep that of the second step.

E and G, of the embedding, are placed in a finished order. Both take next to no time, so they change
no other pass's place: E runs so early that what all ranks have found is there when the first
stage's F begins, G when its gradient has long come: nobody waits for a G, and a rank should not
wait in one because a pass of another has taken longer than expected. M and K, which only send, run
right behind the passes whose rows they send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import ClassVar, NamedTuple

from megatron_zb.errors import UsageError
from megatron_zb.schedules.bounds import lower_bound, usable_limit
from megatron_zb.schedules.costs import Costs, Feature, Scale, latency
from megatron_zb.schedules.features.pairs import search_pairs
from megatron_zb.schedules.kinds import TRAINING_KINDS, At, Due, Home, Kind, Need, with_needs
from megatron_zb.schedules.passes import Message, Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import Request
from megatron_zb.schedules.rules import TrainingRules
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.hill_climbing import search
from megatron_zb.schedules.search.kernels import engine
from megatron_zb.schedules.search.place_w import GapFiller, fuse_for_free
from megatron_zb.schedules.search.placement_search import NAMED_SECONDS, tail_seconds
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.search.runner import PAIRS, SINGLE, effort_of
from megatron_zb.schedules.simulator import Timeline, simulate
from megatron_zb.schedules.stage_costs import StageCosts, Table, communicates

_F, _B, _BW = PassKind.F, PassKind.B, PassKind.BW
_O, _P, _V, _E, _G, _M, _K = (PassKind(letter) for letter in "OPVEGMK")
_OF_SHARDS = {_O, _P, _V, _E, _G, _M, _K}

# --- kinds of passes, and their rules


VOCABULARY_KINDS = (
    *with_needs(TRAINING_KINDS, {_B: (Need(_P, At.SAME, At.LAST),)}),
    Kind(
        _O, Home.SHARDS, (Need(_F, At.LAST),), Due.ALWAYS, is_gradient=True, memory=(("logits", 1),)
    ),
    Kind(_P, Home.LAST, (Need(_F, At.SAME), Need(_O, At.SHARDS)), Due.ALWAYS, is_gradient=True),
    Kind(
        _V,
        Home.SHARDS,
        (Need(_O, At.SAME), Need(_P, At.LAST)),
        is_gradient=True,
        memory=(("logits", -1),),
    ),
)
"""Those of a vocabulary parallel output layer (arXiv 2411.05288), with one barrier a microbatch.

The last stage's output goes to every rank. Each runs O and sends its part of the softmax and of the
input gradient back. P puts the parts together and sends the gradient of the loss to all ranks,
whose V needs it; the B of the last stage follows.
"""

EMBEDDING_KINDS = (
    *with_needs(VOCABULARY_KINDS, {_F: (Need(_E, At.SHARDS, At.FIRST),)}),
    Kind(_E, Home.LOOKUPS, (Need(_E, At.READER),), Due.ALWAYS),
    Kind(_G, Home.SHARDS, (Need(_E, At.SAME), Need(_B, At.FIRST)), is_gradient=True),
)
"""Those of a vocabulary parallel output layer and embedding (arXiv 2411.05288, its input layers).

E on the rank of the first stage reads the tokens of a microbatch and sends them to all ranks; E of
each rank looks up those of its rows, and the first stage's F needs the sum of all. The gradient
that the B of the first stage makes goes to all ranks, whose G adds those of their rows.
"""

PREDICTION_KINDS = (
    *with_needs(
        EMBEDDING_KINDS, {_F: (Need(_M, At.FIRST, At.LAST),), _B: (Need(_K, At.LAST, At.FIRST),)}
    ),
    Kind(_M, Home.FIRST, (Need(_F, At.SAME),), Due.ALWAYS),
    Kind(_K, Home.LAST, (Need(_B, At.SAME),), is_gradient=True),
)
"""Those with multi-token prediction, which embeds the tokens that follow on the last stage.

M sends their rows, the sum that the first stage's F has made, and K sends their gradient back to
the B of the first stage. Where both stages are on one rank, nothing travels.
"""


@dataclass(frozen=True)
class VocabularyRules(TrainingRules):
    """Rules of a training step with a vocabulary parallel output layer.

    O and V run on the ranks ``holders``, P where the loss is.
    """

    holders: tuple[int, ...]

    table = VOCABULARY_KINDS

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        return self.holders

    def message_in_words(self, placement: Placement | None, message: Message) -> str:
        if placement is None or message.stage < placement.num_stages:
            return super().message_in_words(placement, message)
        what = _SHARD_MESSAGES[_place(placement, message), message.is_gradient]
        return f"{what}, microbatch {message.microbatch}"


@dataclass(frozen=True)
class EmbeddingRules(VocabularyRules):
    """Rules of a training step whose output layer and embedding are vocabulary parallel."""

    table = EMBEDDING_KINDS


@dataclass(frozen=True)
class PredictionRules(EmbeddingRules):
    """Rules of vocabulary parallelism with multi-token prediction."""

    table = PREDICTION_KINDS


def _place(placement: Placement, message: Message) -> str:
    """Return which of the stages past the model's a message has; see :class:`TaskGraph`."""
    beyond = message.stage - placement.num_stages
    ends = {1: "first", 2: "ends"}.get(beyond - placement.pipeline_size, "shard")
    return ends if beyond else "all"


_SHARD_MESSAGES = {
    ("all", False): "the output of the last stage",
    ("all", True): "the gradient of the loss",
    ("shard", False): "a part of the embedding",
    ("shard", True): "a part of the loss",
    ("first", False): "the tokens",
    ("first", True): "the gradient of the embedding",
    ("ends", False): "the embedding of later tokens",
    ("ends", True): "the gradient of the embedding of later tokens",
}


# --- costs


@dataclass(frozen=True)
class Vocabulary(Feature):
    """Costs of one microbatch of a vocabulary-parallel output layer.

    Args:
        output: seconds of O of all shards together (logits, softmax and parts of the input
            gradient).
        weight: seconds of V, the weight gradients.
        loss: seconds of P, which puts the parts together.
        held: what all shards hold from O to V, in the unit of activation.
        scatter: seconds by which the last stage's output takes longer to reach all ranks than one
            message from a stage to the next.
        gather: the same of the shards' parts on their way back.
        shares: the share of the vocabulary on each logical rank, the same on all if left out.
        lookup: seconds of E of all shards together, and those of G, if the embedding is vocabulary
            parallel, too; None if it is whole.
        predicts: whether the last stage embeds later tokens, for multi-token prediction.
    """

    name: ClassVar[str] = "vocabulary"

    output: float
    weight: float
    loss: float = 0.0
    held: float = 0.0
    scatter: float = 0.0
    gather: float = 0.0
    shares: Table = ()
    lookup: float | None = None
    predicts: bool = False

    def said(self) -> dict[str, str]:
        return {self.name: "vocabulary parallelism"}

    def completed(self, costs: Costs) -> Vocabulary:
        """Return the feature with the shares of all ranks.

        Raises:
            UsageError: a value is negative or not finite, or the shares do not make a whole.
        """
        p = costs.pipeline_size
        shares = tuple(self.shares or [1 / p] * p)
        names = ("output", "weight", "loss", "held", "scatter", "gather")
        values = {name: float(getattr(self, name)) for name in names}
        for name, value in (values | {"lookup": self.lookup or 0.0}).items():
            if not 0 <= value < float("inf"):
                raise UsageError(
                    f"costs: {name} of the vocabulary is {value}: give a finite value of 0 or more"
                )
        if len(shares) != p or min(shares) < 0 or abs(sum(shares) - 1.0) > 1e-6:
            raise UsageError(
                f"costs: the shares of the vocabulary are {list(shares)}: give one of 0 or more "
                f"for each of the {p} ranks, 1 in all"
            )
        return replace(self, shares=shares)

    def scaled(self, scale: Scale) -> Vocabulary:
        per_token = ("output", "weight", "loss", "held", "scatter", "gather")
        return replace(
            self,
            **{name: scale.tokens * getattr(self, name) for name in per_token},
            lookup=None if self.lookup is None else scale.tokens * self.lookup,
        )

    def of_units(self, units: Sequence[Costs]) -> Vocabulary:
        """Return that of the unit whose logits take the most: a rank holds those of a few units."""
        found = [it for row in units for it in row.features if isinstance(it, Vocabulary)]
        return max(found, key=lambda it: it.held)

    def placed(self, costs: Costs, placement: Placement, table: StageCosts) -> StageCosts:
        """Return the costs with those of shards: in each table, that of rank r stands at S + r."""
        end, none = placement.rank_of[-1], (0.0,) * placement.num_stages
        ranks = range(costs.pipeline_size)
        told = max(latency(costs, end, r) for r in ranks)
        back = (0.0 if r == end else latency(costs, r, end) + self.gather for r in ranks)
        share = [s * f for s, f in zip(self.shares, costs.slowdown, strict=True)]
        seconds = {
            _O: none + tuple(self.output * s for s in share),
            _V: none + tuple(self.weight * s for s in share),
            _P: (*none[1:], self.loss * costs.slowdown[end]),
        }
        latencies = {
            _F: (*table.latency[_F][:-1], told + self.scatter),
            _P: (*none[1:], told),
            _O: (*none, *back),
            _V: none + (0.0,) * len(ranks),
        }
        logits = none + tuple(self.held * s for s in self.shares)
        placed = replace(
            table,
            seconds={**table.seconds, **seconds},
            latency={**table.latency, **latencies},
            memory={**table.memory, "logits": logits},
        )
        return placed if self.lookup is None else self._with_lookups(costs, placement, placed)

    def _with_lookups(self, costs: Costs, placement: Placement, table: StageCosts) -> StageCosts:
        """Return the costs with those of the embedding's passes, which the first stage waits for.

        E of its rank reads the tokens and sends them to all ranks; B of that stage sends its
        gradient to all.
        """
        assert self.lookup is not None
        start, none = placement.rank_of[0], (0.0,) * placement.num_stages
        ranks = range(costs.pipeline_size)
        from_first = max(latency(costs, start, r) for r in ranks)
        answers = (from_first if r == start else latency(costs, r, start) for r in ranks)
        share = [s * f for s, f in zip(self.shares, costs.slowdown, strict=True)]
        lookups = none + tuple(self.lookup * s for s in share)
        first = (from_first, *table.latency[_B][1:])
        told = table.latency[_P][-1]
        return replace(
            table,
            seconds={**table.seconds, _E: lookups, _G: lookups, _M: none, _K: none},
            latency={
                **table.latency,
                _B: first,
                _BW: first,
                _E: (*none, *answers),
                _G: none + (0.0,) * len(ranks),
                _M: (told,) * len(none),
                _K: (from_first,) * len(none),
            },
        )


def shards_embedding(costs: Costs) -> bool:
    """Return whether the embedding is vocabulary parallel, like the output layer."""
    found = costs.feature(Vocabulary)
    return found is not None and found.lookup is not None


def with_prediction(costs: Costs) -> Costs:
    """Return the costs of a vocabulary-parallel embedding that the last stage also reads."""
    found = costs.feature(Vocabulary)
    assert found is not None and found.lookup is not None
    return costs.having(replace(found, predicts=True))


# --- embedding


_TURNS = 3
"""Of the longest pass and of a message: what E is ahead of F by, since a rank runs E only between
passes, the first stage's rank first and then the others."""


def with_embedding(schedule: Schedule, costs: Costs) -> Schedule:
    """Return a schedule of a vocabulary-parallel output layer with the passes of the embedding."""
    rules = schedule.rules
    assert isinstance(rules, TrainingRules)
    vocabulary = costs.feature(Vocabulary)
    assert vocabulary is not None
    timeline = simulate(schedule, costs)
    ranks = tuple(
        _merged(schedule.ranks[rank], timeline.start[rank], _additions(timeline, rank))
        for rank in range(len(schedule.ranks))
    )
    if not vocabulary.predicts:
        embedding = EmbeddingRules(rules.shard_ranks)
        return replace(schedule, ranks=ranks, rules=rules.over(embedding))
    last = schedule.placement.num_stages - 1
    ranks = tuple(tuple(_handing_on(rank, last, schedule.pairs)) for rank in ranks)
    return replace(schedule, ranks=ranks, rules=rules.over(PredictionRules(rules.shard_ranks)))


def _handing_on(order: Sequence[Pass], last: int, pairs: frozenset[Pass]) -> Iterator[Pass]:
    """Yield the passes of a rank with M and K, those of a pair behind it."""
    due = []
    for p in order:
        yield p
        if p.kind is PassKind.F and p.stage == 0:
            due.append(p._replace(kind=PassKind.M))
        elif p.kind in (PassKind.B, PassKind.BW) and p.stage == last:
            due.append(p._replace(kind=PassKind.K))
        if p not in pairs:
            yield from due
            due = []


def _additions(timeline: Timeline, rank: int) -> list[tuple[float, Pass]]:
    """Return E and G of a rank with the seconds at which they are due, in order."""
    schedule, costs = timeline.schedule, timeline.costs
    placement, rules = schedule.placement, schedule.rules
    start, shard = placement.rank_of[0], placement.num_stages + rank
    longest = max(costs.duration(p) for order in schedule.ranks for p in order)
    from_first = costs.latency[PassKind.B][0]
    turn = longest + from_first
    found = []
    times = zip(schedule.ranks[start], timeline.start[start], timeline.end[start], strict=True)
    for p, begin, end in times:
        if p.stage != 0:
            continue
        if p.kind is PassKind.F and (rank == start or rank in rules.shard_ranks):
            ahead = _TURNS * turn if rank == start else (_TURNS - 1) * turn
            found.append((begin - ahead, Pass(PassKind.E, shard, p.microbatch)))
        elif p.kind in (PassKind.B, PassKind.BW) and rank in rules.shard_ranks:
            arrival = end if rank == start else end + from_first + _TURNS * turn
            found.append((arrival, Pass(PassKind.G, shard, p.microbatch)))
    return sorted(found, key=lambda at: at[0])


def _merged(
    order: tuple[Pass, ...], starts: tuple[float, ...], added: list[tuple[float, Pass]]
) -> tuple[Pass, ...]:
    """Return an order with passes added before the first that starts no earlier than they."""
    merged, upcoming = [], iter(added)
    due = next(upcoming, None)
    for p, start in zip(order, starts, strict=True):
        while due is not None and due[0] <= start:
            merged.append(due[1])
            due = next(upcoming, None)
        merged.append(p)
    while due is not None:
        merged.append(due[1])
        due = next(upcoming, None)
    return tuple(merged)


# --- output layer


class _Choices(NamedTuple):
    """Grid of parameters to try; the fastest result wins.

    ``folded`` is the part of O's time that is counted as F, the rest as B, while an order of F and
    B is searched for; ``eagerness`` the share of a W, and of a V, that a wait must have to be
    filled with it.
    """

    folded: tuple[float, ...] = (0.25, 0.5, 0.75)
    eagerness: tuple[float, ...] = (1.0, 0.5, 0.0)


_CHOICES = _Choices()
_ROOM = 1
"""Units for whose logits a rank has room, beside its activations."""
_LOGITS = 3
"""Units whose logits a rank holds at once at most, all of them within its limit; a fourth brings
next to nothing."""
_WORTH = 0.998
"""Share of the seconds of a filled order below which another one is worth more receives that wait:
in a filled order every O and P runs as soon as it can."""
_SEARCHED = NAMED_SECONDS
"""Approximate seconds of a search among all passes, if it is compiled."""
_SEEDS = (0, 1)
"""Of these searches: one of a few hundred runs is a matter of chance."""
_SECONDS = NAMED_SECONDS / 2
"""Those of each search for an order of F and B."""
_PAIR_SECONDS = 0.5
"""Those of each search for passes to pair, where passes communicate."""


def fastest_with_vocabulary(
    name: str,
    placements: Sequence[Placement],
    request: Request,
    peak_microbatches: float,
    *,
    split: bool,
) -> Schedule:
    """Return the fastest schedule on one of the placements, with the passes of the embedding.

    Raises:
        UsageError: as :func:`search_with_vocabulary`.
    """
    found = [
        search_with_vocabulary(name, placement, request, peak_microbatches, split=split)
        for placement in placements
    ]
    if shards_embedding(request.costs):
        found = [with_embedding(schedule, request.costs) for schedule in found]
    return min(found, key=lambda s: request.seconds(simulate(s, request.costs)))


def search_with_vocabulary(
    name: str,
    placement: Placement,
    request: Request,
    peak_microbatches: float,
    *,
    split: bool,
) -> Schedule:
    """Return the fastest order found in which no rank holds more than ``peak_microbatches``.

    Raises:
        UsageError: the limit is below one microbatch in each chunk with the logits of one.
    """
    costs, stages = request.costs.for_placement(placement), placement.num_stages
    logits = costs.memory["logits"][stages:]
    limit = request.limits(placement, peak_microbatches)
    problem = Problem(placement, request.num_microbatches, costs, limit, rules=request.rules)
    ranks = range(placement.pipeline_size)
    needed = [problem.smallest_limit(rank) + _ROOM * logits[rank] for rank in ranks]
    request.check_feasible(name, placement, limit, needed)
    left = tuple(most - _ROOM * held for most, held in zip(limit, logits, strict=True))
    problem = replace(problem, limit=left)
    orders = _orders(placement, costs, request, left, split=split)
    filled = [each for order in orders for each in _filled(problem, order, request)]
    fastest = min(seconds for seconds, _, _ in filled)
    fitting = [(passes(), pairs) for seconds, passes, pairs in filled if seconds == fastest]
    best, pairs = min(fitting, key=lambda it: it[0])
    shares = costs.seconds[PassKind.O][stages:]
    holders = tuple(r for r in ranks if shares[r] > 0 or sum(shares) == 0)
    rules = request.rules.over(VocabularyRules(holders))
    m = request.num_microbatches
    schedule = Schedule(name, placement, m, best, rules=rules, pairs=pairs)
    if not pairs:
        schedule = _searched(schedule, problem, request, split=split)
    return fuse_for_free(schedule, request.costs) if split else schedule


def _searched(known: Schedule, problem: Problem, request: Request, *, split: bool) -> Schedule:
    """Return the order that a search finds in which O, P and V are passes as others are.

    Args:
        known: an order within the limit, which stays if nothing is much faster.
        problem: of F, B and W, with room for the logits of a unit beside its limit.
        request: what is asked for.
        split: whether W is a pass.
    """
    assert isinstance(known.rules, TrainingRules)
    tail = tail_seconds(problem.placement, problem.costs) if request.back_to_back else ()
    within = usable_limit(problem.placement, problem.num_microbatches, problem.costs, problem.limit)
    whole = replace(problem, limit=within, split=split, tail_seconds=tail)
    whole = replace(whole, rules=known.rules, logits=_LOGITS)
    sizes = whole.placement, whole.num_microbatches, whole.costs, within
    effort = effort_of(whole, _SEARCHED, SINGLE)
    tried = (search(whole, effort, lower_bound(*sizes), [known.ranks], s) for s in _SEEDS)
    found = min(tried, key=lambda it: it.makespan)
    order = replace(known, ranks=found.ranks)
    before, after = (request.seconds(simulate(it, request.costs)) for it in (known, order))
    return order if after < _WORTH * before else known


class _Filled(NamedTuple):
    """An order whose gaps are filled: its seconds, its passes, and what it pairs."""

    seconds: float
    passes: Callable[[], tuple[tuple[Pass, ...], ...]]
    pairs: frozenset[Pass]


def _filled(problem: Problem, order: Schedule, request: Request) -> Iterator[_Filled]:
    """Yield an order of F, B and W whose gaps are filled more or less eagerly."""
    leads = [[p for p in rank if p.kind is not PassKind.W] for rank in order.ranks]
    runs = len(_CHOICES.folded) * len(_CHOICES.eagerness) ** 2
    make = engine(runs * sum(map(len, leads)))
    rules = problem.rules.over(VocabularyRules(()))
    filler = GapFiller(replace(problem, rules=rules), leads, make, order.pairs)
    for of_weights, of_shards in product(_CHOICES.eagerness, repeat=2):
        filled = filler.fill(of_weights, of_shards, _ROOM)
        if filled is not None:
            seconds = filled.seconds(back_to_back=request.back_to_back)
            yield _Filled(seconds, partial(filler.passes_of, filled), order.pairs)


def _orders(
    placement: Placement,
    costs: StageCosts,
    request: Request,
    limit: Sequence[float],
    *,
    split: bool,
) -> Iterator[Schedule]:
    """Yield orders within a limit, found with O and V as parts of other passes.

    Where passes communicate, without pairs and with those that a search finds.
    """
    m = request.num_microbatches
    for share in _CHOICES.folded:
        folded = _folded(placement, costs, share)
        within = usable_limit(placement, m, folded, limit)
        turn = _turn(costs)
        problem = Problem(placement, m, folded, within, split, turn=turn, rules=request.rules)
        bound = lower_bound(placement, m, folded, within)
        found = search(problem, effort_of(problem, _SECONDS, SINGLE), bound)
        alone = Schedule("alone", placement, m, found.ranks, rules=request.rules)
        yield alone
        if communicates(folded):
            effort = effort_of(problem, _PAIR_SECONDS, PAIRS)
            paired = search_pairs("paired", problem, effort, bound, [alone])
            if paired.pairs:
                yield paired


def _turn(costs: StageCosts) -> float:
    """Return the seconds from the end of the last stage's F to the start of its B, at best."""
    of_o = zip(costs.seconds[PassKind.O], costs.latency[PassKind.O], strict=True)
    slowest = max(o + back for o, back in of_o)
    return costs.latency[PassKind.F][-1] + slowest + costs.seconds[PassKind.P][-1]


def _folded(placement: Placement, costs: StageCosts, share: float) -> StageCosts:
    """Return the costs with O as a part of F and B of its rank, and V of W."""
    rows = {id(row): _folded(placement, row, share) for row in costs.microbatches}
    kinds = PassKind.F, PassKind.B, PassKind.W, PassKind.BW
    changed = {kind: list(costs.seconds[kind]) for kind in kinds}
    for rank, held in enumerate(placement.stages_of):
        at = placement.num_stages + rank
        output, later = (costs.seconds[kind][at] / len(held) for kind in (PassKind.O, PassKind.V))
        back = (1 - share) * output
        for kind, more in zip(kinds, (share * output, back, later, back + later), strict=True):
            for stage in held:
                changed[kind][stage] += more
    seconds = {k: of for k, of in costs.seconds.items() if k not in _OF_SHARDS}
    return replace(
        costs,
        seconds=seconds | {kind: tuple(of) for kind, of in changed.items()},
        memory={name: of for name, of in costs.memory.items() if name != "logits"},
        microbatches=tuple(rows[id(row)] for row in costs.microbatches),
    )
