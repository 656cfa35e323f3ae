"""The mini-batch time read off a training that does not tell it, signal by signal, against the truth."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from benchmarks.gpu.record import Figures, Section, Setting, Skip
from benchmarks.gpu.trainees import Answer, Trainee, describe, trainee
from node_agent.devices import DeviceBackend, DeviceError
from node_agent.devices.activity import GAP_S
from node_agent.devices.sampling import open_backend
from node_agent.introspection import Estimate, estimate, from_counter
from protocol.messages import GpuId

#: Mini-batch times (s). The first is too fast for what a device tells, and must then be unknown.
PERIODS_S = (0.25, 0.8, 2.5)
#: How long each is watched: for so many mini-batches, and no shorter than this.
WINDOW_PERIODS, WINDOW_S = 12, 22.0
#: Of the true period: what counts as found, and what as wrong.
COUNTER_ERROR, DEVICE_ERROR, WRONG = 0.03, 0.05, 0.1
#: Work takes this share of a mini-batch; the rest stands for the loading of data.
DUTY = 0.7

Signal = list[tuple[float, float]]


def run(setting: Setting, section: Section) -> None:
    """Watch trainings of known pace, then work without a period; last, what the counter costs."""
    backend = open_backend(setting.gpus, "n1", memory_bytes=4 * 2**30, pin=False)
    paced: list[Figures] = []
    try:
        for period_s in setting.pick(PERIODS_S, (0.8,)):
            paced.append(_paced(setting, backend, period_s))
            section.note(paced=paced)
            _judge(section, paced[-1])
        aperiodic = _aperiodic(setting, backend)
    finally:
        backend.close()
    section.note(aperiodic=aperiodic, sampler=_sampler_cost(setting))
    false = {name: one["found_s"] for name, one in aperiodic["signals"].items() if one["found_s"]}
    section.check("no signal of work without a period yields one", not false, gpu_only=True, false=false)


def _judge(section: Section, found: Figures) -> None:
    period_s, signals = found["period_s"], found["signals"]
    for name, one in signals.items():
        section.check(
            f"no wrong period of {period_s:g} s from {name}", abs(one["error"] or 0.0) <= WRONG, gpu_only=True, **one
        )
    counter = signals["counter"]
    section.check(
        f"the allocator's counter tells {period_s:g} s",
        counter["error"] is not None and abs(counter["error"]) <= COUNTER_ERROR,
        gpu_only=True,
        **counter,
    )
    if period_s >= 0.5 and "gpm" not in signals:
        section.untried(f"GPM tells {period_s:g} s", "this GPU tells nothing by GPM")
    elif period_s >= 0.5:
        section.check(
            f"GPM tells {period_s:g} s",
            signals["gpm"]["error"] is not None and abs(signals["gpm"]["error"]) <= DEVICE_ERROR,
            gpu_only=True,
            **signals["gpm"],
        )
    memory = signals["memory"]
    section.check(
        "the processes' memory shows no period under PyTorch", memory["found_s"] is None, gpu_only=True, **memory
    )


def _paced(setting: Setting, backend: DeviceBackend, period_s: float) -> Figures:
    window_s = max(WINDOW_S, WINDOW_PERIODS * period_s)
    with trainee(setting.device, f"period {period_s:g}") as one:
        one.ask(begin_small)
        gpu = _gpu(backend, one)
        one.send(work, period_s=period_s, seconds=window_s, sampled=True)
        signals, gaps = _watch(backend, gpu, window_s)
        done = one.hear()
    truth = statistics.median(later - sooner for sooner, later in pairwise(done["ends"]))
    found = {name: _figures(signal, truth, estimate) for name, signal in signals.items()}
    found["counter"] = _figures([(at, float(held)) for at, held in done["counter"]], truth, from_counter)
    return {"period_s": period_s, "true_s": truth, "signals": found, **gaps}


def _aperiodic(setting: Setting, backend: DeviceBackend) -> Figures:
    window_s = WINDOW_S
    with trainee(setting.device, "aperiodic") as one:
        one.ask(begin_small)
        gpu = _gpu(backend, one)
        one.send(serve, seconds=window_s, seed=1)
        signals, gaps = _watch(backend, gpu, window_s)
        one.hear()
    return {"signals": {name: _figures(signal, None, estimate) for name, signal in signals.items()}, **gaps}


def _gpu(backend: DeviceBackend, one: Trainee) -> GpuId:
    """Return the GPU that the trainee uses, which must not be told of anybody else's work."""
    backend.attach(os.getpid(), [backend.devices()[0].gpu])  # whose child it is
    uuid = one.ask(describe).get("uuid")
    known = [device.gpu for device in backend.devices()]
    if uuid is None:
        return known[0]
    if uuid not in known:
        raise Skip(f"NVML does not show the GPU {uuid} that PyTorch uses; it shows {', '.join(known)}")
    return GpuId(uuid)


def _watch(backend: DeviceBackend, gpu: GpuId, seconds: float) -> tuple[dict[str, Signal], Figures]:
    """Read all that a device tells at the gaps of a node agent; return the signals, and how long readings took."""
    dice = random.Random(0)
    signals: dict[str, Signal] = {"memory": []}
    calls: list[float] = []
    since = time.monotonic()
    end = since + seconds - 0.5
    while (begun := time.monotonic()) < end:
        try:
            activity, used = backend.activity(gpu), backend.utilisation(gpu)
            held = sum(process.memory_bytes for process in backend.processes(gpu))
        except DeviceError as error:
            raise Skip(f"the device does not answer: {error}") from error
        now = time.monotonic()
        calls.append(now - begun)
        signals["memory"].append((now, float(held)))
        if activity is not None:
            signals.setdefault(activity.source, []).append(((since + now) / 2, activity.busy))
        if used is not None and (activity is None or activity.source == "gpm"):
            signals.setdefault("utilisation", []).append((now, used))
        since = now
        time.sleep(dice.uniform(*GAP_S))
    return signals, {"call_ms_median": 1e3 * statistics.median(calls), "call_ms_max": 1e3 * max(calls)}


def _figures(signal: Signal, truth: float | None, look: Callable[..., Estimate | None]) -> Figures:
    """Return what was found in a signal, and how far off it is (`error`, as a share of the truth)."""
    times, values = [at for at, _ in signal], [value for _, value in signal]
    found = look(times, values) if len(signal) > 1 else None
    error = None if found is None or truth is None else found.period_s / truth - 1
    gaps = [later - sooner for sooner, later in pairwise(times)]
    return {
        "samples": len(signal),
        "distinct": len(set(values)),
        "gap_ms_median": 1e3 * statistics.median(gaps) if gaps else None,
        "found_s": None if found is None else found.period_s,
        "confidence": None if found is None else found.confidence,
        "error": error,
    }


def _sampler_cost(setting: Setting) -> Figures:
    """Return what a thread costs that reads the counter every 10 ms: mini-batches without it and with it, in turn."""
    seconds = setting.pick(2.0, 0.5)
    made: dict[bool, int] = {False: 0, True: 0}
    with trainee(setting.device, "sampler") as one:
        one.ask(begin_small)
        for sampled in (False, True, True, False):
            made[sampled] += len(one.ask(work, period_s=0.0, seconds=seconds, sampled=sampled)["ends"])
    return {"steps_without": made[False], "steps_with": made[True], "cost": 1 - made[True] / max(1, made[False])}


# --- in the trainee -------------------------------------------------------------------------------------------------


def begin_small(child: Any) -> Answer:
    """Build a training whose mini-batch is much shorter than all periods."""
    from benchmarks.gpu import training

    cuda = child.device == "cuda"
    return training.begin(child, gb=0.5 if cuda else 0.01, width=1024 if cuda else 128, batch=256 if cuda else 64)


def work(child: Any, *, period_s: float, seconds: float, sampled: bool) -> Answer:
    """Make mini-batches of `period_s` for so long; return when each ended, and the counter's samples."""
    from benchmarks.gpu import training

    passes = _passes(child, DUTY * period_s) if period_s else 1
    stop, counter = threading.Event(), []  # type: ignore[var-annotated]
    thread = threading.Thread(target=_sample, args=(stop, counter))
    if sampled:
        thread.start()
    ends, end = [], time.monotonic() + seconds
    while (begun := time.monotonic()) < end:
        child.training.step(passes)
        training.synchronize(child)
        time.sleep(max(0.0, period_s - (time.monotonic() - begun)))
        ends.append(time.monotonic())
    stop.set()
    if sampled:
        thread.join()
    return {"ends": ends, "counter": counter}


def serve(child: Any, *, seconds: float, seed: int) -> Answer:
    """Work in bursts of random length at random times, as serving does."""
    from benchmarks.gpu import training

    dice, end = random.Random(seed), time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(dice.expovariate(2.5))
        child.training.step(dice.randint(1, 20))
        training.synchronize(child)
    return {}


def _passes(child: Any, seconds: float) -> int:
    """Return how many micro-batches make so long a mini-batch."""
    from benchmarks.gpu import training

    tried = 20
    begun = time.monotonic()
    child.training.step(tried)
    training.synchronize(child)
    return max(1, round(seconds * tried / (time.monotonic() - begun)))


def _sample(stop: threading.Event, into: list[tuple[float, int]]) -> None:
    from app_agent.training import process_memory

    dice = random.Random(0)
    while not stop.wait(dice.uniform(0.005, 0.015)):
        into.append((time.monotonic(), process_memory.allocated_bytes((0,)) or 0))
