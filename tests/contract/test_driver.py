"""The promises of `node_agent.workers.driver`: for both checkpointers, then for the driver's helper in trouble.

The driver is played (`tests/support/stand_in`); all else is real: cuda-bindings, the helper's program and process,
pipes, deadlines, locks, and the processes that are suspended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from msgspec.structs import replace

from node_agent import daemon, procfs
from node_agent.core.events import CheckpointProcess, ProcessCheckpointed
from node_agent.devices.nvml import NvmlBackend
from node_agent.devices.simulated import SimulatedBackend
from node_agent.workers import driver, supervisors
from node_agent.workers.driver import (
    HELPER,
    Checkpointer,
    DriverCheckpointer,
    DriverFacts,
    Found,
    SimulatedCheckpointer,
    open_checkpointer,
)
from node_agent.workers.driver_helper import CannotBeDone, permutation
from node_agent.workers.manager import Settings
from protocol.messages import GpuId, TaskId
from tests.support.node_site import node_site
from tests.support.patience import PATIENCE_S
from tests.support.stand_in import FaultKind, StandIn, cards

RUNNING, LOCKED, CHECKPOINTED, FAILED, RESTORING = 0, 1, 2, 3, 5
#: An interpreter starts in a tenth of a second, and on a busy node in several.
#: For a helper that is going to hang: long enough to get there.
HANG_S = 3.0
GIB = 2**30
FIT = DriverFacts(machine="x86_64", driver="580.95.05", bindings="13.0.1", boot_id="b", user=0)


#: The driver's functions, by the helper's word for them.
FUNCTIONS = {
    "tid": "cuCheckpointProcessGetRestoreThreadId",
    "state": "cuCheckpointProcessGetState",
    "lock": "cuCheckpointProcessLock",
    "checkpoint": "cuCheckpointProcessCheckpoint",
    "restore": "cuCheckpointProcessRestore",
    "unlock": "cuCheckpointProcessUnlock",
    "init": "cuInit",
}


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    driver = StandIn(tmp_path / "driver", *cards(3))
    for name, value in driver.env.items():
        monkeypatch.setenv(name, value)
    return driver


def fail(play: StandIn, call: str, pid: int, how: float | FaultKind) -> None:
    """Have a call about a process err with a code, hang, crash, or take a time in seconds."""
    if isinstance(how, str):
        play.fault(how, FUNCTIONS[call], pid)
    elif isinstance(how, float):
        play.fault("delay", FUNCTIONS[call], pid, int(how * 1000))
    else:
        play.fault("error", FUNCTIONS[call], pid, int(how))


def calls(play: StandIn) -> list[str]:
    """Return the calls so far, each as `lock:4711` or `init`."""
    words = {function: word for word, function in FUNCTIONS.items()}
    found = [call.partition(":") for call in play.calls]
    return [words[function] + colon + pid for function, colon, pid in found]


@pytest.fixture
def pids() -> Iterator[tuple[int, int]]:
    """Two processes that do nothing, for as long as they may."""
    with subprocess.Popen(["sleep", "300"]) as one, subprocess.Popen(["sleep", "300"]) as other:
        yield one.pid, other.pid
        one.kill()
        other.kill()


def played(play: StandIn, host: DriverFacts = FIT) -> DriverCheckpointer:
    return DriverCheckpointer(play.folder.parent, host, (sys.executable, "-I", str(HELPER)))


def on_driver(play: StandIn, pids: tuple[int, ...], state: int = RUNNING) -> DriverCheckpointer:
    """A driver that knows `pids`."""
    for pid in pids:
        play.put(pid, state)
    return played(play)


@pytest.fixture(params=["driver", "simulated"])
def checkpointer(request: pytest.FixtureRequest, play: StandIn, pids: tuple[int, int]) -> Checkpointer:
    return on_driver(play, pids) if request.param == "driver" else SimulatedCheckpointer(SimulatedBackend("n1", 1))


# --- for both -------------------------------------------------------------------------------------------------------


async def test_what_was_suspended_is_found_so_and_runs_again(checkpointer: Checkpointer, pids: tuple[int, int]) -> None:
    assert await checkpointer.find(pids) == Found("running")
    assert (await checkpointer.suspend(pids, PATIENCE_S)).ok
    assert await checkpointer.find(pids) == Found("suspended")
    assert (await checkpointer.resume(pids, PATIENCE_S)).ok
    assert await checkpointer.find(pids) == Found("running")


async def test_an_operation_may_be_repeated(checkpointer: Checkpointer, pids: tuple[int, int]) -> None:
    for _ in range(2):
        assert (await checkpointer.suspend(pids, PATIENCE_S)).ok
    for _ in range(2):
        assert (await checkpointer.resume(pids, PATIENCE_S)).ok
    assert await checkpointer.find(pids) == Found("running")


@pytest.mark.parametrize(
    "words",
    [
        "no JSON",
        '{"at": 7}',
        '{"ok": true, "state": "gone"}',
        f'{{"ok": false, "reason": "{"x" * 3000}"}}',
        "x" * 70_000,
    ],
    ids=["text", "number", "state", "long reason", "long line"],
)
async def test_what_a_helper_of_a_user_says_is_read_within_bounds(tmp_path: Path, words: str) -> None:
    (tmp_path / "words").write_text(f"{words}\n")
    made = DriverCheckpointer(tmp_path, FIT, ("sh", "-c", f"cat {tmp_path}/words; exec sleep 0"))
    found = await made.suspend((os.getpid(),), PATIENCE_S)
    assert (found.ok, found.lost, "in 'start'" in found.reason) == (False, False, True)
    assert len(found.reason) < 500
    assert not (await made.find((os.getpid(),))).known


async def test_where_a_launcher_starts_tasks_it_is_asked_for_helpers_and_without_one_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings("n1", tmp_path, "b")
    assert daemon._launched(settings) is None
    launched = daemon._launched(replace(settings, launcher=tmp_path / "no.sock"))
    backend: Any = SimpleNamespace(driver="580.95.05", devices=list)
    made = open_checkpointer(backend, tmp_path, launched)
    assert "can open the GPUs of that task alone" in made.why_bound()
    own = await made.suspend((os.getpid(),), PATIENCE_S)
    assert (own.ok, own.lost, "no process of the task is left" in own.reason) == (False, False, True), "of no unit"
    monkeypatch.setattr(supervisors, "LAUNCHER_S", 0.0)
    monkeypatch.setattr(driver, "key_of", lambda pid: "0a0a0a0a-0a0a0a0a0a0a0a0a")
    for do in (made.suspend, made.resume):
        silent = await do((os.getpid(),), PATIENCE_S)
        assert (silent.ok, silent.lost, "does not answer" in silent.reason) == (False, False, True)
        assert silent.again, "it may be asked later"
    assert not (await made.find((os.getpid(),))).known


# --- the driver's sequence ------------------------------------------------------------------------------------------


def in_order(play: StandIn, *names: str) -> list[str]:
    return [call for call in calls(play) if call.partition(":")[0] in names]


async def test_all_are_locked_before_one_is_checkpointed_and_restored_before_one_is_unlocked(
    play: StandIn, pids: tuple[int, int]
) -> None:
    one, other = sorted(pids)
    made = on_driver(play, pids)
    assert (await made.suspend(pids, PATIENCE_S)).ok
    assert in_order(play, "lock", "checkpoint", "init") == [
        *(f"lock:{pid}" for pid in (one, other)),
        *(f"checkpoint:{pid}" for pid in (one, other)),
    ]
    assert (await made.resume(pids, PATIENCE_S)).ok
    assert in_order(play, "init", "restore", "unlock") == [
        "init",
        *(f"restore:{pid}" for pid in (one, other)),
        *(f"unlock:{pid}" for pid in (one, other)),
    ]


async def test_a_helper_that_is_ready_suspends_without_a_start_and_one_that_is_gone_costs_nothing(
    play: StandIn, pids: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "READY_S", PATIENCE_S)
    made = on_driver(play, pids)
    await made.prepare()
    ready = set(made._children)
    assert len(ready) == 1
    assert calls(play) == []
    with monkeypatch.context() as no_other:
        no_other.setattr(made, "_start", None)
        assert (await made.suspend(pids, PATIENCE_S)).ok
    assert {play.state(pid) for pid in pids} == {CHECKPOINTED}
    assert (await made.resume(pids, PATIENCE_S)).ok
    await made.prepare()
    (waits,) = made._children
    os.kill(waits, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, waits, os.WEXITED | os.WNOWAIT)
    assert (await made.suspend(pids, PATIENCE_S)).ok
    assert not made._children


async def test_a_helper_that_does_not_get_ready_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "READY_S", 0.1)
    for command in ("exec sleep 300 < /dev/null", "exit 1"):
        made = DriverCheckpointer(tmp_path, FIT, ("sh", "-c", command))
        await made.prepare()
        assert not made._ready
        for child in made._children:
            os.kill(child, signal.SIGKILL)
            await asyncio.to_thread(os.waitpid, child, 0)


@pytest.mark.parametrize("ready", [False, True])
async def test_a_task_whose_processes_have_ended_has_refused_nothing(
    play: StandIn, pids: tuple[int, int], ready: bool
) -> None:
    made = on_driver(play, pids)
    if ready:
        await made.prepare()
    done = await made.suspend([], PATIENCE_S)
    assert (done.ok, done.again, done.lost, done.reason) == (False, True, False, "its processes have ended")
    assert (await made.suspend(pids, PATIENCE_S)).ok


async def test_processes_without_cuda_are_left_alone(play: StandIn, pids: tuple[int, int]) -> None:
    one, other = pids
    made = on_driver(play, (one,))
    assert (await made.suspend(pids, PATIENCE_S)).ok
    assert play.state(one) == CHECKPOINTED
    assert f"lock:{other}" not in calls(play)


async def test_a_process_of_which_the_driver_cannot_tell_is_not_taken_for_one_without_cuda(
    play: StandIn, pids: tuple[int, int]
) -> None:
    made = on_driver(play, pids)
    fail(play, "tid", max(pids), 304)
    result = await made.suspend(pids, PATIENCE_S)
    assert (result.ok, result.lost) == (False, False)
    assert [play.state(pid) for pid in pids] == [RUNNING, RUNNING]


async def test_a_process_that_only_looked_at_cuda_has_nothing_to_lock(play: StandIn, pids: tuple[int, int]) -> None:
    one, other = pids
    made = on_driver(play, pids)
    fail(play, "lock", one, 3)
    assert (await made.suspend(pids, PATIENCE_S)).ok
    assert (play.state(one), play.state(other)) == (RUNNING, CHECKPOINTED)


async def test_a_task_without_cuda_cannot_be_suspended_and_runs_on(play: StandIn, pids: tuple[int, int]) -> None:
    result = await played(play).suspend(pids, PATIENCE_S)
    assert (result.ok, result.lost, result.reason) == (False, False, "none of the task's processes uses CUDA")


@pytest.mark.parametrize(("call", "code"), [("lock", 600), ("checkpoint", 304), ("checkpoint", 801), ("state", 304)])
async def test_a_suspension_that_fails_half_way_leaves_all_running(
    play: StandIn, pids: tuple[int, int], call: str, code: int
) -> None:
    made = on_driver(play, pids)
    fail(play, call, max(pids), code)
    result = await made.suspend(pids, PATIENCE_S)
    assert (result.ok, result.lost) == (False, False)
    assert f"{call} of process {max(pids)} failed" in result.reason
    assert [play.state(pid) for pid in pids] == [RUNNING, RUNNING]


@pytest.mark.parametrize(("left", "suspended"), [(10 * GIB - 1, False), (10 * GIB, True)])
async def test_a_task_whose_bound_on_host_memory_has_no_room_for_its_image_is_not_suspended(
    play: StandIn, pids: tuple[int, int], monkeypatch: pytest.MonkeyPatch, left: int, suspended: bool
) -> None:
    """The kernel ended it for its memory, as the driver was moving it."""
    on_driver(play, pids)
    play.load(monkeypatch)
    play.change(1, processes=[(pids[0], 6 * 1024, "compute"), (pids[1], 1024, "compute"), (4711, 1, "compute")])
    play.change(2, processes=[(pids[0], 3 * 1024, "compute")])
    backend = NvmlBackend()
    monkeypatch.setattr(DriverFacts, "read", lambda driver: FIT)
    monkeypatch.setattr(procfs, "memory_left_bytes", {pids[0]: left, pids[1]: 99 * GIB}.__getitem__)
    result = await open_checkpointer(backend, play.folder.parent).suspend(pids, PATIENCE_S)
    backend.close()
    assert (result.ok, result.lost, result.again) == (suspended, False, False)
    assert ("memory_max_bytes" in result.reason) is not suspended
    assert play.state(pids[0]) == (CHECKPOINTED if suspended else RUNNING)


def test_the_memory_that_a_process_has_left_is_that_of_the_tightest_of_its_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procfs, "PROC", tmp_path / "proc")
    monkeypatch.setattr(procfs, "GROUPS", tmp_path / "fs")
    assert (procfs.memory_left_bytes(7), procfs.memory_limit_bytes()) == (sys.maxsize, sys.maxsize), "gone"
    group = tmp_path / "fs" / "slice" / "task"
    group.mkdir(parents=True)
    for name in ("7", "self"):
        (tmp_path / "proc" / name).mkdir(parents=True)
        (tmp_path / "proc" / name / "cgroup").write_text("1:name=systemd:/\n0::/slice/task\n")
    assert procfs.memory_left_bytes(7) == sys.maxsize, "no bounds"
    for folder, limit, used in ((group, "max", 900), (group.parent, "1000", 700)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 500\ninactive_file 60\nactive_file 40\n")
    assert (procfs.memory_left_bytes(7), procfs.memory_limit_bytes()) == (400, 1000)
    (group / "memory.max").write_text("950\n")
    assert (procfs.memory_left_bytes(7), procfs.memory_limit_bytes()) == (150, 950)


async def test_the_error_for_a_missing_right_names_the_mend(play: StandIn, pids: tuple[int, int]) -> None:
    made = on_driver(play, pids)
    fail(play, "lock", pids[0], 304)
    assert "CAP_SYS_PTRACE" in (await made.suspend(pids, PATIENCE_S)).reason


async def test_an_error_of_a_newer_driver_than_the_bindings_is_told_and_nothing_is_lost(
    play: StandIn, pids: tuple[int, int]
) -> None:
    made = on_driver(play, pids)
    fail(play, "lock", max(pids), 12345)
    result = await made.suspend(pids, PATIENCE_S)
    assert (result.ok, result.lost) == (False, False)
    assert "does not know (12345)" in result.reason
    assert [play.state(pid) for pid in pids] == [RUNNING, RUNNING]


async def test_a_suspension_that_cannot_be_undone_loses_the_task(play: StandIn, pids: tuple[int, int]) -> None:
    one, other = sorted(pids)
    made = on_driver(play, pids)
    fail(play, "checkpoint", other, 304)
    fail(play, "restore", one, 304)
    result = await made.suspend(pids, PATIENCE_S)
    assert (result.ok, result.lost) == (False, True)
    assert "could not be undone" in result.reason


async def test_a_restore_that_meets_too_little_memory_loses_the_task_for_ever(
    play: StandIn, pids: tuple[int, int]
) -> None:
    made = on_driver(play, pids)
    assert (await made.suspend(pids, PATIENCE_S)).ok
    play.flag("full")
    result = await made.resume(pids, PATIENCE_S)
    assert (result.ok, result.lost) == (False, True)
    assert "OUT_OF_MEMORY" in result.reason
    play.flag()
    assert (await made.resume(pids, PATIENCE_S)).lost


async def test_a_resumption_that_cannot_unlock_loses_the_task(play: StandIn, pids: tuple[int, int]) -> None:
    made = on_driver(play, pids, CHECKPOINTED)
    fail(play, "unlock", pids[0], 401)
    assert (await made.resume(pids, PATIENCE_S)).lost


@pytest.mark.parametrize("do", ["suspend", "resume"])
async def test_a_failed_process_loses_the_task(play: StandIn, pids: tuple[int, int], do: str) -> None:
    made = on_driver(play, pids)
    play.put(pids[1], FAILED)
    assert (await getattr(made, do)(pids, PATIENCE_S)).lost
    assert (await made.find(pids)).standing == "lost"


@pytest.mark.parametrize("do", ["suspend", "resume"])
async def test_a_process_that_another_program_checkpoints_is_left_to_it(
    play: StandIn, pids: tuple[int, int], do: str
) -> None:
    made = on_driver(play, pids)
    play.put(pids[1], RESTORING)
    result = await getattr(made, do)(pids, PATIENCE_S)
    assert (result.ok, result.lost) == (False, False)
    assert "another program" in result.reason
    assert [play.state(pid) for pid in pids] == [RUNNING, RESTORING]


# --- a helper in trouble --------------------------------------------------------------------------------------------


async def test_a_helper_that_hangs_in_a_checkpoint_is_killed_and_the_task_lost(
    play: StandIn, pids: tuple[int, int]
) -> None:
    before = {process.pid for process in procfs.processes() if process.ppid == os.getpid()}
    made = on_driver(play, pids)
    fail(play, "checkpoint", max(pids), "hang")
    began = time.monotonic()
    result = await made.suspend(pids, HANG_S)
    assert HANG_S <= time.monotonic() - began < HANG_S + 5
    assert (result.ok, result.lost) == (False, True)
    assert "'checkpoint'" in result.reason
    assert {process.pid for process in procfs.processes() if process.ppid == os.getpid()} <= before


@pytest.mark.parametrize("call", ["restore", "checkpoint"])
async def test_a_helper_that_crashes_while_memory_moves_loses_the_task(
    play: StandIn, pids: tuple[int, int], call: str
) -> None:
    made = on_driver(play, pids, CHECKPOINTED if call == "restore" else RUNNING)
    fail(play, call, pids[0], "crash")
    result = await (made.resume if call == "restore" else made.suspend)(pids, PATIENCE_S)
    assert (result.ok, result.lost) == (False, True)


async def test_a_lock_that_hangs_on_an_nccl_peer_is_let_go_and_the_task_runs_on(
    play: StandIn, pids: tuple[int, int]
) -> None:
    made = on_driver(play, pids)
    play.flag(*(f"entangled {pid}" for pid in pids))
    result = await made.suspend(pids, HANG_S)
    assert (result.ok, result.lost) == (False, False)
    assert "'lock'" in result.reason
    assert [play.state(pid) for pid in pids] == [RUNNING, RUNNING]


async def test_a_task_of_unknown_state_is_lost(
    play: StandIn, pids: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "FIND_S", HANG_S)
    made = on_driver(play, pids)
    fail(play, "state", pids[0], "hang")
    result = await made.suspend(pids, HANG_S)
    assert (result.ok, result.lost) == (False, True)


async def test_a_helper_that_dies_after_its_work_was_done_has_succeeded(play: StandIn, pids: tuple[int, int]) -> None:
    made = on_driver(play, pids, LOCKED)
    fail(play, "unlock", max(pids), "crash-after")
    assert (await made.resume(pids, PATIENCE_S)).ok
    assert [play.state(pid) for pid in pids] == [RUNNING, RUNNING]


async def test_a_helper_that_cannot_be_started_is_no_loss(play: StandIn, pids: tuple[int, int]) -> None:
    made = DriverCheckpointer(play.folder.parent, FIT, ("/nowhere/python",))
    result = await made.suspend(pids, PATIENCE_S)
    assert (result.ok, result.lost) == (False, False)
    assert "could not be started" in result.reason


@pytest.mark.parametrize("do", ["suspend", "resume"])
async def test_a_helper_that_dies_before_it_asks_the_driver_of_a_process_is_no_refusal(tmp_path: Path, do: str) -> None:
    killed = """echo '{"at": "start"}'; kill -9 $$"""
    result = await getattr(DriverCheckpointer(tmp_path, FIT, ("sh", "-c", killed)), do)((os.getpid(),), PATIENCE_S)
    assert (result.ok, result.lost, result.again, "'start'" in result.reason) == (False, False, True, True)


async def test_a_helper_that_dies_as_cuda_starts_in_it_is_judged_by_what_it_has_left(
    play: StandIn, pids: tuple[int, int]
) -> None:
    made = on_driver(play, pids, CHECKPOINTED)
    play.fault("crash", "cuInit")
    resumed = await made.resume(pids, PATIENCE_S)
    assert (resumed.ok, resumed.lost, resumed.again, "'init'" in resumed.reason) == (False, False, False, True)
    for pid in pids:
        play.put(pid, RUNNING)
    fail(play, "checkpoint", max(pids), 304)  # what is done by then cannot be undone without cuInit
    undone = await made.suspend(pids, PATIENCE_S)
    states = sorted(play.state(pid) or 0 for pid in pids)
    assert (undone.ok, undone.lost, undone.again, states) == (True, False, False, [RUNNING, CHECKPOINTED])
    play.heal()
    assert (await made.resume(pids, PATIENCE_S)).ok
    assert [play.state(pid) for pid in pids] == [RUNNING, RUNNING]


async def test_two_tasks_are_suspended_at_the_same_time(play: StandIn, pids: tuple[int, int]) -> None:
    one, other = pids
    made = on_driver(play, pids)
    fail(play, "checkpoint", one, "hang")
    async with asyncio.TaskGroup() as group:
        slow = group.create_task(made.suspend([one], PATIENCE_S))
        await asyncio.to_thread(wait_for_call, play, f"checkpoint:{one}")
        (hung,) = made._children
        assert (await made.suspend([other], PATIENCE_S)).ok
        assert not slow.done()
        os.kill(hung, signal.SIGKILL)
    assert slow.result().lost


# --- after a node agent died ----------------------------------------------------------------------------------------


def wait_for_call(play: StandIn, call: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while call not in calls(play):
        assert time.monotonic() < deadline, f"{call} never came"
        time.sleep(0.01)


async def test_a_helper_outlives_a_node_agent_that_leaves_and_the_next_one_waits_for_it(
    play: StandIn, pids: tuple[int, int]
) -> None:
    before = on_driver(play, pids)
    fail(play, "checkpoint", max(pids), 1.5)
    leaving = asyncio.get_running_loop().create_task(before.suspend(pids, PATIENCE_S))
    await asyncio.to_thread(wait_for_call, play, f"checkpoint:{max(pids)}")
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert play.state(max(pids)) == LOCKED
    assert await played(play).find(pids) == Found("suspended")
    assert [play.state(pid) for pid in pids] == [CHECKPOINTED, CHECKPOINTED]


async def test_what_was_left_locked_runs_again_once_it_is_found(play: StandIn, pids: tuple[int, int]) -> None:
    made = on_driver(play, pids)
    play.put(pids[0], LOCKED)
    assert await made.find(pids) == Found("running")
    assert play.state(pids[0]) == RUNNING


async def test_what_was_left_checkpointed_in_part_is_suspended_and_can_be_resumed(
    play: StandIn, pids: tuple[int, int]
) -> None:
    made = on_driver(play, pids)
    play.put(pids[0], CHECKPOINTED)
    assert (await made.find(pids)).standing == "suspended"
    assert (await made.resume(pids, PATIENCE_S)).ok
    assert [play.state(pid) for pid in pids] == [RUNNING, RUNNING]


async def test_without_an_answer_from_the_driver_nothing_is_claimed(play: StandIn, pids: tuple[int, int]) -> None:
    made = on_driver(play, pids)
    fail(play, "state", pids[0], 304)
    found = await made.find(pids)
    assert not found.known
    assert "304" in found.reason


GPU_SLICE = "/gpu.slice/gpu-arbiter.slice"
KEY = "0a0a0a0a-0a0a0a0a0a0a0a0a"


@pytest.mark.parametrize(
    ("group", "is_task", "is_helper"),
    [
        (f"0::{GPU_SLICE}/gpu-arbiter-{KEY}.service", True, False),
        (f"1:name=systemd:{GPU_SLICE}/gpu-arbiter-{KEY}.service", True, False),
        (f"0::{GPU_SLICE}/gpu-arbiter-driver-{KEY}.service", False, True),
        (f"0::{GPU_SLICE}/gpu-arbiter-driver-{KEY[:-1]}b.service", False, False),
        (f"0::/user.slice/user-2001.slice{GPU_SLICE}/gpu-arbiter-driver-{KEY}.service", False, False),
        (f"0::/user.slice/user-2001.slice/gpu-arbiter-{KEY}.service", False, False),
        (f"0::{GPU_SLICE}/gpu-arbiter-driver-{KEY}.service/below", False, False),
    ],
)
def test_a_helper_is_known_by_its_whole_control_group_and_for_its_task_alone(
    monkeypatch: pytest.MonkeyPatch, group: str, is_task: bool, is_helper: bool
) -> None:
    monkeypatch.setattr(procfs, "processes", lambda: [SimpleNamespace(pid=7)])
    monkeypatch.setattr(procfs, "cgroups", lambda pid: f"2:cpu:/\n{group}\n")
    assert (supervisors.key_of(7) == KEY, supervisors.drives(KEY)) == (is_task, is_helper)


class LateCheckpointer(SimulatedCheckpointer):
    """Finds the state of the first task at once, and of the others once it is told to; remembers its calls."""

    def __init__(self) -> None:
        super().__init__(SimulatedBackend("n1", 1))
        self.calls: list[str] = []
        self.told = asyncio.Event()

    async def find(self, pids: Sequence[int]) -> Found:
        if list(pids) != [1]:
            await self.told.wait()
        self.calls.append(f"find {pids}")
        return Found("suspended")

    async def suspend(self, pids: Sequence[int], timeout_s: float) -> driver.Result:
        self.calls.append(f"suspend {pids}")
        return driver.Result(ok=True)

    async def resume(
        self, pids: Sequence[int], timeout_s: float, moves: Mapping[GpuId, GpuId] = driver.NO_MOVES
    ) -> driver.Result:
        self.calls.append(f"resume {pids}")
        return driver.Result(ok=True)


async def test_a_task_whose_state_is_not_found_out_holds_up_neither_the_node_nor_the_other_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(daemon, "FOUND_S", 0.0)
    made, posted, first = LateCheckpointer(), list[object](), asyncio.Event()
    workers = SimpleNamespace(
        living=lambda: ["late-1", "first-1", "late-2"], processes=lambda task: [int(task == "first-1")]
    )
    performer = daemon.Performer(None, made, None)  # type: ignore[arg-type]
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        performer.attach(workers, None, tasks, lambda event: (posted.append(event), first.set()), None)  # type: ignore[arg-type]
        await performer.find_checkpointed()
        for task, do in (("late-1", "suspend"), ("late-2", "resume")):
            await performer.perform(CheckpointProcess(TaskId(task), do, 1.0))
        await first.wait()
        assert posted == [ProcessCheckpointed(TaskId("first-1"), "suspend", ok=True)]
        made.told.set()
    assert made.calls == ["find [1]", "find [0]", "find [0]", "resume [0]"], (
        "the driver is asked for one thing at a time"
    )
    assert sorted((event.task, event.do) for event in posted) == [  # type: ignore[attr-defined]
        ("first-1", "suspend"),
        ("late-1", "suspend"),
        ("late-2", "resume"),
        ("late-2", "suspend"),
    ]


# --- whether it works here ------------------------------------------------------------------------------------------


async def test_a_trial_suspends_a_small_process_and_finds_its_memory_unchanged(play: StandIn) -> None:
    assert await played(play).probe() == ""
    assert "checkpoint" in {call.partition(":")[0] for call in calls(play)}


async def test_a_verdict_holds_until_the_host_or_its_driver_starts_anew(play: StandIn) -> None:
    assert await played(play).probe() == ""
    play.flag("corrupt")
    assert await played(play).probe() == ""
    again = DriverFacts(machine="x86_64", driver="580.95.05", bindings="13.0.1", boot_id="another", user=0)
    assert "other bytes" in await played(play, again).probe()


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("corrupt", "other bytes"),
        ("stays", "stayed on the GPU"),
        ("blind", "does not show this node's processes"),
        ("full", "OUT_OF_MEMORY"),
    ],
)
async def test_a_trial_that_fails_says_why(play: StandIn, flag: str, reason: str) -> None:
    play.flag(flag)
    assert reason in await played(play).probe()


async def test_a_trial_is_with_a_process_that_is_as_far_from_the_helper_as_workers_are(play: StandIn) -> None:
    play.flag("descendants-only")
    assert "CAP_SYS_PTRACE" in await played(play).probe()


async def test_a_node_agent_without_the_right_says_in_its_log_that_the_drivers_checkpoint_is_off_and_why(
    play: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play.load(monkeypatch)
    monkeypatch.setattr(DriverFacts, "read", lambda driver: FIT)
    for flags, works in (("descendants-only",), False), ((), True):
        play.flag(*flags)
        with structlog.testing.capture_logs() as logged:
            async with node_site(tmp_path / str(works), gpus="nvml") as site:
                await site.report()
        (line,) = [line for line in logged if line["event"] == "driver.checkpoint"]
        assert line["works"] is works
        assert ("CAP_SYS_PTRACE" in line["reason"]) is not works


async def test_where_all_gpus_are_divided_nothing_is_tried(play: StandIn) -> None:
    for index in range(3):
        play.change(index, mig=1)
    assert "MIG" in await played(play).probe()
    assert calls(play) == []


@pytest.mark.parametrize(
    "trouble",
    [
        {"lost": 1},
        {"mig": 1},
        {"mode": 3},
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetComputeMode",
    ],
    ids=str,
)
async def test_one_gpu_that_errs_or_is_in_a_mode_of_its_own_keeps_no_driver_from_being_tried_on_another(
    play: StandIn, trouble: dict[str, int] | str
) -> None:
    """The helper crashed, and for as long as the host was up no job was suspended by the driver."""
    play.change(0, total=200_000)  # it would be taken for its size
    if isinstance(trouble, str):
        play.fault("error", trouble, 0, 15)
    else:
        play.change(0, **trouble)
    assert await played(play).probe() == ""


async def test_a_trial_in_which_nvml_errs_is_told_and_made_again(play: StandIn) -> None:
    play.fault("error", "nvmlDeviceGetComputeRunningProcesses_v3", value=999)
    assert "NVML erred while the driver was tried" in await played(play).probe()
    play.heal()
    assert await played(play).probe() == ""


async def test_a_trial_touches_no_gpu_that_the_node_agent_was_not_given(
    play: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    play.load(monkeypatch)
    play.change(0, total=200_000)  # it would be taken for its size
    backend = NvmlBackend(["1", play.cards[2].uuid])
    monkeypatch.setattr(DriverFacts, "read", lambda driver: FIT)
    assert await open_checkpointer(backend, play.folder.parent).probe() == ""
    backend.close()
    used = {path.read_text() for path in play.folder.glob("on.*")}
    assert used == {play.cards[1].uuid}


async def test_a_trial_for_which_there_was_no_room_is_made_again(play: StandIn) -> None:
    for index in range(3):
        play.change(index, total=2000)
    assert "2 GiB" in await played(play).probe()
    play.change(1, total=20_000)
    assert await played(play).probe() == ""


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (DriverFacts(machine="x86_64", driver="", bindings="13.0", boot_id="b", user=0), "no NVIDIA driver"),
        (DriverFacts(machine="x86_64", driver="565.57.01", bindings="13.0", boot_id="b", user=0), "570 or newer"),
        (DriverFacts(machine="aarch64", driver="580.1", bindings="13.0", boot_id="b", user=0), "aarch64"),
        (DriverFacts(machine="x86_64", driver="580.1", bindings="", boot_id="b", user=0), "install gpu-arbiter"),
    ],
)
async def test_where_it_cannot_work_it_is_not_tried(play: StandIn, host: DriverFacts, reason: str) -> None:
    assert reason in await played(play, host).probe()
    assert calls(play) == []


@pytest.mark.parametrize("launched", [True, False])
async def test_where_a_launcher_starts_tasks_the_kernel_must_let_processes_of_one_user_touch_each_other(
    play: StandIn, monkeypatch: pytest.MonkeyPatch, launched: bool
) -> None:
    monkeypatch.setattr(procfs, "ptrace_scope", lambda: 1)
    assert DriverFacts.read("580.95.05").ptrace_scope == 1
    helpers = driver.LaunchedHelpers(supervisors.Launcher(play.folder)) if launched else None
    command = (sys.executable, "-I", str(HELPER))
    made = DriverCheckpointer(play.folder.parent, replace(FIT, ptrace_scope=1), command, helpers)
    assert ("run: sysctl kernel.yama.ptrace_scope=0" in await made.probe()) == launched
    assert await DriverCheckpointer(play.folder.parent, FIT, command, helpers).probe() == ""


@pytest.mark.skipif(Path("/sys/module/nvidia/version").exists(), reason="this host has an NVIDIA driver")
async def test_without_the_drivers_library_the_real_helper_says_so(tmp_path: Path) -> None:
    reason = await DriverCheckpointer(tmp_path, FIT).probe()
    assert "cuda-bindings" in reason or "NVIDIA driver cannot be used" in reason or "NVML cannot be used" in reason


async def test_the_kind_of_gpus_decides_which_checkpointer_there_is(tmp_path: Path) -> None:
    assert isinstance(open_checkpointer(SimulatedBackend("n1", 1), tmp_path), SimulatedCheckpointer)


# --- onto another GPU -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ({"a": "b"}, [("a", "b"), ("b", "a"), ("c", "c"), ("d", "d")]),
        ({"a": "b", "b": "c"}, [("a", "b"), ("b", "c"), ("c", "a"), ("d", "d")]),
        ({"a": "b", "b": "a"}, [("a", "b"), ("b", "a"), ("c", "c"), ("d", "d")]),
        ({"a": "c", "b": "d"}, [("a", "c"), ("b", "d"), ("c", "a"), ("d", "b")]),
        ({"a": "a"}, [("a", "a"), ("b", "b"), ("c", "c"), ("d", "d")]),
    ],
)
def test_a_move_becomes_a_permutation_of_all_gpus(moves: dict[str, str], expected: list[tuple[str, str]]) -> None:
    assert permutation(moves, list("abcd")) == expected


@pytest.mark.parametrize(("moves", "reason"), [({"a": "x"}, "no GPU x"), ({"a": "c", "b": "c"}, "onto one")])
def test_a_move_that_cannot_be_is_refused(moves: dict[str, str], reason: str) -> None:
    with pytest.raises(CannotBeDone, match=reason):
        permutation(moves, list("abc"))


async def test_a_move_gives_the_driver_every_gpu_by_uuid(play: StandIn, pids: tuple[int, int]) -> None:
    made = on_driver(play, pids, CHECKPOINTED)
    assert (await made.resume(pids[:1], PATIENCE_S, {play.cards[0].uuid: play.cards[1].uuid})).ok
    a, b, c = (card.uuid.removeprefix("GPU-").replace("-", "") for card in play.cards)
    assert play.maps == [[(a, b), (b, a), (c, c)]]


REFUSED = {1: "INVALID_VALUE", 101: "INVALID_DEVICE", 800: "NOT_PERMITTED", 801: "NOT_SUPPORTED"}


@pytest.mark.parametrize("code", REFUSED)
async def test_a_move_of_which_the_driver_does_not_take_the_pairs_leaves_all_suspended(
    play: StandIn, pids: tuple[int, int], code: int
) -> None:
    made = on_driver(play, pids, CHECKPOINTED)
    fail(play, "restore", min(pids), code)
    result = await made.resume(pids, PATIENCE_S, {play.cards[0].uuid: play.cards[1].uuid})
    assert (result.ok, result.lost) == (False, False)
    assert f"{REFUSED[code]} ({code})" in result.reason
    assert await made.find(pids) == Found("suspended")
    play.heal()
    assert (await made.resume(pids, PATIENCE_S)).ok


async def test_a_move_that_fails_once_one_process_has_moved_loses_the_task(
    play: StandIn, pids: tuple[int, int]
) -> None:
    made = on_driver(play, pids, CHECKPOINTED)
    fail(play, "restore", max(pids), 1)
    assert (await made.resume(pids, PATIENCE_S, {play.cards[0].uuid: play.cards[1].uuid})).lost


async def test_a_move_that_meets_too_little_memory_loses_the_task(play: StandIn, pids: tuple[int, int]) -> None:
    made = on_driver(play, pids, CHECKPOINTED)
    play.flag("full")
    assert (await made.resume(pids, PATIENCE_S, {play.cards[0].uuid: play.cards[1].uuid})).lost


async def test_a_resumption_on_its_own_gpus_that_fails_is_no_refusal(play: StandIn, pids: tuple[int, int]) -> None:
    made = on_driver(play, pids, CHECKPOINTED)
    fail(play, "restore", min(pids), 1)
    assert (await made.resume(pids, PATIENCE_S)).lost


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"driver": "575.57.08"}, "the NVIDIA driver is 575.57.08, and moving needs 580 or newer; update it"),
        ({"bindings": "12.9.1"}, "the package cuda-bindings is 12.9.1, and moving needs 13 or newer"),
    ],
)
def test_the_versions_of_the_driver_and_of_the_bindings_decide_whether_it_moves(
    play: StandIn, changes: dict[str, str], reason: str
) -> None:
    assert played(play, replace(FIT, **changes)).why_bound().startswith(reason)
    assert bool(played(play, replace(FIT, **changes)).why_bound()) is bool(reason)


@pytest.mark.parametrize(
    ("trouble", "reason"), [({"lost": 1}, "does not name every GPU of this node"), ({"mig": 1}, "divided by MIG")]
)
async def test_a_move_on_a_node_with_a_gpu_that_does_not_answer_or_is_divided_is_refused_with_the_reason(
    play: StandIn, pids: tuple[int, int], trouble: dict[str, int], reason: str
) -> None:
    made = on_driver(play, pids, CHECKPOINTED)
    play.change(2, **trouble)
    result = await made.resume(pids, PATIENCE_S, {play.cards[0].uuid: play.cards[1].uuid})
    assert (result.ok, result.lost) == (False, False)
    assert reason in result.reason
    assert [play.state(pid) for pid in pids] == [CHECKPOINTED, CHECKPOINTED]


async def test_a_move_to_an_unknown_gpu_touches_nothing(play: StandIn, pids: tuple[int, int]) -> None:
    made = on_driver(play, pids, CHECKPOINTED)
    result = await made.resume(pids, PATIENCE_S, {play.cards[0].uuid: "GPU-elsewhere"})
    assert (result.ok, result.lost) == (False, False)
    assert play.state(pids[0]) == CHECKPOINTED


# --- virtual GPUs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def simulated() -> SimulatedCheckpointer:
    return SimulatedCheckpointer(SimulatedBackend("n1", 1))


async def test_a_move_that_is_refused_leaves_the_task_suspended(
    simulated: SimulatedCheckpointer, pids: tuple[int, int]
) -> None:
    assert (await simulated.suspend(pids, PATIENCE_S)).ok
    simulated.inject("move")
    result = await simulated.resume(pids, PATIENCE_S, {GpuId("GPU-sim-n1-0"): GpuId("GPU-sim-n1-1")})
    assert (result.ok, result.lost) == (False, False)
    assert await simulated.find(pids) == Found("suspended")
    assert (await simulated.resume(pids, PATIENCE_S)).ok


async def test_a_lock_that_does_not_come_leaves_the_task_running(
    simulated: SimulatedCheckpointer, pids: tuple[int, int]
) -> None:
    simulated.inject("lock")
    result = await simulated.suspend(pids, PATIENCE_S)
    assert (result.ok, result.lost) == (False, False)
    assert await simulated.find(pids) == Found("running")
    assert (await simulated.suspend(pids, PATIENCE_S)).ok


async def test_an_operation_slower_than_its_deadline_loses_the_task(
    simulated: SimulatedCheckpointer, pids: tuple[int, int]
) -> None:
    simulated.inject("slow", seconds=0.2)
    result = await simulated.suspend(pids, PATIENCE_S)
    assert result.ok
    assert result.seconds >= 0.2
    simulated.inject("slow", seconds=60.0)
    assert (await simulated.resume(pids, 0.2)).lost
    assert (await simulated.resume(pids, PATIENCE_S)).lost
    assert (await simulated.find(pids)).standing == "lost"


async def test_processes_stopped_in_part_by_a_node_agent_that_died_go_on(
    simulated: SimulatedCheckpointer, pids: tuple[int, int]
) -> None:
    assert (await simulated.suspend(pids[:1], PATIENCE_S)).ok
    assert await simulated.find(pids) == Found("running")
    process = procfs.stat(pids[0])
    assert process is not None
    assert process.state != "T"
