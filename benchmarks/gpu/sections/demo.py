"""From submission to the last mini-batch on real GPUs: a site in this process, two jobs in turns, then packed.

Each job wants all GPUs of this host (and trains on the first), so that both share, however many there are.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from app_agent.core.spec import AppSpec
from app_agent.streams import OVER
from benchmarks.gpu.readings import Readings
from benchmarks.gpu.record import Figures, Section, Setting, Skip
from benchmarks.gpu.trainees import trainee
from launch import log_lines
from launch.client import Client, open_client
from launch.demo import settings
from launch.site.site import end_everything, in_process, local_site, memory_bus, wait_ready
from launch.spec import environment
from protocol.messages import Requirements, Sharing

JOB = Path(__file__).resolve().parents[1] / "job.py"
NAMES = ("ana", "bob")
LEASE_S, POLL_S = 30.0, 0.25
TURNS = "both gave way to each other"
#: Passed on if set: where the driver's library lies, and packages outside the interpreter's own folders.
PASSED_ON = ("LD_LIBRARY_PATH", "PYTHONPATH")


@dataclass(frozen=True)
class Scale:
    """How long things take. `steps` of one job; `quantum_s` of a turn; `limit_s` for both jobs together.

    The site's log is ``NAME-SHARING.jsonl``, beside the document. Suspending and resuming may take `overhead_max` of a
    turn: above 1, so that short jobs take turns whatever those cost.
    """

    name: str
    steps: int
    quantum_s: float
    limit_s: float
    options: tuple[str, ...]
    overhead_max: float = 0.02


REAL = Scale("demo", 500, 3.0, 150.0, ("--device", "cuda", "--passes", "8", "--idle-ms", "15"))
REHEARSED = Scale("demo", 500, 0.7, 150.0, ("--device", "cpu", "--width", "128", "--layers", "2", "--idle-ms", "15"))


def run(setting: Setting, section: Section) -> None:
    """Run the jobs alone, then in turns, then packed; compare what came out."""
    found = play(setting, section, setting.pick(REAL, REHEARSED), ("timeslice", "pack"))
    section.check("no job was packed in turns", found["timeslice"]["packed_looks"] == 0)
    tried = bool(found["pack"]["packed_looks"])
    section.check("the two were tried together on the GPU", tried, remarks=found["pack"]["remarks"])


def play(setting: Setting, section: Section, scale: Scale, ways: Sequence[Sharing]) -> dict[Sharing, Figures]:
    """Run two jobs without a site, then on one in each way of sharing; compare their weights, return what was seen."""
    seen: dict[Sharing, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-arbiter-gpu-demo-") as scratch:
        alone, seconds = _without_site(Path(scratch), scale)
        section.note(without_site_s=seconds)
        for sharing in ways:
            seen[sharing] = _shared(setting, Path(scratch), scale, sharing)
            section.note(**{sharing: seen[sharing]})
            _judge(section, sharing, seen[sharing], alone)
    return seen


def _command(folder: Path, scale: Scale, seed: int, name: str) -> tuple[str, ...]:
    told = ("--steps", str(scale.steps), "--seed", str(seed), "--out", str(folder / f"{name}.sha256"))
    return (sys.executable, str(JOB), *scale.options, *told)


def _without_site(scratch: Path, scale: Scale) -> tuple[dict[str, str], float]:
    """Return the digests of both jobs' weights when they are not suspended, and the seconds they took side by side."""
    folder = scratch / "alone"
    folder.mkdir()
    begun = time.monotonic()
    with ExitStack() as jobs:
        started = [
            jobs.enter_context(subprocess.Popen(_command(folder, scale, seed, name), stdout=subprocess.DEVNULL))
            for seed, name in enumerate(NAMES)
        ]
        for job in started:
            jobs.callback(job.kill)
        for job in started:
            if code := job.wait(scale.limit_s):
                raise RuntimeError(f"a job that runs without a site ended with code {code}")
    return {name: (folder / f"{name}.sha256").read_text().strip() for name in NAMES}, time.monotonic() - begun


def _shared(setting: Setting, scratch: Path, scale: Scale, sharing: Sharing) -> Figures:
    """Run both jobs on a site that shares GPUs like that; return what was seen."""
    folder = scratch / sharing
    folder.mkdir()
    rules = replace(settings(LEASE_S), policy="gandiva", sharing=sharing, quantum_s=scale.quantum_s)
    site = local_site(folder, nodes=1, gpus=setting.gpus, owner="bench", settings=rules)
    site = replace(site, nodes=(replace(site.nodes[0], slice_overhead_max=scale.overhead_max),))
    with (setting.out / f"{scale.name}-{sharing}.jsonl").open("w") as log:
        log_lines.configure(json=True, stream=log)
        with in_process(site, memory_bus()) as check:
            wait_ready(site, check)
            with open_client(site.socket) as client:
                try:
                    return _trained(setting, client, check, folder, scale)
                finally:
                    end_everything(client)


def _trained(setting: Setting, client: Client, check: Callable[[], None], folder: Path, scale: Scale) -> Figures:
    gang = _gpus(client)
    begun, digests = time.monotonic(), {}
    for seed, name in enumerate(NAMES):
        command = _command(folder, scale, seed, name)
        client.submit(app_of(folder, name, command, gang=gang, steps=scale.steps))
    seen = _watch(setting, client, check, begun + scale.limit_s)
    for name in NAMES:
        path = folder / f"{name}.sha256"
        digests[name] = path.read_text().strip() if path.exists() else ""
    apps = client.query("apps")["apps"]
    told = {app["name"]: {key: app[key] for key in ("state", "jct_s", "suspensions", "rho")} for app in apps}
    return {"gpus": gang, "wall_s": time.monotonic() - begun, "apps": told, "digests": digests, **seen}


def _gpus(client: Client) -> int:
    """Return how many GPUs the node has for us."""
    gpus = [gpu for node in client.query("nodes")["nodes"] for gpu in node["gpus"]]
    usable = [gpu for gpu in gpus if gpu["healthy"]]
    if not usable or len(usable) < len(gpus):
        raise Skip(f"the node agent counts on {len(usable)} of {len(gpus)} GPUs; end what else runs there: {gpus}")
    return len(usable)


def app_of(
    folder: Path, name: str, command: tuple[str, ...], *, gang: int = 1, steps: int = 0, grace_s: float = 20.0
) -> AppSpec:
    """Return an app of one job, with the variables that the host's PyTorch may need; 0 steps: it does not say."""
    return AppSpec(
        trials=(command,),
        cwd=str(folder),
        checkpoint_root=str(folder / "checkpoints"),
        tenant="default",
        name=name,
        env=environment([variable for variable in PASSED_ON if variable in os.environ], os.environ),
        gang=gang,
        steps_total=steps,
        requirements=Requirements(grace_s=grace_s),
    )


def _watch(setting: Setting, client: Client, check: Callable[[], None], deadline: float) -> Figures:
    """Look until both are over or time is; return the most that was in use, and who ran together with whom."""
    # Looked at from outside, not through the site. No context of ours is on the GPU while the jobs run.
    with trainee("cpu") as one:
        readings = Readings.of(one) if setting.gpus == "nvml" else Readings(None, None)
    used = packed = 0
    remarks: set[str] = set()
    shares: dict[str, float] = {}
    while time.monotonic() < deadline:
        check()
        apps: list[dict[str, Any]] = client.query("apps")["apps"]
        used = max(used, readings.used_bytes() or 0)
        tasks = {task["task"]: task["measured"] for app in apps for task in app["tasks"]}
        packed += any(measured["packed_with"] for measured in tasks.values())
        remarks |= {measured["remark"] for measured in tasks.values() if measured["remark"]}
        shares |= {task: measured["share"] for task, measured in tasks.items() if measured["share"] < 1}
        if all(app["state"] in OVER for app in apps):
            break
        time.sleep(POLL_S)
    return {"used_bytes_max": used, "packed_looks": packed, "remarks": sorted(remarks), "shares": shares}


def _judge(section: Section, sharing: Sharing, found: Figures, alone: dict[str, str]) -> None:
    states = {name: app["state"] for name, app in found["apps"].items()}
    section.check(f"both jobs finish: {sharing}", set(states.values()) == {"finished"}, states=states)
    section.check(f"both end with the weights of runs alone: {sharing}", found["digests"] == alone, alone=alone)
    if sharing == "timeslice":
        suspensions = {name: app["suspensions"] for name, app in found["apps"].items()}
        section.check(TURNS, min(suspensions.values()) >= 1, suspensions=suspensions)
