"""A question to a Megatron-LM in a folder, which a process of its own answers on a CPU.

Importing Megatron changes the process that does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zb.errors import UsageError

ARGUMENTS = Path("megatron/training/arguments.py")


def answer(
    module: str,
    root: Path,
    failed: str,
    *,
    given: str = "",
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a module of this package with the folder as its argument; return the JSON it prints last.

    Args:
        module: its name.
        root: a checkout, or where ``megatron.training`` is installed.
        failed: the start of the sentence that says what was not possible.
        given: its standard input.
        environment: more variables of its environment.

    Raises:
        UsageError: there is no Megatron-LM, or it cannot be imported here.
    """
    if not (root / ARGUMENTS).is_file():
        raise UsageError(f"{failed}: it has no {ARGUMENTS}")
    done = run_module(module, str(root.resolve()), given, environment or {})
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise UsageError(f"{failed}: {why}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_module(
    module: str, root: str, given: str, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a module of this package in a new interpreter; see :func:`answer`."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, root],
        env={**os.environ, **path, **environment},
        input=given,
        capture_output=True,
        text=True,
    )
