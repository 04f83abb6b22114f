"""Logits of another type than their input: --output-logit-dtype of Megatron's next release."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from gpt_cases import GPTCase, _enter_parallel_groups
from megatron.core.tensor_parallel import ColumnParallelLinear
from ranks import RankPools

from megatron_zb.megatron_core.split_backward import SplitBackward, split_linear_layers
from megatron_zb.megatron_core.vocabulary_shard import VocabularyShard
from megatron_zb.runtime.autograd_stage import WeightGradQueue

pytestmark = pytest.mark.skipif(
    "output_dtype" not in signature(ColumnParallelLinear.__init__).parameters,
    reason="this Megatron does not have it",
)

OUTPUT: dict[str, Any] = {"output_dtype": torch.float32}


def product(
    weight: torch.Tensor, x: torch.Tensor, out_dtype: torch.dtype, **_: Any
) -> tuple[torch.Tensor]:
    """Take the place of Transformer-Engine's product, which is a kernel for GPUs."""
    return ((x.float() @ weight.float().t()).to(out_dtype),)


def output_layer() -> Any:
    """Build an output layer on one rank whose logits are float32, of weights in bfloat16."""
    from megatron.core import tensor_parallel
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer import TransformerConfig

    _enter_parallel_groups(GPTCase(), None, 1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    transformer_engine.te_general_gemm = product
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    config = TransformerConfig(**sizes, use_cpu_initialization=True, params_dtype=torch.bfloat16)
    torch.manual_seed(1)
    return ColumnParallelLinear(
        8,
        12,
        config=config,
        init_method=torch.nn.init.normal_,
        bias=False,
        skip_bias_add=True,
        **OUTPUT,
    )


def activations() -> torch.Tensor:
    return torch.randn(6, 1, 8, generator=torch.Generator().manual_seed(2)).bfloat16()


def gradients(splits: bool) -> list[torch.Tensor]:
    """Return the gradients of the weight and the input, with or without a split backward."""
    layer = output_layer()
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    x = activations().requires_grad_()
    queue = WeightGradQueue()
    if splits:
        split_linear_layers(torch.nn.ModuleList([layer]), SplitBackward(queue))
        with queue.collecting(0):
            logits = layer(x)[0]
            logits.square().sum().backward()
        queue.run(0)
    else:
        logits = layer(x)[0]
        logits.square().sum().backward()
    assert logits.dtype is torch.float32
    assert x.grad is not None
    weight = layer.weight.main_grad if layer.weight.grad is None else layer.weight.grad
    return [weight, x.grad]


def test_gradients_equal_megatrons(ranks: RankPools) -> None:
    for found, expected in zip(
        ranks(2).run(gradients, splits=True), ranks(2).run(gradients, splits=False), strict=True
    ):
        assert all(g.any() for g in expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def logits() -> list[torch.Tensor]:
    """Return the logits of the layer, and of a shard with all of its rows."""
    from megatron.core import parallel_state

    layer, x = output_layer(), activations()
    group = parallel_state.get_tensor_model_parallel_group()
    shard = VocabularyShard(layer.weight.detach(), 0, group, (0, 1), "stored", torch.float32)
    return [layer(x)[0].squeeze(1), shard(x.squeeze(1), logits=True)]


def test_logits_of_a_vocabulary_shard_are_megatrons(ranks: RankPools) -> None:
    for whole, sharded in ranks(1).run(logits):
        assert sharded.dtype is torch.float32
        assert torch.equal(whole, sharded)
        assert not torch.equal(sharded, sharded.bfloat16().float())
