"""A model with vocabulary parallelism, or on slices, is as near to float64 as Megatron's own.

The reference has the layers of Megatron, with the same weights, in 64 bits, on as many ranks, and a
loss of torch's. Which of two sums in another order is nearer to it is chance, so that errors are
added up over several samples; a bias of 32 numbers would say little by one.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import gpt_cases
import pytest
import torch
from brief_searches import briefly
from gpt_cases import GPTCase, Outcome
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from model_options import EXPERTS
from ranks import RankPools
from vocabulary_parallel_outcomes import gathered

M, SAMPLES = 4, 16
MOST = 1.2
FULL = pytest.mark.full
USUAL = [(2, 1, True, "float32")]
SIZES = [
    pytest.param(*sizes, marks=() if sizes in USUAL else FULL)
    for sizes in product((2, 4), (1, 2), (False, True), ("float32", "bfloat16", "float16"))
]


def outcomes(case: GPTCase, schedule: str | None) -> list[Outcome]:
    """Losses and gradients of each sample, of all pipeline ranks."""
    MTPLossLoggingHelper.tracker.clear()  # of another number of layers
    found = []
    with briefly(), gpt_cases.built(case, schedule, M) as (adapter, chunks):
        function = adapter.forward_backward_func if adapter else get_forward_backward_func()
        if adapter is not None and case.all_to_all_overlaps:
            assert adapter.schedule.pairs
        for sample in range(SAMPLES):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            data = [gpt_cases.microbatches(case, M, sample * M) for _ in chunks]
            records = gpt_cases.forward_backward(function, chunks, data, M)
            losses = [float(record["lm loss"]) for record in records]
            mine = Outcome(losses, dict(gpt_cases.gradients(chunks)))
            found.append(gathered(mine, schedule if case.vocabulary else None))
    return found


def in_upstreams_distance(case: GPTCase, schedule: str, slices: str = "") -> dict[str, float]:
    """How far the losses, and each gradient, are from float64's, in upstream's own distance."""
    upstream = outcomes(case, None)
    own = replace(case, slices=slices) if slices else replace(case, vocabulary=True)
    ours = outcomes(own, schedule)
    exact = outcomes(replace(case, exact=True), None)
    names = exact[0].gradients.keys()
    assert ours[0].gradients.keys() == upstream[0].gradients.keys() == names
    found = {}
    for name in names:
        of = [[one.gradients[name] for one in samples] for samples in (ours, upstream, exact)]
        found[name] = distance(of[0], of[2]) / distance(of[1], of[2])
    of = [[torch.tensor(one.losses).double() for one in samples] for samples in (ours, upstream)]
    losses = [torch.tensor(one.losses, dtype=torch.float64) for one in exact]
    return found | {"losses": distance(of[0], losses) / distance(of[1], losses)}


def distance(some: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    assert all(one.dtype is torch.float64 for one in exact)
    pairs = zip(some, exact, strict=True)
    return sum((a.double() - b).square().sum().item() for a, b in pairs) ** 0.5


@pytest.mark.parametrize(
    ("schedule", "tied", "dtype", "depths"),
    [
        pytest.param(*of, marks=FULL)
        for of in product(("v-half", "zb-h1"), (True, False), ("float32", "bfloat16"), (1, 2))
    ],
)
def test_so_are_they_with_multi_token_prediction(
    ranks: RankPools, schedule: str, tied: bool, dtype: str, depths: int
) -> None:
    case = GPTCase(tied=tied, dtype=dtype, multi_token=depths, rotary=True)
    for found in ranks(2).run(in_upstreams_distance, case=case, schedule=schedule):
        assert {name: ratio for name, ratio in found.items() if not ratio <= MOST} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("p", "tensor", "tied", "dtype"), SIZES)
def test_losses_and_gradients_are_as_near_to_float64_as_upstreams(
    ranks: RankPools, p: int, tensor: int, tied: bool, dtype: str
) -> None:
    case = GPTCase(tied=tied, dtype=dtype, tensor_parallel=tensor)
    for found in ranks(p * tensor).run(in_upstreams_distance, case=case, schedule="zb-h1"):
        assert {name: ratio for name, ratio in found.items() if not ratio <= MOST} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "tied", "dtype"),
    [
        pytest.param(*of, marks=() if of == ("v-zb", False, "bfloat16") else FULL)
        for of in product(("v-half", "v-zb", "interleaved"), (True, False), ("bfloat16", "float16"))
    ],
)
def test_so_are_they_where_a_forward_and_a_backward_run_in_one_pass(
    ranks: RankPools, schedule: str, tied: bool, dtype: str
) -> None:
    case = GPTCase(
        tied=tied,
        dtype=dtype,
        data_parallel=2,
        expert_parallel=2,
        all_to_all_overlaps=True,
        options=tuple(EXPERTS.items()),
    )
    for found in ranks(4).run(in_upstreams_distance, case=case, schedule=schedule):
        assert {name: ratio for name, ratio in found.items() if not ratio <= MOST} == {}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=FULL)])
@pytest.mark.parametrize(
    "slices", ["2", pytest.param("4", marks=FULL), pytest.param("8", marks=FULL)]
)
def test_so_are_they_on_token_slices(ranks: RankPools, slices: str, dtype: str) -> None:
    case = GPTCase(layers=4, dtype=dtype, rotary=True, options=(("num_query_groups", 2),))
    for found in ranks(2).run(in_upstreams_distance, case=case, schedule="zb-h1", slices=slices):
        assert {name: ratio for name, ratio in found.items() if not ratio <= MOST} == {}


DENSE_ROUTING: dict[str, Any] = {  # all experts take all tokens, so that rounding moves none
    "num_moe_experts": 4,
    "moe_router_topk": 4,
    "moe_aux_loss_coeff": 0.02,
    "moe_z_loss_coeff": 0.01,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "more"),
    [
        ("float32", {"options": tuple(DENSE_ROUTING.items())}),
        pytest.param("bfloat16", {"options": tuple(DENSE_ROUTING.items())}, marks=FULL),
        pytest.param("float32", {"documents": "ends"}, marks=FULL),
    ],
)
def test_so_are_experts_and_documents_on_slices(
    ranks: RankPools, dtype: str, more: dict[str, Any]
) -> None:
    case = GPTCase(layers=4, dtype=dtype, **more)
    for found in ranks(2).run(in_upstreams_distance, case=case, schedule="zb-h1", slices="4"):
        assert {name: ratio for name, ratio in found.items() if not ratio <= MOST} == {}
