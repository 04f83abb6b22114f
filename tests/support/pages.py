"""The elements of a page in HTML."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

EVIL = "</title></script><script>alert(1)</script><img src=x onerror=alert(2)> & \"'"
_VOID = {"meta", "input", "br", "img", "link", "hr"}


@dataclass
class Element:
    """One element of a page, with what is within it."""

    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """The elements of a tag at any depth; ``of`` stands for class, and - for _."""
        wanted = {"class" if k == "of" else k.replace("_", "-"): v for k, v in attributes.items()}
        found = []
        for child in self.children:
            if child.tag == tag and all(child.attributes.get(k) == v for k, v in wanted.items()):
                found.append(child)
            found += child.all(tag, **attributes)
        return found

    def one(self, tag: str, **attributes: str) -> Element:
        (found,) = self.all(tag, **attributes)
        return found

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Page(HTMLParser):
    """The elements of a page; every one that is opened must be closed in turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = Element("", {})
        self._open = [self.root]
        self.feed(text)
        self.close()
        assert self._open == [self.root], [e.tag for e in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag, {n: v or "" for n, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.texts.append(data)


def page_of(path: Path) -> Element:
    return Page(path.read_text(encoding="utf-8")).root
