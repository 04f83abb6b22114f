"""Output of a plan: a table for people, JSON for programs, and arguments of Megatron-LM."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_zb.parsing import GIB, gib
from megatron_zb.plan.features.catalog import FEATURES, stands_apart
from megatron_zb.plan.prediction import overheads
from megatron_zb.plan.reasons import (
    gain,
    is_named_too,
    margin,
    named_as,
    of_given,
    reason,
    recommendation,
    recommended,
    sentences,
    worth,
)
from megatron_zb.plan.rows import PlanRow, Prediction, RankMemory
from megatron_zb.plan.search import Plan
from megatron_zb.plan.strategy import Strategy
from megatron_zb.schedules import layout

# --- arguments


WORTH_PAGE = "docs/worth_it.md"
_CHUNKS, _LAYOUT = "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout"
_OF_STAGES = (_CHUNKS, _LAYOUT)


def flags(prediction: Prediction, global_batch: int) -> list[str]:
    """Return the flags to paste, each with its value.

    Args:
        prediction: the choice.
        global_batch: samples of an iteration.
    """
    strategy = prediction.load.strategy
    out = [
        f"--tensor-model-parallel-size {strategy.tensor}",
        f"--pipeline-model-parallel-size {strategy.pipeline}",
        f"--micro-batch-size {strategy.microbatch}",
        f"--global-batch-size {global_batch}",
        f"--seq-length {prediction.load.sequence}",
        "--use-distributed-optimizer",
        *_precision(strategy),
        *_overlap(prediction),
    ]
    if strategy.tensor > 1 and strategy.sequence_parallel:
        out.append("--sequence-parallel")
    if strategy.context > 1:
        out.append(f"--context-parallel-size {strategy.context}")
    if strategy.gathers:
        out.append("--cp-comm-type all_gather")
    if strategy.expert > 1:
        out.append(f"--expert-model-parallel-size {strategy.expert}")
    if prediction.load.model.experts and strategy.expert_tensor != strategy.tensor:
        out.append(f"--expert-tensor-parallel-size {strategy.expert_tensor}")
    out += chain.from_iterable(feature.strategy_flags(strategy) for feature in FEATURES)
    return out + _schedule(prediction)


def _precision(strategy: Strategy) -> list[str]:
    return ["--bf16"] if strategy.precision == "bf16" else ["--bf16", "--fp8-format hybrid"]


def _overlap(prediction: Prediction) -> list[str]:
    strategy = prediction.load.strategy
    if not strategy.overlap or strategy.replicas == 1:
        return []
    gathering = [] if prediction.post_validation else ["--overlap-param-gather"]
    return ["--overlap-grad-reduce", *gathering]


def _schedule(prediction: Prediction) -> list[str]:
    model = prediction.load.model
    words = schedule_flags(prediction, prediction.memory_limit, model.prediction_layers)
    if model.pattern is None:
        return words
    return with_pattern(words, model.placed_pattern(prediction.layout))


def with_pattern(words: Sequence[str], pattern: str) -> list[str]:
    """Return the flags of a schedule with a hybrid pattern, whose segments are its stages."""
    rest = [word for word in words if not word.startswith(_OF_STAGES)]
    return [*rest, f"--hybrid-layer-pattern '{pattern}'"]


def schedule_flags(row: PlanRow, memory_limit: float | None, multi_token: int) -> list[str]:
    """Return the flags for the schedule of a row, its chunks and its layers.

    Args:
        row: the schedule, in its setting.
        memory_limit: the limit for a schedule of this package, as a fraction of 1F1B's activations.
        multi_token: layers of multi-token prediction.
    """
    out = [] if row.megatron else [f"--pipeline-schedule {row.family}"]
    out += chain.from_iterable(feature.flags(row) for feature in FEATURES)
    chunks = row.chunks
    if row.family == "auto" and row.schedule is not None:
        placement = row.schedule.placement  # bound, so that a run has the predicted one
        out.append(f"{_CHUNKS} {placement.chunks}")
        if placement.chunks > 1:
            out.append(f"--pipeline-placement {'loop' if placement.name == 'looped' else 'zigzag'}")
        chunks = None
    if memory_limit is not None and not row.megatron:
        out.append(f"--pipeline-memory-limit {memory_limit:g}")
    if chunks is not None and (row.has_by_default or not row.megatron):
        out.append(f"{_CHUNKS} {chunks}")  # a layout sets those of Megatron's own
    if not row.has_by_default:
        written = layout.text(layout.lettered(row.layout, multi_token))
        out.append(f"{_LAYOUT} '{written}'")
    return out


# --- the table


_SHORT = {
    "weights": "weights",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "weight_queue": "W queue",
    "logits": "logits",
    "messages": "p2p",
    "snapshot": "snapshot",
    "reserved": "other",
    "fragmentation": "fragm",
}


_OF_STRATEGY = "tensor pipeline data context expert expert_tensor precision microbatch".split()


def print_plan(plan: Plan, console: Console, top: int) -> None:
    """Print the ranked table, the memory of each row, why each lost, and the flags of the first."""
    job = plan.job
    console.print(
        Text(
            f"{job.model.name} on {job.gpus} {job.device.name}, {gib(job.memory)} each; "
            f"{job.global_batch} samples of {job.sequence} tokens in an iteration",
            style="bold",
        )
    )
    device = job.device
    console.print(
        Text(
            f"of each, {gib(device.reserved_bytes - device.fragmentation_bytes)} are left to CUDA "
            f"and communicators and {gib(device.fragmentation_bytes)} "
            f"({device.memory.fragmentation:.0%}) to fragments"
        ),
        soft_wrap=True,
    )
    shown = _shown(plan, top)
    console.print(_speed(plan, shown))
    console.print(_memory(plan, shown))
    if plan.given is not None:
        console.print(Text(f"{GIVEN:>2}  {of_given(plan)}"), highlight=False, soft_wrap=True)
    for place, index in shown:
        text = Text(f"{place:>2}  {reason(plan, index)}")
        console.print(text, highlight=False, soft_wrap=True)
    for name, why in plan.nothing_for.items():
        console.print(Text(f" -  {name}: {why}"), highlight=False)
    no_given = of_given(plan) if plan.given is None else None
    for said in filter(None, (no_given, *sentences(plan).values())):
        console.print(Text(f" -  {said}"), highlight=False, soft_wrap=True)
    if (beside := _overheads(plan.ranked[0])) is not None:
        console.print(Text(f" -  {beside}"), highlight=False, soft_wrap=True)
    console.print(Text(f"\nrecommendation: {recommendation(plan)}", style="bold"), soft_wrap=True)
    console.print(Text(f"memory: {margin(plan)}"), highlight=False, soft_wrap=True)
    _print_worth(plan, console)
    console.print(Text("\nflags of the first:", style="bold"))
    to_paste = " \\\n  ".join(flags(plan.ranked[0], job.global_batch))
    console.print(Text(f"  {to_paste}"), highlight=False, soft_wrap=True)
    console.print(
        Text(
            f"\n{plan.settings} settings by formula, {plan.simulated} simulated. Costs are "
            "counted, not measured: docs/validation.md lists the errors.",
            style="dim",
        )
    )


def _print_worth(plan: Plan, console: Console) -> None:
    """Print what changes beside Megatron's schedules, and where other jobs are compared."""
    for said in worth(plan):
        console.print(Text(f"worth it? {said}"), highlight=False, soft_wrap=True)
    console.print(Text(f"worth it? {WORTH_PAGE} has figures of other jobs"), soft_wrap=True)


def _overheads(row: Prediction) -> str | None:
    """Describe what the seconds of a row do not show; None where Megatron itself runs it."""
    found = overheads(row)
    if found is None:
        return None
    said = (
        f"{row.candidate}: on average, {found.waiting:.2f} NCCL kernels for messages wait on a GPU "
        "while it computes; what they take from the computation has not been measured, and is not "
        "in the times above"
    )
    if found.exposed:
        said += (
            f"; Megatron overlaps collectives of TP{row.load.strategy.tensor} with the weight "
            f"gradient, which a split backward cannot: they are {found.exposed:.1%} of an "
            "iteration, and the table counts them in all rows"
        )
    return said


def places(plan: Plan) -> list[tuple[int, int]]:
    """Return the place and the index of each row, without those that are another row's run."""
    rows = enumerate(plan.ranked)
    runs = [index for index, row in rows if not is_named_too(plan, row)]
    return list(enumerate(runs, start=1))


def _shown(plan: Plan, top: int) -> list[tuple[int, int]]:
    """Return the places and indices of the first rows.

    Megatron's own stand in the table wherever they rank, and so does the first of whole
    microbatches, and of parts of them.
    """
    rows = places(plan)
    of_whole = [not stands_apart(plan.ranked[index]) for _, index in rows]
    firsts = {of_whole.index(whole) for whole in set(of_whole)}
    return [
        (place, index)
        for at, (place, index) in enumerate(rows)
        if place <= top or plan.ranked[index].candidate.startswith("Megatron") or at in firsts
    ]


def _speed(plan: Plan, shown: list[tuple[int, int]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("#", justify="right")
    table.add_column("schedule", no_wrap=True)
    table.add_column("setting")
    rows, given = _rows(plan, shown), plan.given
    more = [it for it in plan.job.features if any(it.cell(plan, row) for _, row in rows)]
    of_given = ["gain"] if given is not None else []
    for title in ("tok/s/GPU", *of_given, "MFU", "bubble", "GiB", *(it.mark for it in more)):
        table.add_column(title, justify="right", no_wrap=True)
    for place, row in rows:
        lead = gain(plan, row)
        cells = [
            f"{row.tokens_per_gpu:.0f}",
            *([] if lead is None else ["" if row is given else f"{lead:+.1%}"]),
            f"{row.mfu:.1%}",
            f"{row.bubble:.1%}",
            f"{row.memory.total / GIB:.1f}",
            *(feature.cell(plan, row) for feature in more),
        ]
        style = "bold" if place == "1" else None
        table.add_row(place, name_in(plan, row), setting_of(row), *cells, style=style)
    return table


GIVEN = "="
"""The place of the run as given."""


def _rows(plan: Plan, shown: list[tuple[int, int]]) -> list[tuple[str, Prediction]]:
    """Return the place of each row as text, and the row; the run as given comes first."""
    first = [] if plan.given is None else [(GIVEN, plan.given)]
    return [*first, *((str(place), plan.ranked[index]) for place, index in shown)]


def _memory(plan: Plan, shown: list[tuple[int, int]]) -> Table:
    """Build the table of the worst rank's GiB, part by part; parts that no row has are left out."""
    rows = _rows(plan, shown)
    parts = [part for part in _SHORT if any(row.memory.parts()[part] for _, row in rows)]
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.title = Text("\nGiB of the worst rank", style="bold")
    table.add_column("#", justify="right")
    table.add_column("rank", justify="right")
    for part in parts:
        table.add_column(_SHORT[part], justify="right", no_wrap=True)
    for place, row in rows:
        memory: RankMemory = row.memory
        sizes = memory.parts()
        table.add_row(place, str(memory.rank), *(f"{sizes[part] / GIB:.1f}" for part in parts))
    return table


def name_in(plan: Plan, row: Prediction) -> str:
    """Return the name of a row, marked where ``auto`` is the same run."""
    is_auto = any(
        is_named_too(plan, other) and named_as(other) == row.candidate for other in plan.ranked
    )
    return f"{row.name} (auto)" if is_auto else row.name


def setting_of(row: Prediction) -> str:
    """Return the strategy as text, with marks of uneven layers and of features."""
    uneven = "" if row.has_by_default else " uneven"
    marks = "".join(
        f" {feature.mark}" for feature in FEATURES if feature.mark and feature.is_in(row)
    )
    return f"{row.load.strategy}{uneven}{marks}"


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as data for JSON, in seconds and bytes."""
    job = plan.job
    return {
        "model": job.model.name,
        "device": job.device.name,
        "gpus": job.gpus,
        "gpu_memory": job.memory,
        "fragmentation": job.device.fragmentation_bytes,
        "global_batch_size": job.global_batch,
        "sequence_length": job.sequence,
        **_given(plan),
        "ranked": [
            {**_row(plan, row), **_gain(plan, row), "reason": reason(plan, index)}
            for index, row in enumerate(plan.ranked)
        ],
        "not_possible": plan.nothing_for,
        "recommended": recommended(plan),
        "recommendation": recommendation(plan),
        "worth": worth(plan),
        "margin": margin(plan),
        **sentences(plan),
        "settings": plan.settings,
        "simulated": plan.simulated,
    }


def _given(plan: Plan) -> dict[str, Any]:
    """Return the run of a training's arguments, where there are some."""
    if plan.given is None:
        return {"why_not_given": plan.why_not_given} if plan.why_not_given else {}
    return {"given": {**_row(plan, plan.given), "reason": of_given(plan)}}


def _gain(plan: Plan, row: Prediction) -> dict[str, float]:
    more = gain(plan, row)
    return {} if more is None else {"gain": more}


def _row(plan: Plan, row: Prediction) -> dict[str, Any]:
    strategy, beside = row.load.strategy, overheads(row)
    return {
        "schedule": row.candidate,
        "runs": row.family,
        "chunks": row.chunks,
        **{name: getattr(strategy, name) for name in _OF_STRATEGY},
        "num_microbatches": row.num_microbatches,
        "recompute": strategy.recompute,
        "layout": layout.text(layout.lettered(row.layout)),
        **{key: of for it in plan.job.features for key, of in it.as_json(plan, row).items()},
        "seconds": row.seconds,
        "tokens_per_second_per_gpu": row.tokens_per_gpu,
        "mfu": row.mfu,
        "bubble": row.bubble,
        "waiting_kernels": None if beside is None else beside.waiting,
        "exposed_tensor_parallel": None if beside is None else beside.exposed,
        "memory": {"rank": row.memory.rank, "total": row.memory.total, **row.memory.parts()},
        "flags": flags(row, plan.job.global_batch),
    }
