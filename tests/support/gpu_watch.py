"""Who trains on which GPU, as the kernel sees it: looks into /proc all the time, and asks none of our daemons."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from msgspec import Struct

SAMPLE_S = 0.06
#: A busy machine may take samples farther apart. In two such times jobs may have taken turns, and did not meet.
GAP_MAX_S = 0.15
#: A parked training thread uses none; one mini-batch of the smallest script takes several times as much.
IDLE_NS_MAX = 300_000


class Worker(Struct, frozen=True):
    """One training process at one moment. `busy_ns` is the processor time of its training thread so far."""

    pid: int
    start_ticks: int
    task: str
    gpus: tuple[str, ...]
    busy_ns: int

    @property
    def job(self) -> str:
        return self.task.rpartition("-a")[0]


class GpuWatch:
    """Samples all processes with checkpoints, or a node agent, under `folder`; `conflicts` says who met on a GPU.

    Two may be on a GPU if one of them stands still, parked: its training thread uses no processor time. Between two
    samples one may have parked and the other begun, so they meet only if both worked in two such times on end, neither
    longer than `GAP_MAX_S`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._before: dict[tuple[int, int], Worker] = {}
        self._met: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-watch")
        self.conflicts: list[str] = []
        self.samples = 0
        self.now: list[Worker] = []  #: all training processes, as of the last sample
        self.users: dict[str, list[str]] = {}  #: by GPU, the jobs that trained on it, one after the other

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    @property
    def hand_overs(self) -> int:
        """How often a GPU went from one job to another."""
        return sum(len(jobs) - 1 for jobs in self.users.values())

    def workers(self) -> list[Worker]:
        """Look for all training processes that live at this moment."""
        found = (_worker(int(name), self._folder) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
        return [worker for worker in found if worker is not None]

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stopping.wait(SAMPLE_S):
            began, self.now = time.monotonic(), self.workers()
            ended = time.monotonic()
            self.judge(self.now, gap_s=ended - last)
            self.samples, last = self.samples + 1, began

    def judge(self, workers: Sequence[Worker], *, gap_s: float) -> None:
        """Take in a sample that was done so long after the one before was begun."""
        seen = {(worker.pid, worker.start_ticks): worker for worker in workers}
        awake = [worker for key, worker in seen.items() if self._is_awake(key, worker)]
        for worker in awake:
            for gpu in worker.gpus:
                jobs = self.users.setdefault(gpu, [])
                if jobs[-1:] != [worker.job]:
                    jobs.append(worker.job)
        met = {
            f"{one.task} and {other.task} on {gpu}"
            for one, other in itertools.combinations(sorted(awake, key=lambda worker: worker.task), 2)
            for gpu in set(one.gpus) & set(other.gpus)
        }
        if gap_s <= GAP_MAX_S:
            self.conflicts += sorted(met & self._met)
        self._before, self._met = seen, met if gap_s <= GAP_MAX_S else set()

    def _is_awake(self, key: tuple[int, int], worker: Worker) -> bool:
        before = self._before.get(key)
        return before is not None and worker.busy_ns - before.busy_ns > IDLE_NS_MAX


def _worker(pid: int, folder: str) -> Worker | None:
    """Return the process if it is a training process under `folder`; an ended one has no environment any more."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        process = Path("/proc") / str(pid)
        variables = (process / "environ").read_bytes().split(b"\0")
        env = dict(line.decode(errors="replace").split("=", 1) for line in variables if b"=" in line)
        # In the lab, a person submits from anywhere.
        if not any(env.get(f"GPU_ARBITER_{name}", "").startswith(folder) for name in ("CHECKPOINT_DIR", "SOCKET")):
            return None
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        busy_ns = int((process / "schedstat").read_text().split()[0])
        gpus = tuple(env["CUDA_VISIBLE_DEVICES"].split(","))
        return Worker(pid, int(fields[19]), env["GPU_ARBITER_TASK"], gpus, busy_ns)
    return None
