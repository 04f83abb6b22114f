"""A second model beside the trained one: edges, how much of it fits into bubbles, and the bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from brief_searches import briefly

from megatron_zb.errors import UsageError
from megatron_zb.schedules import build, catalog, interchange
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.adapters import Adapters
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.second_model import (
    PlacementBeside,
    SecondModel,
    SecondModelRules,
    SecondRole,
)
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.lowering import PostReceive, Run, lower, runs_of, unfinished
from megatron_zb.schedules.passes import Message, Pass, PassKind
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule
from megatron_zb.schedules.simulator import simulate

F, B, W, BW = PassKind.F, PassKind.B, PassKind.W, PassKind.BW
ENCODER, AHEAD, TEACHER = SecondRole.ENCODER, SecondRole.AHEAD, SecondRole.TEACHER

P, M = 4, 6
COSTS = Costs.uniform(pipeline_size=P, forward=1.0, backward=1.0, weight=1.0, p2p=0.05)

CUT = SecondModel(ENCODER, forward=0.1, backward=0.2)
COPIES = replace(CUT, copies=True, pieces=2, lengths=(1.0, 0.0, 2.0, 1.0, 0.0, 1.0))
FROZEN = SecondModel(ENCODER, forward=0.3, output=0.1)
SPLIT = SecondModel(ENCODER, forward=0.1, backward=0.1, weight=0.1, activation=0.2)
NEXT = SecondModel(AHEAD, forward=(0.1, 0.2, 0.3, 0.2), output=0.1)
LOSS = SecondModel(TEACHER, forward=0.5, pieces=2)
EACH = {"cut": CUT, "copies": COPIES, "frozen": FROZEN, "split": SPLIT, "next": NEXT, "loss": LOSS}


def beside(name: str, second: SecondModel, **choices: Any) -> Schedule:
    sizes: dict[str, Any] = {"pipeline_size": P, "num_microbatches": M, "costs": COSTS}
    return build(name, **{**sizes, **choices}, second_model=second)


def rules_of(schedule: Schedule) -> SecondModelRules:
    assert isinstance(schedule.rules, SecondModelRules)
    return schedule.rules


def times_of(schedule: Schedule, costs: Costs) -> dict[Pass, tuple[float, float]]:
    timeline = simulate(schedule, costs)
    found = {}
    for rank, passes in enumerate(schedule.ranks):
        for p, start, end in zip(passes, timeline.start[rank], timeline.end[rank], strict=True):
            found[p] = (start, end)
            if p.kind is BW:
                found[p._replace(kind=B)] = (start, end)
    return found


# --- what an order is


@pytest.mark.parametrize("which", EACH)
@pytest.mark.parametrize("name", ["v-half", "1f1b"])
def test_both_models_are_in_order(name: str, which: str) -> None:
    second = EACH[which]
    with briefly():
        schedule = beside(name, second).validate()
    assert unfinished(lower(schedule)) == {}
    rules, times = rules_of(schedule), times_of(schedule, COSTS)
    assert schedule.report is not None
    assert schedule.report.gap >= -1e-9
    assert schedule.report.makespan == pytest.approx(simulate(schedule, COSTS).makespan)
    last, rank_of = rules.trained.num_stages - 1, schedule.placement.rank_of
    assert len(rules.served) == (4 if second.lengths else M)
    for i, j in enumerate(rules.served):
        unit = M + i
        assert rules.microbatch_of(unit) == j
        assert rules.routes is not None
        route = rules.routes[unit]
        for a, b in pairwise(route):
            message = 0.05 if rank_of[a] != rank_of[b] else 0.0
            assert times[Pass(F, b, unit)][0] >= times[Pass(F, a, unit)][1] + message - 1e-9
        made = times[Pass(F, route[-1], unit)][1]
        message = 0.05 if rank_of[route[-1]] != rank_of[0] else 0.0
        if second.role is ENCODER:
            assert times[Pass(F, 0, j)][0] >= made + message - 1e-9
        if second.role is TEACHER:
            assert rank_of[route[-1]] == rank_of[last]
            assert times[Pass(F, last, j)][0] >= made - 1e-9
        if not second.is_frozen:
            gradient = times[Pass(B, 0, j)][1]
            assert times[Pass(B, route[-1], unit)][0] >= gradient + message - 1e-9


@pytest.mark.parametrize("which", EACH)
def test_the_seconds_of_each_rank_are_those_that_were_given(which: str) -> None:
    second = EACH[which]
    with briefly():
        schedule = beside("v-half", second)
    timeline, rules = simulate(schedule, COSTS), rules_of(schedule)
    spent = [
        sum(
            end - start
            for p, start, end in zip(passes, starts, ends, strict=True)
            if rules.is_second(p.stage)
        )
        for passes, starts, ends in zip(schedule.ranks, timeline.start, timeline.end, strict=True)
    ]
    lengths = sum(second.length(j) for j in range(M))
    each = second.forward if isinstance(second.forward, tuple) else (second.forward,) * P
    assert isinstance(second.backward, float) and isinstance(second.weight, float)
    whole = [f + second.backward + second.weight for f in each]
    assert sum(spent) == pytest.approx(lengths * sum(whole))
    if not second.copies:
        assert spent == pytest.approx([lengths * of_rank for of_rank in whole])


@pytest.mark.parametrize("which", EACH)
def test_a_table_is_read_back_with_its_second_model(which: str) -> None:
    request: dict[str, Any] = {"pipeline_size": P, "num_microbatches": M, "costs": COSTS}
    request["second_model"] = EACH[which]
    with briefly():
        schedule = build("v-half", **request)
    again = catalog.from_table("v-half", interchange.to_csv(schedule), request)
    assert (again.ranks, again.rules) == (schedule.ranks, schedule.rules)
    assert again.placement == schedule.placement
    other = {**request, "second_model": replace(LOSS, pieces=3)}
    with pytest.raises(UsageError):
        catalog.from_table("v-half", interchange.to_csv(schedule), other)


def test_outputs_and_gradients_are_messages() -> None:
    """Copies on each rank: unit M is on rank 0, unit M + 1, of microbatch 2, on rank 1."""
    with briefly():
        schedule = beside("v-half", COPIES)
    program, stages = lower(schedule), rules_of(schedule).trained.num_stages
    received = {at.message for rank in program.ranks for at in rank if isinstance(at, PostReceive)}
    there, back = Message(False, 0, M + 1), Message(True, stages + 3, 2)
    assert {there, back} <= received
    assert Message(False, 0, M) not in received
    of_rank = {run.work: run for rank in program.ranks for run in runs_of(rank)}
    first = of_rank[Pass(F, 0, 0)]
    assert isinstance(first, Run)
    assert first.reads == (Message(False, 0, M),), "handed over on the rank itself"
    assert of_rank[Pass(F, stages + 1, M)].makes_local
    assert of_rank[Pass(F, 0, 2)].reads == (there,)
    assert of_rank[Pass(BW, stages + 3, M + 1)].reads == (back,)


def moved(schedule: Schedule, p: Pass, before: Pass) -> Schedule:
    """Return a schedule in which a pass stands right before another one of its rank."""
    ranks = []
    for rank in schedule.ranks:
        passes = [it for it in rank if it != p or before not in rank]
        if len(passes) < len(rank):
            passes.insert(passes.index(before), p)
        ranks.append(tuple(passes))
    return replace(schedule, ranks=tuple(ranks))


@pytest.fixture(scope="module")
def known() -> dict[str, Schedule]:
    with briefly():
        return {which: beside("v-half", EACH[which]) for which in ("cut", "copies", "loss")}


def test_the_first_stage_needs_the_output(known: dict[str, Schedule]) -> None:
    schedule = known["cut"]
    last = schedule.placement.num_stages - 1
    words = "F of stage 0, microbatch 0 needs the encoder's output of microbatch 0"
    with pytest.raises(InvalidSchedule, match=words):
        moved(schedule, Pass(F, 0, 0), Pass(F, last, M)).validate()


def test_the_encoder_needs_the_gradient(known: dict[str, Schedule]) -> None:
    schedule = known["cut"]
    last = schedule.placement.num_stages - 1
    back = Pass(BW, last, M)
    (before,) = (p for p in schedule.ranks[0] if p.kind in (B, BW) and p[1:] == (0, 0))
    words = "of the encoder's stage 11, microbatch 0 needs the gradient of the encoder's output"
    with pytest.raises(InvalidSchedule, match=words):
        moved(schedule, back, before).validate()


def test_the_loss_needs_the_output_of_the_teacher(known: dict[str, Schedule]) -> None:
    schedule = known["loss"]
    last = schedule.placement.num_stages - 1
    stage = rules_of(schedule).trained.num_stages - 1
    words = f"F of stage {stage}, microbatch 0 needs the teacher's output of microbatch 0"
    assert schedule.placement.rank_of[stage] == schedule.placement.rank_of[last]
    with pytest.raises(InvalidSchedule, match=words):
        moved(schedule, Pass(F, stage, 0), Pass(F, last, M)).validate()


def test_a_circle_between_ranks_names_the_model(known: dict[str, Schedule]) -> None:
    """The F of the first stage waits for rank 1, and that for what stands behind this F."""
    schedule = known["copies"]
    rules = rules_of(schedule)
    pieces = {p for rank in schedule.ranks for p in rank if rules.is_second(p.stage)}
    late = sorted(p for p in pieces if p.microbatch == M + 1 and p.kind is F)
    ranks = [*schedule.ranks]
    ranks[1] = (*(p for p in ranks[1] if p not in late and p.microbatch != M + 1), *late)
    ranks[1] += tuple(p for p in schedule.ranks[1] if p.microbatch == M + 1 and p.kind is not F)
    words = "progress.*0F2, which needs the encoder's output of microbatch 2"
    with pytest.raises(InvalidSchedule, match=words):
        replace(schedule, ranks=tuple(ranks)).validate()


# --- memory


def test_activations_and_outputs_count() -> None:
    with briefly():
        alone = build("v-half", pipeline_size=P, num_microbatches=M, costs=COSTS)
        trained = beside("v-half", SPLIT)
        kept = beside("v-half", NEXT)
    peaks = simulate(alone, COSTS).peak_memory
    with_encoder = simulate(trained, COSTS).peak_memory
    assert max(with_encoder) > max(peaks)
    assert max(with_encoder) <= max(peaks) + M * SPLIT.activation + 1e-9
    last = simulate(kept, COSTS).memory_steps(0)[-1].after
    assert last == pytest.approx(M * NEXT.output), "all outputs wait for the next step"
    timeline = simulate(trained, COSTS)
    assert all(abs(timeline.memory_steps(rank)[-1].after) < 1e-9 for rank in range(P))
    assert max(timeline.peak_activation) <= 3.0 + 1e-9, "microbatches of the trained model"


def test_a_limit_is_kept_by_both_together() -> None:
    second = replace(CUT, activation=0.1)
    with briefly():
        schedule = beside("v-half", second, memory_limit=0.75)
    limit = 0.75 * COSTS.one_f_one_b_peak()
    assert max(simulate(schedule, COSTS).peak_memory) <= limit * (1 + 1e-9)
    with briefly(), pytest.raises(UsageError, match="cannot keep the memory limit"):
        beside("v-half", replace(CUT, activation=2.0), memory_limit=0.5)


# --- how long it takes


def in_bubbles(second: SecondModel, p: int, m: int, seconds: float) -> float:
    """The share of a second model's seconds per rank that do not make the step longer."""
    costs = Costs.uniform(pipeline_size=p, forward=1.0, backward=1.0, weight=1.0)
    sizes: dict[str, Any] = {"pipeline_size": p, "num_microbatches": m, "costs": costs}
    steps = [build("v-half", **sizes, second_model=it).report for it in (None, second)]
    alone, both = (report.makespan for report in steps if report is not None)
    return 1.0 - (both - alone) / seconds


def test_an_encoder_of_the_next_batch_is_in_the_bubbles() -> None:
    seconds = 0.2 * M
    assert in_bubbles(SecondModel(AHEAD, forward=0.2), P, M, seconds) >= 0.95


def test_an_encoder_of_its_own_step_is_partly_in_the_bubbles() -> None:
    seconds = 0.3 * M
    assert in_bubbles(CUT, P, M, seconds) >= 0.1


@pytest.mark.long
@pytest.mark.parametrize(
    ("share", "copies", "least"), [(0.25, False, 1.0), (0.5, False, 0.87), (1.0, True, 0.63)]
)
def test_of_the_next_batch_at_full_size(share: float, copies: bool, least: float) -> None:
    seconds = 8.5 * share
    second = SecondModel(AHEAD, forward=seconds / 16, copies=copies, pieces=4 if copies else 1)
    assert in_bubbles(second, 8, 16, seconds) >= least


@pytest.mark.long
@pytest.mark.parametrize(("share", "least"), [(0.25, 0.66), (0.5, 0.5)])
def test_of_its_own_step_at_full_size(share: float, least: float) -> None:
    seconds = 8.5 * share
    second = SecondModel(ENCODER, forward=seconds / 48, backward=seconds / 24)
    assert in_bubbles(second, 8, 16, seconds) >= least


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_teacher_fills_the_pipeline(name: str) -> None:
    """Megatron's order runs all of its forwards first, with a ramp of their own."""
    costs = Costs.uniform(pipeline_size=P, forward=1.0, backward=1.0, weight=1.0)
    alone = build(name, pipeline_size=P, num_microbatches=M, costs=costs)
    both = beside(name, SecondModel(TEACHER, forward=1.0), costs=costs)
    assert alone.report is not None and both.report is not None
    first = alone.report.makespan + (M + P - 1) * 1.0
    assert both.report.makespan < first - 1.0
    ramp = (P - 1) * (3.0 if name == "1f1b" else 1.0)
    assert both.report.makespan <= 1.02 * (M * 4.0 + ramp)


@pytest.mark.long
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-zb"])
def test_a_teacher_at_full_size(name: str) -> None:
    costs = Costs.uniform(pipeline_size=8, forward=1.0, backward=1.0, weight=1.0)
    sizes: dict[str, Any] = {"pipeline_size": 8, "num_microbatches": 16, "costs": costs}
    report = build(name, **sizes, second_model=SecondModel(TEACHER, forward=1.0)).report
    assert report is not None
    assert report.gap <= 0.02


# --- what is refused


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SecondModel(ENCODER, forward=0.0), "encoder: forward is 0.0: give positive"),
        (lambda: SecondModel(ENCODER, forward=-1.0), "encoder: forward is -1.0"),
        (lambda: SecondModel(ENCODER, 1.0, pieces=0), "encoder: 0 pieces on each rank"),
        (lambda: SecondModel(ENCODER, 1.0, lengths=(0.0,)), "no microbatch has a length"),
        (lambda: SecondModel(TEACHER, 1.0, 1.0), "teacher: its weights must not change"),
        (lambda: SecondModel(AHEAD, 1.0, 1.0), "encoder: its weights must not change"),
        (lambda: SecondModel(ENCODER, 1.0, activation=1.0), "encoder: it is frozen, and keeps"),
        (lambda: beside("1f1b", replace(CUT, lengths=(1.0,))), "1 lengths for 6 microbatches"),
        (lambda: beside("1f1b", replace(CUT, forward=(1.0,))), "forward has 1 numbers for 4 ranks"),
    ],
)
def test_wrong_models_are_refused_in_a_sentence(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


@pytest.mark.parametrize(
    "choices",
    [
        {"slices": 2},
        {"back_to_back": True},
        {"adapters": Adapters.equal(1, microbatches=M)},
        {"costs": COSTS.having(Vocabulary(output=0.1, weight=0.1))},
        {"costs": COSTS.having(Communication(forward=0.1, backward=0.1))},
        {"costs": COSTS.having(Recomputation(kept_input=0.05))},
        {"costs": COSTS.having(Offload(seconds=0.1))},
    ],
)
def test_what_a_second_model_cannot_be_combined_with_is_refused(choices: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="second model"):
        beside("v-half", CUT, **choices)


def test_megatrons_ranks_are_those_of_the_trained_model(known: dict[str, Schedule]) -> None:
    placement = known["copies"].placement
    assert isinstance(placement, PlacementBeside)
    assert placement.mirrored == placement.trained.mirrored
    assert placement.rank_of[-1] == P - 1
