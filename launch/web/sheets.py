"""A page as a value: tables of cells with a text and a drawing; and its forms for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

from msgspec import Struct

from launch.surface import comma_separated
from protocol.log_ends import without_log_end

#: Rows of each table on one page.
ROWS_MAX = 200
Cell = str | int | float | None


class Column(Struct, frozen=True):
    """A column: its name, which programs see, and where a cell leads to: `link` and the cell's text, if it has one."""

    name: str
    link: str = ""


class Sheet(Struct, frozen=True):
    """A table. `more` says that its rows go on, on the next page."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    more: bool = False


class Page(Struct, frozen=True):
    """All that one address shows. `text` is for reading, `drawing` is SVG that we have made, `notes` are sentences.

    `drawing_more` says that the drawing goes on, on the next page.
    """

    name: str
    title: str
    sheets: tuple[Sheet, ...]
    number: int = 1
    text: str = ""
    drawing: str = ""
    drawing_more: bool = False
    notes: tuple[str, ...] = ()

    @property
    def more(self) -> bool:
        """Whether there is a next page."""
        return self.drawing_more or any(sheet.more for sheet in self.sheets)


def rows_before(number: int) -> int:
    """Return how many rows of a table stand on the pages before this one."""
    return (number - 1) * ROWS_MAX


RowT = TypeVar("RowT")


def read_on(head: Sequence[RowT], read: Callable[[int, int], Sequence[RowT]], number: int) -> Sequence[RowT]:
    """Return the rows of a page and one more: first those of `head`, then those that `read(limit, offset)` returns."""
    before = rows_before(number)
    own = head[before : before + ROWS_MAX + 1]
    return [*own, *read(ROWS_MAX + 1 - len(own), max(0, before - len(head)))]


def sheet(
    name: str,
    title: str,
    columns: Sequence[str | Column],
    rows: Iterable[Sequence[Cell]],
    number: int,
    *,
    skipped: int = 0,
) -> Sheet:
    """Return a table with the rows of one page, of all its rows but the first `skipped`, which were never made.

    It takes no more rows than it needs. Nothing that a task has printed gets into it, as ledgers of earlier versions
    may hold some.
    """
    first = rows_before(number) - skipped
    shown = [tuple(map(_discreet, row)) for row in islice(rows, first, first + ROWS_MAX + 1)]
    named = tuple(each if isinstance(each, Column) else Column(each) for each in columns)
    return Sheet(name, title, named, tuple(shown[:ROWS_MAX]), len(shown) > ROWS_MAX)


def _discreet(cell: Cell) -> Cell:
    return without_log_end(cell) if isinstance(cell, str) else cell


def as_json(page: Page) -> str:
    """Return a page as one document: each row of its tables by the names of the columns."""
    tables = [
        {
            "name": each.name,
            "title": each.title,
            "rows": [dict(zip((column.name for column in each.columns), row, strict=True)) for row in each.rows],
            "more": each.more,
        }
        for each in page.sheets
    ]
    document: dict[str, Any] = {"schema": "web-page/v1", "page": page.name, "title": page.title, "number": page.number}
    document |= {"more": page.more, "text": page.text, "notes": list(page.notes), "tables": tables}
    return json.dumps(document, ensure_ascii=False) + "\n"


def as_csv(page: Page, name: str = "") -> str | None:
    """Return the table of that name as comma-separated values, or the first; None if there is no such table."""
    for each in page.sheets:
        if each.name == name or not name:
            return comma_separated([column.name for column in each.columns], each.rows)
    return None
