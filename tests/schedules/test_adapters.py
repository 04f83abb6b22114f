"""Several adapters in one pipeline: orders, idle time beside published formulas, and the bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from brief_searches import briefly
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zb.errors import UsageError
from megatron_zb.schedules import build, catalog, interchange
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features import recomputation
from megatron_zb.schedules.features.adapters import Adapter, AdapterRules, Adapters
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.lowering import lower, unfinished
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule
from megatron_zb.schedules.search import hill_climbing, kernels
from megatron_zb.schedules.simulator import simulate

F, B, W, BW, U = PassKind.F, PassKind.B, PassKind.W, PassKind.BW, PassKind.U

WEIGHT = UPDATE = 0.02
"""Seconds of W of a frozen base, which has products of small rank alone, and of an update."""

MIX = Adapters(
    (Adapter("a", 4, 3), Adapter("b", 6, 2), Adapter("c", 2, 4, (2.0, 0.5)), Adapter("d", 3)),
    UPDATE,
)


def frozen_base(p: int) -> Costs:
    return Costs.uniform(pipeline_size=p, forward=1.0, backward=1.0, weight=WEIGHT)


def trained(name: str, p: int, adapters: Adapters, **choices: Any) -> Schedule:
    choices.setdefault("costs", frozen_base(p))
    return build(name, pipeline_size=p, adapters=adapters, **choices)


def idle(schedule: Schedule, adapters: Adapters) -> float:
    """The share of the step in which the ranks wait; all have the same work."""
    assert schedule.report is not None
    updates = UPDATE * sum(it.steps for it in adapters.each)
    work = adapters.num_units * (2.0 + WEIGHT) + updates
    return 1.0 - work / schedule.report.makespan


# --- how long it takes

ALONE = Adapters.equal(1, microbatches=8, update=UPDATE)
WINDOW = Adapters.equal(8, microbatches=8, update=UPDATE)
STREAM = Adapters.equal(4, microbatches=8, steps=4, update=UPDATE)
FEW = Adapters.equal(2, microbatches=4, steps=4, update=UPDATE)


@pytest.mark.parametrize(
    ("name", "adapters", "most"),
    [
        ("1f1b", ALONE, 7 / 15),  # what each of them idles alone
        ("1f1b", WINDOW, 7 / 71),
        ("v-zb", WINDOW, 0.0503),
        ("1f1b", STREAM, 7 / 135),
        ("v-zb", STREAM, 0.0258),
        ("v-half", STREAM, 0.0493),
        ("interleaved", STREAM, 0.0267),
        ("zb-h1", STREAM, 0.0509),
    ],
)
def test_adapters_fill_the_bubbles_of_each_other(
    name: str, adapters: Adapters, most: float
) -> None:
    schedule = trained(name, 8, adapters)
    assert idle(schedule, adapters) <= most
    peak = max(simulate(schedule, frozen_base(8)).peak_memory)
    promised = catalog.family(name).peak_microbatches(8, adapters.num_units)
    assert peak <= promised * (1 + 1e-9), "no more memory than a step of one training takes"


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-zb", "dualpipe-v"])
def test_where_others_are_too_few_a_step_is_near_the_bound(name: str) -> None:
    """Two adapters of 4 microbatches on 8 ranks: 4 units between two steps, where 7 are needed."""
    schedule = trained(name, 8, FEW)
    assert schedule.report is not None
    assert schedule.report.gap <= 0.01


@pytest.mark.parametrize("name", ["1f1b", "v-zb", "zb-h1"])
def test_the_bound_is_met_by_adapters_of_other_batches(name: str) -> None:
    adapters = Adapters(
        (Adapter("a", 4, 3), Adapter("b", 6, 2), Adapter("c", 2, 4), Adapter("d", 8, 2)), UPDATE
    )
    schedule = trained(name, 4, adapters)
    assert schedule.report is not None
    assert schedule.report.gap <= 0.004


@pytest.mark.parametrize("steps", [2, 5])
def test_the_bound_of_one_adapter_is_that_of_its_steps_with_a_flush(steps: int) -> None:
    """With as many microbatches as ranks, 1F1B's step takes what the bound says."""
    p = 4
    adapters = Adapters.equal(1, microbatches=p, steps=steps, update=UPDATE)
    schedule = trained(
        "1f1b",
        p,
        adapters,
        costs=Costs.uniform(pipeline_size=p, forward=1.0, backward=1.0, weight=0.0),
    )
    assert schedule.report is not None
    step = 2.0 * (2 * p - 1) + UPDATE
    assert schedule.report.makespan == pytest.approx(steps * step)
    assert schedule.report.lower_bound == pytest.approx(steps * step)


@settings(max_examples=40)
@given(data=st.data())
def test_no_schedule_is_faster_than_the_bound(data: st.DataObject) -> None:
    numbers = st.integers(1, 4)
    each = data.draw(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=3))
    adapters = Adapters(
        tuple(Adapter(str(i), m, steps) for i, (m, steps) in enumerate(each)),
        data.draw(st.sampled_from([0.0, 0.5])),
    )
    p = data.draw(st.integers(2, 4))
    name = data.draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h2", "v-half", "wave"]))
    seconds = st.sampled_from([0.25, 1.0, 2.0])
    costs = Costs.of_slices(
        pipeline_size=p,
        forward=[data.draw(seconds) for _ in range(2 * p)],
        backward=[data.draw(seconds) for _ in range(2 * p)],
        weight=[data.draw(st.sampled_from([0.0, 0.02, 1.0])) for _ in range(2 * p)],
        p2p=data.draw(st.sampled_from([0.0, 0.5])),
    )
    with briefly():
        schedule = trained(name, p, adapters, costs=costs)
    assert schedule.report is not None
    assert schedule.report.gap >= -1e-9


# --- what an order is


@pytest.mark.parametrize("name", catalog.names())
def test_every_schedule_takes_adapters(name: str) -> None:
    with briefly():
        schedule = trained(name, 4, MIX).validate()
    assert unfinished(lower(schedule)) == {}
    rules = schedule.rules
    assert isinstance(rules, AdapterRules)
    for stage, rank in enumerate(schedule.placement.rank_of):
        own = [p for p in schedule.ranks[rank] if p.stage == stage]
        for adapter in MIX.each:
            of_adapter = [p for p in own if rules.at(p.microbatch)[0] is adapter]
            steps = [rules.at(p.microbatch)[1] for p in of_adapter]
            assert steps == sorted(steps), "no step begins before the update of the one before"
            updates = [i for i, p in enumerate(of_adapter) if p.kind is U]
            assert len(updates) == adapter.steps and updates[-1] == len(of_adapter) - 1
            assert [steps[i] for i in updates] == [*range(adapter.steps)]


@pytest.mark.parametrize("name", ["1f1b", "v-half"])
def test_a_table_is_read_back_with_its_adapters(name: str) -> None:
    request: dict[str, Any] = {"pipeline_size": 4, "adapters": MIX, "costs": frozen_base(4)}
    schedule = build(name, **request)
    again = catalog.from_table(name, interchange.to_csv(schedule), request)
    assert (again.ranks, again.rules) == (schedule.ranks, schedule.rules)


def test_passes_are_told_by_their_adapter() -> None:
    rules = AdapterRules.of(MIX, 4)
    adapter, step, microbatch = rules.at(20)
    assert rules.pass_in_words(Pass(F, 1, 20)) == (
        f"F of stage 1, step {step} of adapter {adapter.name}, microbatch {microbatch}"
    )
    schedule = trained("1f1b", 4, MIX)
    first = tuple(p for p in schedule.ranks[0] if p.kind is not U)
    with pytest.raises(InvalidSchedule, match="update of step 0 of adapter c has not run yet"):
        replace(schedule, ranks=(first, *schedule.ranks[1:])).validate()


def test_steps_of_equal_adapters_take_turns() -> None:
    assert [turn.adapter for turn in STREAM.turns(8)] == [0, 1, 2, 3] * 4
    assert [turn.step for turn in STREAM.turns(8)] == [t for t in range(4) for _ in range(4)]


def test_what_takes_longest_one_after_another_comes_first() -> None:
    """Else the many small steps of ``c`` would be left over, with nothing between them."""
    order = [MIX.each[turn.adapter].name for turn in MIX.turns(4)]
    assert order[:3] == ["a", "c", "b"]
    last = max(i for i, name in enumerate(order) if name == "c")
    assert last >= len(order) - 2


@pytest.mark.long
@pytest.mark.parametrize("feature", [Recomputation(kept_input=0.05), Offload(seconds=0.1)])
def test_activations_are_dropped_under_a_limit(feature: Any) -> None:
    adapters = Adapters.equal(4, microbatches=4, steps=2, update=UPDATE)
    costs = frozen_base(4).having(feature)
    schedule = trained("v-zb", 4, adapters, costs=costs, memory_limit=0.5).validate()
    assert schedule.recomputed or schedule.offloaded
    assert unfinished(lower(schedule)) == {}
    peak = max(simulate(schedule, costs).peak_memory)
    assert peak <= 0.5 * costs.one_f_one_b_peak() * (1 + 1e-9)


def test_recomputation_and_updates_have_numbers_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain Python tells an index that is out of range, where compiled loops read what is there."""
    for module in (hill_climbing, recomputation):
        monkeypatch.setattr(module, "engine", lambda passes: kernels.Plain())
    adapters = Adapters((Adapter("a", 2, 2), Adapter("b", 2)), UPDATE)
    costs = frozen_base(2).having(Recomputation(kept_input=0.05))
    with briefly():
        monkeypatch.setattr(recomputation, "SECONDS", 0.01)
        schedule = trained("v-half", 2, adapters, costs=costs, memory_limit=0.5)
    assert schedule.validate().recomputed


# --- what is refused


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Adapter("a", 0), "adapter a: 0 microbatches: give 1 or more"),
        (lambda: Adapter("a", 1, 0), "adapter a: 0 steps: give 1 or more"),
        (lambda: Adapter("a", 2, 1, (1.0,)), "adapter a: 1 lengths for 2 microbatches"),
        (lambda: Adapter("a", 1, 1, (0.0,)), r"adapter a: lengths are \[0.0\]"),
        (lambda: Adapters(()), "adapters: none is given"),
        (lambda: Adapters((Adapter("a", 1), Adapter("a", 2))), "two are called a"),
        (lambda: Adapters.equal(1, microbatches=1, update=-1.0), "an update takes -1.0 s"),
        (lambda: trained("1f1b", 4, MIX, num_microbatches=5), "5 microbatches were asked for"),
        (lambda: build("1f1b", pipeline_size=4), "give the number of microbatches, or adapters"),
        (
            lambda: trained("1f1b", 4, MIX, costs=frozen_base(4).of_lengths([1.0] * 35)),
            "give them with each adapter",
        ),
    ],
)
def test_wrong_adapters_are_refused_in_a_sentence(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


@pytest.mark.parametrize(
    "choices",
    [
        {"slices": 2},
        {"costs": frozen_base(4).having(Vocabulary(output=0.1, weight=0.1))},
        {"costs": frozen_base(4).having(Communication(forward=0.1, backward=0.1))},
    ],
)
def test_what_adapters_cannot_be_combined_with_is_refused(choices: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="adapters"):
        trained("v-half", 4, MIX, **choices)
