"""Of orders of nearly equal time, ``auto`` takes the one that loses least where passes vary."""

from __future__ import annotations

import random
from statistics import fmean, pstdev

import feature_gains
import pytest

from megatron_zb import schedules
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import looped
from megatron_zb.schedules.request import Limit, Request
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.varied_passes import mean_seconds, steadiest, varied

pytestmark = pytest.mark.usefixtures("brief_searches")

P, M = 4, 8
EQUAL = Costs.uniform(pipeline_size=P, forward=1.0, backward=1.0, weight=1.0)
REQUEST = Request(P, M, EQUAL, Limit())


def named(name: str) -> Schedule:
    return schedules.build(name, pipeline_size=P, num_microbatches=M)


def test_passes_vary_as_they_should() -> None:
    """Seconds are uniform around their means; B and W of a whole backward vary independently."""
    table = Costs.uniform(pipeline_size=2, forward=2.0, backward=1.0, weight=3.0).for_placement(
        looped(2)
    )
    drawn = varied(table, 2000, 0.1, random.Random(1))
    for kind, seconds in ((PassKind.F, 2.0), (PassKind.B, 1.0), (PassKind.W, 3.0)):
        found = [value for row in drawn.microbatches for value in row.seconds[kind]]
        assert fmean(found) == pytest.approx(seconds, rel=0.01)
        assert pstdev(found) == pytest.approx(0.1 * seconds, rel=0.05)
        assert max(found) <= seconds * (1 + 0.1 * 3**0.5)
    for row in drawn.microbatches:
        halves = zip(row.seconds[PassKind.B], row.seconds[PassKind.W], strict=True)
        assert row.seconds[PassKind.BW] == pytest.approx([b + w for b, w in halves])
        assert row.memory["activation"] == table.memory["activation"]
    assert varied(table, 3, 0.0, random.Random(1)).microbatches[2].seconds[PassKind.BW] == (
        4.0,
        4.0,
    )


def test_a_mean_is_the_same_on_every_machine() -> None:
    """To the last bit, or the ranks of a job could build different schedules."""
    assert mean_seconds(named("1f1b"), REQUEST).hex() == "0x1.0f4d88f0fbf9ap+5"
    assert mean_seconds(named("1f1b"), REQUEST, deviation=0.0) == 33.0


def test_the_one_that_loses_least_is_taken() -> None:
    """1F1B and GPipe take equally long, and v-zb is faster than both."""
    found = [(33.0, named("1f1b")), (33.0, named("gpipe"))]
    means = [mean_seconds(schedule, REQUEST) for _, schedule in found]
    assert means[0] != means[1]
    expected = means.index(min(means))
    assert steadiest(found, REQUEST) == expected
    assert steadiest(found[::-1], REQUEST) == 1 - expected


def test_only_those_within_one_per_cent_that_no_known_one_beats_compete() -> None:
    steady = (33.2, named("v-zb"))  # in truth 25.5: it would win
    found = [(33.0, named("1f1b")), steady]
    assert steadiest(found, REQUEST) == 1
    assert steadiest(found, REQUEST, most=33.1) == 0
    assert steadiest([(32.8, named("1f1b")), steady], REQUEST) == 0


def test_auto_loses_no_more_than_named_schedules_that_are_as_fast() -> None:
    costs = Costs.uniform(pipeline_size=4, forward=1.0, backward=1.2, weight=0.8, p2p=0.2)
    request = Request(4, 12, costs, Limit(0.6))

    def built(name: str) -> tuple[float, float]:
        schedule = schedules.build(
            name, pipeline_size=4, num_microbatches=12, costs=costs, memory_limit=0.6
        )
        return schedules.simulate(schedule, costs).makespan, mean_seconds(schedule, request)

    seconds, mean = built("auto")
    others = [built(name) for name in ("v-zb", "v-half", "v-min")]
    as_fast = [other for other in others if other[0] <= seconds * (1 + 1e-9)]
    assert as_fast
    for its_seconds, its_mean in as_fast:
        assert its_seconds >= seconds * (1 - 1e-9)
        assert its_mean >= mean


def test_the_benchmark_shows_what_the_choice_costs_and_gains() -> None:
    found = {row["name"]: row for row in feature_gains.varied_rows(2, 4, [0, 10], 8)}
    assert [*found] == [*feature_gains.NAMED, "fastest", "auto"]
    fastest, taken = (found[name]["means"] for name in ("fastest", "auto"))
    assert fastest[0] <= taken[0] <= fastest[0] * 1.01
    assert all(row["means"][1] > row["means"][0] for row in found.values())
