"""The documentation keeps up with the code: every schedule has its section, and its claims hold."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_zb import schedules
from megatron_zb.schedules import catalog, communication
from megatron_zb.schedules.catalog import Family

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "make_schedules", ROOT / "docs" / "make_schedules.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def block(page: str, first_line: str) -> str:
    """The fenced Python code that starts with a line."""
    (found,) = re.findall(rf"```python\n({re.escape(first_line)}.*?)```", page, flags=re.DOTALL)
    return str(found)


@pytest.mark.parametrize("name", schedules.names())
def test_every_schedule_has_its_section_its_picture_and_its_row(name: str) -> None:
    make = "write its section, then run docs/make_schedules.py"
    assert re.search(rf"^### `{re.escape(name)}`$", PAGE, flags=re.MULTILINE), make
    assert f"](pictures/{name}.png)" in PAGE, make
    assert (ROOT / "docs" / "pictures" / f"{name}.png").is_file(), make
    assert f"| [`{name}`](#{name}) |" in PAGE, make


def test_no_section_is_about_a_schedule_that_is_gone() -> None:
    assert re.findall(r"^### `(.*)`$", PAGE, flags=re.MULTILINE) == schedules.names()


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
    ],
)
def test_links_to_files_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.1, 0.5)])
@pytest.mark.parametrize(("p", "m"), [(4, 12), (5, 15), (8, 16)])
def test_the_formulas_of_the_page_hold(p: int, m: int, times: tuple[float, float, float]) -> None:
    f, b, w = times
    half, least = (p + 2) // 2, (p + 4) // 3
    expected = {
        "gpipe": ((p - 1) * (f + b + w), m),
        "1f1b": ((p - 1) * (f + b + w), p),
        "interleaved": ((p - 1) * (f + b + w) / 2, p + (p - 1) / 2),
        "zb-h1": ((p - 1) * (f + b - w), p),
        "zb-h2": ((p - 1) * max(f, f + b - 2 * w), 2 * p - 1),
    }
    if times == (1.0, 1.0, 1.0):
        expected["v-zb"] = ((p - 1) / 2, p)
        expected["v-half"] = ((6 * p - 1) / 2 - 3 * half, half)
        expected["v-min"] = ((6 * p - 1) / 2 - 3 * least, least)
    costs = schedules.Costs.uniform(pipeline_size=p, forward=f, backward=b, weight=w)
    for name, (bubble, peak) in expected.items():
        built = schedules.build(name, pipeline_size=p, num_microbatches=m, costs=costs)
        timeline = schedules.simulate(built, costs)
        assert timeline.makespan - m * (f + b + w) == pytest.approx(bubble), name
        assert max(timeline.peak_activation) == pytest.approx(peak), name


def test_the_example_of_a_new_schedule_works(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    family_file = block(page, '"""Breadth-first')
    assert family_file.count("\n") < 60
    module = ModuleType("breadth_first")
    monkeypatch.setitem(sys.modules, "breadth_first", module)
    exec(family_file, module.__dict__)
    entry = block(page, "    Family(").strip().removesuffix(",")
    family = eval(entry, {"Family": Family, "breadth_first": module})
    monkeypatch.setitem(catalog._BY_NAME, family.name, family)
    for p, m in ((2, 1), (4, 3), (4, 8)):
        built = schedules.build(family.name, pipeline_size=p, num_microbatches=m)
        costs = schedules.Costs.uniform(pipeline_size=p, forward=1, backward=1, weight=1)
        peak = max(schedules.simulate(built, costs).peak_activation)
        assert peak == family.peak_microbatches(p, m)
        schedules.lower(built)


def total_order(name: str, p: int, m: int) -> list[str]:
    """The events of a lowering from first to last, each in the columns of its ranks."""
    schedule = schedules.build(name, pipeline_size=p, num_microbatches=m)
    moments = communication._moments(schedule, None, late=False)
    lines = []
    for rank, at in communication._total_order(schedule, moments):
        if isinstance(at, communication.Receive):
            continue  # it stands in the line of its send
        if isinstance(at, communication.Run):
            cells = {rank: str(at.work)}
        else:
            _, stage, microbatch, _ = at.message
            read_by = f"{stage}{'B' if at.message.is_gradient else 'F'}{microbatch}"
            cells = {rank: f"take {read_by}"}
            if isinstance(at, communication.Send):
                source, target = at.channel
                cells = {source: f"send {read_by}", target: f"receive {read_by}"}
        lines.append("".join(f"{cells.get(r, ''):16}" for r in range(p)).rstrip())
    return lines


def test_the_order_on_the_page_is_the_one_that_is_made() -> None:
    page = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"```\n(0F0\n.*?)\n```", page, flags=re.DOTALL)
    assert shown.splitlines() == total_order("zb-h1", 2, 3)


def test_what_has_not_been_measured_is_said_to_be_missing() -> None:
    script = load_script()
    for table in ("grid", "unequal", "parts", "time"):
        (line,) = getattr(script, f"{table}_table")({})
        assert "not been measured" in line
        assert f"schedule_quality.py --output FILE --parts {table}`" in line
    (line,) = script.exact_table({})
    assert "benchmarks/exact_gap.py" in line
    (line,) = script.others_table({})
    assert "benchmarks/beside_others.py" in line


def test_tables_are_made_from_the_results() -> None:
    script = load_script()
    cell: dict[str, Any] = {"memory_limit": 0.5, "bound_of_v": 100.0, "chunks": 2}
    cells = [
        {**cell, "makespan": 110.0, "best_known": 121.0},
        {**cell, "makespan": 120.0, "best_known": None},
        {**cell, "makespan": None, "best_known": 100.0},
    ]
    lines = script.grid_table({"grid": {"cells": cells, "summary": {"cells": 3}}})
    assert "| 0.5 | 3 | 2 | 2 | 10.00 % | 1 | 15.00 % | 0 |" in lines
    assert "- cells: 3" in lines
    unequal = {"cells": [["slow rank", 4, 8, 1.0, 2.0], ["slow rank", 8, 16, 1.0, 4.0]]}
    lines = script.unequal_table({"unequal": unequal})
    assert "| slow rank | 2 | 3.00 % | 2.00 % | 4.00 % |" in lines


def test_results_are_kept_and_merged(tmp_path: Path) -> None:
    script = load_script()
    kept = tmp_path / "results" / "kept.json"
    parts: list[dict[str, Any]] = [{"time": {"v-zb": 1}}, {"parts": {}}]
    for part in parts:
        given = tmp_path / "given.json"
        given.write_text(json.dumps(part))
        script._keep(given, kept)
    assert script._read(kept) == {"time": {"v-zb": 1}, "parts": {}}
    with pytest.raises(SystemExit, match="must have"):
        script.replaced("no markers", "grid", [])


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "scripts"])
def test_what_can_be_started_can_be_started(folder: str) -> None:
    """A file that names its interpreter is executable, and no other one is."""
    found = {
        path: path.read_bytes().startswith(b"#!")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".sh")
    }
    assert any(found.values())
    assert {path for path in found if os.access(path, os.X_OK)} == {p for p in found if found[p]}
