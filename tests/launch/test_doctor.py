"""What `doctor` says of the node agents of this host and of the GPUs that get no work."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from app_agent import control_server
from app_agent.config import AppConfig
from app_agent.daemon import run_app_host
from launch import doctor
from node_agent import health_files
from node_agent.core.events import HealthLedger
from node_agent.workers.containment import Standing
from node_agent.workers.manager import STANDING
from protocol.bus.amqp import AmqpBus
from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.messages import GpuId
from tests.support.rabbitmq import free_port


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


async def test_what_does_not_answer_has_a_mend_that_is_not_to_ask_the_doctor_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AppConfig(owner="ada", state_dir=str(tmp_path), socket=str(tmp_path / "ada.sock"))
    monkeypatch.setattr(control_server, "ANSWER_S", 0.1)
    monkeypatch.setenv("GPU_ARBITER_URL", f"unix://{config.socket}")
    found = [*doctor._running()]
    for bus in (AmqpBus(f"amqp://app-ada:x@127.0.0.1:{free_port()}/"), MemoryBus(MemoryBroker())):
        ready = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(run_app_host(config, bus, on_ready=ready.set))
            await ready.wait()
            found += await asyncio.to_thread(lambda: list(doctor._running()))
            task.cancel()
    failed = [check for check in found if check.verdict == "fail"]
    assert [check.name for check in failed] == ["app agent", "broker", "arbiter"]
    assert "gpu-arbiter up" in failed[0].mend
    assert [check.name for check in failed if "systemctl" not in check.mend or "gpu-arbiter doctor" in check.mend] == []
    assert [check.verdict for check in found if check.name == "app agent"] == ["fail", "ok", "ok"]


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
