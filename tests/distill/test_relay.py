"""Blockwise distillation on real ranks: what is trained, in any layout, and how far ranks drift."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from rank_process import Kind
from ranks import RankPools
from small_relay import Block, M, data, distilled_on_ranks, empty

from megatron_zb.distill.relay_steps import HANDLERS, Exchange, relay_steps
from megatron_zb.distill.schedule.distribution import Distribution
from megatron_zb.distill.schedule.pipe_bd import pipe_bd
from megatron_zb.distill.schedule.step_by_step import step_by_step
from megatron_zb.runtime.channels import Channels
from megatron_zb.runtime.executor import run_program
from megatron_zb.runtime.link_times import seconds_over_a_link
from megatron_zb.runtime.observer import Recorder
from megatron_zb.runtime.progress import RankProgress
from megatron_zb.schedules import lower
from megatron_zb.schedules.passes import Channel, Message, Pass, PassKind


def distilled_alone(num_blocks: int, steps: int) -> list[torch.Tensor]:
    """The same students, trained in one process, block by block."""
    blocks = [Block(number) for number in range(num_blocks)]
    for step in range(steps):
        for microbatch in range(step * M, (step + 1) * M):
            given = data(microbatch)
            for block in blocks:
                wanted = block.teach(given)
                block.study(given, wanted)
                given = wanted
        for block in blocks:
            block.update()
    return [block.student.detach() for block in blocks]


@pytest.mark.parametrize(
    "stages",
    [
        [(1, 1), (2, 1), (1, 1), (2, 1)],
        [(2, 1), (3, 2), (1, 1)],
        [(2, 2), (1, 2)],
        [(3, 4)],
    ],
)
def test_students_are_those_of_one_process(ranks: RankPools, stages: list[tuple[int, int]]) -> None:
    steps = 5
    found = ranks(4).run(distilled_on_ranks, stages=stages, runs=[(0, steps)])
    expected = distilled_alone(sum(blocks for blocks, _ in stages), steps)
    seen = set()
    degree_of = {
        block: len(group) for blocks, group in Distribution.of(stages).ranges for block in blocks
    }
    for of_rank in found:
        for number, student in of_rank.items():
            seen.add(number)
            assert torch.count_nonzero(student) == 25
            if degree_of[number] == 1:  # the same sums in the same order
                assert torch.equal(student, expected[number])
            torch.testing.assert_close(student, expected[number], rtol=1e-12, atol=1e-14)
    assert seen == set(range(len(expected)))


def test_steps_may_be_run_in_parts(ranks: RankPools) -> None:
    stages = [(2, 1), (3, 2), (1, 1)]
    whole, parts = (
        ranks(4).run(distilled_on_ranks, stages=stages, runs=runs)
        for runs in ([(0, 6)], [(0, 1), (1, 4), (4, 6)])
    )
    assert all(
        torch.equal(a[number], b[number]) for a, b in zip(whole, parts, strict=True) for number in a
    )


def test_messages_may_have_any_shape(ranks: RankPools) -> None:
    stages, runs = [(1, 1), (1, 2), (1, 1)], [(0, 4)]
    plain, shaped = (
        ranks(4).run(distilled_on_ranks, stages=stages, runs=runs, any_shape=flag)
        for flag in (False, True)
    )
    assert all(torch.equal(a[n], b[n]) for a, b in zip(plain, shaped, strict=True) for n in a)


def test_a_rank_may_have_to_wait_until_the_next_one_takes_what_it_sends(ranks: RankPools) -> None:
    stages, runs = [(2, 1), (3, 2), (1, 1)], [(0, 4)]
    free, held = (
        ranks(4).run(distilled_on_ranks, stages=stages, runs=runs, most_waiting=most)
        for most in (None, 1)
    )
    assert all(torch.equal(a[n], b[n]) for a, b in zip(free, held, strict=True) for n in a)


def untaken(most_waiting: int | None) -> int:
    """The most sends of the first rank that wait while the second sleeps."""
    rank, steps, seen = dist.get_rank(), 3, [0]
    distribution = Distribution.of([(1, 1), (1, 1)])
    channels = Channels(range(2), distribution.placement, "cpu")

    class Counting(Sleeper):
        def study(self, microbatch: int) -> None:
            super().study(microbatch)
            seen.extend(map(len, channels._sends.values()))

    stage = Counting(0.02 * rank)
    program = step_by_step(distribution, M, 2, most_waiting)
    for _ in relay_steps(program, rank, stage, Exchange(channels, empty), first=0, until=steps):
        pass
    channels.close()
    return max(seen) * (rank == 0)


def test_so_many_activations_wait_and_no_more(ranks: RankPools) -> None:
    free, held = (ranks(2, Kind.PLAIN).run(untaken, most_waiting=most)[0] for most in (None, 2))
    assert held == 2 < free


class Sleeper:
    """Takes its time to study; notes when each step begins and ends, on the host's clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.begins: dict[int, float] = {}
        self.ends: list[float] = []

    def teach(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        self.begins.setdefault(microbatch // M, time.monotonic())
        return torch.zeros(3, 5, dtype=torch.float64)

    def study(self, microbatch: int) -> None:
        time.sleep(self.seconds)

    def update(self, step: int) -> None:
        self.ends.append(time.monotonic())


def drift(sleeper: int, run_ahead: int, steps: int) -> tuple[list[float], list[float]]:
    """When this rank began and ended each step, while one of the ranks sleeps in each pass."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    distribution = Distribution.of([(1, 1)] * world_size)
    channels = Channels(range(world_size), distribution.placement, "cpu")
    stage = Sleeper(0.02 if rank == sleeper else 0.0)
    program = step_by_step(distribution, M, run_ahead)
    dist.barrier()
    for _ in relay_steps(program, rank, stage, Exchange(channels, empty), first=0, until=steps):
        pass
    channels.close()
    return list(stage.begins.values()), stage.ends


@pytest.mark.parametrize("sleeper", [3, 1])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a_rank_runs_ahead_as_far_as_allowed_and_no_further(
    ranks: RankPools, run_ahead: int, sleeper: int
) -> None:
    steps = 5
    found = ranks(4, Kind.PLAIN).run(drift, sleeper=sleeper, run_ahead=run_ahead, steps=steps)
    for begins, _ in found:
        for _, ends in found:
            for step in range(run_ahead + 1, steps):
                assert begins[step] >= ends[step - 1 - run_ahead]
    # The first rank has nothing to do but to run ahead. Where others keep it from its core it may
    # come late to a step, but hardly to all of them.
    first_begins, sleeper_ends = found[0][0], found[sleeper][1]
    reached = [first_begins[n + run_ahead] < sleeper_ends[n] for n in range(steps - run_ahead)]
    assert any(reached)


def passes_seen() -> list[Pass]:
    """What an observer of a whole program is told on this rank."""
    distribution = Distribution.of([(1, 1), (1, 1)])
    channels = Channels(range(2), distribution.placement, "cpu")
    program = lower(pipe_bd(distribution, 2, steps=2, run_ahead=0))
    recorder = Recorder()
    rank = dist.get_rank()
    stages = {rank: Sleeper(0)}
    run_program(program, rank, stages, channels, empty, recorder, handlers=HANDLERS)
    channels.close()
    return [span.of for span in recorder.spans() if isinstance(span.of, Pass)]


def test_a_whole_program_runs_and_is_observed(ranks: RankPools) -> None:
    found = ranks(2).run(passes_seen)
    assert [" ".join(map(str, rank)) for rank in found] == [
        f"{r}T0 {r}S0 {r}T1 {r}S1 {r}U0 {r}T2 {r}S2 {r}T3 {r}S3 {r}U1" for r in (0, 1)
    ]


class StandIn:
    """A transport that makes up what it receives, and notes what is asked of it."""

    def __init__(self) -> None:
        self.taken: list[weakref.ref[torch.Tensor]] = []
        self.finished = 0

    waits_to_receive = False

    def post_receive(
        self, channel: Channel, message: Message, allocate: Callable[[], torch.Tensor]
    ) -> None:
        """Nothing will come."""

    def take(self, message: Message) -> torch.Tensor:
        tensor = torch.zeros(1)
        self.taken.append(weakref.ref(tensor))
        return tensor

    def send(
        self, channel: Channel, tensor: torch.Tensor, slots: int, message: Message | None = None
    ) -> None:
        """Nobody reads it."""

    def between_passes(self, launches_little: bool = False) -> None:
        """There is nothing to forget."""

    def finish(self) -> None:
        self.finished += 1


def link_seconds(numbers: list[int]) -> list[float]:
    return [seconds_over_a_link(count, "cpu") for count in numbers]


def test_summing_gradients_is_timed_alike_on_all_ranks(ranks: RankPools) -> None:
    first, second = ranks(2).run(link_seconds, numbers=[0, 1000, 4_000_000])
    assert first == second
    nothing, few, many = first
    assert nothing == 0
    assert 0 < few < many


def test_ends_of_steps_are_dropped_and_sends_are_waited_for_at_the_end() -> None:
    transport = StandIn()
    program = step_by_step(Distribution.of([(1, 1), (1, 1)]), M, run_ahead=0)
    steps = relay_steps(program, 0, Sleeper(0), Exchange(transport, empty), first=0, until=4)
    assert [next(steps) for _ in range(4)] == [0, 1, 2, 3]
    assert len(transport.taken) == 3  # before each step but the first
    assert all(tensor() is None for tensor in transport.taken)
    assert transport.finished == 0
    assert next(steps, None) is None
    assert transport.finished == 1


def test_a_rank_that_waits_for_updates_says_so() -> None:
    program = step_by_step(Distribution.of([(1, 1), (1, 1)]), M, run_ahead=0)
    progress = RankProgress(schedule=program.schedule)
    with progress.step():
        done = Message(False, 0, 7, done_by=3)
        with progress.running(Pass(PassKind.U, 0, 8)), progress.waiting(Channel(3, 0), done):
            state = progress.state()
    assert state.doing == "waits for pipeline rank 3 to update its students in step 7"
    assert state.waits_for == 3
    assert state.passes == ("U of stage 0, step 8",)
