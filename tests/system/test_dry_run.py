"""`submit --dry-run` as a user types it, against a site with real processes: the truth, and no trace of it anywhere."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol import exit_codes
from tests.support.thread_site import ThreadSite, thread_site

Cli = Callable[..., subprocess.CompletedProcess[str]]
PROGRAM = (sys.executable, "-m", "launch.cli")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadSite]:
    with thread_site(tmp_path_factory.mktemp("dry")) as running:
        yield running


@pytest.fixture
def cli(site: ThreadSite, tmp_path: Path) -> Cli:
    environment = os.environ | {"GPU_ARBITER_URL": f"unix://{site.socket}", "PYTHONPATH": str(Path.cwd())}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = (*PROGRAM, *words)
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


class Journals:
    """What the arbiter and the app agent write down; they keep their files locked, so copies are read."""

    def __init__(self, site: ThreadSite, folder: Path) -> None:
        app = site.site.app
        self._folder = folder
        self._paths = (
            Path(site.site.arbiter.state_dir, "journal.db"),
            Path(app.state_dir, f"app-{app.owner}.db"),
        )

    def events(self) -> list[tuple[str, int, Any]]:
        """Return all events, as they were written, with their journals and numbers."""
        found = []
        for path in self._paths:
            for file in path.parent.glob(f"{path.name}*"):
                shutil.copy(file, self._folder)
            with closing(sqlite3.connect(self._folder / path.name)) as database:
                rows = database.execute("SELECT seq, event FROM events").fetchall()
            found += [(path.name, seq, msgspec.msgpack.decode(event)) for seq, event in rows]
        return found


def kinds(events: list[Any]) -> set[str]:
    """Return the kinds of events, messages by their own kind."""
    return {str(event["message"]["type"] if event["type"] == "Received" else event["type"]) for event in events}


def test_it_says_what_then_happens_and_leaves_no_trace(site: ThreadSite, cli: Cli, tmp_path: Path) -> None:
    journals = Journals(site, tmp_path)
    first = cli("submit", "--", "true").stdout.strip()
    cli("wait", first)
    before, written = json.loads(cli("ps", "-a", "--json").stdout)["apps"], journals.events()

    told = cli("submit", "--dry-run", "--json", "-g", "2", "--", "sleep", "60")
    assert (told.returncode, told.stderr) == (exit_codes.DONE, "")
    starts = json.loads(told.stdout)
    assert (starts["schema"], starts["starts"], len(starts["gpus"])) == ("dry-run/v1", True, 2)

    known = {(journal, number) for journal, number, _ in written}
    heard = [event for journal, number, event in journals.events() if (journal, number) not in known]
    assert heard, "time has passed"
    assert kinds(heard) <= {"Tick", "NodeReport", "Holdings", "Ask", "AppReport"}
    assert "dry-run" not in repr(heard)
    assert {event["message"]["app"] for event in heard if kinds([event]) == {"AppReport"}} <= {first}
    assert {event["kind"] for event in heard if event["type"] == "Ask"} <= {"capacity", "apps"}
    after = json.loads(cli("ps", "-a", "--json").stdout)["apps"]
    assert [(app["id"], app["state"]) for app in after] == [(app["id"], app["state"]) for app in before]

    app = cli("submit", "-g", "2", "--", "sleep", "60").stdout.strip()
    number = int(first.rpartition("-")[2].lstrip("bcdfghjkmnpqrstvwxz"))
    assert app == f"{first.removesuffix(str(number))}{number + 1}", "the dry run took no number"
    cli("wait", app, "--for", "running")
    (runs,) = [each for each in json.loads(cli("ps", "--json").stdout)["apps"] if each["id"] == app]
    assert sorted(runs["gpus"]) == sorted(gpu["id"] for gpu in starts["gpus"])

    told = cli("submit", "--dry-run", "--", "sleep", "60")
    assert told.returncode == exit_codes.WOULD_WAIT
    assert told.stdout.startswith("It would wait.\nReason: ")
    assert f"In its way: {app} holds " in told.stdout
    waits = json.loads(cli("submit", "--dry-run", "--json", "--", "sleep", "60").stdout)
    waiting = cli("submit", "--", "sleep", "60").stdout.strip()
    explained = json.loads(cli("explain", waiting, "--json").stdout)
    assert waits["binding"]["apps"] == explained["binding"]["apps"] == [app]
    cli("cancel", app, waiting)


def test_what_submit_refuses_it_refuses_in_the_same_words(cli: Cli) -> None:
    for words in (
        ("-g", "3", "--", "true"),
        ("--priority", "7", "--", "true"),
        ("--tenant", "A B", "--", "true"),
        ("--", "nosuchprogram"),
        ("-g", "2,3", "--", "true"),
    ):
        told, submitted = cli("submit", "--dry-run", *words), cli("submit", *words)
        assert told.returncode != exit_codes.DONE
        assert (told.returncode, told.stdout, told.stderr) == (submitted.returncode, "", submitted.stderr)


def test_there_is_nothing_to_wait_for(cli: Cli) -> None:
    told = cli("submit", "--dry-run", "--wait", "--", "true")
    assert told.returncode == exit_codes.USAGE
    assert "leave --dry-run or --wait out" in told.stderr


def test_an_arbiter_that_is_away_is_code_6(site: ThreadSite, cli: Cli) -> None:
    site.stop_arbiter()
    try:
        told = cli("submit", "--dry-run", "--", "true")
        assert (told.returncode, told.stdout) == (exit_codes.UNREACHABLE, "")
    finally:
        site.start_arbiter()
