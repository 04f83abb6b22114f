#!/usr/bin/env python3
"""Draw the five pictures of docs/how_it_works.md, from schedules that are built here.

python docs/make_how_it_works.py
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from megatron_zb import schedules
from megatron_zb.drawing.chart import INK, MEMORY_COLOUR, bars_of, colour_of, text_colour_on
from megatron_zb.schedules import Costs, Timeline, lowering
from megatron_zb.schedules.passes import Message, PassKind

DOCS = Path(__file__).resolve().parent
FOLDER = DOCS / "pictures" / "how_it_works"
QUALITY = DOCS / "results" / "schedule_quality.json"
COLOURS = 96
DOTS_PER_INCH = 110
WIDTH = 9.0
UNIT = (1.0, 1.0, 1.0)  # F, B and W of one microbatch on one rank
LIMITED = (8, 32)  # ranks and microbatches of the measured grid
LIMITED_COSTS = (1.0, 1.2, 0.8, 0.05)
TOP = 60  # percent; the tightest limit is far above it


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[], Figure]] = {
        "split_backward": split_backward,
        "v_memory": v_memory,
        "memory_limit": memory_limit,
        "lowering": lowered,
        "bit_equality": bit_equality,
    }
    for name, make in pictures.items():
        save(make(), FOLDER / f"{name}.png")
        print(FOLDER / f"{name}.png")


def save(figure: Figure, path: Path) -> None:
    """Write a picture with few colours and no metadata, so that equal bars give equal bytes."""
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / path.name
        figure.savefig(drawn, dpi=DOTS_PER_INCH)
        with Image.open(drawn) as image:
            few = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def timeline(name: str, p: int, m: int, costs: Sequence[float] = UNIT) -> Timeline:
    """Build and simulate a schedule whose stages cost the same."""
    names = ("forward", "backward", "weight", "p2p")
    given = dict(zip(names, costs, strict=False))
    uniform = Costs.uniform(pipeline_size=p, **given)
    built = schedules.build(name, pipeline_size=p, num_microbatches=m, costs=uniform)
    return schedules.simulate(built, uniform)


def new_figure(height: float, rows: int, columns: int = 1, **shared: Any) -> tuple[Figure, Any]:
    figure = Figure((WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **shared)


# --- 1: the split backward


def split_backward() -> Figure:
    """Draw the same step under 1F1B and under zb-h1, on one time axis."""
    drawn = {name: timeline(name, 4, 6) for name in ("1f1b", "zb-h1")}
    figure, panels = new_figure(4.4, 2, sharex=True)
    longest = max(each.makespan for each in drawn.values())
    for axes, (name, each) in zip(panels, drawn.items(), strict=True):
        draw_bars(axes, each)
        title = f"{name}: {each.makespan:g} units of time, idle for {each.bubble_rate:.0%}"
        axes.set_title(title, loc="left", size=10)
        axes.set_xlim(0, longest)
    panels[-1].set_xlabel("time; F, B and W of a microbatch take 1 each", size=9)
    legend(figure, (PassKind.F, PassKind.B, PassKind.W, PassKind.BW))
    return figure


def draw_bars(axes: Axes, drawn: Timeline) -> None:
    for bar in bars_of(drawn):
        box(axes, bar.start, bar.rank, bar.end - bar.start, bar.colour, str(bar.microbatch))
    size = len(drawn.schedule.ranks)
    axes.set_ylim(size - 0.5, -0.5)
    axes.set_yticks(range(size), [f"rank {rank}" for rank in range(size)])
    axes.set_facecolor("#E9ECF0")


def box(axes: Axes, x: float, y: float, width: float, colour: str, text: str) -> None:
    axes.add_patch(Rectangle((x, y - 0.42), width, 0.84, facecolor=colour, edgecolor="#FFFFFF"))
    middle = (x + width / 2, y)
    axes.annotate(text, middle, ha="center", va="center", size=8, color=text_colour_on(colour))


def legend(figure: Figure, kinds: Sequence[PassKind]) -> None:
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour_of(kind, 0, 1)) for kind in kinds]
    labels = [f"{kind}: {kind.words}" for kind in kinds]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(kinds), fontsize=8)


# --- 2: a V and its memory


@dataclass(frozen=True)
class Held:
    """The time in which a rank holds the activations of one microbatch and stage."""

    rank: int
    stage: int
    start: float
    end: float


def held(drawn: Timeline, microbatch: int) -> list[Held]:
    """Return, for every stage, the time from the start of F to the end of W or BW."""
    bounds: dict[int, dict[bool, float]] = {}
    for rank, passes in enumerate(drawn.schedule.ranks):
        for position, each in enumerate(passes):
            if each.microbatch == microbatch and each.kind in (PassKind.F, PassKind.W, PassKind.BW):
                is_first = each.kind == PassKind.F
                times = drawn.start if is_first else drawn.end
                bounds.setdefault(each.stage, {})[is_first] = times[rank][position]
    rank_of = drawn.schedule.placement.rank_of
    return [Held(rank_of[s], s, found[True], found[False]) for s, found in sorted(bounds.items())]


def v_memory() -> Figure:
    """Draw how long each rank holds one microbatch, under 1F1B and under v-half."""
    figure, panels = new_figure(4.6, 2)
    for axes, (name, microbatch) in zip(panels, (("1f1b", 8), ("v-half", 8)), strict=True):
        found = held(timeline(name, 4, 16), microbatch)
        first = min(each.start for each in found)
        chunks = len(found) // 4
        for each in found:
            chunk = each.stage // 4
            colour = MEMORY_COLOUR if chunk == 0 else "#CBA9E8"
            y = each.rank + (0 if chunks == 1 else 0.22 * (2 * chunk - 1))
            height = 0.8 / chunks
            corner = (each.start - first, y - height / 2)
            span = each.end - each.start
            axes.add_patch(Rectangle(corner, span, height, facecolor=colour, edgecolor="#FFFFFF"))
            axes.annotate(
                f"stage {each.stage}",
                (each.start - first + span / 2, y),
                ha="center",
                va="center",
                size=8,
                color=text_colour_on(colour),
            )
        totals = [
            sum((each.end - each.start) / chunks for each in found if each.rank == rank)
            for rank in range(4)
        ]
        longest = max(each.end for each in found) - first
        for rank, total in enumerate(totals):
            axes.annotate(f" {total:.3g}", (longest, rank), va="center", size=9)
        axes.set_title(
            f"{name}: when each rank holds the activations of one microbatch; right: time x share "
            "of the rank's layers",
            loc="left",
            size=9,
        )
        axes.set_xlim(0, longest * 1.08)
        axes.set_ylim(3.5, -0.5)
        axes.set_yticks(range(4), [f"rank {rank}" for rank in range(4)])
    panels[-1].set_xlabel("time since the microbatch began; F, B and W take 1 each", size=9)
    return figure


# --- 3: what a limit costs


def memory_limit() -> Figure:
    """Draw the time of a step against the memory limit, with named schedules beside it."""
    p, m = LIMITED
    grid = json.loads(QUALITY.read_text(encoding="utf-8"))["grid"]["cells"]
    cells = [
        cell
        for cell in grid
        if (cell["pipeline_size"], cell["num_microbatches"]) == LIMITED
        and cell["costs"] == [1000 * cost for cost in LIMITED_COSTS]
    ]
    ideal = sum(LIMITED_COSTS[:3]) * m
    limits = [cell["memory_limit"] for cell in cells]
    found = [longer(cell["makespan"] / 1000, ideal) for cell in cells]
    bounds = [longer(cell["bound_of_v"] / 1000, ideal) for cell in cells]
    figure, axes = new_figure(3.9, 1)
    axes.plot(limits, found, "o-", color=MEMORY_COLOUR, label="auto")
    axes.plot(limits, bounds, "--", color="#6E757F", label="lower bound of a V")
    for name in ("1f1b", "interleaved", "v-min", "v-half", "v-zb"):
        drawn = timeline(name, p, m, LIMITED_COSTS)
        point = (max(drawn.peak_activation) / p, longer(drawn.makespan, ideal))
        axes.plot(*point, "s", color=INK, markersize=5)
        axes.annotate(name, point, xytext=(0, 7), textcoords="offset points", size=9, ha="center")
    axes.set_xlabel("activation memory of the worst rank, as a share of 1F1B's", size=9)
    axes.set_ylabel("time above a step without idle time, %", size=9)
    axes.set_xlim(0.3, 1.55)
    axes.set_ylim(0, TOP)
    axes.grid(color="#E9ECF0")
    axes.legend(fontsize=8, loc="upper right")
    return figure


def longer(time: float, ideal: float) -> float:
    return 100 * (time / ideal - 1)


# --- 4: messages


def lowered() -> Figure:
    """Draw two ranks' programs in the one order that they are parts of, with their messages."""
    drawn = timeline("zb-h1", 2, 2)
    order = list(
        lowering._total_order(
            drawn.schedule, lowering._moments(drawn.schedule, None, captured=False)
        )
    )
    figure, axes = new_figure(2.4, 1)
    places: dict[tuple[Message, str], tuple[float, int]] = {}
    x = 0.0
    for rank, at in order:
        if isinstance(at, lowering.RunPair):
            raise ValueError("zb-h1 has no pairs")
        if isinstance(at, lowering.Run):
            colour = colour_of(at.work.kind, 0, 1)
            box(axes, x, rank, 1.0, colour, f"{at.work.kind}{at.work.microbatch}")
        else:
            word = {"Send": "send", "PostReceive": "receive", "WaitReceive": "take"}[
                type(at).__name__
            ]
            if word == "receive":  # at the place of its send
                x -= 1.0
            box(axes, x + 0.1, rank, 0.8, "#FFFFFF", word)
            places[at.message, word] = (x + 0.5, rank)
        x += 1.0
    for (message, word), (at_x, rank) in places.items():
        if word == "send":
            end = places[message, "receive"]
            axes.annotate(
                "",
                (end[0], end[1] - 0.42 * (end[1] - rank)),
                (at_x, rank + 0.42 * (end[1] - rank)),
                arrowprops={"arrowstyle": "->", "color": INK},
            )
    axes.set_xlim(0, x)
    axes.set_ylim(1.6, -0.6)
    axes.set_yticks([0, 1], ["rank 0", "rank 1"])
    axes.set_xticks([])
    axes.set_facecolor("#E9ECF0")
    axes.set_xlabel("the order of all events, from first to last (not to scale in time)", size=9)
    legend(figure, (PassKind.F, PassKind.B, PassKind.W, PassKind.BW))
    return figure


# --- 5: bit equality


def weight_gradients(drawn: Timeline, stage: int) -> Iterator[tuple[float, float, PassKind, int]]:
    for rank, passes in enumerate(drawn.schedule.ranks):
        for position, each in enumerate(passes):
            if each.stage == stage and each.kind in (PassKind.W, PassKind.BW):
                times = drawn.start[rank][position], drawn.end[rank][position]
                yield (*times, each.kind, each.microbatch)


def bit_equality() -> Figure:
    """Draw when the first stage adds to its weight gradient, under four schedules."""
    figure, axes = new_figure(2.9, 1)
    names = ("1f1b", "zb-h1", "v-half", "v-zb")
    for row, name in enumerate(names):
        for start, end, kind, microbatch in weight_gradients(timeline(name, 4, 8), 0):
            box(axes, start, row, end - start, colour_of(kind, 0, 1), str(microbatch))
    axes.set_xlim(0, timeline("1f1b", 4, 8).makespan)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names)
    axes.set_facecolor("#E9ECF0")
    axes.set_xlabel("time at which stage 0 adds the gradient of a microbatch to its sum", size=9)
    legend(figure, (PassKind.W, PassKind.BW))
    return figure


if __name__ == "__main__":
    main()
