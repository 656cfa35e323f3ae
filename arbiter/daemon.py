"""The arbiter's daemon: the core between journal, bus, ledger and desk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import assert_never

import structlog

from arbiter.config import ArbiterConfig, HistoryMode, check
from arbiter.core.arbiter import Arbiter, Configured, Effect, Event, MissingHistory
from arbiter.core.turn import AppRecord, Decide, Decided, LeaseRecord, Note, RoundRecord
from arbiter.desk import Desk
from arbiter.ledger import Ledger
from arbiter.solver import Solver
from protocol.bus import Bus
from protocol.config import ConfigError
from protocol.core import Send
from protocol.journal import Journal
from protocol.messages import ARBITER, AnyMessage, LogChunk, Party, Query
from protocol.shell import Shell

#: Events between two snapshots: a restart replays at most these, about a second's work.
SNAPSHOT_EVERY = 5_000

Performed = Decide | RoundRecord | LeaseRecord | AppRecord | Note

_log = structlog.get_logger("arbiter")


async def run_arbiter(config: ArbiterConfig, bus: Bus, *, on_alive: Callable[[], None] | None = None) -> None:
    """Run the arbiter until cancelled. The state folder is made if it is missing.

    Raises
    ------
    ConfigError
        If the settings cannot work, or the history of GPU time that there should be is not there.
    JournalError
        If the state folder belongs to another process or cannot be read.
    """
    check(config, "configuration")
    folder = _state_folder(config)
    with (
        closing(_journal(folder)) as journal,
        closing(Ledger(folder / "ledger.db")) as ledger,
    ):
        arbiter = _restore(journal, ledger, config.history)
        _configure(arbiter, journal, config)
        desk = Desk(arbiter, ledger)
        solver = Solver()

        async def perform(effect: Performed) -> None:
            if isinstance(effect, Decide):
                solver.ask(effect)
            else:
                _perform(effect, ledger)

        def answer(sender: Party, message: AnyMessage) -> Sequence[Send] | None:
            match message:
                case Query():
                    return desk.ask(sender, message, shell.now())
                case LogChunk():
                    return desk.deliver(sender, message)
                case _:
                    return None

        shell: Shell[Configured | Decided, Performed] = Shell(
            arbiter,
            bus,
            ARBITER,
            perform=perform,
            journal=journal,
            snapshot=arbiter.snapshot,
            snapshot_every=SNAPSHOT_EVERY,
            shared_users=frozenset(config.shared_users),
            answer=answer,
            on_alive=on_alive,
        )
        if config.shared_users:
            _log.warning("users.shared", users=config.shared_users, meaning="they may speak for anyone")
        await _run(shell, solver)


async def _run(shell: Shell[Configured | Decided, Performed], solver: Solver) -> None:
    """Run both until the shell ends; an error in either ends both."""
    try:
        async with asyncio.TaskGroup() as group:
            solving = group.create_task(solver.run(shell.post))
            await shell.run()
            solving.cancel()
    except BaseExceptionGroup as errors:
        # One cause reads better as itself, and the command line tells a full disk from a bug.
        if len(errors.exceptions) == 1:
            raise errors.exceptions[0] from None
        raise


def _state_folder(config: ArbiterConfig) -> Path:
    folder = Path(config.state_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"state_dir {folder} cannot be made: {error.strerror}; give a folder this user owns"
        ) from error
    return folder


def _journal(folder: Path) -> Journal[Event]:
    return Journal.of(folder / "journal.db", Event)


def _restore(journal: Journal[Event], ledger: Ledger, history: HistoryMode = "auto") -> Arbiter:
    """Return the arbiter as the journal tells; what it recorded last is recorded again, should it have been missed.

    Raises
    ------
    ConfigError
        If there should be a history of GPU time and there is none: everybody's would silently begin at nothing.
    """
    mend = 'bring the state folder back, or set history = "begin" for one start, if it is to begin at nothing'
    if history != "begin" and journal.last_seq == 0 and (history == "resume" or ledger.used()):
        why = "is to be resumed" if history == "resume" else "is told of by ledger.db"
        raise ConfigError(f"{journal.path} is empty, but a history of GPU time {why}; {mend}")
    if journal.last_seq == 0:
        # Nodes and app agents may remember an arbiter whose journal was lost, and obey no epoch before its last.
        journal.next_epoch(int(time.time()))
    loaded = journal.load()
    try:
        begin = history == "begin"
        arbiter = Arbiter() if loaded.snapshot is None else Arbiter.restored(loaded.snapshot, begin_history=begin)
    except MissingHistory as error:
        raise ConfigError(f"{journal.path}: {error}; {mend}") from error
    count = 0
    for _seq, now, event in loaded.events:
        for effect in arbiter.handle(event, now):
            if isinstance(effect, RoundRecord | LeaseRecord | AppRecord):
                ledger.write(effect)
        count += 1
    arbiter.validate()
    _log.info("journal.replayed", events=count, apps=len(arbiter.state.apps), round=arbiter.state.round)
    return arbiter


def _configure(arbiter: Arbiter, journal: Journal[Event], config: ArbiterConfig) -> None:
    """Take the settings into the state, at the time of the last event: until we lead, no time has passed for us."""
    event = Configured(config.arbiter)
    journal.append(arbiter.state.now, event)
    journal.commit()
    for effect in arbiter.handle(event, arbiter.state.now):
        if isinstance(effect, Note):
            _perform(effect, None)


def _perform(effect: RoundRecord | LeaseRecord | AppRecord | Note, ledger: Ledger | None) -> None:
    match effect:
        case RoundRecord() | LeaseRecord() | AppRecord():
            if ledger is not None:
                ledger.write(effect)
            if isinstance(effect, RoundRecord):
                won = {outcome.app: len(outcome.gpus) for outcome in effect.outcomes if outcome.gpus}
                _log.info("round.closed", round=effect.round, bidders=len(effect.bidders), gpus=won)
        case Note(subject, what):
            _log.info("object.noted", subject=subject, what=what)
        case _ as never:
            assert_never(never)


__all__ = ["Effect", "run_arbiter"]
