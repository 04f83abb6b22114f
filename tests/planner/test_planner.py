"""megatron-zb plan: files, costs, memory, search, and what others have measured."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import auto_plans
import pytest
from brief_searches import briefly
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import ROOT, SMALL, a100, load, small

from megatron_zb import schedules
from megatron_zb.cli import main as cli
from megatron_zb.cli import plan
from megatron_zb.errors import UsageError
from megatron_zb.measured import config
from megatron_zb.measured.units import GIB, size_in_bytes
from megatron_zb.planner import byte_counts, table
from megatron_zb.planner.builtin_configs import path_of
from megatron_zb.planner.candidate import MEGATRON_1F1B, MEGATRON_INTERLEAVED, candidates_of
from megatron_zb.planner.device import DeviceConfig, read_device
from megatron_zb.planner.flags import flags
from megatron_zb.planner.memory import peak_of, worst_rank
from megatron_zb.planner.model import ModelConfig
from megatron_zb.planner.parameters import all_weights
from megatron_zb.planner.prediction import predict
from megatron_zb.planner.reasons import reason, recommendation, recommended
from megatron_zb.planner.search import (
    Job,
    Plan,
    cut_into_stages,
    memory_fraction,
    search,
    searched_by_auto,
)
from megatron_zb.planner.strategy import Choices
from megatron_zb.planner.work import model_flops
from megatron_zb.planner.workers import workers
from megatron_zb.schedules import layout
from megatron_zb.schedules.layout import Layers
from megatron_zb.schedules.placement import looped, v_shape, wave

MODELS = sorted((ROOT / "configs" / "models").glob("*.yaml"))
DEVICES = sorted((ROOT / "configs" / "devices").glob("*.yaml"))


def gapless() -> DeviceConfig:
    """An A100 that loses nothing between kernels."""
    device = a100()
    kernels = device.kernels.model_copy(update={"seconds": 0.0})
    return device.model_copy(update={"kernels": kernels})


# --- the files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DEVICES, ids=lambda path: path.stem)
def test_every_device_is_whole_and_has_its_sources(path: Path) -> None:
    device = read_device(path)
    assert device.memory_bytes > device.reserved_bytes
    links = [*device.collectives, *device.messages]
    parts: list[Any] = [device.memory, device.node, device.matrix_products, device.attention]
    assert all(part.source for part in (*parts, device.memory_bandwidth, device.kernels))
    assert all(link.source for _, link in links)


# --- what the user can mend ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("layers: 8", "layers: 0|'layers' is 0: .*greater than 0; give, for example, layers: 32"),
        ("layers: 8", "layers: -3|'layers' is -3: "),
        ("layers: 8", "layers: eight|'layers' is 'eight': .*layers: 32"),
        ("layers: 8", "layers: 8.5|'layers' is 8.5: "),
        ("layers: 8", "layers: yes|'layers' is true: "),
        ("layers: 8", "layers:|'layers' is empty: "),
        ("layers: 8", "layers: [1, 2]|'layers' is a list: "),
        ("layers: 8", "layer: 8|'layers' is missing: give, for example, layers: 32"),
        ("layers: 8", "layers: 8\nlayerz: 8|'layerz' is no field here: did you mean layers"),
        ("layers: 8", "layers: 8\nzzz: 8|'zzz' is no field here: the fields are name, "),
        ("layers: 8", "layers: " + "9" * 400 + "|'layers' is a huge number: "),
        ("attention_heads: 16", "attention_heads: 15|hidden_size 1024 cannot be divided by "),
        ("layers: 8", "layers: 8\nquery_groups: 3|cannot be divided by query_groups 3; give, "),
        ("layers: 8", "layers: 8\nexperts: {experts: 8}|'experts.top_k' is missing: .*top_k: 8"),
        (
            "layers: 8",
            "layers: 8\nexperts: {experts: 8, top_k: 9, ffn_hidden_size: 5}|'experts': top_k is 9",
        ),
        ("layers: 8", "layers: 8\nexperts: 8|'experts' is 8: "),
        ("layers: 8", "layers: 8\n5: 8|5 is no field's name"),
        ("name: small", "name: [|is not YAML at line"),
        ("name: small", "name: !!python/object/apply:os.system ['exit 1']|is not YAML at line 1"),
    ],
)
def test_a_wrong_field_is_named_with_a_right_value(change: str, sentence: str) -> None:
    new, words = sentence.split("|")
    with pytest.raises(UsageError, match=words) as raised:
        config.parse(SMALL.replace(change, new).encode(), "x.yaml", ModelConfig)
    assert str(raised.value).startswith("x.yaml")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("raw", [b"", b"- 1", b"text", b"\xff\xfe\x00", b"a: &a [*a]", b"\x00"])
def test_what_is_no_list_of_fields_is_refused(raw: bytes) -> None:
    with pytest.raises(UsageError, match=r"x\.yaml"):
        config.parse(raw, "x.yaml", ModelConfig)


def test_nested_aliases_are_not_walked_into() -> None:
    bomb = "a: &a [x, x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(24)
    )
    with pytest.raises(UsageError):
        config.parse((bomb + "layers: *y\n").encode(), "x.yaml", ModelConfig)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("peak: 3.12e+14", "peak: 0.0", "'matrix_products.peak' is 0.0: .*peak: 3.12e\\+14"),
        ("efficiency: 0.78", "efficiency: 1.5", "'matrix_products.efficiency' is 1.5: "),
        ("size_gib: 79.14", "size_gib: .nan", "'memory.size_gib' is nan: .*size_gib: 79.1"),
        ("latency: 4.0e-05", "latency: -1", "'collectives.between_nodes.latency' is -1: "),
        ("gpus: 8", "", "'node.gpus' is missing: give, for example, gpus: 8"),
    ],
)
def test_a_wrong_figure_of_a_device_is_named(old: str, new: str, words: str) -> None:
    text = DEVICES[0].read_text(encoding="utf-8")
    assert old in text
    with pytest.raises(UsageError, match=words):
        config.parse(text.replace(old, new, 1).encode(), "x.yaml", DeviceConfig)


_LINES = st.sampled_from(SMALL.splitlines())
_VALUES = st.one_of(
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        ["{}", "[]", "{a: 1}", "!!binary x", "!!timestamp 9", "2001-99-01", "0b2", "~"]
    ),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_no_text_is_answered_with_a_traceback(data: st.DataObject) -> None:
    lines = SMALL.splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        field = lines[at].split(":")[0]
        lines[at] = f"{field}: {data.draw(_VALUES)}"
    raw = data.draw(st.one_of(st.just("\n".join(lines)), st.text(max_size=60)))
    encoded = raw.encode("utf-8", errors="surrogatepass")
    for kind in (ModelConfig, DeviceConfig):
        try:
            config.parse(encoded, "x.yaml", kind)
        except UsageError as error:
            assert str(error).startswith("x.yaml")
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "0"], "--gpus 0 is not between 1 and"),
        (["--gpus", "8", "--gpu-memory", "lots"], "--gpu-memory 'lots' is not a size of memory"),
        (["--gpus", "8", "--gpu-memory", "0GiB"], "give, for example, 80GiB"),
        (["--gpus", "8", "--gpu-memory", "1GiB"], "nothing fits into 1.0 GiB on 8 GPUs: the least"),
        (["--gpus", "11"], "among one another: --global-batch-size 22 can be"),
        (["--gpus", "8", "--global-batch-size", "-1"], "--global-batch-size -1 is not between"),
        (["--gpus", "8", "--seq-length", "0"], "--seq-length 0 is not between"),
        (["--gpus", "8", "--tensor", "x"], "--tensor 'x' is no list of sizes: give, for example"),
        (["--gpus", "8", "--tensor", "3"], "--tensor can be 1, 2, 4 or 8"),
        (["--gpus", "8", "--recompute", "some"], "--recompute 'some' is unknown: give one or more"),
        (["--gpus", "8", "--schedules", "v-halv"], "unknown pipeline schedule 'v-halv'"),
        (["--gpus", "8", "--schedules", ","], "names no schedule"),
        (["--gpus", "8", "--tries", "0"], "--tries 0"),
        (["--gpus", "8", "--device", "none.yaml"], "none.yaml cannot be read: No such file"),
    ],
)
def test_a_wrong_argument_is_one_sentence(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    assert cli.main(["plan", "--config", str(path), "--schedules", "zb-h1", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    lines = [line for line in printed.err.splitlines() if not line.startswith("plan: looking at")]
    assert len(lines) == 1


def test_sizes_of_memory() -> None:
    assert size_in_bytes("80GiB", "x") == 80 * GIB
    assert size_in_bytes("80 GB", "x") == 80e9
    assert size_in_bytes("1.5tib", "x") == 1.5 * 2**40


# --- costs ---------------------------------------------------------------------------------------


def test_products_with_weights_take_as_long_in_f_b_and_w() -> None:
    """Beside the scores and the traffic, which have no W."""
    work = load(small(), gapless()).layer(0)
    weights = 12 * 1024**2
    assert work.weight == pytest.approx(2 * 1024 * weights / a100().matrix_products.reached)
    assert work.forward > work.weight
    assert work.backward > work.forward


def test_a_small_microbatch_is_less_efficient() -> None:
    one, two = (load(small(), microbatch=b).layer(0) for b in (1, 2))
    assert two.forward < 2 * one.forward
    assert two.backward < 2 * one.backward
    assert two.weight < 2 * one.weight


def test_recomputation_adds_f_to_b_and_nothing_to_w() -> None:
    model = small(flash_attention=False, dropout=True)
    none, some, everything = (
        load(model, recompute=how).layer(0) for how in ("none", "selective", "full")
    )
    assert everything.backward == pytest.approx(none.backward + none.forward)
    assert none.backward < some.backward < everything.backward
    assert none.forward == some.forward == everything.forward
    assert none.weight == some.weight == everything.weight


def test_activations_are_those_of_the_papers() -> None:
    """34 s b h + 5 a s s b, of which W needs 32 s b h."""
    model = small(flash_attention=False, dropout=True)
    s, h, a = 1024, 1024, 16
    held = byte_counts.layer_held(load(model), 0)
    assert held.activation == 34 * s * h + 5 * a * s * s
    assert held.for_weight == 32 * s * h
    split = byte_counts.layer_held(load(model, tensor=4), 0)
    assert split.activation == held.activation / 4


def test_states_are_18_bytes_of_a_weight_and_fewer_with_data_parallelism() -> None:
    alone = byte_counts.rank_states(load(small()), [0, 1], False, False)
    assert alone.parameters == 2 * 12 * 1024**2
    assert alone.total == 18 * alone.parameters
    shared = byte_counts.rank_states(load(small(), data=4), [0, 1], False, False)
    assert shared.total == (6 + 12 / 4) * alone.parameters


def test_what_w_needs_of_tensor_parallel_ranks_is_counted_as_shards() -> None:
    held = [byte_counts.layer_held(load(small(), tensor=t), 0).for_weight for t in (1, 2, 8)]
    assert held == [32 * 1024 * 1024 / t for t in (1, 2, 8)]


@pytest.mark.parametrize("tensor", [1, 4])
def test_w_of_the_output_layer_holds_its_input_and_the_gradient_of_the_logits(tensor: int) -> None:
    model = small(vocabulary=50_000)
    held = byte_counts.output_held(load(model, tensor=tensor, microbatch=2))
    tokens = 2 * 1024
    assert held.activation == (2 + 2) * tokens * 1024 / tensor
    assert held.for_weight == 2 * tokens * (1024 + 50_000) / tensor
    assert held.in_backward == 0


@pytest.mark.parametrize("tensor", [1, 4])
def test_logits_take_ten_bytes_each_while_their_microbatch_runs(tensor: int) -> None:
    """In 16 bits, their softmax and its gradient in 32; on the rank of the output layer alone."""
    model = small(vocabulary=50_000)
    expected = 10 * 1024 * 50_000 / tensor
    assert byte_counts.logits(load(model, tensor=tensor)) == expected
    staged = cut_into_stages(load(model, tensor=tensor), candidates_of(["zb-h1"])[-1], None)
    assert staged is not None
    assert [staged.logits(rank) for rank in range(4)] == [0, 0, 0, expected]


@pytest.mark.parametrize("snapshot", [False, True])
def test_the_memory_of_the_fullest_rank_has_all_its_parts(snapshot: bool) -> None:
    """With a large vocabulary, that is the last one of a pipeline that is no V."""
    model = small(vocabulary=200_000)
    staged = cut_into_stages(load(model), candidates_of(["zb-h1"])[-1], None)
    assert staged is not None
    schedule = schedules.build("zb-h1", pipeline_size=4, num_microbatches=8)
    memory = worst_rank(staged, schedule, snapshot=snapshot)
    states, device = staged.states[3], staged.load.device
    assert memory.rank == 3
    assert (memory.weights, memory.gradients) == (states.weights, states.gradients)
    assert memory.optimizer == states.optimizer > 0
    assert memory.snapshot == (states.optimizer if snapshot else 0)
    assert memory.logits == 10 * 1024 * 200_000
    assert memory.messages == 4 * 2 * 1024 * 1024  # two of each direction
    assert memory.reserved + memory.fragmentation == device.reserved_bytes
    assert (memory.activations, memory.weight_queue) == peak_of(schedule.ranks[3], staged.held)
    assert memory.total == sum(memory.parts().values())
    assert len(memory.parts()) == 10


@pytest.mark.parametrize(("tied", "copies"), [(True, 1), (False, 2)])
def test_a_tied_embedding_is_kept_once_where_both_ends_are_on_one_rank(
    tied: bool, copies: int
) -> None:
    model = small(tied_embeddings=tied, vocabulary=50_000)
    none, both = (byte_counts.rank_states(load(model), [0], ends, ends) for ends in (False, True))
    assert both.parameters - none.parameters == copies * 1024 * 50_000
    first = byte_counts.rank_states(load(model), [0], True, False)
    assert first.parameters - none.parameters == 1024 * 50_000


def test_experts_are_counted_where_tokens_visit_them() -> None:
    dense = small(gated_mlp=True, ffn_hidden_size=1024)
    sparse = small(
        gated_mlp=True,
        ffn_hidden_size=1024,
        experts={"experts": 8, "top_k": 2, "ffn_hidden_size": 512, "dense_layers": 1},
    )
    assert load(sparse).layer(0) == load(dense).layer(0)
    router = 1024 * 8
    assert load(sparse, gapless()).layer(1).weight == pytest.approx(
        load(dense, gapless()).layer(1).weight * (1 + router / (4 * 1024**2 + 3 * 1024**2))
    )
    assert all_weights(sparse) > all_weights(dense)


def test_training_takes_six_flops_for_each_weight_and_token() -> None:
    model = small(sequence_length=1, vocabulary=1)
    weights = 8 * 12 * 1024**2
    assert model_flops(model, 1000, 1) == pytest.approx(6 * 1000 * weights, rel=0.001)


def test_tensor_parallelism_costs_messages_and_saves_the_rest() -> None:
    model = small(hidden_size=4096)
    one, eight = (load(model, gapless(), tensor=t).layer(0) for t in (1, 8))
    assert one.total / 8 < eight.total < one.total
    assert eight.weight == pytest.approx(one.weight / 8)


# --- layouts and memory --------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [looped(4), looped(4, 2), v_shape(4)])
@pytest.mark.parametrize("layers", [6, 8, 13, 32])
def test_a_layout_has_every_layer_once(layers: int, placement: Any) -> None:
    found = layout.choices(layers, placement, 0.1, 3.0)
    assert len(found) == (1 if layers < placement.num_stages else 2)
    for counts in found:
        assert sum(counts) == layers
        assert len(counts) == placement.num_stages
        assert layout.text(layout.lettered(counts)).count("t") == layers


def test_a_heavy_output_layer_takes_layers_from_its_rank() -> None:
    heavy, light = Layers(16, output=2.0), Layers(6, output=1.0)
    assert layout.balanced(heavy, looped(4)) == (4, 5, 5, 2)
    assert layout.balanced(light, looped(4, 2)) == (0, 1, 1, 1, 1, 1, 1, 0)
    assert layout.text(layout.lettered((0, 1, 1, 0))) == "E|t|t|L"


def test_the_peak_counts_what_waits_for_w() -> None:
    held = [byte_counts.Held(10.0, 6.0, 3.0)]
    passes = [schedules.Pass(schedules.PassKind(kind), 0, i) for kind, i in [("F", 0), ("F", 1)]]
    assert peak_of(passes, held) == (20.0, 0.0)
    passes += [schedules.Pass(schedules.PassKind(kind), 0, 0) for kind in ("B", "W")]
    assert peak_of(passes, held) == (23.0, 0.0)
    passes.insert(3, schedules.Pass(schedules.PassKind.F, 0, 2))
    assert peak_of(passes, held) == (20.0, 6.0)


def test_many_microbatches_are_continued_from_the_steady_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small()
    for candidate in candidates_of(["zb-h1"]):
        chunks = 2 if candidate.takes_chunks else None
        staged = cut_into_stages(load(model), candidate, chunks)
        assert staged is not None
        monkeypatch.setattr("megatron_zb.planner.prediction._MOST_PASSES", 10**9)
        whole = predict(staged, candidate, 64, chunks, is_even=True)
        monkeypatch.setattr("megatron_zb.planner.prediction._MOST_PASSES", 1)
        continued = predict(staged, candidate, 64, chunks, is_even=True)
        assert continued.pipeline_seconds == pytest.approx(whole.pipeline_seconds, rel=0.01)


def test_with_post_validation_an_iteration_does_not_wait_for_the_last_rank() -> None:
    (candidate,) = candidates_of(["zb-2p"])[2:]
    staged = cut_into_stages(load(small(layers=16)), candidate, None)
    assert staged is not None
    alone, back_to_back = (
        predict(staged, candidate, 24, None, is_even=True, post_validation=flag)
        for flag in (False, True)
    )
    assert back_to_back.pipeline_seconds < alone.pipeline_seconds
    assert back_to_back.schedule is not None
    assert back_to_back.costs is not None
    timeline = schedules.simulate(back_to_back.schedule, back_to_back.costs)
    assert back_to_back.pipeline_seconds == timeline.period


# --- the search ----------------------------------------------------------------------------------


def job(**changes: Any) -> Job:
    first = Job(small(), a100(), 8, 20 * GIB, 32, 1024, Choices(recompute=("none",)))
    return replace(first, **changes)


def test_what_is_simulated_to_need_a_little_more_than_there_is_does_not_fit() -> None:
    choices = Choices(tensor=(1,), pipeline=(4,), microbatch=(2,), recompute=("none",))
    asked = job(choices=choices, gpus=4)
    (fits,) = (r for r in search(asked, candidates_of(["zb-h1"])).ranked if r.candidate == "zb-h1")
    for share, is_there in ((1.01, True), (0.99, False)):
        plan = search(replace(asked, memory=share * fits.memory.total), candidates_of(["zb-h1"]))
        assert ("zb-h1" in rates(plan)) == is_there
        assert ("zb-h1" in plan.too_large) != is_there


def test_megatrons_own_always_stand_in_the_table() -> None:
    plan = search(job(), candidates_of(["zb-h1"]))
    names = [row.candidate for row in plan.ranked]
    assert {MEGATRON_1F1B, MEGATRON_INTERLEAVED, "zb-h1", "no pipeline"} == set(names)
    rates = [row.tokens_per_gpu for row in plan.ranked]
    assert rates == sorted(rates, reverse=True)
    assert all(row.memory.total <= 20 * GIB for row in plan.ranked)
    # A small model is best off without a pipeline, and the table says so.
    assert names[0] == "no pipeline"


def test_interleaved_is_tuned_over_all_its_chunks() -> None:
    choices = Choices(tensor=(1,), pipeline=(4,), microbatch=(1,), recompute=("none",))
    plan = search(job(choices=choices, gpus=4), candidates_of(["zb-h1"]))
    (found,) = (row for row in plan.ranked if row.candidate == MEGATRON_INTERLEAVED)
    (own,) = (c for c in candidates_of(["zb-h1"]) if c.name == MEGATRON_INTERLEAVED)
    assert list(own.chunk_counts(8, 2)) == [2, 3, 4]
    for chunks in own.chunk_counts(8, 4):
        staged = cut_into_stages(found.load, own, chunks)
        assert staged is not None
        other = predict(staged, own, 32, chunks, is_even=True)
        assert other.tokens_per_gpu <= found.tokens_per_gpu * (1 + 1e-9)


def rates(plan: Plan) -> dict[str, float]:
    return {row.candidate: row.tokens_per_gpu for row in plan.ranked}


def test_auto_is_never_behind_a_schedule_that_it_could_run() -> None:
    """Also where only it was asked for, and where there are too few layers for a V."""
    with briefly():
        _check_auto_leads()


def _check_auto_leads() -> None:
    choices = Choices(tensor=(1,), pipeline=(4,), microbatch=(1,), recompute=("none",))
    everything = rates(search(job(choices=choices, gpus=4), candidates_of(None)))
    assert len(everything) > 8
    assert everything["auto"] >= max(everything.values())
    alone = search(job(choices=choices, gpus=4), candidates_of(["auto"]))
    assert rates(alone)["auto"] == everything["auto"]
    assert {row.candidate for row in alone.ranked} <= {
        "auto",
        MEGATRON_1F1B,
        MEGATRON_INTERLEAVED,
    }
    five = job(choices=choices, gpus=4, model=small(layers=5))  # too few for a V of 8 stages
    found = rates(search(five, candidates_of(["auto", "zb-h1"])))
    assert found["auto"] >= found["zb-h1"] > 0


def test_the_memory_limit_of_auto_keeps_every_rank_within_its_gpu() -> None:
    choices = Choices(tensor=(1,), pipeline=(4,), microbatch=(2,), recompute=("none",))
    limits = []
    for size in (5, 6, 6.5, 16):
        asked = job(choices=choices, gpus=4, memory=size * GIB)
        setting = candidates_of(["v-half"])[-1]
        staged = cut_into_stages(load(small(), microbatch=2), setting, None)
        assert staged is not None
        costs = staged.costs(blocking=False)
        limit = memory_fraction(asked, staged, costs)
        limits.append(limit)
        if limit is None:
            continue
        most = limit * costs.one_f_one_b_peak()
        assert all(fixed + most <= asked.memory for fixed in costs.fixed)
        tightest = min(asked.memory - fixed for fixed in costs.fixed)
        assert limit == 2.0 or most > tightest - 0.011 * costs.one_f_one_b_peak()
    nothing, *some, most_of_all = limits
    assert nothing is None
    assert most_of_all == 2.0  # twice 1F1B's, however much is left
    assert all(limit is not None and 0 < limit < 2.0 for limit in some)


def test_what_is_predicted_for_auto_is_what_its_flags_build() -> None:
    """The same placement, layout and limit; for the same costs a run's longer search is as fast."""
    choices = Choices(tensor=(1,), pipeline=(4,), microbatch=(1,), recompute=("none",))
    asked = job(choices=choices, gpus=4, global_batch=8)
    staged = cut_into_stages(load(small()), candidates_of(["v-zb"])[-1], None)
    assert staged is not None
    (auto,) = candidates_of(["auto"])[2:]
    with briefly():
        found = searched_by_auto(asked, auto, staged, 8)
    assert found is not None
    assert found.schedule is not None
    assert found.memory_limit is not None
    said = flags(found, 8)
    assert "--pipeline-schedule auto" in said
    assert "--num-virtual-stages-per-pipeline-rank 2" in said
    assert "--pipeline-placement zigzag" in said
    assert f"--pipeline-memory-limit {found.memory_limit:.2f}" in said
    with briefly():
        run = schedules.build(
            "auto",
            pipeline_size=4,
            num_microbatches=8,
            costs=found.costs,
            placement=wave(4, 2),
            memory_limit=float(f"{found.memory_limit:.2f}"),
            chunks=2,
        )
    assert run.placement == found.schedule.placement
    assert found.costs is not None
    seconds = [schedules.simulate(s, found.costs).makespan for s in (run, found.schedule)]
    assert seconds[0] <= seconds[1] == found.pipeline_seconds


def test_reasons_compare_with_rows_that_are_shown() -> None:
    plan = search(job(gpus=4), candidates_of(["zb-h1", "v-zb", "v-min"]))
    first = plan.ranked[0].candidate
    for index in range(1, len(plan.ranked)):
        text = reason(plan, index)
        assert "than the first: " in text or f"level with the first, {first}" in text
        if not plan.ranked[index].candidate.startswith(("Megatron", "no pipeline")):
            assert "than " in text.split("; ")[-1] or "level with" in text
    assert first == "no pipeline"
    assert recommended(plan) is None
    assert recommendation(plan).startswith("no schedule of this package is worth a change here")


def test_a_recommendation_is_what_plan_says() -> None:
    """Of one model here; benchmarks/auto_plans.py --only-recommendations compares all."""
    assert auto_plans.wrong_recommendation(ROOT / "configs" / "models" / "llama2_7b.yaml") is None


@pytest.mark.parametrize(
    "names", [["zb-h1", "v-zb"], pytest.param(["zb-h1", "auto"], marks=pytest.mark.full)]
)
def test_the_plan_is_the_same_whoever_looks(names: list[str]) -> None:
    """Several processes, and this one alone."""
    before = multiprocessing.active_children()
    choices = Choices(tensor=(1,), pipeline=(2, 4), microbatch=(1,), recompute=("none",))
    wanted = job(gpus=4, choices=choices, global_batch=8)
    schedules = candidates_of(names)
    alone = search(wanted, schedules, tries=1)
    with workers(2, after=0.0) as each:
        together = search(wanted, schedules, tries=1, each=each)
    assert table.as_json(together) == table.as_json(alone)
    assert multiprocessing.active_children() == before


def test_it_says_what_it_looks_at_when_it_is_piped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan._Progress, "AFTER", 0.0)
    monkeypatch.setattr(plan._Progress, "EVERY", 0.0)
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    asked = ["plan", "--config", str(path), "--gpus", "4", "--pipeline", "4", "--tries", "1"]
    assert cli.main([*asked, "--schedules", "zb-h1", "--format", "json"]) == 0
    printed = capsys.readouterr()
    json.loads(printed.out)
    lines = printed.err.splitlines()
    assert any(line.startswith("plan: looking at zb-h1") for line in lines)
    assert all(line.startswith("plan: looking at ") for line in lines)


def test_fragments_take_their_share_of_the_memory_that_is_given() -> None:
    device = a100()
    assert device.memory_bytes / GIB == pytest.approx(79.14)
    half = device.with_memory(40 * GIB)
    assert half.fragmentation_bytes == pytest.approx(0.03 * 40 * GIB)
    assert half.reserved_bytes == pytest.approx((0.03 * 40 + 1.5) * GIB)
    plan = search(job(device=half, memory=40 * GIB), candidates_of(["zb-h1"]))
    assert all(row.memory.fragmentation == half.fragmentation_bytes for row in plan.ranked)


def test_flags_can_be_pasted() -> None:
    choices = Choices(tensor=(2,), pipeline=(4,), microbatch=(1,), recompute=("full",))
    plan = search(job(choices=choices), candidates_of(["zb-h1"]))
    by_name = {row.candidate: flags(row, 32) for row in plan.ranked}
    ours = by_name["zb-h1"]
    assert "--pipeline-schedule zb-h1" in ours
    assert {"--tensor-model-parallel-size 2", "--sequence-parallel"} <= set(ours)
    assert "--recompute-granularity full" in ours
    assert not any("--pipeline-schedule" in flag for flag in by_name[MEGATRON_1F1B])


def test_json_has_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    sizes = ["--gpus", "4", "--pipeline", "4", "--micro-batch-size", "1", "--tries", "1"]
    sizes += ["--global-batch-size", "8"]
    asked = ["plan", "--config", str(path), *sizes, "--schedules", "v-half,zb-2p"]
    assert cli.main([*asked, "--format", "json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {row["schedule"] for row in plan["ranked"]} == {
        MEGATRON_1F1B,
        MEGATRON_INTERLEAVED,
        "v-half",
        "zb-2p",
    }
    for row in plan["ranked"]:
        parts = [size for name, size in row["memory"].items() if name not in ("rank", "total")]
        assert sum(parts) == pytest.approx(row["memory"]["total"])
    assert cli.main(asked) == 0
    printed = capsys.readouterr().out
    assert "--pipeline-schedule" in printed
    assert " 1  the fastest" in printed
    assert "slower than the first: " in printed
    assert "recommendation: " in printed
    assert "to fragments" in printed


def test_help_and_a_plan_need_neither_torch_nor_megatron(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    arguments = ["plan", "--config", str(path), "--gpus", "4", "--schedules", "zb-h1"]
    program = (
        "import sys\n"
        "for name in ('torch', 'megatron', 'matplotlib'): sys.modules[name] = None\n"
        "from megatron_zb.cli.main import main, parser\n"
        "parser().format_help()\n"
        "assert 'pydantic' not in sys.modules\n"
        f"sys.exit(main({arguments!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "flags of the first:" in done.stdout


# --- what others have measured -------------------------------------------------------------------


def validation() -> ModuleType:
    sys.path.insert(0, str(ROOT / "docs"))  # it has a part beside it
    spec = importlib.util.spec_from_file_location(
        "make_validation", ROOT / "docs" / "make_validation.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


VALIDATION = validation()
THROUGHPUT = sys.modules["published_throughput"]

# Setups that are quick to simulate; docs/validation.md has all of them, and those that miss.
IN_ORDER = [
    ("Zero Bubble, table 4", 2),
    ("Zero Bubble, table 4", 3),
    ("Zero Bubble, table 4", 4),
    ("Zero Bubble, table 4", 5),
    ("Zero Bubble, table 4", 6),
]
CLOSE_ONLY = [("Zero Bubble, table 4", 0), ("Users' report, 6.2B on 8 ranks", 0)]


# The first and the last of a table, and one of each other kind; all with --full.
ORDINARY = [IN_ORDER[0], IN_ORDER[-1], *CLOSE_ONLY]


@pytest.mark.parametrize(
    ("table", "column"),
    [
        setup if setup in ORDINARY else pytest.param(*setup, marks=pytest.mark.full)
        for setup in IN_ORDER + CLOSE_ONLY
    ],
)
def test_published_ratios_are_met_within_ten_percent(table: str, column: int) -> None:
    (found,) = (t for t in VALIDATION.tables() if t["name"] == table)
    with briefly():  # fast enough to be as close
        rows = VALIDATION.rows(found, found["columns"][column])
    assert [row.schedule for row in rows if not row.is_close] == []
    if (table, column) in IN_ORDER:
        assert VALIDATION.order_misses(rows) == []


def test_the_counted_times_are_near_the_profiled_ones() -> None:
    for line in VALIDATION.profile_lines()[2:]:
        assert all(abs(int(part.split("%")[0])) <= 12 for part in line.split("(")[1:])


@pytest.mark.parametrize("setup", ["GPT 38.5B, p=32, m=512", "GPT 98.5B, 40 GPUs, batch 160"])
def test_the_rows_have_the_published_order_of_the_large_setups(setup: str) -> None:
    """They take minutes to simulate, so that the rows that were written are read."""
    rows = [row for row in VALIDATION.read_ratios() if row.setup.startswith(setup)]
    assert len(rows) >= 4
    assert sorted(rows, key=lambda row: row.published) == sorted(
        rows, key=lambda row: row.predicted
    )
    assert all(row.is_close for row in rows)


def test_the_page_sums_up_the_rows() -> None:
    page = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
    ratios, throughput = VALIDATION.read_ratios(), VALIDATION.read_throughput()
    assert page == VALIDATION.page(ratios, throughput), "run docs/make_validation.py --page"
    for rows, tables in ((ratios, VALIDATION.tables()), (throughput, THROUGHPUT.tables())):
        assert list(dict.fromkeys(row.table for row in rows)) == [t["name"] for t in tables]


def test_the_written_ratios_are_no_worse_than_published() -> None:
    compared = [row for row in VALIDATION.read_ratios() if row.published != 1]
    assert sum(not row.is_close for row in compared) <= 1
    setups = VALIDATION.setups(VALIDATION.read_ratios())
    assert sum(not VALIDATION.order_misses(rows) for rows in setups) >= 15


# Runs that are quick to simulate, of each table one at least.
QUICK = [
    ("Megatron-LM's table", "16B"),
    ("Megatron-LM's table", "32B"),
    ("Reducing Activation", "22B"),
    ("Reducing Activation", "22B baseline"),
    ("Efficient Large-Scale", "18.4B"),
]


@pytest.mark.parametrize(("table", "run"), QUICK)
def test_published_throughput_is_met_within_ten_percent(table: str, run: str) -> None:
    (found,) = (t for t in THROUGHPUT.tables() if t["name"].startswith(table))
    row = next(r for r in found["rows"] if r["name"] == run)
    assert THROUGHPUT.throughput(found, row).is_close


@pytest.mark.parametrize("run", ["177B", "314B", "405B", "175B on", "530B on", "1T on", "145.6B"])
def test_the_large_runs_were_met_within_ten_percent(run: str) -> None:
    rows = [row for row in VALIDATION.read_throughput() if row.setup.startswith(run)]
    assert rows
    assert [row.setup for row in rows if not row.is_close] == []


def test_what_was_fitted_is_little_of_what_is_compared() -> None:
    rows = VALIDATION.read_throughput()
    assert 2 * sum(row.fitted for row in rows) < len(rows)
    assert not any(row.fitted for row in rows if "405B" in row.setup or "A100" in row.table)
    held_out = [row for row in rows if not row.fitted]
    assert sum(not row.is_close for row in held_out) <= 3


# --- what comes with the package -----------------------------------------------------------------


def test_names_stand_for_the_files_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert path_of("--config", "models", Path("gpt_28b")) == ROOT / "configs/models/gpt_28b.yaml"
    for path in ("nowhere.yaml", "a/gpt_28b", str(ROOT)):
        assert path_of("--config", "models", Path(path)) == Path(path)
    assert cli.main(["plan", "--config", "gpt_28b", "--gpus", "8", "--device", "h1"]) == 2
    words = "--device 'h1' is unknown: give a file, or one of a100_80gb_sxm, b200_sxm, "
    assert words in capsys.readouterr().err


def test_an_installed_package_has_them(tmp_path: Path) -> None:
    build = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path)]
    egg_info = ["egg_info", "--egg-base", str(tmp_path)]
    subprocess.run([*build, *egg_info], cwd=ROOT, check=True, capture_output=True)
    command = "import sys; from megatron_zb.cli.main import main; sys.exit(main())"
    plan = "plan --config gpt_1_5b --gpus 8 --schedules zb-h1 --pipeline 8".split()
    done = subprocess.run(
        [sys.executable, "-c", command, *plan],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "lib")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "GPT 1.5B on 8 A100 80GB SXM" in done.stdout
    configs = tmp_path / "lib" / "megatron_zb" / "configs"
    shipped = sorted(path.name for path in configs.glob("*/*.yaml"))
    assert shipped == sorted(path.name for path in (ROOT / "configs").glob("*/*.yaml"))
