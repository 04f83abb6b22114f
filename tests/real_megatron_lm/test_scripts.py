"""Scripts of one's own, which ask Megatron where the ends of the model are."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_megatron_lm.runs import MODEL, PIPELINE, pretrain

# What pretrain_gpt.py asks, and what older scripts, and scripts of one's own, ask in its place.
_ASKS = "is_first_or_last_pipeline_stage(vp_stage)"
_ASKS_ITSELF = (
    "(parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage) or "
    "parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage))"
)


@pytest.fixture
def checkout_with_script(checkout: Path, tmp_path: Path) -> Path:
    """The checkout with another script beside pretrain_gpt.py."""
    for entry in checkout.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    source = (checkout / "pretrain_gpt.py").read_text(encoding="utf-8")
    assert source.count(_ASKS) >= 1
    script = f"from megatron.core import parallel_state\n{source.replace(_ASKS, _ASKS_ITSELF)}"
    (tmp_path / "pretrain_own.py").write_text(script, encoding="utf-8")
    return tmp_path


def test_a_script_that_asks_for_the_first_stage_trains_in_a_v(
    checkout_with_script: Path, checkout: Path
) -> None:
    flags = f"{PIPELINE} --pipeline-schedule v-half --exit-interval 3"
    own = pretrain(checkout_with_script, MODEL, flags, script="pretrain_own.py")
    assert own.code == 0, own.output
    plain = pretrain(checkout, MODEL, flags)
    assert list(own.losses) == [1, 2, 3]
    assert own.losses == plain.losses
