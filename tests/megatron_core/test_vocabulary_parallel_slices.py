"""Token slices whose output layer and embedding are vocabulary parallel, beside Megatron's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gpt_cases
import pytest
import torch
from drawn_sizes import every_value
from gpt_cases import GPTCase
from model_options import ROUTED
from ranks import RankPools
from vocabulary_parallel_outcomes import gathered

MICROBATCHES = 3
PLAIN = GPTCase(layers=8)
CASES = {
    "plain": PLAIN,
    "four ranks": PLAIN,
    "tied": replace(PLAIN, tied=True),
    "tied, rotary, sequence parallelism": replace(
        PLAIN, tied=True, rotary=True, tensor_parallel=2, sequence_parallel=True
    ),
    "per-token loss": replace(PLAIN, per_token_loss=True, wrapped=True),
    "overlapped reduction": replace(PLAIN, data_parallel=2, overlap_grad_reduce=True),
    "documents": replace(PLAIN, documents="ends", rotary=True),
    "context parallelism": replace(PLAIN, context_parallel=2, rotary=True),
    "experts": replace(PLAIN, options=(*ROUTED.items(), ("moe_z_loss_coeff", 0.01))),
}
TOLERANCE = 2e-6  # as of whole microbatches: the sum of the exponentials has another order


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference in units of the largest number."""
    return float((found - expected).abs().max() / (expected.abs().max() or 1.0))


def differences(
    case: GPTCase, schedules: list[str], slices: str, forward_only: bool = False
) -> list[str]:
    """Differences of the first schedule from Megatron's, and of the others from the first."""
    whole, m = replace(case, context_parallel=1), MICROBATCHES
    cut = replace(case, vocabulary=True, slices=slices)
    megatrons = gathered(gpt_cases.run(whole, None, [m], forward_only)[m])
    first, *others = [
        gathered(gpt_cases.run(cut, name, [m], forward_only, iterations=2)[m], name)
        for name in schedules
    ]
    assert len(first.losses) == MICROBATCHES
    found = [f"only one has {n}" for n in megatrons.gradients.keys() ^ first.gradients.keys()]
    by = {name: off(first.gradients[name], g) for name, g in megatrons.gradients.items()}
    found += [f"{name} is off by {most}" for name, most in by.items() if not most <= TOLERANCE]
    losses = torch.tensor([first.losses, megatrons.losses], dtype=torch.float64)
    if case.context_parallel == 1 and not losses[0].allclose(losses[1], rtol=TOLERANCE):
        found.append(f"losses {first.losses} are not {megatrons.losses}")
    for name, other in zip(schedules[1:], others, strict=True):
        if other.losses != first.losses:
            found.append(f"{name}: losses {other.losses} are not {first.losses}")
        unequal = [n for n, g in first.gradients.items() if not g.equal(other.gradients[n])]
        found += [f"{name}: gradient of {n} is not that of {schedules[0]}" for n in unequal]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "others"), every_value([*CASES], [["zb-h1"], ["1f1b", "v-min"], ["interleaved"]])
)
def test_sliced_steps_with_a_sharded_vocabulary_are_megatrons(
    ranks: RankPools, what: str, others: list[str]
) -> None:
    """Up to rounding; and in every schedule alike, to the last bit."""
    case = CASES[what]
    size = 2 * case.tensor_parallel * case.data_parallel * case.context_parallel
    size *= 2 if what == "four ranks" else 1
    found = ranks(size).run(differences, case=case, schedules=["v-half", *others], slices="4")
    assert found == [[]] * size


@pytest.mark.parametrize("forward_only", [False, True])
def test_an_evaluation_and_unequal_slices_with_a_sharded_vocabulary(
    ranks: RankPools, forward_only: bool
) -> None:
    given: dict[str, Any] = {
        "schedules": ["v-half"],
        "slices": "8,6,2",
        "forward_only": forward_only,
    }
    assert ranks(2).run(differences, case=PLAIN, **given) == [[], []]
