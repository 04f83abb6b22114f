"""Two ranks of which one has another value of any argument of the real parser do not train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from real_megatron_lm.runs import MODEL, pretrain

DIFFER = Path(__file__).with_name("run_and_differ.py")

# Draws values for every argument of Megatron-LM's own parser, with those that are added to it.
EVERY = """
import argparse, sys
sys.path.insert(0, sys.argv[1])
from megatron_zb.cpu_ranks import run_on_cpu
run_on_cpu(training_loop=True)
from megatron_zb.megatron_lm import fingerprint
from megatron_zb.megatron_lm.hooks import install
install()
from megatron.training.arguments import add_megatron_arguments
from other_values import check, pairs
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
del parser.error  # it would end this process with a sentence where a value does not fit
flags = set(parser._option_string_actions)
names = set()
for pair in pairs(parser, [], int(sys.argv[2])):
    check(pair, lambda args: fingerprint.of_arguments(args, flags), MAY_DIFFER)
    names.add(pair.name)
assert {"lr", "seed", "ffn_hidden_size", "clip_grad", "pipeline_schedule"} <= names
print(len(names), "arguments")
"""
MAY_DIFFER = "{*fingerprint.OF_RANK, *fingerprint.LOCAL}"


@pytest.mark.parametrize("seed", [1, 2])
def test_every_argument_of_the_parser_is_compared(checkout: Path, seed: int) -> None:
    program = EVERY.replace("MAY_DIFFER", MAY_DIFFER)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(checkout), str(seed)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-2]) > 500


@pytest.mark.parametrize(
    ("everywhere", "on_rank_1", "said"),
    [
        ("--pipeline-schedule v-half", "--lr 2e-3", "--lr 0.001 on rank 0, but --lr 0.002 on"),
        ("--pipeline-schedule v-half", "--seed 7", "--seed 1234 on rank 0, but --seed 7 on"),
        (
            "--pipeline-schedule v-half",
            "--ffn-hidden-size 128",
            "no --ffn-hidden-size on rank 0, but --ffn-hidden-size 128 on",
        ),
        (
            "--pipeline-schedule v-half",
            "--clip-grad 1",
            "--clip-grad 100.0 on rank 0, but --clip-grad 1.0 on",
        ),
        (  # Megatron-LM ends a rank of its own with an assertion, before the ranks connect
            "--pipeline-schedule v-half",
            "--tensor-model-parallel-size 3",
            "--tensor-model-parallel-size 1 on rank 0, but --tensor-model-parallel-size 3 on",
        ),
        ("", "--pipeline-schedule zb-h1", "no --pipeline-schedule on rank 0, but --pipeline-sch"),
        (
            "--pipeline-schedule zb-h1",
            "--pipeline-schedule v-zb",
            "--pipeline-schedule zb-h1 on rank 0, but --pipeline-schedule v-zb on",
        ),
    ],
)
def test_two_ranks_that_differ_end_with_both_values(
    checkout: Path, everywhere: str, on_rank_1: str, said: str
) -> None:
    other = {"OTHER_ARGUMENTS": json.dumps([1, on_rank_1.split()])}
    flags = f"--pipeline-model-parallel-size 2 {everywhere}"
    run = pretrain(checkout, MODEL, flags, ranks=2, program=DIFFER, environment=other)
    assert run.code != 0
    assert said in run.error
    assert run.error.count("\n") == 0
    assert "Traceback" not in run.output.split("torch/distributed/elastic")[0]
    assert not run.losses
