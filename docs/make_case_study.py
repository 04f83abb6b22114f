#!/usr/bin/env python3
"""Run the commands of docs/case_study.md in order, and write what they printed into the page.

python docs/make_case_study.py            # ten minutes, on a machine that does nothing else
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PAGE = DOCS / "case_study.md"
PICTURE = DOCS / "pictures" / "case_study" / "step.png"
GENERATED = re.compile(r"<!-- generated: (\w+) -->.*?<!-- end: \1 -->", re.S)
FENCED = re.compile(r"^```\n(.*?)^```$", re.M | re.S)
RUNS = {"own": "1F1B", "half": "`v-half`", "auto": "`auto`, balanced layers"}
WARM_UP = 9  # iterations that are measured, or compile
ITERATION = re.compile(
    r"^ \[.*?\] (iteration .*?) \|.*?(elapsed .*?) \|.*?(lm loss: \S+) .*$", re.M
)
MARK = "==> case study:"


@dataclass
class Study:
    """What the commands printed, block by block, and the logs that they wrote."""

    printed: list[str]
    logs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def milliseconds(self, name: str) -> float:
        """Return the median time of an iteration after the warm-up."""
        rows = [row for row in self.logs[name] if "seconds" in row]
        return 1000 * statistics.median(row["seconds"] for row in rows[WARM_UP:])

    def losses(self, name: str) -> dict[int, str]:
        """Return the losses with the digits that Megatron-LM prints."""
        rows = (row for row in self.logs[name] if "lm_loss" in row)
        return {row["iteration"]: f"{row['lm_loss']:.6E}" for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        study = run(Path(folder), PAGE.read_text(encoding="utf-8"))
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(folder) / "runs" / "step.png", PICTURE)
    PAGE.write_text(page(study, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)


def run(folder: Path, text: str) -> Study:
    """Run all fenced commands of a page in one shell, in a folder.

    Raises:
        CalledProcessError: a command failed.
    """
    (folder / "scripts").symlink_to(ROOT / "scripts")
    blocks = FENCED.findall(GENERATED.sub("", text))
    script = "".join(f"echo '{MARK}'\n{block}" for block in blocks)
    binaries = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "110",
    }
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    printed = done.stdout.split(f"{MARK}\n")[1:]
    logs = {
        path.stem: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (folder / "runs").glob("*.jsonl")
    }
    return Study(printed, logs)


def page(study: Study, text: str) -> str:
    """Return the page with the outputs of a study between its markers."""
    check, own, half, trace, plan, auto, resumed = study.printed[1:]
    for name, lines in {
        "check": code(check),
        "own": code(chosen(own, r"iteration +(1|19|20)/")),
        "half": code(chosen(half, r"^pipeline|^  pipeline rank|iteration +(1|19|20)/")),
        "trace": code(trace),
        "plan": code(plan.split("\nflags of the first")[0]),
        "auto": code(chosen(auto, r"^pipeline|^  pipeline rank|measured|iteration +(1|19|20)/")),
        "resumed": code(chosen(resumed, r"iteration +2[15]/")),
        "result": result(study),
    }.items():
        text = replaced(text, name, lines)
    return text


def code(printed: str) -> list[str]:
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    return ["```text", *lines, "```"]


def chosen(printed: str, pattern: str) -> str:
    """Return the lines with a pattern; of an iteration, its time and its loss."""
    lines = [line for line in printed.splitlines() if re.search(pattern, line)]
    return "\n".join(re.sub(ITERATION, r"\1 | … | \2 | … | \3 | …", line) for line in lines)


def result(study: Study) -> list[str]:
    """Return the table of times, and whether losses are equal."""
    own = study.milliseconds("own")
    rows = [
        f"| {label} | {study.milliseconds(name):.0f} | {study.milliseconds(name) / own:.2f} |"
        for name, label in RUNS.items()
    ]
    pairs = [
        (float(study.losses("own")[number]), float(loss))
        for name in ("half", "auto")
        for number, loss in study.losses(name).items()
    ]
    equal = sum(one == other for one, other in pairs)
    most = max(abs(other / one - 1) for one, other in pairs)
    return [
        f"Median milliseconds of iterations {WARM_UP + 1} to 20:",
        "",
        "| schedule | ms per iteration | beside 1F1B |",
        "|---|---:|---:|",
        *rows,
        "",
        f"{equal} of {len(pairs)} losses of `v-half` and `auto` are 1F1B's in all seven printed "
        f"digits; the largest difference of the others is {most:.0e} of the loss.",
    ]


def replaced(text: str, name: str, lines: list[str]) -> str:
    start, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.S)
    assert len(pattern.findall(text)) == 1, name
    body = "\n".join([start, "", *lines, "", end])
    return pattern.sub(lambda match: body, text)


if __name__ == "__main__":
    main()
