"""Activations that are dropped and made again: losses and gradients are those of stock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpt_cases import GPTCase, built, differences, forward_backward, microbatches, run
from joined import EXPERTS
from megatron.core import parallel_state
from ranks import RankPools
from states import with_states

from megatron_zb import schedules
from megatron_zb.measured.profile import read_profile
from megatron_zb.megatron_core.profiling import ITERATIONS
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.schedules import Schedule
from megatron_zb.schedules.program.memory import peak_with_messages


def dropping(schedule: Schedule, seed: int, share: float = 0.6) -> Schedule:
    """The same order, with R of some units anywhere between their F and their B."""
    return with_states(schedule, seed, drop=share)


def order(name: str, seed: int) -> Schedule:
    found = dropping(schedules.build(name, pipeline_size=2, num_microbatches=5), seed)
    assert found.dropped
    return found


CASES = {
    "plain": GPTCase(),
    "tied": GPTCase(tied=True),
    "bf16": GPTCase(dtype="bfloat16"),
    "experts": GPTCase(options=tuple(EXPERTS.items())),
    "selective": GPTCase(
        options=(("recompute_granularity", "selective"), ("recompute_modules", ("core_attn",)))
    ),
    "lengths": GPTCase(lengths=(16, 8, 12), options=(("moe_token_dispatcher_type", "alltoall"),)),
}
PARALLEL = {
    "tensor": GPTCase(tensor_parallel=2),
    "sequence": GPTCase(tensor_parallel=2, sequence_parallel=True),
    "data": GPTCase(data_parallel=2, overlap_grad_reduce=True),
    "expert": GPTCase(
        data_parallel=2, expert_parallel=2, dtype="bfloat16", options=tuple(EXPERTS.items())
    ),
    "distributed_optimizer": GPTCase(
        data_parallel=2,
        overlap_grad_reduce=True,
        distributed_optimizer=True,
        overlap_param_gather=True,
        optimizer_steps=3,
    ),
}
NAMES = ("v-half", "zb-h1", "interleaved")
IN_EVERY_RUN = {("plain", "v-half"), ("experts", "v-half"), ("bf16", "interleaved")}


@pytest.mark.parametrize(
    ("what", "name"),
    [
        pytest.param(what, name, marks=() if (what, name) in IN_EVERY_RUN else pytest.mark.full)
        for what in CASES
        for name in NAMES
    ],
)
def test_what_is_made_again_is_what_megatron_computes(
    ranks: RankPools, what: str, name: str
) -> None:
    schedule = order(name, seed=len(what) + len(name))
    found = ranks(2).run(
        differences, case=CASES[what], schedule=schedule, num_microbatches=[5], iterations=2
    )
    assert found == [[]] * 2


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


def counted(kept: Schedule, dropped: Schedule, path: Path) -> tuple[float, int]:
    """The peak of activations on this rank where some are dropped: predicted, and counted.

    Predicted from a profile of the order that keeps all; an input is as large as a message, and
    the first stage has none.
    """
    case, m = GPTCase(), kept.num_microbatches
    memory = ActivationMemory()
    for schedule in (kept, dropped):
        with built(case, schedule, m) as (adapter, chunks):
            assert adapter is not None
            if schedule is kept:
                adapter.profile(path, None)
            function = adapter.forward_backward_func
            if schedule is kept:
                for _ in range(ITERATIONS):
                    forward_backward(function, chunks, [microbatches(case, m) for _ in chunks], m)
            else:
                memory = ActivationMemory(p for chunk in chunks for p in chunk.parameters())
                adapter.track(memory)
                with memory.watching():
                    forward_backward(function, chunks, [microbatches(case, m) for _ in chunks], m)
            rank = adapter.physical.logical(parallel_state.get_pipeline_model_parallel_rank())
            torch.distributed.barrier()
    profile, placement = read_profile(path), kept.placement
    costs = profile.costs(placement).with_recomputation(kept_input=profile.message)
    table = costs.for_placement(placement)
    table = replace(table, kept_input=(0.0, *table.kept_input[1:]))
    program = schedules.lower(dropped)
    return peak_with_messages(program, rank, table, profile.message), memory.peak_bytes


@pytest.mark.parametrize(
    ("name", "share"),
    [("v-half", 0.6), *(pytest.param(n, 1.0, marks=pytest.mark.full) for n in ("v-half", "zb-h1"))],
)
def test_counted_bytes_are_those_of_the_simulated_memory(
    ranks: RankPools, tmp_path: Path, name: str, share: float
) -> None:
    kept = schedules.build(name, pipeline_size=2, num_microbatches=5)
    dropped = dropping(kept, seed=3, share=share)
    found = ranks(2).run(counted, kept=kept, dropped=dropped, path=tmp_path / "profile.yaml")
    for predicted, peak in found:
        assert predicted == pytest.approx(peak, rel=0.05)
