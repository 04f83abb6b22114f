"""What the training loop gives to a rank, and what it writes down of an iteration."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from prepared_text import prepared
from ranks import RankPools
from training_jobs import written

from megatron_zb.train import data, loop
from megatron_zb.train.arguments import parse
from megatron_zb.train.checkpoint import Progress
from megatron_zb.train.model import Trainee, build

FLAGS = {
    "--cpu": True,
    "--num-layers": 2,
    "--hidden-size": 32,
    "--num-attention-heads": 4,
    "--seq-length": 32,
    "--micro-batch-size": 2,
    "--global-batch-size": 8,
    "--train-iters": 4,
    "--lr": 1e-2,
    "--eval-iters": 2,
    "--split": "80,20,0",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepared(tmp_path_factory.mktemp("text"), most_bytes=100_000)


def begun(text: str) -> tuple[argparse.Namespace, Trainee, tuple[Any, Any]]:
    """Arguments, model and data sets of a job whose ranks are all data-parallel."""
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    args = parse(written({**FLAGS, "--data-path": text}), dist.get_world_size())
    return args, build(args, None, lambda problem: None), data.build_datasets(args)


def first_tokens(text: str) -> list[list[int]]:
    """The first tokens of this rank's samples from the fifth of the job on, two microbatches."""
    args, _, (train, _) = begun(text)
    source = data.batches(train, args, first_sample=4)
    return [next(source)["tokens"][:, :3].tolist() for _ in range(2)]


def tokens_of(text: str, numbers: list[int]) -> list[list[int]]:
    _, _, (train, _) = begun(text)
    return [train[number]["tokens"][:3].tolist() for number in numbers]


def test_a_global_batch_goes_to_data_parallel_ranks_in_turn(ranks: RankPools, text: str) -> None:
    found = ranks(2).run(first_tokens, text=text)
    numbers = [4, 5, 8, 9, 6, 7, 10, 11]
    (whole,) = ranks(1).run(tokens_of, text=text, numbers=numbers)
    assert found == [[whole[0:2], whole[2:4]], [whole[4:6], whole[6:8]]]
    assert len({tuple(tokens) for tokens in whole}) > 4


def losses_of(text: str) -> tuple[float, float]:
    """The loss that is written down for a first iteration, and the mean over this rank's tokens."""
    args, trainee, (train, _) = begun(text)
    sources = loop._sources(args, trainee, train, 0)
    losses = loop._forward_backward(args, trainee, sources, 1)
    total, tokens = torch.stack([loss["lm loss"] for loss in losses]).sum(dim=0).tolist()
    record = loop._update(args, trainee, Progress(0, 0), losses)
    return record["lm_loss"], total / tokens


def test_the_loss_is_the_mean_of_all_data_parallel_ranks(ranks: RankPools, text: str) -> None:
    found = ranks(2).run(losses_of, text=text)
    means = [mean for _, mean in found]  # of as many tokens each
    assert means[0] != means[1]
    assert [loss for loss, _ in found] == pytest.approx([sum(means) / 2] * 2)


def iteration(text: str) -> tuple[dict[str, Any], float, int]:
    """A record of an iteration, the norm of its gradients, and the steps of the learning rate."""
    args, trainee, (train, _) = begun(text)
    losses = loop._forward_backward(args, trainee, loop._sources(args, trainee, train, 0), 1)
    gradients = [p.main_grad for chunk in trainee.chunks for p in chunk.parameters()]
    norm = float(torch.cat([g.flatten() for g in gradients]).norm())
    record = loop._update(args, trainee, Progress(0, 0), losses)
    return record, norm, trainee.scheduler.num_steps


def test_an_iteration_is_written_down(ranks: RankPools, text: str) -> None:
    ((record, norm, steps),) = ranks(1).run(iteration, text=text)
    assert record["iteration"] == 1
    assert record["consumed_samples"] == steps == 8
    assert record["skipped"] is False
    assert record["grad_norm"] == pytest.approx(norm, rel=1e-5)


def evaluations(text: str) -> tuple[float, float]:
    """The loss of an evaluation, and that of the first samples one after the other."""
    args, trainee, (_, valid) = begun(text)
    found = loop._evaluate(args, trainee, valid, 1)
    total = tokens = 0.0
    (chunk,) = trainee.chunks
    with torch.no_grad():
        for number in range(0, args.eval_iters * args.global_batch_size, args.micro_batch_size):
            batch = data.microbatch(valid, args, number)
            losses = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
            total += float((losses * batch["loss_mask"]).sum())
            tokens += float(batch["loss_mask"].sum())
    return found, total / tokens


def test_an_evaluation_is_of_the_first_samples(ranks: RankPools, text: str) -> None:
    ((found, expected),) = ranks(1).run(evaluations, text=text)
    assert found == pytest.approx(expected, rel=1e-6)
