"""Is it worth it: every figure of the page is computed, or is that of a file of results."""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from megatron_zb import schedules
from megatron_zb.schedules import Costs

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.append(str(DOCS))
import make_performance  # noqa: E402
import make_recipes  # noqa: E402

TEXT = (DOCS / "worth_it.md").read_text(encoding="utf-8")
PAGE = " ".join(re.sub(r"\]\([^)]*\)", "]", TEXT).split())
ROWS = make_recipes.result()["rows"]

Row = dict[str, Any]


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "results" / name).read_text(encoding="utf-8"))
    return found


def median_gain(rows: list[Row]) -> float:
    return 100 * statistics.median(map(make_recipes.gain, rows))


def median_ratio(rows: list[Row], of: str, to: str) -> float:
    return statistics.median(row[of] / row[to] for row in rows)


def recipes() -> Iterator[str]:
    """The table of recipes, and what the sections repeat of it."""
    yield f"Megatron-Bridge has {len(ROWS)} public recipes"
    sizes = {"m >= 8p": (8.0, math.inf), "2p <= m < 8p": (2.0, 8.0), "m < 2p": (0.0, 2.0)}
    for size, (least_share, below) in sizes.items():
        for today, chunks in (("interleaved", True), ("1F1B", False)):
            rows = [
                row
                for row in ROWS
                if least_share <= row["microbatches"] / row["pipeline"] < below
                and (row["chunks"] > 1) == chunks
            ]
            gain = f"{median_gain(rows):.1f} %"
            time = median_ratio(rows, "v_half", "own")
            memory = median_ratio(rows, "v_half_memory", "own_memory")
            yield f"| {size} | {today} | {len(rows)} | {gain} | {time:.2f} | {memory:.2f} |"
            if (size, today) == ("m >= 8p", "interleaved"):
                yield f"little time to gain: {gain} in the median"
                yield (
                    f"holds {memory:.2f} of the activations and takes {100 * (time - 1):.1f} % "
                    "longer"
                )
            if (size, today) == ("m < 2p", "1F1B"):
                assert all(make_recipes.bubble(row) > 1 / 3 for row in rows)
                yield f"is {gain} faster in the same memory (median of {len(rows)} recipes)"
            if (size, today) == ("m < 2p", "interleaved"):
                least = min(map(make_recipes.gain, rows))
                yield (
                    f"it is {gain} faster ({len(rows)} recipes), and one of these recipes is "
                    f"{100 * (1 / (1 + least) - 1):.1f} % faster"
                )


def fine_tuning() -> Iterator[str]:
    tuned = [row for row in ROWS if "sft" in row["recipe"]]
    plain = [row for row in tuned if row["chunks"] == 1]
    others = [row for row in tuned if row["chunks"] > 1]
    yield f"Of the {len(tuned)} SFT recipes, {len(plain)} run 1F1B"
    yield (
        f"`auto` is {median_gain(plain):.1f} % faster than these, and {median_gain(others):.1f} % "
        f"faster than the {len(others)} that run interleaved 1F1B"
    )
    planned = re.search(r"v-zb, planned ([\d.]+) ", page("performance.md"))
    assert planned is not None
    yield f"took `v-zb` to {planned[1]} of 1F1B's time, measured on 2 CPU ranks"


def page(name: str) -> str:
    return " ".join((DOCS / name).read_text(encoding="utf-8").split())


@cache
def step(name: str, m: int, weight: float, p2p: float, chunks: int | None = None) -> Any:
    """The simulated step of a schedule on 8 ranks."""
    costs = Costs.uniform(pipeline_size=8, forward=1, backward=1.2, weight=weight, p2p=p2p)
    built = schedules.build(name, pipeline_size=8, num_microbatches=m, costs=costs, chunks=chunks)
    return schedules.simulate(built, costs)


def adapters() -> Iterator[str]:
    own, zb_h1, v_zb = (step(n, 16, 0, 0.05).makespan for n in ("1f1b", "zb-h1", "v-zb"))
    interleaved = min(step("interleaved", 16, 0, 0.05, chunks).makespan for chunks in (2, 4, 8))
    assert interleaved == step("interleaved", 16, 0, 0.05, 4).makespan
    yield "8 ranks and 16 microbatches"
    yield f"`v-zb` is {100 * (own / v_zb - 1):.0f} % faster than 1F1B"
    yield f"but {100 * (v_zb / interleaved - 1):.0f} % slower than interleaved 1F1B with 4 chunks"
    assert abs(zb_h1 - own) < 1e-9
    yield "`zb-h1` is as fast as 1F1B"


def links() -> Iterator[str]:
    names = {
        "1F1B": ("1f1b", None),
        "interleaved, 2 chunks": ("interleaved", 2),
        "interleaved, 4 chunks": ("interleaved", 4),
        "`zb-h1`": ("zb-h1", None),
        "`v-zb`": ("v-zb", None),
        "`v-half`": ("v-half", None),
    }
    yield "On 8 ranks with 32 microbatches"
    yield "| schedule | activations | 0.05 | 0.2 | 0.5 |"
    for shown, (name, chunks) in names.items():
        steps = [step(name, 32, 0.8, p2p, chunks) for p2p in (0.05, 0.2, 0.5)]
        times = " | ".join(f"{each.makespan:.2f}" for each in steps)
        yield f"| {shown} | {max(steps[0].peak_activation) / 8:.2f} | {times} |"


def long_context() -> Iterator[str]:
    gained = 0
    cases = results("slices_plan.json")["cases"]
    for case in cases:
        cells = [
            f"{row['tokens_per_second_per_gpu']:.0f}" if row else "nothing fits"
            for row in (case[name] for name in ("sliced", "whole", "megatron_full"))
        ]
        gained += int(cells[0]) > int(cells[1])
        yield f"| {case['gpus']}, {case['tokens'] // 1024}k | {' | '.join(cells)} |"
    assert (gained, len(cases)) == (1, 4)
    yield "Slices gain in one of four cases"


def experts() -> Iterator[str]:
    found = results("pairs.json")
    rows = {(r["schedule"], r["peak"]): r for r in found["rows"] if r["comm"] == 0.5}
    own = rows["interleaved x4", 10.0]
    same, less = rows["auto", 10.0], rows["auto", 8.0]
    fewer = rows["interleaved x2", 12.0]
    assert fewer["makespan"] > own["makespan"]
    yield (
        "with 4 chunks and overlap takes "
        f"{own['makespan']:.1f}, in units of one forward on one rank "
        f"({found['ranks']} ranks, {found['microbatches']} microbatches)"
    )
    faster = 100 * (own["makespan"] / same["makespan"] - 1)
    yield f"`auto` takes {same['makespan']:.1f} in the same memory, which is {faster:.1f} % faster"
    yield f"It takes {less['makespan']:.1f} in {8 / 10:.2f} of the memory"
    yield f"the interleaved schedule takes {own['without_pairs']:.1f}"


def vocabulary() -> Iterator[str]:
    found = results("vocabulary.json")
    [row] = (
        row
        for row in found["makespans"]
        if (row["output_layers"], row["schedule"]) == (2.35, "v-zb")
    )
    layers, ranks = found["sizes"]["layers"], found["sizes"]["ranks"]
    yield f"If it costs 2.35 layers of {layers}, on {ranks} ranks, `v-zb` takes {row['best']:.1f}"
    faster = 100 * (row["best"] / row["cut"] - 1)
    yield f"and {row['cut']:.1f} with `--pipeline-vocabulary on`, which is {faster:.0f} % faster"
    predicted = r"parallelism to be ([\d.]+) % faster than Megatron's best interleaved"
    planned = re.search(predicted, page("../README.md"))
    assert planned is not None  # tests/docs/test_readme.py runs the command
    yield f"puts `v-half` with it {planned[1]} % ahead of Megatron-LM's best interleaved setting"
    yield "Llama 3 70B on 128 H100s"
    yield from measured_steps()
    [differed] = re.findall(r"steps differ by up to ([\d.]+) times", page("performance.md"))
    yield f"steps differed by up to {differed} times"
    yield "`pretrain_gpt.py` on 2 CPU ranks, measured"


def measured_steps() -> Iterator[str]:
    """The rows of docs/performance.md that the page repeats by column."""
    lines = (DOCS / "performance.md").read_text(encoding="utf-8").splitlines()
    own, v_zb = (
        [cell.strip() for cell in line.split("|")[2:6]]
        for start in ("| Megatron interleaved |", "| v-zb |")
        for line in lines
        if line.startswith(start)
    )
    yield f"| 1024 | {own[0]} | {v_zb[0]} | {v_zb[1]} |"
    yield f"| 8192 | {own[2]} | {v_zb[2]} | {v_zb[3]} |"


def memory() -> Iterator[str]:
    [found] = make_performance.gpu_results()
    measured = found["measurements"]
    held = measured["rank_memory_transformer_engine"]["results"]
    half, least = (held[name]["peak_bytes_ratio"] for name in ("v-half", "v-min"))
    yield f"`v-half` allocated {half:.2f} of 1F1B's activations, and `v-min` {least:.2f}"
    sliced = measured["rank_memory_of_slices"]["results"]["1f1b+4slices"]
    yield "samples of 16384 tokens in 4 slices"
    yield (
        f"allocated {sliced['peak_bytes_ratio']:.2f} of the activations and took "
        f"{sliced['seconds_ratio']:.2f} of the time"
    )
    counts = make_recipes._without_recomputation(ROWS)
    yield f"in {counts['fit']} of {counts['selective']} recipes"
    yield f"in {counts['median']:.2f} of the time (median)"
    [less] = re.findall(r"in half of 1F1B's memory, ([\d.]+)% less", page("schedules.md"))
    yield f"on 2 CPU ranks took {less} % less than 1F1B with every layer recomputed"


def test_every_figure_of_the_page_is_computed() -> None:
    """What is computed is in the text, and no other figure is left when it is taken out."""
    text = PAGE
    groups = (
        recipes(),
        fine_tuning(),
        adapters(),
        links(),
        long_context(),
        experts(),
        vocabulary(),
        memory(),
    )
    for said in (said for group in groups for said in group):
        assert said in text, said
        text = text.replace(said, "")
    for said in ("that is 5 % *faster* runs 5 %", "5 % *slower*, a step takes 5 %"):
        text = text.replace(said, "")
    text = re.sub(r"```.*?```|`[^`]*`|1F1B(?:'s)?|H[12]00s?|Llama 3 70B|[2-8]p\b|p = 1", "", text)
    left = re.findall(r"\S*\d\S*", text)
    questions = ["1.", "2.", "3.", "4.", "5.", "8", "1?**"]
    assert [each for each in left if each not in questions] == []


def test_what_the_table_in_short_puts_in_words_holds() -> None:
    """Half the activations at the same speed, and what slow links cost."""
    many = [r for r in ROWS if r["microbatches"] >= 8 * r["pipeline"] and r["chunks"] > 1]
    assert median_ratio(many, "v_half", "own") < 1.02
    assert median_ratio(many, "v_half_memory", "own_memory") < 0.55
    v_half, v_zb = (step(name, 32, 0.8, 0.5).makespan for name in ("v-half", "v-zb"))
    interleaved = min(step("interleaved", 32, 0.8, 0.5, chunks).makespan for chunks in (2, 4, 8))
    assert v_half > 1.1 * interleaved
    assert 0.95 * interleaved < v_zb < interleaved
