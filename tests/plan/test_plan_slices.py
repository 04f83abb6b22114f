"""Token slices in plan: their costs, their memory, and where they are proposed."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from brief_searches import briefly
from small_models import a100, load, small

from megatron_zb import schedules
from megatron_zb.cli import main as cli
from megatron_zb.errors import UsageError
from megatron_zb.job import settings
from megatron_zb.megatron_core.refusals import Asked, of_arguments, refusals
from megatron_zb.megatron_lm import argument_table
from megatron_zb.parsing import GIB
from megatron_zb.plan import byte_counts
from megatron_zb.plan.features.catalog import asking
from megatron_zb.plan.features.recomputation import PlanRecomputation
from megatron_zb.plan.features.slices import PlanSlices
from megatron_zb.plan.features.vocabulary import CountedShard, PlanVocabulary
from megatron_zb.plan.model_flags import model_flags
from megatron_zb.plan.operators import attention_flops
from megatron_zb.plan.prediction import (
    IterationSettings,
    ordered,
    peak_of,
    predict,
)
from megatron_zb.plan.reasons import _said
from megatron_zb.plan.request import read_training
from megatron_zb.plan.rows import Prediction
from megatron_zb.plan.search import Plan, _Looking, _Tried, search, searched_by_auto
from megatron_zb.plan.settings import CountedSettings, EvenSplit, PlanJob, estimated_memory
from megatron_zb.plan.stages import StageWorkload, cut_into_stages
from megatron_zb.plan.strategy import (
    MEGATRON_CONTEXT,
    MEGATRON_FULL,
    MEGATRON_OWN,
    Choices,
    ScheduleCandidate,
    Strategy,
    candidates_of,
    strategies,
)
from megatron_zb.plan.table import as_json, flags
from megatron_zb.schedules import PassKind
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.slices import Slicing, slicing_of
from megatron_zb.schedules.placement import v_shape

pytestmark = pytest.mark.usefixtures("brief_searches")

LONG = small(sequence_length=32768, query_groups=4)
ONE = Choices(tensor=(1,), pipeline=(4,), microbatch=(1,))
SLICES = PlanSlices(counts=(1, 4, 16))
EIGHT = PlanSlices(counts=(8,))


def of(name: str) -> ScheduleCandidate:
    (found,) = PlanSlices().of_these(candidates_of([name])[2:], named=True)
    return found


def slicing(row: Prediction) -> Slicing | None:
    return None if row.schedule is None else slicing_of(row.schedule)


def cut(name: str, **strategy: Any) -> StageWorkload:
    staged = cut_into_stages(load(LONG, **strategy), of(name), None)
    assert staged is not None
    return staged


def plan(
    gib_per_gpu: float,
    slices: PlanSlices = SLICES,
    choices: Choices = ONE,
    batch: int = 4,
    vocabulary: str = "off",
) -> Plan:
    job = PlanJob(LONG, a100(), 4, gib_per_gpu * GIB, batch, 32768, choices)
    job = replace(job, features=asking(slices, PlanVocabulary(vocabulary)))
    candidates = slices.candidates(candidates_of(["zb-h1", "v-half"]), named=True)
    with briefly():
        return search(job, candidates, tries=2)


@pytest.mark.parametrize("name", ["1f1b", "v-half", "zb-h1"])
def test_time_and_memory_are_those_that_the_schedule_has_for_the_same_costs(name: str) -> None:
    staged = cut(name, slices=8)
    row = ordered(staged, of(name), IterationSettings(3), None)
    costs = staged.costs(blocking=False)
    schedule = schedules.build(
        name, pipeline_size=4, num_microbatches=3, costs=costs, slices=staged.units.cut
    )
    timeline = schedules.simulate(schedule, costs)
    assert row.predicted().pipeline_seconds == timeline.makespan
    last = staged.placement.rank_of[-1]  # W of the output layer keeps more than costs can have
    needed = []
    for rank, passes in enumerate(schedule.ranks):
        held = sum(peak_of(staged.units.passes(passes), staged.held_by_units))
        needed.append(held + staged.fixed(rank))
        assert rank == last or held == pytest.approx(timeline.peak_memory[rank])
    assert row.memory.total == pytest.approx(max(needed))


def test_what_slices_add_to_a_layer_is_what_a_hand_counts() -> None:
    whole, cut_up = load(LONG), load(LONG, slices=8)
    device = whole.device
    more = replace(cut_up.layer(0) + whole.layer(0) * -1)
    kernel, byte = device.kernels.seconds, 1 / device.memory_bandwidth.reached
    elements = 32768 * 2 * 4 * 64  # keys and values of 4 groups of 64
    weights = 2 * 1024 * (16 + 4) * 64 + 2 * 1024 * 4096
    products, scores, others = 4, 1, (8, 14)
    forward = 7 * (products + scores + others[0]) * kernel + 4 * elements * byte
    added = 18 * elements * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8) / 8 * byte
    assert more.forward == pytest.approx(forward)
    assert more.backward == pytest.approx(7 * (products + scores + others[1]) * kernel + added)
    assert more.weight == pytest.approx(7 * (products * kernel + 8 * weights * byte))
    link = device.messages.between_nodes
    assert cut_up.message() == whole.message() / 8
    assert cut_up.latency(False) - whole.latency(False) == pytest.approx(7 * link.latency)
    assert byte_counts.logits(cut_up) == byte_counts.logits(whole) / 8
    growing = cut("zb-h1", slices=8).load.slicing
    assert growing is not None
    seconds = 8 * attention_flops(LONG, 32768, 32768) / 2 / device.attention.reached
    ends = cut_up.embedding().forward + cut_up.output().forward
    whole_forward = 8 * cut_up.layer(0).forward + ends
    assert growing.attention == pytest.approx(seconds / whole_forward)


def test_what_ranks_of_a_slice_gather_and_scatter_is_what_a_hand_counts() -> None:
    ring, shared = load(LONG, context=4), load(LONG, context=4, slices=8)
    kernel, byte = ring.device.kernels.seconds, 1 / ring.device.memory_bandwidth.reached
    link, elements = ring.device.collectives.in_node, 32768 * 2 * 4 * 64
    assert ring.layer(0).forward < load(LONG).layer(0).forward / 3  # the ring is hidden
    more = shared.layer(0) + ring.layer(0) * -1
    received, own = elements / 16 * 3 / 4, 4 * 32768 / 4 * 1024
    forward = (7 * (4 + 1 + 8) + 8 * 7) * kernel + (6 * elements + own) * byte
    assert more.forward == pytest.approx(forward + 16 * link.seconds(2 * received))
    moved = 18 * elements * sum(i + (i + 1) + 1 / 8 for i in range(8)) / 8
    backward = (7 * (4 + 1 + 14) + 8 * 8) * kernel + (moved + 12 * elements + own) * byte
    assert more.backward == pytest.approx(backward + 16 * link.seconds(4 * received))
    alone = load(LONG, slices=8).layer(0) + load(LONG).layer(0) * -1
    assert more.weight == pytest.approx(alone.weight)
    assert shared.message() == ring.message() / 8


def test_what_slices_add_to_a_shard_is_what_a_hand_counts() -> None:
    whole, cut_up = (CountedShard(load(LONG, pipeline=4, slices=n)) for n in (1, 8))
    device, rows = whole.load.device, LONG.vocabulary / 4
    kernel, byte = device.kernels.seconds, 1 / device.memory_bandwidth.reached
    assert cut_up.output - whole.output == pytest.approx(7 * 16 * kernel)
    weight = 7 * 8 * kernel + 7 * 8 * rows * LONG.hidden_size * byte  # read and written once more
    assert cut_up.weight - whole.weight == pytest.approx(weight)
    assert cut_up.held == whole.held  # of a microbatch
    for is_last in (False, True):
        assert cut_up.logits(is_last=is_last) == pytest.approx(whole.logits(is_last=is_last) / 8)
    assert cut_up.crowding(3, 0) == pytest.approx(whole.crowding(3, 0))


def test_slices_are_planned_with_a_sharded_vocabulary() -> None:
    found = plan(20, PlanSlices(counts=(4,)), vocabulary="on")
    rows = {row.candidate: row for row in found.ranked}
    row = rows["v-half sliced"]
    made = slicing(row)
    assert row.runs.vocabulary_parallel and made is not None and row.schedule is not None
    kinds = {p.kind for rank in row.schedule.ranks for p in rank}
    assert {*map(PassKind, "OPVEG")} <= kinds
    given = " ".join(flags(row, 4)).split()
    assert given[given.index("--pipeline-vocabulary") + 1] == "on"
    parser = settings.add_megatron_lm_arguments(argument_table.parser_of("0.16"))
    args = parser.parse_args([*model_flags(LONG), *given])
    assert args.pipeline_slices.slices == made.slices == 4
    assert [*refusals(of_arguments(args))] == []
    words = f"v-half with --pipeline-slices {made} and --pipeline-vocabulary on"
    assert _said(row) == words


def test_slices_of_equal_time_take_equally_long() -> None:
    staged = cut("zb-h1", slices=4, by_time=True)
    equal = staged.load.slicing
    assert equal is not None
    lengths = equal.lengths
    assert lengths[0] > 1.5 * lengths[-1]
    assert sum(lengths) == 32768
    assert all(length % 16 == 0 for length in lengths)
    costs = staged.costs(blocking=False)
    rows = [costs.scaled(scale) for scale in equal.scales]
    times = [
        sum(row.seconds[PassKind.F]) + sum(row.seconds[PassKind.B]) + sum(row.seconds[PassKind.W])
        for row in rows
    ]
    assert max(times) < 1.01 * min(times)
    assert staged.load.slowest_slice == pytest.approx(1 / 4, rel=0.01)
    share = max(lengths) / 32768
    assert byte_counts.logits(staged.load) == pytest.approx(share * byte_counts.logits(load(LONG)))


def test_prefixes_and_full_recomputation_keep_keys_and_values() -> None:
    keys = 2 * 32768 * 2 * 4 * 64
    staged = cut("1f1b", slices=8, recompute="full")
    assert staged.kept(0) == keys * (3 * 2 + 5)
    assert cut("1f1b").kept(0) == 0
    inputs = 2 * 32768 * 1024
    assert staged.held[0].activation == 2 * (inputs + keys)
    assert cut("1f1b", recompute="full").held[0].activation == 2 * inputs
    shared = cut("1f1b", slices=8, context=4, recompute="full")
    assert shared.kept(0) == keys * (3 * 2 + 6)
    assert shared.held[0].activation == 2 * (inputs / 4 + keys)
    more = cut("zb-h1", slices=8, context=4).held[0].activation
    more -= cut("zb-h1", context=4).held[0].activation
    assert more == 2 * (keys * 3 / 4 + inputs / 4)  # outputs of attention are as wide as inputs


def test_many_microbatches_are_continued_from_the_first_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds() -> Prediction:
        return predict(cut("1f1b", slices=8), of("1f1b"), IterationSettings(32), None)

    whole = seconds()
    monkeypatch.setattr("megatron_zb.plan.prediction._MOST_PASSES", 100)
    few = seconds()
    assert few.schedule is not None
    assert few.schedule.num_microbatches == 4 * 8
    assert few.seconds == pytest.approx(whole.seconds, rel=1e-6)


def test_no_order_is_faster_than_the_bound_of_a_setting() -> None:
    row = predict(cut("v-half", slices=8), of("v-half"), IterationSettings(3), None)
    bound = PlanJob(LONG, a100(), 4, 80 * GIB, 3, 32768, ONE).optimistic(cut("v-half", slices=8), 3)
    assert row.tokens_per_gpu <= bound * (1 + 1e-9) < 1.5 * row.tokens_per_gpu


def test_slices_are_proposed_where_few_microbatches_do_not_fit() -> None:
    found = plan(16.5)
    first, rows = found.ranked[0], {row.candidate: row for row in found.ranked}
    assert first.candidate.endswith(" sliced")
    assert all(row.megatron == name.startswith("Megatron") for name, row in rows.items())
    assert first.memory.total <= 16.5 * GIB
    assert rows[MEGATRON_FULL].load.strategy.recompute == "full"
    assert rows[MEGATRON_FULL].tokens_per_gpu < first.tokens_per_gpu
    assert found.nothing_for[MEGATRON_CONTEXT].startswith("no setting")
    assert f"--pipeline-slices {slicing(first)}" in flags(first, 4)
    said = as_json(found)
    assert len(said["ranked"][0]["slice_tokens"]) == said["ranked"][0]["slices"] > 1
    assert f"with --pipeline-slices {slicing(first)}" in said["recommendation"]


def test_few_settings_that_cannot_fit_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    split = EvenSplit(load(LONG, slices=8, recompute="full"))
    waits, runs = (estimated_memory(split, of(name), 8, None) for name in ("zb-h1", "1f1b"))
    more = split.held.for_weight - split.held.activation  # W needs what is not kept
    assert waits - runs == pytest.approx((4 + 8 - 1) / 8 * more)
    assert more > 0

    def fits_not(_: Any, setting: Any, staged: StageWorkload, found: Any, __: float) -> bool:
        found.tried.append(_Tried(setting, staged, None))
        return False

    monkeypatch.setattr("megatron_zb.plan.search._Looking._simulated", fits_not)
    monkeypatch.setattr("megatron_zb.plan.search._BUILT", 1)
    features = asking(SLICES, PlanVocabulary("off"))
    job = PlanJob(LONG, a100(), 4, 80 * GIB, 4, 32768, ONE, features=features)
    found = _Looking(CountedSettings.of(job), 2).at(of("zb-h1"))
    assert found.settings > len({str(tried.setting) for tried in found.tried}) == 1


def test_rows_of_megatrons_remedies_are_megatrons() -> None:
    usual = candidates_of(["v-half"])
    names = [one.name for one in PlanSlices(counts=(4,)).candidates(usual, named=True)]
    assert {name in MEGATRON_OWN for name in names if name.startswith("Megatron")} == {True}
    assert {MEGATRON_CONTEXT, MEGATRON_FULL, "v-half sliced"} <= {*names}
    assert "v-half sliced" not in MEGATRON_OWN


@pytest.mark.parametrize("context", [1, 2])
def test_training_takes_the_flags_of_a_plan(context: int) -> None:
    parser = settings.add_megatron_lm_arguments(argument_table.parser_of("0.16"))
    choices = replace(ONE, pipeline=(4 // context,), context=(context,))
    found = plan(20, PlanSlices(counts=(4,)), choices)
    row = next(row for row in found.ranked if slicing(row))
    args = parser.parse_args([*model_flags(LONG), *" ".join(flags(row, 4)).split()])
    assert args.pipeline_slices is not None
    assert args.context_parallel_size == context
    assert [*refusals(of_arguments(args))] == []
    args.cp_comm_type = ["p2p"]
    assert any(refusals(of_arguments(args))) is (context > 1)


def test_whole_microbatches_have_the_same_rows_beside_slices() -> None:
    both, whole = plan(40), plan(40, PlanSlices())
    assert not any(map(slicing, whole.ranked))
    found = {row.candidate: (row.seconds, row.memory.total) for row in both.ranked}
    alone = {row.candidate: (row.seconds, row.memory.total) for row in whole.ranked}
    assert alone.items() <= found.items()
    assert "slices" not in as_json(whole)["ranked"][0]


def test_narrow_models_need_longer_slices(capsys: pytest.CaptureFixture[str]) -> None:
    """At a hidden size of 4096, a rank has 4096 tokens of each."""
    sizes = "--config llama3_8b --gpus 4 --tensor 1 --pipeline 4 --context 1 --seq-length 16384"
    words = ["plan", *sizes.split(), "--global-batch-size", "4", "--slices", "8"]
    assert cli.main(words) == 2
    assert "and 4096 tokens on every rank" in capsys.readouterr().err


def test_slices_are_long_enough_on_all_ranks_that_share_them() -> None:
    slices = PlanSlices(counts=(1, 3, 8, 16), least=2048)

    def ways(choices: Choices, slices: PlanSlices, sequence: int) -> list[Strategy]:
        whole = strategies(LONG, a100(), 16, 16, choices, sequence)
        return [way for one in whole for way in (one, *slices.strategies(one, sequence))]

    choices = replace(ONE, tensor=(1, 2), pipeline=(1, 4), context=(1, 2))
    found = ways(choices, slices, 32768)
    for by_time in (False, True):
        sizes = {
            (s.tensor, s.pipeline, s.context, s.slices)
            for s in found
            if s.slices > 1 and s.by_time is by_time
        }
        assert sizes == {(1, 4, 1, 8), (1, 4, 1, 16), (2, 4, 1, 8), (1, 4, 2, 8)}
    assert all(s.slices == 1 for s in ways(replace(choices, precision="fp8"), slices, 32768))
    odd = replace(choices, tensor=(1,), pipeline=(4,))
    found = ways(odd, replace(slices, least=1), 2 * 8 * 3)
    assert {s.slices for s in found if s.context == 1} == {1, 3, 8, 16}
    assert {s.slices for s in found if s.context == 2} == {1, 3}  # a rank has two runs of a slice


@pytest.mark.parametrize(
    ("changes", "of_training", "why"),
    [
        (
            {"prediction_layers": 1, "rotary": {"base": 10000}},
            {"mtp_num_layers": 1},
            "predicts tokens of the next slice",
        ),
        ({"dropout": True}, {"hidden_dropout": 0.1}, "dropout"),
        (
            {"hybrid_layer_pattern": "M-*-M-*G", "layers": 8},
            {"hybrid_layer_pattern": "M-*-M-*G"},
            r"layers M \(Mamba-2\) and G \(gated delta\), whose state passes to the next slice",
        ),
        (
            {"post_validation": True},
            {"enable_optimizer_post_validation": True},
            "--post-validation",
        ),
    ],
)
def test_what_training_refuses_with_slices_is_not_planned(
    changes: dict[str, Any], of_training: dict[str, Any], why: str
) -> None:
    asked = Asked(args=Namespace(**of_training), choice="", facts={"pipeline_slices": True})
    assert any(refusals(asked, only=("slices",)))
    of_job = {n: changes[n] for n in ("post_validation",) if n in changes}
    model = small(**{n: value for n, value in changes.items() if n not in of_job})
    features = asking(SLICES)
    job = PlanJob(model, a100(), 4, 80 * GIB, 32, 32768, ONE, features=features, **of_job)
    with pytest.raises(UsageError, match=f"--slices: microbatches cannot be cut.*{why}"):
        search(job, candidates_of(["zb-h1"]), tries=1)


def test_slices_read_every_expert_of_a_rank() -> None:
    """8 of 64 experts visit a token; those of a rank are read, and their gradients added, by each.

    Products of a long sample hide the reading, those of a short one do not.
    """
    experts = {"experts": 64, "top_k": 8, "ffn_hidden_size": 512}
    sparse, dense = small(experts=experts), small(ffn_hidden_size=8 * 512)
    for tokens, hides in ((2**20, True), (4096, False)):
        late = []
        for model in (sparse, dense):
            cut_up, whole = (replace(load(model, slices=n), sequence=tokens) for n in (8, 1))
            late.append(cut_up.layer(0) + whole.layer(0) * -1)
        device = a100()
        kernel, byte = device.kernels.seconds, 1 / device.memory_bandwidth.reached
        here, visited, router = 64 * 2 * 1024 * 512, 8 * 2 * 1024 * 512, 64 * 1024
        product = 2 * tokens * visited / device.matrix_products.reached
        read = max(0.0, 8 * 2 * here * byte - product)
        assert (read == 0) == hides
        assert late[0].forward - late[1].forward == pytest.approx(read + 7 * 6 * kernel)
        summed = 7 * 8 * (here - visited + router) * byte
        assert late[0].weight - late[1].weight == pytest.approx(read + summed)


def test_slices_of_a_pattern_are_those_of_its_layers() -> None:
    """Attention, experts and MLPs have slices; what grows with them is that of attention."""
    experts = {"experts": 8, "top_k": 2, "ffn_hidden_size": 1024}
    changes = {"sequence_length": 32768, "query_groups": 4, "experts": experts}
    model = small(hybrid_layer_pattern="*-*E*-E-", **changes)
    staged = cut_into_stages(load(model, slices=8), of("v-half"), None)
    assert staged is not None
    assert [staged.load.scores(i).forward > 0 for i in range(8)] == [k == "*" for k in model.kinds]
    kept = byte_counts.keys_and_values(staged.load)
    for rank, stages in enumerate(staged.placement.stages_of):
        attending = sum(model.attends(i) for s in stages for i in staged.layers_of[s])
        assert staged.kept(rank) == (3 * attending + 5) * kept * (attending > 0)
    job = PlanJob(model, a100(), 4, 80 * GIB, 4, 32768, ONE, features=asking(EIGHT))
    with briefly():
        (row,) = search(job, [of("v-half")], tries=1).ranked
    assert f"--pipeline-slices {slicing(row)}" in flags(row, 4)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--slices 8 --lengths lognormal:4096:0.9", "--lengths"),
        ("--slices 64", "no sample of 8192 tokens can be cut"),
        ("--slices x", "--slices 'x' is no list"),
        ("--slices 2 --slice-tokens 0", "--slice-tokens 0 is not between"),
    ],
)
def test_slices_that_cannot_be_had_are_refused(
    words: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--config llama3_8b --gpus 8 --tensor 1 --pipeline 4".split()
    assert cli.main(["plan", *sizes, *words.split()]) == 2
    assert why in capsys.readouterr().err


def test_slices_of_a_training_are_kept_or_refused() -> None:
    words = [*model_flags(LONG), "--padded-vocab-size", "32000", "--bf16"]
    assert read_training([*words, "--pipeline-slices", "4"]).sizes["slices"] == "4"
    with pytest.raises(UsageError, match="slices of a plan have equal lengths"):
        read_training([*words, "--pipeline-slices", "2,1,1"])
    with pytest.raises(UsageError, match="--reset-attention-mask cannot be combined"):
        read_training([*words, "--reset-attention-mask"], Namespace(slices="2"))


def test_figures_of_long_samples_are_those_of_the_results() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    text = (docs / "long_context.md").read_text(encoding="utf-8")
    cases = json.loads((docs / "results" / "slices_plan.json").read_text(encoding="utf-8"))["cases"]
    assert len(cases) == text.count("k | ")
    for case in cases:
        (line,) = re.findall(rf"\| {case['gpus']}, {case['tokens'] // 1024}k .*", text)
        rows = [case[name] for name in ("sliced", "whole", "megatron_full")]
        for cell, row in zip(line.split("|")[2:5], rows, strict=True):
            said = cell.split(",")[0].strip()
            if row is None:
                assert said == "nothing fits"
                continue
            memory = row["memory"]["total"] / GIB
            assert said == f"{row['tokens_per_second_per_gpu']:.0f} ({memory:.1f})"


def test_slices_that_are_recomputed_are_planned() -> None:
    """Where a V of slices does not fit, auto recomputes some; the limit is kept."""
    features = asking(EIGHT, PlanRecomputation("auto"))
    job = PlanJob(LONG, a100(), 4, 10 * GIB, 8, 32768, ONE, features=features)
    auto = of("auto")
    staged, m = cut("v-zb", slices=8), 8
    kept, recomputed = staged, replace(staged, features=(*staged.features, PlanRecomputation()))
    recomputation = recomputed.costs(blocking=False).feature(Recomputation)
    assert recomputation is not None
    assert recomputation.kept_input == 2 * 32768 * LONG.hidden_size  # in 16 bits
    assert searched_by_auto(job, auto, kept, m) is None
    row = searched_by_auto(job, auto, recomputed, m)
    assert row is not None
    assert 0 < PlanRecomputation().share(row) < 0.8
    assert row.memory.total <= job.memory
    assert row.tokens_per_gpu < job.optimistic(recomputed, m)
    assert row.timeline is not None
    assert row.bubble == pytest.approx(row.timeline.bubble_rate)
    given = flags(row, m)
    assert {"--pipeline-recompute auto", f"--pipeline-slices {slicing(row)}"} <= {*given}


def test_only_settings_whose_activations_do_not_fit_are_counted_with_drops() -> None:
    choices = replace(ONE, recompute=("none", "full"))
    features = asking(EIGHT, PlanRecomputation("auto"))
    for gib_per_gpu, count in ((7, 2), (40, 0)):
        job = PlanJob(LONG, a100(), 4, gib_per_gpu * GIB, 8, 32768, choices, features=features)
        auto = of("auto")
        found = CountedSettings.of(job).if_freed(auto)
        assert len(found) == count  # equal slices and such of equal time
        for staged, m in found:
            assert (staged.load.strategy.recompute, staged.placement, m) == ("none", v_shape(4), 8)
