"""Findings as a table, with a command that mends what pip can."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict

from megatron_zb.cli.doctor.finding import FORCED, Finding

_COLOURS = {"ok": "green", "optional": "yellow", "missing": "red", "wrong": "red"}


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a table of the findings, advice below it, a one-line summary, and one command."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except Exception:  # it is a finding itself
        for finding in findings:
            print(f"{finding.part}: {finding.found} ({finding.state}): {finding.advice}")
    else:
        table = Table(box=None, pad_edge=False)
        for title in ("part", "found", "state", "what it is for"):
            table.add_column(title, no_wrap=title in ("part", "state"))
        for finding in findings:
            state = Text(finding.state, style=_COLOURS[finding.state])
            words = finding.advice if finding.state == "ok" else "see below"
            table.add_row(Text(finding.part), Text(finding.found), state, Text(words))
        Console().print(table)
        for finding in findings:
            if finding.state != "ok":
                print(f"\n{finding.part}: {finding.advice}", end="")
        print()
    for finding in findings:
        if finding.commands:
            print("\n".join([f"\n{finding.part}:", *(f"  {line}" for line in finding.commands)]))
    print(f"\n{summary(findings)}")
    if command := mending_command(findings):
        print(f"What pip can mend, all of it:\n  {command}")


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """Return the findings for other programs."""
    return {
        "ready": not any(finding.stops for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "command": mending_command(findings),
    }


def mending_command(findings: Sequence[Finding]) -> str:
    """Return a shell command that installs all that pip can fix; empty if there is nothing."""
    pip = f"{shlex.quote(sys.executable)} -m pip install "
    parts = []
    for again in (False, True):
        wanted = dict.fromkeys(f.install for f in findings if f.install and f.again is again)
        if wanted:
            parts.append(pip + (FORCED if again else "") + shlex.join(wanted))
    return " && ".join(parts)


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line, with the verdict whether training can start."""
    stopping = [finding.part for finding in findings if finding.stops]
    if not stopping:
        return "All that is required is here."
    return f"To be mended before training can start: {', '.join(stopping)}."


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if anything required is missing or wrong, else 0."""
    return int(any(finding.stops for finding in findings))
