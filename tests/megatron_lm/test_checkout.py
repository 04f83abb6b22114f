"""Which folders are checkouts, and which files are pretrain scripts, without running either."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_trees import PRETRAIN, checkout_tree, write

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.versions import SUPPORTED
from megatron_zb.megatron_lm.checkout import (
    Checkout,
    check_pretrain_script,
    checkout_at,
    checkout_of,
)

VERSION_FILE = "megatron/core/package_info.py"
TRAINING = "megatron/training/training.py"


@pytest.mark.parametrize(
    "version", ["0.16.0", "0.16.1", "0.17.1", "0.18.2", "0.19.1", "0.20.0", "1.0.0"]
)
def test_a_served_checkout(version: str, tmp_path: Path) -> None:
    root = checkout_tree(tmp_path, version)
    found = checkout_at(root)
    assert found == Checkout(root, tuple(map(int, version.split("."))))  # type: ignore[arg-type]
    assert found.version_text == version


@pytest.mark.parametrize("version", ["0.12.0", "0.15.3"])
def test_a_version_that_is_too_old(version: str, tmp_path: Path) -> None:
    checkout_tree(tmp_path, version)
    with pytest.raises(UsageError) as refused:
        checkout_at(tmp_path)
    assert str(refused.value) == (
        f"the Megatron-LM in '{tmp_path}' has version {version}, which is older than all that "
        f"are known here: known are {SUPPORTED}"
    )


def test_no_folder(tmp_path: Path) -> None:
    file = write(tmp_path / "file", "")
    for root in (tmp_path / "nowhere", file):
        with pytest.raises(UsageError, match=f"there is no folder '{root}'"):
            checkout_at(root)


@pytest.mark.parametrize("lost", [VERSION_FILE, TRAINING])
def test_a_folder_that_is_no_checkout(lost: str, tmp_path: Path) -> None:
    checkout_tree(tmp_path, "0.16.1")
    (tmp_path / lost).unlink()
    with pytest.raises(UsageError, match="is not a Megatron-LM checkout") as refused:
        checkout_at(tmp_path)
    assert lost in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "MAJOR = 0\nMINOR = 16\n",
        "MAJOR = '0'\nMINOR = 16\nPATCH = 1\n",
        "MAJOR = 0 +\n",
        "MAJOR = 0\0\n",
    ],
)
def test_a_version_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    checkout_tree(tmp_path, "0.16.1")
    file = write(tmp_path / VERSION_FILE, text)
    with pytest.raises(UsageError, match=f"'{file}' does not say which version"):
        checkout_at(tmp_path)


def test_a_version_file_that_is_no_text(tmp_path: Path) -> None:
    checkout_tree(tmp_path, "0.16.1")
    (tmp_path / VERSION_FILE).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="does not say which version"):
        checkout_at(tmp_path)


def test_nothing_of_the_checkout_is_run(tmp_path: Path) -> None:
    checkout_tree(tmp_path, "0.19.1")
    with (tmp_path / VERSION_FILE).open("a", encoding="utf-8") as file:
        file.write("import subprocess\n__version__ = '0'\nraise RuntimeError('it was run')\n")
    script = write(tmp_path / "pretrain_gpt.py", f"{PRETRAIN}\nraise RuntimeError('it was run')\n")
    assert checkout_of(script).version == (0, 19, 1)


@pytest.mark.parametrize("where", ["pretrain_gpt.py", "examples/multi/modal/pretrain.py"])
def test_the_checkout_of_a_script_at_any_depth(where: str, tmp_path: Path) -> None:
    checkout_tree(tmp_path, "0.16.1")
    assert checkout_of(write(tmp_path / where, PRETRAIN)).root == tmp_path.resolve()


def test_the_nearest_checkout_counts(tmp_path: Path) -> None:
    checkout_tree(tmp_path, "0.16.1")
    inner = checkout_tree(tmp_path / "third_party/Megatron-LM", "0.19.1")
    assert checkout_of(inner / "pretrain_gpt.py").root == inner.resolve()


def test_a_relative_path_and_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = checkout_tree(tmp_path / "Megatron-LM", "0.16.1")
    link = tmp_path / "link.py"
    link.symlink_to(root / "pretrain_gpt.py")
    assert checkout_of(link).root == root.resolve()
    monkeypatch.chdir(root)
    assert checkout_of(Path("pretrain_gpt.py")).root == root.resolve()


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    for script in (tmp_path / "nowhere.py", tmp_path):
        with pytest.raises(UsageError, match=f"there is no file '{script}'"):
            checkout_of(script)


def test_a_script_outside_of_any_checkout(tmp_path: Path) -> None:
    script = write(tmp_path / "pretrain.py", PRETRAIN)
    with pytest.raises(UsageError, match="does not lie in a Megatron-LM checkout") as refused:
        checkout_of(script)
    assert TRAINING in str(refused.value)


def test_a_script_in_a_checkout_that_is_too_old(tmp_path: Path) -> None:
    root = checkout_tree(tmp_path, "0.15.0")
    with pytest.raises(UsageError, match=r"has version 0\.15\.0"):
        checkout_of(root / "pretrain_gpt.py")


@pytest.mark.parametrize(
    "text",
    [
        PRETRAIN,
        "from megatron.training.training import pretrain as run\n",
        "def main():\n    from megatron.training import pretrain\n",
    ],
)
def test_pretrain_scripts(text: str, tmp_path: Path) -> None:
    check_pretrain_script(write(tmp_path / "script.py", text))


WRAPPER = "import os, runpy\nrunpy.run_path(os.path.join(here, 'script.py'))\n"


def test_a_script_that_runs_a_pretrain_script_beside_it(tmp_path: Path) -> None:
    """As pretrain_mamba.py does in Megatron-LM 0.18 and 0.19."""
    wrapper = write(tmp_path / "wrapper.py", WRAPPER.replace("os, runpy", "runpy"))
    for beside in (None, "", WRAPPER):
        if beside is not None:
            write(tmp_path / "script.py", beside)
        with pytest.raises(UsageError, match=r"wrapper.py' is not a pretrain script"):
            check_pretrain_script(wrapper)
    write(tmp_path / "script.py", PRETRAIN)
    check_pretrain_script(wrapper)
    with pytest.raises(UsageError, match=r"is not a pretrain script"):
        check_pretrain_script(write(tmp_path / "other.py", "open('script.py')\n"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "import megatron.training\n",
        "from megatron.training import get_args\n",
        "from megatron.trainings import pretrain\n",
        "from megatron.core import pretrain\n",
        "from .training import pretrain\n",
        "# from megatron.training import pretrain\n",
    ],
)
def test_other_scripts(text: str, tmp_path: Path) -> None:
    script = write(tmp_path / "script.py", text)
    with pytest.raises(UsageError, match=r"is not a pretrain script.*megatron\.training"):
        check_pretrain_script(script)


@pytest.mark.parametrize("content", [b"torchrun pretrain_gpt.py\n", b"\x7fELF\x00\xff", b"a = 1\0"])
def test_what_is_not_python(content: bytes, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_bytes(content)
    with pytest.raises(UsageError, match=f"'{script}' cannot be read as Python") as refused:
        check_pretrain_script(script)
    assert "\n" not in str(refused.value)
