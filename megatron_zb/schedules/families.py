"""The named schedules: a function from a request to a schedule for each.

1F1B, the zero-bubble schedules and V-Min, V-Half and V-ZB come from building blocks, repeated
(arXiv 2405.15362, section 3).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from operator import truediv

from megatron_zb.errors import UsageError
from megatron_zb.schedules import placement
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement, looped, v_shape
from megatron_zb.schedules.request import Limit, Request, keeps
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.place_w import (
    fuse_all,
    least_memory,
    place_weight_gradients,
    split_all,
    squeezed_if_it_fits,
)
from megatron_zb.schedules.search.placement_search import PlacementSearch
from megatron_zb.schedules.simulator import peak_held_chunks, simulate
from megatron_zb.schedules.stage_costs import communicates

# --- building blocks


@dataclass(frozen=True)
class BuildingBlock:
    """The forward and backward passes of a few microbatches on all stages, in unit passes.

    ``forward[s]`` and ``backward[s]`` are the starts of F and B of stage s for the first of them.
    ``later[i]`` is by how many units F, and B, of microbatch i come later than those. The block
    repeats every ``interval`` units and must not collide with itself modulo the interval.
    """

    placement: Placement
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    interval: int
    later: tuple[tuple[int, int], ...] = ((0, 0),)

    def repeat(self, num_microbatches: int) -> list[list[Pass]]:
        """Return each rank's F and B passes in the order of the repeated block."""
        timed: list[list[tuple[int, Pass]]] = [[] for _ in range(self.placement.pipeline_size)]
        for stage, rank in enumerate(self.placement.rank_of):
            for microbatch in range(num_microbatches):
                for kind in (PassKind.F, PassKind.B):
                    p = Pass(kind, stage, microbatch)
                    timed[rank].append((self.start(p), p))
        return [[p for _, p in sorted(passes)] for passes in timed]

    def repeat_with_w(self, num_microbatches: int) -> list[list[Pass]]:
        """Return the order of the repeated block with W, in units that F and B leave free.

        The W of a stage runs in the first one after its B, or right behind B if none is free.
        """
        ranks = []
        for rank, passes in enumerate(self.repeat(num_microbatches)):
            late = dict(self._weights(rank))
            timed: list[tuple[float, Pass]] = [(self.start(p), p) for p in passes]
            for start, p in timed[:]:
                if p.kind is PassKind.B:
                    timed.append((start + late[p.stage], p._replace(kind=PassKind.W)))
            ranks.append([p for _, p in sorted(timed)])
        return ranks

    def start(self, p: Pass) -> int:
        """Return the unit in which an F or B starts."""
        block, index = divmod(p.microbatch, len(self.later))
        is_forward = p.kind is PassKind.F
        first = self.forward if is_forward else self.backward
        return first[p.stage] + block * self.interval + self.later[index][0 if is_forward else 1]

    def _weights(self, rank: int) -> Iterator[tuple[int, float]]:
        """Yield the stages of a rank, each with the units from the start of its B to that of W."""
        stages = [s for s, of in enumerate(self.placement.rank_of) if of == rank]
        taken = {at[s] % self.interval for s in stages for at in (self.forward, self.backward)}
        for stage in sorted(stages, key=self.backward.__getitem__):
            units = range(1, self.interval)
            free = (u for u in units if (self.backward[stage] + u) % self.interval not in taken)
            late = next(free, None)
            if late is not None:
                taken.add((self.backward[stage] + late) % self.interval)
            yield stage, 0.5 if late is None else float(late)


# --- GPipe (arXiv 1811.06965) and 1F1B (PipeDream-Flush, arXiv 2006.09503): one chunk, BW alone


def one_f_one_b_block(pipeline_size: int) -> BuildingBlock:
    """Build 1F1B's block: F down the ranks, B straight back up; one of each every two units."""
    p = pipeline_size
    return BuildingBlock(
        looped(p),
        forward=tuple(range(p)),
        backward=tuple(2 * p - 1 - i for i in range(p)),
        interval=2,
    )


def one_f_one_b(request: Request) -> Schedule:
    """Build 1F1B: rank i holds at most p-i microbatches, whatever the costs."""
    block = one_f_one_b_block(request.pipeline_size)
    ranks = fuse_all(block.repeat(request.num_microbatches))
    schedule = request.ordered("1f1b", block.placement, ranks)
    return _or_searched(schedule, ranks, request, request.pipeline_size)


def _or_searched(
    schedule: Schedule, order: Sequence[Sequence[Pass]], request: Request, peak: float
) -> Schedule:
    """Return a fixed order, or where an update holds passes of it back, what a search finds."""
    if request.keeps_order(order):
        return schedule
    known = [] if schedule.blocked() else [schedule]
    return PlacementSearch(
        schedule.name, schedule.placement, request, request.peak(peak), split=False, known=known
    ).run()


def gpipe(request: Request) -> Schedule:
    """Build GPipe: all forwards, then all backwards; every rank holds every microbatch."""
    m = request.num_microbatches
    ranks = tuple(
        tuple(Pass(kind, stage, i) for kind in (PassKind.F, PassKind.BW) for i in range(m))
        for stage in range(request.pipeline_size)
    )
    return request.ordered("gpipe", looped(request.pipeline_size), ranks)


# --- interleaved 1F1B (Narayanan et al., arXiv 2104.04473): several chunks per rank, looped
# With a split backward, half the warm-up is enough: a gradient moves on after a B, not after a
# whole backward, as in ZB-H1 (Zero Bubble, arXiv 2401.10241).


INTERLEAVED_CHUNKS = 2


def interleaved(request: Request) -> Schedule:
    """Build interleaved 1F1B, only with BW.

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
    chunks = INTERLEAVED_CHUNKS if request.chunks is None else request.chunks
    n = request.rules.units_at_once  # groups fill the pipeline, and have whole microbatches
    group = n * -(-p // n) if request.group_size is None else request.group_size
    if chunks < 2:
        raise UsageError(f"interleaved with {chunks} chunk is 1f1b: give 2 or more chunks")
    if group < 1:
        raise UsageError(f"interleaved: a group of {group} microbatches is empty: give 1 or more")
    plain = _interleaved(p, m, chunks, group)
    ranks, peak = plain.ranks, peak_held_chunks(plain.ranks[0]) / chunks
    plain = request.ordered("interleaved", plain.placement, ranks)
    plain = _or_searched(plain, ranks, request, peak)
    if not communicates(request.costs.for_placement(plain.placement)):
        return plain
    limits = request.limit.per_rank(request.costs)
    paired = overlapped(p, m, chunks, group)
    both = [(schedule, simulate(schedule, request.costs)) for schedule in (plain, paired)]
    fitting = [it for it in both if limits is None or keeps(it[1].peak_memory, limits)]
    return min(fitting or both[:1], key=lambda it: request.seconds(it[1]))[0]


def interleaved_block(pipeline_size: int, chunks: int, microbatches: int = 1) -> BuildingBlock:
    """Build a block of F and BW on a loop, which holds little and repeats with no idle time.

    1. F of each stage starts one unit after that of the stage before, BW two units after that of
       the stage behind. The other distances, between chunks and between microbatches, are multiples
       of three. So all F of a rank begin at multiples of three behind one another, all BW one unit
       behind that, and F and BW take turns.
    2. A microbatch may have to wait from chunk to chunk, and so may the next one at the start,
       until no two F of a rank, nor two of its BW, meet as the block repeats. Of all such
       distances the block has those with which the last BW ends first.

    With several microbatches the block is longer, and each of them waits less.
    """
    p, size = pipeline_size, microbatches * chunks
    down, up = (list(_distances(p * units, chunks, microbatches)) for units in (1, 2))

    def end(ways: tuple[tuple[int, int], tuple[int, int]]) -> int:
        (chunk_down, next_down), (chunk_up, next_up) = ways
        return (chunk_down + chunk_up) * (chunks - 1) + (microbatches - 1) * max(next_down, next_up)

    (chunk_down, next_down), (chunk_up, next_up) = min(product(down, up), key=end)
    each = [divmod(stage, p) for stage in range(p * chunks)]
    forward = [3 * chunk * chunk_down + rank for chunk, rank in each]
    turn = forward[-1] + 1 + 3 * (microbatches - 1) * max(next_down - next_up, 0)
    behind = [(chunks - 1 - chunk, p - 1 - rank) for chunk, rank in each]
    return BuildingBlock(
        looped(p, chunks),
        tuple(forward),
        tuple(turn + 3 * chunk * chunk_up + 2 * rank for chunk, rank in behind),
        3 * size,
        tuple((3 * i * next_down, 3 * i * next_up) for i in range(microbatches)),
    )


def _distances(least: int, chunks: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """Yield distances in threes at which passes of a block of a loop do not meet.

    Args:
        least: units from a chunk to the next one.

    Yields:
        The distances between two chunks and between two microbatches.
    """
    size, threes = chunks * microbatches, -(-least // 3)
    most = (size - 1) // max(microbatches - 1, 1)  # the next block begins behind this one
    for chunk, later in product(range(threes, threes + size), range(1, most + 1)):
        taken = {(c * chunk + i * later) % size for c in range(chunks) for i in range(microbatches)}
        if len(taken) == size:
            yield chunk, later


def overlapped(p: int, m: int, chunks: int, group: int | None = None) -> Schedule:
    """Return Megatron's order with overlap: one more forward of warm-up, and pairs behind it."""
    return _interleaved(p, m, chunks, p if group is None else group, ahead=1)


def _interleaved(p: int, m: int, chunks: int, group: int, ahead: int = 0) -> Schedule:
    """Build the order with the shortest warm-up at which no rank waits for ever.

    That is the textbook's where groups are at least as large as the pipeline. With forwards
    ``ahead``, the warm-up is longer by these, and every F behind it is paired with its BW.
    """
    groups = _groups(p, m, group)
    sequence = _sequence(groups, chunks)
    longest = max(map(len, groups))
    for extra in range(ahead, len(sequence) + 1):
        warm_up = (chunks - 1) * longest + extra
        ranks = tuple(_interleaved_rank(rank, p, chunks, warm_up, sequence) for rank in range(p))
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
    for slope in (1, 2):
        ranks = tuple(
            _split_rank(rank, p, chunks, loop + slope * (p - 1 - rank), slope * rank, sequence)
            for rank in range(p)
        )
        schedule = Schedule("interleaved", looped(p, chunks), m, ranks)
        if schedule.blocked() is None:
            found.append(schedule)
    return found


def split_loops(request: Request, chunks: int) -> list[Schedule]:
    """Return interleaved orders with a split backward, whatever they hold; of slices, what fits."""
    p, m = request.pipeline_size, request.num_microbatches
    orders = split_interleaved(p, m, chunks)
    if request.rules.units_at_once == 1:
        found = [request.completed(order.name, order.placement, order.ranks) for order in orders]
        return [order for order in found if order.blocked() is None]
    return [each for order in orders for each in in_slices(order, request, m)]


def in_slices(order: Schedule, request: Request, peak: float) -> list[Schedule]:
    """Return an order of microbatches as one of slices, if it fits: W fills the waits.

    Args:
        order: of F, B and W, or BW, whose microbatches count turns.
        request: for slices.
        peak: units that a rank holds at most.
    """
    kinds = {PassKind.F: PassKind.F, PassKind.B: PassKind.B, PassKind.BW: PassKind.B}
    turns = [
        [p._replace(kind=kinds[p.kind]) for p in rank if p.kind in kinds] for rank in order.ranks
    ]
    ranks = request.rules.in_units(order.placement, turns)
    return squeezed_if_it_fits(order.name, order.placement, ranks, request, peak)


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
    """Split m microbatches into groups; a last one too small to fill the pipeline is merged."""
    starts = list(range(0, m, group))
    if len(starts) > 1 and m - starts[-1] < min(p, group):
        starts.pop()
    return [range(a, b) for a, b in zip(starts, [*starts[1:], m], strict=True)]


def _interleaved_rank(
    rank: int, p: int, chunks: int, warm_up: int, sequence: list[tuple[int, int]]
) -> tuple[Pass, ...]:
    forwards, backwards = _both(rank, p, chunks, sequence, PassKind.BW)
    first = min(len(forwards), 2 * (p - rank - 1) + warm_up)
    passes = forwards[:first]
    for forward, backward in zip(forwards[first:], backwards, strict=False):
        passes += [forward, backward]
    return tuple(passes + backwards[len(forwards) - first :])


@lru_cache
def interleaved_peak(p: int, m: int) -> float:
    """Return the peak of the first rank in microbatches, with the default chunks and groups."""
    schedule = _interleaved(p, m, INTERLEAVED_CHUNKS, p)
    return peak_held_chunks(schedule.ranks[0]) / INTERLEAVED_CHUNKS


# --- zero-bubble schedules with one chunk per rank (arXiv 2401.10241)


def zb_h1(request: Request) -> Schedule:
    """Build ZB-H1: 1F1B's order of F and B, W where ranks would wait, and 1F1B's peak memory."""
    p = request.pipeline_size
    return _filled("zb-h1", looped(p), _h1_order(request), request, p)


def zb_h2(request: Request) -> Schedule:
    """Build ZB-H2: warm-up forwards fill the wait for the first B, at up to 2p-1 microbatches."""
    p = request.pipeline_size
    return _filled("zb-h2", looped(p), _h2_order(request), request, 2 * p - 1)


def _filled(
    name: str, placement: Placement, order: list[list[Pass]], request: Request, peak: float
) -> Schedule:
    """Return an order of F and B with W where ranks would wait, within a peak in microbatches.

    With slices, a joined W holds more, and unequal ones hold more than most.
    """
    ranks, held = request.rules.in_units(placement, order), request.peak(peak)
    at_once = request.rules.units_at_once
    if at_once > 1:
        held += (at_once - 1) * request.rules.joins_weight
        free = replace(request, limit=Limit())
        least = least_memory(ranks, request.costs.for_placement(placement))
        held = max(held, *map(truediv, least, free.limits(placement, 1.0)))
    if not request.keeps_order(fuse_all(ranks)):
        return PlacementSearch(name, placement, request, request.peak(peak)).run()
    return place_weight_gradients(name, placement, ranks, request, held)


def zb_1p(request: Request) -> Schedule:
    """Build the fastest order found within p microbatches (the paper's automatic schedule)."""
    return _automatic("zb-1p", request, request.pipeline_size)


def zb_2p(request: Request) -> Schedule:
    """Build the fastest order found within 2p microbatches (the paper's automatic schedule)."""
    return _automatic("zb-2p", request, 2 * request.pipeline_size)


def _automatic(name: str, request: Request, peak: int) -> Schedule:
    placement, held = looped(request.pipeline_size), request.peak(peak)
    orders = (_h1_order(request), _h2_order(request))
    known = [
        schedule
        for order in orders
        for schedule in squeezed_if_it_fits(
            name, placement, request.rules.in_units(placement, order), request, held
        )
    ]
    return PlacementSearch(name, placement, request, held, known=known).run()


def _h1_order(request: Request) -> list[list[Pass]]:
    return one_f_one_b_block(request.pipeline_size).repeat(request.num_microbatches)


def _h2_order(request: Request) -> list[list[Pass]]:
    p, m = request.pipeline_size, request.num_microbatches
    return [_warmed_up(rank, m, min(m, 2 * (p - 1 - rank) + 1)) for rank in range(p)]


def _warmed_up(stage: int, m: int, warm_up: int) -> list[Pass]:
    passes = [Pass(PassKind.F, stage, i) for i in range(warm_up)]
    for i in range(m):
        passes.append(Pass(PassKind.B, stage, i))
        if warm_up + i < m:
            passes.append(Pass(PassKind.F, stage, warm_up + i))
    return passes


# --- several chunks per rank in a zig-zag (Hanayo, arXiv 2308.15762), with split backward


WAVE_CHUNKS = 4


def wave(request: Request) -> Schedule:
    """Build the fastest order found within 1F1B's memory.

    Raises:
        UsageError: an odd number of chunks, which would end the wave on the wrong rank.
    """
    chunks = WAVE_CHUNKS if request.chunks is None else request.chunks
    if chunks < 2 or chunks % 2:
        raise UsageError(f"wave with {chunks} chunks: give an even number, such as 2 or 4")
    p = request.pipeline_size
    return PlacementSearch("wave", placement.wave(p, chunks), request, request.peak(p)).run()


# --- two chunks per rank in a V
# V-Min, V-Half and V-ZB come from building blocks (arXiv 2405.15362, section 4). A building block
# is told by four offsets per rank i, in unit passes: F of the descending chunk (stage i), F of the
# ascending chunk (stage 2p-1-i), and their two backwards in the order they run, ascending chunk
# first. The interval is six units: the work of one microbatch on one rank.


_INTERVAL = 6

Offsets = tuple[int, int, int, int]


def v_min_offsets(p: int, i: int) -> Offsets:
    """Return V-Min's offsets: one unit per rank in both chunks, a third of 1F1B's activations."""
    shift = 2 if p % 3 == 0 else 0
    return i, 2 * p - i - 1, 2 * p + shift + i, 4 * p + shift - i - 1


def v_half_offsets(p: int, i: int) -> Offsets:
    """Return V-Half's offsets: two units down, one up, half of 1F1B's activations."""
    shift = 3 if p % 2 == 0 else 0
    return 2 * i, 3 * p - i - 2, 3 * p + shift + 2 * i - 1, 6 * p + shift - i - 2


def v_zb_offsets(p: int, i: int) -> Offsets:
    """Return V-ZB's offsets: four units down, two up.

    They give 1F1B's activations and no bubble in the steady state. 4i and -2i are equal modulo 6,
    so the four passes keep their distance on every rank.
    """
    return 4 * i, 6 * p - 5 - 2 * i, 6 * p - 4 + 4 * i, 12 * p - 9 - 2 * i


def v_block(pipeline_size: int, offsets: Callable[[int, int], Offsets]) -> BuildingBlock:
    """Build the block of all 2p stages from the offsets of each rank."""
    per_rank = [offsets(pipeline_size, i) for i in range(pipeline_size)]
    return BuildingBlock(
        v_shape(pipeline_size),
        forward=tuple(o[0] for o in per_rank) + tuple(o[1] for o in reversed(per_rank)),
        backward=tuple(o[3] for o in per_rank) + tuple(o[2] for o in reversed(per_rank)),
        interval=_INTERVAL,
    )


def of_v_block(
    name: str, offsets: Callable[[int, int], Offsets], request: Request, peak: float
) -> list[Schedule]:
    """Return a block's own order under these costs, if it keeps the peak and the limit."""
    block = v_block(request.pipeline_size, offsets)
    order = request.rules.in_units(block.placement, block.repeat(request.num_microbatches))
    return squeezed_if_it_fits(name, block.placement, order, request, peak)


def _v(
    name: str, offsets: Callable[[int, int], Offsets], request: Request, peak: float
) -> Schedule:
    """Build the best that a search finds from the block's own order under these costs."""
    peak = request.peak(peak)
    known = of_v_block(name, offsets, request, peak)
    v = v_shape(request.pipeline_size)
    return PlacementSearch(name, v, request, peak, known=known).run()


def repeating_orders(name: str, request: Request) -> list[Schedule]:
    """Return orders that repeat in the middle of a long step, in the memory of a schedule.

    They are those of its building blocks with their W, its own first. There they are as fast as
    their ranks work, while at the ends of the step W fills nothing. Schedules that only a search
    finds have none.
    """
    p, m = request.pipeline_size, request.num_microbatches
    if name == "interleaved":
        own = interleaved(request)
        if request.group_size is not None:
            return [own]
        chunks = request.chunks or INTERLEAVED_CHUNKS
        blocks = [interleaved_block(p, chunks, microbatches) for microbatches in (1, 2)]
        return [own, *(Schedule(name, it.placement, m, fuse_all(it.repeat(m))) for it in blocks)]
    offsets = (v_zb_offsets, v_half_offsets, v_min_offsets)
    of_v = {"v-min": offsets[2:], "v-half": offsets[1:], "v-zb": offsets, "auto": offsets}
    blocks = [v_block(p, each) for each in of_v.get(name, ())]
    if name in ("1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "auto"):
        blocks.append(one_f_one_b_block(p))
    found: list[Schedule] = []
    for block in blocks:
        whole = Schedule(name, block.placement, m, fuse_all(block.repeat(m)))
        if name == "1f1b":
            found.append(whole)
            continue
        filled = tuple(map(tuple, block.repeat_with_w(m)))
        found += [replace(whole, ranks=filled), split_all(whole)]
    return found


def squeezed_blocks(name: str, request: Request, peak: float) -> list[Schedule]:
    """Return every block of this file that keeps a peak and the limit, in its own order."""
    return [
        schedule
        for offsets in (v_min_offsets, v_half_offsets, v_zb_offsets)
        for schedule in of_v_block(name, offsets, request, peak)
    ]


def v_min(request: Request) -> Schedule:
    """Build V-Min: the least memory the V can have at the full interval."""
    return _v("v-min", v_min_offsets, request, v_min_peak(request.pipeline_size))


def v_half(request: Request) -> Schedule:
    """Build V-Half: half the memory of 1F1B with half its bubble."""
    return _v("v-half", v_half_offsets, request, v_half_peak(request.pipeline_size))


def v_zb(request: Request) -> Schedule:
    """Build V-ZB: the memory of 1F1B with almost no bubble."""
    return _v("v-zb", v_zb_offsets, request, request.pipeline_size)


def v_min_peak(p: int) -> float:
    """Return the peak in microbatches of a whole rank: p/3 and a little."""
    return (p + 4) // 3


def v_half_peak(p: int) -> float:
    """Return the peak in microbatches of a whole rank: p/2 and a little."""
    return (p + 2) // 2


def one_f_one_b_v(request: Request) -> Schedule:
    """Build 1F1B-V: BW alone on a V, three quarters of 1F1B's memory without a split backward."""
    p = request.pipeline_size
    peak = request.peak(one_f_one_b_v_peak(p))
    return PlacementSearch("1f1b-v", v_shape(p), request, peak, split=False).run()


def one_f_one_b_v_peak(p: int) -> float:
    """Return the peak of 1F1B-V, in microbatches of a whole rank."""
    return (3 * p + 3) // 4


def dualpipe_v(request: Request) -> Schedule:
    """Build DualPipe-V: DualPipe's pairs of F and B on a V, paired where costs have communication.

    Source: DeepSeek-V3, arXiv 2412.19437, and its V-shaped half.
    """
    p, m = request.pipeline_size, request.num_microbatches
    known = [dualpipe_v_order(p, m)] if m >= 2 * p else []
    peak = request.peak(dualpipe_v_peak(p))
    if request.rules.units_at_once > 1:
        known = [each for order in known for each in in_slices(order, request, peak)]
    elif not communicates(request.costs.for_placement(v_shape(p))):
        known = [request.completed(it.name, it.placement, it.ranks) for it in known]
        known = [order for order in known if order.blocked() is None]
    return PlacementSearch("dualpipe-v", v_shape(p), request, peak, known=known).run()


def dualpipe_v_peak(p: int) -> float:
    """Return the peak of DualPipe-V, in microbatches of a whole rank."""
    return p + 0.5


def dualpipe_v_order(p: int, m: int) -> Schedule:
    """Return the published order with its pairs, for 2p microbatches or more.

    The last rank's first backward comes earlier if nothing is paired with it.
    """
    lines = []
    for r in range(p):
        line = _WrittenOrder(r, 2 * p - 1 - r)
        line.run("F0", 2 * (p - r - 1))
        line.run("F0 F1", r + 1)
        line.run("B1 W1 F1", p - r - 1)
        alone = 1 if r == p - 1 else 0
        line.run("F0 BW1 F1+BW0", alone)
        line.run("F0+BW1 F1+BW0", m - 2 * p + r + 1 - alone)
        line.run("BW1 F1+BW0", p - r - 1)
        for i in range(2 * (r + 1)):  # from the middle on, W waits for the bubble
            line.run(f"{'BW' if i <= r else 'B'}{1 - i % 2}", 1)
        line.run("W B0", p - r - 1)
        line.drain()
        lines.append(line)
    ranks = tuple(tuple(line.passes) for line in lines)
    pairs = frozenset().union(*(line.pairs for line in lines))
    return Schedule("dualpipe-v", v_shape(p), m, ranks, pairs=pairs)


class _WrittenOrder:
    """The passes of one rank, written as kinds and chunks; microbatches count up by themselves.

    A plus makes a pair of an F and a backward.
    """

    def __init__(self, *stages: int) -> None:
        self._stages = stages
        self._next: Counter[tuple[str, int]] = Counter()
        self._pending: deque[Pass] = deque()
        self.passes: list[Pass] = []
        self.pairs: set[Pass] = set()

    def run(self, steps: str, times: int) -> None:
        for _ in range(times):
            for step in steps.split():
                if step.startswith("W"):
                    self.passes.append(self._pending.popleft())
                    continue
                for part in step.split("+"):
                    self._pass(part[:-1], self._stages[int(part[-1])])
                if "+" in step:
                    self.pairs.add(self.passes[-2])

    def _pass(self, kind: str, stage: int) -> None:
        count = ("F" if kind == "F" else "B", stage)
        microbatch = self._next[count]
        self._next[count] += 1
        self.passes.append(Pass(PassKind(kind), stage, microbatch))
        if kind == "B":
            self._pending.append(Pass(PassKind.W, stage, microbatch))

    def drain(self) -> None:
        self.passes += self._pending
