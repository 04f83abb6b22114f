"""Start a training as a user does, and read what it leaves."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import Ended
from live_processes import end_session

Flags = Mapping[str, Any]
Record = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
MODULE = "megatron_zb.train"
# A mistake must end the ranks long before a process group's timeout would.
SECONDS_TO_REPORT = 30.0
SECONDS_TO_TRAIN = 120.0
# Every rank reports what of this package it has imported, and what in Megatron comes from it, but
# for the functions that --cpu redirects.
REPORT = """
import json, os, sys
from megatron_zb.train.launch import launch

def ours(thing):
    home = getattr(thing, "__module__", None) or ""
    return home.startswith("megatron_zb") and not home.startswith("megatron_zb.cpu_ranks")

def names_from_this_package():
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron.core"):
            for name, value in list(vars(module).items()):
                if ours(value):
                    yield f"{module_name}.{name}"
                if isinstance(value, type):
                    for attribute, member in list(vars(value).items()):
                        if ours(member):
                            yield f"{module_name}.{name}.{attribute}"

try:
    launch(sys.argv[2:])
except SystemExit as end:
    report = {
        "imported": sorted(name for name in sys.modules if name.startswith("megatron_zb")),
        "in_megatron": sorted(names_from_this_package()),
    }
    with open(f"{sys.argv[1]}.{os.environ['RANK']}", "w") as file:
        json.dump(report, file)
    sys.exit(end.code)
"""


def written(flags: Flags) -> list[str]:
    """A command line; a flag that is None is left out, one that is True has no value."""
    words: list[str] = []
    for flag, value in flags.items():
        if value is not None:
            words += [flag] if value is True else [flag, str(value)]
    return words


def end_of(command: Sequence[str], timeout: float) -> Ended:
    """Run a command to its end; one that does not end is killed with all its ranks."""
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end_session(process)
        stdout, stderr = process.communicate()
        pytest.fail(f"did not end in {timeout:g} s:\n{stdout}\n{stderr}")
    return Ended(process.returncode, stdout, stderr, time.monotonic() - start)


def torchrun(ranks: int, *program: str) -> list[str]:
    """The command that starts a program on that many ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(ranks), *program]


def script(folder: Path, source: str) -> str:
    path = folder / "script.py"
    path.write_text(source, encoding="utf-8")
    return str(path)


def checkpoint_of(run_folder: Path, iteration: int, folder: Path) -> Path:
    """A directory to load from that ends with an earlier checkpoint of a run."""
    name = f"iter_{iteration:07d}"
    shutil.copytree(run_folder / name, folder / name)
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    return folder


def check_report(ended: Ended, *parts: str) -> None:
    """One sentence on stderr that has all the parts, and no traceback through this package."""
    said = [line for line in ended.stderr.splitlines() if line.startswith("megatron_zb: error: ")]
    assert len(said) == 1, ended.stderr
    for part in parts:
        assert part in said[0]
    assert ended.code != 0
    # torchrun adds a traceback of its own when ranks have failed.
    assert not re.search(r'File ".*/megatron(_zb)?/', ended.stderr), ended.stderr
