"""Microbatches that are read before their step, so that it can be planned from their lengths.

For trainers that hand iterators to the schedule and cannot put their microbatches into an order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.planned_steps import PlannedSteps
from megatron_zb.megatron_core.step import Step, StepPart
from megatron_zb.schedules.work import Lengths

LengthsOf = Callable[[Any], tuple[float, float]]
"""Function that returns a microbatch's tokens, and the sum of the squares of its sequences'."""


class ReadAhead(StepPart):
    """Reads all microbatches of a step, plans it and feeds them in the order of the plan.

    What a step returns, and the random streams of layers, keep the order of the iterators. A step
    that has been planned already is left alone.

    Args:
        planned: the plans of the job.
    """

    def __init__(self, planned: PlannedSteps) -> None:
        self._planned = planned
        self.lengths_of: LengthsOf | None = None

    def before_step(self, step: Step) -> None:
        if self.lengths_of is None or self._planned.has_next or step.captured:
            return
        read = [_read(iterator, step.num_microbatches) for iterator in step.data_iterators]
        own = next(filter(None, read), None)
        lengths = None
        if own is not None:
            lengths = Lengths.of(*zip(*map(self.lengths_of, own), strict=True))
        lengths = self._planned.known_to_all(lengths)
        only = step.forward_only
        step.order = self._planned.plan(lengths, keeps_order=False, forward_only=only)
        step.data_iterators = [
            None if items is None else iter([items[j] for j in step.order]) for items in read
        ]

    def after_step(self, step: Step) -> None:
        found = step.forward_data_store
        if step.order is not None and len(found) == len(step.order):
            in_order = dict(zip(step.order, found, strict=True))
            found[:] = [in_order[j] for j in range(len(found))]


def _read(iterator: Iterator[Any] | None, count: int) -> list[Any] | None:
    """Read the microbatches of a step; None on a rank that has no data.

    Raises:
        UsageError: there are too few.
    """
    if iterator is None:
        return None
    items = list(islice(iterator, count))
    if len(items) < count:
        raise UsageError(
            f"the data ended after {len(items)} of {count} microbatches of a step that is read "
            "ahead: give an iterator with all of them"
        )
    return items
