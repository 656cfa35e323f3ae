"""The form of the command line's answers: documents for programs, plain tables for people, sentences on stderr.

stdout carries the answer and nothing else. `--json` (or GPU_ARBITER_OUTPUT=json) prints one document with a `schema`
name; fields are added within a schema's version, never changed. No colour; what a pipe gets has no control characters,
and nothing asks a program.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from launch.faults import Fault, usage
from protocol import exit_codes

Document = Mapping[str, Any]


#: Where the form of answers is set for all commands, and the forms that there are.
OUTPUT, FORMS = "GPU_ARBITER_OUTPUT", ("json", "text")


def check_form() -> None:
    """Refuse a form of answers that there is none of; raises `Fault`."""
    form = os.environ.get(OUTPUT, "")
    if form and form.lower() not in FORMS:
        raise usage(f"{OUTPUT} is {form!r}; it may be {' or '.join(FORMS)}", f"unset {OUTPUT}")


def wants_json(flag: bool) -> bool:
    """Return whether the answer is for a program, by flag or by environment."""
    return flag or os.environ.get(OUTPUT, "").lower() == "json"


def packed(document: Document) -> str:
    """Return one document as one line."""
    return json.dumps(document, ensure_ascii=False)


def emit(document: Document) -> None:
    """Print one document."""
    say(packed(document))


def say(text: str) -> None:
    """Print the answer, as text."""
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()


def note(sentence: str) -> None:
    """Tell the person a sentence beside the answer."""
    sys.stderr.write(sentence.rstrip("\n") + "\n")
    sys.stderr.flush()


def report(fault: Fault, *, as_json: bool) -> None:
    """Report a fault: a sentence and the next step on stderr, with `--json` a document on stdout too."""
    if as_json:
        emit(fault.document())
    note(f"gpu-arbiter: {fault.sentence}")
    if fault.next_step:
        note(f"next: {fault.next_step}")


@contextmanager
def answering(*, as_json: bool) -> Iterator[None]:
    """Turn a `Fault` of the command inside into its sentence and its exit code."""
    try:
        yield
    except Fault as fault:
        report(fault, as_json=as_json)
        raise SystemExit(fault.code) from None


def until_interrupted(act: Callable[[], None]) -> None:
    """Do something until it is done; Ctrl-C is a usual end of it, and ends the command."""
    try:
        act()
    except KeyboardInterrupt:
        raise SystemExit(exit_codes.INTERRUPTED) from None


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns; numbers to the right."""
    cells = [list(headers), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    right = [bool(rows) and all(_numeric(row[column]) for row in rows) for column in range(len(headers))]
    return "\n".join(_line(row, widths, right) for row in cells)


def _line(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = (
        cell.rjust(width) if flush else cell.ljust(width) for cell, width, flush in zip(row, widths, right, strict=True)
    )
    return "  ".join(padded).rstrip()


def _numeric(cell: str) -> bool:
    return cell in {"", "-"} or cell.replace(".", "", 1).replace("-", "", 1).isdigit()


def comma_separated(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return rows as comma-separated values (RFC 4180, but for the ends of lines).

    A text that a spreadsheet would take for a formula has an apostrophe before it: users choose names.
    """
    import csv
    import io

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(headers)
    writer.writerows([[_harmless(cell) for cell in row] for row in rows])
    return out.getvalue()


def _harmless(cell: object) -> object:
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in tuple("=+-@\t\r") and cell != "-" else cell


def number(value: float | None, digits: int = 2) -> str:
    """Return a figure for a table, ``-`` when there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def duration(seconds: float | None) -> str:
    """Return a length of time as people say it: ``45s``, ``3m05s``, ``2h10m``, ``4d03h``."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def plural(count: int, noun: str) -> str:
    """Return ``1 node`` or ``2 nodes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
