"""The arguments that describe the models of configs/models are arguments of Megatron-LM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from megatron_zb.planner.model import read_model
from megatron_zb.planner.model_flags import model_flags

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs" / "models").glob("*.yaml"))

# Prints what Megatron-LM's own parser makes of each of several command lines.
PARSE = """
import argparse, json, sys
sys.path.insert(0, sys.argv[1])
from megatron.training.arguments import add_megatron_arguments
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
found = [vars(parser.parse_args(words)) for words in json.loads(sys.argv[2])]
print(json.dumps(found, default=str))
"""


def test_every_model_is_understood(checkout: Path) -> None:
    lines = json.dumps([model_flags(read_model(config)) for config in CONFIGS])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARSE, str(checkout), lines],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for config, parsed in zip(CONFIGS, json.loads(done.stdout.splitlines()[-1]), strict=True):
        model = read_model(config)
        assert parsed["num_layers"] == model.layers
        assert parsed["hidden_size"] == model.hidden_size
        assert parsed["num_attention_heads"] == model.attention_heads
        assert parsed["swiglu"] == model.gated_mlp
        assert parsed["num_experts"] == (model.experts.experts if model.experts else None)
        assert parsed["multi_latent_attention"] == (model.latent_attention is not None)
        assert parsed["qk_layernorm"] == model.qk_layernorm
