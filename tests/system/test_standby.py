"""An arbiter that does not know the site it finds harms nothing: one with a journal of its own, none, or an older one.

Every daemon is a process with a broker user of its own, on a private RabbitMQ.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from launch.faults import Fault
from tests.support.cluster import SETTINGS, Cluster, DaemonProcess, running_cluster, until
from tests.support.rabbitmq import PrivateRabbitMQ

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(600)]

#: More mini-batches than any test waits for, since a busy machine takes long to start an arbiter.
STEPS = 10_000


@pytest.fixture
def cluster(tmp_path: Path, broker: PrivateRabbitMQ, vhost: str) -> Iterator[Cluster]:
    """One whose leases outlast the test: no app has to keep its GPUs in a round, however late it is heard."""
    with running_cluster(tmp_path, broker, vhost, replace(SETTINGS, lease_s=3600.0)) as made:
        yield made


def states(cluster: Cluster) -> set[str]:
    """The states of all apps that are not finished, by the arbiter; none while it does not answer."""
    with suppress(Fault):
        return {app["state"] for app in cluster.document()} - {"finished"}
    return set()


def go_on_as_begun(cluster: Cluster, training: set[int]) -> None:
    """See the arbiter lead, and processes train on that it did not start: each mini-batch is made once, by these."""
    until(lambda: states(cluster) == {"running"}, "the arbiter tells of what trains")
    cluster.wait_progress(100)
    assert cluster.pids() == training
    for app in cluster.document():
        told = cluster.told(app["id"])
        assert [step for _pid, step in told] == list(range(len(told))), f"{app['id']} lost or repeated steps"
        assert len({pid for pid, _step in told}) == 1, f"{app['id']} was started again"
        assert app["steps_lost"] == 0
    assert cluster.watch.conflicts == []
    with cluster.client() as client:
        for app in cluster.document():
            if app["state"] == "running":
                client.cancel(app["id"])
    until(lambda: not cluster.pids() and states(cluster) == {"cancelled"}, "what trains ends by the arbiter's word")


def other_arbiter(cluster: Cluster, folder: str, *, adopt_site: bool = False) -> DaemonProcess:
    """An arbiter of the same site's broker user, with a state folder of its own."""
    config = replace(
        cluster.site.arbiter, state_dir=str(cluster.folder / folder), adopt_site=adopt_site, history="begin"
    )
    return DaemonProcess("arbiter", config, cluster.folder, folder)


def test_a_second_arbiter_with_a_journal_of_its_own_ends_with_a_sentence_and_the_first_goes_on(
    cluster: Cluster,
) -> None:
    cluster.fill(STEPS)
    training = cluster.pids()
    cluster.arbiter.kill()
    second = other_arbiter(cluster, "second")
    second.start()
    assert second.wait() != 0
    words = second.log.read_text()
    assert "belongs to site" in words
    assert "--adopt-site" in words
    assert cluster.pids() == training, "it has touched what trains"
    cluster.arbiter.start()
    go_on_as_begun(cluster, training)


def test_an_arbiter_that_adopts_the_site_after_a_loss_disturbs_nothing_that_trains(cluster: Cluster) -> None:
    cluster.fill(STEPS)
    training = cluster.pids()
    cluster.arbiter.kill()
    cluster.arbiter = other_arbiter(cluster, "adopting", adopt_site=True)
    cluster.arbiter.start()
    go_on_as_begun(cluster, training)


def test_an_older_backup_leads_on_at_once_and_keeps_what_runs(cluster: Cluster) -> None:
    """It was refused by every node for two further restarts, and called ended jobs running."""
    cluster.submit(100)
    cluster.wait_training(processes=1)
    state, backup = Path(cluster.site.arbiter.state_dir), cluster.folder / "backup"
    cluster.arbiter.kill()
    shutil.copytree(state, backup)
    for restarts in range(3):  # each start takes an epoch that the backup knows nothing of
        cluster.arbiter.start()
        until(lambda so_far=restarts + 2: len(cluster.arbiter.logged("bus.connected")) == so_far, "it leads")
        if restarts < 2:
            cluster.arbiter.kill()
    until(lambda: [app["state"] for app in cluster.document()] == ["finished"], "the first app has ended")
    cluster.submit(STEPS, gang=2)
    cluster.wait_training(processes=1)
    training = cluster.pids()
    cluster.arbiter.kill()
    shutil.rmtree(state)
    shutil.copytree(backup, state)
    cluster.arbiter.start()
    go_on_as_begun(cluster, training)
