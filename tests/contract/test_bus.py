"""The promises of `protocol.bus`, each on the in-process broker and on RabbitMQ."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress

import pytest
from msgspec.structs import replace

from protocol.bus import BusError, ConnectionLost, Full, Link, NotPermitted, NotProvisioned, Outgoing, Unroutable
from protocol.messages import ARBITER, Party
from tests.contract.conftest import (
    APP,
    LONG_APP,
    NODE,
    OTHER_APP,
    OTHER_NODE,
    PARTIES,
    AmqpSite,
    MemorySite,
    Site,
    eventually,
    patiently,
    receive,
)


async def say(link: Link, to: Party, *texts: bytes, beat: bool = False) -> Sequence[BusError | None]:
    return await patiently(link.send([Outgoing(to, text, beat) for text in texts]))


async def hear(link: Link, count: int) -> list[bytes]:
    """Receive and acknowledge so many."""
    heard = []
    for _ in range(count):
        delivery = await receive(link)
        heard.append(delivery.data)
        await delivery.ack()
    return heard


async def reading(site: Site, party: Party) -> Link:
    link = await site.connect(party)
    await patiently(link.consume())
    return link


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


# --- 1 at least once, in order --------------------------------------------------------------------------------------


async def test_messages_of_one_link_to_one_party_arrive_in_the_order_sent(site: Site, arbiter: Link) -> None:
    app = await site.connect(APP)
    assert await say(app, ARBITER, *numbers(300)) == [None] * 300
    assert await hear(arbiter, 300) == numbers(300)


async def test_order_holds_across_separate_sends(site: Site, arbiter: Link) -> None:
    node = await reading(site, NODE)
    heard = []
    for text in numbers(10):
        assert await say(arbiter, NODE, text) == [None]
        heard += await hear(node, 1)
    assert heard == numbers(10)


async def test_unsettled_deliveries_come_again_at_the_head_in_order_and_marked(site: Site, arbiter: Link) -> None:
    app = await reading(site, APP)
    await say(arbiter, APP, *numbers(4))
    first = [await receive(app) for _ in range(4)]
    assert not any(delivery.redelivered for delivery in first)
    await first[0].ack()
    await say(arbiter, APP, b"later")
    await receive(app)  # the broker has seen the acknowledgement, for it sends one more
    await site.drop(app)
    again = await reading(site, APP)
    deliveries = [await receive(again) for _ in range(4)]
    assert [delivery.data for delivery in deliveries] == [b"1", b"2", b"3", b"later"]
    assert [delivery.redelivered for delivery in deliveries] == [True] * 4


async def test_several_are_settled_at_once_and_no_others(site: Site, arbiter: Link) -> None:
    app = await reading(site, APP)
    await say(arbiter, APP, *numbers(4))
    first, second, third, fourth = [await receive(app) for _ in range(4)]
    await app.ack([second, third])  # the first stays unsettled
    await say(arbiter, APP, b"4", b"5")
    fifth, sixth = await receive(app), await receive(app)
    await app.ack([first, fourth, fifth])
    await say(arbiter, APP, b"6", b"7", b"8")
    for _ in range(3):
        await receive(app)
    await site.drop(app)
    again = await reading(site, APP)
    assert (await receive(again)).data == sixth.data == b"5"
    assert await hear(again, 3) == [b"6", b"7", b"8"]


async def test_what_nodes_said_and_is_unsettled_passes_to_the_next_leader_in_order(site: Site, arbiter: Link) -> None:
    node = await site.connect(NODE)
    await say(node, ARBITER, *numbers(3))
    for _ in range(3):
        await receive(arbiter)
    await site.drop(arbiter)
    successor = await site.connect(ARBITER)
    await patiently(successor.lead())
    assert await hear(successor, 3) == numbers(3)


async def test_no_more_than_the_prefetch_is_delivered_unsettled(site: Site, arbiter: Link) -> None:
    node = await reading(site, NODE)
    await say(arbiter, NODE, *numbers(3))
    first, _ = await receive(node), await receive(node)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await node.receive()
    await first.ack()
    assert (await receive(node)).data == b"2"


# --- 2 never synchronously ------------------------------------------------------------------------------------------


async def test_a_send_gives_the_receiver_no_control(site: Site, arbiter: Link) -> None:
    app = await reading(site, APP)
    seen: list[bytes] = []

    async def listen() -> None:
        seen.append((await receive(app)).data)

    async with asyncio.TaskGroup() as group:
        group.create_task(listen())
        await asyncio.sleep(0)
        sending = group.create_task(say(arbiter, APP, b"hello"))
        assert seen == []
    assert sending.result() == [None]
    assert seen == [b"hello"]


# --- 3 known or unknown ---------------------------------------------------------------------------------------------


async def test_nobody_there_is_unroutable_and_the_others_get_theirs(site: Site, arbiter: Link) -> None:
    app = await reading(site, APP)
    nobody = Party("app", "nobody")
    verdicts = await patiently(
        arbiter.send([Outgoing(nobody, b"0"), Outgoing(APP, b"1"), Outgoing(nobody, b"2"), Outgoing(APP, b"3")])
    )
    assert [type(verdict) for verdict in verdicts] == [Unroutable, type(None), Unroutable, type(None)]
    assert "nobody" in str(verdicts[0])
    assert await hear(app, 2) == [b"1", b"3"]


async def test_before_any_arbiter_led_an_agents_words_are_unroutable(site: Site) -> None:
    app = await site.connect(APP)
    assert isinstance((await say(app, ARBITER, b"hello?"))[0], Unroutable)
    assert isinstance((await say(app, ARBITER, b"hello?"))[0], Unroutable)
    await say(app, ARBITER, b"beat", b"beat", beat=True)
    arbiter = await site.connect(ARBITER)
    await patiently(arbiter.lead())
    assert await say(app, ARBITER, b"hello!") == [None]
    assert await hear(arbiter, 1) == [b"hello!"]


async def test_a_beat_reaches_the_arbiter_and_an_agent(site: Site, arbiter: Link) -> None:
    app, node = await reading(site, APP), await reading(site, NODE)
    await say(app, ARBITER, b"app beat", beat=True)
    assert await hear(arbiter, 1) == [b"app beat"]
    await say(node, ARBITER, b"node beat", beat=True)
    assert await hear(arbiter, 1) == [b"node beat"]
    await say(arbiter, APP, b"holdings", beat=True)
    assert await hear(app, 1) == [b"holdings"]


async def test_a_beat_to_nobody_is_no_error(site: Site, arbiter: Link) -> None:
    assert await say(arbiter, Party("app", "nobody"), b"beat", beat=True) == [None]


async def test_large_messages_arrive_whole(site: Site, arbiter: Link) -> None:
    node = await reading(site, NODE)
    large = bytes(range(256)) * 4096
    assert await say(arbiter, NODE, large) == [None]
    assert await hear(node, 1) == [large]


async def test_a_send_over_a_dead_link_is_a_lost_connection(site: Site, arbiter: Link) -> None:
    app = await site.connect(APP)
    await say(app, ARBITER, b"first")
    await app.close()
    with pytest.raises(ConnectionLost):
        await say(app, ARBITER, b"second")


# --- 4 identity -----------------------------------------------------------------------------------------------------


async def test_the_receiver_learns_whom_the_broker_authenticated(site: Site, arbiter: Link) -> None:
    app, node = await reading(site, APP), await reading(site, NODE)
    await say(app, ARBITER, b"bid")
    assert (await receive(arbiter)).user == "app-a1"
    await say(node, ARBITER, b"report", beat=True)
    assert (await receive(arbiter)).user == "node-n1"
    await say(arbiter, NODE, b"plan")
    assert (await receive(node)).user == "arbiter"


@pytest.mark.parametrize("to", [NODE, OTHER_APP, APP])
async def test_an_app_can_send_to_nobody_but_the_arbiter(site: Site, arbiter: Link, to: Party) -> None:
    app = await site.connect(APP)
    verdicts = await patiently(app.send([Outgoing(ARBITER, b"0"), Outgoing(to, b"1"), Outgoing(ARBITER, b"2")]))
    assert [type(verdict) for verdict in verdicts] == [type(None), NotPermitted, type(None)]
    heard = set()
    while heard != {b"0", b"2"}:  # what went down with the refused one was sent again: at least once
        heard |= set(await hear(arbiter, 1))


async def test_a_node_can_send_to_nobody_but_the_arbiter(site: Site, arbiter: Link) -> None:
    node = await site.connect(NODE)
    assert isinstance((await say(node, APP, b"x"))[0], NotPermitted)
    assert isinstance((await say(node, OTHER_NODE, b"x"))[0], NotPermitted)
    assert await say(node, ARBITER, b"x") == [None]


@pytest.mark.parametrize("reader", [OTHER_APP, LONG_APP])
async def test_an_app_cannot_read_anothers_inbox(site: Site, arbiter: Link, reader: Party) -> None:
    thief = await site.connect(APP, user=None) if reader == APP else await site.connect(reader)
    object.__setattr__(thief, "_party", APP)
    with pytest.raises(NotPermitted):
        await patiently(thief.consume())


async def test_an_agent_can_neither_lead_nor_provision(site: Site, arbiter: Link) -> None:
    await arbiter.close()  # the place is free
    with pytest.raises(NotPermitted):
        await patiently((await site.connect(APP)).lead())
    with pytest.raises(NotPermitted):
        await patiently((await site.connect(APP)).provision(APP))


# --- 5 provisioning -------------------------------------------------------------------------------------------------


async def test_an_inbox_exists_once_the_arbiter_provisioned_it(site: Site) -> None:
    arbiter, app = await site.connect(ARBITER), await site.connect(APP)
    await patiently(arbiter.lead())
    for _ in range(2):
        with pytest.raises(NotProvisioned):
            await patiently(app.consume())
    assert await say(app, ARBITER, b"I am here") == [None]  # the attempt did not hurt the link
    await patiently(arbiter.provision(APP))
    await patiently(app.consume())
    await say(arbiter, APP, b"welcome")
    assert await hear(app, 1) == [b"welcome"]


async def test_provisioning_twice_changes_nothing(site: Site, arbiter: Link) -> None:
    await say(arbiter, APP, b"waiting")
    await patiently(arbiter.provision(APP))
    app = await reading(site, APP)
    assert await hear(app, 1) == [b"waiting"]


async def test_many_are_provisioned_at_once(site: Site) -> None:
    arbiter = await site.connect(ARBITER)
    await patiently(arbiter.lead())
    await patiently(arbiter.provision(*PARTIES[1:]))
    agents = [await reading(site, party) for party in PARTIES[1:]]
    for agent in agents:
        assert await say(agent, ARBITER, agent.party.user.encode()) == [None]
    assert sorted(await hear(arbiter, len(agents))) == sorted(party.user.encode() for party in PARTIES[1:])


async def test_one_inbox_with_other_limits_is_refused_among_many_and_costs_the_link_nothing(
    site: Site, arbiter: Link
) -> None:
    site.topology = replace(site.topology, app_max=7)
    if isinstance(site, MemorySite):
        site.broker.topology = site.topology
    other, newcomer = await site.connect(ARBITER), Party("node", "n3")
    with pytest.raises(NotPermitted, match="same topology"):
        await patiently(other.provision(newcomer, APP, NODE))
    await patiently(other.provision(newcomer, NODE))
    assert await say(other, newcomer, b"welcome") == [None]


# --- 6 one leader ---------------------------------------------------------------------------------------------------


async def test_the_first_epoch_is_one(site: Site) -> None:
    link = await site.connect(ARBITER)
    assert await patiently(link.lead()) == 1


async def test_a_second_arbiter_waits_until_the_first_is_gone_and_has_a_higher_epoch(site: Site) -> None:
    first, second = await site.connect(ARBITER), await site.connect(ARBITER)
    epoch = await patiently(first.lead())
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(second.lead())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await asyncio.shield(waiting)
        await site.drop(first)
        assert await patiently(waiting) == epoch + 1


async def test_epochs_grow_over_closings_and_cuts_with_others_waiting(site: Site) -> None:
    epochs = []
    link = await site.connect(ARBITER)
    epochs.append(await patiently(link.lead()))
    for turn in range(6):
        standby = await site.connect(ARBITER)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(standby.lead())
            if turn % 3:  # sometimes the successor is already waiting, sometimes it comes at that very moment
                await asyncio.sleep(0.02 * turn)
            await (link.close() if turn % 2 else site.drop(link))
            epochs.append(await patiently(waiting))
        link = standby
    assert epochs == sorted(set(epochs))


async def test_several_first_arbiters_at_once_make_one_leader_after_the_other(site: Site) -> None:
    links = [await site.connect(ARBITER) for _ in range(3)]
    epochs: list[int] = []
    leading: list[Link] = []
    led = asyncio.Event()

    async def lead(link: Link) -> None:
        epochs.append(await link.lead())
        leading.append(link)
        led.set()

    async with asyncio.TaskGroup() as group:
        for link in links:
            group.create_task(lead(link))
        for count in (1, 2, 3):
            await patiently(led.wait())
            await asyncio.sleep(0.2)  # long enough for a second token to show
            assert len(leading) == count
            led.clear()
            await leading[-1].close()
    assert epochs == [1, 2, 3]


async def test_the_inbox_is_read_by_the_leader_only(site: Site) -> None:
    first, second = await site.connect(ARBITER), await site.connect(ARBITER)
    await patiently(first.lead())
    app = await site.connect(APP)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(second.lead())
        await say(app, ARBITER, *numbers(20))
        assert await hear(first, 20) == numbers(20)
        await first.close()
        await patiently(waiting)
    await say(app, ARBITER, b"next")
    assert await hear(second, 1) == [b"next"]


# --- 7 limits -------------------------------------------------------------------------------------------------------


async def test_an_apps_inbox_keeps_the_newest(site: Site, arbiter: Link) -> None:
    assert await say(arbiter, APP, *numbers(12)) == [None] * 12
    app = await reading(site, APP)
    assert await hear(app, 5) == numbers(12)[-5:]


async def test_a_nodes_inbox_refuses_what_is_too_much(site: Site, arbiter: Link) -> None:
    verdicts = [(await say(arbiter, NODE, text))[0] for text in numbers(5)]
    assert [type(verdict) for verdict in verdicts] == [type(None)] * 3 + [Full] * 2
    node = await reading(site, NODE)
    assert await hear(node, 3) == numbers(3)
    assert await say(arbiter, NODE, b"room again") == [None]


async def test_a_node_command_that_expires_comes_back_as_a_dead_letter(site: Site, arbiter: Link) -> None:
    await say(arbiter, NODE, b"plan")
    await site.advance(0.5)
    dead = await receive(arbiter)
    assert (dead.data, dead.dead, dead.user) == (b"plan", "expired:node.n1", "arbiter")
    await dead.ack()


async def test_expiry_spares_what_is_delivered(site: Site, arbiter: Link) -> None:
    node = await reading(site, NODE)
    await say(arbiter, NODE, b"plan")
    delivery = await receive(node)
    await site.advance(0.6)
    await delivery.ack()
    await say(arbiter, NODE, b"next")
    assert await hear(node, 1) == [b"next"]


async def test_what_a_node_rejects_comes_back_as_a_dead_letter(site: Site, arbiter: Link) -> None:
    node = await reading(site, NODE)
    await say(arbiter, NODE, b"nonsense")
    await (await receive(node)).reject()
    dead = await receive(arbiter)
    assert (dead.data, dead.dead) == (b"nonsense", "rejected:node.n1")


async def test_what_the_arbiter_rejects_of_a_node_comes_back_as_a_dead_letter(site: Site, arbiter: Link) -> None:
    node = await site.connect(NODE)
    await say(node, ARBITER, b"nonsense")
    await (await receive(arbiter)).reject()
    dead = await receive(arbiter)
    assert (dead.data, dead.dead, dead.user) == (b"nonsense", "rejected:arbiter.inbox", "node-n1")


async def test_what_the_arbiter_rejects_of_an_owner_is_gone_and_costs_nobody_anything(
    site: Site, arbiter: Link
) -> None:
    app = await site.connect(APP)
    await say(app, ARBITER, b"nonsense")
    await (await receive(arbiter)).reject()
    await say(app, ARBITER, b"sense")
    assert await hear(arbiter, 1) == [b"sense"]


async def test_a_message_that_outlived_too_many_readers_is_put_aside(site: Site, arbiter: Link) -> None:
    node = await site.connect(NODE)
    await say(node, ARBITER, b"poison")
    link = arbiter
    for _ in range(site.topology.inbox_delivery_limit + 1):
        delivery = await receive(link)
        assert (delivery.data, delivery.dead) == (b"poison", "")
        await site.drop(link)
        link = await site.connect(ARBITER)
        await patiently(link.lead())
    dead = await receive(link)
    assert (dead.data, dead.dead) == (b"poison", "delivery_limit:arbiter.inbox")


async def test_a_flood_of_one_owner_keeps_no_other_from_being_heard(site: Site, arbiter: Link) -> None:
    flood, quiet = await site.connect(APP), await site.connect(OTHER_APP)
    assert await say(flood, ARBITER, *numbers(500)) == [None] * 500
    assert await say(quiet, ARBITER, b"a question") == [None]
    heard: list[bytes] = []
    while b"a question" not in heard:
        heard += await hear(arbiter, 1)
    assert len(heard) <= 2 * site.topology.lane_prefetch + 2


async def test_of_what_an_owner_says_too_fast_the_newest_is_kept(site: Site, arbiter: Link) -> None:
    app = await site.connect(APP)
    await say(app, ARBITER, *numbers(site.topology.lane_prefetch))
    unsettled = [await receive(arbiter) for _ in range(site.topology.lane_prefetch)]
    more = [b"more %d" % number for number in range(site.topology.lane_max + 10)]
    assert await say(app, ARBITER, *more) == [None] * len(more)
    await arbiter.ack(unsettled)
    assert await hear(arbiter, site.topology.lane_max) == more[10:]


async def test_what_an_owner_restates_is_dropped_once_it_is_stale_and_what_it_says_once_is_kept(
    site: Site, arbiter: Link
) -> None:
    app = await site.connect(APP)
    await say(app, ARBITER, *numbers(site.topology.lane_prefetch))
    unsettled = [await receive(arbiter) for _ in range(site.topology.lane_prefetch)]
    await say(app, ARBITER, b"stale", beat=True)
    await say(app, ARBITER, b"a question")
    await site.advance(0.6)
    await arbiter.ack(unsettled)
    assert await hear(arbiter, 1) == [b"a question"]
    await say(app, ARBITER, b"fresh", beat=True)
    assert await hear(arbiter, 1) == [b"fresh"]


async def test_the_first_words_of_an_owner_reach_a_leader_that_does_not_know_it(site: Site) -> None:
    arbiter, app = await site.connect(ARBITER), await site.connect(APP)
    await patiently(arbiter.lead())
    assert await say(app, ARBITER, b"hello") == [None]
    assert await hear(arbiter, 1) == [b"hello"]


async def test_an_owner_is_heard_by_the_next_leader_too(site: Site, arbiter: Link) -> None:
    app = await site.connect(APP)
    await say(app, ARBITER, b"to the first")
    assert await hear(arbiter, 1) == [b"to the first"]
    await site.drop(arbiter)
    successor = await site.connect(ARBITER)
    await patiently(successor.lead())
    heard: list[bytes] = []
    for number in itertools.count():  # the broker may not have noticed yet that the first leader's lane is no more
        await say(app, ARBITER, b"%d" % number)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                heard.append((await successor.receive()).data)
                break
    assert heard


# --- 8 no silence ---------------------------------------------------------------------------------------------------


async def test_a_dead_connection_ends_receive_and_send_with_connection_lost(site: Site, arbiter: Link) -> None:
    app = await reading(site, APP)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(_outcome(app.receive()))
        await asyncio.sleep(0)
        await site.drop(app)
        assert isinstance(await patiently(waiting), ConnectionLost)
    with pytest.raises(ConnectionLost):
        await app.receive()
    with pytest.raises(ConnectionLost):
        await say(app, ARBITER, b"x")


async def test_settling_over_a_dead_link_is_a_lost_connection(site: Site, arbiter: Link) -> None:
    app = await reading(site, APP)
    await say(arbiter, APP, b"x", b"y")
    first, second = await receive(app), await receive(app)
    await site.drop(app)
    with pytest.raises(ConnectionLost):
        await app.receive()
    with pytest.raises(ConnectionLost):
        await first.ack()
    with pytest.raises(ConnectionLost):
        await second.reject()


async def test_waiting_to_lead_ends_with_connection_lost(site: Site, arbiter: Link) -> None:
    standby = await site.connect(ARBITER)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(_outcome(standby.lead()))
        await asyncio.sleep(0.2)
        await site.drop(standby)
        assert isinstance(await patiently(waiting), ConnectionLost)


async def test_cancelling_a_caller_cancels_only_that_caller(site: Site, arbiter: Link) -> None:
    app = await reading(site, APP)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await app.receive()
    await say(arbiter, APP, b"still here")
    assert await hear(app, 1) == [b"still here"]


async def test_closing_twice_is_harmless(site: Site) -> None:
    link = await site.connect(APP)
    await link.close()
    await link.close()


async def _outcome(awaitable: object) -> object:
    try:
        return await awaitable  # type: ignore[misc]
    except ConnectionLost as error:
        return error


# --- faults that need one kind of broker ----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["drop_publish", "drop_confirm"])
async def test_an_unconfirmed_message_is_an_unknown_outcome(fault: str) -> None:
    from tests.contract.conftest import LIMITS

    site = MemorySite(LIMITS)
    arbiter, app = await site.connect(ARBITER), await site.connect(APP)
    await arbiter.lead()
    setattr(site.broker, fault, 1)
    with pytest.raises(ConnectionLost):
        await say(app, ARBITER, b"x")
    if fault == "drop_confirm":
        assert await hear(arbiter, 1) == [b"x"]
    app = await site.connect(APP)
    await say(app, ARBITER, b"y")
    assert await hear(arbiter, 1) == [b"y"]
    await site.close()


async def test_a_frozen_participant_takes_its_prefetch_and_sees_nothing() -> None:
    from tests.contract.conftest import LIMITS

    site = MemorySite(LIMITS)
    arbiter, node = await site.connect(ARBITER), await site.connect(NODE)
    await arbiter.lead()
    await arbiter.provision(NODE)
    await node.consume()
    site.broker.freeze(node)
    await say(arbiter, NODE, *numbers(3))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await node.receive()
    site.broker.thaw(node)
    assert await hear(node, 3) == numbers(3)
    await site.close()


async def test_a_stalled_connection_is_lost_and_not_silence(site: Site, arbiter: Link) -> None:
    if not isinstance(site, AmqpSite):
        pytest.skip("an in-process connection cannot stall")
    app = await reading(site, APP)
    app._timeout_s = 0.3  # type: ignore[attr-defined]
    site.proxies[id(app)].stall()
    with pytest.raises(ConnectionLost):
        await say(app, ARBITER, b"x")
    with pytest.raises(ConnectionLost):
        await app.receive()


async def test_a_deleted_inbox_is_a_lost_connection_and_not_silence(site: Site, arbiter: Link) -> None:
    if not isinstance(site, AmqpSite):
        pytest.skip("nobody can delete a queue of the in-process broker")
    app = await reading(site, APP)
    administrator = await site.connect(ARBITER, user="admin")
    channel = await administrator._open_setup_channel()  # type: ignore[attr-defined]
    await channel.queue_delete("app.a1")
    with pytest.raises(ConnectionLost, match="deleted"):
        await receive(app)


async def test_a_wrong_password_is_refused_and_an_absent_broker_is_lost(site: Site) -> None:
    from protocol.bus.amqp import AmqpBus
    from tests.support.ports import free_port

    if not isinstance(site, AmqpSite):
        pytest.skip("the in-process broker has no passwords")
    with pytest.raises(NotPermitted, match="password"):
        await AmqpBus(site.broker.url("app-a1", site.vhost, password="wrong")).connect(APP)
    with pytest.raises(NotPermitted, match="let"):
        await AmqpBus(site.broker.url("app-a1", "nowhere")).connect(APP)
    with pytest.raises(ConnectionLost, match="cannot reach"):
        await AmqpBus(f"amqp://a:b@127.0.0.1:{free_port()}/").connect(APP)


async def test_of_several_brokers_one_that_answers_is_found_and_tried_first_the_next_time(site: Site) -> None:
    from protocol.bus.amqp import AmqpBus
    from tests.support.ports import free_port
    from tests.support.proxy import Proxy

    if not isinstance(site, AmqpSite):
        pytest.skip("the in-process broker is alone")
    away, also_away = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    there = f"127.0.0.1:{site.broker.port}"
    url = site.broker.url("app-a1", site.vhost)
    bus = AmqpBus(url.replace(there, f"{away},{there}"))
    assert f"app-a1:***@{away},{there}/" in bus.url
    link = await bus.connect(APP)
    await link.close()
    proxy = Proxy(site.broker.port)  # the first one is back, and would be noticed
    await proxy.start(int(away.rpartition(":")[2]))
    try:
        link = await bus.connect(APP)
        assert proxy.pipes == []
        await link.close()
    finally:
        await proxy.close()
    with pytest.raises(ConnectionLost) as lost:
        await AmqpBus(url.replace(there, f"{away},{also_away}")).connect(APP)
    assert [f"{each}/" in str(lost.value) for each in (away, also_away)] == [True, True]
    wrong = site.broker.url("app-a1", site.vhost, password="wrong")
    with pytest.raises(NotPermitted, match="password"):  # which tells more than that the others are away
        await AmqpBus(wrong.replace(there, f"{away},{there},{also_away}")).connect(APP)


async def test_other_limits_than_those_declared_are_refused_with_the_mend(site: Site, arbiter: Link) -> None:
    site.topology = replace(site.topology, app_max=7)
    if isinstance(site, MemorySite):
        site.broker.topology = site.topology
    other = await site.connect(ARBITER)
    with pytest.raises(NotPermitted, match="same topology"):
        await patiently(other.provision(APP))


# --- a broker crash: last, because RabbitMQ takes seconds -----------------------------------------------------------


async def test_what_is_durable_survives_a_broker_crash_and_the_epoch_grows(site: Site, arbiter: Link) -> None:
    app, node = await reading(site, APP), await site.connect(NODE)
    await say(node, ARBITER, *numbers(3))
    await say(arbiter, APP, b"stored")
    await receive(app)  # and does not settle it
    if isinstance(site, AmqpSite):
        await asyncio.sleep(2)  # RabbitMQ 3.10 loses a quorum queue that is younger than about a second
    await site.restart()
    with pytest.raises(ConnectionLost):
        await receive(app)

    async def lead_again() -> tuple[Link, int]:
        link = await site.connect(ARBITER)
        return link, await link.lead()

    successor, epoch = await eventually(lead_again)
    assert epoch == 2
    assert await hear(successor, 3) == numbers(3)
    again = await reading(site, APP)
    assert await hear(again, 1) == [b"stored"]
