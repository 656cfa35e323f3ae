"""A real Prometheus scrapes `gpu-arbiter web` over a small site, and evaluates the alert rules and panels we ship."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("starlette", reason="the extra `web` is not installed")

from tests.launch.test_web_metrics import RULES, recipe_for
from tests.support.page_site import PageSite, page_site, site_process
from tests.support.pages import ROOT
from tests.support.patience import PATIENCE_S

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("promtool")),
        reason="prometheus and promtool are not here: run scripts/ensure-prometheus.sh",
    ),
]

TOKEN = "a-token-of-this-test"
#: Series of a site, at most.
SERIES_MAX = 2000


@dataclass(frozen=True)
class Prometheus:
    """The answers of a private Prometheus."""

    address: str

    def ask(self, what: str, **wishes: str) -> Any:
        with urlopen(f"{self.address}/api/v1/{what}?{urlencode(wishes)}", timeout=PATIENCE_S) as answer:
            told = json.load(answer)
        assert told["status"] == "success", told
        return told["data"]

    def value(self, expression: str) -> float | None:
        """Return the value of an expression that has one at most; None if it has none."""
        found = self.ask("query", query=expression)["result"]
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> set[str]:
        return {each["labels"]["alertname"] for each in self.ask("alerts")["alerts"] if each["state"] == "firing"}


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.1)


def matched(pattern: str, log: Path) -> str:
    """Wait for a line of a log, and return the group of the pattern."""
    wait_until(lambda: re.search(pattern, log.read_text()) is not None, f"{log} has {pattern}")
    found = re.search(pattern, log.read_text())
    assert found is not None
    return found[1]


@contextmanager
def started(log: Path, *command: str, **more: Any) -> Iterator[None]:
    """Run a process whose output goes to a log, until the end of the block."""
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **more) as process,
    ):
        try:
            yield
        finally:
            process.terminate()


@contextmanager
def web(folder: Path, socket: Path) -> Iterator[str]:
    """Serve the pages of the site in a folder to those who have the token; give their host and port."""
    log, token = folder / "web.log", folder / "gpu-arbiter.token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    ledger = next((folder / "site").rglob("ledger.db"))
    command = (sys.executable, "-m", "launch.cli", "web", "--port", "0", "--ledger", str(ledger))
    command += ("--token-file", str(token))
    with started(log, *command, cwd=ROOT, env=os.environ | {"GPU_ARBITER_URL": f"unix://{socket}"}):
        yield matched(r"the site is at http://(\S+)/", log)


@contextmanager
def prometheus(folder: Path, target: str, rules: str) -> Iterator[Prometheus]:
    """Have a Prometheus scrape a target as the page on operating says, every second; it evaluates rules as often."""
    (folder / "gpu-arbiter-alerts.yml").write_text(rules)
    recipe = recipe_for(folder, target).replace("scrape_interval: 15s", "scrape_interval: 1s")
    often = "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}"
    (folder / "prometheus.yml").write_text(f"{often}\n{recipe}")
    promtool("check", "config", str(folder / "prometheus.yml"))
    log = folder / "prometheus.log"
    command = ("prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb")
    with started(log, *command, "--web.listen-address=127.0.0.1:0"):
        port = matched(r'msg="Listening on" address=127.0.0.1:(\d+)', log)
        matched(r"(Server is ready to receive web requests)", log)
        yield Prometheus(f"http://127.0.0.1:{port}")


def promtool(*words: str, told: str | None = None) -> str:
    done = subprocess.run(
        ("promtool", *words), input=told, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def get(address: str) -> str:
    with urlopen(Request(address, headers={"Authorization": f"Bearer {TOKEN}"}), timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


#: Panels that a site like this one has nothing for.
EMPTY = {
    "Time until certificates expire": "its bus is no broker with TLS",
    "rho of the worst-off app": "its policy asks apps for no rho",
}


def submitted(site: PageSite, gpus: int) -> str:
    done = site.type(f"gpu-arbiter submit --gpus {gpus} -- python train.py")
    assert done.code == 0, done.said
    return done.stdout.strip()


def finite(eyes: Prometheus, expression: str) -> bool:
    """Whether an expression has a value that is a number."""
    found = eyes.ask("query", query=expression)["result"]
    return any(math.isfinite(float(each["value"][1])) for each in found)


def shows(eyes: Prometheus, expression: str, value: float) -> bool:
    return eyes.value(expression) == value


def make_news(site: PageSite, eyes: Prometheus) -> None:
    """Let there be something new of all that is counted from the first look on."""
    waits = "sum(gpu_arbiter_wait_seconds_count)"
    for count in (1.0, 2.0):  # the increase of a series is known from its second value on
        app = submitted(site, 1)
        wait_until(partial(shows, eyes, waits, count), "its wait is counted")
    assert site.type(f"gpu-arbiter hold {app}").code == 0
    wait_until(lambda: eyes.value('gpu_arbiter_preemptions_total{reason="act"}') == 1.0, "its GPU is taken")
    assert site.type(f"gpu-arbiter release {app}").code == 0
    submitted(site, 4)  # waits


def test_prometheus_scrapes_a_site_and_an_alert_comes_and_goes(tmp_path: Path) -> None:
    with ExitStack() as running:
        site = running.enter_context(page_site(tmp_path))
        for gpus in (1, 4):
            submitted(site, gpus)
        with web(tmp_path, site.socket) as target:
            shipped = get(f"http://{target}/alerts.yml")
            (tmp_path / "shipped.yml").write_text(shipped)
            assert f"SUCCESS: {RULES} rules found" in promtool("check", "rules", str(tmp_path / "shipped.yml"))
            assert promtool("check", "metrics", told=get(f"http://{target}/metrics")) == ""
            quick = re.sub(r"\bfor: \w+", "for: 1s", shipped)
            with prometheus(tmp_path, target, quick) as eyes:
                wait_until(lambda: eyes.value("up") == 1.0, "the target is up")
                wait_until(lambda: eyes.value("gpu_arbiter_up") == 1.0, "the arbiter is seen")
                wait_until(lambda: eyes.value('sum(gpu_arbiter_gpus{state="leased"})') == 5.0, "five GPUs are held")
                assert 20 < (eyes.value('count({job="gpu-arbiter"})') or 0) <= SERIES_MAX
                (group,) = eyes.ask("rules")["groups"]
                wait_until(
                    lambda: {each["health"] for each in eyes.ask("rules")["groups"][0]["rules"]} == {"ok"},
                    "each rule was evaluated",
                )
                assert len(group["rules"]) == RULES
                make_news(site, eyes)
                panels = json.loads(get(f"http://{target}/dashboard.json"))["panels"]
                assert EMPTY.keys() < {panel["title"] for panel in panels}
                for panel in panels:
                    for each in panel["targets"]:
                        if panel["title"] not in EMPTY:
                            what = f"the panel {panel['title']!r} shows {each['expr']}"
                            wait_until(partial(finite, eyes, each["expr"]), what)
                # Before the first scrape there was no sample.
                wait_until(lambda: "ArbiterAway" not in eyes.firing(), "no alert is left of the beginning")

                running.close()
                wait_until(lambda: "ArbiterAway" in eyes.firing(), "the alert is raised")
                assert eyes.value("gpu_arbiter_up") == 0.0
                with site_process(tmp_path):
                    wait_until(lambda: "ArbiterAway" not in eyes.firing(), "the alert goes away")
                    assert eyes.value("gpu_arbiter_up") == 1.0


#: A program that does not heed SIGTERM.
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()\n"


def test_each_fault_of_a_site_raises_its_alert_within_two_minutes(tmp_path: Path) -> None:
    # `PATIENCE_S` is two minutes. How long a state is borne before it counts as a fault is shortened to seconds;
    # tests/launch/test_web_metrics.py holds the rules as they are to their own times.
    folder = tmp_path / "site"
    with ExitStack() as running:
        site = PageSite(tmp_path / "user", running.enter_context(site_process(tmp_path)))
        (site.folder / "stubborn.py").write_text(STUBBORN)
        with web(tmp_path, site.socket) as target:
            quick = re.sub(r"\bfor: \w+", "for: 1s", get(f"http://{target}/alerts.yml"))
            quick = re.sub(r"> (300|900)\b", "> 3", quick)
            with prometheus(tmp_path, target, quick) as eyes:

                def raised(alert: str) -> None:
                    wait_until(lambda: alert in eyes.firing(), f"{alert} is raised")

                wait_until(lambda: eyes.value("gpu_arbiter_node_up{node='n1'}") == 1.0, "the site is seen")
                wait_until(lambda: eyes.firing() == set(), "no alert is left of the beginning")

                (folder / "stall").touch()
                app = site.type("gpu-arbiter submit --grace 5m -- python stubborn.py").stdout.strip()
                raised("NoRoundWhilePending")
                (folder / "stall").unlink()
                site.wait_state(app, "running")
                wait_until(lambda: "NoRoundWhilePending" not in eyes.firing(), "a round has ended the alert")
                assert "PlansRefused" not in eyes.firing()

                (folder / "rival").touch()
                raised("PlansRefused")
                (folder / "rival").unlink()

                assert site.type(f"gpu-arbiter cancel {app}").code == 0
                raised("GpuDrainingTooLong")
                assert "HistoryBeganAnew" not in eyes.firing()
                running.close()
                shutil.rmtree(folder / "arbiter")
                with site_process(tmp_path, "--adopt-site"):
                    raised("HistoryBeganAnew")
