"""Drawn combinations of settings with the real pretrain_gpt.py, as scripts/fuzz.py runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzzing.drawing import draw
from fuzzing.seed import seed_of_commit
from fuzzing.space import space_of
from fuzzing.trial import Bench, judge

from megatron_zb.megatron_lm.checkout import checkout_at


@pytest.mark.parametrize("number", range(30))
def test_a_drawn_combination_is_equal_or_refused(checkout: Path, number: int) -> None:
    """Equal to upstream's own schedule, or refused at the start as ``check`` says."""
    space = space_of(".".join(map(str, checkout_at(checkout).version[:2])))
    combination = draw(space, f"{seed_of_commit()}/{number}")
    trial = judge(Bench(space, checkout), combination)
    assert not trial.verdict.is_failure, (trial, space.unusual(combination))
