"""The explorer and the pictures of a page in a browser: what a reader does, and what is shown."""

from __future__ import annotations

import json
from typing import Any

from browser import Browser


def redrawn(page: Browser) -> int:
    return int(page.evaluate("document.getElementById('explorer').dataset.redrawn"))


def change(page: Browser, **values: object) -> None:
    """Type into inputs, choose a schedule or a size, and wait until it is drawn."""
    for element, value in values.items():
        before = redrawn(page)
        if element in ("schedule", "p", "m"):
            assert str(value) in offered(page, element)
            page.evaluate(
                f"(() => {{ const s = document.getElementById('{element}');"
                f"s.value = {json.dumps(value)};"
                "s.dispatchEvent(new Event('input', {bubbles: true})); })()"
            )
        else:
            page.type_into(element, str(value))
        page.wait_for(f"Number(document.getElementById('explorer').dataset.redrawn) > {before}")


def offered(page: Browser, element: str) -> list[str]:
    found: list[str] = page.evaluate(
        f"[...document.getElementById({json.dumps(element)}).options].map((o) => o.value)"
    )
    return found


def shown(page: Browser, element: str) -> str:
    return str(page.evaluate(f"document.getElementById({json.dumps(element)}).textContent"))


def comparison(page: Browser) -> dict[str, list[str]]:
    found: dict[str, list[str]] = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#comparison tbody tr')]"
        ".map((tr) => [tr.dataset.schedule, [...tr.cells].map((td) => td.textContent)]))"
    )
    return found


_BARS = (
    "(() => { const found = []; for (const path of document.querySelectorAll('{0} .bars'))"
    " for (const [, x, y, w] of path.getAttribute('d').matchAll(/M([\\d.]+),([\\d.]+)h([\\d.]+)/g))"
    " found.push([path.dataset.kind, +path.dataset.chunk, +x, +y, +w, path.getAttribute('fill')]);"
    " return found; })()"
)


def bars(page: Browser, svg: str) -> list[list[Any]]:
    """Kind, shade, x, y, width and colour of every bar."""
    found: list[list[Any]] = page.evaluate(_BARS.replace("{0}", svg))
    return found


def shares(found: list[list[Any]]) -> list[list[Any]]:
    """Bars in order, with pixels as shares of what all bars span."""
    left, right = min(b[2] for b in found), max(b[2] + b[4] for b in found)
    return sorted(
        [kind, chunk, y, (x - left) / (right - left), w / (right - left), fill]
        for kind, chunk, x, y, w, fill in found
    )


def mouse(page: Browser, kind: str, x: float, y: float, **more: object) -> None:
    page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)


def corner(page: Browser, svg: str) -> tuple[float, float]:
    """Where a picture begins in the window, once it is scrolled there."""
    x, y = page.evaluate(
        f"(() => {{ const e = document.querySelector('{svg}');"
        "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
        "return [r.x, r.y]; })()"
    )
    return x, y


def tip(page: Browser, box: str) -> str:
    found: str = page.evaluate(
        f"(() => {{ const e = document.querySelector('{box} .tip');"
        " return e.hidden ? '' : e.textContent; })()"
    )
    return found
