"""The measure of the tests: its list fits the code, and it tells a hole from what is noticed."""

from __future__ import annotations

from pathlib import Path

import mutate
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_mutant_has_a_place_and_tests() -> None:
    mutants = mutate.read()
    assert len({str(m) for m in mutants}) == len(mutants) >= 100
    for mutant in mutants:
        assert mutant.tests
        assert all((ROOT / test.split("::")[0]).exists() for test in mutant.tests), mutant
        assert mutant.old != mutant.new


def test_a_mutant_without_a_place_is_an_error(tmp_path: Path) -> None:
    listed = tmp_path / "mutants.yaml"
    listed.write_text("- {file: setup.py, tests: [], mutants: [{old: nothing of it, new: x}]}")
    with pytest.raises(ValueError, match=r"setup\.py: nothing of it -> x: found 0 times, not once"):
        mutate.read(listed)


def test_what_no_test_notices_survives(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "test_sums.py").write_text("import sums\n\ndef test(): assert sums.add(2, 2) == 4")
    noticed = mutate.Mutant("sums.py", "a + b", "a - b", ("test_sums.py",))
    missed = mutate.Mutant("sums.py", "a + b", "a * b", ("test_sums.py",))
    assert mutate.tried(noticed, tmp_path, 60) == mutate.KILLED
    assert mutate.tried(missed, tmp_path, 60) == mutate.SURVIVED
    assert mutate.tried(noticed, tmp_path, 0.01) == mutate.NO_ANSWER
    assert "a + b" in (tmp_path / "sums.py").read_text()
    with pytest.raises(RuntimeError, match="pytest could not run nowhere"):
        mutate.tried(mutate.Mutant("sums.py", "a + b", "", ("nowhere.py",)), tmp_path, 60)
