"""A job that measures itself while it recomputes activations, and offloads some."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import drawn_sizes
import gpt_cases
import pytest
from adapters import scheduled
from brief_searches import briefly
from gpt_cases import GPTCase, built, forward_backward, gradients, microbatches
from ranks import RankPools
from recompute_offload import with_recompute_offload

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.measured.balance import Ends
from megatron_zb.measured.profile import Profile, read_profile
from megatron_zb.measured.trace import compare
from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.megatron_core.profiling import ITERATIONS
from megatron_zb.runtime.activation_memory import ThreadEngines
from megatron_zb.schedules import Schedule
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.layout import Layers
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.request import Limit

CASE = GPTCase(layers=8)
M = 6
SECONDS_PER_BYTE = 1e-9


def profiled(schedule: Schedule, path: Path) -> list[float]:
    """Every loss of a job that is profiled, whose copies take so long."""
    with built(CASE, schedule, M) as (adapter, chunks):
        assert adapter is not None
        adapter.copy_with(ThreadEngines(SECONDS_PER_BYTE))
        adapter.profile(path, None)
        return [loss for _ in range(ITERATIONS) for loss in losses(adapter, chunks)]


def losses(adapter: PipelineAdapter, chunks: list[object]) -> list[float]:
    data = [microbatches(CASE, M) for _ in chunks]
    records = forward_backward(adapter.forward_backward_func, chunks, data, M)
    return [float(record["lm loss"]) for record in records]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recompute", "offload"), drawn_sizes.first(1, [(0.5, 0.3), (1.0, 0.0), (0.0, 1.0)])
)
def test_the_bytes_are_those_of_a_run_that_keeps_all(
    ranks: RankPools, tmp_path: Path, recompute: float, offload: float
) -> None:
    kept = schedules.build("v-half", pipeline_size=2, num_microbatches=M)
    mixed = with_recompute_offload(kept, 1, recompute, offload)
    path, reference = tmp_path / "states.yaml", tmp_path / "kept.yaml"
    found = ranks(2).run(profiled, schedule=mixed, path=path)
    assert found == ranks(2).run(profiled, schedule=kept, path=reference)
    profile, usual = read_profile(path), read_profile(reference)
    for stage, other in zip(profile.stages, usual.stages, strict=True):
        assert stage.activation == pytest.approx(other.activation, rel=0.05)
        assert stage.held_for_weight == pytest.approx(other.held_for_weight, rel=0.05)
    has_r = {p.stage for rank in mixed.ranks for p in rank if p.kind is PassKind.R}
    assert [s.recompute is not None for s in profile.stages] == [s in has_r for s in range(4)]
    assert all(stage.recompute is None for stage in usual.stages)
    check_link(profile)
    check_link(usual)
    for step in (compare(path), compare(reference)):
        assert step.measured.schedule.num_microbatches == M
    assert compare(path).measured.schedule.recomputed == mixed.recomputed
    assert compare(path).measured.schedule.offloaded == mixed.offloaded


def check_link(profile: Profile) -> None:
    """The engines' delay is a lower bound of a copy's time; a busy machine adds to it."""
    assert profile.host_link is not None
    assert 0 < profile.host_link.bandwidth < 1 / SECONDS_PER_BYTE


def replanned(
    memory: Limit, host: Limit | None
) -> tuple[list[Schedule], list[schedules.Costs], list[list[float]]]:
    """What ``auto`` runs in each iteration, for which costs, with which losses."""
    create = partial(
        scheduled,
        pipeline_recompute="auto",
        pipeline_offload="auto",
        copy=0.3,
        pipeline_memory_limit=memory,
        pipeline_host_limit=host,
    )
    orders, costs, seen = [], [], []
    with briefly(), patch.object(gpt_cases, "scheduled", create), built(CASE, "auto", M) as job:
        adapter, chunks = job
        assert adapter is not None
        adapter.profile(None, None)
        for _ in range(ITERATIONS + 1):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            seen.append(losses(adapter, chunks) + [float(g.sum()) for _, g in gradients(chunks)])
            orders.append(adapter.schedule)
            costs.append(adapter.costs)
    return orders, costs, seen


@pytest.mark.full
def test_auto_goes_on_with_recomputation_for_measured_costs(ranks: RankPools) -> None:
    for orders, costs, seen in ranks(2).run(replanned, memory=Limit(0.4), host=None):
        assert all(a == b for a, b in pairwise(seen))
        assumed, measured = costs[0], costs[-1]
        assert measured.activation != assumed.activation
        assert measured.recompute != assumed.recompute
        assert 0 < max(measured.copy) != max(assumed.copy)
        assert measured.kept_input > 0
        assert orders[-1].recomputed or orders[-1].offloaded
        before, after = (schedules.simulate(o, measured).makespan for o in (orders[0], orders[-1]))
        assert after <= before * (1 + 1e-9)


@pytest.mark.full
def test_limits_in_bytes_are_kept_in_bytes_once_these_are_measured(ranks: RankPools) -> None:
    """The order for assumed costs is of another limit, which has no order for measured ones."""
    host = Limit(0.3, 250_000.0)
    for orders, costs, _ in ranks(2).run(replanned, memory=Limit(0.9, 300_000.0), host=host):
        assert costs[0].host_limit == pytest.approx(0.3 * costs[0].one_f_one_b_peak())
        assert costs[-1].host_limit == 250_000.0
        timeline = schedules.simulate(orders[-1], costs[-1])
        assert max(timeline.peak_memory) <= 300_000
        assert max(timeline.peak_host) <= 250_000


def two_stages(**changes: object) -> Profile:
    """The profile of a run that has recomputed on its first stage."""
    stage = {
        "rank": 0,
        "layers": "Et",
        "forward": 0.1,
        "backward": 0.1,
        "weight": 0.1,
        "recompute": 0.12,
        "activation": 1000,
        "held_for_weight": 60,
    }
    last = {**stage, "rank": 1, "layers": "tL", "recompute": None}
    return Profile.model_validate(
        {
            "version": 1,
            "device": "CPU",
            "schedule": "zb-h1",
            "pipeline_size": 2,
            "num_microbatches": 4,
            "message": 7,
            "model": {
                "layers": 2,
                "hidden_size": 32,
                "sequence_length": 16,
                "microbatch": 1,
                "tensor": 1,
                "context": 1,
            },
            "stages": [stage, last],
            "links": [],
            "host": {"forward": 0.01, "backward": 0.0, "weight": 0.0, "whole": 0.0},
            "host_link": {"bandwidth": 500.0, "full_duplex": False},
            **changes,
        }
    )


def test_costs_of_recomputation_need_what_was_measured() -> None:
    profile, untold = two_stages(), two_stages(host_link=None)
    placement = schedules.build("zb-h1", pipeline_size=2, num_microbatches=4).placement
    costs = profile.with_recomputation(profile.costs(placement))
    recomputation = costs.feature(Recomputation)
    assert recomputation is not None and recomputation.kept_input == 7
    assert recomputation.seconds == pytest.approx((0.13, 0.11))
    costs = profile.with_offload(costs, host_limit=5000.0)
    assert costs.feature(Offload) == Offload((2.0, 2.0), full_duplex=False, host_limit=5000.0)
    with pytest.raises(UsageError, match="does not say how fast activations are copied"):
        untold.with_offload(costs)


@pytest.mark.parametrize(("profile", "copy"), [(two_stages(), 4.0 / 0.6), (None, 0.3)])
def test_a_profile_that_balances_layers_tells_what_copies_take(
    profile: Profile | None, copy: float
) -> None:
    adapter = scheduled(
        "zb-1p",
        pipeline_size=2,
        num_microbatches=4,
        layers=Layers(4),
        layer_layout=Ends(0.0, 0.0, "measured", profile),
        pipeline_offload="auto",
        copy=copy if profile is None else 0.1,
    )
    offload = adapter.costs.feature(Offload)
    assert offload is not None and offload.seconds == pytest.approx([3 * copy] * 2)
    assert f"; a copy counts as {copy:.0%} of its passes" in adapter.describe()
