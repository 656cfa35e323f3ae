"""The journal: what was committed is read back bit for bit, whatever happened to the process."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Struct

from protocol.journal import Journal, JournalError


class Came(Struct, frozen=True, tag=True):
    app: str
    weight: float = 1.0


class Left(Struct, frozen=True, tag=True):
    app: str


Event = Came | Left


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal[Event]]:
    with Journal[Event].of(path, Event) as opened:
        yield opened


def reopen(journal: Journal[Event]) -> Journal[Event]:
    journal.close()
    return Journal[Event].of(journal.path, Event)


def test_events_come_back_in_order_with_their_times_bit_for_bit(journal: Journal[Event]) -> None:
    written = [(1, 0.1 + 0.2, Came("a", 1e-300)), (2, 1.7e9 + 1 / 3, Left("a")), (3, 1.8e9, Came("b"))]
    for seq, now, event in written:
        assert journal.append(now, event) == seq
    with reopen(journal) as again:
        loaded = again.load()
        assert loaded.snapshot is None
        assert list(loaded.events) == written
        assert (again.last_seq, again.last_now) == (3, 1.8e9)
        assert again.append(2e9, Left("b")) == 4


def test_a_snapshot_replaces_the_events_before_it(journal: Journal[Event]) -> None:
    journal.append(1.0, Came("a"))
    journal.snapshot(b"one app")
    journal.append(2.0, Came("b"))
    with reopen(journal) as again:
        loaded = again.load()
        assert loaded.snapshot == b"one app"
        assert list(loaded.events) == [(2, 2.0, Came("b"))]


def test_numbers_and_times_go_on_after_everything_was_pruned(path: Path) -> None:
    with Journal[Event].of(path, Event, snapshots_kept=1) as journal:
        for turn in range(3):
            journal.append(float(turn), Came("a"))
            journal.snapshot(b"%d" % turn)
    with Journal[Event].of(path, Event, snapshots_kept=1) as again:
        assert list(again.load().events) == []
        assert (again.last_seq, again.last_now) == (3, 2.0)
        assert again.append(3.0, Left("a")) == 4


def test_events_since_the_oldest_kept_snapshot_stay_for_looking_back(journal: Journal[Event]) -> None:
    for turn in range(5):
        journal.append(float(turn), Came("a"))
        journal.snapshot(b"%d" % turn)
    journal.append(9.0, Left("a"))
    journal.close()
    with sqlite3.connect(journal.path) as database:
        assert database.execute("SELECT seq FROM snapshots ORDER BY seq").fetchall() == [(4,), (5,)]
        assert database.execute("SELECT seq FROM events ORDER BY seq").fetchall() == [(5,), (6,)]
    database.close()


def test_starts_count_every_opening(journal: Journal[Event]) -> None:
    assert journal.starts == 1
    with reopen(journal) as second:
        assert second.starts == 2
        with reopen(second) as third:
            assert third.starts == 3


def test_epochs_grow_over_restarts_even_if_the_broker_forgot_its_own(journal: Journal[Event]) -> None:
    assert journal.next_epoch(1) == 1
    assert journal.next_epoch(7) == 7
    with reopen(journal) as again:
        assert again.next_epoch(1) == 8


def test_facts_are_kept(journal: Journal[Event]) -> None:
    journal.append(1.0, Came("a"))
    journal.set("color", "blue")
    with reopen(journal) as again:
        assert again.get("color") == "blue"
        assert again.get("size") is None
        assert len(list(again.load().events)) == 1


KILLED = """
import sys
from tests.protocol.test_journal import *
journal = Journal[Event].of(sys.argv[1], Event)
for number in range(10):
    journal.append(float(number), Came(str(number)))
journal.commit()
journal.append(10.0, Came("uncommitted"))
print("ready", flush=True)
sys.stdin.read()
"""


def test_kill_9_loses_nothing_that_was_committed_and_all_that_was_not(path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path.cwd()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with pytest.raises(JournalError, match="another process; stop it"):
            Journal[Event].of(path, Event)
        process.send_signal(signal.SIGKILL)
    with Journal[Event].of(path, Event) as again:
        assert [event.app for _, _, event in again.load().events] == [str(number) for number in range(10)]
        assert again.append(11.0, Left("0")) == 11


def test_a_second_opening_in_this_process_is_refused_with_the_mend(journal: Journal[Event]) -> None:
    with pytest.raises(JournalError, match=rf"{journal.path.name} is in use"):
        Journal[Event].of(journal.path, Event)


def test_a_damaged_file_is_refused_with_the_mend(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(JournalError, match="move it away to begin anew"):
        Journal[Event].of(path, Event)
    assert path.read_bytes() == b"not a database" * 1000


def test_a_page_that_is_damaged_is_refused_with_the_mend_when_the_journal_is_opened(path: Path) -> None:
    with Journal[Event].of(path, Event) as journal:
        for number in range(3000):
            journal.append(float(number), Came(str(number)))
        journal.commit()
    data = bytearray(path.read_bytes())
    middle = len(data) // 4096 // 2 * 4096
    data[middle : middle + 4096] = b"\xa5" * 4096
    path.write_bytes(data)
    with pytest.raises(
        JournalError, match=r"is damaged .*; bring a copy of the folder back, or .* begin anew"
    ) as error:
        Journal[Event].of(path, Event)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("what", ["event", "snapshot"])
def test_noise_within_a_row_is_noticed_though_every_page_is_in_order(path: Path, what: str) -> None:
    """SQLite knows pages, and nothing of their contents."""
    long = "a" * 60_000
    with Journal[Event].of(path, Event) as journal:
        journal.append(1.0, Came("first" if what == "snapshot" else long))
        if what == "snapshot":
            journal.snapshot(long.encode())
        journal.commit()
    data = path.read_bytes()
    middle = data.index(b"a" * 4000, len(data) // 2)  # within one page, whose own head stays as it is
    path.write_bytes(data[:middle] + b"b" * 2000 + data[middle + 2000 :])
    with (
        Journal[Event].of(path, Event) as journal,
        pytest.raises(JournalError, match="is not as it was written; bring"),
    ):
        list(journal.load().events)


def test_an_event_that_has_gone_is_missed(path: Path) -> None:
    with Journal[Event].of(path, Event) as journal:
        for number in range(5):
            journal.append(float(number), Came(str(number)))
        journal.commit()
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM events WHERE seq = 3")
    database.close()
    with Journal[Event].of(path, Event) as journal, pytest.raises(JournalError, match="event 3 is missing; bring"):
        list(journal.load().events)


def test_a_journal_without_checksums_is_read_and_goes_on_with_them(path: Path) -> None:
    with Journal[Event].of(path, Event) as journal:
        journal.append(1.0, Came("a"))
        journal.commit()
    with sqlite3.connect(path) as database:
        for table in ("events", "snapshots"):
            database.execute(f"ALTER TABLE {table} DROP COLUMN sum")
        database.execute("PRAGMA user_version = 1")
    database.close()
    for name in ("b", "c"):
        with Journal[Event].of(path, Event) as journal:
            journal.append(2.0, Came(name))
            journal.commit()
            names = [event.app for _, _, event in journal.load().events]
    assert names == ["a", "b", "c"]


#: Counts how often the C library is told to flush a file to the disk.
COUNT_FLUSHES = """
#include <stdlib.h>
#include <unistd.h>
#include <fcntl.h>
static void count(void) {
    int fd = open(getenv("FLUSHES"), O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (write(fd, "x", 1) != 1) abort();
    close(fd);
}
int fsync(int fd) { (void)fd; count(); return 0; }
int fdatasync(int fd) { (void)fd; count(); return 0; }
"""
FLUSHED = """
import os, sys
from protocol.journal import Journal
from tests.protocol.test_journal import Came, Event
flushes = lambda: os.path.getsize(os.environ["FLUSHES"])
journal = Journal[Event].of(sys.argv[1], Event)
before = flushes()
journal.append(1.0, Came("a"))
journal.commit()
events = flushes() - before
journal.next_epoch(1)
epoch = flushes() - before - events
journal.append(2.0, Came("b"))
journal.commit()
print(events, epoch > 0, flushes() - before - events - epoch)
"""


def test_an_epoch_is_on_the_disk_before_it_is_given_out(path: Path, tmp_path: Path) -> None:
    """A power cut must not take it back: it would be given out again. Events may wait for the disk; they come again."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (cc) to build the counter of flushes with")
    library, count = tmp_path / "flushes.so", tmp_path / "flushes"
    (tmp_path / "flushes.c").write_text(COUNT_FLUSHES)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "flushes.c"], check=True)
    env = os.environ | {"LD_PRELOAD": str(library), "FLUSHES": str(count)}
    done = subprocess.run([sys.executable, "-c", FLUSHED, path], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True", "0"]


def test_a_foreign_database_is_refused_and_left_alone(path: Path) -> None:
    path.parent.mkdir()
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE songs (title TEXT)")
    database.commit()
    database.close()
    before = path.read_bytes()
    with pytest.raises(JournalError, match="not a journal of gpu-arbiter"):
        Journal[Event].of(path, Event)
    assert path.read_bytes() == before


def test_a_newer_version_is_refused_with_the_mend(journal: Journal[Event]) -> None:
    journal.close()
    database = sqlite3.connect(journal.path)
    database.execute("PRAGMA user_version = 99")
    database.commit()
    database.close()
    with pytest.raises(JournalError, match="upgrade gpu-arbiter"):
        Journal[Event].of(journal.path, Event)


def test_an_event_that_this_version_does_not_know_is_named(journal: Journal[Event]) -> None:
    journal.append(1.0, Came("a"))
    journal.close()
    with Journal[Left].of(journal.path, Left) as narrower, pytest.raises(JournalError, match="event 1 cannot be read"):
        list(narrower.load().events)


def test_a_closed_journal_says_so_in_its_own_words(journal: Journal[Event]) -> None:
    journal.close()
    with pytest.raises(JournalError, match="check the disk"):
        journal.append(1.0, Came("a"))
