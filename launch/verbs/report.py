"""`report`: the GPU time of tenants, owners or apps, by day or in any period."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from launch import completion, periods, views
from launch.client import open_client
from launch.faults import usage
from launch.surface import answering, comma_separated, emit, say, wants_json

#: GPU time is summed by one of these.
SUMMED_BY = ("tenant", "owner", "app")


def add(app: typer.Typer) -> None:
    """Add this group's verb to `app`."""
    app.command()(report)


def report(
    by: Annotated[
        str,
        typer.Option(metavar="tenant|owner|app", autocompletion=completion.one_of(SUMMED_BY), help="whose GPU time"),
    ] = "tenant",
    since: Annotated[str | None, typer.Option(help="of the last 12h or 7d")] = None,
    begin: Annotated[
        str | None, typer.Option("--from", metavar="DATE", help="from the beginning of 2026-11-01, or a moment")
    ] = None,
    end: Annotated[
        str | None, typer.Option("--to", metavar="DATE", help="up to the beginning of that day, or a moment")
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(
            metavar="hour|day|week|month",
            autocompletion=completion.one_of(periods.LENGTHS),
            help="one line for each, by your calendar",
        ),
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="print comma-separated values, in GPU-seconds")] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Sum the GPU time that tenants, owners or apps have had, and have lost.

    gpu-arbiter report --by owner --since 30d --every week

    Without --since and --from it is all time that the arbiter's ledger knows.
    """
    as_json = wants_json(json)
    with answering(as_json=as_json):
        if by not in SUMMED_BY:
            raise usage(f"--by is {by!r}", f"choose one of {', '.join(SUMMED_BY)}")
        edges = periods.edges(begin=begin, end=end, since=since, every=every, now=time.time())
        with open_client() as client:
            document = client.query("report", by, edges=edges)
        if as_json:
            emit(document)
        else:
            say(comma_separated(*views.report_sheet(document)) if csv else views.report_table(document))
