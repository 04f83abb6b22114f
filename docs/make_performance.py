#!/usr/bin/env python3
"""Make the tables of docs/performance.md from the results of the benchmarks in docs/results.

python benchmarks/runtime_overhead.py | tail -n 1 > docs/results/runtime_overhead.cpu.json
python benchmarks/runtime_overhead.py --ranks 4 --exchange 0.5 \\
    --schedules v-half v-zb dualpipe-v interleaved | tail -n 1 \\
    > docs/results/sleeping_pairs.cpu.json
python benchmarks/prediction.py --output docs/results/prediction.cpu.json
python benchmarks/beside_megatron.py --turns 3 --steps 6 --warm-up 2 | tail -n 1 \\
    > docs/results/beside_megatron_1024.cpu.json
python docs/make_performance.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from make_reliability import with_table

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks" / "gpu"))
import report

PAGE = Path(__file__).resolve().parent / "performance.md"
RESULTS = PAGE.parent / "results"


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)


def page(text: str) -> str:
    """The page with its tables made anew."""
    split, ranks, runtime, prediction = (
        _result(f"{name}.cpu")
        for name in ("split_backward", "rank_memory", "runtime_overhead", "prediction")
    )
    text = with_table(text, "times", times(split["results"]))
    text = with_table(text, "held bytes", held_bytes(split["results"]))
    text = with_table(text, "memory of ranks", memory_of_ranks(ranks))
    text = with_table(text, "sleeping stages", sleeping_stages(runtime))
    text = with_table(text, "sleeping pairs", sleeping_pairs(_result("sleeping_pairs.cpu")))
    steps = [_result(f"beside_megatron_{vocabulary}.cpu") for vocabulary in (1024, 8192)]
    text = with_table(text, "cut, simulated", cut_makespans(_result("vocabulary")["makespans"]))
    text = with_table(text, "cut, steps", cut_steps(steps))
    for name in prediction["shapes"]:
        text = with_table(text, name, predicted(prediction, name))
    text = with_table(text, "gpus", of_gpus(_of_machines()))
    return with_table(text, "predictions", [summary(prediction)])


def _of_machines() -> list[dict[str, Any]]:
    """The files that scripts/gpu_check.sh has written, of machines with GPUs."""
    files = sorted(RESULTS.glob("gpu_check.*.json"))
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return [results for results in found if results["machine"].get("gpus")]


def of_gpus(machines: list[dict[str, Any]]) -> list[str]:
    """A table of each machine, or a line that says that there is none."""
    if not machines:
        return ["Nobody has sent a file yet: no figure of this page is of a GPU."]
    lines = []
    for results in machines:
        lines += ["", f"commit {results['commit']}, {results['date']}, {results['seconds']} s", ""]
        lines += ["| part | what | measured |", "|---|---|---|"]
        lines += [f"| {' | '.join(row)} |" for row in report.rows(results)]
    return lines[1:]


def _result(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def table(heads: str, numbers: int, rows: Iterable[str]) -> list[str]:
    """Lines of a table; the last columns are numbers."""
    texts = heads.count("|") - 1 - numbers
    return [heads, "|" + "---|" * texts + "---:|" * numbers, *rows]


def times(results: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each layer and type: milliseconds of its passes, and what splitting costs."""
    rows = []
    for result in results:
        seconds = (f"{1000 * result['seconds'][p]:.1f}" for p in ("F", "B", "W", "BW"))
        low, high = result["middle_half_of_ratios"]
        rows.append(
            f"| `{result['implementation']}` | {result['dtype']} | {' | '.join(seconds)} | "
            f"{result['ratio']:.3f} | {low:.3f} to {high:.3f} |"
        )
    heads = "| layer | type | F | B | W | BW | (F+B+W) / (F+BW) | middle half |"
    return table(heads, 6, rows)


def held_bytes(results: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each layer and type: MiB that a microbatch holds after each pass."""
    rows = []
    for result in results:
        held = (f"{number / 2**20:.1f}" for number in result["held_bytes"].values())
        rows.append(f"| `{result['implementation']}` | {result['dtype']} | {' | '.join(held)} |")
    return table("| layer | type | after F | after B | after W |", 3, rows)


def memory_of_ranks(ranks: dict[str, Any]) -> list[str]:
    """A line for each schedule: the peak of its worst rank."""
    rows = []
    for name, result in ranks["results"].items():
        target = ranks["targets_on_a_gpu"].get(name)
        cells = (
            f"`{name}`",
            f"{result['peak_bytes'] / 2**20:.1f}",
            f"{result['peak_bytes_ratio']:.3f}",
            f"{result['promised_microbatches_ratio']:.3f}",
            f"at most {target}" if target else "",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return table("| schedule | peak, MiB | of 1F1B's | simulated | target on a GPU |", 4, rows)


def sleeping_stages(runtime: dict[str, Any]) -> list[str]:
    """A line for each schedule: seconds of a step, simulated and measured."""
    rows = []
    for name, ratio in runtime["ratio"].items():
        simulated, steps = runtime["simulated_seconds"][name], runtime["measured_seconds"][name]
        rows.append(
            f"| `{name}` | {simulated:.3f} | {statistics.median(steps):.3f} | {ratio:.3f} | "
            f"{max(steps) / simulated:.3f} |"
        )
    heads = f"| schedule | simulated s | measured s | ratio | worst of {len(steps)} |"
    return table(heads, 4, rows)


def sleeping_pairs(runtime: dict[str, Any]) -> list[str]:
    """The same with an exchange between experts, and how far the worst median is off."""
    worst, bar = max(runtime["ratio"].values()), runtime["bars"]["any"]
    within = sum(ratio <= bar for ratio in runtime["ratio"].values())
    said = (
        f"The longest median is {100 * (worst - 1):.1f} % above the simulated time; {within} of "
        f"{len(runtime['ratio'])} are within the bar of {100 * (bar - 1):.0f} %."
    )
    return [said, "", *sleeping_stages(runtime)]


def cut_makespans(makespans: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each output layer and schedule: the makespans of layouts, and of the cut."""
    rows = []
    for row in makespans:
        columns = " | ".join(f"{row[key]:.1f}" for key in ("even", "best", "cut", "bound", "peak"))
        rows.append(f"| {row['output_layers']:g} layers | `{row['schedule']}` | {columns} |")
    heads = (
        "| output layer | schedule | even layers | best layers | cut | bound of the cut | peak |"
    )
    return table(heads, 5, rows)


def cut_steps(shapes: list[dict[str, Any]]) -> list[str]:
    """A line for each contender: its median step for each vocabulary, and how it is to stock's.

    The last of each three columns compares the fastest steps, which a busy machine delays least.
    """
    fastest = [{name: min(steps) for name, steps in shape["all_ms"].items()} for shape in shapes]
    rows = []
    for name in shapes[0]["ms"]:
        columns = " | ".join(
            f"{shape['ms'][name]:.0f} | {shape['over_stock'][name]:.3f} | "
            f"{least[name] / least['stock 1f1b']:.3f}"
            for shape, least in zip(shapes, fastest, strict=True)
        )
        rows.append(f"| {name} | {columns} |")
    sizes = " | ".join(
        f"{shape['sizes']['vocabulary']} words: ms | of stock's | fastest" for shape in shapes
    )
    return table(f"| | {sizes} |", 3 * len(shapes), rows)


def predicted(prediction: dict[str, Any], shape: str) -> list[str]:
    """A line for each schedule, the one that is predicted to be the fastest first."""
    rows = []
    for row in prediction["shapes"][shape]["rows"]:
        name, steps = row["schedule"], [1000 * seconds for seconds in row["steps"]]
        low, median, high = statistics.quantiles(steps, n=4)
        shown = name if name.startswith("Megatron") else f"`{name}`"
        rows.append(
            f"| {shown} | `{row['layers'].replace('|', ' ')}` | {1000 * row['predicted']:.1f} | "
            f"{median:.1f} | {low:.1f} to {high:.1f} | {prediction['off_by'][shape][name]:+.1%} |"
        )
    heads = "| schedule | layers | predicted ms | measured ms | middle half | off by |"
    return table(heads, 4, rows)


def summary(prediction: dict[str, Any]) -> str:
    """How well the bars of the benchmark are kept."""
    off = [abs(value) for shape in prediction["off_by"].values() for value in shape.values()]
    within = sum(value <= 0.05 for value in off)
    behind = (f"{100 * value:.1f} %" for value in prediction["first_behind_fastest"].values())
    machine = prediction["machine"]
    return (
        f"{within} of {len(off)} predictions are within 5 % of the measured median, the worst is "
        f"off by {100 * max(off):.1f} %, the median one by {100 * statistics.median(off):.1f} %. "
        "The schedule that is predicted to be the fastest was "
        f"{', '.join(behind)} behind the fastest measured. "
        f"Measured on {machine['name']}, {machine['cores']} cores, {prediction['date'][:10]}, "
        f"{prediction['rounds']} turns of each."
    )


if __name__ == "__main__":
    main()
