"""`clean`: removes what apps that are over have left behind."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from app_agent.core.records import AppRecord
from launch import completion, leftovers, selection, spec
from launch.client import Client, open_client
from launch.faults import Fault, usage
from launch.leftovers import Folder, Left
from launch.surface import answering, duration, emit, note, plural, say, table, wants_json

#: Without ids, what apps left behind that ended later stays: a result may still be fetched, a checkpoint looked at.
AGE_S = 86_400.0


def add(app: typer.Typer) -> None:
    """Add this group's verb to `app`."""
    app.command()(clean)


def clean(
    apps: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID...]",
            autocompletion=completion.apps_that_are_over,
            help="app ids, `last`, or `all`: your own that are over (all)",
        ),
    ] = None,
    state: selection.State = None,
    tenant: selection.Tenant = None,
    name: selection.Name = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="TIME", help="only of apps that ended 12h or 7d ago (1d; with ids 0s)")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list what would go, and remove nothing")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="do not ask before")] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Remove the checkpoints and calls that apps of yours have left behind, after it has listed them.

    gpu-arbiter clean --older-than 7d --dry-run

    Of an app that is not over, or not known, nothing goes. Files of your script in a folder of checkpoints keep it
    there, unless you name the app by its id.
    """
    as_json = wants_json(json)
    with answering(as_json=as_json), open_client() as client:
        filters = selection.Filters.of(state=state, tenant=tenant, owner=None, name=name)
        named = bool(apps) and selection.EVERYTHING not in (apps or [])
        chosen, missing = _chosen(client, apps or [], filters)
        age_s = (0.0 if named else AGE_S) if older_than is None else spec.seconds(older_than, "--older-than")
        folders, left = leftovers.find(chosen, ended_before=time.time() - age_s, named=named)
        if not named and not filters:
            left += leftovers.unknown(client.apps(), client.ping()["owner"])
        if not as_json:
            _tell(folders, left)
            before = time.time() - age_s
            if young := sum((one.ended_at or 0.0) > before and leftovers.any_of(one) for one in chosen):
                stays = f"{plural(young, 'app')} that ended less than {duration(age_s)} ago"
                note(f"stays: what {stays} left behind; --older-than 0s takes that, too")
        if folders and not dry_run and not yes:
            _confirm(folders)
        failures = {} if dry_run else {each.path: why for each in folders if (why := leftovers.remove(each))}
        document = _document(folders, left, failures, dry_run=dry_run)
        if missing:
            raise selection.not_found(missing, document if as_json else None)
        if failures:
            raise Fault("; ".join(failures.values()), done=document if as_json else None)
        if as_json:
            emit({"schema": "clean/v1"} | document)
        elif folders and not dry_run:
            note(f"removed {_sum(folders)}")


def _chosen(client: Client, ids: Sequence[str], filters: selection.Filters) -> tuple[list[AppRecord], list[str]]:
    """Return the apps that are meant, and the ids that no app has."""
    everything = selection.EVERYTHING in ids
    if everything and len(ids) > 1:
        raise usage(f"`{selection.EVERYTHING}` stands alone, and there are ids beside it", "give ids, or `all`")
    if not ids or everything:
        records, missing = client.apps(), list[str]()
    else:
        known, missing = selection.known(client, ids)
        records = list(known.values())
    fields = ("state", "tenant", "name")
    return [one for one in records if filters.keep({field: getattr(one, field) for field in fields})], missing


def _tell(folders: Sequence[Folder], left: Sequence[Left]) -> None:
    """Print what goes, and how much that is; beside it what stays."""
    now = time.time()
    rows = [
        (
            each.app.app,
            each.app.state,
            duration(now - (each.app.ended_at or now)),
            each.what,
            _size(each.bytes),
            each.path,
        )
        for each in folders
    ]
    headers = ("APP", "STATE", "ENDED", "WHAT", "SIZE", "FOLDER")
    say(f"{table(headers, rows)}\n{_sum(folders)}" if rows else "nothing to remove")
    for each in left:
        note(f"stays: {each.path or each.app}: {each.app + ': ' if each.app and each.path else ''}{each.reason}")


def _sum(folders: Sequence[Folder]) -> str:
    return f"{plural(len(folders), 'folder')}, {_size(sum(each.bytes for each in folders))}"


def _size(amount: int) -> str:
    """Return an amount of bytes as people say it."""
    value, units = float(amount), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{amount} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _confirm(folders: Sequence[Folder]) -> None:
    """Ask on a terminal; raises `Fault` for another answer than yes, and where no one can be asked."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise usage("nothing was removed, as no one can be asked without a terminal", "gpu-arbiter clean --yes")
    sys.stderr.write(f"remove {_sum(folders)}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Fault("nothing was removed", next_step="gpu-arbiter clean --yes, which does not ask")


def _document(
    folders: Sequence[Folder], left: Sequence[Left], failures: Mapping[str, str], *, dry_run: bool
) -> dict[str, Any]:
    from protocol.clock import instant

    gone = [
        {
            "path": each.path,
            "what": each.what,
            "app": each.app.app,
            "state": each.app.state,
            "ended_at": instant(each.app.ended_at or 0.0),
            "bytes": each.bytes,
            "files": each.files,
            "removed": not dry_run and each.path not in failures,
            "reason": failures.get(each.path, ""),
        }
        for each in folders
    ]
    stays = [{"path": each.path, "app": each.app or None, "reason": each.reason} for each in left]
    return {"dry_run": dry_run, "bytes": sum(each.bytes for each in folders), "folders": gone, "left": stays}
