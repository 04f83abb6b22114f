"""Megatron-LM's arguments, as its parser leaves them."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_zb.job import settings

# Megatron-LM's own arguments, as its parser leaves them, for 16 layers on 4 pipeline ranks.
UPSTREAM: dict[str, Any] = {
    "num_layers": 16,
    "encoder_num_layers": None,
    "mtp_num_layers": None,
    "hidden_size": 64,
    "seq_length": 64,
    "num_attention_heads": 4,
    "group_query_attention": False,
    "ffn_hidden_size": None,
    "swiglu": False,
    "vocab_size": None,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "world_size": 4,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 4,
    "context_parallel_size": 1,
    "distributed_timeout_minutes": 10,
    "nccl_communicator_config_path": None,
    "high_priority_stream_groups": [],
    "pipeline_model_parallel_layout": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "microbatch_group_size_per_vp_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "ckpt_format": "torch_dist",
    "cuda_graph_impl": "none",
    "overlap_moe_expert_parallel_comm": False,
    "hybrid_override_pattern": None,
    "heterogeneous_layers_config_path": None,
    "seed": 1234,
    "data_parallel_random_init": False,
}


def parsed(line: str = "", **upstream: Any) -> argparse.Namespace:
    parser = settings.add_megatron_lm_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return parser.parse_args(line.split(), argparse.Namespace(**{**UPSTREAM, **upstream}))
