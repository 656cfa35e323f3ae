"""Where the pages read: the ledger, read-only, and the arbiter, by the questions of an app agent's user."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from arbiter.discretion import told_to
from arbiter.ledger import Ledger
from launch import overview
from launch.client import open_client
from launch.faults import Fault
from protocol.exit_codes import UNREACHABLE
from protocol.journal import JournalError
from protocol.messages import QueryKind

#: How long a page waits for the arbiter.
PATIENCE_S = 10.0
#: How long a program does that watches over the site. Prometheus by itself gives up after 10 s, and would not learn
#: then that it is the arbiter that is away.
WATCH_S = 3.0
#: What a daemon needs to say that it had no answer, at most.
GRACE_S = 1.0
#: One look at the present, also one in vain, serves all browsers for so long: many ask no more than one does.
FRESH_S = 1.0


class _Look(Struct, frozen=True):
    """What a look at the present has found, until when it serves, and when it ended, by the monotonic clock."""

    found: dict[str, Any] | Fault
    until: float
    ended: float


class Sources:
    """The ledger in a file or at an address, and the app agent's daemon at `socket` (None: the usual one).

    Any thread may ask.
    """

    def __init__(self, ledger: Path | str, socket: Path | None = None) -> None:
        self.place, self._socket = ledger, socket
        self._looking = threading.Lock()
        self._seen: _Look | None = None
        self._compared_until = 0.0  #: the sites of arbiter and ledger, by the monotonic clock

    @contextmanager
    def ledger(self) -> Iterator[Ledger]:
        """Open the ledger, to read only.

        Raises
        ------
        JournalError
            If it cannot be read; the message names the mend.
        """
        with closing(Ledger.reader(self.place)) as ledger:
            yield ledger

    def ask(self, kind: QueryKind, target: str = "", *, patience_s: float = PATIENCE_S, **more: Any) -> dict[str, Any]:
        """Return the arbiter's answer (`launch.client.Client.query`) without what tasks have printed.

        The arbiter tells this process what the user may see for whom it asks, and its readers may be any users. It must
        be the one that writes the ledger: a page of two sites would be a lie.

        Raises
        ------
        Fault
            If the arbiter does not answer, says no, or is of another site than the ledger.
        """
        if kind != "rounds" and time.monotonic() > self._compared_until:
            self.ask("rounds", limit=1, patience_s=patience_s)  # whose answer names the site
        document: dict[str, Any] = told_to("", self._answer(kind, target, patience_s=patience_s, **more))
        if kind == "rounds":
            self._compare(document.get("site", ""))  # an arbiter before this version names none
        return document

    def _compare(self, site: str) -> None:
        """Refuse the answer of an arbiter of another site than the ledger's, as far as both are known."""
        with suppress(JournalError), self.ledger() as ledger:  # a page that needs the ledger says so
            known = ledger.sites()
            if site and known and site not in known:
                raise Fault(
                    f"the arbiter that answers is of site {site}, and the ledger of site {' and '.join(sorted(known))}",
                    code=UNREACHABLE,
                    next_step="set GPU_ARBITER_URL to the socket of an app agent of the ledger's site",
                )
        self._compared_until = time.monotonic() + FRESH_S

    def _answer(self, *question: Any, patience_s: float, **more: Any) -> dict[str, Any]:
        with open_client(self._socket, timeout_s=patience_s + GRACE_S) as client:
            return client.query(*question, patience_s=patience_s, **more)

    def present(self, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """Return GPUs, apps, tenants and the newest round as they are now (``top/v1``), or were a second ago.

        Raises
        ------
        Fault
            If the arbiter does not answer within that time, or did not a second ago.
        """
        came = time.monotonic()
        if not self._looking.acquire(timeout=patience_s):  # another asks it, who is more patient
            raise Fault(f"the arbiter has not answered for {patience_s:g} s", code=UNREACHABLE)
        try:
            if self._seen is None or (self._seen.ended < came and self._seen.until < time.monotonic()):
                self._seen = self._look(came + patience_s)
            found = self._seen.found
        finally:
            self._looking.release()
        if isinstance(found, Fault):
            raise Fault(found.sentence, code=found.code, next_step=found.next_step)
        return found

    def _look(self, deadline: float) -> _Look:
        """Ask for the present until a time of the monotonic clock."""

        def ask(kind: QueryKind, target: str = "", *, limit: int = 0) -> dict[str, Any]:
            left_s = max(0.0, deadline - time.monotonic())
            return self.ask(kind, target, limit=limit, patience_s=left_s)

        began = time.monotonic()
        try:
            found = overview.gather(ask, time.time())
        except Fault as fault:
            ended = time.monotonic()
            return _Look(fault, ended + FRESH_S, ended)
        return _Look(found, began + FRESH_S, time.monotonic())

    def tried(self, look: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, str]:
        """Return an answer; or None, and a sentence on why the arbiter gives none."""
        try:
            return look(), ""
        except Fault as fault:
            return None, f"{fault.sentence}. This page shows the ledger."
