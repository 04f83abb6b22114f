"""Choice among orders of nearly equal time: the one that loses least where passes vary.

Every pass takes a random number of times its seconds, evenly drawn with a standard deviation of
:data:`DEVIATION`. Draws are seeded, and sums are exact, so that every rank of a job, on every
machine, chooses the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import mul

from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.request import Request
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.simulator import simulate
from megatron_zb.schedules.stage_costs import StageCosts

_F, _B, _W, _BW, _R = PassKind.F, PassKind.B, PassKind.W, PassKind.BW, PassKind.R

DEVIATION = 0.1
"""Standard deviation of the seconds of a pass, as a share of them."""
NEAR = 1.01
"""The most that an order may take, as a multiple of the fastest, to be chosen in its place."""
_DRAWS = 24
_MOST = 6  # orders that are compared
_MOST_PASSES = 24_000  # of a step, beyond which the fastest order is taken as it is


def varied(
    costs: StageCosts, num_microbatches: int, deviation: float, rng: random.Random
) -> StageCosts:
    """Return costs whose every F, B and W takes a number of times its seconds.

    A whole backward varies as its halves do. Messages and memory do not vary.
    """
    widest = math.sqrt(3.0) * deviation
    draw = partial(rng.uniform, 1.0 - widest, 1.0 + widest)

    def row(base: StageCosts) -> StageCosts:
        factors = {kind: [draw() for _ in base.seconds[kind]] for kind in (_F, _B, _W)}
        halves = (base.seconds[_B], factors[_B], base.seconds[_W], factors[_W])
        parts = zip(*halves, strict=True)
        factors[_BW] = [(b * x + w * y) / (b + w) if b + w else 1.0 for b, x, w, y in parts]
        factors[_R] = factors[_F]
        seconds = {kind: tuple(map(mul, base.seconds[kind], of)) for kind, of in factors.items()}
        exchange = {kind: tuple(map(mul, of, factors[kind])) for kind, of in base.exchange.items()}
        return replace(base.with_seconds(seconds), exchange=exchange, microbatches=())

    return replace(costs, microbatches=tuple(row(costs.of(j)) for j in range(num_microbatches)))


class _OnPlacement:
    """Costs of one placement, for the simulator."""

    def __init__(self, costs: StageCosts) -> None:
        self._costs = costs

    def for_placement(self, placement: object) -> StageCosts:
        return self._costs


def mean_seconds(
    schedule: Schedule,
    request: Request,
    deviation: float = DEVIATION,
    draws: int = _DRAWS,
    seed: int = 0,
) -> float:
    """Return the mean seconds of a schedule whose passes vary, over a number of seeded draws."""
    table = request.costs.for_placement(schedule.placement)
    rng = random.Random(seed)
    found = []
    for _ in range(draws):
        costs = varied(table, schedule.num_microbatches, deviation, rng)
        found.append(request.seconds(simulate(schedule, _OnPlacement(costs))))
    return math.fsum(found) / draws


def steadiest(
    found: Sequence[tuple[float, Schedule]], request: Request, most: float = math.inf
) -> int:
    """Return the place of the schedule that is fastest on average where passes vary.

    Args:
        found: schedules with their seconds, the fastest first; those within :data:`NEAR` compete.
        request: for which they have been built.
        most: seconds of the slowest schedule that competes.
    """
    limit = min(most, found[0][0] * NEAR) * (1 + 1e-9)
    near: dict[object, int] = {}  # the first one of each order
    for i, (seconds, schedule) in enumerate(found):
        if seconds <= limit:
            near.setdefault((schedule.ranks, schedule.pairs), i)
    places = list(near.values())[:_MOST]
    passes = max(sum(map(len, found[i][1].ranks)) for i in places)
    if len(places) < 2 or passes > _MOST_PASSES:
        return 0
    return min(places, key=lambda i: (mean_seconds(found[i][1], request), i))
