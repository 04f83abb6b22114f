"""The benchmarks of one device, at tiny sizes on the CPU: that they count, compare and say it."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import feature_gains
import host_overhead
import long_run
import one_device
import pytest
import rank_memory
import split_backward
import torch
import user_outputs
from jobs import Ended, run_script
from layer_sizes import LayerSizes, chosen
from rank_process import Kind, missing_transformer_engine
from ranks import RankPools

from megatron_zb.errors import UsageError
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.schedules.passes import Channel, Message

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

TINY = "--device cpu --hidden 32 --heads 4 --ffn-hidden 48 --seq-length 16".split()
SIZES = LayerSizes(hidden=32, heads=4, ffn_hidden=48, seq_length=16, micro_batch_size=1)


def benchmark(name: str, *arguments: str) -> Ended:
    return run_script(BENCHMARKS / name, *arguments)


def line_of(name: str, *arguments: str) -> dict[str, Any]:
    done = benchmark(name, *TINY, *arguments)
    assert done.code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
def test_a_split_backward_is_timed_and_its_memory_counted() -> None:
    line = line_of("split_backward.py", "--repetitions", "3")
    assert line["sizes"]["hidden"] == 32
    assert "there is no GPU" in line["not_measured"]["transformer-engine"]
    assert [r["implementation"] for r in line["results"]] == ["local", "local-flash"]
    for result in line["results"]:
        seconds, held = result["seconds"], result["held_bytes"]
        assert min(seconds.values()) > 0
        low, high = result["middle_half_of_ratios"]
        assert 0 < low <= result["ratio"] <= high
        assert held["F"] > held["B"] > held["W"] == 0


def test_ranks_are_replayed_and_compared_with_the_simulator() -> None:
    sizes = "--ranks 4 --microbatches 8 --layers-per-rank 2 --schedules v-half v-min"
    line = line_of("rank_memory.py", *sizes.split())
    results = line["results"]
    assert list(results) == ["1f1b", "v-half", "v-min"]
    one_f_one_b = results["1f1b"]["peak_bytes_of_ranks"]
    assert one_f_one_b == sorted(one_f_one_b, reverse=True)
    assert line["targets_on_a_gpu"] == {}  # they are for 8 ranks
    for name, ratio in (("1f1b", 1.0), ("v-half", 0.75), ("v-min", 0.5)):
        result = results[name]
        assert len(result["peak_bytes_of_ranks"]) == 4
        assert result["peak_bytes"] == max(result["peak_bytes_of_ranks"])
        assert result["promised_microbatches_ratio"] == ratio
        assert result["simulated_bytes_ratio"] == pytest.approx(ratio)
        # the messages are what the simulator leaves out
        message = 2 * SIZES.hidden * SIZES.seq_length
        assert 0 <= result["peak_bytes"] - result["simulated_bytes"] <= 8 * message


@pytest.mark.parametrize("script", ["split_backward.py", "rank_memory.py"])
def test_help(script: str) -> None:
    done = benchmark(script, "--help")
    assert done.code == 0
    assert "--device" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused_in_one_sentence() -> None:
    done = benchmark("split_backward.py", "--device", "cuda")
    assert done.code == 2
    assert done.stderr.splitlines()[-1] == (
        "split_backward.py: error: --device cuda needs a GPU and torch sees none: give --device cpu"
    )


def test_layers_that_the_chunks_cannot_share_are_refused() -> None:
    job = rank_memory.Job(4, 8, 3, SIZES, "local", "bf16", torch.device("cpu"))
    with pytest.raises(UsageError, match=r"v-half has 2 chunks .* give a multiple of 2"):
        rank_memory._build("v-half", job)
    assert rank_memory._build("v-half", replace(job, layers_per_rank=4)).name == "v-half"


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match="--hidden 100 cannot be split among --heads 8"):
        chosen(Namespace(hidden=100, heads=8), torch.device("cpu"))


def test_a_message_leaves_after_the_next_pass() -> None:
    peers = rank_memory.StandInPeers()
    peers.activation_memory = memory = ActivationMemory()
    peers.send(Channel(0, 1), torch.zeros(5), slots=2)
    held = []
    for _ in range(3):
        peers.between_passes()  # the executor does before every pass
        held.append(memory.live_bytes)
    assert held == [20, 0, 0]


def test_a_message_is_made_up_where_it_is_received() -> None:
    peers = rank_memory.StandInPeers()
    message = Message(False, 1, 0)
    peers.post_receive(Channel(0, 1), message, lambda: torch.zeros(50))
    assert peers.take(message).std() > 0
    peers.finish()


def test_gpu_memory_is_what_is_allocated_since(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = iter([100, 130, 110])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 145)
    meter = one_device.meter_of(torch.device("cuda"), [])
    with meter.watching():
        assert [meter.held_bytes, meter.held_bytes, meter.peak_bytes] == [30, 10, 45]


def test_medians_are_of_repetitions_and_ratios_of_pairs() -> None:
    split = [[0.0, 1.0, 2.0, 4.0], [0.0, 1.0, 3.0, 5.0], [0.0, 2.0, 4.0, 9.0]]
    whole = [[0.0, 1.0, 4.0], [0.0, 1.0, 4.0], [0.0, 1.0, 5.0]]
    found = split_backward._summary(one_device.CpuClock(), split, whole)
    assert found["seconds"] == {"F": 1, "BW": 3, "B": 2, "W": 2, "F+BW": 4, "F+B+W": 5}
    assert found["ratio"] == 1.25  # of 1, 5/4 and 9/5
    assert found["middle_half_of_ratios"] == [1.0, 1.8]


def transformer_engine_layers() -> tuple[int, int, int]:
    """Run on a rank over stand-ins, where attention itself needs a GPU."""
    import gpt_layers
    from layer_sizes import TRANSFORMER_ENGINE as NAME
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    device = torch.device("cpu")
    config = gpt_layers.configuration(SIZES, 1, torch.bfloat16, device, NAME)
    layer = gpt_layers._specification(NAME, config)
    layer.submodules.self_attention.submodules.core_attention = gpt_layers.FlashAttention
    gpt_layers._specification = lambda *_: layer
    layers = gpt_layers.Layers(config, SIZES, NAME, device)
    for name in ("F", "BW", "F", "B", "W"):
        layers.run(name)
    held = layers.held_after(one_device.SavedMeter(layers.model.parameters()))
    return held["F"], held["B"], held["W"]


@pytest.mark.long
def test_layers_of_transformer_engine_are_measured_alike(ranks: RankPools) -> None:
    if missing := missing_transformer_engine(Kind.TRANSFORMER_ENGINE):
        pytest.skip(missing)
    pool = ranks(1, Kind.TRANSFORMER_ENGINE)
    ((after_forward, after_backward, after_weights),) = pool.run(transformer_engine_layers)
    assert after_forward > after_backward > after_weights == 0


def looks(**more: int) -> list[dict[str, int]]:
    """Of a run of 80 steps; what is given in ``more`` grows by so much in every look."""
    names = (*long_run.GROWING, *long_run.COUNTED)
    return [
        {"step": 2 * look, **{name: 1000 + look * more.get(name, 0) for name in names}}
        for look in range(1, 41)
    ]


def test_what_grows_in_a_long_run_is_told() -> None:
    assert long_run.missing(long_run.compare(looks(), 80)) == []
    assert long_run.missing(long_run.compare(looks(resident=-5), 80)) == []
    for name in (*long_run.GROWING, *long_run.COUNTED):
        (line,) = long_run.missing(long_run.compare(looks(**{name: 1}), 80))
        assert line.startswith(f"{name} grew from 10")


def test_one_bit_of_a_loss_is_a_difference() -> None:
    upstream: list[dict[str, Any]] = [
        {"iteration": 1, "lm_loss": 0.1 + 0.2},
        {"iteration": 1, "eval_loss": 0.5},
        {"pipeline_schedule": None},
    ]
    assert long_run.differences(upstream, [dict(record) for record in upstream]) == []
    assert long_run.differences(upstream, [{"iteration": 1, "lm_loss": 0.3}]) == [
        "step 1",
        "the evaluation after step 1",
    ]


@pytest.mark.slow
def test_a_rank_finds_its_own_tensors() -> None:
    for _ in range(3):  # what other tests have left is gone with the first ones
        before = long_run.what_there_is()
    kept = torch.zeros(2**20, dtype=torch.uint8)
    after = long_run.what_there_is()
    assert after["tensors"] - before["tensors"] == kept.nbytes
    assert after["malloc"] - before["malloc"] >= kept.nbytes
    assert after["threads"] >= 1


@pytest.mark.full
def test_sleeping_stages_exchange_in_pairs_and_without() -> None:
    names = ["interleaved"]
    sizes = "--ranks 2 --microbatches 4 --repetitions 2 --milliseconds 8 8 8 --exchange 0.5"
    done = benchmark("runtime_overhead.py", *sizes.split(), "--schedules", *names)
    assert done.code in (0, 1), done.stderr  # 1: longer than it may be
    line = json.loads(done.stdout.splitlines()[-1])
    orders = [*names, *(f"{name}, no pairs" for name in names)]
    simulated, measured = line["simulated_seconds"], line["measured_seconds"]
    assert list(line["ratio"]) == list(simulated) == list(measured) == orders
    for name in names:
        assert simulated[name] < simulated[f"{name}, no pairs"]
    for name, seconds in measured.items():
        exchanged = 0.008 if name.endswith("no pairs") else 0.0
        assert min(seconds) >= 4 * (0.024 + exchanged), "no sleep is shorter than it is told"
    assert done.code == int("missed:" in done.stdout)


@pytest.mark.slow
def test_the_hosts_time_is_counted_alike_for_every_runtime() -> None:
    names = "1f1b megatron-1f1b zbv-table torch-zbv".split()
    sizes = "--ranks 2 --microbatches 4 --turns 2 --schedules".split()
    done = benchmark("host_overhead.py", *sizes, *names)
    assert done.code in (0, 1), done.stderr  # 1: slower than it may be
    line = json.loads(done.stdout.splitlines()[-1])
    layers = ["layers of 1", "layers of 2 in a V"]
    assert list(line["us_per_pass"]) == [*names, *layers]
    assert (line["ranks"], line["turns"], line["microbatches"]) == (2, 2, 4)
    for key, name in (("over_megatron", "1f1b"), ("over_torch", "zbv-table")):
        assert list(line[key]) == list(line[f"outside_{key}"]) == [name]
        assert line[key][name] > 0
    found = line["by_ranks"]["2"]["contenders"]
    passes = {name: figures["passes_of_ranks"] for name, figures in found.items()}
    assert passes["1f1b"] == passes["megatron-1f1b"] == [{"F": 4, "BW": 4}] * 2
    assert passes["zbv-table"] == passes["torch-zbv"]
    for name, figures in found.items():
        assert figures["whole"]["us_per_pass"] > figures["outside"]["us_per_pass"] > 0
        assert (figures["added"]["us_per_pass"] == 0) == (name in layers)


def test_the_hosts_time_is_that_of_steps_of_equal_work() -> None:
    of_rank = {
        name: {"layers": "alone", "passes": {"F": 2, "BW": 2}, "seconds": s, "outside": o}
        for name, s, o in (
            ("1f1b", [4e-6, 8e-6, 8e-6], [2e-6, 2e-6, 3e-6]),
            ("megatron-1f1b", [8e-6, 8e-6, 32e-6], [2e-6, 4e-6, 4e-6]),
            ("alone", [2e-6, 4e-6, 6e-6], [1e-6, 1e-6, 1e-6]),
        )
    }
    found = host_overhead.summary([of_rank, of_rank])
    ours = found["contenders"]["1f1b"]
    assert ours["whole"] == {"us_per_pass": 2, "quartiles": [1.5, 2]}
    assert ours["added"] == {"us_per_pass": 0.5, "quartiles": [0.5, 0.75]}
    assert ours["us_per_microbatch"] == 4
    assert found["over_megatron"] == {"1f1b": 0.5}
    assert found["outside_over_megatron"] == {"1f1b": 0.75}
    assert found["over_torch"] == {}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--schedules v-zero", "v-zero is none of "),
        ("--ranks 1", "--ranks 1 is no pipeline: give 2 or more"),
    ],
)
def test_the_hosts_time_is_refused_in_one_sentence(arguments: str, sentence: str) -> None:
    done = benchmark("host_overhead.py", *arguments.split())
    assert done.code == 2
    assert sentence in done.stderr.splitlines()[-1]


def test_outputs_of_every_command_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = dict(user_outputs.commands(with_plans=True))
    overview = user_outputs.output_of(asked["help"])
    listed = re.findall(r"^ {4}(\w+) ", overview, re.MULTILINE)
    assert sorted(listed) == sorted(user_outputs.COMMANDS)
    few = [("help", ["--help"]), ("wrong", ["show", "nothing"])]
    monkeypatch.setattr(user_outputs, "commands", lambda with_plans: iter(few))
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / "kept")])
    assert user_outputs.main() == 0
    assert (tmp_path / "kept" / "help.txt").read_text(encoding="utf-8") == overview
    assert "exit status 2" in (tmp_path / "kept" / "wrong.txt").read_text(encoding="utf-8")
    assert capsys.readouterr().out == f"2 outputs are in {tmp_path / 'kept'}\n"


@pytest.mark.long
@pytest.mark.usefixtures("brief_searches")
def test_a_feature_is_simulated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "vocabulary --ranks 2 --microbatches 4 --layers 8 --output-layers 2 --schedules zb-h1"
    monkeypatch.setattr(sys, "argv", ["feature_gains.py", *words.split()])
    feature_gains.main()
    heading, row, line = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["output", "layer", "schedule"]
    assert row.split()[:3] == ["2", "layers", "zb-h1"]
    found = json.loads(line)
    assert found["sizes"]["layers"] == 8
    (makespans,) = found["makespans"]
    assert max(makespans["best"], makespans["cut"]) < makespans["even"]
    assert f"{makespans['cut']:.1f}" in row.split()


def test_a_table_has_what_is_known_of_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"limit": 0.5, "kept": {}}, {"limit": 1.0, "kept": {"loss": 0.25}}]
    columns = [("limit", "{limit:g}"), ("loss", "{kept[loss]:.0%}")]
    assert feature_gains.printed(iter(rows), columns) == rows
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["limit", "loss"], ["0.5", "-"], ["1", "25%"]]


@pytest.mark.slow
def test_a_teacher_is_timed_beside_the_step_and_before_it() -> None:
    """It ends with an error where losses differ."""
    sizes = "--hidden 32 --sequence 16 --vocabulary 32 --layers 4 --teacher-layers 2".split()
    done = benchmark(
        "teacher_beside.py", *sizes, "--microbatches", "3", "--turns", "1", "--steps", "2"
    )
    assert done.code == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert rows.keys() == {"1f1b", "v-half"}
    for row in rows.values():
        assert len(row["before"]) == len(row["beside"]) == 2
        assert row["ratio"] > 0
        assert row["gap"] >= 0
