"""LoRA trainings of Megatron-Bridge's model in one pipeline: each is as Bridge trains it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from installed_trainers import missing_trainers
from rank_process import Kind
from ranks import RankPool, RankPools

from megatron_zb.bridge import Settings, install

MISSING = missing_trainers()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

STEPS, CLIP = 3, 1e3  # no gradient is clipped, as norms differ in a bit
MICROBATCHES = {"french": 4, "german": 2, "dutch": 3}
Found = dict[str, tuple[list[Any], dict[str, torch.Tensor]]]
"""Of each training, what its steps have reported, and its weights at the end."""


@pytest.fixture(scope="module")
def two(ranks: RankPools) -> RankPool:
    return ranks(2, Kind.TRAINERS)


def batches(name: str) -> Any:
    from megatron_bridge_trainer import rising_batches

    return rising_batches(seed=ord(name[0]))


def by_bridge(schedule: str, name: str) -> Found:
    """One training by Bridge's own step under the schedule."""
    from megatron.core.utils import unwrap_model
    from megatron_bridge_trainer import BridgeJob, new_provider

    from megatron_zb.megatron_core.random_streams import global_parameters

    provider = new_provider(pipeline_size=dist.get_world_size())
    settings = Settings(pipeline_schedule=schedule, num_microbatches=MICROBATCHES[name])
    with install(settings, provider) as pipeline:
        pipeline.prepare_provider(provider)
        job = BridgeJob(provider, adapted=True, clip_grad=CLIP, batches=partial(batches, name))
        job.set_microbatches(MICROBATCHES[name])
        steps: list[Any] = [job.train_one_step() for _ in range(STEPS)]
        weights = {
            key: weight.detach().clone()
            for chunk in unwrap_model(job.model)
            for key, weight in global_parameters(chunk).items()
            if weight.requires_grad
        }
    return {name: (steps, weights)}


def shared(schedule: str, *, ends_first: str = "") -> Found:
    """All trainings in one pipeline; one may end after its second step."""
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.utils import unwrap_model
    from megatron_bridge_trainer import LENGTH, BridgeJob, new_provider

    from megatron_zb.bridge.shared import SharedTraining, SharedTrainings

    provider = new_provider(pipeline_size=dist.get_world_size())
    settings = Settings(pipeline_schedule=schedule, num_microbatches=4)
    with install(settings, provider) as pipeline:
        pipeline.prepare_provider(provider)
        job = BridgeJob(provider, adapted=True, clip_grad=CLIP)
        chunks = unwrap_model(job.model)
        optimizer = partial(get_megatron_optimizer, job.optimizer_config)
        trainings = {
            name: SharedTraining(count, optimizer, [batches(name) for _ in chunks])
            for name, count in MICROBATCHES.items()
        }
        both = SharedTrainings(pipeline, chunks, trainings)
        found: Found = {name: ([], {}) for name in trainings}
        for step in range(STEPS):
            if step == 2 and ends_first:
                both.go_on_with([name for name in trainings if name != ends_first])
            sizes = {"seq_length": LENGTH, "micro_batch_size": 1}
            for name, done in both.step(job.forward_step, **sizes).items():
                assert done.is_done
                found[name][0].append((_mean(done.losses), done.norm))
        for name in trainings:
            found[name][1].update(
                {key: weight.detach().clone() for key, weight in both.weights(name).items()}
            )
    return found


def _mean(losses: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """The mean over tokens, as Bridge reports it."""
    if not losses:
        return {}
    pairs = torch.stack([of["lm loss"].float() for of in losses]).sum(dim=0)
    return {"lm loss": float(pairs[0] / pairs[1])}


@pytest.mark.parametrize("schedule", ["1f1b", "v-zb"])
def test_each_training_is_as_bridge_trains_it(two: RankPool, schedule: str) -> None:
    ours = two.run(shared, schedule=schedule)
    for name in MICROBATCHES:
        theirs = two.run(by_bridge, schedule=schedule, name=name)
        for of_rank, expected in zip(ours, theirs, strict=True):
            check_same(of_rank[name], expected[name])


def test_others_go_on_when_one_has_ended(two: RankPool) -> None:
    ours = two.run(shared, schedule="v-half", ends_first="german")
    all_on = two.run(shared, schedule="v-half")
    for of_rank, expected in zip(ours, all_on, strict=True):
        for name in ("french", "dutch"):
            check_same(of_rank[name], expected[name])
        assert of_rank["german"][0] == expected["german"][0][:2]


def check_same(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> None:
    assert [losses for losses, _ in ours[0]] == [losses for losses, _ in theirs[0]]
    assert [norm for _, norm in ours[0]] == pytest.approx([norm for _, norm in theirs[0]], rel=1e-6)
    assert len(ours[0]) == STEPS
    assert ours[1].keys() == theirs[1].keys()
    assert ours[1]
    for key, value in theirs[1].items():
        assert torch.equal(ours[1][key], value), key
