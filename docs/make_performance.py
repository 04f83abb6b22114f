#!/usr/bin/env python3
r"""Make the tables of docs/performance.md from the results of the benchmarks in docs/results.

The page names the benchmarks, some with a commit that has their script. These need options;
prediction.py takes half an hour, the others up to five minutes. Run them on an idle machine.

python benchmarks/runtime_overhead.py | tail -n 1 > docs/results/runtime_overhead.cpu.json
python benchmarks/runtime_overhead.py --ranks 4 --exchange 0.5 \
    --schedules v-half v-zb dualpipe-v interleaved | tail -n 1 \
    > docs/results/sleeping_pairs.cpu.json
python benchmarks/prediction.py --output docs/results/prediction.cpu.json
python benchmarks/beside_megatron.py --checkout Megatron-LM --turns 3 --steps 6 --warm-up 2 \
    | tail -n 1 > docs/results/beside_megatron_1024.cpu.json
python benchmarks/beside_megatron.py --checkout Megatron-LM --turns 3 --steps 6 --warm-up 2 \
    --vocabulary 8192 | tail -n 1 > docs/results/beside_megatron_8192.cpu.json
python benchmarks/feature_gains.py vocabulary --prediction-layers 1 --schedules v-zb \
    | tail -n 1 > docs/results/vocabulary_prediction.json
python docs/make_performance.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from make_reliability import with_table

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks" / "gpu"))
import report

PAGE = Path(__file__).resolve().parent / "performance.md"
RESULTS = PAGE.parent / "results"
UNSHOWN = ("machine", "queues_1_eager", "queues_8_lazy")  # two of four settings are shown
NO_PAIRS = ", no pairs"


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)


def page(text: str) -> str:
    """The page with its tables made anew."""
    runtime, prediction = (_result(f"{name}.cpu") for name in ("runtime_overhead", "prediction"))
    text = with_table(text, "stages", sleeping_stages(runtime))
    text = with_table(text, "pairs", sleeping_pairs(_result("sleeping_pairs.cpu")))
    steps = [_result(f"beside_megatron_{vocabulary}.cpu") for vocabulary in (1024, 8192)]
    makespans = [_result(name) for name in ("vocabulary", "vocabulary_prediction")]
    text = with_table(text, "vocabulary", vocabulary_makespans(makespans))
    text = with_table(text, "steps", vocabulary_steps(steps))
    text = with_table(text, "heavy", heavy_output(_result("heavy_output.cpu")))
    text = with_table(text, "first", first_step(_result("first_step.cpu")))
    text = with_table(text, "unequal", unequal_steps(_result("unequal_steps.cpu")))
    text = with_table(text, "host", host_overhead(_result("host_overhead.cpu")))
    text = with_table(text, "gpus", of_gpus(gpu_results()))
    return with_table(text, "predictions", [summary(prediction), "", *predicted(prediction)])


def gpu_results() -> list[dict[str, Any]]:
    """Return what scripts/gpu_check.sh and run_all.sh have measured, once for each kind of machine.

    Of what was measured twice on a kind of machine, the file that sorts last counts.
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for file in sorted(RESULTS.glob("gpu_check.*.json")):
        results = json.loads(file.read_text(encoding="utf-8"))
        machine = results["machine"]
        if not machine.get("gpus"):
            continue
        known = found.setdefault((machine["gpu"], machine["gpus"]), results)
        if known is not results:
            known["commit"] += f" and {results['commit']}"
            known["machine"] |= machine
            known["measurements"] |= results["measurements"]
    return list(found.values())


def of_gpus(machines: list[dict[str, Any]]) -> list[str]:
    """A table of each machine, or one line where there is none."""
    if not machines:
        return ["No GPU result has been submitted yet."]
    lines = []
    for results in machines:
        rows = report.rows(results)
        device, *versions = (row for row in rows if row.part == "machine")
        machine = ", ".join(f"{row.what} {row.measured}" for row in versions)
        at = f"on {results['date']}, at commit {results['commit']}"
        lines += ["", f"On {device.measured}, with {machine}, {at}.", ""]
        lines += ["| what | measured |", "|---|---|"]
        lines += [f"| {what} | {measured} |" for measured, what in _by_outcome(rows).items()]
    return lines[1:]


def _by_outcome(rows: Iterable[report.Row]) -> dict[str, str]:
    """Join what came to the same; the queues of a GPU go by their settings."""
    found: dict[str, list[str]] = {}
    for part, what, measured in rows:
        if part not in UNSHOWN:
            names = found.setdefault(measured, [])
            names.append(f"{what} ({_settings_of(part)})" if part.startswith("queues") else what)
    return {measured: "; ".join(dict.fromkeys(names)) for measured, names in found.items()}


def _settings_of(part: str) -> str:
    """Return the settings of CUDA in a part's name, such as queues_1_lazy."""
    name, *settings = part.split("_")
    if len(settings) != 2:
        return name
    connections, loading = settings
    return f"`CUDA_DEVICE_MAX_CONNECTIONS={connections} CUDA_MODULE_LOADING={loading.upper()}`"


def _result(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def table(heads: str, numbers: int, rows: Iterable[str]) -> list[str]:
    """Lines of a table; the last columns are numbers."""
    texts = heads.count("|") - 1 - numbers
    return [heads, "|" + "---|" * texts + "---:|" * numbers, *rows]


def sleeping_stages(runtime: dict[str, Any]) -> list[str]:
    """How measured steps of all schedules compare with simulated ones, the slowest by name."""
    ratios = sorted((ratio, name) for name, ratio in runtime["ratio"].items())
    (second, _), (last, slowest) = ratios[-2:]
    steps = runtime["measured_seconds"]
    worst = {name: max(steps[name]) / runtime["simulated_seconds"][name] for name in steps}
    most = max(each for name, each in worst.items() if name != slowest)
    seconds = runtime["simulated_seconds"].values()
    said = (
        f"Simulated steps take {min(seconds):.3f} to {max(seconds):.3f} s. Measured steps, the "
        f"median of {len(steps[slowest])}, take {ratios[0][0]:.3f} to {second:.3f} times as long "
        f"for {len(ratios) - 1} of {len(ratios)} schedules, and no single step takes more than "
        f"{most:.3f} times as long. For `{slowest}`, the median takes {last:.3f} times as long, "
        f"and the worst step {worst[slowest]:.3f} times."
    )
    return textwrap.wrap(said, 120, break_on_hyphens=False)


def sleeping_pairs(runtime: dict[str, Any]) -> list[str]:
    """The same with an expert all-to-all: each order with its pairs, and without them."""
    worst, bar = max(runtime["ratio"].values()), runtime["bars"]["any"]
    within = sum(ratio <= bar for ratio in runtime["ratio"].values())
    summary = (
        f"Measured medians are at most {100 * (worst - 1):.1f} % above the simulated time. "
        f"{within} of {len(runtime['ratio'])} meet the target of {100 * (bar - 1):.0f} %."
    )
    simulated = runtime["simulated_seconds"]
    gains = ", ".join(
        f"{simulated[name]:.3f} instead of {simulated[f'{name}{NO_PAIRS}']:.3f} s with `{name}`"
        for name in runtime["ratio"]
        if not name.endswith(NO_PAIRS)
    )
    return [summary, "", *textwrap.wrap(f"With pairs, simulated steps take {gains}.", 120)]


def vocabulary_makespans(results: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each schedule: the makespans of layouts and of the shards, by output layer."""
    layers: dict[str, None] = {}
    cells: dict[str, list[str]] = {}
    for result in results:
        depths = result["sizes"].get("prediction_layers")
        for row in result["makespans"]:
            layers[f"{row['output_layers']:g}"] = None
            name = f"`{row['schedule']}`" + (", with a prediction layer" if depths else "")
            cells.setdefault(name, []).extend(f"{row[key]:.1f}" for key in ("even", "best", "cut"))
    rows = [f"| {name} | {' | '.join(of)} |" for name, of in cells.items()]
    heads = " | ".join(
        f"{each} layers: even | {each} layers: best | {each} layers: vocabulary parallel"
        for each in layers
    )
    return table(f"| schedule | {heads} |", 3 * len(layers), rows)


def vocabulary_steps(shapes: list[dict[str, Any]]) -> list[str]:
    """A line for each contender: its fastest step for each vocabulary, relative to Megatron's 1F1B.

    A busy machine delays the fastest steps least.
    """
    fastest = [{name: min(steps) for name, steps in shape["all_ms"].items()} for shape in shapes]
    rows = []
    for name in shapes[0]["ms"]:
        if name.endswith(", cut"):
            continue
        cells = [
            f"{least[each] / least['upstream 1f1b']:.3f}" if each in least else ""
            for least in fastest
            for each in (name, f"{name}, cut")
        ]
        rows.append(f"| {name.replace('upstream', 'Megatron')} | {' | '.join(cells)} |")
    words = [shape["sizes"]["vocabulary"] for shape in shapes]
    sizes = " | ".join(f"{each} words | {each} words, vocabulary parallel" for each in words)
    return table(f"| schedule | {sizes} |", 2 * len(shapes), rows)


def heavy_output(found: dict[str, Any]) -> list[str]:
    """How `auto` compares with the best of the others."""
    simulated, measured = found["simulated"], found["measured"]
    best = min(measured, key=lambda name: float(measured[name]))
    behind = measured["auto"] / measured[best] - 1
    summary = (
        f"In the simulation, no schedule is faster than `auto`. Measured, `auto` takes "
        f"{100 * behind:.2f} % longer than the fastest, `{best}`."
    )
    assert simulated["auto"] <= min(simulated.values()) * (1 + 1e-9)
    return [summary]


def first_step(found: dict[str, Any]) -> list[str]:
    """What the first step of each contender takes longer, of what one rank sleeps."""
    own = "upstream 1f1b"
    shown = {name: f"{row['of_one_rank']:.1f}" for name, row in found["results"].items()}
    names = dict.fromkeys(name.partition(",")[0] for name in shown if name != own)
    return [
        "| schedule | without a warm-up | with a warm-up |",
        "|---|---|---|",
        f"| Megatron's own 1F1B | {shown[own]} | - |",
        *(f"| `{n}` | {shown[f'{n}, no warm-up']} | {shown[f'{n}, warm-up']} |" for n in names),
    ]


def unequal_steps(found: dict[str, Any]) -> list[str]:
    """What each contender's step takes of Megatron's, by medians, and those of single runs."""
    sizes, lengths = found["sizes"], found["lengths"]
    (upstream, base), *others = found["ms"].items()
    shown = []
    for name, milliseconds in others:
        runs = sorted(statistics.median(run) / base for run in found["all_ms"][name])
        spread = f"{runs[0]:.2f} to {runs[-1]:.2f}"
        named = name.replace(upstream, "1F1B")
        shown.append(f"- {named} {milliseconds / base:.2f} ({spread})")
    own = sorted(statistics.median(run) / base for run in found["all_ms"][upstream])
    sentence = (
        f"On {sizes['ranks']} CPU ranks, hidden size {sizes['hidden']}, {len(lengths)} sequences "
        f"of {min(lengths)} to {max(lengths)} tokens: time of a step relative to Megatron-LM's "
        f"1F1B (single runs: {own[0]:.2f} to {own[-1]:.2f}), the median of {sizes['turns']} runs, "
        "and in parentheses single runs:"
    )
    return [*textwrap.wrap(sentence, 120), "", *shown]


def host_overhead(found: dict[str, Any]) -> list[str]:
    """A line for each pair of runtimes: ratios of processor time on each number of ranks."""
    ranks = list(found["by_ranks"])
    rows = []
    for of, (ours, shown, other) in (
        ("megatron", ("1f1b", "`1f1b`", "Megatron's 1F1B")),
        ("megatron", ("interleaved", "`interleaved`", "Megatron's interleaved")),
        ("torch", ("zbv-table", "torch's ZBV order", "torch's runtime")),
        ("torch", ("dualpipe-v-table", "torch's DualPipeV order", "torch's runtime")),
    ):
        cells = [
            ", ".join(f"{found['by_ranks'][n][f'{part}over_{of}'][ours]:.3f}" for n in ranks)
            for part in ("", "outside_")
        ]
        passes = [found["by_ranks"][n]["contenders"][ours]["outside"] for n in ranks]
        cells.append(", ".join(f"{each['us_per_pass']:.0f}" for each in passes))
        rows.append(f"| {shown} | {other} | {' | '.join(cells)} |")
    heads = (
        "| order | relative to | whole step | outside forward and autograd | µs per pass outside |"
    )
    return [
        f"Each cell has the figures on {' and on '.join(ranks)} ranks.",
        "",
        *table(heads, 3, rows),
    ]


def predicted(prediction: dict[str, Any]) -> list[str]:
    """A line for each schedule of interest: its milliseconds, and how far a prediction is off."""
    shapes = prediction["shapes"]
    lines: dict[str, list[str]] = {}
    for shape, found in shapes.items():
        medians = {row["schedule"]: statistics.median(row["steps"]) for row in found["rows"]}
        times = {row["schedule"]: row["predicted"] for row in found["rows"]}
        own = [name for name in medians if name.startswith("Megatron")]
        first = min(times, key=lambda name: float(times[name]))
        best = min(medians, key=lambda name: medians[name])
        auto = next(name for name in medians if name.startswith("auto: "))
        megatron = min(own, key=lambda name: medians[name])
        for kind, name, shown in (
            ("predicted to be the fastest", first, f"`{first.split(': ')[-1]}` "),
            ("fastest", best, f"`{best}` "),
            ("`auto`", auto, f"`{auto.split(': ')[-1]}` "),
            ("`v-zb`", "v-zb", ""),
            ("`v-half`", "v-half", ""),
            ("fastest of Megatron's", megatron, f"{megatron.removeprefix('Megatron ')} "),
            ("Megatron 1F1B", "Megatron 1F1B", ""),
        ):
            off = prediction["off_by"][shape][name]
            cell = f"{shown}{1000 * medians[name]:.1f} ({off:+.1%})"
            lines.setdefault(kind, []).append(cell)
    heads = f"| schedule | {' | '.join(f'{shape}: ms (error)' for shape in shapes)} |"
    rows = (f"| {kind} | {' | '.join(cells)} |" for kind, cells in lines.items())
    return table(heads, len(shapes), rows)


def summary(prediction: dict[str, Any]) -> str:
    """How well the bars of the benchmark are kept."""
    off = [abs(value) for shape in prediction["off_by"].values() for value in shape.values()]
    within = sum(value <= 0.05 for value in off)
    behind = (f"{100 * value:.1f} %" for value in prediction["first_behind_fastest"].values())
    machine = prediction["machine"]
    return (
        f"{within} of {len(off)} predictions are within 5 % of the measured median. The median "
        f"error is {100 * statistics.median(off):.1f} %, the largest {100 * max(off):.1f} %.\n"
        f"The first schedule of the prediction took {', '.join(behind)} longer than the fastest "
        f"measured one, in the order of the columns.\nMeasured on {machine['cores']} cores of an "
        f"{machine['name']} on {prediction['date'][:10]}, {prediction['rounds']} runs of each."
    )


if __name__ == "__main__":
    main()
