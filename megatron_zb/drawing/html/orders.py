"""Orders of passes as short text: those that a page embeds, and those that come with the package.

``parts/orders.json`` has every named schedule but ``auto`` at the sizes of :data:`SIZES`, built for
equal costs (F = B = W = 1, no transfer); ``scripts/make_orders.py`` makes it. The explorer of a
page carries them out with the reader's costs, which is exact; building them while a page is written
would take too long.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from megatron_zb.schedules import Pass, PassKind, Schedule, catalog
from megatron_zb.schedules.placement import Placement

KINDS = (PassKind.F, PassKind.B, PassKind.W, PassKind.BW)
FILE = Path(__file__).resolve().parent / "parts" / "orders.json"
MOST_MICROBATCHES = 64
SIZES = tuple(
    (p, m * p) for p in (2, 3, 4, 6, 8, 12, 16) for m in (1, 2, 4, 8) if m * p <= MOST_MICROBATCHES
)
MOST_CHUNKS = 16
_FIRST = ord("A")


class _Joined(TypedDict, total=False):
    pairs: list[list[int]]


class Order(_Joined):
    """A schedule: ``ranks[r]`` has one character for each pass of rank r.

    The character is the ``kind * chunks + chunk``-th after A, with kinds counted as in
    :data:`KINDS`. Microbatches are not written: the F, the input and the weight
    gradients of a stage each take them in turn. ``pairs[r]`` are the positions of the F of rank r
    that run as one with the pass behind them; left out where there are none.
    """

    name: str
    p: int
    m: int
    rank_of: list[int]
    ranks: list[str]


def is_text(schedule: Schedule) -> bool:
    """Return whether a schedule has only passes of :data:`KINDS`, which can be written as text."""
    return all(p.kind in KINDS for passes in schedule.ranks for p in passes)


def encode(schedule: Schedule) -> Order:
    """Write a schedule of F, B, W and BW passes as text."""
    placement = schedule.placement
    chunks, chunk_of = placement.chunks, placement.chunk_of
    codes = {kind: _FIRST + i * chunks for i, kind in enumerate(KINDS)}
    order: Order = {
        "name": schedule.name,
        "p": placement.pipeline_size,
        "m": schedule.num_microbatches,
        "rank_of": list(placement.rank_of),
        "ranks": [
            "".join(chr(codes[p.kind] + chunk_of(p.stage)) for p in passes)
            for passes in schedule.ranks
        ],
    }
    if schedule.pairs:
        order["pairs"] = [
            [i for i, p in enumerate(passes) if p in schedule.pairs] for passes in schedule.ranks
        ]
    return order


def decode(order: Order) -> Schedule:
    """Read what :func:`encode` wrote; the placement's name is lost."""
    placement = Placement("", order["p"], tuple(order["rank_of"]))
    ranks = []
    for rank, text in enumerate(order["ranks"]):
        done: Counter[tuple[PassKind, int]] = Counter()
        passes = []
        for letter in text:
            number, chunk = divmod(ord(letter) - _FIRST, placement.chunks)
            kind, stage = KINDS[number], placement.stages_of[rank][chunk]
            gradients = (PassKind.B, PassKind.W) if kind is PassKind.BW else (kind,)
            passes.append(Pass(kind, stage, done[gradients[0], stage]))
            for gradient in gradients:
                done[gradient, stage] += 1
        ranks.append(tuple(passes))
    joined = zip(ranks, order.get("pairs", ()), strict=False)
    pairs = frozenset(passes[i] for passes, at in joined for i in at)
    return Schedule(order["name"], placement, order["m"], tuple(ranks), pairs=pairs)


def build(name: str, p: int, m: int) -> Order:
    """Build an order for equal costs, as the file has it."""
    return encode(catalog.build(name, pipeline_size=p, num_microbatches=m))


def names() -> list[str]:
    """Return the names of the file's schedules: all but ``auto``, whose search takes a minute."""
    return [name for name in catalog.names() if name != "auto"]


@cache
def packaged() -> tuple[Order, ...]:
    """Return the orders of the file."""
    found: list[Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(found)
