"""What one lent GPU is asked, as far as a CPU can tell: order, limits and comparisons."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job, run_script, started
from layer_sizes import LayerSizes
from ranks import RankPool, RankPools

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RUN_ALL = BENCHMARKS / "gpu" / "run_all.sh"
sys.path.append(str(BENCHMARKS / "gpu"))
import measurements  # noqa: E402
import one_gpu_training  # noqa: E402
import planned  # noqa: E402
import queues  # noqa: E402
import report  # noqa: E402
import step_times  # noqa: E402
from training_rank import Job  # noqa: E402

SIZES = LayerSizes(
    hidden=32, heads=4, ffn_hidden=48, seq_length=16, micro_batch_size=1, vocabulary=64
)
JOB = Job(1, None, 4, 4, 2, "fp32", "cpu", True, 90.0, SIZES)


def call(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize(
    "script",
    [
        "measurements.py",
        "queues.py",
        "waiting_receive.py",
        "one_gpu_training.py",
        "step_times.py",
        "graphs.py",
        "quantized_gradients.py",
        "random_states.py",
    ],
)
def test_help(script: str) -> None:
    done = run_script(BENCHMARKS / "gpu" / script, "--help")
    assert done.code == 0
    assert "--device" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "give --pack FOLDER where there is a network, or --output FILE on the GPU machine"),
        ("--output", "--output needs a value, see --help"),
        ("--fast", "--fast is not an option of this script, see --help"),
        (
            "--pack f --output o",
            "--pack goes alone: give --carried and --output on the GPU machine",
        ),
        ("--pack f --for 3", "--for 3 is not a version of Python such as 3.12"),
        ("--pack /", "/ is not empty: give --pack a new folder"),
        ("--output o --device tpu", "--device tpu is neither cuda nor cpu"),
        ("--output o --python no-python", "no-python is not a Python: give --python COMMAND"),
    ],
)
def test_run_all_refuses_in_one_sentence(arguments: str, sentence: str) -> None:
    done = call(RUN_ALL, "--python", sys.executable, *arguments.split())
    assert (done.returncode, done.stderr) == (2, f"run_all.sh: error: {sentence}\n")


def test_run_all_has_help_and_wants_what_was_packed(tmp_path: Path) -> None:
    assert "usage: benchmarks/gpu/run_all.sh" in call(RUN_ALL, "--help").stdout
    done = call(RUN_ALL, "--output", "o", "--carried", tmp_path)
    assert done.returncode == 2
    assert "was not made by --pack: there is no packages.tar.gz in it" in done.stderr
    (tmp_path / "packages.tar.gz").write_text("torn")
    done = call(RUN_ALL, "--output", "o", "--carried", tmp_path)
    assert done.returncode == 2
    assert "packages.tar.gz is damaged: pack it again" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_run_all_needs_a_gpu(tmp_path: Path) -> None:
    done = call(RUN_ALL, "--python", sys.executable, "--output", tmp_path / "results.json")
    assert done.returncode == 2
    assert "sees no GPU here: --device cpu tries it out without one" in done.stderr


SECONDS = {"slow": 3, "late": 3, "hangs": 3}


def measured(
    folder: Path, programs: dict[str, str], monkeypatch: pytest.MonkeyPatch, **more: Any
) -> dict[str, Any]:
    """What is in the file after these programs; those that would not end have few seconds."""
    runs = []
    for name, program in programs.items():
        (folder / f"{name}.py").write_text(program)
        runs.append(
            measurements.Measurement(name, f"{name}.py", "", SECONDS.get(name, 30), "", **more)
        )
    output = folder / "results.json"
    monkeypatch.setattr(measurements, "PARTS", {"one-gpu": runs})
    monkeypatch.setattr(measurements, "BENCHMARKS", folder)
    monkeypatch.setattr(sys, "argv", ["m", "--device", "cpu", "--output", str(output)])
    status = measurements.main()
    found: dict[str, Any] = json.loads(output.read_text())["measurements"]
    assert status == any("failed" in answer for answer in found.values())
    for answer in found.values():
        assert answer.pop("wall_seconds", 0) >= 0
    return found


@pytest.mark.slow
def test_what_was_measured_is_kept_and_what_failed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = {
        "broken": """print('{"first": 1}'); raise RuntimeError('out of memory')""",
        "silent": "print('no figures')",
        "slow": "import time; print('working', flush=True); time.sleep(30)",
        "good": """print("a table"); print('{"ratio": 1.0}')""",
    }
    assert measured(tmp_path, programs, monkeypatch) == {
        "broken": {
            "failed": "with exit status 1",
            "last_line": "RuntimeError: out of memory",
            "found": {"first": 1},
        },
        "silent": {"failed": "its last line is not JSON", "last_line": "no figures"},
        "slow": {"failed": "it took more than 3 s", "last_line": "working"},
        "good": {"ratio": 1.0},
    }
    assert "==> slow failed, it took more than 3 s: working" in capsys.readouterr().err


HANGS = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(json.dumps({"answers": [1], "child": child.pid}), flush=True)
child.wait()
"""


@pytest.mark.slow
def test_what_hangs_is_killed_with_its_processes_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {"hangs": HANGS, "good": """print('{"ratio": 1.0}')"""}
    found = measured(tmp_path, programs, monkeypatch)
    assert found["good"] == {"ratio": 1.0}
    assert found["hangs"]["failed"] == "it took more than 3 s"
    assert found["hangs"]["found"]["answers"] == [1]
    assert found["hangs"]["last_line"] == ""  # not the figures once more
    assert ends(found["hangs"]["found"]["child"])


@pytest.mark.full
def test_who_is_terminated_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "process"
    program = f"""
import os, signal, time
open({str(file)!r}, "w").write(str(os.getpid()))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""
    usual = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit):
            measured(tmp_path, {"terminates": program}, monkeypatch)
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert ends(int(file.read_text()))


def ends(process: int) -> bool:
    """Whether a process that is no child of this one is gone, or a zombie, within a moment."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    os.kill(process, signal.SIGKILL)
    return False


@pytest.mark.slow
def test_all_measurements_together_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measurements.TOTAL_SECONDS + measurements.KILLED_WITHIN < 10 * 60
    monkeypatch.setattr(measurements, "TOTAL_SECONDS", 2.0)
    monkeypatch.setattr(measurements, "LEAST_SECONDS", 1.0)
    slow = "import time; print('{\"first\": 1}', flush=True); time.sleep(30)"
    found = measured(tmp_path, {"first": slow, "late": slow}, monkeypatch)
    assert found["first"] == {"not_measured": "no time was left", "found": {"first": 1}}
    assert found["late"] == {"not_measured": "no time was left"}


MEETS = """
import pathlib, sys, time
here = pathlib.Path(__file__)
here.with_suffix(".began").touch()
other = here.with_name({other!r}).with_suffix(".began")
until = time.monotonic() + {seconds}
while time.monotonic() < until and not other.exists():
    time.sleep(0.01)
print('{{"met": %d}}' % other.exists())
"""


@pytest.mark.parametrize("alone", [False, True])
def test_on_a_gpu_what_may_share_it_runs_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    seconds = 0.5 if alone else 60.0
    runs = []
    for name, other in (("first", "second"), ("second", "first")):
        (tmp_path / f"{name}.py").write_text(MEETS.format(other=other, seconds=seconds))
        runs.append(measurements.Measurement(name, f"{name}.py", "", 100, "", alone=alone))
    monkeypatch.setattr(measurements, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(measurements, "_missing", lambda *_: None)
    found = dict(measurements._answers(runs, "cuda", time.monotonic() + 100))
    assert found["first"]["met"] == (not alone)
    assert found["second"]["met"]


def test_results_have_no_names_of_folders_and_hosts() -> None:
    text = f"File /home/someone/megatron_zb/x.py:3 on {platform.node()}, 1/2 of a/b"
    found = measurements.without_places({"a": [text, 3], "b": None})
    assert found == {"a": ["File x.py:3 on HOST, 1/2 of a/b", 3], "b": None}


@pytest.mark.slow
def test_the_check_of_gpus_refuses_in_one_sentence() -> None:
    script = BENCHMARKS.parent / "scripts" / "gpu_check.sh"
    assert "usage: scripts/gpu_check.sh" in call(script, "--help").stdout
    for words, sentence in (
        (["--fast"], "--fast is not an option of this script, see --help"),
        (["--output"], "--output needs a value, see --help"),
        (["--python", sys.executable], "sees no GPU here: --cpu tries it out without one"),
    ):
        if words[0] == "--python" and torch.cuda.is_available():
            continue
        done = call(script, *words)
        assert done.returncode == 2
        assert done.stderr.startswith("gpu_check.sh: error: ")
        assert done.stderr.endswith(f"{sentence}\n")
        assert done.stderr.count("\n") == 1


MEASURED: dict[str, Any] = {
    "machine": {"device": "cuda", "gpu": "H100", "gpus": 2, "torch": "2.9", "driver": None},
    "commit": "abc",
    "date": "2026-11-25",
    "seconds": 100.0,
    "measurements": {
        "queues": {
            "benchmark": "queues",
            "answers": {"a": {"held_up": True}, "b": {"held_up": False}, "c": {"held_up": 0}},
        },
        "waiting": {
            "benchmark": "waiting_receive",
            "receives": "NCCL",
            "product_ms": {"channels": {"0": 2.0, "4": 3.0}},
            "pinned": {"asked": 100, "taken": 200},
        },
        "training": {
            "failed": "it took more than 3 s",
            "last_line": "x",
            "found": {
                "benchmark": "one_gpu_training",
                "job": {"dtype": "bf16", "fp8": "delayed", "experts": 4, "dropout": 0.1}
                | {"implementation": "transformer-engine"},
                "results": [
                    {
                        "schedule": "v-zb",
                        "ranks": 2,
                        "equal_losses": True,
                        "differing_weights": [],
                    },
                    {
                        "schedule": "v-half",
                        "ranks": 2,
                        "equal_losses": True,
                        "differing_weights": ["w"],
                    },
                    {
                        "schedule": "v-min",
                        "ranks": 4,
                        "equal_losses": True,
                        "differing_weights": ["w"],
                    },
                    {
                        "schedule": "zb-h1",
                        "ranks": 2,
                        "equal_losses": False,
                        "largest_loss_difference": 0.5,
                    },
                ],
            },
        },
        "split": {
            "benchmark": "split_backward",
            "results": [
                {"implementation": name, "dtype": "bf16", "ratio": 1.01}
                | {"seconds": {"F": 0.001, "B": 0.002, "W": 0.003, "BW": 0.004}}
                for name in ("local", "local-flash")
            ],
        },
        "memory": {
            "benchmark": "rank_memory",
            "job": {"implementation": "local", "sizes": {"vocabulary": 8}},
            "results": {"1f1b": {"peak_bytes_ratio": 1.0}, "v-min": {"peak_bytes_ratio": 0.51}},
        },
        "steps": {
            "benchmark": "step_times",
            "ranks": 2,
            "results": {
                "v-zb": {"step_seconds": 0.5, "of_megatron": 0.9, "peak_bytes": 2**31},
                "v-half": {"failed": "no"},
            },
        },
        "gradients": {
            "benchmark": "quantized_gradients",
            "results": [
                {"recipe": "delayed", "kind": "Linear", "unequal": []},
                {"recipe": "delayed", "kind": "GroupedLinear", "unequal": []},
                {"recipe": "current", "kind": "Linear", "unequal": []},
                {"recipe": "current", "kind": "GroupedLinear", "unequal": ["weight"]},
                {"recipe": "blockwise", "kind": "Linear", "unequal": []},
                {"recipe": "mxfp8", "not_measured": "an older GPU"},
            ],
        },
        "graphs": {
            "benchmark": "graphs",
            "schedule": "v-half",
            "precision": "bf16",
            "ranks": 2,
            "equal": [[True], [False]],
        },
        "features": {
            "benchmark": "features",
            "ranks": 4,
            "rows": [
                {"feature": "a", "schedule": "v-half", "equal": True, "why": ""},
                {"feature": "b", "schedule": None, "equal": None, "why": "no kernel"},
                {"feature": "a", "schedule": "v-zb", "equal": True, "why": ""},
                {"feature": "c", "schedule": "v-zb", "equal": False, "why": ""},
            ],
        },
        "random": {"benchmark": "random_states", "equal": {"a": True, "b": False}},
        "late": {"not_measured": "no time was left"},
    },
}


PLANNED = {"step_seconds": 0.4, "tokens_per_second": 5.0, "bubble": 0.05, "peak_bytes": 2**30}
STEPS: dict[str, Any] = {
    "benchmark": "step_times",
    "ranks": 2,
    "layers": 16,
    "microbatches": 8,
    "implementation": "local",
    "planned_for": "H100 SXM",
    "sizes": {"hidden": 2048, "seq_length": 4096},
    "results": {
        "megatron": {**PLANNED, "step_seconds": 0.5, "of_megatron": 1.0, "plan": PLANNED},
        "megatron-interleaved": {**PLANNED, "chunks": 4, "plan": {"not_predicted": "no time"}},
        "v-zb": {"failed": "a rank ended", "out_of_memory": True},
        "auto": {"not_measured": "no time was left"},
    },
}


def test_a_table_to_paste_has_each_schedule_beside_its_plan() -> None:
    measured = {"machine": {"gpu": "H100"}, "measurements": {"step_times": STEPS}}
    first, *table = report.to_paste(measured)
    assert first.startswith("2 x H100: 16 layers of hidden size 2048, 8 microbatches of 4096 tok")
    assert table[3:] == [
        "| megatron | 5 | 1.000 | 1 | 5.0% | 5 |  | 1 | 5.0% |",
        "| megatron-interleaved ×4 | 5 |  | 1 | 5.0% | no time |  |  |  |",
        "| v-zb | out of memory |  |  |  | not measured |  |  |  |",
        "| auto | no time was left |  |  |  | not measured |  |  |  |",
    ]
    assert report.to_paste({"machine": {}, "measurements": {}}) == []
    rows = [(row.what, row.measured) for row in report.rows(measured) if row.part == "step_times"]
    assert rows[1] == (
        "megatron-interleaved ×4: a step on 2 ranks",
        "400.0 ms, 1.00 GiB at most, bubble 5.0%",
    )
    assert rows[2:] == [("v-zb", "out of memory"), ("auto", "no time was left")]


def test_the_model_of_the_check_fills_the_gpu() -> None:
    """By the count of the plan, with room for Megatron's interleaved schedule."""
    for gpu, memory, ranks in (("NVIDIA H100 80GB HBM3", 80, 8), ("NVIDIA B200", 180, 2)):
        device = planned.device_of(gpu, memory * 2**30)
        assert device is not None
        training = planned.PlannedTraining(step_times.SIZES, 8 * ranks, ranks, 4 * ranks, device)
        training = replace(training, sizes=replace(training.sizes, vocabulary=32000))
        sizes = next(planned.largest_first(training))
        largest = replace(training, sizes=sizes)
        assert 0.6 < largest.bytes_of_1f1b / device.memory_bytes < 0.75
        two = largest.prediction("megatron-interleaved+2chunks")
        assert two.memory.total < device.memory_bytes
        assert sizes.hidden % sizes.heads == 0
    assert planned.device_of("Some other GPU") is None
    assert planned.chunk_counts(8) == [2, 4, 8]
    assert planned.chunk_counts(6) == [2]


KIND = "fp8 delayed TE experts dropout"


def test_a_table_has_what_was_measured_failed_or_had_no_time() -> None:
    sys.path.append(str(BENCHMARKS.parent / "docs"))
    from make_performance import of_gpus

    lines = of_gpus([MEASURED])
    assert lines[0] == "On 2 x H100, with torch 2.9, on 2026-11-25, at commit abc."
    assert lines[4:] == [
        "| blocked while another kernel waits (queues) | a |",
        "| time of a matrix product beside n receives (NCCL, channels) | 0: 1.00, 4: 1.50 |",
        "| pinned memory that is allocated, relative to the request | 2.00 |",
        "| failed | it took more than 3 s: x |",
        f"| v-zb/2 in {KIND} | losses and weights bit-equal to Megatron's |",
        f"| v-half/2, v-min/4 in {KIND} | 1 weights differ |",
        f"| zb-h1/2 in {KIND} | losses differ by up to 0.5 from Megatron's |",
        "| time of F+B+W relative to F+BW in bf16, target 1.02 (ms of F/B/W/BW) | "
        "local 1.010 (1.00/2.00/3.00/4.00), local-flash 1.010 (1.00/2.00/3.00/4.00) |",
        "| allocated peak of the worst rank, relative to 1F1B's, local, whole model | "
        "1f1b 1.000, v-min 0.510 (target 0.54) |",
        "| v-zb: a step on 2 ranks | 500.0 ms, 0.900 of Megatron's 1F1B, 2.00 GiB at most |",
        "| v-half | failed: no |",
        "| weight gradients of W, delayed, blockwise scaling | bit-equal to a whole backward's |",
        "| weight gradients of W, current scaling | others in GroupedLinear |",
        "| weight gradients of W, mxfp8 scaling | an older GPU |",
        "| v-half/2 in bf16 | steps replayed from CUDA graphs not equal to steps without |",
        "| pretrain_gpt.py, 4 ranks: a (v-half, v-zb) | equal losses |",
        "| pretrain_gpt.py, 4 ranks: b (Megatron's own) | not shown: no kernel |",
        "| pretrain_gpt.py, 4 ranks: c (v-zb) | OTHER LOSSES |",
        "| dropout masks of a recomputed forward, RNG tracker a | equal |",
        "| dropout masks of a recomputed forward, RNG tracker b | other |",
        "| not measured | no time was left |",
    ]
    assert len(of_gpus([])) == 1


@pytest.mark.full
def test_the_check_of_gpus_runs_on_a_cpu(tmp_path: Path) -> None:
    """With tiny sizes: the same programs, and the file that the page is made of."""
    output = tmp_path / "check.json"
    script = BENCHMARKS.parent / "scripts" / "gpu_check.sh"
    words = ["--cpu", "--output", str(output), "--python", sys.executable]
    done = subprocess.run([script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text(encoding="utf-8"))
    assert all("failed" not in found for found in results["measurements"].values())
    assert list(results["measurements"]) == [m.name for m in measurements.CHECK]
    text = output.read_text(encoding="utf-8")
    assert str(BENCHMARKS.parent) not in text
    assert platform.node() not in text


@pytest.mark.full
def test_a_measurement_has_its_environment_and_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = {"asks": "import json, os; print(json.dumps({'x': os.environ['LOADING']}))"}
    assert measured(tmp_path, asks, monkeypatch, environment={"LOADING": "LAZY"}) == {
        "asks": {"x": "LAZY"}
    }
    asks = {"asks": "import os, sys; sys.stdout.write('{\"x\": %s}\\n' % os.environ['WORLD_SIZE'])"}
    assert measured(tmp_path, asks, monkeypatch, processes=2) == {"asks": {"x": 2}}
    assert measured(tmp_path, asks, monkeypatch, needs="transformer_engine") == {
        "asks": {"not_measured": "transformer_engine needs a GPU"}
    }


def test_what_decides_is_asked_before_what_is_only_slow() -> None:
    for parts in measurements.PARTS.values():
        scripts = list(dict.fromkeys(m.script for m in parts))
        assert scripts[:3] == [
            "gpu/queues.py",
            "gpu/waiting_receive.py",
            "gpu/one_gpu_training.py",
        ]
        assert all((BENCHMARKS / script).is_file() for script in scripts)
    asked = [dict(m.environment) for m in measurements.ONE_GPU[:2]]
    assert asked[0].keys() == asked[1].keys()
    assert all(asked[0][name] != asked[1][name] for name in asked[0])


class SimulatedGpu:
    """Stands in for `torch.cuda` and the clock, as there is no GPU: streams that take turns.

    With one connection, work that cannot start yet holds up all that was enqueued after it.
    """

    def __init__(self, connections: int) -> None:
        self.now = 0.0
        self._connections = connections
        self._issued = 0.0
        self.current = self.Stream()
        self.time = self

    class Stream:
        free_at = 0.0

        def wait_event(self, event: Any) -> None:
            self.free_at = max(self.free_at, event.at)

    def Event(self, enable_timing: bool = False) -> Any:
        gpu = self

        class Event:
            at = 0.0

            def record(self) -> None:
                self.at = gpu.enqueue(0.0)

            def query(self) -> bool:
                return gpu.now >= self.at

            def synchronize(self) -> None:
                gpu.now = max(gpu.now, self.at)

            def elapsed_time(self, end: Any) -> float:
                return 1000 * float(end.at - self.at)

        return Event()

    def enqueue(self, seconds: float) -> float:
        start = max(self.now, self.current.free_at)
        if self._connections == 1:
            start = self._issued = max(start, self._issued)
        self.current.free_at = start + seconds
        self.last = max(getattr(self, "last", 0.0), self.current.free_at)
        return self.current.free_at

    def _sleep(self, cycles: int) -> None:
        self.enqueue(cycles / 1e9)

    def synchronize(self) -> None:
        self.now = max(self.now, self.last)

    @contextmanager
    def stream(self, stream: SimulatedGpu.Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("connections", [1, 8])
def test_queues_tells_what_is_held_up(connections: int, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = SimulatedGpu(connections)
    monkeypatch.setattr(torch, "cuda", simulated)
    monkeypatch.setattr(queues, "time", simulated)
    calls = {"launch": lambda: None, "allocation": simulated.synchronize}
    monkeypatch.setattr(queues.Gpu, "_calls", lambda self: calls)
    gpu = queues.Gpu(torch.device("cpu"))
    found = {name: ask() for name, ask in gpu.questions()}
    one = connections == 1
    held_up = {name: answer.get("held_up") for name, answer in found.items()}
    assert held_up == {
        "kernel elsewhere, nothing else queued": False,
        "kernel elsewhere, an event queued": one,
        "kernel elsewhere, a second receive queued": one,
        "kernel elsewhere, a stream that waits queued": one,
        "kernels on 16 other streams": 0,
        "launch": False,
        "allocation": True,
        "first launch of copysign while nothing spins": None,
    }
    assert found["kernel elsewhere, an event queued"]["done_ms"] == (300 if one else 0)
    assert found["launch"] == {"host_ms": 0, "held_up": False, "all_ms": 300}
    assert found["allocation"]["host_ms"] == 300


def test_a_cpu_has_no_queues() -> None:
    done = run_script(BENCHMARKS / "gpu" / "queues.py", "--device", "cpu")
    assert json.loads(done.stdout)["not_measured"] == "a CPU has no queues of kernels"


TINY = "--device cpu --hidden 32 --heads 4 --ffn-hidden 48 --seq-length 16 --vocabulary 64"


class ForkedRank:
    """A rank that is forked off a process that has imported torch, in place of one that is not."""

    def __init__(self, job: Job, rank: int, folder: Path) -> None:
        words = [json.dumps(asdict(job)), str(rank), str(folder)]
        printed = [folder / f"rank{rank}.log"] * 2
        self._process = started(str(one_gpu_training.RANK), words, {}, printed)

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.full)])
def test_ranks_of_one_device_train_to_the_losses_of_one_rank(
    forked: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages take the way they take on a GPU, where streams and events are stand-ins."""
    sizes = "--ranks 2 --schedules v-half --layers 4 --microbatches 4 --steps 2 --seconds 120"
    if forked:
        monkeypatch.setattr(one_gpu_training, "_started", ForkedRank)
    monkeypatch.setattr(sys, "argv", ["x", "--host-memory", *f"{TINY} {sizes}".split()])
    code = one_gpu_training.main()
    said = capsys.readouterr()
    assert code == 0, said.err
    line = json.loads(said.out.splitlines()[-1])
    (result,) = line["results"]
    assert result["equal_losses"] is True
    assert result["differing_weights"] == []
    first, second = line["reference"]["losses"]
    assert len(first) == len(second) == 4
    assert first != second
    assert line["problems"] == []


@pytest.mark.parametrize(
    ("program", "reason", "printed"),
    [
        ("raise SystemExit('no memory')", "rank 0 ended with exit status 1", "no memory"),
        ("print('at work', flush=True); import time; time.sleep(60)", "not done after 3 s on rank 0"
         ", 1", "at work"),
    ],
)  # fmt: skip
def test_a_training_that_does_not_end_says_where_its_ranks_are(
    program: str, reason: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(f"import sys\nif sys.argv[2] == '0' or 'work' in {printed!r}:\n    {program}")
    monkeypatch.setattr(one_gpu_training, "RANK", script)
    expected = one_gpu_training.Trained([[1.0]], {"w": "a"}, [0.1])
    job = replace(JOB, ranks=2, schedule="v-half")
    result = one_gpu_training._compare(job, expected, 3)
    assert result["failed"] == reason
    assert result["printed"]["rank 0"] == [printed]
    assert one_gpu_training._problem(result) == f"v-half on 2 ranks: {reason}"


def test_one_bit_of_a_loss_or_a_weight_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = one_gpu_training.Trained([[1.0], [0.5]], {"w": "a", "v": "b"}, [0.1, 0.1])
    job = replace(JOB, ranks=4, schedule="v-zb")
    for found, problem in (
        (expected, None),
        (replace(expected, losses=[[1.0], [0.25]]), "losses differ by up to 0.25"),
        (replace(expected, weights={"w": "a", "v": "c"}), "1 of 2 weights differ"),
    ):
        monkeypatch.setattr(one_gpu_training, "train", lambda job, seconds, found=found: found)
        said = one_gpu_training._problem(one_gpu_training._compare(job, expected, 3))
        assert said == (problem and f"v-zb on 4 ranks: {problem}")


@pytest.mark.long
def test_steps_are_timed_beside_megatrons_own_and_the_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With real trainings, of which a CPU says that they run."""
    monkeypatch.setattr(one_gpu_training, "_started", ForkedRank)
    sizes = "--layers-per-rank 2 --microbatches 4 --steps 2 --seconds 250 --total-seconds 1000"
    schedules = "--schedules megatron megatron-interleaved auto"
    monkeypatch.setattr(sys, "argv", ["x", *f"{TINY} {sizes} {schedules} --dtype fp32".split()])
    step_times.main()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    results = line["results"]
    assert list(results) == ["megatron", "megatron-interleaved", "auto"]
    for name, result in results.items():
        assert "failed" not in result, (name, result)
        for figures in (result, result["plan"]):
            assert figures["tokens_per_second"] == pytest.approx(64 / figures["step_seconds"])
            assert 0 < figures["bubble"] < 1
            assert figures["peak_bytes"] > 0
            assert figures["of_megatron"] > 0
        assert result["steps"] == 2
    assert results["megatron-interleaved"]["chunks"] == 2
    assert results["megatron-interleaved"]["tried"].keys() == {"2"}
    assert results["auto"]["peak_bytes"] <= 1.1 * results["megatron"]["peak_bytes"]


def test_the_fastest_chunks_and_the_largest_size_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU that is not there: trainings that are too wide run out of memory."""
    gpu = types.SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    wide: list[int] = []
    seconds = {"megatron": 1.0, "2chunks": 0.9, "4chunks": 0.8, "v-half": 0.7}

    def train(job: Job, limit: float) -> one_gpu_training.Trained:
        wide.append(job.sizes.hidden)
        way = (job.schedule or "").rpartition("+")[2]
        if way == "8chunks" or job.sizes.hidden == max(wide):
            raise one_gpu_training.Failed("rank 0 ended", {"rank 0": ["torch.OutOfMemoryError"]})
        return one_gpu_training.Trained([], {}, [seconds[way]], 2**30, bubbles=(0.1,))

    monkeypatch.setattr(step_times, "train", train)
    monkeypatch.setattr(sys, "argv", ["x", "--schedules", *"megatron-interleaved v-half".split()])
    args = step_times._arguments()
    cpu = step_times._job(args, torch.device("cpu"), 2)
    *_, line = step_times.Check(args, replace(cpu, device="cuda")).lines({})
    results = line["results"]
    assert line["sizes"]["hidden"] == wide[1] == wide[0] - 512
    assert results["megatron-interleaved"]["chunks"] == 4
    tried = {2: 0.9, 4: 0.8, 8: "out of memory"}
    assert results["megatron-interleaved"]["tried"] == tried
    assert results["v-half"]["of_megatron"] == 0.7
    assert results["v-half"]["tokens_per_second"] == pytest.approx(8 * 4096 / 0.7)
    assert 0.8 < results["v-half"]["plan"]["of_megatron"] < 1


def test_nothing_runs_beside_what_is_timed() -> None:
    timed = ("gpu/queues.py", "gpu/waiting_receive.py", "gpu/step_times.py", "split_backward.py")
    for parts in measurements.PARTS.values():
        assert all(m.alone for m in parts if m.script in timed)


def exchanged() -> tuple[list[float], int]:
    """Run on a rank: messages both ways, and how often a stream waited for a receive's copy."""
    from host_memory_channels import HostMemoryChannels

    from megatron_zb.schedules.passes import Channel
    from megatron_zb.schedules.placement import v_shape

    me = torch.distributed.get_rank()
    channels = HostMemoryChannels([0, 1], v_shape(2), "cpu")
    waited: list[Any] = []

    class Current:
        def wait_event(self, event: Any) -> None:
            waited.append(event)

    usual, torch.cuda.current_stream = torch.cuda.current_stream, Current  # type: ignore
    there, back = Channel(me, 1 - me), Channel(1 - me, me)
    sends = [channels._isend(there, torch.full((2,), 10.0 * me + i)) for i in range(3)]
    buffers = [torch.zeros(2) for _ in range(3)]
    for buffer in buffers:
        channels._irecv(back, buffer).wait()
    for send in sends:
        send.wait()
    torch.cuda.current_stream = usual
    assert all(send.is_completed() for send in sends)
    channels.close()
    return [float(buffer.sum()) / 2 for buffer in buffers], len(waited)


def test_messages_through_the_host_keep_their_order(ranks: RankPools) -> None:
    """On a CPU, with the stand-ins for streams and events that Megatron runs with there."""
    assert ranks(2).run(exchanged) == [([10.0, 11.0, 12.0], 3), ([0.0, 1.0, 2.0], 3)]


@pytest.mark.full
def test_graphs_are_not_captured_on_a_cpu_but_the_steps_are_run() -> None:
    sizes = "--hidden 32 --heads 4 --ffn-hidden 48 --seq-length 16 --micro-batch-size 1 --layers 4"
    script = str(BENCHMARKS / "gpu" / "graphs.py")
    options = f"--device cpu --microbatches 4 --schedules v-half zb-h1 {sizes}".split()
    shared = "--graphs transformer_engine --share-device".split()
    done = run_job(2, script, [*options, *shared], 120)
    assert done.code == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["schedule"] for line in lines] == ["v-half", "zb-h1"]
    for line in lines:
        assert line["graphs"] == "none: a CPU captures nothing"
        assert line["equal"] == [[True] * 5] * 2


def test_no_graph_of_a_whole_iteration_has_messages_over_gloo() -> None:
    done = run_script(BENCHMARKS / "gpu" / "graphs.py", "--device", "cpu", "--share-device")
    assert done.code == 2
    assert (
        "--share-device goes with --graphs transformer_engine: gloo is in no graph" in done.stderr
    )


def quantized_gradients_with_stand_ins(recipe: str) -> list[dict[str, Any]]:
    """On stand-ins for the kernels: they say that the script works, and nothing about a GPU."""
    sys.path[:0] = [str(BENCHMARKS / "gpu"), str(BENCHMARKS)]
    import quantized_gradients

    cpu, found = torch.device("cpu"), []
    for kind in quantized_gradients.KINDS:
        for fused in (False, True):
            found.append(quantized_gradients.compare(kind, recipe, fused, [256, 128, 128], cpu))
    return found


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_quantized_gradients_are_compared(te_pool: RankPool, recipe: str) -> None:
    for of_rank in te_pool.run(quantized_gradients_with_stand_ins, recipe=recipe):
        assert [result["unequal"] for result in of_rank] == [[]] * 8
        assert all(result["compared"] >= 5 and result["held_bytes"] for result in of_rank)


@pytest.mark.long
def test_quantized_gradients_needs_a_gpu() -> None:
    done = run_script(BENCHMARKS / "gpu" / "quantized_gradients.py", "--device", "cpu")
    reason = "the kernels of Transformer-Engine need a GPU and torch sees none"
    assert (done.code, done.stderr) == (2, f"quantized_gradients.py: error: {reason}\n")


@pytest.mark.long
def test_masks_are_drawn_again_on_a_cpu_too() -> None:
    done = run_script(BENCHMARKS / "gpu" / "random_states.py", "--device", "cpu")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["equal"] == {"Megatron's": True}


@pytest.mark.parametrize(
    "more",
    [
        "--reference v-half --dropout 0.1 --schedules v-half+dropped v-half+moved",
        "--experts 4 --schedules v-half",
    ],
)
@pytest.mark.full
def test_trainings_with_dropout_and_experts_are_compared(
    more: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--ranks 2 --layers 4 --microbatches 4 --steps 2 --seconds 300"
    monkeypatch.setattr(one_gpu_training, "_started", ForkedRank)
    monkeypatch.setattr(sys, "argv", ["x", *f"{TINY} {sizes} {more}".split()])
    code = one_gpu_training.main()
    said = capsys.readouterr()
    line = json.loads(said.out.splitlines()[-1])
    assert (code, line["problems"]) == (0, []), said.err
    assert all(result["equal_losses"] for result in line["results"])
