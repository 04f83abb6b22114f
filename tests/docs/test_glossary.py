"""The glossary: its terms are in order, short, linked, and in use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "glossary.md").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^- (.*?)(?=^- |\Z)", PAGE, re.M | re.S)


def term(entry: str) -> str:
    found = re.match(r"\*\*(.*?)\*\*", entry)
    assert found is not None
    return found[1]


def test_terms_are_in_alphabetical_order() -> None:
    terms = [term(entry).lower() for entry in ENTRIES]
    assert 35 <= len(terms) <= 50
    assert terms == sorted(set(terms))


@pytest.mark.parametrize("entry", ENTRIES, ids=term)
def test_a_term_has_one_or_two_sentences_and_the_page_that_explains_it(entry: str) -> None:
    text, _, page = " ".join(entry.split()).rpartition(" [")
    assert re.fullmatch(r"[\w -]+\]\(\w+\.md(?:#[\w-]+)?\)", page)
    assert 1 <= len(re.findall(r"[.]( |$)", text)) <= 2


@pytest.mark.parametrize("entry", ENTRIES, ids=term)
def test_the_page_that_explains_a_term_uses_it(entry: str) -> None:
    [target] = re.findall(r"\((\w+\.md)(?:#[\w-]+)?\)\s*$", entry)
    page = (DOCS / target).read_text(encoding="utf-8")
    words = r"[\s-]".join(map(re.escape, re.split(r"[\s-]", term(entry))))
    other = re.findall(r"\*\* \(([^)]*)\)", entry)
    names = [words, *(re.escape(name) for name in (other[0].split(", ") if other else []))]
    assert re.search(rf"\b(?:{'|'.join(names)})", page, re.I), term(entry)
