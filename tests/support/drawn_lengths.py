"""Lengths of microbatches as fine-tuning and reinforcement learning have them, drawn with a seed.

Sequences are log-normal, with a median of 4096 tokens and none above 32768, as many as a
microbatch may have. The kinds are: ``single``, one sequence to a microbatch; ``four``, four of
them; ``first fit``, packed in their order of arrival; ``balanced``, packed so that the work of
microbatches is alike; ``padded``, packed and padded to one number of tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from megatron_zb.schedules.step_plan import AttentionWork, Lengths

MOST = 32768
ATTENTION = AttentionWork(forward=1 / 49152, backward=2.5 / 49152)
"""Of a dense model with a hidden size of 4096: one pair counts for a 12 x 4096th of a token."""


def drawn(kind: str, count: int, seed: int) -> Lengths:
    """The lengths of so many microbatches of a kind."""
    rng = random.Random(f"{kind} {count} {seed}")
    return _of(KINDS[kind](count, rng), kind)


def _of(packs: Sequence[Sequence[int]], kind: str) -> Lengths:
    tokens = [MOST if kind == "padded" else sum(pack) for pack in packs]
    return Lengths.of(tokens, [sum(length**2 for length in pack) for pack in packs])


def _sequence(rng: random.Random) -> int:
    return int(min(MOST, max(512, rng.lognormvariate(math.log(4096), 0.9))))


def _sequences(count: int, rng: random.Random) -> list[int]:
    """Enough to fill so many microbatches by nine tenths."""
    found: list[int] = []
    while sum(found) < 0.9 * MOST * count:
        found.append(_sequence(rng))
    return found


def _single(count: int, rng: random.Random) -> list[list[int]]:
    return [[_sequence(rng)] for _ in range(count)]


def _four(count: int, rng: random.Random) -> list[list[int]]:
    return [[_sequence(rng) for _ in range(4)] for _ in range(count)]


def _first_fit(count: int, rng: random.Random) -> list[list[int]]:
    """Every fourth pack of a step of four replicas, whose packs are split until all have enough."""
    packs: list[list[int]] = []
    for length in _sequences(4 * count, rng):
        fitting = (pack for pack in packs if sum(pack) + length <= MOST)
        pack = next(fitting, None)
        if pack is None:
            packs.append([length])
        else:
            pack.append(length)
    while len(packs) < 4 * count:
        fullest = max((pack for pack in packs if len(pack) > 1), key=sum)
        packs.remove(fullest)
        packs += _shared_out(fullest, 2, float)
    return packs[::4][:count]


def _shared_out(
    lengths: Sequence[int], count: int, work: Callable[[int], float]
) -> list[list[int]]:
    """Packs of nearly the same work: the longest sequence left goes to the pack with the least."""
    packs: list[list[int]] = [[] for _ in range(count)]
    for length in sorted(lengths, reverse=True):
        min(packs, key=lambda pack: sum(map(work, pack))).append(length)
    return packs


def _balanced(count: int, rng: random.Random) -> list[list[int]]:
    """Packs of nearly the same work, those with less of it at both ends."""

    def work(length: int) -> float:
        return length + ATTENTION.forward * length**2

    packs = _shared_out(_sequences(count, rng), count, work)
    falling = sorted(packs, key=lambda pack: sum(map(work, pack)), reverse=True)
    return falling[::2][::-1] + falling[1::2]


KINDS: dict[str, Callable[[int, random.Random], list[list[int]]]] = {
    "single": _single,
    "four": _four,
    "first fit": _first_fit,
    "balanced": _balanced,
    "padded": _first_fit,
}
