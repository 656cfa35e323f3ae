"""Folders and files of a daemon's state are for its own user."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from arbiter.ledger import Ledger
from protocol.config import ConfigError
from protocol.core import Tick
from protocol.journal import JournalError
from protocol.journal.sqlite import SqliteJournal
from protocol.private import state_folder


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """What most users have: what is made can be read by all unless it is said otherwise."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_and_all_databases_in_it_are_private(tmp_path: Path) -> None:
    folder = state_folder(tmp_path / "new" / "state")
    with SqliteJournal[Tick].of(folder / "journal.db", Tick) as journal, closing(Ledger(folder / "ledger.db")):
        journal.append(1.0, Tick())
        journal.commit()
        files = {path.name: mode(path) for path in folder.iterdir()}
    assert mode(folder) == 0o700
    assert {"journal.db", "journal.db-wal", "ledger.db", "ledger.db-wal", "ledger.db-shm"} <= files.keys()
    assert set(files.values()) == {0o600}


def test_what_an_earlier_version_left_open_is_closed_and_said_once(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    for name in ("journal.db", "ledger.db", "ledger.db-wal", "notes.txt"):
        (folder / name).touch(mode=0o644)
    with capture_logs() as logs:
        state_folder(folder)
        state_folder(folder)
    assert mode(folder) == 0o700
    assert {mode(folder / name) for name in ("journal.db", "ledger.db", "ledger.db-wal")} == {0o600}
    (line,) = logs
    assert (line["event"], line["before"]) == ("state.closed", "0755")
    assert line["files"] == ["journal.db", "ledger.db", "ledger.db-wal"]


def test_a_database_that_is_open_in_a_private_folder_is_closed_too(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE x (y)")
        assert mode(tmp_path / "ledger.db-wal") == 0o644
        with closing(Ledger(tmp_path / "ledger.db")):
            assert {mode(path) for path in tmp_path.glob("ledger.db*")} == {0o600}


def test_an_administrators_folder_is_taken_as_it_is_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    folder.chmod(0o2770)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with capture_logs() as logs:
        state_folder(folder)
    assert mode(folder) == 0o2770
    assert [(line["event"], line["mode"]) for line in logs] == [("state.open", "2770")]


@pytest.mark.parametrize(("rights", "uid"), [(0o777, 54321), (0o1777, 54321), (0o1777, None)])
def test_a_folder_where_every_user_may_write_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rights: int, uid: int | None
) -> None:
    """``/tmp`` is one, and an administrator who runs a daemon there must not find it closed."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(rights)
    if uid is not None:
        monkeypatch.setattr(os, "geteuid", lambda: uid)
    with pytest.raises(ConfigError, match="every user may write; give one that this user owns"):
        state_folder(folder)
    assert mode(folder) == rights


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"state_dir .*/file/state cannot be made: Not a directory"):
        state_folder(tmp_path / "file" / "state")
    (tmp_path / "folder").mkdir()
    with pytest.raises(JournalError, match=r"cannot open .*/folder: "):
        SqliteJournal[Tick].of(tmp_path / "folder", Tick)
