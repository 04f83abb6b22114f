"""Candidates for a block that have less than a transformer layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from ranks import RankPools
from texts import prepared
from training_jobs import written

from megatron_zb_distill.blocks import student_layer
from megatron_zb_distill.student import BlockShape
from megatron_zb_train.arguments import parse

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
