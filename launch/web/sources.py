"""Where the pages read: the ledger, read-only, and the arbiter, by the questions of an app agent's user."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from arbiter.discretion import told_to
from arbiter.ledger import Ledger
from launch import overview
from launch.client import open_client
from launch.faults import Fault

#: How long a page waits for the arbiter.
PATIENCE_S = 10.0
#: One look at the present serves all browsers for so long: many ask the arbiter no more than one does.
FRESH_S = 1.0


class Sources:
    """The ledger in a file or at an address, and the app agent's daemon at `socket` (None: the usual one).

    Any thread may ask.
    """

    def __init__(self, ledger: Path | str, socket: Path | None = None) -> None:
        self.place, self._socket = ledger, socket
        self._looking = threading.Lock()
        self._seen: tuple[float, dict[str, Any]] | None = None

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

    def ask(self, *question: Any, **more: Any) -> dict[str, Any]:
        """Return the arbiter's answer (`launch.client.Client.query`) without what tasks have printed.

        The arbiter tells this process what the user may see for whom it asks, and its readers may be anybody.

        Raises
        ------
        Fault
            If the arbiter does not answer, or says no.
        """
        document: dict[str, Any] = told_to("", self._answer(*question, **more))
        return document

    def _answer(self, *question: Any, **more: Any) -> dict[str, Any]:
        with open_client(self._socket) as client:
            return client.query(*question, patience_s=PATIENCE_S, **more)

    def present(self) -> dict[str, Any]:
        """Return GPUs, apps, tenants and the newest round as they are now (``top/v1``), or were a second ago.

        Raises
        ------
        Fault
            If the arbiter does not answer.
        """
        with self._looking:
            if self._seen is None or time.monotonic() > self._seen[0] + FRESH_S:
                self._seen = time.monotonic(), overview.gather(self.ask, time.time())
            return self._seen[1]

    def tried(self, look: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, str]:
        """Return an answer; or None, and a sentence on why the arbiter gives none."""
        try:
            return look(), ""
        except Fault as fault:
            return None, f"{fault.sentence}. This page shows the ledger."
