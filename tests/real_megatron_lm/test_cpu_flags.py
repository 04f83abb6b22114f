"""Flags that ask torch for a GPU, or Megatron for its kernels, on CPU ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_megatron_lm.flag_runs import check_same, train

START = "--save {folder} --save-interval 2 --exit-interval 2"
TENSOR = "--tensor-model-parallel-size 2"


def test_sequence_parallelism_changes_nothing(checkout: Path, tmp_path: Path) -> None:
    """Norms see a part of the sequence: their gradients are summed over the tensor ranks."""
    saved = train(checkout, START.format(folder=tmp_path))
    assert saved.ended.code == 0, saved.error
    whole = train(checkout, f"{TENSOR} --load {tmp_path}", ranks=4)
    assert list(whole.losses) == [3, 4, 5]
    for more in ("", "--pipeline-schedule v-half", "--pipeline-schedule zb-h1"):
        flags = f"{TENSOR} --sequence-parallel --load {tmp_path} {more}"
        check_same(train(checkout, flags, ranks=4), whole)


def test_a_memory_report_is_of_nothing(checkout: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = (
        f"--tensorboard-dir {tmp_path} --log-memory-to-tensorboard --log-memory-interval 1 "
        f"--log-device-memory-used --record-memory-history "
        f"--memory-snapshot-path {tmp_path}/snapshot --pipeline-schedule v-half"
    )
    run = train(checkout, flags)
    assert run.ended.code == 0, run.error
    assert "total device memory used: 0.00" in run.ended.stdout
    assert (tmp_path / "snapshot").stat().st_size
    events = EventAccumulator(str(tmp_path)).Reload()
    for name in ("mem-reserved-bytes", "mem-allocated-bytes", "mem-allocated-count"):
        assert [event.value for event in events.Scalars(name)] == [0.0] * 5


@pytest.mark.parametrize("schedule", ["v-half", "auto"])
def test_the_encoders_length_stands_for_the_sequences(
    checkout: Path, tmp_path: Path, schedule: str
) -> None:
    saved = train(checkout, START.format(folder=tmp_path))
    assert saved.ended.code == 0, saved.error
    upstream = train(checkout, f"--load {tmp_path}")
    flags = f"--encoder-seq-length 32 --load {tmp_path} --pipeline-schedule {schedule}"
    check_same(train(checkout, flags, left_out="--seq-length"), upstream)
