"""What is said of a measured step: the table of docs/results/step.cpu.yaml, number by number."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
from recorded import assert_as_recorded, rounded

from megatron_zb.cli import main as cli

RECORDED = Path(__file__).parent / "recorded"
PROFILE = Path(__file__).resolve().parents[2] / "docs/results/step.cpu.yaml"


def test_a_measured_step_is_compared_as_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(["trace", str(PROFILE)]) == 0
    printed = capsys.readouterr().out.replace(str(PROFILE.parent), "RESULTS").rstrip()
    assert_as_recorded(printed, RECORDED / "step.txt")
    events = tmp_path / "step.json"
    assert cli.main(["trace", str(PROFILE), "--output", str(events)]) == 0
    found = json.loads(events.read_text("utf-8"))["traceEvents"]
    lines = [" ".join(f"{key}={value}" for key, value in rounded(event).items()) for event in found]
    digests = [
        sha256("\n".join(lines[i : i + 40]).encode()).hexdigest() for i in range(0, len(lines), 40)
    ]
    assert_as_recorded("\n".join(digests), RECORDED / "events.txt")
