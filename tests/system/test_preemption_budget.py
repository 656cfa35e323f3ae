"""Four jobs of numpy alone, which can neither save nor be suspended, on one GPU with leases shorter than they are."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from app_agent.core.spec import AppSpec
from arbiter.core.leases.preemption_budget import NEGLIGIBLE_S
from arbiter.core.state.model import ArbiterSettings
from launch.client import Client, ending, open_client
from launch.site.site import in_process, local_site, memory_bus, wait_ready
from protocol.exit_codes import DONE
from protocol.messages import Requirements

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WORK_S, CRASH_S = 8.0, 4.0
#: Counts its tenths of a second in a file, over all attempts. `crash` ends one attempt early.
SCRIPT = """
    import os, sys, time
    import numpy
    record, work_s, crash_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    matrix, began = numpy.eye(50), time.monotonic()
    while (now := time.monotonic() - began) < work_s:
        matrix = matrix @ matrix
        time.sleep(0.1)
        print(now, file=open(record, "a"), flush=True)
        if crash_s and now > crash_s and not os.path.exists(record + ".crashed"):
            open(record + ".crashed", "w").close()
            sys.exit(1)
    """
SETTINGS = ArbiterSettings(
    lease_s=3.0,
    renewal_lead_s=1.0,
    round_pause_s=0.2,
    probe_s=0.3,
    bid_s=0.3,
    beat_s=0.3,
    admission_wait_s=0.5,
)


def spec(folder: Path, name: str, crash_s: float) -> AppSpec:
    words = (str(folder / name), str(WORK_S), str(crash_s))
    return AppSpec(
        trials=((sys.executable, "-c", textwrap.dedent(SCRIPT), *words),),
        cwd=str(folder),
        checkpoint_root=str(folder / "checkpoints"),
        name=name,
        restart_s=0.5,
        requirements=Requirements(grace_s=2.0),
    )


def attempts(folder: Path, name: str) -> list[float]:
    """Return how long each attempt of a job went on, by its own record."""
    times = [float(line) for line in (folder / name).read_text().split()]
    starts = [number for number, now in enumerate(times) if number == 0 or now < times[number - 1]]
    return [times[end - 1] for end in (*starts[1:], len(times))]


def lost_gpu_s(client: Client) -> dict[str, float]:
    apps: list[dict[str, Any]] = client.query("apps")["apps"]
    return {app["name"]: app["lost_gpu_seconds"] for app in apps}


def test_what_preemption_would_throw_away_runs_to_its_end_and_what_a_crash_took_is_counted(tmp_path: Path) -> None:
    """All four were begun anew at the end of each lease, and nobody knew what that had cost."""
    site = local_site(tmp_path, nodes=1, gpus="simulated:1", settings=SETTINGS)
    names = ["crashes", "a", "b", "c"]
    with in_process(site, memory_bus()) as check:
        wait_ready(site, check)
        with open_client(site.socket) as client:
            apps = [client.submit(spec(tmp_path, name, CRASH_S if name == "crashes" else 0.0)) for name in names]
            for app in apps:
                assert ending(client.wait(app, until="done", timeout_s=180.0)).code == DONE
            lost = lost_gpu_s(client)
    wasted = {name: sum(attempts(tmp_path, name)[:-1]) for name in names}
    for name in names:
        # The node agent's count begins with the process, before its first line and its Python.
        assert wasted[name] <= lost[name] <= wasted[name] + 10.0 * len(attempts(tmp_path, name)), (lost, wasted)
    assert lost["crashes"] >= CRASH_S
    # A job may be taken off its GPU while it would lose less than NEGLIGIBLE_S in all, and then has a moment to go.
    assert all(wasted[name] <= 2.0 * NEGLIGIBLE_S for name in names[1:]), wasted
    assert wasted["crashes"] <= CRASH_S + 2.0 * NEGLIGIBLE_S, wasted
