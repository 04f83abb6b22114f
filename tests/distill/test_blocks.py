"""Candidates for a block that have less than a transformer layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from prepared_text import prepared
from ranks import RankPools
from training_jobs import written

from megatron_zb.distill.blocks import FusedAttention, _kernels, student_layer
from megatron_zb.distill.student import BlockShape
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.train.arguments import parse

FLAGS = {
    "--cpu": True,
    "--num-layers": 2,
    "--hidden-size": 32,
    "--num-attention-heads": 4,
    "--seq-length": 16,
    "--micro-batch-size": 2,
    "--global-batch-size": 2,
    "--train-iters": 1,
    "--lr": 1e-2,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepared(tmp_path_factory.mktemp("text"), most_bytes=100_000)


def built(text: str, attention: str, mlp: str) -> tuple[list[str], bool]:
    """The names of a candidate's weights, and whether it returns its input unchanged."""
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    args = parse(written({**FLAGS, "--data-path": text}), dist.get_world_size())
    kinds: Any = {"attention": attention, "mlp": mlp}
    shape = BlockShape("x", num_query_groups=4, ffn_hidden_size=64, learning_rate=None, **kinds)
    layer = student_layer(args, shape, 0)
    given = torch.randn(16, 2, 32)
    output, _ = layer(given, attention_mask=torch.zeros(1, 1, 16, 16, dtype=torch.bool))
    weights = [name for name, _ in layer.named_parameters()]
    return weights, bool(torch.equal(output, given))


@pytest.mark.parametrize(
    ("attention", "mlp", "parts"),
    [
        ("no_op", "no_op", set()),
        ("no_op", "linear", {"pre_mlp_layernorm", "mlp"}),
        ("linear", "no_op", {"input_layernorm", "self_attention"}),
        ("no_op", "mlp", {"pre_mlp_layernorm", "mlp"}),
    ],
)
def test_a_part_that_does_nothing_has_no_weights_and_changes_nothing(
    ranks: RankPools, text: str, attention: str, mlp: str, parts: set[str]
) -> None:
    ((weights, is_unchanged),) = ranks(1).run(built, text=text, attention=attention, mlp=mlp)
    assert {name.split(".")[0] for name in weights} == parts
    assert is_unchanged is (not parts)


class Trained(NamedTuple):
    """What a layer makes of tokens, its gradients, and the bytes that it keeps for them."""

    output: torch.Tensor
    gradients: list[torch.Tensor]
    kept_bytes: int


def trained(text: str, kind: type[DotProductAttention], groups: int, tokens: int) -> Trained:
    """A layer with so many heads of keys and values, whose attention is of a kind."""
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    flags = {**FLAGS, "--seq-length": tokens, "--max-position-embeddings": tokens}
    args = parse(written({**flags, "--data-path": text}), dist.get_world_size())
    shape = BlockShape("x", "attention", groups, "no_op", 64, None)
    layer = student_layer(args, shape, 0)
    assert type(layer.self_attention.core_attention) is FusedAttention
    layer.self_attention.core_attention.__class__ = kind
    given = torch.randn(tokens, 2, 32, generator=torch.Generator().manual_seed(2))
    memory = ActivationMemory(layer.parameters())
    with memory.watching():
        output, _ = layer(given, attention_mask=None)
    kept = memory.live_bytes
    output.square().sum().backward()
    return Trained(
        output.detach(), [p.grad for p in layer.parameters() if p.grad is not None], kept
    )


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_attention_is_megatrons_and_keeps_no_scores(
    ranks: RankPools, text: str, groups: int
) -> None:
    """Twice as many tokens keep twice as much, where scores would keep four times as much."""
    fused, own = (
        [ranks(1).run(trained, text=text, kind=kind, groups=groups, tokens=n)[0] for n in (64, 128)]
        for kind in (FusedAttention, DotProductAttention)
    )
    for ours, theirs in zip(fused, own, strict=True):
        torch.testing.assert_close(ours.output, theirs.output, rtol=1e-5, atol=1e-6)
        assert len(ours.gradients) == len(theirs.gradients) > 4
        for a, b in zip(ours.gradients, theirs.gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert fused[1].kept_bytes <= 2.01 * fused[0].kept_bytes
    assert own[1].kept_bytes > 2.5 * own[0].kept_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_in_float32_a_gpu_sums_in_one_order(dtype: torch.dtype, on_gpu: bool) -> None:
    """Only kernels that are not fused do, of which no CPU has the others."""
    query: Any = SimpleNamespace(dtype=dtype, is_cuda=on_gpu)
    with _kernels(query):
        fused = (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
        )
        assert fused == (not (on_gpu and dtype is torch.float32),) * 2
        assert torch.backends.cuda.math_sdp_enabled()
