#!/usr/bin/env python3
"""Find what forwards of Megatron's modules change, and make the table of docs/forward_state.md.

python docs/make_forward_state.py          # runs with the megatron-core that is installed
python docs/make_forward_state.py --layers transformer-engine  # runs only models of its layers
python docs/make_forward_state.py --table  # makes the table from docs/results/forward_state
"""

from __future__ import annotations

import argparse
import csv
import sys
from functools import cache
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "forward_state.md"
RESULTS = PAGE.parent / "results" / "forward_state"
sys.path.insert(0, str(PAGE.parent.parent / "tests" / "support"))

from changed_by_forwards import (  # noqa: E402
    CASES,
    CASES_OF_TE,
    FEATURES,
    OF_TE,
    Change,
    verdicts,
)
from make_reliability import with_table  # noqa: E402
from rank_process import Kind  # noqa: E402
from ranks import RankPool  # noqa: E402

HEAD = ("module", "attribute", "kind", "changed", "models", *FEATURES)


LAYERS = {"local": Kind.HOSTILE, "transformer-engine": Kind.TRANSFORMER_ENGINE}
"""Whose layers the models have, and the ranks that run them."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--layers", choices=LAYERS, help="run models of these alone")
    arguments = parser.parse_args()
    for layers in [] if arguments.table else [arguments.layers] if arguments.layers else LAYERS:
        _run(layers)
    PAGE.write_text(
        with_table(PAGE.read_text(encoding="utf-8"), "changed by forwards", _table()),
        encoding="utf-8",
    )


def _run(layers: str) -> None:
    from megatron.core.package_info import MAJOR, MINOR

    pools, kind = cache(RankPool), LAYERS[layers]
    rows: dict[Change, tuple[list[str], dict[str, set[str]]]] = {}
    for name in _cases(layers, (MAJOR, MINOR)):
        print(name, flush=True)
        for change, by_feature in verdicts(pools, name, kind):
            models, found = rows.setdefault(change, ([], {f: set() for f in FEATURES}))
            models += [name] * (name not in models)
            for feature, verdict in by_feature.items():
                found[feature].add(verdict)
    for size in (2, 4):
        pools(size, kind).close()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{MAJOR}.{MINOR}{OF_TE * (kind is Kind.TRANSFORMER_ENGINE)}.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEAD)
        for change, (models, found) in sorted(rows.items()):
            said = ["/".join(sorted(found[feature])) for feature in FEATURES]
            writer.writerow([*change, "; ".join(models), *said])
    print(path)


def _cases(layers: str, version: tuple[int, int]) -> list[str]:
    """Return the models that a version can build on a CPU; 0.16 has no HybridModel."""
    if layers == "transformer-engine":
        return list(CASES_OF_TE)
    return [name for name in CASES if name != "hybrid" or version > (0, 16)]


def _table() -> list[str]:
    """Return the lines of a table of all versions; what is alike shares one."""
    versions: dict[tuple[str, ...], list[str]] = {}
    for path in sorted(RESULTS.glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                # models that do not run with a feature say nothing where others do
                verdict = [row[feature].removesuffix("/refused") for feature in FEATURES]
                verdict = [found.removeprefix("refused/") or "-" for found in verdict]
                key = (row["attribute"], row["kind"], row["changed"], *verdict, row["module"])
                found, version = versions.setdefault(key, []), path.stem.removesuffix(OF_TE)
                found += [version] * (version not in found)
    modules: dict[tuple[str, ...], list[str]] = {}
    for (*same, module), series in versions.items():
        modules.setdefault((*same, ", ".join(series)), []).append(module)
    names: dict[tuple[str, ...], list[str]] = {}
    for (name, *rest), of in modules.items():
        names.setdefault((", ".join(f"`{module}`" for module in sorted(of)), *rest), []).append(
            name
        )
    rows = [
        (of, ", ".join(f"`{name}`" for name in sorted(found)), *rest)
        for (of, *rest), found in names.items()
    ]
    head = ("module", "value", "kind", "changed", *FEATURES, "Megatron-LM")
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(row)} |" for row in sorted(rows)]


if __name__ == "__main__":
    main()
