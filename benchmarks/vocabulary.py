#!/usr/bin/env python3
"""Simulate the gain of a vocabulary-parallel output layer.

  python benchmarks/vocabulary.py
  python benchmarks/vocabulary.py --output-layers 2.35 6 --schedules v-zb v-half v-min
  python benchmarks/vocabulary.py --output-layers 2.35 --prediction-layers 1

A model of --layers layers, whose F, B and W take .25, .3 and .2 and whose output layer takes as
long as --output-layers of them, on --ranks pipeline ranks with messages of .05. Each schedule is
built for even layers, for the best layers that count the output layer in, and for an output layer
and an embedding that are sharded: barriers, messages and the memory of the shards included, in the
schedule's own memory and one microbatch more. --prediction-layers are those of multi-token
prediction: layers of the last stage, each of which runs the output layer once more. Sharded, the
best of the layouts that count them is taken. Prints a table and, last, one JSON line with every
makespan.
"""

from __future__ import annotations

import argparse
import json

import provenance
from rich.console import Console
from rich.table import Table

from megatron_zb import schedules
from megatron_zb.schedules import layout
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.vocabulary import Vocabulary, with_prediction
from megatron_zb.schedules.placement import Placement

_FORWARD, _BACKWARD, _WEIGHT, _HOP = 0.25, 0.3, 0.2, 0.05
# A layer has 12 h^2 weights and holds about 34 bytes for each number of its input; a vocabulary of
# 13 h takes as long as one, and its logits in 16 bits hold 26.
_LOGITS, _INPUT = 26 / 34, 2 / 34


def main() -> None:
    args = _arguments()
    table = Table("output layer", "schedule", "even layers", "best layers", "cut", "peak", "bound")
    found = []
    for output in args.output_layers:
        for name in args.schedules:
            row = _row(args, name, output)
            found.append(row)
            figures = (row[key] for key in ("even", "best", "cut", "peak", "bound"))
            table.add_row(f"{output:g} layers", name, *(f"{figure:.1f}" for figure in figures))
    Console().print(table)
    print(json.dumps({**provenance.of_this_run(), "sizes": vars(args), "makespans": found}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8, help="pipeline ranks (default 8)")
    parser.add_argument("--microbatches", type=int, default=32, help="of a step (default 32)")
    parser.add_argument("--layers", type=int, default=32, help="of the model (default 32)")
    parser.add_argument("--output-layers", type=float, nargs="+", default=[2.35, 6.0])
    parser.add_argument("--prediction-layers", type=int, default=0, help="(default 0)")
    parser.add_argument("--schedules", nargs="+", default=["v-zb", "v-half", "v-min"])
    return parser.parse_args()


def _row(args: argparse.Namespace, name: str, output: float) -> dict[str, float | str]:
    placement = schedules.build(name, pipeline_size=args.ranks, num_microbatches=1).placement
    predicted = args.prediction_layers
    output *= 1 + predicted
    whole = [
        _built(args, name, _with_layers(placement, counts, output + predicted))[0]
        for counts in layout.choices(args.layers, placement, 0.0, output + predicted)
    ]
    cut, peak, bound = min(
        _built(args, name, _cut(args, _with_layers(placement, counts, predicted), output))
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


def _built(args: argparse.Namespace, name: str, costs: Costs) -> tuple[float, float, float]:
    """Return the makespan, the peak in microbatches of a rank, and the lower bound."""
    sizes = {"pipeline_size": args.ranks, "num_microbatches": args.microbatches}
    schedule = schedules.build(name, costs=costs, **sizes)
    timeline = schedules.simulate(schedule, costs)
    assert schedule.report is not None
    share = sum(costs.memory["activation"]) / args.ranks
    return timeline.makespan, max(timeline.peak_memory) / share, schedule.report.lower_bound


def _with_layers(placement: Placement, counts: layout.Layout, output: float) -> Costs:
    """The costs of stages with so many layers, and more of them on the last one."""
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


def _cut(args: argparse.Namespace, costs: Costs, output: float) -> Costs:
    costs = costs.having(
        Vocabulary(
            output=(_FORWARD + _BACKWARD) * output,
            weight=_WEIGHT * output,
            held=_LOGITS * output + _INPUT * args.ranks * (1 + args.prediction_layers),
            lookup=0.0,
        )
    )
    return with_prediction(costs) if args.prediction_layers else costs


if __name__ == "__main__":
    main()
