"""The simulator of the pages in JavaScript by itself: in Node, or else in a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from typing import Any, TypeAlias

import browser

from megatron_zb.drawing import html_page

Evaluate: TypeAlias = Callable[[str], Any]
"""Returns what an expression over the object ``pipelines`` comes to, as JSON carries it."""

NAMES = ("node", "nodejs")
MISSING = f"{browser.MISSING}; or Node (apt-get install nodejs), which some tests run in as well"


def find_node() -> str | None:
    """The path of Node, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def in_node(expression: str) -> Any:
    command = find_node()
    assert command is not None
    program = f"process.stdout.write(JSON.stringify({_with_simulator(expression)}));"
    done = subprocess.run([command, "-"], input=program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def in_browser(page: browser.Browser, expression: str) -> Any:
    return page.evaluate(_with_simulator(expression))


def _with_simulator(expression: str) -> str:
    script = (html_page.PARTS / "simulator.js").read_text(encoding="utf-8")
    return f"(() => {{ {script} return {expression}; }})()"
