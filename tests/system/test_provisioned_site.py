"""A site on what `provision site` has made: a real broker, TLS alone, and everyone known by a certificate."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the package cryptography, in the extra `users`, is not installed")

from launch import doctor
from launch.site.provision import Host, Wishes, provide
from protocol.bus import BusError, ConnectionLost, Link, NotPermitted, Outgoing
from protocol.messages import ARBITER, Party
from tests.support import rabbitmq
from tests.support.cluster import Cluster, started, until
from tests.support.needs import lack
from tests.support.patience import PATIENCE_S
from tests.support.patient_bus import patient_bus
from tests.support.provisioned import ProvisionedBrokers

pytestmark = [pytest.mark.broker, pytest.mark.slow]

NODE, OTHER, APP, GONE = Party("node", "n1"), Party("node", "n2"), Party("app", "me"), Party("app", "bob")


def _need_rabbitmq() -> None:
    if not rabbitmq.available():
        lack(f"RabbitMQ is not installed ({rabbitmq.SERVER} is missing): run scripts/ensure-rabbitmq.sh")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProvisionedBrokers]:
    _need_rabbitmq()
    folder = tmp_path_factory.mktemp("provisioned")
    with ProvisionedBrokers(folder, nodes=("n1", "n2"), owners=("me", "bob")) as running:
        yield running


@pytest.fixture
async def arbiter(site: ProvisionedBrokers) -> AsyncIterator[Link]:
    link = await patient_bus(site.url("arbiter")).connect(ARBITER)
    await link.lead()
    await link.provision(NODE, OTHER, APP)
    yield link
    await link.close()


def with_files_of(url: str, user: str, other: str) -> str:
    """The address of a user, with the certificate and the key of another."""
    head, query, files = url.partition("?")
    return head + query + files.replace(f"/parties/{user}/", f"/parties/{other}/")


async def said(link: Link, to: Party, text: bytes) -> BusError | None:
    (verdict,) = await link.send([Outgoing(to, text)])
    return verdict


async def heard(link: Link) -> tuple[str, bytes]:
    """Who the broker says has sent the next message, and the message."""
    async with asyncio.timeout(PATIENCE_S):
        delivery = await link.receive()
    await delivery.ack()
    return delivery.user, delivery.data


async def test_everyone_is_who_the_certificate_says_and_reads_what_is_meant_for_it(
    site: ProvisionedBrokers, arbiter: Link
) -> None:
    for party in (NODE, APP):
        link = await patient_bus(site.url(party.user)).connect(party)
        await link.consume()
        assert await said(link, ARBITER, b"up") is None
        assert await heard(arbiter) == (party.user, b"up")
        assert await said(arbiter, party, b"down") is None
        assert await heard(link) == ("arbiter", b"down")
        await link.close()


async def test_a_gateway_speaks_for_an_owner_and_for_no_node(site: ProvisionedBrokers, arbiter: Link) -> None:
    bus = patient_bus(site.url("gateway-login1"))
    link = await bus.connect(APP)
    assert await said(link, ARBITER, b"up") is None
    assert await heard(arbiter) == ("gateway-login1", b"up")
    await link.close()
    link = await bus.connect(NODE)
    assert isinstance(await said(link, ARBITER, b"forged"), NotPermitted)
    await link.close()


async def test_a_party_with_anothers_certificate_cannot_write_or_read_in_the_others_name(
    site: ProvisionedBrokers, arbiter: Link
) -> None:
    url = with_files_of(site.url("node-n1"), "node-n1", "node-n2")
    bus = patient_bus(url)
    assert bus.user(NODE) == "node-n1", "it claims to be that one"
    link = await bus.connect(NODE)
    assert isinstance(await said(link, ARBITER, b"forged"), NotPermitted)
    with pytest.raises(NotPermitted, match=r"may not read 'node\.n1'"):
        await link.consume()
    await link.close()
    honest = await patient_bus(site.url("node-n2")).connect(OTHER)
    assert await said(honest, ARBITER, b"true") is None
    assert await heard(arbiter) == ("node-n2", b"true"), "nothing was heard of the forgery"
    await honest.close()


async def why_not_let_in(address: str) -> str:
    """The words with which a node at this address is refused; empty if it is let in."""
    try:
        link = await patient_bus(address).connect(NODE)
    except BusError as error:
        return str(error)
    await link.close()
    return ""


async def test_nobody_else_is_let_in(site: ProvisionedBrokers, tmp_path: Path) -> None:
    now, url = datetime.now(UTC), site.url("node-n1")
    foreign, old = tmp_path / "foreign", tmp_path / "old"
    wishes = Wishes(hosts=(Host("b1", "127.0.0.1"),), nodes=("n1",))
    provide(foreign, wishes, now)
    old.mkdir()
    for name in ("ca.pem", "ca.key"):  # the same authority, a year ago
        (old / name).write_bytes((site.folder / name).read_bytes())
        (old / "site.json").write_bytes((site.folder / "site.json").read_bytes())
    provide(old, wishes, now - timedelta(days=400))
    of_site = f"cafile={site.folder}/ca.pem"

    def files(folder: Path) -> str:
        party = folder / "parties/node-n1"
        return f"{url.partition('?')[0]}?auth=external&{of_site}&certfile={party}/cert.pem&keyfile={party}/key.pem"

    attempts = {
        f"{url.partition('?')[0]}?auth=external&{of_site}": "certificate required",
        url.replace("auth=external&", "").replace("node-n1@", "node-n1:guessed@"): "check the password",
        url.replace("amqps://", "amqp://"): "cannot reach",
        files(foreign): "unknown ca",
        files(old): "certificate expired",
        url.replace(f"{site.folder}/parties/node-n1/ca.pem", f"{foreign}/ca.pem"): "certificate verify failed",
    }
    for address, says in attempts.items():
        # The broker hangs up behind its last word, which may be lost with the connection.
        why = await why_not_let_in(address)
        assert re.search(f"(?i){says}|connection reset", why), f"{address}: {why or 'it is let in'}"
    link = await patient_bus(files(site.folder)).connect(NODE)  # it was not for another reason
    await link.close()


async def test_a_new_node_is_let_in_without_a_restart_and_one_who_is_removed_is_not(
    site: ProvisionedBrokers, arbiter: Link
) -> None:
    (broker,) = site.nodes
    definitions = str(site.folder / "brokers/b1/definitions.json")

    async def control(*words: str) -> str:
        # In a thread: a command takes long on a busy machine, and the arbiter must be heard by the broker meanwhile.
        return await asyncio.to_thread(broker.control, *words)

    assert "rabbitmqctl import_definitions" in site.provision("--nodes", "n3")
    await control("import_definitions", definitions)
    new = Party("node", "n3")
    link = await patient_bus(site.url("node-n3")).connect(new)
    assert await said(link, ARBITER, b"hello") is None
    assert await heard(arbiter) == ("node-n3", b"hello")
    await link.close()
    url = site.url("app-bob")
    kept = {name: (site.folder / "parties/app-bob" / name).read_bytes() for name in ("ca.pem", "cert.pem", "key.pem")}
    link = await patient_bus(url).connect(GONE)
    steps = site.provision("--remove", "app-bob").splitlines()
    (line,) = [step.partition("next: ")[2] for step in steps if "rabbitmqctl" in step and "app-bob" in step]
    for command in line.split("; "):
        await control(*command.split()[1:])
    await control("import_definitions", definitions)
    assert "app-bob" not in await control("list_users")
    with pytest.raises(BusError):
        await said(link, ARBITER, b"one more word")
    (site.folder / "parties/app-bob").mkdir()
    for name, text in kept.items():  # the certificate itself is still good
        (site.folder / "parties/app-bob" / name).write_bytes(text)
    with pytest.raises(NotPermitted, match="check its certificate"):
        await patient_bus(url).connect(GONE)


def test_the_doctor_finds_nothing_to_mend(site: ProvisionedBrokers) -> None:
    url = site.url("node-n1")
    assert {check.verdict for check in (*doctor._certificates(url), doctor._broker(url))} == {"ok"}


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_whole_site_trains_and_gpus_change_hands(tmp_path: Path, site: ProvisionedBrokers) -> None:
    with started(Cluster(tmp_path, site.nodes[0], "/")) as cluster:
        cluster.fill()
        cluster.contest()
        cluster.finish_without_a_scratch()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProvisionedBrokers]:
    _need_rabbitmq()
    folder = tmp_path_factory.mktemp("three")
    with ProvisionedBrokers(folder, nodes=("n1", "n2"), owners=("me",), brokers=3) as running:
        yield running


@pytest.mark.full
@pytest.mark.timeout(900)
def test_of_three_brokers_one_may_stop_and_without_a_second_training_goes_on(
    tmp_path: Path, three: ProvisionedBrokers
) -> None:
    with started(Cluster(tmp_path, three.nodes[0], "/")) as cluster:
        arbiter = cluster.arbiter

        def wait_decisions(count: int) -> None:
            before = len(arbiter.logged("round.closed"))
            until(lambda: len(arbiter.logged("round.closed")) >= before + count, f"{count} more rounds")

        cluster.fill(steps=1000)
        first, second, _third = three.in_order_of("arbiter")  # it is connected to the first
        first.stop()
        until(lambda: len(arbiter.logged("bus.connected")) >= 2, "it leads again, at another broker")
        cluster.contest()
        wait_decisions(2)
        cluster.wait_progress(10)

        away = len(arbiter.logged("bus.unavailable"))
        second.kill()
        until(lambda: len(arbiter.logged("bus.unavailable")) >= away + 2, "the last broker stands still by itself")
        decided = len(arbiter.logged("round.closed"))
        cluster.wait_progress(30)
        assert len(arbiter.logged("round.closed")) == decided, "somebody decides without most of the brokers"

        second.start()
        wait_decisions(2)
        first.start()
        cluster.finish_without_a_scratch()
        epochs = [line["epoch"] for line in arbiter.logged("bus.connected")]
        assert epochs == sorted(set(epochs)), "each leadership has an epoch of its own"


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_on_three_brokers_that_replicate_nothing_the_arbiter_waits_for_the_one_that_has_its_queues(
    three: ProvisionedBrokers,
) -> None:
    first, *others = three.in_order_of("arbiter")
    first.control("add_vhost", "plain")
    first.control("set_permissions", "-p", "plain", "arbiter", ".*", ".*", ".*")
    bus = patient_bus(three.url("arbiter").replace("/gpu?", "/plain?"))
    link = await bus.connect(ARBITER)
    await link.lead()
    first.stop()
    with pytest.raises(ConnectionLost):
        await link.receive()
    assert [other.control("list_vhosts").count("plain") for other in others] == [1, 1]
    with pytest.raises(ConnectionLost, match=r"a queue is away with its broker: .*that broker must come back"):
        await (await bus.connect(ARBITER)).lead()
    first.start()
    async with asyncio.timeout(PATIENCE_S):
        await (await bus.connect(ARBITER)).lead()


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_one_broker_becomes_three_that_have_every_queue(tmp_path: Path) -> None:
    _need_rabbitmq()

    async def lead(site: ProvisionedBrokers) -> set[str]:
        """Lead, and return the kinds of all queues that last."""
        link = await patient_bus(site.url("arbiter")).connect(ARBITER)
        await link.lead()
        await link.provision(NODE)
        await link.close()
        listed = site.nodes[-1].control("--quiet", "list_queues", "-p", "gpu", "type", "members")
        return {line.split()[0] for line in listed.splitlines() if line.count("@") == len(site.nodes)}

    with ProvisionedBrokers(tmp_path, nodes=("n1",), owners=("me",)) as site:
        await lead(site)
        assert "classic" in site.nodes[0].control("list_queues", "-p", "gpu", "type")
        site.become(3)
        assert await lead(site) == {"quorum"}
        assert "classic" not in site.nodes[0].control("list_queues", "-p", "gpu", "type")
