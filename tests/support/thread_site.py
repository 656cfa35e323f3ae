"""A whole site with real processes on a thread of its own, whose app agent can be stopped and started again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from app_agent.daemon import run_app_host
from arbiter.core.state.model import ArbiterSettings
from arbiter.daemon import run_arbiter
from launch.client import open_client
from launch.site.site import START_S, end_everything, local_site, wait_ready
from node_agent.daemon import run_node_agent
from protocol.bus.memory import MemoryBroker, MemoryBus

SETTINGS = ArbiterSettings(policy="fifo", round_pause_s=0.1, beat_s=0.2, admission_wait_s=1.0)


class ThreadSite:
    """One node with two simulated GPUs under `fifo`; its node agent has `node_fields` in its configuration."""

    def __init__(self, folder: Path, *, ends_workers: bool = True, **node_fields: object) -> None:
        self.site = local_site(folder, nodes=1, gpus="simulated:2", settings=SETTINGS)
        self.node = replace(self.site.nodes[0], **node_fields)
        self._ends_workers = ends_workers
        self.socket = self.site.socket
        self._bus = MemoryBus(MemoryBroker())
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="site", daemon=True)
        self._runs = threading.Event()

    async def _run(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self._runs.set()
        await self._stopping.wait()

    def start(self) -> None:
        self._thread.start()
        self._runs.wait()
        self.start_arbiter()
        self.start_node()
        self.start_app_agent()
        wait_ready(self.site, lambda: None)

    def start_node(self) -> None:
        self._begin("node", lambda: run_node_agent(self.node, self._bus, end_workers=self._ends_workers))

    def stop_node(self) -> None:
        self._end("node")

    def start_arbiter(self) -> None:
        self._begin("arbiter", lambda: run_arbiter(self.site.arbiter, self._bus))

    def stop_arbiter(self) -> None:
        self._end("arbiter")

    def start_app_agent(self) -> None:
        """Return when it listens."""
        ready = threading.Event()
        self._begin("app", lambda: run_app_host(self.site.app, self._bus, on_ready=ready.set))
        assert ready.wait(START_S)

    def stop_app_agent(self) -> None:
        self._end("app")

    def start_owner(self, owner: str, folder: Path) -> Path:
        """Start the app agent of one owner more, with its state in a folder; return its socket once it listens."""
        ready, socket = threading.Event(), folder / "control.sock"
        app = replace(self.site.app, owner=owner, state_dir=str(folder), socket=str(socket))
        self._begin(owner, lambda: run_app_host(app, self._bus, on_ready=ready.set))
        assert ready.wait(START_S)
        return socket

    def stop(self) -> None:
        with open_client(self.socket) as client:
            end_everything(client)
        for name in list(self._tasks):
            self._end(name)
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _begin(self, name: str, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def begin() -> asyncio.Task[None]:
            return asyncio.get_running_loop().create_task(make())

        self._tasks[name] = asyncio.run_coroutine_threadsafe(begin(), self._loop).result()

    def _end(self, name: str) -> None:
        async def end(task: asyncio.Task[None]) -> None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        asyncio.run_coroutine_threadsafe(end(self._tasks.pop(name)), self._loop).result()


def until(reached: Callable[[], bool], patience_s: float = 60.0) -> None:
    """Return once something is so."""
    deadline = time.monotonic() + patience_s
    while not reached():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


@contextmanager
def thread_site(folder: Path) -> Iterator[ThreadSite]:
    site = ThreadSite(folder)
    site.start()
    try:
        yield site
    finally:
        site.stop()
