#!/usr/bin/env python3
"""Outputs of every command in a folder, to see what a change of the code changes for users.

Writes ``--help`` of all commands, ``check`` for argument lists that are accepted or refused,
``doctor``, ``show`` of every schedule and, with --plans, plans of models on devices as JSON. Write
them before and after a change, then compare the folders with ``diff -r``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_zb import schedules

COMMANDS = "show export plan trace flags check verify doctor".split()
_SIZES = "--num-layers 32 --micro-batch-size 1 --global-batch-size 64"
_FOUR = f"--pipeline-model-parallel-size 4 {_SIZES}"
_MANY_EXPERTS = "--num-experts 8 --overlap-moe-expert-parallel-comm --expert-model-parallel-size 2"
CHECKS = (
    f"--pipeline-schedule v-half --bf16 {_FOUR}",
    f"--pipeline-schedule zb-h1 --use-torch-fsdp2 {_FOUR}",
    f"--pipeline-schedule v-half {_FOUR} --num-layers 30",
    f"--pipeline-schedule v-half --ckpt-format torch --save x {_FOUR}",
    f"--pipeline-schedule auto --pipeline-memory-limit 40GiB {_FOUR}",
    f"--pipeline-schedule auto --pipeline-memory-limit 0.5 --sequence-parallel {_FOUR}",
    f"--pipeline-schedule zb-2p --pipeline-memory-limit nonsense {_FOUR}",
    f"--pipeline-schedule v-min --pipeline-recompute 0.5 {_FOUR}",
    f"--pipeline-schedule auto --pipeline-recompute auto --pipeline-offload auto {_FOUR}",
    f"--pipeline-schedule zb-h1 --pipeline-vocabulary on --mtp-detach-heads {_FOUR}",
    f"--pipeline-schedule zb-h1 --pipeline-post-validation {_FOUR}",
    f"--pipeline-schedule v-half --pipeline-model-parallel-size 1 {_SIZES}",
    f"--pipeline-schedule nothing {_FOUR}",
    f"--pipeline-memory-limit 0.5 {_FOUR}",
    f"--pipeline-schedule v-half {_MANY_EXPERTS} {_FOUR}",
    f"--pipeline-schedule v-half --cuda-graph-impl local {_FOUR}",
    f"--pipeline-schedule interleaved --num-layers-per-virtual-pipeline-stage 2 {_FOUR}",
    f"--pipeline-schedule zb-h1 --pipeline-schedule-file x.csv {_FOUR}",
)
_PROGRESS = re.compile(r" \.\.\. \d+ s$")
_MODELS = "gpt_28b llama3_70b llama3_8b deepseek_v3_like qwen3_8b qwen3_30b_a3b".split()
_DEVICES = "h100_sxm", "b200_sxm"


def commands(with_plans: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of a file and the arguments whose output it gets."""
    yield "help", ["--help"]
    for name in COMMANDS:
        yield f"help_{name}", [name, "--help"]
    for number, line in enumerate(CHECKS, start=1):
        yield f"check_{number}", ["check", "--", *line.split()]
    yield "doctor", ["doctor"]
    for name in schedules.names():
        yield f"show_{name}", ["show", name, "--pipeline-size", "4", "--microbatches", "8"]
    if with_plans:
        for model in _MODELS:
            for device in _DEVICES:
                sizes = f"--gpus 64 --pipeline 4 --tries 2 --format json --device {device}"
                yield f"plan_{model}_{device}", ["plan", "--config", model, *sizes.split()]


def output_of(arguments: list[str]) -> str:
    """Return what a command prints but for elapsed seconds, its errors and its exit status."""
    command = [sys.executable, "-m", "megatron_zb.cli", *arguments]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"COLUMNS": "100"},
        text=True,
        check=False,
    )
    kept = [line for line in done.stdout.splitlines() if not _PROGRESS.search(line)]
    return "\n".join([*kept, f"exit status {done.returncode}\n"])


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="that gets a file for each output")
    parser.add_argument("--plans", action="store_true", help="plans, too, which take minutes")
    return parser


def main() -> int:
    arguments = parser().parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    asked = list(commands(arguments.plans))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outputs = pool.map(output_of, [words for _, words in asked])
        for (name, _), output in zip(asked, outputs, strict=True):
            (arguments.folder / f"{name}.txt").write_text(output, encoding="utf-8")
    print(f"{len(asked)} outputs are in {arguments.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
