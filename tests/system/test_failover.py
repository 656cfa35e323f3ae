"""Two arbiters share a PostgreSQL: the leader, the database or the broker fails, and nobody who trains has noticed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from arbiter.core.arbiter import Event
from protocol.core import Tick
from protocol.journal.postgres import PostgresJournal
from tests.support import postgres
from tests.support.cluster import until
from tests.support.failover import WITNESSES, Pair, look_at, running_pair
from tests.support.postgres import PrivatePostgres
from tests.support.rabbitmq import PrivateRabbitMQ

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server() -> Iterator[PrivatePostgres]:
    if reason := postgres.missing():
        pytest.skip(reason)
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


def test_the_witnesses_see_events_of_a_connection_that_does_not_lead(
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
        assert look_at(url) == (0, 0, 2)
        first._epoch = epoch  # as if nothing fenced it
        first.news()
        first.append(1.0, Tick())
        first.commit()
        assert look_at(url) == (1, 0, 3)


@pytest.mark.full
def test_a_leader_that_is_killed_is_followed_by_the_standby_and_nothing_is_lost(pair: Pair) -> None:
    pair.fail_over()
    assert_whole(pair)


@pytest.mark.full
def test_a_leader_that_stands_still_beyond_its_heartbeat_writes_nothing_when_it_wakes_up(pair: Pair) -> None:
    leader, epoch = pair.leader(), pair.newest_epoch()
    leader.signal(signal.SIGSTOP)
    try:
        pair.submit_small()
        pair.wait_led(newer_than=epoch)
        pair.wait_trained(20)
    finally:
        leader.signal(signal.SIGCONT)
    lost = ("bus.lost", "bus.unavailable", "arbiter.stands_by")
    until(lambda: any(leader.lines(event) for event in lost), "it has noticed that it does not lead")
    pair.fail_over()  # it is a standby now, and can lead again
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
