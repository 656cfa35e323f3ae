"""The NVIDIA driver, played for the real helper program: states of processes in a file, errors and hangs on order.

`program` writes a script that puts this in the place of ``cuda.bindings.driver`` and ``pynvml`` and then runs the
helper's own `main`, so that all of the helper but libcuda runs for real, in processes of its own.
"""

# The stand-ins bear the names of CUDA and NVML.
# ruff: noqa: N802

from __future__ import annotations

import ctypes
import enum
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from node_agent.workers import driver_helper

SCRIPT = """
import sys
sys.path[:0] = [{root!r}]
from tests.support.played_driver import main
sys.exit(main({folder!r}, sys.argv[1]))
"""
GPUS = [f"GPU-{digit * 8}-{digit * 4}-{digit * 4}-{digit * 4}-{digit * 12}" for digit in "abc"]


class Error(enum.IntEnum):
    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALIZED = 3
    OPERATING_SYSTEM = 304
    ILLEGAL_STATE = 401
    NOT_READY = 600
    NOT_SUPPORTED = 801


class Play:
    """The state of the driver, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not self._path.exists():
            self.write(states={}, faults={}, entangled=[], full=False, bricked=[], maps=[], corrupt=False)

    @property
    def _path(self) -> Path:
        return self.folder / "play.json"

    def read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._path.read_text())
        return found

    def write(self, **changes: Any) -> None:
        content = (self.read() if self._path.exists() else {}) | changes
        beside = self._path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(content))
        beside.replace(self._path)

    def state(self, pid: int) -> int | None:
        found: int | None = self.read()["states"].get(str(pid))
        return found

    def put(self, pid: int, state: int) -> None:
        self.write(states=self.read()["states"] | {str(pid): state})

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().split() if path.exists() else []

    def program(self) -> Path:
        root = str(Path(__file__).parents[2])
        path = self.folder / "program.py"
        path.write_text(SCRIPT.format(root=root, folder=str(self.folder)))
        return path


def main(folder: str, request: str) -> int:
    play = Play(Path(folder))
    driver = ModuleType("cuda.bindings.driver")
    vars(driver).update(_members(_Cuda(play)))
    sys.modules["cuda.bindings.driver"] = driver
    nvml = ModuleType("pynvml")
    vars(nvml).update(_members(_Nvml(play)))
    sys.modules["pynvml"] = nvml
    for package in ("cuda", "cuda.bindings"):
        sys.modules[package] = ModuleType(package)
    return driver_helper.main(request)


def _members(of: object) -> dict[str, Any]:
    return {name: getattr(of, name) for name in dir(of) if not name.startswith("_")}


class _Uuid:
    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(16)

    def getPtr(self) -> int:
        return ctypes.addressof(self._buffer)

    @property
    def bytes(self) -> bytes:
        return self._buffer.raw


class _Cuda:
    CUcheckpointLockArgs = SimpleNamespace
    CUcheckpointRestoreArgs = SimpleNamespace
    CUcheckpointGpuPair = SimpleNamespace
    CUuuid = _Uuid

    def __init__(self, play: Play) -> None:
        self._play = play
        self._memory: list[bytes] = []

    def _act(self, call: str, pid: int, act: Callable[[int], Error]) -> Error:
        with (self._play.folder / "calls").open("a") as calls:
            calls.write(f"{call}:{pid}\n")
        fault = self._play.read()["faults"].get(f"{call}:{pid}")
        if fault == "hang":
            time.sleep(3600)
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if isinstance(fault, float):
            time.sleep(fault)
        if isinstance(fault, int):
            return Error(fault)
        # NCCL's peers: while one is locked nothing can be asked of the other (NVIDIA/cuda-checkpoint#30).
        while self._others_locked(pid):
            time.sleep(0.01)
        state = self._play.state(pid)
        error = Error.INVALID_VALUE if state is None else act(state)
        if fault == "crash after":
            self._play.write(faults={})
            os.kill(os.getpid(), signal.SIGSEGV)
        return error

    def _others_locked(self, pid: int) -> bool:
        peers = self._play.read()["entangled"]
        return pid in peers and any(self._play.state(other) in (1, 2) for other in peers if other != pid)

    def _from(self, call: str, pid: int, before: int, after: int) -> tuple[Error]:
        def act(state: int) -> Error:
            if state != before:
                return Error.ILLEGAL_STATE
            self._play.put(pid, after)
            return Error.SUCCESS

        return (self._act(call, pid, act),)

    def cuInit(self, flags: int) -> tuple[Error]:
        with (self._play.folder / "calls").open("a") as calls:
            calls.write("init\n")
        return (Error.SUCCESS,)

    def cuCheckpointProcessGetRestoreThreadId(self, pid: int) -> tuple[Error, int]:
        return self._act("tid", pid, lambda state: Error.SUCCESS), pid + 1

    def cuCheckpointProcessGetState(self, pid: int) -> tuple[Error, int]:
        return self._act("state", pid, lambda state: Error.SUCCESS), self._play.state(pid) or 0

    def cuCheckpointProcessLock(self, pid: int, args: Any) -> tuple[Error]:
        assert args.timeoutMs > 0, "0 means no timeout"
        return self._from("lock", pid, 0, 1)

    def cuCheckpointProcessCheckpoint(self, pid: int, args: Any) -> tuple[Error]:
        return self._from("checkpoint", pid, 1, 2)

    def cuCheckpointProcessRestore(self, pid: int, args: Any) -> tuple[Error]:
        assert "init" in self._play.calls, "a restore needs cuInit or persistence mode"
        content = self._play.read()
        if pid in content["bricked"]:
            return (self._act("restore", pid, lambda state: Error.OPERATING_SYSTEM),)
        if content["full"]:
            self._play.write(bricked=[*content["bricked"], pid])
            return (self._act("restore", pid, lambda state: Error.OUT_OF_MEMORY),)
        if args is not None:
            assert args.gpuPairsCount == len(args.gpuPairs)
            pairs = [[pair.oldUuid.bytes.hex(), pair.newUuid.bytes.hex()] for pair in args.gpuPairs]
            self._play.write(maps=[*content["maps"], pairs])
        return self._from("restore", pid, 2, 1)

    def cuCheckpointProcessUnlock(self, pid: int, args: Any) -> tuple[Error]:
        return self._from("unlock", pid, 1, 0)

    # --- what the trial's process calls -----------------------------------------------------------------------------

    def cuDeviceGet(self, ordinal: int) -> tuple[Error, int]:
        return Error.SUCCESS, 0

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Error, object]:
        self._play.put(os.getpid(), 0)
        return Error.SUCCESS, object()

    def cuCtxSetCurrent(self, context: object) -> tuple[Error]:
        return (Error.SUCCESS,)

    def cuMemAlloc(self, size: int) -> tuple[Error, int]:
        self._memory.append(bytes(size))
        return Error.SUCCESS, len(self._memory) - 1

    def cuMemcpyHtoD(self, pointer: int, source: bytes, size: int) -> tuple[Error]:
        self._memory[pointer] = source[:size]
        return (Error.SUCCESS,)

    def cuMemcpyDtoH(self, target: bytearray, pointer: int, size: int) -> tuple[Error]:
        target[:] = bytes(size) if self._play.read()["corrupt"] else self._memory[pointer]
        return (Error.SUCCESS,)


class _Nvml:
    class NVMLError(Exception):
        pass

    def __init__(self, play: Play) -> None:
        self._play = play

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(GPUS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return GPUS[handle]

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        return [int(self._play.read().get("mig", False)), 0]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(free=self._play.read().get("free", 80 * 2**30))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        content = self._play.read()
        if content.get("blind"):
            return []
        shown = [int(pid) for pid, state in content["states"].items() if state != 2 or content.get("stays")]
        return [SimpleNamespace(pid=pid) for pid in shown]
