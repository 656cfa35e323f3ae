"""`make check` and `make full` see to Prometheus before the tests that need it; where it cannot be had, they say so."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.pages import ROOT

SCRIPT = ROOT / "scripts" / "ensure-prometheus.sh"


def ensured(folder: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    """Run the script where there are these programs alone, each a text for the shell."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return subprocess.run(
        ("/bin/sh", str(SCRIPT)), env={"PATH": str(folder)}, capture_output=True, text=True, check=False
    )


def test_it_is_quiet_where_both_programs_are_there(tmp_path: Path) -> None:
    done = ensured(tmp_path, prometheus="", promtool="")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize(("programs", "why"), [({"id": "echo 1000"}, "needs root"), ({"id": "echo 0"}, "no apt-get")])
def test_where_it_cannot_be_installed_it_names_the_mend_and_does_not_fail(
    tmp_path: Path, programs: dict[str, str], why: str
) -> None:
    done = ensured(tmp_path, promtool="", **programs)
    assert (done.returncode, done.stdout) == (0, "")
    assert why in done.stderr
    assert "sudo apt-get install --no-install-recommends prometheus" in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["plain", "full"])
def test_make_sees_to_it_before_the_tests(target: str) -> None:
    done = subprocess.run(("make", "-n", target), cwd=ROOT, capture_output=True, text=True, check=True)
    ensure, _, tests = done.stdout.partition("-m pytest")
    assert "sh scripts/ensure-prometheus.sh\n" in ensure
    assert tests
