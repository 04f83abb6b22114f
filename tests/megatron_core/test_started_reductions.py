"""Reductions that run on copies, against Megatron's own on the buffers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpt_cases import GPTCase, built
from model_options import EXPERTS, options
from ranks import RankPools

from megatron_zb.megatron_core.data_parallel import gradients_of
from megatron_zb.megatron_core.started_reductions import StartedReductions

CASE = GPTCase(layers=4, data_parallel=2)
CASES = {
    "plain": CASE,
    "bf16": replace(CASE, dtype="bfloat16"),
    "distributed-optimizer": replace(CASE, distributed_optimizer=True),
    "experts": replace(CASE, expert_parallel=2, options=options(**EXPERTS)),
}


def own_gradients(chunk: Any) -> list[torch.Tensor]:
    """Other ones on every rank, as those of other microbatches are."""
    draw = torch.Generator().manual_seed(torch.distributed.get_rank())
    return [torch.randn(it.shape, generator=draw).to(it.dtype) for it in gradients_of(chunk)]


def fill(chunk: Any, gradients: list[torch.Tensor]) -> None:
    for buffer, gradient in zip(gradients_of(chunk), gradients, strict=True):
        buffer.copy_(gradient)


def reduced(case: GPTCase) -> None:
    """Copies are reduced while the buffers change, and the buffers keep what is in them."""
    with built(case, None, 2) as (_, chunks):
        (chunk,) = chunks
        gradients = own_gradients(chunk)
        fill(chunk, gradients)
        chunk.finish_grad_sync()
        expected = [it.clone() for it in gradients_of(chunk)]

        later = [2 * it for it in gradients]
        fill(chunk, later)
        views = [bucket.grad_data for group in chunk.bucket_groups for bucket in group.buckets]
        copies = [it.clone() for it in gradients]
        reductions = StartedReductions(chunks, {0: copies})
        assert not chunk.ddp_config.overlap_grad_reduce
        for buffer in gradients_of(chunk):
            buffer.add_(1.0)
        reductions.wait()

        assert any(not torch.equal(a, b) for a, b in zip(expected, gradients, strict=True))
        for copy, whole in zip(copies, expected, strict=True):
            assert torch.equal(copy, whole)
        for buffer, own in zip(gradients_of(chunk), later, strict=True):
            assert torch.equal(buffer, own + 1.0)
        groups = chunk.bucket_groups
        now = [bucket.grad_data for group in groups for bucket in group.buckets]
        assert all(a is b for a, b in zip(views, now, strict=True))

        with reductions.not_again():
            chunk.finish_grad_sync()
        for buffer, own in zip(gradients_of(chunk), later, strict=True):
            assert torch.equal(buffer, own + 1.0)
        fill(chunk, gradients)
        chunk.finish_grad_sync()
        for buffer, whole in zip(gradients_of(chunk), expected, strict=True):
            assert torch.equal(buffer, whole)


@pytest.mark.parametrize("name", CASES)
def test_copies_are_reduced_as_megatron_reduces_the_buffers(ranks: RankPools, name: str) -> None:
    ranks(4).run(reduced, case=CASES[name])


def left_to_megatron(case: GPTCase) -> list[int]:
    """The number of reductions that begin where gradients lie elsewhere than in the buffers."""
    with built(case, None, 2) as (_, chunks):
        (chunk,) = chunks
        found = []
        for elsewhere in ((), (next(chunk.parameters()),)):
            chunk.bucket_groups[0].buckets[0].params_with_extra_main_grads = elsewhere
            reductions = StartedReductions(chunks, {0: [it.clone() for it in gradients_of(chunk)]})
            found.append(len(reductions._handles))
            reductions.wait()
        return found


def test_gradients_that_lie_elsewhere_are_left_to_megatron(ranks: RankPools) -> None:
    for begun, none in ranks(4).run(left_to_megatron, case=CASE):
        assert begun > 0 and none == 0
