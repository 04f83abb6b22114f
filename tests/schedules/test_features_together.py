"""Features of costs by twos: what holds for each of them has to hold for any two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
from cost_tables import changed

from megatron_zb.errors import UsageError
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.vocabulary import Vocabulary, VocabularyRules
from megatron_zb.schedules.passes import Pair, Pass, PassKind
from megatron_zb.schedules.placement import looped
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.simulator import Timeline, simulate
from megatron_zb.schedules.task_graph import Copy

F, B, W, BW, R, D, H, O, P, V = map(PassKind, ("F", "B", "W", "BW", "R", "D", "H", "O", "P", "V"))  # noqa: E741

M = 3


def plain() -> Costs:
    return Costs.uniform(pipeline_size=2, forward=1.0, backward=1.25, weight=0.75, p2p=0.125)


FEATURES: dict[str, Callable[[Costs], Costs]] = {
    "links": lambda costs: replace(costs, p2p=((0.0, 0.25), (0.5, 0.0))),
    "slow rank": lambda costs: replace(costs, slowdown=(1.0, 1.5)),
    "whole": lambda costs: changed(costs, whole=(1.875, 1.75)),
    "slices": lambda costs: changed(
        costs, forward=(1.0, 1.5), activation=(1.0, 2.0), held_for_weight=(0.5, 0.25)
    ),
    "recompute": lambda costs: costs.having(Recomputation(kept_input=0.125, seconds=(0.5, 0.625))),
    "offload": lambda costs: costs.having(Offload(seconds=[2.5, 3.0], full_duplex=False)),
    "pairs": lambda costs: costs.having(Communication(forward=0.5, backward=0.25, pair_loss=0.125)),
    "vocabulary": lambda costs: costs.having(
        Vocabulary(output=2.0, weight=1.0, loss=0.125, held=0.5, scatter=0.25, gather=0.375)
    ),
}
BY_TWOS = list(combinations(FEATURES, 2))


def made(names: tuple[str, ...]) -> Costs:
    costs = plain()
    for name in names:
        costs = FEATURES[name](costs)
    return costs


def order(names: tuple[str, ...]) -> Schedule:
    """An order of two ranks that uses the features: recomputation, offload, pairs, or shards.

    Rank 0 recomputes microbatch 0, or offloads microbatch 1; rank 1 pairs the backward of 0 with F
    of 1.
    """
    first = [Pass(F, 0, j) for j in range(M)]
    last = [Pass(F, 1, 0), Pass(BW, 1, 0), Pass(F, 1, 1), Pass(B, 1, 1)]
    last += [Pass(F, 1, 2), Pass(W, 1, 1), Pass(BW, 1, 2)]
    if "pairs" in names:
        last[1:3] = [Pass(F, 1, 1), Pass(BW, 1, 0)]
    if "vocabulary" in names:
        last = [Pass(F, 1, 0), Pass(O, 3, 0), Pass(P, 1, 0), Pass(F, 1, 1), Pass(BW, 1, 0)]
        last += [Pass(V, 3, 0), Pass(O, 3, 1), Pass(P, 1, 1), Pass(BW, 1, 1), Pass(V, 3, 1)]
        last += [Pass(F, 1, 2), Pass(O, 3, 2), Pass(P, 1, 2), Pass(BW, 1, 2), Pass(V, 3, 2)]
        first = [Pass(F, 0, 0), Pass(F, 0, 1), Pass(O, 2, 0), Pass(F, 0, 2), Pass(V, 2, 0)]
        first += [Pass(O, 2, 1), Pass(V, 2, 1), Pass(O, 2, 2), Pass(V, 2, 2)]
    backwards = {j: [Pass(BW, 0, j)] for j in range(M)}
    if "recompute" in names:
        backwards[0].insert(0, Pass(R, 0, 0))
    if "offload" in names:
        at = first.index(Pass(F, 0, 2))
        first[at:at] = [Pass(D, 0, 1)]
        backwards[1].insert(0, Pass(H, 0, 1))
    ranks = (tuple(first + [p for j in range(M) for p in backwards[j]]), tuple(last))
    pairs = frozenset([Pass(F, 1, 1)] if "pairs" in names else [])
    schedule = Schedule("two ranks", looped(2), M, ranks, pairs=pairs)
    if "vocabulary" in names:
        schedule = replace(schedule, rules=VocabularyRules((0, 1)))
    return schedule.validate()


def numbers(timeline: Timeline) -> list[float]:
    copies = [n for rank in timeline.copies for copy in rank for n in (copy.start, copy.end)]
    times = [*timeline.start, *timeline.end, timeline.peak_memory, timeline.peak_host]
    return [n for row in times for n in row] + copies


@pytest.mark.parametrize("names", BY_TWOS, ids=" and ".join)
def test_microbatches_of_twice_the_length_take_twice_the_time_and_memory(
    names: tuple[str, str],
) -> None:
    """Every number doubles, so nothing of a microbatch is read from another row than its own."""
    costs, schedule = made(names), order(names)
    once = simulate(schedule, costs)
    twice = simulate(schedule, costs.of_lengths([2.0] * M))
    assert numbers(twice) == pytest.approx([2 * n for n in numbers(once)])
    assert once.makespan > 0


@pytest.mark.parametrize("name", FEATURES)
def test_one_longer_microbatch_is_longer_wherever_it_is(name: str) -> None:
    """Passes before it keep their times; its own take twice as long, and so do its copies."""
    costs, schedule = made((name,)), order((name,))
    once = simulate(schedule, costs)
    for longer in range(M):
        lengths = [2.0 if j == longer else 1.0 for j in range(M)]
        found = simulate(schedule, costs.of_lengths(lengths))
        for rank, passes in enumerate(schedule.ranks):
            for at, p in enumerate(passes):
                if any(schedule.pair_at(rank, i) for i in (at - 1, at) if i >= 0):
                    continue  # see the test of a pair
                seconds = found.end[rank][at] - found.start[rank][at]
                before = once.end[rank][at] - once.start[rank][at]
                assert seconds == pytest.approx(lengths[p.microbatch] * before), (longer, p)
        for one, other in zip(once.copies, found.copies, strict=True):
            for a, b in zip(one, other, strict=True):
                assert b.end - b.start == pytest.approx(lengths[a.microbatch] * (a.end - a.start))
        assert found.makespan > once.makespan


def test_the_longer_of_a_pair_counts() -> None:
    """F 1.5, of which 0.5 communicates; BW 2.25, of which 0.25 does; 12.5 % more for a pair."""
    costs = made(("pairs",))
    pair = Pair(Pass(F, 1, 1), Pass(BW, 1, 0))
    table = costs.for_placement(looped(2))
    assert table.pair_seconds(pair) == pytest.approx(1.125 * (1.5 + 2.25 - 0.75))
    long_forward = costs.of_lengths([1.0, 2.0, 1.0]).for_placement(looped(2))
    assert long_forward.pair_seconds(pair) == pytest.approx(1.125 * (3.0 + 2.25 - 1.25))
    long_backward = costs.of_lengths([2.0, 1.0, 1.0]).for_placement(looped(2))
    assert long_backward.pair_seconds(pair) == pytest.approx(1.125 * (1.5 + 4.5 - 1.0))


def test_copies_take_as_long_as_their_microbatch() -> None:
    """Rank 0 offloads microbatch 1, three times as long: its F takes 3, its copies 7.5."""
    costs = plain().having(Offload(seconds=2.5)).of_lengths([1.0, 3.0, 1.0])
    timeline = simulate(order(("offload",)), costs)
    assert timeline.copies[0][0] == Copy(1 - 1, 1, True, 4.0, 11.5)
    assert timeline.copies[0][1].end - timeline.copies[0][1].start == 7.5


def test_a_feature_that_is_refused_beside_lengths_says_the_order_to_give_them() -> None:
    uneven = plain().of_lengths([1.0, 2.0])
    for name in ("recompute", "offload", "pairs", "vocabulary"):
        with pytest.raises(
            UsageError, match="have lengths of their own already: give the costs of"
        ):
            FEATURES[name](uneven)
