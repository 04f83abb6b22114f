"""Flesch reading ease of the pages: 55 for those that a new user reads, 45 for the others."""

from __future__ import annotations

import re
from pathlib import Path

import pyphen
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOR_NEW_USERS = """
README getting_started how_it_works worth_it pre_training moe fine_tuning adapters
reinforcement_learning long_context models memory troubleshooting
""".split()
HYPHENATION = pyphen.Pyphen(lang="en_US")
FEW_SENTENCES = 5  # pages of tables have no reading ease


def sentences(text: str) -> list[str]:
    """Return paragraphs and items of lists as plain text; code is a word of one syllable."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if re.match(r"\s*(\||#|!\[|<|:::)", block):
            continue
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", block)
        plain = re.sub(r"`[^`]*`", "it", plain).replace("*", "")
        words = re.sub(r"^\s*(?:-|\d+\.) ", "", plain).split()
        if len(words) > 3:
            found.append(f"{' '.join(words).rstrip(':;,.')}.")
    return found


def reading_ease(prose: list[str]) -> float:
    """Return Flesch's reading ease: 100 is very easy, 30 is a scientific paper."""
    ends = sum(len(re.findall(r"[.!?](?=\s|$)", each)) for each in prose)
    words = [word for each in prose for word in re.findall(r"[A-Za-z']+", each)]
    syllables = sum(len(HYPHENATION.positions(word)) + 1 for word in words)
    return 206.835 - 1.015 * len(words) / ends - 84.6 * syllables / len(words)


def test_long_words_and_sentences_read_less_easily() -> None:
    easy = ["The cat sat on the mat.", "It was warm."]
    hard = ["Interoperability considerations necessitate comprehensive documentation of the whole."]
    assert reading_ease(easy) > 100 > 0 > reading_ease(hard)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_reads_easily(page: Path) -> None:
    prose = sentences(page.read_text(encoding="utf-8"))
    if len(prose) < FEW_SENTENCES:
        pytest.skip("a page of tables")
    least = 55 if page.stem in FOR_NEW_USERS else 45
    assert reading_ease(prose) >= least
