"""Sampling in patches: idle shares beside the formula, edges, words, refusals, a run on ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import RankPools
from rendezvous import finishes

from megatron_zb.errors import UsageError
from megatron_zb.runtime.channels import Channels
from megatron_zb.runtime.executor import run_program
from megatron_zb.schedules import build, catalog, interchange
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.patches import PatchRules, idle_share, pipefusion
from megatron_zb.schedules.lowering import Send, lower, unfinished
from megatron_zb.schedules.passes import Message, Pass, PassKind
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule
from megatron_zb.schedules.simulator import Timeline, simulate

F = PassKind.F


def costs_of(p: int, p2p: float = 0.0) -> Costs:
    return Costs.uniform(pipeline_size=p, forward=1, backward=1, weight=0, p2p=p2p)


def timed(p: int, patches: int, time_steps: int, costs: Costs | None = None) -> Timeline:
    costs = costs or costs_of(p)
    return simulate(pipefusion(p, patches, time_steps, costs), costs)


# --- how long it takes


@pytest.mark.parametrize("time_steps", [1, 4, 32])
@pytest.mark.parametrize("patches", [8, 12, 16])
@pytest.mark.parametrize("p", [4, 8])
def test_the_idle_share_is_the_formula_with_as_many_patches_as_ranks_or_more(
    p: int, patches: int, time_steps: int
) -> None:
    formula = (p - 1) / (patches * time_steps + p - 1)
    assert timed(p, patches, time_steps).bubble_rate == pytest.approx(formula)
    assert idle_share(p, patches, time_steps) == pytest.approx(formula)


@pytest.mark.parametrize("time_steps", [1, 4, 32])
@pytest.mark.parametrize("patches", [1, 2, 3])
@pytest.mark.parametrize("p", [4, 8])
def test_with_fewer_patches_than_ranks_a_time_step_takes_as_many_slots_as_there_are_ranks(
    p: int, patches: int, time_steps: int
) -> None:
    slots = p * time_steps + patches - 1
    timeline = timed(p, patches, time_steps)
    assert timeline.makespan == pytest.approx(slots)
    assert timeline.bubble_rate == pytest.approx(1 - patches * time_steps / slots)
    assert idle_share(p, patches, time_steps) == pytest.approx(timeline.bubble_rate)


def test_nothing_drains_the_pipeline_between_time_steps() -> None:
    timeline = timed(8, 8, 16)
    for start, end in zip(timeline.start, timeline.end, strict=True):
        assert start[1:] == end[:-1]


def test_one_process_never_waits() -> None:
    assert timed(1, 3, 4).bubble_rate == 0
    assert idle_share(1, 3, 4) == 0


def test_a_patch_comes_back_by_a_message_that_takes_its_time() -> None:
    timeline = timed(4, 2, 3, costs_of(4, p2p=0.5))
    for unit in range(2, 6):
        assert timeline.start[0][unit] == pytest.approx(timeline.end[3][unit - 2] + 0.5)
    # three ways through four ranks, two of them with the message back, and the other patch
    assert timeline.makespan == pytest.approx(3 * (4 + 3 * 0.5) + 2 * 0.5 + 1)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_order_is_faster_for_any_costs(data: st.DataObject) -> None:
    p = data.draw(st.integers(1, 5))
    seconds = st.sampled_from([0.25, 1.0, 2.0])
    links = [
        [0.0 if a == b else data.draw(st.sampled_from([0.0, 0.5])) for b in range(p)]
        for a in range(p)
    ]
    costs = Costs.of_slices(
        pipeline_size=p,
        forward=[data.draw(seconds) for _ in range(p)],
        backward=[1.0] * p,
        weight=[0.0] * p,
        p2p=links,
    )
    schedule = pipefusion(p, data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)), costs)
    assert schedule.report is not None
    assert schedule.report.gap == pytest.approx(0.0, abs=1e-9)
    timeline = simulate(schedule, costs)
    assert schedule.report.makespan == timeline.makespan
    for program in (lower(schedule), lower(schedule, timeline)):
        assert unfinished(program) == {}
        assert finishes(program), "with blocking sends"


# --- its order


def with_swapped(schedule: Schedule, rank: int, at: int, other: int) -> Schedule:
    """The schedule with two passes of a rank in each other's place."""
    passes = list(schedule.ranks[rank])
    passes[at], passes[other] = passes[other], passes[at]
    ranks = [*schedule.ranks]
    ranks[rank] = tuple(passes)
    return replace(schedule, ranks=tuple(ranks))


@pytest.mark.parametrize("p", [1, 2, 4])
def test_a_patch_that_begins_a_time_step_before_it_has_come_back_is_refused(p: int) -> None:
    schedule = pipefusion(p, patches=2, time_steps=3)
    for rank in range(p):
        with pytest.raises(InvalidSchedule, match="is time step 0, patch 0") as error:
            with_swapped(schedule, rank, 0, 2).validate()
        assert (error.value.rank, error.value.position) == (rank, 0)


def test_only_the_first_stage_waits_for_what_comes_back() -> None:
    graph = pipefusion(3, patches=2, time_steps=3).graph
    found = {
        (graph.rows[at // 6].stage, at % 6): [(graph.rows[m // 6].stage, m % 6) for m in makers]
        for at, makers in graph.more.items()
    }
    assert found == {(0, unit + 2): [(2, unit)] for unit in range(4)}


def test_messages_go_to_the_next_rank_and_from_the_last_to_the_first_one() -> None:
    schedule = pipefusion(4, patches=2, time_steps=2)
    assert schedule.placement.peers == {(0, 1), (1, 2), (2, 3)}
    assert schedule.rules.more_peers(schedule.placement) == {(0, 3)}
    for p in (1, 2):
        small = pipefusion(p, patches=2, time_steps=2)
        assert small.rules.more_peers(small.placement) == set()
    sent = {
        (at.channel.source, at.channel.target)
        for rank in lower(schedule).ranks
        for at in rank
        if isinstance(at, Send)
    }
    assert sent == {(0, 1), (1, 2), (2, 3), (3, 0)}


def test_a_rank_holds_no_more_than_its_keys_and_values() -> None:
    timeline = timed(4, 8, 2)
    assert timeline.peak_memory == (0.0,) * 4


def test_a_backward_is_no_part_of_it() -> None:
    schedule = pipefusion(2, patches=2, time_steps=1)
    longer = replace(
        schedule, ranks=((*schedule.ranks[0], Pass(PassKind.B, 0, 0)), schedule.ranks[1])
    )
    with pytest.raises(InvalidSchedule, match="sampling in patches has no B passes"):
        longer.validate()


# --- its words


def test_units_are_named_by_their_time_step_and_patch() -> None:
    rules = PatchRules(patches=8, time_steps=4)
    assert rules.pass_in_words(Pass(F, 2, 21)) == "F of stage 2, time step 2, patch 5"
    there, back = Message(False, 3, 21), Message(False, 0, 21)
    assert rules.message_in_words(None, there) == "the activation for stage 3, time step 2, patch 5"
    assert rules.message_in_words(None, back) == (
        "the prediction for time step 2, patch 5, on its way back to stage 0"
    )


def test_sizes_are_counted() -> None:
    assert PatchRules(8, 4).units_in_words(32) == "8 patches in 4 time steps"
    assert PatchRules(1, 1).units_in_words(1) == "1 patch in 1 time step"


def test_a_unit_that_is_not_there_is_named() -> None:
    schedule = pipefusion(2, patches=2, time_steps=2)
    longer = replace(schedule, ranks=((*schedule.ranks[0], Pass(F, 0, 4)), schedule.ranks[1]))
    with pytest.raises(InvalidSchedule, match="there are 2 patches in 2 time steps"):
        longer.validate()


# --- what is refused


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((0, 8, 4), "0 pipeline ranks were asked for: give 1 or more"),
        ((-3, 8, 4), "-3 pipeline ranks were asked for"),
        ((4, 0, 4), "0 patches were asked for: give 1 or more"),
        ((4, 8, 0), "0 time steps were asked for: give 1 or more"),
        ((4, 10**12, 10**12), "too many to be put in order: their product can be at most 1048576"),
        ((10**12, 1, 1), "too many to be put in order"),
        ((2000, 1, 1), "a pipeline of 2000 ranks was asked for: give at most 1024"),
    ],
)
def test_numbers_out_of_range_are_refused(sizes: tuple[int, int, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        pipefusion(*sizes)


def test_costs_of_something_else_are_refused() -> None:
    with pytest.raises(UsageError, match="costs are for 3 pipeline ranks, the placement has 4"):
        pipefusion(4, 8, 4, costs_of(3))
    with pytest.raises(
        UsageError, match="all patches are of one size, but the costs have 2 length"
    ):
        pipefusion(4, 2, 4, costs_of(4).of_lengths([1, 2]))


def test_no_training_can_choose_it() -> None:
    assert "pipefusion" not in catalog.all_names()
    for name in ("pipefusion", "PipeFusion"):
        with pytest.raises(UsageError, match=r"pipefusion is forward-only: .*give a schedule"):
            build(name, pipeline_size=4, num_microbatches=8)
        with pytest.raises(UsageError, match="pipefusion is forward-only"):
            catalog.family_of_one_copy(name)


def test_a_table_cannot_hold_it() -> None:
    with pytest.raises(UsageError, match="pipefusion has forward passes alone"):
        interchange.to_csv(pipefusion(2, 2, 2))


# --- on ranks


class Mixing:
    """A toy stage: what it makes of a patch depends on what it has last seen of all patches."""

    def __init__(self, stage: int, patches: int) -> None:
        draw = torch.Generator().manual_seed(stage)
        self.weight = torch.randn(4, 4, generator=draw, dtype=torch.float64)
        self.seen = torch.zeros(patches, 4, dtype=torch.float64)
        self.made: list[torch.Tensor] = []

    def forward(self, unit: int, received: torch.Tensor | None) -> torch.Tensor:
        patches = len(self.seen)
        x = torch.full((4,), 1.0 + unit, dtype=torch.float64) if received is None else received
        self.seen[unit % patches] = x
        self.made.append(torch.tanh(x + self.seen.mean(0) @ self.weight))
        return self.made[-1]


def made_on_a_rank(patches: int, time_steps: int) -> list[torch.Tensor]:
    """What the stage of this rank makes of each unit, in its turn."""
    rank, p = torch.distributed.get_rank(), torch.distributed.get_world_size()
    schedule = pipefusion(p, patches, time_steps)
    more = schedule.rules.more_peers(schedule.placement)
    channels = Channels(range(p), schedule.placement, "cpu", more_peers=more)
    stage = Mixing(rank, patches)
    run_program(lower(schedule), rank, {rank: stage}, channels, empty)
    channels.close()
    return stage.made


def empty(message: Message) -> torch.Tensor:
    return torch.empty(4, dtype=torch.float64)


def made_alone(p: int, patches: int, time_steps: int) -> list[list[torch.Tensor]]:
    """The same in one process, patch after patch through all stages."""
    stages = [Mixing(rank, patches) for rank in range(p)]
    back: dict[int, torch.Tensor] = {}
    for unit in range(patches * time_steps):
        x = back.get(unit % patches)
        for stage in stages:
            x = stage.forward(unit, x)
        assert x is not None
        back[unit % patches] = x
    return [stage.made for stage in stages]


@pytest.mark.parametrize("patches", [1, 2, 5])
@pytest.mark.parametrize("p", [2, 4])
def test_ranks_make_what_one_process_makes(ranks: RankPools, p: int, patches: int) -> None:
    found = ranks(p).run(made_on_a_rank, patches=patches, time_steps=3)
    for mine, alone in zip(found, made_alone(p, patches, 3), strict=True):
        assert len(mine) == patches * 3
        assert all(map(torch.equal, mine, alone))


def test_a_program_of_one_rank_hands_each_patch_to_itself() -> None:
    schedule = pipefusion(1, patches=2, time_steps=3)
    stage = Mixing(0, 2)
    run_program(lower(schedule), 0, {0: stage}, NoChannels(), empty)
    ((*alone,),) = made_alone(1, 2, 3)
    assert all(map(torch.equal, stage.made, alone))


class NoChannels(Channels):
    """Channels of a single process, which has nobody to send to."""

    def __init__(self) -> None:
        self._prepare(torch.device("cpu"))
