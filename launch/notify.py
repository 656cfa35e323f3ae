"""Tell systemd a daemon's state: ready, alive, stopping. Without systemd every call does nothing.

The protocol is one datagram to the Unix socket named by NOTIFY_SOCKET (sd_notify(3)); the watchdog's interval is in
WATCHDOG_USEC (sd_watchdog_enabled(3)).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping


def notify(state: str, environ: Mapping[str, str] | None = None) -> bool:
    """Send `state` (``READY=1``, ``WATCHDOG=1``, ``STOPPING=1``, ``STATUS=...``); return whether it was sent."""
    address = (os.environ if environ is None else environ).get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.connect(address)
            channel.sendall(state.encode())
    except OSError:  # a daemon must not die because no systemd listens
        return False
    return True


def watchdog_s(environ: Mapping[str, str] | None = None) -> float | None:
    """Return the watchdog's interval in seconds, or None when this process is not watched."""
    environ = os.environ if environ is None else environ
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    microseconds = environ.get("WATCHDOG_USEC", "")
    return int(microseconds) / 1e6 if microseconds.isdigit() and int(microseconds) > 0 else None


def feeder(environ: Mapping[str, str] | None = None, clock: Callable[[], float] = time.monotonic) -> Callable[[], None]:
    """Return the `on_alive` of a shell: the first call says ready, later ones feed the watchdog.

    The watchdog is fed at a quarter of its interval; systemd restarts a loop that stands still for the whole of it.
    """
    interval_s = watchdog_s(environ)
    fed_at: float | None = None

    def alive() -> None:
        nonlocal fed_at
        now = clock()
        if fed_at is None:
            notify("READY=1", environ)
        elif interval_s is None or now - fed_at < interval_s / 4:
            return
        fed_at = now
        if interval_s is not None:
            notify("WATCHDOG=1", environ)

    return alive
