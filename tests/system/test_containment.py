"""Tasks stay within their bounds and nothing of a task outlives it: real processes wherever there can be.

Groups are made in this host's cgroup v2 where it lets us. Limits of memory and cores need controllers there, and scopes
a running systemd: where those are missing, what is written and what is run is looked at instead.
"""

# Processes of other programs offer no event to wait for.
# ruff: noqa: ASYNC110, ASYNC240

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest

from node_agent import health_files, procfs
from node_agent.core.events import (
    EndStranger,
    HealthLedger,
    LocalEvent,
    StartWorker,
    StrangerSpared,
    WorkerGone,
    WorkerStarted,
)
from node_agent.core.model import Running, Task
from node_agent.core.verdict import judge
from node_agent.devices import Device
from node_agent.devices.simulated import SimulatedBackend
from node_agent.workers import containment, manager
from node_agent.workers.containment import (
    Bare,
    Cgroup,
    Containment,
    ContainmentError,
    Kind,
    Limits,
    Scope,
    device_files,
    key_of,
    owner_of,
)
from node_agent.workers.manager import SHIM, Settings, Workers
from node_agent.workers.records import Exit, Started
from node_agent.workers.storage import Storage
from protocol.messages import AppId, GpuId, JobId, LaunchSpec, TaskId
from tests.support.patience import PATIENCE_S

EventT = TypeVar("EventT", bound=LocalEvent)
TASK = TaskId("ada-1.0-a0")
GPU = GpuId("GPU-sim-n1-0")
LIMITS = Limits(2**30, (0, 2), ("/dev/nvidia0", "/dev/nvidiactl"))


def is_gone(pid: int) -> bool:
    process = procfs.stat(pid)
    return process is None or process.state == "Z"


async def gone(pid: int) -> None:
    """Wait until a process is no more; it may be the child of any process."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_gone(pid):
            await asyncio.sleep(0.01)


def sleeper(**env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["/bin/sleep", "120"], env=env)


async def pid_in(path: Path) -> int:
    async with asyncio.timeout(PATIENCE_S):
        while not (path.exists() and path.read_text().endswith("\n")):
            await asyncio.sleep(0.01)
    return int(path.read_text())


# --- systemd, as it would be asked ----------------------------------------------------------------------------------


class Recorder:
    """Runs nothing, and remembers it."""

    def __init__(self, returncode: int = 0, stdout: str = "") -> None:
        self.ran: list[list[str]] = []
        self.returncode, self.stdout = returncode, stdout

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.ran.append(list(command))
        return subprocess.CompletedProcess(list(command), self.returncode, self.stdout, "it refuses")


def scope(run: Recorder, tmp_path: Path, *, user: bool = False) -> Scope:
    return Scope(run, user=user, systemd=tmp_path)


def test_a_scope_bounds_memory_cores_and_device_files(tmp_path: Path) -> None:
    run = Recorder()
    made = scope(run, tmp_path)
    line = " ".join(made.command("k-1", LIMITS, ["shim", "folder"]))
    assert line.startswith("systemd-run --scope --quiet --collect --unit gpu-arbiter-k-1 --slice gpu-arbiter.slice")
    for bound in ("MemoryMax=1073741824", "AllowedCPUs=0,2", "DevicePolicy=closed", "DeviceAllow=/dev/nvidia0 rw"):
        assert f"-p {bound}" in line
    assert line.endswith("-- shim folder")
    assert made.lacks == ()
    assert "DevicePolicy=closed" in run.ran[0]  # tried before anything depends on it


def test_a_task_that_moves_may_open_the_device_files_of_its_new_gpu(tmp_path: Path) -> None:
    run = Recorder()
    assert scope(run, tmp_path).reopen("k-1", ("/dev/nvidia3", "/dev/nvidiactl")) == ""
    assert run.ran[-1] == [
        *("systemctl", "set-property", "--runtime", "gpu-arbiter-k-1.scope"),
        *("DeviceAllow=", "DeviceAllow=/dev/nvidia3 rw", "DeviceAllow=/dev/nvidiactl rw"),
    ]


def test_a_task_whose_new_device_files_systemd_does_not_open_is_not_moved_and_that_is_said(tmp_path: Path) -> None:
    run = Recorder()
    made = scope(run, tmp_path)
    run.returncode = 1
    assert made.reopen("k-1", ("/dev/nvidia3",)) == (
        "systemd would not open the device files of its new GPUs: it refuses"
    )


@pytest.mark.parametrize("user", [True, False])
def test_where_device_files_are_not_closed_none_is_opened(tmp_path: Path, user: bool) -> None:
    run = Recorder()
    made = scope(run, tmp_path, user=user)
    before = len(run.ran)
    assert made.reopen("k-1", ("/dev/nvidia3",) if user else ()) == ""
    assert len(run.ran) == before
    assert Bare().reopen("k-1", ("/dev/nvidia3",)) == ""


def test_a_scope_without_limits_sets_none(tmp_path: Path) -> None:
    assert "-p" not in scope(Recorder(), tmp_path).command("k-1", Limits(), ["shim"])


def test_a_users_own_systemd_closes_no_device_files_and_that_is_said(tmp_path: Path) -> None:
    made = scope(Recorder(), tmp_path, user=True)
    line = " ".join(made.command("k-1", LIMITS, ["shim"]))
    assert "--user" in line
    assert "Device" not in line
    assert "device files are not closed" in made.lacks[0]


def test_a_systemd_that_refuses_is_an_error_with_its_words_and_the_mend(tmp_path: Path) -> None:
    with pytest.raises(ContainmentError, match=r'it refuses.*containment = "none"'):
        scope(Recorder(returncode=1), tmp_path)
    with pytest.raises(ContainmentError, match="has none"):
        Scope(Recorder(), systemd=tmp_path / "absent")


def test_scopes_of_unknown_tasks_are_killed_and_those_of_other_node_agents_are_not_even_listed(
    tmp_path: Path,
) -> None:
    run = Recorder(stdout="  gpu-arbiter-me-1.scope loaded active\n  gpu-arbiter-me-2.scope loaded active\n")
    scope(run, tmp_path).sweep("me", {"me-2"})
    listed, *killed = run.ran[1:]
    assert listed[-1] == "gpu-arbiter-me-*.scope"
    assert [line[-1] for line in killed] == ["gpu-arbiter-me-1.scope"]
    assert "--signal=SIGKILL" in killed[0]


# --- a folder that behaves as cgroup v2 -----------------------------------------------------------------------------


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a new folder has the files of a group, and goes once no process is in it."""
    base = tmp_path / "cgroup"
    mkdir, rmdir = Path.mkdir, Path.rmdir

    def make(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        mkdir(self, mode, parents, exist_ok)
        if base in (self, *self.parents):
            for name in ("cgroup.procs", "cgroup.kill", "cgroup.subtree_control"):
                (self / name).touch()
            (self / "cgroup.controllers").write_text("cpuset cpu memory pids")

    def remove(self: Path) -> None:
        if base in self.parents:
            if (self / "cgroup.procs").read_text() and not (self / "cgroup.kill").read_text():
                raise OSError(16, "Device or resource busy")
            for path in self.iterdir():
                path.unlink()
        rmdir(self)

    def write(self: Path, data: str) -> int:
        return written(self, data.replace("+", "") if self.name == "cgroup.subtree_control" else data)

    written = Path.write_text
    monkeypatch.setattr(Path, "write_text", write)
    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(Path, "rmdir", remove)
    return base


def test_a_group_bounds_memory_and_cores_and_says_that_device_files_stay_open(kernel: Path) -> None:
    made = Cgroup(kernel)
    group = Path(made.enter("k-1", LIMITS))
    assert (group / "memory.max").read_text() == "1073741824"
    assert (group / "cpuset.cpus").read_text() == "0,2"
    assert [lack for lack in made.lacks if "device files" in lack] == list(made.lacks)


def test_a_group_that_may_not_hand_its_controllers_on_says_so_and_sets_no_limit(
    kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def busy(self: Path, data: str) -> int:
        if self.name == "cgroup.subtree_control":
            raise OSError(16, "Device or resource busy")  # a process is in the group itself
        return write(self, data)

    monkeypatch.setattr(Path, "write_text", busy)
    made = Cgroup(kernel)
    assert not (Path(made.enter("k-1", LIMITS)) / "memory.max").exists()
    assert "host memory is not bounded" in made.lacks[0]
    assert "DelegateSubgroup=agent" in made.lacks[0]


def test_leaving_kills_what_is_left_in_the_group_and_removes_it(kernel: Path) -> None:
    made = Cgroup(kernel)
    group = Path(made.enter("k-1", Limits()))
    (group / "cgroup.procs").write_text("4711\n")
    made.leave("k-1")
    assert not group.exists()


def test_a_sweep_leaves_the_groups_of_living_tasks_and_of_other_node_agents(kernel: Path) -> None:
    made = Cgroup(kernel)
    for key in ("me-1", "me-2", "you-1"):
        made.enter(key, Limits())
    made.sweep("me", {"me-2"})
    assert sorted(path.name for path in kernel.glob("task-*")) == ["task-me-2", "task-you-1"]


def test_a_folder_that_is_no_cgroup_is_refused_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(ContainmentError, match="set cgroup_root"):
        Cgroup(tmp_path / "plain")
    with pytest.raises(ContainmentError, match="Delegate=yes"):
        Cgroup(Path("/proc/none/such"))


@pytest.mark.parametrize(
    ("own", "base"),
    [
        ("/system.slice/node.service/agent", "system.slice/node.service"),  # started in a leaf by systemd 254
        ("/system.slice/node.service", "system.slice/node.service"),
    ],
)
def test_tasks_get_their_groups_beside_the_node_agents_own_leaf(tmp_path: Path, own: str, base: str) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mounts").write_text("proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n")
    (tmp_path / "self/cgroup").write_text(f"0::{own}\n")
    assert containment._base("", tmp_path) == Path("/sys/fs/cgroup") / base


def test_a_host_with_the_old_cgroups_is_said_to_have_no_pure_new_ones(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mounts").write_text("cgroup /a cgroup rw,memory 0 0\ncgroup2 /b cgroup2 rw 0 0\n")
    (tmp_path / "self/cgroup").write_text("4:memory:/x\n0::/\n")
    with pytest.raises(ContainmentError, match="no pure cgroup v2"):
        containment._base("", tmp_path)


def test_without_bounds_it_is_said_what_is_open_and_why() -> None:
    assert "host memory, cores and device files are not bounded (no systemd)" in Bare("no systemd").lacks


def test_automatic_containment_is_one_that_can_be_had() -> None:
    chosen: Containment = containment.choose("auto")
    assert chosen.kind in ("systemd-scope", "cgroup", "none")
    assert chosen.lacks or chosen.kind == "systemd-scope"


def test_the_device_files_of_a_task_are_those_of_its_gpus_and_of_cuda(tmp_path: Path) -> None:
    folder = tmp_path / "driver/nvidia/gpus/0000:1a:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA H200\nDevice Minor: \t 3\n")
    gpu = Device(GPU, 0, "NVIDIA H200", 1, "slot-0", "00000000:1A:00.0")
    files = device_files([gpu], ("/dev/nul?",), tmp_path)
    assert files == ("/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/null")


def test_device_files_are_left_open_where_the_driver_does_not_tell_which_they_are(tmp_path: Path) -> None:
    assert device_files([Device(GPU, 0, "simulated", 1, "slot-0")], (), tmp_path) == ()


# --- the shim and the kernel's count of processes killed for memory -------------------------------------------------


def test_the_shim_puts_the_task_into_its_group_and_writes_down_what_the_kernel_killed_there(tmp_path: Path) -> None:
    group = tmp_path / "group"
    group.mkdir()
    (group / "memory.events").write_text("low 0\nmax 7\noom 3\noom_kill 2\n")
    spec = {"command": [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], "env": {}, "cwd": "/", "cpus": []}
    (tmp_path / "spec.json").write_text(json.dumps(spec | {"log": str(tmp_path / "log"), "cgroup": str(group)}))
    subprocess.run(
        [sys.executable, "-I", "-S", SHIM, tmp_path], check=True, timeout=PATIENCE_S, stdout=subprocess.DEVNULL
    )
    ended = json.loads((tmp_path / "exit.json").read_text())
    assert (ended["signal"], ended["oom_kills"]) == (9, 2)
    assert (group / "cgroup.procs").read_text() == "0"


def test_a_task_that_ran_out_of_host_memory_is_told_so_and_not_that_it_was_killed() -> None:
    reason = manager._out_of_memory(Exit(signal=9, oom_kills=2))
    task = Task(TASK, AppId("ada-1"), JobId("ada-1.0"), 0, (GPU,), Running())
    verdict = judge(task, WorkerGone(TASK, signal=9, reason=reason))
    assert (verdict.outcome, verdict.exit_code) == ("failed", 137)
    assert verdict.reason.startswith("ran out of host memory: the kernel killed 2 of its processes")


# --- real processes -------------------------------------------------------------------------------------------------


class Bench:
    """Workers without a core: their events are looked at here."""

    def __init__(self, folder: Path, workers: Workers, posted: asyncio.Queue[LocalEvent]) -> None:
        self.folder, self.workers, self.posted = folder, workers, posted

    async def start(self, text: str) -> WorkerStarted:
        (self.folder / "script.py").write_text(text)
        launch = LaunchSpec((sys.executable, str(self.folder / "script.py")), str(self.folder), str(self.folder / "ck"))
        await self.workers.start(StartWorker(TASK, AppId("ada-1"), JobId("ada-1.0"), 0, (GPU,), launch))
        return await self.event(WorkerStarted)

    async def event(self, kind: type[EventT]) -> EventT:
        async with asyncio.timeout(PATIENCE_S):
            while not isinstance(event := await self.posted.get(), kind):
                pass
        return event

    def shim(self) -> int:
        (path,) = self.folder.glob("state/workers/*/started.json")
        pid = json.loads(path.read_text())["shim"]
        assert isinstance(pid, int)
        return pid


@asynccontextmanager
async def bench(folder: Path, kind: Kind = "none", cgroup_root: str = "") -> AsyncIterator[Bench]:
    posted: asyncio.Queue[LocalEvent] = asyncio.Queue()
    (folder / "state").mkdir(exist_ok=True)
    settings = Settings("n1", folder / "state", procfs.boot_id(), containment=kind, cgroup_root=cgroup_root)
    async with asyncio.TaskGroup() as tasks:
        workers = Workers(
            settings,
            SimulatedBackend("n1", 1),
            posted.put_nowait,
            tasks,
            Storage(settings.state_dir, posted.put_nowait),
        )
        await workers.adopt()
        yield Bench(folder, workers, posted)
        await workers.end()
        workers.close()


#: Leaves its session and its parents twice over, keeps its environment, and prints its pid.
RUNAWAY = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {extra}
        with open("pid", "w") as file:
            print(os.getpid(), file=file)
        time.sleep(120)
    os._exit(0)
os.wait()
while not os.path.exists("pid"):
    time.sleep(0.01)
{then}
"""
#: Starts anew without any environment.
NAMELESS = "os.execve('/bin/sh', ['sh', '-c', 'echo $$ >pid; sleep 120'], {}) if not os.path.exists('pid') else None"


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path: Path) -> Iterator[None]:
    """End the processes that a failed test has left running."""
    yield
    for path in tmp_path.glob("**/pid"):
        with suppress(ProcessLookupError, ValueError):
            os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_what_runs_away_from_a_task_ends_with_it(tmp_path: Path) -> None:
    async with bench(tmp_path) as site:
        await site.start(RUNAWAY.format(extra="pass", then=""))
        assert (await site.event(WorkerGone)).exit_code == 0
        await gone(await pid_in(tmp_path / "pid"))


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_process_that_ran_away_from_a_task_with_a_killed_supervisor_is_found_by_its_environment(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as site:
        await site.start(RUNAWAY.format(extra="pass", then="time.sleep(120)"))
        runaway = await pid_in(tmp_path / "pid")
        os.kill(site.shim(), signal.SIGKILL)
        await site.event(WorkerGone)
        assert is_gone(runaway)


async def test_workers_are_ended_though_one_of_them_is_dropped_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as site:
        await site.start("import time; time.sleep(120)")
        shim, kill = site.shim(), Workers._kill_all

        def dropped_first(self: Workers, task: TaskId, started: Started) -> None:
            self._drop(task)
            kill(self, task, started)

        monkeypatch.setattr(Workers, "_kill_all", dropped_first)
        await site.workers.end()
        assert is_gone(shim)


@pytest.fixture(params=["short", "deep"])
def home(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder whose name is short, or too long for a socket in it; pytest's own grows with every run."""
    with tempfile.TemporaryDirectory(prefix="ga-") as name:
        folder = Path(name) / ("d" if request.param == "short" else "d" * 90)
        (folder / "state").mkdir(parents=True)
        yield folder
        shutil.rmtree(manager._socket_dir(folder / "state"))


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_new_node_agent_ends_what_the_tasks_of_the_last_one_left_behind_and_nothing_else(home: Path) -> None:
    sockets = manager._socket_dir(home / "state")
    assert (sockets == home / "state/sockets") == (len(home.name) == 1)
    orphan = sleeper(GPU_ARBITER_SOCKET=f"{sockets}/0123456789abcdef.sock")
    others = sleeper(GPU_ARBITER_SOCKET=str(home / "other/state/sockets/x.sock"))
    try:
        async with bench(home):
            assert orphan.wait(PATIENCE_S) == -signal.SIGKILL
            assert others.poll() is None
    finally:
        for process in (orphan, others):
            process.kill()
            process.wait()


def _groups(tmp_path: Path) -> Iterator[str]:
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        base = Path(root) / f"gpu-arbiter-test-{os.getpid()}"
        with suppress(ContainmentError):
            Cgroup(base)
            yield str(base)
            for group in base.glob("task-*"):
                with suppress(OSError):
                    group.rmdir()
            base.rmdir()
            return
    pytest.skip("no cgroup v2 that this user may write")


groups = pytest.fixture(_groups)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_killed_group_takes_with_it_what_has_neither_parent_nor_session_nor_environment(
    tmp_path: Path, groups: str
) -> None:
    async with bench(tmp_path, "cgroup", groups) as site:
        await site.start(RUNAWAY.format(extra=NAMELESS, then="time.sleep(120)"))
        runaway = await pid_in(tmp_path / "pid")
        group = Path(groups) / f"task-{key_of(tmp_path / 'state', TASK)}"
        assert str(runaway) in (group / "cgroup.procs").read_text().split()
        assert str(site.shim()) not in (group / "cgroup.procs").read_text().split()
        site.workers.signal(TASK, "kill")
        ended = await site.event(WorkerGone)
        assert (ended.signal, ended.reason) == (signal.SIGKILL, "")
        assert is_gone(runaway)
        assert not group.exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_kill_reaches_the_whole_group_at_once_and_not_only_what_descends_from_the_supervisor(
    tmp_path: Path, groups: str
) -> None:
    async with bench(tmp_path, "cgroup", groups) as site:
        await site.start("import time\ntime.sleep(120)")
        os.kill(site.shim(), signal.SIGSTOP)  # so that what follows is not the end's own cleaning up
        stray = sleeper()
        (Path(groups) / f"task-{key_of(tmp_path / 'state', TASK)}" / "cgroup.procs").write_text(str(stray.pid))
        site.workers.signal(TASK, "kill")
        try:
            assert stray.wait(PATIENCE_S) == -signal.SIGKILL
        finally:
            stray.kill()
            os.kill(site.shim(), signal.SIGCONT)
        await site.event(WorkerGone)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_group_whose_supervisor_is_killed_is_ended_whole(tmp_path: Path, groups: str) -> None:
    async with bench(tmp_path, "cgroup", groups) as site:
        await site.start(RUNAWAY.format(extra=NAMELESS, then="time.sleep(120)"))
        runaway = await pid_in(tmp_path / "pid")
        os.kill(site.shim(), signal.SIGKILL)
        await site.event(WorkerGone)
        assert is_gone(runaway)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_new_node_agent_ends_the_groups_of_unknown_tasks(tmp_path: Path, groups: str) -> None:
    group = Path(groups) / f"task-{owner_of(tmp_path / 'state')}-forgotten"
    group.mkdir()
    left = sleeper()
    (group / "cgroup.procs").write_text(str(left.pid))
    try:
        async with bench(tmp_path, "cgroup", groups):
            assert left.wait(PATIENCE_S) == -signal.SIGKILL
            assert not group.exists()
    finally:
        left.kill()
        left.wait()


def test_which_containment_is_in_force_is_written_down_for_who_looks(tmp_path: Path) -> None:
    async def look() -> None:
        async with bench(tmp_path):
            standing = json.loads((tmp_path / "state" / manager.STANDING).read_text())
            assert standing["kind"] == "none"
            assert standing["lacks"]

    asyncio.run(look())


# --- strangers ------------------------------------------------------------------------------------------------------

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(120)"
MORTAL = "import time; print('up', flush=True); time.sleep(120)"


@pytest.fixture
def stranger() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    made: list[subprocess.Popen[str]] = []

    def start(text: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
        made.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield start
    for process in made:
        process.kill()
        process.communicate()


def ending(process: subprocess.Popen[str], how: str = "terminate", *, ticks: int = 0) -> EndStranger:
    known = procfs.stat(process.pid)
    assert known is not None
    return EndStranger(GPU, process.pid, known.start_ticks + ticks, how)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_stranger_is_sent_what_was_decided(
    tmp_path: Path, stranger: Callable[[str], subprocess.Popen[str]]
) -> None:
    async with bench(tmp_path) as site:
        mortal, deaf = stranger(MORTAL), stranger(DEAF)
        site.workers.end_stranger(ending(mortal))
        assert mortal.wait(PATIENCE_S) == -signal.SIGTERM
        site.workers.end_stranger(ending(deaf))
        site.workers.end_stranger(ending(deaf, "kill"))
        assert deaf.wait(PATIENCE_S) == -signal.SIGKILL
        site.workers.end_stranger(EndStranger(GPU, deaf.pid, 1, "kill"))  # gone: nothing to do


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_process_that_took_over_a_strangers_number_is_not_touched(
    tmp_path: Path, stranger: Callable[[str], subprocess.Popen[str]]
) -> None:
    async with bench(tmp_path) as site:
        process = stranger(MORTAL)
        site.workers.end_stranger(ending(process, "kill", ticks=-1))
        await asyncio.sleep(0.1)
        assert process.poll() is None


async def test_a_stranger_that_the_node_agent_has_no_right_to_end_is_reported(
    tmp_path: Path, stranger: Callable[[str], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(fd: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    async with bench(tmp_path) as site:
        process = stranger(MORTAL)
        monkeypatch.setattr(signal, "pidfd_send_signal", forbid)
        site.workers.end_stranger(ending(process))
        assert "CAP_KILL" in (await site.event(StrangerSpared)).reason


# --- the ledger of GPUs on disk -------------------------------------------------------------------------------------


def test_the_ledger_of_gpus_is_read_as_it_was_written_and_a_damaged_one_is_empty(tmp_path: Path) -> None:
    ledger = HealthLedger(finished={GPU: 1.5}, quarantined={GPU: "jobs of ada-1 and bob-1 failed"})
    assert health_files.read(tmp_path) == HealthLedger()
    health_files.write(tmp_path, ledger)
    assert health_files.read(tmp_path) == ledger
    (tmp_path / health_files.LEDGER).write_text("{")
    assert health_files.read(tmp_path) == HealthLedger()


def test_the_file_that_lifts_a_quarantine_is_taken_once(tmp_path: Path) -> None:
    assert health_files.lifted(tmp_path) is None
    (tmp_path / health_files.LIFT).write_text(f"{GPU}\nGPU-2\n")
    assert health_files.lifted(tmp_path) == (GPU, "GPU-2")
    assert health_files.lifted(tmp_path) is None
    (tmp_path / health_files.LIFT).touch()
    assert health_files.lifted(tmp_path) == ()
