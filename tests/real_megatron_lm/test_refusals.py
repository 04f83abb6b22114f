"""Mistakes on the command line of the real script: one sentence, and an end."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_megatron_lm.runs import MODEL, PIPELINE, pretrain


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--pipeline-schedule v-haf", ["unknown pipeline schedule 'v-haf'", "v-half"]),
        ("--pipeline-memory-limit 0.5", ["needs --pipeline-schedule"]),
        ("--pipeline-offload onn", ["--pipeline-offload 'onn' is unknown", "did you mean on?"]),
        ("--pipeline-ofload on", ["unknown argument '--pipeline-ofload'", "--pipeline-offload?"]),
        (
            "--pipeline-schedule v-half --overlap-moe-expert-parallel-comm",
            ["--overlap-moe-expert-parallel-comm", "experts of one rank have no all-to-all"],
        ),
        (
            "--pipeline-schedule v-half --num-virtual-stages-per-pipeline-rank 4",
            ["--num-virtual-stages-per-pipeline-rank", "v-half has 2"],
        ),
        (
            "--pipeline-schedule v-half --cuda-graph-impl local",
            ["CUDA graphs (local)", "--pipeline-schedule v-half", "use transformer_engine"],
        ),
        (
            "--pipeline-schedule v-half --cuda-graph-impl transformer_engine",
            ["--cuda-graph-impl transformer_engine", "--pipeline-random-streams rank"],
        ),
        ("--pipeline-schedule v-half --num-layers 7", ["7 layers", "8 stages"]),
        (
            "--pipeline-schedule v-half --pipeline-model-parallel-layout Ett|tt|tt|ttL",
            ["it names 4 stages and the schedule has 8"],
        ),
        ("--pipeline-schedule v-half --pipeline-memory-limit 0.1", ["0.1 of 1F1B", "at least"]),
        ("--pipeline-schedule-file nowhere.csv", ["nowhere.csv"]),
        (
            "--yaml-cfg {folder}/all.yaml --enable-zero-bubble",
            ["--yaml-cfg", "--enable-zero-bubble", "on the command line"],
        ),
    ],
)
def test_one_sentence_says_what_is_wrong(
    checkout: Path, flags: str, parts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "all.yaml").write_text("language_model: {num_layers: 8}\n")
    run = pretrain(checkout, MODEL, PIPELINE, flags.format(folder=tmp_path))
    assert run.code != 0
    assert run.error.count("\n") == 0
    assert run.output.count("megatron_zb: error: ") == 1
    for part in parts:
        assert part in run.error
    assert "Traceback" not in run.output.split("torch/distributed/elastic")[0]


@pytest.mark.parametrize("schedule", ["v-half", "zb-h1"])
def test_what_one_rank_alone_has_ends_all_with_one_sentence(checkout: Path, schedule: str) -> None:
    program = Path(__file__).with_name("run_and_refuse.py")
    flags = f"--pipeline-model-parallel-size 2 --pipeline-schedule {schedule}"
    variables = {"BUILDS": "operation"}
    run = pretrain(checkout, MODEL, flags, ranks=2, program=program, environment=variables)
    assert run.code != 0
    assert run.error.startswith(
        "megatron_zb: error: on rank 1: a BasicLinear cannot be combined with --pipeline-schedule "
        f"{schedule}: "
    )
    assert run.error.count("\n") == 0
    assert "Traceback" not in run.output.split("torch/distributed/elastic")[0]


def test_a_rank_that_cannot_build_leaves_none_waiting(checkout: Path) -> None:
    """The others may wait for it in a collective of Megatron's, or where the ranks meet."""
    program = Path(__file__).with_name("run_and_refuse.py")
    flags = "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"
    variables = {"BUILDS": "nothing"}
    run = pretrain(checkout, MODEL, flags, ranks=2, program=program, environment=variables)
    assert run.code != 0
    assert "RuntimeError: no memory is left for the model" in run.output
    assert not run.losses


def test_ranks_that_differ_end_with_what_differs(checkout: Path, tmp_path: Path) -> None:
    """Each rank has another environment, as hosts of a cluster may."""
    program = tmp_path / "another_environment.py"
    program.write_text(
        "import os, sys\n"
        "os.environ['CUDA_DEVICE_MAX_CONNECTIONS'] = str(1 + int(os.environ['RANK']) // 2)\n"
        "from megatron_zb.launch import main\n"
        "main(sys.argv[1:])\n"
    )
    flags = f"{PIPELINE} --pipeline-schedule zb-h1"
    run = pretrain(checkout, MODEL, flags, program=program)
    assert run.code != 0
    assert (
        "CUDA_DEVICE_MAX_CONNECTIONS 1 on rank 0, but CUDA_DEVICE_MAX_CONNECTIONS 2 on rank 2"
        in run.error
    )
