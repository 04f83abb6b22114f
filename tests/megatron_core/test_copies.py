"""Two copies of every stage train as one model does: gradients are the sums of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from both_ways import both_ways
from brief_searches import briefly
from checkpoint_jobs import Job
from found_on_ranks import whole
from gpt_cases import GPTCase, built, forward_backward, gradients, microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func
from ranks import RankPools

from megatron_zb.schedules.schedule import Schedule

M = 8
BASE = GPTCase(tied=False, layers=8)


def gradients_of(
    case: GPTCase, schedule: Schedule | None, units: list[int]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and gradients of some of the microbatches, under a schedule or Megatron's own."""
    with built(case, schedule, len(units)) as (adapter, chunks):
        function = adapter.forward_backward_func if adapter else get_forward_backward_func()
        data = [
            iter([b for i, b in enumerate(microbatches(case, M)) if i in units]) for _ in chunks
        ]
        records = forward_backward(function, chunks, data, len(units))
        return [float(it["lm loss"]) for it in records], dict(gradients(chunks))


EXPERTS = (
    ("num_moe_experts", 4),
    ("moe_router_topk", 2),
    ("moe_ffn_hidden_size", 32),
    ("moe_aux_loss_coeff", 0.5),
    ("add_bias_linear", False),
)
CASES = {
    "chimera": (4, 1, BASE),
    "bitpipe": (4, 2, BASE),
    "experts": (2, 2, replace(BASE, options=EXPERTS)),
    "replicas": (2, 1, replace(BASE, data_parallel=2)),
    "three": (3, 1, replace(BASE, layers=6)),
    "unwrapped": (3, 2, replace(BASE, layers=6, wrapped=False)),
}


@pytest.mark.long
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_sums_of_those_of_both_directions(
    ranks: RankPools, name: str, split: bool
) -> None:
    p, chunks, case = CASES[name]
    pool = ranks(p * case.data_parallel)
    schedule = both_ways(p, M, chunks, split=split)
    losses, ours = whole(pool.run(gradients_of, case=case, schedule=schedule, units=[*range(M)]))
    (there, first), (back, second) = (
        whole(pool.run(gradients_of, case=case, schedule=None, units=[*range(way, M, 2)]))
        for way in (0, 1)
    )
    for ours_of, there_of, back_of in zip(losses, there, back, strict=True):
        assert ours_of == [x for pair in zip(there_of, back_of, strict=True) for x in pair]
    assert ours.keys() == first.keys() == second.keys()
    for key, value in ours.items():
        # each direction's mean is over half of the microbatches
        expected = (first[key] + second[key]) / 2
        if case.data_parallel > 1:  # which adds up the replicas of a direction first
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-8, msg=key)
        else:
            assert torch.equal(value, expected), key


def losses_after_checkpoints(
    case: GPTCase, schedules: list[Schedule | str | None], folder: Path
) -> list[list[float]]:
    """Losses of two steps after a checkpoint of the first schedule, loaded under each."""
    found = []
    for number, schedule in enumerate([schedules[0], *schedules]):
        with briefly(), built(case, schedule, 4) as (adapter, chunks):
            job = Job(case, adapter, chunks)
            if number:
                job.load(folder)
            else:
                job.train(2)
                job.save(folder)
            found.append(job.train(1) + job.train(1))
    return found


@pytest.mark.parametrize(
    ("p", "chunks", "more"),
    [
        (4, 1, {}),
        (4, 2, {}),
        (2, 1, {"data_parallel": 2}),
        (2, 2, {"data_parallel": 2, "distributed_optimizer": True}),
    ],
)
def test_a_checkpoint_is_that_of_one_model(
    ranks: RankPools, tmp_path: Path, p: int, chunks: int, more: dict[str, Any]
) -> None:
    case = replace(BASE, **more)
    schedules = [both_ways(p, 4, chunks), None, "v-half"]
    for found in ranks(4).run(
        losses_after_checkpoints, case=case, schedules=schedules, folder=tmp_path
    ):
        on, resumed, *others = found
        assert resumed == on
        for other in others:
            assert other == pytest.approx(on, rel=1e-5)
