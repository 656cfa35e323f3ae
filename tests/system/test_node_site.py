"""A node agent with a state folder of its own, and arbiters of different sites."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import structlog
from msgspec.structs import replace

from node_agent import daemon, procfs
from node_agent.daemon import Kept
from node_agent.devices.simulated import SimulatedBackend
from node_agent.workers.records import read_json
from protocol.messages import NodeReport
from tests.support.node_site import Site, config, node_site, plan_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GIB = 2**30


async def say(site: Site, name: str, *, epoch: int = 1, incarnation: int = 0) -> None:
    """Say as the arbiter of the site `name` that nothing is to be on the node."""
    site.seq += 1
    await site.send(replace(plan_of((), epoch=epoch, seq=site.seq), site=name, incarnation=incarnation))


def kept(folder: Path) -> Kept:
    found = read_json(folder / "state" / "agent.json", Kept)
    assert found is not None
    return found


async def test_a_node_keeps_to_its_site_over_restarts_until_it_is_told_to_leave_it(tmp_path: Path) -> None:
    async with node_site(tmp_path) as site:
        before = time.time()
        report = await site.report()
        assert report.site == ""
        assert before - 1.0 < report.wall_s < time.time() + 1.0
        await say(site, "s-ours", epoch=50)
        await site.report(lambda report: report.site == "s-ours")
        assert kept(tmp_path).site == "s-ours"
    with structlog.testing.capture_logs() as logged:
        async with node_site(tmp_path) as site:
            await say(site, "s-theirs", epoch=900)
            await say(site, "s-ours", epoch=51)
            report = await site.report(lambda report: report.epoch > 50)
            assert (report.site, report.epoch) == ("s-ours", 51)
    (complaint,) = [line["complaint"] for line in logged if line["event"] == "plan.complaint"]
    assert "site s-theirs" in complaint
    assert "--adopt-site" in complaint
    async with node_site(tmp_path, adopt_site=True) as site:
        await say(site, "s-theirs", epoch=3)
        await site.report(lambda report: (report.site, report.epoch) == ("s-theirs", 3))
    assert (kept(tmp_path).site, kept(tmp_path).epoch) == ("s-theirs", 3)


@pytest.mark.parametrize(("limit", "given", "parked"), [(6 * GIB, 0, 3 * GIB), (6 * GIB, GIB, GIB)])
def test_where_control_groups_bound_a_node_agent_its_node_has_no_more_memory_than_they_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, given: int, parked: int
) -> None:
    """In a container, half of the host's memory was taken to be there for parked jobs."""
    monkeypatch.setattr(procfs, "memory_limit_bytes", lambda: limit)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB))
    memory: Any = SimpleNamespace(kept=SimpleNamespace(incarnation=1))
    facts = daemon._facts(config(tmp_path, host_memory_bytes=given), memory, SimulatedBackend("n1", 1), "boot")
    assert (facts.total_bytes, facts.host_bytes) == (limit, parked)


async def test_an_incarnation_that_was_made_up_is_counted_on_from_and_outlives_the_node_agent(tmp_path: Path) -> None:
    forged = int(time.time()) + 10**9

    def counts_on(report: NodeReport) -> bool:
        return report.incarnation > forged

    async with node_site(tmp_path) as site:
        await say(site, "s-ours", incarnation=forged)
        assert (await site.report(counts_on)).incarnation == forged + 1
    async with node_site(tmp_path) as site:
        assert (await site.report()).incarnation == forged + 2
