"""`ps`, `explain`, `logs`, `nodes`, `shares`, `rounds`: the state of the site, and its reasons."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from launch import completion, selection, views
from launch.client import open_client
from launch.faults import usage
from launch.follow import follow_logs
from launch.pictures import Picture, show_changes
from launch.surface import answering, emit, note, packed, say, until_interrupted, wants_json

#: Those that GPU time is counted of.
SHARERS = ("tenant", "owner")
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]
Selector = Annotated[str, typer.Argument(metavar="ID", autocompletion=completion.apps, help="an app's id, or `last`")]


def add(app: typer.Typer) -> None:
    """Add this group's verbs to `app`."""
    for verb in (ps, explain, logs, nodes, shares, rounds):
        app.command()(verb)


def ps(
    apps: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID...", autocompletion=completion.apps, help="app ids, or `last`; all without"),
    ] = None,
    everything: Annotated[bool, typer.Option("-a", "--all", help="also those that are over")] = False,
    state: selection.State = None,
    tenant: selection.Tenant = None,
    owner: selection.Owner = None,
    name: selection.Name = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="again whenever something changed")] = False,
    json: Json = False,
) -> None:
    """List apps.

    gpu-arbiter ps -w --state running,waiting --name 'sweep-*'

    Apps that are over are listed with --all, by their ids, and by their states.
    """
    as_json = wants_json(json)
    with answering(as_json=as_json), open_client() as client:
        filters = selection.Filters.of(state=state, tenant=tenant, owner=owner, name=name)
        over_too = everything or bool(apps or filters.states)
        unknown: list[str] = []

        def look() -> Picture:
            document = client.query("apps")
            chosen, unknown[:] = selection.listed(client, document, apps or (), filters)
            document["apps"] = chosen
            text = packed(document) if as_json else views.apps_table(document, everything=over_too, some=bool(filters))
            return Picture(text, views.apps_news(document, everything=over_too))

        picture = look()
        if watch and not unknown:
            until_interrupted(lambda: show_changes(look))
        if not (unknown and as_json):  # the error's document is the answer then
            say(picture.text)
        if unknown:
            raise selection.not_found(unknown)


def explain(app: Selector, json: Json = False) -> None:
    """Explain why an app waits, was preempted, or has its number of GPUs, and give the next step."""
    as_json = wants_json(json)
    with answering(as_json=as_json), open_client() as client:
        document = client.query("explain", client.resolve(app))
        if as_json:
            emit(document)
        else:
            say(views.explanation(document, time.time()))


def logs(
    target: Annotated[
        str, typer.Argument(metavar="ID", autocompletion=completion.tasks, help="an app, job or task, or `last`")
    ],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="go on until it is over, across preemptions")] = False,
    tail: Annotated[int | None, typer.Option(min=0, metavar="N", help="begin with the last N lines (all)")] = None,
) -> None:
    """Print a task's output, stdout and stderr; of an app, that of its newest attempt.

    gpu-arbiter logs -f --tail 20 last
    """
    with answering(as_json=False), open_client() as client:
        named = client.resolve(target)

        def show() -> None:
            if not follow_logs(client, named, follow=follow, tail=tail) and tail != 0:
                note(f"{named} has no output: its newest attempt has printed nothing, or no process of it was started")

        until_interrupted(show)


def nodes(json: Json = False) -> None:
    """List nodes, their GPUs and the apps that hold these."""
    as_json = wants_json(json)
    with answering(as_json=as_json), open_client() as client:
        document = client.query("nodes")
        if as_json:
            emit(document)
        else:
            say(views.nodes_table(document, time.time()))


def shares(
    by: Annotated[
        str, typer.Option(metavar="tenant|owner", autocompletion=completion.one_of(SHARERS), help="whose GPU time")
    ] = "tenant",
    json: Json = False,
) -> None:
    """Show the due and the GPU time of each tenant, or of each owner: LTGF of 1 or more is fair.

    gpu-arbiter shares --by owner
    """
    as_json = wants_json(json)
    with answering(as_json=as_json), open_client() as client:
        if by not in SHARERS:
            raise usage(f"--by is {by!r}", f"choose one of {', '.join(SHARERS)}")
        document = client.query("shares", by if by == "owner" else "")
        if as_json:
            emit(document)
        else:
            say(views.owners_table(document) if by == "owner" else views.shares_table(document))


def rounds(
    limit: Annotated[int, typer.Option(min=1, help="how many, the newest first")] = 20,
    json: Json = False,
) -> None:
    """List the newest rounds: which apps won GPUs, and how many got none."""
    as_json = wants_json(json)
    with answering(as_json=as_json), open_client() as client:
        document = client.query("rounds", limit=limit)
        if as_json:
            emit(document)
        else:
            say(views.rounds_table(document, time.time()))
