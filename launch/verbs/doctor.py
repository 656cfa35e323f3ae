"""`doctor`: checks of this host and its daemons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from launch.faults import journal_place, usage
from launch.surface import answering, emit, note, say, table, wants_json
from protocol import exit_codes

Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]


def add(app: typer.Typer) -> None:
    """Add this group's verbs to `app`."""
    app.command()(doctor)


def doctor(
    bus: Annotated[str, typer.Option(help="also try this broker, amqp://user:password@host/vhost")] = "",
    journal: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="also try the journal in an arbiter's state_dir")
    ] = None,
    journal_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the same of a database: the arbiter's journal_file")
    ] = None,
    site: Annotated[
        bool, typer.Option("--site", help="also check the whole site: broker, TLS, clocks, isolation, fairness")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="with --site: the arbiter.toml whose settings are tried")
    ] = None,
    json: Json = False,
) -> None:
    """Check this host, the broker and the daemons; exit 1 if anything must be mended."""
    from launch import doctor as examination

    as_json = wants_json(json)
    with answering(as_json=as_json):
        if config is not None and not site:
            raise usage("--config is of no use without --site", "add --site")
        place = journal_place(journal, journal_file)
        found = list(examination.checks(bus, place))
        if site:
            from launch import site_checks

            found += site_checks.checks(config)
    broken = any(check.verdict == "fail" for check in found)
    if as_json:
        emit({"schema": "doctor/v1", "ok": not broken, "checks": [msgspec.to_builtins(check) for check in found]})
    else:
        say(table(("CHECK", "VERDICT", "FOUND"), [(check.name, check.verdict, check.found) for check in found]))
        for check in found:
            if check.verdict != "ok" and check.mend:
                note(f"{check.name}: {check.mend}")
    raise SystemExit(exit_codes.FAILED if broken else exit_codes.DONE)
