"""A real browser for the tests of pages; their modules skip where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Browser, find_browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    command = find_browser()
    assert command is not None
    with Browser(command, tmp_path_factory.mktemp("profile")) as opened:
        yield opened
