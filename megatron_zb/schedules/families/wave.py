"""Several chunks per rank in a zig-zag (Hanayo, arXiv 2308.15762), with split backward."""

from __future__ import annotations

from megatron_zb.errors import UsageError
from megatron_zb.schedules import placement
from megatron_zb.schedules.request import Request
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.placement_search import search_placement

DEFAULT_CHUNKS = 4


def wave(request: Request) -> Schedule:
    """Build the fastest order found within 1F1B's memory.

    Raises:
        UsageError: an odd number of chunks, which would end the wave on the wrong rank.
    """
    chunks = DEFAULT_CHUNKS if request.chunks is None else request.chunks
    if chunks < 2 or chunks % 2:
        raise UsageError(f"wave with {chunks} chunks: give an even number, such as 2 or 4")
    p = request.pipeline_size
    return search_placement("wave", placement.wave(p, chunks), request, p)
