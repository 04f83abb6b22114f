"""Where figures come from: the machine, the versions, the commit and the date, for JSON lines."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path
from typing import Any

import one_device
import torch


def of_this_run(device: str = "cpu") -> dict[str, Any]:
    """Describe this run, under the keys ``machine``, ``commit`` and ``date``."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "machine": one_device.describe(torch.device(device)),
        "commit": _commit(),
        "date": now.isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    """The commit of this checkout, and whether it has been changed since."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
