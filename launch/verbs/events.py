"""`events`: what happened to apps, nodes and tenants, in the order of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, cast, get_args

import typer

from launch import completion, selection, spec, views
from launch.client import open_client
from launch.faults import Fault, usage
from launch.surface import Document, answering, emit, note, say, wants_json
from protocol import exit_codes
from protocol.messages import EventFilter, EventKind

KINDS = get_args(EventKind)
#: The newest events that are told unless --tail or --since says otherwise.
TOLD = 100
#: Ids, nodes or tenants of one question, at most.
NAMED_MAX = 100
#: Between two looks at what is new.
LOOK_S = 1.0

Ids = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ID...", autocompletion=completion.tasks, help="ids of apps, jobs or tasks, or `last`; all without"
    ),
]
Node = Annotated[
    str | None,
    typer.Option(metavar="N[,N...]", autocompletion=completion.some_nodes, help="only events on these nodes"),
]
Kind = Annotated[
    str | None,
    typer.Option(
        metavar="K[,K...]", autocompletion=completion.event_kinds, help="only events of these kinds, such as preempted"
    ),
]


def add(app: typer.Typer) -> None:
    """Add this group's verb to `app`."""
    app.command()(events)


def events(
    ids: Ids = None,
    node: Node = None,
    tenant: selection.Tenant = None,
    kind: Kind = None,
    since: Annotated[str | None, typer.Option(help="only events of the last 30m, 2h or 1d")] = None,
    tail: Annotated[int | None, typer.Option(min=0, metavar="N", help="only the last N events")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="go on with new events, until Ctrl-C")] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON document; with --follow one a line")] = False,
) -> None:
    """Tell what happened to apps, nodes and tenants: one line each, oldest first.

    gpu-arbiter events --since 2h --node n1 --follow

    Without --since and --tail, the newest 100 events are told. The arbiter's ledger keeps them over its restarts.
    """
    as_json = wants_json(json)
    with answering(as_json=as_json):
        among = EventFilter(
            nodes=_few(selection.words(node, "--node"), "--node"),
            tenants=_few(selection.words(tenant, "--tenant"), "--tenant"),
            kinds=_kinds(kind),
            since_s=None if since is None else spec.seconds(since, "--since"),
        )
        limit = tail if tail is not None else TOLD if since is None else 0
        from msgspec.structs import replace

        document, among = _newest(_few(ids or (), "ID"), among, limit, none=tail == 0)
        if tail is None and len(document["events"]) == limit > 0:
            note(f"the newest {TOLD} events; for more: --tail N, or --since 1d")
        _show(document, as_json=as_json)
        if follow:
            among = replace(among, since_s=None)  # the cursor knows where to go on, however long that takes
            try:
                _follow(among, int(document["cursor"]), lambda news: _show(news, as_json=as_json))
            except KeyboardInterrupt:
                raise SystemExit(exit_codes.INTERRUPTED) from None


def _few(names: Sequence[str], what: str) -> tuple[str, ...]:
    if len(names) > NAMED_MAX:
        raise usage(f"{what} has {len(names)} names", f"give {NAMED_MAX} at most, or a --tenant")
    return tuple(names)


def _kinds(text: str | None) -> tuple[EventKind, ...]:
    words = selection.words(text, "--kind")
    for wrong in (each for each in words if each not in KINDS):
        nearest = get_close_matches(wrong, KINDS, n=1, cutoff=0.0)[0]
        raise usage(f"--kind is {wrong!r}; it may be {', '.join(KINDS)}", f"try --kind {nearest}")
    return cast("tuple[EventKind, ...]", words)


def _newest(ids: Sequence[str], among: EventFilter, limit: int, *, none: bool) -> tuple[dict[str, Any], EventFilter]:
    """Return the newest `limit` events that are meant, all with 0, or `none`; and what is meant, with ids for `last`.

    Raises
    ------
    Fault
        If there is no such app, task or node.
    """
    from msgspec.structs import replace

    with open_client() as client:
        among = replace(among, ids=tuple(client.resolve(each) for each in ids))
        document = client.query("events", limit=1 if none else limit, events=among)
    unknown = document["unknown"]
    if unknown["ids"]:
        raise selection.not_found(unknown["ids"])
    if unknown["nodes"]:
        missing = ", ".join(unknown["nodes"])
        raise Fault(f"there is no node {missing}", code=exit_codes.NOT_FOUND, next_step="gpu-arbiter nodes")
    return document | ({"events": []} if none else {}), among


def _follow(
    among: EventFilter,
    cursor: int,
    show: Callable[[Document], None],
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Show what happens after the event `cursor`, for ever; an arbiter or app agent that is away is waited for."""
    away = False
    while True:
        pause(LOOK_S)
        try:
            with open_client() as client:
                news = client.query("events", offset=cursor, events=among)
        except Fault as fault:
            if fault.code != exit_codes.UNREACHABLE:
                raise
            if not away:
                note(f"waiting: {fault.sentence}")
            away = True
            continue
        away = False
        cursor = int(news["cursor"])
        if news["events"]:
            show(news)


def _show(document: Document, *, as_json: bool) -> None:
    if as_json:
        emit(document)
    elif document["events"]:
        say("\n".join(map(views.event_line, document["events"])))
