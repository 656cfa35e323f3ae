"""`top` as a person uses it, in a real terminal: the site of now, and a journal of the past with the arrow keys."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from protocol import exit_codes
from tests.core.test_gpu_time import FIFO
from tests.core.test_past import written
from tests.support.arbiter_site import Site, task, wish
from tests.support.page_site import page_site
from tests.support.pages import ROOT
from tests.support.screen import WHY_NOT, Screen, screen

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

TOP = f"{sys.executable} -P {ROOT}/gpu_arbiter.py top"
BEGIN = datetime(2026, 11, 2, 12, tzinfo=UTC).timestamp()


def terminal(folder: Path, **more: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("GPU_ARBITER_", "TMUX"))}
    return own | {"HOME": str(folder), "TERM": "xterm", "TZ": "UTC"} | more


def train(site: Site, app: str, rounds_of_ten_s: int) -> None:
    """Let an app have the one GPU for some time, and finish."""
    site.app(app)
    site.wait(0.0)
    gpus = site.held(app)
    assert gpus
    for _ in range(rounds_of_ten_s):
        site.app(app, jobs=[wish(app, 0, gpus)])
        site.node("n1", tasks=[task(app, 0, gpus)], used=gpus)
        site.wait(10.0)


def shown_at(window: Screen, moment: float) -> str:
    """Wait until the screen shows a moment; return it."""
    return window.see(rf"^{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S}  policy fifo")


def holder(shown: str) -> str:
    found = re.search(r"^n1 +GPU-n1-0 +\w+ +(\S+)", shown, re.MULTILINE)
    assert found is not None, shown
    return found[1]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """ana-1 has the GPU for 400 s, then ben-1 for 100 s; the journal of it lies in `tmp_path`."""
    made = Site(FIFO, start=BEGIN)
    made.node("n1", 1)
    train(made, "ana-1", 40)
    made.app("ana-1", state="finished")
    made.node("n1")
    train(made, "ben-1", 10)
    with closing(written(made, tmp_path)):
        yield made


def test_the_arrow_keys_move_in_the_past_by_ten_seconds_and_by_five_minutes(site: Site, tmp_path: Path) -> None:
    with screen(terminal(tmp_path), str(tmp_path)) as window:
        window.type(f"{TOP} --journal {tmp_path}; echo code $?", "Enter")
        last = shown_at(window, site.now)
        assert "left, right: 10 s; down, up: 5 min; q ends; the past, from 2026-11-02 12:00:00 to" in last
        assert holder(last) == "ben-1"
        window.type("Left")
        assert holder(shown_at(window, site.now - 10.0)) == "ben-1"
        window.type("Down")
        assert holder(shown_at(window, site.now - 310.0)) == "ana-1"
        window.type("Right")
        shown_at(window, site.now - 300.0)
        window.type("Down")
        shown_at(window, BEGIN)  # it does not go on before the journal begins
        window.type("Up", "Up")
        assert holder(shown_at(window, site.now)) == "ben-1"
        window.type("q")
        window.wait(r"^code 0$")


def test_the_screen_begins_at_the_moment_that_is_asked_for(site: Site, tmp_path: Path) -> None:
    with screen(terminal(tmp_path), str(tmp_path)) as window:
        window.type(f"{TOP} --journal {tmp_path} --at 2m; echo code $?", "Enter")
        assert holder(shown_at(window, site.now - 120.0)) == "ana-1"
        window.type("C-c")
        window.wait(rf"code {exit_codes.INTERRUPTED}$")


def test_the_screen_follows_the_site_until_it_is_interrupted(tmp_path: Path) -> None:
    with page_site(tmp_path) as site, screen(terminal(tmp_path, **site.env), str(tmp_path)) as window:
        window.type(f"{TOP}; echo code $?", "Enter")
        window.see(r"8 GPUs: 8 free  0 apps")
        app = site.type("gpu-arbiter submit --gpus 2 -- python train.py").stdout.split()[-1]
        shown = window.see(r"8 GPUs: 6 free, 2 leased  1 app: 1 running")
        assert len(re.findall(rf"^n\d +GPU-\S+ +leased +{app} ", shown, re.MULTILINE)) == 2
        site.let_programs_end()
        window.see(r"8 GPUs: 8 free  0 apps")
        window.type("C-c")
        window.wait(rf"code {exit_codes.INTERRUPTED}$")
