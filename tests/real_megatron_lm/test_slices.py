"""The real pretrain_gpt.py on token slices: it logs what Megatron logs, up to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_megatron_lm.runs import MODEL, PIPELINE_OF_TWO, Logged, check_near, pretrain


@pytest.mark.parametrize(
    "flags",
    [
        "v-half --pipeline-slices 4",
        "zb-h1 --pipeline-slices 12,12,8",
        "1f1b --pipeline-slices 2",
        "v-half --pipeline-slices 4 --pipeline-recompute auto --pipeline-memory-limit 0.3",
        "v-zb --pipeline-slices 4 --pipeline-offload auto --pipeline-memory-limit 0.25",
        "v-zb --pipeline-slices 4 --pipeline-vocabulary on",
    ],
)
def test_two_ranks_log_what_megatron_logs(
    checkout: Path, checkpoint_of_two: Path, upstream_of_two: Logged, flags: str
) -> None:
    asked = f"--load {checkpoint_of_two} --pipeline-schedule {flags}"
    check_near(pretrain(checkout, MODEL, PIPELINE_OF_TWO, asked, ranks=2), upstream_of_two)


def test_tensor_ranks_that_read_no_data_receive_slices(
    checkout: Path, checkpoint_of_two: Path
) -> None:
    parallel = f"--load {checkpoint_of_two} --tensor-model-parallel-size 2 --sequence-parallel"
    upstream, sliced = (
        pretrain(checkout, MODEL, PIPELINE_OF_TWO, f"{parallel} {flags}", ranks=4)
        for flags in ("", "--pipeline-schedule v-zb --pipeline-slices 4")
    )
    assert upstream.code == 0, upstream.output
    check_near(sliced, upstream)
