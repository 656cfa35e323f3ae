"""What a real task prints before it fails reaches its owner, and no other owner and no page."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from app_agent.core.spec import AppSpec
from launch.client import Client, open_client
from protocol.log_ends import INSTEAD, SAID_INSTEAD
from protocol.messages import Requirements
from tests.support.patience import PATIENCE_S
from tests.support.thread_site import thread_site

pytest.importorskip("starlette", reason="the extra `web` is not installed")

from launch.web.server import make_app
from launch.web.sources import Sources
from tests.launch.test_web import Browser
from tests.launch.test_web_discretion import ADDRESSES, texts

PRINTED = "rodb4uort-eht-si-drowssap"
#: It tells what it printed in no other way: not by its command, either.
FAILING = f"import sys; print({PRINTED[::-1]!r}[::-1], flush=True); sys.exit(3)"
#: It tells its password in the exception that its save function raises.
UNSAVED = f"""
import time
from app_agent import session
def save(folder): raise OSError({PRINTED[::-1]!r}[::-1])
for step in range(10**6):
    time.sleep(0.02)
    session.step_end(step, save=save)
"""
QUESTIONS = ("apps", "nodes", "rounds", "leases", "shares", "events", "report")


def check_untold(stranger: Client, app: str) -> None:
    """What a task of `app` has printed stands in no answer to this stranger."""
    for kind in QUESTIONS:
        target = "owner" if kind in ("shares", "report") else ""
        assert PRINTED not in json.dumps(stranger.query(kind, target)), kind  # type: ignore[arg-type]
    for name in (app, f"{app}.0", f"{app}.0-a0", "GPU-sim-n1-0", "n1"):
        assert PRINTED not in json.dumps(stranger.query("explain", name)), name


def test_the_end_of_a_failed_tasks_log_is_told_to_its_owner_only(tmp_path: Path) -> None:
    with thread_site(tmp_path / "site") as site:
        ledger = Path(site.site.arbiter.state_dir, "ledger.db")
        stranger = site.start_owner("eve", tmp_path / "eve")
        spec = AppSpec(
            trials=((sys.executable, "-c", FAILING),),
            cwd=str(tmp_path),
            checkpoint_root=str(tmp_path / "saved"),
            max_restarts=0,
        )
        with open_client(site.socket) as owner, open_client(stranger) as eve:
            app = owner.submit(spec)
            record = owner.outlast(app, "done", PATIENCE_S)
            assert (record.state, PRINTED in record.reason) == ("failed", True)
            assert PRINTED in json.dumps(owner.query("explain", app))
            check_untold(eve, app)
            assert f"exited with code 3{INSTEAD}" in json.dumps(eve.query("explain", app))
        browser = Browser(make_app(Sources(ledger, site.socket)))
        for address in (*ADDRESSES, f"/apps/{app}", f"/apps/{app}.0-a0"):
            for name, text in texts(browser, address):
                assert PRINTED not in text, name
        assert f"exited with code 3{INSTEAD}" in browser.get(f"/apps/{app}")[2]
        held = [path.name for path in ledger.parent.glob("ledger.db*") if PRINTED.encode() in path.read_bytes()]
        assert held == [], "the ledger outlives the logs"


def test_what_a_save_function_raises_is_told_to_its_owner_only(tmp_path: Path) -> None:
    with thread_site(tmp_path / "site") as site:
        stranger = site.start_owner("eve", tmp_path / "eve")
        spec = AppSpec(
            trials=((sys.executable, "-c", UNSAVED),),
            cwd=str(tmp_path),
            checkpoint_root=str(tmp_path / "saved"),
            requirements=Requirements(preempt_by="checkpoint"),
        )
        with open_client(site.socket) as owner, open_client(stranger) as eve:
            app = owner.submit(spec)
            by = time.monotonic() + PATIENCE_S
            while not any(task["step"] > 0 for task in owner.query("apps", app)["apps"][0]["tasks"]):
                assert time.monotonic() < by
                time.sleep(0.05)
            owner.act("hold", app)
            while PRINTED not in json.dumps(owner.query("explain", app)):
                assert time.monotonic() < by
                time.sleep(0.05)
            check_untold(eve, app)
            assert f"failed{SAID_INSTEAD}" in json.dumps(eve.query("explain", app))
