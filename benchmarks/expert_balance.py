#!/usr/bin/env python3
"""Steps of mixtures of experts, with layers balanced for what pairs hide, and for all their work.

Two models on 256 GPUs, 8 pipeline ranks and 32-way expert parallelism. For each schedule with pairs
the layers are cut into stages twice: by the longer of a layer's work and the all-to-all hidden
beside it, and by both together. Each is simulated with pairs, and with as much memory as it asks
for. Costs are counted; nothing is run.

Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import provenance
from rich.console import Console
from rich.table import Table

from megatron_zb.measured.config import builtin_folder
from megatron_zb.parsing import GIB
from megatron_zb.plan.device import read_device
from megatron_zb.plan.features.pairs import PlanPairs
from megatron_zb.plan.model import read_model
from megatron_zb.plan.prediction import IterationSettings, predict
from megatron_zb.plan.stages import StageWorkload, cut_into_stages
from megatron_zb.plan.strategy import ScheduleCandidate, Strategy
from megatron_zb.plan.work import Workload

RANKS, DATA, SEQUENCE = 8, 32, 4096
MODELS = ("deepseek_v3_like", "qwen3_235b_a22b")
SCHEDULES = (
    (PlanPairs.own, 2),
    (ScheduleCandidate("v-zb", "v-zb", overlaps_all_to_all=True), 2),
    (ScheduleCandidate("v-half", "v-half", overlaps_all_to_all=True), 2),
)


def row_of(
    staged: StageWorkload, candidate: ScheduleCandidate, of: dict[str, Any]
) -> dict[str, Any]:
    """Return the simulated step of one cut into stages."""
    settings = IterationSettings(of["microbatches"])
    chunks = staged.placement.chunks if candidate.takes_chunks else None
    found = predict(staged, candidate, settings, chunks)
    return {
        **of,
        "schedule": candidate.name,
        "layout": list(staged.layout),
        "seconds": found.seconds,
        "bubble": found.bubble,
        "gib": found.memory.total / GIB,
    }


def rows(model: str, device: str, microbatches: int) -> list[dict[str, Any]]:
    """Return two rows for each schedule: balanced by all work, and by what pairs leave of it."""
    strategy = Strategy(1, RANKS, DATA, DATA, 1, "none")
    config = read_model(builtin_folder("models") / f"{model}.yaml")
    gpu = read_device(builtin_folder("devices") / f"{device}.yaml")
    load = Workload(config, gpu, strategy, SEQUENCE)
    found = []
    for candidate, chunks in SCHEDULES:
        for weights in (replace(candidate, overlaps_all_to_all=False), candidate):
            staged = cut_into_stages(load, candidate, chunks, weights)
            assert staged is not None, "there are enough layers"
            of = {
                "model": model,
                "microbatches": microbatches,
                "hidden_counts": weights.overlaps_all_to_all,
            }
            found.append(row_of(staged, candidate, of))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, help="(default: both)")
    parser.add_argument("--device", default="h100_sxm", help="(default h100_sxm)")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[16, 64], metavar="M")
    arguments = parser.parse_args()
    found = [
        row
        for model in arguments.models
        for microbatches in arguments.microbatches
        for row in rows(model, arguments.device, microbatches)
    ]
    table = Table("model", "m", "schedule", "balanced by", "s", "bubble", "GiB", "layout", box=None)
    for row in found:
        table.add_row(
            row["model"],
            str(row["microbatches"]),
            row["schedule"],
            "what is exposed" if row["hidden_counts"] else "all work",
            f"{row['seconds']:.3f}",
            f"{row['bubble']:.1%}",
            f"{row['gib']:.0f}",
            " ".join(map(str, row["layout"])),
        )
    Console(width=160).print(table)
    print(json.dumps({"benchmark": "expert_balance", "rows": found} | provenance.of_this_run()))


if __name__ == "__main__":
    main()
