"""The ranks of the tests do break what breaks the rules of a GPU; and who waits for the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from rank_process import COLLECTIVE_TIMEOUT, Kind
from ranks import RankFailure, RankPools, RankTimeout

from megatron_zb import schedules
from megatron_zb.runtime.channels import Channels, new_groups
from megatron_zb.runtime.executor import run_program
from megatron_zb.runtime.link_times import clock_ahead, link_times
from megatron_zb.schedules.lowering import (
    Instruction,
    PostReceive,
    Program,
    WaitReceive,
    check_progress,
)
from megatron_zb.schedules.passes import Channel, Message
from megatron_zb.schedules.placement import looped
from megatron_zb.schedules.schedule import InvalidSchedule
from megatron_zb.train.synthetic_steps import SyntheticStage

MESSAGE = Message(False, 1, 0)
THERE = Channel(0, 1)


def empty() -> torch.Tensor:
    return torch.empty(3)


def connected() -> Channels:
    return Channels([0, 1], looped(2), "cpu")


def buffer_before_and_after() -> list[list[float]]:
    """What is in a receive's buffer before it has been waited for, and then."""
    channels, seen, buffers = connected(), [], [empty()]
    if dist.get_rank() == 0:
        channels.send(THERE, torch.ones(3), 2)
    else:
        channels.post_receive(THERE, MESSAGE, lambda: buffers[0])
        dist.barrier()
        seen = [buffers[0].tolist(), channels.take(MESSAGE).tolist()]
    if dist.get_rank() == 0:
        dist.barrier()
    channels.finish()
    channels.close()
    return seen


def test_a_buffer_holds_nothing_of_use_until_it_has_been_waited_for(ranks: RankPools) -> None:
    _, (before, after) = ranks(2).run(buffer_before_and_after)
    assert all(x != x for x in before)
    assert after == [1, 1, 1]


def changes_what_it_sent() -> None:
    channels, tensor = connected(), torch.ones(3)
    if dist.get_rank() == 0:
        channels.send(THERE, tensor, 2)
        tensor += 1
        channels.finish()
    else:
        channels.post_receive(THERE, MESSAGE, empty)
        channels.take(MESSAGE)


def test_a_tensor_must_not_change_on_its_way(ranks: RankPools) -> None:
    with pytest.raises(RankFailure, match="a tensor was changed while it was on its way"):
        ranks(2).run(changes_what_it_sent)


def synchronises(once_sent: bool) -> None:
    """The second rank waits for its device with a receive open, once or before it is sent to."""
    channels = connected()
    if dist.get_rank() == 1:
        channels.post_receive(THERE, MESSAGE, empty)
    else:
        if once_sent:
            channels.send(THERE, torch.ones(3), 2)
        dist.barrier()
        return
    if once_sent:
        dist.barrier()
    torch.cuda.synchronize()
    channels.take(MESSAGE)


@pytest.mark.long
def test_to_wait_for_the_device_with_a_receive_open_is_told_with_its_place(
    ranks: RankPools,
) -> None:
    ranks(2).run(synchronises, once_sent=True)
    with pytest.raises(RankFailure, match=r"(?s)synchronize was called while .*in post_receive"):
        ranks(2).run(synchronises, once_sent=False)


def runs(program: Program) -> str:
    rank = dist.get_rank()
    schedule = program.schedule
    costs = schedules.Costs.uniform(
        pipeline_size=len(program.ranks), forward=1e-6, backward=1e-6, weight=1e-6
    ).for_placement(schedule.placement)
    stages = {s: SyntheticStage(s, costs) for s in schedule.placement.stages_of[rank]}
    channels = Channels(list(range(len(program.ranks))), schedule.placement, "cpu")
    run_program(program, rank, stages, channels, lambda message: torch.empty(64))
    channels.close()
    return "done"


@pytest.mark.long
def test_a_program_that_buffers_would_forgive_hangs_here_and_not_on_plain_ranks(
    ranks: RankPools,
) -> None:
    """Both ranks send before they receive: one from the other's buffer."""
    schedule = schedules.build("1f1b", pipeline_size=2, num_microbatches=4)
    program = crossed(schedules.lower(schedule))
    with pytest.raises(InvalidSchedule, match=r"rank 0 to send .*; rank 1 to send"):
        check_progress(program)
    assert ranks(2, Kind.PLAIN).run(runs, program=program) == ["done", "done"]
    with pytest.raises(RankTimeout, match="_isend"):
        ranks(2).run(runs, program=program, timeout=3)


def crossed(program: Program) -> Program:
    """Let every rank receive a message only where it takes it."""
    ranks = []
    for rank in program.ranks:
        order: list[Instruction] = []
        for at in rank:
            if isinstance(at, WaitReceive):
                order.append(PostReceive(*at))
            if not isinstance(at, PostReceive):
                order.append(at)
        ranks.append(tuple(order))
    return replace(program, ranks=tuple(ranks))


def measured_links() -> tuple[int, float]:
    """Messages of a profile, on ranks that wait for their device whenever they are asked to."""
    size = dist.get_world_size()
    placement, rank = looped(size, 2), dist.get_rank()
    channels = Channels(list(range(size)), placement, "cpu")
    found = link_times(channels, placement, rank, lambda: torch.zeros(1000))
    ahead = clock_ahead(channels, placement, rank, "cpu")
    channels.close()
    assert all(0 < seconds < 10 for seconds in found.values())
    return len(found), ahead


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_links_are_measured_by_blocking_messages(ranks: RankPools, size: int) -> None:
    found = ranks(size).run(measured_links)
    assert sum(links for links, _ in found) == 2 * (size if size > 2 else 1)
    assert all(abs(ahead) < 1 for _, ahead in found)  # one clock, in truth


def timeout_of_a_new_group() -> float:
    [group] = new_groups([range(dist.get_world_size())])
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    dist.barrier()  # a rank may still be connecting
    dist.destroy_process_group(group)
    return seconds


def test_groups_have_the_timeout_of_the_job(ranks: RankPools) -> None:
    expected = COLLECTIVE_TIMEOUT.total_seconds()
    assert ranks(2).run(timeout_of_a_new_group) == [expected, expected]
