"""The seed of what tests draw: the commit, so that every commit draws others."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

VARIABLE = "TESTS_SEED"


@cache
def seed_of_commit() -> str:
    """Return the value of ``TESTS_SEED``, or else the commit; "0" where there is no repository."""
    if given := os.environ.get(VARIABLE):
        return given
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "0"
