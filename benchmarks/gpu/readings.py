"""What the driver says of the GPU that the trainees use, through NVML; without NVML every answer is None."""

from __future__ import annotations

import contextlib
from typing import Any

from benchmarks.gpu.trainees import Trainee, describe


class Readings:
    """One GPU."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle

    @classmethod
    def of(cls, one: Trainee) -> Readings:
        """Return those of the GPU that `one` calls its first."""
        with contextlib.suppress(Exception):  # no library, no driver, no such GPU: figures that are not there
            import pynvml

            pynvml.nvmlInit()
            uuid = one.ask(describe).get("uuid")
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid) if uuid else pynvml.nvmlDeviceGetHandleByIndex(0)
            return cls(pynvml, handle)
        return cls(None, None)

    def used_bytes(self) -> int | None:
        """Return the memory in use on the GPU."""
        if self.nvml is None:
            return None
        return int(self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used)

    def processes(self) -> dict[int, int] | None:
        """Return the memory of each process on the GPU; in a container their numbers may not be ours."""
        if self.nvml is None:
            return None
        found = self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle)
        return {int(process.pid): int(process.usedGpuMemory or 0) for process in found}

    def process_bytes(self, pid: int) -> int | None:
        """Return the memory of one process; None if NVML does not show it."""
        return (self.processes() or {}).get(pid)

    def __bool__(self) -> bool:
        return self.nvml is not None


def attempt(question: Any, *arguments: Any) -> Any:
    """Return the answer, or the error in words: what a driver does not know is a finding too."""
    try:
        return question(*arguments)
    except Exception as error:  # noqa: BLE001 - a finding
        return f"{type(error).__name__}: {error}"
