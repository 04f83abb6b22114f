"""Memory of a rank while it runs its program: activations, and messages on their way."""

from __future__ import annotations

from megatron_zb.schedules.program.lowering import (
    PostReceive,
    Program,
    Run,
    RunPair,
    Send,
    WaitReceive,
    runs_of,
)
from megatron_zb.schedules.stage_costs import StageCosts


def peak_with_messages(program: Program, rank: int, costs: StageCosts, message: float) -> float:
    """Return the most memory that a rank holds, in the unit of ``costs.activation``.

    A buffer is there from when its receive is posted until its pass takes it, as part of what the
    pass holds; a message that was sent, until the next pass begins.

    Args:
        message: memory of one message, in the same unit.
    """
    held = peak = 0.0
    posted = sent = 0
    for at in program.ranks[rank]:
        if isinstance(at, PostReceive):
            posted += 1
        elif isinstance(at, WaitReceive):
            posted -= 1
        elif isinstance(at, Send):
            sent += 1
        elif isinstance(at, Run | RunPair):
            sent = 0
            for run in runs_of([at]):
                change = program.schedule.memory_change(run.work, costs)
                peak = max(peak, held + max(0.0, change) + message * posted)
                held += change
        peak = max(peak, held + message * (posted + sent))
    return peak
