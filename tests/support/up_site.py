"""`gpu-arbiter up` as a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.support.patience import PATIENCE_S

PROGRAM = (sys.executable, "-m", "gpu_arbiter")


@contextmanager
def running_up(environment: Mapping[str, str], gpus: str = "simulated:8") -> Iterator[None]:
    """A site of eight simulated GPUs, or of others, ready; it ends well when the block does."""
    command = [*PROGRAM, "up", "--fresh", "--gpus", gpus]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "gpu-arbiter is up" in process.stderr.readline()
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
