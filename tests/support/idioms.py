"""Runs the training scripts of `tests/idioms/` alone and on a busy site, and says what became of each.

On the site each shares its GPUs with two neighbours that take turns with it, on one seat fewer than there are jobs,
with leases of seconds: so it meets ends of turns and of leases. As a program this runs all of them and rewrites the
table in `docs/training.md`; ``--keep`` leaves that as it is, and names restrict it to some.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from app_agent.core.spec import AppSpec
from app_agent.streams import OVER
from arbiter.core.state.model import ArbiterSettings
from launch.client import Client, open_client
from launch.site.site import Watch, end_everything, in_process, local_site, memory_bus, wait_ready
from protocol.messages import Requirements

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "idioms"
PAGE = ROOT / "docs" / "training.md"
BEGIN, END = "<!-- idioms: made by `make idioms` -->", "<!-- idioms: end -->"
HEAD = ("idiom", "suspended exactly", "steps counted", "what is lost at a preemption")
NEIGHBOUR = Path(__file__).with_name("neighbour.py")
NEIGHBOURS, SEATS = 2, 2
SETTINGS = ArbiterSettings(
    policy="gandiva-fair",  # whoever has had least GPU time is next, at the end of every lease
    lease_s=4.0,
    renewal_lead_s=1.0,
    round_pause_s=0.2,
    probe_s=0.5,
    bid_s=0.5,
    beat_s=0.3,
    sharing="timeslice",
    seats=SEATS,
    quantum_s=0.5,
)
#: For the end of one script: the limit is for a broken build on a busy machine, not for timing.
PATIENCE_S = 240.0
POLL_S = 0.2
#: What a script needs besides PyTorch.
NEEDS = {"lightning_trainer": ("lightning",), "hf_trainer": ("transformers", "accelerate")}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Outcome(Struct, frozen=True):
    """What became of a script on the busy site; `counted` are the steps that it was known to have made at its end."""

    name: str
    state: str
    equal: bool
    counted: int
    suspensions: int
    preemptions: int
    steps_lost: int
    lost_gpu_s: float
    kept: bool  #: told to keep its GPUs beyond a lease, since it could be neither saved nor suspended

    @property
    def row(self) -> tuple[str, ...]:
        """Its line of the table."""
        return (f"`{self.name}`: {title(self.name)}", self._exact, self._steps, self._lost)

    @property
    def _exact(self) -> str:
        return ("yes" if self.equal else "NO") if self.suspensions else "cannot be"

    @property
    def _steps(self) -> str:
        made = constant(self.name, "MINI_BATCHES")
        each, left = divmod(self.counted, made)
        if not self.counted:
            return "no"
        if left or not each:
            return f"{self.counted} of {made}"
        return "yes" if each == 1 else f"{each} for each mini-batch"

    @property
    def _lost(self) -> str:
        if self.steps_lost or self.lost_gpu_s:
            return f"{self.steps_lost} steps, {self.lost_gpu_s:.1f} GPU-seconds"
        if self.suspensions:
            return "nothing: it stands, parked, until it has its GPU again"
        return "all it did: so it keeps its GPU when its lease ends" if self.kept else "all it did"


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def missing(name: str) -> list[str]:
    """The modules that the script needs and that are not here."""
    return [module for module in NEEDS.get(name, ()) if find_spec(module) is None]


def title(name: str) -> str:
    told = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
    assert told is not None, name
    return told.splitlines()[0].removesuffix(".")


def constant(name: str, wanted: str) -> int:
    """The number that the script calls by this name; 1 if it calls none so."""
    found = re.search(rf"^{wanted} = (\d+)\b", (FOLDER / f"{name}.py").read_text(), re.MULTILINE)
    return int(found[1]) if found else 1


def command(name: str, out: Path) -> tuple[str, ...]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2") if "torchrun" in name else ()
    return (sys.executable, *launcher, str(FOLDER / f"{name}.py"), str(out))


def run(name: str, folder: Path, *, gpus: str = "") -> Outcome:
    """Run the script alone, and meanwhile on the busy site: on virtual GPUs, or on those of this kind."""
    alone, shared = (folder / kind / "weights" for kind in ("alone", "shared"))
    for out in (alone, shared):
        out.parent.mkdir()
    with (folder / "alone.log").open("w") as log:
        by_hand = subprocess.Popen(command(name, alone), cwd=folder, env=ENVIRONMENT, stdout=log, stderr=log)
    try:
        document, story = _on_a_site(name, folder, shared, gpus)
        code = by_hand.wait(PATIENCE_S)
    finally:
        by_hand.kill()
        by_hand.wait()
    assert code == 0, (folder / "alone.log").read_text()
    ends = [found for line in story if (found := re.search(r"exited: finished(?: at step (\d+))?", line))]
    return Outcome(
        name,
        str(document["state"]),
        shared.exists() and _digest(alone) == _digest(shared),
        int(ends[-1][1] or -1) + 1 if ends else 0,
        document["suspensions"],
        document["preemptions"],
        document["steps_lost"],
        document["lost_gpu_seconds"],
        any("beyond its lease" in line for line in story),
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _on_a_site(name: str, folder: Path, out: Path, kind: str) -> tuple[dict[str, Any], list[str]]:
    """What the arbiter says of the script once it is over, and its story."""
    gpus = constant(name, "GPUS")
    site = local_site(folder / "site", nodes=1, gpus=kind or f"simulated:{gpus}", settings=SETTINGS)
    # Suspending takes long beside turns as short as these.
    site = replace(site, nodes=tuple(replace(node, slice_overhead_max=1e3, sample_s=0.2) for node in site.nodes))
    with in_process(site, memory_bus()) as check:
        wait_ready(site, check)
        with open_client(site.socket) as client:
            for _ in range(NEIGHBOURS):
                client.submit(_spec((sys.executable, str(NEIGHBOUR)), folder, gpus))
            app = client.submit(_spec(command(name, out), folder, gpus))
            try:
                return _over(client, app, check)
            finally:
                end_everything(client)


def _spec(line: tuple[str, ...], folder: Path, gpus: int) -> AppSpec:
    root = str(folder / "checkpoints")
    return AppSpec(
        trials=(line,),
        cwd=str(folder),
        checkpoint_root=root,
        env=ENVIRONMENT,
        gang=gpus,
        requirements=Requirements(grace_s=20.0),
        restart_s=2.0,
    )


def _over(client: Client, app: str, check: Watch) -> tuple[dict[str, Any], list[str]]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        check()
        (document,) = client.query("apps", app)["apps"]
        story = [str(chapter["what"]) for chapter in client.query("explain", app)["story"]]
        if document["state"] in OVER:
            return document, story
        assert time.monotonic() < deadline, f"{app} is {document['state']}: {story[-5:]}"
        time.sleep(POLL_S)


# --- the table ------------------------------------------------------------------------------------------------------


def rows_in_docs() -> list[list[str]]:
    """The cells of the table's lines as they are written down, its head left out."""
    text = PAGE.read_text()
    lines = text[text.index(BEGIN) : text.index(END)].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]


def rewrite(rows: list[tuple[str, ...]]) -> None:
    text = PAGE.read_text()
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    lines = [f"| {' | '.join(row)} |" for row in (HEAD, *rows)]
    lines.insert(1, "|" + "---|" * len(HEAD))
    PAGE.write_text("\n".join([f"{head}{BEGIN}", *lines, tail]))


def main(arguments: list[str]) -> int:
    keep, wanted = "--keep" in arguments, [name for name in arguments if name != "--keep"] or names()
    known = {row[0].split("`")[1]: tuple(row) for row in rows_in_docs()}
    failed = 0
    for name in wanted:
        if lacks := missing(name):
            print(f"{name}: not run, {', '.join(lacks)} missing", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="idiom-") as folder:
            outcome = run(name, Path(folder))
        good = outcome.state == "finished" and outcome.equal
        failed += not good
        known[name] = outcome.row
        print(f"{'ok' if good else 'FAILED'} {outcome}", flush=True)
    if not (keep or failed):
        rewrite([known[name] for name in names() if name in known])
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
