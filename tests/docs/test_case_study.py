"""The case study: its commands run in order, and its page is what they lead to."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs"))
import make_case_study  # noqa: E402

PAGE = make_case_study.PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_commands_run_and_train_alike(tmp_path: Path) -> None:
    study = make_case_study.run(tmp_path, PAGE)
    own = study.losses("own")
    assert len(own) == 20 and float(own[20]) < float(own[1])
    for name in ("half", "auto"):  # gradients are clipped by a norm, whose last bit may differ
        found = [float(loss) for loss in study.losses(name).values()]
        assert found == pytest.approx([float(loss) for loss in own.values()], rel=1e-5)
    resumed = study.losses("resumed")
    assert list(resumed) == [21, 22, 23, 24, 25]
    assert float(resumed[25]) < float(own[1])
    assert (tmp_path / "runs" / "step.png").is_file()
    written = make_case_study.page(study, PAGE)
    assert written.count("<!-- generated: ") == PAGE.count("<!-- generated: ")


def test_the_page_has_what_the_commands_printed() -> None:
    for name in ("check", "own", "half", "trace", "plan", "auto", "resumed", "result"):
        body = PAGE.split(f"<!-- generated: {name} -->")[1].split(f"<!-- end: {name} -->")[0]
        assert len(body.split()) > 5, f"{name}: run docs/make_case_study.py"
    assert make_case_study.PICTURE.is_file()
