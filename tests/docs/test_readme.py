"""README: every figure is computed and every command is run."""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from project import project
from small_trees import checkout_tree

from megatron_zb import schedules
from megatron_zb.cli import main as cli
from megatron_zb.megatron_core.versions import SERIES, SUPPORTED
from megatron_zb.schedules import Costs

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs"))
import make_performance  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
BELOW_THE_FOLD = "## Next to others"
PLANNED = re.compile(
    r"`v-half` with vocabulary parallelism to be ([\d.]+) % faster than Megatron's best "
    r"interleaved setting, and ([\d.]+) % faster than Megatron's best, which is 1F1B here"
)
FENCED = re.compile(r"^```\n(.*?)^```$", re.M | re.S)


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs" / "results" / name).read_text())
    return found


def simulated(name: str, p: int, m: int, costs: Costs) -> tuple[float, float]:
    """The bubble in percent, and the most activations of a rank in microbatches."""
    schedule = schedules.build(name, pipeline_size=p, num_microbatches=m, costs=costs)
    timeline = schedules.simulate(schedule, costs)
    return 100 * timeline.bubble_rate, max(timeline.peak_activation)


def beside_others() -> Iterator[str]:
    """What two schedules gain beside interleaved 1F1B, at its best number of chunks, and 1F1B."""
    costs = Costs.uniform(pipeline_size=8, forward=1, backward=1.2, weight=0.8, p2p=0.05)
    plain, zero, half = (step(name, 8, 32, costs) for name in ("1f1b", "v-zb", "v-half"))
    tuned = min(step("interleaved", 8, 32, costs, chunks) for chunks in (2, 4, 8))
    yield "On 8 pipeline ranks with 32 microbatches"
    yield (
        f"`v-zb` is {100 * (tuned[0] / zero[0] - 1):.1f} % faster in {zero[1] / tuned[1]:.2f} of "
        "the memory"
    )
    assert zero[1] == plain[1]
    yield (
        f"`v-zb` is {100 * (plain[0] / zero[0] - 1):.1f} % faster in the same memory, `v-half` "
        f"{100 * (plain[0] / half[0] - 1):.1f} % faster in {half[1] / plain[1]:.2f} of it"
    )


def step(name: str, p: int, m: int, costs: Costs, chunks: int | None = None) -> tuple[float, float]:
    """The time of a step, and the most activations of a rank in microbatches."""
    schedule = schedules.build(
        name, pipeline_size=p, num_microbatches=m, costs=costs, chunks=chunks
    )
    timeline = schedules.simulate(schedule, costs)
    return timeline.makespan, max(timeline.peak_activation)


def beside_recipes() -> Iterator[str]:
    """Medians of public recipes with interleaved 1F1B and 8 or more microbatches per rank."""
    rows = [
        row
        for row in results("recipe_gains.json")["rows"]
        if row["chunks"] > 1 and row["microbatches"] >= 8 * row["pipeline"]
    ]
    longer = statistics.median(row["v_half"] / row["own"] for row in rows) - 1
    memory = statistics.median(row["v_half_memory"] / row["own_memory"] for row in rows)
    yield f"{len(rows)} public interleaved recipes with many microbatches"
    yield f"a step of `v-half` takes {100 * longer:.1f} % longer in {memory:.2f} of the memory"


def the_picture() -> Iterator[str]:
    costs = Costs.uniform(pipeline_size=4, forward=1, backward=1, weight=1)
    (half, less), (own, most) = (simulated(name, 4, 8, costs) for name in ("v-half", "1f1b"))
    yield "`v-half` on 4 ranks with 8 microbatches"
    yield (
        f"idle for {half:.0f} % of the time instead of 1F1B's {own:.0f} %, and {less:.0f} "
        f"microbatches in memory instead of {most:.0f}"
    )


def measurements() -> Iterator[str]:
    took = results("runtime_overhead.cpu.json")["ratio"].values()
    assert len(took) == len(schedules.names())
    yield f"{100 * (statistics.median(took) - 1):.1f} % longer (median of {len(took)} schedules)"
    yield f"explains all {len(schedules.names())}"
    [found] = make_performance.gpu_results()
    yield from gpu_figures(found["measurements"])


def gpu_figures(found: dict[str, Any]) -> Iterator[str]:
    trainings = [
        training
        for part in found.values()
        if part.get("benchmark") == "one_gpu_training" and part["reference"]["schedule"] is None
        for training in part["results"]
        if "slices" not in training["schedule"]
    ]
    assert {training["ranks"] for training in trainings} == {2, 4}
    assert all(t["equal_losses"] and not t["differing_weights"] for t in trainings)
    yield (
        f"{len(trainings)} trainings bit-equal to Megatron's, in fp32, bf16 and fp8, with experts, "
        "offload and recomputation"
    )
    yield "one H200, shared by 2 and 4 ranks"
    jobs = [part["job"] for part in found.values() if part.get("benchmark") == "one_gpu_training"]
    assert {job["dtype"] for job in jobs} == {"fp32", "bf16"}
    assert any(job.get("fp8") for job in jobs)
    over_nccl = sum(
        "slices" not in training["schedule"]
        for part in found.values()
        if part.get("job", {}).get("nccl")
        for training in part["results"]
    )
    yield f"{over_nccl} of them over NCCL"
    rows = [
        row
        for part in found.values()
        if part.get("benchmark") == "features"
        for row in part["rows"]
        if "within" not in row
    ]
    assert all(row["equal"] for row in rows)
    kinds = {row["feature"].split(",")[0] for row in rows}
    assert {"tensor parallelism", "context parallelism", "distributed optimizer"} <= kinds
    yield "equal losses, also with tensor, context and data parallelism"
    sliced = found["rank_memory_of_slices"]["results"]["1f1b+4slices"]
    least, took = sliced["peak_bytes_ratio"], sliced["seconds_ratio"]
    yield "samples of 16384 tokens in 4 slices"
    yield f"{least:.2f} of 1F1B's activations in {took:.2f} of the time"
    held = found["rank_memory_transformer_engine"]["results"]
    half, least = (held[name]["peak_bytes_ratio"] for name in ("v-half", "v-min"))
    [ratio] = (
        result["ratio"]
        for result in found["split_backward"]["results"]
        if result["implementation"] == "transformer-engine"
    )
    yield f"`v-half` {half:.2f} of 1F1B's, `v-min` {least:.2f}"
    yield f"F+B+W takes {ratio:.2f} times F and a whole backward"
    yield (
        f"On one H200, trainings were bit-equal to Megatron's, `v-half` allocated {half:.2f} of "
        f"1F1B's activations, and a split backward took {ratio:.2f} of the time of a whole one"
    )


def predictions() -> Iterator[str]:
    """The counts of docs/validation.md, which tests/plan/test_published.py computes."""
    page = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
    [(near, ratios)] = re.findall(r"\*: (\d+) of (\d+) are within 10%", page.replace("**", "*"))
    [(met, runs, gpus)] = re.findall(
        r"(\d+) of (\d+) published runs on (8 to 16,384) GPUs are met within 10%", page
    )
    yield f"{met} of {runs} published runs within 10 %"
    yield f"runs of others on {gpus} GPUs"
    yield f"{near} of {ratios} published ratios between schedules"


def versions() -> Iterator[str]:
    yield f"Pipeline schedules for Megatron-LM {SUPPORTED}, beside 1F1B"
    first, *others = [series.text for series in SERIES]
    yield f"| Megatron-LM {first} | {' | '.join(others)} | Python 3.10 to 3.12"
    yield f"unmodified, {SUPPORTED}"
    table = project()
    assert table["requires-python"] == ">=3.10"
    assert "torch >= 2.6" in table["dependencies"]
    assert table["optional-dependencies"]["te"] == ["transformer-engine[pytorch] >= 2.3"]
    pins = {file.stem: file.read_text() for file in (ROOT / "constraints").glob("*.txt")}
    assert re.search(r"^torch==2\.15\.", pins["py312"], re.M)
    assert "2.20." in pins["transformer-engine"]
    assert {"py311", "py312"} < set(pins)
    yield "torch 2.6 to 2.15 | Transformer-Engine 2.3 to 2.20"


def plain(text: str) -> str:
    """Prose on one line, with the texts of links alone, without bold, code fences and addresses."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    return " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("**", "").split())


def test_every_figure_of_the_first_page_is_computed() -> None:
    """What is computed is in the text, and no other figure is left when it is taken out."""
    text = plain(README)
    groups = (
        beside_recipes(),
        beside_others(),
        the_picture(),
        measurements(),
        predictions(),
        versions(),
    )
    for said in (said for group in groups for said in group):
        assert said in text, said
        text = text.replace(said, "")
    text = PLANNED.sub("", text)  # what the command predicts, which a test below runs
    names = r"`[^`]*`|1F1B(?:'s)?|Apache-2\.0|one H200|(?:10|15) minutes|compares 5 schedules"
    names += "|on 4 CPU ranks|On 4 GPUs"
    others = r"a (?:copy|commit) of 0\.\d+|\(p\+[24]\)//[23]"
    left = re.findall(r"\S*\d\S*", re.sub(f"{names}|{others}", "", text))
    assert not left


def test_the_quickstart_trains_as_often_as_the_first_page_says() -> None:
    from megatron_zb.train import quickstart

    assert len(quickstart.SCHEDULES) + 1 == 5


def test_the_first_page_begins_with_what_a_reader_needs() -> None:
    lines = README.splitlines()
    assert lines.index(BELOW_THE_FOLD) <= 90
    install = next(n for n, line in enumerate(lines) if line.startswith("pip install . "))
    assert install < 25
    assert "scripts/quickstart.sh" in README.split(BELOW_THE_FOLD)[0]
    assert "scripts/test.sh" in README.split(BELOW_THE_FOLD)[0]


def commands() -> list[str]:
    """The lines of README's code that start this package's command."""
    lines = [line for block in FENCED.findall(README) for line in block.splitlines()]
    ours = [line for line in lines if line.startswith("megatron-zb ")]
    return [line for line in ours if " verify " not in line]  # tests/real_megatron_lm/test_verify


@pytest.mark.slow
@pytest.mark.parametrize("line", commands())
def test_the_commands_of_the_first_page_run(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = (
        "--pipeline-model-parallel-size 2 --pipeline-schedule v-half --num-layers 4 "
        "--micro-batch-size 1 --global-batch-size 4 --seq-length 16 --hidden-size 32 --bf16 "
        "--num-attention-heads 4 --max-position-embeddings 16 --transformer-impl local "
        "--lr 1e-3 --train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 128"
    )
    line = line.replace("$MY_ARGUMENTS", arguments)
    words = shlex.split(line, comments=True)[1:]
    if words[0] == "doctor":
        checkout_tree(tmp_path / "Megatron-LM", "0.16.1")
        assert cli.main(words) in (0, 1)  # 1 where this machine lacks something
        assert re.search(r"Megatron-LM .*0\.16\.1", capsys.readouterr().out)
        return
    assert cli.main(words) == 0
    if words[0] == "plan":
        check_predicted(capsys.readouterr().out)


def check_predicted(printed: str) -> None:
    """What the page writes of a plan is what the command prints."""
    rates = {
        name.strip(): int(rate)
        for name, rate in re.findall(r"^\d+ (.*?) +TP\d.*? (\d{3,5}) +[\d.]+%", printed, re.M)
    }
    [interleaved] = (rate for name, rate in rates.items() if name.startswith("Megatron inter"))
    [(first, second)] = PLANNED.findall(plain(README))
    assert f"{100 * (rates['v-half (auto)'] / interleaved - 1):.1f}" == first
    assert (
        f"run v-half with --pipeline-vocabulary on: {second}% more tokens per second than "
        "Megatron 1F1B"
    ) in " ".join(printed.split())
    check_planner_page(" ".join(printed.split()))


def check_planner_page(printed: str) -> None:
    """The rows and lines that the planner's page explains are printed, but for spaces."""
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"^```\n(# schedule .*?)^```$", page, re.M | re.S)
    lines = [" ".join(line.split()) for line in shown.splitlines() if line.strip()]
    assert len(lines) == 6
    for line in lines:
        assert line in printed, line


@pytest.mark.slow
def test_the_training_of_the_first_page_runs(tmp_path: Path) -> None:
    """As it stands, on CPU ranks."""
    [block] = (block for block in FENCED.findall(README) if "torchrun" in block)
    words = shlex.split(block.partition("torchrun")[2].replace("\\\n", " "))
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    losses = re.findall(r"lm loss: ([\d.E+-]+)", ended.stdout + ended.stderr)
    assert len(losses) == 5
    assert float(losses[-1]) < float(losses[0])


def test_the_first_page_is_short() -> None:
    """Words, with those of code and tables, without the addresses of links."""
    text = re.sub(r"\]\([^)]*\)", "]", README)
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= 900


def test_what_was_measured_has_its_hardware() -> None:
    [table] = re.findall(r"^## What was measured\n\n(.*?)\n\n", README, re.M | re.S)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert len(rows) >= 8
    assert all(re.search(r"H200|the same|CPU ranks|GPUs", row[2]) for row in rows)
    [others] = (line for line in README.splitlines() if line.startswith("| measured on GPUs |"))
    assert "one H200" in others.split("|")[2]


def test_scripts_of_the_first_page_explain_themselves() -> None:
    named = set(re.findall(r"`(?:scripts/)?(\w+\.sh)\b[^`]*`", README))
    assert {"quickstart.sh", "test.sh", "gpu_check.sh", "pretrain_gpt.sh"} <= named
    for name in named:
        assert "usage:" in (ROOT / "scripts" / name).read_text(encoding="utf-8"), name
