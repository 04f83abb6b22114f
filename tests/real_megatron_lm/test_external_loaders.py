"""Iterators that a user's data set provider returns, with ``--dataloader-type external``.

They read ``get_args().seq_length`` for every batch.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from linked_checkouts import EXTERNAL_DATA, with_script

from real_megatron_lm.runs import (
    MODEL,
    PIPELINE_OF_TWO,
    Logged,
    check_equal,
    check_near,
    pretrain,
)

EXTERNAL = f"{MODEL} {PIPELINE_OF_TWO} --dataloader-type external"
train = partial(pretrain, ranks=2, script=EXTERNAL_DATA)


@pytest.fixture(scope="module")
def with_loader(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout, with the script of the user."""
    return with_script(checkout, EXTERNAL_DATA, tmp_path_factory.mktemp("external"))


@pytest.fixture(scope="module")
def expected(with_loader: Path, checkpoint_of_two: Path) -> Logged:
    """Five iterations of Megatron's own 1F1B."""
    run = train(with_loader, EXTERNAL, f"--load {checkpoint_of_two}")
    assert list(run.losses) == [3, 4, 5, 6, 7], run.output
    return run


@pytest.mark.parametrize("schedule", ["zb-h1", "v-half"])
def test_it_logs_what_megatron_logs(
    with_loader: Path, checkpoint_of_two: Path, expected: Logged, schedule: str
) -> None:
    asked = f"--load {checkpoint_of_two} --pipeline-schedule {schedule}"
    check_equal(train(with_loader, EXTERNAL, asked), expected)


@pytest.mark.parametrize("schedule", ["zb-h1", "v-half"])
def test_an_iterator_reads_the_length_of_a_whole_sequence_with_slices(
    with_loader: Path, checkpoint_of_two: Path, expected: Logged, schedule: str
) -> None:
    asked = f"--load {checkpoint_of_two} --pipeline-schedule {schedule} --pipeline-slices 2"
    check_near(train(with_loader, EXTERNAL, asked), expected)
