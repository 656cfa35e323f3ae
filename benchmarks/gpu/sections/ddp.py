"""DistributedDataParallel of one process with a billion parameters: two such jobs in turns on a site, without deadlock.

The gradient buckets of DDP are known to C++ only, so parking leaves them on the GPU: as many bytes as the parameters.
A node agent must find that out, and neither job may wait for ever.
"""

from __future__ import annotations

from benchmarks.gpu.record import Section, Setting
from benchmarks.gpu.sections.demo import Scale, play

#: 15 layers of 8192 x 8192: 1.007e9 parameters, some 20 GB with gradients, buckets and both moments.
REAL = Scale("ddp", 200, 4.0, 200.0, ("--device", "cuda", "--ddp", "--width", "8192", "--layers", "15"), 4.0)
REHEARSED = Scale(
    "ddp", 500, 0.7, 150.0, ("--device", "cpu", "--ddp", "--width", "128", "--layers", "2", "--idle-ms", "15")
)


def run(setting: Setting, section: Section) -> None:
    """Run both jobs alone, then in turns."""
    play(setting, section, setting.pick(REAL, REHEARSED), ("timeslice",))
