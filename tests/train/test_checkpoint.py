"""Which checkpoints a run continues from, by the arguments that are stored in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from ranks import RankPools

from megatron_zb.errors import UsageError
from megatron_zb.train.arguments import parse
from megatron_zb.train.checkpoint import check_checkpoint, write

FLAGS = (
    "--cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-2"
).split()


def why_refused(folder: str, changed: dict[str, Any], without: Sequence[str], flags: str) -> str:
    """Write a checkpoint whose arguments are changed; return why a run does not load it."""
    stored = {**vars(parse(FLAGS, 1)), **changed}
    weight = ShardedTensor.from_rank_offsets("weight", torch.zeros(1))
    state = {"weight": weight, "args": stored}
    write(Path(folder), 1, {k: v for k, v in state.items() if k not in without}, {})
    try:
        check_checkpoint(parse([*FLAGS, "--load", folder, *flags.split()], 1))
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changed", "flags", "sentence"),
    [
        ({}, "", ""),
        ({"lr": 1.0, "pipeline_model_parallel_size": 2, "pipeline_schedule": "v-half"}, "", ""),
        ({"num_layers": 3}, "", "--num-layers 3, this run has 2; they must be the same"),
        ({"swiglu": True}, "--finetune", "--swiglu True, this run has False"),
        ({"rotary_base": 500000}, "", "--rotary-base 500000, this run has 10000"),
        ({"heterogeneous_layers_config_encoded_json": "{}"}, "", "has other layers: give"),
        ({"bf16": True}, "", "--bf16 True, this run has False"),
        ({"bf16": True}, "--finetune", ""),
        ({"fp16": True}, "", "--fp16, which only Megatron-LM's scripts continue: give --finetune"),
        ({"use_distributed_optimizer": True}, "", "--use-distributed-optimizer, which only"),
        ({"fp16": True, "use_distributed_optimizer": True}, "--finetune", ""),
    ],
)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused(
    changed: dict[str, Any], flags: str, sentence: str, ranks: RankPools, tmp_path: Path
) -> None:
    case: dict[str, Any] = {
        "folder": str(tmp_path),
        "changed": changed,
        "without": (),
        "flags": flags,
    }
    (said,) = ranks(1).run(why_refused, **case)
    assert sentence in said
    assert bool(said) == bool(sentence)


def test_a_checkpoint_without_arguments_is_refused(ranks: RankPools, tmp_path: Path) -> None:
    """A distillation writes such a checkpoint, since it has blocks and no whole model."""
    case: dict[str, Any] = {
        "folder": str(tmp_path),
        "changed": {},
        "without": ("args",),
        "flags": "",
    }
    (said,) = ranks(1).run(why_refused, **case)
    assert "--num-layers None, this run has 2; they must be the same" in said
