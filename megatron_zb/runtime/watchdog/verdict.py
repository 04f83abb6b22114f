"""Search for the rank that holds up all others, from the states that ranks have told."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megatron_zb.runtime.watchdog.progress import State


def who_holds_up(states: Mapping[int, State], rank: int) -> int:
    """Return the rank that a rank waits for in the end: the first that waits for no message.

    Args:
        states: of the ranks that have told theirs; one that has not holds up.
    """
    seen = set()
    while rank in states and rank not in seen:
        seen.add(rank)
        after = states[rank].waits_for
        if after is None:
            break
        rank = after
    return rank


def judged(states: Mapping[int, State], silent: Collection[int], seconds: float) -> int | None:
    """Return the rank that holds up all others for good; None where the job may merely be slow.

    A rank that does not answer holds up the job wherever the others are. One that answers does so
    in a step alone: between two steps it may load data or write a checkpoint for as long as it has
    to.

    Args:
        states: of the ranks that have answered, by rank.
        silent: ranks that are watched, have not left, and have not answered.
        seconds: without progress in a step, after which a rank counts as stuck.
    """
    stuck = [rank for rank, state in states.items() if state.in_step and state.seconds > seconds]
    ends = [who_holds_up(states, rank) for rank in stuck]
    gone = [rank for rank in ends if rank not in states]
    if gone:
        return gone[0]
    if silent:
        return min(silent)
    return next((rank for rank in ends if rank in stuck), None)


def sentence(
    rank: int, states: Mapping[int, State], has_left: bool = False, waited: float = 0.0
) -> str:
    """Describe which rank holds up all others, and how; it had ``waited`` seconds to answer."""
    if rank in states:
        how = f"it {states[rank].doing} for {states[rank].seconds:.0f} s"
    elif has_left:
        how = "it has left the job"
    else:
        how = (
            f"it does not answer within {waited:.0f} s, so it has been killed or stopped, or its "
            "host is gone"
        )
    return f"rank {rank} holds up all others: {how}"


def slowest(states: Mapping[int, State], asking: int) -> int:
    """Return the rank that the others probably wait for, where none holds them up for good."""
    end = who_holds_up(states, asking)
    if end != asking and end in states:
        return end
    busy = [r for r, s in states.items() if s.waits_for is None and not s.waits_for_all]
    return min(busy or states, key=lambda rank: (states[rank].seconds, rank))
