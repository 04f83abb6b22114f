"""Bubbles that the catalog gives by formula, beside simulated ones."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from megatron_zb import schedules
from megatron_zb.schedules import catalog


@dataclass(frozen=True)
class Rank:
    """Seconds of one microbatch on a rank."""

    forward: float
    backward: float
    weight: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight


EXACT = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "v-zb", "v-half", "v-min")


@pytest.mark.parametrize("seconds", [1.0, 2.0])
@pytest.mark.parametrize("p", [4, 5])
@pytest.mark.parametrize("name", EXACT)
def test_formulas_are_the_simulated_bubbles(name: str, p: int, seconds: float) -> None:
    """With equal passes and no messages; times of another unit scale them."""
    rank, m = Rank(seconds, seconds, seconds), 3 * p
    costs = schedules.Costs.uniform(
        pipeline_size=p, forward=seconds, backward=seconds, weight=seconds
    )
    built = schedules.build(name, pipeline_size=p, num_microbatches=m, costs=costs)
    bubble = schedules.simulate(built, costs).makespan - m * rank.total
    assert catalog.family(name).bubble(p, rank, built.placement.chunks) == pytest.approx(bubble)
