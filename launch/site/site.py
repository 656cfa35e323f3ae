"""A whole site on this host: arbiter, nodes and app agent, in this process or each in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

import app_agent
from app_agent.config import AppConfig
from app_agent.daemon import run_app_host
from app_agent.streams import OVER
from arbiter.config import ArbiterConfig, HistoryMode, written
from arbiter.core.state.model import ArbiterSettings
from arbiter.daemon import run_arbiter
from launch.client import Client, open_client
from launch.faults import Fault
from launch.site.service import Daemon, root_cause
from node_agent.config import NodeConfig
from node_agent.daemon import run_node_agent
from protocol.bus import Bus
from protocol.bus.memory import MemoryBroker, MemoryBus

#: From the start of the daemons to the enrolment of every node; a loaded laptop needs a few seconds.
START_S = 30.0
#: From the cancellation of all apps to the end of their processes: a save, then the rungs up to SIGKILL.
EMPTY_S = 30.0
POLL_S = 0.1
#: The command line as a file; it lies beside our packages.
PROGRAM = Path(app_agent.__file__).resolve().parents[1] / "gpu_arbiter.py"

Watch = Callable[[], None]


class Site(Struct, frozen=True):
    """The configuration of every daemon of a site."""

    arbiter: ArbiterConfig
    nodes: tuple[NodeConfig, ...]
    app: AppConfig

    @property
    def socket(self) -> Path:
        """The socket on which the app agent listens."""
        return Path(self.app.socket)


def local_site(
    folder: Path,
    *,
    nodes: int,
    gpus: str | tuple[int | str, ...],
    owner: str = "me",
    socket: Path | None = None,
    settings: ArbiterSettings | None = None,
    history: HistoryMode = "auto",
    adopt_site: bool = False,
) -> Site:
    """Return a site with all its state under `folder`; each node has the same `gpus` (``simulated:4``, ``nvml``)."""
    settings = settings or ArbiterSettings()
    beat_s = settings.beat_s
    return Site(
        arbiter=ArbiterConfig(
            state_dir=str(folder / "arbiter"), arbiter=settings, history=history, adopt_site=adopt_site
        ),
        nodes=tuple(
            NodeConfig(
                node=f"n{number}",
                gpus=gpus,
                address="127.0.0.1",
                state_dir=str(folder / f"node-n{number}"),
                bootstrap_dir=str(bootstrap_dir()),
                terminals="127.0.0.1:0",
                beat_s=beat_s,
                sample_s=min(1.0, beat_s),
            )
            for number in range(1, nodes + 1)
        ),
        app=AppConfig(
            owner=owner,
            tenant="default",
            state_dir=str(folder / "app"),
            socket=str(socket or folder / "control.sock"),
            beat_s=beat_s,
        ),
    )


def daemons(site: Site, bus: Bus, *, end_workers: bool) -> Sequence[Daemon]:
    """Return all daemons of the site on one bus; `end_workers`: no training outlives the site."""
    return (
        run_arbiter(site.arbiter, bus),
        *(run_node_agent(node, bus, end_workers=end_workers) for node in site.nodes),
        run_app_host(site.app, bus),
    )


def bootstrap_dir() -> Path:
    """Return the folder on the workers' PYTHONPATH that instruments unchanged scripts."""
    return Path(app_agent.__file__).resolve().parent / "training" / "bootstrap"


def memory_bus() -> Bus:
    """Return a bus within this process."""
    return MemoryBus(MemoryBroker())


# --- in this process ------------------------------------------------------------------------------------------------


@contextmanager
def in_process(site: Site, bus: Bus) -> Iterator[Watch]:
    """Run the site on a thread of its own; the yielded function raises if it has failed."""
    thread = _Background(lambda: daemons(site, bus, end_workers=True))
    thread.start()
    try:
        yield thread.check
    finally:
        thread.stop()


class _Background:
    """An event loop on a thread, with its daemons."""

    def __init__(self, make: Callable[[], Sequence[Daemon]]) -> None:
        self._make = make
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="site", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a daemon that failed."""
        if self._failure is not None:
            raise Fault(f"a daemon stopped: {root_cause(self._failure)}") from self._failure

    def stop(self) -> None:
        """End all daemons and the loop."""
        with suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._work())
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for it, by `check`
                self._failure = error

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(daemon) for daemon in self._make()]
            await self._stopping.wait()
            for task in tasks:
                task.cancel()


# --- in processes of their own --------------------------------------------------------------------------------------


@contextmanager
def as_processes(site: Site, folder: Path, logs: Path) -> Iterator[Watch]:
    """Run each daemon as a process, with its configuration in `folder` and its log in `logs`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    logs.mkdir(parents=True, exist_ok=True)
    running: list[_Process] = []
    try:
        running += [_Process(*entry, folder, logs) for entry in _entries(site)]
        yield lambda: _check(running)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def _entries(site: Site) -> Iterator[tuple[str, str, Struct]]:
    yield "arbiter", "arbiter", site.arbiter
    for node in site.nodes:
        yield "node-agent", f"node-{node.node}", node
    yield "app-agent", f"app-{site.app.owner}", site.app


def _check(running: Sequence[_Process]) -> None:
    for process in running:
        process.check()


class _Process:
    """One daemon."""

    def __init__(self, verb: str, name: str, config: Struct, folder: Path, logs: Path) -> None:
        self._name = name
        self._log = logs / f"{name}.jsonl"
        path = folder / f"{name}.toml"
        path.touch(mode=0o600)  # it holds the broker's password
        path.write_text(as_toml(config))
        # By its path and with -P: modules of the same name in the current folder are not ours.
        command = [sys.executable, "-P", str(PROGRAM), verb, "--config", str(path)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def check(self) -> None:
        """Raise if it has ended."""
        if self._process.poll() is not None:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            raise Fault(
                f"{self._name} stopped: {lines[-1] if lines else 'it said nothing'}", next_step=f"cat {self._log}"
            )

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def on_broker(site: Site, url: str, *, user: str, prefix: str) -> Site:
    """Return `site` on the broker at `url`, where all daemons are `user` and all names begin with `prefix`."""
    common: dict[str, Any] = {"bus": url, "prefix": prefix, "shared_users": (user,)}
    return Site(
        arbiter=replace(site.arbiter, **common),
        nodes=tuple(replace(node, **common) for node in site.nodes),
        app=replace(site.app, **common),
    )


def as_toml(config: Struct) -> str:
    """Return the file from which a daemon reads this configuration."""
    return toml(written(config) if isinstance(config, ArbiterConfig) else msgspec.to_builtins(config))


def toml(fields: Mapping[str, Any]) -> str:
    """Return `fields` as TOML: values first, then one table per nested mapping, also of those in lists."""
    return "\n".join(_toml_lines(fields, "")) + "\n"


def _toml_lines(fields: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, value in fields.items():
        if not isinstance(value, Mapping) and value is not None and not _are_tables(value):
            yield f"{name} = {json.dumps(value)}"  # JSON's strings, numbers and lists are TOML's
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield f"[{path}{name}]"
            yield from _toml_lines(value, f"{path}{name}.")
        for each in value if _are_tables(value) else ():
            yield f"[[{path}{name}]]"
            yield from _toml_lines(each, f"{path}{name}.")


def _are_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, Mapping) for each in value)


# --- waiting --------------------------------------------------------------------------------------------------------


def wait_ready(site: Site, check: Watch, *, timeout_s: float = START_S) -> None:
    """Return when the app agent answers and every node has enrolled.

    Raises
    ------
    Fault
        If a daemon stops, or time is over.
    """
    deadline = time.monotonic() + timeout_s
    missing = "the app agent does not answer"
    while time.monotonic() < deadline:
        check()
        with suppress(Fault), open_client(site.socket) as client:
            seen = sum(bool(node["gpus"]) for node in client.query("nodes")["nodes"])
            if seen >= len(site.nodes):
                return
            missing = f"{seen} of {len(site.nodes)} nodes have enrolled"
        time.sleep(POLL_S)
    raise Fault(f"the site is not ready after {timeout_s:g} s: {missing}", next_step="gpu-arbiter doctor")


def end_everything(client: Client) -> None:
    """Cancel every app and wait until no training process is left, so that none outlives its site."""
    for app in client.query("apps")["apps"]:
        if app["state"] not in OVER:
            with suppress(Fault):
                client.cancel(str(app["id"]))
    deadline = time.monotonic() + EMPTY_S
    while time.monotonic() < deadline and _tasks_left(client):
        time.sleep(POLL_S)


def _tasks_left(client: Client) -> int:
    """Return the number of tasks that may still have a process."""
    return sum(task["phase"] != "exited" for app in client.query("apps")["apps"] for task in app["tasks"])


def user_folder(variable: str, fallback: str) -> Path:
    """Return one of this user's XDG folders."""
    return Path(os.environ.get(variable) or Path.home() / fallback)
