"""Axes of a drawing: round numbers along them, and places between their ends."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 5.0, 10.0)


def ticks(most: float, about: float) -> list[float]:
    """Return round numbers from 0 to ``most``, about ``about`` of them."""
    step = _step(most, about)
    return [i * step for i in range(int(most / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Axis:
    """An axis from its first tick to its last."""

    ticks: tuple[float, ...]

    @classmethod
    def around(cls, values: Iterable[float], about: int = 5) -> Axis:
        """Return an axis with about so many steps that has room for all values."""
        least, most = min(found := list(values)), max(found)
        step = _step((most - least) or abs(most) or 1.0, about)
        first, last = math.floor(least / step), math.ceil(most / step)
        return cls(tuple(i * step for i in range(first, max(last, first + 1) + 1)))

    def share(self, value: float) -> float:
        """Return where a value lies, from 0 for the first tick to 1 for the last."""
        return (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])


def _step(span: float, about: float) -> float:
    rough = span / max(about, 1.0)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(s * power for s in _STEPS if s * power >= rough * (1 - 1e-9))
