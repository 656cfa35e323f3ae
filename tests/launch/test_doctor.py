"""What `doctor` says of the node agents of this host and of the GPUs that get no work."""

from __future__ import annotations

from pathlib import Path

import msgspec

from launch import doctor
from node_agent import health_files
from node_agent.core.events import HealthLedger
from node_agent.workers.containment import Standing
from node_agent.workers.manager import STANDING
from protocol.messages import GpuId


def test_it_says_what_is_contained_and_how_a_quarantine_is_lifted(tmp_path: Path) -> None:
    standing = Standing("cgroup", ("device files are not closed",))
    (tmp_path / STANDING).write_bytes(msgspec.json.encode(standing))
    health_files.write(tmp_path, HealthLedger(quarantined={GpuId("GPU-7"): "quarantined: jobs of a-1 and b-1 failed"}))
    contained, barred = doctor._nodes_here([tmp_path])
    assert contained.found == "cgroup; open: device files are not closed"
    assert barred.found.startswith("quarantined: jobs of a-1 and b-1")
    assert barred.mend == f"to use it again: echo GPU-7 > {tmp_path}/unquarantine"


def test_a_folder_without_a_node_agent_says_nothing(tmp_path: Path) -> None:
    assert list(doctor._nodes_here([tmp_path])) == []


def test_it_says_what_a_node_agent_of_this_user_would_leave_open() -> None:
    check = doctor._containment()
    assert "auto" in check.found
    assert (check.verdict == "ok") != ("open:" in check.found)


def test_it_names_gpus_that_are_sick_quarantined_or_used_by_strangers_and_no_others() -> None:
    gpus = [
        {"id": "GPU-0", "healthy": True, "detail": "", "strangers": 0, "quarantined": False},
        {"id": "GPU-1", "healthy": False, "detail": "Xid 48"},
        {"id": "GPU-2", "healthy": True, "detail": "jobs of a-1 and b-1 failed", "quarantined": True},
        {"id": "GPU-3", "healthy": True, "detail": "process 4711", "strangers": 2},
    ]
    found = [(check.name, check.found) for check in doctor._sick(gpus)]
    assert found == [
        ("health", "GPU-1: Xid 48"),
        ("quarantine", "jobs of a-1 and b-1 failed"),
        ("strangers", "2 processes under no lease use GPU-3: process 4711"),
    ]
