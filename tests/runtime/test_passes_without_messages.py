"""Passes that a rank runs without the others: which they are, and that they wait for nobody."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from joined_pairs import joined
from recompute_offload import with_recompute_offload

from megatron_zb import schedules
from megatron_zb.runtime.executor import run_program
from megatron_zb.runtime.warm_up import MadeUpMessages, warm_up_program
from megatron_zb.schedules import Schedule
from megatron_zb.schedules.lowering import lower, runs_of
from megatron_zb.schedules.passes import Message, Pass, PassKind

M = 8
V_HALF = schedules.build("v-half", pipeline_size=4, num_microbatches=M)
SCHEDULES = {
    **{
        name: schedules.build(name, pipeline_size=4, num_microbatches=M)
        for name in ("1f1b", "interleaved", "zb-h1", "v-zb", "gpipe")
    },
    "recomputed": with_recompute_offload(V_HALF, seed=1, recompute=0.4, offload=0.4),
    "pairs": joined(V_HALF),
}


def passes_of(schedule: Schedule, rank: int, **options: Any) -> tuple[list[Pass], list[Pass]]:
    """The passes of a rank in a step and in its warm-up."""
    program = lower(schedule)
    short = warm_up_program(program, rank, **options)
    return tuple([run.work for run in runs_of(p.ranks[rank])] for p in (program, short))  # type: ignore[return-value]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_kind_of_pass_runs_in_the_order_of_a_step(name: str) -> None:
    for rank in range(4):
        step, warm = passes_of(SCHEDULES[name], rank)
        assert {(p.kind, p.stage) for p in warm} == {(p.kind, p.stage) for p in step}
        chosen = {p.microbatch for p in warm}
        assert warm == [p for p in step if p.microbatch in chosen]
        assert 0 in chosen
        assert len(chosen) < M  # a few, however long the step is


def test_microbatches_of_other_shapes_are_left_out() -> None:
    _, warm = passes_of(SCHEDULES["zb-h1"], 0, alike=False)
    assert {p.microbatch for p in warm} == {0}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rank_holds_a_part_of_what_it_holds_in_the_step(name: str) -> None:
    """At each pass, by what the passes of each kind add to the memory."""
    for rank in range(4):
        step, warm = passes_of(SCHEDULES[name], rank)
        at = dict(zip(step, held(step), strict=True))
        assert all(mine <= at[p] for p, mine in zip(warm, held(warm), strict=True))


def held(passes: list[Pass]) -> list[set[tuple[int, int]]]:
    """The stages and microbatches that are between their F and their last pass, at each pass."""
    last = {p[1:]: p for p in passes}
    now: set[tuple[int, int]] = set()
    found = []
    for p in passes:
        now = now | {p[1:]}
        found.append(now)
        if last[p[1:]] == p:
            now = now - {p[1:]}
    return found


class Noted:
    """Stage of which passes are noted; each makes a message."""

    def __init__(self, number: int, notes: list[tuple[PassKind, int, int]]) -> None:
        self._number, self._notes = number, notes

    def run(self, kind: PassKind, microbatch: int, *received: torch.Tensor) -> torch.Tensor:
        assert all(torch.equal(tensor, torch.full((2,), 7.0)) for tensor in received)
        self._notes.append((kind, self._number, microbatch))
        return torch.full((2,), 7.0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rank_runs_alone(name: str) -> None:
    schedule = SCHEDULES[name]
    for rank in range(4):
        notes: list[tuple[PassKind, int, int]] = []
        program = warm_up_program(lower(schedule), rank)
        stages = {s: Noted(s, notes) for s in schedule.placement.stages_of[rank]}
        handlers = {
            kind: lambda stage, m, *received, kind=kind: stage.run(kind, m, *received)
            for kind in PassKind.all()
        }
        transport = MadeUpMessages(lambda message, tensor: tensor.fill_(7.0))
        run_program(
            program, rank, stages, transport, lambda message: torch.empty(2), handlers=handlers
        )
        assert notes == [tuple(run.work) for run in runs_of(program.ranks[rank])]


def test_a_message_is_filled_when_it_is_taken() -> None:
    filled: list[Message] = []
    transport = MadeUpMessages(lambda message, tensor: filled.append(message))
    message = Message(False, 1, 0)
    transport.post_receive(None, message, lambda: torch.zeros(3))  # type: ignore[arg-type]
    assert filled == []
    assert transport.take(message).shape == (3,)
    assert filled == [message]
