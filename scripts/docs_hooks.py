"""What mkdocs does for the pages outside of docs/, and for links out of it; see mkdocs.yml.

README.md is the first page. A file of the repository that a page links to is published beside the
pages, so that every link of the site leads somewhere; a link to a folder becomes its name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# Pages of the repository's root, by their names in the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, and every file that a page links to."""
    from mkdocs.structure.files import File

    texts = {name: (ROOT / source).read_text(encoding="utf-8") for source, name in PAGES.items()}
    for name, text in texts.items():
        files.append(File.generated(config, name, content=text))
    sources = [(ROOT / source, ROOT) for source in PAGES]
    sources += [(path, path.parent) for path in sorted((ROOT / "docs").glob("*.md"))]
    published = set()
    for path, folder in sources:
        for target in linked(path.read_text(encoding="utf-8")):
            found = (folder / target).resolve()
            outside = found.is_file() and ROOT / "docs" not in found.parents
            if outside and found.relative_to(ROOT).as_posix() not in PAGES:
                published.add(found.relative_to(ROOT).as_posix())
    for name in sorted(published):
        files.append(File.generated(config, f"files/{name}.txt", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where their targets are in the site."""
    del config, files
    of_root = page.file.src_uri in PAGES.values()
    return _LINK.sub(lambda link: _rewritten(link, "" if of_root else "docs"), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show names in docstrings without the roles of another tool, such as :meth:."""
    del page, config, files
    return re.sub(r":(?:attr|class|data|func|meth):(?=<code>)", "", html)


def linked(markdown: str) -> list[str]:
    """The targets of links to files, without their anchors."""
    targets = [link.group(3) for link in _LINK.finditer(markdown)]
    return [target for target in targets if target and "://" not in target]


def _rewritten(link: re.Match[str], folder: str) -> str:
    image, text, target, anchor = link.groups()
    if not target or "://" in target:
        return link.group()
    path = posixpath.normpath(posixpath.join(folder, target))
    if path in PAGES:
        path = PAGES[path]
    elif path.startswith("docs/"):
        path = path.removeprefix("docs/")
    elif (ROOT / path).is_dir():
        return text
    else:
        path = f"files/{path}.txt"
    return f"{image}[{text}]({path}{anchor or ''})"
