"""Multi-token prediction with a vocabulary that is sharded over all ranks, beside Megatron's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gpt_cases
import pytest
import torch
from gpt_cases import GPTCase, Outcome, as_hybrid, skip_without_hybrids
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import RankPools
from vocabulary_parallel_outcomes import gathered

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.vocabulary_shard import PredictedLosses

FULL = pytest.mark.full
ONE = GPTCase(multi_token=1, rotary=True, layers=8)
TWO = replace(ONE, multi_token=2)
CASES = {
    "two-tied": (2, replace(TWO, tied=True)),
    "two-per-token-loss": (2, replace(TWO, per_token_loss=True)),
    "sequence-parallel": (4, replace(TWO, tensor_parallel=2, sequence_parallel=True)),
    "one": (2, ONE),
    "one-tied": (2, replace(ONE, tied=True)),
    "tensor-parallel": (4, replace(ONE, tensor_parallel=2)),
    "data-parallel": (4, replace(ONE, tied=True, data_parallel=2, overlap_grad_reduce=True)),
    "repeated": (2, replace(TWO, options=(("mtp_use_repeated_layer", True),))),
    "four": (4, TWO),
    "hybrid": (2, as_hybrid(replace(TWO, per_token_loss=True))),
    "hybrid-tied": (2, as_hybrid(replace(TWO, tied=True))),
    "hybrid-sequence-parallel": (
        4,
        as_hybrid(replace(ONE, tensor_parallel=2, sequence_parallel=True)),
    ),
    "hybrid-data-parallel": (
        4,
        as_hybrid(replace(ONE, tied=True, data_parallel=2, overlap_grad_reduce=True)),
    ),
}
USUAL = ("two-tied", "two-per-token-loss", "sequence-parallel", "hybrid-tied")
TOLERANCE = 2e-6  # as of a model without prediction


def logged() -> dict[str, list[float]]:
    """What Megatron has counted since the last call, of losses and of hits."""
    found = {
        name: numbers.tolist()
        for name, numbers in MTPLossLoggingHelper.tracker.items()
        if isinstance(numbers, torch.Tensor)
    }
    MTPLossLoggingHelper.tracker.clear()
    return found


def outcome(case: GPTCase, schedule: str | None) -> tuple[Outcome, dict[str, list[float]]]:
    logged()
    found = gathered(gpt_cases.run(case, schedule, [4])[4], schedule)
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, logged())
    return found, next(numbers for numbers in everyone if numbers)


def differences(case: GPTCase, schedules: list[str]) -> list[str]:
    """Of the first schedule from Megatron's own, and of the others from the first."""
    upstream, numbers = outcome(case, None)
    (first, firsts), *others = (
        outcome(replace(case, vocabulary=True), schedule) for schedule in schedules
    )
    found = [f"only one has {name}" for name in upstream.gradients.keys() ^ first.gradients.keys()]
    for name, gradient in upstream.gradients.items():
        off = (first.gradients[name] - gradient).abs().max() / gradient.abs().max()
        if not off <= TOLERANCE:
            found.append(f"gradient of {name} is off by {off}")
    if first.losses != pytest.approx(upstream.losses, rel=TOLERANCE):
        found.append(f"losses {first.losses} are not {upstream.losses}")
    if not numbers or firsts != {
        name: pytest.approx(values, rel=TOLERANCE) for name, values in numbers.items()
    }:
        found.append(f"log {firsts} is not {numbers}")
    for schedule, (other, log) in zip(schedules[1:], others, strict=True):
        found += [
            f"{schedule}: gradient of {name} is not that of {schedules[0]}"
            for name, gradient in first.gradients.items()
            if not torch.equal(gradient, other.gradients[name])
        ]
        if (other.losses, log) != (first.losses, firsts):
            found.append(f"{schedule}: losses {other.losses}, {log} are not {schedules[0]}'s")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else FULL) for name in CASES]
)
@pytest.mark.parametrize(
    "others", [["zb-h1"], pytest.param(["1f1b", "v-zb", "interleaved"], marks=FULL)], ids=str
)
def test_prediction_trains_as_megatrons(ranks: RankPools, name: str, others: list[str]) -> None:
    count, case = CASES[name]
    skip_without_hybrids(case)
    if not {option for option, _ in case.options} <= set(vars(TransformerConfig)):
        pytest.skip("this megatron-core lacks it")
    found = ranks(count).run(differences, case=case, schedules=["v-half", *others])
    assert found == [[]] * count


def test_an_output_processor_is_refused_after_the_call_of_the_model() -> None:
    """An error in the call would leave context managers of the user's forward step."""
    model: Any = SimpleNamespace(_postprocess=lambda **call: torch.zeros(2, 1, 4))
    shard: Any = SimpleNamespace(loss=lambda labels, hidden: hidden)
    losses = PredictedLosses(model, shard)
    model._postprocess(labels=torch.zeros(1, 2))
    losses.call()
    model._postprocess(labels=torch.zeros(1, 2), output_processor=print)
    with pytest.raises(UsageError, match="the model was called with an output_processor"):
        losses.call()
