"""Models and devices that come with the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_models import ROOT

from megatron_zb.cli import main as cli
from megatron_zb.measured.config import path_of


def test_names_stand_for_the_files_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert path_of("--config", "models", Path("gpt_28b")) == ROOT / "configs/models/gpt_28b.yaml"
    for path in ("nowhere.yaml", "a/gpt_28b", str(ROOT)):
        assert path_of("--config", "models", Path(path)) == Path(path)
    assert cli.main(["plan", "--config", "gpt_28b", "--gpus", "8", "--device", "h1"]) == 2
    words = "--device 'h1' is unknown: give a file, or one of a100_80gb_sxm, b200_sxm, "
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_an_installed_package_has_them(tmp_path: Path) -> None:
    build = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path)]
    egg_info = ["egg_info", "--egg-base", str(tmp_path)]
    subprocess.run([*build, *egg_info], cwd=ROOT, check=True, capture_output=True)
    command = "import sys; from megatron_zb.cli.main import main; sys.exit(main())"
    plan = "plan --config gpt_1_5b --gpus 8 --schedules zb-h1 --pipeline 8".split()
    done = subprocess.run(
        [sys.executable, "-c", command, *plan],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "lib")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "GPT 1.5B on 8 A100 80GB SXM" in done.stdout
    configs = tmp_path / "lib" / "megatron_zb" / "configs"
    shipped = sorted(path.name for path in configs.glob("*/*.yaml"))
    assert shipped == sorted(path.name for path in (ROOT / "configs").glob("*/*.yaml"))
