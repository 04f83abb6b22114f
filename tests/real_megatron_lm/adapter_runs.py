"""Trainings of adapters with the real pretrain_gpt.py: their files, logs and checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from stored_tensors import tensors_of

from real_megatron_lm.runs import MODEL, Logged, pretrain

TESTS = Path(__file__).parents[1]

# What adapters have in the file, not as flags of the whole run.
OF_FILE = ("--global-batch-size 8", "--train-iters 7")
FOUR = {
    "a": "batch: 4, steps: 8, rank: 4",
    "b": "batch: 8, steps: 8, rank: 8, dropout: .2, learning_rate: 5e-4",
    "c": "batch: 4, steps: 5, rank: 2, modules: [linear_proj]",
    "d": "batch: 8, steps: 8, alpha: 64, warmup_steps: 2, clip: .2",
}
"""Adapters that differ in all that the file can say; c ends early."""
SPECIAL = {"a": "batch: 4, steps: 4, rank: 4", "b": "batch: 2, steps: 3, rank: 8, alpha: 8"}
PATHS = {"pretrain_hybrid.py": {"PYTHONPATH": f"{TESTS / 'support'}:{TESTS.parent}"}}
"""Variables of the scripts whose layers stand in for those of GPUs."""

_LINE = re.compile(r"^ adapter (\w+) \| iteration +(\d+)/.*(lm loss: \S+ \|.*)$", re.M)


def model(script: str = "pretrain_gpt.py", left_out: Sequence[str] = OF_FILE) -> str:
    """The flags of the base, without some; a pattern gives the layers of a hybrid model."""
    text = MODEL
    for flags in [*left_out, *(["--num-layers 8"] if "hybrid" in script else [])]:
        assert flags in text
        text = text.replace(flags, "")
    return text


def written(path: Path, entries: dict[str, str]) -> Path:
    """A file of adapters that differ in more than their names."""
    lines = [f"  - {{name: {n}, seed: {ord(n[0])}, {entry}}}" for n, entry in entries.items()]
    path.write_text("\n".join(["adapters:", *lines, ""]))
    return path


def train(
    checkout: Path,
    base: Path,
    save: Path,
    entries: dict[str, str],
    schedule: str,
    *more: str,
    ranks: int = 2,
    stages: int = 2,
    program: str | None = None,
    script: str = "pretrain_gpt.py",
) -> Logged:
    """Train adapters of a base, and save them after every second step.

    Args:
        entries: of the adapters, by name.
        more: flags of the run.
        stages: pipeline ranks.
        program: stands in the launcher's place.
        script: of Megatron-LM.
    """
    save.mkdir(exist_ok=True)
    file = written(save / "adapters.yaml", entries)
    files = f"--load {base} --save {save} --save-interval 2 --pipeline-adapters {file}"
    flags = f"{files} --pipeline-schedule {schedule}"
    pipeline = f"--pipeline-model-parallel-size {stages}"
    path = None if program is None else Path(__file__).with_name(program)
    how: dict[str, Any] = {"script": script, "environment": PATHS.get(script)}
    words = (model(script), pipeline, flags, *more)
    return pretrain(checkout, *words, ranks=ranks, program=path, **how)


def lines_of(run: Logged) -> dict[str, list[tuple[str, str]]]:
    """The steps of each adapter in the log, each with its losses and its norm."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, step, said in _LINE.findall(run.output):
        found.setdefault(name, []).append((step, said))
    return found


def evaluation_of(run: Logged, name: str) -> list[str]:
    return re.findall(rf"validation loss at iteration \d+ of adapter {name} \| (.*)", run.output)


def saved(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The tensors of the last checkpoint of an adapter: weights and states of the optimizer."""
    step = int((folder / name / "latest_checkpointed_iteration.txt").read_text())
    return tensors_of(folder / name / f"iter_{step:07d}")


def check_same_adapter(ours: Path, theirs: Path, name: str) -> None:
    one, other = saved(ours, name), saved(theirs, name)
    assert one.keys() == other.keys()
    assert sum("linear_" in key for key in one) > 8
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


def check_refused(run: Logged, said: str) -> None:
    assert run.code != 0
    assert said in run.error
    assert len(run.error.splitlines()) == 1
    assert "number of parameters" not in run.output
