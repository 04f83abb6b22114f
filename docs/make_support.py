#!/usr/bin/env python3
"""Write docs/support.md: what works together with a pipeline schedule, and what is refused.

The rows are those of tests/support/feature_matrix.py, which the tests run; the refusals are those
that the launcher and the schedules make.

  python docs/make_support.py
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent / "tests" / "support"), str(DOCS.parent / "benchmarks")]

import recipes  # noqa: E402
from feature_matrix import ROWS, Row, Verdict  # noqa: E402

from megatron_zb.job.run_flags import (  # noqa: E402
    NOT_WITH_STATES,
    OFFLOAD_FLAG,
    RECOMPUTE_FLAG,
    VERIFY_FLAG,
)
from megatron_zb.megatron_core.forward_backward import NOT_SERVED, NOT_SERVED_ABOVE_1  # noqa: E402
from megatron_zb.megatron_core.graphs import (  # noqa: E402
    WHY_A_STEP_BEFORE,
    WHY_KNOWN_SHAPES,
    WHY_NOT_LOCAL,
)
from megatron_zb.megatron_lm.conflicts import (  # noqa: E402
    CONFLICTS,
    GRAPH_CONFLICTS,
    OFFLOAD_CONFLICTS,
    OVERLAP_FLAG,
    PAIR_CONFLICTS,
    RECOMPUTATION_CONFLICTS,
    VERIFY_CONFLICTS,
    WHY_NO_GRAPHS_OF_LAYERS,
    WHY_NOT_FLOAT32,
    WHY_NOT_YAML,
    Concerned,
)
from megatron_zb.parsing import flag_of  # noqa: E402

ESCAPED = r"\|"
PAGE = DOCS / "support.md"

INTRODUCTION = """\
# What works with a pipeline schedule

Every line of the first table is a test: the same small GPT, with the same weights and batches,
under Megatron-LM's own 1F1B and under our schedules, on CPU ranks over gloo. *Equal* means equal in
every bit. The tests run with megatron-core 0.16, some also with [others](#versions); "every
schedule" means all of [schedules.md](schedules.md).
"""

VERSIONS = """\
What ran on which version of Megatron, on CPU ranks: the adapter with megatron-core, and with a
checkout of Megatron-LM its own `pretrain_gpt.py`, launched and patched. A newer version than all of
these runs with a warning, an older one is refused.
"""

RECIPES = """\
Before a training starts, `megatron-zb check` says of its arguments what goes with a schedule, what
has never been seen on a GPU, and what is refused. By it, of the 175 pre-training recipes of
Megatron-Bridge that have a pipeline (August 2026), {runs} go with v-half; nothing was trained for
this count. `benchmarks/recipes.py` makes it for every schedule, with what only a GPU can show. A
recipe can have several of these in its way:
"""

NOT_ON_CPU = """\
No test shows that these give the same numbers: no CPU can run them.
"""

REFUSED = """\
Refused with one sentence before the first step: with any schedule, only where ranks hold several
chunks, only where there are stages between the first and the last, only with schedules that split
the backward, or only in a V, where the model ends on the rank where it begins (v-half, v-min, v-zb,
1f1b-v, dualpipe-v and wave). What one rank alone finds, such as a layer that no other has, ends all
of them, with one sentence of one rank.
"""

SETTINGS = """\
Refused at the first step, for programs that set Megatron's config themselves:
"""


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            INTRODUCTION,
            "## Tested\n",
            *table(("Feature", "Settings", "Ranks", "Schedules", "Result"), tested()),
            "\n## Versions\n",
            VERSIONS,
            *table(("Megatron", "With", "Tests", "Passed", "When"), versions()),
            "\n## Public recipes\n",
            RECIPES.format(runs=counted_recipes()[0]),
            *table(("In the way", "Recipes", "Reason"), in_the_way()),
            "\n## Not runnable on a CPU\n",
            NOT_ON_CPU,
            *table(("Feature", "Settings", "Reason"), not_on_cpu()),
            "\n## Refused\n",
            REFUSED,
            *table(("Flag", "With", "Reason"), refused_flags()),
            "",
            SETTINGS,
            *table(("Setting", "Reason"), refused_settings()),
            "",
        ]
    )


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    head = list(head)
    for cells in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', ESCAPED) for cell in cells)} |"


def tested() -> Iterator[tuple[str, ...]]:
    for row in ROWS:
        if row.verdict is not Verdict.NOT_ON_CPU:
            yield row.feature, row.settings, row.parallel, _schedules(row), row.verdict.value


def versions() -> Iterator[tuple[str, ...]]:
    """What has run on each version, from a file for each series."""
    for path in sorted((DOCS / "results" / "megatron").glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                with_ = f"Python {row['python']}, torch {row['torch']}"
                yield row["megatron"], with_, f"`{row['tests']}`", row["passed"], row["date"]


def _schedules(row: Row) -> str:
    return "every schedule" if row.every_schedule else ", ".join(row.schedules)


def not_on_cpu() -> Iterator[tuple[str, ...]]:
    for row in ROWS:
        if row.verdict is Verdict.NOT_ON_CPU:
            yield row.feature, row.settings, row.reason


def in_the_way() -> Iterator[tuple[str, ...]]:
    _, stopped, reasons = counted_recipes()
    for flag, count in stopped.most_common():
        yield (f"`{flag}`" if flag.startswith("--") else flag), str(count), reasons[flag]


@cache
def counted_recipes() -> tuple[int, Counter[str], dict[str, str]]:
    """Return how many recipes run with v-half, and what is in the way of the others."""
    return recipes.counted(recipes.read(), "v-half")


def refused_flags() -> Iterator[tuple[str, ...]]:
    for conflict in CONFLICTS:
        only = f" (Megatron-LM {_text(conflict.last)})" if conflict.last else ""
        others = " or ".join(f"`{flag_of(name)}`" for name in conflict.only_with)
        concerned = conflict.concerned.value + (f", {others}" if others else "")
        yield f"`{conflict.flag}`{only}", concerned, conflict.why
    yield "`--cuda-graph-impl local`", Concerned.ALL.value, WHY_NOT_LOCAL
    for conflict in GRAPH_CONFLICTS:
        yield f"`{conflict.flag}`", "CUDA graphs", conflict.why
    for conflict in VERIFY_CONFLICTS:
        value = " delayed" if conflict.argument == "fp8_recipe" else ""
        yield f"`{conflict.flag}{value}`", f"`{VERIFY_FLAG}`", conflict.why
    for flag, passes, known in (
        (RECOMPUTE_FLAG, "R", RECOMPUTATION_CONFLICTS),
        (OFFLOAD_FLAG, "D and H", OFFLOAD_CONFLICTS),
    ):
        others = f"`{flag} auto`, or a table with {passes}"
        for own in NOT_WITH_STATES:
            if flag in own.states:
                value = f" {own.value}" if own.value else ""
                yield f"`{flag_of(own.argument)}{value}`", others, own.why
        for conflict in known:
            yield f"`{conflict.flag}`", others, conflict.why
    for conflict in PAIR_CONFLICTS:
        yield f"`{conflict.flag}`", f"`{OVERLAP_FLAG}`", conflict.why
    yield "neither `--bf16` nor `--fp16`", f"`{OVERLAP_FLAG}`", WHY_NOT_FLOAT32
    layers = "`--cuda-graph-impl transformer_engine`"
    yield layers, f"`{OVERLAP_FLAG}`", WHY_NO_GRAPHS_OF_LAYERS
    yield "`--yaml-cfg`", Concerned.ALL.value, WHY_NOT_YAML


def _text(series: tuple[int, int]) -> str:
    return ".".join(map(str, series))


def refused_settings() -> Iterator[tuple[str, ...]]:
    for setting, why in NOT_SERVED.items():
        yield f"`{setting}`", why
    for setting, why in NOT_SERVED_ABOVE_1.items():
        yield f"`{setting}` above 1", why
    whole = "with CUDA graphs of whole iterations"
    yield f"`variable_seq_lengths` {whole}", WHY_KNOWN_SHAPES
    yield f"`cuda_graph_warmup_steps` 0 {whole}", WHY_A_STEP_BEFORE
    yield "`adjust_tensor_shapes_fn`", "unless `variable_seq_lengths` is set"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
