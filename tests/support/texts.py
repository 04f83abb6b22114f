"""Real text to train on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prepare_text.py"


def prepared(folder: Path, most_bytes: int) -> str:
    """A data set that the script has made in a folder; its prefix."""
    prefix = folder / "text"
    command = [sys.executable, str(_SCRIPT), "--max-bytes", str(most_bytes)]
    subprocess.run([*command, "--output-prefix", str(prefix)], check=True, capture_output=True)
    return str(prefix)
