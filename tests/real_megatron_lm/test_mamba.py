"""The real pretrain_mamba.py of Megatron-LM 0.16, where a GPT can be written as a pattern, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_zb.megatron_core.versions import WITHOUT_HYBRID_CHUNKS
from megatron_zb.megatron_lm.checkout import checkout_at
from real_megatron_lm.runs import MODEL, PIPELINE_OF_TWO, Logged, check_equal, check_near, pretrain

PATHS = {
    "PYTHONPATH": ":".join(
        map(str, (Path(__file__).parents[1] / "support", Path(__file__).parents[2]))
    )
}
PATTERN = """
--hybrid-override-pattern *-*-*-*- --spec mamba_layers STACK --position-embedding-type rope
"""


def train(checkout: Path, *flags: str) -> Logged:
    model = f"{MODEL} {PATTERN} {PIPELINE_OF_TWO}"
    return pretrain(checkout, model, *flags, ranks=2, script="pretrain_mamba.py", environment=PATHS)


def test_a_gpt_as_a_pattern_logs_what_upstream_logs(checkout: Path) -> None:
    found = checkout_at(checkout)
    if found.version[:2] > WITHOUT_HYBRID_CHUNKS:
        pytest.skip(f"test_hybrid.py is for Megatron-LM {found.version_text}")
    upstream = train(checkout)
    assert list(upstream.losses) == [1, 2, 3, 4, 5, 6, 7], upstream.output
    zb_h1 = "--pipeline-schedule zb-h1"
    check_equal(train(checkout, zb_h1), upstream)
    check_near(train(checkout, f"{zb_h1} --pipeline-vocabulary on"), upstream)
    check_near(train(checkout, f"{zb_h1} --pipeline-slices 4"), upstream)
    wrong = train(checkout, f"{zb_h1} --hybrid-override-pattern *-*-*-*Q")
    assert wrong.code != 0
    assert "no kind of layer is written 'Q': use *, -, E, M" in wrong.error
