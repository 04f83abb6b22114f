#!/usr/bin/env python3
"""Write docs/support.md: what works together with a pipeline schedule, and what is refused.

The rows are those of tests/support/feature_matrix.py, which the tests run; the refusals are those
that the launcher and the schedules make.

  python docs/make_support.py
"""

from __future__ import annotations

import csv
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent / "tests" / "support"), str(DOCS.parent / "benchmarks")]

import recipes  # noqa: E402
from feature_matrix import ROWS, Row, Verdict  # noqa: E402

from megatron_zb import schedules  # noqa: E402
from megatron_zb.megatron_core import refusals  # noqa: E402
from megatron_zb.megatron_core.refusals import RefusalRow as Refused  # noqa: E402
from megatron_zb.megatron_core.versions import SERIES  # noqa: E402
from megatron_zb.parsing import flag_of  # noqa: E402

PAGE = DOCS / "support.md"
MAIN_FEATURES = DOCS / "results" / "main_features.csv"
"""The rows whose tests have passed with Megatron-LM's main branch; make_main.py writes it."""

INTRODUCTION = """\
# Supported features

This page lists what has been tried together with a pipeline schedule, what was seen, and what is
refused. Look up your flag here, or let the package do it: `megatron-zb check -- <your arguments>
--pipeline-schedule v-half`.
"""

TESTED = """\
Each row is a test. It trains a small GPT under Megatron-LM's own 1F1B and under each schedule of
the row, with the same weights and batches, on CPU ranks over gloo. The columns:

- **ranks**: the pipeline size (PP), and the tensor- (TP), context- (CP), data- (DP) and
  expert-parallel (EP) sizes above one.
- **schedules**: those that were tried. *All* means all {schedules} of [schedules](schedules.md).
- **equal**: what is bit-identical. *Gradients* means losses and gradients of one step. *Weights*
  means losses, and weights after 3 steps of the optimizer. *Rounding* means equal but for the order
  of sums.
- **Megatron**: the series that the test is for. *0.16+* means 0.16 and newer.
- **{main}**: whether it was *equal* with this commit of Megatron-LM's main branch, which no release
  has. The tests of the other rows have not run with it.
- **HybridModel**: whether Megatron's HybridModel with the same layers, written as a pattern such as
  `*-*-*-*-`, is equal in the same way, with Megatron 0.19+. That holds for {equal} of {number}
  rows.
"""

STAND_INS = """\
A stand-in is Python code that takes the place of a kernel for GPUs. It shows that the schedules
call the module rightly, not that the kernel works.
"""

VERSIONS = """\
The table counts the tests that passed on CPU ranks, last on {date}. *Adapter* tests use only
megatron-core: gradient parity and vocabulary parallelism. *Megatron-LM* tests run its
`pretrain_gpt.py`: all of them with 0.16, and training on two ranks with the others
([commands](results/megatron/0.16.csv)). With main, both are those of
`scripts/test.sh --megatron-main`. A newer version runs with a warning, an older one is refused.
"""

RECIPES = """\
Megatron-Bridge has {number} recipes with a pipeline (August 2026), fine-tuning and LoRA included.
`megatron-zb check` accepts `v-half` for {runs} of them; none was trained ([gains](recipes.md)).
`benchmarks/recipes.py` counts for every schedule. This is in the way of the others, with the number
of recipes ([reasons](#refused)):
"""

NOT_ON_CPU = """\
These need kernels for GPUs, so no test on CPU ranks can show them. *On a GPU* means [one
H200](performance.md#on-gpus), shared by 2 or 4 ranks. What has no such remark has run on no GPU.
"""

REFUSED = """\
A combination that does not work is refused before the first step, on all ranks, in one sentence.
Each heading below names a feature, and its list what does not go with it. For example, under *V
schedules* are the flags that no V can run with. Leave one of the two out, where no other value is
named. A schedule file with R passes counts as `--pipeline-recompute auto`, and one with D and H
passes as `--pipeline-offload auto`.
"""

SETTINGS = """\
### Settings of Megatron's config

Refused at the first step, for programs that set the config themselves. (The launcher turns off
`--delay-wgrad-compute` itself, because the schedule takes its place.)
"""

TITLES = {
    "any": "Any schedule",
    "one_chunk": "One chunk per rank",
    "inner_stages": "More than two stages",
    "v": "A placement in a V (v-half, v-min, v-zb, 1f1b-v, dualpipe-v, wave)",
    "two_ways": "Two directions (chimera, bitpipe)",
    "split": "Split backward",
    "fixed_order": "A fixed order (gpipe, 1f1b, interleaved, zb-h1, zb-h2)",
    "chunks": "Several chunks per rank",
    "graphs": "CUDA graphs",
    "verify": "`--pipeline-verify`",
    "warm_up": "`--pipeline-warm-up on`",
    "recompute": "`--pipeline-recompute auto`",
    "offload": "`--pipeline-offload auto`",
    "overlap": f"`{flag_of(refusals.OVERLAP)}`",
}
REMEDIES = {
    "one_chunk": "Use a schedule with several chunks per rank, such as v-half.",
    "chunks": "Use a schedule with one chunk per rank, such as zb-h1.",
}
HEAD = ("feature", "flags", "ranks", "schedules", "equal", "Megatron")
RESULTS = {
    Verdict.PARITY: "gradients",
    Verdict.STEPS: "weights",
    Verdict.ROUNDED: "rounding",
    Verdict.LOSSES: "losses",
    Verdict.DATA: "data",
    Verdict.AGAIN: "a second run; nothing is left over",
}


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            INTRODUCTION,
            "## Tested\n",
            TESTED.format(main=main(), schedules=len(schedules.names()), **counted_patterns()),
            STAND_INS,
            *table((*HEAD, main(), "HybridModel"), tested()),
            "\n## Versions\n",
            VERSIONS.format(date=max(row["date"] for row in _runs())),
            *table(("Python, torch", "Adapter", "Megatron-LM"), versions()),
            "\n## Public recipes\n",
            RECIPES.format(runs=counted_recipes()[0], number=len(recipes.read())),
            *in_the_way(),
            "\n## Not runnable on a CPU\n",
            NOT_ON_CPU,
            *table(("feature", "flags", "what was seen"), not_on_cpu()),
            "\n## Refused\n",
            REFUSED,
            *refused(),
            SETTINGS,
            *grouped(refused_settings()),
            "",
        ]
    )


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    head = list(head)
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    yield from (first, "|" + "---|" * len(head), *others)


def tested() -> Iterator[tuple[str, ...]]:
    """Rows of what runs on a CPU, with the names of features in full."""
    name = ""
    with MAIN_FEATURES.open(encoding="utf-8", newline="") as file:
        passed = {line["feature"] for line in csv.DictReader(file)}
    for row in ROWS:
        if row.verdict is Verdict.NOT_ON_CPU:
            continue
        is_more = row.feature.startswith("the same")
        name = f"{name}{row.feature.removeprefix('the same')}" if is_more else row.feature
        flags = row.settings.replace("|", "\\|")
        with_main = "equal" if row.feature in passed else ""
        seen = (RESULTS[row.verdict], _series(row), with_main, _with_pattern(row))
        yield name, flags, row.parallel, _schedules(row), *seen
        if is_more:
            name = name.removesuffix(row.feature.removeprefix("the same"))


def main() -> str:
    """The commit of Megatron-LM's main branch that was tried, such as main (d98e8a64)."""
    tried = next(row["megatron"] for row in _runs() if row["series"] == "main")
    return "{} ({})".format(*tried.split())


def counted_patterns() -> dict[str, int]:
    """The number of rows of a GPTModel, and of those in which a HybridModel is equal, too."""
    rows = [row for row in ROWS if row.has_pattern]
    return {"number": len(rows), "equal": sum(not row.pattern_refused for row in rows)}


def _with_pattern(row: Row) -> str:
    if not row.has_pattern:
        return ""
    return f"refused: {row.pattern_refused}" if row.pattern_refused else "equal"


def _schedules(row: Row) -> str:
    return "all" if row.every_schedule else ", ".join(row.schedules)


def _series(row: Row) -> str:
    """The series of Megatron for which there is a test, such as 0.16+, or 0.16 to 0.17."""
    if row.until > SERIES[-1].number:
        return f"{_text(row.since)}+"
    last = max(each.number for each in SERIES if each.number < row.until)
    return _text(row.since) if last == row.since else f"{_text(row.since)} to {_text(last)}"


def _runs() -> Iterator[dict[str, str]]:
    results = DOCS / "results"
    for path in (*sorted((results / "megatron").glob("*.csv")), results / "main.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                yield {**row, "series": path.stem}


def versions() -> Iterator[tuple[str, ...]]:
    """What has run on each version, from a file for each series."""
    series: dict[str, list[dict[str, str]]] = {}
    for row in _runs():
        series.setdefault(row["series"], []).append(row)
    for rows in series.values():
        with_ = {f"{row['python']}, {row['torch']}" for row in rows}
        cells = [
            ", ".join(
                f"{row['passed']} ({row['megatron']})" for row in rows if kind in row["tests"]
            )
            for kind in ("tests/megatron_core", "tests/real_megatron_lm")
        ]
        yield "; ".join(sorted(with_)), *cells


def not_on_cpu() -> Iterator[tuple[str, str, str]]:
    for row in ROWS:
        if row.verdict is Verdict.NOT_ON_CPU:
            yield row.feature, row.settings, row.reason


def in_the_way() -> Iterator[str]:
    """With the reasons that are not those of a refusal below."""
    _, stopped, reasons = counted_recipes()
    refusals = [why for _, _, _, why in refused_flags()]
    for flag, count in stopped.most_common():
        why = reasons[flag]
        for known in refusals:
            why = why.replace(known, "").removesuffix(": ")
        name = f"`{flag}`" if flag.startswith("--") else flag
        yield from item(name, "; ".join(filter(None, (str(count), why))))


@cache
def counted_recipes() -> tuple[int, Counter[str], dict[str, str]]:
    """Return how many recipes run with v-half, and what is in the way of the others."""
    return recipes.counted(recipes.read(), "v-half")


def refused() -> Iterator[str]:
    """A list for each thing that flags cannot be combined with."""
    groups: dict[str, list[tuple[str, str, str]]] = {}
    for flag, with_, given, why in refused_flags():
        groups.setdefault(with_, []).append((flag, given, why))
    both = ["recompute", "offload"]
    either = [row for row in groups[both[0]] if row in groups[both[1]]]
    for with_ in both:
        groups[with_] = [row for row in groups[with_] if row not in either]
    ordered: dict[str, list[tuple[str, str, str]]] = {}
    for with_ in filter(groups.get, TITLES):
        if with_ == both[0]:
            ordered[" or ".join(TITLES[each] for each in both)] = either
        ordered[with_] = groups[with_]
    for with_, rows in ordered.items():
        yield f"### {TITLES.get(with_, with_)}\n"
        if with_ in REMEDIES:
            yield f"{REMEDIES[with_]}\n"
            rows = [(flag, given, _without_remedy(why)) for flag, given, why in rows]
        yield from grouped(rows)
        yield ""


def _without_remedy(why: str) -> str:
    """Without the schedule to use, which the group has once."""
    why = re.sub(r"; use a schedule [^;]*such as (?:v-half|zb-h1)", "", why)
    return re.sub(r", or a newer one$", "; or use a newer one", why)


def grouped(rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """An item for each reason, with all that is refused for it."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, given, why in rows:
        why = re.sub(r"; leave \w+ out$", "", why)  # the page has it once
        reasons.setdefault((given, why), []).append(name)
    for (given, why), names in reasons.items():
        yield from item(f"{', '.join(names)}{given}", why)


def item(name: str, text: str) -> list[str]:
    """The lines of an item of a list."""
    return textwrap.wrap(
        f"- {name}: {text}." if text else f"- {name}.",
        120,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def refused_flags() -> Iterator[tuple[str, str, str, str]]:
    """Flags, what each cannot be combined with, its further conditions, and why."""
    for row in refusals.rows():
        bounded = [each for each in (row.since, row.until) if (0, 0) < each < (99, 0)]
        version = f"Megatron-LM {_text(bounded[0])}" if bounded else ""
        only = "" if version in row.why else f" ({version})"
        others = " or ".join(f"`{refusals.said_flag(name)}`" for name in row.if_any)
        if refusals.START not in row.stage or row.says or ("graphs" in row.when and row.if_any):
            continue
        for name in row.when:
            for with_ in row.with_:
                conditions = only + (f" with {others}" if others and with_ != "verify" else "")
                if with_ == "graphs" and name in ("pipeline_verify", "pipeline_warm_up"):
                    yield "CUDA graphs", name.removeprefix("pipeline_"), "", row.why
                elif with_ in TITLES:
                    yield _name(row, name, with_), with_, conditions, row.why


def _name(row: Refused, name: str, with_: str) -> str:
    """The flag, with the only value that is refused."""
    if name == "precision":
        return "neither `--bf16` nor `--fp16`"
    value = row.when[name].get("is")
    if name == "graphs":
        return f"`--cuda-graph-impl {value}`"
    shown = value is not None and with_ in ("verify", "warm_up", "recompute", "offload")
    return f"`{refusals.said_flag(name)}{f' {value}' if shown else ''}`"


def _text(series: tuple[int, int]) -> str:
    return ".".join(map(str, series))


def refused_settings() -> Iterator[tuple[str, str, str]]:
    """Settings, their further conditions and why; the reasons of flags are not repeated."""
    for row in refusals.rows():
        if refusals.STEP not in row.stage or "any" not in row.with_ or "graphs" in row.when:
            continue
        if "is_sliced" in row.if_any:  # they repeat what is refused with --pipeline-slices
            continue
        if "adjust_tensor_shapes_fn" in row.when:  # an argument of a step, below
            continue
        for setting, test in row.when.items():
            more = " above 1" if "above" in test else ""
            yield f"`{setting}`{more}", "", row.why
    for row in refusals.rows():
        for setting, test in row.if_any.items():
            if row.when.get("graphs") == {"is": "full_iteration"}:
                value = f" {test['is']}" if "is" in test else ""
                yield f"`{setting}`{value}", " with CUDA graphs per iteration", row.why
    yield "`adjust_tensor_shapes_fn`", "", "needs `variable_seq_lengths`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
