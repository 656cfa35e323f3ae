"""A whole site on this host in one process, for a first try and for a single node."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import tempfile
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from app_agent.config import default_socket
from arbiter.config import HistoryMode
from arbiter.core.state.model import ArbiterSettings
from launch.client import open_client
from launch.faults import Fault
from launch.site.page import end_process, start_page
from launch.site.service import faults, serve
from launch.site.site import Site, Watch, daemons, local_site, memory_bus, user_folder, wait_ready
from launch.surface import note, plural
from protocol.messages import OwnerId
from protocol.private import state_folder

#: Of the site's only app agent.
OWNER = OwnerId("me")


class Options(Struct, frozen=True):
    """The options of `up`.

    `fresh`: with a state of its own that is removed at the end. `web`: with the web page, in a process of its own.
    """

    gpus: str | tuple[int | str, ...]
    nodes: int = 1
    state_dir: Path | None = None
    fresh: bool = False
    socket: Path | None = None
    settings: ArbiterSettings = ArbiterSettings()
    history: HistoryMode = "auto"
    adopt_site: bool = False
    web: bool = False


def run(options: Options) -> None:
    """Run the site until a signal says stop.

    Raises
    ------
    Fault
        If the site cannot start, with the sentence and the mend.
    """
    socket = options.socket or default_socket()
    _refuse_a_second(socket)
    with ExitStack() as stack:
        folder = _folder(options, stack)
        # On a site of one's own there is no other administrator.
        settings = replace(options.settings, admins=options.settings.admins or (OWNER,))
        site = local_site(
            folder,
            nodes=options.nodes,
            gpus=options.gpus,
            owner=OWNER,
            socket=socket,
            settings=settings,
            history="auto" if options.fresh else options.history,
            adopt_site=options.adopt_site,
        )
        bus = memory_bus()
        serve(
            lambda: daemons(site, bus, end_workers=options.fresh),
            started=lambda: _greet(site, stack, web=options.web),
            stopping=None if options.fresh else lambda: _farewell(site),
        )


def _refuse_a_second(socket: Path) -> None:
    """Refuse to start where a site is up already. The socket of one that was killed is silent.

    Raises
    ------
    Fault
        With the way to a second site.
    """
    try:
        with open_client(socket):
            pass
    except Fault:
        return
    other = f"GPU_ARBITER_URL=unix://{socket.with_name('second.sock')} gpu-arbiter up --state-dir FOLDER"
    raise Fault(
        f"a site is up already: its app agent answers at {socket}", next_step=f"use it, or have a second: {other}"
    )


def _folder(options: Options, stack: ExitStack) -> Path:
    """Return the folder of the state, made for this user only."""
    if options.fresh:
        folder = Path(tempfile.mkdtemp(prefix="gpu-arbiter-up-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder
    with faults():
        return state_folder(options.state_dir or user_folder("XDG_STATE_HOME", ".local/state") / "gpu-arbiter" / "up")


async def _greet(site: Site, stack: ExitStack, *, web: bool) -> None:
    """Tell the person the site's size and the next step, once all daemons answer."""
    gone = threading.Event()

    def check() -> None:
        if gone.is_set():  # a thread cannot be cancelled, so this event ends its wait
            raise Fault("a daemon has stopped")

    try:
        nodes = await asyncio.to_thread(_enrolled, site, check)
    finally:
        gone.set()
    gpus = sum(len(node["gpus"]) for node in nodes)
    policy = site.arbiter.arbiter.policy
    there = f"{plural(len(nodes), 'node')}, {plural(gpus, 'GPU')}, policy {policy}"
    note(f"gpu-arbiter is up: {there}, socket {site.socket}")
    ledger = Path(site.arbiter.state_dir) / "ledger.db"
    if web:
        stack.callback(end_process, start_page(site, ledger))  # it says where it is
    if site.socket != default_socket():
        note(f"in other terminals: export GPU_ARBITER_URL=unix://{site.socket}")
    if not web:
        note(f"in a browser: gpu-arbiter web --ledger {shlex.quote(str(ledger))}")
    note("next: gpu-arbiter submit -- python3 -c 'print(\"it works\")'   (Ctrl-C here stops it)")


def _enrolled(site: Site, check: Watch) -> list[dict[str, Any]]:
    wait_ready(site, check)
    with open_client(site.socket) as client:
        nodes: list[dict[str, Any]] = client.query("nodes")["nodes"]
    return nodes


async def _farewell(site: Site) -> None:
    """Say which tasks go on training."""
    with suppress(Fault):
        await asyncio.to_thread(_tell, site)


def _tell(site: Site) -> None:
    with open_client(site.socket) as client:
        tasks = [task for app in client.query("apps")["apps"] for task in app["tasks"] if task["phase"] != "exited"]
    if tasks:
        note(f"{plural(len(tasks), 'task')} left training; the next `gpu-arbiter up` adopts them, `cancel` ends them")
