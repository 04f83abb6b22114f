"""What users ask has an answer on the page that the list of questions names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("questions.yaml")
QUESTIONS: list[dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("asked", QUESTIONS, ids=lambda asked: asked["question"])
def test_a_question_has_its_answer_on_a_page(asked: dict[str, Any]) -> None:
    page = (ROOT / asked["page"]).read_text(encoding="utf-8")
    assert asked["answer"]
    for words in asked["found_by"]:
        assert words in page, words


def test_there_are_twenty() -> None:
    assert len({asked["question"] for asked in QUESTIONS}) == len(QUESTIONS) == 20
