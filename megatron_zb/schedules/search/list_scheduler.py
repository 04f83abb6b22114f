"""The inner loop of the search: one greedy run of all ranks, steered by a vector of numbers.

An event-driven list scheduler. Every rank picks, among the forward and backward of each of its
chunks and its oldest pending weight gradient, the action with the lowest score; the rank whose
action starts earliest runs it. Written on flat sequences and plain arithmetic alone, so that the
same lines run as Python or compiled, with the same result to the last bit.
"""

from __future__ import annotations

from typing import Any

INFINITY = 1e300


def run_list_scheduler(
    pipeline_size: int,
    chunks: int,
    num_microbatches: int,
    stage_at: Any,
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
    quota: Any,
    score: Any,
    own: Any,
    split: bool,
    order: Any,
    ready_forward: Any,
    ready_backward: Any,
    pending: Any,
    counts: Any,
    clock: Any,
    held: Any,
    choice: Any,
    choice_start: Any,
) -> float:
    """Fill ``order`` with every rank's passes and return the makespan, INFINITY if it got stuck.

    ``stage_at[r * chunks + c]`` is the stage of chunk c on rank r. Passes are coded
    ``(kind * S + stage) * m + microbatch`` with kind 0 F, 1 B, 2 W. ``score`` holds, for the kinds
    F0.., B0.., W: bias, slope along the ranks, bias once all F of chunk 0 are out; then the weight
    of waiting inputs, of pending W, and the number of pending W that forces one. ``own[r * kinds +
    k]`` is added to the score of the k-th of these kinds on rank r alone. ``quota[r * chunks + c]``
    bounds the microbatches in flight of chunk c. ``behind[r]`` seconds follow the last pass of rank
    r before it counts as done. The other sequences are working space.
    """
    p, m = pipeline_size, num_microbatches
    stages = p * chunks
    kinds = 2 * chunks + 1
    early, gamma, forced = score[3 * kinds], score[3 * kinds + 1], score[3 * kinds + 2]
    per_rank = (3 if split else 2) * chunks * m
    # counts of a rank: F done and B done of each chunk, first and last pending W, passes
    width = 2 * chunks + 3
    for s in range(stages):
        for mb in range(m):
            ready_forward[s * m + mb] = 0.0 if s == 0 else INFINITY
            ready_backward[s * m + mb] = INFINITY
    for r in range(p):
        clock[r] = 0.0
        held[r] = 0.0
        choice[r] = -2  # to be chosen
        for i in range(width):
            counts[r * width + i] = 0
    done = 0
    makespan = 0.0
    dirty_a, dirty_b = -1, -1
    first = True
    while done < p * per_rank:
        for r in range(p):
            if not (first or r in (dirty_a, dirty_b)):
                continue
            base = r * width
            now = clock[r]
            position = (r / (p - 1) if p > 1 else 0.0) - 0.5
            head = counts[base + 2 * chunks]
            tail = counts[base + 2 * chunks + 1]
            waiting = tail - head
            oldest = pending[r * chunks * m + head] if waiting > 0 else -1
            best = INFINITY
            best_kind = -1
            best_start = INFINITY
            late = counts[base] >= m
            if waiting > 0 and waiting > forced:
                best_kind, best_start, best = 2 * chunks, now, -INFINITY
            else:
                for c in range(chunks):
                    s = stage_at[r * chunks + c]
                    mb = counts[base + c]
                    if mb < m and (
                        c == chunks - 1 or mb - counts[base + chunks + c] < quota[r * chunks + c]
                    ):
                        ready = ready_forward[s * m + mb]
                        if ready < INFINITY:
                            start = ready if ready > now else now
                            possible = True
                            kind = c
                            if held[r] + activation[s] > limit[r]:
                                # room only once the oldest W has run
                                possible = waiting > 0
                                if possible:
                                    after = now + weight[oldest // m]
                                    start = ready if ready > after else after
                                    kind = 3 * chunks + c
                            if possible:
                                lead = ready - now
                                value = start + score[c] + score[kinds + c] * position
                                value += own[r * kinds + c]
                                if lead < 0.0:
                                    value += early * lead
                                if late:
                                    value += score[2 * kinds + c]
                                if value < best:
                                    best, best_kind = value, kind
                                    best_start = now if kind >= 3 * chunks else start
                    mb = counts[base + chunks + c]
                    if mb < m:
                        ready = ready_backward[s * m + mb]
                        if ready < INFINITY:
                            start = ready if ready > now else now
                            lead = ready - now
                            k = chunks + c
                            value = start + score[k] + score[kinds + k] * position
                            value += own[r * kinds + k]
                            if lead < 0.0:
                                value += early * lead
                            if late:
                                value += score[2 * kinds + k]
                            if value < best:
                                best, best_kind, best_start = value, k, start
                if waiting > 0:
                    k = 2 * chunks
                    value = now - gamma * (waiting - 1) + score[k] + score[kinds + k] * position
                    value += own[r * kinds + k]
                    if late:
                        value += score[2 * kinds + k]
                    if value < best:
                        best, best_kind, best_start = value, k, now
            choice[r] = best_kind
            choice_start[r] = best_start
        first = False
        rank = -1
        earliest = INFINITY
        for r in range(p):
            if choice_start[r] < earliest:
                earliest, rank = choice_start[r], r
        if rank < 0:
            return INFINITY
        r = rank
        base = r * width
        kind = choice[r]
        start = choice_start[r]
        dirty_a, dirty_b = r, -1
        out = r * per_rank + counts[base + 2 * chunks + 2]
        counts[base + 2 * chunks + 2] += 1
        done += 1
        if kind >= 2 * chunks:  # W, wanted for itself or to make room
            head = counts[base + 2 * chunks]
            code = pending[r * chunks * m + head]
            counts[base + 2 * chunks] = head + 1
            s = code // m
            order[out] = 2 * stages * m + code
            clock[r] = start + weight[s]
            held[r] -= kept[s]
        elif kind < chunks:
            s = stage_at[r * chunks + kind]
            mb = counts[base + kind]
            counts[base + kind] = mb + 1
            order[out] = s * m + mb
            clock[r] = start + forward[s]
            held[r] += activation[s]
            if s + 1 < stages:
                ready_forward[(s + 1) * m + mb] = clock[r] + forward_hop[s]
                dirty_b = s + 1
            else:
                ready_backward[s * m + mb] = clock[r]
        else:
            c = kind - chunks
            s = stage_at[r * chunks + c]
            mb = counts[base + chunks + c]
            counts[base + chunks + c] = mb + 1
            order[out] = (stages + s) * m + mb
            clock[r] = start + backward[s]
            if split:
                held[r] -= activation[s] - kept[s]
                tail = counts[base + 2 * chunks + 1]
                pending[r * chunks * m + tail] = s * m + mb
                counts[base + 2 * chunks + 1] = tail + 1
            else:
                clock[r] += weight[s]
                held[r] -= activation[s]
            if s > 0:
                ready_backward[(s - 1) * m + mb] = clock[r] + backward_hop[s]
                dirty_b = s - 1
        if dirty_b >= 0:
            dirty_b = rank_of[dirty_b]
        if clock[r] + behind[r] > makespan:
            makespan = clock[r] + behind[r]
    return makespan
