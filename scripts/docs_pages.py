"""What MkDocs needs to know of this repository, as a hook of mkdocs.yml.

Pages and files beside docs/ that are linked to are part of the site, README.md as its first page; links to them lead
there. The pages are written for GitHub, whose Markdown is CommonMark: `python_markdown` puts them into the form that
MkDocs's parser takes in the same way, and `on_page_content` warns, which ends a strict build, where it does not.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections import Counter
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]

#: Where on the site files beside docs/ are, by their paths in the repository.
PLACES: dict[str, str] = {}

log = logging.getLogger("mkdocs.hooks.docs_pages")

_LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)")
_ITEM = re.compile(r"(?:[-*+]|\d+[.)]) +")
_FENCE = re.compile(r"```|~~~")
#: The lines that no paragraph goes on in, and none goes on after.
_BLOCKS = ("#", "|", "```", "~~~", "<!--")
#: The elements that show whether a page was parsed alike, by both parsers' names.
_TOKENS = {"list_item_open": "li", "table_open": "table", "fence": "pre", "code_block": "pre", "heading_open": "h"}
_ELEMENT = re.compile(r"<(li|table|pre|h)(?:[1-6])?[ >]")


def places() -> dict[str, str]:
    """Return, by their paths, where on the site the files are that lie beside docs/ and are linked to."""
    found = {"README.md": "index.md"}
    waiting = ["README.md", *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
    for page in waiting:
        for link in _LINK.finditer((ROOT / page).read_text(encoding="utf-8")):
            path = _target(page, link)
            if path not in found and not path.startswith("docs/") and (ROOT / path).is_file():
                found[path] = path
                waiting += [path] if path.endswith(".md") else []
    return found


def _target(page: str, link: re.Match[str]) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link[1]))


def on_files(files: Any, config: Any) -> Any:
    """Add the files beside docs/."""
    PLACES.update(places())
    for path, place in PLACES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page with links that lead to places of the site, in the form that MkDocs's parser takes."""
    place = page.file.src_uri
    source = next((path for path, there in PLACES.items() if there == place), f"docs/{place}")

    def moved(link: re.Match[str]) -> str:
        path = _target(source, link)
        there = PLACES.get(path, path.removeprefix("docs/"))
        return f"]({posixpath.relpath(there, posixpath.dirname(place) or '.')}{link[2] or ''})"

    page.meta["counted"] = counted(markdown)
    return python_markdown(_LINK.sub(moved, markdown))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Warn if a page has other lists, tables, blocks or headings than it has on GitHub."""
    found = Counter(_ELEMENT.findall(html))
    for name, count in page.meta.pop("counted").items():
        if found[name] != count:
            log.warning("%s has %d <%s>, on GitHub %d", page.file.src_uri, found[name], name, count)
    return html


def counted(markdown: str) -> Counter[str]:
    """Return how many lists' items, tables, blocks of code and headings a page has by CommonMark."""
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    return Counter({"li": 0, "table": 0, "pre": 0, "h": 0}) + Counter(
        _TOKENS[token.type] for token in tokens if token.type in _TOKENS
    )


def python_markdown(markdown: str) -> str:
    """Return a page for Python-Markdown: four spaces for each level of a list, and blank lines around lists and tables.

    CommonMark indents what belongs to an item by the width of the item's mark, and needs no blank lines there.
    """
    lines: list[str] = []
    levels: list[int] = []  # of the lists that are open: the column at which an item's text begins
    fence = ""
    before = ""  # the line above
    for line in markdown.splitlines():
        text = line.lstrip(" ")
        indent = len(line) - len(text)
        item = None if fence else _ITEM.match(text)
        lazy = before and not before.startswith(_BLOCKS) and not item and not text.startswith(_BLOCKS)
        while levels and text and indent < levels[-1] and not fence and not lazy:
            levels.pop()
        if before and not fence and _needs_room(text, before, first=bool(item) and not levels):
            lines.append("")
        depth = 4 * len(levels) + max(0, indent - (levels[-1] if levels else 0))
        lines.append(" " * depth + text if text else "")
        if item:
            levels.append(indent + item.end())
        if fence or _FENCE.match(text):
            fence = "" if text == fence else fence or text[:3]
        before = text
    return "\n".join(lines) + "\n"


def _needs_room(text: str, before: str, *, first: bool) -> bool:
    """Whether a line needs a blank one above it; `first`: it is the first item of a list."""
    table = text.startswith("|") and not before.startswith("|")
    return table or first or _FENCE.match(text) is not None
