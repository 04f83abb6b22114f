"""The record of what has passed with Megatron-LM's main branch, which docs/support.md shows."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from feature_matrix import ROWS

ROOT = Path(__file__).resolve().parents[2]
ROW = next(row for row in ROWS if row.feature == "frozen weights")
CASES = {
    f"test_a_feature_gives_what_megatron_gives[{ROW.feature}-v-half]": "",
    f"test_a_feature_gives_what_megatron_gives[{ROW.feature}-zb-h1]": "<skipped/>",
    "test_gradients_equal_megatrons[2 ranks, tied-v-half]": "",
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_main", ROOT / "docs" / "make_main.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("RUNS", "FEATURES"):
        monkeypatch.setattr(module, name, tmp_path / name)
    return module


def report(folder: Path, cases: dict[str, str]) -> str:
    """Write the report of pytest of tests with an outcome each, and return its path."""
    lines = [
        f'<testcase classname="tests.megatron_core.test_feature_matrix" name="{name}">{outcome}'
        "</testcase>"
        for name, outcome in cases.items()
    ]
    path = folder / "report.xml"
    suite = '<testsuite timestamp="2026-11-28T10:00:00">'
    path.write_text(f"<testsuites>{suite}{''.join(lines)}</testsuite></testsuites>")
    return str(path)


def test_only_what_has_passed_is_recorded(script: ModuleType, tmp_path: Path) -> None:
    script.main("abcd1234", [report(tmp_path, CASES)])
    (core,) = csv.DictReader(script.RUNS.open())
    assert (core["megatron"], core["passed"], core["date"]) == ("main abcd1234", "2", "2026-11-28")
    passed = {line["feature"]: line["passed"] for line in csv.DictReader(script.FEATURES.open())}
    assert passed[ROW.feature] == "1"
    assert passed["untied embeddings"] == "1"
    assert "BERT" not in passed
    assert "no data-parallel wrapper" not in passed


def test_a_failure_is_not_recorded(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"1 tests have failed, the first is test_x$"):
        script.main("abcd1234", [report(tmp_path, {**CASES, "test_x": "<failure/>"})])
    assert not script.RUNS.exists()


def test_a_report_that_cannot_be_read_is_said_in_a_sentence(
    script: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"error: a report of .* cannot be read: .*missing"):
        script.main("abcd1234", [str(tmp_path / "missing.xml")])


def test_the_record_names_rows_of_the_matrix() -> None:
    with (ROOT / "docs" / "results" / "main_features.csv").open(encoding="utf-8") as file:
        recorded = [line["feature"] for line in csv.DictReader(file)]
    assert set(recorded) <= {row.feature for row in ROWS if row.case is not None}
    assert len(recorded) > 50
