"""`gpu-arbiter web` as a line of another command's output says, at a port that is free."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.support.pages import ROOT


@contextmanager
def shown_as(line: str, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Do what ``in a browser: gpu-arbiter web ...`` says; give the address of the page."""
    program, *words = shlex.split(line.removeprefix("in a browser: "))
    assert program == "gpu-arbiter", line
    command = (sys.executable, str(ROOT / "gpu_arbiter.py"), *words, "--port", "0")
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = process.stderr.readline()
            assert said.startswith("the site is at http://"), said + process.stderr.read()
            yield said.split()[-1]
        finally:
            process.terminate()
