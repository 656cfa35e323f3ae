"""Tasks of two users on one node, each as its own user, under a real systemd: what works, and which attacks do not.

The systemd is one of its own, in namespaces, on an overlay of this host in memory (`tests/support/launcher_host.py`).
"""

# Processes of other programs offer no event to wait for.

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path

import pytest
from msgspec.structs import replace

pytest.importorskip("cryptography", reason="the package cryptography, in the extra `users`, is not installed")

from node_agent.workers.containment import key_of
from node_agent.workers.ssh_server import SERVER_FOLDERS
from protocol.messages import TaskOrder, TaskStatus, Want
from tests.support.cluster import until
from tests.support.gateway import GATEWAY, Hand
from tests.support.launcher_host import LAUNCHER, REPOSITORY, RUNTIME, UIDS, UNIT, Host, as_user, launcher_host, why_not
from tests.support.node_site import NodeProcess, find_task, plan_of, task_order
from tests.support.patience import PATIENCE_S
from tests.support.stand_in import StandIn, cards

HAS_SSH_SERVER = any(Path(folder, "sshd").exists() for folder in SERVER_FOLDERS)
pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.slow]

STATE = Path("/srv/node/state")
OWN_GPU, OTHER_GPU = f"/dev/gpu-arbiter-own-{os.getpid()}", f"/dev/gpu-arbiter-other-{os.getpid()}"
NUMBERS = count(1)
#: `WatchdogSec` and `RestartSec` of the launcher's unit.
WATCHDOG_S, RESTART_S = 60.0, 5.0


class Bench:
    """The host, the gateway whose key it knows, and the newest plan."""

    def __init__(self, host: Host, hand: Hand) -> None:
        self.host, self.hand = host, hand
        self.node: NodeProcess
        self.orders: dict[str, TaskOrder] = {}

    def task(self, user: str, *command: str, age_s: float = 0.0, gpu: int | None = None, **more: object) -> TaskOrder:
        """A signed order of a new job of the user's, on that user's GPU or another; its first attempt."""
        gpu = {"alice": 0, "bob": 1}[user] if gpu is None else gpu
        order = task_order(Path(f"/home/{user}"), f"{user}-x{next(NUMBERS)}.0-a0", *command, gpus=(gpu,), grace_s=60.0)
        assert order.launch is not None
        order = replace(order, launch=replace(order.launch, **more))
        return self.hand.sign(order, user, UIDS[user], age_s=age_s)

    async def plan(self, *orders: TaskOrder) -> None:
        """Order these and no others."""
        self.orders = {order.task: order for order in orders}
        await self.node.plan(plan_of(orders, epoch=1, seq=next(NUMBERS)))

    async def want(self, order: TaskOrder, want: Want, **more: object) -> None:
        """Plan the same again, but for the wish for one task."""
        await self.plan(*(self.orders | {order.task: replace(order, want=want, **more)}).values())

    async def status(self, order: TaskOrder, wanted: Callable[[TaskStatus], bool]) -> TaskStatus:
        def met(report: object) -> bool:
            status = find_task(report, order.task)  # type: ignore[arg-type]
            return status is not None and wanted(status)

        status = find_task(await self.node.report(met), order.task)
        assert status is not None
        return status

    async def trains(self, order: TaskOrder, steps: int = 3) -> TaskStatus:
        return await self.status(order, lambda status: status.phase == "running" and status.step >= steps)

    async def step_after(self, order: TaskOrder, seconds: float) -> int:
        """Take in all reports until so many seconds are over; return the task's mini-batch by then."""
        by = time.monotonic() + seconds
        report = await self.node.report(lambda _report: time.monotonic() > by, patience_s=seconds + PATIENCE_S)
        status = find_task(report, order.task)
        assert status is not None
        return status.step

    async def ended(self, order: TaskOrder) -> TaskStatus:
        return await self.status(order, lambda status: status.phase == "exited")

    def log(self, order: TaskOrder) -> str:
        return self.host.run("cat", str(STATE / f"logs/{order.task}.log"))

    def unit(self, order: TaskOrder) -> str:
        return f"gpu-arbiter-{key_of(STATE, order.task)}.service"

    def processes(self, order: TaskOrder) -> tuple[int, int]:
        """The supervisor and the main process of a task."""
        started = json.loads(self.host.run("cat", str(STATE / f"workers/{order.task}/started.json")))
        return started["shim"], started["pid"]

    def is_there(self, pid: int) -> bool:
        return self.host.run("sh", "-c", f"kill -0 {pid} && echo yes", check=False).strip() == "yes"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Hand]]:
    folder = tmp_path_factory.mktemp("host")
    with launcher_host(folder / "h") as host:
        hand = Hand(folder)
        host.write(f"/etc/gpu-arbiter/gateways/{GATEWAY}.pub", hand.public.read_text())
        host.start_launcher(devices=[OWN_GPU])
        with gpu_files(host):
            yield host, hand


@contextmanager
def gpu_files(host: Host) -> Iterator[None]:
    """Make the files of two GPUs that no driver serves: to open one is refused, or leads to no device."""
    numbers = {OWN_GPU: 8, OTHER_GPU: 9}
    try:
        for path, number in numbers.items():
            host.run("mknod", "-m", "666", path, "c", "195", str(number))
        yield
    finally:
        host.run("rm", "-f", *numbers)  # the folder is that of the host that runs the tests


@pytest.fixture
async def bench(host: tuple[Host, Hand]) -> AsyncIterator[Bench]:
    made = Bench(*host)
    async with running(made):
        yield made
        await made.plan()
        await made.node.report(lambda report: not report.tasks)


@asynccontextmanager
async def running(bench: Bench, **fields: object) -> AsyncIterator[None]:
    """A node agent for a while; the tasks outlive it."""
    async with bench.host.node(**fields) as node:
        bench.node = node
        yield


WHO = "import os, sys; print(os.getuid(), os.getgroups(), os.environ['HOME'], os.environ['USER'], os.getcwd())"


# --- each as its own user ------------------------------------------------------------------------------------------


@pytest.mark.full  # it boots a systemd; tests/core/test_launcher.py has the launcher without one
async def test_tasks_of_two_users_run_as_themselves_train_park_and_write_their_own_files(bench: Bench) -> None:
    alice = bench.task("alice", "work")
    bob = bench.task("bob", sys.executable, "-c", f"{WHO}; open('mine', 'w')")
    await bench.plan(alice, bob)
    assert (await bench.ended(bob)).outcome == "finished"
    assert bench.log(bob) == "2002 [2002] /home/bob bob /home/bob\n"
    assert bench.host.run("stat", "-c", "%U %a", "/home/bob/mine", bob.launch.checkpoint_dir) == "bob 644\nbob 755\n"
    await bench.trains(alice)
    shown = bench.host.run("systemctl", "show", bench.unit(alice), "-p", "User,Slice,DevicePolicy,NoNewPrivileges")
    assert sorted(shown.split()) == [
        "DevicePolicy=closed",
        "NoNewPrivileges=yes",
        "Slice=gpu-arbiter.slice",
        "User=alice",
    ]
    await bench.want(alice, "vacate", preempt_by="suspend")
    await bench.status(alice, lambda status: status.phase == "suspended")
    await bench.want(alice, "run", preempt_by="auto")
    await bench.trains(alice)
    await bench.want(alice, "vacate", preempt_by="checkpoint")
    assert ((await bench.ended(alice)).outcome, bench.log(alice).split()[0]) == ("preempted", "works")


@pytest.mark.full
async def test_a_task_has_the_memory_and_the_cores_of_its_lease_and_takes_none_of_anothers(
    host: tuple[Host, Hand],
) -> None:
    bench = Bench(*host)
    taking = "import os; print(*os.sched_getaffinity(0), flush=True); bytearray(500 << 20); print('has it')"
    async with running(bench, gpus="simulated:2", simulated_pin=True, memory_max_bytes=200 << 20):
        alice = bench.task("alice", "work")
        bob = bench.task("bob", sys.executable, "-c", taking)
        await bench.plan(alice, bob)
        await bench.trains(alice)
        ended = await bench.ended(bob)
        cores = sorted(os.sched_getaffinity(0))
        assert (ended.outcome, bench.log(bob)) == ("failed", f"{cores[1 % len(cores)]}\n")
        assert "SIGKILL" in ended.reason
        shown = bench.host.run("systemctl", "show", bench.unit(alice), "-p", "MemoryMax,AllowedCPUs").split()
        assert sorted(shown) == [f"AllowedCPUs={cores[0]}", f"MemoryMax={200 << 20}"]
        await bench.trains(alice, (await bench.trains(alice)).step + 3)
        await bench.plan()
        await bench.node.report(lambda report: not report.tasks)


@pytest.mark.full
async def test_a_checkpoint_in_memory_is_the_users_own_and_is_copied_to_the_users_folder(
    host: tuple[Host, Hand],
) -> None:
    there, bench = host[0], Bench(*host)
    memory = f"/dev/shm/gpu-arbiter-test-{os.getpid()}"
    there.run("mkdir", "-m", "711", memory)
    there.start_launcher(devices=[OWN_GPU], memory_dir=memory)
    try:
        async with running(bench, memory_dir=memory):
            first = bench.task("alice", sys.executable, str(REPOSITORY / "tests/support/telling_steps.py"), "held",
                               "--steps", "1000000", "--step-ms", "20")  # fmt: skip
            env = {"PYTHONPATH": str(REPOSITORY)}
            first = bench.hand.sign(
                replace(first, launch=replace(first.launch, env=env)), "alice", UIDS["alice"], age_s=0.0
            )
            await bench.plan(first)
            await bench.trains(first, 10)
            await bench.want(first, "vacate", preempt_by="checkpoint")
            left = await bench.status(first, lambda status: status.phase == "exited" and not status.unflushed)
            assert left.outcome == "preempted"
            (saved,) = there.lines(f"find {first.launch.checkpoint_dir} -name made")
            assert there.run("stat", "-c", "%U", saved) == "alice\n", "it is on the disk, as the user's"
            (kept,) = there.lines(f"find {memory}/{UIDS['alice']} -name made")
            assert there.run("cat", kept) == there.run("cat", saved)
            assert "Permission denied" in there.run("cat", kept, user="bob", check=False)
            assert "Permission denied" in there.run("cat", kept, user="gpu-node", check=False)
            made = int(there.run("cat", saved))
            there.run("rm", "-r", str(Path(saved).parent))  # so that it shows from where the next attempt begins
            again = replace(first, task=first.task.replace("-a0", "-a1"), attempt=1)
            again = bench.hand.sign(again, "alice", UIDS["alice"], age_s=0.0)
            await bench.plan(again)
            await bench.trains(again, made + 5)
            steps = [int(line.split()[1]) for line in there.run("cat", "/home/alice/held").splitlines()]
            assert steps == list(range(len(steps))), "it went on from memory"
            await bench.plan()
            await bench.node.report(lambda report: not report.tasks)
    finally:
        there.start_launcher(devices=[OWN_GPU])
        there.run("rm", "-rf", memory)


# --- attacks --------------------------------------------------------------------------------------------------------

#: Tries each thing, given as JSON of name and expression; prints by name what came of it.
TRYING = """
import json, os, signal, socket, sys
def connected(path, hello=b""):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.settimeout(10)
        try:
            sock.sendall(hello)
            return sock.recv(100) or "hung up"
        except (BrokenPipeError, ConnectionResetError):
            return "hung up"
def mapped(pid):
    return int(open(f"/proc/{pid}/maps").read().partition("-")[0], 16)
def tried(expression):
    try:
        return str(eval(expression))
    except (OSError, ConnectionError) as error:
        return type(error).__name__
print(json.dumps({name: tried(expression) for name, expression in json.loads(sys.argv[1]).items()}))
"""


#: Asks a launcher for tasks, which changes nothing.
LIVING = b'{"type":"living","owner":"00000000"}\n'


def installed_address(host: Host) -> str:
    """Lay down what a node with a launcher has; return the file that holds its password for the broker."""
    root = "/srv/installed"
    host.write("/srv/address", "amqp://node-n1:password@host/gpu\n", mode="600")
    words = ("install", "node", "--id", "n1", "--launcher", "--root", root, "--bus-file", "/srv/address")
    host.run("install", "-d", root)
    host.run("env", "-C", str(REPOSITORY), sys.executable, "-m", "gpu_arbiter", *words)
    assert "password" in host.run("cat", f"{root}/etc/gpu-arbiter/node.url")
    return f"{root}/etc/gpu-arbiter/node.url"


async def attempted(bench: Bench, user: str, tries: dict[str, str], *others: TaskOrder) -> dict[str, str]:
    """What came of these tries in a task of the user's, beside the tasks that run."""
    order = bench.task(user, sys.executable, "-c", TRYING, json.dumps(tries), gpu=1)
    await bench.plan(*others, order)
    ended = await bench.ended(order)
    assert ended.outcome == "finished", ended
    found: dict[str, str] = json.loads(bench.log(order).rpartition("mine")[2])
    return found


@pytest.mark.full
async def test_a_task_can_neither_read_end_nor_speak_for_another_users_task_or_its_node(bench: Bench) -> None:
    alice = bench.task("alice", "work")
    await bench.plan(alice)
    await bench.trains(alice)
    supervisor, main = bench.processes(alice)
    agent = bench.host.run("pgrep", "-u", "gpu-node", "-f", "tests.support.node_site").split()[0]
    socket_path = bench.host.run("sh", "-c", f"echo {RUNTIME}/sockets/*").strip()
    bench.host.write("/home/alice/checkpoint", "weights", owner="alice", mode="600")
    address = installed_address(bench.host)
    hello = json.dumps(
        {"type": "hello", "proto": 1, "task": alice.task, "pid": 1, "state": "running", "step": 10**6}
        | dict.fromkeys(("start_step", "total_steps"), 0)
        | dict.fromkeys(("can_park", "can_checkpoint"), True)
    )
    assert await attempted(
        bench,
        "bob",
        {
            "checkpoint": "open('/home/alice/checkpoint').read()",
            "variables": f"open('/proc/{main}/environ').read()",
            "memory": f"os.pread(os.open('/proc/{main}/mem', os.O_RDONLY), 4, mapped({main}))",
            "log by its path": f"open('{STATE}/logs/{alice.task}.log').read()",
            "log by its process": f"open('/proc/{main}/fd/1').read()",
            "record": f"open('{STATE}/workers/{alice.task}/spec.json').read()",
            "sockets": f"os.listdir('{RUNTIME}/sockets')",
            "socket": f"connected({socket_path!r}, {(hello + chr(10)).encode()!r})",
            "launcher": f"connected('{LAUNCHER}', {LIVING!r})",
            "starts": "os.listdir('/run/gpu-arbiter-launcher/starts')",
            "password": f"open('{address}').read()",
            "node agent": f"os.kill({agent}, 0)",  # it is to tell of this task
            "node agent's variables": f"open('/proc/{agent}/environ').read()",
            "unit": f"open('/run/systemd/transient/{bench.unit(alice)}', 'w')",
            "kill": f"os.kill({main}, signal.SIGKILL)",
            "kill its supervisor": f"os.kill({supervisor}, signal.SIGKILL)",
        },
        alice,
    ) == dict.fromkeys(
        (
            "checkpoint",
            "variables",
            "memory",
            "kill",
            "kill its supervisor",
            "log by its path",
            "log by its process",
            "record",
            "sockets",
            "launcher",
            "starts",
            "password",
            "node agent",
            "node agent's variables",
            "unit",
        ),
        "PermissionError",
    ) | {"socket": "hung up"}
    assert (await bench.trains(alice)).step < 10**6
    assert bench.processes(alice) == (supervisor, main)
    own = {"own log": "open('/proc/self/fd/1', 'a').write('mine')", "own name": f"os.kill({main}, 0)"}
    assert await attempted(bench, "alice", own, alice) == {"own log": "4", "own name": "None"}, "the tries do work"


@pytest.mark.full
async def test_a_node_agent_cannot_start_what_no_gateway_has_signed_for_it(bench: Bench) -> None:
    good = bench.task("alice", "/bin/true")
    await bench.plan(good)
    assert (await bench.ended(good)).outcome == "finished"
    await bench.plan()
    await bench.node.report(lambda report: not report.tasks)
    # All of them would work, but for the launcher.
    bench.host.write("/home/alice/checkpoint", "weights", owner="alice", mode="600")
    fresh = bench.task("alice", "/bin/true")
    bob = bench.task("bob", "/bin/cat", "/home/alice/checkpoint", cwd="/tmp", checkpoint_dir="/tmp/forged")
    forged = replace(bob.launch, warrant=replace(bob.launch.warrant, user="alice", uid=2001, gids=(2001,)))
    altered = replace(fresh.launch, command=("/bin/cat", "/home/alice/checkpoint"))
    unsigned = replace(fresh.launch, warrant=None)
    others = {
        "altered": (replace(fresh, launch=altered), "does not bear the signature of the gateway login1"),
        "unsigned": (replace(fresh, launch=unsigned), "the launch is not signed; submit it through a gateway"),
        "forged owner": (replace(bob, launch=forged), "does not bear the signature of the gateway login1"),
        "old": (bench.task("alice", "/bin/true", age_s=4000), "from -60 to 3600 s are allowed"),
        "repeated": (good, "was started on this node before"),
    }
    for what, (order, says) in others.items():
        await bench.plan(order)
        ended = await bench.ended(order)
        assert (ended.outcome, says in ended.reason) == ("failed", True), (what, ended.reason)
        await bench.plan()
        await bench.node.report(lambda report: not report.tasks)


@pytest.mark.full
async def test_links_and_files_of_a_user_are_opened_with_no_rights_but_the_users(bench: Bench) -> None:
    host = bench.host
    host.write("/home/alice/key", "of alice", owner="alice", mode="600")
    program = "import os; print(os.environ['KEY'])"
    hers = bench.task("alice", sys.executable, "-c", program, secrets={"KEY": "/home/alice/key"})
    his = bench.task("bob", sys.executable, "-c", program, secrets={"KEY": "/home/alice/key"})
    await bench.plan(hers, his)
    assert ((await bench.ended(hers)).outcome, bench.log(hers)) == ("finished", "of alice\n")
    refused = await bench.ended(his)
    assert "the secret KEY cannot be read from /home/alice/key: Permission denied" in refused.reason
    assert "that bob can read" in refused.reason
    # Both folders are where the node agent, too, may go.
    for user in ("alice", "bob"):
        host.run("install", "-d", "-o", user, f"/srv/shared/{user}", f"/srv/shared/{user}/checkpoints")
    # The word of a worker that finished, as a link to a file that the node agent alone can read.
    linked = bench.task("alice", "/bin/true", checkpoint_dir="/srv/shared/alice/checkpoints")
    host.write("/srv/node/finished", json.dumps({"task": linked.task, "run": ""}), owner="gpu-node", mode="600")
    host.run("ln", "-s", "/srv/node/finished", "/srv/shared/alice/checkpoints/finished.json")
    # A checkpoint folder that is a link to a folder of another user's.
    led = bench.task("bob", "/bin/true", checkpoint_dir="/srv/shared/bob/link")
    host.run("ln", "-s", "/srv/shared/alice", "/srv/shared/bob/link")
    await bench.plan(linked, led)
    why = "/srv/shared/bob/link cannot be written by bob on node n1 (Permission denied)"
    assert why in (await bench.ended(led)).reason
    assert "success is unconfirmed" in (await bench.ended(linked)).reason, "its word was read"


@pytest.mark.full
async def test_a_task_opens_the_devices_of_its_lease_and_no_others(bench: Bench) -> None:
    opening = {name: f"os.open({path!r}, os.O_RDWR)" for name, path in (("own", OWN_GPU), ("other", OTHER_GPU))}
    assert await attempted(bench, "alice", opening) == {"own": "OSError", "other": "PermissionError"}
    outside = bench.host.run("cat", OTHER_GPU, user="alice", check=False)
    assert "No such device or address" in outside, "its bounds alone keep a task from it"


# --- the driver's checkpoint ----------------------------------------------------------------------------------------

DRIVER = "/srv/driver"
#: Has the driver asked as a node agent does, and prints the answer.
ASKING_DRIVER = """
import asyncio, json, sys
from pathlib import Path
import msgspec
from node_agent.workers.driver import DriverCheckpointer, DriverFacts, LaunchedHelpers
from node_agent.workers.supervisors import Launcher
socket, do, timeout_s, pids = sys.argv[1:]
launched = LaunchedHelpers(Launcher(Path(socket)))
made = DriverCheckpointer(Path("/srv/node"), DriverFacts("x86_64", "580.95.05", "13.0.1", "b", 993), launched=launched)
words = (json.loads(pids),) if do == "find" else (json.loads(pids), float(timeout_s))
print(msgspec.json.encode(asyncio.run(getattr(made, do)(*words))).decode())
"""


class Driver:
    """A played driver on the host, which really stops processes, and a node agent's words to it."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.host = bench.host
        self.played = StandIn(folder, *cards(2))
        self.lay()
        self.host.write("/etc/ld.so.conf.d/played.conf", f"{DRIVER}\n")
        self.host.run("ldconfig")

    def lay(self, *flags: str) -> None:
        """Put the libraries and their scenario on the host; users write there as the kernel's driver would."""
        self.played.flag("real", "persistence", *flags)
        shutil.copytree(self.played.folder, self.host.root / DRIVER[1:], dirs_exist_ok=True)
        self.host.run("chmod", "777", DRIVER)

    def knows(self, pid: int) -> None:
        """Have a process use CUDA."""
        self.host.write(f"{DRIVER}/state.{pid}", "0", mode="666")

    def line(self, do: str, *pids: int, timeout_s: float = PATIENCE_S) -> list[str]:
        words = (LAUNCHER, do, str(timeout_s), json.dumps(pids))
        return ["env", "-C", str(REPOSITORY), sys.executable, "-c", ASKING_DRIVER, *words]

    def ask(self, do: str, *pids: int, timeout_s: float = PATIENCE_S) -> dict[str, object]:
        answer = self.host.run(*self.line(do, *pids, timeout_s=timeout_s), user="gpu-node")
        found: dict[str, object] = json.loads(answer.splitlines()[-1])
        return found

    def is_stopped(self, pid: int) -> bool:
        return self.host.run("ps", "-o", "state=", "-p", str(pid)).strip() == "T"

    def calls(self) -> str:
        return self.host.run("cat", f"{DRIVER}/calls", check=False)

    def helpers(self) -> list[str]:
        """The units of helpers that live."""
        listed = self.host.run("systemctl", "list-units", "--plain", "--no-legend", "gpu-arbiter-driver-*")
        return [line.split()[0] for line in listed.splitlines()]


@pytest.mark.full
async def test_the_driver_is_asked_as_the_user_of_the_task_and_for_that_tasks_processes_alone(
    bench: Bench, tmp_path: Path
) -> None:
    driver = Driver(bench, tmp_path / "driver")
    alice, bob = bench.task("alice", "work"), bench.task("bob", "work")
    await bench.plan(alice, bob)
    await bench.trains(alice)
    await bench.trains(bob)
    hers, his = bench.processes(alice)[1], bench.processes(bob)[1]
    for pid in (hers, his):
        driver.knows(pid)
    done = await asyncio.to_thread(driver.ask, "suspend", hers)
    assert (done["ok"], driver.is_stopped(hers), driver.is_stopped(his)) == (True, True, False), done
    assert bench.host.run("stat", "-c", "%U", f"{DRIVER}/calls") == "alice\n"
    assert (await asyncio.to_thread(driver.ask, "find", hers))["standing"] == "suspended"
    both = await asyncio.to_thread(driver.ask, "suspend", hers, his)
    assert (both["ok"], both["lost"], driver.is_stopped(his)) == (False, False, False)
    assert "alone, and one of these is none" in str(both["reason"])
    assert (await asyncio.to_thread(driver.ask, "resume", hers))["ok"]
    assert not driver.is_stopped(hers)
    await bench.trains(alice, (await bench.trains(alice)).step + 1)


@pytest.mark.full
async def test_a_helper_for_the_driver_has_the_bounds_of_its_task_and_a_time_and_outlives_the_node_agent(
    bench: Bench, tmp_path: Path
) -> None:
    driver = Driver(bench, tmp_path / "driver")
    alice = bench.task("alice", "work")
    await bench.plan(alice)
    await bench.trains(alice)
    main = bench.processes(alice)[1]
    driver.knows(main)
    driver.played.fault("delay", "cuCheckpointProcessCheckpoint", main, 4000)
    driver.lay()
    line = [*bench.host.enter, *as_user("gpu-node"), *driver.line("suspend", main)]
    with subprocess.Popen(line) as asking:  # noqa: ASYNC220 - it is to be killed half-way
        await asyncio.to_thread(until, lambda: f"Checkpoint:{main}" in driver.calls(), "the driver is asked")
        asking.kill()
    (unit,) = driver.helpers()
    shown = bench.host.run("systemctl", "show", unit, "-p", "User,DevicePolicy,NoNewPrivileges,AmbientCapabilities")
    wanted = ["AmbientCapabilities=", "DevicePolicy=closed", "NoNewPrivileges=yes", "User=alice"]
    assert sorted(shown.split()) == wanted
    assert (await asyncio.to_thread(driver.ask, "find", main))["standing"] == "suspended", "it was waited for"
    driver.played.heal()
    driver.played.fault("hang", "cuCheckpointProcessRestore", main)
    driver.lay()
    hung = await asyncio.to_thread(driver.ask, "resume", main, timeout_s=3.0)
    assert (hung["ok"], hung["lost"]) == (False, True), hung
    assert driver.helpers() == []


# --- restarts and ends ----------------------------------------------------------------------------------------------


@pytest.mark.full
async def test_a_restart_of_the_node_agent_or_the_launcher_leaves_training_untouched(host: tuple[Host, Hand]) -> None:
    bench = Bench(*host)
    alice = bench.task("alice", "work")
    async with running(bench):
        await bench.plan(alice)
        before = (await bench.trains(alice)).step
        processes = bench.processes(alice)
        await bench.node.kill()
    bench.host.run("systemctl", "restart", "gpu-arbiter-launcher")
    async with running(bench):
        await bench.plan(alice)
        assert (await bench.trains(alice, before + 1)).attempt == 0
        assert bench.processes(alice) == processes
        assert bench.is_there(processes[1])
        await bench.want(alice, "vacate", preempt_by="suspend")
        await bench.status(alice, lambda status: status.phase == "suspended")
        await bench.want(alice, "vacate", preempt_by="checkpoint")
        await bench.plan()
        await bench.node.report(lambda report: not report.tasks)
        assert not bench.is_there(processes[1])


@pytest.fixture
def unwatched(host: tuple[Host, Hand]) -> Iterator[None]:
    """The unit of the launcher has no watchdog, as that of a site that has turned it off."""
    drop_in = f"/etc/systemd/system/{UNIT}.d/unwatched.conf"
    host[0].write(drop_in, "[Service]\nWatchdogSec=0\n")
    again = ("sh", "-c", f"systemctl daemon-reload; systemctl restart {UNIT}")
    host[0].run(*again)
    yield
    host[0].run("rm", drop_in)
    host[0].run(*again)


def launcher_of(host: Host) -> str:
    return host.run("systemctl", "show", "--value", "--property=MainPID", UNIT).strip()


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("unwatched")
async def test_a_launcher_that_stands_still_for_two_minutes_fails_what_is_to_start_and_nothing_else(
    bench: Bench,
) -> None:
    """A node agent waits 90 s for its answer. What it has given up by then is not begun as the launcher wakes up."""
    trains, late = bench.task("alice", "work"), bench.task("bob", "work")
    await bench.plan(trains)
    await bench.trains(trains)
    launcher = launcher_of(bench.host)
    bench.host.run("kill", "-STOP", launcher)
    try:
        await bench.plan(trains, late)
        steps = [await bench.step_after(trains, 60.0) for _ in range(2)]
        assert 0 < steps[0] < steps[1], "training goes on, and the node agent tells of it"
    finally:
        bench.host.run("kill", "-CONT", launcher)
    ended = await bench.ended(late)
    assert (ended.outcome, "does not answer (timed out)" in ended.reason) == ("failed", True)
    assert launcher_of(bench.host) == launcher
    again = bench.task("bob", "work")
    await bench.plan(trains, again)
    await bench.trains(again)
    assert {int(pid) for pid in bench.host.run("pgrep", "-u", "bob", ".").split()} == {*bench.processes(again)}
    for task in (trains, again):
        await bench.want(task, "stop", grace_s=0.1)
        assert (await bench.ended(task)).outcome == "stopped"


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_systemd_ends_a_launcher_that_stands_still_and_the_next_one_starts_what_has_waited(bench: Bench) -> None:
    trains, late = bench.task("alice", "work"), bench.task("bob", "work")
    await bench.plan(trains)
    step = (await bench.trains(trains)).step
    launcher = launcher_of(bench.host)
    bench.host.run("kill", "-STOP", launcher)
    await bench.plan(trains, late)
    assert await bench.step_after(trains, WATCHDOG_S + RESTART_S) > step, "training goes on"
    await bench.trains(late)
    assert launcher_of(bench.host) not in ("0", launcher)
    for task in (trains, late):
        await bench.want(task, "stop", grace_s=0.1)
        assert (await bench.ended(task)).outcome == "stopped"


@pytest.mark.full
async def test_nothing_of_a_task_outlives_it_also_if_its_user_kills_the_supervisor(bench: Bench) -> None:
    leaving = "setsid sleep 1000 & setsid setsid env -i sleep 1000 & wait"
    stubborn = bench.task("alice", "stubborn")
    spread = bench.task("bob", "/bin/sh", "-c", f"trap '' TERM; echo $$; {leaving}")
    await bench.plan(stubborn, spread)
    await bench.status(stubborn, lambda status: status.phase == "running")
    await bench.status(spread, lambda status: status.phase == "running")
    assert bench.host.run("pgrep", "-u", "bob", "-c", "sleep").strip() == "2"
    bench.host.run("kill", "-KILL", str(bench.processes(spread)[0]), user="bob")
    ended = await bench.ended(spread)
    assert (ended.outcome, "its supervisor was killed" in ended.reason) == ("preempted", True)
    await bench.want(stubborn, "stop", grace_s=0.1)
    assert (await bench.ended(stubborn)).outcome == "stopped"
    for user in ("alice", "bob"):
        assert bench.host.run("pgrep", "-u", user, "-c", ".", check=False).strip() == "0"
    assert "gpu-arbiter-" not in bench.host.run("systemctl", "list-units", "--plain", "gpu-arbiter-*-*.service")


# --- from submit to the task ----------------------------------------------------------------------------------------


@pytest.mark.full
async def test_what_two_users_submit_at_a_gateway_runs_as_each_of_them(host: tuple[Host, Hand]) -> None:
    there, _ = host
    program = "import os; open('ckpt.txt', 'w').write('mine'); print('I am', os.getuid(), os.environ['USER'])"
    async with there.whole_site():
        for user in ("alice", "bob"):
            told = await asyncio.to_thread(there.as_owner, user, "run", "--", sys.executable, "-c", program)
            assert f"I am {UIDS[user]} {user}" in told
            assert there.run("stat", "-c", "%U", f"/home/{user}/ckpt.txt").strip() == user
        listed = await asyncio.to_thread(there.as_owner, "alice", "ps", "--all")
        (hers,) = set(re.findall(r"alice-[a-z]+\d+", listed))
        words = ("logs", hers)
        assert "I am 2001 alice" in await asyncio.to_thread(there.as_owner, "alice", *words)
        refused = await asyncio.to_thread(lambda: there.as_owner("bob", *words, check=False))
        assert "I am" not in refused


def steps_of(there: Host, path: str) -> list[list[str]]:
    """The mini-batches that a script of `telling_steps.py` has told: its process, and the number."""
    return [line.split() for line in there.run("cat", path, check=False).splitlines() if line[:1].isdigit()]


def gateways_of(there: Host) -> int:
    """How many gateways of the whole site have listened so far."""
    return len(there.run("cat", "/srv/whole/gateways").splitlines())


@pytest.mark.full
async def test_a_restart_of_the_gateway_leaves_training_untouched_and_a_task_has_the_groups_of_its_user(
    host: tuple[Host, Hand],
) -> None:
    there, _ = host
    there.run("sh", "-ec", "groupadd -f -g 3001 vision; usermod -aG vision alice")
    there.write("/srv/of-vision", "shared", mode="640")
    there.run("chgrp", "vision", "/srv/of-vision")
    reading = "import os; print('groups', sorted(os.getgroups()), open('/srv/of-vision').read())"
    script = (str(REPOSITORY / "tests/support/telling_steps.py"), "steps", "--steps", "1000000", "--step-ms", "50")
    async with there.whole_site():
        told = await asyncio.to_thread(there.as_owner, "alice", "run", "--", sys.executable, "-c", reading)
        assert "groups [2001, 3001] shared" in told
        try:
            refused = await asyncio.to_thread(
                lambda: there.as_owner("bob", "run", "--", sys.executable, "-c", reading, check=False)
            )
            assert "Permission denied: '/srv/of-vision'" in refused, "its own groups and no others"
            env = ("--env", f"PYTHONPATH={REPOSITORY}")
            words = ("submit", *env, "--", sys.executable, *script)
            app = (await asyncio.to_thread(there.as_owner, "alice", *words)).split()[-1]
            steps = "/home/alice/steps"
            await asyncio.to_thread(until, lambda: len(steps_of(there, steps)) > 5, "it trains")
            for _ in range(2):
                before, seen = gateways_of(there), len(steps_of(there, steps))
                there.run("pkill", "-HUP", "-u", "gpu-node", "-f", "tests.support.whole_site")
                await asyncio.to_thread(until, lambda n=before: gateways_of(there) > n, "the next gateway listens")
                await asyncio.to_thread(until, lambda n=seen: len(steps_of(there, steps)) > n + 40, "it trains on")
            made = steps_of(there, steps)
            assert [int(number) for _, number in made] == list(range(len(made)))
            assert len({pid for pid, _ in made}) == 1, "one process made them all"
            assert there.run("cat", f"{steps}.words") == "", "it was told nothing"
            listed = await asyncio.to_thread(there.as_owner, "alice", "ps")
            assert re.search(rf"{app} .*running", listed), listed
            waited = await asyncio.to_thread(
                lambda: there.as_owner("alice", "wait", app, "--timeout", "0.1", check=False)
            )
            assert f"{app} is still running" in waited, "the gateway knows it"
            await asyncio.to_thread(there.as_owner, "alice", "cancel", app)
            await asyncio.to_thread(lambda: there.as_owner("alice", "wait", app, check=False))
        finally:
            there.run("sh", "-c", "gpasswd -d alice vision; groupdel vision", check=False)


SECRET, PLAIN = "tr0ub4dor-and-3", "correct-horse-battery"
#: Folders of the daemons of a site and of what systemd keeps of their units.
OF_DAEMONS = (
    "/srv/whole",
    "/var/lib/gpu-arbiter-launcher",
    "/var/log",
    "/run/gpu-arbiter-node",
    "/run/systemd",
    "/etc",
)


@pytest.mark.full
async def test_the_value_of_a_secret_is_in_no_file_message_or_process_list_of_a_site_with_gateway_and_launcher(
    host: tuple[Host, Hand], capfd: pytest.CaptureFixture[str]
) -> None:
    there, _ = host
    there.write("/home/alice/key", f"{SECRET}\n", owner="alice", mode="600")
    program = "import hashlib, os, time; print(hashlib.sha256(os.environ['KEY'].encode()).hexdigest(), flush=True); "
    program += "exec('while not os.path.exists(\"go\"): time.sleep(0.05)')"
    words = (
        "submit",
        "--secret",
        "KEY=/home/alice/key",
        "--env",
        f"OTHER={PLAIN}",
        "--",
        sys.executable,
        "-c",
        program,
    )
    async with there.whole_site():
        app = (await asyncio.to_thread(there.as_owner, "alice", *words)).split()[-1]
        told = hashlib.sha256(SECRET.encode()).hexdigest()
        logged = f"cat /srv/whole/node/logs/{app}*.log"
        await asyncio.to_thread(until, lambda: told in there.lines(logged), "the task has it")
        plain, found = there.holding(PLAIN, *OF_DAEMONS), there.holding(SECRET, *OF_DAEMONS)
        listed = [there.telling(SECRET, "cmdline"), there.telling(PLAIN, "cmdline")]
        known, main = there.telling(SECRET, "environ"), there.run("pgrep", "-u", "alice", "-f", "hashlib").split()
        open_to_bob = [there.telling(word, "environ", user="bob") for word in (SECRET, PLAIN)]
        kept = there.holding(PLAIN, *OF_DAEMONS, user="bob")
        shown = there.run("systemctl", "show", "--all", "gpu-arbiter-*")
        there.write("/home/alice/go", "", owner="alice")
        await asyncio.to_thread(lambda: there.as_owner("alice", "wait", app, check=False))
        afterwards = there.holding(SECRET, *OF_DAEMONS)
    of_daemons = "".join(capfd.readouterr())
    names = {path.rpartition("/")[2] for path in plain}
    assert {"messages", "app-alice.db-wal", "journal.db-wal"} <= names, "what is no secret is found there"
    assert (found, afterwards) == (set(), set())
    assert listed == [set(), set()]
    assert known == set(main), "the task itself has it, and no other process"
    assert (open_to_bob, kept) == ([set(), set()], set())
    assert ("DevicePolicy" in shown, SECRET in shown, PLAIN in shown) == (True, False, False)
    assert (app in of_daemons, SECRET in of_daemons, PLAIN in of_daemons) == (True, False, False)


@pytest.mark.full
async def test_doctor_has_a_task_try_to_escape_and_names_each_try_that_leads_out(host: tuple[Host, Hand]) -> None:
    there, _ = host

    def isolation() -> dict[str, tuple[str, str]]:
        said = there.as_owner("alice", "doctor", "--site", "--json", check=False)
        told = json.loads(said[said.index("{") :].splitlines()[0])
        checks = [check for check in told["checks"] if check["name"].startswith("isolation")]
        return {check["name"]: (check["verdict"], check["found"]) for check in checks}

    def in_tmp() -> str:
        return there.run("find", "/tmp", "-maxdepth", "1", "-name", "gpu-arbiter-*", "-user", "alice")  # the task's

    there.write("/etc/gpu-arbiter/node.url", "amqp://node-n1:password@host/gpu", owner="gpu-node", mode="600")
    async with there.whole_site():
        ((name, (verdict, found)),) = (await asyncio.to_thread(isolation)).items()
        assert (name, verdict) == ("isolation", "ok"), found
        assert "could get at none of: address, sockets, launcher, signal, environ, files" in found
        assert in_tmp() == "", "it leaves nothing"
        opening = (
            "chmod 644 /etc/gpu-arbiter/node.url",
            f"chmod 755 {RUNTIME}/whole/sockets",
            f"chmod 666 {LAUNCHER}",
        )
        there.run("sh", "-ec", "; ".join(opening))
        try:
            led_out = await asyncio.to_thread(isolation)
        finally:
            there.run("sh", "-ec", f"chmod 600 /etc/gpu-arbiter/node.url {LAUNCHER}")
        assert {name: verdict for name, (verdict, _) in led_out.items()} == dict.fromkeys(
            ("isolation: address", "isolation: sockets", "isolation: launcher"), "fail"
        )
        assert "/etc/gpu-arbiter/node.url" in led_out["isolation: address"][1]


#: Asks the gateway for the way to a terminal, and tells what it says.
ASKING = """
import sys
from app_agent.control import Control, ControlError
try:
    with Control() as control:
        print(control.query("terminal", sys.argv[1]))
except ControlError as error:
    print(error.code, error.sentence)
"""


#: Comes to the ssh server of an app as `ssh-proxy` does, but asks nobody before whether that app is one's own.
COMING = """
import sys
from launch.client import open_client
from launch.faults import Fault
from launch.ssh_proxy import _folder, _greet, public_key
from launch.terminals import connected
app = sys.argv[1]
try:
    with open_client() as client:
        door = client.query("terminal", app)
    print(_greet(connected(door), public_key(_folder()), app)[0])
except Fault as fault:
    print(fault.code, fault.sentence)
"""


def check_ssh(there: Host, app: str) -> None:
    """Hold that ssh of alice's comes into the unit of her app, and bob's to nothing of it."""
    for user in ("alice", "bob"):
        there.write(f"/home/{user}/config", there.as_owner(user, "ssh-proxy", "--config"), owner=user)
    unit = "grep -hom1 'gpu-arbiter-[^/]*.service' /proc/self/cgroup /proc/$PPID/cgroup | uniq -c"
    asks = f"echo $(id -un) $GPU_ARBITER_JOB $({unit} | wc -l); sleep 1000"
    session = subprocess.Popen(there.ssh_of("alice", f"{app}.gpu", asks), stdout=subprocess.PIPE, text=True)
    try:
        assert session.stdout is not None
        assert session.stdout.readline() == f"alice {app}.0 1\n"
        files = there.run("sh", "-c", "find /proc/[0-9]*/fd -lname '/memfd:ssh*'", check=False).split()
        key = there.run("cat", *files, user="alice")
        assert "PRIVATE KEY" in key, "the try does work"
        assert there.run("cat", *files, user="bob", check=False).count("Permission denied") == len(files)
        ends = key.partition("-----END")[0].splitlines()[-1]
        assert there.lines(f"grep -raslF -e '{ends}' /dev/shm /tmp /run /srv /home", "bob") == set()
        words = there.ssh_of("bob", f"alice@{app}.gpu", "id")
        refused = subprocess.run(words, capture_output=True, text=True, check=False)
        assert f"there is no app {app}" in refused.stderr
        there.as_owner("alice", "cancel", app)
        assert session.wait(PATIENCE_S) == 255
    finally:
        session.kill()
        session.communicate()


@pytest.mark.full
async def test_a_terminal_is_its_owners_own_on_the_node_and_no_other_user_comes_to_it(host: tuple[Host, Hand]) -> None:
    there, _ = host
    program = "echo I am $(id -un) $(id -u) at $(stat -c %U $(tty)); trap 'exit 3' HUP; while :; do sleep 0.2; done"
    async with there.whole_site():
        shell = there.terminal_of("alice", "run", "--pty", "--", "bash", "-c", program)
        try:
            shown = await asyncio.to_thread(shell.read_until, r"I am alice 2001 at alice")
            app = re.findall(r"(alice-[a-z]+\d+) is queued", shown)[0]
            if HAS_SSH_SERVER:
                came = await asyncio.to_thread(there.as_owner_runs, "bob", COMING, app)
                assert came == f"7 the terminal of {app} is for alice only\n"
                came = await asyncio.to_thread(there.as_owner_runs, "alice", COMING, app)
                assert "user='alice'" in came, "the try does work"
            no = await asyncio.to_thread(there.as_owner_runs, "bob", ASKING, app)
            assert no == f"7 the terminal of {app} is for alice only\n"
            yes = await asyncio.to_thread(there.as_owner_runs, "alice", ASKING, app)
            assert "'address': '127.0.0.1'" in yes
            sockets = there.run("find", "/srv/whole/node/workers", "-name", "terminal.sock").split()
            assert len(sockets) == 1
            assert "Permission denied" in there.run("ls", sockets[0], user="bob", check=False)
            terminal = there.run("sh", "-c", "readlink /proc/$(pgrep -u alice -f 'sleep 0.2' | head -1)/fd/0").strip()
            assert "Permission denied" in there.run("sh", "-c", f"echo stolen > {terminal}", user="bob", check=False)
            if HAS_SSH_SERVER:
                await asyncio.to_thread(check_ssh, there, app)
            await asyncio.to_thread(lambda: there.as_owner("alice", "cancel", app, check=False))
            await asyncio.to_thread(shell.read_until, r"alice-[a-z]+\d+ cancelled")
        finally:
            shell.close()
