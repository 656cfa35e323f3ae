"""What an evaluation says, as a document and as text; the runs that it keeps; its command line."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from simulator.sweep import interval

CaseT = TypeVar("CaseT")
FiguresT = TypeVar("FiguresT")


class Claim(Struct, frozen=True):
    """A published figure, ours, the goal, and whether ours meets it; `met` is null where nothing is asked.

    `impossible` says of a goal that is missed that no scheduler could meet it with the N_avg of that run (`floor`).
    """

    name: str
    paper: str
    ours: str
    goal: str
    met: bool | None
    impossible: bool = False

    @property
    def verdict(self) -> str:
        """The verdict in a word, or none."""
        return {True: "met", False: "impossible" if self.impossible else "**missed**", None: ""}[self.met]


class Table(Struct, frozen=True):
    """Figures behind claims: mean over the seeds, and where there are several its 95 % interval as ``± half``."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Report(Struct, frozen=True):
    """The whole document."""

    schema: str
    claims: tuple[Claim, ...]
    tables: tuple[Table, ...]
    inputs: dict[str, Any]
    cpu_s: float


def report_of(
    schema: str,
    findings: Iterable[tuple[Sequence[Claim], Sequence[Table]]],
    inputs: Mapping[str, Any],
    cpu_s: float,
) -> Report:
    """Return the document of what the parts of an evaluation have found."""
    found = list(findings)
    return Report(
        schema=schema,
        claims=tuple(claim for claims, _ in found for claim in claims),
        tables=tuple(table for _, tables in found for table in tables),
        inputs=dict(inputs),
        cpu_s=cpu_s,
    )


def text_of(report: Report) -> str:
    """Return the document as Markdown."""
    claims = tuple((claim.name, claim.paper, claim.ours, claim.goal, claim.verdict) for claim in report.claims)
    tables = (Table("Claims", ("claim", "paper", "ours", "goal", ""), claims), *report.tables)
    return "\n".join(f"## {table.name[0].upper()}{table.name[1:]}\n\n{_markdown(table)}\n" for table in tables)


def _markdown(table: Table) -> str:
    lines = [table.columns, tuple("---" for _ in table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(report: Report, *, json: bool) -> None:
    """Print the document."""
    print(msgspec.json.encode(report).decode() if json else text_of(report))


# --- figures over seeds -----------------------------------------------------------------------------------------------


def said(values: Sequence[float], form: str = ".2f") -> str:
    """Return the mean of `values`, and its 95 % interval if there are several."""
    found = interval(values)
    middle, low = found["mean"], found["low"]
    assert middle is not None
    return f"{middle:{form}}" + ("" if low is None else f" ± {middle - low:{form}}")


def mean(values: Sequence[float]) -> float:
    middle = interval(values)["mean"]
    assert middle is not None
    return middle


# --- runs that are done -----------------------------------------------------------------------------------------------


class Memory(Generic[CaseT, FiguresT]):
    """The runs that are done; with a `file` also those of an earlier call, so that a long evaluation can be resumed.

    The file is true of the code that wrote it only: delete it when the code has changed.
    """

    def __init__(self, case: type[CaseT], figures: type[FiguresT]) -> None:
        self.done: dict[CaseT, FiguresT] = {}
        self.file: Path | None = None
        self._case, self._figures = case, figures

    def use(self, file: Path) -> None:
        """Read what `file` holds, if it is there, and write down in it every run from now on."""
        self.file = file
        for line in file.read_bytes().splitlines() if file.exists() else ():
            kept = msgspec.json.decode(line)
            self.done[msgspec.convert(kept["case"], self._case)] = msgspec.convert(kept["figures"], self._figures)

    def add(self, case: CaseT, figures: FiguresT) -> None:
        """Note a run that is done."""
        self.done[case] = figures
        if self.file is not None:
            with self.file.open("ab") as file:
                file.write(msgspec.json.encode({"case": case, "figures": figures}) + b"\n")


# --- the command line -------------------------------------------------------------------------------------------------


def arguments(about: str | None, parts: Collection[str], *, quick: str) -> argparse.ArgumentParser:
    """Return the options of an evaluation of these `parts`; `quick` says how long its small form takes."""

    def chosen(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        unknown = [name for name in names if name not in parts]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no part {unknown[0]!r}; choose of {', '.join(parts)}")
        return names

    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help=f"a small part of everything: {quick}")
    parser.add_argument("--only", type=chosen, default=tuple(parts), metavar="PART,...", help=", ".join(parts))
    return parser


def keeping(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return a command line that can also keep its runs (`Memory.use`)."""
    parser.add_argument("--keep", type=Path, metavar="FILE", help="note runs here, and do not repeat those noted")
    return parser
