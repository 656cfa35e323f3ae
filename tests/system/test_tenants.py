"""Two tenants on a site of real processes and simulated GPUs: GPU time by weight, and shown so."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from app_agent.core.spec import AppSpec
from arbiter.core.state.gpu_time import TenantTerms
from arbiter.core.state.model import ArbiterSettings
from launch import views
from launch.client import Client, open_client
from launch.site.site import end_everything, in_process, local_site, memory_bus, wait_ready
from protocol.messages import Requirements, TenantId

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(300)]

#: Trains for ever, saves at once when told to leave, and goes on where it was; without PyTorch it starts at once.
SCRIPT = """
    import sys, time
    from app_agent import session
    session.init(total_steps=1_000_000)
    def save(folder):
        open(folder + "/step", "w").write(str(step))
    def load(folder):
        assert open(folder + "/step").read().isdecimal()
    for step in range(session.restore(load), 1_000_000):
        time.sleep(0.02)
        if session.step_end(step, save=save):
            sys.exit(session.EXIT_REQUEUE)
    """
SETTINGS = ArbiterSettings(
    policy="astraea",
    lease_s=2.0,
    renewal_lead_s=0.3,
    round_pause_s=0.1,
    probe_s=0.2,
    bid_s=0.2,
    beat_s=0.2,
    admission_wait_s=0.5,
    tenants=(TenantTerms(TenantId("vision"), weight=2.0), TenantTerms(TenantId("nlp"), weight=1.0)),
)
#: Of four GPUs 2.67 and 1.33 are due, so GPUs have to change hands between them again and again.
GPUS = 4
LEAST_S, MOST_S = 25.0, 50.0


def spec(folder: Path, tenant: str, number: int) -> AppSpec:
    return AppSpec(
        trials=((sys.executable, "-c", textwrap.dedent(SCRIPT)),),
        cwd=str(folder),
        checkpoint_root=str(folder / "checkpoints"),
        tenant=tenant,
        name=f"{tenant}-{number}",
        requirements=Requirements(grace_s=10.0),
    )


def had(document: dict[str, Any]) -> dict[str, float]:
    return {tenant["tenant"]: tenant["gpu_seconds"] for tenant in document["tenants"]}


def settled(client: Client, deadline: float) -> dict[str, Any]:
    """Return what tenants have had once that is 2 : 1 within 5 % after a good many leases, or at the deadline."""
    began = time.monotonic()
    while True:
        document = client.query("shares")
        seconds = had(document)
        passed = time.monotonic() - began
        ratio = seconds.get("vision", 0.0) / max(1e-9, seconds.get("nlp", 0.0))
        if passed > deadline or (passed > LEAST_S and abs(ratio / 2.0 - 1.0) < 0.05):
            return document
        time.sleep(0.25)


def test_two_tenants_of_weights_two_and_one_come_to_two_and_one_of_the_gpu_time(tmp_path: Path) -> None:
    site = local_site(tmp_path, nodes=1, gpus=f"simulated:{GPUS}", settings=SETTINGS)
    with in_process(site, memory_bus()) as check:
        wait_ready(site, check)
        with open_client(site.socket) as client:
            for number in range(4):
                for tenant in ("nlp", "vision"):  # who came first changes nothing
                    client.submit(spec(tmp_path, tenant, number))
            document = settled(client, MOST_S)
            apps = client.query("apps")["apps"]
            end_everything(client)
        check()
    seconds = had(document)
    assert seconds["vision"] / seconds["nlp"] == pytest.approx(2.0, rel=0.05), views.shares_table(document)
    ltgf = {tenant["tenant"]: tenant["ltgf"] for tenant in document["tenants"]}
    assert ltgf == pytest.approx({"vision": 1.0, "nlp": 1.0}, rel=0.1)
    assert [tenant["quota_gpus"] for tenant in document["tenants"]] == pytest.approx([GPUS / 3, 2 * GPUS / 3])
    assert sum(app["preemptions"] for app in apps) >= 4, "GPUs hardly changed hands"
    assert all(task["step"] > 0 for app in apps for task in app["tasks"] if task["phase"] == "running")
    assert "vision" in views.shares_table(document)
    assert "LTGF" in views.apps_table({"apps": apps})
