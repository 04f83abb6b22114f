"""Choose a block of a library for every layer, under budgets: a mixed-integer program.

Run as `python -m megatron_zb.distill.choice --library DIR --parameters 60% --save-student DIR`. The
sum of the candidates' scores stands for the student's quality, as in Puzzle (arXiv 2411.19146).
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Console

from megatron_zb.cli.ending import ended, report_if_slow
from megatron_zb.distill import library_files, puzzletron
from megatron_zb.distill.library_files import Entry, LibraryFile
from megatron_zb.distill.puzzletron import Routing
from megatron_zb.errors import UsageError
from megatron_zb.files import check_writable
from megatron_zb.measured import config
from megatron_zb.measured.config import Section
from megatron_zb.parsing import Parser, flag_of
from megatron_zb.tables import Column, Listing

_SECONDS = 60.0
"""Of the solver, which then gives the best choice so far."""
_SCORES, _LATENCY = 10**9, 10**9
"""Steps in the largest score, and in a millisecond: the solver computes in whole numbers."""


class LatencyTable(Section):
    """Measured times of candidates in the student's use."""

    milliseconds: dict[str, float] = Field(
        min_length=1, description="by name, teacher included", examples=["{teacher: 1.5, half: 1}"]
    )


@dataclass(frozen=True)
class Budget:
    """A limit of the sum over the blocks."""

    name: str
    limit: float
    costs: Sequence[Sequence[float]]
    """Of each block's candidates."""
    scale: int = 1
    """Steps in one unit, of which costs and limit are whole numbers."""

    def of(self, chosen: Sequence[int]) -> float:
        """Return the sum of a choice."""
        return sum(costs[c] for costs, c in zip(self.costs, chosen, strict=True))


@dataclass(frozen=True)
class Choice:
    """The candidate of each block, by its index, and whether none is better."""

    chosen: tuple[int, ...]
    is_best: bool


def choose(
    scores: Sequence[Sequence[float]],
    budgets: Sequence[Budget],
    kinds: Sequence[Hashable] | None = None,
) -> Choice:
    """Return the choice with the smallest sum of scores that keeps all budgets.

    Args:
        scores: of each block's candidates.
        budgets: the limits.
        kinds: of the blocks; those of one kind, which have candidates in the same order, get the
            same one. None for no such restriction.

    Raises:
        UsageError: no choice keeps one, or all of them.
    """
    from ortools.sat.python import cp_model

    for budget in budgets:
        least = sum(map(min, budget.costs))
        if least > budget.limit:
            raise UsageError(
                f"{flag_of(budget.name)}: the smallest choice needs {least:.10g} of "
                f"{budget.limit:.10g}: give more, or distil smaller candidates"
            )
    model = cp_model.CpModel()
    taken = [[model.new_bool_var("") for _ in candidates] for candidates in scores]
    for candidates in taken:
        model.add_exactly_one(candidates)
    first: dict[Hashable, list[Any]] = {}
    for kind, candidates in zip(kinds or (), taken, strict=kinds is not None):
        for one, other in zip(first.setdefault(kind, candidates), candidates, strict=True):
            model.add(one == other)
    for budget in budgets:
        costs = [[round(cost * budget.scale) for cost in of] for of in budget.costs]
        most = min(budget.limit, sum(map(max, budget.costs)))  # no larger number is needed
        model.add(_sum(cp_model, taken, costs) <= int(most * budget.scale + 1e-6))
    largest = max(map(max, scores)) or 1.0
    steps = [[round(score / largest * _SCORES) for score in of] for of in scores]
    model.minimize(_sum(cp_model, taken, steps))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = _SECONDS
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        names = " and ".join(flag_of(budget.name) for budget in budgets)
        together = " together" * (len(budgets) > 1) + " with --alike" * (kinds is not None)
        raise UsageError(f"no choice keeps {names}{together}: give more of one of them")
    chosen = (next(c for c, x in enumerate(of) if solver.value(x)) for of in taken)
    return Choice(tuple(chosen), status == cp_model.OPTIMAL)


def _sum(cp_model: Any, taken: Sequence[Sequence[Any]], of: Sequence[Sequence[int]]) -> Any:
    variables = [x for candidates in taken for x in candidates]
    factors = [factor for candidates in of for factor in candidates]
    return cp_model.LinearExpr.weighted_sum(variables, factors)


# --- the command line


def main(argv: Sequence[str] | None = None) -> int:
    """Choose, print and write; return 0, or 2 after a UsageError."""
    return ended("choice", lambda: _run(argv))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m megatron_zb.distill.choice",
        description=(__doc__ or "").split("\n")[0],
        epilog="A budget is a number, or a share of the teacher's blocks, such as 60%%.",
    )
    parser.add_argument(
        "--library", type=Path, required=True, metavar="DIR", help="as given to --save-library"
    )
    parser.add_argument("--parameters", metavar="N|P%", help="weights of all blocks")
    parser.add_argument("--kv-cache-bytes", metavar="N|P%", help="of all blocks, for a token")
    parser.add_argument("--latency", metavar="MS|P%", help="with --latency-table")
    parser.add_argument(
        "--latency-table",
        type=Path,
        metavar="FILE",
        help="YAML, such as milliseconds: {teacher: 1.5, half: 1.1}, with every candidate",
    )
    parser.add_argument(
        "--alike",
        action="store_true",
        help="the same candidate for all blocks that have the same ones, as a student with experts "
        "or latent attention needs",
    )
    parser.add_argument(
        "--block-configs",
        type=Path,
        metavar="FILE",
        help="write the student's layers as block_configs, as puzzletron's config.json has them",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the choice as JSON")
    parser.add_argument(
        "--save-student", type=Path, metavar="DIR", help="write the student as a checkpoint"
    )
    return parser


def _run(argv: Sequence[str] | None) -> None:
    args = _parser().parse_args(argv)
    library = library_files.read_library(args.library)
    budgets = _budgets(args, library)
    for path in (args.output, args.block_configs):
        if path is not None:
            check_writable(path)
    kinds = [tuple(entry.name for entry in of) for of in library.blocks] if args.alike else None
    with report_if_slow("choosing blocks"):
        scores = [[entry.score for entry in of] for of in library.blocks]
        found = choose(scores, budgets, kinds)
    chosen = [of[c] for of, c in zip(library.blocks, found.chosen, strict=True)]
    _print(chosen, budgets, found)
    if args.output is not None:
        blocks = [entry.model_dump() for entry in chosen]
        sums = {budget.name: budget.of(found.chosen) for budget in budgets}
        score = sum(entry.score for entry in chosen)
        content = {"score": score, "is_best": found.is_best, "sums": sums, "blocks": blocks}
        library_files.write(args.output, content)
    if args.block_configs is not None:
        routing = Routing(library.experts_per_token, library.shared_expert_size)
        described = puzzletron.described([entry.shape for entry in chosen], routing)
        library_files.write(args.block_configs, described)
    if args.save_student is not None:
        warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.")
        from megatron_zb.cpu_ranks import run_on_cpu

        run_on_cpu()  # before Megatron is imported
        from megatron_zb.distill.assembly import assemble

        print(assemble(args.library, library, chosen, args.save_student))


def _budgets(args: argparse.Namespace, library: LibraryFile) -> list[Budget]:
    if (args.latency is None) != (args.latency_table is None):
        raise UsageError("--latency and --latency-table must be given together")
    costs: dict[str, list[list[float]]] = {
        "parameters": [[entry.parameters for entry in of] for of in library.blocks],
        "kv_cache_bytes": [[entry.kv_cache_bytes for entry in of] for of in library.blocks],
    }
    if args.latency is not None:
        table = config.read(args.latency_table, LatencyTable).milliseconds
        costs["latency"] = [[_latency(entry, table) for entry in of] for of in library.blocks]
    budgets = [
        Budget(name, _limit(name, text, of), of, _LATENCY if name == "latency" else 1)
        for name, of in costs.items()
        if (text := getattr(args, name)) is not None
    ]
    if not budgets:
        raise UsageError("there is no budget: give one, such as --parameters 60%")
    return budgets


def _latency(entry: Entry, table: Mapping[str, float]) -> float:
    if not 0 <= table.get(entry.name, -1.0) < 1e6:
        raise UsageError(f"--latency-table has no time of {entry.name}: give it, in milliseconds")
    return table[entry.name]


def _limit(name: str, text: str, costs: Sequence[Sequence[float]]) -> float:
    """Read a number, or a share of the teacher's blocks, which stand first."""
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e18:
        raise UsageError(f"{flag_of(name)} '{text}' is no budget: give, for example, 60%")
    return number / 100 * sum(of[0] for of in costs) if text.endswith("%") else number


def _print(chosen: Sequence[Entry], budgets: Sequence[Budget], found: Choice) -> None:
    columns: Sequence[Column[Entry]] = (
        Column("candidate", lambda entry: entry.name, is_text=True),
        Column("score", lambda entry: entry.score, ".3e"),
        Column("parameters", lambda entry: entry.parameters, ","),
        Column("KV bytes", lambda entry: entry.kv_cache_bytes, ","),
    )
    console = Console()
    console.print(Listing(columns, chosen, numbered=("block", 0)).table(wide=True))
    for budget in budgets:
        console.print(f"{budget.name}: {budget.of(found.chosen):,.10g} of {budget.limit:,.10g}")
    score = sum(entry.score for entry in chosen)
    best = "no choice is better" if found.is_best else f"the best after {_SECONDS:g} seconds"
    console.print(f"sum of scores: {score:.6g}; {best}")


if __name__ == "__main__":
    sys.exit(main())
