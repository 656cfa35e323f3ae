"""The driver suspends a script that tells of no steps: at the trough of its memory on a site, else at any moment.

The image of a suspended process lies in its own host memory, so that what this grows by is what the driver has moved.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from msgspec.structs import replace

from benchmarks.gpu.record import Figures, Section, Setting, Skip
from benchmarks.gpu.sections.demo import app_of
from benchmarks.gpu.sections.driver import LIMIT_S, LOCK_S, ask, helper_of, resident_bytes
from launch import log_lines
from launch.client import Client, open_client
from launch.demo import settings
from launch.site.site import end_everything, in_process, local_site, memory_bus, wait_ready

JOB = Path(__file__).resolve().parents[1] / "cyclic.py"
Read = Literal["forward", "update"]
#: After what a script reads its loss, and so stands: at the peak of its memory, or at the trough.
READS: tuple[Read, ...] = ("forward", "update")
SUSPENSIONS = 3
#: Of what is moved at any moment, so much may be moved at the trough: activations of some layers, and all weights.
LOW, STEP_ERROR = 0.25, 0.03
KNOWN_S, TURN_S, RUN_S, QUANTUM_S, GRACE_S = 50.0, 30.0, 0.7, 2.0, 30.0
#: Suspending and resuming may take so many times a turn: they are what is measured.
OVERHEAD_MAX = 6.0
REAL = ("--device", "cuda")
REHEARSED = ("--device", "cpu", "--width", "512", "--rows", "4096", "--layers", "8")
#: The training that it takes turns with.
OTHER_JOB = Path(__file__).resolve().parents[1] / "job.py"
OTHER = ("--device", "cuda", "--steps", "1000000", "--idle-ms", "5")
OTHER_REHEARSED = ("--device", "cpu", "--steps", "1000000", "--width", "64", "--layers", "2", "--idle-ms", "20")


def run(setting: Setting, section: Section) -> None:
    """Suspend each script at any moment, then on a site."""
    if setting.rehearsal and not setting.played:
        raise Skip("only a driver, real or played, suspends such a script")
    with tempfile.TemporaryDirectory(prefix="gpu-arbiter-gpu-trough-") as scratch:
        # The allocator keeps what it had, so the driver moves the peak wherever the script stands: one of them says it.
        whole = _any_moment(setting, Path(scratch), READS[0])
        section.note(any_moment=whole)
        for read in READS:
            found = _on_a_site(setting, Path(scratch), read)
            section.note(**{f"reads the loss after the {read}": found})
            _judge(section, read, found, whole)


def _command(setting: Setting, folder: Path, read: Read, seconds: float) -> tuple[str, ...]:
    told = ("--read", read, "--seconds", str(seconds), "--out", str(folder / "told"))
    return (sys.executable, str(JOB), *setting.pick(REAL, REHEARSED), *told)


def _begun(folder: Path) -> int:
    """Wait for the script's first mini-batches; return its process number."""
    deadline = time.monotonic() + KNOWN_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            lines = (folder / "told").read_text().split()
            if len(lines) > 3:
                return int(lines[0])
        time.sleep(0.05)
    raise RuntimeError(f"{JOB.name} made no mini-batch within {KNOWN_S:.0f} s")


def _step_s(folder: Path) -> float:
    return median(map(float, (folder / "told").read_text().split()[1:]))


def _any_moment(setting: Setting, scratch: Path, read: Read) -> Figures:
    """Suspend the script by the driver's helper alone, whenever it may be."""
    folder = scratch / "alone"
    folder.mkdir()
    dice, turns = random.Random(1), []
    with subprocess.Popen(_command(setting, folder, read, 300.0)) as job:
        try:
            pid = _begun(folder)
            for _ in range(SUSPENSIONS):
                time.sleep(RUN_S + dice.random())
                before = resident_bytes(pid)
                begun = time.monotonic()
                out = ask(helper_of(setting), {"do": "suspend", "pids": [pid], "lock_s": LOCK_S, "timeout_s": LIMIT_S})
                if not out["ok"]:
                    raise Skip(f"the driver does not suspend the script: {out['reason']}")
                turns.append({"seconds": time.monotonic() - begun, "image_bytes": resident_bytes(pid) - before})
                ask(helper_of(setting), {"do": "resume", "pids": [pid], "moves": {}, "timeout_s": LIMIT_S})
            return _summed(turns) | {"step_s": _step_s(folder)}
        finally:
            job.kill()


def _summed(turns: list[Figures]) -> Figures:
    return {"turns": turns, **{f"mean_{key}": fmean(each[key] for each in turns) for key in turns[0]}}


def _on_a_site(setting: Setting, scratch: Path, read: Read) -> Figures:
    """Let the script take turns with a training that can be parked, once its cycle is known or ought to be."""
    folder = scratch / read
    folder.mkdir()
    rules = replace(settings(30.0), policy="gandiva", sharing="timeslice", quantum_s=QUANTUM_S)
    site = local_site(folder, nodes=1, gpus=setting.gpus, owner="bench", settings=rules)
    site = replace(site, nodes=(replace(site.nodes[0], slice_overhead_max=OVERHEAD_MAX),))
    with (setting.out / f"trough-{read}.jsonl").open("w") as log:
        log_lines.configure(json=True, stream=log)
        with in_process(site, memory_bus()) as check:
            wait_ready(site, check)
            with open_client(site.socket) as client:
                try:
                    return _taking_turns(setting, client, check, folder, read)
                finally:
                    end_everything(client)


def _taking_turns(setting: Setting, client: Client, check: Callable[[], None], folder: Path, read: Read) -> Figures:
    client.submit(app_of(folder, read, _command(setting, folder, read, 600.0), grace_s=GRACE_S))
    known = _look(client, check, KNOWN_S, lambda task: bool(task["measured"]["source"] != "unknown"))
    other = setting.pick(OTHER, OTHER_REHEARSED)
    line = (sys.executable, str(OTHER_JOB), *other, "--out", str(folder / "other"))
    client.submit(app_of(folder, "other", line, grace_s=GRACE_S))
    pid = _begun(folder)
    turns = [{"image_bytes": _image_bytes(client, check, pid)} for _ in range(SUSPENSIONS)]
    told = {key: known["measured"][key] for key in ("source", "confidence", "periods", "trough_bytes", "peak_bytes")}
    return _summed(turns) | told | {"said_step_s": known["step_s"], "step_s": _step_s(folder)}


def _image_bytes(client: Client, check: Callable[[], None], pid: int) -> int:
    """Return by how much the script's host memory grows in its next rest."""
    seen: list[int] = []

    def is_in(phase: str) -> Callable[[Figures], bool]:
        def look(task: Figures) -> bool:
            seen.append(resident_bytes(pid))
            return bool(task["phase"] == phase)

        return look

    for phase in ("running", "resting", "running"):
        task = _look(client, check, TURN_S, is_in(phase))
        if task["phase"] != phase:
            raise Skip(f"the script was not {phase} within {TURN_S:.0f} s: {task}")
    return max(seen) - min(seen)


def _look(client: Client, check: Callable[[], None], patience_s: float, seen: Callable[[Figures], bool]) -> Figures:
    """Return the script's task once that is seen of it, or as it is when patience ends."""
    task: Figures = {}
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        check()
        tasks: list[Any] = [
            task for app in client.query("apps")["apps"] for task in app["tasks"] if app["name"] in READS
        ]
        if tasks:
            task = tasks[0]
            if seen(task):
                break
        time.sleep(0.05)
    return task


def _judge(section: Section, read: Read, site: Figures, whole: Figures) -> None:
    images = [turn["image_bytes"] for turn in site["turns"]]
    section.check(
        f"a script that reads its loss after the {read} is suspended at the trough of its memory",
        max(images) <= LOW * whole["mean_image_bytes"],
        gpu_only=True,
        images=images,
        any_moment=whole["mean_image_bytes"],
    )
    error = site["said_step_s"] / site["step_s"] - 1 if site["said_step_s"] else None
    section.check(
        f"the time of its mini-batches is known within 3 %: {read}",
        error is not None and abs(error) <= STEP_ERROR,
        gpu_only=True,
        error=error,
        source=site["source"],
    )
