#!/usr/bin/env python3
"""What splitting the backward costs: time of F, B and W against F and BW, for a real GPT layer.

The layer is Megatron's, its backward is split as in training, and its gradients are summed in
fp32. Both ways take turns; the ratio is the median of the ratios of neighbours, which leaves out a
machine that gets slower or faster. Times on a CPU are the processor time of one thread. Also counts
the bytes held after F, after B and after W of one microbatch: what is allocated on a GPU; on a CPU
what is saved for backward and for W, without what an operation needs only while it runs.

Measures on a GPU if there is one, else on the CPU. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict
from typing import Any

import layer_sizes
import one_device
import torch
from layer_sizes import IMPLEMENTATIONS, LayerSizes
from one_device import DTYPES, Clock
from rich.console import Console
from rich.table import Table

TARGET = 1.02  # of the ratio, on a GPU
WARM_UP = 3
SPLIT, WHOLE = ("F", "B", "W"), ("F", "BW")


def main() -> None:
    args = _arguments()
    device = one_device.choose(args.device)
    sizes = layer_sizes.chosen(args, device)
    results, not_measured = [], {}
    one_device.start(device)
    for name in args.implementations:
        reason = layer_sizes.missing(name, device)
        if reason is not None:
            not_measured[name] = reason
            continue
        for dtype in args.dtypes:
            results.append(measure(name, dtype, sizes, device, args.repetitions))
    one_device.finish()
    _report(results, not_measured, sizes, device)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    layer_sizes.add_options(parser)
    parser.add_argument(
        "--repetitions",
        type=one_device.at_least_one,
        default=15,
        metavar="N",
        help="of each way (default 15)",
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=["bf16"], help="(default bf16)"
    )
    parser.add_argument(
        "--implementations",
        nargs="+",
        choices=IMPLEMENTATIONS,
        default=list(IMPLEMENTATIONS),
        help="; ".join(f"{name}: {what}" for name, what in IMPLEMENTATIONS.items())
        + " (default all)",
    )
    return parser.parse_args()


def measure(
    implementation: str, dtype: str, sizes: LayerSizes, device: torch.device, repetitions: int
) -> dict[str, Any]:
    """One implementation in one type."""
    import gpt_layers

    config = gpt_layers.configuration(sizes, 1, DTYPES[dtype], device, implementation)
    layers = gpt_layers.Layers(config, sizes, implementation, device)
    clock = one_device.clock_of(device)
    for _ in range(WARM_UP):
        _times(layers, clock, SPLIT)
        _times(layers, clock, WHOLE)
    split: list[list[Any]] = []
    whole: list[list[Any]] = []
    for repetition in range(repetitions):
        turns = [(SPLIT, split), (WHOLE, whole)]
        for passes, times in turns if repetition % 2 else turns[::-1]:
            times.append(_times(layers, clock, passes))
    clock.wait()
    meter = one_device.meter_of(device, [layers.model])
    return {
        "implementation": implementation,
        "dtype": dtype,
        **_summary(clock, split, whole),
        "clock": clock.measures,
        "counted": meter.counts,
        "held_bytes": layers.held_after(meter),
    }


def _times(layers: Any, clock: Clock, passes: tuple[str, ...]) -> list[Any]:
    """The moments between the passes of one microbatch."""
    moments = [clock.mark()]
    for name in passes:
        layers.run(name)
        moments.append(clock.mark())
    return moments


def _summary(clock: Clock, split: list[list[Any]], whole: list[list[Any]]) -> dict[str, Any]:
    """Medians in seconds; the median ratio of neighbours in time, and how far those spread."""
    seconds = {}
    for passes, repetitions in ((WHOLE, whole), (SPLIT, split)):
        for i, name in enumerate(passes):
            seconds[name] = statistics.median(clock.seconds(r[i], r[i + 1]) for r in repetitions)
        seconds["+".join(passes)] = statistics.median(
            clock.seconds(r[0], r[-1]) for r in repetitions
        )
    ratios = sorted(
        clock.seconds(s[0], s[-1]) / clock.seconds(w[0], w[-1])
        for s, w in zip(split, whole, strict=True)
    )
    quarter = len(ratios) // 4
    return {
        "seconds": seconds,
        "ratio": statistics.median(ratios),
        "middle_half_of_ratios": [ratios[quarter], ratios[-1 - quarter]],
    }


def _report(
    results: list[dict[str, Any]],
    not_measured: dict[str, str],
    sizes: LayerSizes,
    device: torch.device,
) -> None:
    table = Table(title="one GPT layer, milliseconds and MiB (medians)")
    for heading in ("layer", "type", *WHOLE, "B", "W", "F+BW", "F+B+W", "ratio", "middle half"):
        table.add_column(heading, justify="left" if heading in ("layer", "type") else "right")
    for heading in ("after F", "after B", "after W"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(*_row(result))
    console = Console(width=140)
    console.print(table)
    for name, reason in not_measured.items():
        console.print(f"{name} was not measured: {reason}")
    if results:
        console.print(
            f"times are {results[0]['clock']}; MiB are {results[0]['counted']}; on a GPU the ratio "
            f"is to be <= {TARGET}"
        )
    line = {
        "benchmark": "split_backward",
        "machine": one_device.describe(device),
        "sizes": asdict(sizes),
        "target_on_a_gpu": TARGET,
        "results": results,
        "not_measured": not_measured,
    }
    print(json.dumps(line), flush=True)


def _row(result: dict[str, Any]) -> list[str]:
    low, high = result["middle_half_of_ratios"]
    names = (*WHOLE, "B", "W", "F+BW", "F+B+W")
    return [
        result["implementation"],
        result["dtype"],
        *(f"{1000 * result['seconds'][name]:.2f}" for name in names),
        f"{result['ratio']:.4f}",
        f"{low:.3f} to {high:.3f}",
        *(f"{held / 2**20:.1f}" for held in result["held_bytes"].values()),
    ]


if __name__ == "__main__":
    one_device.run(main)
