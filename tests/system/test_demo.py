"""The demo, which is also the first test of the whole system: real training, real processes, both buses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from shutil import which
from typing import Any
from urllib.request import urlopen

import pytest

from arbiter.ledger import Ledger
from launch import demo
from tests.support.patience import PATIENCE_S
from tests.support.rabbitmq import PrivateRabbitMQ, available
from tests.support.web_process import shown_as

#: They share one demo.
pytestmark = [pytest.mark.clock, pytest.mark.slow]

FIGURES = {
    "id", "tenant", "jct_s", "rho", "gpu_seconds", "grants", "renewals", "preemptions", "migrations", "steps_lost",
    "final_accuracy",
}  # fmt: skip
HREFS = "links => links.map(link => link.getAttribute('href'))"
QUICK = {"steps": 200, "step_ms": 25.0, "lease_s": 12.0}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[demo.Result, Path]:
    out = tmp_path_factory.mktemp("demo")
    return demo.run(demo.Options(out=out, quiet=True, **QUICK)), out


@pytest.mark.timeout(300)
def test_every_app_finishes_and_nobody_loses_a_step(outcome: tuple[demo.Result, Path]) -> None:
    result, _ = outcome
    assert result.unfinished == ()
    apps = result.summary["apps"]
    assert len(apps) >= 5
    assert {app["tenant"] for app in apps} == {"vision", "speech"}
    assert [app["steps_lost"] for app in apps] == [0] * len(apps)
    assert all(app["grants"] >= 1 and app["gpu_seconds"] > 0 for app in apps)


def test_gpus_change_hands(outcome: tuple[demo.Result, Path]) -> None:
    spans = _spans(outcome[1])
    holders = {gpu: {span["app"] for span in spans if span["gpu"] == gpu} for gpu in {span["gpu"] for span in spans}}
    assert max(map(len, holders.values())) >= 2, "eleven GPUs are wanted, eight are there"


def test_no_gpu_is_held_by_two_apps_at_any_time(outcome: tuple[demo.Result, Path]) -> None:
    spans = _spans(outcome[1])
    assert spans
    for gpu in {span["gpu"] for span in spans}:
        held = sorted((span["from"], span["to"], span["app"]) for span in spans if span["gpu"] == gpu)
        for earlier, later in pairwise(held):
            assert later[0] >= earlier[1] - 1e-6, (gpu, earlier, later)


def test_the_summary_and_the_picture_are_left_behind(outcome: tuple[demo.Result, Path]) -> None:
    result, out = outcome
    summary = json.loads((out / "summary.json").read_text())
    assert summary == result.summary
    assert (summary["schema"], summary["bus"]) == ("demo/v1", "memory")
    assert summary["wall_s"] <= 120
    assert summary["rounds"] > 1
    assert all(app.keys() >= FIGURES for app in summary["apps"])
    assert all(app["final_accuracy"] > 0.8 for app in summary["apps"])
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_ledger_is_left_behind_with_the_gpu_time_of_all_apps(outcome: tuple[demo.Result, Path]) -> None:
    result, out = outcome
    with closing(Ledger.reader(out / "ledger.db")) as ledger:
        had_s = sum(seconds for _, _, seconds, _ in ledger.gpu_time(0.0, 1e12, known=1e12))
    counted_s = sum(app["gpu_seconds"] for app in result.summary["apps"])
    assert counted_s - 1.0 <= had_s <= counted_s + 60.0, "the last GPUs were being left when it was counted"


@pytest.mark.timeout(300)
@pytest.mark.skipif(which("chromium") is None, reason="chromium is not here: apt-get install chromium")
def test_the_pages_of_its_ledger_are_fit_to_be_seen_in_a_browser(outcome: tuple[demo.Result, Path]) -> None:
    pytest.importorskip("starlette", reason="the extra `web` is not installed")
    pytest.importorskip("playwright", reason="playwright is not here: make setup")
    from tests.support.web_site import chromium, ledger_served
    from tests.support.web_window import look_at_all

    result, out = outcome
    with ledger_served(out / "ledger.db") as site, chromium() as browser:
        look_at_all(browser, site)
        page = browser.new_page()
        page.goto(site.address + site.pages["timeline"])
        drawn = {link.rpartition("/")[2] for link in page.locator("svg a").evaluate_all(HREFS)}
        assert drawn == {app["id"] for app in result.summary["apps"]}
        page.goto(site.address + site.pages["round"])
        listed = [link.rpartition("/")[2] for link in page.locator("#outcomes a[href^='/apps']").evaluate_all(HREFS)]
        with closing(Ledger.reader(out / "ledger.db")) as ledger:
            record = ledger.round(int(site.pages["round"].rpartition("/")[2]))
        assert record is not None
        assert sorted(listed) == sorted(each.app for each in record.outcomes)
        assert any(each.bid for each in record.outcomes)


def rounds_shown(line: str) -> int:
    """How many rounds the page has that a line of the demo tells of."""
    pytest.importorskip("starlette", reason="the extra `web` is not installed")
    with shown_as(line) as address, urlopen(f"{address}rounds.json", timeout=PATIENCE_S) as answer:
        (table,) = [each for each in json.load(answer)["tables"] if each["name"] == "rounds"]
        return len(table["rows"])


def test_its_last_words_show_the_ledger_in_a_browser(outcome: tuple[demo.Result, Path]) -> None:
    result, out = outcome
    assert rounds_shown(demo.last_words(result.summary, out)[-1]) >= result.summary["rounds"]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_last_line_of_the_command_does(tmp_path: Path) -> None:
    words = ["demo", "--out", str(tmp_path / "a folder"), "--steps", "200"]
    done = subprocess.run([sys.executable, "-m", "launch.cli", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert rounds_shown(done.stderr.splitlines()[-1]) > 1


@pytest.mark.full
@pytest.mark.timeout(600)
def test_weights_are_those_of_the_same_script_run_alone(tmp_path: Path) -> None:
    # Training takes four leases. Yet where starts take long, other apps than these may be the ones that give way.
    for number in range(3):
        options = demo.Options(out=tmp_path / f"demo-{number}", quiet=True, steps=480, step_ms=25.0, lease_s=3.0)
        result = demo.run(options)
        apps = {app["name"]: app for app in result.summary["apps"]}
        single = [spec for spec in demo.apps(options, tmp_path, tmp_path) if len(spec.trials) == 1]
        preempted = [spec for spec in single if apps[spec.name]["preemptions"]]
        if preempted:
            break
    assert preempted
    for spec in preempted:
        app = apps[spec.name]
        alone = subprocess.run(
            [*spec.trials[0], "--step-ms", "0"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert _digest(result.outputs[app["id"]]) == _digest(alone.stdout), app


@pytest.mark.full
@pytest.mark.broker
@pytest.mark.timeout(300)
@pytest.mark.skipif(not available(), reason="rabbitmq-server is not installed; see scripts/ensure-rabbitmq.sh")
def test_over_rabbitmq_with_daemons_of_their_own_it_gives_the_same_kind_of_result(
    broker: PrivateRabbitMQ, tmp_path: Path
) -> None:
    words = ["demo", "--json", "--bus", broker.url(), "--out", str(tmp_path), "--steps", "200"]
    done = subprocess.run([sys.executable, "-m", "launch.cli", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["schema"], summary["bus"], len(summary["apps"])) == ("demo/v1", "amqp", 6)
    assert [(app["state"], app["steps_lost"]) for app in summary["apps"]] == [("finished", 0)] * 6


@pytest.fixture
def broker() -> Iterator[PrivateRabbitMQ]:
    with PrivateRabbitMQ() as private:
        yield private


def _spans(out: Path) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = json.loads((out / "rounds.json").read_text())["spans"]
    return spans


def _digest(output: str) -> str:
    (found,) = re.findall(r"weights sha256 ([0-9a-f]{64})", output)
    return str(found)
