"""How many kernels wait for messages beside the computation: by hand, and of the schedules."""

from __future__ import annotations

import pytest

from megatron_zb import schedules
from megatron_zb.schedules import Schedule
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import looped
from megatron_zb.schedules.waiting_kernels import waiting_kernels


def of_two_ranks() -> Schedule:
    ranks = tuple(
        tuple(Pass(kind, stage, j) for kind in (PassKind.F, PassKind.BW) for j in range(2))
        for stage in range(2)
    )
    return Schedule("two ranks", looped(2, 1), 2, ranks).validate()


@pytest.mark.parametrize(("gated", "beside_passes_of_rank_0"), [(False, 2 + 3), (True, 1 + 3)])
def test_two_ranks_by_hand(gated: bool, beside_passes_of_rank_0: float) -> None:
    """Rank 0 runs F in 0-1 and 1-2, rank 1 in 1-2 and 2-3; rank 1 runs BW in 3-6 and 6-9.

    The gradients reach rank 0 at 6 and 9. It waits for the first one from the start on, or from
    that of its second F on, and for the second one in all of its first BW. Rank 1 waits for the
    second activation in its first F.
    """
    schedule = of_two_ranks()
    costs = Costs.uniform(pipeline_size=2, forward=1.0, backward=2.0, weight=1.0)
    timeline = schedules.simulate(schedule, costs)
    program = schedules.lower(schedule, timeline)
    first, second = waiting_kernels(program, timeline.costs, gated=gated)
    assert (first.end, second.end) == (12.0, 9.0)
    assert (first.mean, second.mean) == (beside_passes_of_rank_0 / 8, 1 / 8)
    assert (first.peak, second.peak) == (1, 1)


def asymmetric(pipeline_size: int) -> Costs:
    return Costs.uniform(pipeline_size=pipeline_size, forward=1.0, backward=1.2, weight=0.8)


@pytest.mark.parametrize("name", ["v-half", "v-zb"])
def test_less_than_half_a_kernel_waits_beside_the_computation(name: str) -> None:
    """1.6 would, if receives waited from the moment on when the host has enqueued them."""
    costs = asymmetric(8)
    schedule = schedules.build(name, pipeline_size=8, num_microbatches=32, costs=costs)
    timeline = schedules.simulate(schedule, costs)
    program = schedules.lower(schedule, timeline)
    gated, free = (waiting_kernels(program, timeline.costs, gated=each) for each in (True, False))
    assert sum(rank.mean for rank in gated) / 8 <= 0.5
    assert sum(rank.mean for rank in free) / 8 > 1.5
    assert max(rank.end for rank in gated) == pytest.approx(timeline.makespan)


def sharded(p: int, m: int) -> tuple[list[float], float]:
    """Return the mean kernels of every rank, and how much longer they make the step."""
    costs = asymmetric(p).having(Vocabulary(output=0.5, weight=0.25, lookup=0.02))
    schedule = schedules.build("v-half", pipeline_size=p, num_microbatches=m, costs=costs)
    timeline = schedules.simulate(schedule, costs)
    found = waiting_kernels(schedules.lower(schedule, timeline), timeline.costs)
    return [rank.mean for rank in found], max(rank.end for rank in found) / timeline.makespan


@pytest.mark.parametrize(("p", "m"), [(8, 32), pytest.param(16, 64, marks=pytest.mark.full)])
def test_few_wait_where_the_vocabulary_is_sharded(p: int, m: int) -> None:
    means, longer = sharded(p, m)
    assert sum(means) / p <= 0.8
    assert longer <= 1.003


_WORSE = "1.96: the rank of the last stage waits for shards that run O at different times"


@pytest.mark.parametrize(
    ("p", "m", "most"),
    [
        pytest.param(8, 32, 1.5, marks=pytest.mark.xfail(reason=_WORSE, strict=True)),
        pytest.param(16, 64, 2.5, marks=pytest.mark.full),
    ],
)
def test_few_wait_on_any_rank_where_the_vocabulary_is_sharded(p: int, m: int, most: float) -> None:
    means, _ = sharded(p, m)
    assert max(means) <= most
