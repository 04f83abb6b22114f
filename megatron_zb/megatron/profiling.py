"""Measure a job in a few of its own iterations: seconds and bytes of its passes, and its links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_zb.planner.profile import LinkProfile, StageProfile, merged
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.runtime.observer import Observer
from megatron_zb.runtime.recorder import AllocatedMemory, MemoryRecorder, Recorder
from megatron_zb.schedules.communication import Channel
from megatron_zb.schedules.passes import Pass, PassKind

WARM_UP = 2
TIMED = 4
ITERATIONS = WARM_UP + TIMED + 1
"""What a profile takes; in the last one, bytes are counted and nothing is timed."""


_SHORTEST = 1e-9  # seconds: what a clock cannot tell from nothing, as on a stage without layers

Spans = list[tuple[Pass | None, float, float]]
"""What a rank did, None for a wait, from when to when."""


class Measured(NamedTuple):
    """What all ranks together have measured; the same on every rank.

    ``spans`` has the last timed step of every logical rank of one pipeline, by one clock.
    """

    stages: list[StageProfile]
    links: list[LinkProfile]
    message: int
    spans: list[Spans]


@dataclass(frozen=True)
class Held:
    """A stage that this rank holds: its number, its logical rank, its layers as letters."""

    stage: int
    rank: int
    layers: str


class Profiling:
    """Takes measures in the first iterations of a job, and again every so many.

    Args:
        begin: is called before the first iteration that counts. From then on every backward has to
            be split, so that B and W can be told apart.
        held: the stages of this rank.
        num_microbatches: of an iteration that counts; others are left out.
        every: iterations from one profile to the next; None for one profile alone.
    """

    def __init__(
        self,
        begin: Callable[[], None],
        held: Sequence[Held],
        num_microbatches: int,
        every: int | None = None,
    ) -> None:
        self._begin, self._held, self._every = begin, held, every
        self._num_microbatches = num_microbatches
        self._done = 0
        self._counts = False
        self._recorders: list[Recorder] = []
        self._memory: MemoryRecorder | None = None
        self._of_allocator = False
        self.observers: tuple[Observer, ...] = ()
        """Who looks on during a step."""

    def before_step(self, num_microbatches: int) -> None:
        """Before a step of training begins."""
        self._counts = num_microbatches == self._num_microbatches
        if not self._counts:
            return
        if self._done == self._every:
            self._done = 0
        if self._done == 0:
            self._begin()

    @contextmanager
    def step(
        self, memory: ActivationMemory | None, parameters: Iterable[torch.Tensor], on_gpu: bool
    ) -> Iterator[ActivationMemory | None]:
        """Around a step; what it gives counts the step's activations.

        Args:
            memory: what counts them anyway, if anything does.
            parameters: no activations, also where autograd saves them.
            on_gpu: its allocator knows all bytes; elsewhere, those that autograd saves are counted.
        """
        with ExitStack() as stack:
            if not self._counts:
                yield memory
                return
            if WARM_UP <= self._done < WARM_UP + TIMED:
                self._recorders.append(Recorder(on_gpu))
                self.observers = (self._recorders[-1],)
            elif self._done == ITERATIONS - 1:
                self._of_allocator = on_gpu
                if on_gpu:
                    self._memory = MemoryRecorder(AllocatedMemory())
                else:
                    if memory is None:
                        memory = stack.enter_context(ActivationMemory(parameters).watching())
                    self._memory = MemoryRecorder(memory)
                self.observers = (self._memory,)
            stack.callback(self._after_step)
            yield memory

    def _after_step(self) -> None:
        self.observers = ()
        self._done += 1

    @property
    def is_complete(self) -> bool:
        """Whether the last step has ended a profile."""
        return self._counts and self._done == ITERATIONS

    def measured(self, links: dict[Channel, float], message: int, ahead: float) -> Measured:
        """What all ranks have measured; collective over the job.

        Args:
            links: the seconds that this rank has measured.
            message: bytes of one.
            ahead: by how much the next rank's clock is ahead of this one's.
        """
        rank = self._held[0].rank
        mine = (self._stages(message), links, rank, ahead, self._last_spans())
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        self._recorders.clear()
        self._memory = None
        stages: dict[int, list[StageProfile]] = defaultdict(list)
        slowest: dict[Channel, float] = defaultdict(float)
        pipeline: dict[int, tuple[float, Spans]] = {}
        for of_stages, of_links, rank, ahead, spans in everyone:
            pipeline.setdefault(rank, (ahead, spans))  # of the first replica
            for number, stage in of_stages.items():
                stages[number].append(stage)
            for channel, seconds in of_links.items():
                slowest[channel] = max(slowest[channel], seconds)
        return Measured(
            merged([seen for _, seen in sorted(stages.items())]),
            [
                LinkProfile(source=c.source, target=c.target, seconds=seconds)
                for c, seconds in sorted(slowest.items())
            ],
            message,
            _by_one_clock([of_rank for _, of_rank in sorted(pipeline.items())]),
        )

    def _last_spans(self) -> Spans:
        recorder = self._recorders[-1]
        began = recorder.began
        return [
            (of if isinstance(of, Pass) else None, began + start, began + end)
            for of, start, end in recorder.spans()
        ]

    def _stages(self, message: int) -> dict[int, StageProfile]:
        seconds = self._seconds()
        return {held.stage: self._stage(held, seconds, message) for held in self._held}

    def _seconds(self) -> dict[tuple[PassKind, int], float]:
        taken: dict[tuple[PassKind, int], list[float]] = defaultdict(list)
        for recorder in self._recorders:
            for of, start, end in recorder.spans():
                if isinstance(of, Pass):
                    taken[of.kind, of.stage].append(end - start)
        return {key: max(median(found), _SHORTEST) for key, found in taken.items()}

    def _stage(
        self, held: Held, seconds: dict[tuple[PassKind, int], float], message: int
    ) -> StageProfile:
        assert self._memory is not None, "no step has been counted"
        changes = self._memory.changes
        after_f = round(median(changes[PassKind.F, held.stage]))
        after_b = after_f + round(median(changes[PassKind.B, held.stage]))
        if self._of_allocator:
            after_f += _messages_of_f(held) * message
        return StageProfile(
            rank=held.rank,
            layers=held.layers,
            forward=seconds[PassKind.F, held.stage],
            backward=seconds[PassKind.B, held.stage],
            weight=seconds[PassKind.W, held.stage],
            # W may hold more than F did, such as the logits' gradient. Schedules keep to a limit of
            # memory where an F begins, so it is counted from then on: nothing is understated.
            activation=max(after_f, after_b, 0),
            held_for_weight=max(after_b, 0),
        )


def _messages_of_f(held: Held) -> int:
    """How many more messages F holds than it allocates: it takes one over and leaves one behind.

    The input was there before F, and counts as held from F to B; the output is allocated in F, and
    goes with its message. What B adds and takes away is the opposite.
    """
    return (held.stage > 0) - (not held.layers.endswith("L"))


def _by_one_clock(ranks: Sequence[tuple[float, Spans]]) -> list[Spans]:
    """The spans of all ranks by the clock of the first; each knows how far the next is ahead."""
    offset, found = 0.0, []
    for ahead, spans in ranks:
        found.append([(of, start - offset, end - offset) for of, start, end in spans])
        offset += ahead
    return found
