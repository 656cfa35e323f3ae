"""What is killed with SIGKILL is started again, and nobody who trains has noticed.

Arbiter, node agents and app agent are processes with broker users of their own, on a private RabbitMQ. Two nodes of
two simulated GPUs; two apps that fill them and a third that contests them, on leases of a few seconds, so that GPUs
change hands.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from launch.faults import Fault
from protocol.bus import Outgoing
from protocol.codec import encode
from protocol.messages import ARBITER, NodeId, NodePlan, Party
from tests.support.cluster import LEASE_S, Cluster, running_cluster, until
from tests.support.gpu_watch import GpuWatch
from tests.support.patient_bus import patient_bus
from tests.support.rabbitmq import PrivateRabbitMQ
from tests.support.small_disk import fill_up, small_disk

broker_test = pytest.mark.broker
pytestmark = [pytest.mark.clock, pytest.mark.slow, pytest.mark.timeout(300)]


@broker_test
def test_training_outlives_the_arbiter(cluster: Cluster) -> None:
    cluster.fill(steps=240)
    cluster.arbiter.kill()
    killed = time.monotonic()
    cluster.contest()
    cluster.wait_progress(30)
    # Nobody renews a lease now, and nobody takes its GPU away either.
    until(lambda: time.monotonic() > killed + LEASE_S, "all leases are over")
    cluster.wait_progress(10)
    cluster.arbiter.start()
    cluster.finish_without_a_scratch()


#: From the kill of an arbiter to its next round: its start, a lease, and what a busy machine adds.
ROUND_WITHIN_S = 30.0


@pytest.mark.full
@broker_test
def test_a_round_follows_soon_after_arbiter_and_a_workers_supervisor_were_killed_together(cluster: Cluster) -> None:
    cluster.fill(steps=300)
    (struck,) = {worker.pid for worker in cluster.watch.now if worker.task.startswith("me-1.")}
    others = cluster.pids() - {struck}
    before = newest_round(cluster)
    cluster.arbiter.kill()
    os.kill(parent_of(struck), signal.SIGKILL)
    cluster.contest()
    cluster.arbiter.start()
    until(lambda: newest_round(cluster) > before, "a round is held", within_s=ROUND_WITHIN_S)
    done = {pid for app, steps in cluster.steps.items() for pid, step in cluster.told(app)[-1:] if step == steps - 1}
    assert others <= cluster.pids() | done, "no other process ended"
    for app in cluster.wait_finished():
        steps = [step for _pid, step in cluster.told(app["id"])]
        assert steps[-1] == cluster.steps[app["id"]] - 1
        assert app["id"] == "me-1" or steps == list(range(len(steps))), f"{app['id']} lost or repeated steps"
    assert cluster.watch.conflicts == []


def newest_round(cluster: Cluster) -> int:
    """The number of the newest round in the ledger, or 0, also while the arbiter does not answer."""
    with suppress(Fault), cluster.client() as client:
        return max((each["round"] for each in client.query("rounds")["rounds"]), default=0)
    return 0


def parent_of(pid: int) -> int:
    """The process that started `pid`; of a training process its supervisor."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.full  # test_time_slicing.py kills one, too
@broker_test
def test_training_outlives_a_node_agent(cluster: Cluster) -> None:
    cluster.fill(steps=400)  # a busy machine takes several seconds to start an agent: the workers must still be there
    agent, workers = cluster.nodes["n1"], cluster.pids_on("n1")
    agent.kill()
    cluster.contest()
    cluster.wait_progress(30)
    assert cluster.pids_on("n1") == workers
    agent.start()
    until(lambda: {line["pid"] for line in agent.logged("worker.adopted")} == workers, "the workers are adopted")
    cluster.finish_without_a_scratch()


@pytest.mark.full
@broker_test
def test_training_outlives_an_arbiter_that_stands_still(cluster: Cluster) -> None:
    cluster.fill(steps=400)
    cluster.arbiter.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    until(lambda: time.monotonic() > stopped + 2 * LEASE_S, "all leases are over")
    cluster.wait_progress(10)
    cluster.arbiter.signal(signal.SIGCONT)
    cluster.contest()
    cluster.finish_without_a_scratch()


@pytest.mark.full
@broker_test
def test_training_outlives_full_disks_of_arbiter_and_app_agent(
    tmp_path: Path, broker: PrivateRabbitMQ, vhost: str
) -> None:
    """Each ends with a sentence, as one that cannot write must not decide, and goes on where it was."""
    disks = [tmp_path / name for name in ("arbiter", "app")]
    with ExitStack() as stack:
        for disk in disks:
            stack.enter_context(small_disk(disk))
        cluster = stack.enter_context(running_cluster(tmp_path, broker, vhost))
        cluster.fill(steps=500)
        ballast = [fill_up(disk) for disk in disks]
        daemons = (cluster.arbiter, cluster.app_agent)
        until(lambda: all(daemon.ended() for daemon in daemons), "both have ended")
        cluster.wait_progress(10)
        for daemon, file in zip(daemons, ballast, strict=True):
            words = daemon.log.read_text()
            assert "check the disk's space" in words
            assert "Traceback" not in words
            file.unlink()
            daemon.start()
        until(cluster.answers, "the app agent listens again")
        cluster.contest()
        cluster.finish_without_a_scratch()


@pytest.mark.full
@broker_test
def test_training_outlives_the_app_agent(cluster: Cluster) -> None:
    cluster.fill()
    cluster.app_agent.kill()
    cluster.wait_progress(30)
    cluster.app_agent.start()
    until(cluster.answers, "the app agent listens again")
    cluster.contest()
    cluster.finish_without_a_scratch()


@broker_test
@pytest.mark.full
async def test_an_arbiter_of_an_older_epoch_is_obeyed_by_nobody(cluster: Cluster) -> None:
    # Its successor's epochs are refused in tests/core/test_node_agent.py; here with a real broker and a real restart.
    cluster.submit(2000)
    cluster.wait_training(processes=1)
    (node,) = [node for node in cluster.nodes if cluster.pids_on(node)]
    cluster.arbiter.kill()
    cluster.arbiter.start()
    until(lambda: len(cluster.arbiter.logged("bus.connected")) == 2, "the arbiter leads again")
    old, new = [line["epoch"] for line in cluster.arbiter.logged("bus.connected")]
    assert new > old
    (config,) = [each for each in cluster.site.nodes if each.node == node]
    kept = Path(config.state_dir) / "agent.json"
    # Until the node has heard of the newer one it must obey the older, as if that had only been slow.
    until(lambda: json.loads(kept.read_text())["epoch"] == new, f"{node} has heard of the new arbiter")
    workers = cluster.pids_on(node)
    site = json.loads(kept.read_text())["site"]
    await say_as_arbiter(cluster, NodePlan(NodeId(node), old, 2**40, (), (), site=site))
    cluster.wait_progress(50)
    assert cluster.pids_on(node) == workers
    # The same words of the epoch that leads, of the site that the node belongs to, would have ended everything.
    await say_as_arbiter(cluster, NodePlan(NodeId(node), new, 2**40, (), (), site="another"))
    cluster.wait_progress(50)
    assert cluster.pids_on(node) == workers
    await say_as_arbiter(cluster, NodePlan(NodeId(node), new, 2**40, (), (), site=site))
    until(lambda: not cluster.pids_on(node) & workers, "the worker is stopped")


async def say_as_arbiter(cluster: Cluster, plan: NodePlan) -> None:
    """Speak with the arbiter's password, but without leading."""
    link = await patient_bus(cluster.broker.url(ARBITER.user, cluster.vhost)).connect(ARBITER)
    data = encode(plan, sender=ARBITER, id=f"zombie-{plan.epoch}-{plan.site}")
    assert list(await link.send([Outgoing(Party("node", plan.node), data)])) == [None]
    await link.close()


def look(watch: GpuWatch, *, samples: int) -> None:
    before = watch.samples
    until(lambda: watch.samples > before + samples, "more samples")


BUSY = "import time\nwhile True:\n    sum(range(100_000)); time.sleep(0.01)"


@pytest.mark.full
def test_the_watch_of_these_tests_sees_two_that_train_on_one_gpu(tmp_path: Path) -> None:
    def train(task: str, gpus: str, program: str) -> subprocess.Popen[bytes]:
        env = {"GPU_ARBITER_TASK": task, "CUDA_VISIBLE_DEVICES": gpus, "GPU_ARBITER_CHECKPOINT_DIR": str(tmp_path)}
        return subprocess.Popen([sys.executable, "-I", "-S", "-c", program], env=env)

    running = [train("a.0-a0", "g0,g1", BUSY), train("b.0-a0", "g2", BUSY)]
    try:
        with GpuWatch(tmp_path) as watch:
            running.append(train("c.0-a0", "g2", "import time; time.sleep(60)"))  # as a parked one does
            until(lambda: len(watch.now) == len(running), "all are seen")
            look(watch, samples=10)
            watch.conflicts.clear()  # of its start, which is work
            look(watch, samples=10)
            assert watch.conflicts == []
            running.append(train("d.0-a0", "g1", BUSY))
            until(lambda: "a.0-a0 and d.0-a0 on g1" in watch.conflicts, "the conflict is seen")
    finally:
        for process in running:
            process.kill()
            process.wait()
