"""A gateway's hand: keys of tests, and orders that bear a signature; and connections of its users."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from msgspec.structs import replace

from protocol import warrants
from protocol.messages import TaskOrder, Warrant

GATEWAY = "login1"


class Hand:
    """The key of a gateway in a folder, and what it signs."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "gateway.key"
        warrants.make_key(self.file)
        self.key = warrants.private_key(self.file)
        self.public = warrants.public_file(self.file)

    def sign(self, order: TaskOrder, user: str, uid: int, gids: tuple[int, ...] = (), age_s: float = 0.0) -> TaskOrder:
        """`order` with the signature of this gateway for a user, made `age_s` ago."""
        assert order.launch is not None
        warrant = Warrant(GATEWAY, user, uid, gids or (uid,), order.gpus, int(time.time() - age_s))
        names = {"app": order.app, "job": order.job, "attempt": order.attempt}
        return replace(order, launch=warrants.signed(order.launch, warrant, self.key, **names))


def connected_as(uid: int, path: Path) -> socket.socket:
    """A connection that the kernel notes as another user's: that of a child process, which hands it over.

    Raises
    ------
    ConnectionError
        If that user cannot connect.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            child = os.fork()
            if child == 0:
                try:
                    os.setuid(uid)
                    connection = socket.socket(socket.AF_UNIX)
                    connection.connect(str(path))
                    socket.send_fds(theirs, [b"."], [connection.fileno()])
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if not descriptors:
        raise ConnectionRefusedError(f"user {uid} cannot connect to {path}")
    return socket.socket(fileno=descriptors[0])
