"""Times of each block, measured before the first step on activations of the right shape.

Nothing that is trained is touched: blocks are built for the measurement and thrown away, so that a
run that chooses its distribution is the run that was given the same one by hand.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

import torch
import torch.distributed as dist

from megatron_zb.distill.blocks import rotary, taught, teacher_layer
from megatron_zb.distill.lanes import Lanes
from megatron_zb.distill.schedule.distribution import BlockCosts
from megatron_zb.distill.stage import empty_activation
from megatron_zb.distill.student import BlockShape, TeacherShape
from megatron_zb.distill.student_block import StudentBlock
from megatron_zb.runtime.link_times import seconds_over_a_link

_REPEATS = 4  # after one that allocates what then stays


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one block."""

    teacher: float
    """Teacher's forward of one microbatch."""
    student: float
    """Forward, loss and backward of all candidates on one microbatch."""
    update: float
    """Optimizer step of all candidates, once a step."""
    reduce: float = 0.0
    """One transfer of the gradients of all candidates over a link between two ranks."""


def measure(
    args: argparse.Namespace,
    work: Sequence[tuple[int, Sequence[BlockShape]]],
    sizes: TeacherShape,
) -> list[BlockTime]:
    """Measure blocks and candidates, some on each place; the result is equal on all ranks.

    Collective over all ranks.

    Args:
        args: the arguments.
        work: numbers of blocks, each with candidates that are measured together.
        sizes: the sizes of the teacher.
    """
    lanes = Lanes.of(args)
    places, place = lanes.place_of(dist.get_world_size()), lanes.place_of(dist.get_rank())
    mine = {
        number: _measure_block(args, block, candidates, sizes)
        for number, (block, candidates) in enumerate(work)
        if number % places == place
    }
    everywhere: list[dict[int, tuple[BlockTime, int]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    found = {number: measured for on_rank in everywhere for number, measured in on_rank.items()}
    return _with_sums(args, [found[number] for number in sorted(found)])


def _with_sums(
    args: argparse.Namespace, measured: Sequence[tuple[BlockTime, int]]
) -> list[BlockTime]:
    """Add the transfer times of each block's gradients, from their element counts; collective."""
    largest = max(numbers for _, numbers in measured)
    seconds = seconds_over_a_link(largest, "cpu" if args.cpu else "cuda")
    return [replace(time, reduce=seconds * numbers / max(largest, 1)) for time, numbers in measured]


def costs(times: Sequence[BlockTime]) -> BlockCosts:
    """Convert times for :func:`megatron_zb.distill.schedule.distribution.distribute`."""
    teacher, student, update, reduce = zip(*(astuple(time) for time in times), strict=True)
    return BlockCosts.of(teacher=teacher, student=student, update=update, reduce=reduce)


def _measure_block(
    args: argparse.Namespace, block: int, candidates: Sequence[BlockShape], sizes: TeacherShape
) -> tuple[BlockTime, int]:
    """Measure one block; return its times and the number of elements of its gradients."""
    layer = teacher_layer(args, block)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    student_blocks = [StudentBlock(args, block, shape, layer, sizes) for shape in candidates]
    table = rotary(args)
    given = empty_activation(args).normal_()

    def teach() -> torch.Tensor:
        made: torch.Tensor = taught(layer, given, table)
        return made

    wanted = teach()

    def study() -> None:
        for student_block in student_blocks:
            student_block.study(given, wanted, table)

    def update() -> None:
        for student_block in student_blocks:
            student_block.update(None)

    times = BlockTime(*(_seconds(work, not args.cpu) for work in (teach, study, update)))
    gradients = (
        g for student_block in student_blocks for g in student_block.optimizer.gradients().values()
    )
    return times, sum(gradient.numel() for gradient in gradients)


def _seconds(work: Callable[[], object], on_gpu: bool) -> float:
    """Return the seconds of the fastest of several runs, since other load only slows a run down."""
    shortest = float("inf")
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest
