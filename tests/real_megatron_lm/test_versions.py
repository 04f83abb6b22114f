"""A checkout whose version nobody has checked yet: made up, for the rest is the one that was."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from megatron_zb.megatron_core.versions import NEWEST, SERIES, SUPPORTED
from megatron_zb.megatron_lm.own_process import read_parser
from real_megatron_lm.runs import MODEL, pretrain

FLAGS = "--pipeline-model-parallel-size 2 --train-iters 1 --pipeline-schedule v-half"


def with_minor(minor: int, patched: Path, tmp_path: Path) -> Path:
    """A patched checkout of another version by its own words."""
    copy = tmp_path / "Megatron-LM"
    shutil.copytree(patched, copy)
    file = copy / "megatron/core/package_info.py"
    text = file.read_text(encoding="utf-8")
    file.write_text(re.sub(r"^MINOR = \d+$", f"MINOR = {minor}", text, flags=re.M), "utf-8")
    return copy


@pytest.mark.skipif(
    sys.version_info < (3, 12), reason="NOT RUN with Python 3.11: what is newer needs 3.12"
)
@pytest.mark.parametrize("launcher", [True, False], ids=["launcher", "patched"])
def test_a_newer_one_trains_with_a_warning(patched: Path, tmp_path: Path, launcher: bool) -> None:
    copy = with_minor(SERIES[-1].number[1] + 1, patched, tmp_path)
    run = pretrain(copy, MODEL, FLAGS, ranks=2, launcher=launcher)
    assert run.code == 0, run.output
    assert list(run.losses) == [1]
    assert run.output.count(f"newer than {NEWEST}, the newest that was checked") == 1


@pytest.mark.parametrize("launcher", [True, False], ids=["launcher", "patched"])
def test_an_older_one_is_refused(patched: Path, tmp_path: Path, launcher: bool) -> None:
    copy = with_minor(SERIES[0].number[1] - 1, patched, tmp_path)
    run = pretrain(copy, MODEL, FLAGS, ranks=2, launcher=launcher)
    assert run.code != 0
    assert f"older than all that are known here: known are {SUPPORTED}" in run.output


def test_the_checkouts_own_arguments_are_all_known(checkout: Path) -> None:
    parser = read_parser(checkout)
    assert parser.version in [series.text for series in SERIES]
    assert not parser.new
