"""`version`: which release this is."""

from __future__ import annotations

from typing import Annotated

import typer

from launch.surface import emit, say, wants_json
from protocol.release import release


def add(app: typer.Typer) -> None:
    """Add this group's verb to `app`."""
    app.command()(version)


def version(json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False) -> None:
    """Print the version."""
    number = release()
    if wants_json(json):
        emit({"schema": "version/v1", "version": number})
    else:
        say(number)
