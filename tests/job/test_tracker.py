"""The tracker file of a checkpoint: whatever is in it, one sentence says what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_zb.errors import UsageError
from megatron_zb.files import read_tracker
from megatron_zb.train.checkpoint_directory import TRACKER, latest_checkpoint


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"1" * 1001, "it is larger than 1000 bytes"), (b"\xff\xfe1", "it is no text in UTF-8")],
)
def test_what_is_no_tracker_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    tracker = tmp_path / TRACKER
    tracker.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        latest_checkpoint(tmp_path)
    expected = f"{tracker} cannot be read: {reason}; write the iteration to load into it"
    assert str(refused.value) == expected


@pytest.mark.parametrize("content", ["", "two", "²", "-1"])
def test_a_tracker_names_an_iteration(tmp_path: Path, content: str) -> None:
    (tmp_path / TRACKER).write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match="not an iteration number"):
        latest_checkpoint(tmp_path)


def test_the_iteration_of_a_tracker_is_read(tmp_path: Path) -> None:
    (tmp_path / "iter_0000012").mkdir()
    (tmp_path / TRACKER).write_text("12\n", encoding="utf-8")
    assert latest_checkpoint(tmp_path) == (12, tmp_path / "iter_0000012")
    assert read_tracker(tmp_path / TRACKER) == "12"


def test_a_tracker_names_a_folder_that_is_there(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("12", encoding="utf-8")
    with pytest.raises(UsageError, match="iter_0000012, which is missing"):
        latest_checkpoint(tmp_path)
