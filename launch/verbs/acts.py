"""`cancel`: what owners and administrators do to apps."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from launch import selection
from launch.client import Client, open_client
from launch.faults import Fault
from launch.surface import answering, emit, note, plural, wants_json
from protocol import exit_codes

Ids = Annotated[
    list[str] | None, typer.Argument(metavar="[ID...]", help="app ids, `last`, or `all`: your own that are not over")
]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="do not ask before")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]


def add(app: typer.Typer) -> None:
    """Add this group's verbs to `app`."""
    app.command()(cancel)


def cancel(
    apps: Ids = None,
    state: selection.State = None,
    tenant: selection.Tenant = None,
    owner: selection.Owner = None,
    name: selection.Name = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """End apps for good; their tasks are stopped and their GPUs freed.

    gpu-arbiter cancel --state waiting --name 'sweep-*'

    The arbiter decides about an app that your app agent has no record of: you may cancel your own, an administrator
    every app. If some cannot be cancelled, the others still are, and the exit code tells the reason.
    """
    as_json = wants_json(json)
    ids = apps or []
    with answering(as_json=as_json), open_client() as client:
        filters = selection.Filters.of(state=state, tenant=tenant, owner=owner, name=name)
        chosen = selection.own(client, ids, filters)
        if not chosen:
            note("no app that is not over matches; nothing was cancelled")
        elif (not ids or selection.EVERYTHING in ids) and not (yes or _confirmed("cancel", chosen)):
            raise Fault("nothing was cancelled", next_step="gpu-arbiter cancel --yes, which does not ask")
        cancelled = _cancel(client, chosen)
        if as_json:
            emit({"schema": "cancelled/v1", "apps": cancelled})


def _confirmed(act: str, apps: Sequence[str]) -> bool:
    """Ask on a terminal whether apps that were not named are meant; a script is not asked."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    sys.stderr.write(f"{act} {plural(len(apps), 'app')}: {', '.join(apps)}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _cancel(client: Client, apps: Sequence[str]) -> list[str]:
    """Cancel apps and tell of each; return their ids.

    Raises
    ------
    Fault
        If some cannot be cancelled, when the others are.
    """
    records, unknown = selection.known(client, apps)
    for app, record in records.items():
        client.cancel(app)
        note(f"{app} was already {record.state}" if record.over else f"{app} is cancelled")
    cancelled, faults, untried = list(records), list[tuple[str, Fault]](), list[str]()
    for number, app in enumerate(unknown, start=1):
        try:
            note(f"{app} is {client.cancel(app)}")
            cancelled.append(app)
        except Fault as fault:
            faults.append((app, fault))
            if fault.code == exit_codes.UNREACHABLE:  # the rest would fail alike, each after a while
                untried = unknown[number:]
                break
    if faults:
        raise _undone(faults, untried, {"apps": cancelled})
    return cancelled


def _undone(faults: Sequence[tuple[str, Fault]], untried: Sequence[str], done: Mapping[str, object]) -> Fault:
    """Return a fault with each app's reason against the act, and the greatest of their codes."""
    missing = [app for app, fault in faults if fault.code == exit_codes.NOT_FOUND]
    sentences = [fault.sentence for _, fault in faults if fault.code != exit_codes.NOT_FOUND]
    if missing:
        sentences.insert(0, selection.not_found(missing).sentence)
    if untried:
        sentences.append(f"not tried: {', '.join(untried)}")
    worst = max((fault for _, fault in faults), key=lambda fault: fault.code)
    return Fault("; ".join(sentences), code=worst.code, next_step=worst.next_step, done=done)
