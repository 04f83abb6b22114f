"""A vocabulary-parallel output layer, in plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from brief_searches import briefly
from pages import Page
from small_models import ROOT, SMALL, a100, load, small

from megatron_zb import schedules
from megatron_zb.cli import main as cli
from megatron_zb.errors import UsageError
from megatron_zb.parsing import GIB
from megatron_zb.plan import byte_counts
from megatron_zb.plan.device import DeviceConfig, read_device
from megatron_zb.plan.features.catalog import asking
from megatron_zb.plan.features.vocabulary import (
    CONNECTION,
    CountedShard,
    PlanVocabulary,
    more_connections,
)
from megatron_zb.plan.model import ModelConfig, read_model
from megatron_zb.plan.page import save_plan
from megatron_zb.plan.prediction import IterationSettings, peak_of, predict
from megatron_zb.plan.reasons import recommendation, sentences
from megatron_zb.plan.search import WORTH_A_CHANGE, Plan, search
from megatron_zb.plan.settings import PlanJob
from megatron_zb.plan.stages import StageWorkload, cut_into_stages
from megatron_zb.plan.strategy import Choices, ScheduleCandidate, candidates_of
from megatron_zb.plan.table import flags
from megatron_zb.plan.work import PassSeconds
from megatron_zb.schedules import Pass, PassKind
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.placement import looped, v_shape

LARGE = 32_000 * 8
"""Rows of a vocabulary that takes as long as some twenty layers of the small model."""
ONE = Choices(tensor=(1,), pipeline=(4,), microbatch=(1,), recompute=("none",))


def gapless() -> DeviceConfig:
    """An A100 whose kernels begin at once."""
    found = a100()
    kernels = found.kernels.model_copy(update={"seconds": 0.0})
    return found.model_copy(update={"kernels": kernels})


def sharded_stages(model: ModelConfig | None = None, **changes: Any) -> StageWorkload:
    asked = load(model or small(), gapless(), **changes)
    (candidate,) = candidates_of(["v-half"])[2:]
    found = cut_into_stages(asked, replace(candidate, vocabulary_parallel=True), None)
    assert found is not None
    return found


def shard_of(staged: StageWorkload) -> CountedShard:
    assert isinstance(staged.ends, CountedShard)
    return staged.ends


def plan(names: list[str], vocabulary: str = "auto", **changes: Any) -> Plan:
    features = asking(PlanVocabulary(vocabulary))
    first = PlanJob(small(vocabulary=LARGE), a100(), 4, 60 * GIB, 16, 1024, ONE, features=features)
    with briefly():
        return search(replace(first, **changes), candidates_of(names), tries=1)


# --- seconds and bytes of a shard ----------------------------------------------------------------


def test_the_seconds_of_a_shard_are_those_of_its_kernels() -> None:
    """Sums by hand: 1024 tokens, 1024 numbers each, 8000 of 32000 rows on each of 4 ranks."""
    shard, device = CountedShard(load(small(), gapless())), gapless()
    logits, numbers = 1024 * 8000, 1024 * 1024
    product = 2 * logits * 1024 / device.matrix_products.reached
    speed = device.memory_bandwidth.reached
    assert shard.output == pytest.approx(2 * product + (36 * logits + 16 * numbers) / speed)
    assert shard.weight == pytest.approx(product + 36 * logits / speed)
    assert shard.loss == pytest.approx((4 * 36 + 28) * numbers / speed)


def test_thin_shards_lose_the_overhead_of_kernels_on_every_rank() -> None:
    """Without it, shards of 4 and of 8 ranks take as long in all, but for each rank's packing."""
    for device, is_level in ((gapless(), True), (a100(), False)):
        in_all = [p * CountedShard(load(small(), device, pipeline=p)).weight for p in (4, 8)]
        assert (in_all[1] == pytest.approx(in_all[0])) is is_level
    gap = a100().kernels.seconds
    assert in_all[1] - in_all[0] == pytest.approx(4 * 8 * gap)


def test_tensor_parallel_ranks_gather_and_sum() -> None:
    """One gathering and two sums, each as long, in O; one gathering in V."""
    alone, shared = (CountedShard(load(small(), gapless(), tensor=t)) for t in (1, 2))
    link = gapless().collectives.in_node
    gathering = link.seconds(2 * 1024 * 1024 / 2)
    assert shared.weight == pytest.approx(alone.weight / 2 + gathering)
    look_up = 8 * 1024 * 1024 / 2 / gapless().memory_bandwidth.reached  # of rows, by every rank
    assert shared.output == pytest.approx(alone.output / 2 + look_up + 3 * gathering)


def test_states_of_all_shards_are_those_of_both_layers() -> None:
    sharded = sharded_stages()
    whole = replace(sharded, features=())
    output = 1024 * 32000
    for which in ("parameters", "weights", "gradients", "optimizer"):
        sums = [sum(getattr(held, which) for held in of.states) for of in (whole, sharded)]
        assert sums[1] == pytest.approx(sums[0])
    held = [[states.parameters for states in of.states] for of in (whole, sharded)]
    assert held[0][0] - held[1][0] == pytest.approx(2 * output * 3 / 4)  # of a V, on rank 0
    assert held[1][1] - held[0][1] == pytest.approx(2 * output / 4)


def test_ranks_that_look_up_count_it_forth_and_back() -> None:
    """Eight bytes of each number of a token, and a rank in a V takes three messages' worth."""
    sharded = sharded_stages()
    shard = shard_of(sharded)
    moved = 8 * 1024 * 1024 / sharded.load.device.memory_bandwidth.reached
    assert shard.lookup == pytest.approx(moved + 4 * sharded.load.device.kernels.seconds)
    of_stages = sum(sharded.work[s].weight for s in sharded.placement.stages_of[1])
    assert sharded.rank_work(1).weight == pytest.approx(of_stages + shard.weight + shard.lookup)
    looped_stages = replace(sharded, placement=looped(4, 2))
    assert sharded.link_seconds == pytest.approx(1.5 * looped_stages.link_seconds)


def test_the_first_stage_adds_what_all_ranks_have_looked_up() -> None:
    """Three more ranks' rows, and nothing of the look-up and its gradient."""
    sharded = sharded_stages()
    shard = shard_of(sharded)
    device = sharded.load.device
    numbers, gaps = 1024 * 1024, 3 + 1  # three sums, and the kernel before the first layer
    added = 3 * 6 * numbers / device.memory_bandwidth.reached + gaps * device.kernels.seconds
    assert shard.first.total == shard.first.forward == pytest.approx(added)
    layers = sharded.work[1]
    assert sharded.work[0].total == pytest.approx(layers.total + added)


def test_logits_are_held_from_o_to_v() -> None:
    sharded = sharded_stages()
    kinds = (PassKind.O, PassKind.O, PassKind.P, PassKind.V, PassKind.V)
    shard = shard_of(sharded)
    each = shard.held.activation
    assert each == 2 * 1024 * 8000 + (2 * 1024 + 16) * 1024
    peaks = [
        peak_of([Pass(kind, 8, 0) for kind in kinds[:count]], sharded.held)[0]
        for count in (1, 3, 5)
    ]
    assert peaks == [each, 2 * each, 2 * each]
    again = (*kinds, PassKind.O)
    assert peak_of([Pass(kind, 8, 0) for kind in again], sharded.held)[0] == 2 * each


def test_the_rank_of_the_loss_has_parts_of_all() -> None:
    sharded = sharded_stages(pipeline=4)
    logits, numbers = 1024 * 8000, 1024 * 1024
    assert sharded.logits(1) == 12 * logits + 6 * numbers
    assert sharded.logits(0) == 12 * logits + 4 * 4 * numbers
    thin = sharded_stages(small(vocabulary=3200))
    assert thin.logits(0) == 4 * (12 + 4) * numbers


def test_what_a_rank_does_is_in_its_costs() -> None:
    sharded = sharded_stages()
    costs = sharded.costs(blocking=False).for_placement(sharded.placement)
    shard = shard_of(sharded)
    assert costs.seconds[PassKind.O][8:] == pytest.approx([shard.output] * 4)
    assert costs.seconds[PassKind.V][8:] == pytest.approx([shard.weight] * 4)
    assert len(costs.memory["activation"]) == 8
    whole = replace(sharded, features=())
    norm = shard.last_norm
    assert sharded.work[-1].total == pytest.approx(
        whole.work[-1].total - sharded.load.output().total + norm.total
    )
    expected = sum((sharded.work[s] for s in (0, 7)), PassSeconds()).total
    expected += shard.output + shard.weight + shard.loss + 2 * shard.lookup
    assert sharded.rank_work(0).total == pytest.approx(expected)
    assert sharded.busiest.total <= sharded.interval(in_groups=False)


def test_the_link_of_the_last_stage_carries_all_messages() -> None:
    """Four ranks of 8 GPUs: each is a node of its own; of 2 GPUs: all are in one."""
    for ranks, link in ((8, "between_nodes"), (2, "in_node")):
        sharded = sharded_stages(small(global_batch_size=64), data=ranks)
        place = getattr(gapless().messages, link)
        one = 2 * 1024 * 1024 / place.bandwidth
        found = sharded.costs(blocking=False).for_placement(sharded.placement).latency
        latency = one + place.latency
        assert found[PassKind.P][-1] == pytest.approx(latency)
        # three messages, one after another; then those of twice the size
        assert found[PassKind.F][-1] == pytest.approx(latency + 2 * one)
        assert found[PassKind.O][8:] == pytest.approx([0.0, *[latency + 5 * one] * 3])
        assert sharded.link_seconds == pytest.approx(9 * one)  # two of a part, one of rows


def test_no_iteration_is_shorter_than_the_messages_on_that_link() -> None:
    slow = gapless()
    link = slow.messages.in_node.model_copy(update={"bandwidth": 1e6})
    both = slow.messages.model_copy(update={"in_node": link, "between_nodes": link})
    sharded = sharded_stages()
    sharded = replace(
        sharded, load=replace(sharded.load, device=slow.model_copy(update={"messages": both}))
    )
    candidate = ScheduleCandidate("v-half", "v-half", vocabulary_parallel=True)
    with briefly():
        found = predict(sharded, candidate, IterationSettings(8), None)
    assert found.pipeline_seconds >= 8 * 6 * 2 * 1024 * 1024 / 1e6


# --- which can be sharded
# ----------------------------------------------------------------------------


def test_a_plan_that_is_to_shard_what_cannot_be_sharded_is_refused() -> None:
    again = small(vocabulary=LARGE)
    with pytest.raises(
        UsageError, match=r"small cannot shard its output layer, because .* post-validation runs"
    ):
        plan(["v-half"], model=again, vocabulary="on", post_validation=True)
    said = sentences(plan(["zb-h1"], model=again, post_validation=True))["vocabulary"]
    assert said is not None and "no vocabulary parallelism: the forwards that post-validat" in said


def test_a_hybrid_model_shards_its_output_layer() -> None:
    """Layers of two kinds, which are no transformer's; the rest of the plan is a transformer's."""
    model = small(
        hybrid_layer_pattern="MM*-M*--", mamba={"groups": 2}, vocabulary=LARGE, rotary=None
    )
    off, on = (plan(["v-half"], model=model, vocabulary=asked) for asked in ("off", "on"))
    found = on.ranked[0]
    assert found.runs.vocabulary_parallel
    assert found.tokens_per_gpu > 1.2 * off.ranked[0].tokens_per_gpu
    words = " ".join(flags(found, 32))
    assert "--pipeline-vocabulary on" in words
    assert words.count("|") == 7


def test_prediction_counts_for_one_more_output_layer_and_a_layer() -> None:
    """The layers stay on the last stage; the rest is shared out."""
    once, again = (
        sharded_stages(small(prediction_layers=layers, rotary={"base": 10000}, vocabulary=LARGE))
        for layers in (0, 1)
    )
    ends = shard_of(again)
    for name in ("output", "weight", "lookup"):
        assert getattr(ends, name) == pytest.approx(2 * getattr(once.ends, name)), name
    assert ends.held.activation == 2 * shard_of(once).held.activation
    layer = again.load.layer(0).total
    predicted = again.work[-1].total - again.layout[-1] * layer - ends.last_norm.total
    assert predicted == pytest.approx(again.load.output().total - 2 * once.load.output().total)
    assert predicted > layer and again.layout[-1] < once.layout[-1]
    more, usual = (
        byte_counts.rank_states(of.load, [0], False, True, ends_apart=True).weights
        for of in (again, once)
    )
    hidden = again.load.model.hidden_size
    assert more - usual == usual + 2 * 2 * hidden**2  # 16 bits of a layer, and of what joins rows
    costs = again.costs(blocking=False).feature(Vocabulary)
    assert costs is not None and costs.predicts and costs.output == 4 * ends.output


def test_a_tied_weight_is_one_shard_of_each_rank() -> None:
    tied, untied = (
        CountedShard(load(small(tied_embeddings=tied, vocabulary=LARGE))).states
        for tied in (True, False)
    )
    assert untied.weights == 2 * tied.weights
    found = plan(["v-half"], model=small(tied_embeddings=True, vocabulary=LARGE))
    assert PlanVocabulary in found.best_with


def test_rows_that_do_not_divide_are_left_whole() -> None:
    odd = small(vocabulary=LARGE + 2)
    assert not PlanVocabulary().is_possible(load(odd))
    found = plan(["zb-h1"], model=odd)
    assert PlanVocabulary not in found.best_with
    assert "zb-h1" not in {
        row.candidate for row in plan(["zb-h1"], model=odd, vocabulary="on").ranked
    }


# --- what plan finds and says --------------------------------------------------------------------


def test_a_sharding_that_pays_takes_the_place_of_a_whole_output_layer() -> None:
    """The output layer takes more than all layers of a rank: sharding it must pay."""
    auto, off, on = (plan(["v-half"], vocabulary=asked) for asked in ("auto", "off", "on"))
    first = auto.ranked[0]
    assert (first.candidate, first.runs.vocabulary_parallel) == ("v-half", True)
    assert "--pipeline-vocabulary on" in flags(first, 16)
    whole = next(row for row in off.ranked if row.candidate == "v-half")
    gain = PlanVocabulary().gain(auto, first)
    assert gain is not None
    assert gain == pytest.approx(first.tokens_per_gpu / whole.tokens_per_gpu - 1)
    assert gain > 0.5
    assert recommendation(auto).startswith("run v-half with --pipeline-vocabulary on: ")
    assert " faster than the best without" in str(sentences(auto)["vocabulary"])
    assert not any(row.runs.vocabulary_parallel for row in off.ranked)
    assert not any("--pipeline-vocabulary" in flag for row in off.ranked for flag in flags(row, 16))
    assert {r.candidate for r in on.ranked if r.runs.vocabulary_parallel} == {"v-half"}
    assert first.memory.total < whole.memory.total  # its logits and its states were on one rank


def test_auto_takes_the_best_with_a_sharded_output_layer() -> None:
    found = plan(["auto", "v-half"])
    rows = {row.candidate: row for row in found.ranked}
    assert rows["auto"].runs.vocabulary_parallel
    assert rows["auto"].tokens_per_gpu >= rows["v-half"].tokens_per_gpu
    alone = plan(["auto"], vocabulary="on")
    assert {row.candidate: row.runs.vocabulary_parallel for row in alone.ranked}["auto"]


def test_a_small_vocabulary_is_not_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where the bound says so, nor where the simulation does."""
    assert PlanVocabulary not in plan(["v-half"], model=small(vocabulary=512)).best_with
    monkeypatch.setattr(PlanJob, "optimistic", lambda job, staged, m: float("inf"))
    found = plan(["v-half"], model=small(vocabulary=512))
    sharded = found.best_with[PlanVocabulary]
    assert sharded.tokens_per_gpu < found.ranked[0].tokens_per_gpu * (1 + WORTH_A_CHANGE)
    assert not any(row.runs.vocabulary_parallel for row in found.ranked)
    assert "not worth a change" in str(sentences(found)["vocabulary"])


def test_no_more_sharded_rows_are_simulated_than_may_win() -> None:
    """Where a plan without a pipeline is far ahead, none is."""
    everything = Choices(microbatch=(1,), recompute=("none",))
    asked = {"choices": everything, "gpus": 4, "model": small(global_batch_size=8)}
    auto, off = (plan(["v-half"], vocabulary=v, **asked) for v in ("auto", "off"))
    assert auto.ranked[0].candidate == "no pipeline"
    assert auto.simulated == off.simulated


FULL = pytest.mark.full
MODELS = sorted(path.stem for path in (ROOT / "configs" / "models").glob("*.yaml"))


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("llama3_8b", "qwen3_8b", "gpt_1_5b") else pytest.param(name, marks=FULL)
        for name in MODELS
    ],
)
def test_auto_is_never_behind_a_whole_or_a_sharded_output_layer(name: str) -> None:
    """With the planner's costs; behind a sharded one by no more than predictions are off."""
    model = read_model(ROOT / "configs" / "models" / f"{name}.yaml")
    device = read_device(ROOT / "configs" / "devices" / "h100_sxm.yaml")
    narrow = Choices(tensor=(4,), pipeline=(4,), microbatch=(1,), recompute=("none",))
    first = {"model": model, "device": device, "gpus": 16, "memory": 1e15, "choices": narrow}
    first |= {"global_batch": 8, "sequence": model.sequence_length}
    auto, off = (plan(["v-half"], vocabulary=asked, **first) for asked in ("auto", "off"))
    assert auto.ranked[0].tokens_per_gpu >= off.ranked[0].tokens_per_gpu
    on = plan(["v-half"], vocabulary="on", **first)
    assert auto.ranked[0].tokens_per_gpu * (1 + WORTH_A_CHANGE) >= on.ranked[0].tokens_per_gpu
    rows = {row.candidate: row for row in auto.ranked}
    if rows["v-half"].runs.vocabulary_parallel:
        assert (
            rows["v-half"].tokens_per_gpu
            > {row.candidate: row.tokens_per_gpu for row in off.ranked}["v-half"]
        )


# --- the command ---------------------------------------------------------------------------------


def test_the_command_tells_what_sharding_brings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL.replace("32000", str(LARGE)), encoding="utf-8")
    asked = ["plan", "--config", str(path), "--gpus", "4", "--pipeline", "4", "--tensor", "1"]
    asked += ["--micro-batch-size", "1", "--schedules", "v-half", "--tries", "1"]
    asked += ["--global-batch-size", "8"]
    with briefly():
        assert cli.main([*asked, "--format", "json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert cli.main(asked) == 0
        printed = capsys.readouterr().out
        assert cli.main([*asked, "--vocabulary", "off"]) == 0
        without = capsys.readouterr().out
    rows = {row["schedule"]: row for row in found["ranked"]}
    assert rows["v-half"]["vocabulary"] == "on"
    assert rows["v-half"]["gain_of_cut"] > 0.5
    assert rows["Megatron 1F1B"]["vocabulary"] == "off"
    assert rows["Megatron 1F1B"]["gain_of_cut"] is None
    assert found["vocabulary"].startswith("v-half with vocabulary parallelism")
    assert f"{rows['v-half']['gain_of_cut']:+.1%}" in printed
    assert "--pipeline-vocabulary on" in printed
    assert "--vocabulary off" in without and "--pipeline-vocabulary" not in without


def test_a_page_of_a_plan_draws_what_has_colours(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    found = plan(["v-half"])
    assert found.ranked[0].runs.vocabulary_parallel
    save_plan(tmp_path / "plan.html", found)
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "--pipeline-vocabulary on" in page
    explorer = json.loads(Page(page).root.one("script", id="explorer-data").text)
    first = next(
        row.timeline for row in found.ranked if row.timeline and not row.runs.vocabulary_parallel
    )
    assert explorer["names"][0] == first.schedule.name
    assert explorer["orders"][0]["costs"]["activation"] == list(first.costs.memory["activation"])
    only_cut = replace(found, ranked=found.ranked[:1])
    save_plan(tmp_path / "sharded.html", only_cut)


def test_a_sharded_schedule_keeps_its_memory_and_its_order() -> None:
    sharded = sharded_stages(small(vocabulary=LARGE))
    candidate = ScheduleCandidate("v-half", "v-half", vocabulary_parallel=True)
    with briefly():
        found = predict(sharded, candidate, IterationSettings(8), None)
    assert (timeline := found.timeline) is not None
    share = sum(h.activation for h in sharded.held[:8]) / 4
    most = schedules.catalog.family("v-half").peak_microbatches(4, 8) + 1
    worst = max(sum(sharded.held[s].activation for s in stages) for stages in v_shape(4).stages_of)
    assert share <= worst
    assert max(timeline.peak_memory) <= most * worst * (1 + 1e-9)
    assert found.memory.activations + found.memory.weight_queue > 0
    assert 0 < found.bubble < 0.6


@pytest.mark.parametrize(
    ("placement", "expected"),
    [(v_shape(4), [2, 0, 1, 1]), (looped(4, 1), [2, 1, 1, 2]), (v_shape(2), [0, 0])],
    ids=["v", "loop", "v of two"],
)
def test_messages_of_shards_take_connections(placement: Any, expected: list[int]) -> None:
    """Those with a neighbour are there already; a rank of a V with both ends takes two kinds."""
    found = [more_connections(placement, rank) for rank in range(placement.pipeline_size)]
    assert found == expected


def test_connections_of_shards_count_as_messages() -> None:
    sharded = sharded_stages()
    whole = replace(sharded, features=())
    more = [sharded.messages(rank) - whole.messages(rank) for rank in range(4)]
    assert more == [more_connections(sharded.placement, rank) * CONNECTION for rank in range(4)]
    assert max(more) == 2 * 9_633_792
