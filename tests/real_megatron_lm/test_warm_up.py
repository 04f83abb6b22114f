"""``--pipeline-warm-up`` in the real pretrain_gpt.py: the log is upstream's."""

from __future__ import annotations

from pathlib import Path

from real_megatron_lm.runs import MODEL, PIPELINE_OF_TWO, Logged, check_equal, pretrain


def test_a_run_with_a_warm_up_logs_what_upstream_logs(
    checkout: Path, checkpoint_of_two: Path, upstream_of_two: Logged
) -> None:
    flags = f"--load {checkpoint_of_two} --pipeline-schedule zb-h1 --pipeline-warm-up on"
    run = pretrain(checkout, MODEL, PIPELINE_OF_TWO, flags, ranks=2)
    check_equal(run, upstream_of_two)
    assert run.output.count("--pipeline-warm-up: every stage has run its passes once") == 1
