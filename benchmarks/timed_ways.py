"""Time different ways to distil the same blocks, and compare the weights that they train."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from distilled_blocks import Blocks
from ways_to_distil import (
    Close,
    Run,
    all_blocks_at_once,
    block_by_block,
    pipelined,
    seconds_all_at_once,
    seconds_block_by_block,
)

from megatron_zb.distill.schedule.distribution import BlockCosts, Distribution, RelayCosts
from megatron_zb.distill.schedule.pipe_bd import pipe_bd
from megatron_zb.schedules import simulate


def _nothing() -> None:
    """Close nothing: the groups are the job's."""


@dataclass(frozen=True)
class Way:
    """One way to distil: how it runs, how long a step should take, and which rank has a block."""

    blocks: Blocks
    run: Run
    predicted: float
    distribution: Distribution | None
    close: Close = _nothing


class _Taken(NamedTuple):
    """A step: seconds on the clock of the slowest rank, and of processor of the busiest."""

    seconds: float
    busiest: float


def one_block_at_a_time(costs: BlockCosts, blocks: Blocks, microbatches: int) -> Way:
    """Data-parallel, block by block. Collective."""
    seconds = seconds_block_by_block(costs, dist.get_world_size(), microbatches)
    return Way(blocks, block_by_block(blocks, microbatches), seconds, None)


def every_block_at_once(costs: BlockCosts, blocks: Blocks, microbatches: int) -> Way:
    """Data-parallel, all blocks on every rank. Collective."""
    seconds = seconds_all_at_once(costs, dist.get_world_size(), microbatches)
    return Way(blocks, all_blocks_at_once(blocks, microbatches), seconds, None)


def in_a_pipeline(
    costs: BlockCosts,
    blocks: Blocks,
    distribution: Distribution,
    *,
    microbatches: int,
    steps: int,
    run_ahead: int,
) -> Way:
    """Pipe-BD. Collective."""
    schedule = pipe_bd(distribution, microbatches, steps, run_ahead)
    timeline = simulate(schedule, RelayCosts(costs, distribution))
    run, close = pipelined(blocks, distribution, microbatches, run_ahead)
    return Way(blocks, run, timeline.makespan / steps, distribution, close)


def timed(ways: Mapping[str, Way], fresh: Blocks, steps: int, repetitions: int) -> dict[str, Any]:
    """Time consecutive steps of every way, one way after another. Collective over all ranks.

    ``fresh`` are untrained blocks: how far students have come is measured from them. The ways end:
    the threads of groups that are left would keep cores from later ones.
    """
    taken: dict[str, list[_Taken]] = {name: [] for name in ways}
    for _ in range(repetitions):
        for name, way in ways.items():
            taken[name].append(_taken(way.run, steps))
    found = {
        "difference": _difference(ways, fresh),
        "ways": {name: _summary(way, taken[name]) for name, way in ways.items()},
    }
    for way in ways.values():
        way.close()
    return found


def _taken(run: Run, steps: int) -> _Taken:
    """Per step, of the slowest rank and of the busiest."""
    dist.barrier()
    began, busy = time.perf_counter(), time.process_time()
    run(steps)
    taken = [time.perf_counter() - began, time.process_time() - busy]
    most = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return _Taken(*(most / steps).tolist())


def _difference(ways: Mapping[str, Way], fresh: Blocks) -> float:
    """By how much weights of students differ between any way and the first, as a norm.

    As a share of what training has changed: all ways have trained on the same data, equally long.
    """
    number = fresh.costs.num_blocks
    found = [_trained(way, number) for way in ways.values()]
    began = torch.cat([fresh.weights(block) for block in range(number)])
    way_gone = (found[0] - began).norm().clamp_min(1e-30)
    return max(((other - found[0]).norm() / way_gone).item() for other in found[1:])


def _trained(way: Way, number: int) -> torch.Tensor:
    """Weights of all students, each from the first rank that has it."""
    whole = []
    for block in range(number):
        owner = 0
        if way.distribution is not None:
            ranges = way.distribution.ranges
            owner = next(ranks[0] for blocks, ranks in ranges if block in blocks)
        weights = way.blocks.weights(block).clone()
        dist.broadcast(weights, owner)
        whole.append(weights)
    return torch.cat(whole)


def _summary(way: Way, taken: list[_Taken]) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "seconds": round(statistics.median(one.seconds for one in taken), 5),
        "all": [round(one.seconds, 5) for one in taken],
        "busiest": round(statistics.median(one.busiest for one in taken), 5),
        "predicted": round(way.predicted, 5),
    }
    if way.distribution is not None:
        summary["distribution"] = way.distribution.spec
    return summary
