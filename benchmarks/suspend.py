"""What suspending costs: ``python benchmarks/suspend.py [--gib 1] [--processes 3] [--json]``.

Parking throughput, out of a virtual GPU and in again, as a ratio to one plain `copy_` between two warm tensors of the
same bytes, timed right before it in the same process: 1 is as fast as memory goes. Each process has the environment
that a node agent gives a worker on one virtual GPU and prepares its arena as a node agent tells it to, so its first
suspension counts. One more process is not told to, to show what that is worth. Medians over the processes.

The way in is also compared with the same `copy_` into memory that nobody has touched, which is what the kernel makes
of it on a virtual GPU: it gives out new pages, and zeroes each. On a GPU neither is so.

And what all instrumentation costs per step, as a part of a 10 ms step: see `step_overhead.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
GOAL_RATIO = 0.7
GOAL_SHARE = 0.001
CYCLES = 5
ROWS = ("first_out", "first_in", "later_out", "later_in")


def timed_s(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


# --- one process ----------------------------------------------------------------------------------------------------


def make_state(size: int) -> list[Any]:
    """Tensors as of a transformer with AdamW: per layer a few matrices and small vectors, three of each."""
    import torch

    width = 1024
    shapes = [(4 * width, width), (width, 4 * width), (3 * width, width), (width, width), (4 * width,), (width,), (64,)]
    tensors: list[Any] = []
    while sum(tensor.nbytes for tensor in tensors) < size:
        tensors += [torch.rand(shape) for shape in shapes for _ in range(3)]
    return tensors


def measure_parking(size: int, prepared: bool) -> dict[str, Any]:
    import torch

    from app_agent.training import parking

    state = make_state(size)
    sums = [float(tensor.double().sum()) for tensor in state]
    size = sum(tensor.nbytes for tensor in state)
    source, target = torch.ones(size // 4), torch.ones(size // 4)
    _held = source.numpy(), target.numpy()  # so that parking leaves these two where they are
    if prepared:
        parking.prepare(parking.survey().bytes)
    seconds: dict[str, list[float]] = {name: [] for name in ("memcpy", "fresh_copy", *ROWS)}
    ratios: dict[str, list[float]] = {row: [] for row in (*ROWS, "in_to_fresh_copy")}
    parked: list[parking.Parked] = []
    for cycle in range(CYCLES):
        for way, action in (("out", lambda: parked.append(parking.park())), ("in", lambda: parked.pop().restore())):
            memcpy_s = statistics.median(timed_s(lambda: target.copy_(source)) for _ in range(3))
            took_s = timed_s(action)
            row = f"{'later' if cycle else 'first'}_{way}"
            seconds["memcpy"].append(memcpy_s)
            if way == "in":
                fresh_s = timed_s(lambda: torch.empty(size // 4).copy_(source))
                seconds["fresh_copy"].append(fresh_s)
                ratios["in_to_fresh_copy"].append(fresh_s / took_s)
            seconds[row].append(took_s)
            ratios[row].append(memcpy_s / took_s)
    assert sums == [float(tensor.double().sum()) for tensor in state]
    return {"bytes": size, "seconds": seconds, "ratios": ratios}


# --- all of them ----------------------------------------------------------------------------------------------------


def run_process(size: int, prepared: bool) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT))
    from node_agent.devices.simulated import SimulatedBackend

    backend = SimulatedBackend("bench", 1)
    env = os.environ | backend.env([device.gpu for device in backend.devices()]) | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--child", "prepared" if prepared else "cold", "--gib", str(size / GIB)]
    return dict(json.loads(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout))


def measure_steps() -> dict[str, Any]:
    script = Path(__file__).with_name("step_overhead.py")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, str(script), "--json"], env=env, capture_output=True, text=True, check=False
    )
    return dict(json.loads(ended.stdout))


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def measure(size: int, processes: int) -> dict[str, Any]:
    runs = [run_process(size, prepared=True) for _ in range(processes)]
    cold = run_process(size, prepared=False)
    bytes_parked = runs[0]["bytes"]
    ratios = {row: spread([statistics.median(run["ratios"][row]) for run in runs]) for row in ROWS}
    rates = {
        row: bytes_parked / GIB / statistics.median(statistics.median(run["seconds"][row]) for run in runs)
        for row in ("memcpy", "fresh_copy", *ROWS)
    }
    in_to_fresh = statistics.median(statistics.median(run["ratios"]["in_to_fresh_copy"]) for run in runs)
    worst, steps = min(ratios[row]["median"] for row in ROWS), measure_steps()
    return {
        "schema": "suspend/v1",
        "bytes": bytes_parked,
        "processes": processes,
        "ratio_to_memcpy": round(worst, 3),
        "goal_ratio": GOAL_RATIO,
        "met": worst >= GOAL_RATIO,
        "ratios": {row: {name: round(value, 3) for name, value in ratio.items()} for row, ratio in ratios.items()},
        "gib_per_s": {row: round(rate, 2) for row, rate in rates.items()},
        "in_ratio_to_fresh_copy": round(in_to_fresh, 3),
        "unprepared_first_out": round(cold["ratios"]["first_out"][0], 3),
        "step_share_of_10ms": steps["share_of_10ms"],
        "step_goal": GOAL_SHARE,
        "step_met": steps["met"],
    }


def show(document: dict[str, Any]) -> None:
    rates = document["gib_per_s"]
    print(f"{document['bytes'] / GIB:.2f} GiB, {document['processes']} processes; plain copy {rates['memcpy']} GiB/s")
    for row, ratio in document["ratios"].items():
        way = row.replace("_", " ")
        print(
            f"{way:<10} {ratio['median']:.2f} of it ({ratio['least']:.2f} to {ratio['most']:.2f}), {rates[row]} GiB/s"
        )
    print(f"in: {document['in_ratio_to_fresh_copy']:.2f} of a copy into new memory, {rates['fresh_copy']} GiB/s")
    print(f"first out without a prepared arena: {document['unprepared_first_out']:.2f} of it")
    print(f"worst {document['ratio_to_memcpy']:.2f}, goal {GOAL_RATIO}: {'met' if document['met'] else 'NOT met'}")
    share = f"{document['step_share_of_10ms']:.4%} of a 10 ms step, goal under {GOAL_SHARE:.1%}"
    print(f"instrumentation {share}: {'met' if document['step_met'] else 'NOT met'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--gib", type=float, default=1.0, help="bytes to park")
    parser.add_argument("--processes", type=int, default=3, help="fresh processes to measure in")
    parser.add_argument("--child", choices=("prepared", "cold"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure_parking(int(options.gib * GIB), options.child == "prepared")))
        return 0
    document = measure(int(options.gib * GIB), options.processes)
    if options.json:
        print(json.dumps(document))
    else:
        show(document)
    return 0 if document["met"] and document["step_met"] else 1


if __name__ == "__main__":
    sys.exit(main())
