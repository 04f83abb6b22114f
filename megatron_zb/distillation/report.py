"""What a distillation says as it goes: losses, throughput and how busy every rank is.

Ranks do not meet to say it: each leaves its part in the store when it has updated its students, and
rank 0 picks up what has come whenever it has updated its own.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from torch.distributed import Store

from megatron_zb.distillation.student_block import StudentBlock
from megatron_zb.errors import UsageError
from megatron_zb.runtime.recorder import Recorder
from megatron_zb.schedules.passes import Channel, Message, Pass

_POLL = 0.02  # seconds

Losses = dict[int, dict[str, float]]
"""By block and candidate: means over the microbatches since the line before."""


class BusyTime:
    """An observer that adds up how long passes ran since it was last asked."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._recorder = Recorder(on_gpu)

    @contextmanager
    def running(self, work: Pass) -> Iterator[None]:
        """Around a pass."""
        with self._recorder.running(work):
            yield

    def waiting(self, channel: Channel, message: Message) -> Any:
        """Around the wait for a message."""
        return self._recorder.waiting(channel, message)

    def take(self) -> tuple[float, float]:
        """Seconds of passes, and of everything, since the last call."""
        spans, began = self._recorder.spans(), self._recorder.began
        self._recorder = Recorder(self._on_gpu)
        passes = [span.end - span.start for span in spans if isinstance(span.of, Pass)]
        return sum(passes), time.perf_counter() - began


@dataclass(frozen=True)
class Steps:
    """Which steps of a run get a line, and how they are counted."""

    done: int
    """Before this run."""
    last: int
    """Of the whole training, for `step 3/ 30`."""
    interval: int
    samples: int
    """Of one step."""

    def is_told(self, step: int, end: int) -> bool:
        """Whether the step of that number, from 1, gets a line in a run that ends with `end`."""
        return step % self.interval == 0 or step == end


class Report:
    """What rank 0 tells, and what the others leave for it."""

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        steps: Steps,
        student_blocks: Sequence[StudentBlock],
        busy: BusyTime,
        file: TextIO | None,
    ) -> None:
        """Tell of the ranks 0 to `ranks` - 1; the file is rank 0's."""
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._steps = steps
        self._student_blocks = student_blocks
        self._busy = busy
        self._file = file
        self._told = steps.done
        self._end = steps.last
        self._expected: list[int] = []
        self.last: Losses = {}
        """Of the last line; on rank 0 alone."""

    def ends_with(self, step: int) -> None:
        """The run ends with the step of that number, which gets a line in any case."""
        self._end = step

    def after(self, step: int) -> None:
        """This rank has updated its students in the step of that number, from 1."""
        if self._steps.is_told(step, self._end):
            self._leave(step)
            if self._rank == 0:
                self._expected.append(step)
                self._pick_up()

    def finish(self) -> None:
        """On rank 0, wait until all others have told of the last step."""
        while self._expected:
            self._pick_up()
            time.sleep(_POLL)

    def write(self, record: Mapping[str, Any]) -> None:
        """A line of JSON, where there is a file."""
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self._rank == 0:
            print(text, flush=True)

    def _leave(self, step: int) -> None:
        busy, passed = self._busy.take()
        learnt = [[p.block, p.shape.name, *p.take_losses()] for p in self._student_blocks]
        part = {"busy": busy, "seconds": passed, "losses": learnt}
        self._store.set(f"step{step}/{self._rank}", json.dumps(part))

    def _pick_up(self) -> None:
        while self._expected:
            keys = [f"step{self._expected[0]}/{rank}" for rank in range(self._ranks)]
            if not self._store.check(keys):
                return
            parts = [json.loads(self._store.get(key)) for key in keys]
            for key in keys:
                self._store.delete_key(key)
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
