"""Two copies of every stage train as one model does: gradients are the sums of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from brief_searches import briefly
from checkpoint_jobs import Job
from found_on_ranks import whole
from gpt_cases import (
    GPTCase,
    _zero_gradients,
    as_hybrid,
    built,
    forward_backward,
    gradients,
    microbatches,
    skip_without_hybrids,
)
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from model_options import LAYERS_OF_EXPERTS, WHOLE_LAYERS
from ranks import RankPools

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.random_streams import global_parameters
from megatron_zb.schedules import interchange
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.step_plan import Lengths

M = 8
BASE = GPTCase(tied=False, layers=8)


def gradients_of(
    case: GPTCase, schedule: Schedule | None, units: list[int], *, warms_up: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and gradients of some of the microbatches, under a schedule or Megatron's own."""
    with built(case, schedule, len(units)) as (adapter, chunks):
        if adapter and warms_up:
            adapter.warm_up(always=True)
        function = adapter.forward_backward_func if adapter else get_forward_backward_func()
        data = [
            iter([b for i, b in enumerate(microbatches(case, M)) if i in units]) for _ in chunks
        ]
        records = forward_backward(function, chunks, data, len(units))
        shard = parallel_state.get_tensor_model_parallel_rank()
        found = {f"{name}, shard {shard}": it for name, it in gradients(chunks)}
        return [float(it["lm loss"]) for it in records], found


CASES = {
    "chimera": ("chimera", 4, BASE),
    "bitpipe": ("bitpipe", 4, BASE),
    "experts": ("bitpipe", 2, replace(BASE, options=LAYERS_OF_EXPERTS)),
    "replicas": ("chimera", 2, replace(BASE, data_parallel=2)),
    "unwrapped": ("bitpipe", 2, replace(BASE, wrapped=False)),
    "bf16": ("chimera", 2, replace(BASE, dtype="bfloat16")),
    "tensors": ("bitpipe", 2, replace(BASE, tensor_parallel=2, sequence_parallel=True)),
    "context": ("chimera", 2, replace(BASE, context_parallel=2)),
    "recomputed layers": ("bitpipe", 2, replace(BASE, options=WHOLE_LAYERS)),
    "lengths": ("bitpipe", 2, replace(BASE, lengths=(16, 8, 12))),
    "loss scale": ("chimera", 2, replace(BASE, dtype="float16", grad_scale=1024.0)),
    "images": ("chimera", 2, replace(BASE, images=(1, 0, 2))),
    "hybrid": ("bitpipe", 2, as_hybrid(replace(BASE, layers=4))),
}

ROUNDING = {"replicas": 1e-6, "tensors": 1e-6, "context": 1e-6, "loss scale": 1e-3}
"""Where ranks of a direction are added up first, and where half of a number may be rounded."""


def both_ways(name: str, p: int, m: int) -> Schedule:
    with briefly():
        return schedules.build(name, pipeline_size=p, num_microbatches=m)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_sums_of_those_of_both_directions(ranks: RankPools, name: str) -> None:
    schedule_name, p, case = CASES[name]
    skip_without_hybrids(case)
    pool = ranks(p * case.data_parallel * case.tensor_parallel * case.context_parallel)
    schedule = both_ways(schedule_name, p, M)
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
        if rounding := ROUNDING.get(name):
            assert (value - expected).norm() <= rounding * expected.norm(), key
        else:
            assert torch.equal(value, expected), key


@pytest.mark.long
def test_a_warm_up_and_a_table_change_nothing(ranks: RankPools) -> None:
    schedule = both_ways("bitpipe", 2, M)
    expected = whole(ranks(2).run(gradients_of, case=BASE, schedule=schedule, units=[*range(M)]))
    table = interchange.from_csv(interchange.to_csv(schedule))
    assert table.placement == schedule.placement
    for other, warms_up in ((schedule, True), (table, False)):
        losses, ours = whole(
            ranks(2).run(
                gradients_of, case=BASE, schedule=other, units=[*range(M)], warms_up=warms_up
            )
        )
        assert losses == expected[0]
        assert all(torch.equal(value, ours[name]) for name, value in expected[1].items())


def losses_after_checkpoints(
    case: GPTCase, schedules: list[Schedule | str | None], folder: Path
) -> list[list[float]]:
    """Losses of two steps after a checkpoint of the first schedule, loaded under each."""
    found = []
    for number, schedule in enumerate([schedules[0], *schedules]):
        with briefly(), built(case, schedule, 4) as (adapter, chunks):
            found.append(Job(case, adapter, chunks).losses(folder, begins=not number))
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("p", "name", "more"),
    [
        (4, "bitpipe", {}),
        (2, "chimera", {"data_parallel": 2}),
        (2, "bitpipe", {"data_parallel": 2, "distributed_optimizer": True}),
    ],
)
def test_a_checkpoint_is_that_of_one_model(
    ranks: RankPools, tmp_path: Path, p: int, name: str, more: dict[str, Any]
) -> None:
    case = replace(BASE, **more)
    schedules = [both_ways(name, p, 4), None, "v-half"]
    for found in ranks(4).run(
        losses_after_checkpoints, case=case, schedules=schedules, folder=tmp_path
    ):
        on, resumed, *others = found
        assert resumed == on
        for other in others:
            assert other == pytest.approx(on, rel=1e-5)


def evaluated(case: GPTCase, adapter: Any, chunks: list[Any]) -> list[float]:
    """Losses of an evaluation, after which the next step goes on."""
    data = [microbatches(case, 4, 100) for _ in chunks]
    for chunk in chunks:
        chunk.eval()
    records = forward_backward(adapter.forward_backward_func, chunks, data, 4, forward_only=True)
    for chunk in chunks:
        chunk.train()
    return [float(it["lm loss"]) for it in records]


def clipped_steps(case: GPTCase, schedule: Schedule | str) -> tuple[list[Any], dict[str, Any]]:
    """Losses and norms of steps that are clipped, read from one iterator, and the weights."""
    config = OptimizerConfig(optimizer="adam", lr=0.01, clip_grad=0.1)
    with briefly(), built(case, schedule, 5, lambda: 0) as (adapter, chunks):
        assert adapter is not None
        adam = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
        data = [microbatches(case, 15) for _ in chunks]
        found: list[Any] = []
        for _ in range(3):
            _zero_gradients(chunks)
            records = forward_backward(adapter.forward_backward_func, chunks, data, 5)
            _, norm, _ = adam.step()
            losses = [float(it["lm loss"]) for it in records]
            found.append((losses, norm, evaluated(case, adapter, chunks)))
        weights = {k: w.detach() for it in chunks for k, w in global_parameters(it).items()}
        is_end = bool(found[-1][0])
        return found if is_end else [], weights


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [replace(BASE, dropout=0.1), replace(BASE, per_token_loss=True)],
    ids=["dropout", "tokens"],
)
@pytest.mark.parametrize("name", ["chimera", "bitpipe"])
def test_steps_are_those_of_one_model(ranks: RankPools, case: GPTCase, name: str) -> None:
    """Each weight counts once in a norm; the next step reads on; an odd microbatch has no twin."""
    (ours,), weights = whole(ranks(2).run(clipped_steps, case=case, schedule=both_ways(name, 2, 5)))
    (theirs,), expected = whole(ranks(2).run(clipped_steps, case=case, schedule="1f1b"))
    assert len(ours) == 3
    for (losses, norm, later), (their_losses, their_norm, their_later) in zip(
        ours, theirs, strict=True
    ):
        assert losses == pytest.approx(their_losses, rel=1e-5)
        assert norm == pytest.approx(their_norm, rel=1e-5)
        assert norm > 0.1
        assert len(later) == 4
        assert later == pytest.approx(their_later, rel=1e-5)
    assert ours[0][0] == theirs[0][0]
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5, msg=name)


def said_of(case: GPTCase, schedule: Schedule, change: str) -> str:
    """What is said of two copies that differ, or of a step that was planned."""
    with pytest.raises(UsageError) as error, built(case, schedule, M) as (pipeline, chunks):
        assert pipeline is not None
        if change == "weights" and torch.distributed.get_rank() == 1:
            next(chunks[0].parameters()).data[0] += 1.0
        if change == "lengths":
            pipeline.planned.plan(
                Lengths.of([*range(1, M + 1)]), keeps_order=True, forward_only=False
            )
        data = [microbatches(case, M) for _ in chunks]
        forward_backward(pipeline.forward_backward_func, chunks, data, M)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("weights", "the two copies of stage 0 of the model begin with other weights: load"),
        ("overlap", "chimera: overlap_grad_reduce reduces gradients before those of both copies"),
        ("lengths", "chimera: steps of two copies are not planned for unequal microbatches"),
    ],
    ids=["weights", "overlap", "lengths"],
)
def test_what_two_copies_cannot_have_is_refused(ranks: RankPools, change: str, said: str) -> None:
    schedule = both_ways("chimera", 2, M)
    case = replace(BASE, overlap_grad_reduce=change == "overlap")
    for found in ranks(2).run(said_of, case=case, schedule=schedule, change=change):
        assert found.startswith(said)
