"""Blocks that several ranks share: what they learn, and what is stored of them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distillation_cases import (
    EMPTY,
    EXPERTS,
    FEWER_EXPERTS,
    GPT,
    HALF,
    LATENT,
    LAYERS,
    LINEAR,
    LLAMA,
    MIXTRAL,
    QWEN,
    SLOW,
    STEPS,
    TRAINING,
    _store,
    differences,
    enter,
    fresh,
    job_of,
    learnt_alone,
    learnt_in_pipeline,
)
from ranks import Kind, RankPools
from stored_tensors import tensors_of

from megatron_zb.distill import checkpoint
from megatron_zb.distill.blocks import layer_config
from megatron_zb.distill.evaluation import compare
from megatron_zb.distill.flags import check_split, complete, parse
from megatron_zb.distill.loop import distribution_of, open_job
from megatron_zb.distill.shards import whole, with_all_experts
from megatron_zb.distill.stitching import save_student
from megatron_zb.distill.student import StudentConfig, TeacherShape, library
from megatron_zb.errors import UsageError
from megatron_zb.train.checkpoint_directory import latest_checkpoint
from megatron_zb.train.data import check_data

MODELS = {
    "gpt": GPT,
    "llama": LLAMA,
    "qwen": QWEN,
    "latent": {**LLAMA, **LATENT},
    "experts": {**LLAMA, **EXPERTS},
    "mixtral": MIXTRAL,
    "deepseek": {**LLAMA, **LATENT, **EXPERTS},
}
TENSOR = ("--tensor-model-parallel-size", "2")
SEQUENCE = (*TENSOR, "--sequence-parallel")
SPLIT_EXPERTS = ("--expert-model-parallel-size", "2")
BOTH = (*SEQUENCE, *SPLIT_EXPERTS)
HELD_OUT = ("--eval-iters", "2", "--split", "80,20,0")
ONE: tuple[str, ...] = ()
SAME = {"name": "same"}
ONE_GROUP = {"name": "one-group", "attention": {"query_groups": 1}}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one rank writes the teachers."""
    return tmp_path_factory.mktemp("teachers")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "candidates", "distribution", "shares", "flags"),
    [
        ("llama", [HALF, SLOW], "0-1:1,2-3:1", 1, SEQUENCE),
        pytest.param("llama", [HALF, LINEAR, EMPTY], "0-3:1", 1, TENSOR, marks=pytest.mark.full),
        pytest.param("gpt", [HALF, SLOW], "0-3:2", 2, SEQUENCE, marks=pytest.mark.full),
        pytest.param("gpt", [SLOW], "0:1,1-3:1", 1, TENSOR, marks=pytest.mark.full),
        ("experts", [HALF, EMPTY], "0-1:1,2-3:1", 1, SPLIT_EXPERTS),
        pytest.param("deepseek", [HALF], "0-1:1,2-3:1", 1, SPLIT_EXPERTS, marks=pytest.mark.full),
        pytest.param("latent", [HALF], "0-1:1,2-3:1", 1, SEQUENCE, marks=pytest.mark.full),
        ("qwen", [HALF, ONE_GROUP, LINEAR], "0-1:1,2-3:1", 1, ONE),
        ("qwen", [HALF, EMPTY], "0-1:1,2-3:1", 1, SEQUENCE),
        pytest.param("qwen", [HALF, LINEAR], "0-3:1", 1, TENSOR, marks=pytest.mark.full),
        ("mixtral", [FEWER_EXPERTS], "0-1:1,2-3:1", 1, SPLIT_EXPERTS),
        pytest.param("experts", [HALF, SLOW], "0-1:1,2-3:1", 1, ONE, marks=pytest.mark.full),
        pytest.param("experts", [HALF], "0-3:1", 1, BOTH, marks=pytest.mark.full),
    ],
)
def test_split_blocks_learn_in_the_pipeline_what_they_learn_alone(
    model: str,
    candidates: Sequence[Mapping[str, Any]],
    distribution: str,
    shares: int,
    flags: Sequence[str],
    ranks: RankPools,
    corpus: str,
    teachers: Path,
) -> None:
    """Every rank's part, to the last bit; ranks that share a block relay to as many others."""
    each = 2 ** sum(flag.endswith("parallel-size") for flag in flags)
    size = each * sum(int(part.partition(":")[2]) for part in distribution.split(","))
    teacher = str(teachers / model)
    # Megatron builds latent attention only where Transformer-Engine is installed
    kind = Kind.TRANSFORMER_ENGINE if "multi_latent_attention" in MODELS[model] else Kind.HOSTILE
    ranks(1, kind).run(enter, model=MODELS[model], folder=teacher)
    case: dict[str, Any] = {"corpus": corpus, "teacher": teacher, "model": MODELS[model]}
    case["candidates"] = candidates
    alone = ranks(each, kind).run(learnt_alone, **case, shares=[shares] * LAYERS, flags=flags)
    given = [*flags, "--distribution", distribution]
    seen = set()
    for rank, learnt in enumerate(ranks(size, kind).run(learnt_in_pipeline, **case, flags=given)):
        assert differences(learnt, alone[rank % each]) == []
        seen |= set(learnt)
    assert seen == {(block, c["name"]) for block in range(LAYERS) for c in candidates}


def kept_experts(model: str, teacher: str, corpus: str, flags: Sequence[str]) -> dict[str, Any]:
    """All weights of a student with fewer experts before its first step."""
    enter(MODELS[model], teacher, flags)
    job = job_of(corpus, teacher, [FEWER_EXPERTS], *flags)
    layer = fresh(job, 1, job.library[1][0])
    weights = with_all_experts(layer, whole(layer))
    return {n: t.detach().clone() for n, t in (weights | dict(layer.named_buffers())).items()}


@pytest.mark.parametrize("split", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_strongest_experts_are_kept(
    split: bool, ranks: RankPools, corpus: str, teachers: Path
) -> None:
    """With their rows of the router, wherever they are."""
    teacher, flags = str(teachers / "mixtral"), SPLIT_EXPERTS if split else ONE
    case: dict[str, Any] = {"model": "mixtral", "teacher": teacher, "corpus": corpus}
    ranks(1, Kind.HOSTILE).run(enter, model=MIXTRAL, folder=teacher)
    (taught,) = ranks(1, Kind.HOSTILE).run(teachers_block, **case)
    into, out = (f"mlp.experts.local_experts.{{}}.linear_{fc}.weight" for fc in ("fc1", "fc2"))

    def strength(expert: int) -> float:
        up, down = taught[into.format(expert)], taught[out.format(expert)]
        gate, value = up.chunk(2)
        return float((gate.norm(dim=1) * value.norm(dim=1) * down.norm(dim=0)).sum())

    kept = sorted(sorted(range(4), key=strength)[2:])
    assert kept not in ([0, 1], [2, 3])  # which a rank could keep without the other
    for found in ranks(2 if split else 1, Kind.HOSTILE).run(kept_experts, **case, flags=flags):
        for new, old in enumerate(kept):
            for name in (into, out):
                assert torch.equal(found[name.format(new)], taught[name.format(old)])
        for name in ("mlp.router.weight", "mlp.router.expert_bias"):
            assert torch.equal(found[name], taught[name][kept])
        assert not any(".local_experts.2." in name for name in found)


def teachers_block(model: str, teacher: str, corpus: str) -> dict[str, torch.Tensor]:
    enter(MODELS[model], teacher)
    job = job_of(corpus, teacher, [SAME])
    found = fresh(job, 1, job.library[1][0]).state_dict()
    return {n: t.clone() for n, t in found.items() if isinstance(t, torch.Tensor)}


Stored = dict[tuple[int, str], tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]
"""Of a candidate: its parameters in one piece, and this rank's part of its optimizer."""


def run_between(
    corpus: str, teacher: str, flags: Sequence[str], save: str, load: str | None, until: int
) -> tuple[Stored, list[float]]:
    """Train from a checkpoint, or the start, to a step; both models' losses on held-out text."""
    enter(MODELS["llama"], teacher, flags)
    words = [*flags, "--save", save, "--save-student", f"{save}.student", *HELD_OUT]
    job = job_of(corpus, teacher, [HALF], *words)
    check_data(job.args)
    if load is not None:
        job.args.load = load
        job = replace(job, resume=checkpoint.stored_distribution(job.args, job.library))
    run = open_job(job, distribution_of(job), _store())
    run.steps(run.first_step, until)
    checkpoint.save(job.args, job.library, run.distribution, run.stage_blocks, until)
    blocks = list(run.stage_blocks.all_student_blocks())
    save_student(job.args, run.stage_blocks, blocks, until)
    losses = compare(job.args, run.distribution, run.stage_blocks, blocks, run.held_out)
    run.close()
    return {
        (b.block, b.shape.name): (
            {n: t.clone() for n, t in whole(b.layer).items()},
            {n: t.clone() for n, t in b.optimizer.state().items()},
        )
        for b in blocks
    }, [losses.teacher, losses.student]


def check_equal(ours: Stored, theirs: Stored, parts: int = 2) -> None:
    """Every tensor to the last bit."""
    for key, learnt in ours.items():
        for mine, other in list(zip(learnt, theirs[key], strict=True))[:parts]:
            assert mine.keys() == other.keys()
            assert [n for n in mine if not torch.equal(mine[n], other[n])] == []


@pytest.mark.slow
def test_a_split_run_continues_split_or_whole(
    ranks: RankPools, corpus: str, teachers: Path, tmp_path: Path
) -> None:
    """From its checkpoint, bit by bit; one rank has the same weights, and finds the same losses."""
    teacher = str(teachers / "llama")
    ranks(1).run(enter, model=MODELS["llama"], folder=teacher)
    case: dict[str, Any] = {"corpus": corpus, "teacher": teacher}
    split = {**case, "flags": [*SEQUENCE, "--distribution", "0-1:1,2-3:1"]}
    first, middle, end = str(tmp_path / "first"), str(tmp_path / "middle"), str(tmp_path / "end")
    uninterrupted = ranks(4).run(run_between, **split, save=end, load=None, until=STEPS)
    stopped = ranks(4).run(run_between, **split, save=first, load=None, until=STEPS - 1)
    continued = ranks(4).run(run_between, **split, save=middle, load=first, until=STEPS)
    for (ours, losses), (theirs, expected) in zip(continued, uninterrupted, strict=True):
        check_equal(ours, theirs)
        assert losses == expected
    one = {**case, "flags": ["--distribution", "0-3:1"], "save": str(tmp_path / "one")}
    ((alone, losses),) = ranks(1).run(run_between, **one, load=first, until=STEPS - 1)
    assert losses == pytest.approx(stopped[0][1], rel=1e-5)
    for ours, _ in stopped:
        check_equal(ours, alone, parts=1)
    written = [
        tensors_of(latest_checkpoint(Path(f"{path}.student"))[1]) for path in (first, one["save"])
    ]
    assert len(written[0]) > 5
    assert written[0].keys() == written[1].keys()
    assert [n for n in written[0] if not torch.equal(written[0][n], written[1][n])] == []


@pytest.mark.parametrize(
    ("model", "flags", "sentence"),
    [
        (
            "llama",
            ["--sequence-parallel"],
            "--sequence-parallel needs --tensor-model-parallel-size",
        ),
        ("llama", [*SPLIT_EXPERTS], "the teacher has no experts: leave it out"),
        ("experts", ["--expert-model-parallel-size", "3"], "does not divide the teacher's 4 exp"),
        ("experts", [*TENSOR], "only with --sequence-parallel: add it"),
    ],
)
def test_what_cannot_be_split_is_refused(
    model: str, flags: Sequence[str], sentence: str, tmp_path: Path
) -> None:
    words = [*TRAINING.split(), "--teacher-load", str(tmp_path), "--mock-data", *flags]
    known = {"num_query_groups": None, "num_experts": None, **MODELS[model]}
    with pytest.raises(UsageError, match=sentence):
        complete(parse(words), known)


def test_blocks_keep_their_gradients_where_autograd_puts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apex, on a GPU, would add them to buffers that only Megatron's data parallelism makes."""
    monkeypatch.setattr("megatron_zb.train.model.find_spec", lambda name: name)
    words = [*TRAINING.split(), "--teacher-load", str(tmp_path), "--mock-data"]
    known = {"num_query_groups": None, "num_experts": None, **LLAMA}
    args = complete(parse(words), known)
    args.cpu = False
    assert not layer_config(args, 0).gradient_accumulation_fusion


@pytest.mark.parametrize(
    ("ranks", "candidate", "sentence"),
    [
        (3, {"name": "h"}, "3 ranks were started, but 2 share a block"),
        (
            2,
            {"name": "h", "mlp": {"ffn_hidden_size": 31}},
            "has ffn_hidden_size 31, which",
        ),
        (2, {"name": "h", "attention": {"query_groups": 1}}, "has num_query_groups 1, which"),
    ],
)
def test_a_student_that_cannot_be_split_is_refused(
    ranks: int, candidate: Mapping[str, Any], sentence: str
) -> None:
    args = argparse.Namespace(tensor_model_parallel_size=2, expert_model_parallel_size=1)
    student = StudentConfig.model_validate({"name": "s", "candidates": [candidate]})
    with pytest.raises(UsageError, match=sentence):
        check_split(args, library(student, TeacherShape(4, 32, 4, 4, 64)), ranks)


@pytest.mark.parametrize(
    ("candidate", "sentence"),
    [
        ({"name": "h", "mlp": {"kind": "linear"}}, "block 1 of the teacher has experts"),
        ({"name": "h", "attention": {"kind": "linear"}}, "latent attention has no heads"),
        ({"name": "h", "mlp": {"experts": 2}}, "experts 2 of block 0, has none: leave it out"),
    ],
)
def test_what_no_weights_replace_is_refused(candidate: Mapping[str, Any], sentence: str) -> None:
    teacher = TeacherShape(2, 32, 4, 4, 64, True, frozenset({1}), 16, 4)
    student = StudentConfig.model_validate({"name": "s", "candidates": [candidate]})
    with pytest.raises(UsageError, match=sentence):
        library(student, teacher)


@pytest.mark.parametrize(
    ("experts", "flags", "router", "sentence"),
    [
        (5, ONE, {}, "experts 5 of block 0, the teacher has 4 there: give fewer"),
        (1, ONE, {}, "has 1 experts: .* give a multiple of 1, 2 or more"),
        (3, SPLIT_EXPERTS, {}, "has 3 experts: .* give a multiple of 2, 2 or more"),
        (3, ONE, {"moe_router_num_groups": 4, "moe_router_group_topk": 1}, "multiple of 4, 8 or"),
    ],
)
def test_experts_that_no_router_finds_are_refused(
    experts: int, flags: Sequence[str], router: Mapping[str, int], sentence: str, tmp_path: Path
) -> None:
    words = [*TRAINING.split(), "--teacher-load", str(tmp_path), "--mock-data", *flags]
    args = complete(parse(words), {"num_query_groups": None, **MIXTRAL, **router})
    candidate = {"name": "fewer", "mlp": {"experts": experts}}
    student = StudentConfig.model_validate({"name": "s", "candidates": [candidate]})
    teacher = TeacherShape(4, 32, 4, 4, 64, False, frozenset(range(4)), 32, 4)
    with pytest.raises(UsageError, match=sentence):
        check_split(args, library(student, teacher), 4)


def test_widths_are_parts_of_an_expert_where_there_are_experts() -> None:
    teacher = TeacherShape(2, 32, 4, 4, 64, False, frozenset({1}), 16)
    student = StudentConfig.model_validate({"name": "s", "candidates": [HALF]})
    assert [shapes[0].ffn_hidden_size for shapes in library(student, teacher)] == [32, 8]
