"""Arbiters that share a journal in PostgreSQL: one leads, and what it has decided is known to the next one."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from contextvars import ContextVar
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from app_agent import control_server
from app_agent.config import AppConfig
from app_agent.control import AsyncControl
from app_agent.core.spec import AppSpec
from app_agent.daemon import run_app_host
from arbiter.config import ArbiterConfig
from arbiter.core.arbiter import Arbiter, Event
from arbiter.daemon import RETRY_S, run_arbiter
from arbiter.ledger import Ledger
from launch import doctor
from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.config import ConfigError
from protocol.core import Connected, Send, Tick
from protocol.journal import Deposed, JournalError
from protocol.journal.postgres import PostgresJournal
from protocol.messages import (
    ARBITER,
    EventFilter,
    Outage,
)
from protocol.shell import Shell
from tests.support import postgres
from tests.support.memory_site import QUICK, MemorySite, explained, playing
from tests.support.needs import lack
from tests.support.patience import PATIENCE_S
from tests.support.postgres import PrivatePostgres

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[PrivatePostgres]:
    if reason := postgres.missing():
        lack(reason)
    with PrivatePostgres() as made:
        yield made


def replayed(url: str) -> Arbiter:
    """The arbiter as the database tells it."""
    with closing(PostgresJournal[Event].of(url, Event, program="99")) as journal:
        loaded = journal.load()
        arbiter = Arbiter() if loaded.snapshot is None else Arbiter.restored(loaded.snapshot)
        for _seq, now, event in loaded.events:
            arbiter.handle(event, now)
        arbiter.validate()
        return arbiter


async def test_leadership_goes_to_and_fro_and_no_arbiter_forgets_anything(
    server: PrivatePostgres, tmp_path: Path
) -> None:
    async with playing(tmp_path, server.database()) as site:
        site.arbiter()
        epoch = await site.until_led(1)
        await site.enrol_node()
        await site.submit("ana-1")
        site.arbiter()
        for turn in range(2, 6):
            site.drop_leader()
            assert await site.until_led(turn) > epoch
            epoch = site.epochs()[-1]
            assert [each["id"] for each in (await site.ask("apps"))["apps"]] == [f"ana-{n}" for n in range(1, turn)]
            assert [each["state"] for each in (await site.ask("nodes"))["nodes"]] == ["up"]
            await site.submit(f"ana-{turn}")
        assert site.said("arbiter.stands_by") == []
    assert site.epochs() == sorted(set(site.epochs()))
    arbiter = replayed(site.url)
    assert sorted(arbiter.state.apps) == [f"ana-{n}" for n in range(1, 6)]
    assert arbiter.state.epoch == epoch
    assert arbiter.state.epoch_in_ids, "ids of leases may come again after a power cut"
    with closing(PostgresJournal[Event].of(site.url, Event, program="99")) as journal:
        told = [record.number for _id, record in Ledger(journal).events(EventFilter(), limit=10_000)]
    assert told == list(range(1, arbiter.state.events + 1)), "the ledger has a gap"


async def test_a_standby_follows_all_that_the_leader_writes_and_finds_its_own_state_different(
    server: PrivatePostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arbiter.daemon.SNAPSHOT_EVERY", 20)
    monkeypatch.setattr("arbiter.daemon.FOLLOW_S", 0.05)
    arbiters: list[Arbiter] = []
    made = Arbiter.__init__

    def noted(arbiter: Arbiter, *words: Any) -> None:
        made(arbiter, *words)
        arbiters.append(arbiter)

    monkeypatch.setattr(Arbiter, "__init__", noted)
    async with playing(tmp_path, server.database()) as site:
        site.arbiter()
        await site.until_led(1)
        await site.enrol_node()
        leader = arbiters[0]
        site.arbiter()

        async def agreed(times: int) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while len(site.said("standby.agrees")) < times:
                    await site.report()
                    await asyncio.sleep(0.02)

        await agreed(3)
        assert site.said("standby.differs") == []
        standby = arbiters[-1]
        assert standby is not leader
        async with asyncio.timeout(PATIENCE_S):
            while standby.state.now < leader.state.now - 1.0:  # noqa: ASYNC110 - a core tells no one
                await asyncio.sleep(0.02)
        changed = leader
        async with asyncio.timeout(PATIENCE_S):
            while not site.said("standby.differs"):
                if arbiters[-1] is not changed:  # a standby that lost its database for a moment has begun anew
                    changed = arbiters[-1]
                    changed.state.leases_made += 1  # a decision that the leader did not make
                await site.report()
                await asyncio.sleep(0.02)
        (line,) = site.said("standby.differs")
        assert "bug of gpu-arbiter" in line["meaning"]
        agreements = len(site.said("standby.agrees"))
        await agreed(agreements + 2)  # it has begun anew with the leader's snapshot
        assert len(site.said("standby.differs")) == 1
        assert len(site.epochs()) == 1, "the leader led on all the time"


async def test_a_deposed_arbiter_says_so_and_leads_again_in_a_newer_epoch(
    server: PrivatePostgres, tmp_path: Path
) -> None:
    async with playing(tmp_path, server.database()) as site:
        site.arbiter()
        epoch = await site.until_led(1)
        await site.enrol_node()
        with closing(
            PostgresJournal[Event].of(site.url, Event, leader="another host", program=version("gpu-arbiter"))
        ) as other:
            assert other.next_epoch(1) == epoch + 1
        plan = await site.next_plan(newer_than=epoch)
        assert plan.epoch >= epoch + 2  # no smaller than the seconds of the clock
        (line,) = site.said("arbiter.stands_by")
        assert f"another host leads in epoch {epoch + 1}, and ours was {epoch}" in line["why"]
        assert "training goes on" in line["meaning"]


async def test_while_the_database_is_away_no_arbiter_decides_and_all_goes_on_when_it_is_back(
    server: PrivatePostgres, tmp_path: Path
) -> None:
    async with playing(tmp_path, server.database()) as site:
        site.arbiter()
        epoch = await site.until_led(1)
        await site.enrol_node()
        await site.submit("ana-1")
        server.kill()
        async with asyncio.timeout(PATIENCE_S):
            while not site.said("arbiter.stands_by"):  # noqa: ASYNC110 - a log has no event to wait for
                await asyncio.sleep(0.02)
        assert not [link for link in site.broker._links if link.party == ARBITER and link._epoch], (
            "it holds the leader token"
        )
        server.start()
        assert (await site.next_plan(newer_than=epoch)).epoch > epoch
        assert [each["id"] for each in (await site.ask("apps"))["apps"]] == ["ana-1"]


async def test_while_the_database_is_away_owners_are_told_which_store_it_is_and_since_when(
    server: PrivatePostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "ANSWER_S", 0.5)
    config = AppConfig(owner="ada", state_dir=str(tmp_path / "ada"), socket=str(tmp_path / "ada.sock"))
    monkeypatch.setenv("GPU_ARBITER_URL", f"unix://{config.socket}")
    control = AsyncControl(Path(config.socket))

    async with playing(tmp_path, server.database()) as site:
        site.arbiter()
        await site.until_led(1)
        ready = asyncio.Event()
        agent = site.group.create_task(run_app_host(config, MemoryBus(site.broker), on_ready=ready.set))
        await ready.wait()
        app = await control.submit(AppSpec(trials=(("true",),), cwd=str(tmp_path), checkpoint_root=str(tmp_path)))
        await explained(control, app, of=app)
        assert (await control.ping())["outage"] == ""
        place = site.url
        (store,) = [await asyncio.to_thread(doctor._store, place)]
        assert "has led last, in epoch" in store.found
        before = datetime.now(UTC)
        server.kill()
        said = await explained(control, app, of="the store at")
        assert re.match(rf"the arbiter has not answered within 0.5 s: the store at {re.escape(place)} does not", said)
        assert "no app is granted a GPU or loses one" in said
        (since,) = re.findall(r", since (.*) UTC; ", said)
        assert abs(datetime.fromisoformat(f"{since}+00:00") - before).total_seconds() < PATIENCE_S
        checks = {check.name: check for check in await asyncio.to_thread(lambda: list(doctor._running()))}
        assert (checks["store"].verdict, place in checks["store"].found) == ("fail", True)
        assert (await asyncio.to_thread(doctor._store, place)).verdict == "fail"
        server.start()
        await explained(control, app, of=app)
        assert (await control.ping())["outage"] == ""
        agent.cancel()


async def test_an_arbiter_whose_file_fails_tells_the_owners_before_it_ends(tmp_path: Path) -> None:
    config = ArbiterConfig(state_dir=str(tmp_path / "state"), arbiter=QUICK)
    async with playing(tmp_path) as site:

        async def end() -> str:
            with pytest.raises(JournalError) as ended:
                await run_arbiter(config, MemoryBus(site.broker))
            return str(ended.value)

        arbiter = site.group.create_task(end())
        await site.submit("ana-1")
        journal = tmp_path / "state" / "journal.db"
        assert doctor._store(journal.parent).verdict == "ok"
        with closing(sqlite3.connect(journal, timeout=PATIENCE_S, isolation_level=None)) as other:
            other.execute("DROP TABLE events")
        told = await site.heard(Outage)
        assert f"cannot use {journal}: no such table" in told.why
        assert told.why == f"the arbiter has ended: {await arbiter}"
        assert doctor._store(journal).verdict == "fail"


async def test_a_deposed_arbiter_performs_nothing_of_its_last_batch(server: PrivatePostgres) -> None:
    class Core:
        def handle(self, event: object, now: float) -> Sequence[str | Send]:
            return [] if isinstance(event, Connected) else ["performed"]

        def deadline(self) -> float | None:
            return None

    performed = []

    async def perform(effect: str) -> None:
        performed.append(effect)

    url = server.database()
    with (
        closing(PostgresJournal[Event].of(url, Event)) as first,
        closing(PostgresJournal[Event].of(url, Event)) as second,
    ):
        shell: Shell[Any, str] = Shell(Core(), MemoryBus(MemoryBroker()), ARBITER, perform=perform, journal=first)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(_raised(shell))
            await shell.wait_connected()
            shell.post(Tick())
            await shell.wait_idle()
            assert performed == ["performed"]
            second.next_epoch(1)
            shell.post(Tick())
            assert isinstance(await running, Deposed)
        assert performed == ["performed"]
        assert len(list(second.load().events)) == 2


async def _raised(shell: Shell[Any, Any]) -> Exception | None:
    try:
        await shell.run()
    except Exception as error:  # noqa: BLE001 - the test asks which
        return error
    return None


async def test_an_arbiter_of_an_older_version_waits_and_says_why(server: PrivatePostgres, tmp_path: Path) -> None:
    async with playing(tmp_path, server.database()) as site:
        with closing(PostgresJournal[Event].of(site.url, Event, leader="host-b", program="99.0")) as other:
            other.next_epoch(1)
        site.arbiter()
        assert "host-b has led with version 99.0, newer than" in await _until_one_waits(site)
        assert site.epochs() == []


async def test_a_newer_standby_takes_over_from_an_older_leader_which_then_waits_and_says_why(
    server: PrivatePostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade, arbiter by arbiter: the older one leads on, then follows no leader, and cannot lead any more."""
    versions = ContextVar("versions", default="")
    monkeypatch.setattr("arbiter.daemon.release", versions.get)  # each arbiter is a task, with a version of its own
    monkeypatch.setattr("arbiter.daemon.SNAPSHOT_EVERY", 5)
    monkeypatch.setattr("arbiter.daemon.FOLLOW_S", 0.05)
    async with playing(tmp_path, server.database()) as site:
        versions.set("0.1.0")
        site.arbiter()
        await site.until_led(1)
        await site.submit("ana-1")
        versions.set("0.2.0")
        site.arbiter()
        await site.enrol_node()  # snapshots are made, of an older version, which are not compared
        assert (len(site.epochs()), site.said("arbiter.stands_by")) == (1, [])
        site.drop_leader()
        await site.until_led(2)
        waits = await _until_one_waits(site)
        assert re.search(r"has led with version 0\.2\.0, newer than 0\.1\.0 here; this arbiter waits: upgrade", waits)
        await site.submit("ana-2")
        site.drop_leader()
        await site.until_led(3)
        assert [each["id"] for each in (await site.ask("apps"))["apps"]] == ["ana-1", "ana-2"]
        assert set(_who_waits(site)) == {waits}, "the newer one does not wait"
        assert site.said("standby.differs") == []
    assert sorted(replayed(site.url).state.apps) == ["ana-1", "ana-2"]


async def test_an_older_standby_of_a_newer_leader_waits_from_its_start_and_leads_when_it_was_upgraded(
    server: PrivatePostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = ContextVar("versions", default="")
    monkeypatch.setattr("arbiter.daemon.release", versions.get)
    async with playing(tmp_path, server.database()) as site:
        versions.set("0.2.0")
        leader = site.arbiter()
        await site.until_led(1)
        await site.submit("ana-1")
        versions.set("0.1.0")
        older = site.arbiter()
        assert "newer than 0.1.0 here; this arbiter waits" in await _until_one_waits(site)
        leader.cancel()
        await asyncio.sleep(3 * RETRY_S)
        assert len(site.epochs()) == 1, "it would read events of a version that it does not know"
        older.cancel()
        versions.set("0.2.0")
        site.arbiter()
        await site.until_led(2)
        assert [each["id"] for each in (await site.ask("apps"))["apps"]] == ["ana-1"]


async def _until_one_waits(site: MemorySite) -> str:
    """Wait until an arbiter says that it waits; return why."""
    async with asyncio.timeout(PATIENCE_S):
        while not _who_waits(site):  # noqa: ASYNC110 - a log has no event to wait for
            await asyncio.sleep(0.02)
    return _who_waits(site)[0]


def _who_waits(site: MemorySite) -> list[str]:
    """Return why arbiters wait. A former leader may say before that another one leads: that is no wait."""
    return [line["why"] for line in site.said("arbiter.stands_by") if "this arbiter waits" in line["why"]]


async def test_an_address_that_cannot_work_ends_the_arbiter_with_the_mend(
    server: PrivatePostgres, tmp_path: Path
) -> None:
    config = ArbiterConfig(state_dir=str(tmp_path), journal=server.url("nowhere"))
    with pytest.raises(JournalError, match=r'database "nowhere" does not exist; create the database: createdb'):
        await run_arbiter(config, MemoryBus(MemoryBroker()))
    file = tmp_path / "journal.url"
    config = replace(config, journal="", journal_file=str(file))
    with pytest.raises(
        ConfigError, match=r"journal_file .* cannot be read: No such file or directory; put postgresql:"
    ):
        await run_arbiter(config, MemoryBus(MemoryBroker()))
    file.write_text("mysql://arbiter:hunter2@host/gpu")
    with pytest.raises(ConfigError, match=r"journal_file .* has 'mysql://arbiter@host/gpu', which is no address"):
        await run_arbiter(config, MemoryBus(MemoryBroker()))
    with pytest.raises(ConfigError, match=r"journal is 'sqlite:///x'; write it like"):
        await run_arbiter(replace(config, journal="sqlite:///x", journal_file=""), MemoryBus(MemoryBroker()))
