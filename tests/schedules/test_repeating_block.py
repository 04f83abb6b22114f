"""Orders that repeat with every microbatch, for unequal costs."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from megatron_zb.schedules import build
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement, looped, v_shape
from megatron_zb.schedules.search.repeating_block import _Circle, modulo_orders
from megatron_zb.schedules.simulator import simulate

F, B, W, BW = PassKind.F, PassKind.B, PassKind.W, PassKind.BW
M = 6
PLACES = [looped(2), looped(4), v_shape(4), looped(3, 2), v_shape(7)]
SPLIT = pytest.mark.parametrize("splits_backward", [True, False])


def drawn_costs(p: int, seed: int) -> Costs:
    draw = random.Random(seed)

    def each(low: float, high: float) -> list[float]:
        return [draw.uniform(low, high) for _ in range(p)]

    return Costs.of_slices(
        pipeline_size=p,
        forward=each(0.5, 1.5),
        backward=each(0.5, 2.0),
        weight=each(0.2, 1.0),
        p2p=draw.choice([0.0, 0.1]),
    )


@SPLIT
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("place", PLACES, ids=lambda it: f"{it.name}-{it.pipeline_size}")
def test_orders_run_every_pass_once(place: Placement, seed: int, splits_backward: bool) -> None:
    costs = drawn_costs(place.pipeline_size, seed)
    table = costs.for_placement(place)
    orders = list(modulo_orders("any", place, table, M, splits_backward=splits_backward))
    assert int(splits_backward) <= len(orders) <= 2, "W fits into gaps, BW may not"
    for order in orders:
        order.validate()
        kinds = {p.kind for rank in order.ranks for p in rank}
        assert kinds == ({F, B, W} if splits_backward else {F, BW})
        passes = [p for rank in order.ranks for p in rank]
        assert len(set(passes)) == len(passes) == M * place.num_stages * len(kinds)


@SPLIT
@pytest.mark.parametrize("seed", range(6))
def test_passes_of_all_microbatches_have_the_rank_to_themselves(
    seed: int, splits_backward: bool
) -> None:
    """Their times on the circle do not overlap, and each begins when its inputs are there."""
    place = v_shape(4)
    table = drawn_costs(4, seed).for_placement(place)
    circle = _Circle(place, table, 1.3 * 4 * 1.5 * 3)
    starts = circle.place(splits_backward=splits_backward)
    assert starts is not None
    for rank, stages in enumerate(place.stages_of):
        own = [(p, start) for p, start in starts.items() if p.stage in stages]
        spans = sorted((start % circle.interval, table.duration(p)) for p, start in own)
        for (begin, seconds), (following, _) in pairwise(spans):
            assert begin + seconds <= following + 1e-6, rank
        (first, _), (last, seconds) = spans[0], spans[-1]
        assert last + seconds <= first + circle.interval + 1e-6
    back = B if splits_backward else BW
    for p, start in starts.items():
        for needed in {
            F: [Pass(F, p.stage - 1, 0)],
            back: [Pass(back, p.stage + 1, 0), Pass(F, p.stage, 0)],
            W: [Pass(B, p.stage, 0)],
        }[p.kind]:
            if needed in starts:
                assert starts[needed] + table.duration(needed) <= start + 1e-6


def test_what_does_not_fit_is_no_order() -> None:
    place = looped(2)
    table = Costs.uniform(pipeline_size=2, forward=1.0, backward=1.0, weight=1.0)
    circle = _Circle(place, table.for_placement(place), 2.5)
    assert circle.place(splits_backward=True) is None


def test_equal_passes_fill_the_interval() -> None:
    place = looped(4)
    costs = Costs.uniform(pipeline_size=4, forward=1.0, backward=1.0, weight=1.0)
    first = next(modulo_orders("any", place, costs.for_placement(place), 32, splits_backward=True))
    timeline = simulate(first, costs)
    assert timeline.makespan <= 32 * 3.0 + 10


def test_late_updates_of_unequal_stages_take_such_an_order() -> None:
    """The building blocks, for equal passes, wait where one chunk is twice as long as the other."""
    costs = Costs.of_slices(
        pipeline_size=4,
        forward=[1.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0],
        backward=[1.1, 2.2, 2.2, 2.2, 1.1, 1.1, 1.1, 1.1],
        weight=[0.5, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5],
        p2p=0.3,
    )
    late = build("v-half", pipeline_size=4, num_microbatches=8, costs=costs, update_delay=1)
    assert late.report is not None and late.report.period is not None
    assert late.report.period <= 1.15 * late.report.lower_bound / 4
