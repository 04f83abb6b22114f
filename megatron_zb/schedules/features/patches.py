"""Patches of an image: a diffusion transformer samples with its blocks on a pipeline.

The image is cut into M patches, and rank s has the s-th part of the blocks. A *unit* is one patch
in one time step of the sampler; it passes all ranks, forward only. What the last rank predicts for
a patch goes back to the first one, which updates the patch and begins its next time step at once.
So nothing drains the pipeline between two time steps. The attention of a patch reads keys and
values of the whole image: of this time step, for the patches that a stage has already seen in it,
and stale ones of the time step before for the others. The sampler begins with a warm-up in which
the whole image is one patch, so that there are keys and values for all of it.
Source: PipeFusion, arXiv 2405.14430.

Example::

    schedule = pipefusion(pipeline_size=8, patches=16, time_steps=49)
    simulate(schedule, Costs.uniform(pipeline_size=8, forward=1, backward=1, weight=0))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from megatron_zb.errors import UsageError
from megatron_zb.schedules.costs import Costs, latency
from megatron_zb.schedules.kinds import At, Due, Kind, Need
from megatron_zb.schedules.passes import Message, Pass, PassKind
from megatron_zb.schedules.placement import Placement, looped
from megatron_zb.schedules.request import MOST_FORWARDS
from megatron_zb.schedules.rules import Rules, Sizes
from megatron_zb.schedules.schedule import Report, Schedule
from megatron_zb.schedules.simulator import simulate
from megatron_zb.schedules.stage_costs import Priced, StageCosts
from megatron_zb.schedules.task_graph import Row, TaskGraph

NAME = "pipefusion"

_F = PassKind.F


@dataclass(frozen=True)
class PatchRules(Rules):
    """Rules of sampling in patches: unit ``t * patches + k`` is patch k in time step t.

    A stage keeps keys and values in one buffer for the whole image, of which F replaces the part of
    its patch. So F holds no more memory than it found, and each stage must take all units in turn:
    their order decides which keys and values are stale.
    """

    patches: int
    time_steps: int

    table = (Kind(_F, needs=(Need(_F, At.PREVIOUS),), due=Due.ALWAYS),)
    name = "sampling in patches"
    number_word: ClassVar[str] = "patch"
    has_steps = True

    def units(self, num_microbatches: int) -> int:
        return self.time_steps * self.patches

    def step_of(self, p: Pass) -> int:
        return p.microbatch // self.patches

    def microbatch_of(self, unit: int) -> int:
        """Return the patch of a unit."""
        return unit % self.patches

    def more_inputs(self, graph: TaskGraph) -> Mapping[int, tuple[int, ...]]:
        """Return the input of each patch from its own time step before: F of the last stage."""
        placement = graph.placement
        last = placement.num_stages - 1

        def code(stage: int, unit: int) -> int:
            return graph.code_of(Pass(_F, stage, unit), placement.rank_of[stage])

        returning = range(graph.units - self.patches)
        return {code(0, unit + self.patches): (code(last, unit),) for unit in returning}

    def further_message(self, row: Row, unit: int) -> Message | None:
        """Return the message to the first stage, with the number of the unit that has made it."""
        return Message(False, 0, unit)

    def more_peers(self, placement: Placement) -> set[tuple[int, int]]:
        ends = placement.rank_of[0], placement.rank_of[-1]
        back = {(min(ends), max(ends))} if ends[0] != ends[1] else set()
        return back - {(min(pair), max(pair)) for pair in placement.peers}

    def unit_costs(self, schedule: Sizes, costs: Priced) -> Priced:
        return PricedPatches(costs) if isinstance(costs, Costs) else costs

    def unit_in_words(self, kind: PassKind, unit: int) -> str:
        """Describe a unit, such as ``time step 2, patch 5``."""
        step, patch = divmod(unit, self.patches)
        return f"time step {step}, patch {patch}"

    def units_in_words(self, units: int) -> str:
        return (
            f"{_counted(self.patches, 'patch', 'es')} in {_counted(self.time_steps, 'time step')}"
        )

    def sizes_in_words(self, schedule: Sizes) -> str:
        return self.units_in_words(0)

    def message_in_words(self, placement: Placement | None, message: Message) -> str:
        """Describe a message, such as ``the activation for stage 1, time step 2, patch 5``."""
        unit = self.unit_in_words(_F, message.microbatch)
        if message.stage == 0:
            return f"the prediction for {unit}, on its way back to stage 0"
        return f"the activation for stage {message.stage}, {unit}"


def _counted(number: int, word: str, ending: str = "s") -> str:
    return f"{number} {word}{'' if number == 1 else ending}"


@dataclass(frozen=True)
class PricedPatches:
    """Costs of one patch, with the message from the last stage back to the first one."""

    costs: Costs

    def for_placement(self, placement: Placement) -> StageCosts:
        """Return the costs of the stages of a placement.

        Raises:
            UsageError: patches have different costs, or there is another number of ranks.
        """
        if self.costs.microbatches:
            raise UsageError(
                f"{NAME}: all patches are of one size, but the costs have "
                f"{len(self.costs.microbatches)} lengths: give costs without lengths"
            )
        table = self.costs.for_placement(placement)
        back = latency(self.costs, placement.rank_of[-1], placement.rank_of[0])
        return replace(table, latency={**table.latency, _F: (*table.latency[_F][:-1], back)})


def pipefusion(
    pipeline_size: int, patches: int, time_steps: int, costs: Costs | None = None
) -> Schedule:
    """Build the schedule of the time steps behind the warm-up.

    Every rank runs its units in turn: all patches of a time step, then those of the next one.

    Args:
        pipeline_size: pipeline ranks p, each with one stage; 1 is a single process.
        patches: M, of which an image is made. With fewer patches than ranks, the first rank waits
            for each of them to come back: see :func:`idle_share`.
        time_steps: T, those of the sampler without its warm-up.
        costs: of one patch; F takes 1 on each rank, and messages take no time, when left out.

    Returns:
        The schedule, validated, with its :class:`~schedule.Report`: no order is faster.

    Raises:
        UsageError: a number is below 1 or too large, or the costs are for other ranks.
    """
    _check(pipeline_size, patches, time_steps)
    if costs is None:
        costs = Costs.uniform(pipeline_size=pipeline_size, forward=1, backward=1, weight=0)
    placement = looped(pipeline_size) if pipeline_size > 1 else Placement("looped", 1, (0,))
    ranks = tuple(
        tuple(Pass(_F, rank, unit) for unit in range(time_steps * patches))
        for rank in range(pipeline_size)
    )
    rules = PatchRules(patches, time_steps)
    schedule = Schedule(NAME, placement, patches, ranks, forward_only=True, rules=rules)
    timeline = simulate(schedule.validate(), costs)
    bound = least_seconds(rules, timeline.costs)
    return replace(schedule, report=Report(timeline.makespan, bound))


def _check(pipeline_size: int, patches: int, time_steps: int) -> None:
    """Refuse numbers before anything is allocated for them.

    Raises:
        UsageError: one is below 1, or their product is too large.
    """
    for what, number in (
        ("pipeline ranks", pipeline_size),
        ("patches", patches),
        ("time steps", time_steps),
    ):
        if number < 1:
            raise UsageError(f"{NAME}: {number} {what} were asked for: give 1 or more")
    if pipeline_size * patches * time_steps > MOST_FORWARDS:
        raise UsageError(
            f"{NAME}: {patches} patches in {time_steps} time steps on {pipeline_size} ranks are "
            f"too many to be put in order: their product can be at most {MOST_FORWARDS}"
        )


def least_seconds(rules: PatchRules, costs: StageCosts) -> float:
    """Return the seconds that no order of the units can beat.

    1. The last patch of a time step leaves the last stage when one patch has passed all stages, and
       the slowest of them has run F of the others.
    2. Each further time step takes at least what the slowest stage needs for all patches, and at
       least the way of one patch through all stages and back.
    """
    forward, messages = costs.seconds[_F], costs.latency[_F]
    way, slowest = sum(forward) + sum(messages[:-1]), max(forward)
    first = way + (rules.patches - 1) * slowest
    further = max(rules.patches * slowest, way + messages[-1])
    return first + (rules.time_steps - 1) * further


def idle_share(pipeline_size: int, patches: int, time_steps: int) -> float:
    """Return the idle share by formula: F takes as long on all ranks, and messages take no time.

    With M patches, p ranks and T time steps, a time step begins ``max(M, p)`` slots after the one
    before, each as long as F. The last one takes M + p - 1. Of these slots, a rank runs M * T. From
    M = p on, the share is (p - 1) / (M * T + p - 1).

    Raises:
        UsageError: a number is below 1 or too large.
    """
    _check(pipeline_size, patches, time_steps)
    slots = (time_steps - 1) * max(patches, pipeline_size) + patches + pipeline_size - 1
    return 1 - patches * time_steps / slots


def check_trained(name: str) -> None:
    """Refuse the name where a schedule of a training step is due.

    Raises:
        UsageError: it is that of sampling in patches.
    """
    if name.lower() == NAME:
        raise UsageError(
            f"{NAME} is forward-only: it samples from a diffusion transformer, and "
            f"'megatron-zb show {NAME}' draws it: give a schedule of a training step, such as v-zb"
        )
