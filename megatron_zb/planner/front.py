"""Rows of a plan as points of speed and memory, and the Pareto front among them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zb.measured.units import GIB
from megatron_zb.planner.search import Plan
from megatron_zb.planner.table import name_in, places, setting_of


@dataclass(frozen=True)
class Point:
    """A row of a plan: its place in the table, GiB of its worst rank, tokens per second and GPU.

    ``on_front``: no other row is as fast in as little memory, or better in one of them.
    """

    place: int
    name: str
    setting: str
    gib: float
    tokens: float
    on_front: bool

    @property
    def sentence(self) -> str:
        """The row in words, without its place."""
        return f"{self.name}, {self.setting}: {self.tokens:.0f} tokens/s/GPU in {self.gib:.1f} GiB"


def points(plan: Plan) -> list[Point]:
    """Return a point for each row of the table, fastest first."""
    rows = [(place, plan.ranked[index]) for place, index in places(plan)]
    sizes = [(row.memory.total / GIB, row.tokens_per_gpu) for _, row in rows]
    return [
        Point(place, name_in(plan, row), setting_of(row), *size, on_front=is_on_front(size, sizes))
        for (place, row), size in zip(rows, sizes, strict=True)
    ]


def is_on_front(size: tuple[float, float], sizes: list[tuple[float, float]]) -> bool:
    """Return whether none of ``sizes`` has less memory and as many tokens, or more and as much."""
    memory, tokens = size
    return not any(other != size and other[0] <= memory and other[1] >= tokens for other in sizes)
