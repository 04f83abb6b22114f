"""Programs of calls and drains: whatever their sequence, what they compose to finishes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import pytest

from megatron_zb.errors import UsageError
from megatron_zb.schedules import build
from megatron_zb.schedules.call_programs import Call, CallPrograms, joined
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.lowering import (
    Instruction,
    PostReceive,
    Program,
    Run,
    Send,
    WaitReceive,
    check_progress,
)
from megatron_zb.schedules.passes import Message, Pass, PassKind
from megatron_zb.schedules.schedule import InvalidSchedule

F, B, W, BW, U = PassKind.F, PassKind.B, PassKind.W, PassKind.BW, PassKind.U

SIZES = [
    ("1f1b", 2, 2),
    ("1f1b", 4, 4),
    ("1f1b", 4, 1),
    ("zb-h1", 2, 3),
    ("zb-h1", 4, 5),
    ("v-min", 2, 2),
    ("v-min", 4, 4),
    ("v-half", 2, 1),
    ("v-half", 4, 5),
    ("v-zb", 2, 2),
    ("v-zb", 3, 4),
    ("v-zb", 4, 4),
    ("interleaved", 2, 4),
    ("interleaved", 4, 8),
]
LARGE = [
    pytest.param(name, p, m, marks=pytest.mark.full)
    for name in ("1f1b", "zb-h1", "v-min", "v-half", "v-zb", "interleaved")
    for p, m in ((4, 11), (4, 12), (8, 16))
]
EACH = pytest.mark.parametrize(("name", "p", "m"), [*SIZES, *LARGE])
AHEAD = [("v-zb", 2, 2), ("v-zb", 3, 4), ("v-half", 4, 5), ("v-zb", 4, 4)]


@cache
def programs_of(name: str, p: int, m: int, *, timed: bool = False) -> CallPrograms:
    costs = Costs.uniform(pipeline_size=p, forward=1.0, backward=1.2, weight=0.8, p2p=0.1)
    schedule = build(name, pipeline_size=p, num_microbatches=m, costs=costs, update_delay=1)
    return CallPrograms(schedule, costs if timed else None)


@dataclass
class Training:
    """A sequence of calls and drains, and what they are.

    ``parts`` has the program of each; ``drains`` the index of those that are drains. Groups of
    ``restarts`` begin anew with the newest weights.
    """

    programs: CallPrograms
    parts: list[Program] = field(default_factory=list)
    calls: list[Call | None] = field(default_factory=list)
    restarts: list[int] = field(default_factory=lambda: [0])
    drained: list[int] = field(default_factory=list)
    last: Call | None = None
    is_open: bool = False

    def call(self, *, reads_ahead: bool) -> None:
        group = 0 if self.last is None else self.last.group + 1
        begun = self.last is not None and self.last.reads_ahead
        ahead = reads_ahead and self.programs.reads_ahead
        self.last = Call(group, follows=self.is_open, has_begun=begun, reads_ahead=ahead)
        self.is_open = True
        self.calls.append(self.last)
        self.parts.append(self.programs.of(self.last))

    def drain(self) -> None:
        assert self.last is not None
        if self.is_open:
            self.calls.append(None)
            self.parts.append(self.programs.drain(self.last))
            self.drained.append(self.last.group)
        self.is_open = False

    def restart(self) -> None:
        """Drain, and compute on from the newest weights; the last call has read nothing ahead."""
        assert self.last is not None and not self.last.reads_ahead
        self.drain()
        self.restarts.append(self.last.group + 1)

    @property
    def groups(self) -> int:
        return 0 if self.last is None else self.last.group + 1

    def whole(self) -> Program:
        whole = joined(self.parts)
        units = [at.work.microbatch for rank in whole.ranks for at in rank if isinstance(at, Run)]
        calls = self.programs.calls
        schedule = calls.consecutive("several calls", max(units) // calls.group + 1)
        return replace(whole, schedule=schedule)

    def runs(self) -> list[list[Pass]]:
        return [[at.work for at in rank if isinstance(at, Run)] for rank in self.whole().ranks]


def drawn(programs: CallPrograms, seed: int, calls: int = 8) -> Training:
    """A training with drains and restarts anywhere, that ends with nothing under way."""
    choose = random.Random(seed)
    training = Training(programs)
    for i in range(calls):
        restarts = choose.random() < 0.2
        training.call(reads_ahead=not restarts and i + 1 < calls and choose.random() < 0.8)
        if restarts:
            training.restart()
        elif choose.random() < 0.35:
            training.drain()
    training.drain()
    return training


def in_turn(programs: CallPrograms, calls: int, drained: Sequence[int] = ()) -> Training:
    """A training that always reads ahead but at its end, drained behind some groups."""
    training = Training(programs)
    for group in range(calls):
        training.call(reads_ahead=group + 1 < calls)
        if group in drained:
            training.drain()
    training.drain()
    return training


def check(training: Training) -> None:
    """Check all that holds for any sequence."""
    check_progress(training.whole())
    check_passes(training)
    check_messages(training)
    check_weights(training)


def check_passes(training: Training) -> None:
    """Every pass of every group runs once, and those of one group in the order of the schedule."""
    programs, m = training.programs, training.programs.group
    expected = programs.calls.consecutive("in a row", training.groups)
    for found, given in zip(training.runs(), expected.ranks, strict=True):
        assert sorted(found) == sorted(given)
        for group in range(training.groups):
            own = [p for p in found if p.microbatch // m == group]
            assert own == [p for p in given if p.microbatch // m == group]


def check_messages(training: Training) -> None:
    """No message is under way between two programs, and each is taken once, behind its receive."""
    for part in training.parts:
        sent = Counter((at.channel, at.message) for rank in part.ranks for at in of(Send, rank))
        posted = Counter(
            (at.channel, at.message) for rank in part.ranks for at in of(PostReceive, rank)
        )
        assert sent == posted and set(sent.values()) <= {1}
        for rank, instructions in enumerate(part.ranks):
            assert all(at.channel.source == rank for at in of(Send, instructions))
            assert all(at.channel.target == rank for at in of(PostReceive, instructions))
    for instructions in training.whole().ranks:
        posted_here: set[Message] = set()
        taken: set[Message] = set()
        here: set[Message] = set()
        for at in instructions:
            if isinstance(at, PostReceive):
                assert at.message not in posted_here
                posted_here.add(at.message)
            elif isinstance(at, WaitReceive):
                assert at.message in posted_here and at.message not in taken
                taken.add(at.message)
                here.add(at.message)
            elif isinstance(at, Run):
                assert here.issuperset(at.reads), at
                here.difference_update(at.reads)
                if at.makes_local:
                    assert at.makes is not None
                    here.add(at.makes)
        assert taken == posted_here
        assert not here, "what is made or received is read"


def of(kind: type, instructions: Sequence[Instruction]) -> Iterator[Send | PostReceive]:
    for at in instructions:
        if isinstance(at, kind):
            assert isinstance(at, Send | PostReceive)
            yield at


def check_weights(training: Training) -> None:
    """A pass finds the weights of its group: the newest ones, or those before them.

    They are those of one update fewer than groups before it; the first two groups behind a restart
    have the same ones.
    """
    m = training.programs.group
    for passes in training.runs():
        updates = 0
        seen: set[int] = set()
        for p in passes:
            group = p.microbatch // m
            if p.kind is U:
                seen.add(group)
                updates = len(seen)
                assert seen == set(range(updates)), "updates come in turn"
                continue
            since = max(it for it in training.restarts if it <= group)
            wanted = max(group - 1, since)
            assert wanted in (updates, updates - 1), p
            if wanted == updates - 1:
                assert updates > since, "older weights than those of the restart are gone"


# --- any sequence


@EACH
@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_calls_and_drains_runs_every_pass(
    name: str, p: int, m: int, seed: int
) -> None:
    programs = programs_of(name, p, m)
    assert programs.group == m
    check(drawn(programs, 1000 * seed + 10 * p + m))


@pytest.mark.parametrize(("name", "p", "m"), [("zb-h1", 4, 5), ("v-half", 4, 5), ("v-zb", 2, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_programs_for_the_costs_of_their_schedule(name: str, p: int, m: int, seed: int) -> None:
    """Messages then stand elsewhere, by the times of the passes."""
    check(drawn(programs_of(name, p, m, timed=True), seed))


def test_sequences_have_drains_restarts_and_calls_that_read_ahead() -> None:
    """What is drawn above has all kinds of calls, one behind the other."""
    kinds = set()
    for name, p, m in AHEAD:
        for seed in range(4):
            training = drawn(programs_of(name, p, m), 1000 * seed + 10 * p + m)
            kinds |= {
                (it.follows, it.has_begun, it.reads_ahead)
                for it in training.calls
                if it is not None
            }
            assert training.drained
    assert len(kinds) == 8


@EACH
def test_calls_in_turn_are_the_schedule(name: str, p: int, m: int) -> None:
    programs = programs_of(name, p, m)
    training = in_turn(programs, 5)
    check(training)
    expected = programs.calls.consecutive("in a row", 5)
    assert [tuple(rank) for rank in training.runs()] == [*expected.ranks]


@EACH
def test_a_drain_behind_every_call(name: str, p: int, m: int) -> None:
    programs = programs_of(name, p, m)
    training = in_turn(programs, 4, range(4))
    check(training)
    assert training.drained == [0, 1, 2, 3]


@EACH
def test_a_call_alone(name: str, p: int, m: int) -> None:
    """A training of one step, and one that restarts behind every step."""
    programs = programs_of(name, p, m)
    training = Training(programs)
    for _ in range(3):
        training.call(reads_ahead=False)
        training.restart()
    check(training)
    assert len(training.parts) == 6


# --- what is in a call


def groups_of(part: Program, m: int) -> set[int]:
    return {at.work.microbatch // m for rank in part.ranks for at in rank if isinstance(at, Run)}


@EACH
def test_a_call_has_the_groups_that_it_is_given(name: str, p: int, m: int) -> None:
    programs = programs_of(name, p, m)
    ahead = programs.reads_ahead
    first = programs.of(Call(0, follows=False, has_begun=False, reads_ahead=ahead))
    assert groups_of(first, m) == ({0, 1} if ahead else {0})
    middle = programs.of(Call(5, follows=True, has_begun=ahead, reads_ahead=ahead))
    assert groups_of(middle, m) == ({4, 5, 6} if ahead else {4, 5})
    last = programs.of(Call(5, follows=True, has_begun=ahead, reads_ahead=False))
    assert groups_of(last, m) == {4, 5}
    behind_a_drain = programs.of(Call(5, follows=False, has_begun=ahead, reads_ahead=False))
    assert groups_of(behind_a_drain, m) == {5}
    for reads_ahead in {ahead, False}:
        drain = programs.drain(Call(5, follows=True, has_begun=ahead, reads_ahead=reads_ahead))
        assert groups_of(drain, m) == {5}


@EACH
def test_a_call_ends_with_the_losses_of_its_group(name: str, p: int, m: int) -> None:
    """All F of a group have run behind its call, and the drain has none."""
    programs = programs_of(name, p, m)
    training = in_turn(programs, 4, [1])
    stages = programs.calls.placement.num_stages
    forwards: Counter[int] = Counter()
    for call, part in zip(training.calls, training.parts, strict=True):
        runs = [at.work for rank in part.ranks for at in rank if isinstance(at, Run)]
        if call is None:
            assert not [it for it in runs if it.kind is F]
            continue
        forwards.update(it.microbatch // m for it in runs if it.kind is F)
        assert forwards[call.group] == m * stages


@EACH
def test_a_drain_ends_with_the_update_of_its_group(name: str, p: int, m: int) -> None:
    programs = programs_of(name, p, m)
    drain = programs.drain(Call(3, follows=True, has_begun=False, reads_ahead=False))
    for rank, instructions in enumerate(drain.ranks):
        runs = [at.work for at in instructions if isinstance(at, Run)]
        stages = [s for s, on in enumerate(programs.calls.placement.rank_of) if on == rank]
        updates = [it for it in runs if it.kind is U]
        assert sorted(updates) == [Pass(U, stage, 3 * m) for stage in stages]
        assert runs[-len(updates) :] == updates


@pytest.mark.parametrize(("name", "p", "m"), AHEAD)
def test_a_drain_takes_what_has_been_sent_for_the_next_group(name: str, p: int, m: int) -> None:
    """A message is then here already when the call behind the drain runs."""
    programs = programs_of(name, p, m)
    assert programs.reads_ahead
    ahead = Call(2, follows=True, has_begun=True, reads_ahead=True)
    taken = [
        {
            at.message
            for at in rank
            if isinstance(at, WaitReceive) and at.message.microbatch >= 3 * m
        }
        for rank in programs.drain(ahead).ranks
    ]
    posted = [
        {at.message for at in rank if isinstance(at, PostReceive)}
        - {at.message for at in rank if isinstance(at, WaitReceive)}
        for rank in programs.of(ahead).ranks
    ]
    for of_drain, of_call in zip(taken, posted, strict=True):
        assert of_drain == {it for it in of_call if it.microbatch >= 3 * m}
    behind = programs.of(Call(3, follows=False, has_begun=True, reads_ahead=True))
    for rank, of_drain in zip(behind.ranks, taken, strict=True):
        assert not of_drain & {at.message for at in rank if isinstance(at, WaitReceive)}
    follows = programs.of(Call(3, follows=True, has_begun=True, reads_ahead=True))
    for rank, of_drain in zip(follows.ranks, taken, strict=True):
        assert of_drain <= {at.message for at in rank if isinstance(at, WaitReceive)}
    none = programs.drain(Call(2, follows=True, has_begun=True, reads_ahead=False))
    for rank in none.ranks:
        waits = [at.message.microbatch for at in rank if isinstance(at, WaitReceive)]
        assert all(2 * m <= unit < 3 * m for unit in waits)


@EACH
def test_a_call_runs_what_the_schedule_has_in_a_call(name: str, p: int, m: int) -> None:
    programs = programs_of(name, p, m)
    ahead = programs.reads_ahead
    found = programs.of(Call(3, follows=True, has_begun=ahead, reads_ahead=ahead))
    for rank, expected in zip(found.ranks, programs.calls.ranks, strict=True):
        works = [at.work for at in rank if isinstance(at, Run)]
        assert works == [it._replace(microbatch=it.microbatch + 2 * m) for it in expected]


@EACH
def test_programs_count_through_all_groups(name: str, p: int, m: int) -> None:
    """A call far into a training is the one before with later numbers."""
    programs = programs_of(name, p, m)
    ahead = programs.reads_ahead
    for near, far in ((3, 4), (3, 1000)):
        parts = [
            programs.of(Call(group, follows=True, has_begun=ahead, reads_ahead=ahead))
            for group in (near, far)
        ]
        works = [
            [at.work for rank in part.ranks for at in rank if isinstance(at, Run)] for part in parts
        ]
        assert [
            it._replace(microbatch=it.microbatch + (far - near) * m) for it in works[0]
        ] == works[1]


# --- where ranks meet


@EACH
def test_ranks_meet_behind_the_last_w_and_before_the_update(name: str, p: int, m: int) -> None:
    training = in_turn(programs_of(name, p, m), 4, [1])
    for call, part in zip(training.calls, training.parts, strict=True):
        updated = {at.work.microbatch // m for rank in part.ranks for at in runs_of_kind(rank, U)}
        assert len(updated) == int(call is None or call.follows)
        assert {len(meets) for meets in part.meets} == {len(updated)}
    whole = training.whole()
    for instructions, meets in zip(whole.ranks, whole.meets, strict=True):
        assert len(meets) == 4
        for group, meet in enumerate(meets):
            before, behind = instructions[:meet], instructions[meet:]
            weights = [at for at in runs_of_kind(behind, W, BW) if at.work.microbatch // m == group]
            updates = [at for at in runs_of_kind(before, U) if at.work.microbatch // m == group]
            assert not weights and not updates


def runs_of_kind(instructions: Sequence[Instruction], *kinds: PassKind) -> Iterator[Run]:
    return (at for at in instructions if isinstance(at, Run) and at.work.kind in kinds)


def test_ranks_meet_before_a_pass_that_is_under_way_at_the_update() -> None:
    """So that no rank waits at the update for one that is within a pass."""
    programs = programs_of("1f1b", 4, 4)
    part = programs.of(Call(3, follows=True, has_begun=False, reads_ahead=False))
    between = [
        [at.work.kind for at in runs_of_kind(instructions[meet:], F, BW, U)]
        for instructions, (meet,) in zip(part.ranks, part.meets, strict=True)
    ]
    passes = [kinds.index(U) for kinds in between]
    assert set(passes) == {0, 1}, "one rank makes the update as soon as it can"


def test_the_proof_knows_where_ranks_meet() -> None:
    programs = programs_of("zb-h1", 4, 5)
    whole = in_turn(programs, 3).whole()
    check_progress(whole)
    first, *others = whole.meets
    late = tuple(len(whole.ranks[0]) for _ in first)
    with pytest.raises(InvalidSchedule, match="rank 1 to meet all others") as error:
        check_progress(replace(whole, meets=(late, *others)))
    assert "\n" not in str(error.value)


def test_some_schedules_read_nothing_ahead() -> None:
    assert not programs_of("1f1b", 2, 2).reads_ahead
    assert programs_of("v-zb", 4, 4).reads_ahead


def test_a_schedule_without_a_delay_has_no_calls() -> None:
    with pytest.raises(UsageError, match="1f1b: the schedule was built without an update delay"):
        CallPrograms(build("1f1b", pipeline_size=2, num_microbatches=4))


def test_the_proof_knows_what_an_update_waits_for() -> None:
    """It has no message from the ranks whose W it waits for."""
    programs = programs_of("1f1b", 2, 4)
    whole = in_turn(programs, 3).whole()
    check_progress(whole)
    first, *others = whole.ranks
    updates = tuple(at for at in first if isinstance(at, Run) and at.work.kind is PassKind.U)
    early = (*updates[:1], *(at for at in first if at is not updates[0]))
    with pytest.raises(InvalidSchedule, match="rank 0 to run 0U0"):
        check_progress(replace(whole, ranks=(early, *others)))
