"""A library of blocks: what candidates learn, their scores and files, and a run that is killed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distillation_cases import (
    EMPTY,
    HALF,
    LAYERS,
    LINEAR,
    LLAMA,
    STEPS,
    Key,
    Learnt,
    _recorded,
    _store,
    differences,
    enter,
    fresh,
    job_of,
    learnt_alone,
)
from jobs import run_job
from ranks import RankPools
from training_jobs import SECONDS_TO_REPORT, SECONDS_TO_TRAIN, check_report, script, written

MODULE = "megatron_zb.distill_gpt"
CANDIDATES = [HALF, LINEAR, EMPTY]
HELD_OUT = ("--eval-iters", "2", "--split", "80,20,0")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("teachers") / "llama")


def learnt_in_library(
    corpus: str, teacher: str, folder: str, distribution: str
) -> tuple[dict[Key, Learnt], dict[Key, float]]:
    """What this rank's candidates have come to, and their scores on the first rank of a stage."""
    from megatron_zb_distill.block_library import _scores, distribution_of, open_candidates

    enter(LLAMA, teacher)
    flags = ["--save-library", folder, "--distribution", distribution, *HELD_OUT]
    job = job_of(corpus, teacher, CANDIDATES, *flags)
    run = open_candidates(job, job.library, distribution_of(job, job.library), _store())
    blocks = {(p.block, p.shape.name): p for p in run.stage_blocks.all_student_blocks()}
    owner = {id(p): key for key, block in blocks.items() for p in block.layer.parameters()}
    with _recorded(owner) as gradients:
        run.steps(0, STEPS)
    scores = {(p.block, p.shape.name): score for p, score in _scores(job.args, run)}
    run.close()
    weights = {
        key: {n: p.detach().clone() for n, p in block.layer.named_parameters()}
        for key, block in blocks.items()
    }
    return {key: Learnt(gradients.get(key, []), weights[key]) for key in blocks}, scores


def scored_alone(
    corpus: str, teacher: str, weights: Mapping[Key, Mapping[str, torch.Tensor]]
) -> dict[Key, float]:
    """The same scores, from the teacher in one piece."""
    from distillation_cases import _recorded_lessons, _rotary

    from megatron_zb_train import data

    enter(LLAMA, teacher)
    job = job_of(corpus, teacher, CANDIDATES, *HELD_OUT)
    held_out = data.build_datasets(job.args)[1]
    build, data.build_datasets = data.build_datasets, lambda _: (held_out, None)
    try:
        lessons = _recorded_lessons(job)[: job.args.eval_iters * job.args.num_microbatches]
    finally:
        data.build_datasets = build
    scores = {}
    for block, shapes in enumerate(job.library):
        for shape in shapes:
            layer = fresh(job, block, shape)
            error = norm = 0.0
            with torch.no_grad():
                for name, parameter in layer.named_parameters():
                    parameter.copy_(weights[block, shape.name][name])
                for given, wanted in (lesson[block] for lesson in lessons):
                    made, _ = layer(given, attention_mask=None, rotary_pos_emb=_rotary(job))
                    error += float((made - wanted).double().square().sum())
                    norm += float(wanted.double().square().sum())
            scores[block, shape.name] = error / norm
    return scores


@pytest.mark.parametrize(
    "distribution", ["0-3:1,4-11:1", pytest.param("0:2,1-11:2", marks=pytest.mark.full)]
)
def test_candidates_learn_in_a_library_what_they_learn_alone(
    distribution: str, ranks: RankPools, corpus: str, teacher: str, tmp_path: Path
) -> None:
    """To the last bit, with candidates of one block on two ranks; scores are those of one model."""
    size = sum(int(part.partition(":")[2]) for part in distribution.split(","))
    shares = [size // 2] * LAYERS
    case = {"corpus": corpus, "teacher": teacher}
    model = {**case, "model": LLAMA, "candidates": CANDIDATES}
    (alone,) = ranks(1).run(learnt_alone, **model, shares=shares, flags=HELD_OUT)
    seen: set[Key] = set()
    scores: dict[Key, float] = {}
    library = {**case, "folder": str(tmp_path), "distribution": distribution}
    for learnt, scored in ranks(size).run(learnt_in_library, **library):
        assert differences(learnt, alone) == []
        seen |= set(learnt)
        scores |= scored
    assert seen == {(block, c["name"]) for block in range(LAYERS) for c in CANDIDATES}
    weights = {key: learnt.weights for key, learnt in alone.items()}
    (expected,) = ranks(1).run(scored_alone, **case, weights=weights)
    assert scores == {key: pytest.approx(score, rel=1e-5) for key, score in expected.items()}
    assert len(set(scores.values())) == len(scores)
