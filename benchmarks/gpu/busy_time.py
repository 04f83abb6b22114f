"""The time in which a rank runs passes, under a schedule of this package or Megatron's own.

On a GPU, CUDA events before and after every pass give it; the host waits for none of them in a
step. Megatron's passes are its ``forward_step`` and ``backward_step``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.pipeline_parallel import schedules

from megatron_zb.megatron_core.step import Step, StepPart
from megatron_zb.runtime.observer import Observer, Recorder
from megatron_zb.schedules.passes import Message, Pass, PassKind


class BusyTime(StepPart):
    """Records the passes of this rank: :meth:`begin` a step, then ask for its seconds."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._recorder = Recorder(on_gpu)

    def observers(self, step: Step) -> Sequence[Observer]:
        """Return the observer of this package's passes."""
        return (self._recorder,)

    def begin(self) -> None:
        """Begin a step, for which the host waits until the device has done all before."""
        self._recorder = Recorder(self._on_gpu)

    def seconds(self) -> tuple[float, float]:
        """Return the seconds in which passes ran, and those until the end of the last one."""
        passes = [span for span in self._recorder.spans() if not isinstance(span.of, Message)]
        return sum(span.end - span.start for span in passes), max(span.end for span in passes)

    def observe_megatron(self) -> None:
        """Record the passes of Megatron's own schedules in this process."""
        schedules.forward_step = self._recorded(PassKind.F, schedules.forward_step)
        schedules.backward_step = self._recorded(PassKind.BW, schedules.backward_step)

    def _recorded(self, kind: PassKind, function: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with self._recorder.running(Pass(kind, 0, 0)):  # the number of the pass is not used
                return function(*args, **kwargs)

        return recorded
