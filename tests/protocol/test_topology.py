"""Names, routes and rights; that the broker enforces them is the contract suite's business."""

from __future__ import annotations

import re
import shlex

import pytest

from protocol.bus.provision import broker_config, user_commands
from protocol.messages import ARBITER, Party
from protocol.topology import Topology, with_prefix

NODE, APP, LONG_APP = Party("node", "n1"), Party("app", "a1"), Party("app", "a10")
TOPOLOGY = Topology()


@pytest.mark.parametrize(
    ("sender", "to", "beat", "exchange", "key"),
    [
        (APP, ARBITER, False, "ga.agents", "bid.app-a1"),
        (APP, ARBITER, True, "ga.agents", "hb.app-a1"),
        (NODE, ARBITER, False, "ga.agents", "ack.node-n1"),
        (NODE, ARBITER, True, "ga.agents", "pulse.node-n1"),
        (ARBITER, APP, False, "", "app.a1"),
        (ARBITER, NODE, True, "", "node.n1"),
    ],
)
def test_a_route_says_who_speaks_and_only_a_beat_may_be_lost(
    sender: Party, to: Party, beat: bool, exchange: str, key: str
) -> None:
    route = TOPOLOGY.route(sender, to, beat=beat)
    assert (route.exchange, route.key) == (exchange, key)
    assert route.persistent is route.mandatory is not beat


def test_a_prefix_keeps_two_sites_apart() -> None:
    one, two = with_prefix(TOPOLOGY, "one-"), with_prefix(TOPOLOGY, "two-")
    for site, other in ((one, two), (two, one)):
        names = {queue.name for queue in other.arbiter_queues} | {other.inbox(APP).name, other.up}
        assert names.isdisjoint({queue.name for queue in site.arbiter_queues} | {site.inbox(APP).name, site.up})
        rights = site.permissions(ARBITER)
        assert not any(re.search(rights.configure, name) for name in names)


def test_the_arbiter_may_do_all_that_leading_and_provisioning_takes_and_cannot_forge_a_bid() -> None:
    rights = TOPOLOGY.permissions(ARBITER)
    for queue in (*TOPOLOGY.arbiter_queues, TOPOLOGY.lane(APP), TOPOLOGY.inbox(APP), TOPOLOGY.inbox(NODE)):
        assert all(re.search(pattern, queue.name) for pattern in (rights.configure, rights.write, rights.read))
    for exchange in TOPOLOGY.exchanges:
        assert re.search(rights.configure, exchange.name)
        assert re.search(rights.read, exchange.name)
        assert not exchange.alternate or re.search(rights.write, exchange.alternate), "what naming an alternate takes"
    assert not re.search(rights.write, TOPOLOGY.up)
    assert re.search(rights.topic_write, "bid.app-a1") is None


@pytest.mark.parametrize("party", [NODE, APP])
def test_an_agent_may_write_upwards_and_read_its_own_inbox_and_nothing_else(party: Party) -> None:
    rights = TOPOLOGY.permissions(party)
    own = TOPOLOGY.inbox(party).name
    others = [*(queue.name for queue in TOPOLOGY.arbiter_queues), "app.a10", "app.a", "xapp.a1", "node.n10", "ga.dlx"]
    others += [TOPOLOGY.lane(party).name, "ga.lobby"]
    assert re.search(rights.read, own)
    assert re.search(rights.write, TOPOLOGY.up)
    assert not any(re.search(rights.read, name) or re.search(rights.write, name) for name in others)
    assert not any(re.search(rights.configure, name) for name in [own, TOPOLOGY.up, *others])
    assert not re.search(rights.write, "amq.default")
    keys = rights.topic_write.replace("{username}", party.user)
    for speaker in (NODE, APP, LONG_APP, Party("node", "n10")):
        for beat in (False, True):
            key = TOPOLOGY.route(speaker, ARBITER, beat=beat).key
            assert bool(re.search(keys, key)) == (speaker == party), f"{party.user} speaks as {speaker.user}"


def test_an_app_cannot_speak_under_a_name_that_begins_like_its_own() -> None:
    pattern = TOPOLOGY.permissions(APP).topic_write.replace("{username}", APP.user)
    assert re.search(pattern, TOPOLOGY.route(APP, ARBITER, beat=False).key)
    assert re.search(pattern, TOPOLOGY.route(APP, ARBITER, beat=True).key)
    assert not re.search(pattern, TOPOLOGY.route(LONG_APP, ARBITER, beat=False).key)
    assert not re.search(pattern, "ack.app-a1")


def test_the_commands_for_an_administrator_can_be_pasted_into_a_shell() -> None:
    lines = [shlex.split(line) for line in user_commands(APP, vhost="gpu")]
    assert [line[:2] for line in lines[:3]] == [
        ["rabbitmqctl", "add_user"],
        ["rabbitmqctl", "set_user_limits"],
        ["rabbitmqctl", "set_permissions"],
    ]
    assert lines[2] == ["rabbitmqctl", "set_permissions", "-p", "gpu", "app-a1", "^$", r"^ga\.agents$", r"^app\.a1$"]
    assert lines[3][2:] == ["-p", "gpu", "app-a1", "ga.agents", r"^(bid|hb)\.{username}$", "^$"]
    assert lines[4][2:] == ["-p", "gpu", "app-a1", "ga.dlx", "^$", "^$"]


def test_the_broker_lets_a_leader_hold_its_token_for_a_year() -> None:
    line = next(line for line in broker_config().splitlines() if line.startswith("consumer_timeout"))
    assert int(line.split("=")[1]) > 364 * 24 * 3600 * 1000
