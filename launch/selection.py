"""Which apps a command means: ids, and filters by state, tenant, owner and name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, get_args

import typer

from app_agent.core.records import AppRecord
from app_agent.streams import OVER
from launch import completion
from launch.client import NEXT_STEPS, Client
from launch.faults import Fault, usage
from launch.preflight import PATIENCE_S
from launch.surface import Document, note
from protocol import exit_codes
from protocol.messages import AppStateName

STATES = get_args(AppStateName)
#: Slurm's names of states, long and short, and ours.
SLURM_STATES = {
    **dict.fromkeys(("PENDING", "PD"), "waiting"),
    **dict.fromkeys(("CONFIGURING", "CF"), "starting"),
    **dict.fromkeys(("COMPLETING", "CG"), "leaving"),
    **dict.fromkeys(("COMPLETED", "CD"), "finished"),
    **dict.fromkeys(("TIMEOUT", "TO"), "failed"),
    "R": "running",
    "S": "suspended",
    "F": "failed",
    "CA": "cancelled",
}
#: In place of ids: all of one's own apps that are not over.
EVERYTHING = "all"

State = Annotated[
    str | None,
    typer.Option(
        metavar="S[,S...]", autocompletion=completion.states, help=f"only apps in these states: {', '.join(STATES)}"
    ),
]
Tenant = Annotated[
    str | None,
    typer.Option(metavar="T[,T...]", autocompletion=completion.some_tenants, help="only apps of these tenants"),
]
Owner = Annotated[
    str | None,
    typer.Option(metavar="O[,O...]", autocompletion=completion.some_owners, help="only apps of these owners"),
]
Name = Annotated[
    str | None,
    typer.Option(
        metavar="N[,N...]",
        autocompletion=completion.app_names,
        help="only apps with these names; * and ? as in a shell",
    ),
]


@dataclass(frozen=True)
class Filters:
    """What apps must be like; an empty filter keeps all of them."""

    states: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, *, state: str | None, tenant: str | None, owner: str | None, name: str | None) -> Filters:
        """Return the filters that flags ask for, each a list with commas between.

        Raises
        ------
        Fault
            For an empty list, and for a state that no app can be in.
        """
        states = words(state, "--state")
        for wrong in (each for each in states if each not in STATES):
            nearest = get_close_matches(wrong, STATES, n=1, cutoff=0.0)[0]
            ours = SLURM_STATES.get(wrong.upper())
            if ours is not None:
                raise usage(f"--state is {wrong!r}, a state of Slurm", f"try --state {ours}")
            raise usage(f"--state is {wrong!r}; it may be {', '.join(STATES)}", f"try --state {nearest}")
        return cls(states, words(tenant, "--tenant"), words(owner, "--owner"), words(name, "--name"))

    def __bool__(self) -> bool:
        return any((self.states, self.tenants, self.owners, self.names))

    def keep(self, app: Document) -> bool:
        """Return whether an app of ``apps/v1`` is among those that are meant."""
        pairs = ((self.states, "state"), (self.tenants, "tenant"), (self.owners, "owner"))
        exact = all(not wanted or app[field] in wanted for wanted, field in pairs)
        return exact and (not self.names or any(fnmatchcase(str(app["name"]), each) for each in self.names))


def words(text: str | None, flag: str) -> tuple[str, ...]:
    """Return the names of a list with commas between; raises `Fault`, naming `flag`, where one is empty."""
    if text is None:
        return ()
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise usage(f"{flag} is {text!r}, in which a name is empty", f"write {flag} A,B, or leave it out")
    return words


def listed(
    client: Client, document: Document, ids: Iterable[str], filters: Filters
) -> tuple[list[Document], list[str]]:
    """Return the apps of ``apps/v1`` that are meant, all of them without ids, and the ids that none of them has."""
    wanted = dict.fromkeys(client.resolve(each) for each in ids)
    apps = {str(app["id"]): app for app in document["apps"]}
    chosen = [app for name, app in apps.items() if not wanted or name in wanted]
    return [app for app in chosen if filters.keep(app)], [name for name in wanted if name not in apps]


def own(client: Client, ids: Sequence[str], filters: Filters) -> list[str]:
    """Return the ids of apps that a command for one's own apps is to act on.

    Ids that are given are kept unless an app with that id is filtered out. ``all`` stands for one's own apps that are
    not over, and so do filters alone; with a filter of owners those are theirs.

    Raises
    ------
    Fault
        If no app is named in any way; or if the arbiter, which filters need, is away.
    """
    everything = EVERYTHING in ids
    if everything and len(ids) > 1:
        raise usage(f"`{EVERYTHING}` stands alone, and there are ids beside it", "give ids, or `all` with filters")
    if not ids and not filters:
        raise usage("no app is named", "give ids, `last` or `all`, or filters such as --name 'sweep-*'")
    if ids and not everything:
        names = list(dict.fromkeys(client.resolve(each) for each in ids))
        if not filters:
            return names
        rows = _rows(client, filters, client.ping()["owner"])
        return [name for name in names if name not in rows or filters.keep(rows[name])]
    me = client.ping()["owner"]
    apps = (app for app in _rows(client, filters, me).values() if app["state"] not in OVER)
    return [str(app["id"]) for app in apps if filters.keep(app) and (filters.owners or app["owner"] == me)]


def _rows(client: Client, filters: Filters, me: str) -> dict[str, Document]:
    """Return all apps by id: those of the arbiter, and those of `me` that the app agent has not told it of yet."""
    rows: dict[str, Document] = {
        str(record.app): {"id": record.app, "owner": me, "state": record.state, "tenant": record.tenant}
        | {"name": record.name}
        for record in client.apps()
    }
    try:
        document = client.query("apps", patience_s=None if filters else PATIENCE_S)
    except Fault as fault:
        if filters or fault.code != exit_codes.UNREACHABLE:
            raise
        note(f"the arbiter is away, so only apps that your app agent knows are meant: {fault.sentence}")
        return rows
    return rows | {str(app["id"]): app for app in document["apps"]}


def known(client: Client, selectors: Sequence[str]) -> tuple[dict[str, AppRecord], list[str]]:
    """Return the records of the selected apps, and the ids that no app has; each once, in their order."""
    ids = dict.fromkeys(client.resolve(selector) for selector in selectors)
    records = {str(record.app): record for record in client.apps()}
    return {app: records[app] for app in ids if app in records}, [app for app in ids if app not in records]


def not_found(unknown: Sequence[str], done: Mapping[str, object] | None = None) -> Fault:
    """Return a fault that names the ids that no app has; `done` tells the result of the others."""
    names = ", ".join(unknown)
    sentence = f"there is no app {names}" if len(unknown) == 1 else f"there are no apps {names}"
    code = exit_codes.NOT_FOUND
    return Fault(sentence, code=code, next_step=NEXT_STEPS[code], done=done)
