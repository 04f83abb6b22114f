"""Real text to train on."""

from __future__ import annotations

from pathlib import Path

_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prepare_text.py"


def prepared(folder: Path, most_bytes: int) -> str:
    """A data set that the script has made in a folder; its prefix."""
    from jobs import run_job  # imports torch, which not every run of tests needs

    prefix = folder / "text"
    words = ["--max-bytes", str(most_bytes), "--output-prefix", str(prefix)]
    ended = run_job(None, str(_SCRIPT), words, 120)
    assert ended.code == 0, ended.stderr
    return str(prefix)
