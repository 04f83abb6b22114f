"""What a release is made of: its notes, its wheel, its script and its workflow."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import megatron_zb

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "release.sh"
sys.path.append(str(ROOT / "scripts"))
import check_wheel  # noqa: E402

CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def sections() -> dict[str, list[str]]:
    """The lines of each version of the changelog, by its heading."""
    found: dict[str, list[str]] = {}
    for line in CHANGELOG.splitlines():
        if line.startswith("## "):
            found[line] = []
        elif found:
            found[[*found][-1]].append(line)
    return found


def test_the_version_has_an_entry_of_the_changelog() -> None:
    first, newest = [*sections()][:2]
    assert first == "## [Unreleased]"
    assert re.fullmatch(rf"## \[{re.escape(megatron_zb.__version__)}\] - \d{{4}}-\d\d-\d\d", newest)


def test_an_entry_of_the_changelog_can_be_read_in_a_minute() -> None:
    for heading, lines in sections().items():
        if heading != "## [Unreleased]":
            assert len(lines) < 60, heading
            assert all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tests/test_x.py", "", "a test or a page: tests/test_x.py"),
        ("megatron_zb/tests/x.py", "", "a test or a page: megatron_zb/tests/x.py"),
        ("megatron_zb/docs/pictures/v-half.svg", "", "a picture"),
        ("megatron_zb/__pycache__/x.pyc", "", "a cache"),
        ("/megatron_zb/x.py", "", "a path out of the wheel"),
        ("megatron_zb/../x.py", "", "a path out of the wheel"),
        ("setup.py", "", "a file of no package: setup.py"),
        ("megatron_zb/x.yaml", "a: /home/someone/x", "an absolute path, /home/someone"),
    ],
)
def test_a_wheel_has_nothing_that_no_user_needs(
    name: str, content: str, problem: str, tmp_path: Path
) -> None:
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for package in check_wheel.SUBPACKAGES:
            file.writestr(f"megatron_zb/{package}/__init__.py", "")
        file.writestr("megatron_zb-1.dist-info/METADATA", "")
    with zipfile.ZipFile(wheel) as file:
        assert [*check_wheel.problems(file)] == []
    with zipfile.ZipFile(wheel, "a") as file:
        file.writestr(name, content)
    with zipfile.ZipFile(wheel) as file:
        assert any(problem in found for found in check_wheel.problems(file))


def test_a_wheel_has_all_subpackages(tmp_path: Path) -> None:
    folders = {path.parent.name for path in ROOT.glob("megatron_zb/*/__init__.py")}
    assert {*folders, "configs"} == check_wheel.SUBPACKAGES
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("megatron_zb/__init__.py", "")
    done = subprocess.run(
        [sys.executable, check_wheel.__file__, wheel], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "        0  megatron_zb/__init__.py\n" in done.stdout
    assert done.stderr.endswith("x.whl has no package megatron_zb.train\n")


def test_the_workflow_of_a_tag_runs_the_script_and_has_no_secret() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    (built,) = [command.split() for command in commands if "release.sh" in command]
    options = set(re.findall(r"^  (--[a-z]+)", SCRIPT.read_text(encoding="utf-8"), re.M))
    assert {word for word in built if word.startswith("--")} <= options
    assert "secrets." not in text
    assert any("release-notes.md" in command for command in commands)
