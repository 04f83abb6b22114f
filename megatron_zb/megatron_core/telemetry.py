"""Spans of OpenTelemetry for passes and messages, beside those of Megatron-LM's ``--otel-enabled``.

Megatron-LM after 0.19 traces its function ``forward_step``, which runs every F here, too. Its spans
of backwards and messages are around functions that a schedule of this package does not call. This
part makes them in the same two groups, with Megatron's names where the work is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.step import Step, StepPart
from megatron_zb.runtime.observer import NOTHING, Observer
from megatron_zb.schedules.passes import Channel, Message, Pair, Pass, PassKind

_PASSES, _MESSAGES = "microbatch", "communication"  # groups of spans
_NAMES = {
    PassKind.BW: "megatron.microbatch.backward",
    PassKind.B: "megatron.microbatch.backward_input",
    PassKind.W: "megatron.microbatch.backward_weight",
}


class SpansPart(StepPart):
    """Traces the passes of every step where the job traces Megatron's groups of spans."""

    @cached_property
    def _observers(self) -> tuple[Observer, ...]:
        groups = versions.enabled_span_groups((_PASSES, _MESSAGES))
        return (_Spans(groups),) if groups else ()

    def observers(self, step: Step) -> Sequence[Observer]:
        """Return the observer that makes spans, if the job has any of the two groups."""
        return self._observers


class _Spans:
    """An observer that makes a span of every pass but F, and of every wait for a message."""

    def __init__(self, groups: frozenset[str]) -> None:
        from opentelemetry import trace

        self._groups = groups
        self._tracer = trace.get_tracer("megatron_zb")

    def running(self, work: Pass | Pair) -> AbstractContextManager[Any]:
        """Return the span of a pass; a pair has the numbers of its backward."""
        if _PASSES not in self._groups:
            return NOTHING
        if isinstance(work, Pair):
            return self._span("megatron.microbatch.forward_backward", work.backward)
        if work.kind is PassKind.F:
            return NOTHING
        name = _NAMES.get(work.kind, f"megatron_zb.microbatch.{work.kind}")
        return self._span(name, work)

    def waiting(self, channel: Channel, message: Message) -> AbstractContextManager[Any]:
        """Return the span of a wait for a message."""
        if _MESSAGES not in self._groups:
            return NOTHING
        direction = "backward" if message.is_gradient else "forward"
        return self._span(f"megatron.p2p.recv_{direction}", message)

    def _span(self, name: str, of: Pass | Message) -> AbstractContextManager[Any]:
        attributes = {"stage": of.stage, "microbatch": of.microbatch}
        span: AbstractContextManager[Any] = self._tracer.start_as_current_span(
            name, attributes=attributes
        )
        return span
