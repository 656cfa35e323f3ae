"""What `submit` and `run` find out before an app is queued: its files on this host, and the nodes that there are."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app_agent import control_server
from app_agent.config import AppConfig
from app_agent.control import Control
from app_agent.control_server import UNDECIDED
from app_agent.core.spec import AppSpec
from app_agent.daemon import run_app_host
from launch import preflight
from launch.faults import Fault
from protocol import exit_codes
from protocol.bus import Bus
from protocol.bus.amqp import AmqpBus
from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.messages import Act, Query
from tests.support.app_state import with_plain_ids
from tests.support.hand_arbiter import Reply, hand_arbiter
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port
from tests.support.wishes import made

CAPACITY = {
    "schema": "capacity/v1", "policy": "themis", "nodes": 2, "gpus": 6, "gpus_known": 12, "largest_node_gpus": 4,
    "largest_node_gpus_known": 8, "cpus_max": 32.0, "host_bytes_max": 64 * 2**30, "priority_max": 5, "weight_max": 2.0,
    "classes": ["batch"],
}  # fmt: skip


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "script"),
    [
        ("python train.py --lr 1", "train.py"),
        ("/venv/bin/python3.11 -u -X dev src/train.py -m", "src/train.py"),
        ("python -Wignore -uO train.py", "train.py"),
        ("python -W ignore train.py", "train.py"),
        ("python -- train.py", "train.py"),
        ("pypy3 train.py", "train.py"),
        ("python -m trainer train.py", ""),
        ("python -um trainer", ""),
        ("python -c pass", ""),
        ("python -", ""),
        ("python", ""),
        ("python --version", ""),
        ("pythonic train.py", ""),
        ("torchrun train.py", "train.py"),
        ("torchrun --nproc-per-node 2 train.py", ""),
        ("bash run.sh", "run.sh"),
        ("bash -c run.sh", ""),
        ("./train.py data.py", ""),
    ],
)
def test_the_script_of_a_command_is_what_its_interpreter_takes_for_it(line: str, script: str) -> None:
    assert preflight.script_of(line.split()) == script


def spec(folder: Path, *trials: tuple[str, ...], **fields: object) -> AppSpec:
    env = {"PATH": "/usr/bin:/bin"}
    return AppSpec(trials=trials, cwd=str(folder), checkpoint_root=str(folder), env=env, **made(fields))  # type: ignore[arg-type]


def test_what_is_there_as_a_node_would_look_for_it_passes(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "run").write_text("#!/bin/sh\n")
    (tmp_path / "run").chmod(0o755)
    preflight.check_files(spec(tmp_path, ("sh", "train.py"), ("sh", str(tmp_path / "run")), ("./run",), ("true",)))
    preflight.check_files(spec(tmp_path, (sys.executable, "train.py"), (sys.executable, "-m", "nosuch")))
    preflight.check_files(spec(tmp_path, ("bash", "which")))  # bash looks for it on the PATH, too


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("nosuch",), "the command 'nosuch' was not found on this host"),
        (("./data.txt",), "the command './data.txt' was not found on this host, or is not executable"),
        (("sh", "train.sh"), "train.sh does not exist on this host"),
        ((sys.executable, "-u", "train.py"), "train.py does not exist on this host"),
        ((sys.executable, "/no/such.py"), "the script /no/such.py does not exist on this host"),
    ],
)
def test_what_is_not_there_is_named_with_the_mend(tmp_path: Path, command: tuple[str, ...], sentence: str) -> None:
    (tmp_path / "data.txt").touch()
    with pytest.raises(Fault) as caught:
        preflight.check_files(spec(tmp_path, ("true",), command))
    assert sentence in caught.value.sentence
    assert (caught.value.code, "--no-check" in caught.value.next_step) == (exit_codes.USAGE, True)


def test_what_this_user_may_not_look_into_is_left_to_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def barred(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    asked = spec(tmp_path, (sys.executable, "train.py"), secrets={"KEY": "/root/key"})
    assert preflight.absent_secrets(spec(tmp_path, ("true",), secrets={"KEY": "/no/such"})) != []
    monkeypatch.setattr(Path, "exists", barred)
    preflight.check_files(asked)
    assert preflight.absent_secrets(asked) == []


def test_a_folder_that_is_not_there_is_named_first(tmp_path: Path) -> None:
    with pytest.raises(Fault, match=r"the working folder .*/none does not exist on this host"):
        preflight.check_files(spec(tmp_path / "none", ("nosuch",)))


# --- nodes ----------------------------------------------------------------------------------------------------------


def room(tmp_path: Path, capacity: dict[str, object] | None = None, **fields: object) -> list[str]:
    return preflight.check_room(spec(tmp_path, ("true",), **fields), CAPACITY | (capacity or {}))  # type: ignore[arg-type]


def test_a_gang_that_fits_now_is_nothing_to_speak_of(tmp_path: Path) -> None:
    assert room(tmp_path, gang=4, cpus=32, host_bytes=64 * 2**30) == []
    assert room(tmp_path, {"cpus_max": 0.0, "host_bytes_max": 0}, cpus=64, host_bytes=2**40) == [], "no node says"


def test_a_tenant_that_the_site_does_not_name_is_told_or_refused_as_the_arbiter_would(tmp_path: Path) -> None:
    named = {"tenants": ["nlp", "vision"], "tenants_only": False}
    assert room(tmp_path, named, tenant="vision") == []
    assert room(tmp_path, {"tenants": [], "tenants_only": False}, tenant="visoin") == []
    assert room(tmp_path, named, tenant="") == [], "the daemon's own tenant is not known here"
    assert room(tmp_path, named, tenant="visoin") == [
        "tenant visoin is not among the tenants of this site (nlp, vision); it has weight 1, as every tenant that is "
        "not named"
    ]
    with pytest.raises(Fault, match=r"tenant visoin is not among the tenants of this site \(nlp, vision\)") as caught:
        room(tmp_path, named | {"tenants_only": True}, tenant="visoin")
    assert (caught.value.code, caught.value.next_step) == (exit_codes.REFUSED, "name one: --tenant")


def test_a_gang_that_may_lie_on_several_nodes_needs_room_on_all_of_them_together(tmp_path: Path) -> None:
    assert room(tmp_path, gang=6, spans=True) == []
    assert room(tmp_path, gang=9, spans=True) == ["6 GPUs are in service now; the app waits until 9 are"]
    with pytest.raises(Fault, match="each job needs 13 GPUs, and all nodes together have 12"):
        room(tmp_path, gang=13, spans=True)


def test_kinds_of_gpus_on_several_nodes_count_together(tmp_path: Path) -> None:
    h200 = {"model": "NVIDIA H200", "memory_bytes": 141 * 10**9, "known": 4, "in_service": 3}
    kinds: dict[str, object] = {"kinds": [{"nodes": 2, "gpus": [h200]}]}
    assert room(tmp_path, kinds, gang=6, gpu_types=("H200",), spans=True) == []
    assert room(tmp_path, kinds, gang=7, gpu_types=("H200",), spans=True) == [
        "7 H200 are not in service now; the app waits until they are"
    ]
    with pytest.raises(Fault, match="each job needs 9 H200, and all nodes together have 8 of that kind"):
        room(tmp_path, kinds, gang=9, gpu_types=("H200",), spans=True)
    with pytest.raises(Fault, match="each job needs 5 H200 on one node, and the largest node has 4 of that kind"):
        room(tmp_path, kinds, gang=5, gpu_types=("H200",))


def test_a_job_on_several_nodes_is_accepted_where_gpus_are_shared_and_is_told_that_it_has_its_own(
    tmp_path: Path,
) -> None:
    (note,) = room(tmp_path, {"sharing": "timeslice"}, gang=6, spans=True)
    assert note == (
        "sharing is timeslice here, but not for a job that may lie on several nodes: it waits for GPUs of its own"
    )
    assert room(tmp_path, {"sharing": "timeslice"}, gang=4) == []


def test_a_gang_that_fits_no_node_that_is_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Fault, match="each job needs 9 GPUs on one node, and the largest node has 8") as caught:
        room(tmp_path, gang=9)
    assert caught.value.code == exit_codes.REFUSED


def test_a_gang_that_fits_only_what_is_out_of_service_is_accepted_with_a_note(tmp_path: Path) -> None:
    (note,) = room(tmp_path, gang=5)
    assert note.startswith("no node has 5 GPUs in service now (the largest has 4 of its GPUs in service)")
    (note,) = room(tmp_path, {"largest_node_gpus": 0}, gang=1)
    assert note.startswith("no node has 1 GPU in service now (no GPU is in service)")
    assert room(tmp_path, {"largest_node_gpus_known": 0}, gang=99) == [
        "no node has enrolled yet; the app waits for one"
    ]


A100 = {"model": "NVIDIA A100-SXM4-80GB", "memory_bytes": 80 * 2**30}
H200 = {"model": "NVIDIA H200", "memory_bytes": 140 * 2**30}
#: A node of eight A100, of which four are in service, and two of four H200.
KINDS = {
    "kinds": [
        {"nodes": 1, "gpus": [A100 | {"known": 8, "in_service": 4}]},
        {"nodes": 2, "gpus": [H200 | {"known": 4, "in_service": 0}]},
    ]
}


def test_a_kind_of_gpus_that_no_node_has_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    there = "the GPUs here are NVIDIA A100-SXM4-80GB \\(80 GiB\\), NVIDIA H200 \\(140 GiB\\)"
    with pytest.raises(Fault, match=f"each job needs 1 H100, and no node has one; {there}") as caught:
        room(tmp_path, KINDS, gpu_types=("H100",))
    assert (caught.value.code, caught.value.next_step) == (exit_codes.REFUSED, "ask for another kind")
    with pytest.raises(Fault, match="each job needs 5 H200 on one node, and the largest node has 4 of that kind"):
        room(tmp_path, KINDS, gang=5, gpu_types=("H200",))
    with pytest.raises(Fault, match="each job needs 1 GPU with at least 200 GiB, and no node has one"):
        room(tmp_path, KINDS, min_memory_bytes=200 * 2**30)


def test_a_kind_of_gpus_that_is_out_of_service_is_accepted_with_a_note(tmp_path: Path) -> None:
    assert room(tmp_path, KINDS, gang=4, gpu_types=("A100",)) == []
    (note,) = room(tmp_path, KINDS, gang=2, gpu_types=("H200",))
    assert note == "no node has 2 H200 in service now; the app waits until one has"


def test_an_arbiter_that_does_not_tell_the_kinds_refuses_for_itself(tmp_path: Path) -> None:
    assert room(tmp_path, gpu_types=("H100",)) == []


def test_more_cores_or_memory_than_any_node_says_is_worth_a_note(tmp_path: Path) -> None:
    cores, memory = room(tmp_path, cpus=33, host_bytes=65 * 2**30)
    assert "asks for 33 CPU cores, and no node says that it has more than 32" in cores
    assert "asks for 65 GiB of host memory, and no node says that it has more than 64" in memory


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"priority": 6}, "priority is 6, and this site allows at most 5"),
        ({"weight": 2.5}, "weight is 2.5, and this site allows at most 2"),
        ({"kind": "interactive"}, "its class is interactive, and this site allows batch only"),
    ],
)
def test_what_the_site_does_not_allow_is_refused_before_it_is_queued(
    tmp_path: Path, asked: dict[str, object], told: str
) -> None:
    assert room(tmp_path, priority=5, weight=2.0, kind="batch") == []
    with pytest.raises(Fault, match=told) as caught:
        room(tmp_path, **asked)
    assert caught.value.code == exit_codes.REFUSED


# --- as typed -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def site(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reply: Reply | None, bus: Bus | None = None
) -> AsyncIterator[None]:
    """An app agent of ada's, and unless there is no `reply` an arbiter on an in-process bus."""
    monkeypatch.setenv("GPU_ARBITER_URL", f"unix://{folder}/control.sock")
    monkeypatch.delenv("GPU_ARBITER_OUTPUT", raising=False)
    config = AppConfig(owner="ada", state_dir=str(folder / "ada"), socket=str(folder / "control.sock"))
    monkeypatch.setattr(control_server, "ANSWER_S", 2.0)
    ready, bus = asyncio.Event(), bus or MemoryBus(MemoryBroker())
    async with asyncio.TaskGroup() as group:
        agent = group.create_task(run_app_host(with_plain_ids(config), bus, on_ready=ready.set))
        await ready.wait()
        if reply is None:
            yield
        else:
            assert isinstance(bus, MemoryBus)
            async with hand_arbiter(bus, reply):
                await asyncio.to_thread(_wait_connected, folder / "control.sock")
                yield
        agent.cancel()


def _wait_connected(socket: Path) -> None:
    with Control(socket) as control:
        control.query("capacity")


async def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.cli", *words]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


def answer(message: Query | Act) -> dict[str, object] | None:
    return CAPACITY if isinstance(message, Query) and message.kind == "capacity" else None


async def test_notes_go_to_stderr_and_into_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(tmp_path, monkeypatch, answer):
        done = await run("submit", "-g", "8", "--", "true")
        assert (done.returncode, done.stdout) == (exit_codes.DONE, "ada-1\n")
        (note,) = done.stderr.splitlines()
        assert note.startswith("no node has 8 GPUs in service now")
        document = json.loads((await run("submit", "-g", "8", "--json", "--", "true")).stdout)
        assert document == {"schema": "submitted/v1", "app": "ada-2", "notes": [note]}
        refused = await run("submit", "-g", "9", "--json", "--", "true")
        assert (refused.returncode, json.loads(refused.stdout)["code"]) == (exit_codes.REFUSED, exit_codes.REFUSED)
        assert json.loads((await run("submit", "--json", "--", "true")).stdout)["app"] == "ada-3", "not queued"


async def test_a_variable_that_sounds_secret_is_warned_of_once_and_one_from_a_file_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_123")
    (tmp_path / "key").write_text("k")
    async with site(tmp_path, monkeypatch, answer):
        done = await run("submit", "--env", "HF_TOKEN", "--env", "API_KEY=1", "--env", "SEED=1", "--", "true")
        assert (done.returncode, done.stdout) == (exit_codes.DONE, "ada-1\n")
        assert done.stderr == (
            "HF_TOKEN, API_KEY are given by value, which messages and journals hold; to keep a value secret, put it "
            "into a file: --secret HF_TOKEN=FILE\n"
        )
        done = await run("submit", "--secret", f"HF_TOKEN={tmp_path}/key", "--", "true")
        assert (done.returncode, done.stderr) == (exit_codes.DONE, "")
        done = await run("submit", "--secret", f"HF_TOKEN={tmp_path}/none", "--", "true")
        assert (done.returncode, done.stdout) == (exit_codes.DONE, "ada-3\n")
        assert (
            done.stderr == f"the file {tmp_path}/none of secret HF_TOKEN is not on this host; every node must have it\n"
        )


async def test_one_variable_cannot_be_given_by_value_and_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(tmp_path, monkeypatch, answer):
        done = await run("submit", "--env", "A=1", "--secret", f"A={tmp_path}/key", "--", "true")
        assert (done.returncode, done.stdout) == (exit_codes.USAGE, "")
        assert "A is in env and in secrets; leave one out" in done.stderr


async def test_without_an_arbiter_an_app_is_queued_and_the_exit_code_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(tmp_path, monkeypatch, None):
        done = await run("submit", "-g", "100", "--", "true")
        assert (done.returncode, done.stdout) == (exit_codes.UNREACHABLE, "ada-1\n")
        assert done.stderr == (
            "ada-1 is queued, the arbiter is away: the arbiter has not answered within 1 s, though the broker at "
            f"memory:// was reached; {UNDECIDED}; your app agent tells it of ada-1 when it is back\n"
        )
        listed = await run("wait", "ada-1", "--timeout", "0s")
        assert listed.returncode == exit_codes.TIMED_OUT, "it is queued"


async def test_without_a_broker_an_app_is_queued_and_the_broker_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = AmqpBus(f"amqp://app-ada:x@127.0.0.1:{free_port()}/")
    async with site(tmp_path, monkeypatch, None, bus):
        done = await run("submit", "--", "true")
        assert (done.returncode, done.stdout) == (exit_codes.UNREACHABLE, "ada-1\n")
        assert (
            f"the arbiter is away: the broker at {bus.url} cannot be reached; {UNDECIDED}; your app agent"
            in done.stderr
        )


async def test_run_stays_while_the_arbiter_is_away_and_still_cancels_at_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(tmp_path, monkeypatch, None):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "launch.cli", "run", "--", "true", stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        assert b"ada-1 is queued, the arbiter is away" in await process.stderr.readline()
        assert b"its output follows" in await process.stderr.readline()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):  # the daemon gives the arbiter up after 2 s
                await process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert b"ada-1 is cancelled" in await process.stderr.read()
        assert await process.wait() == exit_codes.INTERRUPTED
