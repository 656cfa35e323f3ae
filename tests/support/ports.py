"""Ports for servers that a test starts later: no two tests get the same one, and no outgoing connection takes it.

A port that the kernel chooses is from the range of outgoing connections. One of another test can take it before the
server listens, or while the server is stopped. These ports lie below that range, and a file counts them for all
processes of this host.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

PORTS = range(10_000, 32_768)  #: outgoing connections have those from 32768 on, unless an admin says otherwise
_COUNTER = Path(tempfile.gettempdir()) / f"gpu-arbiter-test-ports-{os.getuid()}"


def free_port() -> int:
    """Return a port on which no server listens now, and which no other test has got lately."""
    with _COUNTER.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        first = PORTS.index(int(file.read() or PORTS[-1])) + 1
        port = next(filter(_is_free, (*PORTS[first:], *PORTS[:first])))
        file.truncate(0)
        file.write(str(port))
        return port


def _is_free(port: int) -> bool:
    with suppress(OSError), socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        return True
    return False
