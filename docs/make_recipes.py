#!/usr/bin/env python3
"""Write docs/recipes.md from docs/results/recipe_gains.json and hybrid_recipes.json.

They are of benchmarks/recipe_gains.py and benchmarks/hybrid_recipes.py.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "recipes.md"
RESULT = ROOT / "docs" / "results" / "recipe_gains.json"
HYBRIDS = RESULT.with_name("hybrid_recipes.json")
WORTH_IT = 0.05
SHOWN = 6
GROUPS = {
    "recipes": "performance pre-training",
    "recipes_other": "other pre-training, fine-tuning, LoRA",
}

Row = dict[str, Any]

INTRODUCTION = """\
# What does my recipe gain?

This page is for somebody who trains with a recipe of Megatron-Bridge, or with similar sizes. It
shows how much such a recipe would gain by a schedule of this package, in time and in memory. At
the end you can find a recipe like yours, and the flags to try. All figures are simulated. [Is it
worth it?](worth_it.md) goes through the same question by kind of job.

Of the public recipes of Megatron-Bridge (August 2026), {sized} have a pipeline, and a batch that
its ranks divide. `benchmarks/recipe_gains.py` simulates each recipe three times: with its own
schedule (1F1B or interleaved 1F1B), with the fastest order of `auto` on a V in the same
activation memory, and with `v-half`. Stages are equal there. F, B and W (forward, input gradient
and weight gradient) take {forward}, {backward} and {weight} on each rank, and a message takes
{p2p}. Layers, overlaps and kernels are left out, so use the figures to find recipes like yours.
Then run `megatron-zb plan` for your model, which counts these as well:

```
megatron-zb plan --config llama3_70b --gpus 128 --device h100_sxm
```

In this table, *bubble* is the idle share of the recipe's own schedule. *Gain* is how much faster
the V is in the same memory.
"""
RECOMPUTATION = """\
The last column counts recipes for which `v-half` is no slower than the recipe's own schedule, and
holds at most 0.65 of its activations. For example, a pre-training recipe with many microbatches
mostly has a small bubble, so few of these gain time, and more of them gain memory.

**Recomputation.** Some recipes use Megatron-LM's selective recomputation to fit into memory. In
{fit} of {selective} such recipes whose layers are counted, a V holds all activations in the bytes
that the recipe's own schedule needs with recomputation. So recomputation could be removed. The
time is then {least:.2f} to {most:.2f} of the recipe's (median {median:.2f}). This does not yet
count the time that recomputation took. Of the {full} recipes with full recomputation, none could
do without it.
"""
BEST = """\
*p, m, chunks* are the pipeline ranks, the microbatches of a step, and the chunks (virtual stages)
of a rank. With one chunk, the recipe runs 1F1B. The last column has the time and the memory of
`v-half`, relative to the recipe's own schedule. A time of 0.77 is 23 % less.
"""
HYBRID = """\
Layers of a hybrid model differ, so that stages with as many letters of its pattern take unequally
long. This table has the {count} recipes without a layout whose model is, or can be, written as such
a pattern: Nemotron 3, and Qwen3-Next, whose recipes train a `GPTModel`. LoRA and context
parallelism are left out. `benchmarks/hybrid_recipes.py` counts
them as `megatron-zb plan` does, on the GPUs in their names. Each gain is relative to the recipe's
own schedule with as many letters on each stage. *Balanced* is `v-zb` with stages of equal work.
*Sharded* also has a vocabulary-parallel output layer.
"""
FLAGS = """\
In Megatron-LM, add `--pipeline-schedule auto` to the arguments. In Megatron-Bridge, give
`Settings(pipeline_schedule="auto")` ([how](fine_tuning.md#lora-with-megatron-bridge)). Then
remove its virtual stages and its layout, because `auto` places the layers itself. `auto` uses
1F1B's memory.

An interleaved recipe may hold more than 1F1B. To give `auto` the same memory, set
`--pipeline-memory-limit`. Its value is the recipe's `own_memory` in the results, which is in
microbatches, divided by p (or by m, if m is smaller). For example, `own_memory` 9.75 on 8 ranks
is `--pipeline-memory-limit 1.22`.
"""


def gain(row: Row) -> float:
    """Return how much faster the best order in the same memory is."""
    return float(row["own"] / row["auto"] - 1)


def bubble(row: Row) -> float:
    """Return the bubble of the recipe's own schedule."""
    costs = result()["costs"]
    work = row["microbatches"] * (costs["forward"] + costs["backward"] + costs["weight"])
    return float(1 - work / row["own"])


def halves(row: Row) -> bool:
    """Return whether v-half takes at most 0.65 of the memory and is no slower."""
    return bool(row["v_half_memory"] <= 0.65 * row["own_memory"] and row["v_half"] <= row["own"])


def _without_recomputation(rows: Sequence[Row]) -> dict[str, float]:
    """Count the recipes that recompute, and those that a V spares it in the same bytes."""
    counted = [row for row in rows if "kept" in row]
    selective = [row for row in counted if row["recompute"] == "selective"]
    times = [row["without"] / row["own"] for row in selective if row["without"] is not None]
    full = [row for row in counted if row["recompute"] == "full"]
    assert not any(row["without"] for row in full), "the page says that none of these fits"
    sizes = {"fit": len(times), "selective": len(selective), "full": len(full)}
    return {**sizes, "least": min(times), "most": max(times), "median": statistics.median(times)}


def result() -> dict[str, Any]:
    """Read the result of the simulation."""
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return found


def lines() -> Iterator[str]:
    """Yield the blocks of the page."""
    found = result()
    rows = found["rows"]
    yield INTRODUCTION.format(sized=len(rows), **found["costs"])
    yield "\n".join(_summary(rows))
    yield RECOMPUTATION.format(**_without_recomputation(rows))
    better = sorted((row for row in rows if gain(row) > WORTH_IT), key=gain, reverse=True)
    yield f"## The {SHOWN} recipes that gain the most in the same memory"
    yield "\n".join(_table(better[:SHOWN]))
    yield BEST
    yield f"[The results](results/{RESULT.name}) have all {len(rows)} recipes."
    hybrids = json.loads(HYBRIDS.read_text(encoding="utf-8"))["rows"]
    yield "## Recipes of hybrid models"
    yield HYBRID.format(count=len(hybrids))
    yield "\n".join(_hybrids(hybrids))
    yield "## Flags"
    yield FLAGS


HEADINGS = (
    "kind of recipe",
    "recipes",
    "median bubble",
    "recipes that gain more than 5 %",
    "median gain of these",
    "recipes with `v-half` no slower in 0.65 of the memory",
)
COLUMNS = ("recipes", "p, m, chunks", "bubble today", "gain", "time and memory of `v-half`")


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    yield from _headings(HEADINGS)
    for stem, name in GROUPS.items():
        group = [row for row in rows if row["from"] == stem]
        gains = [gain(row) for row in group if gain(row) > WORTH_IT]
        halved = [row for row in group if halves(row)]
        yield _line(
            name,
            len(group),
            f"{statistics.median(map(bubble, group)):.1%}",
            len(gains),
            f"{statistics.median(gains):.0%}" if gains else "-",
            len(halved),
        )


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each shape, with the recipes that have it."""
    yield from _headings(COLUMNS)
    shapes: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        assert row["own_memory"] <= min(row["pipeline"], row["microbatches"]), "needs a limit"
        shape: tuple[int, ...] = (row["pipeline"], row["microbatches"], row["chunks"])
        shapes.setdefault(shape, []).append(row)
    for shape, same in shapes.items():
        row = same[0]
        assert all(other["own"] == row["own"] and other["auto"] == row["auto"] for other in same)
        time, memory = row["v_half"] / row["own"], row["v_half_memory"] / row["own_memory"]
        yield _line(
            ", ".join(re.sub(r"_config$", "", each["recipe"]) for each in same),
            ", ".join(map(str, shape)),
            f"{bubble(row):.0%}",
            f"{gain(row):+.0%}",
            f"{time:.2f}, {memory:.2f}",
        )


def _hybrids(rows: Sequence[Row]) -> Iterator[str]:
    ways = ("even", "balanced", "sharded")
    yield from _headings(("recipe", "p, m, chunks", *(f"`v-zb`, {way}" for way in ways)))
    for row in rows:
        yield _line(
            re.sub(r"_config$", "", row["recipe"]),
            f"{row['pipeline']}, {row['microbatches']}, {row['chunks']}",
            *(f"{row['own'] / row[way] - 1:+.1%}" for way in ways),
        )


def _headings(names: Sequence[str]) -> Iterator[str]:
    yield _line(*names)
    yield "|---|" + "---:|" * (len(names) - 1)


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    PAGE.write_text("\n\n".join(block.rstrip("\n") for block in lines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
