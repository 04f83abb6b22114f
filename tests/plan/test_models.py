"""The shipped models are the published ones: each beside the figures of its config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_zb import schedules
from megatron_zb.cli import main as cli
from megatron_zb.errors import UsageError
from megatron_zb.measured import config
from megatron_zb.plan.model import ModelConfig, read_model
from megatron_zb.plan.model_flags import mock_data_flags, model_flags
from megatron_zb.plan.operators import all_weights

MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"
DEVICES = MODELS.parent / "devices"

# Fields of the published config.json by the name of the model, typed in on 2026-11-22.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama2_7b": {  # meta-llama/Llama-2-7b-hf
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "llama3_8b": {  # meta-llama/Meta-Llama-3-8B
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "llama3_70b": {  # meta-llama/Meta-Llama-3-70B
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "llama3_405b": {  # meta-llama/Llama-3.1-405B
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "qwen3_8b": {  # Qwen/Qwen3-8B
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
        "qk_norm": True,  # in the architecture Qwen3ForCausalLM, not a field
    },
    "qwen3_30b_a3b": {  # Qwen/Qwen3-30B-A3B
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.001,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
        "qk_norm": True,
    },
    "qwen3_235b_a22b": {  # Qwen/Qwen3-235B-A22B
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.001,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
        "qk_norm": True,
    },
    "deepseek_v3_like": {  # deepseek-ai/DeepSeek-V3
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_shared_experts": 1,
        "num_experts": 256,  # n_routed_experts
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "qk_norm": True,  # q_a_layernorm and kv_a_layernorm of its architecture
    },
    "nemotron_3_nano_like": {  # nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16
        "first_k_dense_replace": 0,
        "head_dim": 128,
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "intermediate_size": 1856,
        "mamba_head_dim": 64,
        "mamba_num_heads": 64,
        "moe_intermediate_size": 1856,
        "n_group": 1,
        "n_groups": 8,
        "n_shared_experts": 2,  # moe_shared_expert_intermediate_size 3712
        "num_experts": 128,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 52,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "ssm_state_size": 128,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "vocab_size": 131072,
    },
    "nemotron_3_super_like": {  # nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16
        "first_k_dense_replace": 0,
        "head_dim": 128,
        "hidden_size": 4096,
        "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
        "EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME/*E/*E",
        "intermediate_size": 2688,
        "mamba_head_dim": 64,
        "mamba_num_heads": 128,
        "moe_intermediate_size": 2688,
        "moe_latent_size": 1024,
        "n_group": 1,
        "n_groups": 8,
        "n_shared_experts": 2,  # moe_shared_expert_intermediate_size 5376
        "num_experts": 512,
        "num_experts_per_tok": 22,
        "num_hidden_layers": 88,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "num_nextn_predict_layers": 2,  # as trained; of the checkpoint, 1
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 5.0,
        "scoring_func": "sigmoid",
        "ssm_state_size": 128,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "vocab_size": 131072,
    },
    "qwen3_next_like": {  # Qwen/Qwen3-Next-80B-A3B-Instruct, in a pattern of twice its 48 layers
        "attn_output_gate": True,  # in the architecture
        "head_dim": 256,
        "hidden_size": 2048,
        "hybrid_override_pattern": f"{'GEGEGE*E' * 12}/*E",
        "intermediate_size": 5632,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "moe_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 96,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
}


def fields(model: ModelConfig) -> dict[str, Any]:
    """A description in the terms of config.json; what it does not have is left out."""
    out: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.attention_heads,
        "num_key_value_heads": model.groups,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tied_embeddings,
        "vocab_size": model.vocabulary,
    }
    if model.qk_layernorm:
        out["qk_norm"] = True
    if model.attention_output_gate:
        out["attn_output_gate"] = True
    if model.prediction_layers:
        out["num_nextn_predict_layers"] = model.prediction_layers
    out |= _of_rotary(model) | _of_experts(model) | _of_attention(model)
    return out | _of_kinds(model)


def _of_rotary(model: ModelConfig) -> dict[str, Any]:
    rotary = model.rotary
    if rotary is None:
        assert model.kinds
        return {}
    out: dict[str, Any] = {"rope_theta": rotary.base}
    if rotary.fraction != 1:
        out["partial_rotary_factor"] = rotary.fraction
    if rotary.scaling is not None:
        out["rope_scaling"] = {"rope_type": "llama3", "factor": rotary.scaling.factor}
    if rotary.yarn is not None:
        out["rope_scaling"] = {"type": "yarn", **rotary.yarn.model_dump()}
    return out


def _of_kinds(model: ModelConfig) -> dict[str, Any]:
    """The layers of a hybrid model, and the sizes of those with a state."""
    out: dict[str, Any] = {}
    if model.hybrid_layer_pattern is not None:
        out["hybrid_override_pattern"] = model.hybrid_layer_pattern
    if model.mamba is not None:
        out["mamba_num_heads"] = model.mamba.heads
        out["mamba_head_dim"] = model.mamba.head_dim
        out["n_groups"] = model.mamba.groups
        out["ssm_state_size"] = model.mamba.state_dim
    if (delta := model.gated_delta) is not None:
        out["linear_num_key_heads"] = delta.key_heads
        out["linear_num_value_heads"] = delta.value_heads
        out["linear_key_head_dim"] = delta.key_head_dim
        out["linear_value_head_dim"] = delta.value_head_dim
    return out


def _of_experts(model: ModelConfig) -> dict[str, Any]:
    experts = model.experts
    if experts is None:
        return {}
    out: dict[str, Any] = {
        "num_experts": experts.experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ffn_hidden_size,
    }
    if experts.latent_size is not None:
        out["moe_latent_size"] = experts.latent_size
    router = experts.router
    if router.score_function == "softmax":
        if experts.shared_ffn_hidden_size:
            assert experts.shared_gate
            out["shared_expert_intermediate_size"] = experts.shared_ffn_hidden_size
        return out | {"router_aux_loss_coef": router.aux_loss_coefficient}
    return out | {
        "first_k_dense_replace": experts.dense_layers,
        "n_group": router.groups,
        "topk_group": router.top_k_groups,
        "n_shared_experts": experts.shared_ffn_hidden_size / experts.ffn_hidden_size,
        "routed_scaling_factor": router.scaling_factor,
        "scoring_func": router.score_function,
    }


def _of_attention(model: ModelConfig) -> dict[str, Any]:
    latent = model.latent_attention
    if latent is None:
        return {} if model.head_dim is None else {"head_dim": model.head_dim}
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_head_dim,
        "qk_rope_head_dim": latent.rope_head_dim,
        "v_head_dim": latent.value_head_dim,
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_is_the_published_one(name: str) -> None:
    assert fields(read_model(MODELS / f"{name}.yaml")) == PUBLISHED[name]


def test_every_model_with_a_tokenizer_is_compared() -> None:
    """The others are GPTs of papers, which publish no config.json."""
    named = {path.stem for path in MODELS.glob("*.yaml") if read_model(path).tokenizer is not None}
    assert named == set(PUBLISHED)


def test_what_the_papers_tell_beside_the_config_of_deepseek_v3() -> None:
    """arXiv 2412.19437, section 4.2."""
    model = read_model(MODELS / "deepseek_v3_like.yaml")
    assert model.experts is not None
    assert model.experts.router.bias_update_rate == 0.001
    assert model.experts.router.aux_loss_coefficient == 0.0001
    assert model.experts.router.balancing == "seq_aux_loss"
    assert model.prediction_loss_scale == 0.3


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.yaml")), ids=lambda path: path.stem)
def test_made_up_data_has_the_models_vocabulary(path: Path) -> None:
    model = read_model(path)
    words = [*model_flags(model), *mock_data_flags(model)]
    assert words.count("--padded-vocab-size") == 1
    assert words[words.index("--padded-vocab-size") + 1] == str(model.vocabulary)
    # A tokenizer that counts the end of a document on top still fits.
    assert int(words[words.index("--vocab-size") + 1]) + 1 <= model.vocabulary


def test_a_gpt_of_a_paper_takes_the_vocabulary_of_the_users_tokenizer() -> None:
    assert "--padded-vocab-size" not in model_flags(read_model(MODELS / "gpt_28b.yaml"))


def test_the_command_prints_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["flags", "--config", "qwen3_8b", "--mock-data"]) == 0
    words = capsys.readouterr().out.splitlines()
    assert words[words.index("--rotary-base") + 1] == "1000000"
    assert words[words.index("--norm-epsilon") + 1] == "1e-06"
    assert "--mock-data" in words
    assert cli.main(["flags", "--config", "qwen3_8b"]) == 0
    assert "--mock-data" not in capsys.readouterr().out


SPARSE = """\
name: sparse
source: test
layers: 8
hidden_size: 1024
attention_heads: 16
vocabulary: 32000
sequence_length: 1024
global_batch_size: 32
experts: {experts: 8, top_k: 2, ffn_hidden_size: 512, router: %s}
"""


@pytest.mark.parametrize(
    ("router", "words"),
    [
        ("{groups: 4}", "groups and top_k_groups go together"),
        ("{groups: 3, top_k_groups: 1}", "experts 8 cannot be divided by router.groups 3; .* 2"),
        ("{groups: 2, top_k_groups: 4}", "top_k_groups is 4, more than the 2 groups; .* 2"),
        ("{bias_update_rate: 0.001}", "bias_update_rate needs score_function: sigmoid"),
        ("{score_function: tanh}", "'experts.router.score_function' is 'tanh': .*sigmoid"),
        ("{}\nrotary: {base: 10000, yarn: {factor: 40.0}}", "rotary.yarn needs latent_attention"),
        (
            "{}\nrotary: {base: 10000, scaling: {factor: 8.0}, yarn: {factor: 40.0}}",
            "scaling and yarn exclude each other",
        ),
        ("{}\nprediction_layers: 1", "prediction_layers need rotary positions"),
        ("{}\nnorm_epsilon: 0.0", "'norm_epsilon' is 0.0: .*norm_epsilon: 1.0e-06"),
    ],
)
def test_a_setting_that_cannot_be_is_named(router: str, words: str) -> None:
    text = SPARSE.replace("router: %s}", f"router: {router.partition(chr(10))[0]}}}")
    text += router.partition("\n")[2]
    with pytest.raises(UsageError, match=words):
        config.parse(text.encode(), "x.yaml", ModelConfig)


# Parameters as the papers and model cards tell them, in billions.
PUBLISHED_SIZES = {
    "gpt_1_5b": 1.5,
    "gpt_6_2b": 6.2,
    "gpt_14_6b": 14.6,
    "gpt_28b": 28.3,
    "gpt_9_6b": 9.6,
    "gpt_21b": 21,
    "gpt_38b": 38.5,
    "gpt_98b": 98.5,
    "llama2_7b": 6.74,
    "llama3_8b": 8.03,
    "llama3_70b": 70.6,
    "qwen3_30b_a3b": 30.5,
    "llama3_405b": 405.9,
    "qwen3_8b": 8.19,
    "qwen3_235b_a22b": 235.1,
    "deepseek_v3_like": 685,  # 671 and its layer of multi-token prediction
    "nemotron_3_nano_like": 31.6,
    "nemotron_3_super_like": 126.6,  # 123.6, and a second layer of multi-token prediction
    "qwen3_next_like": 81.3,  # and its layer of multi-token prediction
}


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_model_has_its_size_and_a_recommended_schedule(path: Path) -> None:
    model = read_model(path)
    assert all_weights(model) / 1e9 == pytest.approx(PUBLISHED_SIZES[path.stem], rel=0.05)
    assert model.recommended is not None
    assert model.recommended.schedule in [*schedules.names(), "none"]
    assert model.recommended.gpus is not None
    assert model.recommended.device in [device.stem for device in DEVICES.glob("*.yaml")]
