"""What `doctor` says of the node agents of this host and of the GPUs that get no work."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from app_agent import control_server
from app_agent.config import AppConfig
from app_agent.daemon import run_app_host
from launch import doctor, gpu_checks
from launch.gpu_checks import Check
from node_agent import health_files
from node_agent.core.events import HealthLedger
from node_agent.workers.containment import Standing
from node_agent.workers.manager import STANDING
from protocol.bus.amqp import AmqpBus
from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.messages import GpuId
from tests.support.ports import free_port
from tests.support.stand_in import StandIn, cards

UNITS = Path(doctor.__file__).parent / "site" / "systemd"


def test_it_says_what_is_contained_and_how_a_quarantine_is_lifted(tmp_path: Path) -> None:
    standing = Standing("cgroup", ("device files are not closed",))
    (tmp_path / STANDING).write_bytes(msgspec.json.encode(standing))
    health_files.write(tmp_path, HealthLedger(quarantined={GpuId("GPU-7"): "quarantined: jobs of a-1 and b-1 failed"}))
    contained, barred = doctor._nodes_here([tmp_path])
    assert contained.found == "cgroup; open: device files are not closed"
    assert barred.found.startswith("quarantined: jobs of a-1 and b-1")
    assert barred.mend == f"to use it again: echo GPU-7 > {tmp_path}/unquarantine"


def a_certificate(path: Path, *, days: float) -> Path:
    """A certificate, signed by itself, that is valid for so many days from now on."""
    now, name, key = datetime.now(UTC), x509.Name([]), ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - timedelta(days=99))
    made = builder.not_valid_after(now + timedelta(days=days, hours=1)).sign(key, SHA256())
    path.write_bytes(made.public_bytes(Encoding.PEM))
    return path


def test_it_tells_the_days_until_the_certificates_of_a_broker_expire(tmp_path: Path) -> None:
    def found(ca: Path, own: Path) -> list[tuple[str, str]]:
        url = f"amqps://broker:5671/gpu?cafile={ca}&certfile={own}&keyfile=/none"
        return [(check.verdict, check.found) for check in doctor._certificates(url)]

    ca, own = a_certificate(tmp_path / "ca.pem", days=400), a_certificate(tmp_path / "own.pem", days=12)
    assert found(ca, own) == [("ok", "expires in 400 days"), ("note", "expires in 12 days")]
    a_certificate(own, days=-3)
    assert found(ca, own)[1] == ("fail", "expired 3 days ago")
    own.write_text("no certificate")
    verdict, words = found(ca, own)[1]
    assert (verdict, words.startswith("cannot be read: ")) == ("fail", True)
    own.write_bytes(ca.read_bytes() + a_certificate(tmp_path / "next.pem", days=12).read_bytes())
    assert found(ca, own)[1] == ("note", "expires in 12 days"), "the first of several counts"
    assert list(doctor._certificates("amqp://arbiter:secret@broker/gpu")) == []


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


# --- NVIDIA GPUs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    played = StandIn(tmp_path / "driver", *cards(2, gpm=1))
    played.flag("persistence")
    played.load(monkeypatch)
    return played


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's files on a host whose users may not touch each other's processes, for a user who is not root."""
    folder = tmp_path / "proc"
    for part in ("sys/kernel/yama", "self/ns"):
        (folder / part).mkdir(parents=True)
    (folder / "sys/kernel/yama/ptrace_scope").write_text("0\n")
    (folder / "self/status").write_text("Name:\tpython\nCapEff:\t0000000000000000\n")
    (folder / "self/ns/pid").symlink_to(gpu_checks.HOST_PIDS)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    return folder


def told(proc: Path, *, launched: bool = False) -> dict[str, Check]:
    return {check.name: check for check in gpu_checks.checks(proc, launched=launched)}


def test_a_host_whose_gpus_lack_nothing_is_told_so(driver: StandIn, proc: Path) -> None:
    found = told(proc)
    assert {name: check.verdict for name, check in found.items()} == {"gpus": "ok", "driver checkpoint": "ok"}
    assert found["gpus"].found == "2 GPUs, driver 580.95.05"


@pytest.mark.parametrize(
    ("changes", "verdict", "found", "mend"),
    [
        ({"lost": 1}, "fail", "GPU is lost", "kernel's log"),
        ({"mig": 1}, "fail", "MIG", "-mig 0"),
        ({"mode": 3}, "fail", "compute mode", "-c DEFAULT"),
        ({"gpm": 0}, "note", "GPM", "Hopper"),
    ],
)
def test_what_is_wrong_with_one_gpu_is_told_with_its_mend(
    driver: StandIn, proc: Path, changes: dict[str, int], verdict: str, found: str, mend: str
) -> None:
    driver.change(1, **changes)
    checks = told(proc)
    assert set(checks) == {"gpus", "GPU 1", "driver checkpoint"}
    assert checks["GPU 1"].verdict == verdict
    assert found in checks["GPU 1"].found
    assert mend in f"{checks['GPU 1'].found}; {checks['GPU 1'].mend}"


def test_persistence_mode_that_is_off_is_told(driver: StandIn, proc: Path) -> None:
    driver.flag()
    assert "nvidia-persistenced" in told(proc)["GPU 0"].mend


def test_a_missing_right_for_the_drivers_checkpoint_is_told_unless_root_or_the_capability_makes_up_for_it(
    driver: StandIn, proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (proc / "sys/kernel/yama/ptrace_scope").write_text("1\n")
    check = told(proc)["driver checkpoint"]
    assert (check.verdict, "ptrace_scope is 1" in check.found) == ("note", True)
    unit = (UNITS / "gpu-arbiter-node-agent.service").read_text()
    for setting in ("CapabilityBoundingSet=", "AmbientCapabilities="):  # both take it away as they are shipped
        assert f"\n{setting}\n" in unit
        assert setting in check.mend
    said = " ".join(unit.replace("\n# ", " ").split())
    assert "CAP_SYS_PTRACE for the driver's checkpoint where kernel.yama.ptrace_scope is not 0" in said
    assert "without it that is off, jobs that do not cooperate are not suspended" in said
    (proc / "self/status").write_text(f"CapEff:\t{1 << 19:016x}\n")
    assert told(proc)["driver checkpoint"].verdict == "ok"
    (proc / "self/status").write_text("CapEff:\t0000000000000000\n")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert told(proc)["driver checkpoint"].verdict == "ok"


def test_where_a_launcher_starts_tasks_no_right_of_the_node_agent_makes_up_for_the_kernels_setting(
    driver: StandIn, proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (proc / "self/status").write_text(f"CapEff:\t{1 << 19:016x}\n")
    for scope, user, verdict in (("1\n", 1000, "note"), ("1\n", 0, "note"), ("0\n", 1000, "ok")):
        (proc / "sys/kernel/yama/ptrace_scope").write_text(scope)
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        check = told(proc, launched=True)["driver checkpoint"]
        assert (check.verdict, check.mend) == (
            verdict,
            "sysctl kernel.yama.ptrace_scope=0" if verdict == "note" else "",
        )


def test_doctor_sees_that_a_launcher_runs_on_this_host(
    driver: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(gpu_checks, "checks", lambda *, launched: asked.append(launched) or iter(()))
    for folder in (tmp_path, tmp_path / "none"):
        monkeypatch.setattr(doctor, "LAUNCHER", folder)
        list(doctor.checks())
    assert asked == [True, False]


def test_a_pid_namespace_of_its_own_is_told(driver: StandIn, proc: Path) -> None:
    (proc / "self/ns/pid").unlink()
    (proc / "self/ns/pid").symlink_to("pid:[4026532177]")
    assert "host's PID namespace" in told(proc)["process ids"].mend


def test_a_driver_that_errs_is_told_and_the_other_checks_go_on(driver: StandIn, proc: Path) -> None:
    driver.fault("error", "nvmlDeviceGetCount_v2", value=999)
    assert told(proc)["gpus"].verdict == "fail"
    driver.heal()
    driver.fault("error", "nvmlInitWithFlags", value=9)
    check = told(proc)["gpus"]
    assert (check.verdict, check.found) == ("note", "NVML cannot be used (Driver Not Loaded)")
    assert "simulated" in check.mend
