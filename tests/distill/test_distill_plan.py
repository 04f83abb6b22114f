"""megatron-zb plan --student-config: counted times of blocks, and ways to distil."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_zb.cli import main as cli
from megatron_zb.distill.planning import DistillPlanJob, block_costs, flags_of, rows
from megatron_zb.distill.student import StudentConfig, nodes_of
from megatron_zb.errors import UsageError
from megatron_zb.measured.config import builtin_folder
from megatron_zb.parsing import GIB
from megatron_zb.plan.device import read_device
from megatron_zb.plan.model import ModelConfig
from megatron_zb.plan.strategy import Strategy
from megatron_zb.plan.work import Workload

BLOCKS = 8
TEACHER = ModelConfig.model_validate(
    {
        "name": "small",
        "source": "test",
        "layers": BLOCKS,
        "hidden_size": 1024,
        "attention_heads": 16,
        "vocabulary": 32000,
        "sequence_length": 1024,
        "global_batch_size": 32,
    }
)
DEVICE = read_device(builtin_folder("devices") / "a100_80gb_sxm.yaml")


def job(*candidates: dict[str, Any], **changes: Any) -> DistillPlanJob:
    named = [{"name": f"c{i}", **c} for i, c in enumerate(candidates or ({},))]
    student = StudentConfig.model_validate({"name": "student", "candidates": named})
    first = DistillPlanJob(TEACHER, student, DEVICE, 4, DEVICE.memory_bytes, 1, 32, 1024)
    return replace(first, **changes)


def student_seconds(*candidates: dict[str, Any]) -> float:
    return block_costs(job(*candidates)).student[0]


def test_a_student_like_its_teacher_takes_what_training_a_layer_takes() -> None:
    costs = block_costs(job())
    layer = Workload(TEACHER, DEVICE, Strategy(1, 4, 1, 1, 1, "none"), 1024).layer(0)
    assert costs.teacher == (layer.forward,) * BLOCKS
    assert costs.student[0] == pytest.approx(layer.total, rel=0.03)  # and the loss
    assert costs.student[0] > layer.total
    weights = 12 * 1024**2
    assert costs.memory == (2 * weights + 18 * weights,) * BLOCKS
    link = DEVICE.collectives.in_node
    assert costs.reduce == (pytest.approx(link.seconds(4 * weights)),) * BLOCKS


def test_less_of_a_student_takes_less() -> None:
    whole = student_seconds({})
    half = student_seconds({"mlp": {"ffn_fraction": 0.5}})
    groups = student_seconds({"attention": {"query_groups": 4}})
    linear = student_seconds({"mlp": {"kind": "linear"}})
    nothing = student_seconds({"mlp": {"kind": "no_op"}, "attention": {"kind": "no_op"}})
    assert nothing < linear < half < groups < whole
    instead = student_seconds({"mlp": {"kind": "no_op"}, "attention": {"kind": "linear"}})
    assert nothing < instead < student_seconds({"mlp": {"kind": "no_op"}})
    both = student_seconds({}, {"mlp": {"ffn_fraction": 0.5}})
    assert both == pytest.approx(whole + half)


def test_ways_to_distil_are_ranked_and_the_chosen_one_is_the_first() -> None:
    small = job()
    found = rows(small)
    assert [row.seconds for row in found] == sorted(row.seconds for row in found)
    assert found[0].name == "pipe-bd"
    (practice,) = [row for row in found if row.distribution is None]
    costs = block_costs(small)
    teacher = costs.teacher[0] * sum(range(1, BLOCKS + 1))
    compute = 32 / 4 * (teacher + BLOCKS * costs.student[0])
    sums = BLOCKS * (costs.update[0] + 1.5 * costs.reduce[0])
    assert practice.seconds == pytest.approx(compute + sums)
    assert practice.seconds > 1.5 * found[0].seconds


def test_candidates_of_a_library_are_placed_one_by_one() -> None:
    shapes: list[dict[str, Any]] = [{"mlp": {"ffn_fraction": 0.5}}, {"mlp": {"kind": "no_op"}}]
    library = job(*shapes, gpus=6, global_batch=7, tokens=1e6)
    apart, whole = rows(library)[:2]
    assert (apart.name, whole.name) == ("pipe-bd, candidates apart", "pipe-bd, whole blocks")
    assert apart.seconds < 0.95 * whole.seconds
    assert apart.seconds == pytest.approx(max(stage.seconds for stage in apart.stages))
    assert flags_of(library, apart)[0] == "--save-library DIR"
    assert apart.distribution is not None
    assert apart.distribution.num_blocks == len(nodes_of(library.candidates)) == 2 * BLOCKS
    assert [apart.stages[0].first, apart.stages[-1].last] == ["0.c0", "7.c1"]
    split = [stage for stage in apart.stages if stage.first.endswith("c1")]
    assert split  # whose teacher is on two ranks
    taught = sum(stage.teacher * stage.gpus for stage in apart.stages)
    assert taught == pytest.approx(7 * (BLOCKS + len(split)) * block_costs(library).teacher[0])
    steps = 140  # of 7 samples of 1024 tokens
    assert library.hours(apart.seconds) == pytest.approx(steps * apart.seconds / 3600)


def test_what_does_not_fit_is_not_there() -> None:
    costs = block_costs(job())
    everywhere = {row.name: row for row in rows(job())}
    needed = max(row.memory for row in everywhere.values())
    tight = rows(job(memory=everywhere["pipe-bd"].memory * 1.001))
    assert all(row.memory <= everywhere["pipe-bd"].memory * 1.001 < needed for row in tight)
    least = job(memory=needed - sum(costs.memory) + max(costs.memory) * 2.01)
    (first, *_) = rows(least)
    assert first.distribution is not None
    assert max(len(blocks) for blocks, _ in first.distribution.ranges) <= 2
    with pytest.raises(UsageError, match="cannot hold 8 of them with their students"):
        rows(replace(least, gpus=3))
    with pytest.raises(UsageError, match="cannot hold one block's activations"):
        rows(job(memory=DEVICE.reserved_bytes))


def test_a_hybrid_model_is_no_teacher() -> None:
    hybrid = TEACHER.model_copy(update={"hybrid_layer_pattern": "*-" * 4})
    with pytest.raises(UsageError, match="a teacher with layers of several kinds is not planned"):
        rows(job(teacher=hybrid))


def plan(*more: str) -> int:
    given = ["--config", "llama3_8b", "--gpus", "8", "--student-config", "half_mlp"]
    return cli.main(["plan", *given, "--device", "h100_sxm", "--global-batch-size", "64", *more])


def test_the_table_and_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan() == 0
    table = capsys.readouterr().out
    assert plan("--format", "json") == 0
    found = json.loads(capsys.readouterr().out)["ranked"]
    best = found[0]
    assert best["way"] == "pipe-bd"
    assert best["flags"][0] == f"--distribution {best['distribution']}"
    assert best["flags"][0] in table
    assert f"{best['seconds_per_step']:.4g}" in table
    assert [stage["first"] for stage in best["stages"]] == [str(4 * s) for s in range(8)]
    assert best["hours"] is None
    assert best["samples_per_second"] == pytest.approx(64 / best["seconds_per_step"])
    assert 0 < best["gib"] < 80
    assert best["gib"] > DEVICE.reserved_bytes / GIB


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schedules", "v-half"], "--schedules has no meaning for a distillation"),
        (["--post-validation"], "--post-validation has no meaning for a distillation"),
        (["--micro-batch-size", "1,2"], "--micro-batch-size '1,2' is no number of samples"),
        (["--micro-batch-size", "3"], "64 is not a multiple of --micro-batch-size 3"),
        (["--student-config", "none"], "'none' is unknown: give a file, or one of fewer_kv_heads,"),
        (["--tokens", "1.5G"], "--tokens '1.5G' is no number of tokens: give one, such as 2.5B"),
        (["--config", "qwen3_30b_a3b"], "a teacher with experts is not planned"),
        (["--config", "llama3_70b", "--gpus", "4"], "give more --gpus, or fewer candidates"),
    ],
)
def test_what_cannot_be_had_is_a_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("megatron-zb: error: ")
    assert words in said
    assert said.count("\n") == 1


def test_the_hours_of_a_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--student-config", "library", "--gpus", "12", "--tokens", "1B") == 0
    table = capsys.readouterr().out
    assert "1,000,000,000 tokens take" in table
    assert "--save-library DIR" in table
    assert "12 GPUs are busy for" in table
    assert cli.main(["plan", "--config", "llama3_8b", "--gpus", "8", "--tokens", "1B"]) == 2
    assert "give --student-config, too" in capsys.readouterr().err


def test_it_imports_neither_torch_nor_megatron() -> None:
    program = (
        "import sys; from megatron_zb.cli.main import main; main(sys.argv[1:]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'megatron')))"
    )
    given = "plan --config gpt_1_5b --gpus 8 --student-config half_mlp".split()
    done = subprocess.run(
        [sys.executable, "-c", program, *given],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "pipe-bd" in done.stdout
