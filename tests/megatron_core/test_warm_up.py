"""A warm-up before the first step: all stages at once, and no trace of it in the training."""

from __future__ import annotations

from contextlib import ExitStack, redirect_stdout
from io import StringIO
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gpt_cases import (
    GPTCase,
    built,
    forward_backward,
    gradients,
    microbatches,
    optimizer,
)
from joined_pairs import joined
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.core.utils import get_model_config
from model_options import EXPERTS
from ranks import RankPools
from recompute_offload import with_recompute_offload

from megatron_zb import schedules
from megatron_zb.megatron_core import versions, warm_up
from megatron_zb.megatron_core.data_iterators import Start
from megatron_zb.megatron_core.random_streams import RandomState
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.runtime.channels import Channels
from megatron_zb.runtime.executor import Execution
from megatron_zb.schedules import Schedule
from megatron_zb.schedules.passes import PassKind

M = 4


def trained(case: GPTCase, schedule: str | Schedule, count: int, *, warms: bool) -> list[Any]:
    """What is said of a warm-up, and all that a training of so many steps leaves."""
    with redirect_stdout(StringIO()) as said, built(case, schedule, M) as (adapter, chunks):
        assert adapter is not None
        if warms:
            adapter.warm_up(always=True)
        adam = optimizer(case, chunks) if case.optimizer_steps else None
        if adam is not None and case.dtype == "float16":
            get_model_config(chunks[0]).grad_scale_func = adam.scale_loss
        data = [microbatches(case, M * count) for _ in chunks]
        found: list[Any] = []
        for _ in range(count):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            records = forward_backward(adapter.forward_backward_func, chunks, data, M)
            found += [[float(record["lm loss"]) for record in records], dict(gradients(chunks))]
            if adam is not None:
                adam.step()
                found.append(float(adam.get_loss_scale()))
        found += [state_of(chunks), torch.get_rng_state()]
        found += [tracked for _, tracked in sorted(vars(RandomState())["_values"].items())]
    return [[line for line in said.getvalue().splitlines() if "warm-up" in line], found]


def state_of(chunks: list[Any]) -> dict[str, torch.Tensor]:
    """Weights and buffers."""
    return {
        f"{number}.{name}": value.detach().clone()
        for number, chunk in enumerate(chunks)
        for name, value in (*chunk.named_parameters(), *torch.nn.Module.named_buffers(chunk))
    }


def compared(case: GPTCase, schedule: str | Schedule, count: int) -> list[str]:
    """What is said, if nothing differs from a training without a warm-up."""
    said, warm = trained(case, schedule, count, warms=True)
    _, cold = trained(case, schedule, count, warms=False)
    for one, other in zip(warm, cold, strict=True):
        assert equal(one, other), (one, other)
    return said


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())


BIASED = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": ("seq_aux_loss", "global_aux_loss"),
    "moe_aux_loss_coeff": (0.02, 0.02),
}
EVERYTHING = GPTCase(
    dropout=0.1,
    dtype="float16",
    overlap_grad_reduce=True,
    options=tuple({**EXPERTS, **BIASED}.items()),
    changes=("new average", "counter", "history"),
    optimizer_steps=1,
)
CASES = {
    "everything": (EVERYTHING, "zb-h1"),
    "prediction": (GPTCase(multi_token=1, rotary=True), "v-zb"),
    "vocabulary": (GPTCase(vocabulary=True, tied=True), "v-half"),
}
MORE = {
    "interleaved": (EVERYTHING, "interleaved"),
    "V": (EVERYTHING, "v-half"),
    "vocabulary, predicted": (GPTCase(vocabulary=True, multi_token=2), "v-zb"),
    "tied": (GPTCase(tied=True), "v-zb"),
    "per token": (GPTCase(per_token_loss=True, dtype="bfloat16"), "zb-h1"),
    "hybrid": (GPTCase(hybrid="*-*-", layers=4), "zb-h1"),
}
ON_FOUR = {
    "distributed": GPTCase(
        data_parallel=2,
        overlap_grad_reduce=True,
        bucket_size=1000,
        distributed_optimizer=True,
        overlap_param_gather=True,
        align_param_gather=True,
        optimizer_steps=1,
    ),
    "experts": GPTCase(data_parallel=2, expert_parallel=2, options=tuple(EXPERTS.items())),
    "sequence": GPTCase(tensor_parallel=2, sequence_parallel=True, dropout=0.1),
}


def check(ranks: RankPools, case: GPTCase, schedule: str | Schedule, count: int) -> None:
    size = 2 * case.data_parallel * case.tensor_parallel
    said = ranks(size).run(compared, case=case, schedule=schedule, count=count)
    assert said[1:] == [[]] * (size - 1)
    assert len(said[0]) == 1
    assert "every stage has run its passes once" in said[0][0]


@pytest.mark.parametrize("name", CASES)
def test_a_training_is_the_same_with_a_warm_up(ranks: RankPools, name: str) -> None:
    check(ranks, *CASES[name], count=4)


@pytest.mark.full
@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_twenty_steps_are_the_same(ranks: RankPools, name: str) -> None:
    check(ranks, *(CASES | MORE)[name], count=20)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "distributed" else pytest.mark.full)
        for name in ON_FOUR
    ],
)
def test_parallel_ranks_train_the_same(ranks: RankPools, name: str) -> None:
    check(ranks, ON_FOUR[name], "v-half", count=3)


@pytest.mark.slow
def test_recomputed_and_offloaded_passes_warm_up(ranks: RankPools) -> None:
    kept = schedules.build("v-half", pipeline_size=2, num_microbatches=M)
    order = with_recompute_offload(kept, seed=1, recompute=0.4, offload=0.4)
    check(ranks, GPTCase(dropout=0.1), order, count=2)


@pytest.mark.full
def test_pairs_warm_up(ranks: RankPools) -> None:
    case = GPTCase(
        dtype="bfloat16",
        data_parallel=2,
        expert_parallel=2,
        layers=8,
        all_to_all_overlaps=True,
        options=tuple(EXPERTS.items()),
    )
    order = joined(schedules.build("v-half", pipeline_size=2, num_microbatches=M))
    assert order.pairs
    check(ranks, case, order, count=2)


# --- what happens when


def events(schedule: str, *, warms: bool) -> list[str]:
    """Passes of a rank, as 1F, its messages, and reductions, until the first message has come."""
    found: list[str] = []
    run_pass, take, send = Execution._run_pass, Channels.take, Channels.send

    def noted(self: Any, run: Any) -> None:
        found.append(f"{run.work.stage}{run.work.kind}")
        run_pass(self, run)

    def taken(self: Any, message: Any) -> Any:
        found.append("message")
        return take(self, message)

    def sent(self: Any, *arguments: Any) -> None:
        found.append("message")
        send(self, *arguments)

    def reduced(self: Any, *arguments: Any, **options: Any) -> None:
        found.append("reduction")

    case = GPTCase(overlap_grad_reduce=True)
    with ExitStack() as stack, built(case, schedule, M) as (adapter, chunks):
        assert adapter is not None
        if warms:
            adapter.warm_up(always=True)
        stack.enter_context(patch.object(Execution, "_run_pass", noted))
        stack.enter_context(patch.multiple(Channels, take=taken, send=sent))
        stack.enter_context(patch.object(_ParamAndGradBucketGroup, "start_grad_sync", reduced))
        stack.enter_context(patch.object(_ParamAndGradBucketGroup, "finish_grad_sync", reduced))
        data = [microbatches(case, M) for _ in chunks]
        forward_backward(adapter.forward_backward_func, chunks, data, M)
    return found[: found.index("message")]


@pytest.mark.parametrize("schedule", ["zb-h1", pytest.param("v-half", marks=pytest.mark.full)])
def test_all_stages_run_before_any_waits_for_another(ranks: RankPools, schedule: str) -> None:
    """So no rank can hold up another one's first passes, and nothing is reduced."""
    kinds = {PassKind.F, PassKind.B, PassKind.W, PassKind.BW}
    placement = schedules.build(schedule, pipeline_size=2, num_microbatches=M).placement
    warm, cold = (ranks(2).run(events, schedule=schedule, warms=on) for on in (True, False))
    for rank in range(2):
        logical = placement.pipeline_size - 1 - rank if placement.chunks > 1 else rank
        step = schedules.build(schedule, pipeline_size=2, num_microbatches=M).ranks[logical]
        every = {f"{p.stage}{p.kind}" for p in step if p.kind in kinds}
        assert set(warm[rank]) == every
        assert set(cold[rank]) < every


def peaks(schedule: str) -> tuple[int, int]:
    """The most bytes of this rank's activations in a warm-up and in the step after it."""
    case, found = GPTCase(), []
    with redirect_stdout(StringIO()), built(case, schedule, M) as (adapter, chunks):
        assert adapter is not None
        adapter.warm_up(always=True)
        memory = ActivationMemory(p for chunk in chunks for p in chunk.parameters())
        adapter.track(memory)
        run = warm_up.WarmUp._run

        def counted(self: Any, step: Any) -> None:
            run(self, step)
            assert memory.live_bytes == 0
            found.append(memory.peak_bytes)
            memory.peak_bytes = 0

        data = [microbatches(case, M) for _ in chunks]
        with memory.watching(), patch.object(warm_up.WarmUp, "_run", counted):
            forward_backward(adapter.forward_backward_func, chunks, data, M)
    return found[0], memory.peak_bytes


@pytest.mark.parametrize("schedule", ["v-half", pytest.param("zb-h1", marks=pytest.mark.full)])
def test_a_warm_up_holds_less_than_a_step(ranks: RankPools, schedule: str) -> None:
    for warm, step in ranks(2).run(peaks, schedule=schedule):
        assert 0 < warm < step


def said(case: GPTCase, *, always: bool, on_gpu: bool) -> list[str]:
    """What is said of the warm-up of an evaluation and two steps."""
    out = StringIO()
    with redirect_stdout(out), built(case, "v-half", M) as (adapter, chunks):
        assert adapter is not None
        adapter.warm_up(always=always)
        with patch.object(warm_up, "on_gpu", lambda: on_gpu):
            for forward_only in (True, False, False):
                data = [microbatches(case, M) for _ in chunks]
                function = adapter.forward_backward_func
                forward_backward(function, chunks, data, M, forward_only=forward_only)
    return [line for line in out.getvalue().splitlines() if "warm-up" in line]


RUN = "every stage has run its passes once"


@pytest.mark.parametrize(
    ("case", "always", "on_gpu", "expected"),
    [
        (GPTCase(), False, True, RUN),
        (GPTCase(), False, False, None),
        (
            GPTCase(lengths=(8, 16), options=(("moe_token_dispatcher_type", "alltoall"),)),
            True,
            False,
            "only the sender of a message knows its shape",
        ),
        (
            GPTCase(slices="2"),
            False,
            True,
            "is_sliced: the slices of a microbatch keep state for one another",
        ),
    ],
    ids=["GPU", "CPU", "lengths", "slices"],
)
def test_where_there_is_a_warm_up(
    ranks: RankPools, case: GPTCase, always: bool, on_gpu: bool, expected: str | None
) -> None:
    lines, other = ranks(2).run(said, case=case, always=always, on_gpu=on_gpu)
    assert other == []
    assert len(lines) == (expected is not None)
    assert all(expected is not None and expected in line for line in lines)


# --- what is put back


def read_twice() -> list[int]:
    """What two chunks that share an iterator read, again from the start."""
    numbers = iter(range(10))
    start = Start([numbers, None, numbers])
    first, none, last = start.data_iterators
    assert none is None and first is not None and last is not None
    assert [next(first), next(last)] == [0, 1]
    start.go_back()
    return [next(first), next(first), next(last), next(first)]


def test_chunks_that_share_an_iterator_read_the_same_again(ranks: RankPools) -> None:
    assert ranks(2).run(read_twice) == [[0, 1, 2, 3]] * 2


def rejections() -> list[str]:
    """What Megatron says of a loss that is no number, undone and not."""
    machine, loss = RerunStateMachine(), torch.tensor(float("nan"))

    def validate() -> None:
        machine.validate_result(loss, rejection_func=torch.isnan, message="no loss")

    with versions.no_results_validated():
        validate()
    try:
        validate()
    except RuntimeError as error:
        return [str(error)]
    return []


def test_what_is_undone_is_not_validated(ranks: RankPools) -> None:
    for found in ranks(2).run(rejections):
        assert len(found) == 1
        assert "message='no loss'" in found[0]
