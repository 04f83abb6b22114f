"""Recomputation: F of a unit keeps only its input, and R makes its activation again before B.

As in *Training Deep Nets with Sublinear Memory Cost* (arXiv 1604.06174), for a whole stage at once.

Memory buys time in two ways: another order holds less, and a unit that is recomputed holds only its
input until R computes its activation. Neither by itself is good below half of 1F1B's memory. So

1. orders are found as if every unit were recomputed in part, for less memory and a longer B;
2. units are kept as long as there is room;
3. a local search moves passes, R among them, and changes what is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from megatron_zb.schedules.costs import (
    Costs,
    Scale,
    added,
    check_table,
    filled,
    resampled,
    seconds_of,
    times,
)
from megatron_zb.schedules.features.recompute_or_offload import (
    RecomputeOrOffload,
    drops_last_stage,
    one_at_a_time,
)
from megatron_zb.schedules.memory import Interval, keep
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import Request
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.hill_climbing import Pool, polished_pool, search
from megatron_zb.schedules.search.inner_loops import RecomputeCosts
from megatron_zb.schedules.search.kernels import engine
from megatron_zb.schedules.search.place_w import fuse_for_free
from megatron_zb.schedules.search.placement_search import LimitedSearch
from megatron_zb.schedules.search.problem import OTHERS, Problem
from megatron_zb.schedules.search.runner import (
    RECOMPUTE,
    Coded,
    Effort,
    Runner,
    effort_of,
    pair_costs_of,
)
from megatron_zb.schedules.stage_costs import StageCosts

SECONDS = 12.0
"""Approximate seconds of the search for what is recomputed, on one placement."""

QUICK_SECONDS = 1.5
"""Those of a request that is quick."""

_SECONDS_OF_SLICES = 3.0
"""Those of a request for slices: longer searches gain little."""


@dataclass(frozen=True)
class Recomputation(RecomputeOrOffload):
    """The choice to recompute activations before B.

    Args:
        kept_input: memory of the input of a stage, in the unit of activation.
        seconds: what making activations again takes, of each slice; as long as F if left out,
            beside what it exchanges.
    """

    name: ClassVar[str] = "recomputation"
    turn: ClassVar[int] = 1

    kept_input: float
    seconds: Sequence[float] | None = None

    def completed(self, costs: Costs) -> Recomputation:
        """Return the feature with the seconds of each slice.

        Raises:
            UsageError: a value is negative or not finite, or there is not one for each slice.
        """
        forward = costs.seconds[PassKind.F]
        again = forward if self.seconds is None else tuple(self.seconds)
        check_table("recompute", again, len(forward))
        check_table("kept_input", (self.kept_input,), 1)
        return replace(self, seconds=again)

    def scaled(self, scale: Scale) -> Recomputation:
        seconds = times(filled(self.seconds), scale.forward)
        return replace(self, kept_input=self.kept_input * scale.tokens, seconds=seconds)

    def placed(self, costs: Costs, placement: Placement, table: StageCosts) -> StageCosts:
        again = seconds_of(costs, filled(self.seconds), placement)
        if PassKind.F in table.exchange:  # it is exchanged again, too
            again = added(again, table.exchange[PassKind.F])
        held = resampled(costs.memory["activation"], placement.num_stages)
        kept = tuple(min(self.kept_input, of_stage) for of_stage in held)
        memory = {**table.memory, "kept_input": kept}
        return replace(table.with_seconds({PassKind.R: again}), memory=memory)

    def in_place(self, order: Schedule, request: Request, problem: Problem) -> Iterable[Schedule]:
        """Return the order with R right before the B of each unit that there is no room for."""
        runner = runner_with_r(problem, Effort(0, 0))
        coded = with_recompute(runner, order.ranks)
        return [] if coded is None else [replace(order, ranks=runner.passes(coded))]

    def within_limit(self, search: LimitedSearch) -> Iterable[Schedule]:
        """Return the fastest order that a search finds, with R where units are recomputed."""
        effort = effort_of(search.problem, seconds_of_search(search), RECOMPUTE)
        found = search_recompute(search.name, search.problem, effort, search.bound, search.starts)
        return [] if found is None else [fuse_for_free(found, search.request.costs)]

    def last_resort(self, search: LimitedSearch) -> Iterable[Schedule]:
        """Return the order that holds the least: a search may miss it at the smallest limit."""
        found = self.in_place(one_at_a_time(search.problem), search.request, search.problem)
        return [replace(order, name=search.name) for order in found]


def seconds_of_search(search: LimitedSearch) -> float:
    """Return the approximate seconds of a search for what is recomputed."""
    if search.request.quick:
        return QUICK_SECONDS
    return min(SECONDS, _SECONDS_OF_SLICES) if search.request.rules.units_at_once > 1 else SECONDS


# --- search


# Shares of units that are recomputed while an order is looked for: of the chunks of a rank that
# hold their activations longest, the first half, and of the others.
_SHARES = ((1.0, 1.0), (0.9, 0.9), (0.75, 0.75), (0.5, 0.5), (0.25, 0.25), (1.0, 0.0), (0.5, 0.0))
_LEAST = 1e-6  # of an activation: orders are found for memory that is not nothing
_POOL = 3  # starts that are polished further, the fastest ones
_THRESHOLDS = (0.3, 0.3, 0.15, 0.3, 0.15)


def search_recompute(
    name: str, problem: Problem, effort: Effort, lower_bound: float, known: Iterable[Schedule]
) -> Schedule | None:
    """Return the fastest schedule found that keeps the limit, with R where units are recomputed.

    ``known`` are schedules of the placement, whatever they hold, whose orders take part. None if
    none was found.
    """
    runner = runner_with_r(problem, effort)
    orders = [*(s.ranks for s in known), *_mixed_orders(problem, effort)]
    starts = [coded for order in orders if (coded := with_recompute(runner, order)) is not None]
    if not starts:
        return None
    pool = Pool(effort.moves, lower_bound * (1 + 1e-9), _POOL, _THRESHOLDS)
    ranks = runner.passes(polished_pool(runner, starts, pool))  # what is kept has no R
    m, rules = problem.num_microbatches, problem.rules
    return Schedule(name, problem.placement, m, ranks, rules=rules)


def _mixed_orders(problem: Problem, effort: Effort) -> Iterator[tuple[tuple[Pass, ...], ...]]:
    """Yield orders found for costs of units that are recomputed in part."""
    runs = Effort(effort.runs // (2 * len(_SHARES)), effort.runs * 10 // len(_SHARES))
    for mixed in mixed_problems(problem):
        yield search(mixed, runs, 0.0).ranks


def mixed_problems(problem: Problem) -> Iterator[Problem]:
    """Yield problems whose units are recomputed in part, twice as many as there are shares at most.

    With all memory, and with room for one activation that is being recomputed.
    """
    placement = problem.placement
    ranks = range(placement.pipeline_size)
    room = [
        max(
            problem.costs.memory["activation"][s] - problem.costs.memory["kept_input"][s]
            for s in placement.stages_of[r]
        )
        for r in ranks
    ]
    for shares in _SHARES:
        costs = problem.rules.regrouped(_mixed(placement, problem.costs, shares))
        mixed = replace(problem, costs=costs)
        for free in (0.0, 1.0):
            limit = tuple(
                most - free * extra for most, extra in zip(problem.limit, room, strict=True)
            )
            if all(mixed.smallest_limit(r) <= limit[r] for r in ranks):
                yield replace(mixed, limit=limit)


def _mixed(placement: Placement, costs: StageCosts, shares: tuple[float, float]) -> StageCosts:
    """Return the costs with these shares of units recomputed: less memory, and a longer B."""
    chunks = placement.chunks
    share = [
        shares[2 * placement.chunk_of(s) >= chunks] if s < placement.num_stages - 1 else 0.0
        for s in range(placement.num_stages)
    ]
    rows = {id(row): _mixed(placement, row, shares) for row in costs.microbatches}

    def less(held: Sequence[float]) -> tuple[float, ...]:
        each = zip(held, costs.memory["kept_input"], share, strict=True)
        return tuple(max(_LEAST * h, h - x * max(0.0, h - i)) for h, i, x in each)

    def longer(seconds: Sequence[float]) -> tuple[float, ...]:
        again = costs.seconds[PassKind.R]
        return tuple(t + x * r for t, r, x in zip(seconds, again, share, strict=True))

    backward = {kind: longer(costs.seconds[kind]) for kind in (PassKind.B, PassKind.BW)}
    return replace(
        costs.with_seconds(backward),
        memory={name: less(costs.memory[name]) for name in ("activation", "held_for_weight")},
        microbatches=tuple(rows[id(row)] for row in costs.microbatches),
    )


@dataclass
class _Rank:
    """Codes of one rank's passes while R is put in, and the memory held after each."""

    codes: list[int]
    held: list[float]

    def put(self, code: int, change: float) -> None:
        self.codes.append(code)
        self.held.append((self.held[-1] if self.held else 0.0) + change)

    def has_room(self, extra: float, limit: float) -> bool:
        return (self.held[-1] if self.held else 0.0) + extra <= limit


def runner_with_r(problem: Problem, effort: Effort, *, pairs: bool = False) -> Runner:
    """Return a runner on orders that have an R of every unit, or with ``pairs`` a flag for it."""
    make = engine(float(effort.runs + effort.moves) * problem.num_passes)
    last, m = problem.placement.num_stages - 1, problem.num_microbatches
    stages, rows = range(last + 1), [problem.costs.of(j) for j in range(m)]
    drops_all = drops_last_stage(problem.rules)
    saved = [
        row.memory["activation"][s] - row.memory["kept_input"][s] if drops_all or s < last else 0.0
        for s in stages
        for row in rows
    ]
    seconds = [row.seconds[PassKind.R][s] for s in stages for row in rows]
    again = RecomputeCosts(make.floats(seconds), make.floats(saved))
    return Runner(problem, make, pair_costs_of(problem, make) if pairs else None, again)


def with_recompute(
    runner: Runner, ranks: Sequence[Sequence[Pass]], paired: Collection[Pass] = ()
) -> Coded | None:
    """Encode an order, with R right before each B and kept what there is room for.

    R of a B that is paired comes before the pair. A W that stands too late comes earlier where its
    memory is needed. None if that does not help.
    """
    recomputed = [0] * runner.block
    found: list[int] = []
    for rank, passes in enumerate(ranks):
        line = _with_r(runner, rank, passes, paired)
        if line is None:
            return None
        for unit in _without_room(runner, line, float(runner.inputs.limit[rank])):
            recomputed[unit] = 1
        found += line.codes
    return runner.engine.integers(found), runner.engine.integers(recomputed)


def _with_r(
    runner: Runner, rank: int, passes: Sequence[Pass], paired: Collection[Pass]
) -> _Rank | None:
    """Return a rank's codes with everything recomputed that can be."""
    assert runner.recompute is not None
    codes, limit, saved = (
        runner.problem.codes,
        float(runner.inputs.limit[rank]),
        runner.recompute.saved,
    )
    memory, line = runner.inputs.memory, _Rank([], [])
    pending: list[int] = []  # W that are to come

    def make_room(extra: float) -> None:
        while pending and not line.has_room(extra, limit):
            code = pending.pop(0)
            line.put(code, float(memory[code]))

    def put_r(unit: int) -> None:
        line.put(codes.total + unit, float(saved[unit]))

    for place, p in enumerate(passes):
        unit = codes.of(PassKind.F, p.stage, p.microbatch)
        if p.kind is PassKind.F:
            need = float(memory[unit]) - float(saved[unit])
            if p in paired:
                again = codes.of(PassKind.F, *passes[place + 1][1:])
                make_room(need + float(saved[again]))
                put_r(again)
            else:
                make_room(need)
            line.put(unit, need)
        elif p.kind in (PassKind.B, PassKind.BW):
            if place == 0 or passes[place - 1] not in paired:
                make_room(float(saved[unit]))
                put_r(unit)
            backward = codes.of(p.kind, p.stage, p.microbatch)
            line.put(backward, float(memory[backward]))
            if (weight := int(runner.inputs.weight[backward])) >= 0:
                pending.append(weight)
        if codes.split and p.kind in (PassKind.W, PassKind.BW):
            weight = codes.of(PassKind.W, p.stage, p.microbatch)
            if weight in pending:
                pending.remove(weight)
                line.put(weight, float(memory[weight]))
        elif p.kind in OTHERS:
            line.put(codes.of(*p), float(memory[codes.of(*p)]))
    line.codes += pending
    return line if max(line.held) <= limit else None


def _without_room(runner: Runner, line: _Rank, limit: float) -> set[int]:
    """Return the units that are not kept; those are whose B follows their F soonest."""
    assert runner.recompute is not None
    again, saved = runner.inputs.again, runner.recompute.saved
    place = {code: i for i, code in enumerate(line.codes)}
    spans = {
        code: Interval(place[code], place[again + code], float(saved[code]))
        for code in line.codes
        if code < runner.block
    }
    units = sorted(spans.items(), key=lambda it: (it[1].stop - it[1].start, it[0]))
    return spans.keys() - keep(np.array(line.held), units, limit)
