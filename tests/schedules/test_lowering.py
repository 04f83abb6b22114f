"""Programs: where messages stand in them, what stays on a rank, and what is held meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_zb import schedules
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.lowering import (
    Instruction,
    PostReceive,
    Program,
    Run,
    Send,
    WaitReceive,
    lower,
    peak_with_messages,
)
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import looped
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.stage_costs import StageCosts

F, B, W, BW = PassKind.F, PassKind.B, PassKind.W, PassKind.BW


def _runs(program: Program, rank: int) -> dict[Pass, Run]:
    return {at.work: at for at in program.ranks[rank] if isinstance(at, Run)}


def test_what_the_next_stage_of_the_same_rank_reads_is_not_sent() -> None:
    """In a V of two ranks, stages 1 and 2 are both on rank 1."""
    program = lower(schedules.build("v-half", pipeline_size=2, num_microbatches=4))
    first, turn = _runs(program, 0), _runs(program, 1)
    for microbatch in range(4):
        assert turn[Pass(F, 1, microbatch)].makes_local
        assert not turn[Pass(F, 2, microbatch)].makes_local
        assert not first[Pass(F, 0, microbatch)].makes_local
    gradients = [run for p, run in turn.items() if p.stage == 2 and p.kind in (B, BW)]
    assert len(gradients) == 4 and all(run.makes_local for run in gradients)
    sent = [at.message.stage for at in program.ranks[1] if isinstance(at, Send)]
    assert set(sent) == {0, 3}, "gradients of stage 0 and activations of stage 3 alone"


def _two_ranks() -> Schedule:
    ranks = (
        (Pass(F, 0, 0), Pass(F, 0, 1), Pass(BW, 0, 0), Pass(BW, 0, 1)),
        (Pass(F, 1, 0), Pass(BW, 1, 0), Pass(F, 1, 1), Pass(BW, 1, 1)),
    )
    return Schedule("two ranks", looped(2, 1), 2, ranks).validate()


@pytest.mark.parametrize("captured", [False, True])
def test_a_receive_stands_where_the_pass_that_makes_its_message_ends(captured: bool) -> None:
    """Rank 0's second F runs from 1 to 2, as rank 1's first F does.

    In a CUDA graph, the receive stands where that F of rank 0 begins, before F of rank 1; otherwise
    behind it.
    """
    program = lower(_two_ranks(), captured=captured)
    rank = program.ranks[1]
    second = next(
        i for i, at in enumerate(rank) if isinstance(at, PostReceive) and at.message[2] == 1
    )
    first_pass = next(i for i, at in enumerate(rank) if isinstance(at, Run))
    assert (second < first_pass) is captured


@pytest.mark.parametrize("name", ["zb-h1", "v-half"])
def test_messages_count_from_their_receive_or_send_on(name: str) -> None:
    """A buffer counts until its pass takes it, a sent message until the next pass of its rank."""
    program = lower(schedules.build(name, pipeline_size=2, num_microbatches=4))
    placement = program.schedule.placement
    costs = Costs.uniform(pipeline_size=2, forward=1.0, backward=1.0, weight=1.0)
    stages = costs.for_placement(placement)
    for rank in range(2):
        peaks = [peak_with_messages(program, rank, stages, size) for size in (0.0, 0.5, 10.0)]
        assert peaks == [_peak_by_hand(program, rank, stages, size) for size in (0.0, 0.5, 10.0)]
        assert peaks[0] < peaks[1] < peaks[2]
    sent = [i for i, at in enumerate(program.ranks[0]) if isinstance(at, Send)]
    assert any(_open(program.ranks[0][: i + 1]) == (0, 1) for i in sent), "a sent one alone"


def _open(instructions: Sequence[Instruction]) -> tuple[int, int]:
    """How many messages are received and not taken, and sent since the last pass."""
    last_run = max((i for i, at in enumerate(instructions) if isinstance(at, Run)), default=-1)
    kinds = [type(at) for at in instructions]
    return kinds.count(PostReceive) - kinds.count(WaitReceive), kinds[last_run + 1 :].count(Send)


def _peak_by_hand(program: Program, rank: int, costs: StageCosts, message: float) -> float:
    """The same by listing what is there at every place, without running sums."""
    instructions, rules = program.ranks[rank], program.schedule.rules
    peak = 0.0
    for place, at in enumerate(instructions):
        done = [b.work for b in instructions[: place + 1] if isinstance(b, Run)]
        held = sum(rules.memory_change(p, costs) for p in done)
        peak = max(peak, held + message * sum(_open(instructions[: place + 1])))
        if isinstance(at, Run):
            freed = min(0.0, rules.memory_change(at.work, costs))
            peak = max(peak, held - freed + message * _open(instructions[:place])[0])
    return peak
