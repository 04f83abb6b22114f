"""Process groups, devices and random seeds of the ranks."""

from __future__ import annotations

import argparse
import random
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_zb.train.processes import Environment

if TYPE_CHECKING:
    from megatron_zb.megatron_core.adapter import PipelineAdapter


def start_ranks(
    args: argparse.Namespace,
    adapter: PipelineAdapter | None,
    store: dist.Store,
    environment: Environment,
    expert_parallel: int = 1,
) -> None:
    """Connect the ranks and give Megatron its groups; `adapter` is None without a schedule."""
    if not args.cpu:
        torch.cuda.set_device(environment.local_rank)
    dist.init_process_group(
        backend="gloo" if args.cpu else "nccl",
        store=dist.PrefixStore("ranks", store),
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=adapter.virtual_pipeline_size if adapter else None,
        expert_model_parallel_size=expert_parallel,
        get_embedding_ranks=adapter.embedding_ranks if adapter else None,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        # a second set of gloo groups beside NCCL's; on the CPU the first set is gloo's already
        create_gloo_process_groups=not args.cpu,
    )
    _seed(args.seed)


def _seed(seed: int) -> None:
    """Seed dropout; initial weights have other seeds: see ``megatron_core/random_streams.py``."""
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def stop_ranks() -> None:
    """Take the process groups down after a run that went well."""
    dist.barrier()
    dist.destroy_process_group()


def is_log_rank() -> bool:
    """Return whether this is the one rank that prints and writes: it holds the loss."""
    return bool(
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_data_parallel_rank() == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )
