"""The table of sections, in the order in which they run."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from benchmarks.gpu.record import Run, Section, Setting

#: The modules that the node agent needs besides PyTorch, and those of a whole site on the memory bus.
AGENT = ("msgpack", "msgspec", "numpy")
SITE = (*AGENT, "highspy", "psutil", "structlog")
#: A part is what one call on a lent GPU measures: it begins no section, and ends the one it is in, after so long.
PART_S = 480.0


@dataclass(frozen=True)
class Entry:
    """A section. `needs`: the modules it cannot do without.

    `cuda`: it needs CUDA in PyTorch, and `driver`: a driver, real or played; without these a rehearsal leaves it out.
    After `limit_s` seconds it is ended, and what it has found by then is kept. `part`: see `PART_S`.
    """

    module: str
    needs: tuple[str, ...] = ()
    cuda: bool = False
    driver: bool = False
    part: int = 1
    limit_s: float = 60.0

    @property
    def simulated_needs(self) -> tuple[str, ...]:
        """The modules that the section needs where GPUs are simulated."""
        return tuple(one for one in self.needs if one not in ("pynvml", "cuda.bindings"))

    def run(self, setting: Setting, section: Section) -> None:
        """Run it."""
        # Only now, since its own imports may be what is missing.
        run: Run = importlib.import_module(f"benchmarks.gpu.sections.{self.module}").run
        run(setting, section)


SECTIONS = {
    "env": Entry("env", part=1, limit_s=50.0),
    "pcie": Entry("pcie", part=1, limit_s=70.0),
    "park": Entry("park", part=1, limit_s=170.0),
    "driver": Entry("driver", ("cuda.bindings", "pynvml"), driver=True, part=1, limit_s=190.0),
    "pack": Entry("pack", part=2, limit_s=180.0),
    "estimator": Entry("estimator", (*AGENT, "pynvml"), part=2, limit_s=300.0),
    "demo": Entry("demo", (*SITE, "pynvml"), part=3, limit_s=380.0),
    "graph": Entry("graph", cuda=True, part=4, limit_s=140.0),
    "ddp": Entry("ddp", (*SITE, "pynvml"), part=4, limit_s=340.0),
    "trough": Entry("trough", (*SITE, "pynvml", "cuda.bindings"), driver=True, part=5, limit_s=300.0),
}


def parts() -> dict[int, tuple[str, ...]]:
    """Return the sections of each part."""
    numbers = sorted({entry.part for entry in SECTIONS.values()})
    return {number: tuple(name for name, entry in SECTIONS.items() if entry.part == number) for number in numbers}
