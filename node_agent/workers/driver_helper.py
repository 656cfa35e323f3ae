"""The only program of ours that loads libcuda: has the driver checkpoint and restore other processes.

Run as a script, ``python -I driver_helper.py REQUEST``, once per operation, since a call of the driver may hang or
crash and a process can be killed where a thread cannot. It writes JSON lines: one before each call of the driver, so
that the node agent knows the operation if it must kill it, and last the answer. It needs the package
``cuda-bindings``, and for a probe also ``nvidia-ml-py``.

With the request `wait` it gets ready, says so, and takes the request proper from its standard input: the driver is then
asked within milliseconds, and not after the start of a program.

Where a launcher starts tasks as their users, it runs as the user of the task, ``python -I driver_helper.py SOCKET``:
root listens there and sends the request, and the pipe for these lines.

The driver's states of a process: 0 running, 1 locked (its calls of CUDA wait), 2 checkpointed (its GPU memory is in
host memory, its context is gone), 3 failed, and since CUDA 13.4 also 4 and 5, being checkpointed or restored by
another program with storage of its own. The order of the calls below follows from these facts:

* All processes of a task are locked before the first is checkpointed, and all restored before the first is unlocked.
* A lock that does not come in time leaves a process running. A checkpoint that fails can be undone.
* A restore that fails is for ever: even with memory enough the next one fails too (NVIDIA/cuda-checkpoint#44). Only
  one whose pairs of GPUs the driver does not take leaves the process checkpointed (NVIDIA/cuda-checkpoint#35).
* The pairs of a restore must have every checkpointed GPU, and drivers want each one of the node.
* A process without CUDA has no restore thread; it is recognised by that, as in CRIU.

*Source:* CUDA Driver API, section "CUDA Checkpointing".
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NOT_READY, UNKNOWN = 1, 2, 3, 600, 999
INVALID_DEVICE, NOT_PERMITTED, NOT_SUPPORTED = 101, 800, 801
#: The errors by which the driver may say that it does not take the pairs of GPUs that it is given.
REFUSALS = (INVALID_VALUE, INVALID_DEVICE, NOT_PERMITTED, NOT_SUPPORTED)
#: The driver's error for the operating system: most often the right to touch the process is missing.
OPERATING_SYSTEM = 304
#: An orphan whose node agent died must end some day.
SURPLUS_S = 15
#: GPU memory that must be free for a probe: 16 MiB, a context, and room.
PROBE_FREE_BYTES = 2 * 2**30
PROBE_BYTES = 16 * 2**20
PROBE_LOCK_S = 10.0
TARGET_S = 120
#: Of nvmlComputeMode_t: the mode that admits several processes.
DEFAULT_MODE = 0

NO_CUDA = "none of the task's processes uses CUDA"

Json = dict[str, Any]


class DriverError(Exception):
    """A call of the driver that did not succeed."""

    def __init__(self, at: str, pid: int, code: int, name: str) -> None:
        self.code = code
        super().__init__(f"{at} of process {pid} failed: {name} ({code}){HINTS.get(code, '')}")


HINTS = {
    OPERATING_SYSTEM: "; run: sysctl kernel.yama.ptrace_scope=0, or where no launcher starts tasks run the node agent "
    "as root, or as the user of the tasks with CAP_SYS_PTRACE",
    NOT_READY: "; its work on the GPU did not end in time",
    OUT_OF_MEMORY: "; the GPU's memory was taken meanwhile",
}


class CannotBeDone(Exception):  # noqa: N818 - an expected no, told as a sentence
    """The request cannot be carried out, and nothing was done."""


class Driver:
    """The driver's checkpoint functions; each call is announced before it is made."""

    def __init__(self, out: Any) -> None:
        self._out = out
        self._initialised = False
        self.say(at="start")
        try:
            self.cuda = importlib.import_module("cuda.bindings.driver")
        except Exception as error:
            raise CannotBeDone(
                f"the package cuda-bindings cannot be loaded ({error}); install gpu-arbiter[cuda]"
            ) from error
        if not hasattr(self.cuda, "cuCheckpointProcessLock"):
            raise CannotBeDone("this cuda-bindings has no checkpoint functions; install cuda-bindings 12.8 or newer")

    def say(self, **line: Any) -> None:
        """Write a line, if the node agent still listens."""
        with suppress(OSError):  # the node agent died; its successor asks the driver for the states
            os.write(self._out, json.dumps(line).encode() + b"\n")

    def initialise(self) -> None:
        """Initialise CUDA here: a restore needs it unless persistence mode is on, and nothing else does."""
        if not self._initialised:
            self.call("init", 0, self.cuda.cuInit, 0)
            self._initialised = True

    def call(self, at: str, pid: int, function: Any, *arguments: Any) -> Any:
        """Call the driver and return its value.

        Raises
        ------
        DriverError
            If it returns an error.
        CannotBeDone
            If there is no driver.
        """
        self.say(at=at, pid=pid)
        try:
            error, *values = function(*arguments)
        except RuntimeError as absent:  # cuda-bindings found no libcuda, or not this function in it
            raise CannotBeDone(f"the NVIDIA driver cannot be used ({absent})") from absent
        except ValueError as unknown:  # the driver is newer than cuda-bindings
            code = next((int(word) for word in str(unknown).split() if word.isdigit()), UNKNOWN)
            raise DriverError(at, pid, code, "an error that this cuda-bindings does not know") from unknown
        if int(error):
            raise DriverError(at, pid, int(error), getattr(error, "name", "an error"))
        return values[0] if values else None

    def uses_cuda(self, pid: int) -> bool:
        """Say whether the driver knows `pid`."""
        try:
            self.call("state", pid, self.cuda.cuCheckpointProcessGetRestoreThreadId, pid)
        except DriverError as error:
            if error.code in (INVALID_VALUE, NOT_INITIALIZED):
                return False
            raise
        return True

    def state(self, pid: int) -> int:
        """Return the state of `pid`."""
        return int(self.call("state", pid, self.cuda.cuCheckpointProcessGetState, pid))

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Let the GPU work of `pid` end and its calls wait; on a timeout it goes on running."""
        arguments = self.cuda.CUcheckpointLockArgs()
        arguments.timeoutMs = max(1, timeout_ms)  # 0 would mean for ever
        self.call("lock", pid, self.cuda.cuCheckpointProcessLock, pid, arguments)

    def checkpoint(self, pid: int) -> None:
        """Move the GPU memory of the locked `pid` to host memory. Has no timeout."""
        self.call("checkpoint", pid, self.cuda.cuCheckpointProcessCheckpoint, pid, None)

    def restore(self, pid: int, pairs: list[tuple[str, str]]) -> None:
        """Move it back, if there are `pairs` (old, new) onto other GPUs. Has no timeout."""
        self.initialise()
        self.call("restore", pid, self.cuda.cuCheckpointProcessRestore, pid, self._restore_arguments(pairs))

    def unlock(self, pid: int) -> None:
        """Let `pid` call CUDA again."""
        self.call("unlock", pid, self.cuda.cuCheckpointProcessUnlock, pid, None)

    def _restore_arguments(self, pairs: list[tuple[str, str]]) -> Any:
        if not pairs:
            return None
        arguments = self.cuda.CUcheckpointRestoreArgs()
        arguments.gpuPairs = [self._pair(old, new) for old, new in pairs]
        arguments.gpuPairsCount = len(pairs)
        return arguments

    def _pair(self, old: str, new: str) -> Any:
        pair = self.cuda.CUcheckpointGpuPair()
        pair.oldUuid, pair.newUuid = self._uuid(old), self._uuid(new)
        return pair

    def _uuid(self, gpu: str) -> Any:
        value = self.cuda.CUuuid()
        # Its `bytes` can only be read.
        ctypes.memmove(int(value.getPtr()), uuid.UUID(gpu.removeprefix("GPU-")).bytes, 16)
        return value


# --- the operations -------------------------------------------------------------------------------------------------


def suspend(driver: Driver, pids: list[int], lock_s: float) -> Json:
    """Checkpoint all CUDA processes among `pids`, or leave all running."""
    states = states_of(driver, pids)
    if not states:
        return {"ok": False, "reason": NO_CUDA}
    if FAILED in states.values():
        return {"ok": False, "lost": True, "reason": "the driver says that a process of the task has failed"}
    if any(state > FAILED for state in states.values()):
        return {"ok": False, "reason": "another program is checkpointing a process of the task; stop that program"}
    deadline = time.monotonic() + lock_s
    done: list[int] = []
    try:
        for pid in [pid for pid, state in states.items() if state == RUNNING]:
            if not locked(driver, pid, deadline):
                del states[pid]
        for pid in (pid for pid, state in states.items() if state != CHECKPOINTED):
            driver.checkpoint(pid)
            done.append(pid)
    except DriverError as error:
        return undo(driver, list(states), done, error)
    return {"ok": True, "state": "suspended"} if states else {"ok": False, "reason": NO_CUDA}


def locked(driver: Driver, pid: int, deadline: float) -> bool:
    """Lock `pid` and say whether there was anything to lock: it may have looked at CUDA and made no context."""
    try:
        driver.lock(pid, int(1000 * (deadline - time.monotonic())))
    except DriverError as error:
        if error.code == NOT_INITIALIZED:
            return False
        raise
    return True


def undo(driver: Driver, pids: list[int], checkpointed: list[int], cause: DriverError) -> Json:
    """Have all `pids` run again, those just checkpointed too."""
    try:
        for pid in filter(alive, checkpointed):
            driver.restore(pid, [])
        for pid in filter(alive, pids):
            if driver.state(pid) == LOCKED:
                driver.unlock(pid)
        bad = [pid for pid in filter(alive, pids) if driver.state(pid) != RUNNING]
    except DriverError as error:
        return {"ok": False, "lost": True, "reason": f"{cause}; and it could not be undone: {error}"}
    if bad:
        return {"ok": False, "lost": True, "reason": f"{cause}; and process {bad[0]} does not run any more"}
    return {"ok": False, "state": "running", "reason": str(cause)}


def resume(driver: Driver, pids: list[int], moves: dict[str, str]) -> Json:
    """Have all CUDA processes among `pids` run again, on other GPUs where `moves` says so."""
    pairs = permutation(moves, gpus_of_node()) if moves else []
    if moves and not hasattr(driver.cuda, "CUcheckpointGpuPair"):
        raise CannotBeDone("moving to another GPU needs cuda-bindings 13 and driver 580, or newer")
    states = states_of(driver, pids)
    if FAILED in states.values():
        return {"ok": False, "lost": True, "reason": "the driver says that a process of the task has failed"}
    if any(state > FAILED for state in states.values()):
        return {"ok": False, "reason": "another program is restoring a process of the task; stop that program"}
    try:
        for pid in (pid for pid, state in states.items() if state == CHECKPOINTED):
            driver.restore(pid, pairs)
        for pid in (pid for pid, state in states.items() if state != RUNNING):
            driver.unlock(pid)
    except DriverError as error:
        return {"ok": False, "lost": not (pairs and refused(driver, list(states), error)), "reason": str(error)}
    return {"ok": True, "state": "running"}


def refused(driver: Driver, pids: list[int], error: DriverError) -> bool:
    """Say whether an error means that the pairs of GPUs were not taken, and all `pids` are suspended as they were."""
    if error.code not in REFUSALS:
        return False
    try:
        return all(driver.state(pid) == CHECKPOINTED for pid in pids)
    except DriverError:
        return False


def find(driver: Driver, pids: list[int]) -> Json:
    """Return the state of `pids`; those that an interrupted helper left locked run again."""
    for pid in pids:
        # First of all, without asking for states: while one process is locked, a question about its NCCL peer may
        # hang (NVIDIA/cuda-checkpoint#30). A process that is not locked refuses this and is left as it was.
        with suppress(DriverError):
            driver.unlock(pid)
    states = set(states_of(driver, pids).values())
    if states <= {RUNNING}:
        return {"ok": True, "state": "running"}
    if CHECKPOINTED in states and states <= {RUNNING, LOCKED, CHECKPOINTED}:
        return {"ok": True, "state": "suspended"}
    return {"ok": True, "state": "lost", "reason": f"the driver shows a process of the task in state {max(states)}"}


def states_of(driver: Driver, pids: list[int]) -> dict[int, int]:
    """Return the states of those of `pids` that use CUDA."""
    return {pid: driver.state(pid) for pid in pids if driver.uses_cuda(pid)}


def alive(pid: int) -> bool:
    """Say whether `pid` lives; for one that has ended nothing is to be undone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            return file.read().rpartition(b")")[2].split()[0] != b"Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def permutation(moves: dict[str, str], gpus: list[str]) -> list[tuple[str, str]]:
    """Return (old, new) for each of `gpus` once, so that `moves` happen and all others stay if they can.

    The driver wants every GPU of the node in the map, even those outside CUDA_VISIBLE_DEVICES
    (NVIDIA/cuda-checkpoint#35). A GPU that is moved onto goes where the chain of moves that ends in it began.

    Raises
    ------
    CannotBeDone
        If a GPU is unknown, or two would move onto one.
    """
    unknown = sorted({*moves, *moves.values()} - set(gpus))
    if unknown:
        raise CannotBeDone(f"there is no GPU {unknown[0]} here; there are {', '.join(gpus)}")
    begin = {new: old for old, new in moves.items()}
    if len(begin) < len(moves):
        raise CannotBeDone("two GPUs would move onto one; give each a new one of its own")
    return [(gpu, moves.get(gpu) or first_of_chain(gpu, begin)) for gpu in gpus]


def first_of_chain(gpu: str, begin: dict[str, str]) -> str:
    """Return where the moves that end in `gpu` began; itself if none does."""
    while gpu in begin:
        gpu = begin[gpu]
    return gpu


# --- a probe --------------------------------------------------------------------------------------------------------


def gpus_of_node() -> list[str]:
    """Return the UUIDs of all GPUs that the kernel driver shows.

    Raises
    ------
    CannotBeDone
        If NVML does not reach one of them, or MIG divides one.
    """
    nvml = opened_nvml()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        if any(divided(nvml, handle) for handle in handles):
            raise CannotBeDone("a GPU of this node is divided by MIG, and a move needs every GPU whole")
        return [text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except nvml.NVMLError as error:
        raise CannotBeDone(f"NVML does not name every GPU of this node ({error}), as a move needs") from error


def opened_nvml() -> Any:
    """Return NVML, ready for use."""
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise CannotBeDone(f"NVML cannot be used ({error})") from error
    return nvml


def free_gpus(nvml: Any, gpus: list[str]) -> list[tuple[int, str, Any]]:
    """Return those of `gpus`, or of all if it is empty, that a probe can use, each as (free bytes, UUID, handle).

    A GPU of which NVML does not answer is left out: it says nothing of the others.

    Raises
    ------
    CannotBeDone
        If MIG divides all of them.
    """
    found, divided_ones = [], 0
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = text(nvml.nvmlDeviceGetUUID(handle))
            if gpus and name not in gpus:
                continue
            if divided(nvml, handle):
                divided_ones += 1
            elif nvml.nvmlDeviceGetComputeMode(handle) == DEFAULT_MODE:
                found.append((int(nvml.nvmlDeviceGetMemoryInfo(handle).free), name, handle))
    if divided_ones and not found:
        raise CannotBeDone("the GPUs of this node are divided by MIG, which the driver cannot checkpoint")
    return found


def probe(driver: Driver, gpus: list[str]) -> Json:
    """Suspend and resume a process on one of `gpus` for real, and see its GPU memory go and come back unchanged."""
    nvml = opened_nvml()
    try:
        free_bytes, gpu, handle = max(free_gpus(nvml, gpus), key=lambda found: found[0], default=(0, "", None))
        if free_bytes < PROBE_FREE_BYTES:
            return {"ok": False, "again": True, "reason": "no GPU had the 2 GiB free that a probe takes"}
        return probe_on(driver, gpu, lambda pid: pid in pids_on(nvml, handle))
    except nvml.NVMLError as error:
        return {"ok": False, "again": True, "reason": f"NVML erred while the driver was tried ({error})"}


def probe_on(driver: Driver, gpu: str, is_there: Callable[[int], bool]) -> Json:
    """Try the driver out with a small process of this program's own on a GPU; `is_there` sees a process on it."""
    command = [sys.executable, "-I", sys.argv[0], json.dumps({"do": "target"})]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
    started: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    with started as target:
        word, _, pid = target.stdout.readline().partition(" ")
        if word != "ready":
            return {"ok": False, "reason": "a process that takes 16 MiB of GPU memory could not be started"}
        try:
            return try_out(driver, target, int(pid), lambda: is_there(int(pid)))
        finally:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def try_out(driver: Driver, target: Any, pid: int, on_gpu: Any) -> Json:
    """Return the outcome of one suspension and resumption of the process `pid`, which `target` has left behind."""
    if not on_gpu():
        return {"ok": False, "reason": "NVML does not show this node's processes, so freed memory cannot be proven"}
    answer = suspend(driver, [pid], PROBE_LOCK_S)
    if not answer["ok"]:
        return answer
    if on_gpu():
        return {"ok": False, "reason": "a suspended process stayed on the GPU"}
    answer = resume(driver, [pid], {})
    if not answer["ok"]:
        return answer
    if target.communicate("verify\n")[0] != "same\n":
        return {"ok": False, "reason": "a resumed process found other bytes in its GPU memory, or none"}
    return {"ok": True}


def divided(nvml: Any, handle: Any) -> bool:
    """Say whether the GPU is in MIG mode."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:
        return False  # a GPU that has no such mode


def pids_on(nvml: Any, handle: Any) -> list[int]:
    """Return the processes with a context on the GPU."""
    return [int(process.pid) for process in nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)]


def text(value: Any) -> str:
    """Return a string of NVML's, which some versions give as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def target(out: int) -> int:
    """Run as a process that holds a pattern in GPU memory until it is told to verify it.

    It leaves its parent, for workers are no descendants of a helper either, and of those a kernel may protect others.
    """
    if os.fork():
        return 0
    signal.alarm(TARGET_S)
    driver = Driver(os.open(os.devnull, os.O_WRONLY))
    cuda, call = driver.cuda, driver.call
    driver.initialise()
    opened_nvml()  # as PyTorch does; before driver 570 a process that used it could not be checkpointed
    device = call("target", 0, cuda.cuDeviceGet, 0)
    call("target", 0, cuda.cuCtxSetCurrent, call("target", 0, cuda.cuDevicePrimaryCtxRetain, device))
    pointer = call("target", 0, cuda.cuMemAlloc, PROBE_BYTES)
    pattern = os.urandom(PROBE_BYTES)
    call("target", 0, cuda.cuMemcpyHtoD, pointer, pattern, PROBE_BYTES)
    os.write(out, f"ready {os.getpid()}\n".encode())
    sys.stdin.readline()
    found = bytearray(PROBE_BYTES)
    call("target", 0, cuda.cuMemcpyDtoH, found, pointer, PROBE_BYTES)
    os.write(out, b"same\n" if found == pattern else b"different\n")
    return 0


# --- one request ----------------------------------------------------------------------------------------------------


def answer(driver: Driver, request: Json) -> Json:
    """Carry out the request; every failure becomes an answer."""
    try:
        match request["do"]:
            case "suspend":
                return suspend(driver, request.get("pids", []), request["lock_s"])
            case "resume":
                return resume(driver, request.get("pids", []), request.get("moves", {}))
            case "find":
                return find(driver, request.get("pids", []))
            case "probe":
                return probe(driver, request.get("gpus", []))
            case unknown:
                return {"ok": False, "reason": f"there is no operation {unknown!r}"}
    except (CannotBeDone, DriverError) as error:
        return {"ok": False, "reason": str(error)}


def received(place: str) -> tuple[Json, int]:
    """Return the request that the launcher at the socket `place` sends, and the descriptor for the answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as launcher:
        launcher.connect(place)
        data, (out,), _, _ = socket.recv_fds(launcher, 2**16, 1)
        while more := launcher.recv(2**16):
            data += more
    return json.loads(data), out


def main(argument: str) -> int:
    """Carry out one request and write its answer."""
    # The output of libraries must not come between the lines.
    request, out = received(argument) if argument.startswith("/") else (json.loads(argument), os.dup(1))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if request["do"] == "target":
        return target(out)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.alarm(int(request["timeout_s"]) + SURPLUS_S)
    try:
        driver = Driver(out)
    except CannotBeDone as error:
        os.write(out, json.dumps({"ok": False, "reason": str(error)}).encode() + b"\n")
        return 1
    if request["do"] == "wait":
        driver.say(at="ready")
        line = sys.stdin.readline()
        if not line:  # it is not needed after all, or the node agent died
            return 0
        request = json.loads(line)
        signal.alarm(int(request["timeout_s"]) + SURPLUS_S)
    driver.say(**answer(driver, request))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
