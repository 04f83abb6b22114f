"""Pictures of pages: all of them are there, small, and shown; what the page says holds."""

from __future__ import annotations

import importlib.util
import sys
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

from megatron_zb.cli.main import parser
from megatron_zb.drawing import html_drawing

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "pages.md").read_text(encoding="utf-8")
MOST_BYTES = 120_000


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("make_pages", ROOT / "docs" / "make_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_every_picture(script: ModuleType) -> None:
    made = {
        script.path_of(kind, width, scheme): (width, height)
        for kind, (width, height), scheme in product(
            script.COMMANDS, script.SIZES.items(), script.SCHEMES
        )
    }
    assert set(made) == set(script.PICTURES.iterdir()), "run docs/make_pages.py"
    for path, size in made.items():
        assert path.stat().st_size <= MOST_BYTES
        with Image.open(path) as image:
            assert image.size == size
        assert PAGE.count(f"](pictures/pages/{path.name})") == 1


def test_the_commands_of_the_pictures_are_those_of_the_page(script: ModuleType) -> None:
    for kind, command in script.COMMANDS.items():
        words = f"{command} {kind}.html".replace(f"{ROOT}/", "")
        assert f"`megatron-zb {words}`" in PAGE
        parser().parse_args(words.split())


def test_the_explorer_has_the_sizes_that_are_told() -> None:
    assert "2, 3, 4, 6, 8, 12 and 16 ranks with one, two, four and eight times as many" in PAGE
    assert list(html_drawing.ORDER_SIZES) == [
        (p, times * p) for p in (2, 3, 4, 6, 8, 12, 16) for times in (1, 2, 4, 8) if times * p <= 64
    ]
