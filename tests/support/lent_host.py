"""A GPU host as one is lent, played: the repository, its carried wheels, a Python with PyTorch, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from tests.support import wheels
from tests.support.stand_in import StandIn, cards

#: What an image for GPUs has; numba comes with some.
IMAGE = ("torch", "numpy", "psutil", "nvidia-ml-py", "cuda-bindings", "numba")
#: A call on a lent host is ended after so long.
CALL_S = 600


class LentHost:
    """Tree and wheels, an environment of its own, an empty home, a played driver; no package registry, no broker.

    Its environment has the packages of an image and none of ours: those come by the command that is called.
    """

    def __init__(self, folder: Path) -> None:
        self.tree = wheels.clone(folder)
        self.python = wheels.environment(folder / "environment", with_pip=True)
        wheels.lend(self.python, *IMAGE)
        self.home = folder / "home"
        self.home.mkdir()
        self.carried = self.tree / "out" / "gpu-wheels"
        collect(self.carried, ".".join(map(str, sys.version_info[:2])), self.tree)
        (card,) = cards(1, gpm=1)
        # The driver shows all processes with that GPU, also those of other tests. By the prefix a worker knows that its
        # main memory stands for that of the GPU.
        card.uuid = f"GPU-sim-{uuid.uuid4()}"
        self.driver = StandIn(folder / "driver", card)
        self.driver.put_mps()
        self.driver.flag("real", "all-use-cuda", "gpm-counts")

    def call(self, command: str, out: Path, *, played: bool = True) -> subprocess.CompletedProcess[str]:
        """Run one command as there, where it is ended after ten minutes; `played`: with the driver."""
        out.mkdir(exist_ok=True)
        return subprocess.run(
            self._line(command), **self._place(out, played), capture_output=True, text=True, check=False
        )

    def call_cut_short(self, command: str, out: Path, when: Callable[[], bool]) -> None:
        """Begin a command, and when `when` says so have all of it killed at once, as where the machine is taken."""
        out.mkdir(exist_ok=True)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        line = self._line(command)
        with subprocess.Popen(line, **self._place(out, played=True), **quiet, start_new_session=True) as call:
            try:
                while not when():
                    assert call.poll() is None, "the command ended before it was cut short"
            finally:
                os.killpg(call.pid, signal.SIGKILL)

    def lacks(self, module: str) -> bool:
        """Whether Python there cannot import this module, not even with the carried wheels installed."""
        line = [self.python, "-c", f"import {module}"]
        env = {"PYTHONPATH": str(self.tree / "out" / "gpu-site")}
        done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
        return done.returncode != 0 and "ModuleNotFoundError" in done.stderr

    def compiled(self) -> list[Path]:
        """Return the code of the auction's loops that was left on the disk."""
        return [*self.tree.rglob("*.nb?"), *self.home.rglob("*.nb?")]

    def _line(self, command: str) -> list[str]:
        return ["timeout", str(CALL_S), "sh", "-c", command]

    def _place(self, out: Path, played: bool) -> dict[str, object]:
        path = f"{self.driver.folder}:{self.python.parent}:/usr/bin:/bin"
        env = {"PATH": path, "HOME": str(self.home), "OUT": str(out), "PIP_NO_INDEX": "1"}
        env |= {"PIP_CONFIG_FILE": os.devnull}
        return {"cwd": self.tree, "env": env | (self.driver.env if played else {})}


def collect(to: Path, version: str, tree: Path = wheels.ROOT) -> int:
    """Have the wheels for a version of Python collected; return their size in bytes."""
    line = ["sh", tree / "scripts" / "gpu-wheels", "--python-version", version, "--to", to]
    done = subprocess.run(
        line, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return sum(wheel.stat().st_size for wheel in to.glob("*.whl"))
