"""Layers that are cut along the vocabulary, in the real pretrain_gpt.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from real_megatron_lm.runs import (
    MODEL,
    PIPELINE_OF_TWO,
    Logged,
    pretrain,
)

WEIGHTS = {"untied": "--untie-embeddings-and-output-weights", "tied": ""}
CUT = "--pipeline-vocabulary on"


def check_close(run: Logged, stock: Logged) -> None:
    """To one in the last of the seven digits of a loss and the four of a norm."""
    assert run.code == 0, run.output
    for ours, theirs, digit in (
        (run.losses, stock.losses, 1e-6),
        (run.evaluations, stock.evaluations, 1e-6),
        (run.norms, stock.norms, 1e-3),
    ):
        assert ours and ours.keys() == theirs.keys()
        numbers = {key: float(text) for key, text in theirs.items()}
        expected = pytest.approx(numbers, abs=1.01 * digit)
        assert {key: float(text) for key, text in ours.items()} == expected


@dataclass(frozen=True)
class Start:
    """Two iterations of Megatron's own 1F1B, and what stock logs in the next five."""

    flags: str
    folder: Path
    stock: Logged


@pytest.fixture(scope="module", params=WEIGHTS)
def start(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Start:
    folder = tmp_path_factory.mktemp(request.param)
    flags = f"{MODEL} {PIPELINE_OF_TWO} {WEIGHTS[request.param]}"
    saving = f"--exit-interval 2 --save {folder} --save-interval 2"
    run = pretrain(checkout, flags, saving, ranks=2)
    assert run.code == 0, run.output
    stock = pretrain(checkout, flags, f"--load {folder}", ranks=2)
    assert list(stock.losses) == [3, 4, 5, 6, 7], stock.output
    return Start(flags, folder, stock)


@pytest.mark.parametrize("name", ["v-half", "zb-h1"])
def test_shards_of_a_stock_checkpoint_log_what_stock_logs(
    checkout: Path, start: Start, name: str
) -> None:
    more = f"--load {start.folder} --pipeline-schedule {name} {CUT}"
    check_close(pretrain(checkout, start.flags, more, ranks=2), start.stock)


def test_stock_goes_on_with_a_checkpoint_of_shards(
    checkout: Path, start: Start, tmp_path: Path
) -> None:
    """As it does with one of its own, at the same iteration."""
    found = {}
    for name, more in (("stock", ""), ("shards", f"--pipeline-schedule v-half {CUT}")):
        saving = f"--load {start.folder} --exit-interval 4 --save {tmp_path / name} "
        saving += "--save-interval 4"
        run = pretrain(checkout, start.flags, saving, more, ranks=2)
        assert run.code == 0, run.output
        found[name] = pretrain(checkout, start.flags, f"--load {tmp_path / name}", ranks=2)
    assert list(found["stock"].losses) == [5, 6, 7]
    check_close(found["shards"], found["stock"])
