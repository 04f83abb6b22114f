"""Updates that come one step late, so that the pipeline is never drained.

The microbatches of one optimizer step are a *group*. With a delay of one, group t computes with the
weights after t - 1 updates (groups 0 and 1 both with the first weights), and its update changes the
newest weights. So F of group t + 1 waits for the update of group t - 1, not for that of group t
(PipeDream-2BW, arXiv 2006.09503). Groups follow one another as the microbatches of one long step
do, in a *period* that is as long as the work of the busiest rank.

A *call* is what a rank runs while its caller waits for the losses of a group: the rest of the group
before, the group itself, and first F of the next one where the order has these before. No pass of a
call needs one of a later call, on any rank. So a caller may let all ranks meet between two calls.

Example::

    schedule = build("v-half", pipeline_size=8, num_microbatches=16, update_delay=1)
    schedule.report.period
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_zb.errors import UsageError
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import LimitTooSmall, Request, least_refused
from megatron_zb.schedules.rules import Sizes
from megatron_zb.schedules.schedule import InvalidSchedule, Report, Schedule
from megatron_zb.schedules.simulator import Timeline, simulate
from megatron_zb.schedules.stage_costs import Priced
from megatron_zb.schedules.task_graph import TaskGraph
from megatron_zb.schedules.units import UnitRules, Units, Updates

_F, _B, _W, _BW, _U = PassKind.F, PassKind.B, PassKind.W, PassKind.BW, PassKind.U

_TOLERANCE = 1e-9  # seconds that times of one moment may differ by

DELAYS = (0, 1)
"""Steps by which an update may come late."""

GROUPS = 4
"""Groups of the schedule that stands for all of them."""

BUILT = 6
"""Groups of a long step of which a middle one is what every call runs."""


def check_delay(delay: int, updates: Updates) -> None:
    """Check the number of steps by which an update comes late, and what it takes.

    Raises:
        UsageError: it is neither 0 nor 1, or takes no number of seconds, or some without a delay.
    """
    for what, seconds in (
        ("an update", updates.seconds),
        ("a reduction", updates.reduction),
        ("a gathering", updates.gathering),
    ):
        if seconds and not delay:
            raise UsageError(
                f"{what} that takes {seconds} s was asked for without a delay: give update_delay 1"
            )
        if not 0 <= seconds < math.inf:
            raise UsageError(f"{what} takes {seconds} s: give a number of seconds")
    if delay not in DELAYS:
        raise UsageError(f"an update delay of {delay} steps was asked for: give 0 or 1")


@dataclass(frozen=True)
class DelayedRules(UnitRules):
    """Rules of consecutive groups, each of which waits for the update two groups before.

    Args:
        group: microbatches of a group.
    """

    group: int = field(kw_only=True)

    @classmethod
    def of(cls, groups: int, group: int) -> DelayedRules:
        """Return the rules of a number of groups of some microbatches."""
        owner = tuple(unit // group for unit in range(groups * group))
        version = tuple(max(of - 2, -1) for of in owner)
        columns = Units(None, owner, version)
        return cls(columns, has_updates=True, group=group)

    def more_inputs(self, graph: TaskGraph) -> Mapping[int, tuple[int, ...]]:
        """Return what an update and F wait for: an update, for the last W of its group anywhere.

        The gradients of all ranks have one norm, by which each rank clips its own.
        """
        found = dict(super().more_inputs(graph))
        if graph.forward_only:
            return found
        stages = list(enumerate(graph.placement.rank_of))
        for first in range(0, len(self.columns), self.group):
            last = first + self.group - 1
            weights = [graph.code_of(Pass(_W, stage, last), rank) for stage, rank in stages]
            for stage, rank in stages:
                found[graph.code_of(Pass(_U, stage, first), rank)] = tuple(weights)
        return found

    def step_microbatches(self, schedule: Sizes) -> int:
        return self.group

    def microbatch_of(self, unit: int) -> int:
        return unit % self.group

    def _unit_in_words(self, unit: int) -> str:
        return f"group {unit // self.group}, microbatch {unit % self.group}"

    def pass_in_words(self, p: Pass) -> str:
        """Describe a pass, such as ``F of stage 1, group 2, microbatch 3``."""
        words = f"{p.kind.name} of stage {p.stage}, "
        if p.kind is _U:
            return f"{words}group {p.microbatch // self.group}"
        return words + self._unit_in_words(p.microbatch)

    def not_yet(self, p: Pass, needed: Pass) -> str:
        if needed.kind is _U:
            return f"the update of group {needed.microbatch // self.group} has not run yet"
        if p.kind is _U:
            return f"not every W of group {p.microbatch // self.group} has run yet"
        return super().not_yet(p, needed)

    def sizes_in_words(self, schedule: Sizes) -> str:
        groups = schedule.num_microbatches // self.group
        return f"{groups} groups of {self.group} microbatches, each updated one step late"

    def unit_costs(self, schedule: Sizes, costs: Priced) -> Priced:
        if isinstance(costs, Costs) and costs.feature(Updates) is None:
            return costs.having(Updates(0.0))
        return costs


@dataclass(frozen=True)
class Calls:
    """What every rank runs in a call, in its order.

    Args:
        placement: of the stages.
        group: microbatches of a group.
        ranks: passes of each rank. Units count from the first microbatch of the group before: those
            from ``group`` on are of the group itself, those from ``2 * group`` on of the next one.
    """

    placement: Placement
    group: int
    ranks: tuple[tuple[Pass, ...], ...]

    def some(self, groups: Collection[int]) -> list[list[Pass]]:
        """Return the passes of some groups: 0 is the one before, 1 the group itself, 2 the next."""
        return [[p for p in rank if p.microbatch // self.group in groups] for rank in self.ranks]

    @cached_property
    def reads_ahead(self) -> bool:
        """Whether a call runs passes of the next group."""
        return any(map(len, self.some({2})))

    def consecutive(self, name: str, groups: int) -> Schedule:
        """Return the schedule of the first calls of a training, and of the drain behind them.

        1. The first group has begun in no call before: its passes from there stand first.
        2. Each call follows. The last one runs nothing of a group that never comes.
        3. The drain is what the next call would run of the last group.
        """
        ranks: list[list[Pass]] = [[] for _ in self.ranks]

        def extend(of: Collection[int], call: int) -> None:
            for rank, passes in zip(ranks, self.some(of), strict=True):
                rank += [p._replace(microbatch=p.microbatch + call * self.group) for p in passes]

        extend({2}, -2)
        for t in range(groups):
            here = {1} | ({0} if t else set()) | ({2} if t + 1 < groups else set())
            extend(here, t - 1)
        extend({0}, groups - 1)
        rules = DelayedRules.of(groups, self.group)
        passes = tuple(map(tuple, ranks))
        return Schedule(name, self.placement, groups * self.group, passes, rules=rules)

    def period(self, name: str, costs: Costs) -> float:
        """Return the seconds of a call among many, by simulation."""
        few, many = (
            simulate(self.consecutive(name, groups), costs).makespan
            for groups in (GROUPS, 2 * GROUPS)
        )
        return (many - few) / GROUPS


def calls_of(schedule: Schedule) -> Calls:
    """Return the calls of consecutive groups, from their order alone.

    1. A call ends as early as the last F of its group and the update of the group before allow: it
       has these and what they depend on, on any rank.
    2. What a call in the middle has beyond the one before is what every call runs.

    Raises:
        UsageError: the schedule is not one of :func:`with_delay`, or a group has too few
            microbatches: some of its passes come later than in the next call.
    """
    rules = schedule.rules
    if not isinstance(rules, DelayedRules):
        raise UsageError(f"{schedule.name}: the schedule was built without an update delay")
    group = rules.group
    middle = len(rules.columns) // group // 2
    past = _Past(schedule)
    ends = []
    for t in (middle - 1, middle):
        for rank, passes in enumerate(schedule.ranks):
            for position, p in enumerate(passes):
                of = p.microbatch // group
                if (p.kind is _F and of == t) or (p.kind is _U and of == t - 1):
                    past.include(rank, position)
        ends.append(tuple(past.ends))
    found = [
        tuple(_relative(passes[slice(*between)], (middle - 1) * group))
        for passes, between in zip(schedule.ranks, zip(*ends, strict=True), strict=True)
    ]
    calls = Calls(schedule.placement, group, tuple(found))
    _check_whole(schedule, calls)
    return calls


class _Past:
    """What has run on every rank before some passes can have run.

    ``ends`` are the first positions behind it.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._graph, self._ranks = schedule.graph, schedule.ranks
        self.ends = [0] * len(schedule.ranks)
        self._place: dict[int, tuple[int, int]] = {}
        for rank, passes in enumerate(schedule.ranks):
            for position, p in enumerate(passes):
                code = self._graph.code_of(p, rank)
                for role in self._graph.roles[code // self._graph.units]:
                    self._place[role * self._graph.units + p.microbatch] = rank, position

    def include(self, rank: int, position: int) -> None:
        """Include a pass, all before it on its rank, and all that these depend on."""
        waiting = [(rank, position)]
        while waiting:
            of, last = waiting.pop()
            first, self.ends[of] = self.ends[of], max(self.ends[of], last + 1)
            for p in self._ranks[of][first : last + 1]:
                for maker in self._graph.makers_of(self._graph.code_of(p, of)):
                    waiting.append(self._place[maker])


def _relative(passes: Sequence[Pass], first: int) -> Iterator[Pass]:
    """Yield passes with units that count from another first one."""
    for p in passes:
        yield p._replace(microbatch=p.microbatch - first)


def _check_whole(schedule: Schedule, calls: Calls) -> None:
    """Check that every pass of a group is in one of three calls.

    Raises:
        UsageError: some are not, since a group has too few microbatches.
    """
    group = calls.group
    for given, found in zip(schedule.ranks, calls.ranks, strict=True):
        of_one = {p for p in given if p.microbatch < group}
        if sorted(p._replace(microbatch=p.microbatch % group) for p in found) != sorted(of_one):
            raise _too_few(schedule.name, group)


def _too_few(name: str, group: int) -> UsageError:
    return UsageError(
        f"{name}: an update that comes one step late needs more microbatches than {group} in a "
        "step, since the pipeline holds those of two steps: give a larger global batch"
    )


def in_groups(schedule: Schedule, group: int) -> Schedule:
    """Return the schedule of groups, not validated, whose table has the passes of another one.

    Raises:
        UsageError: it has no whole number of groups.
    """
    groups, rest = divmod(schedule.num_microbatches, group)
    if rest or not groups:
        raise UsageError(
            f"{schedule.name}: {schedule.num_microbatches} units are listed, which are no groups "
            f"of {group} microbatches"
        )
    return replace(schedule, rules=DelayedRules.of(groups, group))


# --- building


def with_delay(
    name: str,
    request: Request,
    orders: Iterable[Schedule],
    most: Callable[[Placement], Sequence[float]],
) -> Schedule:
    """Return the fastest schedule of groups whose updates come one step late, with its report.

    Of several as fast it is the first, even if others hold less memory: costs are never quite those
    that it is built for, and a schedule's own order is made for its memory.

    Args:
        name: of the schedule.
        request: for a group.
        orders: schedules of :data:`BUILT` groups as one long step, one of which is cut into groups,
            the one to prefer first.
        most: returns the memory that each rank may hold on a placement.

    Raises:
        LimitTooSmall: none keeps the memory that a rank may hold.
        UsageError: a group has too few microbatches for this schedule.
    """
    found, refused = list[tuple[float, Schedule]](), list[LimitTooSmall]()
    for schedule in (it for order in orders for it in _cuts(replace(order, name=name), request)):
        peaks = simulate(schedule, request.costs).peak_memory
        try:
            request.check_feasible(name, schedule.placement, most(schedule.placement), peaks)
        except LimitTooSmall as error:
            refused.append(error)
            continue
        assert schedule.report is not None
        assert schedule.report.period is not None
        found.append((round(schedule.report.period, 9), schedule))
        if schedule.report.period <= schedule.report.lower_bound / GROUPS * (1 + _TOLERANCE):
            break  # none is faster
    if found:
        return min(found, key=lambda entry: entry[0])[1]
    if refused:
        raise least_refused(list(refused))
    raise _too_few(name, request.num_microbatches)


def _cuts(order: Schedule, request: Request) -> Iterator[Schedule]:
    """Yield a long step cut into groups, with updates at one time and as late as each rank can."""
    late = _with_updates(order, request.num_microbatches)
    early = _seconds_early(request.costs, order.placement)
    for updated in (*(_at_one_time(late, request.costs, it) for it in early), late):
        schedule = None if updated is None else _repeated(updated, request)
        if schedule is not None:
            yield schedule


def _seconds_early(costs: Costs, placement: Placement) -> list[float | None]:
    """Return by how many seconds an update may come before the first F that needs it.

    Some leave time to gather weights, even where a rank ends a pass before it makes the update.
    None is for a part of the time that there is, where nobody has said what it is needed for.
    """
    updates = costs.feature(Updates)
    assert updates is not None
    if not updates.gathering:
        return [0.0] if updates.reduction else [None, 0.0]
    seconds = costs.for_placement(placement).seconds
    longest = max(max(seconds[kind]) for kind in (_F, _B, _W, _BW))
    return [updates.gathering + longest, updates.gathering, updates.gathering / 2, 0.0]


def _repeated(updated: Schedule, request: Request) -> Schedule | None:
    """Return consecutive groups like those in the middle, None if they do not repeat or run."""
    try:
        calls = calls_of(updated)
        schedule = calls.consecutive(updated.name, GROUPS).validate()
        if calls_of(schedule) != calls:  # what other ranks would find in its table
            return None
        period = calls.period(updated.name, request.costs)
    except UsageError:
        return None
    timeline = simulate(schedule, request.costs)
    work = (sum(timeline.costs.duration(p) for p in rank) for rank in schedule.ranks)
    return replace(schedule, report=Report(timeline.makespan, max(work), period))


def _at_one_time(schedule: Schedule, costs: Costs, early: float | None) -> Schedule | None:
    """Return a schedule whose ranks make each update at one time, None if they cannot run.

    1. Updates and gathers take no time at first. The earliest update of a group on any rank tells
       the time. It is some seconds ``early``, in which weights can be gathered: a third of those
       behind the last W if None, since gradients have twice the bytes of weights.
    2. On each rank the update follows all passes that start before that time. No pass before it, on
       any rank, then needs one behind it on another rank, so that updates of any length move what
       is behind them by this length and no more.
    """
    updates = costs.feature(Updates)
    assert updates is not None
    try:
        timeline = simulate(schedule, costs.having(Updates(0.0, updates.reduction)))
    except InvalidSchedule:
        return None
    times = _times_of_updates(schedule, timeline, early)
    found = []
    for passes, starts in zip(schedule.ranks, timeline.start, strict=True):
        keys = [
            (times[p.microbatch] - _TOLERANCE, 0) if p.kind is _U else (at, 1)
            for p, at in zip(passes, starts, strict=True)
        ]
        found.append(tuple(passes[i] for i in sorted(range(len(passes)), key=keys.__getitem__)))
    return replace(schedule, ranks=tuple(found))


def _times_of_updates(
    schedule: Schedule, timeline: Timeline, early: float | None
) -> dict[int, float]:
    """Return when the update of each group is made, by its unit."""
    rules = schedule.rules
    assert isinstance(rules, DelayedRules)
    first, done = dict[int, float](), dict[int, float]()
    for passes, starts, ends in zip(schedule.ranks, timeline.start, timeline.end, strict=True):
        for p, at, end in zip(passes, starts, ends, strict=True):
            unit = p.microbatch // rules.group * rules.group
            if p.kind is _U:
                first[unit] = min(first.get(unit, math.inf), at)
            elif p.kind in (_W, _BW):
                done[unit] = max(done.get(unit, 0.0), end)
    return {
        unit: at - ((at - done[unit]) / 3 if early is None else early) for unit, at in first.items()
    }


def _with_updates(schedule: Schedule, group: int) -> Schedule:
    """Return a schedule of one long step, cut into groups that have updates."""
    groups = schedule.num_microbatches // group
    rules = DelayedRules.of(groups, group)
    ranks = tuple(tuple(_Updated(rank, group, groups).found) for rank in schedule.ranks)
    return replace(schedule, ranks=ranks, rules=rules, report=None)


class _Updated:
    """The order of a rank with updates: each right before the first F that waits for it.

    1. An F is held back while the rank has B to run of the group two before its own.
    2. What needs a pass that is held back, or comes later in its row, is held back as well.
    3. In front of the first F of a group comes the update of the group two before. A W of that
       group that has not run is brought forward.
    4. Updates that no F waits for come at the end.
    """

    def __init__(self, rank: Sequence[Pass], group: int, groups: int) -> None:
        self._rank, self._group = rank, group
        self._stages = sorted({p.stage for p in rank})
        self._left = [group * len(self._stages)] * groups
        self._has_run: set[Pass] = set()
        self._held_back: list[Pass] = []
        self.found: list[Pass] = []
        self._updated = 0
        for p in rank:
            self._take(p)
        self._update_before(groups)

    def _take(self, p: Pass) -> None:
        """Run a pass, and what has been held back until it, or hold it back."""
        if p in self._has_run:
            return
        if not self._can_run(p):
            self._held_back.append(p)
            return
        if p.kind is _F:
            self._update_before(p.microbatch // self._group - 1)
        self._run(p)
        if self._held_back and p.kind in (_B, _BW, _F):
            waiting, self._held_back = self._held_back, []
            for other in waiting:
                self._take(other)

    def _can_run(self, p: Pass) -> bool:
        if any(it.kind is p.kind and it.stage == p.stage for it in self._held_back):
            return False
        if p.kind is not _F:
            return p._replace(kind=_B if p.kind is _W else _F) not in self._held_back
        before = p.microbatch // self._group - 2
        return before < 0 or not self._left[before]

    def _update_before(self, end: int) -> None:
        """Run the updates of all groups before a number."""
        while self._updated < end:
            first = self._updated * self._group
            for p in self._rank:
                if p.kind is _W and p.microbatch < first + self._group:
                    self._run(p)
            self.found += [Pass(_U, stage, first) for stage in self._stages]
            self._updated += 1

    def _run(self, p: Pass) -> None:
        if p in self._has_run:
            return
        self._has_run.add(p)
        self.found.append(p)
        if p.kind in (_B, _BW):
            self._left[p.microbatch // self._group] -= 1
