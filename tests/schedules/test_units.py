"""Units with a route, an owner and a version: checked, timed, lowered, written, read and run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from ranks import RankPools
from toy_layers import Layer, empty_message, layers_of_a_rank, toy_input

from megatron_zb.errors import UsageError
from megatron_zb.runtime.autograd_stage import AutogradStage, WeightGradQueue
from megatron_zb.runtime.channels import Channels
from megatron_zb.runtime.executor import TRAINING, run_program
from megatron_zb.schedules import interchange
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.lowering import lower, unfinished
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement, looped
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule
from megatron_zb.schedules.simulator import simulate
from megatron_zb.schedules.units import UnitRules, Units, with_columns

F, B, W, BW, U = PassKind.F, PassKind.B, PassKind.W, PassKind.BW, PassKind.U


def schedule_of(placement: Placement, columns: Units, *ranks: str) -> Schedule:
    """A schedule from ranks written as in a table, such as ``0F0 0B0``; B is whole, I is not."""
    table = "\n".join(",".join(rank.split()) for rank in ranks)
    changed = partial(with_columns, columns=columns)
    read = interchange.from_csv(table, name="written", change=changed)
    assert read.placement.rank_of == placement.rank_of
    return read


# --- two directions: stages 0, 1 down the ranks, their copies 2, 3 on the way up

BOTH_WAYS = Placement("both ways", 2, (0, 1, 1, 0))
WAYS = ((0, 1), (2, 3))
DIRECTIONS = Units.of(WAYS)
TWO = (
    "0F0 3F1 3I1 3W1 0I0 0W0",
    "2F1 1F0 1I0 1W0 2I1 2W1",
)


def test_two_directions_meet() -> None:
    schedule = schedule_of(BOTH_WAYS, DIRECTIONS, *TWO)
    assert unfinished(lower(schedule)) == {}
    costs = Costs.uniform(pipeline_size=2, forward=2.0, backward=2.0, weight=2.0, p2p=0.5)
    timeline = simulate(schedule, costs)
    # F of both units at 0 and, a message later, at 1.5; then B and W of each without a wait
    assert timeline.start[0] == timeline.start[1] == (0.0, 1.5, 2.5, 3.5, 4.5, 5.5)


def test_a_table_is_read_back_with_its_columns() -> None:
    schedule = schedule_of(BOTH_WAYS, DIRECTIONS, *TWO)
    changed = partial(with_columns, columns=DIRECTIONS)
    again = interchange.from_csv(interchange.to_csv(schedule), name="written", change=changed)
    assert (again.ranks, again.rules) == (schedule.ranks, schedule.rules)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (("0F0 0F1 3F1 3I1 3W1 0I0 0W0", TWO[1]), "there is no F of stage 0 left to run"),
        ((TWO[0], "1F0 1I0 1W0 2I1 2W1 2F1"), "its F has not run yet"),
        ((TWO[0], "2F1 1F0 1I0 1W0"), "0 of 1 B passes are listed, stage 2|0 of 1 B passes"),
        (("3F1 3I1 3W1 0F0 0I0 0W0", "1F0 1I0 1W0 2F1 2I1 2W1"), "wait for one another"),
    ],
)
def test_what_a_route_does_not_allow_is_refused(ranks: tuple[str, str], words: str) -> None:
    with pytest.raises(InvalidSchedule, match=words):
        schedule_of(BOTH_WAYS, DIRECTIONS, *ranks)


def test_a_unit_may_leave_a_stage_out() -> None:
    """Unit 1 goes from stage 0 to stage 2, as one that is led around a rank."""
    columns = Units.of([(0, 1, 2), (0, 2)])
    ranks = ("0F0 0F1 0B1 0B0", "1F0 1B0", "2F1 2B1 2F0 2B0")
    with pytest.raises(InvalidSchedule, match="the next B of stage 0 is unit 0"):
        schedule_of(looped(3), columns, *ranks)
    schedule = schedule_of(looped(3), columns, "0F0 0F1 0B0 0B1", "1F0 1B0", "2F0 2B0 2F1 2B1")
    assert unfinished(lower(schedule)) == {}
    costs = Costs.uniform(pipeline_size=3, forward=1.0, backward=1.0, weight=1.0)
    assert simulate(schedule, costs).start[2] == (2.0, 3.0, 5.0, 6.0)


# --- owners: two adapters with two units each, and a further step of the first

OWNERS = Units.of([(0, 1)] * 6, [0, 0, 1, 1, 2, 2], [-1, -1, -1, -1, 0, 0])
STREAM = (
    "0F0 0F1 0B0 0F2 0B1 0U0 0F3 0B2 0F4 0B3 0U2 0F5 0B4 0B5 0U4",
    "1F0 1B0 1F1 1B1 1U0 1F2 1B2 1F3 1B3 1U2 1F4 1B4 1F5 1B5 1U4",
)


def test_an_owner_is_updated_while_others_fill_the_pipeline() -> None:
    schedule = schedule_of(looped(2), OWNERS, *STREAM)
    assert unfinished(lower(schedule)) == {}
    costs = Costs.uniform(pipeline_size=2, forward=1.0, backward=1.0, weight=1.0)
    timeline = simulate(schedule, costs)
    flush = 3 * (2 + 1) * 3.0  # each of three steps, one after the other
    assert timeline.makespan < flush
    assert timeline.peak_activation == (2.0, 1.0)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("0F4 0B3 0U2", "0B3 0U2 0F4", None),  # the update of the first owner is long done
        ("0F2 0B1 0U0", "0F2 0U0 0B1", "not every W of owner 0 has run yet"),
        ("0B1 0U0 0F3 0B2 0F4", "0B1 0F3 0B2 0F4 0U0", "the update of owner 0 has not run yet"),
        ("0B5 0U4", "0B5", "2 of 3 U passes are listed"),
    ],
)
def test_updates_stand_between_the_steps_of_their_owner(
    before: str, after: str, words: str | None
) -> None:
    assert STREAM[0].count(before) == 1
    ranks = STREAM[0].replace(before, after), STREAM[1]
    if words is None:
        assert schedule_of(looped(2), OWNERS, *ranks).num_microbatches == 6
        return
    with pytest.raises(InvalidSchedule, match=words):
        schedule_of(looped(2), OWNERS, *ranks)


def test_an_order_without_updates_needs_none() -> None:
    columns = replace(OWNERS, version=(-1,) * 6)
    order = ("0F0 0F1 0B0 0F2 0B1 0F3 0B2 0F4 0B3 0F5 0B4 0B5", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3")
    ranks = order[0], order[1] + " 1F4 1B4 1F5 1B5"
    assert schedule_of(looped(2), columns, *ranks).rules == UnitRules(columns)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (([(0, 1)], [0, 1]), "1 routes, 2 owners and 1 versions"),
        (([(0, 0)],), r"the route of unit 0 is \[0, 0\]"),
        (([()],), r"the route of unit 0 is \[\]"),
        (([(0,), (0,)], [0, 1], [1, -1]), "unit 0 waits for an update of owner 1"),
        (([],), "0 routes"),
    ],
)
def test_wrong_columns_are_refused_in_a_sentence(columns: tuple, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Units.of(*columns)


def test_units_without_columns_are_refused() -> None:
    with pytest.raises(UsageError, match="4 units are listed, and 2 have columns"):
        schedule_of(looped(2), Units.of([(0, 1)] * 2), "0F0 0B0 0F3 0B3", "1F0 1B0 1F3 1B3")


# --- on ranks


def run_both_ways() -> dict[int, torch.Tensor]:
    schedule = schedule_of(BOTH_WAYS, DIRECTIONS, *TWO)
    channels = Channels([0, 1], schedule.placement, "cpu")
    layers, stages = layers_of_a_rank(schedule.placement, {way[-1] for way in WAYS})
    rank = torch.distributed.get_rank()
    run_program(lower(schedule), rank, stages, channels, empty_message)
    channels.close()
    return {stage: layer.gradient for stage, layer in layers.items()}


def test_two_directions_run_on_two_ranks(ranks: RankPools) -> None:
    first, second = ranks(2).run(run_both_ways)
    found = first | second
    for unit, route in enumerate(WAYS):
        queue = WeightGradQueue()
        layers = [Layer(stage, queue) for stage in route]
        x = toy_input(unit).requires_grad_()
        for layer in layers:
            x = layer(x)
        x.square().sum().backward()
        for stage, layer in zip(route, layers, strict=True):
            assert torch.equal(found[stage], layer.gradient)
            assert layer.gradient.abs().sum() > 0


def run_stream() -> dict[int, tuple[torch.Tensor, list[int]]]:
    """Run owners one after the other, each with an update of gradient descent when it is done."""
    schedule = schedule_of(looped(2), OWNERS, *STREAM)
    channels = Channels([0, 1], schedule.placement, "cpu")
    layers, stages = layers_of_a_rank(schedule.placement)
    updated: list[int] = []

    def update(stage: AutogradStage, unit: int) -> None:
        (layer,) = layers.values()
        updated.append(unit)
        layer.weight -= 0.1 * layer.gradient
        layer.gradient.zero_()

    rank = torch.distributed.get_rank()
    handlers = {**TRAINING, U: update}
    run_program(lower(schedule), rank, stages, channels, empty_message, handlers=handlers)
    channels.close()
    return {stage: (layer.weight, updated) for stage, layer in layers.items()}


def test_updates_run_between_the_passes_of_others(ranks: RankPools) -> None:
    first, second = ranks(2).run(run_stream)
    assert first[0][1] == second[1][1] == [0, 2, 4]
    assert Pass(U, 0, 2) in schedule_of(looped(2), OWNERS, *STREAM).ranks[0]
