"""The disk of the database is full: nobody decides, everyone is told, and all goes on when there is room."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from app_agent import control_server
from app_agent.config import AppConfig
from app_agent.control import AsyncControl
from app_agent.core.spec import AppSpec
from app_agent.daemon import run_app_host
from arbiter.core.arbiter import Arbiter, Event
from arbiter.daemon import RETRY_S
from arbiter.ledger import Ledger
from launch import doctor
from protocol.bus.memory import MemoryBus
from protocol.journal.postgres import PostgresJournal
from protocol.messages import EventFilter
from tests.support import postgres
from tests.support.memory_site import explained, playing
from tests.support.needs import lack
from tests.support.patience import PATIENCE_S
from tests.support.postgres import PrivatePostgres
from tests.support.small_disk import fill_up, small_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def server() -> Iterator[PrivatePostgres]:
    """One whose data is on a disk of its own, of which some 20 MB are free."""
    if reason := postgres.missing():
        lack(reason)
    made = PrivatePostgres(empty=True)
    try:
        with small_disk(made.folder / "data", "64m", owner=made.folder.stat().st_uid):
            made.make_data()
            with made:
                yield made
    finally:
        shutil.rmtree(made.folder, ignore_errors=True)


@pytest.mark.parametrize("log_is_full", [False, True], ids=["it refuses commits", "it ends"])
async def test_while_the_disk_of_the_database_is_full_nobody_decides_and_all_goes_on_when_there_is_room(
    server: PrivatePostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, log_is_full: bool
) -> None:
    """Without room for its tables PostgreSQL refuses what is written; without room for its log it ends."""
    monkeypatch.setattr(control_server, "ANSWER_S", 0.5)
    config = AppConfig(owner="ada", state_dir=str(tmp_path / "ada"), socket=str(tmp_path / "ada.sock"))
    monkeypatch.setenv("GPU_ARBITER_URL", f"unix://{config.socket}")
    control = AsyncControl(Path(config.socket))
    spec = AppSpec(trials=(("true",),), cwd=str(tmp_path), checkpoint_root=str(tmp_path))

    async with playing(tmp_path, server.database()) as site:
        site.arbiter()
        await site.until_led(1)
        await site.enrol_node()
        ready = asyncio.Event()
        agent = site.group.create_task(run_app_host(config, MemoryBus(site.broker), on_ready=ready.set))
        await ready.wait()
        first = await control.submit(spec)
        await explained(control, first, of=first)

        ballast = fill_up(server.folder / "data")
        if log_is_full:
            server.sql("postgres", "SELECT pg_switch_wal()")  # what is written next needs a new file
        async with asyncio.timeout(PATIENCE_S):
            while not site.said("arbiter.stands_by"):
                await site.report()
                await asyncio.sleep(0.01)
        decided = len(site.said("round.closed"))
        second = await control.submit(spec)
        said = await explained(control, second, of="the store at")
        assert re.search(r"the store at \S+ does not answer as it should: .*No space left on device", said), said
        assert "while no arbiter decides, training goes on, and no app is granted a GPU or loses one" in said
        await asyncio.sleep(5 * RETRY_S)
        later = await explained(control, second, of="the store at")
        assert since(later) - since(said) < timedelta(seconds=RETRY_S), "it begins anew at each try"
        checks = {check.name: check for check in await asyncio.to_thread(lambda: list(doctor._running()))}
        assert (checks["store"].verdict, "No space left on device" in checks["store"].found) == ("fail", True)
        assert len(site.said("round.closed")) == decided
        assert server.ended == log_is_full

        ballast.unlink()
        if server.ended:
            server.start()
        for app in (first, second):
            await explained(control, app, of=app)
        assert (await control.ping())["outage"] == ""

        server.kill()
        again = await explained(control, second, of="the store at")
        assert since(again) - since(said) > timedelta(seconds=3 * RETRY_S), "it is another outage"
        server.start()
        await explained(control, second, of=second)
        agent.cancel()
    with closing(PostgresJournal[Event].of(site.url, Event, program="99")) as journal:
        loaded = journal.load()
        arbiter = Arbiter() if loaded.snapshot is None else Arbiter.restored(loaded.snapshot)
        for _seq, now, event in loaded.events:
            arbiter.handle(event, now)
        told = [record.number for _id, record in Ledger(journal).events(EventFilter(), limit=10_000)]
    assert {first, second} <= set(arbiter.state.apps)
    assert told == list(range(1, arbiter.state.events + 1)), "the ledger has a gap"


def since(said: str) -> datetime:
    """When the outage began, as a person reads it."""
    (found,) = re.findall(r", since (.*) UTC; ", said)
    return datetime.fromisoformat(f"{found}+00:00")
