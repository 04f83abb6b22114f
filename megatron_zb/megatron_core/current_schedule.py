"""The schedule that a job runs, and how to build it anew for other costs or another batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean
from typing import Any

from megatron_zb.errors import UsageError
from megatron_zb.job.settings import ScheduleSettings, placement_of
from megatron_zb.measured.balance import TRANSFER, Ends, costs_of, with_counted_vocabulary
from megatron_zb.measured.expert_all_to_all import with_all_to_all
from megatron_zb.measured.profile import Profile
from megatron_zb.schedules import catalog
from megatron_zb.schedules.catalog import Build
from megatron_zb.schedules.costs import Costs, with_frozen, with_unsplit
from megatron_zb.schedules.features.adapters import AdapterRules, Adapters
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.second_model import SecondModel, SecondModelRules
from megatron_zb.schedules.features.slices import (
    AUTO,
    GAIN,
    KEPT,
    Slicing,
    least_tokens,
    slicing_of,
)
from megatron_zb.schedules.features.update_delay import DelayedRules
from megatron_zb.schedules.layout import Layers
from megatron_zb.schedules.lowering import Program, lower
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import Placement, looped, wave
from megatron_zb.schedules.request import Limit, keeps
from megatron_zb.schedules.rules import LastFirstRules
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.simulator import Timeline, simulate
from megatron_zb.schedules.step_plan import (
    NO_ATTENTION,
    AttentionWork,
    in_forward_order,
    usual_limit,
)

_INPUT = 1 / 17
"""What the input of a layer takes of its activation: 2 of about 34 bytes a number in 16 bits
(Korthikanti et al., arXiv 2205.05198, without those of attention that are computed again)."""

_KEPT = 64
"""Most tables and programs that are kept: of other numbers of microbatches, and of evaluation."""

_FROZEN = 0.98
"""Share of the weight gradients that adapters leave out, until a step has shown it."""

_NEARLY_ALL = 0.9
"""Share of frozen weights above which a split backward brings little."""

_SUBSTITUTE = "auto"
"""Schedule for another number of microbatches than a table's: evaluation, or a growing batch."""


@dataclass(frozen=True, kw_only=True)
class JobSizes:
    """Model and batch of a job, for which a schedule is built.

    Args:
        layers: the layers to place, spread evenly unless there is a ``layer_layout``.
        layer_layout: the layers of every stage in model order, such as ``Ett|tt|tt|ttL``, or the
            costs of the model's ends, to balance the stages.
        ends: the costs of the model's ends, if known: ``auto`` chooses its placement by them, which
            stays when costs have been measured.
        overlaps_all_to_all: a forward and a backward may run in one pass, so that the expert
            all-to-all of one hides behind the other.
        copy: with ``pipeline_offload``, what copying an activation to the host takes as a share of
            the passes that use it, unless the profile that balances layers has timed copies.
        vocabulary: with ``pipeline_vocabulary``, the number of layers that the output layer counts
            for, unless the ends of the model are known.
        attention: what attention takes beside linear layers, for steps of unequal microbatches and
            for token slices.
        sequence: tokens of a sequence, for token slices.
        spread: ranks of tensor and context parallelism, for token slices.
        hidden: hidden size, for the number of token slices.
        kept: share of the activations that keys and values take, for token slices.
        adapters: trainings that share the pipeline on a frozen model; ``num_microbatches`` then
            counts those of all their steps.
        second_model: an encoder or a teacher, whose passes run between those of the trained model;
            its seconds are multiples of the F of a rank.
    """

    pipeline_size: int
    num_microbatches: int
    layers: Layers
    layer_layout: str | Ends | None = None
    ends: Ends | None = None
    overlaps_all_to_all: bool = False
    copy: float | None = None
    vocabulary: float | None = None
    attention: AttentionWork = NO_ATTENTION
    sequence: int | None = None
    spread: int = 1
    hidden: int | None = None
    kept: float = KEPT
    adapters: Adapters | None = None
    second_model: SecondModel | None = None

    @property
    def known_ends(self) -> Ends | None:
        """The costs of the model's ends: by a profile, or else counted, where they can be."""
        return self.layer_layout if isinstance(self.layer_layout, Ends) else self.ends

    @property
    def known_attention(self) -> AttentionWork:
        """Share of attention: from a profile that has it, or else counted."""
        measured = None if self.profile is None else self.profile.attention_work
        return measured or self.attention

    @property
    def profile(self) -> Profile | None:
        """The profile that balances layers, if any."""
        return self.layer_layout.profile if isinstance(self.layer_layout, Ends) else None


class CurrentSchedule:
    """The schedule that a job runs now, and the costs for which it was built.

    It can be exchanged for another order of passes on the same placement.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        settings: ScheduleSettings,
        build: Build = catalog.build,
        attention: AttentionWork = NO_ATTENTION,
    ) -> None:
        self.schedule, self.costs, self.attention = schedule, costs, attention
        self._settings, self._build = settings, build
        self.remarks: list[str] = []
        """Lines for the start of the job."""
        self._is_measured = False
        self.measures = False
        """Whether the step that begins is measured: then its passes are those of the schedule."""
        self.unsplit_shares: Sequence[float] = []
        """Share of each stage's weight gradients that B computes, once a step has shown it."""
        self.table = lru_cache(maxsize=_KEPT)(self._table)
        self.program_for = lru_cache(maxsize=_KEPT)(self._build_program)

    @classmethod
    def named(
        cls, settings: ScheduleSettings, sizes: JobSizes, build: Build = catalog.build
    ) -> CurrentSchedule:
        """Build the schedule that settings name.

        Raises:
            UsageError: unknown name, or sizes that cannot be scheduled.
        """
        family, p, written = settings.family, sizes.pipeline_size, sizes.layer_layout
        placement = placement_of(settings, p)
        if family.chooses_placement and placement is None and isinstance(written, str):
            placement = _placement_of_layout(written, p, sizes.layers.kinds)
        costs, limit = _assumed_costs(settings, sizes), settings.memory_limit
        slicing, second = _slicing(settings, sizes), sizes.second_model
        if second is not None:
            second = second.scaled(fmean(costs.seconds[PassKind.F]))
        schedule = build(
            family.name,
            pipeline_size=p,
            num_microbatches=sizes.num_microbatches,
            costs=costs,
            memory_limit=limit and limit.share,
            chunks=settings.num_virtual_stages_per_pipeline_rank,
            group_size=settings.microbatch_group_size_per_vp_stage,
            placement=placement,
            back_to_back=settings.enable_optimizer_post_validation,
            num_layers=None if isinstance(written, str) else sizes.layers.decoder,
            **_given(
                slices=slicing,
                adapters=sizes.adapters,
                second_model=second,
                update_delay=settings.pipeline_update_delay or None,
            ),
        )
        found = cls(schedule, costs, settings, build, sizes.known_attention)
        if settings.slices == AUTO:
            found.remarks.append(_of_slices(slicing, sizes))
        return found

    @classmethod
    def of_table(
        cls, schedule: Schedule, sizes: JobSizes, build: Build = catalog.build
    ) -> CurrentSchedule:
        """Take a finished schedule, such as one read from a file.

        Raises:
            UsageError: it is for other sizes, or cannot train.
        """
        found = (schedule.placement.pipeline_size, schedule.rules.step_microbatches(schedule))
        if found != (sizes.pipeline_size, sizes.num_microbatches):
            raise UsageError(
                f"the schedule {schedule.name} is for {found[0]} pipeline ranks and {found[1]} "
                f"microbatches, but the job has {sizes.pipeline_size} and {sizes.num_microbatches}"
            )
        if any(p.kind is PassKind.O for rank in schedule.ranks for p in rank):
            raise UsageError(
                f"the schedule {schedule.name} has passes of a vocabulary-parallel output layer: "
                "tables train with a whole one; name a schedule, with --pipeline-vocabulary on"
            )
        if isinstance(schedule.rules, LastFirstRules):
            raise UsageError(
                f"the schedule {schedule.name} begins its backwards with the last microbatch, and "
                "would sum gradients in another order than 1F1B: give a table that takes "
                "microbatches in turn"
            )
        costs = _equal_costs(sizes.pipeline_size)
        return cls(schedule, costs, ScheduleSettings(), build, sizes.known_attention)

    @property
    def slicing(self) -> Slicing | None:
        """Token slices of every microbatch, None for whole ones."""
        return slicing_of(self.schedule)

    @property
    def is_profiled(self) -> bool:
        """Whether the times of passes can be those of one training on whole microbatches.

        A profile has those.
        """
        others = (AdapterRules, SecondModelRules, DelayedRules)
        return self.slicing is None and not isinstance(self.schedule.rules, others)

    @property
    def second_model(self) -> SecondModel | None:
        """The model whose passes run between those of the trained one, None without one."""
        rules = self.schedule.rules
        return rules.second if isinstance(rules, SecondModelRules) else None

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule has a W, a weight gradient as a separate pass."""
        return any(p.kind is PassKind.W for rank in self.schedule.ranks for p in rank)

    @property
    def follows_costs(self) -> bool:
        """Whether other costs may give another order of passes; not those of a finished table."""
        name = self.schedule.name
        is_named = self.slicing is None and name in catalog.all_names()
        return is_named and catalog.family(name).follows_costs

    @property
    def bubble_rate(self) -> float:
        """The expected share of idle time."""
        timeline = self.timeline
        return timeline.bubble_rate_back_to_back if self._in_a_row else timeline.bubble_rate

    @property
    def timeline(self) -> Timeline:
        """The schedule in the time of its costs."""
        return simulate(self.schedule, self.costs)

    @property
    def _in_a_row(self) -> bool:
        return self._settings.enable_optimizer_post_validation

    def use(self, schedule: Schedule, costs: Costs | None = None) -> None:
        """Switch to another order of passes on the same placement from the next step on."""
        assert schedule.placement == self.schedule.placement, "the model is placed already"
        self.schedule = schedule
        self._is_measured = self._is_measured or costs is not None
        self.costs = costs or self.costs
        self.table.cache_clear()
        self.program_for.cache_clear()

    def count_unsplit(self, unsplit: list[float], frozen: list[float]) -> str | None:
        """Count the weight gradients that W does not compute, by a share of each stage.

        Args:
            unsplit: shares that B computes since layers cannot be split.
            frozen: shares that nothing computes.

        Returns:
            A line about them, None if there is nothing to count.
        """
        self.unsplit_shares = [round(share, 4) for share in unsplit]
        said = []
        if any(unsplit):
            said.append(f"B computes weight gradients that W cannot, {_of_stages(unsplit)}")
        if any(frozen):
            said.append(f"frozen weights have no gradients, {_of_stages(frozen)}")
        if not said:
            return None
        before = self.bubble_rate
        left = [max(1 - share, 1e-9) for share in frozen]  # of which B has its share
        of_left = [min(part / rest, 1.0) for part, rest in zip(unsplit, left, strict=True)]
        self.costs = with_unsplit(with_frozen(self.costs, frozen), of_left)
        line = (
            f"{'; '.join(said)}: the expected bubble is {100 * self.bubble_rate:.1f} %, not "
            f"{100 * before:.1f} %"
        )
        if min(frozen) > _NEARLY_ALL and self.schedule.placement.chunks == 1:
            line += "; W is too short to fill it, but v-zb makes it shorter"
        return line

    def use_adapters(self, adapters: Adapters) -> None:
        """Switch to the order for other adapters on the same placement from the next step on.

        Collective over the job, as one rank builds for all.

        Raises:
            UsageError: the schedule cannot be built within the memory limit.
        """
        limit, m = self._limit(self._is_measured), adapters.num_units
        name = self.schedule.name
        self.use(self._built(self._build, name, m, self.costs, limit, adapters))

    # --- measured costs

    def rebuilt(self, costs: Costs) -> Schedule:
        """Build the same kind of schedule on the same placement for measured costs, on this rank.

        Raises:
            UsageError: the memory limit cannot be kept with these costs.
        """
        name, m, limit = self.schedule.name, self.schedule.num_microbatches, self._limit(True)
        return self._built(catalog.build, name, m, costs, limit)

    def keeps_limit(self, schedule: Schedule, costs: Costs) -> bool:
        """Return whether an order keeps the memory limit, for costs in bytes."""
        most = _in_unit_of(costs, self._settings.memory_limit, is_measured=True)
        return keeps(simulate(schedule, costs).peak_memory, [most] * costs.pipeline_size)

    def host_limit(self, costs: Costs) -> float:
        """Return the most bytes of the host that a rank may take, for costs in bytes."""
        return _in_unit_of(costs, self._settings.host_limit, is_measured=True)

    def seconds(self, schedule: Schedule, costs: Costs) -> float:
        """Predict the seconds of an iteration, for costs of whole microbatches."""
        timeline = simulate(schedule, costs)
        return timeline.seconds(back_to_back=self._in_a_row)

    # --- another number of microbatches

    def _table(self, num_microbatches: int, forward_only: bool) -> Schedule:
        """Return the schedule for a number of microbatches that are all alike."""
        schedule = self.schedule
        has_steps = isinstance(schedule.rules, AdapterRules | DelayedRules)
        is_of_training = not (forward_only and has_steps)
        if is_of_training and num_microbatches == schedule.rules.step_microbatches(schedule):
            return schedule
        name = schedule.name if schedule.name in catalog.all_names() else _SUBSTITUTE
        # forwards keep nothing
        limit = None if forward_only else self._limit(self._is_measured)
        return self._built(self._build, name, num_microbatches, self.costs, limit)

    def step_limit(self, table: Schedule, costs: Costs) -> list[float]:
        """Return the most memory of every rank in a step of unequal microbatches.

        It is the user's limit, or without one the usual limit of the schedule.
        """
        limit = self._settings.memory_limit
        if limit is not None:
            most = limit.in_unit_of(costs, is_measured=self._is_measured)
            in_bytes = self._is_measured and limit.bytes is not None
            return [most - fixed if in_bytes else most for fixed in costs.fixed]
        most = usual_limit(table, self.costs, costs, follows_costs=self.follows_costs)
        return [most] * costs.pipeline_size

    def _build_program(self, num_microbatches: int, forward_only: bool, captured: bool) -> Program:
        schedule = self.table(num_microbatches, forward_only)
        if forward_only:
            schedule = in_forward_order(schedule, self.costs)
        return lower(schedule, simulate(schedule, self.costs), captured=captured)

    def _limit(self, is_measured: bool) -> Limit | float | None:
        """Return the memory limit of a search, in bytes where costs are."""
        limit = self._settings.memory_limit
        if limit is not None and is_measured and limit.bytes is not None:
            return Limit(bytes=limit.bytes)
        return None if limit is None else limit.share

    def _built(
        self,
        build: Build,
        name: str,
        num_microbatches: int,
        costs: Costs,
        limit: Limit | float | None,
        adapters: Adapters | None = None,
    ) -> Schedule:
        placement, family = self.schedule.placement.of_trained, catalog.family(name)
        second = self.second_model
        if second is not None and num_microbatches != len(second.lengths):
            second = replace(second, lengths=())  # those of the microbatches of a training step
        group_size = self._settings.microbatch_group_size_per_vp_stage
        return build(
            name,
            pipeline_size=placement.pipeline_size,
            num_microbatches=num_microbatches,
            costs=costs,
            chunks=placement.chunks if family.takes_chunks else None,
            group_size=group_size if family.takes_group_size else None,
            placement=placement,
            back_to_back=self._in_a_row,
            memory_limit=limit,
            **_given(slices=self.slicing, adapters=adapters, second_model=second),
        )


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _slicing(settings: ScheduleSettings, sizes: JobSizes) -> Slicing | None:
    """Return the token slices with attention's share; None for whole microbatches.

    Raises:
        UsageError: they do not divide the sequence.
    """
    asked, tokens = settings.slices, sizes.sequence or 0
    if asked is None:
        return None
    if isinstance(asked, str):
        least = least_tokens(sizes.hidden) * sizes.spread
        asked = Slicing.enough(sizes.pipeline_size, sizes.num_microbatches, tokens, least)
    asked.borders(tokens)
    forward, backward = (
        work * tokens / (1.0 + work * tokens)
        for work in (sizes.known_attention.forward, sizes.known_attention.backward)
    )
    if asked.slices == 1:
        return None
    return replace(asked, attention=forward, attention_backward=backward, kept=sizes.kept)


def _of_slices(slicing: Slicing | None, sizes: JobSizes) -> str:
    """Return a sentence on the slices that were chosen."""
    if slicing is None:
        return f"whole microbatches: slices would be too short, or gain less than {GAIN:.0%}"
    tokens = (sizes.sequence or 0) // slicing.slices
    return (
        f"{slicing.slices} slices of {tokens} tokens: twice as many would be too short, or gain "
        f"less than {GAIN:.0%}"
    )


def _of_stages(shares: list[float]) -> str:
    stages = (f"{share:.0%} of stage {s}" for s, share in enumerate(shares) if share)
    return f"by their sizes {', '.join(stages)}"


def _placement_of_layout(written: str, pipeline_size: int, kinds: str) -> Placement | None:
    """Return the placement that a layout's number of stages prescribes for ``auto``, if any.

    A V for two stages of each rank, as ``plan`` has it, and a zig-zag for four.
    """
    chunks, rest = divmod(written.count("|") + 1, max(pipeline_size, 1))
    repeats = "*" in written and not kinds
    if rest or repeats or pipeline_size < 2:
        return None
    return looped(pipeline_size) if chunks == 1 else wave(pipeline_size, chunks)


def _equal_costs(pipeline_size: int, p2p: float = 0.0) -> Costs:
    p = max(pipeline_size, 1)
    return Costs.uniform(pipeline_size=p, forward=1.0, backward=1.0, weight=1.0, p2p=p2p)


def _assumed_costs(settings: ScheduleSettings, sizes: JobSizes) -> Costs:
    """Return the costs that a schedule is built for before any have been measured.

    They include the choices that the settings leave to the schedule.
    """
    p, layers, profile = sizes.pipeline_size, sizes.layers.decoder, sizes.profile
    costs = _equal_costs(p)
    if settings.family.chooses_placement:
        costs = _equal_costs(p, p2p=TRANSFER)
        if sizes.ends is not None and layers > 0:
            costs = costs_of(layers, p, sizes.ends)
    if sizes.adapters is not None:
        costs = with_frozen(costs, [_FROZEN] * p)
    if settings.pipeline_vocabulary == "on":
        ends, depths = sizes.known_ends, 1 + sizes.layers.multi_token
        counted = 1.0 * depths if ends is None else ends.output - ends.kept
        output = counted if sizes.vocabulary is None else sizes.vocabulary * depths
        costs = with_counted_vocabulary(costs, layers, output, predicts=depths > 1)
    if sizes.overlaps_all_to_all:
        all_to_all = profile and profile.all_to_all
        shares = (all_to_all.share, all_to_all.loss) if all_to_all else ()
        costs = with_all_to_all(costs, *shares)
    if settings.pipeline_recompute == "auto":
        layer = sum(costs.memory["activation"]) / max(layers, 1)
        costs = costs.having(Recomputation(kept_input=_INPUT * layer))
    if settings.pipeline_offload == "auto":
        copy = (profile and profile.copy_share) or sizes.copy
        if copy is None:
            raise UsageError(
                "pipeline_offload needs the seconds of a copy: give copy, such as 0.1, their share "
                "of the passes that use it"
            )
        kinds = PassKind.F, PassKind.B, PassKind.W
        passes = zip(*(costs.seconds[kind] for kind in kinds), strict=True)
        most = _in_unit_of(costs, settings.host_limit, is_measured=False)
        seconds = [copy * sum(of_slice) for of_slice in passes]
        costs = costs.having(Offload(seconds=seconds, host_limit=most))
    return costs


def _in_unit_of(costs: Costs, limit: Limit | None, *, is_measured: bool) -> float:
    """Return a limit in the unit of the costs, which is bytes where they are measured."""
    return math.inf if limit is None else limit.in_unit_of(costs, is_measured=is_measured)
