"""A played NVIDIA driver for the real nvidia-ml-py and cuda-bindings: two libraries in C, and the scenario they read.

The libraries read the folder that they lie in at each call, so a test changes what "the driver" says by writing there,
for its own process and for all others that load them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import pytest

SOURCES = {"libnvidia-ml.so.1": "nvml.c", "libcuda.so.1": "cuda.c"}
ProcessKind = Literal["compute", "mps", "graphics"]
FaultKind = Literal["error", "hang", "crash", "crash-after", "delay"]
#: A process with a context that the scenario put there; memory in MiB, None where the driver does not tell.
Listed = tuple[int, int | None, ProcessKind]


@dataclass
class Card:
    """One GPU as the driver describes it; memory in MiB, `recovery` -1 and `mig` -1 where the driver has no answer.

    Another negative `recovery` is the error (such as -999) that the driver gives instead of this field.
    """

    uuid: str
    bus: str
    name: str = "NVIDIA H200"
    total: int = 143_771
    reserved: int = 500
    used: int = 100  #: beyond the reserve, and beyond the processes of the flag `real`
    nvlinks: int = 0
    recovery: int = 0
    lost: int = 0
    mig: int = 0
    mode: int = 0
    gpm: int = 0
    util: int = 37
    cores: int = 0xFFFF_FFFF_FFFF_FFFF
    gpm_s: float = 100.0
    gpm_work: float = 0.0  #: percent of its SMs times seconds, so far
    gpm_warps: float = 0.0
    gpm_dram: float = 0.0
    processes: list[Listed] = field(default_factory=list)

    def line(self) -> str:
        """Return it as the scenario has it."""
        told = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "processes"}
        told |= {"cores": f"{self.cores:x}", "name": self.name.replace(" ", "_")}
        return "gpu " + " ".join(f"{key}={value}" for key, value in told.items())


def cards(count: int, *, first: int = 0, **same: int) -> list[Card]:
    """Return GPUs in the order of the bus, with UUIDs as real ones have; other hosts have others than those from 0."""
    return [
        Card(f"GPU-{index:08x}-0000-4000-8000-{index:012x}", f"00000000:{index:02X}:00.0", **same)  # type: ignore[arg-type]
        for index in range(first, first + count)
    ]


@functools.cache
def libraries() -> Path:
    """Compile both libraries, once for each process of the tests; skip the test where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("the played NVIDIA driver needs a C compiler: install gcc, or another that is named cc")
    folder = Path(tempfile.mkdtemp(prefix="gpu-arbiter-stand-in-"))
    here = Path(__file__).parent
    for library, source in SOURCES.items():
        # They have no soname: by it, a later test in this process would find them under the driver's name.
        command = [compiler, "-shared", "-fPIC", "-O1", "-D_GNU_SOURCE", "-Wall"]
        subprocess.run([*command, "-o", folder / library, here / source, "-lpthread", "-ldl"], check=True)
    return folder


class StandIn:
    """The driver, its GPUs and its faults, in a folder of their own."""

    def __init__(self, folder: Path, *gpus: Card) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for library in SOURCES:
            shutil.copy(libraries() / library, folder)
        self.folder = folder
        self.cards = list(gpus)
        self.ancestors: dict[tuple[int, int], int] = {}
        self.version = "580.95.05"  #: of the driver; an older one lacks functions, or has another layout of a struct
        self._flags: set[str] = set()
        self._faults: list[str] = []
        self.write()

    # --- the scenario -----------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Have the libraries read this scenario from now on."""
        lines = [f"driver {self.version}", *(card.line() for card in self.cards)]
        for index, card in enumerate(self.cards):
            lines += [f"process {index} {pid} {-1 if mib is None else mib} {kind}" for pid, mib, kind in card.processes]
        lines += [f"link {one} {other} {level}" for (one, other), level in self.ancestors.items()]
        lines += sorted(self._flags) + self._faults
        if not self.cards:
            lines.append("no-gpu")
        beside = self.folder / "scenario.new"
        beside.write_text("".join(f"{line}\n" for line in lines))
        beside.replace(self.folder / "scenario")

    def change(self, index: int, **changes: object) -> None:
        """Change a GPU."""
        for name, value in changes.items():
            setattr(self.cards[index], name, value)
        self.write()

    def flag(self, *words: str) -> None:
        """Have these flags alone: `real`, `gpm-counts`, `used-counts-reserved`, `stays`, `blind`, ..."""
        self._flags = set(words)
        self.write()

    def fault(self, kind: FaultKind, function: str, which: int | str = "*", value: int = 0) -> None:
        """Have a function err (with the code `value`), hang, crash or take `value` ms, for a GPU or a process."""
        self._faults.append(f"{kind} {function} {which} {value}")
        self.write()

    def heal(self) -> None:
        """Have no faults any more."""
        self._faults = []
        self.write()

    def event(self, index: int, kind: int, data: int = 0) -> None:
        """Raise a health event of a GPU."""
        with (self.folder / "events").open("a") as file:
            file.write(f"{index} {kind:x} {data}\n")

    def xid(self, index: int, number: int) -> None:
        """Raise an Xid on a GPU."""
        self.event(index, 0x8, number)

    # --- the driver's checkpoint ------------------------------------------------------------------------------------

    def put(self, pid: int, state: int) -> None:
        """Have a process use CUDA, in this state of the driver's."""
        (self.folder / f"state.{pid}").write_text(str(state))

    def state(self, pid: int) -> int | None:
        """Return the driver's state of a process; None for one without CUDA."""
        path = self.folder / f"state.{pid}"
        return int(path.read_text()) if path.exists() else None

    @property
    def calls(self) -> list[str]:
        """The calls of libcuda so far, each `function:pid`."""
        path = self.folder / "calls"
        return path.read_text().split() if path.exists() else []

    @property
    def maps(self) -> list[list[tuple[str, str]]]:
        """The maps of GPUs that restores were given, each a list of (old, new) as hexadecimal UUIDs."""
        path = self.folder / "maps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [[(pair.split(">")[0], pair.split(">")[1]) for pair in line.split()] for line in lines]

    # --- its use ----------------------------------------------------------------------------------------------------

    @property
    def env(self) -> dict[str, str]:
        """The variables with which another process loads the libraries."""
        before = os.environ.get("LD_LIBRARY_PATH")
        return {"LD_LIBRARY_PATH": f"{self.folder}:{before}" if before else str(self.folder)}

    def play_mps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put a played MPS on the PATH of this process, until the test ends, and of all children of it."""
        self.put_mps()
        monkeypatch.setenv("PATH", f"{self.folder}:{os.environ['PATH']}")

    def put_mps(self) -> None:
        """Put the programs of a played MPS beside the libraries."""
        source = (Path(__file__).parent / "mps.py").read_text()
        for name in ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"):
            program = self.folder / name
            program.write_text(f"#!{sys.executable} -IS\n{source}")
            program.chmod(0o755)

    def load(self, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
        """Have nvidia-ml-py use the library in this process, until the test ends, and all children of it."""
        import pynvml

        library = ctypes.CDLL(str(self.folder / "libnvidia-ml.so.1"))
        monkeypatch.setattr(pynvml, "nvmlLib", library)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)
        return library
