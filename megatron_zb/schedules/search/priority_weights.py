"""Numbers that steer one run of the list scheduler, their neighbours, and starting points.

The starting points stand in ``presets.csv``, and were found by climbing on V placements of 4 to 16
ranks at limits of 3/8 to 1 of 1F1B. Each is, for the kinds F0, F1, B0, B1, W: bias, slope along the
ranks, bias once every F of chunk 0 has been started; then the quota of chunk 0 on the first rank
and its fall to the last (as shares of the slots), the weight of inputs that have long been ready,
the weight of pending W, and the share of the slots that pending W may take (0: any). Biases and
slopes are in mean pass times.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_PRESETS_FILE = Path(__file__).with_name("presets.csv")


def _read_presets() -> tuple[tuple[float, ...], ...]:
    with _PRESETS_FILE.open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    return tuple(tuple(map(float, row)) for row in rows)


PRESETS = _read_presets()


@dataclass(frozen=True)
class PriorityWeights:
    """The numbers that steer one run.

    ``bias``, ``slope`` and ``late`` have one entry for F of each chunk, B of each chunk, and W.
    ``shift[r * chunks + c]`` is added to the quota of chunk c on rank r, ``rank_bias[r * kinds +
    k]`` to the score of the k-th of these entries, only on rank r, in mean passes.
    """

    bias: tuple[float, ...]
    slope: tuple[float, ...]
    late: tuple[float, ...]
    quota: float
    quota_slope: float
    early: float
    pending: float
    pending_share: float
    shift: tuple[int, ...]
    rank_bias: tuple[float, ...]

    @classmethod
    def from_preset(cls, numbers: Sequence[float], chunks: int, ranks: int) -> PriorityWeights:
        """Build weights from a preset for two chunks; other numbers of chunks interpolate it."""

        def spread(five: Sequence[float]) -> tuple[float, ...]:
            first_f, last_f, first_b, last_b, w = five
            shares = [c / (chunks - 1) if chunks > 1 else 0.5 for c in range(chunks)]
            forward = [first_f + (last_f - first_f) * x for x in shares]
            backward = [first_b + (last_b - first_b) * x for x in shares]
            return (*forward, *backward, w)

        return cls(
            spread(numbers[:5]),
            spread(numbers[5:10]),
            spread(numbers[10:15]),
            quota=numbers[15],
            quota_slope=numbers[16],
            early=numbers[17],
            pending=numbers[18],
            pending_share=numbers[19],
            shift=(0,) * (ranks * chunks),
            rank_bias=(0.0,) * (ranks * (2 * chunks + 1)),
        )

    def changed(self, rng: random.Random, chunks: int, ranks: int) -> PriorityWeights:
        """Return a neighbour: other quotas of a range of ranks, or one to three numbers changed."""
        if chunks > 1 and rng.random() < 0.35:
            return self._with_other_quotas(rng, chunks, ranks)
        rows = [list(self.bias), list(self.slope), list(self.late)]
        scalars = {
            "quota": self.quota,
            "quota_slope": self.quota_slope,
            "early": self.early,
            "pending": self.pending,
            "pending_share": self.pending_share,
        }
        width = len(self.bias)
        for _ in range(rng.choice((1, 1, 2, 3))):
            at = rng.randrange(3 * width + len(scalars))
            size = 0.2 if rng.random() < 0.3 else 1.0
            if at < 3 * width:
                rows[at // width][at % width] += rng.gauss(0, size)
            else:
                name = list(scalars)[at - 3 * width]
                reach = 0.08 if name.startswith("quota") else 0.4
                scalars[name] += rng.gauss(0, reach * size)
        bias, slope, late = map(tuple, rows)
        return PriorityWeights(
            bias, slope, late, **scalars, shift=self.shift, rank_bias=self.rank_bias
        )

    def _with_other_quotas(self, rng: random.Random, chunks: int, ranks: int) -> PriorityWeights:
        first = rng.randrange(ranks)
        last = rng.randrange(first, ranks)
        chunk = rng.randrange(chunks - 1)
        step = rng.choice((-2, -1, 1, 2))
        shift = list(self.shift)
        for rank in range(first, last + 1):
            shift[rank * chunks + chunk] += step
        return replace(self, shift=tuple(shift))

    def with_other_biases(self, rng: random.Random, chunks: int, ranks: int) -> PriorityWeights:
        """Return a neighbour: one or two kinds of pass are favoured, or not, on some ranks."""
        kinds = 2 * chunks + 1
        rank_bias = list(self.rank_bias)
        for _ in range(rng.choice((1, 2))):
            first = rng.randrange(ranks)
            last = rng.randrange(first, ranks) if rng.random() < 0.6 else first
            kind = rng.randrange(kinds)
            change = rng.gauss(0, 0.5) * rng.choice((0.2, 1.0))
            for rank in range(first, last + 1, rng.choice((1, 1, 2, 3))):
                rank_bias[rank * kinds + kind] += change
        return replace(self, rank_bias=tuple(rank_bias))
