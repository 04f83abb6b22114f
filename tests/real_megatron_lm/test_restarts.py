"""Megatron-LM's in-process restart: a rank raises, and all begin again without a new process."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

from megatron_zb.megatron_core import versions
from real_megatron_lm.run_and_restart import STEP
from real_megatron_lm.runs import MODEL, PIPELINE, Logged, check_equal, pretrain

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nvidia_resiliency_ext") is None,
    reason="nvidia-resiliency-ext, which restarts, is not installed",
)

RESTART = """
--inprocess-restart --inprocess-granularity rank --inprocess-active-world-size 4
--inprocess-monitor-thread-interval 0.1 --inprocess-last-call-wait 0.2
"""
FIRST = 3
"""The first iteration after the checkpoint that is loaded."""


@pytest.mark.parametrize(
    "schedule",
    [
        "--pipeline-schedule v-half",
        "--pipeline-schedule zb-h1 --enable-optimizer-post-validation",
        "--pipeline-schedule auto --pipeline-memory-limit 0.6 --pipeline-timeout 30",
    ],
)
def test_training_goes_on_from_the_last_checkpoint(
    checkout: Path, upstream_checkpoint: Path, upstream: Logged, tmp_path: Path, schedule: str
) -> None:
    folder = shutil.copytree(upstream_checkpoint, tmp_path / "checkpoints")
    run = pretrain(
        checkout,
        MODEL,
        PIPELINE,
        f"{schedule} {RESTART} --load {folder} --save {folder} --save-interval 2",
        program=Path(__file__).with_name("run_and_restart.py"),
        environment={"TORCH_CPP_LOG_LEVEL": "error"},
    )
    check_equal(run, upstream)
    logged = [int(n) for n in re.findall(r"iteration +(\d+)/ +\d+ .* lm loss: ", run.output)]
    fails = FIRST + STEP - 1
    assert logged == [*range(FIRST, fails), *range(fails - 1, 8)]
    assert "rank 2 holds up" not in run.output
