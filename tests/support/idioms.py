"""Runs the training scripts of `tests/idioms/` alone and on a busy site, and says what became of each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from app_agent.core.spec import AppSpec
from arbiter.core.model import ArbiterSettings
from launch.client import Client, open_client
from launch.faults import Fault
from launch.site import end_everything, in_process, local_site, memory_bus, wait_ready
from launch.spec import environment
from launch.views import OVER

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "idioms"
NEIGHBOUR = Path(__file__).with_name("neighbour.py")
NEIGHBOURS = 2
SEATS = 2
#: Short enough that each script meets several ends of a turn and of a lease.
LEASE_S, QUANTUM_S = 4.0, 0.5
SETTINGS = ArbiterSettings(
    policy="las",
    lease_s=LEASE_S,
    renewal_lead_s=1.0,
    round_pause_s=0.2,
    probe_s=0.5,
    bid_s=0.5,
    beat_s=0.3,
    sharing="timeslice",
    seats=SEATS,
    quantum_s=QUANTUM_S,
)
PATIENCE_S = 200.0


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def constant(name: str, wanted: str, default: int) -> int:
    found = re.search(rf"^{wanted} = (\d+)$", (FOLDER / f"{name}.py").read_text(), re.MULTILINE)
    return int(found[1]) if found else default


def command(name: str, out: Path) -> tuple[str, ...]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2") if "torchrun" in name else ()
    return (sys.executable, *launcher, str(FOLDER / f"{name}.py"), str(out))


if __name__ == "__main__":
    import json, tempfile
    name = sys.argv[1]
    folder = Path(tempfile.mkdtemp())
    b = time.time()
    (folder/"alone").mkdir(); (folder/"shared").mkdir()
    subprocess.run(command(name, folder/"alone"/"w"), check=True, cwd=folder)
    print("alone", time.time()-b, flush=True)
    gpus = constant(name, "GPUS", 1)
    site = local_site(folder, nodes=1, gpus=f"simulated:{gpus}", settings=SETTINGS)
    site = replace(site, nodes=tuple(replace(node, slice_overhead_max=1e3, sample_s=0.2) for node in site.nodes))
    with in_process(site, memory_bus()) as check:
        wait_ready(site, check)
        print("ready", time.time()-b, flush=True)
        with open_client(site.socket) as client:
            def spec(cmd): return AppSpec(trials=(cmd,), cwd=str(folder), checkpoint_root=str(folder/"ck"), env=environment((), {}), gang=gpus, grace_s=20., restart_s=2.)
            for n in range(NEIGHBOURS):
                client.submit(spec((sys.executable, str(NEIGHBOUR))))
            app = client.submit(spec(command(name, folder/"shared"/"w")))
            while True:
                check()
                doc = client.query("apps", app)["apps"][0]
                if doc["state"] in OVER or time.time()-b > 120: break
                time.sleep(0.3)
            print("over", time.time()-b)
            d = client.query("explain", app)
            print(json.dumps(doc)); print(json.dumps(d["story"], indent=0))
            for a in client.query("apps")["apps"]: print(a["id"], a["state"], a["suspensions"], a["preemptions"], a["grants"], a["renewals"], a["steps_lost"], a.get("lost_gpu_seconds"), a["gpu_seconds"])
            end_everything(client)
    print((folder/"alone"/"w").read_bytes() == (folder/"shared"/"w").read_bytes())
