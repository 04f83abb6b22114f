"""The optimizer of one block: Megatron's rate, Adam by hand, and a resume that changes nothing."""

from __future__ import annotations

import argparse
import math

import pytest
import torch

from megatron_zb.distill.student_block import BlockOptimizer


def arguments(**changed: object) -> argparse.Namespace:
    """Cosine decay from 0.1 to 0.02 over 8 steps of 4 samples, after 2 of warm-up."""
    given = {
        "clip_grad": 0.0,
        "tensor_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "global_batch_size": 4,
        "lr": 0.1,
        "min_lr": 0.02,
        "adam_beta1": 0.8,
        "adam_beta2": 0.9,
        "adam_eps": 1e-8,
        "weight_decay": 0.25,
        "lr_warmup_iters": 2,
        "lr_decay_iters": 8,
        "lr_decay_style": "cosine",
        "train_iters": 10,
    }
    return argparse.Namespace(**given | changed)


def block(dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    weight, bias = torch.linspace(-1, 1, 6).view(2, 3), torch.tensor([0.5, -0.5])
    return {name: torch.nn.Parameter(t.to(dtype)) for name, t in (("w", weight), ("b", bias))}


def step(optimizer: BlockOptimizer, block: dict[str, torch.nn.Parameter], number: int) -> None:
    for parameter in block.values():
        parameter.grad = (parameter.detach() + number) / 4
    optimizer.collect()
    optimizer.step(None)


def test_the_rate_follows_samples() -> None:
    """Warm-up by half a peak for each step; then half a cosine over the 6 that are left."""
    parameters = block()
    optimizer = BlockOptimizer(arguments(), parameters, None)
    rates = []
    for number in range(9):
        rates.append(optimizer.learning_rate)
        step(optimizer, parameters, number)
    decayed = [0.02 + 0.04 * (1 + math.cos(math.pi * n / 6)) for n in range(7)]
    assert rates == pytest.approx([0.0, 0.05, *decayed])


def test_a_step_is_adams_with_decay_of_matrices_alone() -> None:
    """The second step, since the rate of the first is 0."""
    parameters = block()
    optimizer = BlockOptimizer(arguments(), parameters, None)
    for _ in range(2):
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, 3.0)
        optimizer.step(None)
    # A gradient that does not change has the moments g and g squared, their bias corrected.
    expected = torch.linspace(-1, 1, 6).view(2, 3) * (1 - 0.05 * 0.25) - 0.05
    torch.testing.assert_close(parameters["w"].detach(), expected)
    torch.testing.assert_close(parameters["b"].detach(), torch.tensor([0.45, -0.55]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resume_changes_nothing(dtype: torch.dtype) -> None:
    through, optimizer = block(dtype), None
    optimizer = BlockOptimizer(arguments(), through, None)
    for number in range(4):
        step(optimizer, through, number)
    state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    stopped = {name: torch.nn.Parameter(p.detach().clone()) for name, p in through.items()}
    resumed = BlockOptimizer(arguments(), stopped, None)
    resumed.resume(state, steps=4)
    assert resumed.learning_rate == optimizer.learning_rate > 0
    for number in range(4, 7):
        step(optimizer, through, number)
        step(resumed, stopped, number)
    for name, parameter in through.items():
        assert torch.equal(stopped[name], parameter)


def test_gradients_are_clipped_by_their_norm_together() -> None:
    """Without a second moment to hide it: the state after one step has the clipped gradient."""
    parameters = block()
    optimizer = BlockOptimizer(arguments(clip_grad=1.0), parameters, None)
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 3.0)
    optimizer.step(None)
    clipped = 1 / math.sqrt(8)  # 8 equal numbers of norm 1
    moment = optimizer.state()["exp_avg.w"]
    torch.testing.assert_close(moment, torch.full((2, 3), 0.2 * clipped), rtol=1e-5, atol=0)


def test_a_block_has_its_own_peak() -> None:
    optimizer = BlockOptimizer(arguments(lr_warmup_iters=0), block(), 0.01)
    assert optimizer.learning_rate == pytest.approx(0.01)
