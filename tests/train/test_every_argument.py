"""Two ranks of our own programs of which one has another value of any argument do not run."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from other_values import Pair, check, pairs

from megatron_zb.distill import flags as distillation_flags
from megatron_zb.train import flags as training_flags
from megatron_zb.train.launch import LOCAL, given_arguments

TRAINING = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 2 --lr 1e-3 --data-path text"
)
DISTILLATION = (
    "--teacher-load teacher --student-config half.yaml --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 2 --lr 1e-3 --data-path text"
)
PROGRAMS: dict[str, tuple[Any, str, set[str]]] = {
    "pretrain_gpt": (training_flags.parser, TRAINING, {"lr", "seed", "ffn_hidden_size"}),
    "distill_gpt": (distillation_flags.parser, DISTILLATION, {"lr", "seed", "teacher_load"}),
}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_argument_is_compared(program: str, seed: int) -> None:
    parser, base, some = PROGRAMS[program]
    names = set()
    for pair in pairs(parser(), base.split(), seed):
        check(pair, given_arguments, set(LOCAL))
        names.add(pair.name)
    assert some <= names


def test_the_check_notices_an_argument_that_is_left_out() -> None:
    pair = Pair("lr", argparse.Namespace(lr=1.0), argparse.Namespace(lr=2.0))
    with pytest.raises(AssertionError, match="lr"):
        check(pair, lambda args: {}, set())
    with pytest.raises(AssertionError):
        check(pair, lambda args: {"--lr": 3.0 if args.lr == 1.0 else 4.0}, set())
