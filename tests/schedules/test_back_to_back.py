"""Schedules for iterations that follow one another with no barrier between them."""

from __future__ import annotations

import pytest
from adapters import scheduled
from brief_searches import at_length
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zb import schedules
from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.schedules.bounds import period_bound
from megatron_zb.schedules.layout import Layers
from megatron_zb.schedules.passes import Pass
from megatron_zb.schedules.schedule import Schedule

pytestmark = pytest.mark.usefixtures("brief_searches")

P, M = 8, 16
EQUAL = schedules.Costs.uniform(pipeline_size=P, forward=1, backward=1, weight=1)
WORK = 3 * M


def repeated(schedule: Schedule, times: int) -> Schedule:
    """The same order so many times, one behind the other on every rank."""
    m = schedule.num_microbatches
    ranks = tuple(
        tuple(Pass(kind, stage, mb + i * m) for i in range(times) for kind, stage, mb in rank)
        for rank in schedule.ranks
    )
    return Schedule(schedule.name, schedule.placement, m * times, ranks).validate()


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half"])
@settings(max_examples=10, deadline=None)
@given(
    p=st.integers(2, 5),
    m=st.integers(1, 9),
    times=st.lists(st.floats(0.1, 5), min_size=3, max_size=3),
    p2p=st.floats(0, 1),
    slowdown=st.lists(st.floats(0.5, 2), min_size=5, max_size=5),
)
def test_many_iterations_take_as_long_as_predicted(
    name: str, p: int, m: int, times: list[float], p2p: float, slowdown: list[float]
) -> None:
    forward, backward, weight = ([t] for t in times)
    costs = schedules.Costs.of_slices(
        pipeline_size=p,
        forward=forward,
        backward=backward,
        weight=weight,
        p2p=p2p,
        slowdown=slowdown[:p],
    )
    schedule = schedules.build(
        name, pipeline_size=p, num_microbatches=m, costs=costs, back_to_back=True
    )
    one = schedules.simulate(schedule, costs)
    bound = period_bound(schedule.placement, m, one.costs, one.peak_memory)
    assert bound <= one.period * (1 + 1e-9)
    assert one.period <= one.makespan * (1 + 1e-9)
    many = schedules.simulate(repeated(schedule, 4), costs).makespan
    assert many <= (one.makespan + 3 * one.period) * (1 + 1e-9)


@pytest.fixture(scope="module")
def v_zb() -> dict[bool, Schedule]:
    """V-ZB for one iteration, and for many in a row; brief searches are too short for it."""
    with at_length():
        return {
            flag: schedules.build("v-zb", pipeline_size=P, num_microbatches=M, back_to_back=flag)
            for flag in (False, True)
        }


def test_v_zb_has_no_bubble_between_iterations(v_zb: dict[bool, Schedule]) -> None:
    """A single one waits for its last rank to begin: half a forward on each of the others."""
    alone, back_to_back = (schedules.simulate(v_zb[flag], EQUAL) for flag in (False, True))
    assert alone.makespan == back_to_back.makespan == WORK + (P - 1) / 2
    assert alone.period > WORK
    assert back_to_back.period == back_to_back.seconds(back_to_back=True) == WORK
    assert back_to_back.seconds(back_to_back=False) == back_to_back.makespan
    assert back_to_back.bubble_rate_back_to_back == pytest.approx(0)
    assert max(back_to_back.peak_activation) <= P
    many = schedules.simulate(repeated(back_to_back.schedule, 5), EQUAL)
    assert many.makespan == pytest.approx(5 * WORK + (P - 1) / 2)


def test_the_report_tells_the_period(v_zb: dict[bool, Schedule]) -> None:
    built, other = v_zb[True].report, v_zb[False].report
    assert built is not None
    assert built.period == WORK
    assert other is not None
    assert other.period is None


def test_an_adapter_for_iterations_in_a_row() -> None:
    def adapter(back_to_back: bool) -> PipelineAdapter:
        with at_length():
            return scheduled(
                "v-zb",
                pipeline_size=P,
                num_microbatches=M,
                layers=Layers(16),
                enable_optimizer_post_validation=back_to_back,
            )

    of = {flag: adapter(flag) for flag in (True, False)}
    assert of[True].predicted_bubble_rate == pytest.approx(0)
    assert of[False].predicted_bubble_rate == pytest.approx(3.5 / 51.5)
    assert "expected bubble 0.0 % at equal costs" in of[True].describe()
    seconds = {flag: one.current.seconds(one.schedule, EQUAL) for flag, one in of.items()}
    assert seconds[True] == WORK < seconds[False] == WORK + (P - 1) / 2


@pytest.mark.parametrize(
    ("m", "output", "backward"), [(6, 1.0, 1.3), (8, 2.0, 2.0), (10, 0.3, 2.0)]
)
@pytest.mark.parametrize(("name", "chunks"), [("v-zb", None), ("zb-2p", None), ("wave", 4)])
def test_many_in_a_row_are_never_slower_than_with_the_schedule_for_one(
    name: str, chunks: int | None, m: int, output: float, backward: float
) -> None:
    forward = [1.0] * 15 + [1.0 + output]
    costs = schedules.Costs.of_slices(
        pipeline_size=4,
        forward=forward,
        backward=[backward * seconds for seconds in forward],
        weight=[0.7 * seconds for seconds in forward],
    )
    alone, back_to_back = (
        schedules.simulate(
            schedules.build(
                name,
                pipeline_size=4,
                num_microbatches=m,
                costs=costs,
                chunks=chunks,
                back_to_back=flag,
            ),
            costs,
        ).period
        for flag in (False, True)
    )
    assert back_to_back <= alone * (1 + 1e-9)
