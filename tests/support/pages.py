"""Pages of the documentation as tests read them: tables, fenced blocks, and the lines in these that users type."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

#: Above a block of commands that no test can run as it stands, or that takes long.
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
_FULL = re.compile(r"<!-- run in full: (.+) -->")
_FENCE = re.compile(r"( *)```(\w*)$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. `not_run`, `full`: why no test runs it, or only `make full`."""

    page: str
    line: int
    language: str
    text: str
    not_run: str = ""
    full: str = ""

    @property
    def id(self) -> str:
        """Where it is."""
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """Return the lines that are typed, each with those that it goes on in."""
        lines = self.text.replace("\\\n", "").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks(path: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    lines = path.read_text(encoding="utf-8").splitlines()
    begin, indent, language = 0, "", ""
    for number, line in enumerate(lines, start=1):
        found = _FENCE.match(line)
        if begin and line == f"{indent}```":
            text = "\n".join(each.removeprefix(indent) for each in lines[begin : number - 1])
            above = lines[begin - 2] if begin > 1 else ""
            reasons = (pattern.fullmatch(above.strip()) for pattern in (_NOT_RUN, _FULL))
            not_run, full = (reason[1] if reason else "" for reason in reasons)
            yield Block(path.name, begin, language, text, not_run, full)
            begin = 0
        elif found and not begin:
            begin, indent, language = number, found[1], found[2]
    assert not begin, f"{path.name}:{begin}: the block has no end"


def below(path: Path, heading: str) -> list[Block]:
    """Return the blocks of commands below a heading, up to the next one."""
    lines = path.read_text(encoding="utf-8").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(heading))
    end = next(number for number, line in enumerate(lines) if number > begin and re.match("##+ ", line))
    return [block for block in blocks(path) if begin < block.line <= end and block.language == "sh"]


def rows(path: Path, header: str) -> list[list[str]]:
    """Return the cells of each row of the tables with that first line."""
    found: list[list[str]] = []
    inside = False
    for line in path.read_text(encoding="utf-8").splitlines():
        if line == header:
            inside = True
        elif inside and not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("|---"):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found
