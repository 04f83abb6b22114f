"""Units of an order as data for the scripts of a page, in addition to its passes as text.

Most orders need none of this: each kind of pass takes the microbatches in turn, F waits for the
stage before and B for the one behind. Of other orders a page has lists, which Python takes from the
schedule and its task graph. So the scripts know no feature that makes units differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypedDict

from megatron_zb.drawing.chart import colour_of, labels_of, text_colour_on
from megatron_zb.schedules import Pass, PassKind, Schedule

_F, _B = PassKind.F, PassKind.B


class Owners(TypedDict):
    """Trainings that share the pipeline, each with its shades.

    ``labels[i]`` is what the legend says of training i, and ``colours`` has its colour and that of
    text on it, by kind of pass. ``spans`` are the steps: the first unit, the training, and the
    words.
    """

    labels: list[str]
    colours: dict[str, list[tuple[str, str]]]
    spans: list[tuple[int, int, str]]


class OfUnits(TypedDict, total=False):
    """What is left out of an order like most.

    ``turns`` are units in the order in which a kind of pass takes them on each stage, or one list
    for all stages, where it does not take 0, 1, 2 and so on; a BW takes those of B. ``inputs`` are,
    for each pass of each rank, the passes whose outputs it waits for: numbers that count all passes
    rank by rank.
    """

    turns: dict[str, list[list[int]]]
    inputs: list[list[list[int]]]
    owners: Owners


def of_units(schedule: Schedule, kinds: Sequence[PassKind]) -> OfUnits:
    """Return what an order of passes of these kinds needs beside its text."""
    found = OfUnits()
    if turns := _turns(schedule):
        found["turns"] = turns
    inputs = _inputs(schedule)
    if inputs != [[_usual(schedule, p) for p in passes] for passes in schedule.ranks]:
        number = _numbers(schedule)
        found["inputs"] = [[[number[it] for it in of] for of in passes] for passes in inputs]
    if schedule.rules.owners:
        found["owners"] = _owners(schedule, kinds)
    return found


def _roles(schedule: Schedule, p: Pass) -> Iterator[Pass]:
    """Yield the passes whose outputs a pass makes."""
    kind = schedule.rules.kind(p.kind)
    assert kind is not None
    return (p._replace(kind=role) for role in kind.roles)


def _turns(schedule: Schedule) -> dict[str, list[list[int]]]:
    stages = range(schedule.placement.num_stages)
    units: dict[PassKind, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    passes = chain.from_iterable(schedule.ranks)
    for role in chain.from_iterable(_roles(schedule, p) for p in passes):
        units[role.kind][role.stage].append(role.microbatch)
    found: dict[str, list[list[int]]] = {}
    for kind, by_stage in units.items():
        if any(taken != list(range(len(taken))) for taken in by_stage.values()):
            each = [by_stage[stage] for stage in stages]
            found[kind.value] = each[:1] if all(taken == each[0] for taken in each) else each
    return found


def _numbers(schedule: Schedule) -> dict[Pass, int]:
    """Return the number of the pass that makes each output, counted rank by rank."""
    passes = enumerate(chain.from_iterable(schedule.ranks))
    return {role: i for i, p in passes for role in _roles(schedule, p)}


def _inputs(schedule: Schedule) -> list[list[list[Pass]]]:
    """Return the outputs that each pass waits for, from the task graph.

    Of those made on the rank itself, only the usual ones: its order has them before.
    """
    graph = schedule.graph

    def inputs_of(p: Pass, rank: int) -> Iterator[Pass]:
        usual = _usual(schedule, p)
        for code in graph.makers_of(graph.code_of(p, rank)):
            row, unit = divmod(code, graph.units)
            made = Pass(graph.rows[row].kind.kind, graph.rows[row].stage, unit)
            if graph.rank_of(code) != rank or made in usual:
                yield made

    return [
        [list(inputs_of(p, rank)) for p in passes] for rank, passes in enumerate(schedule.ranks)
    ]


def _usual(schedule: Schedule, p: Pass) -> list[Pass]:
    """Return the outputs that the scripts take a pass to wait for if no others are listed."""
    if p.kind is _F:
        return [p._replace(stage=p.stage - 1)] if p.stage else []
    is_last = p.stage == schedule.placement.num_stages - 1
    is_backward = p.kind in (_B, PassKind.BW)
    return [Pass(_B, p.stage + 1, p.microbatch)] if is_backward and not is_last else []


def _owners(schedule: Schedule, kinds: Sequence[PassKind]) -> Owners:
    labels = labels_of(schedule)
    variants = range(len(labels))
    shades = {kind.value: [colour_of(kind, i, len(labels)) for i in variants] for kind in kinds}
    return {
        "labels": labels,
        "colours": {
            kind: [(colour, text_colour_on(colour)) for colour in colours]
            for kind, colours in shades.items()
        },
        "spans": [(span.first, span.owner, span.words) for span in schedule.rules.spans],
    }
