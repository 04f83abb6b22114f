"""Lower bounds beside all orders of problems so small that each of them can be tried."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import schedule_digest

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.schedules.bounds import lower_bound, period_bound
from megatron_zb.schedules.costs import MOST_RANKS, Costs
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import looped
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule
from megatron_zb.schedules.simulator import simulate

F, B, W, BW, R, D, H = map(PassKind, ("F", "B", "W", "BW", "R", "D", "H"))
M = 2
PLACEMENT = looped(2)


def test_a_pipeline_has_at_most_so_many_ranks() -> None:
    sizes: dict[str, Any] = {name: [1.0] for name in ("forward", "backward", "weight")}
    assert Costs.of_slices(pipeline_size=MOST_RANKS, **sizes).pipeline_size == MOST_RANKS
    more = MOST_RANKS + 1
    with pytest.raises(UsageError, match=f"of {more} ranks .* at most {MOST_RANKS}"):
        Costs.of_slices(pipeline_size=more, **sizes)


def test_one_microbatch_waits_for_every_pass_and_message() -> None:
    """By hand: 1 + 0.5 + 1 + 2 + 1.5 + 2 + 1, which is what it takes, too."""
    costs = Costs.of_slices(
        pipeline_size=2,
        forward=[1.0, 1.0],
        backward=[2.0, 2.0],
        weight=[1.0, 1.0],
        p2p=[[0.0, 0.5], [1.5, 0.0]],
    )
    table = costs.for_placement(PLACEMENT)
    assert lower_bound(PLACEMENT, 1, table, [1.0, 1.0]) == pytest.approx(9.0)
    # In memory of one microbatch, rank 0 holds each of two for 9 seconds, one after the other.
    assert lower_bound(PLACEMENT, 2, table, [1.0, 1.0]) == pytest.approx(18.0)
    assert period_bound(PLACEMENT, 2, table, [1.0, 1.0]) == pytest.approx(18.0)
    assert period_bound(PLACEMENT, 2, table, [2.0, 2.0]) == pytest.approx(9.0)
    # In memory of two, work and the wait in the middle: rank 0 has 2 of F before B, and 6 to wait.
    assert lower_bound(PLACEMENT, 2, table, [2.0, 2.0]) == pytest.approx(8.0 + 4.0)


@cache
def orders(kinds: tuple[PassKind, ...], stage: int) -> tuple[tuple[Pass, ...], ...]:
    """All orders of the passes of two microbatches in which each has its passes in turn."""

    def grown(done: tuple[Pass, ...], left: tuple[int, int]) -> Iterator[tuple[Pass, ...]]:
        if left == (len(kinds), len(kinds)):
            yield done
        for j in range(M):
            at = left[j]
            if at < len(kinds) and (j == 0 or at < left[0]):
                following = (at + 1, left[1]) if j == 0 else (left[0], at + 1)
                yield from grown((*done, Pass(kinds[at], stage, j)), following)

    return tuple(grown((), (0, 0)))


def peaks_and_makespans(
    firsts: tuple[tuple[Pass, ...], ...], lasts: tuple[tuple[Pass, ...], ...], costs: Costs
) -> list[tuple[tuple[float, ...], float]]:
    found = []
    for ranks in product(firsts, lasts):
        try:
            schedule = Schedule("tried", PLACEMENT, M, ranks).validate()
        except InvalidSchedule:
            continue
        timeline = simulate(schedule, costs)
        found.append((timeline.peak_memory, timeline.makespan))
    assert len(found) > 10
    return found


def unequal(chance: random.Random) -> Costs:
    """Costs of which no two are equal, and links whose directions differ."""

    def some(least: float = 0.25) -> list[float]:
        return [chance.uniform(least, 3.0) for _ in range(2)]

    activation = some(0.5)
    return Costs.of_slices(
        pipeline_size=2,
        forward=some(),
        backward=some(),
        weight=some(),
        p2p=[[0.0, chance.uniform(0.0, 1.5)], [chance.uniform(0.0, 1.5), 0.0]],
        slowdown=some(),
        activation=activation,
        held_for_weight=[a * chance.uniform(0.1, 1.0) for a in activation],
    )


@pytest.mark.parametrize("seed", range(12))
def test_no_order_is_faster_than_its_bound(seed: int) -> None:
    """For each memory that some order has: of the orders within it, the fastest."""
    costs = unequal(random.Random(seed))
    table = costs.for_placement(PLACEMENT)
    tried = peaks_and_makespans(orders((F, B, W), 0), orders((F, B, W), 1), costs)
    close = []
    for limit in {peak for peak, _ in tried}:
        within = [
            s for peak, s in tried if all(p <= most for p, most in zip(peak, limit, strict=True))
        ]
        bound = lower_bound(PLACEMENT, M, table, limit)
        assert bound <= min(within) * (1 + 1e-9), limit
        close.append(bound / min(within))
    assert max(close) > 0.9
    assert min(close) > 0.5


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("moves", [False, True], ids=["recomputed", "offloaded"])
def test_no_order_with_recomputation_is_faster_than_its_bound(seed: int, moves: bool) -> None:
    """Of both microbatches of rank 0, of one, or of none; full duplex or not."""
    chance = random.Random(seed)
    costs = unequal(chance)
    if moves:
        copies = [chance.uniform(0.1, 2.0) for _ in range(2)]
        costs = costs.having(Offload(seconds=copies, full_duplex=seed % 2 == 0))
    else:
        again = [chance.uniform(0.1, 1.0) for _ in range(2)]
        costs = costs.having(Recomputation(kept_input=0.1, seconds=again))
    table = costs.for_placement(PLACEMENT)
    every = orders((F, D, H, BW) if moves else (F, R, BW), 0)
    firsts = {
        tuple(p for p in passes if p.kind in (F, BW) or p.microbatch in states)
        for passes in every
        for states in ((), (0,), (1,), (0, 1))
    }
    lasts = orders((F, BW), 1)
    tried = peaks_and_makespans(tuple(sorted(firsts)), lasts, costs)
    for limit in {peak for peak, _ in tried}:
        within = [
            s for peak, s in tried if all(p <= most for p, most in zip(peak, limit, strict=True))
        ]
        assert lower_bound(PLACEMENT, M, table, limit) <= min(within) * (1 + 1e-9), limit


@pytest.mark.parametrize(
    ("kept", "again", "expected"),
    [
        # An R saves 1 - 0.75 of an activation for 6 - 0.5 - 2 = 3.5 s, and both are worth it.
        (0.75, 0.5, 12.0 - 2 * 0.875),
        # It saves 0.75 for 6 - 2 - 2 = 2 s, and t seconds for R save 0.75 t: 6 + t = 12 - 0.75 t.
        (0.25, 2.0, 6.0 + 6.0 / 1.75),
        # Nothing is held too long where both are recomputed: work of 6, and a wait of 2 before B.
        (0.25, 0.5, 8.0),
    ],
)
def test_what_dropping_saves_by_hand(kept: float, again: float, expected: float) -> None:
    """Two ranks of F 1, BW 2 and no messages, and memory of one activation on the first.

    A unit of rank 0 is held for 1 + 1 + 2 + 2 = 6 s from the begin of F to the end of B: two take
    12 activation-seconds.
    """
    costs = Costs.of_slices(
        pipeline_size=2, forward=[1.0] * 2, backward=[2.0] * 2, weight=[0.0] * 2
    )
    drops = costs.having(Recomputation(kept_input=kept, seconds=[again, again]))
    found = lower_bound(PLACEMENT, M, drops.for_placement(PLACEMENT), [1.0, 9.0])
    assert found == pytest.approx(expected, rel=1e-6)


def test_what_moving_saves_by_hand() -> None:
    """The same with copies of 1: an offload saves one activation for 6 - 1 - 2 - 2 = 1 s."""
    costs = Costs.of_slices(
        pipeline_size=2, forward=[1.0] * 2, backward=[2.0] * 2, weight=[0.0] * 2
    )
    for full_duplex in (True, False):
        moves = costs.having(Offload(seconds=[1.0, 1.0], full_duplex=full_duplex))
        found = lower_bound(PLACEMENT, M, moves.for_placement(PLACEMENT), [1.0, 9.0])
        assert found == pytest.approx(12.0 - 2.0, rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["lengths", "stages", "vocabulary", "slices", "joined"])
def test_no_bound_is_above_a_schedule_that_was_found(kind: str) -> None:
    """Where all activations fit exactly, sums in another order must not look like less room."""
    for name, given in schedule_digest.requests(kind, 8, seed=0):
        try:
            report = schedules.build(name, **given).report
        except UsageError:
            continue
        assert report is not None
        assert report.lower_bound <= report.makespan * (1 + 1e-9), (name, given)
