"""The findings of all runs of the suite: one document, ``gpu-suite/v2``, whose sections each say when, where and how.

Calls on different days and GPUs fill it section by section.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu import goals

SCHEMA = "gpu-suite/v2"
#: Where two GPU machines may differ and a figure with them.
PACKAGES = ("torch", "nvidia-ml-py", "cuda-bindings", "numpy", "msgspec")

Figures = dict[str, Any]
#: `unfinished`: ended before its end, with a part of its figures; `running` stays where all of the suite was killed.
Status = Literal["running", "passed", "failed", "skipped", "unfinished", "error"]
#: A section that has ended is not run again unless it is asked for.
DONE = ("passed", "failed")


class Skip(Exception):  # noqa: N818 - an expected no
    """A section cannot run here; the message says why."""


@dataclass(frozen=True)
class Setting:
    """How the sections run. `gb`: GPU memory (GiB) of the largest training; `helper`: the driver's helper program.

    `played`: a rehearsal with NVIDIA's libraries played, so that all but CUDA in PyTorch is as on a GPU host.
    """

    device: Literal["cuda", "cpu"]
    out: Path
    gb: float
    helper: tuple[str, ...] = ()
    played: bool = False

    @property
    def rehearsal(self) -> bool:
        """Whether this is the CPU, in the place of a GPU."""
        return self.device == "cpu"

    @property
    def gpus(self) -> str:
        """The GPUs of node agents, as their configuration has them."""
        return "simulated:1" if self.rehearsal and not self.played else "nvml"

    @property
    def path(self) -> Path:
        """The document. Figures of a rehearsal never come among those of a GPU."""
        return self.out / ("rehearsal.json" if self.rehearsal else "gpu.json")

    def pick(self, real: Any, rehearsed: Any) -> Any:
        """Return the first on a GPU, the second in a rehearsal."""
        return rehearsed if self.rehearsal else real


@dataclass(frozen=True)
class Check:
    """Something promised. Where it is not `judged`, `ok` counts for nothing: in a rehearsal, or if it was `untried`.

    `untried` is why.
    """

    name: str
    ok: bool
    judged: bool
    seen: Figures
    untried: str = ""


class DocumentError(Exception):
    """A file that is no document of this suite; the message names it and the mend."""


@dataclass
class Section:
    """One section's share of the document. `changed` is called after each figure and check, to keep what there is."""

    rehearsal: bool
    figures: Figures = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    status: Status = "skipped"
    reason: str = ""
    seconds: float = 0.0
    origin: Figures = field(default_factory=dict)  #: see `origin_of`
    changed: Callable[[], None] = lambda: None

    def note(self, **figures: Any) -> None:
        """Put figures into the document."""
        self.figures |= figures
        self.changed()

    def check(self, name: str, ok: bool, *, gpu_only: bool = False, **seen: Any) -> None:
        """Hold the GPU to a promise; `gpu_only` ones are not judged in a rehearsal."""
        self.checks.append(Check(name, bool(ok), not (gpu_only and self.rehearsal), seen))
        self.changed()

    def untried(self, name: str, why: str) -> None:
        """Say that a promise cannot be tried here."""
        self.checks.append(Check(name, ok=False, judged=False, seen={}, untried=why))
        self.changed()

    @property
    def failures(self) -> list[Check]:
        """The checks that count and failed."""
        return [check for check in self.checks if check.judged and not check.ok]

    def told(self) -> Figures:
        """Return it as it stands in the document."""
        return {
            "status": self.status,
            "reason": self.reason,
            "seconds": round(self.seconds, 1),
            **self.origin,
            "figures": self.figures,
            "checks": [asdict(check) for check in self.checks],
        }


Run = Callable[[Setting, Section], None]


def origin_of(setting: Setting) -> Figures:
    """Return what stands beside a section's figures; `host` comes to it once the section has a process of its own."""
    command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
    return {"date": _now(), "command": command, "device": setting.device, "gb": setting.gb}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Document:
    """The file. It is written whole at every change, so what is in it outlives whatever ends the suite."""

    def __init__(self, path: Path, sections: dict[str, Figures]) -> None:
        self.path, self.sections = path, sections

    def put(self, name: str, section: Section) -> None:
        """Put a section into the file."""
        self.sections[name] = section.told()
        self.write()

    def write(self) -> None:
        """Replace the file, so that there is always a whole one."""
        content = {"schema": SCHEMA, "date": _now(), "goals": self.goals(), "sections": self.sections}
        beside = self.path.with_suffix(".partial")
        beside.write_text(json.dumps(content, indent=1, default=str) + "\n")
        beside.replace(self.path)

    def goals(self) -> list[Figures]:
        """Return each goal with its verdict; see `benchmarks.gpu.goals`."""
        return goals.judged(self.sections)

    def read_again(self) -> None:
        """Take what another process has written."""
        self.sections = _read(self.path)

    def done(self, name: str, setting: Setting) -> bool:
        """Whether the section has ended, with trainings of that size."""
        told = self.sections.get(name)
        return told is not None and told["status"] in DONE and told["gb"] == setting.gb


def merged(setting: Setting, others: Iterable[Path]) -> Document:
    """Return this setting's document, with the sections that other documents have of such a device.

    Of a section that is in several, one that has ended counts more than one that did not, then one with figures,
    then the newest. A file that is not there says nothing.

    Raises
    ------
    DocumentError
        If one is no document of this suite.
    """
    sections: dict[str, Figures] = {}
    for found in (_read(each) for each in (setting.path, *others) if each.exists()):
        for name, told in found.items():
            if told["device"] == setting.device and (name not in sections or _worth(told) > _worth(sections[name])):
                sections[name] = told
    return Document(setting.path, sections)


def _worth(told: Figures) -> tuple[bool, bool, str]:
    return told["status"] in DONE, bool(told["figures"] or told["checks"]), told["date"]


def _read(path: Path) -> dict[str, Figures]:
    mend = "move it away, or name another folder with --out"
    try:
        content = json.loads(path.read_text())
        schema, sections = content["schema"], content["sections"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DocumentError(f"{path} is no document of this suite ({type(error).__name__}: {error}); {mend}") from error
    if schema != SCHEMA:
        raise DocumentError(f"{path}: schema is {schema!r}, and this suite knows {SCHEMA!r}; {mend}")
    return dict(sections)


def host() -> Figures:
    """Return what the figures depend on."""
    found: Figures = {"python": platform.python_version(), "kernel": platform.release(), "driver": driver_version()}
    for package in PACKAGES:
        found[package] = version(package)
    return found | {"gpus": gpus()}


def version(package: str) -> str | None:
    """Return the version of an installed package."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def driver_version() -> str | None:
    """Return the version of the NVIDIA kernel module, None if it is not loaded."""
    with contextlib.suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text().strip()
    with contextlib.suppress(Exception):  # a sandbox may hide the module and show the library
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return None


def gpus() -> list[str]:
    """Return the models of all GPUs, as far as NVML tells."""
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    return []


def missing(modules: Sequence[str]) -> list[str]:
    """Return those that are not installed."""
    return [module for module in modules if not _there(module)]


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a.b, where a is not there
        return False
