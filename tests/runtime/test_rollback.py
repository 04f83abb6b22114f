"""Where a step may be taken back: on paper for every schedule, over gloo for a toy model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import drawn_sizes
import pytest
import torch
from ranks import RankPools
from rendezvous import finishes
from toy_layers import empty_message, layers_of_a_rank

from megatron_zb import schedules
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.runtime.channels import Channels
from megatron_zb.runtime.post_validation import StateExchange, run_from_cut
from megatron_zb.schedules.lowering import (
    PostReceive,
    Program,
    Run,
    RunPair,
    Send,
    WaitReceive,
    rollback,
)
from megatron_zb.schedules.passes import PassKind

pytestmark = pytest.mark.usefixtures("brief_searches")
SIZES = [(2, 2), (2, 5), (3, 7), (4, 1), (4, 8), (8, 16)]


def lowered(name: str, pipeline_size: int, num_microbatches: int) -> Program:
    return schedules.lower(
        schedules.build(name, pipeline_size=pipeline_size, num_microbatches=num_microbatches)
    )


@pytest.mark.parametrize("name", schedules.names())
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_only_forwards_run_before_the_cut_and_they_read_what_was_sent_before_it(
    name: str, p: int, m: int
) -> None:
    program = lowered(name, p, m)
    ends = rollback(program).ends
    before = [rank[:end] for rank, end in zip(program.ranks, ends, strict=True)]
    sent, received = (
        {(at.channel, at.message) for rank in before for at in rank if isinstance(at, kind)}
        for kind in (Send, PostReceive)
    )
    assert sent == received
    for rank, end, prefix in zip(program.ranks, ends, before, strict=True):
        assert all(at.work.kind is PassKind.F for at in prefix if isinstance(at, Run))
        assert {
            (at.channel, at.message) for at in prefix if isinstance(at, WaitReceive)
        } <= received
        after = rank[end]
        if isinstance(after, Run):
            assert after.work.kind is not PassKind.F
        elif isinstance(after, WaitReceive):
            assert after.message.is_gradient
        elif not isinstance(after, RunPair):  # the other end of the message is beyond the cut
            assert (after.channel, after.message) not in sent


@pytest.mark.parametrize("name", schedules.names())
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_what_is_before_the_cut_finishes_and_leaves_no_message(name: str, p: int, m: int) -> None:
    program = lowered(name, p, m)
    found = rollback(program)
    prefixes = [rank[:end] for rank, end in zip(program.ranks, found.ends, strict=True)]
    assert finishes(replace(program, ranks=tuple(prefixes)))
    for prefix, drops in zip(prefixes, found.drops, strict=True):
        received = [at.message for at in prefix if isinstance(at, PostReceive)]
        taken = [at.message for at in prefix if isinstance(at, WaitReceive)]
        assert sorted(received) == sorted([*taken, *drops])


@pytest.mark.parametrize("name", schedules.names())
def test_the_warm_up_is_before_the_cut(name: str) -> None:
    """What runs before it is known whether the weights are right is what hides the wait."""
    program = lowered(name, 4, 8)
    ends = rollback(program).ends
    for rank, end in zip(program.ranks, ends, strict=True):
        kinds = [at.work.kind for at in rank if isinstance(at, Run)]
        warm_up = next(i for i, kind in enumerate(kinds) if kind is not PassKind.F)
        before = sum(isinstance(at, Run) for at in rank[:end])
        assert before >= warm_up - 2


class Restarted(NamedTuple):
    """How often the forwards of this rank ran, and the gradients of its stages, in each step."""

    forwards: list[int]
    gradients: list[dict[int, torch.Tensor]]


def steps_with_a_restart(name: str, num_microbatches: int) -> Restarted:
    """Three steps of the same weights; the second begins on wrong ones."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    program = lowered(name, world_size, num_microbatches)
    channels = Channels(list(range(world_size)), program.schedule.placement, "cpu")
    layers, stages = layers_of_a_rank(program.schedule.placement)
    memory = ActivationMemory()
    channels.activation_memory = memory
    result = Restarted([], [])
    for is_right in (True, False, True):
        right = {s: layer.weight.clone() for s, layer in layers.items()}
        anew: list[None] = []
        for layer in layers.values():
            layer.gradient.zero_()
            layer.weight += 0.0 if is_right else 1.0

        def validate(right: Any = right, is_right: bool = is_right) -> bool:
            for s, layer in layers.items():
                layer.weight.copy_(right[s])
            return is_right

        for stage in stages.values():
            stage.activation_memory = memory
        run_from_cut(
            program,
            rollback(program),
            rank,
            stages,
            channels,
            empty_message,
            is_right=validate,
            start_anew=lambda anew=anew: anew.append(None),  # type: ignore[misc]
        )
        assert memory.live_bytes == 0
        result.forwards.append(1 + len(anew))
        result.gradients.append({s: layer.gradient.clone() for s, layer in layers.items()})
    channels.close()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", drawn_sizes.AUTO_WITH_FULL)
@pytest.mark.parametrize("num_microbatches", [pytest.param(1, marks=pytest.mark.full), 7])
def test_a_step_that_began_wrongly_ends_like_one_that_did_not(
    ranks: RankPools, name: str, num_microbatches: int
) -> None:
    for of_rank in ranks(4).run(steps_with_a_restart, name=name, num_microbatches=num_microbatches):
        assert of_rank.forwards == [1, 2, 1]
        for stage, gradient in of_rank.gradients[0].items():
            for later in of_rank.gradients[1:]:
                assert torch.equal(later[stage], gradient)


def states_seen(steps: int) -> list[tuple[list[float], list[float]]]:
    """The partial and the full state of every step; ranks are in reverse order."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    exchange = StateExchange(list(range(world_size))[::-1], size=2)
    seen = []
    for step in range(steps):
        own = torch.tensor([10.0**rank, step], dtype=torch.float64)
        partial = exchange.partial(own)
        exchange.pass_on(partial)
        seen.append((partial.tolist(), exchange.full().tolist()))
    exchange.close()
    return seen


def test_the_state_adds_up_along_the_pipeline(ranks: RankPools) -> None:
    for rank, seen in enumerate(ranks(4).run(states_seen, steps=3)):
        for step, (partial, full) in enumerate(seen):
            assert partial == [sum(10.0**r for r in range(rank, 4)), (4 - rank) * step]
            assert full == [1111.0, 4 * step]
