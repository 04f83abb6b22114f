"""Loss functions and metrics of users: Megatron's results, or a refusal, and nothing else.

docs/schedules.md has the table of the outcomes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from drawn_sizes import every_value
from gpt_cases import GPTCase, built, forward_backward, microbatches
from ranks import RankFailure, RankPools
from user_losses import (
    LOSSES,
    METRICS,
    OTHER_STEPS,
    differences,
    forward_step,
    records_and_gradients,
    refusal,
)

from megatron_zb.megatron_core.slices import SlicesPart
from megatron_zb.megatron_lm import adapter_of_arguments
from megatron_zb.megatron_lm.adapter_of_arguments import BatchArguments

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
TRIED = [
    pytest.param(way, marks=[pytest.mark.slow] * (way == "slices and vocabulary")) for way in WAYS
]
"""With both, what either refuses is refused, and it is tried by turns."""
NAMES = ("zb-h1", "v-half", "v-zb", "interleaved")
EVERY = [*LOSSES, *METRICS, *OTHER_STEPS]

_TOKENS = "gradient of each slice as that of a mean over the tokens of loss_mask"
_USED = "forward step uses the output of the model"
_HOOK = "the loss depends on the model by more than its output"
REFUSED: dict[tuple[str, str], str] = {
    ("output changed behind the model", "vocabulary"): _USED,
    ("output changed behind the model", "slices and vocabulary"): _USED,
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
    )
}
"""What the refusal of a loss contains; all others are Megatron's results."""


@pytest.mark.long
@pytest.mark.parametrize(("what", "name"), every_value(EVERY, NAMES))
@pytest.mark.parametrize("way", TRIED)
def test_a_loss_or_a_metric_is_megatrons_or_refused(
    ranks: RankPools, what: str, way: str, name: str
) -> None:
    case, upstream, most = WAYS[way]
    given: dict[str, Any] = {"case": case, "schedule": name, "what": what}
    if (what, way) not in REFUSED:
        found = ranks(2).run(differences, upstream=upstream, most=most, **given)
        assert found == [[], []]
        return
    if REFUSED[what, way] == _TOKENS:
        first, other = ranks(2).run(refusal, **given)
        assert _TOKENS in first and first == other
        return
    with pytest.raises(RankFailure, match=REFUSED[what, way]) as refused:  # of the last stage
        ranks(2).run(records_and_gradients, **given)
    assert refused.value.exception_type == "UsageError"


def test_the_page_has_the_outcomes() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for what in EVERY:
        outcomes = ["refused" if (what, way) in REFUSED else "equal" for way in WAYS]
        assert f"| {what} | {' | '.join(outcomes)} |" in text


@pytest.mark.parametrize("way", ["slices", "slices and vocabulary"])
@pytest.mark.parametrize("what", ["mean over samples", "largest"])
def test_an_evaluation_reports_what_megatrons_does(ranks: RankPools, what: str, way: str) -> None:
    case, upstream, _ = WAYS[way]
    given: dict[str, Any] = {"case": case, "upstream": upstream, "most": 5e-6, "what": what}
    found = ranks(2).run(differences, schedule="v-half", forward_only=True, **given)
    assert found == [[], []]


def collected(case: GPTCase, schedule: str | None) -> list[Any]:
    more: dict[str, Any] = {"forward_only": True, "collect_non_loss_data": True}
    return records_and_gradients(case, schedule, "data that is no loss", **more)[0]


def test_data_that_is_no_loss_is_collected_by_microbatch(ranks: RankPools) -> None:
    expected = ranks(2).run(collected, case=EXACT, schedule=None)
    assert expected[0] == [[2, 16]] * 3
    assert ranks(2).run(collected, case=WAYS["slices"][0], schedule="zb-h1") == expected


def seen_lengths(schedule: str, what: str) -> set[int]:
    """The lengths in the arguments while code of the user runs, in a step on slices."""
    args = Namespace(seq_length=16, create_attention_mask_in_dataloader=False, sft=False)
    seen = set()

    class Reading:
        """An iterator that looks the length up for every batch."""

        def __init__(self, items: Iterator[Any]) -> None:
            self._items = items

        def __next__(self) -> Any:
            seen.add(args.seq_length)
            return next(self._items)

    def watched_step(iterator: Any, model: Any) -> Any:
        seen.add(args.seq_length)
        output, loss = forward_step(what, iterator, model)
        seen.add(args.seq_length)

        def watched_loss(losses: torch.Tensor) -> Any:
            seen.add(args.seq_length)
            return loss(losses)

        return output, watched_loss

    case = WAYS["slices"][0]
    with (
        patch.object(adapter_of_arguments, "_running_args", lambda: args),
        built(case, schedule, 3) as (adapter, chunks),
    ):
        assert adapter is not None
        adapter.part(SlicesPart).arguments = BatchArguments()
        data = [Reading(microbatches(case, 3)) for _ in chunks]
        forward_backward(adapter.forward_backward_func, chunks, data, 3, watched_step)
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_code_of_the_user_finds_the_length_of_whole_samples(ranks: RankPools, name: str) -> None:
    assert ranks(2).run(seen_lengths, schedule=name, what="mean over tokens") == [{16}, {16}]


def test_ranks_without_data_receive_batches_of_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Megatron-LM's get_batch, which makes the tensors that it receives by the arguments."""
    args = Namespace(seq_length=16, create_attention_mask_in_dataloader=True, sft=True)
    whole = vars(args).copy()
    monkeypatch.setattr(adapter_of_arguments, "_running_args", lambda: args)
    arguments = BatchArguments()
    for receives, length in ((True, 4), (False, 16)):
        with arguments.of_batch(4, receives=receives):
            found = {"seq_length": length, "create_attention_mask_in_dataloader": False}
            assert vars(args) == found | {"sft": False}
            with arguments.of_user():
                assert vars(args) == whole
            assert args.seq_length == length
            arguments.restore()
            assert vars(args) == whole
        assert vars(args) == whole
