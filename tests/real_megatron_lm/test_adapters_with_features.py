"""Adapters with what else a training has: each is, to the last digit, what it is alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_tensors import tensors_of

from megatron_zb.megatron_lm.checkout import checkout_at
from real_megatron_lm.adapter_runs import (
    PATHS,
    SPECIAL,
    check_refused,
    check_same_adapter,
    evaluation_of,
    lines_of,
    model,
    train,
)
from real_megatron_lm.runs import MODEL, PIPELINE_OF_TWO, Logged, pretrain

LLAMA = """
--untie-embeddings-and-output-weights --swiglu --normalization RMSNorm --disable-bias-linear
--group-query-attention --num-query-groups 2 --position-embedding-type rope
"""
EXPERTS = """
--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1
"""
HYBRID = """
--spec hybrid_layers STACK --position-embedding-type rope --hybrid-layer-pattern *-*-*-*-
"""
PREDICTION = """
--mtp-num-layers 1 --position-embedding-type rope --untie-embeddings-and-output-weights
"""
TENSORS = "--tensor-model-parallel-size 2 --sequence-parallel"
UNPADDED = "--vocab-size 255"
"""With which the table of words has 256 rows, with and without tensor parallelism."""
UNEQUAL = "--moe-token-dispatcher-type alltoall"
"""Which Megatron asks for where lengths vary, of models without experts, too."""
RECOMPUTED = "--pipeline-recompute auto --pipeline-memory-limit 0.45"
OFFLOADED = "--pipeline-offload auto --pipeline-memory-limit 0.5"


@dataclass(frozen=True)
class Case:
    """A training beside the plain one: 1F1B on 2 ranks in float32.

    Args:
        schedule: of the pipeline.
        more: flags of the run.
        model: flags of the base and of every run.
        ranks: of the job.
        script: of Megatron-LM.
        digits: to which the losses are those of the plain training; None where they are others.
        program: in the launcher's place.
    """

    schedule: str
    more: str = ""
    model: str = ""
    ranks: int = 2
    script: str = "pretrain_gpt.py"
    digits: float | None = 1e-5
    program: str | None = None


CASES = {
    "recomputation": Case("v-half", RECOMPUTED),
    "offload": Case("auto", OFFLOADED),
    "recompute-auto-stream": Case("auto", f"{RECOMPUTED} --pipeline-adapter-steps 3"),
    "replicas": Case("v-zb", "--use-distributed-optimizer", ranks=4),
    "tensors": Case("v-half", TENSORS, UNPADDED, ranks=4),
    "tensors-stream": Case("v-zb", f"{TENSORS} --pipeline-adapter-steps 2", UNPADDED, ranks=4),
    "bf16": Case("v-zb", "--bf16", digits=1e-2),
    "fp16": Case("v-zb", "--fp16 --initial-loss-scale 4194304", digits=None),
    "lengths": Case("v-zb", model=UNEQUAL, program="run_unequal.py"),
    "lengths-stream": Case(
        "v-half", "--pipeline-adapter-steps 2", UNEQUAL, program="run_unequal.py"
    ),
    "llama": Case("v-half", model=LLAMA),
    "experts": Case("v-zb", model=EXPERTS),
    "experts-parallel": Case(
        "v-half", "--expert-model-parallel-size 2", model=EXPERTS, ranks=4, digits=1e-3
    ),
    "prediction": Case("zb-h1", model=PREDICTION),
    "hybrid": Case("v-half", model=HYBRID, script="pretrain_hybrid.py"),
}


@pytest.fixture(scope="module")
def base_of(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Two iterations of Megatron's own 1F1B with flags of a model, made once for each."""
    made: dict[str, Path] = {}

    def make(flags: str, script: str = "pretrain_gpt.py") -> Path:
        if flags not in made:
            folder = tmp_path_factory.mktemp("base")
            saving = f"--exit-interval 2 --save {folder} --save-interval 2"
            text = model(script, left_out=())
            how: dict[str, Any] = {"script": script, "environment": PATHS.get(script)}
            run = pretrain(checkout, text, flags, PIPELINE_OF_TWO, saving, ranks=2, **how)
            assert run.code == 0, run.output
            made[flags] = folder
        return made[flags]

    return make


def losses_of(said: list[tuple[str, str]]) -> list[float]:
    return [float(re.findall(r"lm loss: (\S+)", text)[0]) for _, text in said]


@pytest.mark.parametrize("name", CASES)
def test_each_adapter_is_as_in_a_separate_run(
    checkout: Path, base_of: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    if not (checkout / case.script).is_file():
        pytest.skip(f"Megatron-LM {checkout_at(checkout).version_text} has no {case.script}")
    base = base_of(case.model, case.script)
    how = (case.schedule, case.model, case.more)

    def run(folder: str, entries: dict[str, str], *how: str, ranks: int) -> Logged:
        more: dict[str, Any] = {"ranks": ranks, "script": case.script, "program": case.program}
        ended = train(checkout, base, tmp_path / folder, entries, *how, **more)
        assert ended.code == 0, ended.output
        return ended

    together = run("all", SPECIAL, *how, ranks=case.ranks)
    lines = lines_of(together)
    assert {adapter: len(of) for adapter, of in lines.items()} == {"a": 4, "b": 3}
    for adapter, entry in SPECIAL.items():
        alone = run(adapter, {adapter: entry}, *how, ranks=case.ranks)
        assert lines_of(alone) == {adapter: lines[adapter]}
        assert evaluation_of(alone, adapter) == evaluation_of(together, adapter) != []
        check_same_adapter(tmp_path / adapter, tmp_path / "all", adapter)
    if case.digits is not None:
        plain = lines_of(run("plain", SPECIAL, "1f1b", case.model, ranks=2))
        for adapter in SPECIAL:
            near = pytest.approx(losses_of(plain[adapter]), rel=case.digits)
            assert losses_of(lines[adapter]) == near


COPIES = {
    "a": "batch: 4, steps: 4, weights: all",
    "b": "batch: 2, steps: 3, weights: all, learning_rate: 5e-4",
    "c": "batch: 2, steps: 4, rank: 4",
}


@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", "--clip-grad .5"),
        Case("v-zb"),
        Case("v-zb", "--bf16"),
        Case("1f1b", "--use-distributed-optimizer", ranks=4),
    ],
    ids=["clipped", "v-zb", "bf16", "replicas"],
)
def test_copies_of_all_weights_train_as_megatron_does(
    checkout: Path, base_of: Callable[..., Path], tmp_path: Path, case: Case
) -> None:
    """Each is Megatron's own training of the base, also after a job has ended and gone on.

    A V sums a norm in another order, so that a clipped gradient may differ in its last digit.
    """
    base, save = base_of(LLAMA), tmp_path / "save"
    how = (case.schedule, LLAMA, case.more)
    parts = [
        train(checkout, base, save, COPIES, *how, *end, ranks=case.ranks)
        for end in (["--exit-interval 2"], [])
    ]
    lines: dict[str, list[tuple[str, str]]] = {}
    for run in parts:
        assert run.code == 0, run.output
        for name, of in lines_of(run).items():
            lines.setdefault(name, []).extend(of)
    for name, batch, steps, rate in (("a", 4, 4, "1e-3"), ("b", 2, 3, "5e-4")):
        own = f"--global-batch-size {batch} --train-iters {steps} --lr {rate} --seed {ord(name)}"
        into = tmp_path / name
        start = f"--load {base} --finetune --no-load-optim --no-load-rng"
        end = f"--save {into} --save-interval {steps}"
        flags = f"{LLAMA} {PIPELINE_OF_TWO} {case.more} {own} {start} {end}"
        plain = pretrain(checkout, MODEL, flags, ranks=case.ranks)
        assert plain.code == 0, plain.output
        losses = {n: f"{loss:.6E}" for n, loss in enumerate(losses_of(lines[name]), 1)}
        mean, second = float(plain.losses.pop(2)), float(losses.pop(2))
        assert mean == pytest.approx((float(losses[1]) + second) / 2, rel=1e-6)  # as Megatron logs
        assert losses == plain.losses
        iteration = f"iter_{steps:07d}"
        ours = tensors_of(save / name / "model" / iteration)
        expected = {
            key: value
            for key, value in tensors_of(into / iteration).items()
            if key in ours and "optimizer" not in key
        }
        assert len(expected) == len(ours) > 8
        assert all(torch.equal(ours[key], value) for key, value in expected.items())
    alone = train(checkout, base, tmp_path / "c", {"c": COPIES["c"]}, *how, ranks=case.ranks)
    assert lines_of(alone) == {"c": lines["c"]}


@pytest.mark.parametrize(
    ("flags", "more", "said"),
    [
        ("", "", "weights: all of --pipeline-adapters needs a base whose output layer has its own"),
        (
            LLAMA,
            "--pipeline-adapter-steps 2",
            "steps 2 cannot be combined with weights: all",
        ),
        (f"{LLAMA} --num-experts 2", "", "--num-experts 2 cannot be combined with weights: all"),
    ],
    ids=["tied", "filled", "experts"],
)
def test_what_copies_are_not_combined_with_is_refused(
    checkout: Path, base_of: Callable[..., Path], tmp_path: Path, flags: str, more: str, said: str
) -> None:
    run = train(checkout, base_of(""), tmp_path, {"a": COPIES["a"]}, "v-half", flags, more)
    check_refused(run, said)
