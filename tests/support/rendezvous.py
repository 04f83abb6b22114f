"""A second replay of programs under blocking rendezvous, plain and slow, to compare with."""

from __future__ import annotations

from megatron_zb.schedules.lowering import PostReceive, Program, Run, Send, WaitReceive
from megatron_zb.schedules.passes import PassKind


def finishes(program: Program) -> bool:
    """Walk round and round over all ranks until none moves: did all of them get to the end?"""
    left = [list(instructions) for instructions in program.ranks]
    arrived: list[list[object]] = [[] for _ in left]
    before = -1
    while before != (before := sum(map(len, left))):
        for rank, mine in enumerate(left):
            if not mine:
                continue
            first = mine[0]
            if isinstance(first, Run):
                stage = program.schedule.placement.ranks_of[first.work.stage]
                peers = stage if first.work.kind is PassKind.U else (rank,)
                if all(left[peer] and left[peer][0] == first for peer in peers):
                    for peer in peers:
                        left[peer].pop(0)
            elif isinstance(first, WaitReceive):
                if first.message in arrived[rank]:
                    mine.pop(0)
            elif isinstance(first, Send):
                theirs = left[first.channel.target]
                if theirs and isinstance(theirs[0], PostReceive) and theirs[0] == (*first,):
                    arrived[first.channel.target].append(first.message)
                    theirs.pop(0)
                    mine.pop(0)
    return not any(left)
