"""A picture of the last steps of a distillation: which rank ran which pass when."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_zb.distill.lanes import Lanes
from megatron_zb.distill.schedule.distribution import Distribution
from megatron_zb.distill.schedule.pipe_bd import pipe_bd
from megatron_zb.drawing.chart import SECONDS
from megatron_zb.drawing.pictures import save_picture
from megatron_zb.runtime.observer import NOBODY, Observer, Recorder
from megatron_zb.schedules.passes import Channel, Message, Pair, Pass, PassKind
from megatron_zb.schedules.simulator import Timeline

STEPS = 3
"""Steps of a picture."""


@dataclass(frozen=True)
class _Durations:
    """Costs of passes that have run: what each took."""

    seconds: dict[Pass, float]

    def duration(self, p: Pass) -> float:
        return self.seconds[p]


@dataclass
class LastSteps:
    """An observer that records the passes of the last steps of this rank.

    Ranks of several hosts are drawn by the clocks of their hosts.

    Args:
        on_gpu: whether passes run on one.
        microbatches: of a step in the relay.
        run_ahead: steps that ranks may be apart.
    """

    on_gpu: bool
    microbatches: int
    run_ahead: int
    _first: int = 0
    _epoch: float = 0.0
    _recorder: Recorder | None = None
    _observer: Observer = field(default=NOBODY)

    def before(self, step: int, end: int) -> None:
        """Begin to record if step `step`, from 0, is the first of the last ones before `end`."""
        if self._recorder is None and step >= end - STEPS:
            self._recorder = self._observer = Recorder(self.on_gpu)
            self._first, self._epoch = step, time.time()

    @contextmanager
    def running(self, work: Pass | Pair) -> Iterator[None]:
        """Record a pass while this context is active."""
        with self._observer.running(work):
            yield

    def waiting(self, channel: Channel, message: Message) -> Any:
        """Return a context for the wait for a message, which is idle time."""
        return NOBODY.waiting(channel, message)

    def draw(self, distribution: Distribution, lanes: Lanes, path: Path) -> bool:
        """Gather the passes of all ranks, and write the picture on the first; collective.

        Returns:
            Whether this rank has written it: there is none of a run without steps.

        Raises:
            UsageError: it cannot be written.
        """
        spans = [] if self._recorder is None else self._recorder.spans()
        mine = [
            (*self._numbered(span.of), self._epoch + span.start, self._epoch + span.end)
            for span in spans
            if isinstance(span.of, Pass)
        ]
        everywhere: list[list[Any]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everywhere, mine)
        if dist.get_rank() != 0 or not mine:
            return False
        ranks = [everywhere[place * lanes.size] for place in range(distribution.num_ranks)]
        save_picture(self._timeline(distribution, ranks), path, SECONDS)
        return True

    def _numbered(self, p: Pass) -> tuple[str, int, int]:
        """Return a pass, numbered from the first step that is drawn."""
        first = self._first * (1 if p.kind is PassKind.U else self.microbatches)
        return p.kind.value, p.stage, p.microbatch - first

    def _timeline(self, distribution: Distribution, ranks: Sequence[Sequence[Any]]) -> Timeline:
        steps = 1 + max(number for kind, _, number, _, _ in ranks[0] if kind == PassKind.U)
        schedule = pipe_bd(distribution, self.microbatches, steps, self.run_ahead)
        begin = min(start for rank in ranks for *_, start, _ in rank)
        times = [
            {Pass(PassKind(k), s, n): (start - begin, end - begin) for k, s, n, start, end in rank}
            for rank in ranks
        ]
        seconds = {p: end - start for rank in times for p, (start, end) in rank.items()}
        start, end = (
            tuple(
                tuple(of_rank[p][side] for p in passes)
                for of_rank, passes in zip(times, schedule.ranks, strict=True)
            )
            for side in (0, 1)
        )
        costs: Any = _Durations(seconds)
        return Timeline(schedule, costs, start, end)
