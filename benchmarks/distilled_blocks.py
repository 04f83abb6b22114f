"""Blocks of a teacher and their students to time: real ones of torch, and ones that sleep."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_zb.distill.schedule.distribution import BlockCosts


class Blocks(Protocol):
    """What every way to distil is made of. A rank may use any of the blocks."""

    costs: BlockCosts

    def read(self, microbatch: int) -> torch.Tensor:
        """The input of block 0."""

    def empty(self) -> torch.Tensor:
        """Room for an activation."""

    def teach(self, block: int, given: torch.Tensor) -> torch.Tensor:
        """The teacher's forward."""

    def study(self, block: int, given: torch.Tensor, wanted: torch.Tensor) -> None:
        """Forward, loss and backward of the block's student."""

    def start_reduce(self, block: int, group: dist.ProcessGroup | None) -> Callable[[], None]:
        """Begin to sum the student's gradients over a group; what is returned waits for it."""

    def update(self, block: int) -> None:
        """The step of the student's optimizer."""

    def weights(self, block: int) -> torch.Tensor:
        """All weights of the student in a row."""


class SleepingBlocks:
    """Blocks that sleep for their costs; summing over a group waits for it, and sleeps as well."""

    def __init__(self, costs: BlockCosts) -> None:
        self.costs = costs
        self._link_free = 0.0

    def read(self, microbatch: int) -> torch.Tensor:
        return torch.zeros(64)

    def empty(self) -> torch.Tensor:
        return torch.empty(64)

    def teach(self, block: int, given: torch.Tensor) -> torch.Tensor:
        time.sleep(self.costs.teacher[block])
        return given

    def study(self, block: int, given: torch.Tensor, wanted: torch.Tensor) -> None:
        time.sleep(self.costs.student[block])

    def start_reduce(self, block: int, group: dist.ProcessGroup | None) -> Callable[[], None]:
        degree = dist.get_world_size(group) if group is not None else 1
        if degree == 1:
            return _nothing
        work = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
        assert work is not None
        seconds = self.costs.reduce[block] * 2 * (degree - 1) / degree
        # One link, one message after the other; computing goes on meanwhile.
        self._link_free = max(self._link_free, time.perf_counter()) + seconds
        until = self._link_free

        def finish() -> None:
            work.wait()
            time.sleep(max(until - time.perf_counter(), 0.0))

        return finish

    def update(self, block: int) -> None:
        time.sleep(self.costs.update[block])

    def weights(self, block: int) -> torch.Tensor:
        return torch.zeros(0)


def _nothing() -> None:
    """There is nothing to wait for."""


@dataclass(frozen=True)
class Sizes:
    """Of real blocks: transformer layers of ``hidden``, of which a student has half the MLP."""

    hidden: int
    heads: int
    seq_length: int
    micro_batch: int


class _Layer(torch.nn.Module):
    """Attention and an MLP, each before a sum with its input."""

    def __init__(self, sizes: Sizes, ffn: int) -> None:
        super().__init__()
        h = sizes.hidden
        self.heads = sizes.heads
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(h), torch.nn.LayerNorm(h)])
        self.qkv, self.out = torch.nn.Linear(h, 3 * h), torch.nn.Linear(h, h)
        self.up, self.down = torch.nn.Linear(h, ffn), torch.nn.Linear(ffn, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        up: torch.Tensor = self.up(self.norms[1](x))
        return x + self.down(torch.nn.functional.gelu(up))


_SAMPLES, _VOCABULARY = 256, 1024
"""Of the text that real blocks read."""


class RealBlocks:
    """Transformer layers on this process's one core, in fp32; students have SGD with momentum.

    Data are tokens in memory, whose embedding is read. ``share`` multiplies the learning rate: a
    microbatch's share of the batch makes of the sum of its microbatches' means the batch's mean.
    """

    def __init__(
        self, number: int, sizes: Sizes, costs: BlockCosts | None = None, share: float = 1.0
    ) -> None:
        torch.manual_seed(0)
        self._sizes = sizes
        self._teachers = [_Layer(sizes, 4 * sizes.hidden) for _ in range(number)]
        self._students = [_Layer(sizes, 2 * sizes.hidden) for _ in range(number)]
        self._optimizers = [
            torch.optim.SGD(student.parameters(), lr=0.1 * share, momentum=0.9)
            for student in self._students
        ]
        for teacher in self._teachers:
            teacher.requires_grad_(False)
        self._text = torch.randint(_VOCABULARY, (_SAMPLES, sizes.seq_length))
        self._embedding = torch.randn(_VOCABULARY, sizes.hidden)
        self.costs = costs or BlockCosts.of(teacher=[1.0] * number, student=[1.0] * number)

    def read(self, microbatch: int) -> torch.Tensor:
        number = self._sizes.micro_batch
        samples = torch.arange(microbatch * number, (microbatch + 1) * number) % _SAMPLES
        return torch.nn.functional.embedding(self._text[samples], self._embedding)

    def empty(self) -> torch.Tensor:
        return torch.empty(self._sizes.micro_batch, self._sizes.seq_length, self._sizes.hidden)

    def teach(self, block: int, given: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            made: torch.Tensor = self._teachers[block](given)
        return made

    def study(self, block: int, given: torch.Tensor, wanted: torch.Tensor) -> None:
        loss = torch.nn.functional.mse_loss(self._students[block](given), wanted)
        loss.backward()

    def start_reduce(self, block: int, group: dist.ProcessGroup | None) -> Callable[[], None]:
        if group is None or dist.get_world_size(group) == 1:
            return _nothing
        gradients = [p.grad for p in self._students[block].parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None

        def finish() -> None:
            work.wait()
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

        return finish

    def update(self, block: int) -> None:
        self._optimizers[block].step()
        self._optimizers[block].zero_grad(set_to_none=True)

    def weights(self, block: int) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self._students[block].parameters()])


def reading_time(blocks: RealBlocks, repetitions: int = 20) -> float:
    """Processor seconds that reading a microbatch takes."""
    return _busy(partial(blocks.read, 0), repetitions)


def milliseconds(seconds: Iterable[float]) -> list[float]:
    """As they are written into results."""
    return [round(1000 * each, 3) for each in seconds]


def measured_costs(blocks: RealBlocks, number: int, repetitions: int = 5) -> BlockCosts:
    """Time every block on all ranks at once; of the ranks the mean. Collective.

    What computes is timed in processor seconds, which others on the machine hardly change; summing
    is timed on the clock, and the shortest is taken.
    """
    given = blocks.read(0)
    teacher, student, update, reduce = [], [], [], []
    for block in range(number):
        wanted = blocks.teach(block, given)
        taught = _busy(partial(blocks.teach, block, given), repetitions)
        studied = _busy(partial(blocks.study, block, given, wanted), repetitions)
        dist.barrier()
        summed = _shortest(partial(_summed, blocks, block), repetitions)
        teacher.append(taught)
        student.append(studied)
        reduce.append(summed * dist.get_world_size() / (2 * (dist.get_world_size() - 1)))
        blocks.update(block)
        blocks.study(block, given, wanted)
        update.append(_busy_once(partial(blocks.update, block)))
    times = torch.tensor([teacher, student, update, reduce], dtype=torch.float64)
    dist.all_reduce(times)
    rows = (times / dist.get_world_size()).tolist()
    return BlockCosts.of(teacher=rows[0], student=rows[1], update=rows[2], reduce=rows[3])


def _summed(blocks: Blocks, block: int) -> None:
    blocks.start_reduce(block, dist.group.WORLD)()


def _busy(what: Callable[[], object], repetitions: int) -> float:
    """Processor seconds of a call, the median, but for the first."""
    what()
    return statistics.median(_busy_once(what) for _ in range(repetitions))


def _busy_once(what: Callable[[], object]) -> float:
    began = time.process_time()
    what()
    return time.process_time() - began


def _shortest(what: Callable[[], object], repetitions: int) -> float:
    """Seconds on the clock of the fastest call."""
    taken = []
    for _ in range(repetitions):
        began = time.perf_counter()
        what()
        taken.append(time.perf_counter() - began)
    return min(taken)


def synthetic_costs(
    number: int, mean: Sequence[float], *, uneven: bool, update: float, reduce: float
) -> BlockCosts:
    """Seconds of blocks that take ``mean`` (teacher, student) on average.

    Uneven ones fall from 1.6 to 0.4 times that: as in a convolutional network, whose first blocks
    see the largest activations. Updating and summing gradients cost the same for all.
    """
    spread = 0.6 if uneven and number > 1 else 0.0
    shares = [1 + spread * (1 - 2 * b / max(number - 1, 1)) for b in range(number)]
    teacher, student = mean
    return BlockCosts.of(
        teacher=[teacher * share for share in shares],
        student=[student * share for share in shares],
        update=update,
        reduce=reduce,
    )
