"""The inner loops of the search: a greedy run of all ranks, moves of single passes, gap filling.

The first two read one :class:`Graph`, the last one :class:`Gaps`. Written on flat sequences and
plain arithmetic alone, with a random generator of their own, so that the same lines run as Python
or compiled, with the same result to the last bit. The tuples that they take stand in this file
because numba keeps what it compiled for as long as this very file stays the same.

What a problem does not have, such as pairs or recomputation, is None. The compiler leaves out
branches behind a nested ``if it is not None``, and only those: one ``and`` more and they stay.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any, NamedTuple

INFINITY = 1e300

_MODULUS = 2147483648
_REACH = 10
_RECOMPUTE_EVERY = 4  # of the moves of passes that may be paired, those of what is recomputed
_ROUNDING = 1e-9  # relative, of sums in another order


class Graph(NamedTuple):
    """Passes of a problem as numbers: what each takes, what it waits for and what waits for it.

    A *row* is a kind of pass on one stage. Its passes have the codes ``first[row]`` to
    ``first[row + 1] - 1``, in the order in which its rank runs them. The rows of F come first, with
    the codes below ``forwards``, then those of B, below ``backwards``, then those of W, below
    ``weights``. An R, where orders have it, has the code of its F plus ``again``. Unless
    ``split``, no pass of W has a code, and ``after`` has its seconds by code of B.

    By code are: the ``row``, the ``rank``, the ``cell`` (the F of the same unit and stage), the
    pass ``before`` it that its row needs of the same cell, the ``maker`` of an input from another
    one, the ``reader`` of the output (-1 for none), the seconds of the pass and of the ``latency``
    of its input, the memory that it takes, or frees if negative, the ``weight`` pass that a B makes
    ready (-1 for none), and the ``flight``: the number of average microbatches that F brings into
    its stage and B takes out of it.

    ``place[r]`` is the first place of rank r in an order. ``leads[lead_first[r] + i]`` are the rows
    that rank r chooses from, beside W, and ``lead_kind`` their kinds in :class:`Priorities`;
    ``stage[row]`` is that of a row. ``limit[r]`` is the memory of rank r, of which F, B and W may
    fill ``room[r]``; ``work[r]`` are the seconds of all its passes; ``tail_seconds[r]`` follow its
    last pass before it counts as done.

    Passes of a vocabulary-parallel output layer, and updates, have the codes from ``weights`` to
    ``again``, and their inputs are :class:`Edges`.
    """

    pipeline_size: int
    chunks: int
    forwards: int
    backwards: int
    weights: int
    again: int
    split: bool
    first: Any
    stage: Any
    row: Any
    rank: Any
    cell: Any
    before: Any
    maker: Any
    reader: Any
    seconds: Any
    latency: Any
    memory: Any
    weight: Any
    flight: Any
    after: Any
    place: Any
    leads: Any
    lead_kind: Any
    lead_first: Any
    limit: Any
    room: Any
    work: Any
    tail_seconds: Any


class Edges(NamedTuple):
    """Inputs of passes that have several, or whose output several passes read.

    Beside ``maker`` and ``reader`` of a :class:`Graph`. The outputs of ``code`` are
    ``out_node[out_first[code]:out_first[code + 1]]``, each after the seconds ``out_lag``; its
    inputs from other cells likewise. ``missing`` is the number of inputs of a pass that has such,
    with its ``maker`` and those of its own cell. A shard holds the logits of ``most`` units at
    once.
    """

    most: int
    missing: Any
    in_first: Any
    in_node: Any
    in_lag: Any
    out_first: Any
    out_node: Any
    out_lag: Any


class Priorities(NamedTuple):
    """Numbers that steer a greedy run.

    ``quota[s]`` bounds the microbatches in flight of stage s, by their memory. ``score`` holds, for
    the kinds F0.., B0.., W, O, P, V, U: bias, slope along the ranks, bias once all F of the rank's
    first lead are out; then the weight of waiting inputs, of pending W, and the number of pending W
    that forces one. ``rank_bias[r * kinds + k]`` is added to the score of the k-th of these kinds,
    only on rank r. A run ends as soon as its makespan will certainly be above ``bound``.
    """

    quota: Any
    score: Any
    rank_bias: Any
    bound: float


class GreedySpace(NamedTuple):
    """Working space of a greedy run: by code, by place, by row, by stage, and by rank the others.

    ``pending[place[r] + i]`` is the i-th W of rank r that was ready; it has run those before
    ``oldest[r]``, and ``newest[r]`` were ready in all. ``upcoming`` is the next pass of each row,
    -1 once there is none left. ``missing`` counts the inputs of a pass that have not been made;
    ``touched[r]`` is 1 for a rank that has to choose anew.
    """

    ready: Any
    arrival: Any
    missing: Any
    touched: Any
    pending: Any
    upcoming: Any
    in_flight: Any
    oldest: Any
    newest: Any
    placed: Any
    clock: Any
    held: Any
    left: Any
    choice: Any
    choice_start: Any


class Moves(NamedTuple):
    """Settings of a local search.

    ``threshold`` is the first loss accepted, in seconds. What may not be lost is the makespan plus
    ``mean_weight`` times the mean end of all passes: this distinguishes the many orders of one
    makespan.
    """

    steps: int
    threshold: float
    mean_weight: float
    good_enough: float
    seed: int


class RecomputeCosts(NamedTuple):
    """Units (stage and microbatch) whose activations R recomputes before B.

    By code of F: the seconds of R, and the memory that it saves. An order has an R of every unit:
    one that is kept takes no time there. Where passes communicate, an order has no R: each
    runs right before its B, or before the pair that this is in.
    """

    seconds: Any
    saved: Any


class ReplaySpace(NamedTuple):
    """Working space of a local search.

    By code the first three, by rank the next four; ``next_of`` by row, ``kept`` and
    ``kept_flags`` by place. ``span`` has the first place that a move changed, and how many.
    """

    end: Any
    predecessor: Any
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
    """Seconds of exposed communication in a pass, by code, and the loss of a pair."""

    seconds: Any
    loss: float


class PairPriorities(NamedTuple):
    """Numbers that steer which passes a greedy run joins.

    A pair of F of chunk c and B of chunk d has the mean of the scores of both, plus
    ``bias[c * chunks + d]``, less ``gain`` times the seconds that it hides.
    """

    gain: float
    bias: Any


# --- greedy run of all ranks


def run_list_scheduler(
    graph: Graph,
    edges: Edges | None,
    pair_costs: PairCosts | None,
    priorities: Priorities,
    pair_priorities: PairPriorities,
    space: GreedySpace,
    order: Any,
    paired: Any,
) -> float:
    """Fill ``order`` and ``paired``; return the makespan, INFINITY if stuck or above the bound.

    1. Every rank has chosen an action: the one that it would start now or wait for.
    2. The rank whose action starts earliest runs it.
    3. This rank chooses anew, and so do those that read what it made.
    """
    p, total = graph.pipeline_size, graph.place[graph.pipeline_size]
    choice_start, clock, left = space.choice_start, space.clock, space.left
    seconds, tail_seconds = graph.seconds, graph.tail_seconds
    bound = priorities.bound * (1.0 + _ROUNDING)
    reset(graph, edges, pair_costs, space, paired)
    done, makespan = 0, 0.0
    second, third = -1, -1  # readers, beside the rank itself
    rank = -1
    while done < total:
        turns = p if rank < 0 else 3
        if edges is not None:
            turns = p
        for turn in range(turns):
            if rank < 0:
                r = turn
            elif turn == 0:
                r = rank
            elif turn == 1:
                r = second if second != rank else -1
            else:
                r = third if third != rank and third != second else -1
            if edges is not None:
                r = turn if space.touched[turn] == 1 else -1
            if r >= 0:
                choose_action(graph, pair_costs, priorities, pair_priorities, space, r)
        rank = -1
        earliest = INFINITY
        for r in range(p):
            if choice_start[r] < earliest:
                earliest, rank = choice_start[r], r
        if rank < 0:
            return INFINITY
        code, other = take_action(graph, pair_costs, space, rank)
        end = earliest + seconds[code]
        if not graph.split:
            end += graph.after[code]
        if pair_costs is not None:
            if other >= 0:
                end = earliest + pair_seconds(graph, pair_costs, code, other)
                paired[code] = 1
        clock[rank] = end
        if pair_costs is None:  # a pair takes less than its passes
            left[rank] -= end - earliest
            if end + left[rank] + tail_seconds[rank] > bound:
                return INFINITY
        if edges is not None:
            for r in range(p):
                space.touched[r] = 0
            space.touched[rank] = 1
            hand_out(graph, edges, space, code, end)
        second = hand_over(graph, edges, space, order, rank, code, end)
        third = hand_over(graph, edges, space, order, rank, other, end) if other >= 0 else -1
        done += 1 if other < 0 else 2
        makespan = max(makespan, end + tail_seconds[rank])
    return makespan


def reset(
    graph: Graph,
    edges: Edges | None,
    pair_costs: PairCosts | None,
    space: GreedySpace,
    paired: Any,
) -> None:
    """Prepare the space for a run: only the F of the first stage have their inputs."""
    for code in range(graph.forwards):
        space.ready[code] = 0.0 if graph.maker[code] < 0 else INFINITY
    for code in range(graph.forwards, graph.backwards):
        space.ready[code] = INFINITY
    if edges is not None:
        for code in range(len(space.ready)):
            if code >= graph.weights:
                space.ready[code] = INFINITY
            space.arrival[code] = 0.0
            space.missing[code] = edges.missing[code]
            if edges.missing[code] > 0:
                space.ready[code] = INFINITY
        for r in range(graph.pipeline_size):
            space.touched[r] = 1
    if pair_costs is not None:
        for code in range(graph.forwards):
            paired[code] = 0
    for row in range(len(graph.stage)):
        space.upcoming[row] = graph.first[row]
        space.in_flight[graph.stage[row]] = 0.0
    for r in range(graph.pipeline_size):
        space.clock[r] = 0.0
        space.held[r] = 0.0
        space.left[r] = graph.work[r]
        space.oldest[r] = 0
        space.newest[r] = 0
        space.placed[r] = graph.place[r]


def choose_action(
    graph: Graph,
    pair_costs: PairCosts | None,
    priorities: Priorities,
    pair_priorities: PairPriorities,
    space: GreedySpace,
    r: int,
) -> None:
    """Choose what a rank runs next: the action with the lowest score, in ``choice``.

    It is the next pass of one of its leads, its oldest pending weight gradient (numbered behind
    them) or, where passes communicate, a pair of a forward and a backward (numbered behind it).
    Among equal scores the first one wins.
    """
    chunks, cell = graph.chunks, graph.cell
    seconds, memory, room = graph.seconds, graph.memory, graph.room
    upcoming, ready_at = space.upcoming, space.ready
    base = graph.lead_first[r]
    leads = graph.lead_first[r + 1] - base
    now = space.clock[r]
    late = upcoming[graph.leads[base]] < 0
    waiting = space.newest[r] - space.oldest[r]
    kinds = 2 * chunks + 5
    position = (r / (graph.pipeline_size - 1) if graph.pipeline_size > 1 else 0.0) - 0.5
    best, best_choice, best_start = INFINITY, -1, INFINITY
    if waiting > 0 and waiting > priorities.score[3 * kinds + 2]:
        space.choice[r], space.choice_start[r] = leads, now
        return
    for i in range(leads):
        row = graph.leads[base + i]
        code = upcoming[row]
        if code < 0:
            continue
        ready = ready_at[code]
        if ready >= INFINITY:
            continue
        after, makes_room = now, False
        if code < graph.forwards:  # row s is that of F of stage s
            if space.in_flight[row] + graph.flight[code] > priorities.quota[row]:
                continue
            if space.held[r] + memory[code] > room[r]:
                if waiting == 0:
                    continue
                # room only once the oldest W has run
                oldest = space.pending[graph.place[r] + space.oldest[r]]
                after, makes_room = now + seconds[oldest], True
        elif code >= graph.weights:  # of a shard, which holds the logits of few microbatches
            at = graph.stage[row]
            if space.in_flight[at] + graph.flight[code] > priorities.quota[at]:
                continue
        start = ready if ready > after else after
        kind = graph.lead_kind[base + i]
        own = score_of(priorities, kinds, kind, r, position, ready - now, late)
        if start + own < best:
            best = start + own
            best_choice = leads if makes_room else i
            best_start = now if makes_room else start
        if pair_costs is not None:
            for d in range(chunks if i < chunks else 0):
                behind = graph.leads[base + chunks + d]
                other = upcoming[behind]
                if other < 0:
                    continue
                if cell[other] == code or ready_at[other] >= INFINITY:
                    continue
                hides = hidden_seconds(graph, pair_costs, code, other)
                if hides <= 0.0:
                    continue
                begin = ready_at[other] if ready_at[other] > start else start
                ahead = ready_at[other] - now
                its = score_of(priorities, kinds, chunks + d, r, position, ahead, late)
                value = begin + (own + its) / 2 + pair_priorities.bias[i * chunks + d]
                value -= pair_priorities.gain * hides
                if value < best:
                    best = value
                    best_choice = leads if makes_room else leads + 1 + i * chunks + d
                    best_start = now if makes_room else begin
    if waiting > 0:
        weight, score = 2 * chunks, priorities.score
        value = now - score[3 * kinds + 1] * (waiting - 1)
        value = value + score[weight] + score[kinds + weight] * position
        value += priorities.rank_bias[r * kinds + weight]
        if late:
            value += score[2 * kinds + weight]
        if value < best:
            best_choice, best_start = leads, now
    space.choice[r], space.choice_start[r] = best_choice, best_start


def score_of(
    priorities: Priorities, kinds: int, k: int, r: int, position: float, ahead: float, late: bool
) -> float:
    """Return the score of a pass of the k-th kind whose input is ready in ``ahead`` seconds."""
    score = priorities.score
    value = score[k] + score[kinds + k] * position + priorities.rank_bias[r * kinds + k]
    if ahead < 0.0:
        value += score[3 * kinds] * ahead
    if late:
        value += score[2 * kinds + k]
    return value


def take_action(
    graph: Graph, pair_costs: PairCosts | None, space: GreedySpace, r: int
) -> tuple[int, int]:
    """Count what a rank has chosen; return its pass, and the backward of a pair or -1."""
    base = graph.lead_first[r]
    leads = graph.lead_first[r + 1] - base
    i, other = space.choice[r], -1
    if i == leads:  # W, wanted for itself or to make room
        head = space.oldest[r]
        space.oldest[r] = head + 1
        return space.pending[graph.place[r] + head], other
    if pair_costs is not None:
        if i > leads:
            i, d = (i - leads - 1) // graph.chunks, (i - leads - 1) % graph.chunks
            behind = graph.leads[base + graph.chunks + d]
            other = take(graph, space, behind)
    return take(graph, space, graph.leads[base + i]), other


def take(graph: Graph, space: GreedySpace, row: int) -> int:
    """Count the next pass of a row as run, and return it."""
    code = space.upcoming[row]
    space.upcoming[row] = code + 1 if code + 1 < graph.first[row + 1] else -1
    space.in_flight[graph.stage[row]] += graph.flight[code]
    return code


def hand_out(graph: Graph, edges: Edges, space: GreedySpace, code: int, end: float) -> None:
    """Publish the output of a pass along its edges, and mark the ranks of what is ready now."""
    for i in range(edges.out_first[code], edges.out_first[code + 1]):
        deliver(graph, space, edges.out_node[i], end + edges.out_lag[i])


def deliver(graph: Graph, space: GreedySpace, reader: int, arrival: float) -> None:
    """Count an input of a pass that has several, and mark its rank once it has all of them."""
    space.arrival[reader] = max(space.arrival[reader], arrival)
    space.missing[reader] -= 1
    if space.missing[reader] == 0:
        space.ready[reader] = space.arrival[reader]
        space.touched[graph.rank[reader]] = 1


def hand_over(
    graph: Graph,
    edges: Edges | None,
    space: GreedySpace,
    order: Any,
    r: int,
    code: int,
    end: float,
) -> int:
    """Put a pass that ends then into the order; return the rank that reads its output, or -1."""
    order[space.placed[r]] = code
    space.placed[r] += 1
    if code < graph.weights:
        space.held[r] += graph.memory[code]
    if graph.split:
        weight = graph.weight[code]
        if weight >= 0:
            space.pending[graph.place[r] + space.newest[r]] = weight
            space.newest[r] += 1
    following = graph.reader[code]
    if following < 0:
        return -1
    if edges is not None:
        if space.missing[following] > 0:
            deliver(graph, space, following, end + graph.latency[following])
            return -1
        space.touched[graph.rank[following]] = 1
    space.ready[following] = end + graph.latency[following]
    return graph.rank[following]


def pair_seconds(graph: Graph, pair_costs: PairCosts, forward: int, backward: int) -> float:
    """Return the seconds of a pair; see :meth:`StageCosts.pair_seconds`."""
    length, alone = graph.seconds[forward], backward_seconds(graph, backward)
    both = pair_costs.seconds[forward] + pair_costs.seconds[backward]
    return max(length + alone - both, both, length, alone) * (1.0 + pair_costs.loss)


def backward_seconds(graph: Graph, backward: int) -> float:
    """Return the seconds of a backward pass outside of a pair, with those of W unless split."""
    if graph.split:
        return graph.seconds[backward]
    return graph.seconds[backward] + graph.after[backward]


def hidden_seconds(graph: Graph, pair_costs: PairCosts, forward: int, backward: int) -> float:
    """Return the seconds that a pair takes less than its two passes."""
    alone = backward_seconds(graph, backward)
    return graph.seconds[forward] + alone - pair_seconds(graph, pair_costs, forward, backward)


# --- local search


def local_search(
    graph: Graph,
    edges: Edges | None,
    pair_costs: PairCosts | None,
    moves: Moves,
    space: ReplaySpace,
    recompute: RecomputeCosts | None,
    order: Any,
    flags: Any,
    best: Any,
    best_flags: Any,
) -> float:
    """Improve ``order``, of each rank's codes, and ``flags``, into ``best`` and ``best_flags``.

    Local search by threshold accepting:

    1. Times the order (:func:`replay`), which gives the critical path.
    2. Keeps the last move if it loses no more than a threshold, which falls to zero; else takes it
       back.
    3. Moves a pass of the critical path by some places on its rank, or pairs or recomputes it.

    ``flags``
    say by code of F what is paired with the backward behind it, where passes communicate, and what
    is recomputed otherwise; with both, 1 is paired, 2 recomputed and 3 both. Returns the makespan
    of ``best``.
    """
    critical = space.critical
    total = len(order)
    steps = moves.steps
    rng = moves.seed % _MODULUS
    lowest = INFINITY
    current = INFINITY
    moved = -1  # the rank whose order was changed
    path = 0
    for step in range(steps + 1):
        done, makespan, sum_of_ends, final = replay(
            graph, edges, pair_costs, space, recompute, order, flags
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
                code = space.predecessor[code]
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
            rng = (rng * 1103515245 + 12345) % _MODULUS
            code = critical[(rng >> 8) % path]
            if pair_costs is None:
                rng, moved = move_pass(graph, edges, space, recompute, order, flags, code, rng)
            else:
                rng, moved = move_pair(graph, space, recompute, order, flags, code, rng)
            if moved >= 0:
                break
    return lowest


def keep(graph: Graph, space: ReplaySpace, low: int, count: int, order: Any, flags: Any) -> None:
    """Copy a part of the order and its flags, for :func:`restore`."""
    space.span[0], space.span[1] = low, count
    for i in range(count):
        code = order[low + i]
        space.kept[i] = code
        if flags is not None:
            space.kept_flags[i] = flags[code] if code < graph.forwards else 0


def restore(graph: Graph, space: ReplaySpace, order: Any, flags: Any) -> None:
    """Take back the move of which :func:`keep` has kept the part that it changed."""
    low, count = space.span[0], space.span[1]
    for i in range(count):
        code = space.kept[i]
        order[low + i] = code
        if flags is not None:
            if code < graph.forwards:
                flags[code] = space.kept_flags[i]


def replay(
    graph: Graph,
    edges: Edges | None,
    pair_costs: PairCosts | None,
    space: ReplaySpace,
    recompute: RecomputeCosts | None,
    order: Any,
    flags: Any,
) -> tuple[int, float, float, int]:
    """Time an order; ``predecessor[code]`` gets the critical predecessor of a pass, -1 for none.

    Returns the number of passes that ran, the makespan, the sum of all ends, and the last pass.
    """
    p, weights, again = graph.pipeline_size, graph.weights, graph.again
    rank_of, maker, reader, place = graph.rank, graph.maker, graph.reader, graph.place
    seconds, latency, tail_seconds = graph.seconds, graph.latency, graph.tail_seconds
    end, predecessor, position = space.end, space.predecessor, space.position
    clock, waiting, stack = space.clock, space.waiting, space.stack
    begin(graph, space)
    depth = p
    done = 0
    makespan = 0.0
    sum_of_ends = 0.0
    final = -1
    while depth > 0:
        depth -= 1
        r = stack[depth]
        i, last = position[r], place[r + 1]
        while i < last:
            code = order[i]
            start = clock[r]
            if pair_costs is not None:
                if recompute is not None:
                    start += seconds_of_r(graph, recompute, order, flags, i)
            reason = order[i - 1] if i > place[r] else -1
            need = maker[code]
            if need >= 0:
                if end[need] < 0.0:
                    waiting[r] = need
                    break
                if end[need] + latency[code] > start:
                    start = end[need] + latency[code]
                    reason = need
            if edges is not None:
                need, arrival = last_of(edges, end, code)
                if need >= 0:
                    if end[need] < 0.0:
                        waiting[r] = need
                        break
                    if arrival > start:
                        start = arrival
                        reason = need
            other = -1
            if pair_costs is not None:
                if is_paired(graph, code, flags):  # a pair waits for the inputs of both
                    other = order[i + 1]
                    need = maker[other]
                    if need >= 0:
                        if end[need] < 0.0:
                            waiting[r] = need
                            break
                        if end[need] + latency[other] > start:
                            start = end[need] + latency[other]
                            reason = need
            if recompute is None:
                finish = start + seconds[code]
            elif code >= again:
                finish = start + recompute.seconds[code - again] * flags[code - again]
            else:
                finish = start + seconds[code]
            if not graph.split and code < weights:
                if pair_costs is None:
                    finish += graph.after[code]
                else:
                    finish = start + (seconds[code] + graph.after[code])
            if pair_costs is not None:
                if other >= 0:
                    finish = start + pair_seconds(graph, pair_costs, code, other)
            clock[r] = finish
            if finish + tail_seconds[r] > makespan:
                makespan = finish + tail_seconds[r]
                final = code
            while code >= 0:
                end[code] = finish
                sum_of_ends += finish
                predecessor[code] = reason
                done += 1
                i += 1
                following = reader[code]
                if following >= 0:
                    q = rank_of[following]
                    if q != r and waiting[q] == code:
                        waiting[q] = -1
                        stack[depth] = q
                        depth += 1
                if edges is not None:
                    depth = wake(graph, edges, space, code, r, depth)
                code, other = other, -1
        position[r] = i
    return done, makespan, sum_of_ends, final


def begin(graph: Graph, space: ReplaySpace) -> None:
    """Prepare the space for a replay: no pass has run, and every rank is on the stack."""
    for code in range(len(space.end)):
        space.end[code] = -1.0
    for r in range(graph.pipeline_size):
        space.position[r] = graph.place[r]
        space.clock[r] = 0.0
        space.waiting[r] = -1
        space.stack[r] = graph.pipeline_size - 1 - r


def last_of(edges: Edges, end: Any, code: int) -> tuple[int, float]:
    """Return the last input of a pass to arrive, and when; one that was not made comes first.

    The input is -1 if the pass has none along edges.
    """
    last, latest = -1, -1.0
    for k in range(edges.in_first[code], edges.in_first[code + 1]):
        need = edges.in_node[k]
        if end[need] < 0.0:
            return need, latest
        if end[need] + edges.in_lag[k] > latest:
            last, latest = need, end[need] + edges.in_lag[k]
    return last, latest


def wake(graph: Graph, edges: Edges, space: ReplaySpace, code: int, r: int, depth: int) -> int:
    """Put the ranks that wait for a pass along edges onto the stack; return its depth."""
    for k in range(edges.out_first[code], edges.out_first[code + 1]):
        q = graph.rank[edges.out_node[k]]
        if q != r and space.waiting[q] == code:
            space.waiting[q] = -1
            space.stack[depth] = q
            depth += 1
    return depth


def fits(
    graph: Graph,
    edges: Edges | None,
    recompute: RecomputeCosts | None,
    order: Any,
    flags: Any,
    r: int,
) -> bool:
    """Return whether a rank keeps its memory limit, and holds the logits of few units."""
    memory, limit, weights, again = graph.memory, graph.limit[r], graph.weights, graph.again
    held, logits = 0.0, 0.0
    for i in range(graph.place[r], graph.place[r + 1]):
        code = order[i]
        if edges is not None:
            if code >= weights and code < again:
                logits += graph.flight[code]
                if logits > edges.most:
                    return False
        if recompute is None:
            held += memory[code]
        elif code >= again:
            held += recompute.saved[code - again] * flags[code - again]
        else:
            held += memory[code]
            if code < graph.forwards:
                held -= recompute.saved[code] * flags[code]
        if held > limit:
            return False
    return True


def other_of_stage(graph: Graph, unit: int, draw: int) -> int:
    """Return the F of the same stage that a random number picks."""
    row = graph.row[unit]
    return graph.first[row] + draw % (graph.first[row + 1] - graph.first[row])


def move_pass(
    graph: Graph,
    edges: Edges | None,
    space: ReplaySpace,
    recompute: RecomputeCosts | None,
    order: Any,
    flags: Any,
    code: int,
    rng: int,
) -> tuple[int, int]:
    """Move a pass by some places on its rank, or keep an activation that was recomputed.

    1. With recomputation, one of sixteen moves, and each of an R, keeps a unit that is recomputed,
       and every second one of these recomputes another in its place.
    2. Else the pass, or the one before it, goes up to ten places, mostly to an earlier one.
    3. The move is refused where it passes one of its row, or of its unit and stage.
    4. It is taken back where the rank would exceed its memory.

    Returns the rng, and the rank that was changed, -1 if none could be.
    """
    rng = (rng * 1103515245 + 12345) % _MODULUS
    choice = rng >> 12
    row, cell = graph.row, graph.cell
    r = graph.rank[code]
    first = graph.place[r]
    last = graph.place[r + 1] - 1
    if recompute is not None:
        is_of_f = cell[code] < graph.forwards  # an update is of no F
        if is_of_f and (code >= graph.again or choice % 16 == 0):
            unit = cell[code]
            if flags[unit] == 0:
                rng = (rng * 1103515245 + 12345) % _MODULUS
                unit = other_of_stage(graph, unit, rng >> 8)
            if flags[unit] == 1 and (rng >> 4) % 4 != 0:
                keep(graph, space, first, last + 1 - first, order, flags)
                flags[unit] = 0
                if choice % 2 == 0:
                    rng = (rng * 1103515245 + 12345) % _MODULUS
                    other = cell[order[first + (rng >> 8) % (last + 1 - first)]]
                    if other < graph.forwards and other != unit and flags[other] == 0:
                        if recompute.saved[other] > 0.0:
                            flags[other] = 1
                if fits(graph, edges, recompute, order, flags, r):
                    return rng, r
                restore(graph, space, order, flags)
                return rng, -1
    at = first
    while order[at] != code:
        at += 1
    rng = (rng * 1103515245 + 12345) % _MODULUS
    distance = 1 + (rng >> 8) % _REACH
    if choice % 4 == 0 and at > first:  # move what stands before it
        at -= 1
        to = at + distance if choice % 8 < 4 else at + 1
    elif choice % 4 < 3:
        to = at - distance
    else:
        to = at + distance
    to = min(max(to, first), last)
    if to == at:
        return rng, -1
    code = order[at]
    step_to = 1 if to > at else -1
    i = at
    while i != to:
        i += step_to
        other = order[i]
        # the order of a row stays, and F, B, W of one unit and stage follow each other
        if row[other] == row[code] or cell[other] == cell[code]:
            return rng, -1
    keep(graph, space, min(at, to), abs(at - to) + 1, order, flags)
    i = at
    while i != to:
        order[i] = order[i + step_to]
        i += step_to
    order[to] = code
    if fits(graph, edges, recompute, order, flags, r):
        return rng, r
    restore(graph, space, order, flags)
    return rng, -1


def move_pair(
    graph: Graph,
    space: ReplaySpace,
    recompute: RecomputeCosts | None,
    order: Any,
    paired: Any,
    code: int,
    rng: int,
) -> tuple[int, int]:
    """Move a pass or a pair, pair two passes, part a pair, or swap the backwards of two pairs.

    1. With recomputation, one of four moves keeps a unit that is recomputed, or the reverse.
    2. Half of the others, and all of a W, shift the pass, or its pair, by up to ten places.
    3. Of a pair, three of eight part it, the others swap its backward with one up to ten places
       away.
    4. A single pass is paired with the nearest single one of the other direction.
    5. The move is taken back where a row loses its order, or the rank exceeds its memory.

    Returns the rng, and the rank that was changed, -1 if none could be.
    """
    rng = (rng * 1103515245 + 12345) % _MODULUS
    choice = (rng >> 12) % 16
    rng = (rng * 1103515245 + 12345) % _MODULUS
    distance = 1 + (rng >> 8) % _REACH
    rng = (rng * 1103515245 + 12345) % _MODULUS
    step = -1 if (rng >> 12) % 2 == 0 else 1
    r = graph.rank[code]
    first = graph.place[r]
    last = graph.place[r + 1]
    at = first
    while order[at] != code:
        at += 1
    if choice < 3 and at > first:  # take what stands before it
        at -= 1
        code = order[at]
    keep(graph, space, first, last - first, order, paired)
    if recompute is not None:
        rng = (rng * 1103515245 + 12345) % _MODULUS
        if (rng >> 12) % _RECOMPUTE_EVERY == 0:
            rng, changed = change_recompute(graph, recompute, order, paired, code, rng)
            if changed:
                if keeps_pair_rules(graph, space, recompute, order, paired, r):
                    return rng, r
            restore(graph, space, order, paired)
            return rng, -1
    head = at  # of the pair that it belongs to, if any
    if is_backward(graph, code) and at > first and is_paired(graph, order[at - 1], paired):
        head = at - 1
    is_pair = is_paired(graph, order[head], paired)
    changed = True
    if choice < 8 or code >= graph.backwards:
        width = 2 if is_pair else 1
        to = head - distance if step < 0 else head + width + distance
        to = free_place(graph, order, paired, min(max(to, first), last), step, r)
        changed = shift(order, head, width, to)
    elif is_pair and choice < 11:  # part it, in either order
        paired[order[head]] -= 1
        if step < 0:
            order[head], order[head + 1] = order[head + 1], order[head]
    elif is_pair:  # swap backwards with another pair or take a single one
        seek = head + distance * step
        while first <= seek < last and not is_backward(graph, order[seek]):
            seek += step
        changed = first <= seek < last and seek != head + 1
        if changed:
            order[head + 1], order[seek] = order[seek], order[head + 1]
    else:
        seek = partner_of(graph, order, paired, at, step, r)
        changed = seek >= 0
        if changed:  # both to the place of one of the two
            stays, goes = (at, seek) if choice % 2 == 0 else (seek, at)
            pair_up(graph, order, paired, stays, goes)
    if changed:
        changed = keeps_pair_rules(graph, space, recompute, order, paired, r)
    if changed:
        return rng, r
    restore(graph, space, order, paired)
    return rng, -1


def change_recompute(
    graph: Graph, recompute: RecomputeCosts, order: Any, flags: Any, code: int, rng: int
) -> tuple[int, bool]:
    """Keep a unit that is recomputed, and maybe recompute another, or just recompute one.

    The unit is that of a pass, or another of its stage. Returns the rng, and whether a flag was
    changed.
    """
    rng = (rng * 1103515245 + 12345) % _MODULUS
    choice, unit = rng >> 12, graph.cell[code]
    r = graph.rank[unit]
    if flags[unit] < 2:
        rng = (rng * 1103515245 + 12345) % _MODULUS
        unit = other_of_stage(graph, unit, rng >> 8)
    if flags[unit] < 2:
        if choice % 4 == 0 and recompute.saved[unit] > 0.0:
            flags[unit] += 2
            return rng, True
        return rng, False
    flags[unit] -= 2
    if choice % 2 == 0:
        rng = (rng * 1103515245 + 12345) % _MODULUS
        first = graph.place[r]
        other = graph.cell[order[first + (rng >> 8) % (graph.place[r + 1] - first)]]
        if other != unit and flags[other] < 2 and recompute.saved[other] > 0.0:
            flags[other] += 2
    return rng, True


def is_backward(graph: Graph, code: int) -> bool:
    """Return whether a pass is a B, or a BW."""
    return graph.forwards <= code < graph.backwards


def is_paired(graph: Graph, code: int, paired: Any) -> bool:
    """Return whether a pass is the forward of a pair, which the backward follows."""
    if code < graph.forwards:
        return bool(paired[code] % 2 == 1)
    return False


def free_place(graph: Graph, order: Any, paired: Any, to: int, step: int, r: int) -> int:
    """Return the place itself, or the next one if it is between the two of a pair."""
    if graph.place[r] < to < graph.place[r + 1] and is_paired(graph, order[to - 1], paired):
        return to + step
    return to


def shift(order: Any, head: int, width: int, to: int) -> bool:
    """Move ``width`` codes from ``head`` to before ``to``; return whether that changes anything."""
    a, b = order[head], order[head + width - 1]
    if to < head:
        for i in range(head - 1, to - 1, -1):
            order[i + width] = order[i]
        order[to], order[to + width - 1] = a, b
        return True
    if to > head + width:
        for i in range(head + width, to):
            order[i - width] = order[i]
        order[to - width], order[to - 1] = a, b
        return True
    return False


def partner_of(graph: Graph, order: Any, paired: Any, at: int, step: int, r: int) -> int:
    """Return the place of the nearest single pass in the other direction, -1 if none is near."""
    first, last = graph.place[r], graph.place[r + 1]
    wants_backward = order[at] < graph.forwards
    seek = at + step
    for _ in range(_REACH):
        if seek < first or seek >= last:
            return -1
        code = order[seek]
        if is_backward(graph, code) if wants_backward else code < graph.forwards:
            forward = code if not wants_backward or seek == first else order[seek - 1]
            if not is_paired(graph, forward, paired):
                return seek
        seek += step
    return -1


def pair_up(graph: Graph, order: Any, paired: Any, stays: int, goes: int) -> None:
    """Make a pair of two passes: one goes to the other."""
    taken = order[goes]
    step = 1 if goes < stays else -1
    i = goes
    while i != stays:
        order[i] = order[i + step]
        i += step
    order[stays] = taken
    low = stays - 1 if step > 0 else stays
    if order[low] >= graph.forwards:
        order[low], order[low + 1] = order[low + 1], order[low]
    paired[order[low]] += 1


def unit_of_r(graph: Graph, order: Any, flags: Any, at: int) -> int:
    """Return the F whose R runs right before a place, which begins a pass or a pair, or -1."""
    code = order[at]
    if is_paired(graph, code, flags):
        code = order[at + 1]
    unit = graph.cell[code] if is_backward(graph, code) else -1
    return unit if unit >= 0 and flags[unit] >= 2 else -1


def seconds_of_r(graph: Graph, recompute: RecomputeCosts, order: Any, flags: Any, at: int) -> float:
    """Return the seconds of the R that runs right before a place, 0 if there is none."""
    unit = unit_of_r(graph, order, flags, at)
    return recompute.seconds[unit] if unit >= 0 else 0.0


def keeps_pair_rules(
    graph: Graph,
    space: ReplaySpace,
    recompute: RecomputeCosts | None,
    order: Any,
    paired: Any,
    r: int,
) -> bool:
    """Return whether rows keep their order, F, B, W of one follow each other, and memory suffices.

    ``next_of[row]`` is the pass of each row that comes next.
    """
    next_of, place, forwards = space.next_of, graph.place, graph.forwards
    for row in range(len(graph.stage)):
        next_of[row] = graph.first[row]
    held = 0.0
    for i in range(place[r], place[r + 1]):
        code = order[i]
        if recompute is not None:
            if i == place[r] or not is_paired(graph, order[i - 1], paired):
                unit = unit_of_r(graph, order, paired, i)
                if unit >= 0:
                    held += recompute.saved[unit]
            if held > graph.limit[r]:
                return False
            if code < forwards and paired[code] >= 2:
                held -= recompute.saved[code]
        held += graph.memory[code]
        row = graph.row[code]
        if code != next_of[row] or held > graph.limit[r]:
            return False
        before = graph.before[code]
        if before >= 0 and next_of[graph.row[before]] <= before:
            return False
        if is_paired(graph, code, paired):
            behind = order[i + 1] if i + 1 < place[r + 1] else -1
            if not is_backward(graph, behind) or graph.cell[behind] == code:
                return False
        next_of[row] = code + 1
    return True


# --- gaps


class Gaps(NamedTuple):
    """Passes of a gap filler as numbers, coded ``row * m + microbatch``.

    The rows are F of each stage, then B, W, one P, and O and V of each rank; those of shards count
    only if ``vocabulary_parallel``. With ``split``, B may be followed by a W. ``end`` is the rank
    of the last stage and ``holders[r]`` is 1 for a rank with a shard. By row is the rank; by code
    are the seconds, the memory that the pass takes, or frees if negative, and the ``latency`` of
    its output. ``leads[r * width + k]`` is the code of the k-th F or B of rank r, of
    ``num_leads[r]``. ``partner`` is by code of F the backward that it is paired with, which is the
    next lead, or -1, and ``of_pair`` the seconds of both. ``weight[s * m + j]`` is the code of W of
    unit j on stage s, -1 if it has none.
    """

    num_microbatches: int
    stages: int
    split: bool
    vocabulary_parallel: bool
    end: int
    rank: Any
    holders: Any
    seconds: Any
    memory: Any
    latency: Any
    limit: Any
    leads: Any
    num_leads: Any
    weight: Any
    partner: Any
    of_pair: Any


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

    1. The next event is the earliest time at which a rank is free, or an input of it arrives.
    2. A free rank runs P or O if one is ready, at most ``room`` O before their V.
    3. Else it waits for the next F or B, which keep the order of ``gaps.leads``. A W fills a wait
       of at least ``eagerness`` times its seconds, or runs at once where the next F would exceed
       the memory; a V likewise with ``eagerness_of_shards``, or where ``room`` is used up.
    4. What it has run is published to the passes that read it, whose ranks get an event.

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
        other = partner_in_gaps(gaps, chosen)
        end = now + (gaps.seconds[chosen] if other < 0 else gaps.of_pair[chosen])
        if counts[ranks + rank] == 0:
            space.begin[rank] = now
        space.clock[rank] = end
        heappush(events, (end, rank))
        while chosen >= 0:
            space.order[rank * length + counts[ranks + rank]] = chosen
            counts[ranks + rank] += 1
            placed += 1
            if chosen < 3 * gaps.stages * gaps.num_microbatches:
                space.held[rank] += gaps.memory[chosen]
            hand_on(gaps, space, events, chosen, rank, end)
            chosen, other = other, -1
    return placed


def partner_in_gaps(gaps: Gaps, code: int) -> int:
    """Return the backward that a pass is paired with, -1 if there is none."""
    if code < gaps.stages * gaps.num_microbatches:
        return int(gaps.partner[code])
    return -1


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
    if gaps.vocabulary_parallel and rank == gaps.end and counts[8 * ranks] < m:
        code = 3 * stages * m + counts[8 * ranks]
        if ready[code] <= now:
            return code
        wait = ready[code] - now
    if (
        gaps.vocabulary_parallel
        and counts[7 * ranks + rank] < room
        and counts[6 * ranks + rank] < m
    ):
        code = (3 * stages + 1 + rank) * m + counts[6 * ranks + rank]
        if ready[code] <= now:
            return code
        wait = min(wait, ready[code] - now)
    upcoming, other, full = -1, -1, False
    if counts[rank] < gaps.num_leads[rank]:
        upcoming = gaps.leads[rank * width + counts[rank]]
        other = partner_in_gaps(gaps, upcoming)
        most = gaps.limit[rank]
        after = space.held[rank] + gaps.memory[upcoming]
        full = upcoming < stages * m and after > most + 1e-9 * (1 + most)
        if not full:
            at = ready[upcoming] if other < 0 else max(ready[upcoming], ready[other])
            wait = min(wait, max(0.0, at - now))
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
        counts[rank] += 1 if other < 0 else 2
        return upcoming
    return -1


def hand_on(gaps: Gaps, space: GapSpace, events: Any, code: int, rank: int, end: float) -> None:
    """Publish the output of a pass to the passes that read it, and wake their ranks."""
    m, stages, ranks = gaps.num_microbatches, gaps.stages, len(gaps.num_leads)
    counts, ready, width = space.counts, space.ready, len(gaps.leads) // ranks
    losses, outputs = 3 * stages * m, (3 * stages + 1) * m
    row, j, arrival = code // m, code % m, end + gaps.latency[code]
    if row < stages - 1:
        ready[code + m] = arrival
        heappush(events, (arrival, gaps.rank[row + 1]))
    elif row == stages - 1 and gaps.vocabulary_parallel:
        for holder in range(ranks):
            if gaps.holders[holder]:
                at = end if holder == gaps.end else arrival
                ready[outputs + holder * m + j] = at
                heappush(events, (at, holder))
    elif stages <= row < 2 * stages:
        weight = gaps.weight[code - stages * m] if gaps.split else -1
        if weight >= 0:
            space.pending[rank * width + counts[2 * ranks + rank]] = weight
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
