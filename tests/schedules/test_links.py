"""Links whose directions differ, so that a message that takes the wrong one takes other time."""

from __future__ import annotations

import pytest

from megatron_zb import schedules
from megatron_zb.schedules.costs import Costs, averaged
from megatron_zb.schedules.features.vocabulary import Vocabulary, VocabularyRules
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement, looped, v_shape
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.stage_costs import StageCosts

F, B, W, BW, O, P, V, E = map(PassKind, ("F", "B", "W", "BW", "O", "P", "V", "E"))  # noqa: E741

# P2P[a][b] are the seconds from rank a to rank b: all six links of three ranks differ.
P2P = ((0.0, 0.25, 0.5), (1.0, 0.0, 2.0), (4.0, 8.0, 0.0))


def costs_of(p2p: tuple[tuple[float, ...], ...] = P2P) -> Costs:
    p = len(p2p)
    return Costs.of_slices(
        pipeline_size=p, forward=[1.0] * p, backward=[1.0] * p, weight=[1.0] * p, p2p=p2p
    )


@pytest.mark.parametrize(
    ("placement", "forward", "backward"),
    [
        (looped(3), (0.25, 2.0, 0.0), (0.0, 1.0, 8.0)),
        (v_shape(3), (0.25, 2.0, 0.0, 8.0, 1.0, 0.0), (0.0, 1.0, 8.0, 0.0, 2.0, 0.25)),
        (looped(3, 2), (0.25, 2.0, 4.0, 0.25, 2.0, 0.0), (0.0, 1.0, 8.0, 0.5, 1.0, 8.0)),
    ],
    ids=str,
)
def test_forwards_and_backwards_take_opposite_directions(
    placement: Placement, forward: tuple[float, ...], backward: tuple[float, ...]
) -> None:
    table = costs_of().for_placement(placement)
    assert (table.latency[PassKind.F], table.latency[PassKind.B]) == (forward, backward)
    assert table.latency[F] == forward
    assert table.latency[B] == table.latency[BW] == backward
    assert table.latency[W] == (0.0,) * placement.num_stages


def shards(placement: Placement) -> StageCosts:
    costs = costs_of().having(
        Vocabulary(output=3.0, weight=3.0, scatter=16.0, gather=32.0, lookup=3.0)
    )
    return costs.for_placement(placement)


def test_shards_hear_from_the_last_stage_and_answer_it() -> None:
    """The slowest rank receives after 8 s; each answers over its own link to the last rank."""
    table = shards(looped(3))
    assert table.latency[F] == (0.25, 2.0, 8.0 + 16.0)
    assert table.latency[P] == (0.0, 0.0, 8.0)
    assert table.latency[O] == (0.0, 0.0, 0.0, 32.5, 34.0, 0.0)


def test_shards_of_a_v_answer_its_first_rank() -> None:
    table = shards(v_shape(3))
    assert table.latency[P] == (0.0, 0.0, 0.0, 0.0, 0.0, 0.5)
    assert table.latency[F][-1] == 0.5 + 16.0
    assert table.latency[O][6:] == (0.0, 1.0 + 32.0, 4.0 + 32.0)


def test_lookups_answer_the_first_stage_and_hear_its_gradient() -> None:
    table = shards(looped(3))
    assert table.latency[E] == (0.0, 0.0, 0.0, 0.5, 1.0, 4.0)
    assert table.latency[B] == table.latency[BW] == (0.5, 1.0, 8.0)


def test_an_order_with_shards_by_hand() -> None:
    """Rank 1 has the loss; messages to it take 0.5, those from it 2."""
    first = (Pass(F, 0, 0), Pass(O, 2, 0), Pass(V, 2, 0), Pass(BW, 0, 0))
    last = (Pass(F, 1, 0), Pass(O, 3, 0), Pass(P, 1, 0), Pass(BW, 1, 0), Pass(V, 3, 0))
    rules = VocabularyRules((0, 1))
    schedule = Schedule("by hand", looped(2), 1, (first, last), rules=rules).validate()
    costs = costs_of(((0.0, 0.5), (2.0, 0.0))).having(
        Vocabulary(output=2.0, weight=1.0, loss=0.125)
    )
    timeline = schedules.simulate(schedule, costs)
    # F 0 to 1, its message until 1.5, F until 2.5, the vectors until 4.5 on rank 0, O until 5.5,
    # its answer until 6, P until 6.125, which rank 0 hears of at 8.125; BW of rank 1 until 8.125
    assert timeline.start[1] == pytest.approx((1.5, 2.5, 6.0, 6.125, 8.125))
    assert timeline.start[0] == pytest.approx((0.0, 4.5, 8.125, 10.125))
    assert timeline.makespan == pytest.approx(12.125)


def test_an_order_of_two_ranks_by_hand() -> None:
    ranks = tuple(tuple(Pass(kind, s, j) for kind in (F, BW) for j in (0, 1)) for s in (0, 1))
    schedule = Schedule("by hand", looped(2), 2, ranks).validate()
    timeline = schedules.simulate(schedule, costs_of(((0.0, 0.5), (2.0, 0.0))))
    assert timeline.start[1] == (1.5, 2.5, 3.5, 5.5)
    assert timeline.start[0] == (0.0, 1.0, 7.5, 9.5)


def test_one_cost_for_all_has_the_median_of_the_links_to_the_next_rank() -> None:
    four = [[float(10 * a + b) if a != b else 0.0 for b in range(4)] for a in range(4)]
    costs = averaged(costs_of(tuple(map(tuple, four))))
    assert {costs.p2p[a][b] for a in range(4) for b in range(4) if a != b} == {12.0}
