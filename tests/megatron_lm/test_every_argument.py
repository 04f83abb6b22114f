"""Two ranks of which one has another value of any argument of the real parser do not train."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Draws values for every argument of Megatron-LM's own parser, with those that are added to it.
EVERY = """
import argparse, sys
sys.path.insert(0, sys.argv[1])
from megatron_zb.megatron.cpu import run_on_cpu
run_on_cpu(training_loop=True)
from megatron_zb.megatron_lm import fingerprint
from megatron_zb.megatron_lm.hooks import install
install()
from megatron.training.arguments import add_megatron_arguments
from other_values import check, pairs
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
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
