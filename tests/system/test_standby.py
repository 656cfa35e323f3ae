"""An arbiter that does not know the site it finds harms nothing: one with a journal of its own, none, or an older one.

Every daemon is a process with a broker user of its own, on a private RabbitMQ.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.cluster import Cluster, DaemonProcess, until

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 400


def finish_as_begun(cluster: Cluster, workers: set[int]) -> None:
    """Wait for the end; each mini-batch was made once, by the process that began."""
    for app in cluster.wait_finished():
        told = cluster.told(app["id"])
        steps = list(range(cluster.steps[app["id"]]))
        assert [step for _pid, step in told] == steps, f"{app['id']} lost or repeated steps"
        assert {pid for pid, _step in told} <= workers, f"{app['id']} was started again"
        assert app["steps_lost"] == 0
    assert cluster.watch.conflicts == []


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
    workers = cluster.pids()
    cluster.arbiter.kill()
    second = other_arbiter(cluster, "second")
    second.start()
    assert second.wait() != 0
    words = second.log.read_text()
    assert "belongs to site" in words
    assert "--adopt-site" in words
    assert cluster.pids() == workers, "it has touched what trains"
    cluster.arbiter.start()
    cluster.wait_progress(20)
    finish_as_begun(cluster, workers)


def test_an_arbiter_that_adopts_the_site_after_a_loss_disturbs_nothing_that_trains(cluster: Cluster) -> None:
    cluster.fill(STEPS)
    workers = cluster.pids()
    cluster.arbiter.kill()
    cluster.arbiter = other_arbiter(cluster, "adopting", adopt_site=True)
    cluster.arbiter.start()
    cluster.wait_progress(20)
    finish_as_begun(cluster, workers)


def test_an_older_backup_leads_on_at_once_and_keeps_what_runs(cluster: Cluster) -> None:
    """It was refused by every node for two further restarts, and called ended jobs running."""
    cluster.submit(100)
    cluster.wait_training(processes=1)
    workers = cluster.pids()
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
    workers |= cluster.pids()
    cluster.arbiter.kill()
    shutil.rmtree(state)
    shutil.copytree(backup, state)
    cluster.arbiter.start()
    cluster.wait_progress(20)
    finish_as_begun(cluster, workers)
