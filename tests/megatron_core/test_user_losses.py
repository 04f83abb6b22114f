"""Loss functions and metrics of users: Megatron's results, or a refusal, and nothing else.

docs/schedules.md has the table of the outcomes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpt_cases import GPTCase
from ranks import RankFailure, RankPools
from sizes import every_value
from user_losses import LOSSES, METRICS, OTHER_STEPS, differences, records_and_gradients

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"
PLAIN = GPTCase(layers=4)
EXACT = replace(PLAIN, exact=True)
LENGTHS = GPTCase(
    layers=4, lengths=(16, 8, 12), options=(("moe_token_dispatcher_type", "alltoall"),)
)
WAYS = {
    "slices": (replace(EXACT, slices="4"), EXACT, 1e-12),
    "vocabulary": (replace(PLAIN, vocabulary=True), PLAIN, 5e-6),
    "slices and vocabulary": (replace(PLAIN, vocabulary=True, slices="4"), PLAIN, 5e-6),
    "lengths": (LENGTHS, LENGTHS, 1e-6),
}
"""Our case, Megatron's, and the most by which results may differ, in units of the largest."""
NAMES = ("zb-h1", "v-half", "v-zb", "interleaved")
EVERY = [*LOSSES, *METRICS, *OTHER_STEPS]

_TOKENS = "gradient of each slice as that of a mean over the tokens of loss_mask"
_HOOK = "the loss depends on the model by more than its output"
REFUSED: dict[tuple[str, str], str] = {
    ("output changed behind the model", "vocabulary"): "forward step changes the output",
    ("cross entropy of logits", "vocabulary"): "called without labels",
    ("cross entropy of logits", "slices and vocabulary"): "called without labels",
    ("hidden states", "slices"): _HOOK,
    ("hidden states", "vocabulary"): _HOOK,
    ("hidden states", "slices and vocabulary"): _HOOK,
} | {
    (loss, "slices and vocabulary"): _TOKENS
    for loss in (
        *list(LOSSES)[2:6],
        *list(LOSSES)[7:],
        "output changed behind the model",
    )
}
"""What the refusal of a loss contains; all others are Megatron's results."""


@pytest.mark.parametrize(("what", "name"), every_value(EVERY, NAMES))
@pytest.mark.parametrize("way", WAYS)
def test_a_loss_or_a_metric_is_megatrons_or_refused(
    ranks: RankPools, what: str, way: str, name: str
) -> None:
    case, upstream, most = WAYS[way]
    given: dict[str, Any] = {"case": case, "schedule": name, "what": what}
    if (what, way) not in REFUSED:
        found = ranks(2).run(differences, upstream=upstream, most=most, **given)
        assert found == [[], []]
        return
    with pytest.raises(RankFailure, match=REFUSED[what, way]) as refusal:
        ranks(2).run(records_and_gradients, **given)
    assert refusal.value.exception_type == "UsageError"
