"""Weight gradients in the time that is left free."""

from __future__ import annotations

import pytest

from megatron_zb import schedules


@pytest.mark.parametrize(
    ("p", "m", "backward", "weight", "seconds"), [(4, 4, 1.0, 1.6, 18.1), (2, 6, 1.5, 2.0, 28.7)]
)
def test_a_w_that_is_longer_than_a_wait_is_left_for_later(
    p: int, m: int, backward: float, weight: float, seconds: float
) -> None:
    """With a W at once in every wait, these take 19.0 and 29.9."""
    costs = schedules.Costs.uniform(
        pipeline_size=p, forward=1.0, backward=backward, weight=weight, p2p=0.1
    )
    found = schedules.build("zb-h1", pipeline_size=p, num_microbatches=m, costs=costs)
    assert schedules.simulate(found, costs).makespan == pytest.approx(seconds)
