"""The lab: links are cut, and leadership goes to and fro between two hosts; no task is harmed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.lab import network
from tests.lab.network import Network
from tests.lab.site import LINKS, Lab, Link, missing, running_lab
from tests.support.cluster import until

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(1800)]

#: So long each link is cut, in seconds: mostly longer than a daemon waits for its broker or store before it gives the
#: connection up.
CUTS: Sequence[tuple[Link, float]] = tuple(zip(LINKS, (120.0, 60.0, 10.0, 30.0), strict=True))
#: Kills of the leader, one host in turn with the other.
KILLS = 20


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    if reason := missing():
        pytest.skip(reason)
    with running_lab(tmp_path) as made:
        made.keep_busy()
        made.wait_training(processes=2)
        yield made


def assert_whole(lab: Lab) -> None:
    audit = lab.audit()
    assert audit.whole, audit
    assert audit.hand_overs > 0, "no GPU changed hands, so nothing was shown"
    assert [line for arbiter in lab.arbiters for line in arbiter.lines("standby.differs")] == []


KNOCK = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2.0)"


def test_hosts_reach_each_other_over_the_networks_that_both_are_on_until_a_cable_is_cut() -> None:
    if reason := network.missing():
        pytest.skip(reason)
    hosts = {"db": ("store",), "a": ("bus", "store"), "b": ("bus",), "c": ("store",)}
    with Network(hosts) as made, ExitStack() as stack:

        def reaches(host: str, place: str, name: str) -> bool:
            knock = [sys.executable, "-I", "-S", "-c", KNOCK, made.addresses[place, name], "7000"]
            return subprocess.run([*made.within(host), *knock], capture_output=True, check=False).returncode == 0

        for host, name in made.addresses:
            listen = (
                "import socket, sys; s = socket.create_server((sys.argv[1], 7000)); print(flush=True); sys.stdin.read()"
            )
            command = [*made.within(host), sys.executable, "-I", "-S", "-c", listen, made.addresses[host, name]]
            server = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert server.stdout is not None
            assert server.stdout.readline() == b"\n"
        assert reaches("a", "db", "store")
        assert reaches("b", "a", "bus")
        assert not reaches("b", "db", "store"), "b is not on that network"
        made.cut("a", "store")
        assert not reaches("a", "db", "store")
        assert reaches("c", "db", "store")
        assert reaches("b", "a", "bus"), "the other cable is whole"
        made.mend("a", "store")
        until(lambda: reaches("a", "db", "store"), "the cable is laid again")


@pytest.mark.full
def test_links_that_are_cut_for_a_while_cost_nothing(lab: Lab) -> None:
    for link, cut_s in CUTS:
        epoch = lab.newest_epoch()
        lab.keep_busy()
        lab.wait_training(processes=2)
        with lab.without(link):
            cut = time.monotonic()
            if link in ("leader-broker", "leader-store"):
                lab.wait_led(newer_than=epoch)
            lab.wait_trained(20)  # of jobs that run: nodes that are cut off begin no other
            until(
                lambda end=cut + cut_s: time.monotonic() > end,
                "the link was down for long enough",
                within_s=cut_s + 9.0,
            )
        lab.submit_small()
        lab.wait_trained(20)
        for arbiter in lab.arbiters:
            arbiter.check()
    assert_whole(lab)


@pytest.mark.full
def test_leadership_that_goes_to_and_fro_between_two_hosts_costs_nothing(lab: Lab) -> None:
    leaders = []
    for _ in range(KILLS):
        lab.keep_busy()
        lab.wait_training(processes=2)
        leaders.append(lab.leader())
        lab.fail_over()
    assert leaders[0] is not leaders[1]
    assert leaders == leaders[:2] * (KILLS // 2)
    assert_whole(lab)
