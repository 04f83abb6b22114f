"""Steps whose microbatches have unequal lengths, planned from these lengths before each step.

A trainer that knows the lengths of a step's microbatches gives them to :class:`PlannedSteps` right
before the step. All ranks that run one model find the same plan, since it follows from the lengths
alone, and compare it. Replicas with an expert all-to-all wait for one another in
every pass: they plan for the longest of their microbatches that run at one time.

For trainers that hand iterators to the schedule and cannot put their microbatches into an order,
:class:`ReadAhead` reads them before their step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.current_schedule import CurrentSchedule
from megatron_zb.megatron_core.step import Step, StepPart, activation_shape
from megatron_zb.runtime.channels import new_groups
from megatron_zb.schedules.features.adapters import AdapterRules
from megatron_zb.schedules.lowering import Program, lower
from megatron_zb.schedules.simulator import simulate
from megatron_zb.schedules.step_plan import (
    Lengths,
    Order,
    StepPlan,
    costs_of_work,
    plan_forwards,
    plan_step,
)


@dataclass(frozen=True)
class _Next:
    """The step that has been planned; ``plan`` is None where all microbatches are alike.

    ``lengths`` are in the order of the step.
    """

    num_microbatches: int
    forward_only: bool
    plan: StepPlan | None
    lengths: Lengths | None = None


class PlannedSteps:
    """Programs of the steps: of the schedule, or of a plan for the next step.

    Args:
        current: the schedule of the job.
    """

    def __init__(self, current: CurrentSchedule) -> None:
        self._current = current
        self._next: _Next | None = None
        self._groups: list[Any] = []

    def plan(self, lengths: Lengths, *, keeps_order: bool, forward_only: bool) -> Order:
        """Plan the next step; return the order of its microbatches.

        Those of several owners, such as adapters, keep their order. Collective over the job, once
        its process groups exist.

        Raises:
            UsageError: no order keeps the memory limit, other ranks have other lengths, or another
                model runs beside the trained one.
        """
        if (second := self._current.second_model) is not None:
            raise UsageError(
                f"a step with {second.in_words} is not planned for unequal microbatches: do not "
                "give their lengths, or leave it out of the schedule"
            )
        rules = self._current.table(len(lengths), forward_only).rules
        keeps_order = keeps_order or bool(rules.owners)
        sizes = sorted(range(len(lengths)), key=lambda j: (-lengths.tokens[j], j))
        groups = self._connected()
        if groups and groups[1].size() > 1:
            of_all = _gathered(groups[1], lengths if keeps_order else lengths.in_order(sizes))
            planned = self._planned(_longest(of_all), keeps_order, forward_only)
            places = range(len(sizes)) if keeps_order else sizes
            order = tuple(places[j] for j in planned)
        else:
            order = self._planned(lengths, keeps_order, forward_only)
        if groups:
            self._agree(groups[0], lengths, order)
        assert self._next is not None
        self._next = replace(self._next, lengths=lengths.in_order(order))
        return order

    @property
    def has_next(self) -> bool:
        """Whether the next step has been planned."""
        return self._next is not None

    def known_to_all(self, lengths: Lengths | None) -> Lengths:
        """Return the lengths that a rank of the model has read.

        Often only the first tensor-parallel ranks of the first and the last stage read data.
        Collective over tensor and pipeline parallelism.

        Raises:
            UsageError: no rank has read any.
        """
        groups = self._connected()
        of_all = _gathered(groups[2], lengths) if groups else [lengths]
        found = next(filter(None, of_all), None)
        if found is None:
            raise UsageError("no rank of the model has data to read ahead: pass its iterator")
        return found

    @property
    def lengths(self) -> Lengths | None:
        """Lengths of the next step's microbatches, if it has been planned."""
        return None if self._next is None else self._next.lengths

    def program_for(self, num_microbatches: int, forward_only: bool, captured: bool) -> Program:
        """Return the program of a step: as planned, if it has been and is not measured.

        Raises:
            UsageError: another step has been planned.
        """
        planned, self._next = self._next, None
        if planned is None:
            return self._current.program_for(num_microbatches, forward_only, captured)
        asked = (num_microbatches, forward_only)
        if asked != (planned.num_microbatches, planned.forward_only):
            raise UsageError(
                f"the step that was planned has {_said(*_sizes_of(planned))}, but this one has "
                f"{_said(*asked)}: plan each step right before it"
            )
        if planned.plan is None or (self._current.measures and not forward_only):
            return self._current.program_for(num_microbatches, forward_only, captured)
        timeline = simulate(planned.plan.schedule, planned.plan.costs)
        return lower(planned.plan.schedule, timeline, captured=captured)

    def _planned(self, lengths: Lengths, keeps_order: bool, forward_only: bool) -> Order:
        current, m = self._current, len(lengths)
        given = tuple(range(m))
        if len(set(zip(lengths.tokens, lengths.squares, strict=True))) == 1:
            self._next = _Next(m, forward_only, None)
            return given
        table = current.table(m, forward_only)
        rules, equal = table.rules, current.costs
        if isinstance(rules, AdapterRules):
            equal = rules.costs(equal)  # with what their updates take
        costs = costs_of_work(equal, lengths, current.attention)
        if forward_only:
            plan: StepPlan | None = plan_forwards(table, costs, keeps_order=keeps_order)
        else:
            limit = current.step_limit(table, costs)
            fixed = not current.follows_costs
            plan = plan_step(table, costs, limit, keeps_order=keeps_order, keeps_passes=fixed)
            if plan is None:
                raise _too_long(current, costs, limit)
        assert plan is not None
        self._next = _Next(m, forward_only, plan)
        return plan.order

    def _connected(self) -> list[Any]:
        """Return groups of gloo: the pipeline, the replicas that share its experts, the model."""
        if not self._groups and dist.is_initialized() and parallel_state.is_initialized():
            ranks = dist.get_process_group_ranks
            pipeline = ranks(parallel_state.get_pipeline_model_parallel_group())
            experts = ranks(parallel_state.get_expert_model_parallel_group())
            model = ranks(parallel_state.get_model_parallel_group())
            self._groups = new_groups([pipeline, experts, model], "gloo")
        return self._groups

    @staticmethod
    def _agree(pipeline: Any, lengths: Lengths, order: Order) -> None:
        text = repr((lengths, order)).encode()
        digests = _gathered(pipeline, hashlib.sha256(text).hexdigest())
        if len(set(digests)) > 1:
            other = next(r for r, digest in enumerate(digests) if digest != digests[0])
            raise UsageError(
                f"pipeline ranks 0 and {other} were given other lengths of microbatches, or plan "
                "with other installations: give all ranks of a model the same"
            )


class PlannedLengths(StepPart):
    """Tells a step the lengths that it was planned for; given their shapes, it exchanges none.

    Args:
        planned: the plans of the job.
    """

    def __init__(self, planned: PlannedSteps) -> None:
        self._planned = planned

    def before_step(self, step: Step) -> None:
        step.lengths = self._planned.lengths
        if step.lengths is not None and step.lengths.shapes is not None:
            step.shapes = [
                activation_shape(*shape, step.config, step.pg_collection)
                for shape in step.lengths.shapes
            ]


def _sizes_of(planned: _Next) -> tuple[int, bool]:
    return planned.num_microbatches, planned.forward_only


def _said(num_microbatches: int, forward_only: bool) -> str:
    kind = "forwards alone" if forward_only else "training"
    return f"{num_microbatches} microbatches of {kind}"


def _gathered(group: Any, value: Any) -> list[Any]:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


def _longest(of_all: Sequence[Lengths]) -> Lengths:
    """Return the most tokens and squares at each place.

    Raises:
        UsageError: replicas have other numbers of microbatches.
    """
    counts = [len(lengths) for lengths in of_all]
    if len(set(counts)) > 1:
        raise UsageError(
            f"replicas that share experts have {sorted(set(counts))} microbatches: give all of "
            "them as many, since they exchange tokens in every pass"
        )
    tokens = zip(*(lengths.tokens for lengths in of_all), strict=True)
    squares = zip(*(lengths.squares for lengths in of_all), strict=True)
    return Lengths.of([*map(max, tokens)], [*map(max, squares)])


def _too_long(current: CurrentSchedule, costs: Any, limit: Sequence[float]) -> UsageError:
    placement = current.schedule.placement
    largest = costs.for_placement(placement).largest_activation
    needed = max(sum(largest[s] for s in held) for held in placement.stages_of)
    share = costs.one_f_one_b_peak()
    why = "no order was found that fits"
    if needed > max(limit):
        why = f"the longest alone takes {needed / share:.4g} of it"
    return UsageError(
        f"{current.schedule.name} cannot run these microbatches within {max(limit) / share:.3g} of "
        f"1F1B's memory: {why}; raise the memory limit, or pack the sequences more evenly"
    )


# --- microbatches that are read before their step


_GLOBAL_LOSS = "global_aux_loss"
"""Type of load balancing that adds up the tokens of all microbatches of the step so far."""

LengthsOf = Callable[[Any], tuple[float, float]]
"""Function that returns a microbatch's tokens, and the sum of the squares of its sequences'."""


class ReadAhead(StepPart):
    """Reads all microbatches of a step, plans it and feeds them in the order of the plan.

    What a step returns, and the random streams of layers, keep the order of the iterators. A step
    that has been planned already is left alone. Microbatches keep their order where a balancing
    loss of the router depends on it.

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
        keeps_order = _GLOBAL_LOSS in (step.config.moe_router_load_balancing_type or ())
        step.order = self._planned.plan(
            lengths, keeps_order=keeps_order, forward_only=step.forward_only
        )
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
