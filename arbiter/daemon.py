"""The arbiter's daemon: the core between journal, bus, ledger and queries."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from arbiter.config import JOURNAL, LEDGER, ArbiterConfig, HistoryMode, check, database_url, owners_by_gateway
from arbiter.core.arbiter import Arbiter, Batch, Configured, Effect, Event, MissingHistory, SolverReady
from arbiter.core.dry_run import may_begin
from arbiter.core.effects import (
    Decide,
    Decided,
    EpochTaken,
    Note,
    PolicyFailed,
    Record,
    Resign,
    RoundRecord,
    Sell,
    Sold,
    failure_of,
)
from arbiter.core.registry import policy_of
from arbiter.core.seam import Outcome
from arbiter.ledger import Ledger
from arbiter.outages import Outages
from arbiter.queries import PastRound, Queries
from arbiter.reports import ReportRow
from arbiter.solver import Solver
from protocol import certificates, exit_codes
from protocol.bus import Bus
from protocol.clock import Anchor, Clock, RecordedClock
from protocol.config import ConfigError
from protocol.core import Send
from protocol.garbage import seldom_collected
from protocol.journal import Deposed, Journal, JournalError, LostEnd, NewerStore, StoreAway, digest
from protocol.journal.postgres import PostgresJournal
from protocol.journal.sqlite import SqliteJournal
from protocol.messages import ARBITER, AnyMessage, AppId, AppReport, LogChunk, NodeReport, Party, Query, TerminalDoor
from protocol.private import state_folder
from protocol.release import release
from protocol.shell import Shell

FoundT = TypeVar("FoundT")

#: Events between two snapshots: a restart replays at most these, about a second's work.
SNAPSHOT_EVERY = 5_000
#: Between two samples of where tenants stand.
SAMPLE_S = 3600.0
#: How long `explain`, and a dry run, look for what binds an app.
TRIED_S = 3.0
#: So long after a question auctions are held again for it; and so many outcomes that were found so are remembered.
LOST_S, EXPLAINED_MAX = 5.0, 256
#: Between two looks of a standby at the journal of the leader.
FOLLOW_S = 0.5
#: So many old records of a kind are deleted at a time, with a pause in between; and so often it is looked for some.
PRUNED_MAX, PRUNE_PAUSE_S, PRUNE_EVERY_S = 500, 1.0, 3600.0
#: Between two looks at a store that is away, or that another arbiter leads.
RETRY_S = 1.0
#: How long a dry run waits for the end of a round that is being decided, and how often it looks.
ROUND_S, LOOK_S = 4.0, 0.02

Performed = EpochTaken | Resign | Decide | Sell | Record | Note

_log = structlog.get_logger("arbiter")


async def run_arbiter(
    config: ArbiterConfig, bus: Bus, *, on_alive: Callable[[], None] | None = None, wall: Clock = time.time
) -> None:
    """Run the arbiter until cancelled. The state folder is made if it is missing.

    Parameters
    ----------
    config, bus
        How to decide, and where the nodes and app agents are.
    on_alive
        Called at least once a second, for a watchdog.
    wall
        The host's wall clock, UNIX seconds; see `protocol.clock` on how far it is believed.

    Raises
    ------
    ConfigError
        If the settings cannot work, the history of GPU time that there should be is not there, or the site that is
        heard is another one than the journal's.
    JournalError
        If the state folder belongs to another process or cannot be read.
    """
    check(config, "configuration")
    outages = Outages(bus, config.arbiter.admins)
    standing_by = ""
    while True:
        try:
            with seldom_collected():
                return await _run_once(config, bus, on_alive, wall, outages)
        except (StoreAway, Deposed, NewerStore) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the store went away as this arbiter was told to end
                raise asyncio.CancelledError from error
            # Memory may hold more than the store, or less, so the arbiter begins anew from the store.
            if str(error) != standing_by:
                _log.warning("arbiter.stands_by", why=str(error), meaning=_STANDING_BY)
            standing_by = str(error)
            if isinstance(error, LostEnd) or not isinstance(error, Deposed):  # else another arbiter leads
                await outages.tell(str(error))
        except JournalError as error:
            await outages.tell(f"the arbiter has ended: {error}")
            raise
        if on_alive is not None:
            on_alive()
        await asyncio.sleep(RETRY_S)


_DIFFERS = "this is a bug of gpu-arbiter; the standby begins anew with the leader's snapshot"
_STANDING_BY = "this arbiter decides nothing; training goes on, and it tries again by itself"


async def _run_once(
    config: ArbiterConfig, bus: Bus, on_alive: Callable[[], None] | None, wall: Clock, outages: Outages
) -> None:
    """Run until the store is away or another arbiter leads."""
    async with _open_store(config) as (journal, ledger):
        arbiter = _restore(journal, ledger, config.history)
        performer = _Performer(arbiter, journal, ledger, config, wall, alone=bus.private)
        shell = performer.shell(bus, on_alive)
        try:
            await _run(shell, performer)
        finally:
            outages.know(app.owner for app in arbiter.state.apps.values())
            if performer.followed or shell.commits.count:  # a store that can be read may still have no room
                outages.end()


ArbiterShell = Shell[Batch | Configured | SolverReady | Decided | Sold, Performed]


class _Performer:
    """Performs the effects of an arbiter's core, and answers what is asked of it beside its core."""

    def __init__(
        self,
        arbiter: Arbiter,
        journal: Journal[Event],
        ledger: Ledger,
        config: ArbiterConfig,
        wall: Clock = time.time,
        *,
        alone: bool = True,
    ) -> None:
        self._arbiter, self._journal, self._ledger = arbiter, journal, ledger
        self._config, self._wall, self._alone = config, wall, alone
        self._clock: RecordedClock | None = None  #: from when this arbiter first leads
        self._queries = Queries(arbiter, ledger, self._of_itself)
        self._one_auction = asyncio.Lock()
        self._explained: dict[tuple[int, float, AppId], Outcome] = {}  #: by round, its time, and app; the oldest first
        self._sampled_at = 0.0
        self.solver = Solver()
        self.followed = False  #: whether another arbiter has written events since the store was opened
        self._ready = not _holds_auctions(config)
        self._clock_moved = asyncio.Event()
        self._one_follower = asyncio.Lock()
        self._is_news = True  #: others have led since our settings were taken in

    def shell(self, bus: Bus, on_alive: Callable[[], None] | None) -> ArbiterShell:
        """Return the shell around the core."""
        shared = self._config.shared_users
        self._certificates = certificates.named_in(bus.url)
        self._shell: ArbiterShell = Shell(
            self._arbiter,
            bus,
            ARBITER,
            perform_together=self._perform,
            journal=self._journal,
            take_over=self._take_over,
            snapshot=self._arbiter.snapshot,
            snapshot_every=SNAPSHOT_EVERY,
            clock=self._time,
            shared_users=frozenset(shared),
            gateways=owners_by_gateway(self._config),
            answer=self._answer,
            on_alive=on_alive,
            batch=Batch,
        )
        if shared:
            _log.warning("users.shared", users=shared, meaning="they may speak for every participant")
        return self._shell

    def start_beside(self, group: asyncio.TaskGroup) -> Sequence[asyncio.Task[None]]:
        """Start what runs beside the shell; return its tasks."""
        beside = [self.solver.run(self._shell.post), self._keep_anchor(), self._prune_ledger()]
        if self._journal.remote:
            beside.append(self._stand_by())
        if not self._ready:
            beside.append(self.solver.prepare(self._config.arbiter.policy, self._take_ready))
        return [group.create_task(each) for each in beside]

    def _of_itself(self) -> Mapping[str, Any]:
        """Return what metrics tell of this process."""
        return {
            "journal_commits": self._shell.commits.document(),
            "certificates": certificates.ends(self._certificates),
        }

    def _take_ready(self) -> None:
        self._ready = True
        self._shell.post(SolverReady())

    async def _keep_anchor(self) -> None:
        """Write the clock's record down each time the clock has gone forward."""
        while True:
            await self._clock_moved.wait()
            self._clock_moved.clear()
            await self._write_anchor()

    async def _stand_by(self) -> None:
        """Follow what another arbiter decides, as long as this one does not lead."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            if not self._shell.connected:
                await self._follow()

    async def _prune_ledger(self) -> None:
        """Delete old records, a few at a time, while this arbiter leads."""
        if not self._config.ledger_days:
            return
        while True:
            await self._shell.wait_connected()
            before = self._shell.now() - self._config.ledger_days * 86_400.0
            found = self._ledger.prune(before, most=PRUNED_MAX)
            await asyncio.sleep(PRUNE_PAUSE_S if found else PRUNE_EVERY_S)

    def _time(self) -> float:
        return self._journal.last_now if self._clock is None else self._clock()

    async def _take_over(self, token: int) -> int:
        """Begin to lead: depose all others, learn what they have decided, and take our own settings in.

        `token` is the epoch of the leader token. Returns the epoch to lead in, newer than all that were given out.
        """
        state = self._arbiter.state
        # The journal may have lost its end, and the broker its count. Nodes and app agents obey no epoch older than one
        # that they know, and cannot tell two arbiters of one epoch apart: a clock gives no second again.
        least = max(token, state.epoch + 1, int(self._wall()))
        epoch = await self._journal_work(partial(self._journal.next_epoch, least))
        await self._follow()
        if state.epoch >= epoch:
            epoch = await self._journal_work(partial(self._journal.next_epoch, state.epoch + 1))
        if self._is_news:
            await self._configure()
            self._is_news = False
        return epoch

    async def _follow(self) -> None:
        """Take in what another leader has decided, and compare our state with its snapshots.

        Raises
        ------
        Deposed
            If our state differs, which is a bug of ours, or events are missing: we begin anew with its snapshot.
        """
        async with self._one_follower:
            news = await self._journal_work(self._journal.news)
            at = self._journal.last_seq - len(news.events)
            self._compare(at, news.marks)
            for seq, now, event in news.events:
                self._is_news = self.followed = True
                self._ledger.write(*(each for each in self._arbiter.handle(event, now) if isinstance(each, Record)))
                self._compare(seq, news.marks)

    def _compare(self, seq: int, marks: Mapping[int, str]) -> None:
        """Compare our state after an event with the leader's, if it took a snapshot then."""
        if seq not in marks:
            return
        if digest(self._arbiter.snapshot()) != marks[seq]:
            _log.error("standby.differs", event_seq=seq, meaning=_DIFFERS)
            raise Deposed(f"{self._journal.place}: after event {seq} our state is not the leader's; {_DIFFERS}")
        self._ledger.forget_unwritten()  # the leader has written all records up to there
        _log.debug("standby.agrees", event_seq=seq)

    async def _configure(self) -> None:
        """Take the settings into the state, at the time of the last event: until we lead no time passes for us."""
        state = self._arbiter.state
        written = await self._journal_work(partial(self._journal.get, "clock"))
        anchor = msgspec.json.decode(written, type=Anchor) if written else None
        self._clock = RecordedClock(self._journal.last_now, anchor, wall=self._wall)
        await self._write_anchor()
        known = await self._journal_work(partial(self._journal.get, "site"))
        site = state.site or known or f"s-{secrets.token_hex(4)}"
        if site != known:
            await self._journal_work(partial(self._journal.set, "site", site))
        self._ledger.belong_to(site)
        restored = await self._journal_work(partial(self._journal.get, "restored"))
        event = Configured(
            self._config.arbiter,
            site,
            adopt=self._config.adopt_site,
            alone=self._alone,
            ready=self._ready,
            restored=backup_in_words(float(restored), self._clock()) if restored else "",
            epoch_in_ids=True,
        )
        self._journal.append(state.now, event)
        effects = self._arbiter.handle(event, state.now)
        await self._journal_work(self._journal.commit)
        if restored:
            await self._journal_work(partial(self._journal.set, "restored", ""))
        _record(effects, self._ledger)

    async def _write_anchor(self) -> None:
        assert self._clock is not None, "there is a clock from when it first leads"
        anchor = msgspec.json.encode(self._clock.anchor).decode()
        await self._journal_work(partial(self._journal.set, "clock", anchor))

    async def _journal_work(self, work: Callable[[], FoundT]) -> FoundT:
        """Have the journal do something, in a thread if another process is waited for."""
        return await asyncio.to_thread(work) if self._journal.remote else work()

    async def _perform(self, effects: Sequence[Performed]) -> None:
        """Perform a batch: take its epochs, have the solver begin, and write its records in one transaction."""
        for effect in effects:
            if isinstance(effect, EpochTaken):
                await self._take_epoch(effect)
        asked = [effect for effect in effects if isinstance(effect, Decide | Sell)]
        for question in asked:
            self.solver.ask(question)
        if asked:
            await asyncio.sleep(0)  # its thread decides while this one writes
        _record(effects, self._ledger)
        for question in asked:
            if isinstance(question, Decide):
                self._ledger.keep(question)
        self._sample()
        for effect in effects:
            if isinstance(effect, Resign):
                raise ConfigError(effect.why)

    async def _take_epoch(self, taken: EpochTaken) -> None:
        await self._journal_work(partial(self._journal.take_epoch, taken.epoch))
        if await self._journal_work(partial(self._journal.get, "site")) != taken.site:
            await self._journal_work(partial(self._journal.set, "site", taken.site))
        self._ledger.belong_to(taken.site)

    def _sample(self) -> None:
        """Keep every hour where tenants stand, so that fairness over weeks can be shown."""
        state = self._arbiter.state
        if state.now >= self._sampled_at + SAMPLE_S:
            self._sampled_at = state.now
            tenants = state.history.tenants
            self._ledger.sample(state.now, {name: state.history.of_tenant(name, state.now) for name in tenants})

    def _answer(
        self, sender: Party, message: AnyMessage
    ) -> Sequence[Send] | Coroutine[None, None, Sequence[Send]] | None:
        match message:
            case Query(kind="dry-run"):
                return self._rehearse(sender, message)
            case Query(kind="report"):
                return self._report(sender, message)
            case Query():
                if self._queries.takes_long(message):
                    return self._try_out(sender, message, time.monotonic())
                return self._queries.ask(sender, message, self._shell.now())
            case LogChunk() | TerminalDoor():
                return self._queries.deliver(sender, message)
            case AppReport(release=said, wall_s=wall_s):
                self._queries.hear(sender, said, wall_s, self._shell.now())
                return None
            case NodeReport(node=node, boot_id=boot, wall_s=wall_s, release=said):
                self._queries.hear(sender, said, wall_s, self._shell.now())
                if self._clock is not None and self._clock.hear(node, boot, wall_s):
                    self._clock_moved.set()
                return None
            case _:
                return None

    async def _rehearse(self, sender: Party, query: Query) -> Sequence[Send]:
        """Answer a dry run on a copy, in a thread; a round that is being decided comes first."""
        try:
            async with asyncio.timeout(ROUND_S):
                while not may_begin(self._arbiter.state):  # noqa: ASYNC110 - a core tells no one that it has moved on
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            return self._queries.refuse(sender, query, "a round is being decided; ask again", exit_codes.TIMED_OUT)
        by = time.monotonic() + TRIED_S
        now = self._shell.now()
        rehearsal = self._queries.rehearsal(sender, query, now, lambda: time.monotonic() > by)
        if rehearsal is None:
            return self._queries.ask(sender, query, now)
        try:
            forecast = await asyncio.to_thread(rehearsal.run)
        except Exception as error:  # noqa: BLE001 - a policy's, or for a forged report, on a copy: it costs this answer
            failure = failure_of(self._arbiter.state.settings.policy, "decide a dry run", error)
            _log.error("policy.failed", what=failure.sentence, trace=failure.trace)
            return self._queries.refuse(sender, query, failure.sentence, exit_codes.FAILED)
        return self._queries.tell(sender, query, forecast, now)

    async def _report(self, sender: Party, query: Query) -> Sequence[Send]:
        """Answer a report, which is summed in a thread from a second opening of the ledger."""
        report = self._queries.report(sender, query, self._shell.now())
        if isinstance(report, Send):
            return [report]

        def sum_up() -> list[ReportRow]:
            with closing(self._ledger.for_reading()) as ledger:
                return report.rows(ledger)

        try:
            rows = await asyncio.to_thread(sum_up)
        except JournalError as error:
            return self._queries.refuse(sender, query, str(error), exit_codes.FAILED)
        return self._queries.tell_report(sender, query, report, rows)

    async def _try_out(self, sender: Party, query: Query, asked_at: float) -> Sequence[Send]:
        """Answer `explain` after what takes long has been tried out, in a thread.

        The search for the binding reason comes first. Then rounds that the app lost, or that told it nothing of its
        own, are held again: one at a time for all users, and only while the question is young. Later the round's own
        words are told.
        """
        begun = time.monotonic()
        inquiry = self._queries.inquiry(query, self._shell.now(), lambda: time.monotonic() > begun + TRIED_S)
        found = None
        if inquiry is not None:
            binding = await self._tried(query, inquiry.binding)
            found = (binding, inquiry.estimate)
        explained = {}
        for each in self._queries.unexplained(query):
            async with self._one_auction:
                outcome = await self._explain(query, each, until=asked_at + LOST_S)
            if outcome is not None:
                explained[each.record.round] = outcome
        return self._queries.ask(sender, query, self._shell.now(), found=found, explained=explained)

    async def _explain(self, query: Query, past: PastRound, *, until: float) -> Outcome | None:
        """Return an app's outcome with what would have won, as once found; None once it is too late to look for it."""
        key = past.record.round, past.record.at, past.app
        if key not in self._explained and time.monotonic() < until:
            outcome = await self._tried(query, past.explained)
            if outcome is not None:
                self._explained[key] = outcome
                while len(self._explained) > EXPLAINED_MAX:
                    del self._explained[next(iter(self._explained))]
        return self._explained.get(key)

    async def _tried(self, query: Query, work: Callable[[], FoundT]) -> FoundT | None:
        """Do a part of an answer in a thread; None if it fails."""
        try:
            return await asyncio.to_thread(work)
        except Exception as error:  # noqa: BLE001 - a policy's, on a copy: it costs this part of the answer
            failure = failure_of(self._arbiter.state.settings.policy, "explain", error)
            _log.error("policy.failed", app=query.target, what=failure.sentence, trace=failure.trace)
            return None


def _holds_auctions(config: ArbiterConfig) -> bool:
    return policy_of(config.arbiter.policy, config.arbiter.policy_settings).traits.probes


async def _run(shell: ArbiterShell, performer: _Performer) -> None:
    """Run both until the shell ends; an error in either ends both."""
    try:
        async with asyncio.TaskGroup() as group:
            beside = performer.start_beside(group)
            await shell.run()
            for task in beside:
                task.cancel()
    except BaseExceptionGroup as errors:
        # One cause reads better as itself, and the command line tells a full disk from a bug. A store that is away
        # may be found out in several places at once.
        causes = _leaves(errors)
        if len(causes) == 1 or all(isinstance(cause, JournalError) for cause in causes):
            raise causes[0] from None
        raise


def _leaves(error: BaseException) -> Sequence[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]


@asynccontextmanager
async def _open_store(config: ArbiterConfig) -> AsyncIterator[tuple[Journal[Event], Ledger]]:
    """Open journal and ledger where the configuration says: in the state folder, or in a database.

    Raises
    ------
    ConfigError
        If the address of a database cannot be read, or is none.
    """
    folder = state_folder(Path(config.state_dir))
    url = database_url(config)
    if url:
        leader = f"{socket.gethostname()}, process {os.getpid()}"
        connect = partial(PostgresJournal[Event].of, url, Event, leader=leader, program=release())
        shared = await asyncio.to_thread(connect)
        with closing(shared):
            yield shared, Ledger(shared)
        return
    own: SqliteJournal[Event] = SqliteJournal.of(folder / JOURNAL, Event, program=release())
    with closing(own), closing(Ledger(folder / LEDGER)) as ledger:
        yield own, ledger


def _restore(journal: Journal[Event], ledger: Ledger, history: HistoryMode = "auto") -> Arbiter:
    """Return the arbiter as the journal tells; its last records are made again, should they have been missed.

    Raises
    ------
    ConfigError
        If there should be a history of GPU time and there is none: that of all owners would silently begin at nothing.
    """
    mend = 'bring the state folder back, or set history = "begin" for one start, if it is to begin at nothing'
    if history != "begin" and journal.last_seq == 0 and (history == "resume" or ledger.used()):
        why = "is to be resumed" if history == "resume" else "is told of by the ledger"
        raise ConfigError(f"{journal.place} is empty, but a history of GPU time {why}; {mend}")
    loaded = journal.load()
    try:
        begin = history == "begin"
        arbiter = Arbiter() if loaded.snapshot is None else Arbiter.restored(loaded.snapshot, begin_history=begin)
    except MissingHistory as error:
        raise ConfigError(f"{journal.place}: {error}; {mend}") from error
    count = 0
    for _seq, now, event in loaded.events:
        ledger.write(*(effect for effect in arbiter.handle(event, now) if isinstance(effect, Record)))
        count += 1
    arbiter.validate()
    _log.info("journal.replayed", events=count, apps=len(arbiter.state.apps), round=arbiter.state.round)
    return arbiter


def backup_in_words(at: float, now: float) -> str:
    """Return ``the backup of 2026-11-25 19:00 UTC, 3.2 hours old`` for its newest event's time, in seconds."""
    made = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"the backup of {made}, {max(0.0, now - at) / 3600.0:.1f} hours old"


def _record(effects: Sequence[object], ledger: Ledger) -> None:
    """Write all records among these effects in one transaction, and log what belongs there."""
    ledger.write(*(effect for effect in effects if isinstance(effect, Record)))
    for effect in effects:
        match effect:
            case Note(subject, what):
                _log.info("object.noted", subject=subject, what=what)
            case RoundRecord():
                won = {outcome.app: len(outcome.gpus) for outcome in effect.outcomes if outcome.gpus}
                _log.info("round.closed", round=effect.round, bidders=len(effect.bidders), gpus=won)
            case PolicyFailed(failure=failure):
                _log.error("policy.failed", policy=failure.policy, error=failure.error, trace=failure.trace)
            case _:
                pass


__all__ = ["Effect", "run_arbiter"]
