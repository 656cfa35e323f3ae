"""A site whose auction has never been compiled answers, and starts apps, while it compiles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from arbiter import solver
from arbiter.core.policies.themis.auction import compiled
from arbiter.core.registry import POLICIES
from launch.site.site import PROGRAM
from tests.support.patience import PATIENCE_S

ROOT = PROGRAM.parent


@pytest.mark.timeout(300)
def test_an_app_runs_to_its_end_while_the_loops_are_compiled(tmp_path: Path) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("GPU_ARBITER_")}
    socket = f"unix://{tmp_path}/control.sock"
    env = own | {"GPU_ARBITER_URL": socket, "HOME": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "loops")}
    command = (sys.executable, "-P", str(PROGRAM))
    up = (*command, "up", "--fresh", "--gpus", "simulated:2", "--policy", "themis", "--log-level", "info")
    with subprocess.Popen(up, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as site:
        assert site.stderr is not None
        assert any("gpu-arbiter is up" in line for line in site.stderr)
        line = (*command, "run", "--", sys.executable, "-c", "print(42)")
        done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        compiling = [each for each in psutil.Process(site.pid).children() if "warm_up" in " ".join(each.cmdline())]
        rounds = subprocess.run((*command, "rounds", "--json"), env=env, capture_output=True, text=True, check=True)
        site.send_signal(signal.SIGINT)
        _, told = site.communicate(timeout=PATIENCE_S)
    assert site.returncode == 0, told
    assert (done.returncode, done.stdout) == (0, "42\n"), told + done.stderr
    assert json.loads(rounds.stdout)["count"] > 0
    # It was answered by plain Python: the compilation went on beside it, and ended with the site.
    assert "solver.ready" not in told
    assert len(compiling) == 1
    assert "Traceback" not in told, told
    psutil.wait_procs(compiling, timeout=PATIENCE_S)
    assert not compiling[0].is_running()


SITE = """
import gc, sys, time
from pathlib import Path
from launch import log_lines
from launch.site.site import in_process, local_site, memory_bus, wait_ready
import psutil

log_lines.configure("error")
site = local_site(Path(sys.argv[1]), nodes=1, gpus="simulated:1")
with in_process(site, memory_bus()) as check:
    wait_ready(site, check)
    while not list(Path(sys.argv[1]).glob("loops/**/*.nb?")):
        check()
        time.sleep(0.1)
    assert [each for each in psutil.Process().children() if "warm_up" in " ".join(each.cmdline())]
gc.collect()
"""


def test_a_site_that_ends_while_they_are_compiled_ends_quietly(tmp_path: Path) -> None:
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "loops")}
    line = [sys.executable, "-c", SITE, str(tmp_path)]
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")


WITHOUT = """
import sys
from pathlib import Path
from msgspec.structs import replace
from arbiter.core.policies.themis.auction import compiled
from launch import demo, log_lines
from launch.client import open_client
from launch.site.site import in_process, local_site, memory_bus, wait_ready
from app_agent.core.spec import AppSpec
import psutil

log_lines.configure("error")
folder, policy = Path(sys.argv[1]), sys.argv[2]
site = local_site(folder, nodes=1, gpus="simulated:1", settings=replace(demo.settings(6.0), policy=policy))
with in_process(site, memory_bus()) as check:
    wait_ready(site, check)
    with open_client(site.socket) as client:
        told = dict(cwd=str(folder), checkpoint_root=str(folder / "saved"), env={"PATH": "/usr/bin:/bin"})
        app = client.submit(AppSpec(trials=((sys.executable, "-c", "pass"),), **told))
        while client.query("apps", app)["apps"][0]["state"] not in ("finished", "failed"):
            check()
        print(client.query("apps", app)["apps"][0]["state"])
    assert not [each for each in psutil.Process().children() if "warm_up" in " ".join(each.cmdline())]
assert compiled._Use.loops
assert not [loop.name for loop in compiled._Use.loops if loop.compiled.signatures]
assert not list(folder.glob("loops/**/*.nb?"))
assert "aio_pika" not in sys.modules
"""


@pytest.mark.parametrize("policy", ["fifo", "gandiva"])
def test_where_the_policy_holds_no_auctions_nothing_is_compiled(policy: str, tmp_path: Path) -> None:
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "loops")}
    line = [sys.executable, "-c", WITHOUT, str(tmp_path), policy]
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, "finished\n"), done.stderr


async def test_where_compiled_code_cannot_be_kept_rounds_wait_until_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(compiled._Use, "kept", False)
    entry = POLICIES["themis"]
    assert entry.loops is not None
    loops = replace(entry.loops, warm_up=lambda: told.append("compiled"))
    monkeypatch.setitem(POLICIES, "themis", replace(entry, loops=loops))
    await solver.Solver().prepare("themis", lambda: told.append("ready"))
    assert told == ["compiled", "ready"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("/no/such/program",), "No such file or directory: '/no/such/program'"),
        ((sys.executable, "-c", "raise OSError('the disk is full')"), "OSError: the disk is full"),
        ((sys.executable, "-c", "pass"), "another process compiled them, and they are not on disk"),
    ],
)
async def test_where_they_cannot_be_compiled_plain_python_goes_on(
    command: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = POLICIES["themis"]
    assert entry.loops is not None
    absent = replace(entry, loops=replace(entry.loops, load=lambda: False))
    monkeypatch.setitem(POLICIES, "themis", absent)
    monkeypatch.setattr(solver, "COMPILE", command)
    told: list[None] = []
    with capture_logs() as lines:
        await solver.Solver().prepare("themis", lambda: told.append(None))
    try:
        assert (len(told), compiled.compiled_in_use()) == (1, False)
        assert [line["event"] for line in lines if says in line["why"]] == ["solver.slow"]
    finally:
        compiled.use_compiled()


@pytest.mark.usefixtures("compiled_auction")
async def test_loops_that_are_on_disk_are_read_and_no_other_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "COMPILE", ("/no/such/program",))
    told: list[bool] = []
    with capture_logs() as lines:
        await solver.Solver().prepare("themis", lambda: told.append(compiled.compiled_in_use()))
    assert (told, compiled.compiled_in_use()) == ([False], True)
    assert [line["event"] for line in lines] == ["solver.ready"]


async def test_a_policy_that_compiles_nothing_is_ready_at_once() -> None:
    told: list[str] = []
    await solver.Solver().prepare("fifo", lambda: told.append("ready"))
    assert (told, compiled.compiled_in_use()) == (["ready"], compiled.COMPILED)
