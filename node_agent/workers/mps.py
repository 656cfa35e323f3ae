"""NVIDIA's Multi-Process Service (MPS): kernels of several jobs on one GPU overlap instead of taking turns.

Each GPU of the setting `mps` has a control daemon of its own (``nvidia-cuda-mps-control``) for the Unix user of the
node agent, since a fatal fault ends all clients of a daemon's server. Workers find it by CUDA_MPS_PIPE_DIRECTORY, which
must be set before CUDA starts: a worker is a client of MPS all its life, or never.

1. A daemon is looked for before it is started, so the next node agent goes on with it. It is ended only while no task
   is its client.
2. A worker gets the variables only once the daemon's server says that it takes clients. If it does not, the worker runs
   without MPS, and `MpsClient.trouble` says why in a sentence.
3. The daemon and its clients name the GPU by its UUID, so that neither counts GPUs in its own way.

Memory and threads of a client are limited only where an administrator says so. Either limit is fixed as the client
starts, also if the daemon is told another one later, and holds while the job has the GPU to itself, as most have for
most of the time. No job has a known peak by then. Jobs that run together get a limit on their memory from the library,
which changes as they meet and part.

*Sources:* NVIDIA's documentation of MPS (deploy/mps), where a new limit does not affect existing clients; its words on
states and faults are not tried out on a GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from hashlib import blake2s
from pathlib import Path

import structlog
from msgspec import Struct

from node_agent import procfs
from node_agent.devices import visible
from node_agent.workers.records import MpsMark, read_json, write_json
from protocol.messages import GpuId

log: structlog.stdlib.BoundLogger = structlog.get_logger("node_agent")

CONTROL = "nvidia-cuda-mps-control"
#: The kernel keeps 15 bytes of a program's name; that of the control daemon and that of its server begin alike.
PROGRAM = CONTROL[:15]
PIPE = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"
MEMORY_LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
THREAD_LIMIT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
#: The folder of all pipes, in the one for sockets, and that of all logs, in the state directory.
PIPES, ALL_LOGS = "mps-pipes", "mps"
#: Below the folder of all pipes: a folder's name of 16 bytes, and the daemon's longest name in it.
PATH_BYTES_MAX = 1 + 16 + 1 + len("control_privileged")
#: In the state directory: why GPUs have no MPS though they should.
STANDING = "mps.json"
#: Variables that a daemon needs of our environment.
INHERITED = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")
#: For an answer of the daemon.
ASK_S = 5.0
#: For a server to create its context on the GPU; the driver may have to be loaded first.
READY_S = 30.0
#: For a faulted server to create it again, once its last client has gone.
CLEAR_S = 5.0
#: For a daemon to end after it was told to, and after SIGKILL.
QUIT_S = 10.0
#: For a client's contexts to be destroyed before it is killed.
RELEASE_S = 3.0
POLL_S = 0.1
#: Logs larger than this are removed before a daemon is started.
LOG_BYTES_MAX = 2**24
#: Lines of the logs that tell of a fatal fault (seen in NVIDIA/k8s-device-plugin#685, and assumed of other drivers).
_FATAL = re.compile(rb"fatal|exited with status [1-9]", re.IGNORECASE)
_LINE = re.compile(rb"^\[[^\]]*\]\s*")


class MpsError(Exception):
    """A GPU has no MPS at the moment; the message is a sentence."""


class MpsClient(Struct, frozen=True):
    """The environment and the mark of a client; without a mark, why there is no MPS."""

    env: dict[str, str] = {}
    mark: MpsMark | None = None
    trouble: str = ""


class MpsStanding(Struct, frozen=True):
    """The GPUs that have no MPS though they should, each with the sentence that says why."""

    troubles: dict[GpuId, str] = {}


class MpsDaemon:
    """The control daemon of one GPU and one user.

    Parameters
    ----------
    gpu
        The GPU, by its UUID.
    pipe
        The daemon's folder for its socket and pipes, by which it is found.
    logs
        The folder of its logs.
    """

    def __init__(self, gpu: GpuId, pipe: Path, logs: Path) -> None:
        self.gpu, self.pipe, self.logs = gpu, pipe, logs
        self.lock = threading.Lock()

    @property
    def env(self) -> dict[str, str]:
        """The variables by which a worker becomes a client."""
        return {PIPE: str(self.pipe), LOGS: str(self.logs)}

    def mark(self) -> MpsMark:
        """Return the mark of a worker that is started now."""
        return MpsMark(self.gpu, *(_size(self.logs / name) for name in ("control.log", "server.log")))

    # --- its life ---------------------------------------------------------------------------------------------------

    def ready(self, *, has_clients: bool) -> None:
        """Return once it takes clients, having started it if it was not there.

        Raises
        ------
        MpsError
            If it does not. One that has clients is never started anew.
        OSError
            If its program is not there, or its folders cannot be written.
        """
        if not self.answers():
            if has_clients and self.pid() is not None:
                raise MpsError("its daemon does not answer; it is started anew once no task is its client")
            self.end(spares_servers=has_clients)
            self._start()
        if self._serves(READY_S if not self._faulted() else CLEAR_S):
            return
        if has_clients:
            met = "has met a fatal fault, and takes" if self._faulted() else "takes"
            raise MpsError(f"its server {met} no client until all that it has have ended")
        self.end()
        self._start()
        begun = self.mark()
        if not self._serves(READY_S):
            found = self._fatal_since(begun)
            self.end()
            raise MpsError(f"its server does not start ({found or 'its log says nothing'})")

    def end(self, *, spares_servers: bool = False) -> None:
        """End the daemon and its servers, whatever they are at; servers that outlive it may still have clients."""
        pid = self.pid()
        if self.pipe.exists():
            with suppress(MpsError, OSError):
                self.ask(f"quit -t {int(ASK_S)}", timeout_s=QUIT_S)
        left = [] if pid is None or _wait_gone(pid, QUIT_S) else [pid]
        if not spares_servers:
            found = procfs.with_variable(PIPE).items()
            left += [each for each, pipe in found if pipe == str(self.pipe) and procfs.program(each) == PROGRAM]
        if left:
            log.warning("mps.killed", gpu=self.gpu, pids=left)
            _kill(left)
            all(_wait_gone(each, QUIT_S) for each in left)
        shutil.rmtree(self.pipe, ignore_errors=True)

    def pid(self) -> int | None:
        """Return the process of the daemon, None if it does not live."""
        try:
            pid = int((self.pipe / f"{CONTROL}.pid").read_text())
        except (OSError, ValueError):
            return None
        process = procfs.stat(pid)
        lives = process is not None and process.state != "Z" and procfs.variable(pid, PIPE) == str(self.pipe)
        return pid if lives else None

    def _start(self) -> None:
        for folder in (self.pipe, self.logs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("control.log", "server.log"):
            if _size(self.logs / name) > LOG_BYTES_MAX:
                (self.logs / name).unlink()
        with (self.logs / "start.log").open("wb") as out:
            # The daemon keeps the descriptors it is given, so it gets no pipe of ours.
            done = self._run([CONTROL, "-d"], stdout=out, stderr=out, timeout=READY_S)
        if done.returncode != 0 or not self.answers():
            said = (self.logs / "start.log").read_text(errors="replace").strip().splitlines()
            raise MpsError(f"{CONTROL} -d ended with code {done.returncode} ({said[-1] if said else 'no word'})")
        log.info("mps.started", gpu=self.gpu, pid=self.pid(), pipe=str(self.pipe))

    def _serves(self, timeout_s: float) -> bool:
        """Whether a server takes clients, within `timeout_s`; start one if there is none."""
        deadline, asked, begun = time.monotonic() + timeout_s, False, self.mark()
        while True:
            servers = self.servers()
            if servers and all(_takes_clients(self.status(server)) for server in servers):
                return True
            if (asked and not servers and self._fatal_since(begun)) or time.monotonic() > deadline:
                return False
            if not servers and not asked:
                self.ask(f"start_server -uid {os.getuid()}")
                asked = True
            time.sleep(POLL_S)

    # --- questions --------------------------------------------------------------------------------------------------

    def answers(self) -> bool:
        """Whether the daemon is there and answers."""
        try:
            self.servers()
        except (MpsError, OSError):
            return False
        return True

    def servers(self) -> list[int]:
        """Return the processes of its servers."""
        return _numbers(self.ask("get_server_list"))

    def status(self, server: int) -> str:
        """Return the state of a server in NVIDIA's words: ACTIVE, FAULT, ..."""
        return self.ask(f"get_server_status {server}").strip()

    def release(self, pids: Collection[int]) -> None:
        """Have the contexts of these processes destroyed: SIGKILL alone may leave the others in an undefined state."""
        for server in self.servers():
            for pid in set(_numbers(self.ask(f"get_client_list {server}"))) & set(pids):
                self.ask(f"terminate_client {server} {pid}")

    def evidence(self, since: MpsMark) -> str:
        """Say how it shows that a server met a fatal fault since this mark; empty if it does not."""
        if self._faulted():
            return "its state is FAULT"
        line = self._fatal_since(since)
        return f"its log says: {line}" if line else ""

    def _fatal_since(self, mark: MpsMark) -> str:
        """Return the newest line of its logs since this mark that tells of a fatal fault."""
        lines = [
            *_fatal_lines(self.logs / "control.log", mark.control_bytes),
            *_fatal_lines(self.logs / "server.log", mark.server_bytes),
        ]
        return lines[-1] if lines else ""

    def _faulted(self) -> bool:
        try:
            return any("FAULT" in self.status(server) for server in self.servers())
        except (MpsError, OSError):
            return False

    def ask(self, command: str, *, timeout_s: float = ASK_S) -> str:
        """Give the daemon a command and return its answer.

        Raises
        ------
        MpsError
            If it is not there, or does not answer.
        """
        try:
            done = self._run([CONTROL], input=command.encode() + b"\n", capture_output=True, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise MpsError(f"its daemon does not answer to {command!r}") from error
        if done.returncode != 0:
            raise MpsError(f"its daemon does not answer to {command!r} (code {done.returncode})")
        return done.stdout.decode(errors="replace")

    def _run(self, command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        env = {name: os.environ[name] for name in INHERITED if name in os.environ}
        env |= self.env | visible([self.gpu])
        if "input" not in options:
            options["stdin"] = subprocess.DEVNULL
        return subprocess.run(command, env=env, cwd="/", start_new_session=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


class MpsDaemons:
    """The daemons of one node. Its methods wait for processes: call them from a thread.

    Parameters
    ----------
    gpus
        The GPUs that have MPS.
    pipes
        A private folder for the daemons' sockets, with a short path.
    state_dir
        The folder of their logs, and of `STANDING`.
    """

    def __init__(self, gpus: Collection[GpuId], pipes: Path, state_dir: Path) -> None:
        self._gpus = frozenset(gpus)
        self._pipes = pipes
        self._logs = state_dir / ALL_LOGS
        self._standing = state_dir / STANDING
        self._daemons: dict[GpuId, MpsDaemon] = {}
        self._lock = threading.Lock()
        self._troubles = (read_json(self._standing, MpsStanding) or MpsStanding()).troubles

    @staticmethod
    def left_in(state_dir: Path) -> bool:
        """Whether an earlier node agent has run daemons."""
        return (state_dir / ALL_LOGS).is_dir()

    def has(self, gpu: GpuId) -> bool:
        """Whether a GPU has MPS."""
        return gpu in self._gpus

    def client(self, gpu: GpuId, *, has_clients: bool) -> MpsClient:
        """Return the environment of a worker on this GPU, once its daemon takes clients."""
        daemon = self._daemon(gpu)
        with daemon.lock:
            try:
                daemon.ready(has_clients=has_clients)
                client = MpsClient(daemon.env, daemon.mark())
            except FileNotFoundError:
                mend = f"{CONTROL}, which comes with NVIDIA's driver, is not on the PATH of the node agent"
                client = MpsClient(trouble=_told(gpu, mend))
            except (MpsError, OSError, subprocess.TimeoutExpired) as error:
                client = MpsClient(trouble=_told(gpu, f"{error}; see {daemon.logs}"))
        self._note(gpu, client.trouble)
        return client

    def evidence(self, mark: MpsMark) -> str:
        """Say how it shows that the server of a client met a fatal fault in its life; empty if it does not."""
        return self._daemon(mark.gpu).evidence(mark)

    def release(self, mark: MpsMark, pids: Collection[int]) -> None:
        """Have the contexts of a client destroyed that is about to be killed, if that can be done soon."""
        done = threading.Thread(target=self._release, args=(mark, pids), daemon=True)
        done.start()
        done.join(RELEASE_S)

    def _release(self, mark: MpsMark, pids: Collection[int]) -> None:
        try:
            self._daemon(mark.gpu).release(pids)
        except (MpsError, OSError) as error:
            log.info("mps.unreleased", gpu=mark.gpu, pids=list(pids), reason=str(error))

    def serves(self, pid: int) -> bool:
        """Whether a process on a GPU is a server of one of these daemons, or of those of an earlier node agent."""
        if procfs.uid(pid) != os.getuid() or procfs.program(pid) != PROGRAM:
            return False
        return Path(procfs.variable(pid, PIPE) or "/").parent == self._pipes

    def end(self, used: Collection[GpuId], *, all_of_them: bool = False) -> None:
        """End the daemons without a client that the setting no longer names, or `all_of_them` without a client."""
        for folder in self._logs.iterdir() if self._logs.is_dir() else ():
            gpu = GpuId(folder.name)
            if gpu in used or (self.has(gpu) and not all_of_them):
                continue
            daemon = self._daemon(gpu)
            with daemon.lock:
                if daemon.pid() is not None or daemon.answers():
                    daemon.end()
                    log.info("mps.ended", gpu=gpu)
            if not self.has(gpu):
                shutil.rmtree(folder, ignore_errors=True)
                self._note(gpu, "")

    def _daemon(self, gpu: GpuId) -> MpsDaemon:
        name = blake2s(gpu.encode(), digest_size=8).hexdigest()
        return self._daemons.setdefault(gpu, MpsDaemon(gpu, self._pipes / name, self._logs / gpu))

    def _note(self, gpu: GpuId, trouble: str) -> None:
        """Keep for `doctor` whether a GPU has MPS, and log it when that changes."""
        with self._lock:
            if self._troubles.get(gpu, "") == trouble:
                return
            others = {each: why for each, why in self._troubles.items() if each != gpu}
            self._troubles = others | ({gpu: trouble} if trouble else {})
            with suppress(OSError):  # a full disk: the log and the report say it, too
                write_json(self._standing, MpsStanding(self._troubles))
        if trouble:
            log.warning("mps.absent", gpu=gpu, reason=trouble)


def limits(gpu: GpuId, memory_bytes: int, thread_share: float) -> dict[str, str]:
    """Return the variables that limit a client on this GPU; 0 bytes, or all threads, are no limit."""
    memory = {MEMORY_LIMIT: f"{gpu}={max(1, memory_bytes // 2**20)}M"} if memory_bytes else {}
    return memory | ({THREAD_LIMIT: str(max(1, round(100 * thread_share)))} if thread_share < 1.0 else {})


def _told(gpu: GpuId, why: str) -> str:
    return f"{gpu} has no MPS, and jobs there run without it: {why}"


def _takes_clients(status: str) -> bool:
    """Whether a server in this state takes clients; one whose driver knows no states does."""
    return not any(word in status.upper() for word in ("FAULT", "INITIALIZING", "NOT READY"))


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split() if word.isdigit()]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _fatal_lines(path: Path, since: int) -> list[str]:
    """Return the lines from the offset `since` on that tell of a fatal fault, without their time."""
    try:
        with path.open("rb") as file:
            file.seek(max(since, _size(path) - LOG_BYTES_MAX))
            lines = file.read().splitlines()
    except OSError:
        return []
    return [_LINE.sub(b"", line).decode(errors="replace")[:200] for line in lines if _FATAL.search(line)]


def _wait_gone(pid: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while (process := procfs.stat(pid)) is not None and process.state != "Z":
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S / 4)
    return True


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
