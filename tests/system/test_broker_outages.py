"""The broker is killed, stands still, forgets all it knew or loses its connections, and nobody who trains has noticed.

The site is that of `test_survival`.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from protocol.messages import Party
from tests.support.cluster import LEASE_S, SETTINGS, Cluster, running_cluster, until
from tests.support.proxy import cuttable_link
from tests.support.rabbitmq import PrivateRabbitMQ

pytestmark = [pytest.mark.broker, pytest.mark.clock, pytest.mark.slow, pytest.mark.timeout(300)]

#: Quorum queues younger than this can be lost with their broker: RabbitMQ 3.10 does not yet have them on disk.
SETTLED_S = 2.0


def test_training_outlives_the_broker(cluster: Cluster) -> None:
    ready = time.monotonic()
    cluster.fill()
    until(lambda: time.monotonic() > ready + SETTLED_S, "the queues are on disk")
    cluster.broker.kill()
    try:
        cluster.contest()
        cluster.wait_progress(30)
    finally:  # other tests need it, too
        cluster.broker.start()
    cluster.finish_without_a_scratch()


@pytest.mark.full
def test_training_outlives_a_broker_that_stands_still(cluster: Cluster) -> None:
    cluster.fill(steps=500)
    cluster.broker.freeze()
    try:
        stopped = time.monotonic()
        until(lambda: time.monotonic() > stopped + 2 * LEASE_S, "all leases are over and connections given up")
        cluster.wait_progress(10)
    finally:
        cluster.broker.thaw()
    cluster.contest()
    cluster.finish_without_a_scratch()


@pytest.mark.full
def test_training_outlives_the_loss_of_all_that_the_broker_knew(cluster: Cluster) -> None:
    cluster.fill(steps=500)
    cluster.broker.kill()
    try:
        cluster.broker.forget()
        cluster.wait_progress(30)
    finally:
        cluster.broker.start()
    cluster.contest()
    cluster.finish_without_a_scratch()


@pytest.mark.full
def test_training_outlives_a_broker_that_takes_nothing_for_lack_of_memory(cluster: Cluster) -> None:
    cluster.fill(steps=1000)  # rabbitmqctl alone may take seconds on a busy machine
    cluster.broker.control("set_vm_memory_high_watermark", "absolute", "1MB")
    try:
        blocked = time.monotonic()
        until(lambda: time.monotonic() > blocked + 2 * LEASE_S, "all leases are over")
        cluster.wait_progress(10)
    finally:
        cluster.broker.control("set_vm_memory_high_watermark", "absolute", "1GB")
    cluster.contest()
    cluster.finish_without_a_scratch()


@pytest.mark.full
def test_training_outlives_connections_that_are_closed_again_and_again(cluster: Cluster) -> None:
    cluster.fill(steps=800)
    cluster.contest()
    for _ in range(3):
        cluster.broker.control("close_all_connections", "the test closes it")
        made = cluster.steps_made()
        enough = min(made + 20, sum(cluster.steps.values()))  # closing takes long on a busy machine
        until(lambda enough=enough: cluster.steps_made() >= enough, "training goes on")
    cluster.finish_without_a_scratch()


@pytest.mark.full
def test_what_a_node_made_whose_link_was_cut_for_good_is_made_again_and_counted(
    tmp_path: Path, broker: PrivateRabbitMQ, vhost: str
) -> None:
    """Its task goes on there until the link is back, and its successor elsewhere knows nothing of that."""
    settings = replace(SETTINGS, node_timeout_s=5.0)
    with ExitStack() as stack:
        links = {node: stack.enter_context(cuttable_link(broker.port)) for node in ("n1", "n2")}
        ports = {Party("node", node): link.port for node, link in links.items()}
        cluster = stack.enter_context(running_cluster(tmp_path, broker, vhost, settings, ports))
        app = cluster.submit(400)
        cluster.wait_training(processes=1)
        here, there = ("n1", "n2") if cluster.pids_on("n1") else ("n2", "n1")
        (alone,) = cluster.pids_on(here)
        links[here].cut()
        until(lambda: bool(cluster.pids_on(there)), "its successor is started on the other node")
        cluster.wait_progress(20)
        links[here].mend()
        until(lambda: alone not in cluster.pids_on(here), "the old one is told to go")
        (over,) = cluster.wait_finished()
        told = cluster.told(app)
        made_alone = 1 + max(step for pid, step in told if pid == alone)
        restored = min(step for pid, step in told if pid != alone)
        # Whatever it made after its last report to anybody nobody can know.
        assert made_alone - restored - UNTOLD_STEPS_MAX <= over["steps_lost"] <= made_alone - restored
        assert cluster.watch.conflicts == []


#: Mini-batches of 40 ms that a task may make between its last report and its end.
UNTOLD_STEPS_MAX = 100
