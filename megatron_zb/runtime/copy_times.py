"""Measurement of copies between a device and its host."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_zb.runtime.copy_engines import CopyEngines

BYTES = 1 << 24
"""Bytes of each copy that is timed."""

_ROUNDS = 3


class CopyTimes(NamedTuple):
    """Seconds of :data:`BYTES` copied one way, and both ways at once."""

    one_way: float
    both_ways: float


def copy_times(engines: CopyEngines, device: torch.device) -> CopyTimes:
    """Measure the seconds of a copy on the engines of this rank; collective over the job.

    All ranks copy at the same time, so that a link that several share is as slow as in a step. One
    way is the slower of both, and each figure the fastest of a few rounds.
    """
    there, back = (engines.host_buffer(BYTES) for _ in range(2))
    leaving, coming = (torch.zeros(BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    out, into = (there, leaving, True), (coming, back, False)

    def seconds(*copies: tuple[torch.Tensor, torch.Tensor, bool]) -> float:
        dist.barrier()
        begun = time.perf_counter()
        waits = [engines.begin([(to, from_)], to_host=to_host) for to, from_, to_host in copies]
        for wait in waits:
            wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun

    rounds = [(seconds(out), seconds(into), seconds(out, into)) for _ in range(_ROUNDS)]
    outs, intos, both = (min(column) for column in zip(*rounds, strict=True))
    return CopyTimes(max(outs, intos), both)
