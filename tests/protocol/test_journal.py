"""The journal in a file: what its process and its disk may suffer. Its promises: tests/contract/test_journal.py."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec import Struct

from protocol.journal import JournalError
from protocol.journal.sqlite import SqliteJournal


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
def journal(path: Path) -> Iterator[SqliteJournal[Event]]:
    with SqliteJournal[Event].of(path, Event) as opened:
        yield opened


KILLED = """
import sys
from tests.protocol.test_journal import *
journal = SqliteJournal[Event].of(sys.argv[1], Event)
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
            SqliteJournal[Event].of(path, Event)
        process.send_signal(signal.SIGKILL)
    with SqliteJournal[Event].of(path, Event) as again:
        assert [event.app for _, _, event in again.load().events] == [str(number) for number in range(10)]
        assert again.append(11.0, Left("0")) == 11


def test_a_second_opening_in_this_process_is_refused_with_the_mend(journal: SqliteJournal[Event]) -> None:
    with pytest.raises(JournalError, match=rf"{journal.path.name} is in use"):
        SqliteJournal[Event].of(journal.path, Event)


def test_a_damaged_file_is_refused_with_the_mend(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(JournalError, match="move it away to begin anew"):
        SqliteJournal[Event].of(path, Event)
    assert path.read_bytes() == b"not a database" * 1000


def test_a_page_that_is_damaged_is_refused_with_the_mend_when_the_journal_is_opened(path: Path) -> None:
    with SqliteJournal[Event].of(path, Event) as journal:
        for number in range(3000):
            journal.append(float(number), Came(str(number)))
        journal.commit()
    data = bytearray(path.read_bytes())
    middle = len(data) // 4096 // 2 * 4096
    data[middle : middle + 4096] = b"\xa5" * 4096
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"is damaged .*; bring a backup back, or .* begin anew") as error:
        SqliteJournal[Event].of(path, Event)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("what", ["event", "snapshot"])
def test_noise_within_a_row_is_noticed_though_every_page_is_in_order(path: Path, what: str) -> None:
    """SQLite knows pages, and nothing of their contents."""
    long = "a" * 60_000
    with SqliteJournal[Event].of(path, Event) as journal:
        journal.append(1.0, Came("first" if what == "snapshot" else long))
        if what == "snapshot":
            journal.snapshot(long.encode())
        journal.commit()
    data = path.read_bytes()
    middle = data.index(b"a" * 4000, len(data) // 2)  # within one page, whose own head stays as it is
    path.write_bytes(data[:middle] + b"b" * 2000 + data[middle + 2000 :])
    with (
        SqliteJournal[Event].of(path, Event) as journal,
        pytest.raises(JournalError, match="is not as it was written; bring"),
    ):
        list(journal.load().events)


def _delete(path: Path) -> None:
    path.unlink()


def _replace(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    copy.replace(path)


def _cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("suffix", ["", "-wal"])
@pytest.mark.parametrize(
    ("disturb", "words"), [(_delete, "is gone"), (_replace, "is another file"), (_cut_short, "was cut short")]
)
def test_a_file_that_is_disturbed_while_it_is_open_takes_nothing_more(
    journal: SqliteJournal[Event], disturb: Callable[[Path], None], words: str, suffix: str
) -> None:
    """SQLite says nothing of it: it writes on into a file that no later start finds."""
    journal.append(1.0, Came("a"))
    journal.commit()
    disturb(journal.path.with_name(journal.path.name + suffix))
    refusal = rf"{journal.path.name}{suffix} {words} .*so what would be written now would be lost; bring a backup"
    writes: list[Callable[[], object]] = [
        lambda: (journal.append(2.0, Came("b")), journal.commit()),
        lambda: journal.snapshot(b"state"),
        lambda: journal.set("color", "red"),
        lambda: journal.next_epoch(7),
    ]
    for write in writes:
        with pytest.raises(JournalError, match=refusal):
            write()
    with suppress(JournalError):
        journal.close()


def test_an_older_file_in_the_place_of_one_that_is_open_and_was_not_written_yet_is_noticed(path: Path) -> None:
    """An arbiter waits for its broker for hours; SQLite would mix both files into one."""
    with SqliteJournal[Event].of(path, Event) as journal:
        journal.append(1.0, Came("a"))
        journal.commit()
    with SqliteJournal[Event].of(path, Event) as journal:
        _replace(path)
        with pytest.raises(JournalError, match="is another file"):
            journal.next_epoch(1)
        with suppress(JournalError):
            journal.close()


def test_a_journal_without_checksums_is_read_and_goes_on_with_them(path: Path) -> None:
    with SqliteJournal[Event].of(path, Event) as journal:
        journal.append(1.0, Came("a"))
        journal.commit()
    with sqlite3.connect(path) as database:
        for table in ("events", "snapshots"):
            database.execute(f"ALTER TABLE {table} DROP COLUMN sum")
        database.execute("PRAGMA user_version = 1")
    database.close()
    for name in ("b", "c"):
        with SqliteJournal[Event].of(path, Event) as journal:
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
from protocol.journal.sqlite import SqliteJournal
from tests.protocol.test_journal import Came, Event
flushes = lambda: os.path.getsize(os.environ["FLUSHES"])
journal = SqliteJournal[Event].of(sys.argv[1], Event)
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
        SqliteJournal[Event].of(path, Event)
    assert path.read_bytes() == before


def test_a_newer_version_is_refused_with_the_mend(journal: SqliteJournal[Event]) -> None:
    journal.close()
    database = sqlite3.connect(journal.path)
    database.execute("PRAGMA user_version = 99")
    database.commit()
    database.close()
    with pytest.raises(JournalError, match="upgrade gpu-arbiter"):
        SqliteJournal[Event].of(journal.path, Event)


def test_a_closed_journal_says_so_in_its_own_words(journal: SqliteJournal[Event]) -> None:
    journal.close()
    with pytest.raises(JournalError, match="check the disk"):
        journal.append(1.0, Came("a"))


def test_a_program_that_is_older_than_the_last_one_there_is_refused_with_one_sentence(path: Path) -> None:
    for program in ("0.9.3", "0.10.0"):
        with SqliteJournal[Event].of(path, Event, program=program) as journal:
            journal.append(1.0, Came(program))
    before = path.read_bytes()
    with pytest.raises(JournalError, match=r"version 0\.10\.0 of gpu-arbiter has written it, newer than 0\.9\.3 here"):
        SqliteJournal[Event].of(path, Event, program="0.9.3")
    assert path.read_bytes() == before
    with SqliteJournal[Event].of(path, Event, program="0.10.0") as journal:
        assert len(list(journal.load().events)) == 2
