"""Search for an order, for what it pairs, and for what it recomputes.

A pair hides communication only if both of its passes are ready, so units wait longer and hold more;
below 1F1B's memory there is room for few. A recomputed unit waits for little. Its R runs right
before its B, or before the pair that B is in: R also communicates, with nothing to hide it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.inner_loops import INFINITY
from megatron_zb.schedules.search.kernels import engine
from megatron_zb.schedules.search.pair_search import (
    PairRunner,
    climb_pairs,
    pair_costs_of,
    paired_flags,
    paired_passes,
)
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.search.recompute_search import RecomputeRunner, mixed_problems
from megatron_zb.schedules.search.runner import Coded, Effort

_POOL = 4  # starts that are polished further, the fastest ones
_THRESHOLDS = (0.3, 0.15, 0.3)  # the loss that polishing accepts at first, in mean passes


def search_paired_recompute(
    name: str, problem: Problem, effort: Effort, lower_bound: float, known: Iterable[Schedule]
) -> Schedule | None:
    """Return the fastest schedule found that keeps the limit, None if none was found.

    ``known`` are schedules of the placement, whatever they hold, whose orders and pairs take part.
    """
    runner = _PairedRecomputeRunner(problem, effort)
    good_enough = lower_bound * (1 + 1e-9)
    orders = [*known, *_mixed_orders(name, problem, effort)]
    starts = [coded for order in orders if (coded := runner.encoded(order)) is not None]
    if not starts:
        return None
    moves = effort.moves // (2 * len(starts))
    pool = sorted(
        (
            runner.polished(start, moves, _THRESHOLDS[0], good_enough, number)
            for number, start in enumerate(starts)
        ),
        key=lambda entry: entry[0],
    )[:_POOL]
    moves = effort.moves // (2 * len(pool) * len(_THRESHOLDS))
    for number, threshold in enumerate(_THRESHOLDS):
        for place, start in enumerate(pool):
            if pool[0][0] > good_enough:
                found = runner.polished(start[1], moves, threshold, good_enough, 100 + number)
                pool[place] = min(start, found, key=lambda entry: entry[0])
    return runner.schedule(name, min(pool, key=lambda entry: entry[0])[1])


def _mixed_orders(name: str, problem: Problem, effort: Effort) -> Iterator[Schedule]:
    """Yield orders with pairs, found for costs of units that are recomputed in part."""
    problems = list(mixed_problems(problem))
    for mixed in problems:
        runner = PairRunner(mixed, effort)
        for weights in climb_pairs(runner, effort.runs // len(problems), 0.0, 0)[:1]:
            if runner.seconds_of(weights) < INFINITY:
                yield runner.schedule(name, runner.copied())


class _PairedRecomputeRunner(RecomputeRunner):
    """Runner on orders of F, B and W whose flags mark pairs and passes with an R."""

    def __init__(self, problem: Problem, effort: Effort) -> None:
        make = engine(float(effort.runs + effort.moves) * problem.num_passes)
        super().__init__(problem, effort, pair_costs_of(problem, make))

    def encoded(self, schedule: Schedule) -> Coded | None:
        """Encode a schedule, with what it pairs, and recompute what the limit has no room for."""
        coded = self.with_recompute(schedule.ranks, schedule.pairs)
        if coded is None:
            return None
        order, recomputed = coded
        codes = [int(code) for code in order if code < 3 * self.block]
        flags = paired_flags(schedule, self.block)
        flags = [flag + 2 * int(again) for flag, again in zip(flags, recomputed, strict=True)]
        return self.engine.integers(codes), self.engine.integers(flags)

    def schedule(self, name: str, coded: Coded) -> Schedule:
        """Decode a schedule."""
        order, flags = coded
        problem, m = self.problem, self.problem.num_microbatches
        pairs = paired_passes(flags, m)
        recomputed = {divmod(unit, m) for unit, flag in enumerate(flags) if flag >= 2}
        ranks = self.passes((order, [0] * self.block))
        with_r = tuple(tuple(_with_r(passes, pairs, recomputed)) for passes in ranks)
        return Schedule(name, problem.placement, m, with_r, pairs=pairs)


def _with_r(
    passes: Sequence[Pass], pairs: frozenset[Pass], recomputed: set[tuple[int, int]]
) -> Iterator[Pass]:
    """Yield the passes of a rank, with each R before its B, or before the pair that B is in."""
    for place, p in enumerate(passes):
        backward = passes[place + 1] if p in pairs else p
        is_second = place > 0 and passes[place - 1] in pairs
        if backward.kind is PassKind.B and backward[1:] in recomputed and not is_second:
            yield backward._replace(kind=PassKind.R)
        yield p
