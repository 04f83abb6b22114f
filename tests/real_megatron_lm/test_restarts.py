"""Megatron-LM's in-process restart: a rank raises, and all begin again without a new process."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_zb.megatron_core import versions
from real_megatron_lm.run_and_restart import STEP
from real_megatron_lm.runs import MODEL, PIPELINE, Logged, check_equal, pretrain

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("nvidia_resiliency_ext") is None,
        reason="nvidia-resiliency-ext, which restarts, is not installed",
    ),
    pytest.mark.skipif(
        versions.core_series() >= versions.WITHOUT_RESTARTS,
        reason="this Megatron-LM parses its arguments once, and a restart finds none",
    ),
]

RESTART = """
--inprocess-restart --inprocess-granularity rank --inprocess-active-world-size 4
--inprocess-monitor-thread-interval 0.1 --inprocess-last-call-wait 0.2
"""
FIRST, LAST = 3, 7
"""Iterations after the checkpoint that is loaded."""

Restart = Callable[[str], Logged]


@pytest.fixture(scope="module")
def restart(
    checkout: Path, upstream_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Restart:
    """Return a function that trains on, and saves at iterations 4 and 6; the 6th fails once."""

    def run(schedule: str) -> Logged:
        folder = tmp_path_factory.mktemp("restart") / "checkpoints"
        shutil.copytree(upstream_checkpoint, folder)
        return pretrain(
            checkout,
            MODEL,
            PIPELINE,
            f"{schedule} {RESTART} --load {folder} --save {folder} --save-interval 2",
            program=Path(__file__).with_name("run_and_restart.py"),
            environment={"TORCH_CPP_LOG_LEVEL": "error"},
        )

    return run


@pytest.fixture(scope="module")
def restarted(restart: Restart) -> Logged:
    """Megatron's own 1F1B, which logs the first loss after a restart with the next one."""
    return restart("")


@pytest.mark.parametrize(
    "schedule",
    [
        "--pipeline-schedule v-half",
        "--pipeline-schedule zb-h1 --enable-optimizer-post-validation",
        "--pipeline-schedule auto --pipeline-memory-limit 0.6 --pipeline-timeout 30",
    ],
)
def test_training_goes_on_from_the_last_checkpoint(
    restart: Restart, restarted: Logged, upstream: Logged, schedule: str
) -> None:
    run = restart(schedule)
    check_equal(run, restarted)
    assert run.norms == upstream.norms
    logged = [int(n) for n in re.findall(r"iteration +(\d+)/ +\d+ .* lm loss: ", run.output)]
    fails = FIRST + STEP - 1
    last = fails - ("validation" in schedule)  # which holds back the log of the last step
    assert logged == [*range(FIRST, last), *range(fails - 1, LAST + 1)]
    assert "holds up all others" not in run.output
