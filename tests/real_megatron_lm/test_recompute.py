"""Activations that are dropped and made again in the real pretrain_gpt.py: stock's every digit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from real_megatron_lm.runs import MODEL, PIPELINE_OF_TWO, Logged, check_equal, pretrain


@pytest.fixture(scope="module")
def start(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Logged]:
    """Two iterations of stock, and what it logs in the next five."""
    folder = tmp_path_factory.mktemp("start")
    saving = f"--exit-interval 2 --save {folder} --save-interval 2"
    run = pretrain(checkout, MODEL, PIPELINE_OF_TWO, saving, ranks=2)
    assert run.code == 0, run.output
    stock = pretrain(checkout, MODEL, PIPELINE_OF_TWO, f"--load {folder}", ranks=2)
    assert list(stock.losses) == [3, 4, 5, 6, 7], stock.output
    return folder, stock


@pytest.mark.parametrize("name", ["v-half", "auto"])
def test_what_is_made_again_logs_what_stock_logs(
    checkout: Path, start: tuple[Path, Logged], name: str
) -> None:
    folder, stock = start
    flags = f"--pipeline-schedule {name} --pipeline-recompute auto --pipeline-memory-limit 0.45"
    run = pretrain(checkout, MODEL, PIPELINE_OF_TWO, f"--load {folder}", flags, ranks=2)
    check_equal(run, stock)
    assert re.search(r"  [1-9]\d* of \d+ forwards keep their input alone", run.output)


@pytest.mark.parametrize("name", ["v-half", "auto"])
def test_what_moves_to_the_host_logs_what_stock_logs(
    checkout: Path, start: tuple[Path, Logged], name: str
) -> None:
    folder, stock = start
    flags = f"--pipeline-schedule {name} --pipeline-offload auto --pipeline-memory-limit 0.5"
    run = pretrain(checkout, MODEL, PIPELINE_OF_TWO, f"--load {folder}", flags, ranks=2)
    check_equal(run, stock)
    assert re.search(r"  [1-9]\d* of \d+ activations move to the host", run.output)


def test_what_recomputes_layers_already_is_refused(checkout: Path) -> None:
    flags = "--pipeline-schedule v-half --pipeline-recompute auto --recompute-granularity full"
    more = "--recompute-method uniform --recompute-num-layers 1"
    run = pretrain(checkout, MODEL, PIPELINE_OF_TWO, flags, more, ranks=2)
    assert run.code != 0
    assert "--recompute-granularity full cannot be combined with --pipeline-recompute" in run.error
