"""The arguments that describe the models of configs/models are arguments of Megatron-LM."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_zb.plan.device import read_device
from megatron_zb.plan.model import ModelConfig, read_model
from megatron_zb.plan.model_flags import mock_data_flags, model_flags
from megatron_zb.plan.operators import RECOMPUTE
from megatron_zb.plan.prediction import IterationSettings, predict
from megatron_zb.plan.stages import cut_into_stages
from megatron_zb.plan.strategy import Strategy, candidates_of
from megatron_zb.plan.table import flags
from megatron_zb.plan.work import Workload

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs" / "models").glob("*.yaml"))

DEVICE = Path(__file__).resolve().parents[2] / "configs" / "devices" / "h100_sxm.yaml"
SPARSE = {
    "name": "sparse",
    "source": "test",
    "layers": 16,
    "hidden_size": 1024,
    "attention_heads": 16,
    "vocabulary": 32000,
    "sequence_length": 1024,
    "global_batch_size": 16,
    "rotary": {"base": 10000},
    "experts": {"experts": 8, "top_k": 2, "ffn_hidden_size": 512},
    "prediction_layers": 1,
}

# Prints what Megatron-LM's own parser makes of each of several command lines.
PARSE = """
import argparse, json, sys
sys.path.insert(0, sys.argv[1])
from megatron.training.arguments import add_megatron_arguments
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
found = [vars(parser.parse_args(words)) for words in json.loads(sys.argv[2])]
print(json.dumps(found, default=str))
"""


def parsed(checkout: Path, lines: list[list[str]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARSE, str(checkout), json.dumps(lines)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def understood(model: ModelConfig) -> dict[str, Any]:
    """What Megatron-LM must have made of a model's words."""
    out: dict[str, Any] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.attention_heads,
        "kv_channels": model.head_dim,
        "norm_epsilon": model.norm_epsilon,
        "swiglu": model.gated_mlp,
        "qk_layernorm": model.qk_layernorm,
        "untie_embeddings_and_output_weights": not model.tied_embeddings,
        "num_experts": model.experts.experts if model.experts else None,
        "multi_latent_attention": model.latent_attention is not None,
        "mtp_num_layers": model.prediction_layers or None,
        "padded_vocab_size": model.vocabulary,
        "vocab_size": model.vocabulary - 1,
        "tokenizer_type": "NullTokenizer",
        "mock_data": True,
    }
    if model.rotary is not None:
        out["position_embedding_type"] = "rope"
        out["rotary_base"] = model.rotary.base
        out["use_rope_scaling"] = model.rotary.scaling is not None
    if model.experts is not None:
        router = model.experts.router
        out["moe_router_topk"] = model.experts.top_k
        out["moe_router_score_function"] = router.score_function
        out["moe_router_num_groups"] = router.groups
        out["moe_router_group_topk"] = router.top_k_groups
        out["moe_router_topk_scaling_factor"] = router.scaling_factor
        out["moe_router_enable_expert_bias"] = router.bias_update_rate is not None
        out["moe_router_load_balancing_type"] = [router.balancing]
        out["moe_aux_loss_coeff"] = [router.aux_loss_coefficient]
    return out


def test_every_model_is_understood(checkout: Path) -> None:
    models = [read_model(config) for config in CONFIGS]
    if not (checkout / "pretrain_hybrid.py").is_file():  # the pattern has another name
        models = [model for model in models if model.pattern is None]
    found = parsed(checkout, [[*model_flags(m), *mock_data_flags(m)] for m in models])
    for model, arguments in zip(models, found, strict=True):
        expected = understood(model)
        name = "norm_epsilon" if "norm_epsilon" in arguments else "layernorm_epsilon"
        expected[name] = expected.pop("norm_epsilon")
        assert {key: arguments[key] for key in expected} == expected, model.name


def planned_words() -> list[list[str]]:
    """What a plan prints, for every kind of setting; our own flags are left out."""
    model = ModelConfig.model_validate(SPARSE)
    out = []
    for recompute in RECOMPUTE:
        for candidate in candidates_of(["zb-h1"]):
            strategy = Strategy(
                2, 4, 2, 4, 1, recompute, context=2, expert_tensor=1, precision="fp8"
            )
            load = Workload(model, read_device(DEVICE), strategy, model.sequence_length)
            staged = cut_into_stages(load, candidate, 2 if candidate.takes_chunks else None)
            assert staged is not None
            chunks = staged.placement.chunks if candidate.takes_chunks else None
            found = predict(staged, candidate, IterationSettings(8), chunks)
            found = replace(found, has_by_default=recompute == "full")
            words = [shlex.split(flag) for flag in flags(found, 16)]
            out.append([word for of in words if of[0] != "--pipeline-schedule" for word in of])
    return out


def test_every_flag_of_a_plan_is_understood(checkout: Path) -> None:
    lines = planned_words()
    assert any("--num-virtual-stages-per-pipeline-rank" in words for words in lines)
    assert any("--pipeline-model-parallel-layout" in words for words in lines)
    for arguments in parsed(checkout, lines):
        assert arguments["context_parallel_size"] == 2
        assert arguments["expert_model_parallel_size"] == 4
        assert arguments["expert_tensor_parallel_size"] == 1
        assert arguments["overlap_grad_reduce"]
        assert arguments["fp8"] == "hybrid"


def test_a_hybrid_model_is_understood(checkout: Path) -> None:
    if not (checkout / "pretrain_hybrid.py").is_file():
        pytest.skip("its --hybrid-layer-pattern has another name")
    given = {"layers": 3, "hybrid_layer_pattern": "M*E/M*", "mamba": {"heads": 4, "groups": 2}}
    model = ModelConfig.model_validate({**SPARSE, **given, "rotary": None, "squared_relu": True})
    (found,) = parsed(checkout, [[*model_flags(model), *mock_data_flags(model)]])
    expected = {
        "hybrid_layer_pattern": "M*E/M*",
        "mamba_num_heads": 4,
        "mamba_head_dim": 64,
        "mamba_num_groups": 2,
        "mamba_state_dim": 128,
        "position_embedding_type": "none",
        "squared_relu": True,
        "mtp_num_layers": 1,
        "spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
    }
    assert {key: found[key] for key in expected} == expected


def test_a_word_that_megatron_lm_does_not_know_is_found(checkout: Path) -> None:
    with pytest.raises(AssertionError, match="--no-such-word"):
        parsed(checkout, [["--no-such-word", "1"]])
