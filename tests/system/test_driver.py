"""Suspending real processes that know nothing of us, on virtual GPUs: the freed memory, and the price of haste."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from node_agent import procfs
from node_agent.devices.simulated import SimulatedBackend
from node_agent.workers.driver import Found, SimulatedCheckpointer
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MIB = 2**20
GPU_BYTES = 160 * MIB
#: The memory that stands for a CUDA context is not the GPU's.
CONTEXT_BYTES = 256 * MIB

#: Holds memory, and counts as fast as it can in a child of its own: no library, no boundary, no signal handler.
BUSY = """
import subprocess, sys
subprocess.run([sys.executable, "-c", '''
import sys
block = bytearray(b"x") * (int(sys.argv[1]) << 20)
print("holds", flush=True)
while True:
    for index in range(0, len(block), 4096):
        block[index] = (block[index] + 1) % 256
''', sys.argv[1]])
"""


class Bench:
    """A virtual GPU of 160 MiB and the tasks on it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.backend = SimulatedBackend("n1", 1, memory_bytes=GPU_BYTES)
        self.gpu = self.backend.devices()[0].gpu
        self.checkpointer = SimulatedCheckpointer(self.backend)

    def start(self, mib: int) -> int:
        """Start a task that holds `mib` of GPU memory; return what stands for its shim."""
        command = [sys.executable, "-c", BUSY, str(mib + CONTEXT_BYTES // MIB)]
        process = self._stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        self._stack.callback(self.kill, process.pid)
        self.backend.attach(process.pid, [self.gpu])
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        return process.pid

    def kill(self, shim: int) -> None:
        for pid in [*self.pids(shim), shim]:
            os.kill(pid, signal.SIGKILL)

    def pids(self, shim: int) -> list[int]:
        return list(procfs.descendants([shim]))

    def used_mib(self) -> int:
        return self.backend.memory(self.gpu).used_bytes // MIB

    def works(self, shim: int) -> bool:
        """Whether the task's processes use the processor."""
        before = self._busy_ns(shim)
        time.sleep(0.3)
        return self._busy_ns(shim) > before

    def _busy_ns(self, shim: int) -> int:
        paths = (procfs.PROC / str(pid) / "schedstat" for pid in self.pids(shim))
        return sum(int(path.read_text().split()[0]) for path in paths)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack)


async def test_a_suspended_task_gives_its_memory_to_another_and_gets_it_back(bench: Bench) -> None:
    one = bench.start(100)
    assert 95 <= bench.used_mib() <= 115
    result = await bench.checkpointer.suspend(bench.pids(one), PATIENCE_S)
    assert result.ok
    assert 95 * MIB <= result.bytes <= 115 * MIB
    assert bench.used_mib() == 0
    assert bench.backend.processes(bench.gpu) == []
    assert not bench.works(one)

    other = bench.start(140)
    assert 135 <= bench.used_mib() <= 155
    assert bench.works(other)
    bench.kill(other)
    bench.backend.detach(other)

    assert (await bench.checkpointer.resume(bench.pids(one), PATIENCE_S)).ok
    assert 95 <= bench.used_mib() <= 115
    assert bench.works(one)


async def test_two_tasks_that_fit_together_are_both_resumed(bench: Bench) -> None:
    one, other = bench.start(60), bench.start(70)
    assert (await bench.checkpointer.suspend(bench.pids(one), PATIENCE_S)).ok
    assert (await bench.checkpointer.resume(bench.pids(one), PATIENCE_S)).ok
    assert 125 <= bench.used_mib() <= 155
    assert bench.works(one)
    assert bench.works(other)


async def test_a_task_resumed_onto_a_full_gpu_is_lost_even_when_there_is_room_again(bench: Bench) -> None:
    one = bench.start(100)
    assert (await bench.checkpointer.suspend(bench.pids(one), PATIENCE_S)).ok
    other = bench.start(140)
    result = await bench.checkpointer.resume(bench.pids(one), PATIENCE_S)
    assert (result.ok, result.lost) == (False, True)
    assert bench.gpu in result.reason
    bench.kill(other)
    bench.backend.detach(other)
    assert (await bench.checkpointer.resume(bench.pids(one), PATIENCE_S)).lost
    assert not bench.works(one)


async def test_the_next_node_agent_finds_a_suspended_task_and_resumes_it(bench: Bench) -> None:
    one = bench.start(100)
    assert (await bench.checkpointer.suspend(bench.pids(one), PATIENCE_S)).ok
    backend = SimulatedBackend("n1", 1, memory_bytes=GPU_BYTES)
    backend.attach(one, [bench.gpu])
    successor = SimulatedCheckpointer(backend)
    assert await successor.find(bench.pids(one)) == Found("suspended")
    assert backend.memory(bench.gpu).used_bytes == 0
    assert (await successor.resume(bench.pids(one), PATIENCE_S)).ok
    assert backend.memory(bench.gpu).used_bytes // MIB >= 95
    assert bench.works(one)


async def test_a_task_that_is_moved_takes_its_memory_to_the_other_gpu(bench: Bench) -> None:
    bench.backend = SimulatedBackend("n1", 2, memory_bytes=GPU_BYTES)
    bench.checkpointer = SimulatedCheckpointer(bench.backend)
    other = bench.backend.devices()[1].gpu
    one = bench.start(100)
    assert (await bench.checkpointer.suspend(bench.pids(one), PATIENCE_S)).ok
    bench.start(140)
    assert (await bench.checkpointer.resume(bench.pids(one), PATIENCE_S, {bench.gpu: other})).ok
    assert 95 <= bench.backend.memory(other).used_bytes // MIB <= 115
    assert 135 <= bench.used_mib() <= 155
    assert bench.works(one)


async def test_a_task_stopped_by_another_program_still_takes_its_gpu_memory(bench: Bench) -> None:
    one = bench.start(100)
    for pid in bench.pids(one):
        os.kill(pid, signal.SIGSTOP)
    assert bench.used_mib() >= 95


async def test_what_a_process_has_started_is_stopped_with_it(bench: Bench) -> None:
    one = bench.start(100)
    assert (await bench.checkpointer.suspend([one], PATIENCE_S)).ok
    assert not bench.works(one)
    assert bench.used_mib() == 0


async def test_a_suspended_task_that_another_program_wakes_takes_its_gpu_memory_again(bench: Bench) -> None:
    one = bench.start(100)
    pids = bench.pids(one)
    assert (await bench.checkpointer.suspend(pids, PATIENCE_S)).ok
    assert bench.used_mib() == 0
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert bench.works(one)
    assert bench.used_mib() >= 95
