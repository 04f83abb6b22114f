"""Token slices in Megatron's models: the same for all schedules, and Megatron's up to rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gpt_cases
import pytest
import torch
from gpt_cases import GPTCase, run
from ranks import RankPools

MICROBATCHES = 3
PLAIN = GPTCase(layers=4, exact=True)
CASES = {
    "plain": PLAIN,
    "tied": replace(PLAIN, tied=True),
    "grouped queries, rotary": replace(
        PLAIN, rotary=True, options=(("num_query_groups", 2), ("gated_linear_unit", True))
    ),
    "per-token loss": replace(PLAIN, per_token_loss=True),
    "full recomputation": replace(
        PLAIN,
        options=(
            ("recompute_granularity", "full"),
            ("recompute_method", "uniform"),
            ("recompute_num_layers", 1),
        ),
    ),
    "recomputed attention": replace(
        PLAIN,
        options=(("recompute_granularity", "selective"), ("recompute_modules", ("core_attn",))),
    ),
}
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "v-half", "v-min", "v-zb", "auto")


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference in units of the largest number."""
    scale = float(expected.abs().max())
    return float((found - expected).abs().max()) / (scale or 1.0)


def distance(case: GPTCase, name: str, slices: str, forward_only: bool) -> float:
    """How far a sliced step is from Megatron's own, in units of the largest number of a tensor."""
    expected = run(case, None, [MICROBATCHES], forward_only)[MICROBATCHES]
    sliced = replace(case, slices=slices)
    found = run(sliced, name, [MICROBATCHES], forward_only, iterations=2)[MICROBATCHES]
    assert len(found.losses) in (0, MICROBATCHES)
    losses = [abs(a / b - 1) for a, b in zip(found.losses, expected.losses, strict=False)]
    shared = found.gradients.keys() & expected.gradients.keys()
    assert shared or forward_only
    return max([*losses, *(off(found.gradients[n], expected.gradients[n]) for n in shared)] or [0])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("what", CASES)
def test_a_sliced_step_is_megatrons_up_to_rounding(ranks: RankPools, what: str, name: str) -> None:
    found = ranks(2).run(distance, case=CASES[what], name=name, slices="4", forward_only=False)
    assert max(found) < 1e-12
