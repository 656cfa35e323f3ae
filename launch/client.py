"""The command line's side of the control socket, with the errors of the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from app_agent import streams
from app_agent.config import default_socket
from app_agent.control import ALL_EVENTS, TIMEOUT_S, Control, ControlError, Request, as_named, exit_code
from app_agent.core.records import AppRecord
from launch.faults import Fault, usage
from protocol import exit_codes
from protocol.config import ConfigError
from protocol.messages import EventFilter, QueryKind

Until = streams.Until
#: The next step, by exit code, where the sentence does not say it already.
NEXT_STEPS = {
    exit_codes.NOT_FOUND: "gpu-arbiter ps -a",
    exit_codes.UNREACHABLE: "gpu-arbiter doctor",
    exit_codes.NOT_PERMITTED: "ask its owner, or an administrator of the site",
}
#: The same when the app agent cannot even be reached.
FIRST_STEPS = NEXT_STEPS | {exit_codes.NOT_PERMITTED: "set GPU_ARBITER_URL to your own daemon's socket"}


#: The key of each list's entries: an entry that comes or goes between two pages moves the others.
KEYS: dict[QueryKind, str] = {
    "apps": "id",
    "nodes": "id",
    "rounds": "round",
    "leases": "lease",
    "events": "id",
    "report": "id",
}


class Ending(Struct, frozen=True):
    """How an app ended: the exit code for `run` and `wait`, and a sentence unless all is well."""

    code: int
    sentence: str = ""


class Client(Control):
    """A conversation with the app agent's daemon at `path`; every method raises `Fault`."""

    def __init__(self, path: Path, *, timeout_s: float = TIMEOUT_S) -> None:
        with _faults(FIRST_STEPS):
            super().__init__(path, timeout_s=timeout_s)

    def query(
        self,
        kind: QueryKind,
        target: str = "",
        offset: int = 0,
        *,
        limit: int = 0,
        patience_s: float | None = None,
        events: EventFilter = ALL_EVENTS,
        edges: Sequence[float] = (),
    ) -> dict[str, Any]:
        """Return the arbiter's answer: of a list `limit` entries from `offset` on, or with 0 all entries.

        The call waits as long as the daemon is configured to, or `patience_s` seconds.
        """
        ask = partial(super().query, kind, target, patience_s=patience_s, events=events, edges=edges)
        document = ask(offset, limit=limit)
        return _all_pages(ask, kind, document, limit) if kind in KEYS else document

    def outlast(self, app: str, until: Until, timeout_s: float | None) -> AppRecord:
        """Return the record of an app once it is over, or runs; an app agent that starts again is waited for."""

        def ask(question: streams.Question) -> Any:
            with Control(self.path) as control:
                return question(control)

        record: AppRecord
        with _faults():
            (record,) = streams.talk(streams.reached(app, until, timeout_s), ask)
        return record

    def resolve(self, selector: str) -> str:
        """Return the id that `selector` means: itself, or the newest app for ``last``; ``ID_3`` is the job ``ID.3``."""
        selector = as_named(selector)
        whole, dot, part = selector.partition(".")
        if whole != "last":
            return selector
        apps = self.apps()
        if not apps:
            raise Fault(
                "you have submitted nothing yet",
                code=exit_codes.NOT_FOUND,
                next_step="gpu-arbiter submit -- python train.py",
            )
        return f"{apps[-1].app}{dot}{part}"

    def _ask(self, request: Request, *, timeout_s: float | None = -1.0) -> Mapping[str, Any]:
        with _faults():
            return super()._ask(request, timeout_s=timeout_s)


def open_client(path: Path | None = None, *, timeout_s: float = TIMEOUT_S) -> Client:
    """Return a client of the daemon at `path`, or at its usual socket. Use it as a context manager.

    It waits so long for each answer of the daemon, where the question does not say otherwise.

    Raises
    ------
    Fault
        Also from every method: the daemon's sentence, its exit code and the next step.
    """
    with _faults():
        path = path or default_socket()
    return Client(path, timeout_s=timeout_s)


@contextmanager
def _faults(next_steps: Mapping[int, str] = NEXT_STEPS) -> Iterator[None]:
    try:
        yield
    except ControlError as error:
        raise Fault(error.sentence, code=error.code, next_step=next_steps.get(error.code, "")) from None
    except ConfigError as error:
        raise usage(str(error)) from None


def _all_pages(ask: Callable[..., dict[str, Any]], kind: QueryKind, page: dict[str, Any], limit: int) -> dict[str, Any]:
    """Return the first page of a list with the entries of those after it, each entry once."""
    document, entries = page, dict[object, object]()
    while True:
        entries |= {entry[KEYS[kind]]: entry for entry in page[kind] if entry[KEYS[kind]] not in entries}
        following = page.get("next_offset")
        if following is None or not page[kind] or 0 < limit <= len(entries):
            break
        page = ask(following, limit=limit and limit - len(entries))
    newest = {"cursor": page["cursor"]} if "cursor" in page else {}
    return document | newest | {kind: list(entries.values()), "next_offset": following}


def ending(record: AppRecord) -> Ending:
    """Return how the app of `record` ended, or that it runs."""
    if record.state == "finished" or not record.over:
        told = record.over and record.reason
        return Ending(exit_codes.DONE, f"{record.app} finished: {record.reason}" if told else "")
    return Ending(exit_code(record), f"{record.app} {record.state}: {record.reason}".rstrip(": "))
