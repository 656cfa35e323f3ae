"""Two small trainings on one GPU: at once, in turns, and at once under MPS, each against its own rate alone.

*Gain* is the sum of both rates, each divided by the same training's rate alone: what a node agent decides by
(`node_agent.core.packing`). Turns without a loss give 1.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from benchmarks.gpu import training
from benchmarks.gpu.readings import Readings
from benchmarks.gpu.record import Figures, Section, Setting
from benchmarks.gpu.trainees import Answer, Trainee, describe, trainee

GB = 0.4
TURNS = 8
MPS_GAINS = "trainings gain at least as much under MPS as packed without it"
#: By which two measurements of one pair's gain differ.
NOISE = 0.03


def run(setting: Setting, section: Section) -> None:
    """Measure a pair that keeps the GPU busy and a pair that waits for data half the time."""
    step_s = _step_s(setting)
    section.note(step_s=step_s)
    for name, idle_s in (("busy", 0.0), ("half_idle", step_s)):
        found = _pair(setting, idle_s, {})
        section.note(**{name: found})
        section.check(
            f"both of a pair make progress when packed: {name}", all(share > 0.05 for share in found["shares"]), **found
        )
    section.check(
        "trainings that wait half the time gain by being packed, against turns",
        found["packed_gain"] > max(1.0, found["turns_gain"]),
        gpu_only=True,
        packed=found["packed_gain"],
        turns=found["turns_gain"],
    )
    if setting.gpus != "nvml":
        section.untried(MPS_GAINS, "no NVIDIA GPU (this is a rehearsal without a driver)")
        return
    mps = _under_mps(setting, step_s)
    section.note(mps=mps)
    if "absent" in mps:
        section.untried(MPS_GAINS, mps["absent"])
        return
    packed, overlapped = found["packed_gain"], mps["half_idle"]["packed_gain"]
    section.check(MPS_GAINS, overlapped >= (1 - NOISE) * packed, gpu_only=True, packed=packed, mps=overlapped)


def _options(setting: Setting, seed: int) -> Figures:
    return {"gb": setting.pick(GB, 0.01), "width": setting.pick(1024, 128), "batch": 256, "seed": seed}


def _step_s(setting: Setting) -> float:
    with trainee(setting.device, "alone") as one:
        one.ask(training.begin, **_options(setting, 0))
        return float(one.ask(training.run, steps=20)["seconds"]) / 20


def _pair(setting: Setting, idle_s: float, env: Mapping[str, str]) -> Figures:
    """Return the rates of two trainings alone, packed and in turns (mini-batches per second)."""
    seconds = setting.pick(5.0, 1.5)
    with ExitStack() as stack:
        pair = [stack.enter_context(trainee(setting.device, f"pair-{n}", env)) for n in range(2)]
        for seed, one in enumerate(pair):
            one.ask(training.begin, **_options(setting, seed))
        alone = [_rate(one.ask(training.loop, seconds=seconds / 2, idle_s=idle_s)) for one in pair]
        packed = _packed(pair, seconds, idle_s)
        shares = [rate / by_itself for rate, by_itself in zip(packed, alone, strict=True)]
        turns = None if env else _in_turns(pair, alone, setting.pick(1.0, 0.3), idle_s)
        seen = _seen(pair)
    return {
        "alone_per_s": alone,
        "packed_per_s": packed,
        "shares": shares,
        "packed_gain": sum(shares),
        "turns_gain": turns,
        "seen": seen,
    }


def _rate(answer: Answer) -> float:
    return float(answer["steps"] / answer["seconds"])


def _packed(pair: Sequence[Trainee], seconds: float, idle_s: float) -> list[float]:
    for one in pair:
        one.send(training.loop, seconds=seconds, idle_s=idle_s)
    return [_rate(one.hear()) for one in pair]


def _in_turns(pair: Sequence[Trainee], alone: Sequence[float], quantum_s: float, idle_s: float) -> float:
    """Return the gain of turns by parking, what it costs included."""
    for one in pair:
        one.ask(training.prepare)
        one.ask(training.park)
    begun, made = time.monotonic(), [0, 0]
    for number in range(TURNS):
        one = pair[number % 2]
        one.ask(training.restore)
        made[number % 2] += one.ask(training.loop, seconds=quantum_s, idle_s=idle_s)["steps"]
        one.ask(training.park)
    seconds = time.monotonic() - begun
    for one in pair:
        one.ask(training.restore)
    return sum(steps / seconds / rate for steps, rate in zip(made, alone, strict=True))


def _seen(pair: Sequence[Trainee]) -> Figures:
    """Return in which of NVML's lists the pair shows."""
    readings = Readings.of(pair[0])
    if not readings:
        return {}
    pids = {one.pid for one in pair}
    lists = {"compute": "nvmlDeviceGetComputeRunningProcesses", "mps": "nvmlDeviceGetMPSComputeRunningProcesses"}
    found: Figures = {}
    for name, function in lists.items():
        with suppress(readings.nvml.NVMLError):
            shown = {int(process.pid) for process in getattr(readings.nvml, function)(readings.handle)}
            found[name] = len(shown & pids)
    return found


# --- MPS ------------------------------------------------------------------------------------------------------------


def _under_mps(setting: Setting, step_s: float) -> Figures:
    """Measure both pairs under MPS as a node agent runs it; no setting of the GPU changes. It may be impossible."""
    try:
        with under_daemon(_uuid(setting)) as env:
            return {"busy": _pair(setting, 0.0, env), "half_idle": _pair(setting, step_s, env)}
    except Exception as error:  # noqa: BLE001 - MPS is an extra: where there is none, that is the finding
        return {"absent": f"{type(error).__name__}: {error}"}


def _uuid(setting: Setting) -> str:
    """Return the GPU of the trainees."""
    with trainee(setting.device, "uuid") as one:
        if not setting.rehearsal:
            return str(one.ask(describe)["uuid"])
        readings = Readings.of(one)
        return str(readings.nvml.nvmlDeviceGetUUID(readings.handle))


@contextmanager
def under_daemon(uuid: str) -> Iterator[dict[str, str]]:
    """Run an MPS daemon that only those see who are given its environment."""
    # What a node agent needs may be missing where PyTorch is not.
    from node_agent.devices import visible
    from node_agent.workers.mps import MpsDaemon
    from protocol.messages import GpuId

    gpu = GpuId(uuid)
    with tempfile.TemporaryDirectory(prefix="gpu-arbiter-mps-") as folder:
        daemon = MpsDaemon(gpu, Path(folder, "pipe"), Path(folder, "logs"))
        try:
            daemon.ready(has_clients=False)
            yield daemon.env | visible([gpu])
        finally:
            daemon.end()
