"""Schedules with two chunks per rank in a V.

V-Min, V-Half and V-ZB come from building blocks (arXiv 2405.15362, section 4). A building block is
told by four offsets per rank i, in unit passes: F of the descending chunk (stage i), F of the
ascending chunk (stage 2p-1-i), and their two backwards in the order they run, ascending chunk
first. The interval is six units: the work of one microbatch on one rank.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from megatron_zb.schedules.families.building_block import BuildingBlock
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import v_shape
from megatron_zb.schedules.request import Request
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.place_w import squeezed_if_it_fits
from megatron_zb.schedules.search.placement_search import search_placement

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


def building_block(pipeline_size: int, offsets: Callable[[int, int], Offsets]) -> BuildingBlock:
    """Build the block of all 2p stages from the offsets of each rank."""
    per_rank = [offsets(pipeline_size, i) for i in range(pipeline_size)]
    return BuildingBlock(
        v_shape(pipeline_size),
        forward=tuple(o[0] for o in per_rank) + tuple(o[1] for o in reversed(per_rank)),
        backward=tuple(o[3] for o in per_rank) + tuple(o[2] for o in reversed(per_rank)),
        interval=_INTERVAL,
    )


def of_block(
    name: str, offsets: Callable[[int, int], Offsets], request: Request, peak: float
) -> list[Schedule]:
    """Return a block's own order under these costs, if it keeps the peak and the limit."""
    block = building_block(request.pipeline_size, offsets)
    order = block.repeat(request.num_microbatches)
    return squeezed_if_it_fits(name, block.placement, order, request, peak)


def _v(
    name: str, offsets: Callable[[int, int], Offsets], request: Request, peak: float
) -> Schedule:
    """Build the best that a search finds from the block's own order under these costs."""
    known = of_block(name, offsets, request, peak)
    return search_placement(name, v_shape(request.pipeline_size), request, peak, known=known)


def squeezed_blocks(name: str, request: Request) -> list[Schedule]:
    """Return every block of this file that keeps the request's limit, in its own order."""
    return [
        schedule
        for offsets in (v_min_offsets, v_half_offsets, v_zb_offsets)
        for schedule in of_block(name, offsets, request, 2 * request.pipeline_size)
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
    return search_placement("1f1b-v", v_shape(p), request, one_f_one_b_v_peak(p), split=False)


def one_f_one_b_v_peak(p: int) -> float:
    """Return the peak of 1F1B-V, in microbatches of a whole rank."""
    return (3 * p + 3) // 4


def dualpipe_v(request: Request) -> Schedule:
    """Build DualPipe-V: DualPipe's pairs of F and B on a V, joined where costs have communication.

    Source: DeepSeek-V3, arXiv 2412.19437, and its V-shaped half.
    """
    p, m = request.pipeline_size, request.num_microbatches
    known = [dualpipe_v_order(p, m)] if m >= 2 * p else []
    return search_placement("dualpipe-v", v_shape(p), request, dualpipe_v_peak(p), known=known)


def dualpipe_v_peak(p: int) -> float:
    """Return the peak of DualPipe-V, in microbatches of a whole rank."""
    return p + 0.5


def dualpipe_v_order(p: int, m: int) -> Schedule:
    """Return the published order with its pairs, for 2p microbatches or more.

    The last rank's first backward comes earlier if nothing is joined with it.
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

    A plus joins an F and a backward to a pair.
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
