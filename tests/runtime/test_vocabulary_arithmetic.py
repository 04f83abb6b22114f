"""Arithmetic of a vocabulary-parallel output layer, beside float64 and the whole."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.nn import functional

from megatron_zb.runtime.vocabulary import Hidden, Loss, Rows, ShardLoss, hidden_width, put_together

TOKENS, WIDTH, VOCABULARY = 96, 64, 512


class Sample(NamedTuple):
    """Tokens (tokens, width), weight (vocabulary, width), labels, and gradients of their losses."""

    x: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    gradient: torch.Tensor


class Found(NamedTuple):
    """Loss of each token, and gradients of ``x`` and of the weight."""

    loss: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor


def sample(dtype: torch.dtype) -> Sample:
    torch.manual_seed(3)
    x, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH) * 0.1
    labels = torch.randint(0, VOCABULARY, (TOKENS,))
    return Sample(x.to(dtype), weight.to(dtype), labels, torch.rand(TOKENS))


def exact(given: Sample) -> Found:
    x, weight = (t.double().requires_grad_() for t in given[:2])
    loss = functional.cross_entropy(x @ weight.t(), given.labels, reduction="none")
    (loss * given.gradient).sum().backward()
    assert x.grad is not None and weight.grad is not None
    return Found(loss.detach(), x.grad, weight.grad)


def of_one_layer(given: Sample) -> Found:
    """Compute as Megatron's output layer and loss do."""
    logits = (given.x @ given.weight.t()).float()
    greatest = logits.amax(1, keepdim=True)
    exponentials = (logits - greatest).exp()
    total = exponentials.sum(1, keepdim=True)
    loss = total.log() - (logits - greatest).gather(1, given.labels.unsqueeze(1))
    gradient = exponentials / total
    gradient[torch.arange(TOKENS), given.labels] -= 1
    gradient = (gradient * given.gradient.unsqueeze(1)).to(given.x.dtype)
    return Found(loss.squeeze(1), gradient @ given.weight, gradient.t() @ given.x)


def of_shards(given: Sample, sizes: list[int]) -> Found:
    """Compute by O, P and V, with every message packed and unpacked."""
    hidden = Hidden.of(Hidden(given.x, given.labels).packed())
    assert torch.equal(hidden.x, given.x) and torch.equal(hidden.labels, given.labels)
    starts = [sum(sizes[:r]) for r in range(len(sizes))]
    rows = [Rows(start, size) for start, size in zip(starts, sizes, strict=True)]
    weights = given.weight.split(sizes)
    logits = [hidden.x @ weight.t() for weight in weights]
    parts = [
        ShardLoss.of(one.part(weight, y, hidden.labels).packed())
        for one, weight, y in zip(rows, weights, logits, strict=True)
    ]
    whole = put_together(parts, with_gradient=True)
    loss = Loss.of(Loss(whole.log, given.gradient).packed())
    of_weights = [
        one.gradient(y, hidden.labels, loss, given.x.dtype).t() @ hidden.x
        for one, y in zip(rows, logits, strict=True)
    ]
    of_x = (whole.direction * given.gradient.unsqueeze(1)).to(given.x.dtype)
    return Found(whole.per_token, of_x, torch.cat(of_weights))


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("sizes", [[512], [256, 256], [128] * 4, [500, 12]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shards_are_as_near_to_exact_as_one_layer(dtype: torch.dtype, sizes: list[int]) -> None:
    given = sample(dtype)
    found, usual, expected = of_shards(given, sizes), of_one_layer(given), exact(given)
    for ours, upstream, true in zip(found, usual, expected, strict=True):
        assert off(ours, true) <= 1.2 * off(upstream, true)


def test_extreme_logits_do_not_overflow() -> None:
    """One shard has logits that exceed all others by far more than float32 can exponentiate."""
    given = sample(torch.float32)
    given.weight[256:] += 60 * given.x[0]
    found, expected = of_shards(given, [256, 256]), exact(given)
    assert all(torch.isfinite(one).all() for one in found)
    assert off(found.loss, expected.loss) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rows_of_hidden_states_begin_at_multiples_of_16_bytes(dtype: torch.dtype) -> None:
    """O multiplies a view of the message, and a GPU's fastest kernels want its rows aligned."""
    hidden = Hidden(torch.randn(3, 64).to(dtype), torch.tensor([5, 1 << 40, -100]))
    message = hidden.packed()
    assert message.shape == (3, hidden_width(64, dtype))
    found = Hidden.of(message)
    assert found.x.stride(0) * dtype.itemsize % 16 == 0
    assert torch.equal(found.x, hidden.x)
    assert torch.equal(found.labels, hidden.labels)
