"""scripts/apply_patches.sh on small trees that have the lines which the patches look for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from small_trees import checkout_tree, write

from megatron_zb.megatron_core.versions import SERIES

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "patches").glob("core_v*.patch"))
VERSIONS = [patch.stem.removeprefix("core_v") for patch in PATCHES]

_PATCHED = "megatron/training/__init__.py"
HUNK = re.compile(r"^@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")


def run(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "apply_patches.sh"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def refused(*arguments: str | Path) -> str:
    """The one sentence with which a run was refused."""
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("apply_patches.sh: error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def before(patch: Path) -> dict[str, str]:
    """For each file that a patch changes, a text that it fits: its old lines, where they belong."""
    texts: dict[str, list[str]] = {}
    for line in patch.read_text(encoding="utf-8").splitlines():
        if line.startswith("--- a/"):
            lines = texts[line.removeprefix("--- a/")] = []
        elif found := HUNK.match(line):
            padding = int(found.group(1)) - 1 - len(lines)
            lines += [f"# line {len(lines) + i + 1}" for i in range(padding)]
        elif line.startswith((" ", "-")) and not line.startswith("---"):
            lines.append(line[1:])
    return {file: "\n".join([*lines, ""]) for file, lines in texts.items()}


def tree_for(patch: Path, root: Path) -> Path:
    checkout_tree(root, patch.stem.removeprefix("core_v"))
    for file, text in before(patch).items():
        write(root / file, text)
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(root)): file.read_bytes()
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }


@pytest.fixture(params=PATCHES, ids=VERSIONS)
def patch(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def tree(patch: Path, tmp_path: Path) -> Path:
    return tree_for(patch, tmp_path / "Megatron-LM")


def test_every_supported_version_has_a_patch_and_pins_are_of_some() -> None:
    """scripts/test.sh --megatron replaces the pin for the others."""
    series = [s.text for s in SERIES]
    assert [version.rpartition(".")[0] for version in VERSIONS] == series
    pinned = re.compile(r"^megatron-core==(\d+\.\d+)\.", re.M)
    pins = sorted((ROOT / "constraints").glob("py*.txt"))
    found = [pinned.findall(file.read_text(encoding="utf-8")) for file in pins]
    assert all(len(each) == 1 and each[0] in series for each in found)


def test_patches_are_small(patch: Path) -> None:
    """They touch at most 40 lines, lean on one line of context, and end on a new line."""
    text = patch.read_text(encoding="utf-8")
    lines = text.splitlines()
    changed = [line for line in lines if re.match(r"[+-](?!\+\+ |-- )", line)]
    assert 0 < len(changed) <= 40
    assert sum(line.startswith(" ") for line in lines) == 1
    assert text.endswith("\n")


def test_the_patch_is_applied(patch: Path, tree: Path) -> None:
    old = contents(tree)
    done = run(tree)
    assert (done.returncode, done.stderr) == (0, "")
    version = patch.stem.removeprefix("core_v")
    assert done.stdout == f"{patch.name} applied to {tree} (version {version})\n"
    changed = {file for file, text in contents(tree).items() if text != old.get(file)}
    assert changed == set(before(patch))
    text = (tree / "megatron/training/__init__.py").read_text(encoding="utf-8")
    assert text.endswith("\nimport megatron_zb\n\nmegatron_zb.install()  # --pipeline-schedule\n")


def test_twice_is_refused(tree: Path) -> None:
    assert run(tree).returncode == 0
    once = contents(tree)
    assert "has been patched already; --reverse takes the patch out" in refused(tree)
    assert contents(tree) == once


def test_reverse_takes_it_out(patch: Path, tree: Path) -> None:
    old = contents(tree)
    assert run(tree).returncode == 0
    done = run("--reverse", tree)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{patch.name} taken out of {tree}")
    assert contents(tree) == old
    assert "has not been patched with" in refused(tree, "--reverse")


def test_check_changes_nothing(patch: Path, tree: Path) -> None:
    old = contents(tree)
    done = run("--check", tree)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{patch.name} fits {tree}")
    assert contents(tree) == old
    assert "has not been patched" in refused("--check", "--reverse", tree)
    assert run(tree).returncode == 0
    patched = contents(tree)
    assert run("--check", "--reverse", tree).returncode == 0
    assert "has been patched already" in refused("--check", tree)
    assert contents(tree) == patched


def test_lines_that_moved_are_found(tree: Path) -> None:
    file = tree / "megatron/training/__init__.py"
    file.write_text("# a new line\n" * 3 + file.read_text(encoding="utf-8"), encoding="utf-8")
    assert run(tree).returncode == 0
    assert "megatron_zb.install()" in file.read_text(encoding="utf-8")


def test_a_changed_tree_is_left_alone(patch: Path, tree: Path) -> None:
    for file in before(patch):
        write(tree / file, "import torch\n")
    old = contents(tree)
    for options in ([], ["--check"]):
        sentence = refused(*options, tree)
        assert f"{patch.name} does not fit '{tree}'" in sentence
        assert "has been changed" in sentence
    assert contents(tree) == old


def test_a_patch_that_was_edited_is_not_taken_out(patch: Path, tree: Path) -> None:
    assert run(tree).returncode == 0
    file = tree / "megatron/training/__init__.py"
    text = file.read_text(encoding="utf-8").replace("megatron_zb.install()", "megatron_zb.off()")
    write(file, text)
    assert f"has not been patched with {patch.name}, or has been changed" in refused(
        "--reverse", tree
    )
    assert file.read_text(encoding="utf-8") == text


def test_in_a_repository_of_its_own_and_inside_of_another(tree: Path) -> None:
    """git takes paths from the root of the repository that it finds above."""
    for repository in (tree, tree.parent):
        subprocess.run(["git", "init", "-q", str(repository)], check=True)
        assert run(tree).returncode == 0
        assert "megatron_zb" in (tree / "megatron/training/__init__.py").read_text(encoding="utf-8")
        assert run("--reverse", tree).returncode == 0


def test_from_anywhere_and_by_any_path(patch: Path, tmp_path: Path) -> None:
    tree = tree_for(patch, tmp_path / "a folder" / "Megatron-LM")
    assert run(Path("a folder/Megatron-LM"), cwd=tmp_path).returncode == 0
    assert run("--reverse", ".", cwd=tree).returncode == 0
    link = tmp_path / "link"
    link.symlink_to(tree)
    assert run(link).returncode == 0
    assert "megatron_zb" in (tree / "megatron/training/__init__.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("version", VERSIONS)
def test_another_patch_version_of_a_series_takes_its_patch(version: str, tmp_path: Path) -> None:
    [patch] = [patch for patch in PATCHES if patch.stem == f"core_v{version}"]
    tree = tree_for(patch, tmp_path)
    checkout = checkout_tree(tmp_path / "other", f"{version.rpartition('.')[0]}.7")
    (tree / "megatron/core/package_info.py").write_bytes(
        (checkout / "megatron/core/package_info.py").read_bytes()
    )
    assert run(tree).returncode == 0


@pytest.mark.parametrize("version", ["0.20.0", "1.0.0"])
def test_a_version_newer_than_all_takes_the_newest_patch(version: str, tmp_path: Path) -> None:
    tree, newest = tree_for(PATCHES[-1], tmp_path), PATCHES[-1].name
    checkout_tree(tmp_path, version)
    write(tree / "megatron/training/__init__.py", before(PATCHES[-1])[_PATCHED])
    done = run(tree)
    assert done.returncode == 0
    assert done.stdout.startswith(f"{newest} applied to {tree} (version {version})")
    assert f"has version {version}, which is newer than all that were checked" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("version", ["0.12.0", "0.15.3"])
def test_a_version_without_a_patch(version: str, tmp_path: Path) -> None:
    tree = checkout_tree(tmp_path, version)
    old = contents(tree)
    sentence = refused(tree)
    assert f"has version {version}, which no patch here is for" in sentence
    known = " and ".join(patch.stem for patch in PATCHES)
    assert f"there are patches for {known}" in sentence
    assert contents(tree) == old


def test_folders_that_are_no_checkout(tmp_path: Path) -> None:
    assert f"there is no folder '{tmp_path}/nowhere'" in refused(tmp_path / "nowhere")
    file = write(tmp_path / "file", "")
    assert f"there is no folder '{file}'" in refused(file)
    assert "is not a Megatron-LM checkout" in refused(tmp_path)
    write(tmp_path / "megatron/core/package_info.py", "VERSION = 'new'\n")
    assert "is not a Megatron-LM checkout" in refused(tmp_path)


def test_arguments_that_are_wrong(tmp_path: Path) -> None:
    assert "give the path of a Megatron-LM checkout" in refused()
    assert "give the path of a Megatron-LM checkout" in refused("--check")
    assert "unknown option --revert: --help lists the options" in refused("--revert", tmp_path)
    assert "give one Megatron-LM checkout, not both 'a' and 'b'" in refused("a", "b")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_teaches(flag: str) -> None:
    done = run(flag)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: scripts/apply_patches.sh ")
    for word in ("--reverse", "--check", "MEGATRON_LM", "pip install"):
        assert word in done.stdout
