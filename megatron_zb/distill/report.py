"""Progress reports of a distillation: losses, throughput and the busy time of every rank.

Reports need no collective: each rank leaves its part in the store when it has updated its students,
and rank 0 collects what has arrived whenever it has updated its own.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.distributed import Store

from megatron_zb.distill.lanes import Lanes
from megatron_zb.distill.student_block import StudentBlock
from megatron_zb.errors import UsageError
from megatron_zb.runtime.observer import Recorder
from megatron_zb.schedules.passes import Channel, Message, Pair, Pass
from megatron_zb.train.log import Records

_POLL = 0.02  # seconds

Losses = dict[int, dict[str, float]]
"""Losses by block and candidate: means over the microbatches since the previous line."""


class BusyTime:
    """An observer that sums the seconds of passes since the last :meth:`take`."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._recorder = Recorder(on_gpu)

    @contextmanager
    def running(self, work: Pass | Pair) -> Iterator[None]:
        """Measure a pass while this context is active."""
        with self._recorder.running(work):
            yield

    def waiting(self, channel: Channel, message: Message) -> Any:
        """Return a context for the wait for a message, which does not count as busy."""
        return self._recorder.waiting(channel, message)

    def take(self) -> tuple[float, float]:
        """Return the seconds of passes and the elapsed seconds since the last call."""
        spans, began = self._recorder.spans(), self._recorder.began
        self._recorder = Recorder(self._on_gpu)
        passes = [span.end - span.start for span in spans if isinstance(span.of, Pass)]
        return sum(passes), time.perf_counter() - began


@dataclass(frozen=True)
class Steps:
    """Numbering of a run's steps, and the choice of those that are reported."""

    done: int
    """Steps before this run."""
    last: int
    """Last step of the whole training, for `step 3/ 30`."""
    interval: int
    samples: int
    """Samples of one step."""

    def is_reported(self, step: int, end: int) -> bool:
        """Return whether step `step`, from 1, is reported in a run that ends with `end`."""
        return step % self.interval == 0 or step == end


class StepBar:
    """A bar of the steps that are done and the time that is left, below a terminal's lines."""

    def __init__(self, done: int, last: int) -> None:
        self._progress = Progress(
            TextColumn("steps"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            transient=True,
        )
        self._task = self._progress.add_task("", total=last, completed=done)
        self._progress.start()
        self._progress.console.show_cursor(True)  # a rank that ends early would leave it hidden

    def update(self, *, completed: int) -> None:
        """Show a number of steps as done."""
        self._progress.update(self._task, completed=completed)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()


@dataclass(frozen=True)
class Board:
    """Where the parts of a line are left for rank 0, one for each tensor-parallel group."""

    store: Store
    rank: int | None
    """Number of this rank among those that leave a part; None if it leaves none."""
    ranks: int

    @classmethod
    def of(cls, store: Store, lanes: Lanes, places: int) -> Board:
        """Build the board of this rank, in a job that trains on a number of places."""
        rank = dist.get_rank()
        mine = None if lanes.tensor_lane(rank) else rank // lanes.tensor
        return cls(store, mine, places * lanes.expert)

    def leave(self, step: int, part: Mapping[str, Any]) -> None:
        """Leave this rank's part of a step."""
        if self.rank is not None:
            self.store.set(f"step{step}/{self.rank}", json.dumps(part))

    def pick_up(self, step: int) -> list[Any] | None:
        """Return and remove the parts of all ranks; None if one is missing yet."""
        keys = [f"step{step}/{rank}" for rank in range(self.ranks)]
        if not self.store.check(keys):
            return None
        parts = [json.loads(self.store.get(key)) for key in keys]
        for key in keys:
            self.store.delete_key(key)
        return parts


class DistillReport:
    """Progress reports: rank 0 prints and writes them, the other ranks contribute to them."""

    def __init__(
        self,
        board: Board,
        steps: Steps,
        student_blocks: Sequence[StudentBlock],
        busy: BusyTime,
        records: Records | None,
    ) -> None:
        """Report on the ranks of the board; only rank 0 writes to the file."""
        self._board = board
        self._steps = steps
        self._student_blocks = student_blocks
        self._busy = busy
        self._records = records
        self._told = steps.done
        self._end = steps.last
        self._expected: list[int] = []
        self.last: Losses = {}
        """Losses of the last line; on rank 0 alone."""
        shows = board.rank == 0 and sys.stdout.isatty()
        self._bar = StepBar(steps.done, steps.last) if shows else None

    def ends_with(self, step: int) -> None:
        """Set the last step of the run, which is reported in any case."""
        self._end = step

    def after(self, step: int) -> None:
        """Record that this rank has updated its students in step `step`, from 1."""
        if self._bar is not None:
            self._bar.update(completed=step)
        if self._steps.is_reported(step, self._end):
            self._leave(step)
            if self._board.rank == 0:
                self._expected.append(step)
                self._pick_up()

    def finish(self) -> None:
        """Wait on rank 0 until all other ranks have reported the last step."""
        while self._expected:
            self._pick_up()
            time.sleep(_POLL)
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a record as a line of JSON, if there is a file."""
        if self._records is not None:
            self._records.write(record)

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self._bar is not None:
            self._bar.say(text)
        elif self._board.rank == 0:
            print(text, flush=True)

    def _leave(self, step: int) -> None:
        busy, passed = self._busy.take()
        learnt = [[p.block, p.shape.name, *p.take_losses()] for p in self._student_blocks]
        self._board.leave(step, {"busy": busy, "seconds": passed, "losses": learnt})

    def _pick_up(self) -> None:
        while self._expected:
            parts = self._board.pick_up(self._expected[0])
            if parts is None:
                return
            self._tell(self._expected.pop(0), parts)

    def _tell(self, step: int, parts: Sequence[Any]) -> None:
        self.last = _means(parts)
        _check_finite(self.last, step)
        seconds = max(part["seconds"] for part in parts)
        samples = (step - self._told) * self._steps.samples
        self._told = step
        utilisation = [part["busy"] / part["seconds"] for part in parts]
        record = {
            "iteration": step,
            "losses": self.last,
            "samples_per_second": samples / seconds,
            "utilisation": utilisation,
        }
        self.write(record)
        lowest = " ".join(f"{min(self.last[block].values()):.2e}" for block in sorted(self.last))
        width = len(str(self._steps.last))
        self.say(
            f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] step {step:{width}d}/{self._steps.last} | "
            f"samples per second: {samples / seconds:.1f} | loss by block: {lowest} | "
            f"ranks busy: {' '.join(f'{part:.0%}' for part in utilisation)} |"
        )


def _means(parts: Sequence[Any]) -> Losses:
    sums: dict[tuple[int, str], tuple[float, int]] = {}
    for part in parts:
        for block, name, total, count in part["losses"]:
            so_far = sums.get((block, name), (0.0, 0))
            sums[block, name] = so_far[0] + total, so_far[1] + count
    means: Losses = {}
    for (block, name), (total, count) in sorted(sums.items()):
        means.setdefault(block, {})[name] = total / count
    return means


def _check_finite(losses: Losses, step: int) -> None:
    for block, candidates in losses.items():
        for name, loss in candidates.items():
            if not math.isfinite(loss):
                raise UsageError(
                    f"the loss of block {block}, candidate {name}, is not a number any more in "
                    f"step {step}: give a lower --lr, or a lower learning_rate for it in the "
                    "--student-config"
                )
