"""The launcher's service: takes requests of the node agent, believes gateways only, and starts tasks as their users.

The node agent says where and when a task runs, and with how much memory. A gateway's signature says what runs, as which
user, and on which GPUs it may. The launcher starts it once, and soon:

1. The signature covers the program, its environment, its folders, the user, the attempt and the GPUs.
2. An attempt is started once on a node. A mark of each is on the disk before it starts, and is kept for 30 days.
3. The user is known on this node by the same name and number, is no system user, and gets no group here that the
   gateway does not know it in.
4. The task's supervisor (`node_agent.workers.shim`) runs as the user, in a unit of its own. It is no child of the node
   agent or of this service, so a restart of either does not touch it.

For a task that runs it also starts the helper that has the driver checkpoint it: as the user, in a unit with the
devices of the task and a time. Another helper, likewise, copies a checkpoint that an attempt has left in memory to the
folder that was signed for it.

It holds no state but the marks. Each connection is one request, answered in a thread of its own.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2s
from pathlib import Path

import msgspec
from msgspec.structs import replace

from node_agent.launcher import requests
from node_agent.launcher.config import LauncherConfig, check_keys, node_uid
from node_agent.launcher.requests import Drive, Keep, Keeping, Living, Marked, Payload, Reply, Request, Signal, Start
from node_agent.launcher.units import UnitError, Units, allowing, device_files, unit
from protocol import warrants
from protocol.config import ConfigError
from protocol.messages import LaunchSpec, Warrant, device_of
from protocol.worker import ENVIRONMENT, memory_name

WORKERS = Path(__file__).parents[1] / "workers"
SHIM, HELPER = ("-I", "-S", str(WORKERS / "shim.py")), ("-I", str(WORKERS / "driver_helper.py"))
KEEPER = ("-I", str(WORKERS / "memory_helper.py"))
#: The memory of a suspended GPU is the task's. A helper that is stopped has nothing to tidy up.
HELPER_LIMITS = ("KillSignal=SIGKILL", "MemoryMax=1G")
#: For the node agent to send a request, and for a program to connect once its unit is started. Half of `WatchdogSec`.
PATIENCE_S = 30.0
CONNECTIONS_MAX = 64
MARKS_KEPT_S = 30 * 86400.0
#: The variables that a node agent may give a task: those of the worker contract, and for virtual GPUs. None of them
#: names code that the task would load, or a folder in which it would remove files.
VIRTUAL = "MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_ THP_MEM_ALLOC_ENABLE OMP_NUM_THREADS MKL_NUM_THREADS"
NODE_VARIABLES = (ENVIRONMENT.keys() - {"GPU_ARBITER_MEMORY_DIR"}).union(VIRTUAL.split())


#: A helper: the key of its unit, its user, its limits, its program, and what it is asked.
_Helper = tuple[str, str, Sequence[str], Sequence[str], Drive | Keeping]


class Refused(Exception):  # noqa: N818 - an expected no, told as a sentence
    """A request is refused; the message says why, and the mend."""


class Launcher:
    """Checks requests and carries them out.

    Parameters
    ----------
    config
        Its settings.
    units
        systemd's units.
    clock
        UNIX time in seconds.

    Raises
    ------
    ConfigError
        If the node agent's user, the folder of keys or that of marks is not as it must be.
    """

    def __init__(self, config: LauncherConfig, units: Units, clock: Callable[[], float] = time.time) -> None:
        self._config, self._units, self._clock = config, units, clock
        self.node_uid = node_uid(config)
        check_keys(Path(config.keys))
        self._marks = Path(config.state_dir) / "started"
        try:
            self._marks.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._starts = _passage(Path(config.socket).parent / "starts")
            self._memory = _passage(Path(config.memory_dir)) if config.memory_dir else None
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be made: {error.strerror}; name another folder") from error

    def answer(self, line: bytes, descriptors: Sequence[int], answer: Callable[[Reply], None]) -> None:
        """Carry out the request in `line`, and answer it once.

        Raises
        ------
        Refused, UnitError, msgspec.DecodeError
            If it was not carried out, and not answered.
        """
        match msgspec.json.decode(line, type=Request):
            case Start() as start:
                self._start(start, descriptors, answer)
            case Signal(key, how):
                getattr(self._units, how)(key)
                answer(Reply())
            case Drive() as drive:
                self._help(self._driving(drive), descriptors, answer)
            case Keep() as keep:
                self._help(self._keeping(keep), descriptors, answer)
            case Living(owner):
                answer(Reply(keys=tuple(self._units.living(owner))))

    # --- starting ---------------------------------------------------------------------------------------------------

    def _start(self, start: Start, descriptors: Sequence[int], answer: Callable[[Reply], None]) -> None:
        user, warrant = self._check(start)
        if len(descriptors) != (needed := requests.DESCRIPTORS + (start.launch.terminal is not None)):
            raise Refused(f"a task needs {needed} descriptors, and {len(descriptors)} came")
        _give_log(descriptors[0], self.node_uid, user.pw_gid)
        mark = self._mark(start, warrant)
        with ExitStack() as undoing:
            undoing.callback(mark.unlink)
            with self._begun(start.key, user, self._properties(start), SHIM) as supervisor:
                undoing.pop_all()  # from here on something of the user's may run
                pid = _peer(supervisor)[0]
                answer(Reply(shim=pid, shim_ticks=_start_ticks(pid)))
                _hand_over(supervisor, self._payload(start, user), descriptors)
        _log("task.started", task=f"{start.job}-a{start.attempt}", user=user.pw_name, unit=start.key, shim=pid)

    @contextmanager
    def _begun(
        self, key: str, user: pwd.struct_passwd, properties: Sequence[str], program: Sequence[str]
    ) -> Iterator[socket.socket]:
        """Start a program of ours as `user` in a unit, and yield its connection; without one the unit is ended.

        The connection of another process of the user's is none.
        """
        with _listening(path := self._starts / f"{key}.sock", user.pw_uid) as listener, ExitStack() as undoing:
            self._units.start(key, user.pw_name, user.pw_gid, properties, [sys.executable, *program, str(path)])
            undoing.callback(self._units.end, key)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise Refused(f"no word came within {PATIENCE_S:g} s; see journalctl -u {unit(key)}") from None
            with connection:
                if _peer(connection) != (self._units.standing(key).main, user.pw_uid):
                    raise Refused(f"another process spoke in place of that of {unit(key)}")
                connection.settimeout(PATIENCE_S)
                undoing.pop_all()
                yield connection

    def _help(self, helper: _Helper, descriptors: Sequence[int], answer: Callable[[Reply], None]) -> None:
        key, user, limits, program, asked = helper
        if len(descriptors) != 1:
            raise Refused(f"a helper needs one descriptor, and {len(descriptors)} came")
        with self._begun(key, _known(user), (*HELPER_LIMITS, *limits), program) as connection:
            answer(Reply())
            _hand_over(connection, asked, descriptors)

    def _driving(self, drive: Drive) -> _Helper:
        """Return the helper for the driver, which runs as the user of a task that runs, with the devices of that task.

        It has no right of root's, so the kernel keeps it from the processes of other users. Processes that have ended
        by now are left out. It ends with the task, and systemd has one unit of a name: a task has one helper at most.
        """
        task, name = self._units.standing(drive.key), unit(drive.key)
        found = {pid: self._units.is_member(pid, task.group) for pid in drive.pids}
        if False in found.values() or not any(found.values()):
            raise Refused(f"the driver is asked for processes of {name} alone, and one of these is none")
        limits = (f"RuntimeMaxSec={drive.timeout_s}", f"BindsTo={name}", f"After={name}", *task.bounds)
        return f"driver-{drive.key}", task.user, limits, HELPER, replace(drive, pids=tuple(filter(found.get, found)))

    def _keeping(self, keep: Keep) -> _Helper:
        """Return the helper for a checkpoint in memory, which runs as the user of an attempt that was started here.

        The folders are those of that user and of what was signed, so a node agent can name none.
        """
        mark = self._mark_of(keep.gateway, keep.run, keep.job, keep.attempt)
        if self._memory is None or not mark.exists():
            raise Refused(f"no attempt {keep.attempt} of {keep.job} was started here that may use memory_dir")
        attempt = msgspec.json.decode(mark.read_bytes(), type=Marked)
        asked = Keeping(str(self._memory / str(attempt.uid)), attempt.checkpoint_dir, keep)
        return f"memory-{keep.key}", attempt.user, ("RuntimeMaxSec=1h",), KEEPER, asked

    def _check(self, start: Start) -> tuple[pwd.struct_passwd, Warrant]:
        """Return the user that the task runs as, and the gateway's warrant for it.

        Raises
        ------
        Refused
            If the launch is not what a gateway has signed, or its user may not run it here and now.
        """
        warrant = start.launch.warrant
        if warrant is None:
            raise Refused("the launch is not signed; submit it through a gateway, this node runs no other")
        self._check_signature(start, warrant)
        self._check_age(warrant)
        if others := set(map(device_of, start.gpus)) - set(map(device_of, warrant.gpus)):
            raise Refused(f"the launch is signed for other GPUs than {min(others)}")
        if foreign := set(start.env) - NODE_VARIABLES:
            raise Refused(f"a node agent may not set the variable {min(foreign)} of a task")
        return self._user(warrant), warrant

    def _check_signature(self, start: Start, warrant: Warrant) -> None:
        file = Path(self._config.keys) / f"{warrant.gateway}.pub"
        try:
            key = warrants.public_key(file)
        except warrants.WarrantError as error:
            raise Refused(f"the gateway {warrant.gateway} is not known on this node: {error}") from error
        if not warrants.is_signed(start.launch, key, app=start.app, job=start.job, attempt=start.attempt):
            raise Refused(
                f"the launch of {start.job} does not bear the signature of the gateway {warrant.gateway}: it was "
                f"altered, or {file} is not that gateway's newest key"
            )

    def _check_age(self, warrant: Warrant) -> None:
        age_s, config = self._clock() - warrant.signed_at_s, self._config
        if not -config.skew_max_s <= age_s <= config.age_max_s:
            raise Refused(
                f"by the clocks of the gateway {warrant.gateway} and of this node the launch was signed {age_s:.0f} "
                f"s ago; from {-config.skew_max_s:g} to {config.age_max_s:g} s are allowed; set both clocks by NTP"
            )

    def _user(self, warrant: Warrant) -> pwd.struct_passwd:
        if warrant.uid < self._config.uid_min:
            raise Refused(
                f"the user {warrant.user} has the number {warrant.uid}; users below {self._config.uid_min} run no tasks"
            )
        user = _known(warrant.user)
        if (user.pw_uid, user.pw_gid) != (warrant.uid, warrant.gids[0]):
            raise Refused(
                f"the user {warrant.user} has the numbers {user.pw_uid}:{user.pw_gid} on this node and "
                f"{warrant.uid}:{warrant.gids[0]} at the gateway {warrant.gateway}; give it the same on both"
            )
        here = set(os.getgrouplist(user.pw_name, user.pw_gid)) - set(warrant.gids)
        if surplus := {_group(gid) for gid in here} - set(self._config.groups):
            raise Refused(
                f"the user {warrant.user} is in the group {min(surplus)} on this node and not at the gateway; take it "
                "out, or add the group to `groups` in launcher.toml"
            )
        return user

    def _mark(self, start: Start, warrant: Warrant) -> Path:
        """Mark an attempt as started, on the disk; raises `Refused` if it was before."""
        self._prune()
        path = self._mark_of(warrant.gateway, start.launch.run, start.job, start.attempt)
        try:
            with path.open("xb") as mark:  # in a folder that root alone enters
                mark.write(msgspec.json.encode(Marked(warrant.user, warrant.uid, start.launch.checkpoint_dir)))
        except FileExistsError:
            raise Refused(f"the attempt {start.attempt} of {start.job} was started on this node before") from None
        folder = os.open(self._marks, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.fsync(folder)
        os.close(folder)
        return path

    def _mark_of(self, gateway: str, run: str, job: str, attempt: int) -> Path:
        name = "\n".join((gateway, run, job, str(attempt)))
        return self._marks / blake2s(name.encode(), digest_size=16).hexdigest()

    def _prune(self) -> None:
        """Remove old marks; a gateway signs a launch again and again while its task may still have to be started."""
        oldest = self._clock() - max(MARKS_KEPT_S, self._config.age_max_s + self._config.skew_max_s)
        for path in self._marks.iterdir():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < oldest:
                    path.unlink()

    def _properties(self, start: Start) -> list[str]:
        bounds = {"MemoryMax": start.memory_bytes, "AllowedCPUs": ",".join(map(str, start.cpus))}
        devices = allowing(device_files(set(map(device_of, start.gpus)), self._config.devices))
        return [*(f"{name}={value}" for name, value in bounds.items() if value), *devices]

    def _payload(self, start: Start, user: pwd.struct_passwd) -> Payload:
        launch = start.launch
        ours = start.env | _identity(start, launch) | self._room(start, user)
        secrets = {name: file for name, file in launch.secrets.items() if name not in ours}
        told = (user.pw_name, start.node, launch.terminal is not None, self._config.bootstrap_dir)
        return Payload(launch.command, launch.cwd, launch.checkpoint_dir, launch.env | ours, secrets, start.cpus, *told)

    def _room(self, start: Start, user: pwd.struct_passwd) -> dict[str, str]:
        """Return the variable with the folder in memory of a job's checkpoints; none where memory is full."""
        if self._memory is not None and start.memory_dir:
            with suppress(OSError):
                (own := self._memory / str(user.pw_uid)).mkdir(mode=0o700, exist_ok=True)
                os.chown(own, user.pw_uid, user.pw_gid)
                return {"GPU_ARBITER_MEMORY_DIR": str(own / memory_name(start.job, start.launch.run))}
        return {}


def _identity(start: Start, launch: LaunchSpec) -> dict[str, str]:
    """Return the variables of the worker contract that follow from what was signed."""
    return {
        "GPU_ARBITER_JOB": start.job,
        "GPU_ARBITER_ATTEMPT": str(start.attempt),
        "GPU_ARBITER_RUN": launch.run,
        "GPU_ARBITER_CHECKPOINT_DIR": launch.checkpoint_dir,
    }


def _known(name: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise Refused(f"the user {name} is not known on this node; make it here with the number at gateways") from None


def _passage(folder: Path) -> Path:
    """Make a folder of our own through which users pass to what is theirs; raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder.lstat().st_uid != os.geteuid():
        raise PermissionError(0, "it is another user's", str(folder))
    folder.chmod(0o711)
    return folder


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _give_log(log: int, node_uid: int, gid: int) -> None:
    """Let the user's group write to a log of the node agent's, which no path leads the user to.

    Raises
    ------
    Refused
        If it is no plain file of the node agent's own: root would give another's file away.
    """
    found = os.fstat(log)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != node_uid:
        raise Refused("the log of the task is no file of the node agent's own")
    os.fchown(log, -1, gid)
    os.fchmod(log, 0o660)


def _hand_over(program: socket.socket, content: Payload | Drive | Keeping, descriptors: Sequence[int]) -> None:
    data = msgspec.json.encode(content)
    program.sendall(data[socket.send_fds(program, [data], descriptors) :])


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return the number and the user of the process that connected."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _start_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def _log(event: str, **fields: object) -> None:
    sys.stderr.write(json.dumps({"event": event, **fields}) + "\n")  # which is flushed with each line


# --- the socket -----------------------------------------------------------------------------------------------------


@contextmanager
def _listening(path: Path, uid: int) -> Iterator[socket.socket]:
    """Yield a socket at `path` that root and the user of that number alone can connect to."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        try:
            os.chown(path, uid, -1)
            listener.settimeout(PATIENCE_S)
            listener.listen(CONNECTIONS_MAX)
            yield listener
        finally:
            path.unlink(missing_ok=True)


def serve(config: LauncherConfig, units: Units | None = None, on_alive: Callable[[], object] = lambda: None) -> None:
    """Answer requests until SIGTERM; tasks go on.

    `on_alive` is called once it is ready, and then every `PATIENCE_S` at the latest, for a watchdog.

    Raises
    ------
    ConfigError
        If it does not run as root, or the socket cannot be made.
    """
    if os.geteuid():
        raise ConfigError("the launcher starts tasks as other users, so it must run as root")
    launcher, path = Launcher(config, units or Units()), Path(config.socket)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with _listening(path, launcher.node_uid) as listener:
            _log("launcher.ready", socket=str(path), node_user=config.node_user)
            room = threading.BoundedSemaphore(CONNECTIONS_MAX)
            while True:
                on_alive()
                with suppress(TimeoutError):
                    connection, _ = listener.accept()
                    room.acquire()
                    threading.Thread(target=_converse, args=(launcher, connection, room), daemon=True).start()
    except OSError as error:
        raise ConfigError(f"socket {path} cannot be used: {error.strerror}; choose another path") from error


def _converse(launcher: Launcher, connection: socket.socket, room: threading.BoundedSemaphore) -> None:
    """Answer one request; whatever goes wrong is this request's."""
    descriptors: list[int] = []
    try:
        with connection:
            connection.settimeout(PATIENCE_S)
            if _peer(connection)[1] not in (0, launcher.node_uid):
                _log("request.refused", pid=_peer(connection)[0], uid=_peer(connection)[1])
                return
            line = _receive(connection, descriptors)
            try:
                launcher.answer(line, descriptors, lambda reply: _reply(connection, reply))
            except (Refused, UnitError, msgspec.DecodeError, OSError) as error:
                _log("request.refused", reason=str(error))
                _reply(connection, Reply(error=str(error)))
    except (OSError, ValueError) as error:
        _log("request.failed", reason=f"{type(error).__name__}: {error}")
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        room.release()


def _receive(connection: socket.socket, descriptors: list[int]) -> bytes:
    """Return the line of a request; its descriptors are added to `descriptors`, so that they are closed in any case."""
    data = b""
    while not data.endswith(b"\n"):
        chunk, found, _, _ = socket.recv_fds(connection, 2**16, requests.DESCRIPTORS_MAX)
        descriptors += found
        data += chunk
        if not chunk or len(data) > requests.REQUEST_BYTES_MAX:
            raise ValueError("the request is not one line, or is too long")
    return data


def _reply(connection: socket.socket, reply: Reply) -> None:
    connection.sendall(msgspec.json.encode(reply) + b"\n")
