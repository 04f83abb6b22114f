"""An output layer that is cut along the vocabulary, in the real pretrain_gpt.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_megatron_lm.runs import (
    MODEL,
    PIPELINE_OF_TWO,
    Logged,
    check_equal,
    pretrain,
)

FLAGS = f"{PIPELINE_OF_TWO} --untie-embeddings-and-output-weights"


@pytest.fixture(scope="module")
def untied(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations of Megatron's own 1F1B."""
    folder = tmp_path_factory.mktemp("untied")
    saving = f"--exit-interval 2 --save {folder} --save-interval 2"
    run = pretrain(checkout, MODEL, FLAGS, saving, ranks=2)
    assert run.code == 0, run.output
    return folder


@pytest.fixture(scope="module")
def stock_untied(checkout: Path, untied: Path) -> Logged:
    """The next five iterations, and the evaluation."""
    run = pretrain(checkout, MODEL, FLAGS, f"--load {untied}", ranks=2)
    assert list(run.losses) == [3, 4, 5, 6, 7], run.output
    return run


@pytest.mark.parametrize("name", ["v-half", "zb-h1"])
def test_shards_of_a_stock_checkpoint_log_what_stock_logs(
    checkout: Path, untied: Path, stock_untied: Logged, name: str
) -> None:
    flags = f"--load {untied} --pipeline-schedule {name} --pipeline-vocabulary on"
    check_equal(pretrain(checkout, MODEL, FLAGS, flags, ranks=2), stock_untied)


def test_stock_goes_on_with_a_checkpoint_of_shards(
    checkout: Path, untied: Path, tmp_path: Path
) -> None:
    """As it does with one of its own, at the same iteration."""
    ours = "--pipeline-schedule v-half --pipeline-vocabulary on"
    found = {}
    for name, more in (("stock", ""), ("shards", ours)):
        saving = f"--load {untied} --exit-interval 4 --save {tmp_path / name} --save-interval 4"
        run = pretrain(checkout, MODEL, FLAGS, saving, more, ranks=2)
        assert run.code == 0, run.output
        found[name] = pretrain(checkout, MODEL, FLAGS, f"--load {tmp_path / name}", ranks=2)
    assert list(found["stock"].losses) == [5, 6, 7]
    check_equal(found["shards"], found["stock"])
