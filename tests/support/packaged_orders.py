"""Orders that come with the package, read as schedules."""

from __future__ import annotations

from functools import cache

from megatron_zb.drawing import html_drawing
from megatron_zb.schedules import Schedule


@cache
def packaged(name: str, p: int, m: int) -> Schedule:
    """The order of a schedule on p ranks with m microbatches."""
    (found,) = (
        order
        for order in html_drawing.packaged_orders()
        if (order["name"], order["p"], order["m"]) == (name, p, m)
    )
    return html_drawing.decode_order(found)
