"""Daemons that stand still for longer than their timeouts, and wall clocks that jump: no task is harmed.

The site is that of `test_survival`. A leader with a standby that stands still: test_failover.py.
"""

from __future__ import annotations

import os
import pwd
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from app_agent.gateway import GatewayConfig
from arbiter.config import Gateway
from arbiter.core.state.model import ArbiterSettings
from protocol.bus.provision import gateway_commands
from tests.support import wall_clock
from tests.support.app_state import with_plain_ids
from tests.support.cluster import SETTINGS, Cluster, DaemonProcess, running_cluster, started, until
from tests.support.gateway import connected_as
from tests.support.rabbitmq import PASSWORD, PrivateRabbitMQ
from tests.support.wall_clock import WallClock

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.clock, pytest.mark.slow, pytest.mark.timeout(900)]

TIMEOUT_S = 5.0
#: So long a daemon stands still: longer than every timeout, and than the broker waits for a heartbeat.
STILL_S = 120.0
#: Mini-batches that no test waits for: the site is ended before.
ENDLESS = 100_000
DAY_S = 86_400.0


@pytest.fixture
def impatient(tmp_path: Path, broker: PrivateRabbitMQ, vhost: str) -> Iterator[Cluster]:
    """A site that takes nodes and app agents for lost after a few seconds."""
    settings = replace(SETTINGS, node_timeout_s=TIMEOUT_S, app_timeout_s=TIMEOUT_S)
    with running_cluster(tmp_path, broker, vhost, settings) as made:
        yield made


def stand_still(daemon: DaemonProcess, meanwhile: Callable[[], None]) -> None:
    """Stop a daemon for two minutes, and until `meanwhile` is done."""
    daemon.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        meanwhile()
        until(lambda: time.monotonic() > stopped + STILL_S, "it has stood still for long enough", within_s=2 * STILL_S)
    finally:
        daemon.signal(signal.SIGCONT)


def check_that_training_outlives(cluster: Cluster) -> None:
    """Have the daemon of its users stand still; training goes on, and afterwards GPUs change hands as ever."""
    cluster.fill(steps=int(1.4 * STILL_S / 0.04))
    workers = cluster.pids()
    stand_still(cluster.app_agent, lambda: cluster.wait_progress(30))
    cluster.contest()
    assert cluster.pids() >= workers
    cluster.finish_without_a_scratch()


def test_training_outlives_an_app_agent_that_stands_still(impatient: Cluster) -> None:
    check_that_training_outlives(impatient)


class GatewayCluster(Cluster):
    """A site whose users submit at a gateway; the tests do as the user nobody."""

    owner = "nobody"

    def __init__(self, folder: Path, broker: PrivateRabbitMQ, vhost: str, settings: ArbiterSettings) -> None:
        super().__init__(folder, broker, vhost, settings)
        for line in gateway_commands("login1", vhost=vhost):
            words = shlex.split(line)[1:]
            broker.control(*words, *([PASSWORD] if words[0] == "add_user" else []))
        state = str(folder / "gateway")
        with_plain_ids(replace(self.site.app, state_dir=state, owner=self.owner))
        gateway = GatewayConfig(
            "login1",
            bus=broker.url("gateway-login1", vhost),
            state_dir=state,
            socket=str(self.site.socket),
            beat_s=self.site.app.beat_s,
        )
        arbiter = replace(self.site.arbiter, gateways=(Gateway("login1"),))
        self.arbiter = DaemonProcess("arbiter", arbiter, folder, "arbiter")
        self.app_agent = DaemonProcess("gateway", gateway, folder, "gateway")


@pytest.mark.skipif(os.geteuid() != 0, reason="connecting as another user needs root")
def test_training_outlives_a_gateway_that_stands_still(
    reachable: Path, broker: PrivateRabbitMQ, vhost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography", reason="the package cryptography, in the extra `users`, is not installed")
    settings = replace(SETTINGS, node_timeout_s=TIMEOUT_S, app_timeout_s=TIMEOUT_S)
    site = GatewayCluster(reachable, broker, vhost, settings)
    users, connect = pwd.getpwnam(site.owner), socket.socket.connect

    def connect_as_user(made: socket.socket, address: Any) -> None:
        if address != str(site.site.socket) or os.geteuid() == users.pw_uid:  # which is so in the user's own process
            connect(made, address)
            return
        with connected_as(users.pw_uid, Path(address)) as theirs:
            os.dup2(theirs.fileno(), made.fileno())

    monkeypatch.setattr(socket.socket, "connect", connect_as_user)
    with started(site):
        check_that_training_outlives(site)


def test_jobs_of_a_node_agent_that_stands_still_go_on_elsewhere_and_no_gpu_is_shared(impatient: Cluster) -> None:
    app = impatient.submit(ENDLESS)
    impatient.wait_training(processes=1)
    here, there = ("n1", "n2") if impatient.pids_on("n1") else ("n2", "n1")
    (alone,) = impatient.pids_on(here)
    stand_still(
        impatient.nodes[here],
        lambda: until(lambda: bool(impatient.pids_on(there)), "its successor is on the other node"),
    )
    until(lambda: alone not in impatient.pids(), "the old one is told to go")
    impatient.wait_progress(20)
    told = impatient.told(app)
    kept = [step for pid, step in told if pid != alone]
    assert kept == list(range(kept[0], kept[0] + len(kept))), "its successor lost or repeated steps"
    assert kept[0] <= 1 + max(step for pid, step in told if pid == alone)
    assert impatient.watch.conflicts == []


def test_no_daemon_minds_a_wall_clock_that_jumps_while_it_runs_or_between_two_starts(
    tmp_path: Path, broker: PrivateRabbitMQ, vhost: str
) -> None:
    if reason := wall_clock.missing():
        pytest.skip(reason)
    clock = WallClock(tmp_path)
    cluster = Cluster(tmp_path, broker, vhost)
    for daemon in cluster.daemons:
        daemon.environment = clock.environment
    began = time.time()
    with started(cluster):
        cluster.fill(ENDLESS)
        workers = cluster.pids()
        for ahead_s in (400 * DAY_S, -400 * DAY_S, 0.0):
            clock.set(ahead_s)
            cluster.wait_progress(10)  # while it runs
            for daemon in cluster.daemons:
                daemon.kill()
                daemon.start()
            until(cluster.answers, "the app agent listens again")
            until(lambda: all(app["gpus"] for app in known(cluster)), "the arbiter knows what they hold")
            cluster.wait_progress(10)
            cluster.check()
        assert cluster.pids() == workers, "a task was started again"
        for app in cluster.steps:
            steps = [step for _pid, step in cluster.told(app)]
            assert steps == list(range(len(steps))), f"{app} lost or repeated steps"
        with cluster.client() as client:
            submitted = [record.submitted_at for record in client.apps()]
            rounds = [each["at"] for each in client.query("rounds")["rounds"]]
        now = time.time()
        assert all(began - 60.0 <= seconds(at) <= now + 60.0 for at in (*submitted, *rounds))
        assert cluster.watch.conflicts == []


def seconds(at: float | str) -> float:
    """Return a time as UNIX seconds, however it is told."""
    return datetime.fromisoformat(at).timestamp() if isinstance(at, str) else at


def known(cluster: Cluster) -> list[dict[str, object]]:
    """What the arbiter says of all apps, once it answers."""
    from launch.faults import Fault

    try:
        return [dict(app) for app in cluster.document()] or [{"gpus": ()}]
    except Fault:
        return [{"gpus": ()}]
