"""Measurement of the time to sum gradients over ranks."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

_ROUNDS = 4


def seconds_over_a_link(numbers: int, device: torch.device | str | int) -> float:
    """Measure the seconds for ``numbers`` float32 values to pass a link once; equal on all ranks.

    Collective over all ranks of the job: they are summed over all of them a few times, and the
    fastest counts. A ring over k ranks sends 2(k-1)/k of them over each link. 0 for one rank.
    """
    ranks = dist.get_world_size()
    if ranks == 1 or numbers == 0:
        return 0.0
    tensor = torch.zeros(numbers, device=device)
    taken = torch.tensor([_seconds_to_sum(tensor) for _ in range(_ROUNDS)], device=device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken.min()) * ranks / (2 * (ranks - 1))


def _seconds_to_sum(tensor: torch.Tensor) -> float:
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()  # which waits for the sum
    return time.perf_counter() - began
