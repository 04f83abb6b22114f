"""A distillation of small blocks on real ranks: teachers, students and their relay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_zb.distill.relay_steps import Exchange, relay_steps
from megatron_zb.distill.schedule.distribution import Distribution
from megatron_zb.distill.schedule.step_by_step import step_by_step
from megatron_zb.runtime.channels import Channels, ShapedChannels, new_groups
from megatron_zb.runtime.executor import Transport
from megatron_zb.schedules.passes import Message

M = 4  # microbatches of a step
RATE = 0.05


def data(microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    return torch.randn(3, 5, generator=generator, dtype=torch.float64)


class Block:
    """A teacher's block, tanh(x w), and its student, x v, which learns to make the same."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1000 + number)
        self.teacher = torch.randn(5, 5, generator=generator, dtype=torch.float64)
        self.student = torch.zeros(5, 5, dtype=torch.float64, requires_grad=True)

    def teach(self, given: torch.Tensor) -> torch.Tensor:
        return torch.tanh(given @ self.teacher)

    def study(self, given: torch.Tensor, wanted: torch.Tensor) -> None:
        (given @ self.student - wanted).square().sum().backward()

    def update(self) -> None:
        assert self.student.grad is not None
        with torch.no_grad():
            self.student -= RATE * self.student.grad
        self.student.grad = None


class BlockStage:
    """Stage of consecutive blocks that all-reduces their gradients over ``group``."""

    def __init__(self, blocks: Sequence[Block], group: dist.ProcessGroup, is_last: bool) -> None:
        self.blocks, self.group, self.is_last = blocks, group, is_last
        self.lessons: list[tuple[Block, torch.Tensor, torch.Tensor]] = []
        self.updates: list[int] = []

    def teach(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        given = data(microbatch) if activation is None else activation
        for block in self.blocks:
            wanted = block.teach(given)
            self.lessons.append((block, given, wanted))
            given = wanted
        return given  # of the last stage, too: nobody may send it

    def study(self, microbatch: int) -> None:
        for block, given, wanted in self.lessons:
            block.study(given, wanted)
        self.lessons.clear()

    def update(self, step: int) -> None:
        self.updates.append(step)
        for block in self.blocks:
            gradient = block.student.grad
            assert gradient is not None
            dist.all_reduce(gradient, group=self.group)
            block.update()


def distilled_on_ranks(
    stages: list[tuple[int, int]],
    runs: list[tuple[int, int]],
    any_shape: bool = False,
    most_waiting: int | None = None,
) -> dict[int, torch.Tensor]:
    """The students of this rank's blocks after the steps of each run."""
    distribution, rank = Distribution.of(stages), dist.get_rank()
    placement = distribution.placement
    program = step_by_step(distribution, M, run_ahead=1, most_waiting=most_waiting)
    stage = distribution.stage_on(rank)
    [group] = new_groups([placement.ranks_of[stage]])
    blocks = {number: Block(number) for number in distribution.ranges[stage][0]}
    is_last = stage == placement.num_stages - 1
    channels, headers = (
        Channels(range(placement.pipeline_size), placement, "cpu") for _ in range(2)
    )
    held = BlockStage(list(blocks.values()), group, is_last)
    for first, until in runs:
        transport: Transport = channels
        if any_shape:
            transport = ShapedChannels(channels, headers, placement.num_stages)
        steps = relay_steps(
            program, rank, held, Exchange(transport, empty), first=first, until=until
        )
        assert list(steps) == list(range(first, until))
    assert held.updates == [step for first, until in runs for step in range(first, until)]
    channels.close()
    headers.close()
    return {number: block.student.detach() for number, block in blocks.items()}


def empty(message: Message) -> torch.Tensor:
    return torch.empty(3, 5, dtype=torch.float64)
