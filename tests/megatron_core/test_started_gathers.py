"""Gathers of weights that nobody waits for, against Megatron's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpt_cases import GPTCase, built
from model_options import EXPERTS, options
from ranks import RankPools

from megatron_zb.megatron_core.data_parallel import bucket_groups_of
from megatron_zb.megatron_core.started_gathers import StartedGathers

CASE = GPTCase(layers=4, data_parallel=2, distributed_optimizer=True)
CASES = {
    "plain": CASE,
    "bf16": replace(CASE, dtype="bfloat16"),
    "experts": replace(CASE, expert_parallel=2, options=options(**EXPERTS)),
}


def gathered(case: GPTCase) -> int:
    """The number of gathers behind two steps of what would each gather all weights."""
    with built(case, None, 2) as (_, chunks):
        (chunk,) = chunks
        draw = torch.Generator().manual_seed(torch.distributed.get_rank())

        def step() -> None:
            for parameter, of in zip(chunk.parameters(), own, strict=True):
                parameter.data.copy_(of)
            chunk.start_param_sync()

        own = [torch.randn(it.shape, generator=draw).to(it.dtype) for it in chunk.parameters()]
        step()
        expected = [it.detach().clone() for it in chunk.parameters()]
        assert any(not torch.equal(a, b) for a, b in zip(own, expected, strict=True))

        gathers = StartedGathers()
        with gathers.behind(chunks):
            step()
            assert all(map(torch.equal, own, chunk.parameters())), "a step of another one follows"
            step()
        begun = len(gathers._handles)
        gathers.wait()
        assert all(map(torch.equal, expected, chunk.parameters()))
        assert not chunk.ddp_config.overlap_param_gather
        assert all(it.param_gather_handle is None for it in bucket_groups_of(chunk))
        step()
        assert all(map(torch.equal, expected, chunk.parameters())), "Megatron's own again"
        assert begun == len(bucket_groups_of(chunk))
        return begun


@pytest.mark.parametrize("name", CASES)
def test_weights_are_gathered_as_megatron_gathers_them(ranks: RankPools, name: str) -> None:
    assert all(ranks(4).run(gathered, case=CASES[name]))
