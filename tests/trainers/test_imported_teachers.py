"""Models of Hugging Face's format, which Megatron-Bridge imports, as teachers of a distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from installed_trainers import missing_trainers
from rank_process import Kind
from ranks import RankPools

MISSING = missing_trainers()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

LENGTH, VOCABULARY = 128, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "tie_word_embeddings": False},
    "Qwen2": {"rope_theta": 1e6, "tie_word_embeddings": True},
    "Qwen3": {"rope_theta": 1e6, "head_dim": 12, "tie_word_embeddings": False},
    "Qwen3Moe": {
        "rope_theta": 1e6,
        "head_dim": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "Mistral": {"rope_theta": 1e6, "head_dim": 12, "sliding_window": None},
}


def hugging_face_model(family: str, folder: Path) -> Any:
    """A model with random weights, all of them: norms and biases would be ones and zeros."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def imported_by_bridge(source: Path, folder: Path) -> None:
    """Import a model on this rank and write it as Bridge does."""
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from megatron_bridge_trainer import imported_provider

    bridge = AutoBridge.from_hf_pretrained(source)
    provider = imported_provider(bridge, 1)
    provider.seq_length = LENGTH
    parallel_state.initialize_model_parallel(1, 1)
    provider.finalize()
    model = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, bf16=False, fp16=False
    )
    bridge.save_megatron_model(model, folder, low_memory_save=False)


def losses_of_blocks(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The losses of the teacher's blocks, embedding and output layer, (batch, sequence - 1)."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_zb.cpu_ranks import redirect_experts
    from megatron_zb.distill.flags import complete, parse
    from megatron_zb.distill.place import Place
    from megatron_zb.distill.schedule.distribution import Distribution
    from megatron_zb.distill.stage import open_stage_blocks
    from megatron_zb.distill.teacher import read_teacher

    redirect_experts()
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)
    words = "--cpu --mock-data --student-config none --lr 0 --train-iters 1"
    batch = "--micro-batch-size 1 --global-batch-size 1"
    teacher = read_teacher(folder)
    args = complete(
        parse([*words.split(), *batch.split(), "--teacher-load", str(folder)]), teacher.arguments
    )
    place = Place.of_this_rank(Distribution.of([(args.num_layers, 1)]))
    blocks = open_stage_blocks(args, teacher, [[]] * args.num_layers, place)
    assert blocks.embedding is not None
    assert blocks.head is not None
    with torch.no_grad():
        hidden = blocks.embedding(tokens, torch.arange(LENGTH)[None])
        for layer in blocks.layers:
            hidden, _ = layer(hidden, attention_mask=None, rotary_pos_emb=blocks.rotary)
        return blocks.head.losses(hidden, tokens.roll(-1, 1))[:, :-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_teachers_losses_are_those_of_the_model(
    family: str, ranks: RankPools, tmp_path: Path
) -> None:
    source, folder = tmp_path / "source", tmp_path / "imported"
    model = hugging_face_model(family, source)
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), tokens[:, 1:], reduction="none"
    )
    ranks(1, Kind.TRAINERS).run(imported_by_bridge, source=source, folder=folder)
    (found,) = ranks(1, Kind.TRAINERS).run(losses_of_blocks, folder=folder, tokens=tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
