"""What the library costs a training step, as a share of a 10 ms step: ``python benchmarks/step_overhead.py [--json]``.

All in processor time, so that other work on the machine counts as little as may be. Against a bare loop measured in
turn in the same process, while a listening process takes what the helper thread says: `session.step_end` as a script
calls it, and the optimizer hook of an unchanged script. In a loop of 10 ms steps: the reading of the memory counters,
and the helper thread, which competes with the training thread; medians of some windows. The sum of the dearer boundary,
the readings and the helper thread is compared with the goal.

Without a goal, what a call takes beyond an empty one where both find cold caches, as in a loop of 10 ms steps.

Without a goal, since it runs for 20 s now and then, and only where nothing tells of steps: the thread that samples the
memory, by its processor time, and by how much longer a loop of Python takes beside it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from app_agent.training.training_process import TrainingProcess

STEP_US = 10_000.0
GOAL = 0.001
ROUNDS = 31
CALLS = 20_000
WINDOWS, WINDOW_S = 5, 4.0


def listen(path: Path) -> None:
    """Take what the helper thread says, in a process of its own, as a node agent does: it shares no lock with it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()

    def swallow() -> None:
        connection, _ = listener.accept()
        while connection.recv(65536):
            pass

    multiprocessing.get_context("fork").Process(target=swallow, daemon=True).start()
    listener.close()


def loop_s(boundary: Callable[[int], object], calls: int = CALLS) -> float:
    begun = time.thread_time()
    for step in range(calls):
        boundary(step)
    return time.thread_time() - begun


def cost_us(boundary: Callable[[int], object], bare: Callable[[int], object]) -> tuple[float, float]:
    """Return microseconds per call beyond the bare loop, and the ratio to it; medians of alternating rounds."""
    pairs = [(loop_s(boundary), loop_s(bare)) for _ in range(ROUNDS)]
    extra = statistics.median(with_it - without for with_it, without in pairs)
    return extra / CALLS * 1e6, statistics.median(with_it / without for with_it, without in pairs)


def cpu_s(name: str = "gpu-arbiter") -> float:
    """Processor time of a thread so far; by itself of the helper thread."""
    thread = next(item for item in threading.enumerate() if item.name == name)
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


class Window(NamedTuple):
    """Microseconds of processor time in a loop of 10 ms steps: of the calls by kind, and for each 10 ms."""

    boundary: float  #: each call
    bare: float  #: each empty call
    reading: float
    helper: float


def paced(training: TrainingProcess, boundary: Callable[[int], object], bare: Callable[[int], object]) -> Window:
    """Make steps of 10 ms for some seconds, every other one with an empty call, which finds the same cold caches."""
    read_memory, reading_s = training.read_memory, 0.0

    def timed() -> None:
        nonlocal reading_s
        begun_s = time.thread_time()
        read_memory()
        reading_s += time.thread_time() - begun_s

    training.read_memory = timed  # type: ignore[method-assign]
    spent: dict[Callable[[int], object], list[float]] = {boundary: [], bare: []}
    begun_s, begun_cpu_s = time.perf_counter(), cpu_s()
    while time.perf_counter() < begun_s + WINDOW_S:
        for call in (boundary, bare):
            time.sleep(STEP_US / 1e6)
            call_s = time.thread_time()
            call(training.boundaries)  # a step that was not before, so that each beat has news
            spent[call].append(time.thread_time() - call_s)
    training.read_memory = read_memory  # type: ignore[method-assign]
    steps = (time.perf_counter() - begun_s) * 1e6 / STEP_US
    calls = (statistics.median(spent[call]) * 1e6 for call in (boundary, bare))
    return Window(*calls, reading_s * 1e6 / steps, (cpu_s() - begun_cpu_s) * 1e6 / steps)


def sampled_loop() -> tuple[float, float]:
    """Return how much longer a loop of Python takes beside the sampling thread, and that thread's us per 10 ms."""
    from app_agent.training import memory_cycle, process_memory

    def work_s() -> float:
        begun = time.perf_counter()
        for _ in range(4_000_000):
            pass
        return time.perf_counter() - begun

    ratios, shares = [], []
    for _ in range(ROUNDS):
        alone_s, stop = work_s(), threading.Event()
        samples = memory_cycle.read(process_memory.allocations, 60.0, stop.is_set)
        thread = threading.Thread(target=lambda rest=samples: list(rest), name="sampler")
        thread.start()
        begun_s = time.perf_counter()
        ratios.append(work_s() / alone_s)
        shares.append(cpu_s("sampler") / (time.perf_counter() - begun_s))
        stop.set()
        thread.join()
    return statistics.median(ratios), statistics.median(shares) * STEP_US


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        listen(Path(folder, "agent.sock"))
        os.environ |= {
            "GPU_ARBITER_SOCKET": str(Path(folder, "agent.sock")),
            "GPU_ARBITER_TASK": "bench-1.0-a0",
            "GPU_ARBITER_ATTEMPT": "0",
            "GPU_ARBITER_CHECKPOINT_DIR": folder,
        }
        document = measure()
    if options.json:
        print(json.dumps(document))
    else:
        print(f"cost per step        {document['per_step_us']:.2f} us")
        print(f"share of a 10 ms step {document['share_of_10ms']:.4%}, goal under {GOAL:.1%}")
        print(f"of it readings       {document['memory_readings_us_per_10ms']:.2f} us, of the memory counters")
        print(f"with cold caches     {document['step_end_with_cold_caches_us']:.2f} us for session.step_end alone")
        print(f"no steps, sampled    {document['sampled_loop_ratio']:.4f} of the time without, for 20 s of each minute")
        print("met" if document["met"] else "NOT met")
    return 0 if document["met"] else 1


def measure() -> dict[str, object]:
    from app_agent import session

    session.init()
    metrics, save = {"loss": 1.0}, os.fspath

    def bare(_: int) -> None:
        pass

    def explicit(step: int) -> None:
        session.step_end(step, save=save, metrics=metrics)

    def hooked(_: int) -> None:
        session._after_optimizer_step(None, (), {})

    hook_us, hook_ratio = cost_us(hooked, bare)  # first: the hook counts nothing once step_end has been called
    explicit_us, explicit_ratio = cost_us(explicit, bare)
    assert session._session is not None
    windows = [paced(session._session, explicit, bare) for _ in range(WINDOWS)]
    cold = Window(*map(statistics.median, zip(*windows, strict=True)))
    per_step_us = max(hook_us, explicit_us) + cold.reading + cold.helper
    sampled_ratio, sampler_us = sampled_loop()
    return {
        "schema": "step-overhead/v1",
        "per_step_us": round(per_step_us, 3),
        "share_of_10ms": round(per_step_us / STEP_US, 6),
        "goal": GOAL,
        "met": per_step_us / STEP_US < GOAL,
        "step_end_us": round(explicit_us, 3),
        "step_end_ratio_to_bare_loop": round(explicit_ratio, 2),
        "optimizer_hook_us": round(hook_us, 3),
        "optimizer_hook_ratio_to_bare_loop": round(hook_ratio, 2),
        "step_end_with_cold_caches_us": round(cold.boundary - cold.bare, 3),
        "memory_readings_us_per_10ms": round(cold.reading, 3),
        "helper_thread_us_per_10ms": round(cold.helper, 3),
        "sampled_loop_ratio": round(sampled_ratio, 4),
        "sampler_thread_us_per_10ms": round(sampler_us, 3),
    }


if __name__ == "__main__":
    sys.exit(main())
