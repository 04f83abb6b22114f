"""A warm-up before the first step: all stages at once, and no trace of it in the training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
import torch
from gpt_cases import GPTCase, built, forward_backward, gradients, microbatches, optimizer
from joined import EXPERTS as PAIRED
from joined import joined
from ranks import RankPools
from recompute_offload import with_recompute_offload

from megatron_zb import schedules
from megatron_zb.megatron_core.random_streams import RandomState
from megatron_zb.schedules import Schedule

M = 4
OPTIMIZER = {"optimizer_steps": 1}  # an optimizer is built


def trained(case: GPTCase, schedule: str | Schedule, count: int, *, warms: bool) -> list[Any]:
    """What is said of the warm-up, and all that a training of so many steps leaves."""
    said = StringIO()
    done = 0
    streams = None if case.dropout else lambda: done
    with redirect_stdout(said), built(case, schedule, M, streams) as (adapter, chunks):
        assert adapter is not None
        if warms:
            adapter.warm_up(always=True)
        adam = optimizer(case, chunks) if case.optimizer_steps else None
        data = [microbatches(case, M * count) for _ in chunks]
        found: list[Any] = []
        for done in range(count):  # noqa: B007
            for chunk in chunks:
                chunk.zero_grad_buffer()
            records = forward_backward(adapter.forward_backward_func, chunks, data, M)
            found.append([float(record["lm loss"]) for record in records])
            if adam is not None:
                adam.step()
        found += [dict(gradients(chunks)), state_of(chunks), vars(RandomState())["_host"]]
    lines = [line for line in said.getvalue().splitlines() if "warm-up" in line]
    return [lines, found]


def state_of(chunks: list[Any]) -> dict[str, torch.Tensor]:
    """Weights and buffers."""
    return {
        f"{number}.{name}": value.detach().clone()
        for number, chunk in enumerate(chunks)
        for name, value in (*chunk.named_parameters(), *torch.nn.Module.named_buffers(chunk))
    }


def compared(case: GPTCase, schedule: str | Schedule, count: int) -> list[str]:
    """What is said, and where a training differs from one without a warm-up."""
    said, warm = trained(case, schedule, count, warms=True)
    _, cold = trained(case, schedule, count, warms=False)
    for one, other in zip(warm, cold, strict=True):
        assert equal(one, other), (one, other)
    return said


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def moe(**options: Any) -> tuple[tuple[str, Any], ...]:
    return tuple({**PAIRED, **options}.items())


BIASED = moe(
    moe_router_enable_expert_bias=True,
    moe_router_score_function="sigmoid",
    moe_router_load_balancing_type="seq_aux_loss",
)
CASES: dict[str, tuple[GPTCase, str]] = {
    "dropout": (GPTCase(dropout=0.1, **OPTIMIZER), "zb-h1"),
    "expert bias": (GPTCase(options=BIASED, **OPTIMIZER), "v-half"),
    "global aux loss": (
        GPTCase(options=moe(moe_router_load_balancing_type="global_aux_loss"), **OPTIMIZER),
        "zb-h1",
    ),
    "prediction": (GPTCase(multi_token=1, rotary=True, **OPTIMIZER), "v-zb"),
    "vocabulary": (GPTCase(vocabulary=True, tied=True, **OPTIMIZER), "v-half"),
    "users": (GPTCase(changes=("new average", "counter", "history")), "interleaved"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_training_is_the_same_with_a_warm_up(ranks: RankPools, name: str) -> None:
    case, schedule = CASES[name]
    said = ranks(2).run(compared, case=case, schedule=schedule, count=20)
    assert said[1:] == [[]]
    assert len(said[0]) == 1
    assert "every stage has run its passes once" in said[0][0]
