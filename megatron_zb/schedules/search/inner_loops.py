"""The inner loops of the search: a greedy run of all ranks, moves of single passes, gap filling.

The first two read one :class:`Graph`, the last one :class:`Gaps`. Written on flat sequences and
plain arithmetic alone, with a random generator of their own, so that the same lines run as Python
or compiled, with the same result to the last bit. The tuples that they take stand in this file
because numba keeps what it compiled for as long as this very file stays the same.

What a problem does not have, such as an exchange or states, is None. The compiler leaves out
branches behind a nested ``if it is not None``, and only those: one ``and`` more and they stay.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any, NamedTuple

INFINITY = 1e300

_MODULUS = 2147483648
_REACH = 10
_ROUNDING = 1e-9  # relative, of sums in another order


class Graph(NamedTuple):
    """Passes of a problem as numbers: what each takes, what it waits for and what waits for it.

    A pass is coded ``(kind * S + stage) * m + microbatch`` with kind 0 F, 1 B, 2 W; unless
    ``split``, W has no code in an order and its seconds follow those of B. By code are: the rank,
    the ``maker`` of the input and the ``reader`` of the output (-1 for none), the seconds of the
    pass and of the ``hop`` of its input, and the memory that it takes, or frees if negative.
    ``stage_at[r * chunks + c]`` is the stage of chunk c on rank r, ``limit[r]`` the memory of rank
    r, ``work[r]`` the seconds of all its passes; ``tail_seconds[r]`` follow the last pass of rank r
    before it counts as done.
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
    work: Any
    tail_seconds: Any


class Priorities(NamedTuple):
    """Numbers that steer a greedy run.

    ``quota[r * chunks + c]`` bounds the microbatches in flight of chunk c. ``score`` holds, for the
    kinds F0.., B0.., W: bias, slope along the ranks, bias once all F of chunk 0 are out; then the
    weight of waiting inputs, of pending W, and the number of pending W that forces one.
    ``rank_bias[r * kinds + k]`` is added to the score of the k-th of these kinds on rank r alone.
    A run ends as soon as its makespan will certainly be above ``bound``.
    """

    quota: Any
    score: Any
    rank_bias: Any
    bound: float


class GreedySpace(NamedTuple):
    """Working space of a greedy run: by code the first, by rank the others."""

    ready: Any
    pending: Any
    counts: Any
    clock: Any
    held: Any
    left: Any
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
    """Units (stage and microbatch) whose activations F drops and R recomputes.

    By unit: the seconds of R, and the memory that it saves. An order has R, of kind 3, of every
    unit: one that is kept takes no time there.
    """

    seconds: Any
    saved: Any


class ReplaySpace(NamedTuple):
    """Working space of a local search.

    By code the first three, by rank the next four; ``next_of`` by kind and stage, ``kept`` and
    ``kept_flags`` by place. ``span`` has the first place that a move changed, and how many.
    """

    end: Any
    blame: Any
    critical: Any
    position: Any
    clock: Any
    waiting: Any
    stack: Any
    next_of: Any
    kept: Any
    kept_flags: Any
    span: Any


class PairCosts(NamedTuple):
    """Seconds, by code, of a pass in which it only communicates, and the loss of a pair."""

    seconds: Any
    loss: float


class PairPriorities(NamedTuple):
    """Numbers that steer which passes a greedy run joins.

    A pair of F of chunk c and B of chunk d has the mean of the scores of both, plus
    ``bias[c * chunks + d]``, less ``gain`` times the seconds that it hides.
    """

    gain: float
    bias: Any


def run_list_scheduler(
    graph: Graph,
    exchange: PairCosts | None,
    priorities: Priorities,
    pair_priorities: PairPriorities,
    space: GreedySpace,
    order: Any,
    joined: Any,
) -> float:
    """Fill ``order`` and ``joined``; return the makespan, INFINITY if stuck or above the bound.

    Every rank picks the action with the lowest score among the forward and backward of each of its
    chunks, its oldest pending weight gradient and, where passes communicate, each pair of a forward
    and a backward; the rank whose action starts earliest runs it.
    """
    p, chunks, m, split = graph.pipeline_size, graph.chunks, graph.num_microbatches, graph.split
    stage_at, reader, rank_of = graph.stage_at, graph.reader, graph.rank
    seconds, hop, memory = graph.seconds, graph.hop, graph.memory
    limit, tail_seconds = graph.limit, graph.tail_seconds
    quota, score, rank_bias, bound = priorities
    ready_at, pending, counts, clock = space.ready, space.pending, space.counts, space.clock
    held, left, choice, choice_start = space.held, space.left, space.choice, space.choice_start
    block = p * chunks * m
    kinds = 2 * chunks + 1
    early, gamma, forced = score[3 * kinds], score[3 * kinds + 1], score[3 * kinds + 2]
    per_rank = (3 if split else 2) * chunks * m
    # counts of a rank: F done and B done of each chunk, first and last pending W, passes
    width = 2 * chunks + 3
    for code in range(2 * block):
        ready_at[code] = 0.0 if code < m else INFINITY
    if exchange is not None:
        for code in range(block):
            joined[code] = 0
    for r in range(p):
        clock[r] = 0.0
        held[r] = 0.0
        left[r] = graph.work[r]
        for i in range(width):
            counts[r * width + i] = 0
    bound *= 1.0 + _ROUNDING
    done = 0
    makespan = 0.0
    dirty_a, dirty_b, dirty_c = -1, -1, -1
    first = True
    while done < p * per_rank:
        for turn in range(p if first else 3):
            if first:
                r = turn
            elif turn == 0:
                r = dirty_a
            elif turn == 1:
                r = dirty_b if dirty_b != dirty_a else -1
            else:
                r = dirty_c if dirty_c != dirty_a and dirty_c != dirty_b else -1
            if r < 0:
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
                # among equal scores the first one wins: F of a chunk, then its B; but with pairs
                # all F first, each with the pairs that it could be in
                for outer in range(chunks if exchange is None else 2):
                    for inner in range(2 if exchange is None else chunks):
                        c = outer if exchange is None else inner
                        half = inner if exchange is None else outer
                        k = c + half * chunks
                        mb = counts[base + k]
                        if mb >= m:
                            continue
                        code = stage_at[r * chunks + c] * m + mb + half * block
                        ready = ready_at[code]
                        if ready >= INFINITY:
                            continue
                        after = now
                        if half == 0:
                            if (
                                c < chunks - 1
                                and mb - counts[base + chunks + c] >= quota[r * chunks + c]
                            ):
                                continue
                            if held[r] + memory[code] > limit[r]:
                                if waiting == 0:
                                    continue
                                # room only once the oldest W has run
                                after = now + seconds[pending[r * chunks * m + head]]
                        start = ready if ready > after else after
                        lead = ready - now
                        own = score[k] + score[kinds + k] * position + rank_bias[r * kinds + k]
                        if lead < 0.0:
                            own += early * lead
                        if late:
                            own += score[2 * kinds + k]
                        if start + own < best:
                            best = start + own
                            best_kind = k if after == now else 2 * chunks
                            best_start = start if after == now else now
                        if exchange is not None:
                            for d in range(chunks if half == 0 else 0):
                                other_mb = counts[base + chunks + d]
                                if other_mb >= m:
                                    continue
                                other = block + stage_at[r * chunks + d] * m + other_mb
                                if other == code + block or ready_at[other] >= INFINITY:
                                    continue
                                begin = ready_at[other] if ready_at[other] > start else start
                                alone = seconds[other] + (0.0 if split else seconds[other + block])
                                together = pair_seconds(graph, exchange, code, other)
                                hides = seconds[code] + alone - together
                                if hides <= 0.0:
                                    continue
                                b = chunks + d
                                its = (
                                    score[b]
                                    + score[kinds + b] * position
                                    + rank_bias[r * kinds + b]
                                )
                                lead = ready_at[other] - now
                                if lead < 0.0:
                                    its += early * lead
                                if late:
                                    its += score[2 * kinds + b]
                                value = (
                                    begin
                                    + (own + its) / 2
                                    + pair_priorities.bias[c * chunks + d]
                                    - pair_priorities.gain * hides
                                )
                                if value < best:
                                    best = value
                                    best_kind = (
                                        kinds + c * chunks + d if after == now else 2 * chunks
                                    )
                                    best_start = begin if after == now else now
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
        other = -1  # the backward of a pair
        if kind == 2 * chunks:  # W, wanted for itself or to make room
            head = counts[base + 2 * chunks]
            counts[base + 2 * chunks] = head + 1
            code = pending[r * chunks * m + head]
        else:
            if exchange is not None:
                if kind > 2 * chunks:
                    d = (kind - kinds) % chunks
                    kind = (kind - kinds) // chunks
                    mb = counts[base + chunks + d]
                    counts[base + chunks + d] = mb + 1
                    other = block + stage_at[r * chunks + d] * m + mb
            mb = counts[base + kind]
            counts[base + kind] = mb + 1
            if kind < chunks:
                code = stage_at[r * chunks + kind] * m + mb
            else:
                code = block + stage_at[r * chunks + kind - chunks] * m + mb
        end = choice_start[r] + seconds[code]
        if not split and code >= block:
            end += seconds[code + block]
        if exchange is not None:
            if other >= 0:
                end = choice_start[r] + pair_seconds(graph, exchange, code, other)
                joined[code] = 1
        clock[r] = end
        if exchange is None:  # a pair takes less than its passes
            left[r] -= end - choice_start[r]
            if end + left[r] + tail_seconds[r] > bound:
                return INFINITY
        dirty_a, dirty_b, dirty_c = r, -1, -1
        while code >= 0:
            order[r * per_rank + counts[base + 2 * chunks + 2]] = code
            counts[base + 2 * chunks + 2] += 1
            done += 1
            held[r] += memory[code]
            if split and block <= code < 2 * block:
                tail = counts[base + 2 * chunks + 1]
                counts[base + 2 * chunks + 1] = tail + 1
                pending[r * chunks * m + tail] = code + block
            following = reader[code]
            if following >= 0:
                ready_at[following] = end + hop[following]
                dirty_b, dirty_c = rank_of[following], dirty_b
            code, other = other, -1
        if end + tail_seconds[r] > makespan:
            makespan = end + tail_seconds[r]
    return makespan


def pair_seconds(graph: Graph, exchange: PairCosts, forward: int, backward: int) -> float:
    """Return the seconds of a pair; see :meth:`StageCosts.pair_seconds`."""
    block = graph.pipeline_size * graph.chunks * graph.num_microbatches
    length = graph.seconds[forward]
    alone = graph.seconds[backward]
    if not graph.split:
        alone += graph.seconds[backward + block]
    both = exchange.seconds[forward] + exchange.seconds[backward]
    return max(length + alone - both, both, length, alone) * (1.0 + exchange.loss)


def local_search(
    graph: Graph,
    exchange: PairCosts | None,
    moves: Moves,
    space: ReplaySpace,
    states: States | None,
    order: Any,
    flags: Any,
    best: Any,
    best_flags: Any,
) -> float:
    """Improve ``order``, of each rank's codes, and ``flags``, into ``best`` and ``best_flags``.

    Threshold accepting on the orders themselves: a move changes one rank, the schedule is timed
    again, and the change is kept if it loses no more than a threshold that falls to zero. ``flags``
    say by code of F what is joined with the backward behind it, where passes communicate, and what
    is recomputed otherwise. Returns the makespan of ``best``.
    """
    critical = space.critical
    kinds = 3 if states is None else 4
    per_rank = ((3 if graph.split else 2) + kinds - 3) * graph.chunks * graph.num_microbatches
    total = graph.pipeline_size * per_rank
    steps = moves.steps
    dice = moves.seed % _MODULUS
    lowest = INFINITY
    current = INFINITY
    moved = -1  # the rank whose order was changed
    path = 0
    for step in range(steps + 1):
        done, makespan, sum_of_ends, final = replay(
            graph, exchange, space, states, order, flags, kinds, per_rank
        )
        allowed = moves.threshold * (1.0 - step / steps) if steps > 0 else 0.0
        value = makespan + moves.mean_weight * sum_of_ends / total
        if done == total and value <= current + allowed:
            current = value
            path = 0  # the critical path
            code = final
            while code >= 0:
                critical[path] = code
                path += 1
                code = space.blame[code]
            if makespan < lowest:
                lowest = makespan
                for i in range(total):
                    best[i] = order[i]
                if flags is not None:
                    for i in range(len(flags)):
                        best_flags[i] = flags[i]
                if lowest <= moves.good_enough:
                    break
        elif moved >= 0:
            restore(graph, space, order, flags)
        if step == steps or path == 0:
            break
        moved = -1
        for _ in range(50):  # until a move is possible
            dice = (dice * 1103515245 + 12345) % _MODULUS
            code = critical[(dice >> 8) % path]
            if exchange is None:
                dice, moved = move_pass(graph, space, states, order, flags, code, per_rank, dice)
            else:
                dice, moved = move_pair(graph, space, order, flags, code, per_rank, dice)
            if moved >= 0:
                break
    return lowest


def keep(graph: Graph, space: ReplaySpace, low: int, count: int, order: Any, flags: Any) -> None:
    """Copy a part of the order and its flags, for :func:`restore`."""
    space.span[0], space.span[1] = low, count
    block = graph.pipeline_size * graph.chunks * graph.num_microbatches
    for i in range(count):
        code = order[low + i]
        space.kept[i] = code
        if flags is not None:
            space.kept_flags[i] = flags[code] if code < block else 0


def restore(graph: Graph, space: ReplaySpace, order: Any, flags: Any) -> None:
    """Take back the move of which :func:`keep` has kept the part that it changed."""
    low, count = space.span[0], space.span[1]
    block = graph.pipeline_size * graph.chunks * graph.num_microbatches
    for i in range(count):
        code = space.kept[i]
        order[low + i] = code
        if flags is not None:
            if code < block:
                flags[code] = space.kept_flags[i]


def replay(
    graph: Graph,
    exchange: PairCosts | None,
    space: ReplaySpace,
    states: States | None,
    order: Any,
    flags: Any,
    kinds: int,
    per_rank: int,
) -> tuple[int, float, float, int]:
    """Time an order; ``blame[code]`` gets the pass that each start waited for, -1 if for none.

    Returns the number of passes that ran, the makespan, the sum of all ends, and the last pass.
    """
    p, split = graph.pipeline_size, graph.split
    rank_of, maker, reader = graph.rank, graph.maker, graph.reader
    seconds, hop, tail_seconds = graph.seconds, graph.hop, graph.tail_seconds
    end, blame, position = space.end, space.blame, space.position
    clock, waiting, stack = space.clock, space.waiting, space.stack
    block = p * graph.chunks * graph.num_microbatches
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
            start = clock[r]
            reason = order[r * per_rank + i - 1] if i > 0 else -1
            need = maker[code]
            if need >= 0:
                if end[need] < 0.0:
                    waiting[r] = need
                    break
                if end[need] + hop[code] > start:
                    start = end[need] + hop[code]
                    reason = need
            other = -1
            if exchange is not None:
                if code < block and flags[code] == 1:  # a pair waits for the inputs of both
                    other = order[r * per_rank + i + 1]
                    need = maker[other]
                    if need >= 0:
                        if end[need] < 0.0:
                            waiting[r] = need
                            break
                        if end[need] + hop[other] > start:
                            start = end[need] + hop[other]
                            reason = need
            if states is None:
                finish = start + seconds[code]
            elif code >= 3 * block:
                finish = start + states.seconds[code - 3 * block] * flags[code - 3 * block]
            else:
                finish = start + seconds[code]
            if not split and block <= code < 2 * block:
                if exchange is None:
                    finish += seconds[code + block]
                else:
                    finish = start + (seconds[code] + seconds[code + block])
            if exchange is not None:
                if other >= 0:
                    finish = start + pair_seconds(graph, exchange, code, other)
            clock[r] = finish
            if finish + tail_seconds[r] > makespan:
                makespan = finish + tail_seconds[r]
                final = code
            while code >= 0:
                end[code] = finish
                sum_of_ends += finish
                blame[code] = reason
                done += 1
                i += 1
                following = reader[code]
                if following >= 0:
                    q = rank_of[following]
                    if q != r and waiting[q] == code:
                        waiting[q] = -1
                        stack[depth] = q
                        depth += 1
                code, other = other, -1
        position[r] = i
    return done, makespan, sum_of_ends, final


def fits(
    graph: Graph, states: States | None, order: Any, flags: Any, r: int, per_rank: int
) -> bool:
    """Return whether a rank keeps its memory limit."""
    block = graph.pipeline_size * graph.chunks * graph.num_microbatches
    memory, limit = graph.memory, graph.limit[r]
    held = 0.0
    for i in range(r * per_rank, (r + 1) * per_rank):
        code = order[i]
        if states is None:
            held += memory[code]
        elif code >= 3 * block:
            held += states.saved[code - 3 * block] * flags[code - 3 * block]
        else:
            held += memory[code]
            if code < block:
                held -= states.saved[code] * flags[code]
        if held > limit:
            return False
    return True


def move_pass(
    graph: Graph,
    space: ReplaySpace,
    states: States | None,
    order: Any,
    flags: Any,
    code: int,
    per_rank: int,
    dice: int,
) -> tuple[int, int]:
    """Move a pass by some places on its rank, or keep an activation that was recomputed.

    Returns the dice, and the rank that was changed, -1 if none could be.
    """
    m = graph.num_microbatches
    block = graph.pipeline_size * graph.chunks * m
    dice = (dice * 1103515245 + 12345) % _MODULUS
    choice = dice >> 12
    r = graph.rank[code % block]
    first = r * per_rank
    last = first + per_rank - 1
    if states is not None:
        if code >= 3 * block or choice % 16 == 0:
            unit = code % block
            if flags[unit] == 0:  # another one of the same stage
                dice = (dice * 1103515245 + 12345) % _MODULUS
                unit = unit // m * m + (dice >> 8) % m
            if flags[unit] == 1 and (dice >> 4) % 4 != 0:
                keep(graph, space, first, per_rank, order, flags)
                flags[unit] = 0
                if choice % 2 == 0:
                    dice = (dice * 1103515245 + 12345) % _MODULUS
                    other = order[first + (dice >> 8) % per_rank] % block
                    if other != unit and flags[other] == 0 and states.saved[other] > 0.0:
                        flags[other] = 1
                if fits(graph, states, order, flags, r, per_rank):
                    return dice, r
                restore(graph, space, order, flags)
                return dice, -1
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
    to = min(max(to, first), last)
    if to == at:
        return dice, -1
    code = order[at]
    step_to = 1 if to > at else -1
    i = at
    while i != to:
        i += step_to
        other = order[i]
        # the order within a stage: microbatches rise, and F, B, W of one follow each other
        if other // m == code // m or other % block == code % block:
            return dice, -1
    keep(graph, space, min(at, to), abs(at - to) + 1, order, flags)
    i = at
    while i != to:
        order[i] = order[i + step_to]
        i += step_to
    order[to] = code
    if fits(graph, states, order, flags, r, per_rank):
        return dice, r
    restore(graph, space, order, flags)
    return dice, -1


def move_pair(
    graph: Graph, space: ReplaySpace, order: Any, joined: Any, code: int, per_rank: int, dice: int
) -> tuple[int, int]:
    """Move a pass or a pair, join two passes, part a pair, or exchange the backwards of two pairs.

    Returns the dice, and the rank that was changed, -1 if none could be.
    """
    p, m, chunks = graph.pipeline_size, graph.num_microbatches, graph.chunks
    rank_of, memory, limit = graph.rank, graph.memory, graph.limit
    next_of = space.next_of
    block = p * chunks * m
    dice = (dice * 1103515245 + 12345) % _MODULUS
    choice = (dice >> 12) % 16
    dice = (dice * 1103515245 + 12345) % _MODULUS
    distance = 1 + (dice >> 8) % _REACH
    dice = (dice * 1103515245 + 12345) % _MODULUS
    backwards = (dice >> 12) % 2 == 0
    r = rank_of[code]
    first = r * per_rank
    at = first
    while order[at] != code:
        at += 1
    if choice < 3 and at > first:  # take what stands before it
        at -= 1
        code = order[at]
    keep(graph, space, first, per_rank, order, joined)
    # the pair it belongs to, if any
    head = at
    if code >= block and code < 2 * block and at > first:
        before = order[at - 1]
        if before < block and joined[before] == 1:
            head = at - 1
    is_pair = order[head] < block and joined[order[head]] == 1
    width = 2 if is_pair else 1
    last = first + per_rank
    ok = True
    if choice < 8 or code >= 2 * block:  # move a pass or a pair by some places
        to = head - distance if backwards else head + width + distance
        if to < first:
            to = first
        if to > last:
            to = last
        # not between the two of a pair
        if to > first and to < last and order[to - 1] < block and joined[order[to - 1]]:
            to += -1 if backwards else 1
        a, b = order[head], order[head + width - 1]
        if to < head:
            for i in range(head - 1, to - 1, -1):
                order[i + width] = order[i]
            order[to] = a
            order[to + width - 1] = b
        elif to > head + width:
            for i in range(head + width, to):
                order[i - width] = order[i]
            order[to - width] = a
            order[to - 1] = b
        else:
            ok = False
    elif is_pair and choice < 11:  # part it, in either order
        joined[order[head]] = 0
        if backwards:
            order[head], order[head + 1] = order[head + 1], order[head]
        else:
            ok = True
    elif is_pair:  # exchange backwards with another pair or take a single one
        seek = head + distance * (-1 if backwards else 1)
        step_to = -1 if backwards else 1
        while seek >= first and seek < last and order[seek] // block != 1:
            seek += step_to
        if seek < first or seek >= last or seek == head + 1:
            ok = False
        else:
            order[head + 1], order[seek] = order[seek], order[head + 1]
    else:  # join it with the nearest in the other direction
        wanted = 1 if code < block else 0
        step_to = -1 if backwards else 1
        seek = at + step_to
        reach = 0
        while seek >= first and seek < last and reach < _REACH:
            mine = order[seek]
            if mine // block == wanted:
                if wanted == 0 and joined[mine] == 0:
                    break
                if wanted == 1 and not (
                    seek > first and order[seek - 1] < block and joined[order[seek - 1]] == 1
                ):
                    break
            seek += step_to
            reach += 1
        if seek < first or seek >= last or reach >= _REACH:
            ok = False
        else:
            # both to the place of one of the two
            stays = at if choice % 2 == 0 else seek
            goes = seek if choice % 2 == 0 else at
            taken = order[goes]
            if goes < stays:
                for i in range(goes, stays):
                    order[i] = order[i + 1]
                order[stays] = taken
                low = stays - 1
            else:
                for i in range(goes, stays, -1):
                    order[i] = order[i - 1]
                order[stays] = taken
                low = stays
            if order[low] >= block:
                order[low], order[low + 1] = order[low + 1], order[low]
            joined[order[low]] = 1
    # microbatches rise, F, B, W of one follow each other, and the memory is kept
    if ok:
        for i in range(3 * chunks * p):
            next_of[i] = 0
        held = 0.0
        for i in range(first, last):
            mine = order[i]
            held += memory[mine]
            row = mine // m
            if mine % m != next_of[row] or held > limit[r]:
                ok = False
                break
            if row >= chunks * p and next_of[row - chunks * p] <= mine % m:
                ok = False
                break
            if mine < block and joined[mine] == 1:
                behind = order[i + 1] if i + 1 < last else -1
                if behind // block != 1 or behind == mine + block:
                    ok = False
                    break
            next_of[row] = mine % m + 1
    if ok:
        return dice, r
    restore(graph, space, order, joined)
    return dice, -1


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
    ranks, counts, placed = len(gaps.num_leads), space.counts, 0
    length = len(space.order) // ranks
    events = [(0.0, 0)]
    for rank in range(1, ranks):
        heappush(events, (0.0, rank))
    while len(events) > 0:
        now, rank = heappop(events)
        if now < space.clock[rank]:
            continue
        chosen = choose(gaps, space, now, rank, eagerness, eagerness_of_shards, room)
        if chosen < 0:
            continue
        end = now + gaps.seconds[chosen]
        if counts[ranks + rank] == 0:
            space.begin[rank] = now
        space.order[rank * length + counts[ranks + rank]] = chosen
        counts[ranks + rank] += 1
        placed += 1
        space.clock[rank] = end
        heappush(events, (end, rank))
        if chosen < 3 * gaps.stages * gaps.num_microbatches:
            space.held[rank] += gaps.memory[chosen]
        hand_on(gaps, space, events, chosen, rank, end)
    return placed


def choose(
    gaps: Gaps,
    space: GapSpace,
    now: float,
    rank: int,
    eagerness: float,
    eagerness_of_shards: float,
    room: int,
) -> int:
    """Return the pass that a free rank starts now, -1 if it waits.

    P, O, then the next F or B if it is ready; W or V in the wait for them.
    """
    m, stages, ranks = gaps.num_microbatches, gaps.stages, len(gaps.num_leads)
    counts, ready, width = space.counts, space.ready, len(gaps.leads) // ranks
    wait = INFINITY
    if gaps.cut and rank == gaps.end and counts[8 * ranks] < m:
        code = 3 * stages * m + counts[8 * ranks]
        if ready[code] <= now:
            return code
        wait = ready[code] - now
    if gaps.cut and counts[7 * ranks + rank] < room and counts[6 * ranks + rank] < m:
        code = (3 * stages + 1 + rank) * m + counts[6 * ranks + rank]
        if ready[code] <= now:
            return code
        wait = min(wait, ready[code] - now)
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
            counts[3 * ranks + rank] += 1
            return code
    if counts[5 * ranks + rank] < counts[4 * ranks + rank]:
        code = space.of_shards[rank * m + counts[5 * ranks + rank]]
        fills = wait > 0 and wait >= eagerness_of_shards * gaps.seconds[code]
        if ready[code] <= now and (counts[7 * ranks + rank] >= room or fills):
            counts[5 * ranks + rank] += 1
            return code
    if wait <= 0:
        counts[rank] += 1
        return upcoming
    return -1


def hand_on(gaps: Gaps, space: GapSpace, events: Any, code: int, rank: int, end: float) -> None:
    """Make the output of a pass known to the passes that read it, and wake their ranks."""
    m, stages, ranks = gaps.num_microbatches, gaps.stages, len(gaps.num_leads)
    counts, ready, width = space.counts, space.ready, len(gaps.leads) // ranks
    losses, outputs = 3 * stages * m, (3 * stages + 1) * m
    row, j, arrival = code // m, code % m, end + gaps.hop[code]
    if row < stages - 1:
        ready[code + m] = arrival
        heappush(events, (arrival, gaps.rank[row + 1]))
    elif row == stages - 1 and gaps.cut:
        for holder in range(ranks):
            if gaps.holders[holder]:
                at = end if holder == gaps.end else arrival
                ready[outputs + holder * m + j] = at
                heappush(events, (at, holder))
    elif stages <= row < 2 * stages:
        if gaps.split:
            space.pending[rank * width + counts[2 * ranks + rank]] = code + stages * m
            counts[2 * ranks + rank] += 1
        if row > stages:
            ready[code - m] = arrival
            heappush(events, (arrival, gaps.rank[row - 1]))
    elif row == 3 * stages:
        counts[8 * ranks] += 1
        ready[(2 * stages - 1) * m + j] = end
        heappush(events, (end, gaps.end))
        for holder in range(ranks):
            if gaps.holders[holder]:
                at = end if holder == gaps.end else arrival
                weight = outputs + (ranks + holder) * m + j
                space.of_shards[holder * m + counts[4 * ranks + holder]] = weight
                counts[4 * ranks + holder] += 1
                ready[weight] = at
                heappush(events, (at, holder))
    elif 3 * stages < row <= 3 * stages + ranks:
        counts[6 * ranks + rank] += 1
        counts[7 * ranks + rank] += 1
        space.parts[j] += 1
        space.latest[j] = max(space.latest[j], arrival)
        if space.parts[j] == sum_of(gaps.holders):
            ready[losses + j] = space.latest[j]
            heappush(events, (space.latest[j], gaps.end))
    elif row > 3 * stages + ranks:
        counts[7 * ranks + rank] -= 1


def sum_of(values: Any) -> int:
    """Return the sum of integers, which numba does not take of every sequence."""
    total = 0
    for value in values:
        total += value
    return total
