"""Layers of each stage: spread evenly, balanced, or given by a text.

The text of a hybrid model's layers has a letter for each, ``|`` between stages, and ``/`` before
the layers of each depth of multi-token prediction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice, pairwise

from megatron_zb.errors import UsageError
from megatron_zb.schedules.placement import Placement

FLAG = "--pipeline-model-parallel-layout"

Layout = tuple[int, ...]
"""Decoder layers of each stage, in model order."""

Letters = tuple[str, ...]
"""All layers of each stage, in model order: E embedding, t layer, m multi-token prediction, L."""


@dataclass(frozen=True)
class Layers:
    """Layers to be placed on the stages of a pipeline.

    ``embedding`` and ``output`` say for how many decoder layers the embedding and the output layer
    count when layers are distributed; ``first`` and ``last`` fix the layers of the first and the
    last stage. ``multi_token`` prediction layers stand before the output layer. ``kinds`` are those
    of a hybrid model's decoder layers, a letter for each, such as ``M*ME``.
    """

    decoder: int
    multi_token: int = 0
    embedding: float = 0.0
    output: float = 0.0
    first: int | None = None
    last: int | None = None
    kinds: str = ""


def spread(layers: Layers, placement: Placement) -> Layout:
    """Spread layers as evenly as they go: the layout where no other is requested.

    Where they do not divide, the ranks that hold the embedding and the output layer have less.

    Raises:
        UsageError: there are fewer layers than stages, or ``first`` and ``last`` leave a stage
            without any.
    """
    counts = _shared_out(layers, placement, least_at_ends=1)
    if min(counts) < 1 or sum(counts) != layers.decoder:
        raise UsageError(
            f"{layers.decoder} layers cannot be placed on {placement.num_stages} stages with at "
            f"least one on each{_describe_ends(layers)}: give more layers, or {_by_hand(layers)}"
        )
    return counts


def balanced(layers: Layers, placement: Placement) -> Layout:
    """Balance layers as evenly as the ends allow; an end may be alone on its stage.

    Raises:
        UsageError: there are too few layers.
    """
    counts = _shared_out(layers, placement, least_at_ends=0)
    if sum(counts) != layers.decoder:
        raise UsageError(
            f"{layers.decoder} layers cannot be balanced over {placement.num_stages} stages: give "
            f"more layers, or {_by_hand(layers)}"
        )
    return counts


def choices(layers: int, placement: Placement, embedding: float, output: float) -> list[Layout]:
    """Return the even layout, and that balanced for such ends, where there are enough layers.

    The even one comes first, if it can be had.
    """
    found = []
    ends = Layers(layers, embedding=embedding, output=output)
    for share, asked in ((spread, Layers(layers)), (balanced, ends)):
        with suppress(UsageError):
            found.append(share(asked, placement))
    return list(dict.fromkeys(found))


def weighed(
    weights: tuple[float, ...], placement: Placement, embedding: float, output: float
) -> list[Layout]:
    """Return layouts that balance layers of unequal work, where there are enough layers.

    With one stage on each rank, the busiest rank of one of them has as little to do as can be.

    Args:
        weights: the work of each decoder layer.
        placement: the ranks of the stages.
        embedding: work of the embedding, in the same unit.
        output: work of the output layer.
    """
    begun = choices(len(weights), placement, embedding, output)
    if len(weights) >= placement.num_stages:
        begun.append(_cut(weights, placement.num_stages, embedding, output))
    found = [_evened(counts, weights, placement, embedding, output) for counts in begun]
    return list(dict.fromkeys([*begun, *found]))


@lru_cache(maxsize=4096)
def _evened(
    counts: Layout,
    weights: tuple[float, ...],
    placement: Placement,
    embedding: float,
    output: float,
) -> Layout:
    """Move borders until no move evens out the ranks; no stage is emptied.

    1. A single border moves by up to three layers.
    2. Where none gains, several borders in a row move by one layer: a layer's work passes from one
       rank to another through those between them, which are left with as much as before.
    """
    before = [0.0, *accumulate(weights)]
    borders = [0, *accumulate(counts)]
    of = placement.rank_of
    work = [0.0] * placement.pipeline_size
    for rank, (first, after) in zip(of, pairwise(borders), strict=True):
        work[rank] += before[after] - before[first]
    work[of[0]] += embedding
    work[of[-1]] += output

    def gain(border: int, step: int) -> float:
        """Return by how much the sum of squares falls if a number of layers go one stage down."""
        here, there = borders[border], borders[border] + step
        one, other = of[border - 1], of[border]
        low, high = borders[border - 1], borders[border + 1]
        if one == other or (step > 0 and there >= high) or (step < 0 and there <= low):
            return 0.0
        moved = before[there] - before[here]
        return 2 * moved * (work[other] - work[one] - moved)

    def gain_of_row(first: int, last: int, step: int) -> float:
        """Return the same for a row of borders, which all go one layer up or down."""
        if borders[first - 1] >= borders[first] + step or borders[last] + step >= borders[last + 1]:
            return 0.0
        changed = dict.fromkeys(of[first - 1 : last + 1], 0.0)
        for border in range(first, last + 1):
            moved = before[borders[border] + step] - before[borders[border]]
            changed[of[border - 1]] += moved
            changed[of[border]] -= moved
        return -sum((2 * work[rank] + more) * more for rank, more in changed.items())

    def move(border: int, step: int) -> None:
        moved = before[borders[border] + step] - before[borders[border]]
        work[of[border - 1]] += moved
        work[of[border]] -= moved
        borders[border] += step

    singles = [(b, step) for b in range(1, len(of)) for step in (-3, -2, -1, 1, 2, 3)]
    rows = [
        (first, last, step)
        for first in range(1, len(of))
        for last in range(first + 1, min(first + placement.pipeline_size, len(of)))
        for step in (-1, 1)
    ]
    while singles:
        border, step = max(singles, key=lambda it: gain(*it))
        if gain(border, step) > _EQUAL:
            move(border, step)
            continue
        first, last, step = max(rows, key=lambda it: gain_of_row(*it), default=(1, 1, 0))
        if first == last or gain_of_row(first, last, step) <= _EQUAL:
            break
        for border in range(first, last + 1):
            move(border, step)
    return tuple(after - first for first, after in pairwise(borders))


_EQUAL = 1e-9  # of a layer's work: less is rounding


def _cut(weights: tuple[float, ...], stages: int, embedding: float, output: float) -> Layout:
    """Cut layers so that the fullest stage has as little to do as can be, searched by halves."""

    def filled(most: float) -> Layout | None:
        """Fill one stage after the other up to ``most``; None if that is too little."""
        borders, held = [0], embedding
        for layer, weight in enumerate(weights):
            others = stages - len(borders)
            is_full = held + weight > most and layer > borders[-1]
            if others and (is_full or len(weights) - layer == others):
                borders.append(layer)
                held = 0.0
            held += weight
            if held + (output if len(borders) == stages else 0.0) > most:
                return None
        return tuple(after - first for first, after in pairwise([*borders, len(weights)]))

    low, high = 0.0, embedding + sum(weights) + output
    while high - low > _EQUAL * high:
        middle = (low + high) / 2
        low, high = (low, middle) if filled(middle) else (middle, high)
    found = filled(high * (1 + _EQUAL))
    assert found is not None  # all layers are on the last stage at most
    return found


@lru_cache(maxsize=4096)
def _shared_out(layers: Layers, placement: Placement, least_at_ends: int) -> Layout:
    """Add one layer at a time to the rank with the least to do, on its smallest stage.

    Every stage has one from the beginning, but for the ends, which have ``least_at_ends``. Ranks
    and stages with an end come last among equals: the simulator says that steps are shorter so.
    """
    last = placement.num_stages - 1
    fixed = {s: n for s, n in ((0, layers.first), (last, layers.last)) if n is not None}
    counts = [fixed.get(s, least_at_ends if s in (0, last) else 1) for s in range(last + 1)]
    weight = [float(count) for count in counts]
    weight[0] += layers.embedding
    weight[last] += layers.output
    load = [sum(weight[s] for s in held) for held in placement.stages_of]
    ends = {placement.rank_of[0], placement.rank_of[last]}
    open_on = [[s for s in held if s not in fixed] for held in placement.stages_of]
    ranks = [rank for rank, held in enumerate(open_on) if held]
    for _ in range(layers.decoder - sum(counts) if ranks else 0):
        rank = min(ranks, key=lambda r: (load[r], r in ends, r))
        stage = min(open_on[rank], key=lambda s: (weight[s], s in (0, last), s))
        counts[stage] += 1
        weight[stage] += 1
        load[rank] += 1
    return tuple(counts)


def _by_hand(layers: Layers) -> str:
    if layers.kinds:
        return "write '|' between the stages in the pattern"
    return f"say the layers of each stage with {FLAG}"


def _describe_ends(layers: Layers) -> str:
    ends = (("first", layers.first), ("last", layers.last))
    said = [f"{count} on the {name}" for name, count in ends if count is not None]
    return f" and {' and '.join(said)}" if said else ""


def is_megatrons(letters: Letters, layers: Layers, placement: Placement) -> bool:
    """Return whether Megatron by itself has these layers on these ranks.

    It has one chunk on a rank, and as many layers on one as on another, where the ends of the model
    count as ``layers`` says; if those of the first or last rank are fixed, the others are alike.
    """
    load = [float(stage.count("t")) for stage in letters]
    load[0] += layers.embedding
    load[-1] += layers.output
    fixed = {0: layers.first, len(load) - 1: layers.last}
    alike = {n for stage, n in enumerate(load) if fixed.get(stage) is None}
    return placement.chunks == 1 and len(alike) <= 1


def lettered(layout: Layout, multi_token: int = 0) -> Letters:
    """Return all layers of stages as letters, from the number of decoder layers of each."""
    first, *others = ["t" * count for count in layout]
    *before, last = ["E" + first, *others]
    return (*before, last + "m" * multi_token + "L")


def text(letters: Letters) -> str:
    """Format a layout for ``--pipeline-model-parallel-layout``, such as ``Et|tt|tt|tL``."""
    return "|".join(letters)


def read(layout: str, layers: Layers, num_stages: int) -> Letters:
    """Read a layout such as ``Ett|tt|tt|ttL`` or ``Et*2|(tt|)*2,ttL``, as Megatron does.

    That of a hybrid model is its pattern, such as ``M*|ME``.

    Raises:
        UsageError: a letter is unknown, or stages, layers, embedding or loss do not add up.
    """
    if layers.kinds:
        return _of_segments(layout, layers, num_stages)
    letters = tuple(unrolled(layout).split("|"))
    flat = "".join(letters)
    problem = None
    if set(flat) - set("EtmL"):
        problem = "use E, t, m, L and |, such as 'Ett|tt|tt|ttL'"
    elif len(letters) != num_stages:
        problem = (
            f"it names {len(letters)} stages and the schedule has {num_stages}: write {num_stages} "
            "parts between '|', in the order in which a microbatch passes them"
        )
    elif flat.count("t") != layers.decoder:
        problem = (
            f"it names {flat.count('t')} layers and the model has {layers.decoder}: write one t "
            "for each"
        )
    elif flat.count("m") != layers.multi_token:
        problem = (
            f"it names {flat.count('m')} multi-token prediction layers (m) and the model has "
            f"{layers.multi_token}: write one m for each, before L"
        )
    elif letters[-1].count("m") != layers.multi_token:
        problem = "multi-token prediction layers (m) must be on the last stage, before L"
    elif not (flat.startswith("E") and flat.endswith("L")):
        problem = "it must begin with E and end with L"
    elif flat.count("E") != 1 or flat.count("L") != 1:
        problem = "E and L must each stand in it once"
    if problem:
        raise UsageError(f"the layer layout '{layout}' ({FLAG}): {problem}")
    return letters


def _of_segments(pattern: str, layers: Layers, num_stages: int) -> Letters:
    segments = pattern.split("|")
    if len(segments) != num_stages:
        raise UsageError(
            f"hybrid layer pattern '{pattern}': it has {len(segments)} segments ('|') and the "
            f"schedule has {num_stages} stages: write as many, in the order of the model, or none"
        )
    return lettered(tuple(map(len, segments)), layers.multi_token)


_LONGEST = 1_000_000  # letters
_REPEATED = (re.compile(r"\(([^()]+)\)\*(\d{1,9})"), re.compile(r"([^*])\*(\d{1,9})"))


def unrolled(layout: str) -> str:
    """Remove commas, and write out every repeated group and letter."""
    found = layout.replace(",", "")
    for pattern in _REPEATED:
        parts = [len(one) * int(times) for one, times in pattern.findall(found)]
        if sum(parts) > _LONGEST:
            raise UsageError(
                f"the layer layout '{layout}' ({FLAG}): it has more than {_LONGEST} letters"
            )
        found = pattern.sub(lambda match: match[1] * int(match[2]), found)
    return found


# --- the text of a hybrid model's layers

SEPARATORS = "|/"
"""What stands between stages, and before the layers of multi-token prediction."""


def main_pattern(pattern: str) -> str:
    """Return the pattern without multi-token prediction, such as ``M*|ME``."""
    return pattern.split("/")[0]


def predicting_parts(pattern: str) -> list[str]:
    """Return the layers of each depth of multi-token prediction."""
    return list(filter(None, pattern.split("/")[1:]))


def pattern_kinds(pattern: str) -> str:
    """Return the kinds of all layers but those of multi-token prediction."""
    return main_pattern(pattern).replace("|", "")


def placed_pattern(pattern: str, counts: Iterable[int]) -> str:
    """Return the pattern with ``|`` between stages, from the number of layers of each."""
    layers = iter(pattern_kinds(pattern))
    written = "|".join("".join(islice(layers, count)) for count in counts)
    return written + pattern[len(main_pattern(pattern)) :]
