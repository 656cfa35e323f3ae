"""What a run of the suite found: one document, ``gpu-suite/v1``."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

SCHEMA = "gpu-suite/v1"
#: Where two GPU machines may differ and a figure with them.
PACKAGES = ("torch", "nvidia-ml-py", "cuda-bindings", "numpy", "msgspec")

Figures = dict[str, Any]
Status = Literal["passed", "failed", "skipped", "error"]


class Skip(Exception):  # noqa: N818 - an expected no
    """A section cannot run here; the message says why."""


@dataclass(frozen=True)
class Setting:
    """How the sections run. `gb`: GPU memory (GiB) of the largest training; `helper`: the driver's helper program."""

    device: Literal["cuda", "cpu"]
    out: Path
    gb: float
    helper: tuple[str, ...] = ()

    @property
    def rehearsal(self) -> bool:
        """Whether this is the CPU, in the place of a GPU."""
        return self.device == "cpu"

    def pick(self, real: Any, rehearsed: Any) -> Any:
        """Return the first on a GPU, the second in a rehearsal."""
        return rehearsed if self.rehearsal else real


@dataclass(frozen=True)
class Check:
    """Something promised. `judged` is false for a promise about speed in a rehearsal; then `ok` counts for nothing."""

    name: str
    ok: bool
    judged: bool
    seen: Figures


@dataclass
class Section:
    """One section's share of the document."""

    rehearsal: bool
    figures: Figures = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    status: Status = "skipped"
    reason: str = ""
    seconds: float = 0.0

    def note(self, **figures: Any) -> None:
        """Put figures into the document."""
        self.figures |= figures

    def check(self, name: str, ok: bool, *, timed: bool = False, **seen: Any) -> None:
        """Hold the GPU to a promise; `timed` ones are not judged in a rehearsal."""
        self.checks.append(Check(name, bool(ok), not (timed and self.rehearsal), seen))

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
            "figures": self.figures,
            "checks": [asdict(check) for check in self.checks],
        }


Run = Callable[[Setting, Section], None]


def document(setting: Setting, sections: dict[str, Section], skipped: str) -> Figures:
    """Return the document; `skipped` says why nothing ran, if so."""
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
        "device": setting.device,
        "rehearsal": setting.rehearsal,
        "skipped": skipped,
        "host": host(),
        "sections": {name: section.told() for name, section in sections.items()},
    }


def write(path: Path, content: Figures) -> None:
    """Replace the document, so that there is always a whole one."""
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(content, indent=1, default=str) + "\n")
    beside.replace(path)


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
