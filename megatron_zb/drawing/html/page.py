"""One HTML file from a template, with its style and its scripts inside."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_zb import __version__
from megatron_zb.drawing.html import drawing
from megatron_zb.errors import UsageError

if TYPE_CHECKING:
    from jinja2 import Environment

ENDING = ".html"
SCRIPTS = ("simulator.js", "drawing.js", "explorer.js", "wider.js")
STYLE = "style.css"
_PARTS = Path(__file__).resolve().parent / "parts"


def check(path: Path) -> None:
    """Check that a page can be written, so that a long search does not fail at its end.

    Raises:
        UsageError: the name does not end in .html, it is a folder's, or jinja2 is missing.
    """
    if path.suffix.lower() != ENDING:
        raise UsageError(f"cannot write a page into '{path}': give a name that ends in {ENDING}")
    if path.is_dir():
        raise UsageError(f"cannot write a page into '{path}': it is a folder; give a file's name")
    _environment()


def write(path: Path, template: str, context: dict[str, Any]) -> None:
    """Fill a template and write it.

    Args:
        path: the file; its folder is made.
        template: the name of a file in the folder ``parts``.
        context: what the template calls by name; text in it is escaped.

    Raises:
        UsageError: as :func:`check`, or the file cannot be written.
    """
    check(path)
    scripts, style = {name: _part(name) for name in SCRIPTS}, _part(STYLE)
    text = (
        _environment()
        .get_template(template)
        .render(
            **context,
            constants=drawing.constants(),
            scripts=scripts,
            style=style,
            policy=_policy(scripts.values(), style),
            version=__version__,
        )
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UsageError(f"cannot write '{path}': {error.strerror}") from error


def _environment() -> Environment:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise UsageError(
            "pages need jinja2: install it with pip install 'megatron-zb[plots]'"
        ) from error
    return Environment(
        loader=FileSystemLoader(_PARTS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _part(name: str) -> Any:
    """Return a file of the package as markup, to be embedded in the page unchanged."""
    from markupsafe import Markup

    return Markup("\n" + (_PARTS / name).read_text(encoding="utf-8"))


def _policy(scripts: Any, style: str) -> str:
    """Return the content security policy: these scripts and this style, nothing from elsewhere."""
    allowed = " ".join(_digest(script) for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_digest(style)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
