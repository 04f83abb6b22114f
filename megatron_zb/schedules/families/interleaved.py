"""Interleaved 1F1B (Narayanan et al., arXiv 2104.04473): several chunks per rank, looped.

With a split backward, half the warm-up is enough: a gradient moves on after a B, not after a whole
backward, as in ZB-H1 (Zero Bubble, arXiv 2401.10241).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from megatron_zb.errors import UsageError
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import looped
from megatron_zb.schedules.request import Request, keeps
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.simulator import peak_held_chunks, simulate

DEFAULT_CHUNKS = 2


def interleaved(request: Request) -> Schedule:
    """Build interleaved 1F1B, with BW alone.

    Where costs have communication, each F of the steady state runs as one with the BW behind it,
    after one more forward of warm-up, as with Megatron's ``overlap_moe_expert_parallel_comm``, if
    that is faster and fits; else the order does not depend on the costs.

    Groups of microbatches pass through all chunks in turn: ``request.group_size`` microbatches
    (default p) go through one chunk before the next chunk starts; what is left at the end joins the
    last group, or makes one if it fills the pipeline.

    Raises:
        UsageError: fewer than two chunks, or a group of less than one microbatch.
    """
    p, m = request.pipeline_size, request.num_microbatches
    chunks = DEFAULT_CHUNKS if request.chunks is None else request.chunks
    group = p if request.group_size is None else request.group_size
    if chunks < 2:
        raise UsageError(f"interleaved with {chunks} chunk is 1f1b: give 2 or more chunks")
    if group < 1:
        raise UsageError(f"interleaved: a group of {group} microbatches is empty: give 1 or more")
    plain = _interleaved(p, m, chunks, group)
    if not request.costs.for_placement(plain.placement).communicates:
        return plain
    limits = request.limit.per_rank(request.costs)
    joined = overlapped(p, m, chunks, group)
    both = [(schedule, simulate(schedule, request.costs)) for schedule in (plain, joined)]
    fitting = [it for it in both if limits is None or keeps(it[1].peak_memory, limits)]
    return min(fitting or both[:1], key=lambda it: request.seconds(it[1]))[0]


def overlapped(p: int, m: int, chunks: int, group: int | None = None) -> Schedule:
    """Return Megatron's order with overlap: one more forward of warm-up, and pairs behind it."""
    return _interleaved(p, m, chunks, p if group is None else group, ahead=1)


def _interleaved(p: int, m: int, chunks: int, group: int, ahead: int = 0) -> Schedule:
    """Build the order with the shortest warm-up at which no rank waits for ever.

    That is the textbook's where groups are at least as large as the pipeline. With forwards
    ``ahead``, the warm-up is longer by these, and every F behind it is joined with its BW.
    """
    groups = _groups(p, m, group)
    sequence = _sequence(groups, chunks)
    longest = max(map(len, groups))
    for extra in range(ahead, len(sequence) + 1):
        warm_up = (chunks - 1) * longest + extra
        ranks = tuple(_rank(rank, p, chunks, warm_up, sequence) for rank in range(p))
        schedule = Schedule("interleaved", looped(p, chunks), m, ranks)
        if ahead:
            firsts = (2 * (p - rank - 1) + warm_up for rank in range(p))
            pairs = (_joined(order[first:]) for order, first in zip(ranks, firsts, strict=True))
            schedule = replace(schedule, pairs=frozenset().union(*pairs))
        if schedule.blocked() is None:
            return schedule
    raise AssertionError("all forwards before all backwards always runs")


def _joined(passes: tuple[Pass, ...]) -> set[Pass]:
    """Return every F that stands right before a backward of another unit."""
    return {
        a
        for a, b in pairwise(passes)
        if a.kind is PassKind.F and b.kind is not PassKind.F and a[1:] != b[1:]
    }


def split_interleaved(p: int, m: int, chunks: int) -> list[Schedule]:
    """Build orders with a split backward: of p microbatches of memory on every rank, and of more.

    A rank's warm-up is shorter by one forward, or two, for each rank before it; its W stay behind
    its B by as much, so that all ranks hold equally much and those that wait the longest for their
    first B have W to fill the end with.
    """
    groups = _groups(p, m, p)
    sequence = _sequence(groups, chunks)
    loop = (chunks - 1) * max(map(len, groups))
    found = []
    for hops in (1, 2):
        ranks = tuple(
            _split_rank(rank, p, chunks, loop + hops * (p - 1 - rank), hops * rank, sequence)
            for rank in range(p)
        )
        schedule = Schedule("interleaved", looped(p, chunks), m, ranks)
        if schedule.blocked() is None:
            found.append(schedule)
    return found


def _split_rank(
    rank: int, p: int, chunks: int, warm_up: int, behind: int, sequence: list[tuple[int, int]]
) -> tuple[Pass, ...]:
    """Return the warm-up, then F, B and the W of ``behind`` microbatches before, in turn."""
    forwards, backwards = _both(rank, p, chunks, sequence, PassKind.B)
    weights = [b._replace(kind=PassKind.W) for b in backwards]
    passes = forwards[:warm_up]
    for i, backward in enumerate(backwards):
        passes += [*forwards[warm_up + i : warm_up + i + 1], backward]
        passes += weights[i - behind : i - behind + 1] if i >= behind else []
    return tuple(passes + weights[max(len(weights) - behind, 0) :])


def _sequence(groups: list[range], chunks: int) -> list[tuple[int, int]]:
    """List chunks and microbatches in the order in which a rank runs them forwards."""
    return [(chunk, mb) for mbs in groups for chunk in range(chunks) for mb in mbs]


def _both(
    rank: int, p: int, chunks: int, sequence: list[tuple[int, int]], backward: PassKind
) -> tuple[list[Pass], list[Pass]]:
    """Return a rank's forwards, and its backwards, which run through the chunks in reverse."""
    forwards = [Pass(PassKind.F, chunk * p + rank, mb) for chunk, mb in sequence]
    backwards = [Pass(backward, (chunks - 1 - chunk) * p + rank, mb) for chunk, mb in sequence]
    return forwards, backwards


def _groups(p: int, m: int, group: int) -> list[range]:
    """Split m microbatches into groups; a last one too small to fill the pipeline is joined."""
    starts = list(range(0, m, group))
    if len(starts) > 1 and m - starts[-1] < min(p, group):
        starts.pop()
    return [range(a, b) for a, b in zip(starts, [*starts[1:], m], strict=True)]


def _rank(
    rank: int, p: int, chunks: int, warm_up: int, sequence: list[tuple[int, int]]
) -> tuple[Pass, ...]:
    forwards, backwards = _both(rank, p, chunks, sequence, PassKind.BW)
    first = min(len(forwards), 2 * (p - rank - 1) + warm_up)
    passes = forwards[:first]
    for forward, backward in zip(forwards[first:], backwards, strict=False):
        passes += [forward, backward]
    return tuple(passes + backwards[len(forwards) - first :])


@lru_cache
def peak_microbatches(p: int, m: int) -> float:
    """Return the peak of the first rank in microbatches, with the default chunks and groups."""
    schedule = _interleaved(p, m, DEFAULT_CHUNKS, p)
    return peak_held_chunks(schedule.ranks[0]) / DEFAULT_CHUNKS
