"""What the schedule explorer of a page starts from: a setting, its schedules, sizes and colours."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from megatron_zb.report import drawing
from megatron_zb.schedules import Costs, Timeline

EXACT = "The package's own order, exactly"
SQUEEZED = "Building blocks, squeezed"
GREEDY = "Greedy, within the memory limit"

# What the explorer starts with at most; a rank has six passes for each microbatch in a V.
_MOST_PASSES = 12_000
_MOST_RANKS = 128


@dataclass(frozen=True)
class Choice:
    """A schedule of the explorer, and the one of the package that is the most like it."""

    name: str
    label: str
    group: str
    package: str
    more: tuple[str, ...] = ()


CHOICES = (
    Choice("1f1b", "1F1B", EXACT, "1f1b", ("1f1b-v",)),
    Choice("gpipe", "GPipe", EXACT, "gpipe"),
    Choice("interleaved", "interleaved 1F1B, two chunks", EXACT, "interleaved"),
    Choice("zb-h1", "ZB-H1", EXACT, "zb-h1", ("zb-1p",)),
    Choice("zb-h2", "ZB-H2", EXACT, "zb-h2", ("zb-2p",)),
    Choice("v-min", "V-Min", SQUEEZED, "v-min"),
    Choice("v-half", "V-Half", SQUEEZED, "v-half"),
    Choice("v-zb", "V-ZB", SQUEEZED, "v-zb", ("wave", "dualpipe-v")),
    Choice("greedy-v", "greedy, two chunks in a V", GREEDY, "auto", ("auto",)),
    Choice("greedy-1", "greedy, one chunk", GREEDY, "zb-1p"),
)


@dataclass(frozen=True)
class Setting:
    """What the explorer draws first.

    Times of one microbatch on one rank and of a transfer in any unit, called ``unit``; ``limit`` is
    the most memory as a share of 1F1B's peak, None for the schedule's own.
    """

    schedule: str
    p: int
    m: int
    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    p2p: float = 0.0
    limit: float | None = None
    unit: str = ""


def setting_of(
    timeline: Timeline, costs: Costs, limit: float | None = None, scale: float = 1.0, unit: str = ""
) -> Setting:
    """The nearest setting with equal ranks; a large one gets fewer microbatches and ranks.

    Args:
        timeline: the schedule that the page is about.
        costs: what it was built for.
        limit: the user's memory limit as a share of 1F1B's peak.
        scale: times this make seconds the ``unit``.
        unit: what the page calls it.
    """
    schedule = timeline.schedule
    p = schedule.placement.pipeline_size
    ranks = min(p, _MOST_RANKS)
    links = [costs.p2p[a][a + 1] for a in range(p - 1)]
    forward, backward, weight = (
        _rounded(sum(slices) / p * scale)
        for slices in (costs.forward, costs.backward, costs.weight)
    )
    return Setting(
        schedule=_most_alike(schedule.name),
        p=ranks,
        m=min(schedule.num_microbatches, _MOST_PASSES // (6 * ranks)),
        forward=forward,
        backward=backward,
        weight=weight,
        p2p=_rounded(fmean(links) * scale),
        limit=limit,
        unit=unit,
    )


def context(setting: Setting, found: Timeline | None = None) -> dict[str, Any]:
    """What the template of the explorer calls by name.

    ``found`` is the schedule of the package at just this setting, if the page is about that.
    """
    groups: dict[str, list[Choice]] = {}
    for choice in CHOICES:
        groups.setdefault(choice.group, []).append(choice)
    if found is not None and _sizes(found) != (setting.p, setting.m):
        found = None
    data = {
        "initial": asdict(setting),
        "found": found and {"name": found.schedule.name, "makespan": found.makespan},
        "order": [choice.name for choice in CHOICES],
        "commands": {choice.name: choice.package for choice in CHOICES},
        "labels": {choice.name: choice.label for choice in CHOICES},
        "exact": [choice.name for choice in CHOICES if choice.group == EXACT],
        "sizes": drawing.sizes(),
        "colours": drawing.colours(),
    }
    return {"setting": setting, "groups": groups, "data": data}


def _sizes(timeline: Timeline) -> tuple[int, int]:
    return timeline.schedule.placement.pipeline_size, timeline.schedule.num_microbatches


def _most_alike(name: str) -> str:
    for choice in CHOICES:
        if name in (choice.package, *choice.more):
            return choice.name
    return CHOICES[0].name


def _rounded(value: float) -> float:
    """With four digits: the reader is to change it."""
    return float(f"{value:.4g}")
