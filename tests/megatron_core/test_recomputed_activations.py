"""Activations that are recomputed: losses and gradients are those of upstream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpt_cases import GPTCase, differences, run
from ranks import RankPools
from recompute_offload import with_recompute_offload
from state_cases import PARALLEL, SMALL_GPTS, counted

from megatron_zb import schedules
from megatron_zb.schedules import Schedule


def dropping(schedule: Schedule, seed: int, share: float = 0.6) -> Schedule:
    """The same order, with R of some units anywhere between their F and their B."""
    return with_recompute_offload(schedule, seed, recompute=share)


def order(name: str, seed: int) -> Schedule:
    found = dropping(schedules.build(name, pipeline_size=2, num_microbatches=5), seed)
    assert found.recomputed
    return found


NAMES = ("v-half", "zb-h1", "interleaved")
IN_EVERY_RUN = {("plain", "v-half"), ("experts", "v-half"), ("bf16", "interleaved")}


@pytest.mark.parametrize(
    ("what", "name"),
    [
        pytest.param(what, name, marks=() if (what, name) in IN_EVERY_RUN else pytest.mark.full)
        for what in SMALL_GPTS
        for name in NAMES
    ],
)
def test_what_is_made_again_is_what_megatron_computes(
    ranks: RankPools, what: str, name: str
) -> None:
    schedule = order(name, seed=len(what) + len(name))
    found = ranks(2).run(
        differences, case=SMALL_GPTS[what], schedule=schedule, num_microbatches=[5], iterations=2
    )
    assert found == [[]] * 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "name"),
    [
        pytest.param(
            what, name, marks=() if (what, name) == ("data", "v-half") else pytest.mark.full
        )
        for what in PARALLEL
        for name in ("v-half", "interleaved")
    ],
)
def test_other_ranks_make_it_again_together(ranks: RankPools, what: str, name: str) -> None:
    found = ranks(4).run(
        differences,
        case=PARALLEL[what],
        schedule=order(name, seed=len(what)),
        num_microbatches=[5],
        iterations=2,
    )
    assert found == [[]] * 4


def drawn_again(case: GPTCase, seed: int) -> list[str]:
    """Where dropout masks are others if some forwards run twice: [] is nowhere."""
    kept = schedules.build("v-half", pipeline_size=2, num_microbatches=5)
    one, other = (
        run(case, schedule, [5], iterations=2)[5] for schedule in (kept, dropping(kept, seed))
    )
    found = [] if one.losses == other.losses else [f"{one.losses} are not {other.losses}"]
    for name, gradient in one.gradients.items():
        if not torch.equal(gradient, other.gradients[name]):
            found.append(f"gradient of {name}")
    return found


def test_a_forward_that_runs_again_draws_the_same_masks(ranks: RankPools) -> None:
    found = ranks(2).run(drawn_again, case=GPTCase(dropout=0.1), seed=4)
    assert found == [[]] * 2


def test_an_evaluation_drops_nothing(ranks: RankPools) -> None:
    found = ranks(2).run(
        differences,
        case=GPTCase(),
        schedule=order("v-half", 1),
        num_microbatches=[5],
        forward_only=True,
    )
    assert found == [[]] * 2


@pytest.mark.parametrize(
    ("name", "share"),
    [("v-half", 0.6), *(pytest.param(n, 1.0, marks=pytest.mark.full) for n in ("v-half", "zb-h1"))],
)
def test_counted_bytes_are_those_of_the_simulated_memory(
    ranks: RankPools, tmp_path: Path, name: str, share: float
) -> None:
    kept = schedules.build(name, pipeline_size=2, num_microbatches=5)
    dropped = dropping(kept, seed=3, share=share)
    found = ranks(2).run(counted, kept=kept, other=dropped, path=tmp_path / "profile.yaml")
    for predicted, peak, _, _ in found:
        assert predicted == pytest.approx(peak, rel=0.05)
