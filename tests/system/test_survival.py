"""What is killed with SIGKILL is started again, and nobody who trains has noticed.

Arbiter, node agents and app agent are processes with broker users of their own, on a private RabbitMQ. Two nodes of
two simulated GPUs; two apps that fill them and a third that contests them, on leases of a few seconds, so that GPUs
change hands.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from launch.faults import Fault
from protocol.bus import Outgoing
from protocol.bus.amqp import AmqpBus
from protocol.codec import encode
from protocol.messages import ARBITER, NodeId, NodePlan, Party
from tests.support import rabbitmq
from tests.support.cluster import LEASE_S, PARTIES, SETTINGS, Cluster, running_cluster, until
from tests.support.gpu_watch import GpuWatch
from tests.support.proxy import Proxy

broker_test = pytest.mark.broker
pytestmark = [pytest.mark.clock, pytest.mark.slow, pytest.mark.timeout(180)]

VHOSTS = [f"s{number}" for number in range(16)]  # one for each test, as a broker keeps what a site left there
_vhosts = itertools.cycle(VHOSTS)
#: Of each app, 40 ms each; enough to outlast an outage.
STEPS = 160
#: Quorum queues younger than this can be lost with their broker: RabbitMQ 3.10 does not yet have them on disk.
SETTLED_S = 2.0


@pytest.fixture(scope="module")
def broker() -> Iterator[rabbitmq.PrivateRabbitMQ]:
    if not rabbitmq.available():
        reason = f"RabbitMQ is not installed ({rabbitmq.SERVER} is missing): run scripts/ensure-rabbitmq.sh"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with rabbitmq.PrivateRabbitMQ(PARTIES, VHOSTS) as node:
        yield node


@pytest.fixture
def cluster(tmp_path: Path, broker: rabbitmq.PrivateRabbitMQ) -> Iterator[Cluster]:
    with running_cluster(tmp_path, broker, next(_vhosts)) as made:
        yield made


def fill(cluster: Cluster, steps: int = STEPS) -> None:
    """Two apps on two GPUs each, and nobody who contests them: who stands still now was not told to."""
    cluster.submit(steps, gang=2)
    cluster.submit(steps, gang=2)
    cluster.wait_training(processes=2)


def contest(cluster: Cluster) -> None:
    """One more app than fits, so that GPUs change hands."""
    cluster.submit(STEPS)


def steps_made(cluster: Cluster) -> int:
    return sum(len(cluster.told(app)) for app in cluster.steps)


def finish_without_a_scratch(cluster: Cluster) -> None:
    """Wait for the end; nothing was lost, made twice, or shared by two."""
    apps = cluster.wait_finished()
    for app in apps:
        steps = [step for _pid, step in cluster.told(app["id"])]
        assert steps == list(range(cluster.steps[app["id"]])), f"{app['id']} lost or repeated steps"
        assert (app["steps_lost"], app["metrics"]["accuracy"] > 0.5) == (0, True)
    assert cluster.watch.conflicts == []
    assert cluster.watch.hand_overs > 0, "no GPU changed hands, so nothing was shown"


@broker_test
def test_training_outlives_the_arbiter(cluster: Cluster) -> None:
    fill(cluster, steps=240)
    cluster.arbiter.kill()
    killed = time.monotonic()
    contest(cluster)
    cluster.wait_progress(30)
    # Nobody renews a lease now, and nobody takes its GPU away either.
    until(lambda: time.monotonic() > killed + LEASE_S, "all leases are over")
    cluster.wait_progress(10)
    cluster.arbiter.start()
    finish_without_a_scratch(cluster)


#: From the kill of an arbiter to its next round: its start, a lease, and what a busy machine adds.
ROUND_WITHIN_S = 30.0


@pytest.mark.full
@broker_test
def test_a_round_follows_soon_after_arbiter_and_a_workers_supervisor_were_killed_together(cluster: Cluster) -> None:
    fill(cluster, steps=300)
    (struck,) = {worker.pid for worker in cluster.watch.now if worker.task.startswith("me-1.")}
    others = {worker.pid for worker in cluster.watch.now} - {struck}
    before = newest_round(cluster)
    cluster.arbiter.kill()
    os.kill(parent_of(struck), signal.SIGKILL)
    contest(cluster)
    cluster.arbiter.start()
    until(lambda: newest_round(cluster) > before, "a round is held", within_s=ROUND_WITHIN_S)
    assert others <= {worker.pid for worker in cluster.watch.now}, "nobody else noticed"
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


@broker_test
def test_training_outlives_a_node_agent(cluster: Cluster) -> None:
    fill(cluster, steps=400)  # a busy machine takes several seconds to start an agent: the workers must still be there
    agent, workers = cluster.nodes["n1"], pids_on(cluster, "n1")
    agent.kill()
    contest(cluster)
    cluster.wait_progress(30)
    assert pids_on(cluster, "n1") == workers
    agent.start()
    until(lambda: {line["pid"] for line in agent.logged("worker.adopted")} == workers, "the workers are adopted")
    finish_without_a_scratch(cluster)


def pids_on(cluster: Cluster, node: str) -> set[int]:
    """The training processes on the GPUs of `node`."""
    return {worker.pid for worker in cluster.watch.now if worker.gpus[0].startswith(f"GPU-sim-{node}-")}


@broker_test
def test_training_outlives_the_broker(cluster: Cluster) -> None:
    ready = time.monotonic()
    fill(cluster)
    until(lambda: time.monotonic() > ready + SETTLED_S, "the queues are on disk")
    cluster.broker.kill()
    try:
        contest(cluster)
        cluster.wait_progress(30)
    finally:  # other tests need it, too
        cluster.broker.start()
    finish_without_a_scratch(cluster)


@pytest.mark.full
@broker_test
def test_training_outlives_an_arbiter_that_stands_still(cluster: Cluster) -> None:
    fill(cluster, steps=400)
    cluster.arbiter.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    until(lambda: time.monotonic() > stopped + 2 * LEASE_S, "all leases are over")
    cluster.wait_progress(10)
    cluster.arbiter.signal(signal.SIGCONT)
    contest(cluster)
    finish_without_a_scratch(cluster)


@pytest.mark.full
@broker_test
def test_training_outlives_a_broker_that_stands_still(cluster: Cluster) -> None:
    fill(cluster, steps=500)
    cluster.broker.freeze()
    try:
        stopped = time.monotonic()
        until(lambda: time.monotonic() > stopped + 2 * LEASE_S, "all leases are over and connections given up")
        cluster.wait_progress(10)
    finally:
        cluster.broker.thaw()
    contest(cluster)
    finish_without_a_scratch(cluster)


@pytest.mark.full
@broker_test
def test_training_outlives_the_loss_of_all_that_the_broker_knew(cluster: Cluster) -> None:
    fill(cluster, steps=500)
    cluster.broker.kill()
    try:
        cluster.broker.forget()
        cluster.wait_progress(30)
    finally:
        cluster.broker.start()
    contest(cluster)
    finish_without_a_scratch(cluster)


@pytest.mark.full
@broker_test
def test_training_outlives_a_broker_that_takes_nothing_for_lack_of_memory(cluster: Cluster) -> None:
    fill(cluster, steps=500)
    cluster.broker.control("set_vm_memory_high_watermark", "absolute", "1MB")
    try:
        blocked = time.monotonic()
        until(lambda: time.monotonic() > blocked + 2 * LEASE_S, "all leases are over")
        cluster.wait_progress(10)
    finally:
        cluster.broker.control("set_vm_memory_high_watermark", "absolute", "1GB")
    contest(cluster)
    finish_without_a_scratch(cluster)


@pytest.mark.full
@broker_test
def test_training_outlives_connections_that_are_closed_again_and_again(cluster: Cluster) -> None:
    fill(cluster, steps=500)
    contest(cluster)
    for _ in range(3):
        cluster.broker.control("close_all_connections", "the test closes it")
        made = steps_made(cluster)
        until(lambda made=made: steps_made(cluster) >= made + 20, "somebody trains on")
    finish_without_a_scratch(cluster)


@pytest.mark.full
@broker_test
def test_training_outlives_full_disks_of_arbiter_and_app_agent(
    tmp_path: Path, broker: rabbitmq.PrivateRabbitMQ
) -> None:
    """Each ends with a sentence, as one that cannot write must not decide, and goes on where it was."""
    disks = [tmp_path / name for name in ("arbiter", "app")]
    with ExitStack() as stack:
        for disk in disks:
            stack.enter_context(small_disk(disk))
        cluster = stack.enter_context(running_cluster(tmp_path, broker, next(_vhosts)))
        fill(cluster, steps=500)
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
        contest(cluster)
        finish_without_a_scratch(cluster)


@pytest.mark.full
@broker_test
def test_what_a_node_made_whose_link_was_cut_for_good_is_made_again_and_counted(
    tmp_path: Path, broker: rabbitmq.PrivateRabbitMQ
) -> None:
    """Its task goes on there until the link is back, and its successor elsewhere knows nothing of that."""
    settings = replace(SETTINGS, node_timeout_s=5.0)
    with ExitStack() as stack:
        links = {node: stack.enter_context(cuttable_link(broker.port)) for node in ("n1", "n2")}
        ports = {Party("node", node): link.port for node, link in links.items()}
        cluster = stack.enter_context(running_cluster(tmp_path, broker, next(_vhosts), settings, ports))
        app = cluster.submit(400)
        cluster.wait_training(processes=1)
        here, there = ("n1", "n2") if pids_on(cluster, "n1") else ("n2", "n1")
        (alone,) = pids_on(cluster, here)
        links[here].cut()
        until(lambda: bool(pids_on(cluster, there)), "its successor is started on the other node")
        cluster.wait_progress(20)
        links[here].mend()
        until(lambda: alone not in pids_on(cluster, here), "the old one is told to go")
        (over,) = cluster.wait_finished()
        told = cluster.told(app)
        made_alone = 1 + max(step for pid, step in told if pid == alone)
        restored = min(step for pid, step in told if pid != alone)
        # Whatever it made after its last report to anybody nobody can know.
        assert made_alone - restored - UNTOLD_STEPS_MAX <= over["steps_lost"] <= made_alone - restored
        assert cluster.watch.conflicts == []


#: Mini-batches of 40 ms that a task may make between its last report and its end.
UNTOLD_STEPS_MAX = 100


class CuttableLink:
    """A port that leads to the broker, or nowhere while the link is cut."""

    def __init__(self, target_port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._proxy = Proxy(target_port)
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._thread.start()
        self._do(self._proxy.start())

    @property
    def port(self) -> int:
        return self._proxy.port

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self._proxy.stall)

    def mend(self) -> None:
        """Begin anew: what was on the way is lost."""
        self._loop.call_soon_threadsafe(self._proxy.cut)
        self._loop.call_soon_threadsafe(self._proxy.flow)

    def close(self) -> None:
        self._do(self._proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, what: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(10.0)


@contextmanager
def cuttable_link(target_port: int) -> Iterator[CuttableLink]:
    link = CuttableLink(target_port)
    try:
        yield link
    finally:
        link.close()


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own, of a few MB, in this folder."""
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "tmpfs", folder], check=False)
    if made.returncode:
        pytest.skip("only root can mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill_up(folder: Path) -> Path:
    """Write a file that leaves no room in this file system."""
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


@pytest.mark.full
@broker_test
def test_training_outlives_the_app_agent(cluster: Cluster) -> None:
    fill(cluster)
    cluster.app_agent.kill()
    cluster.wait_progress(30)
    cluster.app_agent.start()
    until(cluster.answers, "the app agent listens again")
    contest(cluster)
    finish_without_a_scratch(cluster)


@broker_test
async def test_an_arbiter_of_an_older_epoch_is_obeyed_by_nobody(cluster: Cluster) -> None:
    # Its successor's epochs are refused in tests/core/test_node_agent.py; here with a real broker and a real restart.
    cluster.submit(2000)
    cluster.wait_training(processes=1)
    (node,) = [node for node in cluster.nodes if pids_on(cluster, node)]
    cluster.arbiter.kill()
    cluster.arbiter.start()
    until(lambda: len(cluster.arbiter.logged("bus.connected")) == 2, "the arbiter leads again")
    old, new = [line["epoch"] for line in cluster.arbiter.logged("bus.connected")]
    assert new > old
    (config,) = [each for each in cluster.site.nodes if each.node == node]
    kept = Path(config.state_dir) / "agent.json"
    # Until the node has heard of the newer one it must obey the older, as if that had only been slow.
    until(lambda: json.loads(kept.read_text())["epoch"] == new, f"{node} has heard of the new arbiter")
    workers = pids_on(cluster, node)
    site = json.loads(kept.read_text())["site"]
    await say_as_arbiter(cluster, NodePlan(NodeId(node), old, 2**40, (), (), site=site))
    cluster.wait_progress(50)
    assert pids_on(cluster, node) == workers
    # The same words of the epoch that leads, of the site that the node belongs to, would have ended everything.
    await say_as_arbiter(cluster, NodePlan(NodeId(node), new, 2**40, (), (), site="another"))
    cluster.wait_progress(50)
    assert pids_on(cluster, node) == workers
    await say_as_arbiter(cluster, NodePlan(NodeId(node), new, 2**40, (), (), site=site))
    until(lambda: not pids_on(cluster, node) & workers, "the worker is stopped")


async def say_as_arbiter(cluster: Cluster, plan: NodePlan) -> None:
    """Speak with the arbiter's password, but without leading."""
    link = await AmqpBus(cluster.broker.url(ARBITER.user, cluster.vhost)).connect(ARBITER)
    data = encode(plan, sender=ARBITER, id=f"zombie-{plan.epoch}-{plan.site}")
    assert list(await link.send([Outgoing(Party("node", plan.node), data)])) == [None]
    await link.close()


def look(watch: GpuWatch, *, samples: int) -> None:
    before = watch.samples
    until(lambda: watch.samples > before + samples, "more samples")


BUSY = "import time\nwhile True:\n    sum(range(100_000)); time.sleep(0.01)"


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
