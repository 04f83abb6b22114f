"""Output of a plan's rows with sequences of unequal lengths, as a table and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_zb.planner.search import Plan
from megatron_zb.planner.table import name_in, setting_of
from megatron_zb.planner.unequal import UnequalPlan


def print_unequal(plan: Plan, unequal: UnequalPlan, console: Console) -> None:
    """Print the rows, fastest first, and what even packing would bring."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    source = unequal.source
    what = "packs of sequences" if source.packs else "single sequences"
    title = (
        f"\nwith {what} of unequal lengths, {source.mean} tokens a microbatch on average, at most "
        f"{source.most}"
    )
    console.print(Text(title, style="bold"), soft_wrap=True)
    for column in ("schedule", "setting"):
        table.add_column(column, no_wrap=True)
    for column in ("tok/s/GPU", "as fed"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in unequal.rows:
        of = plan.ranked[row.index]
        rates = (row.tokens_per_gpu, row.as_fed)
        shown = ("too long" if rate is None else f"{rate:.0f}" for rate in rates)
        table.add_row(name_in(plan, of), setting_of(of), *shown)
    console.print(table)
    console.print(Text(f" -  {advice(unequal)}"), highlight=False, soft_wrap=True)


def advice(unequal: UnequalPlan) -> str:
    """Return what the figures mean, and what even packing would bring the first row."""
    meaning = (
        "tok/s/GPU: in the order and with the passes that Pipeline.order of megatron_zb.bridge "
        "plans before each step; as fed: in the order in which microbatches come, as Megatron's "
        "own schedules run them"
    )
    if unequal.evenly is None:
        return meaning
    count, factor = unequal.evenly
    return (
        f"{meaning}; packed evenly into {count} microbatches a step, the same sequences would run "
        f"at {factor:.2f} times the speed of the first"
    )


def as_json(plan: Plan, unequal: UnequalPlan) -> dict[str, Any]:
    """Return the rows as data for JSON."""
    source, evenly = unequal.source, unequal.evenly
    return {
        "mean_tokens": source.mean,
        "most_tokens": source.most,
        "packs": source.packs,
        "rows": [
            {
                "schedule": plan.ranked[row.index].candidate,
                "index": row.index,
                "tokens_per_second_per_gpu": row.tokens_per_gpu,
                "as_fed": row.as_fed,
            }
            for row in unequal.rows
        ],
        "packed_evenly": None
        if evenly is None
        else {"microbatches": evenly[0], "speed": evenly[1]},
    }
