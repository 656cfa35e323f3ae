"""The table of sections, in the order in which they run."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from benchmarks.gpu.record import Run, Section, Setting

#: What the node agent, and what a whole site needs besides PyTorch.
AGENT = ("msgspec", "numpy", "structlog")
SITE = (*AGENT, "msgpack", "psutil", "highspy", "numba", "rich")


@dataclass(frozen=True)
class Entry:
    """A section. `needs`: the modules it cannot do without; a rehearsal needs no driver's."""

    module: str
    needs: tuple[str, ...] = ()
    rehearsed: bool = True

    @property
    def rehearsal_needs(self) -> tuple[str, ...]:
        """What the section needs on the CPU."""
        return tuple(one for one in self.needs if one not in ("pynvml", "cuda.bindings"))

    def run(self, setting: Setting, section: Section) -> None:
        """Run it."""
        # Only now, since its own imports may be what is missing.
        run: Run = importlib.import_module(f"benchmarks.gpu.sections.{self.module}").run
        run(setting, section)


SECTIONS = {
    "env": Entry("env"),
    "pcie": Entry("pcie"),
    "park": Entry("park"),
    "driver": Entry("driver", ("cuda.bindings", "pynvml"), rehearsed=False),
    "graph": Entry("graph", rehearsed=False),
    "pack": Entry("pack"),
    "estimator": Entry("estimator", (*AGENT, "pynvml")),
    "demo": Entry("demo", (*SITE, "pynvml")),
}
