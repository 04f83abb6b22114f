"""Forward-only orders: faster than those of training, valid, and the same microbatches in turn."""

from __future__ import annotations

from itertools import accumulate

import pytest
from rendezvous import finishes

from megatron_zb import schedules
from megatron_zb.schedules import Costs
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.lowering import unfinished
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.step_plan import _greedy, in_forward_order

pytestmark = pytest.mark.usefixtures("brief_searches")

CHUNKED = ("v-half", "v-min", "v-zb", "1f1b-v", "wave", "interleaved")


def costs_of(p: int, p2p: float = 0.02) -> Costs:
    return Costs.uniform(pipeline_size=p, forward=1.0, backward=1.0, weight=1.0, p2p=p2p)


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("lengths", [(1.0,) * 6, (1.0, 3.0, 0.5, 2.0, 1.0, 8.0)])
def test_any_order_is_valid_and_no_slower_than_that_of_training(
    name: str, lengths: tuple[float, ...]
) -> None:
    p, m = 3, len(lengths)
    costs = costs_of(p).of_lengths(lengths)
    training = schedules.build(name, pipeline_size=p, num_microbatches=m, costs=costs_of(p))
    found = in_forward_order(training, costs).validate()
    assert found.forward_only
    assert {p.kind for rank in found.ranks for p in rank} == {PassKind.F}
    program = schedules.lower(found, schedules.simulate(found, costs))
    assert unfinished(program) == {}
    assert finishes(program), "with blocking sends"
    before = schedules.simulate(training.forwards(), costs).makespan
    assert schedules.simulate(found, costs).makespan <= before


def test_a_v_evaluates_about_as_fast_as_one_chunk() -> None:
    """Units of one rank's forward work; 1F1B on one chunk takes 1.45 with these latencies."""
    p, m = 8, 16
    costs = costs_of(p)
    seconds = {}
    for name in ("1f1b", "v-half", "v-zb"):
        training = schedules.build(name, pipeline_size=p, num_microbatches=m, costs=costs)
        seconds[name] = schedules.simulate(in_forward_order(training, costs), costs).makespan / m
    assert seconds["1f1b"] == pytest.approx((m + p - 1 + 0.02 * (p - 1)) / m)
    assert seconds["v-half"] <= 1.5
    assert seconds["v-zb"] <= 1.5


@pytest.mark.parametrize("name", CHUNKED)
def test_few_activations_wait_before_a_stage(name: str) -> None:
    """Not those of nearly all microbatches, as where a rank prefers its first stage."""
    p, m = 4, 32
    costs = costs_of(p)
    training = schedules.build(name, pipeline_size=p, num_microbatches=m, costs=costs)
    greedy = _greedy(training.forwards(), costs.for_placement(training.placement))
    timeline = schedules.simulate(greedy, costs)
    rank_of, changes = training.placement.rank_of, [list[tuple[float, int]]() for _ in range(p)]
    for rank, passes in enumerate(timeline.schedule.ranks):
        times = zip(passes, timeline.start[rank], timeline.end[rank], strict=True)
        for (_, stage, _), start, end in times:
            if stage > 0:
                changes[rank].append((start, -1))
            if stage + 1 < len(rank_of):
                changes[rank_of[stage + 1]].append((end, 1))
    most = [max(accumulate(n for _, n in sorted(each))) for each in changes]
    assert max(most) <= 2 * training.placement.chunks


def test_what_has_other_forward_passes_keeps_its_order() -> None:
    costs = costs_of(4).having(Vocabulary(output=1.0, weight=0.5))
    training = schedules.build("v-half", pipeline_size=4, num_microbatches=6, costs=costs)
    assert in_forward_order(training, costs) == training.forwards()


def test_one_chunk_has_one_order() -> None:
    training = schedules.build("zb-h1", pipeline_size=4, num_microbatches=6, costs=costs_of(4))
    assert in_forward_order(training, costs_of(4)) == training.forwards()
