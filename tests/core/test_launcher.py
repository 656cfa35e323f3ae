"""A launcher believes gateways alone: what it refuses, and that nothing of it is started."""

from __future__ import annotations

import ast
import fcntl
import os
import pwd
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from msgspec.structs import replace

pytest.importorskip("cryptography", reason="the package cryptography, in the extra `users`, is not installed")

from node_agent import config as node_config
from node_agent.config import NodeConfig
from node_agent.launcher import config, service, units
from node_agent.launcher.config import LauncherConfig
from node_agent.launcher.requests import DESCRIPTORS, Drive, Keeping, Living, Reply, Start
from node_agent.launcher.service import Launcher, Refused
from node_agent.launcher.units import UnitError, Units, device_files
from node_agent.workers import shim, supervisors
from node_agent.workers.records import EXIT_BYTES_MAX, FinishedFile, Record, Records
from node_agent.workers.supervisors import CannotStart, _believed
from protocol import warrants
from protocol.config import ConfigError
from protocol.messages import AppId, GpuId, JobId, LaunchSpec, Terminal, Warrant
from tests.support.gateway import GATEWAY, Hand
from tests.support.node_site import task_order
from tests.support.room import take_room

#: A user of every host, who is no system user by number.
NOBODY = pwd.getpwnam("nobody")
JOB = {"app": AppId("nobody-1"), "job": JobId("nobody-1.0"), "attempt": 2}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another group needs root")


class Systemd:
    """Starts nothing, and remembers that it was to."""

    def __init__(self) -> None:
        self.started: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        if command[0] == "systemd-run":
            self.started.append(list(command))
        return subprocess.CompletedProcess(list(command), 1, "", "it refuses")


class Site:
    """A launcher whose systemd refuses all, a gateway that it knows, and a task's descriptors."""

    def __init__(self, folder: Path, sockets: Path) -> None:
        self.folder = folder
        self.hand = Hand(folder)
        keys = folder / "keys"
        keys.mkdir(mode=0o755)
        (keys / f"{GATEWAY}.pub").write_bytes(self.hand.public.read_bytes())
        self.systemd, self.now = Systemd(), time.time()
        node_user = pwd.getpwuid(os.getuid()).pw_name
        self.config = LauncherConfig(node_user, str(sockets / "run/l.sock"), str(keys), str(folder / "state"))
        self.launcher = self.made()
        self.log = folder / "log"
        self.log.touch()

    def made(self, **settings: object) -> Launcher:
        chosen = replace(self.config, **settings)
        return Launcher(chosen, Units(self.systemd), lambda: self.now)

    def start(self, age_s: float = 0.0, **changes: object) -> Start:
        order = task_order(self.folder, "nobody-1.0-a2", "work")
        order = self.hand.sign(order, "nobody", NOBODY.pw_uid, (NOBODY.pw_gid,), age_s)
        start = Start("0a0a0a0a-0a0a0a0a0a0a0a0a", "n1", order.app, order.job, 2, order.gpus, order.launch)
        return replace(start, **changes)

    def ask(self, start: Start, launcher: Launcher | None = None, log: int | None = None) -> str:
        """Why the launcher did not start it: its own word, or systemd's."""
        opened = os.open(self.log, os.O_WRONLY | os.O_APPEND)
        try:
            line = msgspec.json.encode(start) + b"\n"
            (launcher or self.launcher).answer(line, [opened if log is None else log] * 4, lambda reply: None)
        except (Refused, UnitError) as error:
            return str(error)
        finally:
            os.close(opened)
        raise AssertionError("it was started")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with TemporaryDirectory() as sockets:  # a short path: that of a Unix socket has 107 characters at most
        yield Site(tmp_path, Path(sockets))


def warrant_of(start: Start) -> Warrant:
    assert start.launch.warrant is not None
    return start.launch.warrant


# --- the signature --------------------------------------------------------------------------------------------------

LAUNCH = LaunchSpec(("python", "train.py"), "/home/ana", "/ckpt", {"SEED": "7"}, "r1", {"KEY": "/home/ana/key"})
WARRANT = Warrant(GATEWAY, "ana", 2001, (2001, 3000), (GpuId("GPU-0a"),), 1_800_000_000)
#: For each field of a launch another value; of a warrant likewise.
ALTERED: dict[str, object] = {
    "command": ("python", "steal.py"),
    "cwd": "/home/bob",
    "checkpoint_dir": "/home/bob",
    "env": {"SEED": "7", "LD_PRELOAD": "/tmp/evil.so"},
    "run": "r2",
    "secrets": {"KEY": "/home/ana/other"},
    "terminal": Terminal(60.0),
}
ALTERED_WARRANT: dict[str, object] = {
    "gateway": "login2",
    "user": "bob",
    "uid": 2002,
    "gids": (2001, 27),
    "gpus": (GpuId("GPU-0b"),),
    "signed_at_s": 1_800_000_001,
}


def test_what_a_gateway_has_signed_is_taken_for_signed(site: Site) -> None:
    launch = warrants.signed(LAUNCH, WARRANT, site.hand.key, **JOB)
    assert warrants.is_signed(launch, warrants.public_key(site.hand.public), **JOB)


def test_no_field_of_a_launch_can_be_altered_and_no_new_one_is_left_unsigned(site: Site) -> None:
    key = warrants.public_key(site.hand.public)
    launch = warrants.signed(LAUNCH, WARRANT, site.hand.key, **JOB)
    assert launch.warrant is not None
    assert {*ALTERED, "warrant"} == set(LaunchSpec.__struct_fields__)
    assert {*ALTERED_WARRANT, "signature"} == set(Warrant.__struct_fields__)
    for field, value in ALTERED.items():
        assert not warrants.is_signed(replace(launch, **{field: value}), key, **JOB), field
    for field, value in ALTERED_WARRANT.items():
        altered = replace(launch, warrant=replace(launch.warrant, **{field: value}))
        assert not warrants.is_signed(altered, key, **JOB), field
    for field, value in {"app": "ana-2", "job": "ana-1.1", "attempt": 3}.items():
        assert not warrants.is_signed(launch, key, **(JOB | {field: value})), field
    for signature in ("", "00" * 64):
        assert not warrants.is_signed(replace(launch, warrant=replace(launch.warrant, signature=signature)), key, **JOB)


def test_a_launch_with_any_text_in_it_is_signed_and_checked_alike(site: Site) -> None:
    odd = replace(LAUNCH, env={"A": 'ä"\n\u2028\U0001f600', "B": "\\"}, command=("sh", "-c", "echo ''"))
    launch = warrants.signed(odd, WARRANT, site.hand.key, **JOB)
    there = msgspec.json.decode(msgspec.json.encode(launch), type=LaunchSpec)
    assert warrants.is_signed(there, warrants.public_key(site.hand.public), **JOB)


def test_a_key_that_other_users_may_use_or_change_is_refused_with_the_mend(site: Site) -> None:
    assert stat.S_IMODE(site.hand.file.stat().st_mode) == 0o600
    site.hand.file.chmod(0o640)
    with pytest.raises(warrants.WarrantError, match="chmod 600"):
        warrants.private_key(site.hand.file)
    site.hand.public.chmod(0o664)
    with pytest.raises(warrants.WarrantError, match="chmod 644"):
        warrants.public_key(site.hand.public)


def test_a_key_that_is_none_is_refused_with_the_file(site: Site) -> None:
    site.hand.file.write_text("no key")
    with pytest.raises(warrants.WarrantError, match=r"gateway\.key holds no private key"):
        warrants.private_key(site.hand.file)
    with pytest.raises(warrants.WarrantError, match=r"gateway\.key holds no public key"):
        warrants.public_key(site.hand.file)
    with pytest.raises(warrants.WarrantError, match="cannot be written"):
        warrants.make_key(site.hand.file)  # one that is there is never overwritten


# --- what is refused ------------------------------------------------------------------------------------------------


def signed_as(user: str, uid: int, *gids: int) -> Callable[[Site], Start]:
    def make(site: Site) -> Start:
        order = site.hand.sign(task_order(site.folder, "nobody-1.0-a2", "work"), user, uid, gids)
        return site.start(launch=order.launch)

    return make


def aged(age_s: float) -> Callable[[Site], Start]:
    def make(site: Site) -> Start:
        site.now += age_s
        return site.start()

    return make


def by_another_gateway(site: Site) -> Start:
    other = site.folder / "other"
    other.mkdir()
    order = Hand(other).sign(
        task_order(site.folder, "nobody-1.0-a2", "work"), "nobody", NOBODY.pw_uid, (NOBODY.pw_gid,)
    )
    return site.start(launch=order.launch)


def of_an_unknown_gateway(site: Site) -> Start:
    start = site.start()
    return replace(start, launch=replace(start.launch, warrant=replace(warrant_of(start), gateway="login9")))


REFUSED: dict[str, tuple[Callable[[Site], Start], str]] = {
    "not signed": (
        lambda site: site.start(launch=replace(site.start().launch, warrant=None)),
        "is not signed; submit it",
    ),
    "altered": (lambda site: site.start(launch=replace(site.start().launch, cwd="/root")), "was altered"),
    "another job": (lambda site: site.start(job=JobId("nobody-1.1")), "was altered"),
    "another attempt": (lambda site: site.start(attempt=3), "was altered"),
    "another gateway's key": (by_another_gateway, "was altered, or .*login1.pub is not that gateway's newest key"),
    "an unknown gateway": (of_an_unknown_gateway, "the gateway login9 is not known on this node"),
    "old": (aged(4000), r"signed 400[01] s ago; from -60 to 3600 s are allowed; set both clocks by NTP"),
    "ahead": (aged(-500), r"signed -(500|499) s ago; from -60"),
    "root": (signed_as("root", 0), "the user root has the number 0; users below 1000 run no tasks"),
    "a system user": (signed_as("daemon", 1), "users below 1000 run no tasks"),
    "an unknown user": (
        signed_as("nosuchuser", 4711),
        "nosuchuser is not known on this node; make it here with the number",
    ),
    "another number": (
        signed_as("nobody", 4711),
        "has the numbers 65534:65534 on this node and 4711:4711 at the gateway",
    ),
    "root's name": (signed_as("root", 4711), "has the numbers 0:0 on this node"),
    "another group": (signed_as("nobody", NOBODY.pw_uid, 4711), "and 65534:4711 at the gateway"),
    "other GPUs": (lambda site: site.start(gpus=(GpuId("GPU-sim-n1-1"),)), "signed for other GPUs than GPU-sim-n1-1"),
    "code": (lambda site: site.start(env={"LD_PRELOAD": "/tmp/x.so"}), "may not set the variable LD_PRELOAD"),
    "a path to code": (lambda site: site.start(env={"PYTHONPATH": "/tmp"}), "may not set the variable PYTHONPATH"),
    "a folder": (
        lambda site: site.start(env={"GPU_ARBITER_MEMORY_DIR": "/"}),
        "may not set the variable GPU_ARBITER_MEM",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_launch_that_no_gateway_vouches_for_here_and_now_is_refused_and_not_started(site: Site, what: str) -> None:
    make, says = REFUSED[what]
    said = site.ask(make(site))
    assert re.search(says, said), said
    assert site.systemd.started == []


def test_a_user_who_has_more_rights_here_than_at_the_gateway_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid, 0])
    assert "the user nobody is in the group root on this node and not at the gateway" in site.ask(site.start())
    assert site.systemd.started == []


@needs_root
def test_an_administrator_may_allow_a_group_of_the_node(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid, 0])
    assert "it refuses" in site.ask(site.start(), site.made(groups=("root",)))
    assert len(site.systemd.started) == 1


@needs_root
def test_an_attempt_is_started_once_also_by_the_next_launcher(site: Site) -> None:
    start = site.start()
    mark = site.launcher._mark(start, warrant_of(start))
    for launcher in (site.launcher, site.made()):
        assert site.ask(start, launcher) == "the attempt 2 of nobody-1.0 was started on this node before"
    assert site.systemd.started == []
    mark.unlink()
    assert "it refuses" in site.ask(start)


@needs_root
def test_an_attempt_that_systemd_did_not_start_may_be_started_later(site: Site) -> None:
    start = site.start()
    assert "it refuses" in site.ask(start)
    assert "it refuses" in site.ask(start)
    assert len(site.systemd.started) == 2


@needs_root
def test_an_attempt_that_was_signed_again_later_is_not_started_again(site: Site) -> None:
    """A gateway signs the launch of a task anew every quarter of an hour, as it may still have to be started."""
    mark = site.launcher._mark(start := site.start(), warrant_of(start))
    for _ in range(3):
        site.now += 10 * 86400.0 - 1.0
        site.launcher._prune()
        again = site.start(age_s=time.time() - site.now)
        assert site.ask(again) == "the attempt 2 of nobody-1.0 was started on this node before"
    site.now += 60.0
    site.launcher._prune()
    assert not mark.exists()


@needs_root
def test_no_file_but_the_node_agents_own_is_given_to_a_user(site: Site) -> None:
    theirs = site.folder / "theirs"
    theirs.touch()
    os.chown(theirs, NOBODY.pw_uid, 0)
    for path in (theirs, Path("/dev/null")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            assert site.ask(site.start(), log=descriptor) == "the log of the task is no file of the node agent's own"
        finally:
            os.close(descriptor)
    assert theirs.stat().st_gid == 0


@needs_root
def test_a_unit_has_its_user_bounds_and_nothing_of_the_users_program_on_its_command_line(site: Site) -> None:
    site.ask(site.start(memory_bytes=2**30, cpus=(0, 2)))
    (line,) = site.systemd.started
    wanted = {"User=nobody", f"Group={NOBODY.pw_gid}", "DevicePolicy=closed", "NoNewPrivileges=yes"}
    assert wanted | {"MemoryMax=1073741824", "AllowedCPUs=0,2"} <= set(line)
    assert line[line.index("--slice") + 1] == "gpu-arbiter.slice"
    assert "hand_worker" not in " ".join(line)


def test_a_request_of_any_other_shape_is_no_request(site: Site) -> None:
    for line in (b"{}", b"[]", b'{"type":"start"}', b'{"type":"signal","key":"../x","how":"kill"}', b"\xff"):
        with pytest.raises(msgspec.DecodeError):
            site.launcher.answer(line, [], lambda reply: None)


# --- the driver's checkpoint ----------------------------------------------------------------------------------------

TASK, HELPER = (f"gpu-arbiter-{name}0a0a0a0a-0a0a0a0a0a0a0a0a.service" for name in ("", "driver-"))
OF_TASK = """MainPID=7
ControlGroup=/a.slice/task.service
User=nobody
DeviceAllow=/dev/null rw
DeviceAllow=/dev/zero rw
AllowedCPUs=0 2-3
"""


class TaskAndHelper(Systemd):
    """Knows the unit of a task, and starts nothing either; the unit of an earlier helper goes after `earlier` tries."""

    earlier = 0

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        if command[0] == "systemd-run" and self.earlier:
            self.earlier -= 1
            return subprocess.CompletedProcess(list(command), 1, "", "Unit x.service was already loaded")
        if command[:2] == ["systemctl", "show"]:
            return subprocess.CompletedProcess(list(command), 0, OF_TASK, "")
        return super().__call__(command)


def drive(
    site: Site, *pids: int, descriptors: int = 1, systemd: TaskAndHelper | None = None
) -> tuple[str, list[list[str]]]:
    """Why the driver was not asked for these processes, and what was to be started for it; 7 is one of the task's."""
    for pid, group in {7: "/a.slice/task.service", 8: "/a.slice/task.service", 9: "/a.slice/other.service"}.items():
        (site.folder / f"proc/{pid}").mkdir(parents=True, exist_ok=True)
        (site.folder / f"proc/{pid}/cgroup").write_text(f"0::{group}\n")
    systemd = systemd or TaskAndHelper()
    launcher = Launcher(site.config, Units(systemd, site.folder / "proc"))
    line = msgspec.json.encode(Drive("0a0a0a0a-0a0a0a0a0a0a0a0a", "suspend", 5.0, pids, 1.0)) + b"\n"
    why = ""
    try:
        launcher.answer(line, [0] * descriptors, lambda reply: None)
    except (Refused, UnitError) as error:
        why = str(error)
    return why, systemd.started


@pytest.mark.parametrize("pids", [(9,), (7, 9), (10,), (7, 9, 10)])
def test_the_driver_is_asked_for_no_process_but_the_tasks(site: Site, pids: tuple[int, ...]) -> None:
    why, started = drive(site, *pids)
    assert why.endswith("alone, and one of these is none")
    assert started == []


@pytest.mark.parametrize("pids", [(7, 10), (10, 8, 7)])
def test_a_process_that_has_ended_keeps_the_driver_from_none_of_the_others(
    site: Site, pids: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[Drive] = []
    monkeypatch.setattr(Launcher, "_begun", lambda *_: nullcontext())
    monkeypatch.setattr(service, "_hand_over", lambda helper, drive, descriptors: handed.append(drive))
    assert drive(site, *pids) == ("", [])
    assert handed[0].pids == tuple(pid for pid in pids if pid != 10)


@needs_root
def test_the_drivers_helper_has_the_user_and_the_devices_of_the_task_a_time_and_no_right(site: Site) -> None:
    why, (line,) = drive(site, 7, 8)
    assert "it refuses" in why
    wanted = {"User=nobody", f"Group={NOBODY.pw_gid}", "DevicePolicy=closed", "NoNewPrivileges=yes"}
    assert wanted | {"DeviceAllow=/dev/null rw", "DeviceAllow=/dev/zero rw", "RuntimeMaxSec=5.0"} <= set(line)
    assert {"AllowedCPUs=0 2-3", "MemoryMax=1G"} <= set(line)
    assert not [word for word in line if "Capabilities" in word]


@needs_root
def test_the_drivers_helper_ends_with_the_task_which_has_one_at_most(site: Site) -> None:
    systemd = TaskAndHelper()
    systemd.earlier = 2
    _, (line,) = drive(site, 7, systemd=systemd)
    assert {f"BindsTo={TASK}", f"After={TASK}", "KillSignal=SIGKILL"} <= set(line)
    assert line[line.index("--unit") + 1] == HELPER, "systemd has one unit of a name"


@pytest.mark.parametrize("count", [0, 2])
def test_a_question_to_the_driver_comes_with_one_descriptor(site: Site, count: int) -> None:
    assert drive(site, 7, descriptors=count) == (f"a helper needs one descriptor, and {count} came", [])


def test_the_user_of_a_task_may_be_gone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.OF_TASK", OF_TASK.replace("nobody", "nosuchuser"))
    why, started = drive(site, 7)
    assert (why.startswith("the user nosuchuser is not known on this node"), started) == (True, [])


@pytest.mark.parametrize(
    "question",
    [
        {"timeout_s": 3601.0, "pids": (7,)},
        {"timeout_s": 5.0, "pids": ()},
        {"timeout_s": 5.0, "pids": tuple(range(1, 4098))},
    ],
)
def test_a_question_to_the_driver_has_bounds(question: dict[str, object]) -> None:
    words = {"type": "drive", "key": "0a0a0a0a-0a0a0a0a0a0a0a0a", "do": "suspend", **question}
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(words), type=Drive)


def test_the_end_of_a_task_is_that_of_its_helper_too() -> None:
    ran: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(list(command), 0, "", "")

    Units(run).end("0a0a0a0a-0a0a0a0a0a0a0a0a")
    assert ran[-1][-2:] == [TASK, HELPER]


def keep(site: Site, **changes: object) -> tuple[str, list[list[str]]]:
    """Ask for the checkpoint in memory of the attempt of `site.start`; what came of it, and what was to start."""
    launcher, systemd = site.made(memory_dir=str(site.folder / "memory")), site.systemd
    systemd.started.clear()
    told: dict[str, object] = {"gateway": GATEWAY, "run": "", "job": "nobody-1.0", "attempt": 2} | changes
    words = {"type": "keep", "key": "0a0a0a0a-0a0a0a0a0a0a0a0a", "do": "flush", **told}
    try:
        launcher.answer(msgspec.json.encode(words) + b"\n", [0], lambda reply: None)
    except (Refused, UnitError) as error:
        return str(error), systemd.started
    raise AssertionError("it was started")


@needs_root
def test_a_checkpoint_in_memory_is_for_a_helper_of_its_user_and_only_of_an_attempt_that_was_started_here(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = site.launcher._mark(start := site.start(), warrant_of(start))
    handed: list[Keeping] = []
    why, (line,) = keep(site)
    assert "it refuses" in why
    assert {"User=nobody", "DevicePolicy=closed", "NoNewPrivileges=yes", "RuntimeMaxSec=1h", "MemoryMax=1G"} <= set(
        line
    )
    for other in ({"gateway": "login2"}, {"run": "r2"}, {"job": "nobody-1.1"}, {"attempt": 1}):
        why, started = keep(site, **other)
        assert (why.startswith("no attempt "), started) == (True, []), other
    monkeypatch.setattr(Launcher, "_begun", lambda *_: nullcontext())
    monkeypatch.setattr(service, "_hand_over", lambda helper, asked, descriptors: handed.append(asked))
    with pytest.raises(AssertionError, match="it was started"):
        keep(site)
    assert (handed[0].folder, handed[0].checkpoint_dir) == (
        str(site.folder / f"memory/{NOBODY.pw_uid}"),
        start.launch.checkpoint_dir,
    ), "both follow from the mark"
    mark.unlink()
    assert keep(site)[0].startswith("no attempt ")


@needs_root
def test_a_folder_in_memory_is_closed_to_other_users_and_one_of_another_users_is_refused(site: Site) -> None:
    memory = site.folder / "memory"
    launcher = site.made(memory_dir=str(memory))
    variable = launcher._room(site.start(memory_dir=True), NOBODY)["GPU_ARBITER_MEMORY_DIR"]
    own = memory / str(NOBODY.pw_uid)
    assert Path(variable).parent == own
    assert [(stat.S_IMODE(path.stat().st_mode), path.stat().st_uid) for path in (memory, own)] == [
        (0o711, 0),
        (0o700, NOBODY.pw_uid),
    ]
    assert launcher._room(site.start(), NOBODY) == {}
    assert site.launcher._room(site.start(memory_dir=True), NOBODY) == {}
    os.chown(memory, NOBODY.pw_uid, -1)
    with pytest.raises(ConfigError, match=f"{memory} cannot be made: it is another user's; name another folder"):
        site.made(memory_dir=str(memory))


def test_no_request_opens_other_gpus_for_a_task_than_those_of_its_signed_lease(site: Site) -> None:
    request = {"type": "reopen", "key": "0a0a0a0a-0a0a0a0a0a0a0a0a", "gpus": ["GPU-9"]}
    with pytest.raises(msgspec.DecodeError, match="reopen"):
        site.launcher.answer(msgspec.json.encode(request) + b"\n", (), lambda reply: None)


# --- devices, the supervisor's word ---------------------------------------------------------------------------------


def test_the_device_files_are_those_of_the_named_gpus(tmp_path: Path) -> None:
    for number, uuid in enumerate(("GPU-aa", "GPU-bb")):
        folder = tmp_path / f"driver/nvidia/gpus/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t H100\nGPU UUID: \t {uuid}\nDevice Minor: \t {number}\n")
    assert device_files({"GPU-bb"}, (), tmp_path)[0] == "/dev/nvidia1"
    assert "/dev/nvidia0" not in device_files({"GPU-bb"}, (), tmp_path)
    assert device_files({"GPU-sim-0"}, ("/dev/nul*",), tmp_path) == ["/dev/null"]


def test_a_supervisor_can_name_no_process_but_its_child(site: Site) -> None:
    reply = Reply(shim=os.getpid(), shim_ticks=7)
    init = f'{{"pid": 1, "start_ticks": {service._start_ticks(1)}, "shim": 1, "shim_ticks": 1}}'
    assert _believed(init.encode(), reply).pid == os.getpid()
    assert _believed(b"no JSON\n", reply).pid == os.getpid()
    child = subprocess.Popen(["/bin/sleep", "60"])
    try:
        ticks = service._start_ticks(child.pid)
        told = f'{{"pid": {child.pid}, "start_ticks": {ticks}, "shim": 1, "shim_ticks": 1}}'
        believed = _believed(told.encode(), reply)
        assert (believed.pid, believed.shim, believed.shim_ticks) == (child.pid, os.getpid(), 7)
    finally:
        child.kill()
        child.wait()


def test_what_a_user_writes_into_the_record_of_an_end_cannot_harm_the_node(tmp_path: Path) -> None:
    path = tmp_path / "exit.json"
    path.write_text('{"code": 0, "finished": {"task": "nobody-1.0-a2", "step": 9, "metrics": {"loss": 0.5}}}')
    ended = Record(tmp_path).exit
    assert ended is not None
    assert ended.finish == FinishedFile("nobody-1.0-a2", step=9, metrics={"loss": 0.5})
    # No report could carry it: the number would end the node agent, and the arbiter would refuse its reports.
    for forged in (
        f'{{"code": {10**30}}}',
        '{"code": 0, "lived_s": -1e400}',
        '{"code": 0, "lived_s": -1e300}',
        '{"signal": 999}',
        f'{{"code": 0, "x": {"[" * 10**5}',
    ):
        path.write_text(forged)
        assert Record(tmp_path).exit is None
    for word in ('{"task": "a", "step": 1e30}', f'{{"task": "a", "metrics": {{"{"m" * 300}": 1}}}}', "7"):
        path.write_text(f'{{"code": 0, "finished": {word}}}')
        assert Record(tmp_path).exit is not None
        assert Record(tmp_path).exit.finish is None
    path.write_text('{"code": 0}' + " " * EXIT_BYTES_MAX)  # whole, and longer than any that a supervisor writes
    assert Record(tmp_path).exit is None


RECEIVING = """
import json, os, sys
from node_agent.workers import shim, supervisors
spec = shim.receive(sys.argv[1])
os.write(1, json.dumps(spec["env"]).encode())
"""


@pytest.mark.parametrize(
    ("more", "path"),
    [({"bootstrap_dir": "/boot"}, "/boot:/mine"), ({"bootstrap_dir": ""}, "/mine"), ({}, "/mine")],
    ids=["a folder", "none", "of the version before"],
)
def test_a_task_begins_with_the_variables_of_a_login_then_its_own_and_the_bootstrap_folder_first(
    tmp_path: Path, more: dict[str, str], path: str
) -> None:
    payload = {"reader": NOBODY.pw_name, "env": {"PYTHONPATH": "/mine", "LANG": "de", "SHELL": "/bin/own"}, **more}
    out_read, out_write = os.pipe()
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen()
        with subprocess.Popen([sys.executable, "-c", RECEIVING, f"{folder}/s"]):
            with listener.accept()[0] as supervisor:
                socket.send_fds(supervisor, [msgspec.json.encode(payload)], [out_write] * 4)
            os.close(out_write)
            with os.fdopen(out_read, "rb") as out:
                env = msgspec.json.decode(out.read())
    wanted = {"HOME": NOBODY.pw_dir, "USER": "nobody", "LOGNAME": "nobody", "LANG": "de", "SHELL": "/bin/own"}
    assert env == wanted | {"PATH": shim.LOGIN_PATH, "PYTHONPATH": path}


def test_a_record_of_an_end_that_a_user_fills_is_emptied(tmp_path: Path) -> None:
    records = Records(tmp_path)
    for name, size in (("a", EXIT_BYTES_MAX), ("b", EXIT_BYTES_MAX + 1)):
        (tmp_path / "workers" / name).mkdir()
        (tmp_path / "workers" / name / "exit.json").write_bytes(bytes(size))
    take_room(tmp_path / "workers/a/exit.json", 8 * EXIT_BYTES_MAX)  # which its size does not show
    records.bound()
    assert [(tmp_path / f"workers/{name}/exit.json").stat().st_size for name in "ab"] == [0, 0]
    (tmp_path / "workers/a/exit.json").write_bytes(bytes(EXIT_BYTES_MAX))
    records.bound()
    assert (tmp_path / "workers/a/exit.json").stat().st_size == EXIT_BYTES_MAX, "what a supervisor writes is kept"


def test_a_supervisor_can_write_nothing_into_the_lock_of_its_record(tmp_path: Path) -> None:
    (tmp_path / "workers/a").mkdir(parents=True)
    record, modes = Record(tmp_path / "workers/a"), list[int]()

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            _, descriptors, _, _ = socket.recv_fds(connection, 2**16, DESCRIPTORS)
            modes.extend(fcntl.fcntl(each, fcntl.F_GETFL) & os.O_ACCMODE for each in descriptors)
            connection.sendall(msgspec.json.encode(Reply(error="no")) + b"\n")
            for each in descriptors:
                os.close(each)

    start = Start("0a0a0a0a-0a0a0a0a0a0a0a0a", "n1", AppId("a"), JobId("a.0"), 0, (GpuId("GPU-0"),), LAUNCH)
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/l.sock")
        listener.listen()
        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(CannotStart, match="refused it: no"):
            supervisors.Launcher(Path(folder, "l.sock")).start(start, tmp_path / "log", record, print)
        answering.join()
    log, end, lock, pipe = modes
    assert (log, end, lock, pipe) == (os.O_WRONLY, os.O_RDWR, os.O_RDONLY, os.O_WRONLY)
    assert not record.alive, "it is let go"


@pytest.mark.parametrize("heard", [False, True])
def test_a_launcher_that_ends_before_it_has_answered_is_asked_once_more(tmp_path: Path, heard: bool) -> None:
    """One that stood still is ended by systemd, with all requests that wait for it; the next one answers."""

    def end_and_answer() -> None:
        listener, requests = listening(), list[bytes]()
        connection, _ = listener.accept()
        requests += [connection.makefile("rb").readline()] * heard
        listener.close()
        connection.close()
        (tmp_path / "l.sock").unlink()
        with listening() as following:
            connection, _ = following.accept()
            with connection:
                requests.append(connection.makefile("rb").readline())
                connection.sendall(msgspec.json.encode(Reply(keys=("0a0a0a0a-0a0a0a0a0a0a0a0a",))) + b"\n")
        told.append(requests)

    def listening() -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "l.sock"))
        listener.listen()
        return listener

    told = list[list[bytes]]()
    ending = threading.Thread(target=end_and_answer, daemon=True)
    ending.start()
    reply = supervisors.Launcher(tmp_path / "l.sock")._ask(Living("0a0a0a0a"))
    ending.join()
    assert reply.keys == ("0a0a0a0a-0a0a0a0a0a0a0a0a",)
    assert len(set(told[0])) == 1, "the same request"


def test_a_launcher_that_nobody_asks_anything_gives_its_signs_of_life(
    monkeypatch: pytest.MonkeyPatch, site: Site
) -> None:
    monkeypatch.setattr(service, "PATIENCE_S", 0.01)
    monkeypatch.setattr(service.os, "geteuid", lambda: 0)
    signs = count(1)

    def sign() -> None:
        if next(signs) == 5:
            raise EndOfTestError

    with pytest.raises(EndOfTestError), TemporaryDirectory() as folder:
        service.serve(replace(site.config, socket=f"{folder}/l.sock"), on_alive=sign)


class EndOfTestError(Exception):
    """No fault of a launcher's."""


# --- the service itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"uid_min": 999}, "uid_min is 999; write 1000 or more"),
        ({"socket": "l.sock"}, "socket 'l.sock' is no full path"),
        ({"devices": ("/etc/shadow",)}, "devices has '/etc/shadow'; write patterns of files below /dev"),
        ({"age_max_s": 0.0}, "age_max_s"),
        ({"bootstrap_dir": "/no/such"}, "bootstrap_dir /no/such is no folder"),
    ],
)
def test_settings_that_would_give_root_away_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config.check(replace(LauncherConfig(), **settings), "launcher.toml")


NODE = NodeConfig(node="n1", gpus="nvml", launcher="/run/l.sock", runtime_dir="/run/n", driver_checkpoint="on")


@pytest.mark.parametrize(
    ("field", "value"),
    [("mps", "all"), ("containment", "cgroup"), ("gpus", "simulated:2")],
)
def test_settings_of_a_node_that_serve_one_user_only_are_refused_with_a_launcher(field: str, value: str) -> None:
    node_config.check(NODE, "node.toml")
    with pytest.raises(ConfigError, match=r"and launcher do not go together: .*; leave"):
        node_config.check(replace(NODE, **{field: value}), "node.toml")


def test_a_folder_of_keys_that_others_may_write_to_is_refused(site: Site) -> None:
    keys = Path(site.config.keys)
    keys.chmod(0o777)
    with pytest.raises(ConfigError, match=rf"other users may write to keys {keys};.*chmod go-w"):
        site.made()
    keys.chmod(0o755)
    site.made()
    key = next(keys.glob("*.pub"))
    key.chmod(0o666)
    with pytest.raises(ConfigError, match=f"other users may write to keys {key}; run: chown root {key}; chmod go-w"):
        site.made()
    key.chmod(0o644)
    if not os.geteuid():
        os.chown(key, NOBODY.pw_uid, -1)
        with pytest.raises(ConfigError, match=f"other users may write to keys {key}"):
            site.made()
    with pytest.raises(ConfigError, match=r"copy the [.]pub file of each gateway there"):
        site.made(keys="/no/such")
    with pytest.raises(ConfigError, match="node_user 'nosuchuser' is no user here"):
        site.made(node_user="nosuchuser")


def test_the_root_service_is_short_and_imports_little() -> None:
    program = "import sys, node_agent.launcher.service; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()} - set(sys.stdlib_module_names)
    loaded = {name for name in loaded if not name.startswith(("_", "sphinx", "cython_runtime"))}
    loaded -= {"sitecustomize", "usercustomize"}  # the host's own
    assert loaded <= {"node_agent", "protocol", "msgspec", "msgpack", "typing_extensions"}
    ours = {name for name in done.stdout.split() if name.startswith("node_agent.")}
    assert ours == {f"node_agent.launcher{part}" for part in ("", ".config", ".requests", ".service", ".units")}
    # The code that acts as root; settings and requests are declarations, which the types check.
    assert sum(code_lines(Path(module.__file__)) for module in (service, units)) <= 400


def code_lines(path: Path) -> int:
    """The lines of a file that hold code: no blank ones, comments and docstrings."""
    text = path.read_text()
    strings = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    prose = {line for one in strings if isinstance(one, ast.Constant) for line in range(one.lineno, one.end_lineno + 1)}
    lines = (line.strip() for number, line in enumerate(text.splitlines(), 1) if number not in prose)
    return sum(bool(line) and not line.startswith("#") for line in lines)
