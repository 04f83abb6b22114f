"""The documentation keeps up with the code: every schedule has its section, and its claims hold."""

from __future__ import annotations

import ast
import csv
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import types
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from project import project

from megatron_zb import schedules
from megatron_zb.cli import main as cli
from megatron_zb.megatron_core.versions import SERIES
from megatron_zb.schedules import catalog, lowering
from megatron_zb.schedules.catalog import Family
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.adapters import Adapters
from megatron_zb.schedules.placement import looped

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CLAIMS = yaml.safe_load((ROOT / "tests" / "claims.yaml").read_text(encoding="utf-8"))


def load_script(name: str = "make_schedules") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
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


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading; the site's are the same where pages link to them."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", prose, re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_and_sections_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        found = page.parent / target if target else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), f"{target}#{anchor}"
    names = set(re.findall(r"\]\[([\w-]+)\]", text))
    assert names == set(re.findall(r"^\[([\w-]+)\]: https://\S+$", text, re.M))


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
    family = eval(entry, {"Family": Family, "breadth_first": module, "looped": looped})
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
    moments = lowering._moments(schedule, None, captured=False)
    lines = []
    for rank, at in lowering._total_order(schedule, moments):
        if isinstance(at, lowering.PostReceive):
            continue  # it stands in the line of its send
        if isinstance(at, lowering.Run | lowering.RunPair):
            cells = {rank: str(at.work)}
        else:
            _, stage, microbatch, *_ = at.message
            read_by = f"{stage}{'B' if at.message.is_gradient else 'F'}{microbatch}"
            cells = {rank: f"take {read_by}"}
            if isinstance(at, lowering.Send):
                source, target = at.channel
                cells = {source: f"send {read_by}", target: f"receive {read_by}"}
        lines.append("".join(f"{cells.get(r, ''):16}" for r in range(p)).rstrip())
    return lines


def test_the_order_on_the_page_is_the_one_that_is_made() -> None:
    page = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"```\n(0F0\n.*?)\n```", page, flags=re.DOTALL)
    assert shown.splitlines() == total_order("zb-h1", 2, 2)


def test_what_has_not_been_measured_is_said_to_be_missing() -> None:
    script = load_script()
    for table, parts in (("grid", "grid states"), ("unequal", "unequal"), ("time", "time")):
        (line,) = getattr(script, f"{table}_table")({})
        assert "not been measured" in line
        assert f"schedule_quality.py --output FILE --parts {parts}`" in line
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
    summary = {
        "worse than installed torch": 4,
        "median gain on torch's best (%)": "0.50",
        "strictly better, where there is anything to gain": "5 of 6",
        "bubble at p=16, m=64, limit 0.5 (%)": 17.5,
    }
    grid = {"cells": cells, "summary": summary}
    lines = script.grid_table({"grid": grid})
    assert "| 0.5 | 10.00% | 15.00% | - |" in lines
    said = " ".join(lines)
    for each in (
        "finds an order in 2 of 3 cells; in 1 of them no published schedule fits",
        "slower than the best published one in 0 cells",
        "the best of torch in 4 (median gain 0.50%)",
        "faster in 5 of 6 cells",
        "17.5% (0.5).",
    ):
        assert each in said, each
    cells[0]["best_known"] = 109.0
    assert "published one in 1 cells" in " ".join(script.grid_table({"grid": grid}))
    states = [
        {"memory_limit": limit, "kept": kept, "chosen": 100.0}
        for limit, kept in ((0.5, 130.0), (0.5, 150.0), (1, 100.0), (1, 99.0))
    ]
    lines = script.grid_table({"grid": grid, "states": {"cells": states}})
    assert "Of 4 cells with recomputation or offload, 2 are faster and 1 slower" in " ".join(lines)
    assert any(line.endswith("| 15.00% | 40.00% |") for line in lines)
    unequal = {"cells": [["slow rank", 4, 8, 1.0, 2.0], ["slow rank", 8, 16, 1.0, 4.0]]}
    lines = script.unequal_table({"unequal": unequal})
    assert lines[0].startswith("| costs, 2 cells each |")
    assert "| slow rank | 3.00% | 2.00-4.00% |" in lines
    seconds = {"a p=2 m=4": 0.1, "b p=2 m=4": 0.3, "auto p=2 m=4": 1, "auto p=2 m=4 limit 0.5": 2}
    assert script.time_table({"time": seconds}) == [
        "- p = 2, m = 4. Named schedules: 0.1 to 0.3; `auto`: 1; `auto` limit 0.5: 2."
    ]


def test_the_tables_of_schedules_are_made_from_the_results() -> None:
    """But the catalog's, which simulates; its rows have a test above."""
    script = load_script()
    made = {
        "grid": (script.grid_table, script.QUALITY),
        "unequal": (script.unequal_table, script.QUALITY),
        "time": (script.time_table, script.QUALITY),
        "exact": (script.exact_table, script.EXACT),
        "others": (script.others_table, script.OTHERS),
    }
    page = PAGE
    for name, (table, kept) in made.items():
        page = script.replaced(page, name, table(script._read(ROOT / "docs" / kept)))
    assert page == PAGE, "run docs/make_schedules.py --tables-only"


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


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "examples", "scripts"])
def test_what_can_be_started_can_be_started(folder: str) -> None:
    """A file that names its interpreter is executable, and no other one is."""
    found = {
        path: path.read_bytes().startswith(b"#!")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".sh")
    }
    assert any(found.values())
    assert {path for path in found if os.access(path, os.X_OK)} == {p for p in found if found[p]}


# --- what is claimed is shown


def plain(text: str) -> str:
    """Prose in one line, with the texts of links alone."""
    return " ".join(re.sub(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text).split())


def test_every_page_has_evidence() -> None:
    pages = {page.relative_to(ROOT).as_posix() for page in PAGES} - {"CONTRIBUTING.md"}
    assert set(CLAIMS) == pages
    assert all(CLAIMS.values())


@pytest.mark.parametrize("name", sorted({name for names in CLAIMS.values() for name in names}))
def test_evidence_exists(name: str) -> None:
    path, _, test = name.partition("::")
    assert (ROOT / path).is_file()
    if path.startswith("tests/"):
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {re.escape(test)}\(", source, re.M), test


def test_a_feature_of_others_has_its_link() -> None:
    """What is said of others has a link, but for what is missing and what their heading links."""
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    first, second = (
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        for table in re.findall(r"^\| \| .*?(?=\n\n)", page, re.M | re.S)
    )
    assert first[0][1] == "megatron_zb"
    assert [row[0] for row in second] == [row[0] for row in first]
    assert {len(row) for row in first} == {len(first[0])}
    assert {len(row) for row in second} == {len(second[0])}
    said_by_the_heading = {"version", "in Megatron-LM", "overlapped gradient reduction"}
    plain_words = ("-", "?", "no V", "the user's", "1F1B, interleaved")
    for table, own, without_links in ((first, 2, said_by_the_heading), (second, 1, {"version"})):
        for row in table[2:]:
            if row[0] not in without_links:
                for cell in row[own:]:
                    assert "](" in cell or "][" in cell or cell in plain_words, (row[0], cell)


def test_a_source_about_others_does_not_change() -> None:
    """Code of others is linked at a tag or a commit, and every link is used."""
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    links = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", page, re.M))
    for name, address in links.items():
        assert f"][{name}]" in page, name
        if "github.com" in address:
            assert re.search(
                r"/(?:blob|tree)/(?:[0-9a-f]{40}|(?:core_)?v[0-9.]+)(?:/|$)", address
            ), address


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs" / "results" / name).read_text())
    return found


def test_every_version_has_a_record_of_what_ran() -> None:
    """The adapter and the real pretrain_gpt.py, by tests that there are."""
    folder = ROOT / "docs" / "results" / "megatron"
    assert {file.stem for file in folder.iterdir()} == {series.text for series in SERIES}
    for file in folder.iterdir():
        with file.open(encoding="utf-8", newline="") as text:
            rows = list(csv.DictReader(text))
        folders = {Path(*Path(row["tests"].split()[0]).parts[:2]) for row in rows}
        assert {Path("tests/megatron_core"), Path("tests/real_megatron_lm")} <= folders
        for row in rows:
            assert row["megatron"].startswith(f"{file.stem}.")
            assert (ROOT / row["tests"].split()[0]).exists()
            assert int(row["passed"]) > 0
            assert date.fromisoformat(row["date"])


def test_plans_of_token_slices_are_those_that_were_made() -> None:
    page = (ROOT / "docs" / "long_context.md").read_text(encoding="utf-8")
    for case in results("slices_plan.json")["cases"]:
        found = [case[name] for name in ("sliced", "whole", "megatron_full")]
        memory = "{:.0f} ({:.1f})"
        cells = [
            memory.format(row["tokens_per_second_per_gpu"], row["memory"]["total"] / 2**30)
            if row
            else "nothing fits"
            for row in found
        ]
        (line,) = (
            line
            for line in page.splitlines()
            if line.startswith(f"| {case['gpus']}, {case['tokens'] // 1024}k |")
        )
        assert [cell.split(",")[0].strip() for cell in line.split("|")[2:5]] == cells
        for row, cell in zip(found, line.split("|")[2:5], strict=True):
            assert row is None or row["tensor"] == 8
            if row and "`" in cell:
                assert f"`{row['runs']}`" in cell and f"PP{row['pipeline']}" in cell
                assert ("n=" in cell) == (row["slices"] > 1)
                assert row["slices"] == 1 or f"n={row['slices']}" in cell
                assert row["context"] == 1 or f"CP{row['context']}" in cell


def test_what_is_said_of_auto_was_measured() -> None:
    found = results("auto_plans.json")
    compared = [row for row in found["rows"] if row["lead"] is not None]
    leads = [row["lead"] for row in compared]
    seconds = [row["seconds"] for row in compared]
    ahead = sum(lead > 1e-9 for lead in leads)
    page = " ".join((ROOT / "docs" / "planner.md").read_text(encoding="utf-8").split())
    assert min(leads) >= 0 == found["behind"]
    assert f"in {len(found['rows'])} plans: 16 models" in page
    assert f"In {len(found['rows']) - len(compared)} no pipeline fits." in page
    assert f"In the other {len(compared)} `auto` is never behind a named schedule" in page
    assert f"ahead of all in {ahead}, by up to {max(leads):.1%}".replace("%", " %") in page
    took = f"{min(seconds):.0f} to {max(seconds):.0f} seconds of a processor"
    assert f"{took}, {statistics.median(seconds):.0f} in the median." in page


def test_the_step_on_the_page_of_the_planner_is_the_one_that_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    [command] = re.findall(r"`megatron-zb (trace docs/results/\S+)`", page)
    name, path = command.split()
    assert cli.main([name, str(ROOT / path)]) == 0
    [shown] = re.findall(r"^```\n(rank ms .*?)^```$", page, re.M | re.S)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert len(shown.splitlines()) == 5
    assert [line for line in shown.splitlines() if line not in printed] == []


def test_the_extras_are_those_of_the_packaging() -> None:
    said = plain(README).split("Extras:")[1]
    extras = project()["optional-dependencies"]
    assert sorted(extras) == ["docs", "fast", "library", "megatron-lm", "plots", "te", "test"]
    assert {*extras["plots"], *extras["fast"], *extras["library"]} < set(extras["test"])
    for name in extras:
        assert f"`{name}`" in said or f"[{name}]" in README


def test_a_searched_order_is_never_slower_than_the_fixed_one() -> None:
    costs = schedules.Costs.uniform(pipeline_size=4, forward=1, backward=1.3, weight=0.6, p2p=0.1)
    for fixed, searched in (("zb-h1", "zb-1p"), ("zb-h2", "zb-2p")):
        makespans = [
            schedules.simulate(
                schedules.build(name, pipeline_size=4, num_microbatches=9, costs=costs), costs
            ).makespan
            for name in (fixed, searched)
        ]
        assert makespans[1] <= makespans[0] * (1 + 1e-12)


def test_the_gains_of_blockwise_distillation_are_those_of_the_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = results("pipe_bd.json")

    def gains(cells: list[dict[str, Any]], way: str, base: str, key: str) -> list[float]:
        return [cell["ways"][base][key] / cell["ways"][way][key] for cell in cells]

    def said(values: list[float]) -> str:
        return f"{min(values):.1f} to {max(values):.1f}"

    text = plain((ROOT / "docs" / "pipe_bd.md").read_text(encoding="utf-8"))
    base = "block by block"
    said_of = {12.0: " times as fast with", 4.0: " times with equal", 1.33: " times with a third"}
    for student, after in said_of.items():
        cells = [cell for cell in found["sleeping"] if cell["student_ms"] == student]
        assert said(gains(cells, "pipe-bd", base, "seconds")) + after in text
    assert f"were {said(gains(found['real'], 'pipe-bd', base, 'seconds'))} times as fast" in text
    every = gains([*found["sleeping"], *found["real"]], "pipe-bd", "all blocks at once", "seconds")
    assert f"{min(every):.2f} to {max(every):.1f} times" in text
    page = (ROOT / "docs" / "pipe_bd_appendix.md").read_text(encoding="utf-8")
    monkeypatch.syspath_prepend(ROOT / "docs")
    script = load_script("make_pipe_bd")
    made = script.sleeping_table(found["sleeping"]) + script.computing_table(found["real"])
    for line in made + script.batches_table(found["batches"]):
        assert line in page.splitlines(), "run docs/make_pipe_bd.py"
    four, six = (
        [
            each["one after the other"]["seconds"] / each[way]["seconds"]
            for way in ("candidates", "whole blocks")
        ]
        for each in (
            next(iter(result["cases"].values()))
            for result in results("library_of_blocks.json")["results"]
        )
    )
    said_of_ways = (
        f"speedups are {four[0]:.2f} on 4 sleeping ranks, {six[0]:.2f} on 6; with whole blocks "
        f"{four[1]:.2f}, {six[1]:.2f}"
    )
    assert said_of_ways in plain(page)


def test_the_table_of_faults_is_made_from_the_results() -> None:
    script = load_script("make_reliability")
    seen = json.loads((ROOT / "docs" / "results" / "faults.json").read_text())
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = script.fault_rows(seen)
    assert all(line in page.splitlines() for line in rows), "run docs/make_reliability.py"
    assert sum(int(row.split("|")[3]) for row in rows[2:]) == len(seen)
    changed = [{**seen[0], "resume": "other losses"}, *seen[1:]]
    assert "equal in 3 of 4" in script.fault_rows(changed)[2]


@pytest.mark.parametrize("microbatches", [4, pytest.param(8, marks=pytest.mark.full)])
def test_the_example_in_python_runs(microbatches: int, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    example = block(page, "from megatron_zb import schedules")
    assert example.count("num_microbatches=8") == 1
    exec(example.replace("num_microbatches=8", f"num_microbatches={microbatches}"), {})
    reason, bound, bubble, passes = capsys.readouterr().out.splitlines()
    assert "fits" in reason
    assert bound.endswith("left to gain")
    assert bubble.startswith("bubble rate")
    assert passes.split()[0] == "0F0"


def templates() -> set[str]:
    """Every string of the package as it stands in its source, with … for what is put in."""
    found = set()
    for path in ROOT.glob("megatron_zb*/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_the_package_prints_what_the_page_quotes() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [
        line.strip()
        for fenced in re.findall(r"^ *```text\n(.*?)^ *```", page, re.M | re.S)
        for line in fenced.splitlines()
        if not line.strip().startswith(("torchrun", "megatron-zb "))
    ]
    assert len(quoted) > 10
    known = templates()
    for line in quoted:
        assert any(line in text for text in known), f"nothing in the package prints: {line}"


# --- the site, which scripts/docs.sh builds


def test_the_site_has_every_page_and_needs_no_network() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        inner = entry.values() if isinstance(entry, dict) else entry
        return [page for one in inner for page in pages(one)]

    of_root = {"index.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    assert set(pages(site["nav"])) == of_root | {p.name for p in (ROOT / "docs").glob("*.md")}
    assert site["strict"]
    assert set(site["validation"]["links"].values()) == {"warn"}  # errors, as it is strict
    assert site["theme"]["font"] is False  # others would be asked for fonts


def test_links_out_of_the_pages_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    hooks = importlib.import_module("docs_hooks")

    def rewritten(text: str, source: str) -> str:
        page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri=source))
        return str(hooks.on_page_markdown(text, page, None, None))

    assert rewritten("[a](docs/api.md#b) ![c](docs/pictures/d.png)", "index.md") == (
        "[a](api.md#b) ![c](pictures/d.png)"
    )
    assert rewritten("[a](../README.md) [b](#c) [d](https://e)", "api.md") == (
        "[a](index.md) [b](#c) [d](https://e)"
    )
    assert rewritten("[a](../setup.py) [b](../examples)", "api.md") == "[a](files/setup.py.txt) b"
    assert hooks.linked("[a](b.md#c) [d](#e) [f](https://g)") == ["b.md"]


def test_the_site_is_built_with_versions_that_the_packaging_allows() -> None:
    lines = (ROOT / "constraints" / "docs.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    texts = project()["optional-dependencies"]["docs"]
    assert len(texts) == 3
    for text in texts:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[requirement.name])


def test_the_script_that_builds_the_site_explains_itself() -> None:
    script = ROOT / "scripts" / "docs.sh"
    subprocess.run(["bash", "-n", script], check=True)
    said = subprocess.run([script, "--help"], check=True, capture_output=True, text=True).stdout
    assert "build/site" in said


def test_the_tables_of_what_was_measured_are_made_from_the_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    script = load_script("make_performance")
    assert page == script.page(page), "run docs/make_performance.py"
    assert page.count("<!-- generated: ") == page.count("<!-- end: ") == 10


def test_the_times_with_recomputation_are_those_of_the_results() -> None:
    """And none is above what keeps everything in the same memory, or breaks its limit."""
    results = json.loads((ROOT / "docs/results/recomputation.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/schedules.md").read_text(encoding="utf-8")
    rows = results["rows"]
    for row in rows:
        kept, some = row["kept"], row["some"]
        times = " | ".join(f"{of['makespan']:.1f}" for of in (kept, some))
        assert f"| {row['limit']:g} | {times} | {some['dropped']:.0%} |" in page
        assert some["makespan"] <= kept["makespan"]
        assert some["peak"] <= row["limit"] * (1 + 1e-9)
    upstream = results["upstream"]
    assert f"with every layer recomputed takes {upstream['makespan']:.1f} in 0.15 of" in page
    work = {
        round(of["makespan"] * (1 - of["loss"])) for of in (upstream, *(r["kept"] for r in rows))
    }
    assert f"without recomputation is {work.pop()}." in " ".join(page.split())
    assert not work


def test_the_times_with_moves_are_those_of_the_results() -> None:
    """And each keeps its limit."""
    results = json.loads((ROOT / "docs/results/recomputation.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/schedules.md").read_text(encoding="utf-8")
    assert results["moved"]
    lines: dict[float, str] = {}
    for row in sorted(results["moved"], key=lambda row: row["copy"]):
        times = f"{row['makespan']:.1f} | {row['moved']:.0%} | {row['host']:.1f} |"
        lines[row["limit"]] = f"{lines.get(row['limit'], '|')} {times}"
        assert f"The lower bound is {row['bound']:.1f}." in page
        assert row["peak"] <= row["limit"] * (1 + 1e-9)
    fast, slow = sorted({row["copy"] for row in results["moved"]})
    assert f"| limit | {fast:g} | offloaded | host | {slow:g} | offloaded | host |" in page
    for limit, line in lines.items():
        assert f"| {limit:g} {line}" in page


def test_the_times_with_pairs_are_those_of_the_results() -> None:
    """And none is above a published order's that holds as much."""
    results = json.loads((ROOT / "docs/results/pairs.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/schedules.md").read_text(encoding="utf-8")
    keys = ("without_pairs", "makespan")
    for comm in (0.3, 0.5, 0.8):
        rows = [row for row in results["rows"] if row["comm"] == comm]
        found = [row for row in rows if row["schedule"] == "auto"]
        assert 0 < len(found) < len(rows)
        for row in rows if comm == 0.5 else ():
            times = " | ".join(f"{row[key]:.1f}" for key in keys)
            assert f"| {row['peak']:g} | {times} |" in page, row
        for row in rows:
            as_much = [r for r in found if r["limit"] <= row["peak"]]
            assert min(r["makespan"] for r in as_much) <= row["makespan"]


def test_the_idle_times_of_adapters_are_those_of_the_results() -> None:
    rows = results("adapters.json")["rows"]
    page = (ROOT / "docs/schedules.md").read_text(encoding="utf-8")
    for name in dict.fromkeys(row["schedule"] for row in rows):
        idle = " | ".join(f"{row['idle']:.1%}" for row in rows if row["schedule"] == name)
        assert f"| `{name}` | {idle} |" in page


def test_the_table_of_a_second_model_is_that_of_the_results() -> None:
    make = load_script()
    made = make.second_model_table(results("second_model.json"))
    assert make.replaced(PAGE, "second model", made) == PAGE


def test_the_table_of_two_directions_is_what_its_script_prints() -> None:
    make = load_script()
    assert make.replaced(PAGE, "directions", make.directions_table()) == PAGE


def test_the_table_of_patches_is_what_its_script_prints() -> None:
    make = load_script()
    assert make.replaced(PAGE, "patches", make.patches_table()) == PAGE


def test_the_gain_of_a_teacher_beside_is_that_of_the_results() -> None:
    rows = results("teacher_beside.cpu.json")["rows"]
    page = " ".join(PAGE.split())
    ratios = {name: f"{row['ratio']:.2f}" for name, row in rows.items()}
    assert f"took {ratios['1f1b']} of the time of the teacher's forward" in page
    assert f"with `1f1b`, {ratios['v-zb']} with `v-zb` and {ratios['v-half']} with `v-half`" in page
    assert {len(row["beside"]) for row in rows.values()} == {12}


def test_the_gain_of_adapters_together_is_that_of_the_results() -> None:
    page = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    filled, result = results("adapters_filled.cpu.json"), results("adapters_together.cpu.json")
    assert f"took {result['rows']['1f1b']['ratio']:.2f} of the time" in page
    ratio, steps = filled["rows"]["1f1b"]["ratio"], filled["arguments"]["at_once"]
    assert f"and {ratio:.2f} with it filled for {steps} steps" in page
    low, middle, high = statistics.quantiles(filled["rows"]["1f1b"]["one_ms"], n=4)
    varied = max(high - middle, middle - low) / middle
    assert f"varied by {100 * varied:.0f} %" in page
    assert f"it would be {result['bound']:.2f} (" in page
    made = result["arguments"]
    assert f"{made['ranks']} CPU ranks" in page
    assert f"{made['adapters']} adapters of {made['microbatches']} microbatches took" in page


def test_the_idle_times_of_the_page_of_adapters_are_simulated() -> None:
    page = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    costs = Costs.uniform(pipeline_size=8, forward=1.0, backward=1.0, weight=0.02)
    idle = {}
    for name, steps in (("1f1b", 1), ("1f1b", 4), ("v-zb", 4)):
        adapters = Adapters.equal(4, microbatches=8, steps=steps)
        order = schedules.build(name, pipeline_size=8, adapters=adapters, costs=costs)
        idle[name, steps] = 100 * schedules.simulate(order, costs).bubble_rate
    filled, drained = idle["1f1b", 4], idle["1f1b", 1]
    assert f"idle for {filled:.0f} % under `1f1b`, not for {drained:.0f} %" in page
    assert f"for {idle['v-zb', 4]:.1f} % under `v-zb`" in page


def test_the_page_of_recipes_is_made_from_the_results() -> None:
    script = load_script("make_recipes")
    made = "\n\n".join(block.rstrip("\n") for block in script.lines()) + "\n"
    assert (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8") == made
    rows = results("recipe_gains.json")["rows"]
    shapes = {(row["pipeline"], row["microbatches"], row["chunks"]): row for row in rows}
    assert len(rows) > 250
    for (p, m, chunks), row in list(shapes.items())[:8]:
        if m <= 6 * p and chunks == 1:
            costs = schedules.Costs.uniform(
                pipeline_size=p,
                forward=1.0,
                backward=1.2,
                weight=0.8,
                p2p=script.result()["costs"]["p2p"],
            )
            own = schedules.build("1f1b", pipeline_size=p, num_microbatches=m, costs=costs)
            assert schedules.simulate(own, costs).makespan == pytest.approx(row["own"])
