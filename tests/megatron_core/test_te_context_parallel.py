"""Context parallelism of Transformer-Engine's attention, compared with Megatron's own schedule.

By all-gathers and by all-to-alls; the ring is left to a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gpt_cases
import pytest
import torch
from gpt_cases import GPTCase
from rank_process import Kind
from ranks import RankPool, RankPools
from sizes import every_value, first
from te_attention import layers_with_attention
from te_cases import unlike
from te_models import EXPERTS

PLAIN = GPTCase()


def shared(how: str, case: GPTCase = PLAIN, **more: Any) -> GPTCase:
    """A case of two ranks that share every sequence; TE's fused attention is for two bytes."""
    options = (*case.options, ("cp_comm_type", how))
    case = replace(case, **more)
    return replace(case, context_parallel=2, dtype="bfloat16", options=options)


CASES = {
    "all-gather": shared("all_gather", rotary=True, per_token_loss=True),
    "all-to-all": shared("a2a", fused_accumulation=True, overlap_grad_reduce=True, tied=True),
    "experts": shared("a2a", EXPERTS, expert_parallel=2),
}


def differences(case: GPTCase, schedule: str) -> list[str]:
    gpt_cases._specification = layers_with_attention
    return gpt_cases.differences(case, schedule, [3], iterations=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"), every_value([*CASES], ["v-half", "zb-h1", "v-zb", "interleaved"])
)
def test_context_parallel_models_equal_megatrons(
    ranks: RankPools, te_pool: RankPool, name: str, schedule: str
) -> None:
    four = ranks(4, Kind.TRANSFORMER_ENGINE)
    assert four.run(differences, case=CASES[name], schedule=schedule) == [[]] * 4


def gradients(case: GPTCase) -> dict[str, torch.Tensor]:
    gpt_cases._specification = layers_with_attention
    return gpt_cases.run(case, "v-half", [3])[3].gradients


@pytest.mark.parametrize(
    ("how", "slices"), [("all_gather", "4"), *first(0, [("all_gather", None), ("a2a", None)])]
)
def test_two_ranks_of_a_sequence_compute_what_one_does(
    ranks: RankPools, te_pool: RankPool, how: str, slices: str | None
) -> None:
    """But for the order of sums: what stands in for the kernels is attention."""
    whole = GPTCase(dtype="bfloat16", per_token_loss=True)
    expected: dict[str, torch.Tensor] = {}
    for found in te_pool.run(gradients, case=whole):
        expected |= found
    case = shared(how, whole, slices=slices)
    for found in ranks(4, Kind.TRANSFORMER_ENGINE).run(gradients, case=case):
        assert unlike(found, {name: expected[name] for name in found}, tolerance=0.03) == []
