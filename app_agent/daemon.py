"""An owner's app-agent daemon: the host core between journal, bus and control socket."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import structlog
from msgspec.structs import replace

from app_agent import control_server
from app_agent.config import AppConfig, default_socket
from app_agent.control_server import ControlServer
from app_agent.core.host import (
    AppHost,
    Configured,
    Event,
    OwnEffect,
    OwnEvent,
)
from protocol.bus import Bus
from protocol.clock import Anchor, Clock, ResumedClock
from protocol.core import Connected, Received, Send, Tick
from protocol.journal.sqlite import SqliteJournal
from protocol.messages import AppReport, OwnerId, Party
from protocol.private import state_folder
from protocol.release import release
from protocol.shell import Shell

#: Events between two snapshots: a restart replays at most these, about a second's work.
SNAPSHOT_EVERY = 5_000
#: Of ids: consonants, so that they make no words.
TAG_LETTERS = "bcdfghjkmnpqrstvwxz"
TAG_LENGTH = 3

_log = structlog.get_logger("app-agent")


async def run_app_host(
    config: AppConfig,
    bus: Bus,
    *,
    on_alive: Callable[[], None] | None = None,
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Host an owner's apps until cancelled. The state folder and the socket's folder are made if they are missing.

    Parameters
    ----------
    config, bus
        The apps to host, and the way to the arbiter.
    on_alive
        Called at least once a second, for a watchdog.
    on_ready
        Called once the control socket listens.

    Raises
    ------
    ConfigError
        If the control socket or the state folder cannot be made.
    JournalError
        If the state folder belongs to another process or cannot be read.
    """
    path = Path(config.socket) if config.socket else default_socket()
    with closing(open_journal(config)) as journal, control_server.listen(path) as listener:
        host, clock = restored(journal, config)
        control = ControlServer(host, config)
        shell: Shell[OwnEvent, OwnEffect] = Shell(
            DatedHost(host),
            bus,
            Party("app", config.owner),
            perform=control.perform,
            journal=journal,
            snapshot=host.snapshot,
            snapshot_every=SNAPSHOT_EVERY,
            clock=clock,
            shared_users=frozenset(config.shared_users),
            answer=control.take_answer,
            on_alive=on_alive,
        )
        control.attach(shell, bus)
        if config.shared_users:
            _log.warning("users.shared", users=config.shared_users, meaning="they may speak for every participant")

        try:
            await _run(shell, control, listener, config.owner, on_ready)
        finally:
            path.unlink(missing_ok=True)


class DatedHost:
    """The host core of an owner, with the time of this host's clock and the release of the program in its reports."""

    def __init__(self, host: AppHost) -> None:
        """Add them to what `host` says."""
        self._host = host
        self._release = release()
        self.deadline = host.deadline

    def handle(self, event: OwnEvent | Received | Tick | Connected, now: float) -> Sequence[OwnEffect | Send]:
        """Return the effects of the core."""
        return [self._dated(effect) for effect in self._host.handle(event, now)]

    def _dated(self, effect: OwnEffect | Send) -> OwnEffect | Send:
        if isinstance(effect, Send) and isinstance(effect.message, AppReport):
            return replace(effect, message=replace(effect.message, wall_s=time.time(), release=self._release))
        return effect


async def _run(
    shell: Shell[OwnEvent, OwnEffect],
    control: ControlServer,
    listener: socket.socket,
    owner: str,
    on_ready: Callable[[], None] | None,
) -> None:
    server: asyncio.Server | None = None
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(shell.run())
            group.create_task(control.introduce())
            server = await control_server.serve(listener, lambda _: control, group)
            _log.info("control.listening", socket=listener.getsockname(), owner=owner)
            if on_ready is not None:
                on_ready()
    finally:
        if server is not None:
            server.close()


def open_journal(config: AppConfig) -> SqliteJournal[Event]:
    """Return the journal of an owner's apps; raises `ConfigError` or `JournalError`."""
    path = state_folder(Path(config.state_dir)) / f"app-{config.owner}.db"
    return SqliteJournal.of(path, Event, program=release())


def restored(journal: SqliteJournal[Event], config: AppConfig) -> tuple[AppHost, Clock]:
    """Return the host as its journal tells, with the settings of today, and its clock."""
    loaded = journal.load()
    host = AppHost.restore(loaded.snapshot) if loaded.snapshot is not None else AppHost(OwnerId(config.owner))
    replayed = 0
    for _seq, now, event in loaded.events:
        host.handle(event, now)
        replayed += 1
    host.validate()
    configured = Configured(config.tenant or config.owner, config.beat_s, _tag(journal))
    clock = _clock(journal)
    now = clock()
    journal.append(now, configured)
    journal.commit()
    host.handle(configured, now)
    _log.info("journal.replayed", events=replayed, apps=len(host.state.apps))
    return host, clock


def _clock(journal: SqliteJournal[Event]) -> Clock:
    """Return the clock that the last start in this boot of the host has left, whatever the wall clock shows by now."""
    written = journal.get("clock")
    clock = ResumedClock(journal.last_now, msgspec.json.decode(written, type=Anchor) if written else None)
    journal.set("clock", msgspec.json.encode(clock.anchor).decode())
    return clock


def _tag(journal: SqliteJournal[Event]) -> str:
    """Return the letters that the ids of this journal's apps have: should it be lost, the next one has others."""
    tag = journal.get("tag")
    if tag is None:
        tag = "".join(secrets.choice(TAG_LETTERS) for _ in range(TAG_LENGTH))
        journal.set("tag", tag)
    return tag
