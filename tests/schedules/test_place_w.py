"""Weight gradients in the time that is left free."""

from __future__ import annotations

import pytest

from megatron_zb import schedules


@pytest.mark.parametrize(
    ("p", "m", "backward", "weight", "p2p", "seconds", "filled_at_once"),
    [(4, 4, 1.0, 1.6, 0.1, 18.1, 19.0), (2, 6, 1.5, 2.0, 0.1, 28.7, 29.9)],
)
def test_a_w_that_is_longer_than_a_wait_is_left_for_later(
    p: int,
    m: int,
    backward: float,
    weight: float,
    p2p: float,
    seconds: float,
    filled_at_once: float,
) -> None:
    """Where every wait takes a W at once, what it delays costs more than it saves."""
    costs = schedules.Costs.uniform(
        pipeline_size=p, forward=1.0, backward=backward, weight=weight, p2p=p2p
    )
    found = schedules.build("zb-h1", pipeline_size=p, num_microbatches=m, costs=costs)
    assert schedules.simulate(found, costs).makespan == pytest.approx(seconds)
    assert seconds < filled_at_once
