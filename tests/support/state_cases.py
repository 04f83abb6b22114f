"""Small GPTs under schedules that recompute and offload, and the bytes that they hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from gpt_cases import GPTCase, built, forward_backward, microbatches
from megatron.core import parallel_state
from model_options import EXPERTS, SELECTIVE

from megatron_zb import schedules
from megatron_zb.measured.profile import read_profile
from megatron_zb.megatron_core.profiling import ITERATIONS
from megatron_zb.megatron_core.stages import OffloadPart
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.schedules import Schedule
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.lowering import peak_with_messages
from megatron_zb.schedules.simulator import simulate

SMALL_GPTS = {
    "plain": GPTCase(),
    "tied": GPTCase(tied=True),
    "bf16": GPTCase(dtype="bfloat16"),
    "experts": GPTCase(options=tuple(EXPERTS.items())),
    "selective": GPTCase(options=SELECTIVE),
    "lengths": GPTCase(lengths=(16, 8, 12), options=(("moe_token_dispatcher_type", "alltoall"),)),
}
PARALLEL = {
    "tensor": GPTCase(tensor_parallel=2),
    "sequence": GPTCase(tensor_parallel=2, sequence_parallel=True),
    "data": GPTCase(data_parallel=2, overlap_grad_reduce=True),
    "expert": GPTCase(
        data_parallel=2, expert_parallel=2, dtype="bfloat16", options=tuple(EXPERTS.items())
    ),
    "distributed_optimizer": GPTCase(
        data_parallel=2,
        overlap_grad_reduce=True,
        distributed_optimizer=True,
        overlap_param_gather=True,
        optimizer_steps=3,
    ),
}


def counted(kept: Schedule, other: Schedule, path: Path) -> tuple[float, int, float, int]:
    """Peaks on this rank, predicted and counted: of its device, then of its host, in bytes.

    Predicted from a profile of the order that keeps all.
    """
    case, m = GPTCase(), kept.num_microbatches
    memory, on_host = ActivationMemory(), 0
    for schedule in (kept, other):
        with built(case, schedule, m) as (adapter, chunks):
            assert adapter is not None
            if schedule is kept:
                adapter.profile(path, None)
            function = adapter.forward_backward_func
            if schedule is kept:
                for _ in range(ITERATIONS):
                    forward_backward(function, chunks, [microbatches(case, m) for _ in chunks], m)
            else:
                memory = ActivationMemory(p for chunk in chunks for p in chunk.parameters())
                adapter.track(memory)
                with memory.watching():
                    forward_backward(function, chunks, [microbatches(case, m) for _ in chunks], m)
                on_host = adapter.part(OffloadPart).peak_host_bytes
            rank = adapter.physical.logical(parallel_state.get_pipeline_model_parallel_rank())
            torch.distributed.barrier()
    profile, placement = read_profile(path), kept.placement
    costs = profile.costs(placement).having(Recomputation(kept_input=profile.message))
    costs = costs.having(Offload(seconds=1e-6))
    table = costs.for_placement(placement)
    first_is_free = (0.0, *table.memory["kept_input"][1:])
    table = replace(table, memory={**table.memory, "kept_input": first_is_free})
    predicted = peak_with_messages(schedules.lower(other), rank, table, profile.message)
    host = simulate(other, costs).peak_host[rank]
    return predicted, memory.peak_bytes, host, on_host
