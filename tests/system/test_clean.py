"""`clean`: what apps that are over have left behind goes, and nothing else."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from app_agent.client import App, Client, connect
from protocol import exit_codes
from tests.support import called_functions as functions
from tests.support.patience import PATIENCE_S
from tests.support.thread_site import ThreadSite, thread_site

#: They share one site.
SAVING = """
import os
folder = os.environ["GPU_ARBITER_CHECKPOINT_DIR"]
os.makedirs(folder + "/a0-s7")
for name in ("a0-s7/state.pt", "a0-s7/manifest.json", "finished.json"):
    with open(folder + "/" + name, "w") as file:
        file.write("x" * 10_000)
"""
OWN = SAVING + "open(folder + '/best.pt', 'w').close()\n"
LASTING = "import time; time.sleep(600)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadSite]:
    with thread_site(tmp_path_factory.mktemp("clean")) as running:
        yield running


@pytest.fixture
def client(site: ThreadSite, tmp_path: Path) -> Client:
    return connect(site.socket, cwd=tmp_path, name=tmp_path.name)


@pytest.fixture
def clean(site: ThreadSite, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the verb for the apps of this test, which have its name, or for those that are named."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        named = words and not words[0].startswith("-")
        line = [*PROGRAM, "clean", *words, *(() if named else ("--name", tmp_path.name))]
        env = os.environ | {"GPU_ARBITER_URL": f"unix://{site.socket}"}
        return subprocess.run(
            line, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )

    return run


PROGRAM = (sys.executable, "-m", "launch.cli")
Clean = Callable[..., subprocess.CompletedProcess[str]]


def over(client: Client, script: str = SAVING) -> Path:
    """The folder of an app that is over."""
    return folder_of(ended(client, script))


def ended(client: Client, script: str = SAVING) -> App:
    app = client.submit((sys.executable, "-c", script))
    assert app.wait(PATIENCE_S).state == "finished"
    return app


def folder_of(app: App) -> Path:
    return Path(app.record().checkpoint_dir)


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not reached():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_dry_run_says_what_and_how_much_and_removes_nothing(client: Client, clean: Clean) -> None:
    folder = over(client)
    done = clean("--older-than", "0s", "--dry-run")
    assert done.returncode == 0
    assert str(folder) in done.stdout
    room = sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    assert done.stdout.splitlines()[-1] == f"1 folder, {room / 1024:.1f} KiB"
    assert (folder / "0" / "a0-s7" / "state.pt").exists()
    document = answer(clean("--older-than", "0s", "--dry-run", "--json"))
    (told,) = document["folders"]
    assert (document["schema"], document["dry_run"], document["bytes"]) == ("clean/v1", True, room)
    assert (told["path"], told["what"], told["files"], told["removed"]) == (str(folder), "checkpoints", 3, False)


def test_what_apps_that_are_over_have_left_behind_goes(client: Client, clean: Clean, tmp_path: Path) -> None:
    folder, called = over(client), client.with_fields(name="called").submit_function(functions.add, 1)
    assert called.wait(PATIENCE_S).state == "finished"
    call = Path(called.record().call_dir)
    assert call.parent == tmp_path / "checkpoints" / "calls"
    done = clean("--older-than", "0s", "--yes")
    assert done.returncode == 0
    assert not folder.exists()
    assert done.stderr.splitlines()[-1].startswith("removed 1 folder, ")
    document = answer(clean(called.id, "--yes", "--json"))
    gone = sorted((each["what"], each["removed"]) for each in document["folders"])
    assert gone == [("call", True), ("checkpoints", True)]
    assert not call.exists()


def test_what_ended_within_a_day_stays_unless_it_is_named(client: Client, clean: Clean) -> None:
    app = ended(client)
    assert clean("--yes").stdout == "nothing to remove\n"
    assert folder_of(app).exists()
    assert answer(clean(app.id, "--older-than", "1h", "--yes", "--json"))["left"] == [
        {"path": str(folder_of(app)), "app": app.id, "reason": "it ended later than --older-than says"}
    ]
    assert answer(clean(app.id, "--yes", "--json"))["folders"][0]["removed"]
    assert not folder_of(app).exists()


def test_how_many_apps_ended_too_lately_is_told_with_the_flag_that_takes_them(client: Client, clean: Clean) -> None:
    note = "stays: what {} that ended less than 1d00h ago left behind; --older-than 0s takes that, too\n"
    ended(client)
    assert clean("--dry-run").stderr == note.format("1 app")
    ended(client)
    assert clean("--yes").stderr == note.format("2 apps")
    assert clean("--older-than", "0s", "--yes").stderr.startswith("removed 2 folders, ")
    assert clean("--yes").stderr == "", "nothing of theirs is there"


def test_an_app_that_is_not_over_keeps_its_folders_and_is_told_of(client: Client, clean: Clean) -> None:
    app = client.submit((sys.executable, "-c", LASTING))
    app.wait(60, for_="running")
    folder = folder_of(app)
    until(folder.exists)
    assert clean("--older-than", "0s", "--yes").stdout == "nothing to remove\n"
    document = answer(clean(app.id, "--yes", "--json"))
    assert (document["folders"], document["left"][0]["reason"]) == ([], "it is running")
    assert folder.exists()
    app.cancel()
    app.wait(PATIENCE_S)


def test_files_of_the_script_keep_a_folder_unless_the_app_is_named(client: Client, clean: Clean) -> None:
    app = ended(client, OWN)
    document = answer(clean("--older-than", "0s", "--yes", "--json"))
    assert document["folders"] == []
    assert document["left"][0]["reason"].startswith("it has files of the script (0/best.pt)")
    assert folder_of(app).exists()
    assert clean(app.id, "--yes").returncode == 0
    assert not folder_of(app).exists()


def test_a_folder_of_which_nothing_is_known_stays_and_is_told_of(
    client: Client, site: ThreadSite, clean: Clean, tmp_path: Path
) -> None:
    folder = over(client)
    strange = folder.with_name("me-abc9-0123abcd")
    others = folder.with_name("bob-abc9-0123abcd")
    for each in (strange, others, folder.with_name("me-notes")):
        (each / "0" / "a0-s7").mkdir(parents=True)
    call = folder.parent / "calls" / "add-0123456789ab"
    call.mkdir(parents=True)
    (call / "call.pickle").touch()
    document = answer(clean("all", "--older-than", "0s", "--yes", "--json"))
    told = [each for each in document["left"] if each["path"].startswith(str(tmp_path))]
    assert [each["path"] for each in told] == [str(strange), str(call)]
    assert {each["reason"].partition(";")[0] for each in told} == {"nothing is known of its app"}
    assert (folder.exists(), strange.exists(), others.exists(), call.exists()) == (False, True, True, True)


def test_symbolic_links_are_not_followed(client: Client, clean: Clean, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("x" * 100_000)
    linking = ended(client, SAVING + f"os.symlink({str(precious)!r}, folder + '/a0-s7/data')\n")
    assert answer(clean(linking.id, "--dry-run", "--json"))["bytes"] < 100_000
    assert answer(clean(linking.id, "--yes", "--json"))["folders"][0]["removed"]
    assert not folder_of(linking).exists()
    replaced = ended(client)
    folder_of(replaced).rename(tmp_path / "elsewhere")
    folder_of(replaced).symlink_to(precious)
    assert answer(clean(replaced.id, "--yes", "--json"))["folders"] == []
    assert (precious / "data").exists()


def test_without_a_terminal_nothing_goes_before_yes_is_said(client: Client, clean: Clean) -> None:
    folder = over(client)
    done = clean("--older-than", "0s")
    assert (done.returncode, "clean --yes" in done.stderr, folder.exists()) == (exit_codes.USAGE, True, True)


@pytest.mark.parametrize(("reply", "stays"), [("y", False), ("", True), ("n", True)])
def test_a_person_is_asked_before(client: Client, site: ThreadSite, reply: str, stays: bool) -> None:
    app = ended(client)
    ours, theirs = pty.openpty()
    os.write(ours, f"{reply}\n".encode())
    env = os.environ | {"GPU_ARBITER_URL": f"unix://{site.socket}"}
    with subprocess.Popen([*PROGRAM, "clean", app.id], env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the other end is closed
            while data := os.read(ours, 65_536):
                shown += data
        process.wait(PATIENCE_S)
    os.close(ours)
    assert re.search(rb"remove 1 folder, [0-9.]+ KiB\? \[y/N\]", shown)
    assert folder_of(app).exists() == stays


def test_an_id_that_no_app_has_is_told_and_the_others_go(client: Client, clean: Clean) -> None:
    app = ended(client)
    done = clean(app.id, "me-none9", "--yes", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["error"]) == (exit_codes.NOT_FOUND, "there is no app me-none9")
    assert document["folders"][0]["removed"]
    assert not folder_of(app).exists()
    assert clean("all", app.id, "--yes").returncode == exit_codes.USAGE


def test_a_folder_that_cannot_be_removed_is_told_and_the_others_go(
    client: Client, clean: Clean, tmp_path: Path
) -> None:
    first, second = ended(client), ended(client)
    busy = folder_of(first) / "0" / "a0-s7"
    if subprocess.run(["mount", "-t", "tmpfs", "none", busy], capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount a tmpfs")
    try:
        done = clean(first.id, second.id, "--yes")
    finally:
        subprocess.run(["umount", "--lazy", busy], check=True)
    assert done.returncode == exit_codes.FAILED
    assert f"{folder_of(first)} cannot be removed: a0-s7: Device or resource busy" in done.stderr
    assert not folder_of(second).exists()


def test_apps_are_chosen_by_state_as_elsewhere(client: Client, clean: Clean) -> None:
    finished = over(client)
    failing = client.submit((sys.executable, "-c", SAVING + "raise SystemExit(1)"), max_restarts=0)
    assert failing.wait(PATIENCE_S).state == "failed"
    document = answer(clean("--state", "failed", "--older-than", "0s", "--yes", "--json"))
    assert [each["path"] for each in document["folders"]] == [str(folder_of(failing))]
    assert finished.exists()
