"""Which Python the scripts take on a machine that has only some of the pinned versions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = "bash basename cat cksum dirname env grep mkdir sed sort tail".split()
SCRIPTS = ["quickstart.sh", "test.sh", "mutate.sh"]

FAKE = """#!/bin/sh
case "$1 $2" in
    "-c "*"!= '{version}')"*) exit {found} ;;
    "-m venv") echo "asked for $*"; exit 7 ;;
esac
exit 1
"""
"""A Python of one version, which ends where it is asked for an environment."""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A clone that has never been used, and a PATH without any Python."""
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None, tool
        (tmp_path / "bin" / tool).symlink_to(found)
    shutil.copytree(ROOT / "scripts", tmp_path / "clone" / "scripts")
    shutil.copytree(ROOT / "constraints", tmp_path / "clone" / "constraints")
    for name in ("setup.py", "pyproject.toml", "megatron_zb/__init__.py"):
        (tmp_path / "clone" / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "clone" / name)
    return tmp_path


def add_python(machine: Path, command: str, version: str, has_ensurepip: bool = True) -> None:
    path = machine / "bin" / command
    path.write_text(FAKE.format(version=version, found=0 if has_ensurepip else 1))
    path.chmod(0o755)


def started(machine: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [machine / "clone" / "scripts" / script, *words],
        env={"PATH": str(machine / "bin")},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("command", ["python3.12", "python3"])
def test_a_machine_with_3_12_alone(machine: Path, script: str, command: str) -> None:
    add_python(machine, command, "3.12")
    done = started(machine, script)
    assert done.returncode == 7, done.stderr
    assert "==> Python 3.12 (the first on this machine of 3.11 3.12;" in done.stderr
    assert "asked for -m venv --clear .venv-3.12\n" in done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_3_11_comes_first(machine: Path, script: str) -> None:
    add_python(machine, "python3.12", "3.12")
    add_python(machine, "python3", "3.11")
    done = started(machine, script)
    assert "==> Python 3.11 (" in done.stderr
    assert "asked for -m venv --clear .venv\n" in done.stdout


def test_a_python_that_cannot_make_environments_is_passed_over(machine: Path) -> None:
    """As Debian's, without its package python3-venv."""
    add_python(machine, "python3.11", "3.11", has_ensurepip=False)
    add_python(machine, "python3.12", "3.12")
    assert ".venv-3.12\n" in started(machine, "test.sh").stdout


def test_an_environment_that_is_there_is_taken(machine: Path) -> None:
    """It runs on, where its Python has left PATH since."""
    add_python(machine, "python3.12", "3.12")
    (machine / "clone" / ".venv" / "bin").mkdir(parents=True)
    add_python(machine, "../clone/.venv/bin/python", "3.11")
    assert "==> Python 3.11 (" in started(machine, "test.sh").stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_machine_with_none(machine: Path, script: str) -> None:
    add_python(machine, "python3", "3.13")
    done = started(machine, script)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"{script}: error: no Python 3.11 or 3.12 with the venv and ensurepip modules is on PATH"
        " or under pyenv; install one (Debian and Ubuntu: python3.12 and python3.12-venv)\n"
    )


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_a_version_that_is_given_is_a_demand(machine: Path, script: str) -> None:
    add_python(machine, "python3.12", "3.12")
    done = started(machine, script, "--python", "3.11")
    assert done.returncode == 2
    assert "error: no Python 3.11 with the venv" in done.stderr
    add_python(machine, "python3.11", "3.11")
    assert ".venv-3.12\n" in started(machine, script, "--python=3.12").stdout


def test_what_pip_prints_is_followed_by_seconds() -> None:
    """Where pip is silent, as while it reads a large package, lines with the seconds go on."""
    script = """
        source scripts/_environment.sh
        { echo one; until [[ -s $1 ]]; do :; done; echo two; } | with_progress | tee "$1.all" \
            | while IFS= read -r line; do
                echo "$line"
                if [[ $line == *" s" ]]; then echo seen >"$1"; fi
            done
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script, "test", f"{folder}/seen"],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "PROGRESS_SECONDS": "0.1"},
            capture_output=True,
            text=True,
            check=True,
        )
    first, *seconds, last = done.stdout.splitlines()
    assert (first, last) == ("one", "two")
    assert seconds
    assert all(re.fullmatch(r"    \.\.\. \d+ s", line) for line in seconds)


def test_a_failure_of_pip_is_not_hidden_by_its_progress() -> None:
    script = "source scripts/_environment.sh; { echo one; exit 3; } | with_progress"
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, capture_output=True)
    assert done.returncode == 3
