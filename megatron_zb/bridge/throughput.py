"""Throughput that Megatron-Bridge logs: it counts whole microbatches, not slices."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.megatron_core.slices import SlicesPart
from megatron_zb.megatron_lm.replacing import Undo, is_anybodys, replace

_MODULE, _COUNT = "megatron.bridge.training.utils.flop_utils", "accumulate_flops_metadata"


def count_whole(adapter: PipelineAdapter) -> Undo | None:
    """Let Megatron-Bridge count the tokens of a microbatch once, with its first slice.

    Returns:
        What undoes that; None without slices, and in a process that has not imported it.
    """
    counting = sys.modules.get(_MODULE)
    if adapter.current.slicing is None or not hasattr(counting, _COUNT):
        return None
    count = partial(_count, adapter.part(SlicesPart))
    return replace(counting, _COUNT, count, is_anybodys)


def _count(part: SlicesPart, original: Any, state: Any, tokens: Any, **more: Any) -> None:
    """Count the tokens of a microbatch with its first slice, and those of its documents."""
    cut = part.cuts[more.get("vp_stage") or 0]
    if tokens is None or cut.slice > 0:
        return
    if cut.documents is not None:
        more["cu_seqlens"] = cut.documents.ends(cut.microbatch)
    original(state, tokens.new_empty(len(tokens), cut.borders[-1], device="meta"), **more)
