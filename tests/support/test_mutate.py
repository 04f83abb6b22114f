"""The measure of the tests: what is drawn, which tests are tried on it, and what is said of it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import mutants
import mutate
import pytest
import reaching_tests
from mutants import Mutant

CHECKOUT = Path(__file__).resolve().parents[2]

SOURCE = '''"""A module."""

from __future__ import annotations

TABLE = {"one": 1, "two": 2}


def largest(values: list[int], least: int = 0, *, twice: bool = False) -> int:
    """Return the largest."""
    best = least
    if not values and twice:
        return best
    for value in values:
        if value > best:
            best = max(best, value + 1)
    values.append(best)
    return round(best, len(values))
'''
EXPECTED = {
    ("", "entry", "{'one': 1, 'two': 2}", "{'two': 2}"),
    ("", "entry", "{'one': 1, 'two': 2}", "{'one': 1}"),
    ("", "constant", "1", "2"),
    ("", "constant", "2", "3"),
    ("largest", "default", "0", "1"),
    ("largest", "default", "False", "True"),
    ("largest", "constant", "0", "1"),
    ("largest", "constant", "False", "True"),
    ("largest", "boolean", "not values and twice", "not values or twice"),
    ("largest", "boolean", "not values and twice", "not (not values and twice)"),
    ("largest", "boolean", "not values", "values"),
    ("largest", "early return", "if not values and twice:\n    return best", "pass"),
    ("largest", "early return", "return best", "return None"),
    ("largest", "early return", "return round(best, len(values))", "return None"),
    ("largest", "comparison", "value > best", "value >= best"),
    ("largest", "arithmetic", "value + 1", "value - 1"),
    ("largest", "arithmetic", "max", "min"),
    ("largest", "constant", "1", "2"),
    ("largest", "dropped statement", "best = least", "pass"),
    ("largest", "dropped statement", "best = max(best, value + 1)", "pass"),
    ("largest", "dropped statement", "values.append(best)", "pass"),
    ("largest", "argument swap", "round(best, len(values))", "round(len(values), best)"),
}


def of(source: str) -> list[Mutant]:
    places = mutants.places_of(source.encode(), "megatron_zb/it.py")
    return [m for place in places if (m := mutants.mutant_of(place, source.encode())) is not None]


def one_of(source: str, kind: str, new: str) -> Mutant:
    [found] = [m for m in of(source) if (m.kind, m.new) == (kind, new)]
    return found


def test_every_kind_of_change_is_made() -> None:
    assert {(m.name, *m.anchor[1:]) for m in of(SOURCE)} == EXPECTED


def test_examples_of_a_field_are_for_readers() -> None:
    found = list(mutants.places_of(b"SIZE = size(8, examples=[9])", "a.py"))
    assert [ast.unparse(place.change.old) for place in found] == ["8"]


def test_a_change_is_made_where_it_stands_and_nowhere_else() -> None:
    mutant = one_of(SOURCE, "comparison", "value >= best")
    changed = mutant.applied(SOURCE.encode()).decode()
    assert changed == SOURCE.replace("value > best", "(value >= best)")
    for mutant in of(SOURCE):
        tree = ast.parse(mutant.applied(SOURCE.encode()))
        assert ast.dump(tree) != ast.dump(ast.parse(SOURCE))


@pytest.mark.full
def test_a_seed_draws_the_same_and_another_seed_others(tree: Path) -> None:
    drawn = {seed: set(map(str, mutants.draw(CHECKOUT, 30, seed))) for seed in ("a", "b")}
    assert len(drawn["a"]) == 30
    assert len(drawn["a"] | drawn["b"]) > 50
    assert len({line.split("/")[1] for line in drawn["a"]}) > 4
    assert mutants.draw(tree / "root", 5, "a") == mutants.draw(tree / "root", 5, "a")
    assert len(mutants.draw(tree / "root", 1000, "a")) == len({m.anchor for m in of(SOURCE)})


def test_equivalent_mutants_are_still_there() -> None:
    for anchor, why in mutate.equivalent().items():
        file, name = anchor[0].split("::")
        source = (mutate.ROOT / file).read_bytes()
        places = [p for p in mutants.places_of(source, file) if p.name == name]
        found = {m.anchor for p in places if (m := mutants.mutant_of(p, source)) is not None}
        assert anchor in found, anchor
        assert why


TESTS = """
import subprocess, sys

import pytest
from megatron_zb.it import largest

def test_nothing(): pass
def test_largest(): assert largest([1, 5]) == 6
@pytest.mark.parametrize("word", ["a b", "c"])
def test_started(word):
    code = "from megatron_zb.it import largest; assert largest([], twice=True) == 0"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one module and one file of tests, with a file that cannot be run."""
    for name, text in {
        "megatron_zb/__init__.py": "",
        "megatron_zb/it.py": SOURCE,
        "megatron_zb/table.py": "from megatron_zb.it import TABLE\n\nSIZE = len(TABLE)\n",
        "tests/test_it.py": TESTS,
        "pyproject.toml": '[tool.mypy]\nfiles = ["megatron_zb"]\n',
    }.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    (tmp_path / "root" / "pytest.ini").touch()
    monkeypatch.setattr(reaching_tests, "ROOT", tmp_path / "root")
    monkeypatch.setattr(mutate, "ROOT", tmp_path / "root")
    return tmp_path


def test_what_a_test_reaches_is_recorded_also_in_processes_that_it_starts(tree: Path) -> None:
    reaching_tests.record(tree / "copy", tree / "notes", [])
    found = reaching_tests.Reached(tree / "notes", tree / "root")
    by_subprocess = [f"tests/test_it.py::test_started[{word}]" for word in ("a b", "c")]
    directly = "tests/test_it.py::test_largest"
    for change, tests in {
        ("comparison", "value >= best"): [directly],
        ("early return", "if not values and twice:\n    return best"): None,
        ("default", "True"): [directly, *by_subprocess],
        ("entry", "{'two': 2}"): [directly, *by_subprocess],
    }.items():
        if tests is not None:
            assert sorted(found.tests_of(one_of(SOURCE, *change))) == sorted(tests)
    returned = next(m for m in of(SOURCE) if m.old == "return best")
    assert sorted(found.tests_of(returned)) == by_subprocess


@pytest.mark.slow
def test_a_mutant_is_killed_by_a_test_or_survives_or_hangs(tree: Path) -> None:
    tests = ["tests/test_it.py::test_nothing", "tests/test_it.py::test_largest"]

    def verdict(mutant: Mutant, tests: list[str], seconds: float = 60.0) -> tuple[str, str]:
        found = mutate.tried(mutant, tree / "copy", tests, seconds)
        return found.word, found.by

    minus = one_of(SOURCE, "arithmetic", "value - 1")
    assert verdict(minus, tests) == (mutate.KILLED, tests[1])
    assert verdict(minus, tests[:1]) == (mutate.SURVIVED, "")
    assert verdict(minus, []) == (mutate.SURVIVED, "no test reaches it")
    assert verdict(minus, tests, 0.01) == (mutate.NO_ANSWER, "")
    assert verdict(minus, ["tests/test_it.py::test_gone"]) == (mutate.KILLED, tests[1])
    end = len(SOURCE.encode())
    broken = Mutant("megatron_zb/it.py", "", "", "", "", 1, end, end, "1 / 0\n")
    assert verdict(broken, tests) == (mutate.KILLED, "tests/test_it.py")
    assert (tree / "root/megatron_zb/it.py").read_text() == SOURCE
    with pytest.raises(RuntimeError, match="has not found its tests"):
        verdict(minus, ["tests/nowhere.py"])


@pytest.mark.parametrize(
    ("change", "checker"),
    [
        (("early return", "return None"), "mypy"),
        (("dropped statement", "pass"), "ruff"),
        (("comparison", "value >= best"), ""),
    ],
)
def test_a_checker_notices_wrong_types_and_unknown_names(
    tree: Path, change: tuple[str, str], checker: str
) -> None:
    mutant = next(m for m in of(SOURCE) if (m.kind, m.new) == change)
    file = tree / "root/megatron_zb/it.py"
    file.write_bytes(mutant.applied(file.read_bytes()))
    assert mutate.checker_of(tree / "root", "megatron_zb/it.py") == checker


def test_wider_tests_are_those_of_the_folder_and_of_its_users() -> None:
    nearby = reaching_tests.Nearby(CHECKOUT)
    mutant = Mutant("megatron_zb/job/settings.py", "", "", "", "", 1, 0, 0, "")
    near, wider = nearby.tests_of(mutant), nearby.wider_tests_of(mutant)
    assert not set(near) & set(wider)
    folders = {Path(file).parts[1] for file in wider}
    assert folders == {"job", "megatron_lm", "cli"}


def test_survivors_alone_meet_the_wider_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    minus = one_of(SOURCE, "arithmetic", "value - 1")
    larger = one_of(SOURCE, "comparison", "value >= best")
    near = [
        mutate.Verdict(minus, mutate.KILLED, "a test", 1, 1.0),
        mutate.Verdict(larger, mutate.SURVIVED, "", 1, 1.0),
    ]
    tried: list[Mutant] = []

    def wider(drawn: list[Mutant], *more: object) -> list[mutate.Verdict]:
        tried.extend(drawn)
        return [mutate.Verdict(each, mutate.KILLED, "another", 5, 9.0) for each in drawn]

    monkeypatch.setattr(mutate, "verdicts", wider)
    found = mutate.with_wider_tests(iter(near), reaching_tests.Nearby(CHECKOUT), 60.0, 2)
    assert [(each.mutant, each.by) for each in found] == [(minus, "a test"), (larger, "another")]
    assert tried == [larger]


@pytest.mark.long
def test_the_command_prints_a_diff_a_verdict_and_the_share(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    minus, larger = (
        one_of(SOURCE, "arithmetic", "value - 1"),
        one_of(SOURCE, "comparison", "value >= best"),
    )
    monkeypatch.setattr(mutants, "draw", lambda root, count, seed: [minus, larger][:count])
    monkeypatch.setattr(mutate, "equivalent", lambda: {larger.anchor: "both are the largest"})
    reaching_tests.record(tree / "copy", tree / "notes", [])
    known = reaching_tests.Reached(tree / "notes", tree / "root")
    monkeypatch.setattr(reaching_tests.Reached, "of", lambda root: known)
    monkeypatch.setattr(sys, "argv", ["mutate.py", "--draw", "2", "--seed", "x"])
    assert mutate.main() == 0
    printed = capsys.readouterr().out
    assert "killed by tests/test_it.py::test_largest (1 tests, " in printed
    assert (
        "\n-            best = max(best, value + 1)\n+            best = max(best, (value - 1))"
        in printed
    )
    assert "equivalent: megatron_zb/it.py:14 largest: comparison: value > best" in printed
    assert printed.endswith("seed x: 1 of 1 mutants killed (100.0%), 0 of them by ruff and mypy\n")
