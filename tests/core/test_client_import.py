"""The Python client is loaded by users' own programs, so it must not load much."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"aio_pika", "asyncio", "multiprocessing", "numpy", "sqlite3", "structlog", "torch", "typer"}
ROOMS = {"arbiter", "launch", "node_agent", "simulator"}


@pytest.mark.parametrize("module", ["app_agent.client", "app_agent.executor"])
def test_the_client_loads_msgspec_and_nothing_heavy(module: str) -> None:
    line = f"import sys; before = set(sys.modules); import {module}; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run((sys.executable, "-c", line), capture_output=True, text=True, check=True).stdout.split()
    assert "msgspec" in loaded
    assert module in loaded
    assert {name.partition(".")[0] for name in loaded} & (HEAVY | ROOMS) == set()
    assert [name for name in loaded if name.startswith("app_agent.training")] == []


def test_a_file_of_the_user_that_hides_a_package_of_ours_is_named(tmp_path: Path) -> None:
    """A researcher's own `protocol.py` beside the script: the client ended with that file's error."""
    (tmp_path / "protocol.py").write_text("raise SystemExit('the user meant something else')\n")
    (tmp_path / "script.py").write_text("from app_agent.client import connect\n")
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"{tmp_path}/protocol.py hides the package `protocol` of gpu-arbiter" in done.stderr
