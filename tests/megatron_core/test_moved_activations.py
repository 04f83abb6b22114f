"""Activations that are moved to the host and back: losses and gradients are those of stock."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest
import torch
from gpt_cases import GPTCase, built, differences, forward_backward, microbatches, run
from hypothesis import strategies as st
from joined import EXPERTS
from megatron.core import parallel_state
from ranks import RankPools
from states import with_states

from megatron_zb import schedules
from megatron_zb.measured.profile import read_profile
from megatron_zb.megatron_core.profiling import ITERATIONS
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.runtime.copy_engines import ThreadEngines
from megatron_zb.schedules import Schedule
from megatron_zb.schedules.program.memory import peak_with_messages

CASES = {
    "plain": GPTCase(),
    "tied": GPTCase(tied=True),
    "bf16": GPTCase(dtype="bfloat16"),
    "experts": GPTCase(options=tuple(EXPERTS.items())),
    "full": GPTCase(
        options=(
            ("recompute_granularity", "full"),
            ("recompute_method", "uniform"),
            ("recompute_num_layers", 1),
        )
    ),
    "selective": GPTCase(
        options=(("recompute_granularity", "selective"), ("recompute_modules", ("core_attn",)))
    ),
    "lengths": GPTCase(lengths=(16, 8, 12), options=(("moe_token_dispatcher_type", "alltoall"),)),
}
NAMES = ("v-half", "zb-h1", "interleaved")
IN_EVERY_RUN = {("plain", "v-half"), ("experts", "v-half")}


def order(name: str, seed: int, p: int = 2, drop: float = 0.0, move: float = 0.6) -> Schedule:
    kept = schedules.build(name, pipeline_size=p, num_microbatches=5)
    found = with_states(kept, seed, drop, move)
    assert found.moved
    return found


@pytest.mark.parametrize(
    ("what", "name"),
    [
        pytest.param(what, name, marks=() if (what, name) in IN_EVERY_RUN else pytest.mark.full)
        for what in CASES
        for name in NAMES
    ],
)
def test_what_was_moved_comes_back_as_it_was(ranks: RankPools, what: str, name: str) -> None:
    found = ranks(2).run(
        differences,
        case=CASES[what],
        schedule=order(name, seed=len(what) + len(name)),
        num_microbatches=[5],
        iterations=2,
    )
    assert found == [[]] * 2
