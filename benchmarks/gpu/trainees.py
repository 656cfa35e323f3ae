"""Processes that train: the parent's side. Each does what it is asked, one thing at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Deterministic matrix products (cuBLAS), and on the CPU memory that goes back to the system when it is freed.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
START_S, ANSWER_S = 180.0, 300.0

Answer = dict[str, Any]


class Died(Exception):  # noqa: N818 - what happened
    """A process ended, or was ended because it did not answer in time."""


class Failed(Exception):  # noqa: N818 - what happened
    """What was asked raised; the message begins with the name of the exception."""


class Trainee:
    """One process. `name` is for messages."""

    def __init__(self, device: str, name: str, env: Mapping[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.trainee", device],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def ask(self, what: Callable[..., Answer], timeout_s: float = ANSWER_S, **arguments: Any) -> Answer:
        """Have it done; return the answer.

        Raises
        ------
        Failed
            If it raised there.
        Died
            If the process ended, or did not answer in time.
        """
        self.send(what, **arguments)
        return self.hear(timeout_s)

    def send(self, what: Callable[..., Answer], **arguments: Any) -> None:
        """Ask, and go on meanwhile; `hear` gives the answer."""
        request = {"call": f"{what.__module__}:{what.__name__}", "with": arguments}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def hear(self, timeout_s: float = ANSWER_S) -> Answer:
        """Return the answer to what was sent; see `ask`."""
        assert self._process.stdout is not None
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line.endswith("\n"):
            raise self._died()
        answer: Answer = json.loads(line)
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _died(self) -> Died:
        self._process.kill()
        return Died(f"the process {self.name!r} ended with code {self._process.wait()}, or did not answer in time")


@contextmanager
def trainee(device: str, name: str = "trainee", env: Mapping[str, str] | None = None) -> Iterator[Trainee]:
    """Start a process, and end it."""
    one = Trainee(device, name, env or {})
    try:
        one.hear(START_S)
        yield one
    finally:
        one.close()


def describe(_child: Any) -> Answer:
    """Say what PyTorch has here; `without_cuda` is why it has no CUDA, empty if it has."""
    import torch

    found: Answer = {"torch": torch.__version__, "cuda": torch.version.cuda, "without_cuda": ""}
    if not torch.cuda.is_available():
        built = "which is built without CUDA" if torch.version.cuda is None else "which finds none"
        return found | {"without_cuda": f"there is no CUDA device here for PyTorch {torch.__version__}, {built}"}
    properties = torch.cuda.get_device_properties(0)
    uuid = str(getattr(properties, "uuid", ""))
    return found | {
        "gpu": properties.name,
        "uuid": uuid and f"GPU-{uuid.removeprefix('GPU-')}",
        "memory_bytes": properties.total_memory,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if hasattr(torch.cuda, "nccl") else None,
        "nccl_suspend": hasattr(torch._C._distributed_c10d.Backend, "suspend"),
    }
