"""The command line's side of the control socket, with the errors of the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from app_agent.config import default_socket
from app_agent.control import Control, ControlError, exit_code
from app_agent.core.records import AppRecord
from app_agent.core.spec import AppSpec
from launch.faults import Fault, usage
from protocol import exit_codes
from protocol.config import ConfigError
from protocol.messages import ActKind, QueryKind

Until = Literal["done", "running"]
#: The next step, by exit code, where the sentence does not say it already.
NEXT_STEPS = {
    exit_codes.NOT_FOUND: "gpu-arbiter ps -a",
    exit_codes.UNREACHABLE: "gpu-arbiter doctor",
    exit_codes.NOT_PERMITTED: "ask its owner, or an administrator of the site",
}
#: The same when the app agent cannot even be reached.
FIRST_STEPS = NEXT_STEPS | {exit_codes.NOT_PERMITTED: "set GPU_ARBITER_URL to your own daemon's socket"}


#: The key of each list's entries: an entry that comes or goes between two pages moves the others.
KEYS: dict[QueryKind, str] = {"apps": "id", "nodes": "id", "rounds": "round", "leases": "lease"}


class Ending(Struct, frozen=True):
    """How an app ended: the exit code for `run` and `wait`, and a sentence unless all is well."""

    code: int
    sentence: str = ""


class Client:
    """A conversation with the app agent's daemon."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self.address = control.path

    def submit(self, spec: AppSpec) -> str:
        """Queue an app and return its id."""
        with _faults():
            return self._control.submit(spec)

    def cancel(self, app: str) -> str:
        """End an app for good, also one that only the arbiter knows; return its state after that."""
        with _faults():
            return self._control.cancel(app)[1]

    def act(self, kind: ActKind, app: str) -> str:
        """Have the arbiter act on an app; return the word for its state after that, such as ``held``."""
        with _faults():
            return self._control.act(kind, app)[1]

    def wait(self, app: str, *, until: Until, timeout_s: float | None) -> AppRecord:
        """Return the app's record once it is over, or runs."""
        with _faults():
            return self._control.wait(app, until=until, timeout_s=timeout_s)

    def query(
        self, kind: QueryKind, target: str = "", offset: int = 0, *, limit: int = 0, patience_s: float | None = None
    ) -> dict[str, Any]:
        """Return the arbiter's answer: of a list `limit` entries from `offset` on, or with 0 all entries.

        The call waits as long as the daemon is configured to, or `patience_s` seconds.
        """
        with _faults():
            document = self._control.query(kind, target, offset, limit=limit, patience_s=patience_s)
            return self._all_pages(kind, target, document, limit) if kind in KEYS else document

    def _all_pages(self, kind: QueryKind, target: str, page: dict[str, Any], limit: int) -> dict[str, Any]:
        """Return the first page of a list with the entries of those after it, each entry once."""
        document, entries = page, dict[object, object]()
        while True:
            entries |= {entry[KEYS[kind]]: entry for entry in page[kind] if entry[KEYS[kind]] not in entries}
            following = page.get("next_offset")
            if following is None or not page[kind] or 0 < limit <= len(entries):
                break
            page = self._control.query(kind, target, following, limit=limit and limit - len(entries))
        return document | {kind: list(entries.values()), "next_offset": following}

    def apps(self) -> list[AppRecord]:
        """Return the owner's apps, oldest first."""
        with _faults():
            return self._control.apps()

    def ping(self) -> dict[str, Any]:
        """Return the daemon's own description: ``{"owner", "tenant", "connected", "reached", "bus"}``."""
        with _faults():
            return self._control.ping()

    def resolve(self, selector: str) -> str:
        """Return the id that `selector` means: itself, or the newest app for ``last``."""
        if selector != "last":
            return selector
        apps = self.apps()
        if not apps:
            raise Fault(
                "you have submitted nothing yet",
                code=exit_codes.NOT_FOUND,
                next_step="gpu-arbiter submit -- python train.py",
            )
        return apps[-1].app


@contextmanager
def open_client(path: Path | None = None) -> Iterator[Client]:
    """Talk to the daemon at `path`, or at its usual socket.

    Raises
    ------
    Fault
        Here and from every call inside: the daemon's sentence, its exit code and the next step.
    """
    with _faults(FIRST_STEPS):
        control = Control(path or default_socket())
    with control:
        yield Client(control)


@contextmanager
def _faults(next_steps: Mapping[int, str] = NEXT_STEPS) -> Iterator[None]:
    try:
        yield
    except ControlError as error:
        raise Fault(error.sentence, code=error.code, next_step=next_steps.get(error.code, "")) from None
    except ConfigError as error:
        raise usage(str(error)) from None


def ending(record: AppRecord) -> Ending:
    """Return how the app of `record` ended, or that it runs."""
    if record.state == "finished" or not record.over:
        told = record.over and record.reason
        return Ending(exit_codes.DONE, f"{record.app} finished: {record.reason}" if told else "")
    return Ending(exit_code(record), f"{record.app} {record.state}: {record.reason}".rstrip(": "))
