"""What each release has written: its frames and its journals, which this version reads and goes on from.

A release adds a folder to ``tests/data/releases``, once its version is in pyproject.toml:
``python -m tests.core.test_releases``. The folder of the minor version before the last one is deleted then.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tempfile
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from app_agent.core.host import AppHost, Submit
from app_agent.core.host import Configured as HostConfigured
from app_agent.core.host import Event as HostEvent
from arbiter.core.arbiter import Arbiter, Event
from protocol.codec import decode
from protocol.core import Connected
from protocol.journal import numbers
from protocol.journal.sqlite import SqliteJournal
from protocol.messages import OwnerId
from tests.protocol.test_codec import GOLDEN
from tests.support.app_harness import spec_of
from tests.support.arbiter_site import Site, wish

RELEASES = Path(__file__).parents[1] / "data" / "releases"
EXPECTED = "expected.json"
#: The first minor version that has files here.
FIRST = (0, 1)
THERE = sorted((folder.name for folder in RELEASES.iterdir()), key=numbers)


@pytest.fixture(params=THERE)
def release(request: pytest.FixtureRequest) -> Path:
    return RELEASES / str(request.param)


def test_there_is_the_present_minor_version_and_after_the_first_also_the_one_before() -> None:
    minors = {numbers(name)[:2] for name in THERE}
    now = numbers(version("gpu-arbiter"))[:2]
    assert now in minors, f"make its files: {sys.executable} -m tests.core.test_releases"
    assert now == FIRST or (now[0], now[1] - 1) in minors, "the minor version before is to be read"


def test_its_messages_are_understood(release: Path) -> None:
    frames = json.loads((release / GOLDEN.name).read_text())
    assert frames
    for name, frame in frames.items():
        assert type(decode(bytes.fromhex(frame)).body).__name__ == name


def test_an_arbiter_goes_on_from_its_journal(release: Path, tmp_path: Path) -> None:
    arbiter, last_s = read_arbiter(unpacked(release / "arbiter.db.gz", tmp_path))
    assert summary(arbiter) == expected(release)["arbiter"]
    arbiter.handle(Connected(arbiter.state.epoch + 1), last_s + 1.0)
    arbiter.validate()
    assert summary(arbiter) == expected(release)["arbiter"]


def test_an_app_agent_goes_on_from_its_journal(release: Path, tmp_path: Path) -> None:
    host = read_host(unpacked(release / "app.db.gz", tmp_path))
    assert host_summary(host) == expected(release)["apps"]


def expected(release: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((release / EXPECTED).read_text())
    return told


def unpacked(packed: Path, folder: Path) -> Path:
    path = folder / packed.stem
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    return path


def read_arbiter(path: Path) -> tuple[Arbiter, float]:
    with closing(SqliteJournal[Event].of(path, Event, program=version("gpu-arbiter"))) as journal:
        loaded = journal.load()
        assert loaded.snapshot is not None
        arbiter, replayed = Arbiter.restored(loaded.snapshot), 0
        for _seq, now, event in loaded.events:
            arbiter.handle(event, now)
            replayed += 1
        assert replayed > 0
        arbiter.validate()
        return arbiter, journal.last_now


def read_host(path: Path) -> AppHost:
    with closing(SqliteJournal[HostEvent].of(path, HostEvent, program=version("gpu-arbiter"))) as journal:
        loaded = journal.load()
        assert loaded.snapshot is not None
        host = AppHost.restore(loaded.snapshot)
        for _seq, now, event in loaded.events:
            host.handle(event, now)
        host.validate()
        return host


def summary(arbiter: Arbiter) -> dict[str, Any]:
    """What must be known of a site after an upgrade."""
    state = arbiter.state
    leased = {gpu: each.state.lease.app for gpu, each in state.gpus.items() if hasattr(each.state, "lease")}
    apps = {name: [type(app.state).__name__, app.tenant, app.requirements.weight] for name, app in state.apps.items()}
    return {
        "site": state.site,
        "nodes": sorted(state.nodes),
        "leased": leased,
        "apps": apps,
        "tasks": sorted(state.tasks),
    }


def host_summary(host: AppHost) -> dict[str, Any]:
    return {name: [app.spec.name, app.spec.gang, app.submitted_at] for name, app in host.state.apps.items()}


# --- the files of a release -----------------------------------------------------------------------------------------


def write_arbiter(path: Path) -> None:
    """Write the journal of a site with two nodes, an app that runs on two GPUs, and one that waits; then read it."""
    site = Site()
    site.node("n1", 2)
    site.node("n2", 1)
    site.wait(10.0)
    site.play_round(site.app("ana-1", gang=2, demand=2) + site.wait(2.0))
    gpus = site.held("ana-1")
    site.app("ana-1", gang=2, demand=2, jobs=[wish("ana-1", 0, gpus)])
    middle, snapshot = len(site.journal), site.arbiter.snapshot()
    site.app("bob-1", gang=2, demand=2, weight=2.0)
    site.node("n2", 1)
    site.wait(5.0)
    with closing(SqliteJournal[Event].of(path, Event, program=version("gpu-arbiter"))) as journal:
        for number, (now, event) in enumerate(site.journal, start=1):
            journal.append(now, event)
            if number == middle:
                journal.snapshot(snapshot)


def write_host(path: Path) -> None:
    """Write the journal of an owner with two apps, one of them before the snapshot."""
    host = AppHost(OwnerId("ada"), tenant="team-a")
    with closing(SqliteJournal[HostEvent].of(path, HostEvent, program=version("gpu-arbiter"))) as journal:

        def handle(now: float, event: HostEvent) -> None:
            journal.append(now, event)
            host.handle(event, now)

        handle(1.0, HostConfigured("team-a", 5.0, "bcd"))
        handle(2.0, Submit("r1", spec_of()))
        journal.snapshot(host.snapshot())
        handle(3.0, Submit("r2", spec_of(gang=2, name="large.py")))


def write_release() -> Path:
    """Write the files of the present version; return their folder."""
    release = RELEASES / version("gpu-arbiter")
    release.mkdir(parents=True, exist_ok=True)
    shutil.copy(GOLDEN, release)
    with tempfile.TemporaryDirectory() as folder:
        arbiter, app = Path(folder) / "arbiter.db", Path(folder) / "app.db"
        write_arbiter(arbiter)
        write_host(app)
        for path in (arbiter, app):
            (release / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        told = {"arbiter": summary(read_arbiter(arbiter)[0]), "apps": host_summary(read_host(app))}
    (release / EXPECTED).write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")
    return release


if __name__ == "__main__":
    RELEASES.mkdir(exist_ok=True)
    sys.stdout.write(f"{write_release()}\n")
