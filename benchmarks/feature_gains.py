#!/usr/bin/env python3
"""Simulate what features bring to a step: one command for each, with a table of cases.

  python benchmarks/feature_gains.py vocabulary
  python benchmarks/feature_gains.py vocabulary --output-layers 2.35 --prediction-layers 1
  python benchmarks/feature_gains.py recomputation
  python benchmarks/feature_gains.py pairs --comm 0.5 --limits 8 10
  python benchmarks/feature_gains.py slices
  python benchmarks/feature_gains.py adapters
  python benchmarks/feature_gains.py second-model
  python benchmarks/feature_gains.py varied

Nothing is run: every order is built, lowered and timed by the simulator. If a command does not say
otherwise, F, B and W of a microbatch take 1, 1.2 and 0.8 on one rank, and a message 0.05. Bounds
are those of the schedule's placement within the memory limit. Prints a table and, last, one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from inspect import cleandoc
from typing import Any, TypeAlias

import provenance

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.schedules import auto, layout
from megatron_zb.schedules.bounds import lower_bound
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.families import dualpipe_v_order, overlapped
from megatron_zb.schedules.features.adapters import Adapters
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.second_model import SecondModel, SecondRole
from megatron_zb.schedules.features.slices import Slicing
from megatron_zb.schedules.features.vocabulary import Vocabulary, with_prediction
from megatron_zb.schedules.placement import Placement, wave
from megatron_zb.schedules.request import Limit, Request
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search import varied_passes

Row: TypeAlias = dict[str, Any]
Columns: TypeAlias = Sequence[tuple[str, str]]
"""Headings, and how a row is written below them; "-" where a row has no such figure."""

WORK = 3.0  # seconds of F, B and W of a microbatch on a rank


def printed(rows: Iterable[Row], columns: Columns) -> list[Row]:
    """Print a table, each row as soon as it is known, and return the rows."""
    widths = [max(9, len(heading)) for heading, _ in columns]
    print("  ".join(heading.rjust(n) for n, (heading, _) in zip(widths, columns, strict=True)))
    kept = []
    for row in rows:
        kept.append(row)
        cells = (_cell(text, row).rjust(n) for n, (_, text) in zip(widths, columns, strict=True))
        print("  ".join(cells), flush=True)
    return kept


def _cell(text: str, row: Row) -> str:
    try:
        return text.format_map(row)
    except KeyError:
        return "-"


def timed(
    name: str, p: int, m: int, costs: Costs, **options: Any
) -> tuple[Schedule, schedules.Timeline, Row]:
    """Build an order, prove that it ends, and time it; with the figures that rows share."""
    begin = time.process_time()
    found = schedules.build(name, pipeline_size=p, num_microbatches=m, costs=costs, **options)
    seconds = time.process_time() - begin
    timeline = schedules.simulate(found.validate(), costs)
    schedules.lower(found, timeline)
    figures = {"makespan": timeline.makespan, "seconds": seconds}
    return found, timeline, figures


def equal_costs(p: int, *, forward: float = 1.0, backward: float = 1.2) -> Costs:
    return Costs.uniform(pipeline_size=p, forward=forward, backward=backward, weight=0.8, p2p=0.05)


# --- a vocabulary-parallel output layer

_FORWARD, _BACKWARD, _WEIGHT, _HOP = 0.25, 0.3, 0.2, 0.05
# A layer has 12 h^2 weights and holds about 34 bytes for each number of its input; a vocabulary of
# 13 h takes as long as one, and its logits in 16 bits hold 26.
_LOGITS, _INPUT = 26 / 34, 2 / 34


def vocabulary(args: argparse.Namespace) -> Row:
    """Simulate the gain of a vocabulary-parallel output layer.

    A model of --layers layers, whose F, B and W take .25, .3 and .2 and whose output layer takes as
    long as --output-layers of them. Each schedule is built for even layers, for the best layers
    that count the output layer in, and for an output layer and an embedding that are sharded:
    barriers, messages and the memory of the shards included, in the schedule's own memory and one
    microbatch more. --prediction-layers are those of multi-token prediction: layers of the last
    stage, each of which runs the output layer once more. Sharded, the best of the layouts that
    count them is taken.
    """
    rows = (
        _with_shards(args, name, output) for output in args.output_layers for name in args.schedules
    )
    sizes = {name: value for name, value in vars(args).items() if name != "case"}
    return {"sizes": sizes, "makespans": printed(rows, _OF_SHARDS)}


_OF_SHARDS = (
    ("output layer", "{output_layers:g} layers"),
    ("schedule", "{schedule}"),
    ("even layers", "{even:.1f}"),
    ("best layers", "{best:.1f}"),
    ("sharded", "{cut:.1f}"),
    ("peak", "{peak:.1f}"),
    ("bound", "{bound:.1f}"),
)


def _with_shards(args: argparse.Namespace, name: str, output: float) -> Row:
    placement = schedules.build(name, pipeline_size=args.ranks, num_microbatches=1).placement
    predicted = args.prediction_layers
    output *= 1 + predicted
    whole = [
        _of_layers(args, name, _with_layers(placement, counts, output + predicted))[0]
        for counts in layout.choices(args.layers, placement, 0.0, output + predicted)
    ]
    cut, peak, bound = min(
        _of_layers(args, name, _sharded(args, _with_layers(placement, counts, predicted), output))
        for counts in layout.choices(args.layers, placement, 0.0, predicted)
    )
    return {
        "output_layers": output / (1 + predicted),
        "schedule": name,
        "even": whole[0],
        "best": min(whole),
        "cut": cut,
        "peak": peak,
        "bound": bound,
    }


def _of_layers(args: argparse.Namespace, name: str, costs: Costs) -> tuple[float, float, float]:
    """Return the makespan, the peak in microbatches of a rank, and the lower bound."""
    schedule, timeline, _ = timed(name, args.ranks, args.microbatches, costs)
    assert schedule.report is not None
    share = sum(costs.memory["activation"]) / args.ranks
    return timeline.makespan, max(timeline.peak_memory) / share, schedule.report.lower_bound


def _with_layers(placement: Placement, counts: layout.Layout, output: float) -> Costs:
    """Return the costs of stages with these layers, and more of them on the last one."""
    work = [float(count) for count in counts]
    work[-1] += output
    return Costs.of_slices(
        pipeline_size=placement.pipeline_size,
        forward=[_FORWARD * layers for layers in work],
        backward=[_BACKWARD * layers for layers in work],
        weight=[_WEIGHT * layers for layers in work],
        p2p=_HOP,
        activation=[max(1e-6, float(count)) for count in counts],
    )


def _sharded(args: argparse.Namespace, costs: Costs, output: float) -> Costs:
    costs = costs.having(
        Vocabulary(
            output=(_FORWARD + _BACKWARD) * output,
            weight=_WEIGHT * output,
            held=_LOGITS * output + _INPUT * args.ranks * (1 + args.prediction_layers),
            lookup=0.0,
        )
    )
    return with_prediction(costs) if args.prediction_layers else costs


# --- recomputation and offload


def recomputation(args: argparse.Namespace) -> Row:
    """Simulate recomputation and offload: seconds of a step by memory limit.

    The input of a stage takes --kept of a microbatch on a rank. For each memory limit, `auto` with
    every activation kept, and with recomputation; for each limit of --offload-limits, with offload,
    each copy in --copy of the time of its passes. Beside it, 1F1B in which all layers are
    recomputed, as Megatron does with --recompute-granularity full: B takes F longer, and a rank
    holds inputs and one activation. The loss is what a step takes longer than its passes without
    recomputation.
    """
    p, m = args.ranks, args.microbatches
    mixed = equal_costs(p).having(Recomputation(kept_input=args.kept))
    rows = (
        {"limit": x, "kept": _within(p, m, x, equal_costs(p)), "some": _within(p, m, x, mixed)}
        for x in args.limits
    )
    found = {"rows": printed(rows, _OF_RECOMPUTATION)}
    upstream = _all_recomputed(p, m, args.kept)
    print(
        f"1F1B, everything recomputed: {upstream['makespan']:.1f}, loss {upstream['loss']:.1%}, in "
        f"{upstream['peak']:.2f} of 1F1B's memory"
    )
    moved = []
    for copy in args.copy:
        print(f"\nto the host, {copy:g} of F, B and W each way")
        costs = equal_costs(p).having(Offload(seconds=WORK * copy))
        limits = args.offload_limits
        rows = ({"limit": x, "copy": copy, **_within(p, m, x, costs)} for x in limits)
        moved += printed(rows, _OF_OFFLOAD)
    sizes = {"ranks": p, "microbatches": m, "kept": args.kept}
    return {**sizes, **found, "upstream": upstream, "moved": moved}


_OF_RECOMPUTATION = (
    ("limit", "{limit:g}"),
    ("all kept", "{kept[makespan]:.1f}"),
    ("loss", "{kept[loss]:.1%}"),
    ("some dropped", "{some[makespan]:.1f}"),
    ("loss", "{some[loss]:.1%}"),
    ("dropped", "{some[dropped]:.0%}"),
    ("placement", "{some[placement]} x{some[chunks]}"),
    ("bound", "{some[bound]:.1f}"),
)
_OF_OFFLOAD = (
    ("limit", "{limit:g}"),
    ("makespan", "{makespan:.1f}"),
    ("loss", "{loss:.1%}"),
    ("moved", "{moved:.0%}"),
    ("host", "{host:.1f}"),
    ("placement", "{placement} x{chunks}"),
    ("bound", "{bound:.1f}"),
)


def _within(p: int, m: int, limit: float, costs: Costs) -> Row:
    """`auto` under a limit, as a fraction of 1F1B; empty where nothing fits."""
    try:
        found, timeline, figures = timed("auto", p, m, costs, memory_limit=limit)
    except UsageError:
        return {}
    assert found.report is not None
    return {
        **figures,
        "loss": 1 - m * WORK / timeline.makespan,
        "bound": found.report.lower_bound,
        "peak": max(timeline.peak_memory) / p,
        "placement": found.placement.name,
        "chunks": found.placement.chunks,
        "dropped": len(found.recomputed) / (found.placement.num_stages * m),
        "moved": len(found.offloaded) / (found.placement.num_stages * m),
        "host": max(timeline.peak_host),
    }


def _all_recomputed(p: int, m: int, kept: float) -> Row:
    """1F1B with every layer recomputed, and what its first rank holds."""
    costs = equal_costs(p, backward=2.2)
    makespan = timed("1f1b", p, m, costs)[1].makespan
    return {"makespan": makespan, "loss": 1 - m * WORK / makespan, "peak": (1 + p * kept) / p}


# --- overlapped pairs


def pairs(args: argparse.Namespace) -> Row:
    """Simulate mixtures of experts: how much of the all-to-all is hidden, at which memory.

    The exchange of tokens between experts takes --comm in F and as much in B beside that. For each
    of these and each memory limit, `auto` on --chunks chunks in a zig-zag, with and without pairs;
    beside it the published orders with pairs at the memory that they take: DualPipeV and Megatron's
    interleaved with overlap.
    """
    job = PairsJob(args.ranks, args.microbatches, args.chunks, args.recompute)
    rows = (
        {**row, "gap": row["makespan"] / row["bound"] - 1}
        for comm in args.comm
        for find in (_published_pairs(job, comm), _searched_pairs(job, comm, args.limits))
        for row in find
    )
    return {**asdict(job), "rows": printed(rows, _OF_PAIRS)}


_OF_PAIRS = (
    ("comm", "{comm:g}"),
    ("schedule", "{schedule:14}"),
    ("limit", "{limit}"),
    ("peak", "{peak:g}"),
    ("without pairs", "{without_pairs:.2f}"),
    ("with pairs", "{makespan:.2f}"),
    ("bound", "{bound:.2f}"),
    ("above it", "{gap:.1%}"),
)


@dataclass(frozen=True)
class PairsJob:
    """Ranks, microbatches, chunks of the zig-zag, and whether B computes its forward again."""

    p: int
    m: int
    chunks: int
    recompute: bool = False

    def costs(self, comm: float, *, pairs: bool = True) -> Costs:
        """Costs with this communication in F and in B; if not for pairs, as a part of them."""
        back, again = comm * (1 + self.recompute), 1.0 * self.recompute
        exposed = comm * (not pairs), back * (not pairs)
        costs = equal_costs(self.p, forward=1.0 + exposed[0], backward=1.2 + again + exposed[1])
        return costs.having(Communication(forward=comm, backward=back)) if pairs else costs


def _searched_pairs(job: PairsJob, comm: float, limits: Iterable[float]) -> Iterator[Row]:
    """`auto` on a zig-zag with limits in microbatches of a rank, with and without pairs."""
    p, m, costs = job.p, job.m, job.costs(comm)
    place = wave(p, job.chunks)
    for limit in limits:
        options = {"memory_limit": limit / p, "placement": place}
        without, _, _ = timed("auto", p, m, job.costs(comm, pairs=False), **options)
        found, timeline, figures = timed("auto", p, m, costs, **options)
        yield {
            **figures,
            "schedule": "auto",
            "comm": comm,
            "limit": limit,
            "peak": max(timeline.peak_activation),
            "without_pairs": schedules.simulate(without, costs).makespan,
            "bound": lower_bound(place, m, timeline.costs, (limit,) * p),
            "pairs": len(found.pairs),
        }


def _published_pairs(job: PairsJob, comm: float) -> Iterator[Row]:
    """DualPipeV's order and Megatron's interleaved ones, with and without their pairs."""
    p, m, costs = job.p, job.m, job.costs(comm)
    orders = {"dualpipe-v": dualpipe_v_order(p, m)} if m >= 2 * p else {}
    orders |= {f"interleaved x{chunks}": overlapped(p, m, chunks) for chunks in (2, 4)}
    for name, schedule in orders.items():
        timeline = schedules.simulate(schedule.validate(), costs)
        peak = max(timeline.peak_activation)
        yield {
            "schedule": name,
            "comm": comm,
            "peak": peak,
            "without_pairs": schedules.simulate(schedule.without_pairs(), costs).makespan,
            "makespan": timeline.makespan,
            "bound": lower_bound(schedule.placement, m, timeline.costs, (peak,) * p),
            "pairs": len(schedule.pairs),
        }


# --- token slices

SHAPES = "2:8:0 2:8:0.5 4:8:0.5 8:4:0.5 8:8:0 8:8:0.5 8:16:0.5 32:8:0.5".split()


def slices(args: argparse.Namespace) -> Row:
    """Simulate token slices: bubble and memory beside sliced 1F1B and interleaved 1F1B.

    A message takes 0.05 / n; attention takes a share of F and B that grows with the tokens before a
    slice. For each number of microbatches, of slices, and share of attention: the fixed orders, and
    `v-zb` and `auto` within the memory of sliced 1F1B, `auto` within that of interleaved. Then
    `auto` under smaller limits, and the seconds to build a large one. Memory is in microbatches of
    a rank; gaps are distances to the lower bound.
    """
    p, rows = args.ranks, []
    for shape in args.shapes:
        m, n, attention = shape.split(":")
        print(f"\nm {m}, n {n}, attention {attention}")
        cut = Slicing.equal(int(n), attention=float(attention))
        rows.append({"shape": shape, "found": _beside_fixed_orders(p, int(m), cut)})
    cut = Slicing.equal(16, attention=0.5)
    print("\nauto, m 8, n 16")
    found = ({"limit": x, **_of_slices("auto", p, 8, cut, x)} for x in args.held)
    limits = printed(found, [("limit", "{limit:.2f}"), *_OF_SLICES])
    large = {}
    if args.large:
        print(f"\nauto, p = m = {args.large}, n 8")
        cut = Slicing.equal(8, attention=0.5)
        found = (_of_slices("auto", n, n, cut, (n + 7) / 8) for n in (args.large,))
        (large,) = printed(found, [*_OF_SLICES, ("seconds", "{seconds:.1f}")])
    return {"ranks": p, "rows": rows, "limits": limits, "large": large}


_OF_SLICES = (
    ("schedule", "{name}"),
    ("bubble", "{bubble:.1%}"),
    ("held", "{held:.2f}"),
    ("gap", "{gap:.1%}"),
    ("placement", "{placement}"),
)


def _named(schedule: Schedule) -> str:
    return f"{schedule.placement.name} x{schedule.placement.chunks}"


def _of_slices(name: str, p: int, m: int, cut: Slicing, held: float | None = None) -> Row:
    """A schedule of the slices, with a limit in microbatches of a rank."""
    limit = None if held is None else held / p
    options = {"slices": cut, "memory_limit": limit}
    schedule, timeline, figures = timed(name, p, m, equal_costs(p), **options)
    assert schedule.report is not None
    return {
        **figures,
        "name": name,
        "bubble": timeline.bubble_rate,
        "held": max(timeline.peak_memory),
        "gap": schedule.report.gap,
        "placement": _named(schedule),
    }


def _beside_fixed_orders(p: int, m: int, cut: Slicing) -> list[Row]:
    """Fixed orders, and searches in their memory, which must not be slower."""
    fused, looped = (_of_slices(name, p, m, cut) for name in ("1f1b", "interleaved"))
    v, in_fused = (_of_slices(name, p, m, cut, fused["held"]) for name in ("v-zb", "auto"))
    in_looped = in_fused
    if looped["held"] > fused["held"]:
        in_looped = _of_slices("auto", p, m, cut, looped["held"])
    assert in_fused["makespan"] <= fused["makespan"] * (1 + 1e-9)
    assert in_looped["makespan"] <= looped["makespan"] * (1 + 1e-9)
    memory = ("its own", "its own", "1f1b's", "1f1b's", "interleaved's")
    found = [fused, looped, v, in_fused, in_looped]
    rows = ({**row, "within": of} for row, of in zip(found, memory, strict=True))
    printed(rows, [("memory", "{within:13}"), *_OF_SLICES])
    return found


# --- several adapters


def adapters(args: argparse.Namespace) -> Row:
    """Simulate several LoRA adapters in one pipeline: how long the ranks are idle.

    The base is frozen, so F and B take 1 and W --weight, that of products of small rank; an update
    takes --update. --mixes are counts of adapters, their microbatches and steps: 8x8x1 is a window
    of 8 adapters with a step of 8 microbatches each, 4x8x4 a stream of 4 adapters with 4 steps.
    """
    rows = (_of_mix(args, name, mix) for mix in args.mixes for name in (*args.schedules, "auto"))
    return {"ranks": args.ranks, "weight": args.weight, "rows": printed(rows, _OF_ADAPTERS)}


ADAPTED = ["1f1b", "interleaved", "zb-h1", "v-half", "v-zb"]
_OF_ADAPTERS = (
    ("adapters", "{mix}"),
    ("schedule", "{schedule:12}"),
    ("makespan", "{makespan:.2f}"),
    ("idle", "{idle:.1%}"),
    ("above bound", "{gap:.1%}"),
    ("peak", "{peak:.1f}"),
    ("seconds", "{seconds:.1f}"),
)


def _of_mix(args: argparse.Namespace, name: str, mix: str) -> Row:
    count, microbatches, steps = map(int, mix.split("x"))
    together = Adapters.equal(count, microbatches=microbatches, steps=steps, update=args.update)
    costs = Costs.uniform(pipeline_size=args.ranks, forward=1.0, backward=1.0, weight=args.weight)
    found, timeline, figures = timed(name, args.ranks, together.num_units, costs, adapters=together)
    assert found.report is not None
    work = together.num_units * (2.0 + args.weight) + count * steps * args.update
    return {
        "mix": mix,
        "schedule": name,
        **figures,
        "idle": 1 - work / timeline.makespan,
        "gap": found.report.gap,
        "peak": max(timeline.peak_memory),
    }


# --- a second model in the gaps


def second_model(args: argparse.Namespace) -> Row:
    """Simulate an encoder or a teacher beside a trained model, whose F, B and W take 1.

    --shares are the seconds of the second model on each rank, in those that a rank is idle without
    it. An encoder's backward takes twice its forward; that of the next batch is frozen. `fits` is
    the share of these seconds that does not make the step longer. Beside: `first stage`, the step
    with the whole encoder on the first stage; `uneven`, the shortest one with layers of the trained
    model moved from the first rank to the others; `before`, all forwards of the teacher before the
    step.
    """
    rows = (
        _beside(args, microbatches, share, case)
        for microbatches in args.microbatches
        for share in args.shares
        for case in args.cases
    )
    return {"ranks": args.ranks, "schedule": args.schedule, "rows": printed(rows, _OF_BESIDE)}


_OF_BESIDE = (
    ("microbatches", "{microbatches}"),
    ("share of idle", "{share:.0%}"),
    ("second model", "{case:13}"),
    ("alone", "{alone:.2f}"),
    ("makespan", "{makespan:.2f}"),
    ("fits", "{fits:.0%}"),
    ("above bound", "{gap:.1%}"),
    ("first stage", "{first:.2f}"),
    ("uneven", "{uneven:.2f}"),
    ("before", "{before:.2f}"),
    ("seconds", "{seconds:.1f}"),
)
_MOVED = (0.0, 0.5, 0.75, 1.0, 1.25)


def _beside(args: argparse.Namespace, m: int, share: float, case: str) -> Row:
    p, name = args.ranks, args.schedule
    costs = Costs.uniform(pipeline_size=p, forward=1.0, backward=1.0, weight=1.0)
    alone = timed(name, p, m, costs)[2]["makespan"]
    seconds = share * (alone - WORK * m)
    each = seconds / m
    second = {
        "encoder": SecondModel(SecondRole.ENCODER, each / 3, 2 * each / 3),
        "copies": SecondModel(SecondRole.ENCODER, each / 3, 2 * each / 3, copies=True, pieces=4),
        "ahead": SecondModel(SecondRole.AHEAD, each),
        "ahead, copies": SecondModel(SecondRole.AHEAD, each, copies=True, pieces=4),
        "teacher": SecondModel(SecondRole.TEACHER, each),
    }[case]
    found, timeline, figures = timed(name, p, m, costs, second_model=second)
    assert found.report is not None
    row = {"microbatches": m, "share": share, "case": case, "alone": alone, **figures}
    row |= {"fits": 1 - (timeline.makespan - alone) / seconds, "gap": found.report.gap}
    if case == "teacher":
        return {**row, "before": alone + (m + p - 1) * each}
    backward = 0.0 if case.startswith("ahead") else 2 / 3
    whole = {"forward": p * each * (1 - backward), "backward": p * each * backward}
    steps = [_on_the_first_stage(name, p, m, moved, whole) for moved in _MOVED]
    return {**row, "first": steps[0], "uneven": min(steps)}


def _on_the_first_stage(name: str, p: int, m: int, moved: float, whole: dict[str, float]) -> float:
    """Return the step with a whole encoder on the first stage.

    Args:
        moved: the work that goes from the first rank to the others, 1 for as much on each rank.
        whole: seconds of the encoder.
    """
    placement = schedules.build(name, pipeline_size=p, num_microbatches=m).placement
    ranks = placement.rank_of
    less = min(moved * sum(whole.values()) * (p - 1) / p / WORK, 1.0)
    layers = [(1.0 - less if r == 0 else 1.0 + less / (p - 1)) / placement.chunks for r in ranks]

    def with_encoder(kind: str) -> list[float]:
        return [layers[0] + whole.get(kind, 0.0), *layers[1:]]

    costs = Costs.of_slices(
        pipeline_size=p,
        forward=with_encoder("forward"),
        backward=with_encoder("backward"),
        weight=layers,
        activation=layers,
    )
    return float(timed(name, p, m, costs)[2]["makespan"])


# --- passes that vary

NAMED = ("1f1b", "interleaved", "v-half", "v-zb")
_SEED = 1


def varied(args: argparse.Namespace) -> Row:
    """Steps whose passes vary: `auto` beside named schedules and the fastest order that it finds.

    Every pass takes a random number of times what it takes by default, evenly drawn with a standard
    deviation of 0 to 40 %. Means of many draws, other ones than those by which `auto` chooses.
    `fastest` is what `auto` would return if it looked at equal passes alone.
    """
    shapes = (map(int, shape.split(":")) for shape in args.shapes)
    rows = (row for p, m in shapes for row in varied_rows(p, m, args.deviations, args.draws))
    means = [(f"{x:g} %", f"{{means[{i}]:.2f}}") for i, x in enumerate(args.deviations)]
    found = printed(rows, [*_OF_VARIED, *means])
    return {"deviations": args.deviations, "rows": found}


_OF_VARIED = (
    ("ranks", "{ranks}"),
    ("microbatches", "{microbatches}"),
    ("schedule", "{name:11}"),
    ("placement", "{placement:11}"),
)


def varied_rows(p: int, m: int, deviations: list[float], draws: int) -> Iterator[Row]:
    """Yield a row for each schedule: its mean seconds by deviation, in percent."""
    costs = equal_costs(p)
    request = Request(p, m, costs, Limit())
    named = ((name, timed(name, p, m, costs)[0]) for name in NAMED)
    for name, schedule in (*named, *_with_fastest(request)):
        means = [
            varied_passes.mean_seconds(schedule, request, deviation / 100, draws, _SEED)
            if deviation
            else schedules.simulate(schedule, costs).makespan
            for deviation in deviations
        ]
        about = {"ranks": p, "microbatches": m, "name": name, "placement": _named(schedule)}
        yield {**about, "means": means}


def _with_fastest(request: Request) -> Iterator[tuple[str, Schedule]]:
    """Yield the fastest order that `auto` finds, and the one that it takes."""
    seen: list[tuple[float, Schedule]] = []
    choose = varied_passes.steadiest

    def steadiest(
        found: Sequence[tuple[float, Schedule]], request: Request, most: float = math.inf
    ) -> int:
        seen.extend(found)
        return choose(found, request, most)

    varied_passes.steadiest = steadiest
    try:
        taken = auto.auto(request)
    finally:
        varied_passes.steadiest = choose
    yield "fastest", seen[0][1]
    yield "auto", taken


# --- the command line

_SIZES = {"--ranks": (8, "pipeline ranks"), "--microbatches": (32, "of a step")}
_LIMITS = [0.145, 0.18, 0.25, 0.333, 0.375, 0.5, 1.0]
CASES: dict[str, tuple[Callable[[argparse.Namespace], Row], dict[str, tuple[Any, str]]]] = {
    "vocabulary": (
        vocabulary,
        {
            **_SIZES,
            "--layers": (32, "of the model"),
            "--output-layers": ([2.35, 6.0], "time of the output layer"),
            "--prediction-layers": (0, "of multi-token prediction"),
            "--schedules": (["v-zb", "v-half", "v-min"], "their names"),
        },
    ),
    "recomputation": (
        recomputation,
        {
            **_SIZES,
            "--kept": (0.03, "a stage's input"),
            "--limits": (_LIMITS, "memory as a fraction of 1F1B's"),
            "--offload-limits": ([0.0625, 0.125, 0.25, 0.5], "the same with offload"),
            "--copy": ([0.3, 0.5], "time to copy an activation one way, in that of its passes"),
        },
    ),
    "pairs": (
        pairs,
        {
            **_SIZES,
            "--comm": ([0.3, 0.5, 0.8], "the exchange, in the time of a forward"),
            "--limits": ([5.0, 6.0, 8.0, 8.5, 10.0], "memory in microbatches of a rank"),
            "--chunks": (2, "of the zig-zag; 2 are a V"),
            "--recompute": (False, "B computes its forward again, exchange included"),
        },
    ),
    "slices": (
        slices,
        {
            "--ranks": (8, "pipeline ranks"),
            "--shapes": (SHAPES, "microbatches, slices of each and share of attention: M:N:X"),
            "--held": ([1.0, 1.03125, 1.125, 1.25, 1.5, 1.875], "limits, for 8:16:0.5"),
            "--large": (32, "ranks and microbatches of the large one; 0 for none"),
        },
    ),
    "adapters": (
        adapters,
        {
            "--ranks": (8, "pipeline ranks"),
            "--mixes": (["1x8x1", "8x8x1", "4x8x4", "2x4x4"], "counts, microbatches and steps"),
            "--schedules": (ADAPTED, "schedules beside auto"),
            "--weight": (0.02, "seconds of W"),
            "--update": (0.02, "seconds of an update"),
        },
    ),
    "second-model": (
        second_model,
        {
            "--ranks": (8, "pipeline ranks"),
            "--microbatches": ([16, 32], "of a step"),
            "--schedule": ("v-half", "of the trained model"),
            "--shares": ([0.25, 0.5, 1.0], "seconds of the second model, in those of the idle"),
            "--cases": (
                ["encoder", "copies", "ahead", "ahead, copies", "teacher"],
                "second models",
            ),
        },
    ),
    "varied": (
        varied,
        {
            "--shapes": (["4:8", "8:16"], "ranks and microbatches: P:M"),
            "--deviations": ([0.0, 10.0, 20.0, 40.0], "of the seconds of a pass, in percent"),
            "--draws": (200, "of each mean"),
        },
    ),
}
"""What each command runs; its options, with their defaults."""


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows a docstring as it is, and the default of each option."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Help)
    commands = parser.add_subparsers(dest="case", required=True, metavar="FEATURE")
    for name, (run, options) in CASES.items():
        about = cleandoc(run.__doc__ or "")
        own = commands.add_parser(
            name,
            help=about.splitlines()[0],
            description=about,
            formatter_class=_Help,
        )
        for flag, (default, meaning) in options.items():
            if default is False:
                own.add_argument(flag, action="store_true", help=meaning)
                continue
            many: dict[str, Any] = {"nargs": "*"} if isinstance(default, list) else {}
            kind = type(default[0] if many else default)
            own.add_argument(flag, type=kind, default=default, metavar="X", help=meaning, **many)
    args = parser.parse_args()
    run, _ = CASES[args.case]
    print(json.dumps({**run(args), **provenance.of_this_run()}))


if __name__ == "__main__":
    main()
