"""Local search in orders with moves to the host: passes trade places, and units change their state.

Every candidate is simulated as a whole, which is for small problems; the effort is counted from
sizes alone, so that every rank of a job finds the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.request import keeps
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule
from megatron_zb.schedules.simulator import Priced, Timeline, simulate

_PASSES = 800_000  # simulated in all
_LARGEST = 200  # passes of a schedule that is worth it
_THRESHOLD = 0.75  # the loss that is accepted at first in each round, in mean passes
_ROUNDS = 4
_FARTHEST = 8  # places that a pass goes at once
_STATES = 0.25  # share of candidates in which a unit changes its state
_FURTHER = 0.5  # share of changes that another one follows
_OF_MOVES = (PassKind.D, PassKind.H)


def polish_moves(
    schedule: Schedule, costs: Priced, limit: Sequence[float], bound: float
) -> Schedule:
    """Return an order with moves that keeps the limit in no more time than this one.

    Args:
        schedule: an order with moves that keeps the limit; large ones are returned as they are.
        bound: a makespan at which nothing is left to gain.
    """
    size = sum(map(len, schedule.ranks))
    if size > _LARGEST:
        return schedule
    return _Polish(schedule, costs, limit).run(_PASSES // size, bound)


class _Polish:
    def __init__(self, schedule: Schedule, costs: Priced, limit: Sequence[float]) -> None:
        self._costs, self._limit = costs, limit
        self._dice = random.Random(0)
        self._best = self._now = simulate(schedule, costs)
        self._last = schedule.placement.num_stages - 1

    def run(self, turns: int, bound: float) -> Schedule:
        for turn in range(turns):
            if self._best.makespan <= bound * (1 + 1e-9):
                break
            left = 1 - (turn * _ROUNDS / turns) % 1.0
            threshold = _THRESHOLD * self._mean_pass() * left
            found = self._tried(self._candidate())
            if found is None or found.makespan > self._best.makespan + threshold:
                continue
            self._now = found
            if found.makespan < self._best.makespan - 1e-9:
                self._best = found
        return self._best.schedule

    def _mean_pass(self) -> float:
        passes = sum(map(len, self._best.schedule.ranks))
        busy = sum(self._best.costs.duration(p) for rank in self._best.schedule.ranks for p in rank)
        return busy / passes

    def _tried(self, candidate: Schedule | None) -> Timeline | None:
        """Return the timeline of a candidate that is valid and keeps the limits."""
        if candidate is None:
            return None
        try:
            timeline = simulate(candidate.validate(), self._costs)
        except InvalidSchedule:
            return None
        on_host = [timeline.costs.host_limit] * len(self._limit)
        fits = keeps(timeline.peak_memory, self._limit) and keeps(timeline.peak_host, on_host)
        return timeline if fits else None

    def _candidate(self) -> Schedule | None:
        """Return the present order with some changes, None where one breaks a rank's order."""
        lines = [list(rank) for rank in self._now.schedule.ranks]
        while True:
            line = self._dice.choice(lines)
            if self._dice.random() < _STATES:
                self._change_state(line)
            elif not self._shift(line):
                return None
            if self._dice.random() >= _FURTHER:
                return replace(self._now.schedule, ranks=tuple(map(tuple, lines)))

    def _shift(self, line: list[Pass]) -> bool:
        """Let a pass go some places earlier or later, if its rank's order allows that."""
        start = self._dice.randrange(len(line))
        stop = start + self._dice.choice((-1, 1)) * self._dice.randint(1, _FARTHEST)
        if not 0 <= stop < len(line):
            return False
        p = line.pop(start)
        line.insert(stop, p)
        passed = line[min(start, stop) : max(start, stop) + 1]
        return not any(q is not p and _in_turn(p, q) for q in passed)

    def _change_state(self, line: list[Pass]) -> None:
        """Keep a unit that was moved, or move one that was kept, for any part of its time."""
        backward = (PassKind.B, PassKind.BW)
        b = self._dice.choice([p for p in line if p.kind in backward])
        unit = b[1:]
        moves = [p for p in line if p[1:] == unit and p.kind in _OF_MOVES]
        if moves:
            line[:] = [p for p in line if p not in moves]
        elif b.stage != self._last and Pass(PassKind.R, *unit) not in line:
            first, last = line.index(Pass(PassKind.F, *unit)) + 1, line.index(b)
            out, back = sorted(self._dice.randint(first, last) for _ in range(2))
            line.insert(back, Pass(PassKind.H, *unit))
            line.insert(out, Pass(PassKind.D, *unit))


def _in_turn(p: Pass, q: Pass) -> bool:
    """Return whether one of two passes of a rank has to come before the other."""
    same_unit = p[1:] == q[1:]
    return same_unit or (p.stage == q.stage and p.kind is q.kind and p.kind not in _OF_MOVES)
