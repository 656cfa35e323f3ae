"""Serve the pages from this process, until a signal ends it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import uvicorn

from arbiter.ledger import Ledger
from launch.faults import Fault
from launch.web.server import AsgiApp, make_app
from launch.web.sources import Sources
from protocol.journal import JournalError

#: Requests at a time; others are told to come again.
REQUESTS_MAX = 64


def serve_pages(
    ledger: Path | str, *, host: str, port: int, token: str, shown: str, traces: str, told: Callable[[str], None]
) -> None:
    """Listen, tell the address by `told`, and answer until SIGINT or SIGTERM; with `traces`, send them there meanwhile.

    The address has the token in it, unless there is something else to be `shown` behind it.

    Raises
    ------
    Fault
        If the ledger cannot be read, or the address is taken.
    """
    try:
        Ledger.reader(ledger).close()
    except JournalError as error:
        raise Fault(str(error), next_step="gpu-arbiter web --ledger FILE") from None
    listening = _listening(host, port)
    name = f"[{host}]" if ":" in host else host
    told(f"the site is at http://{name}:{listening.getsockname()[1]}/{shown or (token and f'?token={token}')}")
    sources = Sources(ledger)
    with _sending(traces, sources):
        uvicorn.Server(settings_of(make_app(sources, token=token))).run(sockets=[listening])


def settings_of(app: AsgiApp) -> uvicorn.Config:
    """Return how the application is served."""
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # what a proxy says of a request, `Guard` reads by itself
        limit_concurrency=REQUESTS_MAX,
        timeout_graceful_shutdown=3,
    )


def _sending(address: str, sources: Sources) -> AbstractContextManager[None]:
    """Send traces to an address, if there is one: only that needs the libraries of the extra `otel`."""
    if not address:
        return nullcontext()
    from launch.web.traces import told_to

    return told_to(address, sources)


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family, backlog=128)
    except OSError as error:
        raise Fault(
            f"cannot listen on {host} port {port}: {error.strerror or error}", next_step="gpu-arbiter web --port 0"
        ) from None
