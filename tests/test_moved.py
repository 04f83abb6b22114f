"""Old names of modules that have moved still lead to them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sizes

from megatron_zb import moved

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("megatron_zb.training", "megatron_zb.train"),
        ("megatron_zb.training.flags", "megatron_zb.train.flags"),
        ("megatron_zb.distillation.schedule.pipe_bd", "megatron_zb.distill.schedule.pipe_bd"),
        *moved.MOVED.items(),
    ],
)
def test_an_old_name_is_the_same_module(old: str, new: str) -> None:
    module = importlib.import_module(old)
    assert module is importlib.import_module(new)
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__ == new


def test_every_way_of_importing_gives_one_class() -> None:
    code = """
import megatron_zb.distillation.schedule.distribution as old
from megatron_zb.distillation.schedule import distribution
from megatron_zb.distillation.schedule.distribution import BlockCosts
import megatron_zb.distill.schedule.distribution as new
assert old is new is distribution and BlockCosts is new.BlockCosts
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("name", ["megatron_zb.training.nothing", "megatron_zb.trainings"])
def test_a_name_that_never_was_is_not_found(name: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sizes.first(1, ["pretrain_gpt", "distill_gpt", "cli.quickstart", "cli.sleeping_steps"])
)
def test_an_old_name_runs_as_a_script(name: str) -> None:
    old = f"megatron_zb.{name}"
    texts = [
        subprocess.run(
            [sys.executable, "-m", module, "--help"],
            check=True,
            capture_output=True,
            text=True,
            env=environment(),
        ).stdout
        for module in (old, moved.MOVED[old])
    ]
    assert texts[0] == texts[1] != ""


def test_the_core_runs_without_the_packages_beside_it(tmp_path: Path) -> None:
    (tmp_path / moved.__name__.split(".")[0]).symlink_to(ROOT / "megatron_zb")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    code = """
import sys
from megatron_zb.cli.main import main
sys.meta_path = [f for f in sys.meta_path if "__editable__" not in str(getattr(f, "__module__", f))]
sys.exit(main("show pipe-bd --pipeline-size 2 --num-microbatches 2".split())
         + 10 * main("show v-half --pipeline-size 2 --num-microbatches 2".split()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**environment(), "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 2
    assert "'pipe-bd'" in done.stderr
    assert "v-half" in done.stdout
