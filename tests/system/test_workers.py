"""The node agent with real processes: how they start, end, are moved, are killed and are found again."""

# Files and processes of other programs offer no event to wait for, and are looked at in place.
# ruff: noqa: ASYNC110, ASYNC240

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import structlog
from msgspec.structs import replace

from node_agent import procfs
from node_agent.config import NodeConfig, load, parse
from node_agent.daemon import run_node_agent
from node_agent.devices import HungError
from node_agent.devices.simulated import SimulatedBackend
from node_agent.workers.manager import INHERITED, finished_of
from node_agent.workers.records import Spec
from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.config import ConfigError
from protocol.messages import AppId, GpuId, JobId, NodeReport, TaskId
from protocol.worker import ENVIRONMENT
from tests.support.node_site import (
    WORKER,
    Site,
    config,
    find_gpu,
    find_task,
    gpu,
    node_process,
    node_site,
    plan_of,
    task_order,
)
from tests.support.patience import PATIENCE_S

A, B = "ada-1.0-a0", "bob-1.0-a0"


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path: Path) -> Iterator[None]:
    """Kill the processes that a failed test has left running."""
    yield
    for path in tmp_path.glob("state/workers/*/started.json"):
        started = msgspec.json.decode(path.read_bytes())
        if procfs.is_running(started["shim"], started["shim_ticks"]):
            os.kill(started["shim"], signal.SIGKILL)  # its task dies with it


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with node_site(tmp_path) as made:
        yield made


def script(folder: Path, text: str) -> tuple[str, str]:
    """A program without our library."""
    path = folder / "script.py"
    path.write_text(text)
    return sys.executable, str(path)


def is_gone(pid: int) -> bool:
    process = procfs.stat(pid)
    return process is None or process.state == "Z"


async def gone(pid: int) -> None:
    """Wait until a process is no more; it may be the child of any process."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_gone(pid):
            await asyncio.sleep(0.01)


async def pid_in(path: Path) -> int:
    """Wait for a file with a pid in it, which a program of the test writes."""
    async with asyncio.timeout(PATIENCE_S):
        while not (path.exists() and path.read_text().strip()):
            await asyncio.sleep(0.01)
    return int(path.read_text())


# --- how programs end -----------------------------------------------------------------------------------------------


async def test_a_worker_starts_works_and_finishes(site: Site) -> None:
    await site.plan(task_order(site.folder, A, "finish"))
    status = await site.exited(A)
    assert (status.outcome, status.exit_code, status.metrics) == ("finished", 0, {"accuracy": 0.5})


async def test_a_driver_that_hangs_as_a_worker_starts_ends_no_node_agent_and_keeps_it_from_nothing_else(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_in: list[threading.Thread] = []

    def hang(_self: SimulatedBackend, _gpus: Sequence[GpuId]) -> None:
        asked_in.append(threading.current_thread())
        raise HungError("NVML did not answer within 10 s; a GPU of this node hangs")

    monkeypatch.setattr(SimulatedBackend, "cpus", hang)
    await site.plan(task_order(site.folder, A, "finish"))
    assert (await site.exited(A)).outcome == "finished"
    assert asked_in
    assert threading.main_thread() not in asked_in


async def test_a_script_that_crashes_at_once_is_failed_with_its_last_words(site: Site) -> None:
    command = script(site.folder, "raise ValueError('the data set is missing')")
    await site.plan(task_order(site.folder, A, *command))
    status = await site.exited(A)
    assert (status.outcome, status.exit_code) == ("failed", 1)
    assert "ValueError: the data set is missing" in status.reason


async def test_a_script_that_never_calls_the_library_and_exits_0_is_finished_unconfirmed(site: Site) -> None:
    await site.plan(task_order(site.folder, A, *script(site.folder, "print('done')")))
    status = await site.exited(A)
    assert status.outcome == "finished"
    assert "unconfirmed" in status.reason


async def test_a_script_that_never_calls_the_library_counts_as_running_and_is_ended_by_sigterm(site: Site) -> None:
    command = script(site.folder, "import time\nprint('up', flush=True)\ntime.sleep(60)")
    await site.plan(task_order(site.folder, A, *command))
    assert not (await site.phase(A, "running")).cooperative
    await site.plan(task_order(site.folder, A, *command, want="vacate"))
    status = await site.exited(A)
    assert (status.outcome, status.exit_code) == ("preempted", 128 + signal.SIGTERM)
    assert "work since the last checkpoint is lost" in status.reason


async def test_a_script_killed_by_a_signal_is_failed_and_says_which(site: Site) -> None:
    command = script(site.folder, "import os\nos.kill(os.getpid(), 11)")
    await site.plan(task_order(site.folder, A, *command))
    status = await site.exited(A)
    assert (status.outcome, status.exit_code) == ("failed", 139)
    assert "SIGSEGV" in status.reason


async def test_a_finish_written_down_while_no_node_agent_listened_counts(site: Site) -> None:
    written = {"schema": "finished/v1", "task": A, "attempt": 0, "step": 9, "metrics": {"accuracy": 0.7}}
    text = f"""
import json, os
with open(os.environ["GPU_ARBITER_CHECKPOINT_DIR"] + "/finished.json", "w") as file:
    file.write({json.dumps(json.dumps(written))})
"""
    await site.plan(task_order(site.folder, A, *script(site.folder, text)))
    status = await site.exited(A)
    assert (status.outcome, status.metrics, status.reason) == ("finished", {"accuracy": 0.7}, "")


async def test_a_finish_that_a_task_of_the_same_name_wrote_down_in_another_run_does_not_count(site: Site) -> None:
    order = task_order(site.folder, A, *script(site.folder, ""))
    assert order.launch is not None
    folder = Path(order.launch.checkpoint_dir)
    folder.mkdir()
    strange = {"schema": "finished/v1", "task": A, "run": "me-1-77", "attempt": 0, "step": 9, "metrics": {"loss": 0.7}}
    (folder / "finished.json").write_text(json.dumps(strange))
    await site.plan(replace(order, launch=replace(order.launch, run="me-1-5f")))
    status = await site.exited(A)
    assert (status.step, status.metrics) == (-1, {})
    assert "its success is unconfirmed" in status.reason


async def test_what_a_task_leaves_behind_is_killed_before_it_counts_as_gone(site: Site) -> None:
    text = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
open({str(site.folder / "child")!r}, "w").write(str(child.pid))
"""
    await site.plan(task_order(site.folder, A, *script(site.folder, text)))
    assert (await site.exited(A)).outcome == "finished"
    assert is_gone(await pid_in(site.folder / "child"))


# --- what cannot be started -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "command", "says"),
    [
        ({"cwd": "/no/such/folder"}, ("/bin/true",), "working directory /no/such/folder does not exist"),
        ({}, ("/no/such/program",), "'/no/such/program' was not found"),
        ({"checkpoint_dir": "/proc/checkpoints"}, ("/bin/true",), "/proc/checkpoints cannot be written"),
        ({}, ("/etc/passwd",), "not executable"),
    ],
)
async def test_what_cannot_be_started_is_refused_in_one_sentence_and_disturbs_nothing_else(
    site: Site, fields: dict[str, str], command: tuple[str, ...], says: str
) -> None:
    bad = task_order(site.folder, A, *command, **fields)  # type: ignore[arg-type]
    good = task_order(site.folder, B, "finish", gpus=[1])
    await site.plan(bad, good)
    report = await site.report(lambda r: sum(status.phase == "exited" for status in r.tasks) == 2)
    refused, finished = find_task(report, A), find_task(report, B)
    assert refused is not None
    assert finished is not None
    assert (refused.outcome, finished.outcome) == ("failed", "finished")
    assert says in refused.reason
    assert "n1" in refused.reason


async def test_a_program_that_the_kernel_will_not_run_is_refused_in_one_sentence(site: Site) -> None:
    path = site.folder / "program"
    path.write_bytes(b"\x7fELFnonsense")
    path.chmod(0o755)
    await site.plan(task_order(site.folder, A, str(path)))
    status = await site.exited(A)
    assert status.outcome == "failed"
    assert "Exec format error" in status.reason


# --- environment, log -----------------------------------------------------------------------------------------------


async def test_a_worker_gets_the_promised_environment_and_no_secrets(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKER_PASSWORD", "secret")
    command = script(site.folder, "import json, os\nprint(json.dumps(dict(os.environ)))")
    order = task_order(site.folder, A, *command, gpus=[0, 1], env={"SEED": "1"})
    assert order.launch is not None
    await site.plan(replace(order, launch=replace(order.launch, run="ana-1-5f")))
    await site.exited(A)
    env = json.loads((await site.log(A)).data)
    of_several_nodes = {"PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
    assert set(ENVIRONMENT) - set(env) == {"GPU_ARBITER_MEMORY_DIR"} | of_several_nodes  # this node has no memory_dir
    assert env["CUDA_VISIBLE_DEVICES"] == f"{gpu(0)},{gpu(1)}"
    assert (env["GPU_ARBITER_TASK"], env["GPU_ARBITER_GPUS"], env["SEED"]) == (A, "2", "1")
    assert env["GPU_ARBITER_RUN"] == "ana-1-5f"
    assert env["PET_NPROC_PER_NODE"] == "2"
    assert "BROKER_PASSWORD" not in env
    assert "BROKER_PASSWORD" not in INHERITED


async def test_the_output_is_kept_and_can_be_read_after_the_end(site: Site) -> None:
    command = script(site.folder, "import sys\nprint('out')\nprint('err', file=sys.stderr)")
    await site.plan(task_order(site.folder, A, *command))
    await site.exited(A)
    chunk = await site.log(A)
    assert sorted(chunk.data.split()) == [b"err", b"out"]
    assert (chunk.size, chunk.ended) == (len(chunk.data), True)


async def test_a_bootstrap_folder_comes_first_on_the_python_path(tmp_path: Path) -> None:
    folder = tmp_path / "bootstrap"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("print('instrumented')")
    async with node_site(tmp_path, bootstrap_dir=str(folder)) as site:
        await site.plan(task_order(tmp_path, A, *script(tmp_path, "print('script')"), env={"PYTHONPATH": "/elsewhere"}))
        await site.exited(A)
        assert (await site.log(A)).data.split() == [b"instrumented", b"script"]


# --- moving ---------------------------------------------------------------------------------------------------------


async def test_a_cooperative_worker_is_suspended_gives_way_and_is_resumed(site: Site) -> None:
    first = task_order(site.folder, A, "park-only")
    await site.plan(first)
    await site.status(A, lambda status: status.step >= 3)
    leaving = task_order(site.folder, A, "park-only", want="vacate")
    await site.plan(leaving, task_order(site.folder, B, "finish"))
    report = await site.report(lambda r: (s := find_task(r, B)) is not None and s.phase == "exited")
    parked = find_task(report, A)
    assert parked is not None
    assert parked.phase == "suspended"
    await site.plan(first)
    status = await site.status(A, lambda status: status.phase == "running" and status.step > parked.step)
    assert status.suspensions == 1


async def test_a_worker_that_can_save_leaves_with_code_75_and_frees_its_gpu(site: Site) -> None:
    await site.plan(task_order(site.folder, A, "work"))
    await site.status(A, lambda status: status.step >= 1)
    await site.plan(task_order(site.folder, A, "work", want="vacate"))
    status = await site.exited(A)
    assert (status.outcome, status.exit_code) == ("preempted", 75)
    await site.report(lambda r: find_gpu(r, 0).empty)


async def test_a_worker_that_talks_nonsense_loses_that_connection_only(site: Site) -> None:
    await site.plan(task_order(site.folder, A, "babble"))
    assert (await site.status(A, lambda status: status.step >= 1)).phase == "running"


async def test_a_stranger_cannot_speak_for_a_worker(site: Site) -> None:
    await site.plan(task_order(site.folder, A, "park-only"))
    await site.status(A, lambda status: status.step >= 1)
    env = msgspec.json.decode(next((site.folder / "state/workers").glob("*/spec.json")).read_bytes())["env"]
    with socket.socket(socket.AF_UNIX) as intruder:
        intruder.connect(env["GPU_ARBITER_SOCKET"])
        intruder.sendall(b'{"type":"finished","step":1}\n')
        intruder.setblocking(False)
        with suppress(ConnectionResetError):
            async with asyncio.timeout(PATIENCE_S):
                assert await asyncio.get_running_loop().sock_recv(intruder, 1) == b""
    assert (await site.status(A, lambda status: status.step >= 5)).phase == "running"


#: Says a worker's own hello on the socket that it is given, until it is heard or has been refused three times.
NEIGHBOUR = """
    import json, socket, sys
    hello = {"type": "hello", "proto": 1, "task": sys.argv[2], "pid": 1, "state": "suspended", "step": 999,
             "start_step": -1, "total_steps": 0, "can_park": True, "can_checkpoint": True}
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(sys.argv[1])
            try:
                sock.sendall(json.dumps(hello).encode() + b"\\n")
                heard = sock.recv(1)
            except ConnectionError:
                heard = b""
            print("heard" if heard else "refused", flush=True)
    """


async def test_a_task_cannot_speak_for_its_neighbour_nor_cut_it_off(site: Site) -> None:
    await site.plan(first := task_order(site.folder, A, "park-only"))
    await site.status(A, lambda status: status.step >= 1)
    env = msgspec.json.decode(next((site.folder / "state/workers").glob("*/spec.json")).read_bytes())["env"]
    words = (sys.executable, "-c", textwrap.dedent(NEIGHBOUR), env["GPU_ARBITER_SOCKET"], A)
    with structlog.testing.capture_logs() as logged:
        await site.plan(first, task_order(site.folder, B, *words, gpus=(1,)))
        await site.exited(B)
        assert (await site.log(B)).data == b"refused\n" * 3
        step = (await site.status(A, lambda status: True)).step
        status = await site.status(A, lambda status: status.step > step + 3)
    assert (status.phase, status.suspensions) == ("running", 0)
    dropped = [line for line in logged if line["event"] == "connection.dropped"]
    assert len(dropped) == 3
    assert all("none of this task's" in line["reason"] for line in dropped)


#: How training processes come to be, other than as the task's own: each starts the program in its arguments.
MANNERS = {
    "a launcher's child": "import subprocess, sys; subprocess.run(sys.argv[1:])",
    "a child's child in a session of its own": """
        import os, sys, time
        if os.fork():
            time.sleep(60)
        os.setsid()
        if os.fork():
            os._exit(0)
        os.execv(sys.argv[1], sys.argv[1:])
        """,
    "a forkserver's": """
        import multiprocessing, os, sys
        if __name__ == "__main__":
            one = multiprocessing.get_context("forkserver").Process(target=os.execv, args=(sys.argv[1], sys.argv[1:]))
            one.start()
            one.join()
        """,
    "a spawned one": """
        import multiprocessing, os, sys
        if __name__ == "__main__":
            one = multiprocessing.get_context("spawn").Process(target=os.execv, args=(sys.argv[1], sys.argv[1:]))
            one.start()
            one.join()
        """,
}


@pytest.mark.parametrize("manner", MANNERS)
async def test_any_process_of_a_task_that_trains_is_heard(site: Site, manner: str) -> None:
    script = site.folder / "launch.py"
    script.write_text(textwrap.dedent(MANNERS[manner]))
    await site.plan(task_order(site.folder, A, sys.executable, str(script), sys.executable, str(WORKER), "work"))
    await site.status(A, lambda status: status.step >= 1)


# --- the kill ladder ------------------------------------------------------------------------------------------------


async def test_a_worker_that_ignores_orders_and_sigterm_is_killed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node_agent.core.ladder.PROBE_S", 0.2)
    monkeypatch.setattr("node_agent.core.ladder.TERMINATE_S", 0.2)
    order = task_order(site.folder, A, "stubborn", grace_s=0.3)
    await site.plan(order)
    await site.status(A, lambda status: status.step >= 1)
    await site.plan(task_order(site.folder, A, "stubborn", want="vacate", grace_s=0.3))
    status = await site.exited(A)
    assert (status.outcome, status.exit_code) == ("preempted", 128 + signal.SIGKILL)
    assert "did not suspend in time" in status.reason


async def test_a_stopped_process_is_woken_to_take_its_sigterm(site: Site) -> None:
    text = f"""
import os, signal, time
open({str(site.folder / "pid")!r}, "w").write(str(os.getpid()))
time.sleep(60)
"""
    command = script(site.folder, text)
    await site.plan(task_order(site.folder, A, *command))
    os.kill(await pid_in(site.folder / "pid"), signal.SIGSTOP)
    await site.plan(task_order(site.folder, A, *command, want="stop"))
    status = await site.exited(A)
    assert (status.outcome, status.exit_code) == ("stopped", 128 + signal.SIGTERM)


async def test_the_helpers_of_a_killed_worker_die_with_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node_agent.core.ladder.TERMINATE_S", 0.2)
    text = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(site.folder / "child")!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    command = script(site.folder, text)
    await site.plan(task_order(site.folder, A, *command))
    child = await pid_in(site.folder / "child")
    await site.plan(task_order(site.folder, A, *command, want="stop"))
    assert (await site.exited(A)).exit_code == 128 + signal.SIGKILL
    assert is_gone(child)


# --- GPUs -----------------------------------------------------------------------------------------------------------


async def test_a_stranger_on_a_gpu_blocks_its_release_and_the_next_start(site: Site) -> None:
    await site.report()
    site.backend.intrude(gpu(0), os.getpid())
    await site.report(lambda r: find_gpu(r, 0).strangers == 1 and not find_gpu(r, 0).empty)
    await site.plan(task_order(site.folder, A, "finish"))
    await site.status(A, lambda status: "under no lease" in status.reason)
    site.backend.intrude(gpu(0))
    assert (await site.exited(A)).outcome == "finished"


async def test_a_lost_gpu_takes_its_task_along_and_leaves_the_other_alone(site: Site) -> None:
    await site.plan(task_order(site.folder, A, "work"), task_order(site.folder, B, "work", gpus=[1]))
    await site.report(lambda r: len(r.tasks) == 2 and all(status.step >= 1 for status in r.tasks))
    site.backend.lose(gpu(0))
    status = await site.exited(A)
    assert status.outcome == "preempted"
    assert "was lost" in status.reason
    report = await site.report()
    assert not find_gpu(report, 0).healthy
    other = find_task(report, B)
    assert other is not None
    assert other.phase == "running"


async def test_a_worker_that_overdraws_its_virtual_gpu_is_killed_as_out_of_memory(tmp_path: Path) -> None:
    async with node_site(tmp_path) as site:
        site.backend._devices = tuple(
            type(device)(device.gpu, device.index, device.model, 64 * 2**20, device.slot)
            for device in site.backend.devices()
        )
        command = script(tmp_path, "import time\nblock = bytearray(b'x') * (400 * 2**20)\ntime.sleep(60)")
        await site.plan(task_order(tmp_path, A, *command))
        status = await site.exited(A)
        assert status.outcome == "failed"
        assert "out of memory" in status.reason


# --- the node agent's own death -------------------------------------------------------------------------------------


def running(report: NodeReport) -> bool:
    return bool(report.tasks) and all(status.step >= 1 for status in report.tasks)


async def test_workers_survive_kill_9_of_the_node_agent_and_are_adopted(tmp_path: Path) -> None:
    orders = [task_order(tmp_path, A, "work"), task_order(tmp_path, B, "park-only", gpus=[1])]
    suspend = [orders[0], task_order(tmp_path, B, "park-only", gpus=[1], want="vacate")]
    async with node_process(tmp_path) as agent:
        await agent.plan(plan_of(orders, epoch=1, seq=1))
        await agent.report(running)
        await agent.plan(plan_of(suspend, epoch=1, seq=2))
        before = await agent.report(lambda r: (s := find_task(r, B)) is not None and s.phase == "suspended")
        await agent.kill()
    async with node_process(tmp_path) as agent:
        report = await agent.report(
            lambda r: (s := find_task(r, A)) is not None and s.phase == "running" and s.step > 0
        )
        parked, was = find_task(report, B), find_task(before, B)
        assert parked is not None
        assert was is not None
        assert (parked.phase, parked.step, parked.suspensions) == ("suspended", was.step, 1)
        assert parked.measured.ran_s == pytest.approx(was.measured.ran_s, abs=1e-6)
        assert (trains := find_task(report, A)) is not None
        assert (trained := find_task(before, A)) is not None
        assert trains.measured.ran_s > trained.measured.ran_s > 0.0
        assert report.incarnation > before.incarnation
        assert (report.epoch, report.plan_seq) == (1, 2)
        await agent.plan(plan_of([task_order(tmp_path, A, "work", want="vacate"), orders[1]], epoch=1, seq=3))
        left = await agent.report(lambda r: (s := find_task(r, A)) is not None and s.phase == "exited")
        assert (status := find_task(left, A)) is not None
        assert (status.outcome, status.exit_code) == ("preempted", 75)
        await agent.report(lambda r: (s := find_task(r, B)) is not None and s.phase == "running" and s.step > was.step)
        await agent.plan(plan_of([], epoch=1, seq=4))
        await agent.report(lambda r: not r.tasks and find_gpu(r, 0).empty and find_gpu(r, 1).empty)


@pytest.mark.parametrize(("task", "done"), [("me-1.0-a2", True), ("me-1.0-a2.1", True), ("me-1.0-a21", False)])
def test_the_first_part_of_a_job_writes_down_for_all_that_it_has_finished(
    tmp_path: Path, task: str, done: bool
) -> None:
    (tmp_path / "finished.json").write_text('{"task": "me-1.0-a2", "run": "r", "step": 9}')
    spec = Spec(TaskId(task), AppId("me-1"), JobId("me-1.0"), 2, (), "boot", (), "/", {}, "", str(tmp_path), "r")
    assert (finished_of(spec) is not None) == done


async def test_an_exit_that_no_node_agent_saw_is_reported_with_its_code_by_the_next(tmp_path: Path) -> None:
    text = f"import os, sys, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    text += f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\nsys.exit(37)"
    order = task_order(tmp_path, A, *script(tmp_path, text))
    async with node_process(tmp_path) as agent:
        began = time.monotonic()
        await agent.plan(plan_of([order], epoch=1, seq=1))
        pid = await pid_in(tmp_path / "pid")
        await agent.report(lambda r: bool(r.tasks))
        await agent.kill()
    (tmp_path / "go").touch()
    await gone(pid)
    lived_s = time.monotonic() - began
    await asyncio.sleep(lived_s + 1.0)  # what comes after its end must not count
    async with node_process(tmp_path) as agent:
        report = await agent.report(lambda r: (s := find_task(r, A)) is not None and s.phase == "exited")
        assert (status := find_task(report, A)) is not None
        assert (status.outcome, status.exit_code) == ("failed", 37)
        assert 0.0 < status.measured.unsaved_s == status.measured.ran_s <= lived_s + 0.5


async def test_a_restarted_node_agent_refuses_the_plans_of_an_older_epoch(tmp_path: Path) -> None:
    async with node_process(tmp_path) as agent:
        await agent.plan(plan_of([], epoch=4, seq=2))
        await agent.report(lambda r: (r.epoch, r.plan_seq) == (4, 2))
        await agent.kill()
    async with node_process(tmp_path) as agent:
        order = task_order(tmp_path, A, "finish")
        await agent.plan(plan_of([order], epoch=3, seq=9))
        report = await agent.report(lambda r: r.plans_refused > 0 or r.epoch == 3)
        assert (report.epoch, report.plan_seq, report.plans_refused) == (4, 2, 1)
        await agent.plan(plan_of([], epoch=4, seq=3))
        report = await agent.report(lambda r: r.plan_seq == 3)
        assert not report.tasks
        await agent.plan(plan_of([order], epoch=4, seq=4))
        await agent.report(lambda r: (s := find_task(r, A)) is not None and s.outcome == "finished")


async def test_a_supervisor_that_is_killed_takes_its_task_along_and_the_script_is_not_blamed(site: Site) -> None:
    text = f"import os, time\nopen({str(site.folder / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    await site.plan(task_order(site.folder, A, *script(site.folder, text)))
    pid = await pid_in(site.folder / "pid")
    await site.phase(A, "running")
    shim = procfs.stat(pid)
    assert shim is not None
    os.kill(shim.ppid, signal.SIGKILL)
    status = await site.exited(A)
    assert status.outcome == "preempted"
    assert "supervisor was killed" in status.reason
    await gone(pid)


async def test_an_agent_that_is_told_to_leave_nothing_behind_kills_its_workers(tmp_path: Path) -> None:
    text = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    async with node_site(tmp_path, end_workers=True) as site:
        await site.plan(task_order(tmp_path, A, *script(tmp_path, text)))
        pid = await pid_in(tmp_path / "pid")
        await site.phase(A, "running")
    assert is_gone(pid)


# --- configuration --------------------------------------------------------------------------------------------------


async def test_two_node_agents_cannot_share_a_state_directory(tmp_path: Path) -> None:
    async with node_site(tmp_path) as site:
        await site.report()
        with pytest.raises(ConfigError, match="another node agent uses state_dir"):
            await run_node_agent(config(tmp_path), MemoryBus(MemoryBroker()))


@pytest.mark.skipif(Path("/run/systemd/system").is_dir(), reason="systemd runs here, so it can be given")
async def test_a_containment_that_this_host_cannot_give_is_refused_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ExceptionGroup)) as caught:
        await run_node_agent(config(tmp_path, containment="systemd-scope"), MemoryBus(MemoryBroker()))
    error = caught.value
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ConfigError)
    assert 'containment = "none"' in str(error)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is an NVIDIA driver here")
async def test_gpus_that_this_host_does_not_have_are_refused_and_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="simulated:4"):
        await run_node_agent(NodeConfig(node="n1", gpus="nvml", state_dir=str(tmp_path)), MemoryBus(MemoryBroker()))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"node": "N1", "gpus": "nvml"}, "lower-case"),
        ({"node": "n1", "gpus": "cuda"}, "simulated:4"),
        ({"node": "n1"}, "gpus"),
        ({"node": "n1", "gpus": "nvml", "beat_s": 0}, "beat_s is 0.0; it must be above 0"),
        ({"node": "n1", "gpus": "nvml", "gpu": 1}, "gpu"),
        ({"node": "n1", "gpus": "nvml", "containment": "docker"}, "containment"),
        ({"node": "n1", "gpus": "nvml", "bootstrap_dir": "/none"}, "bootstrap_dir"),
    ],
)
def test_a_wrong_setting_is_named_with_its_mend(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(fields, source="node.toml")


def test_a_configuration_is_read_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('node = "n1"\ngpus = "simulated:4"\nrack = "r7"\n')
    assert load(path).rack == "r7"
    with pytest.raises(ConfigError, match="--config"):
        load(tmp_path / "absent.toml")
    path.write_text("node = ")
    with pytest.raises(ConfigError, match="not TOML"):
        load(path)


def test_a_process_is_told_from_another_with_its_number_by_its_start() -> None:
    me = procfs.stat(os.getpid())
    assert me is not None
    assert procfs.is_running(me.pid, me.start_ticks)
    assert not procfs.is_running(me.pid, me.start_ticks + 1)
