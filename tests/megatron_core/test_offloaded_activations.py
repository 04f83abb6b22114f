"""Activations that are offloaded: losses and gradients are those of upstream."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from gpt_cases import GPTCase, built, differences, forward_backward, gradients, microbatches
from hypothesis import strategies as st
from model_options import RECOMPUTED
from ranks import RankPools
from recompute_offload import with_recompute_offload
from state_cases import PARALLEL, SMALL_GPTS, counted

from megatron_zb import schedules
from megatron_zb.runtime.activation_memory import ThreadEngines
from megatron_zb.schedules import Schedule

CASES = SMALL_GPTS | {
    "full": GPTCase(options=RECOMPUTED),
}
NAMES = ("v-half", "zb-h1", "interleaved")
IN_EVERY_RUN = {("plain", "v-half"), ("experts", "v-half")}


def order(
    name: str, seed: int, p: int = 2, recompute: float = 0.0, offload: float = 0.6
) -> Schedule:
    kept = schedules.build(name, pipeline_size=p, num_microbatches=5)
    found = with_recompute_offload(kept, seed, recompute, offload)
    assert found.offloaded
    return found


@pytest.mark.parametrize(
    ("what", "name"),
    [
        pytest.param(what, name, marks=() if (what, name) in IN_EVERY_RUN else pytest.mark.full)
        for what in CASES
        for name in NAMES
    ],
)
def test_what_was_offloaded_comes_back_as_it_was(ranks: RankPools, what: str, name: str) -> None:
    found = ranks(2).run(
        differences,
        case=CASES[what],
        schedule=order(name, seed=len(what) + len(name)),
        num_microbatches=[5],
        iterations=2,
    )
    assert found == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        pytest.param("tensor", marks=pytest.mark.full),
        pytest.param("sequence", marks=pytest.mark.full),
        "distributed_optimizer",
        pytest.param("expert", marks=pytest.mark.full),
    ],
)
def test_other_ranks_move_theirs(ranks: RankPools, what: str) -> None:
    found = ranks(4).run(
        differences,
        case=PARALLEL[what],
        schedule=order("v-half", seed=len(what), recompute=0.3),
        num_microbatches=[5],
        iterations=2,
    )
    assert found == [[]] * 4


def evaluated_between(case: GPTCase, schedule: Schedule) -> list[str]:
    """Where two steps with an evaluation between them differ from those of the kept order."""
    kept = schedules.build("v-half", pipeline_size=2, num_microbatches=5)
    outcomes = []
    for taken in (kept, schedule):
        with built(case, taken, 5) as (adapter, chunks):
            assert adapter is not None
            found: list[float] = []
            for forward_only in (False, True, False):
                data = [microbatches(case, 5) for _ in chunks]
                records = forward_backward(
                    adapter.forward_backward_func, chunks, data, 5, forward_only=forward_only
                )
                found += [float(record["lm loss"]) for record in records]
            outcomes.append((found, dict(gradients(chunks))))
    (losses, expected), (others, ours) = outcomes
    different = [name for name in expected if not torch.equal(expected[name], ours[name])]
    return different if losses == others else [f"{others} are not {losses}", *different]


@pytest.mark.slow
@hypothesis.settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    seed=st.integers(0, 1 << 20), recompute=st.floats(0, 0.5), offload=st.floats(0, 0.5)
)
def test_any_mix_of_recomputation_and_offload_draws_and_computes_the_same(
    ranks: RankPools, seed: int, recompute: float, offload: float
) -> None:
    kept = schedules.build("v-half", pipeline_size=2, num_microbatches=5)
    found = ranks(2).run(
        evaluated_between,
        case=GPTCase(dropout=0.1),
        schedule=with_recompute_offload(kept, seed, recompute, offload),
    )
    assert found == [[]] * 2


@pytest.mark.slow
@hypothesis.settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    seed=st.integers(0, 1 << 20),
    recompute=st.floats(0, 0.5),
    offload=st.floats(0, 0.5),
    model=st.sampled_from([("plain", 8, "v-half"), ("plain", 8, "zb-h2"), ("experts", 4, "zb-h1")]),
)
def test_any_mix_of_recomputation_and_offload_on_four_ranks_is_upstreams(
    ranks: RankPools, seed: int, recompute: float, offload: float, model: tuple[str, int, str]
) -> None:
    what, layers, name = model
    kept = schedules.build(name, pipeline_size=4, num_microbatches=4)
    found = ranks(4).run(
        differences,
        case=replace(CASES[what], layers=layers),
        schedule=with_recompute_offload(kept, seed, recompute, offload),
        num_microbatches=[4],
        iterations=2,
    )
    assert found == [[]] * 4


def offloaded_slowly(case: GPTCase, schedule: Schedule, seconds_per_byte: float) -> Any:
    """Losses and gradients if every copy takes so long."""
    with built(case, schedule, 5) as (adapter, chunks):
        assert adapter is not None
        adapter.copy_with(ThreadEngines(seconds_per_byte))
        data = [microbatches(case, 5) for _ in chunks]
        records = forward_backward(adapter.forward_backward_func, chunks, data, 5)
        return [float(r["lm loss"]) for r in records], dict(gradients(chunks))


def copied_at_two_speeds(case: GPTCase, schedule: Schedule) -> list[str]:
    """What differs where copies are slow."""
    one, other = (offloaded_slowly(case, schedule, s) for s in (0.0, 2e-6))
    assert one[1]
    different = [name for name in one[1] if not torch.equal(one[1][name], other[1][name])]
    return different if one[0] == other[0] else ["losses", *different]


def test_slow_copies_change_no_number(ranks: RankPools) -> None:
    found = ranks(2).run(copied_at_two_speeds, case=GPTCase(), schedule=order("v-half", 2))
    assert found == [[], []]


@pytest.mark.parametrize(
    ("name", "recompute", "offload"),
    [
        ("v-half", 0.0, 1.0),
        pytest.param("v-half", 0.4, 0.4, marks=pytest.mark.full),
        pytest.param("zb-h1", 0.0, 1.0, marks=pytest.mark.full),
        pytest.param("zb-h2", 0.3, 0.6, marks=pytest.mark.full),
    ],
)
def test_counted_bytes_are_those_of_both_simulated_curves(
    ranks: RankPools, tmp_path: Path, name: str, recompute: float, offload: float
) -> None:
    kept = schedules.build(name, pipeline_size=2, num_microbatches=5)
    other = with_recompute_offload(kept, 3, recompute, offload)
    found = ranks(2).run(counted, kept=kept, other=other, path=tmp_path / "profile.yaml")
    for device, counted_device, host, counted_host in found:
        assert device == pytest.approx(counted_device, rel=0.05)
        assert host == pytest.approx(counted_host, rel=0.05)
