"""The Python client is loaded by users' own programs, so it must not load much."""

from __future__ import annotations

import subprocess
import sys

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
