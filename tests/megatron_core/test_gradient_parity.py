"""Every schedule of the catalog against Megatron's own 1F1B: losses and gradients, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import drawn_sizes
import pytest
from gpt_cases import GPTCase, differences
from model_options import RECOMPUTED
from ranks import RankPools

from megatron_zb import schedules
from megatron_zb.schedules.families import split_interleaved

FEW = ("v-half", "zb-h1", "interleaved", "1f1b")
"""One of each way to run: whole and split backwards, one chunk, a loop and a V."""
ON_FOUR = {"1f1b", "zb-h1", "v-half", "wave"}
"""What runs on four ranks; all schedules do on two."""


MODELS = {
    "2 ranks, tied": (2, True, "bfloat16"),
    "4 ranks": (4, False, "float32"),
    "2 ranks": (2, False, "float32"),
    "4 ranks, tied": (4, True, "bfloat16"),
}


def is_ordinary(model: str, name: str) -> bool:
    return model == "2 ranks, tied" or (model == "4 ranks" and name in ON_FOUR)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param(model, name, marks=() if is_ordinary(model, name) else pytest.mark.full)
        for model in MODELS
        for name in schedules.names()
    ],
)
def test_gradients_equal_megatrons(ranks: RankPools, model: str, name: str) -> None:
    world_size, tied, dtype = MODELS[model]
    even, odd = 3 * world_size, 2 * world_size + 1
    large = [even, odd, 3] if drawn_sizes.IS_FULL else [even] if world_size == 2 else [odd]
    microbatches = [1, *large]
    case = GPTCase(tied=tied, dtype=dtype)
    found = ranks(world_size).run(
        differences, case=case, schedule=name, num_microbatches=microbatches
    )
    assert found == [[]] * world_size


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "chunks"), drawn_sizes.every_value([2, 4], [4, 2]))
def test_a_loop_with_a_split_backward_equals_megatrons(
    ranks: RankPools, world_size: int, chunks: int
) -> None:
    """What `auto` may choose and no name stands for."""
    for schedule in split_interleaved(world_size, 2 * world_size, chunks):
        found = ranks(world_size).run(
            differences,
            case=GPTCase(tied=True),
            schedule=schedule,
            num_microbatches=[2 * world_size],
        )
        assert found == [[]] * world_size


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        pytest.param(p, name, marks=() if (p == 4) == (name in ON_FOUR) else pytest.mark.full)
        for p in (2, 4)
        for name in schedules.names()
    ],
)
def test_evaluation_equals_megatrons(ranks: RankPools, world_size: int, name: str) -> None:
    found = ranks(world_size).run(
        differences,
        case=GPTCase(tied=True),
        schedule=name,
        num_microbatches=[1, world_size + 1],
        forward_only=True,
    )
    assert found == [[]] * world_size


def few_or_full(variants: Iterable[str]) -> list[Any]:
    """All schedules for each variant: v-half and one of the others of `FEW` in every run."""
    return [
        pytest.param(
            variant,
            name,
            marks=() if name in (FEW[0], FEW[1 + i % 3]) else pytest.mark.full,
        )
        for i, variant in enumerate(variants)
        for name in schedules.names()
    ]


VARIANTS = {
    "per-token-loss": GPTCase(tied=True, per_token_loss=True),
    "no-ddp": GPTCase(wrapped=False),
    "fused": GPTCase(fused_accumulation=True, tied=True),
    "fused-bf16": GPTCase(fused_accumulation=True, dtype="bfloat16"),
    "swiglu-no-bias": GPTCase(options=(("gated_linear_unit", True), ("add_bias_linear", False))),
    "full-recompute": GPTCase(options=RECOMPUTED),
}


@pytest.mark.parametrize(("variant", "name"), few_or_full(VARIANTS))
def test_variants_equal_megatrons(ranks: RankPools, variant: str, name: str) -> None:
    found = ranks(2).run(
        differences, case=VARIANTS[variant], schedule=name, num_microbatches=[5], iterations=2
    )
    assert found == [[]] * 2


PARALLEL = {
    "tp2": GPTCase(tensor_parallel=2),
    "tp2-sequence-parallel": GPTCase(tensor_parallel=2, sequence_parallel=True),
    "dp2": GPTCase(data_parallel=2, tied=True),
    "dp2-overlap": GPTCase(data_parallel=2, overlap_grad_reduce=True),
    "dp2-overlap-fused": GPTCase(
        data_parallel=2, overlap_grad_reduce=True, fused_accumulation=True
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(("variant", "name"), few_or_full(PARALLEL))
def test_tensor_and_data_parallel_equal_megatrons(
    ranks: RankPools, variant: str, name: str
) -> None:
    found = ranks(4).run(differences, case=PARALLEL[variant], schedule=name, num_microbatches=[5])
    assert found == [[]] * 4
