"""`gpu-arbiter web` is stopped in the middle of a request, and killed: rounds and grants go on at a real site.

`tests/launch/test_web.py` has the quick form: a process that does nothing but read the ledger.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.support.page_site import PageSite, page_site
from tests.support.pages import ROOT
from tests.support.patience import PATIENCE_S

pytest.importorskip("starlette", reason="the extra `web` is not installed")

pytestmark = pytest.mark.full


class Web:
    """A process of `gpu-arbiter web`."""

    def __init__(self, process: subprocess.Popen[str], ledger: Path) -> None:
        assert process.stderr is not None
        self.process, self._ledger = process, ledger.resolve()
        self.address = process.stderr.readline().split()[-1]
        assert self.address.startswith("http://127.0.0.1:")

    def get(self, path: str) -> str:
        with urlopen(self.address + path, timeout=PATIENCE_S) as answer:
            return str(answer.read().decode())

    def reads(self) -> bool:
        """Whether it has the ledger open: it does only in a request."""
        for each in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed by now
                if each.readlink() == self._ledger:
                    return True
        return False

    def stop_in_mid_request(self) -> None:
        """Stop the process at a moment at which it has the ledger open; somebody is to ask it again and again."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            while not self.reads():
                assert time.monotonic() < deadline
            self.process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)
            if self.reads():
                return
            self.process.send_signal(signal.SIGCONT)


@contextmanager
def web(site: PageSite, ledger: Path) -> Iterator[Web]:
    command = (sys.executable, "-m", "launch.cli", "web", "--port", "0", "--ledger", str(ledger))
    environment = os.environ | site.env
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Web(process, ledger)
        finally:
            process.kill()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[PageSite]:
    with page_site(tmp_path) as made:
        yield made


def submit(site: PageSite) -> str:
    done = site.type("gpu-arbiter submit --gpus 2 -- python train.py")
    assert done.code == 0, done.said
    return done.stdout.split()[-1]


def rounds(site: PageSite) -> int:
    with site.client() as client:
        return int(client.query("rounds", limit=1)["count"])


def test_a_site_goes_on_while_web_stands_still_in_mid_request_and_after_it_was_killed(
    site: PageSite, tmp_path: Path
) -> None:
    ledger, asking = tmp_path / "site" / "arbiter" / "ledger.db", threading.Event()
    with web(site, ledger) as page:

        def ask() -> None:
            with suppress(OSError):  # as it is killed
                while not asking.is_set():
                    page.get("rounds.json")
                    page.get("report.json?by=app")

        reader = threading.Thread(target=ask)
        reader.start()
        try:
            page.stop_in_mid_request()
            for _ in range(2):
                before = rounds(site)
                site.wait_state(submit(site), "running")
                assert rounds(site) > before, "the round is in the ledger, which the other process has open"
            page.process.kill()
            page.process.wait(PATIENCE_S)
        finally:
            asking.set()
            page.process.kill()
            reader.join(PATIENCE_S)
    last = submit(site)
    site.wait_state(last, "running")
    with web(site, ledger) as page:
        assert f'"app": "{last}"' in page.get("now.json")
        assert page.get("rounds.csv").count("\n") == rounds(site) + 1
