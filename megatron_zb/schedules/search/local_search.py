"""The second inner loop of the search: improve a given order by moving single passes.

Threshold accepting on the orders themselves: a pass that the makespan depends on is moved by a few
places on its rank, the schedule is timed again, and the change is kept if it loses no more than a
threshold that falls to zero. Like :mod:`list_scheduler`, this is plain arithmetic on flat
sequences, with a random generator of its own, so that compiled and plain runs are equal to the
last bit.
"""

from __future__ import annotations

from typing import Any

_MODULUS = 2147483648
_REACH = 10


def local_search(
    pipeline_size: int,
    per_rank: int,
    num_stages: int,
    num_microbatches: int,
    rank_of: Any,
    forward: Any,
    backward: Any,
    weight: Any,
    forward_hop: Any,
    backward_hop: Any,
    activation: Any,
    kept: Any,
    limit: Any,
    behind: Any,
    split: bool,
    steps: int,
    threshold: float,
    mean_weight: float,
    good_enough: float,
    seed: int,
    order: Any,
    best: Any,
    end: Any,
    blame: Any,
    position: Any,
    clock: Any,
    waiting: Any,
    stack: Any,
    critical: Any,
) -> float:
    """Improve ``order`` (coded as in ``list_scheduler``); ``best`` gets the best order found.

    Returns its makespan, with ``behind[r]`` seconds behind the last pass of rank r. ``threshold``
    is the first loss accepted, in seconds. What may not be lost is the makespan plus
    ``mean_weight`` times the mean end of all passes: this tells apart the many orders of one
    makespan. The sequences after ``order`` are working space.
    """
    p, m, stages = pipeline_size, num_microbatches, num_stages
    block = stages * m
    total = p * per_rank
    dice = seed % _MODULUS
    lowest = 1e300
    current = 1e300
    moved_from, moved_to = -1, -1
    path = 0
    for step in range(steps + 1):
        # time the order; blame[code] is the pass that each start waited for, -1 if for none
        for code in range(3 * block):
            end[code] = -1.0
        for r in range(p):
            position[r] = 0
            clock[r] = 0.0
            waiting[r] = -1
            stack[r] = p - 1 - r
        depth = p
        done = 0
        makespan = 0.0
        sum_of_ends = 0.0
        final = -1
        while depth > 0:
            depth -= 1
            r = stack[depth]
            i = position[r]
            while i < per_rank:
                code = order[r * per_rank + i]
                kind = code // block
                rest = code - kind * block
                s = rest // m
                need = -1
                hop = 0.0
                if kind == 0:
                    if s > 0:
                        need, hop = code - m, forward_hop[s - 1]
                elif kind == 1 and s < stages - 1:
                    need, hop = code + m, backward_hop[s + 1]
                start = clock[r]
                reason = order[r * per_rank + i - 1] if i > 0 else -1
                if need >= 0:
                    if end[need] < 0.0:
                        waiting[r] = need
                        break
                    if end[need] + hop > start:
                        start = end[need] + hop
                        reason = need
                if kind == 0:
                    finish = start + forward[s]
                elif kind == 1:
                    finish = start + backward[s] + (0.0 if split else weight[s])
                else:
                    finish = start + weight[s]
                end[code] = finish
                sum_of_ends += finish
                blame[code] = reason
                clock[r] = finish
                done += 1
                i += 1
                if finish + behind[r] > makespan:
                    makespan = finish + behind[r]
                    final = code
                if kind < 2:
                    t = s + 1 if kind == 0 else s - 1
                    if 0 <= t < stages:
                        q = rank_of[t]
                        if q != r and waiting[q] == code:
                            waiting[q] = -1
                            stack[depth] = q
                            depth += 1
            position[r] = i
        allowed = threshold * (1.0 - step / steps) if steps > 0 else 0.0
        value = makespan + mean_weight * sum_of_ends / total
        if done == total and value <= current + allowed:
            current = value
            # the chain of passes that the makespan depends on
            path = 0
            code = final
            while code >= 0:
                critical[path] = code
                path += 1
                code = blame[code]
            if makespan < lowest:
                lowest = makespan
                for i in range(total):
                    best[i] = order[i]
                if lowest <= good_enough:
                    break
        elif moved_from >= 0:  # undo
            code = order[moved_to]
            if moved_to > moved_from:
                for i in range(moved_to, moved_from, -1):
                    order[i] = order[i - 1]
            else:
                for i in range(moved_to, moved_from):
                    order[i] = order[i + 1]
            order[moved_from] = code
        if step == steps:
            break
        moved_from, moved_to = -1, -1
        for _ in range(50):  # until a move is possible
            dice = (dice * 1103515245 + 12345) % _MODULUS
            code = critical[(dice >> 8) % path]
            dice = (dice * 1103515245 + 12345) % _MODULUS
            choice = dice >> 12
            kind = code // block
            r = rank_of[(code - kind * block) // m]
            first = r * per_rank
            last = first + per_rank - 1
            at = first
            while order[at] != code:
                at += 1
            dice = (dice * 1103515245 + 12345) % _MODULUS
            distance = 1 + (dice >> 8) % _REACH
            if choice % 4 == 0 and at > first:  # move what stands before it
                at -= 1
                to = at + distance if choice % 8 < 4 else at + 1
            elif choice % 4 < 3:
                to = at - distance
            else:
                to = at + distance
            if to < first:
                to = first
            if to > last:
                to = last
            if to == at:
                continue
            code = order[at]
            kind = code // block
            rest = code - kind * block
            s = rest // m
            step_to = 1 if to > at else -1
            ok = True
            i = at
            while i != to:
                i += step_to
                other = order[i]
                other_kind = other // block
                other_rest = other - other_kind * block
                # the order within a stage: microbatches rise, and F, B, W of one follow each other
                if other_rest // m == s and (other_kind == kind or other_rest == rest):
                    ok = False
                    break
            if not ok:
                continue
            i = at
            while i != to:
                order[i] = order[i + step_to]
                i += step_to
            order[to] = code
            held = 0.0
            for i in range(first, last + 1):
                other = order[i]
                other_kind = other // block
                t = (other - other_kind * block) // m
                if other_kind == 0:
                    held += activation[t]
                    if held > limit[r]:
                        ok = False
                        break
                elif other_kind == 1:
                    held -= activation[t] - (kept[t] if split else 0.0)
                else:
                    held -= kept[t]
            if ok:
                moved_from, moved_to = at, to
                break
            i = to
            while i != at:
                order[i] = order[i - step_to]
                i -= step_to
            order[at] = code
    return lowest
