"""The watchdog in Megatron-LM's own training loop, outside of its steps."""

from __future__ import annotations

from pathlib import Path

from real_megatron_lm.run_and_stop import RANK, STEP
from real_megatron_lm.runs import MODEL, PIPELINE, RANKS, pretrain


def test_a_rank_that_is_stopped_between_two_steps_is_named_by_all_others(checkout: Path) -> None:
    logged = pretrain(
        checkout,
        MODEL,
        PIPELINE,
        "--pipeline-schedule v-half --pipeline-timeout 8",
        program=Path(__file__).with_name("run_and_stop.py"),
    )
    assert logged.code != 0
    assert sorted(logged.losses) == list(range(1, STEP))
    lines = logged.error.splitlines()
    named = [line for line in lines if f"rank {RANK} holds up all others: it does not" in line]
    assert len(named) == RANKS - 1, logged.output
    assert "is between two steps, in the optimizer step, waiting in all_reduce" in logged.error
