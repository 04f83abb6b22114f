"""What plan says of each of its options, in each of its uses: accepted, or one sentence.

Each option is tried with a value that is right, and with wrong ones. Nothing is searched.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from recorded import assert_as_recorded

from megatron_zb.cli import main as cli
from megatron_zb.plan import from_profile
from megatron_zb.plan import search as planner

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).parent / "recorded"
USES = {
    "config": "--config llama3_8b --gpus 16 --device h100_sxm",
    "profile": f"--profile {ROOT / 'docs/results/step.cpu.yaml'}",
    "student": "--config llama3_8b --gpus 8 --device h100_sxm --student-config half_mlp",
    "arguments": "--gpus 8 -- --num-layers 8 --hidden-size 1024 --num-attention-heads 16 "
    "--seq-length 2048 --max-position-embeddings 2048 --vocab-size 32000 "
    "--pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 16 --bf16",
}
RIGHT = {
    "config": "llama3_8b",
    "device": "a100_80gb_sxm",
    "expert_tensor": "1",
    "gpu_memory": "80GiB",
    "gpus": "16",
    "lengths": "lognormal:2048:0.8",
    "memory_limit": "0.5",
    "packing": "first-fit",
    "precision": "bf16",
    "profile": str(ROOT / "docs/results/step.cpu.yaml"),
    "recompute": "none,full",
    "schedules": "v-zb,zb-h1",
    "seq_length": "4096",
    "slices": "1,2",
    "slice_tokens": "512",
    "student_config": "half_mlp",
    "tokens": "1B",
    "html": "plan.html",
}
WRONG = ("0", "-1", "nothing", "1,,2", "1e30", "")


class Accepted(Exception):
    """The search would begin."""


def options() -> list[argparse.Action]:
    [commands] = [
        action for action in cli.parser()._actions if isinstance(action, argparse._SubParsersAction)
    ]
    actions = commands.choices["plan"]._actions
    return [a for a in actions if a.option_strings and a.dest not in ("help", "html")]


def outcome(use: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    before, dashes, after = USES[use].partition(" -- ")
    command = ["plan", *before.split(), *words, *(["--", *after.split()] if dashes else [])]
    try:
        code = cli.main(command)
    except Accepted:
        return "accepted"
    printed = capsys.readouterr()
    said = [line for line in printed.err.splitlines() if line.startswith("megatron-zb:")]
    return "planned" if code == 0 else " ".join(said).replace(str(ROOT), "ROOT")


def tried(action: argparse.Action) -> list[list[str]]:
    name = action.option_strings[-1]
    if action.nargs == 0:
        return [[name]]
    right = list(action.choices) if action.choices else [RIGHT.get(action.dest, "2")]
    wrong = [] if action.choices else WRONG
    return [[name, value] for value in (*right, *wrong)]


@pytest.mark.long
@pytest.mark.parametrize("use", USES)
def test_each_option_is_accepted_or_refused_as_it_was(
    use: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def accept(*given: Any, **more: Any) -> None:
        raise Accepted

    monkeypatch.setattr(planner, "search", accept)
    monkeypatch.setattr(from_profile, "rows", accept)
    monkeypatch.chdir(tmp_path)
    lines = []
    for action in options():
        for words in tried(action):
            said = " ".join(words).replace(str(ROOT), "ROOT")
            lines.append(f"{said}: {outcome(use, words, capsys)}")
    assert_as_recorded("\n".join(lines), RECORDED / f"options_of_{use}.txt")
