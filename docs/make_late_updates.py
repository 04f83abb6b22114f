#!/usr/bin/env python3
"""Make what is generated in docs/late_updates.md: tables between the markers.

Periods come from the catalog. Losses come from docs/results/delayed_convergence.json, of

  python benchmarks/delayed_convergence.py --results docs/results/delayed_convergence.json
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from make_schedules import replaced, table

from megatron_zb.schedules import Costs, build, simulate
from megatron_zb.schedules.units import Updates

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "late_updates.md"
RESULTS = DOCS / "results" / "delayed_convergence.json"

RANKS, UPDATE = 8, 0.1
SLOW = 0.1
"""Shares of a rank's work that a slow update and a slow reduction take."""
MICROBATCHES = (8, 16, 32)
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "v-min", "v-half", "v-zb", "auto")


def periods_table() -> list[str]:
    """Seconds of a step with a flush and with late updates."""
    rows: list[list[object]] = []
    for name in SCHEDULES:
        for m in MICROBATCHES:
            rows.append([f"`{name}`", m, *seconds_of(name, m)])
    headings = ("schedule", "microbatches", "flush", "late", "work", "slow, late", "and gathered")
    return table((*headings, "slow, work", "peak"), rows)


def seconds_of(name: str, m: int) -> Sequence[object]:
    """Return the cells of a schedule.

    With a flush, late, the work of a rank, both with a slow update and reduction (late with a
    gathering of half a reduction as well), and the peak.
    """
    costs, work = Costs.uniform(pipeline_size=RANKS, forward=1, backward=1, weight=1), 3 * m
    flushed = build(name, pipeline_size=RANKS, num_microbatches=m, costs=costs)
    assert flushed.report is not None
    flush = f"{flushed.report.makespan + UPDATE:.1f}"
    late, slow, gathered = (
        build(
            name,
            pipeline_size=RANKS,
            num_microbatches=m,
            costs=costs,
            update_delay=1,
            updates=updates,
        )
        for updates in (
            Updates(UPDATE),
            Updates(SLOW * work, SLOW * work),
            Updates(SLOW * work, SLOW * work, SLOW * work / 2),
        )
    )
    assert late.report is not None and slow.report is not None and gathered.report is not None
    peak = max(simulate(late, costs).peak_microbatches)
    periods = late.report.period, work + UPDATE, slow.report.period, gathered.report.period
    return flush, *(f"{it:.1f}" for it in (*periods, (1 + SLOW) * work)), f"{peak:g}"


def convergence_table(results: dict[str, Any]) -> list[str]:
    """Held-out losses of each training and mode, and the difference to the synchronous runs.

    Runs that tuned a learning rate have no delay beside them.
    """
    trainings: dict[_Training, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for run in results["runs"]:
        training = _Training(*(run[name] for name in _Training._fields))
        trainings[training][run["mode"]][run["seed"]] = run["held_out"][-1]
    rows: list[list[object]] = []
    for training, modes in trainings.items():
        if "delay" not in modes:
            continue
        for mode, of_seeds in modes.items():
            gaps = [loss - modes["sync"][seed] for seed, loss in of_seeds.items()]
            gap = "" if mode == "sync" else _spread(gaps, signed=True)
            mean = _spread(list(of_seeds.values()))
            rows.append([*training.cells, mode, len(of_seeds), mean, gap])
    headings = ("optimizer", "learning rate", "weights", "updates", "mode", "seeds", "loss")
    return table((*headings, "beside sync"), rows)


class _Training(NamedTuple):
    """What runs have in common whose modes are compared, by the names of the results."""

    optimizer: str
    learning_rate: float
    parameters: int
    steps: int

    @property
    def cells(self) -> tuple[object, ...]:
        weights = f"{self.parameters / 1e6:.1f} M"
        return self.optimizer, f"{self.learning_rate:g}", weights, self.steps


def _spread(values: Sequence[float], *, signed: bool = False) -> str:
    mean = statistics.fmean(values)
    text = f"{mean:+.3f}" if signed else f"{mean:.3f}"
    return text if len(values) == 1 else f"{text} ± {statistics.stdev(values):.3f}"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    text = replaced(text, "periods", periods_table())
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(replaced(text, "convergence", convergence_table(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
