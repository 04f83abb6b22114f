"""Runs of a real pretrain script of Megatron-LM on CPU ranks, and what they log."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from jobs import try_job
from live_processes import end_session
from rank_process import Kind

SECONDS = 400
RANKS = 4

# A small GPT on random data that Megatron-LM makes up itself; clipping is never active.
MODEL = """
--mock-data --tokenizer-type NullTokenizer --vocab-size 128 --split 90,5,5
--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8
--attention-dropout 0 --hidden-dropout 0 --clip-grad 100
--lr 1e-3 --lr-decay-iters 10 --train-iters 7
--eval-iters 1 --eval-interval 1000 --log-interval 1 --ckpt-format torch_dist
"""
PIPELINE = "--pipeline-model-parallel-size 4"
PIPELINE_OF_TWO = "--pipeline-model-parallel-size 2"

# What the launcher's --cpu sets by itself.
CPU = """
--distributed-backend gloo --transformer-impl local --use-cpu-initialization
--no-gradient-accumulation-fusion --no-persist-layer-norm --no-bias-gelu-fusion
--no-bias-dropout-fusion --no-masked-softmax-fusion
"""

# Scripts that import no more than forked ranks have.
_FORKED = {"pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py"}

_PLAIN = Path(__file__).with_name("run_on_cpu.py")
_ITERATION = re.compile(r"iteration +(\d+)/ +\d+ .* lm loss: (\S+) ")
_NORM = re.compile(r"grad norm: (\S+)")
_EVALUATION = re.compile(r"validation loss at iteration (\d+) on (\w+) set \| lm loss value: (\S+)")


@dataclass
class Logged:
    """What one run printed: texts, so that every digit counts."""

    code: int
    output: str
    losses: dict[int, str] = field(default_factory=dict)
    norms: dict[int, str] = field(default_factory=dict)
    evaluations: dict[str, str] = field(default_factory=dict)

    @property
    def error(self) -> str:
        """The sentences of this package, one line each; another rank may have begun their line."""
        return "\n".join(re.findall(r"megatron_zb: error: .*", self.output))

    @property
    def said(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("megatron_zb: ")]


def pretrain(
    checkout: Path,
    *flags: str,
    ranks: int = RANKS,
    launcher: bool = True,
    program: Path | None = None,
    script: str | Path = "pretrain_gpt.py",
    environment: Mapping[str, str] | None = None,
    torchrun: bool = False,
) -> Logged:
    """Train on CPU ranks; without the launcher, as the script of a patched checkout.

    A script of the checkout runs on forked ranks, which import nothing again. Everything else, and
    with ``torchrun`` such a script as well, is started by torchrun.

    Args:
        program: stands in the launcher's place, and calls it.
    """
    arguments = " ".join(flags).split()
    is_plain = launcher and program is None and not environment
    if is_plain and not torchrun and script in _FORKED and _is_preloaded(checkout):
        return _forked([str(checkout / script), "--cpu", *arguments], ranks)
    if program is not None:
        command = [str(program), str(checkout / script), "--cpu", *arguments]
    elif launcher:
        command = ["-m", "megatron_zb.launch", str(checkout / script), "--cpu", *arguments]
    else:
        command = [str(_PLAIN), str(checkout / script), *CPU.split(), *arguments]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *(f"--nproc-per-node={ranks}", *command),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "OMP_NUM_THREADS": "1",
                **(environment or {}),
            },
            start_new_session=True,
            cwd=tempfile.gettempdir(),
        )
        try:
            process.wait(SECONDS)
        finally:
            end_session(process)
        output.seek(0)
        return _read(process.returncode, output.read())


def _is_preloaded(checkout: Path) -> bool:
    return checkout.resolve() == Path(os.environ["MEGATRON_LM_PATH"]).resolve()


def _forked(words: list[str], ranks: int) -> Logged:
    """Train on forked ranks, which end like those of torchrun when one of them fails."""
    ended = try_job(ranks, "megatron_zb.launch", words, SECONDS, Kind.MEGATRON_LM)
    assert not ended.hung, f"did not end in {SECONDS} s:\n{ended.stdout}\n{ended.stderr}"
    return _read(ended.code, f"{ended.stdout}\n{ended.stderr}")


def _read(code: int, output: str) -> Logged:
    """Read what a run has logged, with the digits of Megatron-LM: forked ranks print more."""
    logged = Logged(code, output)
    for line in output.splitlines():
        if found := _ITERATION.search(line):
            logged.losses[int(found[1])] = f"{float(found[2]):.6E}"
            if norm := _NORM.search(line):
                logged.norms[int(found[1])] = f"{float(norm[1]):.3f}"
        elif found := _EVALUATION.search(line):
            logged.evaluations[f"{found[2]} after {found[1]}"] = f"{float(found[3]):.6E}"
    return logged


def check_equal(run: Logged, upstream: Logged) -> None:
    """Losses, gradient norms and evaluation as texts."""
    assert run.code == 0, run.output
    assert run.losses and run.losses == upstream.losses
    assert run.norms == upstream.norms
    assert run.evaluations == upstream.evaluations


def check_near(run: Logged, upstream: Logged) -> None:
    """What is logged, but for rounding: a unit of the last of seven digits."""
    assert run.code == 0, run.output
    for name in ("losses", "evaluations"):
        ours, theirs = getattr(run, name), getattr(upstream, name)
        assert theirs and ours.keys() == theirs.keys()
        for key, text in theirs.items():
            assert float(ours[key]) == pytest.approx(float(text), rel=1e-6)
    assert run.norms.keys() == upstream.norms.keys()
    for step, text in upstream.norms.items():
        assert float(run.norms[step]) == pytest.approx(float(text), abs=1.01e-3)
