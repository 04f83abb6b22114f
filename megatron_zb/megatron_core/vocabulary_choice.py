"""Whether an output layer is cut along the vocabulary, where the user leaves the choice."""

from __future__ import annotations

import argparse

from megatron_zb.measured.balance import Ends, costs_beside
from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.parsing import flag_of
from megatron_zb.schedules import simulate

WHOLE = "the output layer stays whole"

_MULTIPLE, _USUAL_MULTIPLE = "make_vocab_size_divisible_by", 128


def why_rows_stay(args: argparse.Namespace) -> str | None:
    """Return why the rows of an output layer cannot be shared out evenly, None if they can.

    They are those of Megatron-LM's padding, where the vocabulary is known.
    """
    p, tensor = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    rows = getattr(args, "padded_vocab_size", None) or getattr(args, "vocab_size", None)
    if rows is None:
        return "its size is not known before the tokenizer is read: give --vocab-size"
    multiple = (getattr(args, _MULTIPLE, None) or _USUAL_MULTIPLE) * tensor
    rows = -(-rows // multiple) * multiple // tensor
    if rows % p:
        return (
            f"its {rows} rows cannot be cut evenly for {p} pipeline ranks: make "
            f"{flag_of(_MULTIPLE)} a multiple of {p}"
        )
    return None


def faster(whole: PipelineAdapter, cut: PipelineAdapter, ends: Ends) -> PipelineAdapter:
    """Return the adapter whose schedule is faster in the simulator; it says by how much.

    Args:
        whole: with the output layer on the last stage.
        cut: with the output layer cut along the vocabulary over all pipeline ranks.
        ends: what the embedding and the output layer take.
    """
    seconds = [_seconds(whole, ends, cut=False), _seconds(cut, ends, cut=True)]
    less = 1 - seconds[1] / seconds[0]
    if less > 0:
        cut.say(
            f"the output layer is cut along the vocabulary: {less:.1%} less time than whole, "
            f"simulated for {ends}"
        )
        return cut
    whole.say(f"{WHOLE}: cut, a step would take {-less:.1%} longer, simulated for {ends}")
    return whole


def _seconds(adapter: PipelineAdapter, ends: Ends, *, cut: bool) -> float:
    schedule = adapter.schedule
    layers = tuple(letters.count("t") for letters in adapter.layer_layout.letters)
    costs = costs_beside(schedule.placement, layers, ends, cut=cut)
    return simulate(schedule, costs).makespan
