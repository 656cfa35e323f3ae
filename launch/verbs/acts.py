"""`cancel`, `hold`, `release`, `requeue`: what owners and administrators do to apps."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from app_agent.streams import OVER
from launch import completion, selection
from launch.client import Client, open_client
from launch.faults import Fault
from launch.surface import answering, duration, emit, note, plural, wants_json
from protocol import exit_codes
from protocol.messages import AppActKind

Ids = list[str] | None


def _ids(complete: completion.Completer) -> typer.models.ArgumentInfo:
    meaning = "app ids, `last`, or `all`: your own that are not over"
    return typer.Argument(metavar="ID...", autocompletion=complete, help=meaning)  # type: ignore[no-any-return]


Yes = Annotated[bool, typer.Option("-y", "--yes", help="do not ask before")]
Force = Annotated[bool, typer.Option("--force", help="also apps whose work would be lost")]
#: Less work than that may be lost without `--force`, in seconds: as much as an arbiter takes for nothing.
NEGLIGIBLE_S = 2.0
#: The word for what was done.
PAST: Mapping[AppActKind, str] = {"cancel": "cancelled", "hold": "held", "release": "released", "requeue": "requeued"}
#: The states of apps with tasks that may have work to lose.
RUNS = frozenset({"starting", "running"})
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]


def add(app: typer.Typer) -> None:
    """Add this group's verbs to `app`."""
    for verb in (cancel, hold, release, requeue):
        app.command()(verb)


def cancel(
    apps: Annotated[Ids, _ids(completion.apps_to_cancel)] = None,
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
    with answering(as_json=wants_json(json)):
        filters = selection.Filters.of(state=state, tenant=tenant, owner=owner, name=name)
        _act("cancel", apps or [], filters, yes=yes, as_json=wants_json(json))


def hold(
    apps: Annotated[Ids, _ids(completion.apps_to_hold)] = None,
    state: selection.State = None,
    tenant: selection.Tenant = None,
    owner: selection.Owner = None,
    name: selection.Name = None,
    yes: Yes = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Keep apps in the queue without GPUs until they are released; those that run leave, if no work is lost by that.

    gpu-arbiter hold alice-kqz7

    An app that runs saves and leaves, or is suspended. One that is not known to be able to do either would begin again:
    it is not held without --force. Held are your own apps; an administrator may hold every app.
    """
    with answering(as_json=wants_json(json)):
        filters = selection.Filters.of(state=state, tenant=tenant, owner=owner, name=name)
        _act("hold", apps or [], filters, yes=yes, force=force, as_json=wants_json(json))


def release(
    apps: Annotated[Ids, _ids(completion.apps_to_release)] = None,
    tenant: selection.Tenant = None,
    owner: selection.Owner = None,
    name: selection.Name = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Let apps that are held take part again; `all` stands for all of yours that are held.

    gpu-arbiter release alice-kqz7
    """
    with answering(as_json=wants_json(json)):
        filters = _filters(apps, "held", tenant, owner, name)
        _act("release", apps or [], filters, yes=yes, as_json=wants_json(json))


def requeue(
    apps: Annotated[Ids, _ids(completion.apps_to_requeue)] = None,
    tenant: selection.Tenant = None,
    owner: selection.Owner = None,
    name: selection.Name = None,
    yes: Yes = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Have apps that run leave their GPUs and wait behind all others; `all` stands for all of yours that run.

    gpu-arbiter requeue alice-kqz7

    They save before, or are suspended. An app that is not known to be able to do either would begin again: it is not
    requeued without --force.
    """
    with answering(as_json=wants_json(json)):
        filters = _filters(apps, "starting,running", tenant, owner, name)
        _act("requeue", apps or [], filters, yes=yes, force=force, as_json=wants_json(json))


def _filters(
    apps: list[str] | None, states: str, tenant: str | None, owner: str | None, name: str | None
) -> selection.Filters:
    """Return the filters of an act that is for apps in certain states only, unless apps are named one by one."""
    by_list = not apps or selection.EVERYTHING in apps
    state = states if by_list and (apps or tenant or owner or name) else None
    return selection.Filters.of(state=state, tenant=tenant, owner=owner, name=name)


def _act(
    kind: AppActKind, ids: Sequence[str], filters: selection.Filters, *, yes: bool, as_json: bool, force: bool = True
) -> None:
    """Do an act to the apps that are meant, and tell of each; without `force` not to those whose work it would lose."""
    past = PAST[kind]
    with open_client() as client:
        chosen = selection.own(client, ids, filters)
        if not chosen:
            note(f"no app that is not over matches; nothing was {past}")
        elif (not ids or selection.EVERYTHING in ids) and not (yes or _confirmed(kind, chosen)):
            raise Fault(f"nothing was {past}", next_step=f"gpu-arbiter {kind} --yes, which does not ask")
        done = _cancel(client, chosen) if kind == "cancel" else _each(client, kind, chosen, [], force=force)
        if as_json:
            emit({"schema": f"{past}/v1", "apps": done})


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
    return _each(client, "cancel", unknown, list(records))


def _each(client: Client, kind: AppActKind, apps: Sequence[str], done: list[str], *, force: bool = True) -> list[str]:
    """Have the arbiter act on each app; return `done` with the ids of these.

    Without `force` an app whose work would be lost is left as it is.

    Raises
    ------
    Fault
        If it does not act on some, when it has acted on the others.
    """
    faults, untried = list[tuple[str, Fault]](), list[str]()
    for number, app in enumerate(apps, start=1):
        try:
            if not force:
                _spare(client, kind, app)
            if kind == "release" and _was_not_held(client, app):
                note(f"{app} was not held")
                done.append(app)
                continue
            note(f"{app} is {client.cancel(app) if kind == 'cancel' else client.act(kind, app)}")
            done.append(app)
        except Fault as fault:
            faults.append((app, fault))
            if fault.code == exit_codes.UNREACHABLE:  # the rest would fail alike, each after a while
                untried = list(apps[number:])
                break
    if faults:
        raise _undone(faults, untried, {"apps": done})
    return done


def _was_not_held(client: Client, app: str) -> bool:
    """Whether an app that is not over is known not to be held."""
    rows = [row for row in client.query("apps", app)["apps"] if row["id"] == app and row["state"] not in OVER]
    return any(row.get("held_by") == "" for row in rows)


def _spare(client: Client, kind: AppActKind, app: str) -> None:
    """Refuse an act that would lose the work of an app: a task of it is not known to save or to be suspended.

    Raises
    ------
    Fault
        With code 4, naming the work that would be lost.
    """
    rows = [row for row in client.query("apps", app)["apps"] if row["id"] == app and row["state"] in RUNS]
    at_risk_s = max((task.get("at_risk_s", 0.0) for row in rows for task in row["tasks"]), default=0.0)
    if at_risk_s > NEGLIGIBLE_S:
        raise Fault(
            f"{app} is not {PAST[kind]}: it is not known to be able to save or to be suspended, so the "
            f"{duration(at_risk_s)} of work that it has done would be lost",
            code=exit_codes.REFUSED,
            next_step=f"gpu-arbiter {kind} --force {app}, if that work may be lost",
        )


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
