"""Two arbiters share a PostgreSQL: the leader, the database or the broker fails, and nobody who trains has noticed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import msgspec
import pytest

from arbiter.core.arbiter import Arbiter, Event
from arbiter.core.effects import Decided
from arbiter.ledger import Ledger
from arbiter.queries import Queries
from protocol.core import Tick
from protocol.journal.postgres import PostgresJournal
from protocol.messages import Answer, Party, Query, QueryKind
from tests.support import postgres
from tests.support.arbiter_site import SETTINGS, Site
from tests.support.cluster import DaemonProcess, until
from tests.support.failover import HOSTS, WITNESSES, Pair, gpu_times, look_at, running_pair, told_gpu_times
from tests.support.needs import lack
from tests.support.postgres import PrivatePostgres
from tests.support.proxy import cuttable_link
from tests.support.rabbitmq import PrivateRabbitMQ

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server() -> Iterator[PrivatePostgres]:
    if reason := postgres.missing():
        lack(reason)
    with PrivatePostgres() as made:
        yield made


@pytest.fixture
def pair(tmp_path: Path, broker: PrivateRabbitMQ, vhost: str, server: PrivatePostgres) -> Iterator[Pair]:
    with running_pair(tmp_path, broker, vhost, server) as made:
        yield made


def assert_whole(pair: Pair) -> None:
    audit = pair.audit()
    assert audit.whole, audit
    assert audit.hand_overs > 0, "no GPU changed hands, so nothing was shown"
    assert [line for arbiter in pair.arbiters for line in arbiter.lines("standby.differs")] == []


def test_the_witnesses_see_events_of_a_connection_that_does_not_lead_and_a_state_that_is_no_leaders(
    server: PrivatePostgres,
) -> None:
    url = server.database()
    with (
        PostgresJournal[Event].of(url, Event) as first,
        PostgresJournal[Event].of(url, Event) as second,
    ):
        server.sql(url.rpartition("/")[2], WITNESSES)
        for journal in (first, second):
            epoch = journal.next_epoch(1)
            journal.news()
            journal.append(1.0, Tick())
            journal.commit()
        found = look_at(url)
        assert (found.rows_of_deposed, found.ledger_gaps, found.events, found.states) == (0, 0, 2, 0)
        first._epoch = epoch  # as if nothing fenced it
        first.news()
        first.append(1.0, Tick())
        first.commit()
        found = look_at(url)
        assert (found.rows_of_deposed, found.ledger_gaps, found.events) == (1, 0, 3)
        for state, differ in ((found.replayed.snapshot(), 0), (b"of another leader", 1)):
            first.snapshot(state)
            found = look_at(url)
            assert (found.states, found.states_differ) == (1 + differ, differ)


def test_a_replay_that_lacks_an_event_has_another_gpu_time_than_was_told() -> None:
    site = Site(SETTINGS)
    site.node("n1", 2)
    site.play_round(site.app("ana-1") + site.wait(2.0))
    site.wait(10.0)
    site.node("n1")
    site.app("ana-1", state="finished")
    documents = []
    for kind in ("apps", "shares"):
        query = Query("q", cast("QueryKind", kind))
        (send,) = Queries(site.arbiter, Ledger(":memory:")).ask(Party("app", "ana-agent"), query, site.now)
        assert isinstance(send.message, Answer)
        documents.append(msgspec.json.decode(send.message.document))
    told = told_gpu_times(*documents)
    assert {name: times[0] > 0.0 for name, times in told.items()} == {"id ana-1": True, "tenant team": True}
    replayed, lacking = Arbiter(), Arbiter()
    for now, event in site.journal:
        replayed.handle(event, now)
        if not isinstance(event, Decided):
            lacking.handle(event, now)
    assert gpu_times(replayed, told) == told
    assert gpu_times(lacking, told) != told


@pytest.mark.full
def test_a_leader_that_is_killed_is_followed_by_the_standby_and_nothing_is_lost(pair: Pair) -> None:
    pair.fail_over()
    assert_whole(pair)


@pytest.mark.full
def test_a_leader_that_stands_still_beyond_its_heartbeat_leads_no_more_when_it_wakes_up(pair: Pair) -> None:
    leader = pair.leader()
    pair.stand_still()
    pair.fail_over()  # it is a standby now, and can lead again
    assert pair.leader() is leader
    assert_whole(pair)


def stop_between_commits(pair: Pair, leader: DaemonProcess, server: PrivatePostgres) -> None:
    """Stop the leader where none of its transactions is open: the server would end the connection of one that is."""
    database = pair.url.rpartition("/")[2]
    busy = f"SELECT 1 FROM pg_stat_activity WHERE datname = '{database}' AND xact_start IS NOT NULL AND pid <> "
    for _ in range(100):
        leader.signal(signal.SIGSTOP)
        if not server.sql(database, f"{busy} pg_backend_pid()"):
            return
        leader.signal(signal.SIGCONT)
    pytest.fail("a transaction was open each time")


@pytest.mark.full
def test_a_leader_that_wakes_up_unaware_that_another_leads_is_refused_by_the_store_and_says_so(
    tmp_path: Path, broker: PrivateRabbitMQ, vhost: str, server: PrivatePostgres
) -> None:
    """Its link is cut without a word, so nothing but the store can tell it."""
    with ExitStack() as stack:
        links = {host: stack.enter_context(cuttable_link(broker.port)) for host in HOSTS}
        ports = {host: link.port for host, link in links.items()}
        pair = stack.enter_context(running_pair(tmp_path, broker, vhost, server, ports))
        leader, epoch = pair.leader(), pair.newest_epoch()
        link = links[HOSTS[pair.arbiters.index(leader)]]
        stop_between_commits(pair, leader, server)
        try:
            pair.wait_trained(5)  # the broker's last answers reach it meanwhile, or it would wait for them first
            link.cut()
            pair.submit_small()
            pair.wait_led(newer_than=epoch)
        finally:
            leader.signal(signal.SIGCONT)
        until(lambda: bool(leader.lines("arbiter.stands_by")), "it says that it stands by", pair.ends_of_logs)
        (line,) = leader.lines("arbiter.stands_by")
        assert f"leads in epoch {pair.newest_epoch()}, and ours was {epoch}" in line["why"]
        link.mend()
        pair.wait_paired()
        pair.fail_over()
        assert pair.leader() is leader
        assert_whole(pair)


@pytest.mark.full
def test_a_database_that_is_killed_and_started_again_costs_nothing(pair: Pair, server: PrivatePostgres) -> None:
    epoch = pair.newest_epoch()
    server.kill()
    try:
        for arbiter in pair.arbiters:
            until(lambda arbiter=arbiter: bool(arbiter.lines("arbiter.stands_by")), "it stands by")
        pair.wait_trained(40)
    finally:  # other tests need it, too
        server.start()
    pair.wait_led(newer_than=epoch)
    assert_whole(pair)


@pytest.mark.full
def test_a_broker_that_is_killed_and_started_again_costs_nothing(pair: Pair) -> None:
    epoch = pair.newest_epoch()
    pair.wait_trained(100)  # RabbitMQ 3.10 has young quorum queues in memory only
    pair.broker.kill()
    try:
        pair.wait_trained(40)
    finally:  # other tests need it, too
        pair.broker.start()
    pair.wait_led(newer_than=epoch)
    assert_whole(pair)
