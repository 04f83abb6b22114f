"""A distillation that goes on: from its own data, or from others where that is allowed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from megatron_zb.distill import checkpoint
from megatron_zb.errors import UsageError
from megatron_zb.job import data_contents

SETTINGS: dict[str, Any] = dict.fromkeys(checkpoint._SAME, 1)


def resumed(monkeypatch: pytest.MonkeyPatch, mine: Any, *, allowed: bool) -> tuple[Path, str]:
    """Resume from a checkpoint of the data "a"."""
    stored = {
        "library": [],
        "settings": SETTINGS,
        "distribution": "0-1:1",
        data_contents.RECORD: {"--data-path": [("1", "a", "contents of a")]},
    }
    monkeypatch.setattr(checkpoint, "latest_checkpoint", lambda folder: (1, folder / "iter"))
    monkeypatch.setattr(checkpoint, "check_contents", lambda path, flag: None)
    monkeypatch.setattr(checkpoint, "read", lambda path, call: stored)
    args = argparse.Namespace(load="kept", pipeline_allow_other_data=allowed, **SETTINGS)
    setattr(args, data_contents.RECORD, mine)
    return checkpoint.stored_distribution(args, [])


SAME = {"--data-path": [("1", "elsewhere", "contents of a")]}
OTHER = {"--data-path": [("1", "b", "contents of b")]}


@pytest.mark.parametrize(("mine", "allowed"), [(SAME, False), (SAME, True), (OTHER, True)])
def test_a_run_goes_on(monkeypatch: pytest.MonkeyPatch, mine: Any, allowed: bool) -> None:
    assert resumed(monkeypatch, mine, allowed=allowed) == (Path("kept/iter"), "0-1:1")


def test_other_data_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UsageError, match=r"was trained with --data-path 1 a .*--pipeline-allow-other-data"
    ):
        resumed(monkeypatch, OTHER, allowed=False)
