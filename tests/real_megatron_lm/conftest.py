"""Tests against a real Megatron-LM checkout, which MEGATRON_LM_PATH names; else none runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_zb.megatron_lm.checkout import checkout_at
from real_megatron_lm.runs import MODEL, PIPELINE, PIPELINE_OF_TWO, Logged, pretrain

VARIABLE = "MEGATRON_LM_PATH"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(VARIABLE):
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(
                pytest.mark.skip(
                    reason=f"NOT RUN against a real Megatron-LM: {VARIABLE} names no checkout"
                )
            )


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The checkout of MEGATRON_LM_PATH, which no test changes."""
    return checkout_at(Path(os.environ[VARIABLE]).resolve()).root


@pytest.fixture(scope="session")
def patched(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patched copy of the checkout."""
    copy = tmp_path_factory.mktemp("patched") / "Megatron-LM"
    keep_out = shutil.ignore_patterns(".git", "tests", "docs", "examples", "*.so")
    shutil.copytree(checkout, copy, ignore=keep_out)
    script = Path(__file__).parents[2] / "scripts" / "apply_patches.sh"
    subprocess.run([str(script), str(copy)], check=True, capture_output=True)
    return copy


@pytest.fixture(scope="session")
def upstream_checkpoint(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations of Megatron's own 1F1B on 4 ranks, saved as torch_dist."""
    folder = tmp_path_factory.mktemp("upstream")
    run = pretrain(
        checkout, MODEL, PIPELINE, f"--exit-interval 2 --save {folder} --save-interval 2"
    )
    assert run.code == 0, run.output
    return folder


@pytest.fixture(scope="session")
def upstream(checkout: Path, upstream_checkpoint: Path) -> Logged:
    """The next five iterations of Megatron's own 1F1B."""
    run = pretrain(checkout, MODEL, PIPELINE, f"--load {upstream_checkpoint}")
    assert run.code == 0, run.output
    assert list(run.losses) == [3, 4, 5, 6, 7]
    assert set(run.evaluations) == {"validation after 7", "test after 7"}
    return run


@pytest.fixture(scope="session")
def checkpoint_of_two(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations of Megatron's own 1F1B on 2 ranks."""
    folder = tmp_path_factory.mktemp("two")
    saving = f"--exit-interval 2 --save {folder} --save-interval 2"
    run = pretrain(checkout, MODEL, PIPELINE_OF_TWO, saving, ranks=2)
    assert run.code == 0, run.output
    return folder


@pytest.fixture(scope="session")
def upstream_of_two(checkout: Path, checkpoint_of_two: Path) -> Logged:
    """The next five iterations of Megatron's own 1F1B on 2 ranks."""
    run = pretrain(checkout, MODEL, PIPELINE_OF_TWO, f"--load {checkpoint_of_two}", ranks=2)
    assert list(run.losses) == [3, 4, 5, 6, 7], run.output
    return run
