"""`top`: the whole site on one screen, as it is now or as its journal tells of a moment of the past."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch import keys, overview, spec
from launch.client import open_client
from launch.faults import Fault, journal_place, usage
from launch.pictures import Picture, cut_to_terminal, show_changes
from launch.surface import answering, emit, say, until_interrupted, wants_json

if TYPE_CHECKING:
    from arbiter.past import Past

#: Seconds that a key moves in the past.
STEPS = {"left": -10.0, "right": 10.0, "down": -300.0, "up": 300.0}


def add(app: typer.Typer) -> None:
    """Add this group's verb to `app`."""
    app.command()(top)


def top(
    journal: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="look at the past that the journal in an arbiter's state_dir tells of"),
    ] = None,
    journal_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="the same of a journal in a database: the arbiter's journal_file"),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="with --journal: 10m before its end, or 2026-11-25T18:00 (its end)"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Show GPUs with their holders and use, tenants, apps and the newest round on one screen.

    gpu-arbiter top --journal /var/lib/gpu-arbiter --at 20m

    On a terminal the screen follows the site until Ctrl-C; of a journal the arrow keys move by 10 s and by 5 min.
    """
    as_json = wants_json(json)
    with answering(as_json=as_json):
        place = journal_place(journal, journal_file)
        if place is not None:
            _show_past(place, at, as_json=as_json)
            return
        if at is not None:
            raise usage("--at needs a --journal", "the present is shown without both")
        with open_client() as client:
            look = partial(overview.gather, client.query)
            if as_json:
                emit(look(time.time()))
            elif not sys.stdout.isatty():
                say(overview.screen(look(time.time())))
            else:
                until_interrupted(lambda: show_changes(lambda: _picture(look(time.time()))))


def _picture(document: dict[str, Any]) -> Picture:
    text = overview.screen(document)
    return Picture(text, text)


def _show_past(journal: Path | str, at: str | None, *, as_json: bool) -> None:
    from arbiter.past import Past
    from protocol.journal import JournalError

    try:
        with Past(journal) as past:
            moment = past.go_to(_moment(at, past.end))
            if as_json:
                emit(overview.gather(past.ask, moment))
            elif not (sys.stdout.isatty() and sys.stdin.isatty()):
                say(_screen(past, moment))
            else:
                until_interrupted(lambda: _walk(past, moment))
    except JournalError as error:
        raise Fault(str(error)) from None


def _moment(at: str | None, end: float) -> float:
    """Return the moment that is meant: so long before the end of the journal, or by the calendar."""
    if at is None:
        return end
    try:
        return datetime.fromisoformat(at).timestamp()
    except ValueError:
        return end - spec.seconds(at, "--at")


def _screen(past: Past, moment: float) -> str:
    begin, end = (datetime.fromtimestamp(each).strftime("%Y-%m-%d %H:%M:%S") for each in (past.begin, past.end))  # noqa: DTZ006 - the reader's time
    return f"the past, from {begin} to {end}\n{overview.screen(overview.gather(past.ask, moment))}"


def _walk(past: Past, moment: float) -> None:
    """Show the past, and move in it with each key, until ``q``."""
    with keys.pressed() as next_key:
        while True:
            help_line = "left, right: 10 s; down, up: 5 min; q ends"
            sys.stdout.write(f"\x1b[H\x1b[J{cut_to_terminal(f'{help_line}; {_screen(past, moment)}')}\n")
            sys.stdout.flush()
            key = next_key()
            if key == "q":
                return
            moment = past.go_to(moment + STEPS.get(key, 0.0))
