"""The inner loops of the search: a greedy run of all ranks, moves of single passes, gap filling.

The first two read one :class:`Graph`, the last one :class:`Gaps`. Written on flat sequences and
plain arithmetic alone, with a random generator of their own, so that the same lines run as Python
or compiled, with the same result to the last bit. The tuples that they take stand in this file
because numba keeps what it compiled for as long as this very file stays the same.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any, NamedTuple

INFINITY = 1e300

_MODULUS = 2147483648
_REACH = 10


class Graph(NamedTuple):
    """Passes of a problem as numbers: what each takes, what it waits for and what waits for it.

    A pass is coded ``(kind * S + stage) * m + microbatch`` with kind 0 F, 1 B, 2 W; unless
    ``split``, W has no code in an order and its seconds follow those of B. By code are: the rank,
    the ``maker`` of the input and the ``reader`` of the output (-1 for none), the seconds of the
    pass and of the ``hop`` of its input, and the memory that it takes, or frees if negative.
    ``stage_at[r * chunks + c]`` is the stage of chunk c on rank r, ``limit[r]`` the memory of rank
    r; ``tail_seconds[r]`` follow the last pass of rank r before it counts as done.
    """

    pipeline_size: int
    chunks: int
    num_microbatches: int
    split: bool
    stage_at: Any
    rank: Any
    maker: Any
    reader: Any
    seconds: Any
    hop: Any
    memory: Any
    limit: Any
    tail_seconds: Any


class Priorities(NamedTuple):
    """Numbers that steer a greedy run.

    ``quota[r * chunks + c]`` bounds the microbatches in flight of chunk c. ``score`` holds, for the
    kinds F0.., B0.., W: bias, slope along the ranks, bias once all F of chunk 0 are out; then the
    weight of waiting inputs, of pending W, and the number of pending W that forces one.
    ``rank_bias[r * kinds + k]`` is added to the score of the k-th of these kinds on rank r alone.
    """

    quota: Any
    score: Any
    rank_bias: Any


class GreedySpace(NamedTuple):
    """Working space of a greedy run: by code the first, by rank the others."""

    ready: Any
    pending: Any
    counts: Any
    clock: Any
    held: Any
    choice: Any
    choice_start: Any


class Moves(NamedTuple):
    """Settings of a local search.

    ``threshold`` is the first loss accepted, in seconds. What may not be lost is the makespan plus
    ``mean_weight`` times the mean end of all passes: this tells apart the many orders of one
    makespan.
    """

    steps: int
    threshold: float
    mean_weight: float
    good_enough: float
    seed: int


class States(NamedTuple):
    """Units (stage and microbatch) whose activations F drops, so that R makes them again.

    By unit: the seconds of R, the memory that dropping saves, 1 if it is ``dropped``, and space for
    that of the best order. All are empty where no order has R. Otherwise it has R, of kind 3, of
    every unit: one that is kept takes no time there.
    """

    seconds: Any
    saved: Any
    dropped: Any
    best_dropped: Any


class ReplaySpace(NamedTuple):
    """Working space of a local search: by code the first three, by rank the others."""

    end: Any
    blame: Any
    critical: Any
    position: Any
    clock: Any
    waiting: Any
    stack: Any


def run_list_scheduler(
    graph: Graph, priorities: Priorities, space: GreedySpace, order: Any
) -> float:
    """Fill ``order`` with every rank's passes and return the makespan, INFINITY if it got stuck.

    Every rank picks, among the forward and backward of each of its chunks and its oldest pending
    weight gradient, the action with the lowest score; the rank whose action starts earliest runs
    it.
    """
    p, chunks, m, split = graph.pipeline_size, graph.chunks, graph.num_microbatches, graph.split
    stage_at, reader, rank_of = graph.stage_at, graph.reader, graph.rank
    seconds, hop, memory = graph.seconds, graph.hop, graph.memory
    limit, tail_seconds = graph.limit, graph.tail_seconds
    quota, score, rank_bias = priorities
    ready_at, pending, counts, clock = space.ready, space.pending, space.counts, space.clock
    held, choice, choice_start = space.held, space.choice, space.choice_start
    block = p * chunks * m
    kinds = 2 * chunks + 1
    early, gamma, forced = score[3 * kinds], score[3 * kinds + 1], score[3 * kinds + 2]
    per_rank = (3 if split else 2) * chunks * m
    # counts of a rank: F done and B done of each chunk, first and last pending W, passes
    width = 2 * chunks + 3
    for code in range(2 * block):
        ready_at[code] = 0.0 if code < m else INFINITY
    for r in range(p):
        clock[r] = 0.0
        held[r] = 0.0
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
            waiting = counts[base + 2 * chunks + 1] - head
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
                        code = s * m + mb
                        ready = ready_at[code]
                        if ready < INFINITY:
                            start = ready if ready > now else now
                            possible = True
                            kind = c
                            if held[r] + memory[code] > limit[r]:
                                # room only once the oldest W has run
                                possible = waiting > 0
                                if possible:
                                    after = now + seconds[pending[r * chunks * m + head]]
                                    start = ready if ready > after else after
                                    kind = 3 * chunks + c
                            if possible:
                                lead = ready - now
                                value = start + score[c] + score[kinds + c] * position
                                value += rank_bias[r * kinds + c]
                                if lead < 0.0:
                                    value += early * lead
                                if late:
                                    value += score[2 * kinds + c]
                                if value < best:
                                    best, best_kind = value, kind
                                    best_start = now if kind >= 3 * chunks else start
                    mb = counts[base + chunks + c]
                    if mb < m:
                        ready = ready_at[block + s * m + mb]
                        if ready < INFINITY:
                            start = ready if ready > now else now
                            lead = ready - now
                            k = chunks + c
                            value = start + score[k] + score[kinds + k] * position
                            value += rank_bias[r * kinds + k]
                            if lead < 0.0:
                                value += early * lead
                            if late:
                                value += score[2 * kinds + k]
                            if value < best:
                                best, best_kind, best_start = value, k, start
                if waiting > 0:
                    k = 2 * chunks
                    value = now - gamma * (waiting - 1) + score[k] + score[kinds + k] * position
                    value += rank_bias[r * kinds + k]
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
        if kind >= 2 * chunks:  # W, wanted for itself or to make room
            head = counts[base + 2 * chunks]
            counts[base + 2 * chunks] = head + 1
            code = pending[r * chunks * m + head]
        else:
            mb = counts[base + kind]
            counts[base + kind] = mb + 1
            c = kind if kind < chunks else kind - chunks
            code = stage_at[r * chunks + c] * m + mb
            if kind >= chunks:
                code += block
                if split:
                    tail = counts[base + 2 * chunks + 1]
                    counts[base + 2 * chunks + 1] = tail + 1
                    pending[r * chunks * m + tail] = code + block
        order[r * per_rank + counts[base + 2 * chunks + 2]] = code
        counts[base + 2 * chunks + 2] += 1
        done += 1
        end = choice_start[r] + seconds[code]
        if code >= block and not split:
            end += seconds[code + block]
        clock[r] = end
        held[r] += memory[code]
        dirty_a, dirty_b = r, -1
        following = reader[code]
        if following >= 0:
            ready_at[following] = end + hop[following]
            dirty_b = rank_of[following]
        if end + tail_seconds[r] > makespan:
            makespan = end + tail_seconds[r]
    return makespan


def local_search(
    graph: Graph, moves: Moves, space: ReplaySpace, states: States, order: Any, best: Any
) -> float:
    """Improve ``order``, of each rank's codes; ``best`` gets the best order found.

    Threshold accepting on the orders themselves: a pass that the makespan depends on is moved by a
    few places on its rank, or a unit is kept there, and another one dropped instead if need be; the
    schedule is timed again, and the change is kept if it loses no more than a threshold that falls
    to zero. Returns the makespan of ``best``.
    """
    p, m, split = graph.pipeline_size, graph.num_microbatches, graph.split
    rank_of, maker, reader = graph.rank, graph.maker, graph.reader
    seconds, hop, memory = graph.seconds, graph.hop, graph.memory
    limit, tail_seconds = graph.limit, graph.tail_seconds
    end, blame, critical, position = space.end, space.blame, space.critical, space.position
    clock, waiting, stack = space.clock, space.waiting, space.stack
    steps, good_enough = moves.steps, moves.good_enough
    of_r, saved, dropped, best_dropped = states
    has_states = len(dropped) > 0
    block = p * graph.chunks * m
    kinds = 4 if has_states else 3
    per_rank = ((3 if split else 2) + kinds - 3) * graph.chunks * m
    total = p * per_rank
    dice = moves.seed % _MODULUS
    lowest = INFINITY
    current = INFINITY
    moved_from, moved_to = -1, -1
    kept_now, dropped_now = -1, -1
    path = 0
    for step in range(steps + 1):
        # time the order; blame[code] is the pass that each start waited for, -1 if for none
        for code in range(kinds * block):
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
                need = maker[code]
                start = clock[r]
                reason = order[r * per_rank + i - 1] if i > 0 else -1
                if need >= 0:
                    if end[need] < 0.0:
                        waiting[r] = need
                        break
                    if end[need] + hop[code] > start:
                        start = end[need] + hop[code]
                        reason = need
                if code >= 3 * block:
                    finish = start + of_r[code - 3 * block] * dropped[code - 3 * block]
                else:
                    finish = start + seconds[code]
                    if code >= block and not split:
                        finish += seconds[code + block]
                end[code] = finish
                sum_of_ends += finish
                blame[code] = reason
                clock[r] = finish
                done += 1
                i += 1
                if finish + tail_seconds[r] > makespan:
                    makespan = finish + tail_seconds[r]
                    final = code
                following = reader[code]
                if following >= 0:
                    q = rank_of[following]
                    if q != r and waiting[q] == code:
                        waiting[q] = -1
                        stack[depth] = q
                        depth += 1
            position[r] = i
        allowed = moves.threshold * (1.0 - step / steps) if steps > 0 else 0.0
        value = makespan + moves.mean_weight * sum_of_ends / total
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
                for i in range(len(dropped)):
                    best_dropped[i] = dropped[i]
                if lowest <= good_enough:
                    break
        elif kept_now >= 0:  # undo
            dropped[kept_now] = 1
            if dropped_now >= 0:
                dropped[dropped_now] = 0
        elif moved_from >= 0:
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
        kept_now, dropped_now = -1, -1
        for _ in range(50):  # until a move is possible
            dice = (dice * 1103515245 + 12345) % _MODULUS
            code = critical[(dice >> 8) % path]
            dice = (dice * 1103515245 + 12345) % _MODULUS
            choice = dice >> 12
            r = rank_of[code % block]
            first = r * per_rank
            last = first + per_rank - 1
            if has_states and (code >= 3 * block or choice % 16 == 0):
                unit = code % block
                if dropped[unit] == 0:  # another one of the same stage
                    dice = (dice * 1103515245 + 12345) % _MODULUS
                    unit = unit // m * m + (dice >> 8) % m
                if dropped[unit] == 1 and (dice >> 4) % 4 != 0:
                    dropped[unit] = 0
                    other = -1
                    if choice % 2 == 0:
                        dice = (dice * 1103515245 + 12345) % _MODULUS
                        other = order[first + (dice >> 8) % per_rank] % block
                        if other == unit or dropped[other] == 1 or saved[other] <= 0.0:
                            other = -1
                        else:
                            dropped[other] = 1
                    held = 0.0
                    ok = True
                    for i in range(first, last + 1):
                        code = order[i]
                        if code >= 3 * block:
                            held += saved[code - 3 * block] * dropped[code - 3 * block]
                        else:
                            held += memory[code]
                            if code < block:
                                held -= saved[code] * dropped[code]
                        if held > limit[r]:
                            ok = False
                            break
                    if ok:
                        kept_now, dropped_now = unit, other
                        break
                    dropped[unit] = 1
                    if other >= 0:
                        dropped[other] = 0
                    continue
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
            step_to = 1 if to > at else -1
            ok = True
            i = at
            while i != to:
                i += step_to
                other = order[i]
                # the order within a stage: microbatches rise, and F, B, W of one follow each other
                if other // m == code // m or other % block == code % block:
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
                here = order[i]
                if here >= 3 * block:
                    held += saved[here - 3 * block] * dropped[here - 3 * block]
                else:
                    held += memory[here]
                    if has_states and here < block:
                        held -= saved[here] * dropped[here]
                if held > limit[r]:
                    ok = False
                    break
            if ok:
                moved_from, moved_to = at, to
                break
            i = to
            while i != at:
                order[i] = order[i - step_to]
                i -= step_to
            order[at] = code
    return lowest


class Gaps(NamedTuple):
    """Passes of a gap filler as numbers, coded ``row * m + microbatch``.

    The rows are F of each stage, then B, W, one P, and O and V of each rank; those of shards count
    only if ``cut``. With ``split``, every B is followed by a W. ``end`` is the rank of the last
    stage and ``holders[r]`` is 1 for a rank with a shard. By row is the rank; by code are the
    seconds, the memory that the pass takes, or frees if negative, and the ``hop`` of its output.
    ``leads[r * width + k]`` is the code of the k-th F or B of rank r, of ``num_leads[r]``.
    """

    num_microbatches: int
    stages: int
    split: bool
    cut: bool
    end: int
    rank: Any
    holders: Any
    seconds: Any
    memory: Any
    hop: Any
    limit: Any
    leads: Any
    num_leads: Any


class GapSpace(NamedTuple):
    """State of one run of a gap filler.

    By code ``ready``; by rank and position ``order``, ``pending`` and ``of_shards``; by microbatch
    ``parts`` and ``latest``; by rank the others, of ``counts`` nine numbers each.
    """

    ready: Any
    order: Any
    pending: Any
    of_shards: Any
    parts: Any
    latest: Any
    clock: Any
    begin: Any
    held: Any
    counts: Any


def fill_gaps(
    gaps: Gaps, space: GapSpace, eagerness: float, eagerness_of_shards: float, room: int
) -> int:
    """Run all ranks in order of time; fill waits with W and V. Return the number of passes placed.

    F and B keep the order of ``gaps.leads``. P and O run as soon as they are ready, at most
    ``room`` O before their V. A W fills a wait of at least ``eagerness`` times its seconds, or runs
    at once where the next F would exceed the memory; a V likewise with ``eagerness_of_shards``,
    or where ``room`` is used up.

    ``space.counts[c * ranks + r]`` counts on rank r what has been taken from ``leads`` (c = 0),
    placed (1), put into ``pending`` and taken from it (2, 3), put into ``of_shards`` and taken from
    it (4, 5), the O (6), and the O without a V (7); ``counts[8 * ranks]`` counts P.
    """
    m, stages = gaps.num_microbatches, gaps.stages
    ranks, needed = len(gaps.num_leads), 0
    width, length = len(gaps.leads) // ranks, len(space.order) // ranks
    losses, outputs = 3 * stages * m, (3 * stages + 1) * m
    for rank in range(ranks):
        needed += gaps.holders[rank]
    events = [(0.0, 0)]
    for rank in range(1, ranks):
        heappush(events, (0.0, rank))
    counts, ready, placed = space.counts, space.ready, 0
    while len(events) > 0:
        now, rank = heappop(events)
        if now < space.clock[rank]:
            continue
        # Choice: P, O, then the next F or B if it is ready; W or V in the wait for them.
        chosen, wait = -1, INFINITY
        if gaps.cut:
            if rank == gaps.end and counts[8 * ranks] < m:
                code = losses + counts[8 * ranks]
                if ready[code] <= now:
                    chosen = code
                wait = min(wait, ready[code] - now)
            if chosen < 0 and counts[7 * ranks + rank] < room and counts[6 * ranks + rank] < m:
                code = outputs + rank * m + counts[6 * ranks + rank]
                if ready[code] <= now:
                    chosen = code
                wait = min(wait, ready[code] - now)
        if chosen < 0:
            upcoming, full = -1, False
            if counts[rank] < gaps.num_leads[rank]:
                upcoming = gaps.leads[rank * width + counts[rank]]
                most = gaps.limit[rank]
                after = space.held[rank] + gaps.memory[upcoming]
                full = upcoming < stages * m and after > most + 1e-9 * (1 + most)
                if not full:
                    wait = min(wait, max(0.0, ready[upcoming] - now))
            if counts[3 * ranks + rank] < counts[2 * ranks + rank]:
                code = space.pending[rank * width + counts[3 * ranks + rank]]
                if full or (wait > 0 and wait >= eagerness * gaps.seconds[code]):
                    chosen = code
                    counts[3 * ranks + rank] += 1
            if chosen < 0 and counts[5 * ranks + rank] < counts[4 * ranks + rank]:
                code = space.of_shards[rank * m + counts[5 * ranks + rank]]
                fills = wait > 0 and wait >= eagerness_of_shards * gaps.seconds[code]
                if ready[code] <= now and (counts[7 * ranks + rank] >= room or fills):
                    chosen = code
                    counts[5 * ranks + rank] += 1
            if chosen < 0 and wait <= 0:
                chosen = upcoming
                counts[rank] += 1
        if chosen < 0:
            continue
        # Start of the chosen pass; its end and its output wake ranks.
        end = now + gaps.seconds[chosen]
        if counts[ranks + rank] == 0:
            space.begin[rank] = now
        space.order[rank * length + counts[ranks + rank]] = chosen
        counts[ranks + rank] += 1
        placed += 1
        space.clock[rank] = end
        heappush(events, (end, rank))
        row, j = chosen // m, chosen % m
        arrival = end + gaps.hop[chosen]
        if row < 3 * stages:
            space.held[rank] += gaps.memory[chosen]
        if row < stages - 1:
            ready[chosen + m] = arrival
            heappush(events, (arrival, gaps.rank[row + 1]))
        elif row == stages - 1 and gaps.cut:
            for holder in range(ranks):
                if gaps.holders[holder]:
                    at = end if holder == gaps.end else arrival
                    ready[outputs + holder * m + j] = at
                    heappush(events, (at, holder))
        elif stages <= row < 2 * stages:
            if gaps.split:
                space.pending[rank * width + counts[2 * ranks + rank]] = chosen + stages * m
                counts[2 * ranks + rank] += 1
            if row > stages:
                ready[chosen - m] = arrival
                heappush(events, (arrival, gaps.rank[row - 1]))
        elif row == 3 * stages:
            counts[8 * ranks] += 1
            ready[(2 * stages - 1) * m + j] = end
            heappush(events, (end, gaps.end))
            for holder in range(ranks):
                if gaps.holders[holder]:
                    at = end if holder == gaps.end else arrival
                    code = outputs + (ranks + holder) * m + j
                    space.of_shards[holder * m + counts[4 * ranks + holder]] = code
                    counts[4 * ranks + holder] += 1
                    ready[code] = at
                    heappush(events, (at, holder))
        elif 3 * stages < row <= 3 * stages + ranks:
            counts[6 * ranks + rank] += 1
            counts[7 * ranks + rank] += 1
            space.parts[j] += 1
            space.latest[j] = max(space.latest[j], arrival)
            if space.parts[j] == needed:
                ready[losses + j] = space.latest[j]
                heappush(events, (space.latest[j], gaps.end))
        elif row > 3 * stages + ranks:
            counts[7 * ranks + rank] -= 1
    return placed
