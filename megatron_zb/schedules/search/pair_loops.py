"""The inner loops of the search for orders with pairs: a greedy run, and moves of passes and pairs.

They are written as those of :mod:`inner_loops`, and read the same :class:`~inner_loops.Graph`; a
problem without communication never comes here. An order has beside it, by code of F, whether that
F runs as one with the B right behind it. A pair takes what both compute, or both exchange, or all
of one of them, whichever is longest, times ``1 + loss``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_zb.schedules.search.inner_loops import (
    INFINITY,
    Graph,
    GreedySpace,
    Moves,
    Priorities,
)

_MODULUS = 2147483648
_REACH = 10


class Exchange(NamedTuple):
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


class PairSpace(NamedTuple):
    """Working space of a local search.

    By code the first three, by rank the next four; ``next_of`` by kind and stage, and the last two
    by place on a rank.
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
    kept_joined: Any


def run_pair_scheduler(
    graph: Graph,
    exchange: Exchange,
    priorities: Priorities,
    pair_priorities: PairPriorities,
    space: GreedySpace,
    order: Any,
    joined: Any,
) -> float:
    """Fill ``order`` and ``joined`` and return the makespan, INFINITY if it got stuck.

    As :func:`inner_loops.run_list_scheduler`, with one more action for each F and B that are both
    ready: to run them as one.
    """
    p, chunks, m, split = graph.pipeline_size, graph.chunks, graph.num_microbatches, graph.split
    stage_at, reader, rank_of = graph.stage_at, graph.reader, graph.rank
    seconds, hop, memory = graph.seconds, graph.hop, graph.memory
    limit, tail_seconds = graph.limit, graph.tail_seconds
    quota, score, rank_bias = priorities
    comm, loss = exchange
    gain, pair_bias = pair_priorities
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
    for code in range(block):
        joined[code] = 0
    for r in range(p):
        clock[r] = 0.0
        held[r] = 0.0
        for i in range(width):
            counts[r * width + i] = 0
    done = 0
    makespan = 0.0
    dirty_a, dirty_b, dirty_c = -1, -1, -1
    first = True
    while done < p * per_rank:
        for r in range(p):
            if not (first or r in (dirty_a, dirty_b, dirty_c)):
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
                for k in range(2 * chunks):
                    c = k if k < chunks else k - chunks
                    mb = counts[base + k]
                    if mb >= m:
                        continue
                    code = stage_at[r * chunks + c] * m + mb
                    after = now
                    if k < chunks:
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
                    else:
                        code += block
                    ready = ready_at[code]
                    if ready >= INFINITY:
                        continue
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
                    if k >= chunks:
                        continue
                    for d in range(chunks):
                        other_mb = counts[base + chunks + d]
                        if other_mb >= m:
                            continue
                        other = block + stage_at[r * chunks + d] * m + other_mb
                        if other == code + block or ready_at[other] >= INFINITY:
                            continue
                        begin = ready_at[other] if ready_at[other] > start else start
                        alone = seconds[other] + (0.0 if split else seconds[other + block])
                        both = comm[code] + comm[other]
                        length = max(seconds[code] + alone - both, both, seconds[code], alone)
                        hides = seconds[code] + alone - length * (1.0 + loss)
                        if hides <= 0.0:
                            continue
                        b = chunks + d
                        its = score[b] + score[kinds + b] * position + rank_bias[r * kinds + b]
                        lead = ready_at[other] - now
                        if lead < 0.0:
                            its += early * lead
                        if late:
                            its += score[2 * kinds + b]
                        value = begin + (own + its) / 2 + pair_bias[c * chunks + d] - gain * hides
                        if value < best:
                            best = value
                            best_kind = kinds + c * chunks + d if after == now else 2 * chunks
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
        dirty_a, dirty_b, dirty_c = r, -1, -1
        place = r * per_rank + counts[base + 2 * chunks + 2]
        if kind == 2 * chunks:  # W, wanted for itself or to make room
            head = counts[base + 2 * chunks]
            counts[base + 2 * chunks] = head + 1
            code = pending[r * chunks * m + head]
            order[place] = code
            counts[base + 2 * chunks + 2] += 1
            done += 1
            clock[r] = choice_start[r] + seconds[code]
            held[r] += memory[code]
            end = clock[r]
        else:
            is_pair = kind > 2 * chunks
            forward, backward = -1, -1
            if is_pair:
                forward, backward = (kind - kinds) // chunks, (kind - kinds) % chunks
            elif kind < chunks:
                forward = kind
            else:
                backward = kind - chunks
            length = 0.0
            f_code, b_code = -1, -1
            if forward >= 0:
                mb = counts[base + forward]
                counts[base + forward] = mb + 1
                f_code = stage_at[r * chunks + forward] * m + mb
                length = seconds[f_code]
                order[place] = f_code
                place += 1
                held[r] += memory[f_code]
            if backward >= 0:
                mb = counts[base + chunks + backward]
                counts[base + chunks + backward] = mb + 1
                b_code = block + stage_at[r * chunks + backward] * m + mb
                if split:
                    tail = counts[base + 2 * chunks + 1]
                    counts[base + 2 * chunks + 1] = tail + 1
                    pending[r * chunks * m + tail] = b_code + block
                alone = seconds[b_code] + (0.0 if split else seconds[b_code + block])
                if is_pair:
                    both = comm[f_code] + comm[b_code]
                    length = max(length + alone - both, both, length, alone) * (1.0 + loss)
                    joined[f_code] = 1
                else:
                    length = alone
                order[place] = b_code
                place += 1
                held[r] += memory[b_code]
            end = choice_start[r] + length
            clock[r] = end
            counts[base + 2 * chunks + 2] += 2 if is_pair else 1
            done += 2 if is_pair else 1
            if f_code >= 0:
                following = reader[f_code]
                ready_at[following] = end + hop[following]
                dirty_b = rank_of[following]
            if b_code >= 0:
                following = reader[b_code]
                if following >= 0:
                    ready_at[following] = end + hop[following]
                    dirty_c = rank_of[following]
        if end + tail_seconds[r] > makespan:
            makespan = end + tail_seconds[r]
    return makespan


def local_search_of_pairs(
    graph: Graph,
    exchange: Exchange,
    moves: Moves,
    space: PairSpace,
    order: Any,
    joined: Any,
    best: Any,
    best_joined: Any,
) -> float:
    """Improve ``order`` and ``joined``; ``best`` and ``best_joined`` get the best that is found.

    As :func:`inner_loops.local_search`, with three more moves: to join a pass with one in the other
    direction nearby, to part a pair, and to exchange the backwards of two pairs. Whatever a move
    leaves is kept only if every rank can run to its end.
    """
    p, m, split, chunks = graph.pipeline_size, graph.num_microbatches, graph.split, graph.chunks
    rank_of, maker, reader = graph.rank, graph.maker, graph.reader
    seconds, hop, memory = graph.seconds, graph.hop, graph.memory
    limit, tail_seconds = graph.limit, graph.tail_seconds
    comm, loss = exchange
    end, blame, critical, position = space.end, space.blame, space.critical, space.position
    clock, waiting, stack = space.clock, space.waiting, space.stack
    next_of, kept, kept_joined = space.next_of, space.kept, space.kept_joined
    steps, good_enough = moves.steps, moves.good_enough
    block = p * chunks * m
    per_rank = (3 if split else 2) * chunks * m
    total = p * per_rank
    dice = moves.seed % _MODULUS
    lowest = INFINITY
    current = INFINITY
    moved = -1  # the rank whose order was changed
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
                start = clock[r]
                reason = order[r * per_rank + i - 1] if i > 0 else -1
                length = seconds[code]
                is_pair = code < block and joined[code] == 1
                other = order[r * per_rank + i + 1] if is_pair else code
                missing = -1
                need = maker[code]
                if need >= 0:
                    if end[need] < 0.0:
                        missing = need
                    elif end[need] + hop[code] > start:
                        start = end[need] + hop[code]
                        reason = need
                if is_pair and missing < 0:
                    need = maker[other]
                    if need >= 0:
                        if end[need] < 0.0:
                            missing = need
                        elif end[need] + hop[other] > start:
                            start = end[need] + hop[other]
                            reason = need
                if missing >= 0:
                    waiting[r] = missing
                    break
                if is_pair:
                    alone = seconds[other] + (0.0 if split else seconds[other + block])
                    both = comm[code] + comm[other]
                    length = max(length + alone - both, both, length, alone) * (1.0 + loss)
                elif code >= block and not split:
                    length += seconds[code + block]
                finish = start + length
                clock[r] = finish
                if finish + tail_seconds[r] > makespan:
                    makespan = finish + tail_seconds[r]
                    final = code
                for each in range(2 if is_pair else 1):
                    mine = code if each == 0 else other
                    end[mine] = finish
                    sum_of_ends += finish
                    blame[mine] = reason
                    done += 1
                    i += 1
                    following = reader[mine]
                    if following >= 0:
                        q = rank_of[following]
                        if q != r and waiting[q] == mine:
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
                for i in range(block):
                    best_joined[i] = joined[i]
                if lowest <= good_enough:
                    break
        elif moved >= 0:  # undo
            first = moved * per_rank
            for i in range(per_rank):
                code = kept[i]
                order[first + i] = code
                if code < block:
                    joined[code] = kept_joined[i]
        if step == steps or path == 0:
            break
        moved = -1
        for _ in range(50):  # until a move is possible
            dice = (dice * 1103515245 + 12345) % _MODULUS
            code = critical[(dice >> 8) % path]
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
            for i in range(per_rank):
                mine = order[first + i]
                kept[i] = mine
                kept_joined[i] = joined[mine] if mine < block else 0
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
                            seek > first
                            and order[seek - 1] < block
                            and joined[order[seek - 1]] == 1
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
                moved = r
                break
            for i in range(per_rank):
                mine = kept[i]
                order[first + i] = mine
                if mine < block:
                    joined[mine] = kept_joined[i]
    return lowest
