"""The web page beside a site on this host, in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from launch.site.site import PROGRAM, Site
from launch.web import PORT

#: From SIGTERM to SIGKILL.
END_S = 5.0


def start_page(site: Site, ledger: Path) -> subprocess.Popen[bytes]:
    """Start the page, which says on stderr where it is: at the usual port, or at one that is free."""
    command = [sys.executable, str(PROGRAM), "web", "--port", str(_free_port()), "--ledger", str(ledger)]
    environment = {**os.environ, "GPU_ARBITER_URL": f"unix://{site.socket}"}
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _free_port() -> int:
    with suppress(OSError), socket.create_server(("127.0.0.1", PORT)):
        return PORT
    return 0


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process, and wait for its end."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
