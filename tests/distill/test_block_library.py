"""A library of blocks: what candidates learn, their scores and files, and a run that is killed."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from distillation_cases import (
    EMPTY,
    FEWER_EXPERTS,
    HALF,
    LAYERS,
    LINEAR,
    LLAMA,
    MIXTRAL,
    STEPS,
    Key,
    Learnt,
    _defaults,
    _recorded,
    _store,
    differences,
    enter,
    fresh,
    job_of,
    learnt_alone,
    whole_model,
)
from jobs import run_job
from megatron.core import dist_checkpointing
from ranks import Kind, RankPools
from stored_tensors import tensors_of
from training_jobs import SECONDS_TO_REPORT, SECONDS_TO_TRAIN, check_report, script, written

from megatron_zb.distill import block_library, shards
from megatron_zb.distill.block_times import BlockTime
from megatron_zb.distill.student import TeacherShape
from megatron_zb.train.checkpoint_directory import latest_checkpoint

MODULE = "megatron_zb.distill"
CANDIDATES = [HALF, LINEAR, EMPTY]
HELD_OUT = ("--eval-iters", "2", "--split", "80,20,0")


MODELS = {"llama": (LLAMA, CANDIDATES), "mixtral": (MIXTRAL, [HALF, FEWER_EXPERTS])}
SPLIT_EXPERTS = ("--expert-model-parallel-size", "2")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("teachers")


def learnt_in_library(
    corpus: str, teacher: str, model: str, flags: Sequence[str]
) -> tuple[dict[Key, Learnt], dict[Key, float], dict[Key, shards.Tensors]]:
    """What this rank's candidates have come to, their scores on the first place, all weights."""
    from megatron_zb.distill.block_library import _scores, distribution_of, open_candidates

    sizes, candidates = MODELS[model]
    enter(sizes, teacher, flags)
    job = job_of(corpus, teacher, candidates, *flags)
    run = open_candidates(job, job.library, distribution_of(job, job.library), _store())
    blocks = {(p.block, p.shape.name): p for p in run.stage_blocks.all_student_blocks()}
    owner = {id(p): key for key, block in blocks.items() for p in block.layer.parameters()}
    with _recorded(owner) as gradients:
        run.steps(0, STEPS)
    scores = {(p.block, p.shape.name): score for p, score in _scores(job.args, run)}
    run.close()
    learnt = {}
    weights = {}
    for key, block in blocks.items():
        mine = {n: p.detach().clone() for n, p in block.layer.named_parameters()}
        learnt[key] = Learnt(gradients.get(key, []), mine)
        weights[key] = shards.with_all_experts(block.layer, shards.whole(block.layer))
    return learnt, scores, weights


def scored_alone(
    corpus: str, teacher: str, model: str, weights: Mapping[Key, Mapping[str, torch.Tensor]]
) -> dict[Key, float]:
    """The same scores, from the teacher in one piece."""
    from distillation_cases import _recorded_lessons, _rotary

    from megatron_zb.train import data

    sizes, candidates = MODELS[model]
    enter(sizes, teacher)
    job = job_of(corpus, teacher, candidates, *HELD_OUT)
    held_out = data.build_datasets(job.args)[1]
    with mock.patch.object(data, "build_datasets", return_value=(held_out, None)):
        lessons = _recorded_lessons(job)[: job.args.eval_iters * job.args.num_microbatches]
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "distribution", "split"),
    [
        ("llama", "0-3:1,4-11:1", ()),
        pytest.param("llama", "0:2,1-11:2", (), marks=pytest.mark.full),
        ("mixtral", "0-2:1,3-7:1", SPLIT_EXPERTS),
        pytest.param("mixtral", "0-4:1,5-7:1", (), marks=pytest.mark.full),
    ],
)
def test_candidates_learn_in_a_library_what_they_learn_alone(
    model: str,
    distribution: str,
    split: Sequence[str],
    ranks: RankPools,
    corpus: str,
    teachers: Path,
    tmp_path: Path,
) -> None:
    """To the last bit, with candidates of one block on two ranks; scores are those of one model."""
    places = sum(int(part.partition(":")[2]) for part in distribution.split(","))
    each, kind = 2 if split else 1, Kind.HOSTILE
    sizes, candidates = MODELS[model]
    case: dict[str, Any] = {"corpus": corpus, "teacher": str(teachers / model)}
    ranks(1, kind).run(enter, model=sizes, folder=case["teacher"])
    whole = {**case, "model": sizes, "candidates": candidates, "flags": [*HELD_OUT, *split]}
    alone = ranks(each, kind).run(learnt_alone, **whole, shares=[places // 2] * LAYERS)
    seen: set[Key] = set()
    scores: list[dict[Key, float]] = [{} for _ in alone]
    weights: dict[Key, dict[str, torch.Tensor]] = {}
    flags = ["--save-library", str(tmp_path), "--distribution", distribution, *HELD_OUT, *split]
    results = ranks(places * each, kind).run(learnt_in_library, **case, model=model, flags=flags)
    for rank, (learnt, scored, stored) in enumerate(results):
        assert differences(learnt, alone[rank % each]) == []
        seen |= set(learnt)
        scores[rank % each] |= scored
        weights |= stored
    assert seen == {(block, c["name"]) for block in range(LAYERS) for c in candidates}
    (expected,) = ranks(1, kind).run(scored_alone, **case, model=model, weights=weights)
    for found in scores:
        assert found == {key: pytest.approx(score, rel=1e-5) for key, score in expected.items()}
        assert len(set(found.values())) == len(found)


TRAINED = 3
# With what Llama 3, Qwen2.5 and Qwen3 have.
MODEL: Mapping[str, Any] = {
    "--kv-channels": 12,
    "--add-qkv-bias": True,
    "--qk-layernorm": True,
    "--rotary-base": 500,
    "--use-rope-scaling": True,
    "--rope-scaling-factor": 4,
    "--cpu": True,
    "--num-layers": LAYERS,
    "--hidden-size": 32,
    "--num-attention-heads": 4,
    "--ffn-hidden-size": 64,
    "--seq-length": 32,
    "--position-embedding-type": "rope",
    "--normalization": "RMSNorm",
    "--swiglu": True,
    "--disable-bias-linear": True,
    "--micro-batch-size": 2,
    "--global-batch-size": 8,
    "--lr": 1e-2,
}
DISTILLATION: Mapping[str, Any] = {
    "--cpu": True,
    "--micro-batch-size": 2,
    "--global-batch-size": 8,
    "--train-iters": TRAINED,
    "--lr": 1e-3,
    "--weight-decay": 0,
    "--eval-iters": 2,
    "--split": "90,10,0",
}
# Rank 1 is killed in that update, counted over all rounds.
STRUCK = """
import os, signal, sys
from megatron_zb.distill.__main__ import main
from megatron_zb.distill.stage import BlockwiseStage
left = int(sys.argv.pop(1))
update = BlockwiseStage.update

def struck(stage, number):
    global left
    left -= 1
    if os.environ["RANK"] == "1" and left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    update(stage, number)

BlockwiseStage.update = struck
main()
"""


def stored(folder: Path) -> dict[str, Any]:
    """The weights and the record of every finished candidate."""
    return {
        f"{path.parent.name}.{path.stem}": (
            json.loads(path.read_text())["candidate"],
            {n: t.tolist() for n, t in torch.load(path.with_suffix(".pt")).items()},
        )
        for path in folder.glob("block*/*.json")
    }


class Library:
    """A teacher, its library in one piece, and the flags for another one."""

    def __init__(self, folder: Path, corpus: str) -> None:
        self.folder, self.corpus, self.library = folder, corpus, folder / "library"
        self.candidates = folder / "candidates.yaml"
        self.candidates.write_text(json.dumps({"name": "two", "candidates": [HALF, EMPTY]}))
        self.data = {"--data-path": corpus, "--teacher-load": folder / "teacher"}
        flags = {**MODEL, "--train-iters": 20, "--data-path": corpus, "--save": folder / "teacher"}
        ended = run_job(None, "megatron_zb.train", written(flags), SECONDS_TO_TRAIN)
        assert ended.code == 0, ended.stderr
        ended = self.run(MODULE, [], self.library)
        assert ended.code == 0, ended.stderr

    def run(self, program: str, words: list[str], folder: Path, **flags: Any) -> Any:
        given = {"--student-config": self.candidates, "--save-library": folder, **flags}
        all_words = [*words, *written({**DISTILLATION, **self.data, **given})]
        return run_job(
            4 if "--sequence-parallel" in given else 2, program, all_words, SECONDS_TO_TRAIN
        )

    def choose(self, *words: str) -> Any:
        given = ["--library", str(self.library), *words]
        return run_job(None, "megatron_zb.distill.choice", given, SECONDS_TO_TRAIN)


@pytest.fixture(scope="module")
def library(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tmp_path_factory.mktemp("library"), corpus)


@pytest.mark.slow
@pytest.mark.parametrize(
    "split",
    [
        {},
        pytest.param(
            {"--tensor-model-parallel-size": 2, "--sequence-parallel": True}, marks=pytest.mark.full
        ),
    ],
    ids=["whole", "tensor-parallel"],
)
def test_a_killed_run_keeps_what_is_finished(
    split: Mapping[str, Any], library: Library, tmp_path: Path
) -> None:
    """In the second of two rounds; the end is that of one round without a kill.

    To the last bit on as many ranks; where two ranks share a block, sums have another order.
    """
    once = {"--candidates-at-once": 1, **split}
    program = script(tmp_path, STRUCK)
    ended = library.run(program, [str(TRAINED + 1)], tmp_path / "run", **once)
    assert ended.code != 0
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("run/block*/*")}
    assert {path.name for path in kept} == {"half.pt", "half.json"}
    assert len(kept) == 2 * LAYERS
    ended = library.run(MODULE, [], tmp_path / "run", **once)
    assert ended.code == 0, ended.stderr
    assert f"{LAYERS} candidates learn" in ended.stdout
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    expected = stored(library.library)
    made = stored(tmp_path / "run")
    if split:
        assert made.keys() == expected.keys()
        for name, (entry, weights) in made.items():
            whole, _ = expected[name]
            assert entry == {**whole, "score": pytest.approx(whole["score"], rel=1e-3)}
            assert {n: len(w) for n, w in weights.items()} == {
                n: len(w) for n, w in expected[name][1].items()
            }
    else:
        assert made == expected
    names = [HALF["name"], EMPTY["name"]]
    assert set(expected) == {f"block{b}.{name}" for b in range(LAYERS) for name in names}


@pytest.mark.slow
def test_a_choice_becomes_a_student_that_trains(library: Library, tmp_path: Path) -> None:
    """Its loss is that of the same blocks as distil_gpt stitches them."""
    student, choice = tmp_path / "student", tmp_path / "choice.json"
    ended = library.choose(
        *("--parameters", "70%", "--save-student", str(student), "--output", str(choice))
    )
    assert ended.code == 0, ended.stderr
    names = [entry["name"] for entry in json.loads(choice.read_text())["blocks"]]
    assert len(set(names)) > 1
    shapes = {"teacher": {"name": "teacher"}, "half": HALF, "empty": EMPTY}
    blocks = [{"blocks": [b], "candidates": [shapes[name]]} for b, name in enumerate(names)]
    by_hand = tmp_path / "student.yaml"
    by_hand.write_text(json.dumps({"name": "a", "candidates": [HALF], "exceptions": blocks}))
    log = tmp_path / "log.jsonl"
    flags = {**DISTILLATION, **library.data, "--student-config": by_hand, "--log-file": log}
    ended = run_job(2, MODULE, written(flags), SECONDS_TO_TRAIN)
    assert ended.code == 0, ended.stderr
    expected = json.loads(log.read_text().splitlines()[-1])["student_eval_loss"]
    flags = {
        **MODEL,
        "--data-path": library.corpus,
        "--load": student,
        "--finetune": True,
        "--heterogeneous-layers-config-path": student / "layers.json",
        "--lr": 1e-3,
        "--train-iters": 8,
        "--eval-interval": 8,
        "--eval-iters": 2,
        "--split": "90,10,0",
    }
    losses = []
    for skip in (True, False):
        log = tmp_path / f"{skip}.jsonl"
        words = written({**flags, "--skip-train": skip or None, "--log-file": log})
        ended = run_job(2, "megatron_zb.train", words, SECONDS_TO_TRAIN)
        assert ended.code == 0, ended.stderr
        records = [json.loads(line) for line in log.read_text().splitlines()]
        losses += [record["eval_loss"] for record in records if "eval_loss" in record]
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[1] < losses[0]


def loaded(path: str) -> list[str]:
    """Fill a GPTModel of Megatron's from a student; the names of its experts' parameters."""
    shapes = {**MIXTRAL, "num_experts": 2}
    enter(shapes, path)
    model = whole_model(argparse.Namespace(**(vars(_defaults()) | shapes)))
    state = {"model": model.sharded_state_dict()}
    path = str(latest_checkpoint(Path(path))[1])
    model.load_state_dict(dist_checkpointing.load(state, path)["model"])
    return [name for name, _ in model.named_parameters() if ".local_experts." in name]


@pytest.mark.slow
def test_a_choice_among_experts_becomes_a_student(
    ranks: RankPools, corpus: str, teachers: Path, tmp_path: Path
) -> None:
    """With the same candidate for all blocks: what distil_gpt stitches, which Megatron loads."""
    teacher, library = teachers / "mixtral", tmp_path / "library"
    ranks(1, Kind.HOSTILE).run(enter, model=MIXTRAL, folder=str(teacher))
    shapes = tmp_path / "shapes.yaml"
    shapes.write_text(json.dumps({"name": "two", "candidates": [EMPTY, FEWER_EXPERTS]}))
    split = {"--expert-model-parallel-size": 2, "--distribution": "0-7:1"}
    common = {**DISTILLATION, "--data-path": corpus, "--teacher-load": teacher, **split}
    words = written({**common, "--student-config": shapes, "--save-library": library})
    ended = run_job(2, MODULE, words, SECONDS_TO_TRAIN)
    assert ended.code == 0, ended.stderr
    numbers = {
        entry["name"]: entry["parameters"]
        for entry in json.loads((library / "library.json").read_text())["blocks"][0]
    }
    least = LAYERS * numbers["fewer-experts"]
    given = ["--library", str(library), "--parameters", str(least), "--alike"]
    one, other = tmp_path / "chosen", tmp_path / "stitched"
    ended = run_job(
        None, "megatron_zb.distill.choice", [*given, "--save-student", str(one)], SECONDS_TO_TRAIN
    )
    assert ended.code == 0, ended.stderr
    shapes.write_text(json.dumps({"name": "one", "candidates": [FEWER_EXPERTS]}))
    words = written(
        {**common, "--student-config": shapes, "--save-student": other, "--distribution": "0-3:1"}
    )
    ended = run_job(2, MODULE, words, SECONDS_TO_TRAIN)
    assert ended.code == 0, ended.stderr
    (found,) = ranks(1, Kind.HOSTILE).run(loaded, path=str(one))
    assert len(found) == LAYERS * 2 * 2
    made, expected = ({**tensors_of(latest_checkpoint(path)[1])} for path in (one, other))
    assert made.keys() == expected.keys()
    assert [n for n in made if not torch.equal(made[n], expected[n])] == []


@pytest.mark.parametrize(
    ("damage", "flags", "sentence"),
    [
        ({}, {"--lr": 1e-4}, "half.json was made with --lr 0.001, this run has 0.0001"),
        ({}, {"--save": "run"}, "--save: --save-library keeps every finished candidate"),
        ({}, {"--eval-iters": 0}, "give --eval-iters"),
        ({}, {"--distribution": "0-3:1"}, "ends with candidate 3, but the last candidate is 7"),
        ({"block1/half.json": "{}"}, {}, "half.json: 'candidate' is missing"),
    ],
)
def test_a_library_that_cannot_continue(
    damage: Mapping[str, str],
    flags: Mapping[str, Any],
    sentence: str,
    library: Library,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "library"
    shutil.copytree(library.library, folder)
    for name, text in damage.items():
        (folder / name).write_text(text)
    given = {"--student-config": library.candidates, "--save-library": folder, **flags}
    words = written({**DISTILLATION, **library.data, **given})
    ended = run_job(None, MODULE, words, SECONDS_TO_REPORT)
    check_report(ended, sentence)
    assert ended.code == 2


def test_a_candidate_whose_weights_are_damaged(library: Library, tmp_path: Path) -> None:
    path = library.library / "block0/half.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    try:
        ended = library.choose("--parameters", "63%", "--save-student", str(tmp_path))
    finally:
        path.write_bytes(whole)
    assert ended.code == 2
    assert "half.pt is missing or damaged: delete" in ended.stderr


def test_only_a_teacher_of_both_kinds_of_blocks_has_a_second_time() -> None:
    known: Any = {"a": (0, "shape"), "b": (1, "shape")}
    times = [BlockTime(3.0, 1.0, 0.5), BlockTime(2.0, 1.0, 0.5)]
    assert [each.reduce for each in times] == [0.0, 0.0]
    cases: Sequence[tuple[tuple[int, ...], dict[str, float]]] = (
        ((), {"teacher": 2.0}),
        ((0, 1), {"teacher": 2.0}),
        ((1,), {"teacher": 2.0, "dense_teacher": 3.0}),
    )
    for expert_blocks, expected in cases:
        sizes = TeacherShape(2, 8, 2, 2, 32, expert_blocks=frozenset(expert_blocks))
        found = block_library._as_file(sizes, known, times)
        del found["candidates"]
        assert found == expected
