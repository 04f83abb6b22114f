"""Automatic hybrid distribution: the solver against every possibility, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_zb.distill.schedule.candidates import CandidateCosts
from megatron_zb.distill.schedule.distribution import (
    BlockCosts,
    Distribution,
    distribute,
    evenly,
)
from megatron_zb.errors import UsageError

SECONDS = st.floats(0, 10, allow_subnormal=False)


@st.composite
def block_costs(draw: st.DrawFn, most: int = 8) -> BlockCosts:
    blocks = draw(st.integers(1, most))
    times = st.lists(SECONDS, min_size=blocks, max_size=blocks)
    teacher = draw(st.lists(st.floats(0.01, 10), min_size=blocks, max_size=blocks))
    names = ("student", "update", "relay", "reduce", "memory")
    return BlockCosts.of(teacher=teacher, **{name: draw(times) for name in names})


@st.composite
def candidate_costs(draw: st.DrawFn) -> CandidateCosts:
    costs = draw(block_costs())
    block_of = sorted(draw(st.integers(0, 3)) for _ in costs.teacher)
    return CandidateCosts(**vars(costs), block_of=tuple(block_of), teacher_memory=draw(SECONDS))


def divisions(blocks: int, ranks: int, microbatches: int) -> Iterator[list[tuple[int, int]]]:
    """Every way to divide the blocks into stages with so many ranks at most."""
    if blocks == 0:
        yield []
    for first in range(1, blocks + 1):
        for degree in range(1, ranks + 1):
            if microbatches % degree == 0:
                for rest in divisions(blocks - first, ranks - degree, microbatches):
                    yield [(first, degree), *rest]


def best_of_all(
    costs: BlockCosts, ranks: int, microbatches: int, limit: float
) -> tuple[float, int, int] | None:
    """Seconds of the slowest stage, ranks and minus stages of the best division that fits."""
    return min(
        (
            (costs.slowest(found, microbatches), found.num_ranks, -len(found.ranges))
            for found in map(Distribution.of, divisions(costs.num_blocks, ranks, microbatches))
            if all(costs.held(blocks) <= limit for blocks, _ in found.ranges)
        ),
        default=None,
    )


# One block costs as much as three: it pays to give it more ranks, and to leave none of them idle.
UNEVEN = BlockCosts.of(teacher=[1, 1, 3, 1], student=[2, 2, 6, 2], update=0.5)


@settings(max_examples=150, deadline=None)
@given(
    block_costs() | candidate_costs(),
    st.integers(1, 8),
    st.sampled_from([1, 2, 4, 6, 8, 24]),
    st.sampled_from([10.0, 25.0, math.inf]),
)
@example(UNEVEN, 6, 12, math.inf)
def test_no_distribution_is_better(
    costs: BlockCosts, ranks: int, microbatches: int, limit: float
) -> None:
    best = best_of_all(costs, ranks, microbatches, limit)
    if best is None:
        with pytest.raises(UsageError, match="give more ranks, or more memory"):
            distribute(costs, ranks, microbatches, limit)
        return
    found = distribute(costs, ranks, microbatches, limit)
    slowest = costs.slowest(found, microbatches)
    assert (slowest, found.num_ranks, -len(found.ranges)) == best
    assert all(costs.held(blocks) <= limit for blocks, _ in found.ranges)


@settings(max_examples=60, deadline=None)
@given(block_costs(40), st.integers(1, 40), st.sampled_from([1, 2, 4, 6, 8, 24]))
def test_blocks_and_ranks_follow_one_another(
    costs: BlockCosts, ranks: int, microbatches: int
) -> None:
    found = distribute(costs, ranks, microbatches)
    assert [b for blocks, _ in found.ranges for b in blocks] == list(range(costs.num_blocks))
    held = [r for _, group in found.ranges for r in group]
    assert held == list(range(len(held)))
    assert len(held) <= ranks
    assert all(microbatches % len(group) == 0 for _, group in found.ranges)
    assert costs.slowest(found, microbatches) <= costs.slowest(
        evenly(costs.num_blocks, ranks), microbatches
    )


def test_candidates_of_a_stage_share_the_teacher() -> None:
    costs = CandidateCosts(
        teacher=(1.0,) * 4,
        student=(2.0,) * 4,
        update=(0.0,) * 4,
        relay=(0.5,) * 4,
        reduce=(0.0,) * 4,
        memory=(3.0,) * 4,
        block_of=(0, 0, 1, 1),
        teacher_memory=10.0,
    )
    assert [costs.stage_seconds(range(*of), 1, 2) for of in ((0, 4), (0, 2), (1, 3), (3, 4))] == [
        2 * (2 + 8),
        2 * (1 + 4 + 0.5),
        2 * (2 + 4 + 0.5),
        2 * (1 + 2),
    ]
    assert [costs.held(range(*of)) for of in ((0, 4), (0, 2), (1, 3))] == [32, 16, 26]
    assert distribute(costs, 3, 1, memory_limit=26).spec == "0-0:1,1-1:1,2-3:1"


def test_a_heavy_block_gets_more_ranks() -> None:
    found = distribute(UNEVEN, 6, 12)
    assert str(found) == (
        "block 0 on rank 0, block 1 on rank 1, block 2 on ranks 2-4, block 3 on rank 5"
    )
    assert UNEVEN.slowest(found, 12) == 12 * 3 + 0.5


def test_summing_gradients_can_cost_more_than_it_gains() -> None:
    times = {"teacher": [1.0], "student": [3.0]}
    assert distribute(BlockCosts.of(**times), 4, 4).num_ranks == 4
    costs = BlockCosts.of(**times, reduce=20)
    assert [costs.stage_seconds(range(1), k, 4) for k in (1, 2, 4)] == [16, 8 + 20, 4 + 30]
    assert distribute(costs, 4, 4).num_ranks == 1


def test_relaying_is_charged_to_all_stages_but_the_last() -> None:
    costs = BlockCosts.of(teacher=[1, 1], student=[1, 1], relay=0.25)
    assert costs.stage_seconds(range(1), 1, 8) == 8 * 2.25
    assert costs.stage_seconds(range(1, 2), 1, 8) == 8 * 2
    assert costs.stage_seconds(range(2), 2, 8) == 4 * 4


def test_ninety_six_blocks_on_sixty_four_ranks_are_near_the_ideal() -> None:
    blocks = range(96)
    costs = BlockCosts.of(
        teacher=[1 + (b * 37 % 17) / 10 for b in blocks],
        student=[2 + (b * 53 % 23) / 10 for b in blocks],
        update=0.1,
        relay=0.05,
        reduce=0.3,
    )
    found = distribute(costs, 64, 64)
    ideal = (sum(costs.teacher) + sum(costs.student)) * 64 / 64
    assert ideal < costs.slowest(found, 64) < 1.15 * ideal


def test_a_rank_may_be_too_small_for_all_blocks() -> None:
    costs = BlockCosts.of(teacher=[1] * 5, student=[3] * 5, memory=10)
    assert distribute(costs, 4, 8).spec == "0-4:4"
    assert distribute(costs, 4, 8, memory_limit=30).spec == "0-0:1,1-1:1,2-4:2"
    assert distribute(costs, 4, 8, memory_limit=29).spec == "0-0:1,1-2:1,3-4:1"


def test_among_equals_a_rank_holds_the_least() -> None:
    costs = BlockCosts.of(teacher=[1] * 4, student=[3] * 4)
    assert distribute(costs, 4, 8).spec == "0-0:1,1-1:1,2-2:1,3-3:1"


@pytest.mark.parametrize(
    ("text", "stages"),
    [("0-3:1,4-7:2", [(4, 1), (4, 2)]), ("0:2, 1-2", [(1, 2), (2, 1)]), ("0-0:4", [(1, 4)])],
)
def test_a_distribution_is_read_as_it_is_written(text: str, stages: list[tuple[int, int]]) -> None:
    found = Distribution.parse(text)
    assert found == Distribution.of(stages)
    assert Distribution.parse(found.spec) == found


def test_evenly() -> None:
    sizes = [(len(blocks), len(ranks)) for blocks, ranks in evenly(7, 3).ranges]
    assert sorted(sizes) == [(2, 1), (2, 1), (3, 1)]
    assert evenly(2, 5).num_ranks == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: distribute(UNEVEN, 0, 4), "0 ranks and 4 microbatches per step: give 1 or more"),
        (lambda: Distribution.of([(2, 1), (0, 1)]), "stage 1 has 0 blocks and 1 ranks"),
        (lambda: Distribution.of([]), "without a stage"),
        (lambda: evenly(0, 2), "0 blocks on 2 ranks"),
        (lambda: Distribution.parse("0-3:1,5:1"), "stage 1 .* give blocks from 4 on"),
        (lambda: Distribution.parse("1-3"), "stage 0 .* give blocks from 0 on"),
        (lambda: Distribution.parse("0-3:1,all"), "'all' in the distribution .* is no stage"),
        (lambda: Distribution.parse("0-3:0"), "stage 0 has 4 blocks and 0 ranks"),
        (lambda: Distribution.parse("0:99999999999"), "is no stage"),
        (
            lambda: distribute(BlockCosts.of(teacher=[1], student=[1], memory=3), 2, 2, 2.5),
            "2 ranks of 2.5 cannot hold 1 blocks of 3 in all",
        ),
        (lambda: BlockCosts.of(teacher=[1, 2], student=[1]), "student has 1 entries"),
        (lambda: BlockCosts.of(teacher=[1], student=[-1]), "give finite values of 0 or more"),
        (lambda: BlockCosts.of(teacher=[0], student=[0]), "no block takes any time"),
        (lambda: UNEVEN.stage_costs(evenly(3, 3)), "for 4 blocks, the distribution has 3"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(wrong: object, said: str) -> None:
    assert callable(wrong)
    with pytest.raises(UsageError, match=said):
        wrong()
