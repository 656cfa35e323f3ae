"""A site of two nodes with four simulated GPUs each, in one process: ``python -m tests.support.page_site FOLDER``.

It prints the path of its socket once all is ready, and ends with its standard input. While there is a file `stall` in
its folder the policy does not answer; while there is a file `rival`, another arbiter sends plans to the nodes.
After a loss of the journal ``--adopt-site`` takes the site over.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from typer.testing import CliRunner

from arbiter.core.policies.queues.fifo import Fifo
from arbiter.core.registry import POLICIES, Entry
from arbiter.core.seam import AppView, View
from arbiter.core.state.model import ArbiterSettings
from launch import cli, log_lines
from launch.client import Client, open_client
from launch.site import site as sites
from launch.site.site import Site, end_everything, local_site, memory_bus, wait_ready
from protocol.bus import Bus, Outgoing
from protocol.codec import encode
from protocol.messages import ARBITER, NodeId, NodePlan, OwnerId, Party
from tests.support.pages import ROOT
from tests.support.patience import PATIENCE_S

OWNER = OwnerId("alice")
STALLING = "fifo-that-stalls"
SETTINGS = ArbiterSettings(policy=STALLING, round_pause_s=0.1, beat_s=0.2, admission_wait_s=1.0, admins=(OWNER,))
#: A program that ends once there is a file `end` in its folder; it can save, so it may be held.
TRAIN = """
import sys, time
from pathlib import Path
from app_agent import session
print("trained", flush=True)
session.restore(lambda folder: None)
while not Path("end").exists():
    time.sleep(0.02)
    if session.step_end(save=lambda folder: None): sys.exit(session.EXIT_REQUEUE)
session.done()
"""
#: What only a shell understands.
SHELL = frozenset("|&;<>$`(")


@dataclass(frozen=True)
class Done:
    """The end of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def said(self) -> str:
        return self.stdout + self.stderr


class PageSite:
    """The folder of a user, with programs to submit, beside the site."""

    def __init__(self, folder: Path, socket: Path) -> None:
        self.folder, self.socket = folder, socket
        self.env = {"GPU_ARBITER_URL": f"unix://{socket}", "PATH": f"{folder}/bin:{os.environ['PATH']}"}
        self.env |= {"XDG_STATE_HOME": f"{folder}/state"}  # and not in a home folder
        binaries = folder / "bin"
        binaries.mkdir(parents=True)
        (folder / "train.py").write_text(TRAIN)
        (folder / "script.sh").write_text("#!/bin/bash\n#SBATCH --gpus=1\nexec python train.py\n")
        for name, line in (("python", f'exec {sys.executable} "$@"'), ("torchrun", 'exec python "$@"')):
            (binaries / name).write_text(f"#!/bin/sh\n{line}\n")
            (binaries / name).chmod(0o755)
        # The command line of this tree, whatever is installed.
        (binaries / "gpu-arbiter").write_text(f'#!/bin/sh\nexec {sys.executable} -P {ROOT}/gpu_arbiter.py "$@"\n')
        (binaries / "gpu-arbiter").chmod(0o755)

    def client(self) -> Client:
        return open_client(self.socket)

    def type(self, line: str) -> Done:
        """Run a line that a user types: a command of ours in this process, anything else in a shell."""
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            if line.startswith("gpu-arbiter ") and not SHELL & set(line):
                done = CliRunner().invoke(cli.app, shlex.split(line, comments=True)[1:], env=self.env)
                if done.exception is not None and not isinstance(done.exception, SystemExit):
                    raise done.exception
                return Done(done.exit_code, done.stdout, done.stderr)
            ran = subprocess.run(
                ("sh", "-ec", line), env=os.environ | self.env, capture_output=True, text=True, check=False
            )
            return Done(ran.returncode, ran.stdout, ran.stderr)
        finally:
            os.chdir(before)

    def let_programs_end(self) -> None:
        (self.folder / "end").touch()

    def begin_anew(self) -> None:
        """End all apps and drains; the apps that come next run until they are told to end."""
        with self.client() as client:
            end_everything(client)
            for node in client.query("nodes")["nodes"]:
                if node["drain"]:
                    client.undrain(node["id"])
        (self.folder / "end").unlink(missing_ok=True)

    def wait_state(self, app: str, *states: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (now := self.record(app)["state"]) not in states:
            assert time.monotonic() < deadline, f"{app} is {now}"
            time.sleep(0.02)

    def record(self, app: str) -> dict[str, object]:
        """Return what the arbiter knows of an app."""
        with self.client() as client:
            (found,) = [each for each in client.query("apps")["apps"] if each["id"] == app]
        return dict(found)


@contextmanager
def site_process(folder: Path, *words: str) -> Iterator[Path]:
    """Run the site of a folder, the same again if it ran before; give its socket."""
    command = (sys.executable, "-m", "tests.support.page_site", str(folder / "site"), *words)
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            socket = process.stdout.readline().strip()
            assert socket, "the site did not start"
            yield Path(socket)
        finally:
            process.stdin.close()


@contextmanager
def page_site(folder: Path) -> Iterator[PageSite]:
    with site_process(folder) as socket:
        site = PageSite(folder / "user", socket)
        try:
            yield site
        finally:
            site.begin_anew()


def stalling(folder: Path) -> type[Fifo]:
    """Return a policy that answers nothing while there is a file `stall`."""

    class Stalling(Fifo):
        def order(self, view: View) -> Sequence[AppView]:
            while (folder / "stall").exists():
                time.sleep(0.02)
            return super().order(view)

    return Stalling


async def rival(site: Site, bus: Bus, folder: Path) -> None:
    """Speak to the nodes as an arbiter of no site."""
    link = await bus.connect(ARBITER)
    plans = [(Party("node", node.node), NodePlan(NodeId(node.node), 0, 0, (), ())) for node in site.nodes]
    while True:
        if (folder / "rival").exists():
            await link.send([Outgoing(to, encode(plan, sender=ARBITER, id=token_hex(4))) for to, plan in plans])
        await asyncio.sleep(0.2)


def main(folder: Path, *words: str) -> None:
    log_lines.configure("error")
    POLICIES[STALLING] = Entry(stalling(folder), live=True)
    adopts = "--adopt-site" in words
    site = local_site(folder, nodes=2, gpus="simulated:4", owner=OWNER, settings=SETTINGS, adopt_site=adopts)
    bus = memory_bus()
    background = sites._Background(lambda: [*sites.daemons(site, bus, end_workers=True), rival(site, bus, folder)])
    background.start()
    try:
        wait_ready(site, background.check)
        print(site.socket, flush=True)
        sys.stdin.read()
    finally:
        background.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
