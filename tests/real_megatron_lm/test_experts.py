"""Experts that are balanced by a bias, which Megatron updates where it reduces gradients."""

from __future__ import annotations

from pathlib import Path

from real_megatron_lm.runs import MODEL, pretrain

EXPERTS = """
--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1
--moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall --disable-bias-linear
--pipeline-model-parallel-size 2 --exit-interval 3
"""


def test_a_bias_of_experts_is_updated_as_megatron_does(checkout: Path) -> None:
    """zb-h1 has its layers where Megatron has them, and so the same weights at the start."""
    upstream = pretrain(checkout, MODEL, EXPERTS, ranks=2)
    assert upstream.code == 0, upstream.output
    ours = pretrain(checkout, MODEL, EXPERTS, "--pipeline-schedule zb-h1", ranks=2)
    assert ours.code == 0, ours.output
    assert list(upstream.losses) == [1, 2, 3]
    assert ours.losses == upstream.losses
