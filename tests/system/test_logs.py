"""The output of a task is bounded on its node, and can be read and followed all the same."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from app_agent.core.spec import AppSpec
from launch.client import open_client
from launch.follow import follow_logs
from node_agent.config import parse
from node_agent.workers.logs import Logs, Punch, punch_hole
from node_agent.workers.records import file_name
from protocol.config import ConfigError
from protocol.messages import TaskId
from tests.support.patience import PATIENCE_S
from tests.support.room import take_room
from tests.support.thread_site import ThreadSite

A, B = TaskId("ada-1.0-a0"), TaskId("bob-1.0-a0")
BOUND = 2**20


def refusing(fd: int, offset: int, length: int) -> None:
    """The answer of a file system that makes no holes."""
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


@pytest.fixture(params=[punch_hole, refusing])
def punch(request: pytest.FixtureRequest) -> Punch:
    """Of a file system that makes holes in files, and of one that does not."""
    chosen: Punch = request.param
    return chosen


def lines(begin: int, end: int) -> bytes:
    """Numbered lines of 100 bytes."""
    return b"".join(f"{number:099d}\n".encode() for number in range(begin, end))


def numbers(data: bytes) -> list[int]:
    """Of lines that are whole."""
    assert all(len(line) == 99 for line in data.split(b"\n")[:-1])
    assert data.endswith(b"\n")
    return [int(line) for line in data.split()]


def append(path: Path, data: bytes) -> None:
    """Write as a task does."""
    with path.open("ab", buffering=0) as file:
        assert file.write(data) == len(data)


def room(path: Path) -> int:
    """The bytes that a file takes on its disk."""
    return path.stat().st_blocks * 512


def read_all(logs: Logs, task: TaskId, offset: int = 0) -> tuple[bytes, int, int]:
    """What a reader gets from `offset` on, how much was dropped before it, and the offset that it comes to."""
    data, dropped = b"", 0
    while (part := logs.read(task, offset=offset, limit=65_536)).data:
        offset += part.dropped + len(part.data)
        data, dropped = data + part.data, dropped + part.dropped
    return data, dropped, offset


def test_a_log_beyond_its_bound_keeps_its_beginning_and_its_newest_lines(tmp_path: Path, punch: Punch) -> None:
    logs = Logs(tmp_path, BOUND, punch)
    with logs.path(A).open("ab", buffering=0) as task:  # which holds it open all the time
        for part in range(40):
            task.write(lines(part * 2500, part * 2500 + 2500))
            logs.bound()
            assert room(logs.path(A)) <= BOUND + 2 * 65_536
    data, dropped, offset = read_all(logs, A)
    assert (offset, dropped + len(data)) == (40 * 2500 * 100,) * 2
    kept = numbers(data)
    first = next(at for at, number in enumerate(kept) if at != number)
    assert first >= 1000
    assert kept[first:] == list(range(kept[first], 40 * 2500))
    assert len(kept) - first >= 1000
    assert logs.tail(A).splitlines()[-1] == f"{40 * 2500 - 1:099d}"


def test_a_log_within_its_bound_is_whole(tmp_path: Path, punch: Punch) -> None:
    logs = Logs(tmp_path, BOUND, punch)
    append(logs.path(A), lines(0, BOUND // 100))
    logs.bound()
    assert read_all(logs, A)[0] == lines(0, BOUND // 100)
    assert not list(tmp_path.rglob("*.cut"))


def test_a_reader_gets_whole_lines_but_of_the_newest_and_of_one_that_is_longer_than_it_asked_for(
    tmp_path: Path,
) -> None:
    logs = Logs(tmp_path, BOUND)
    append(logs.path(A), lines(0, 10) + b"half")
    assert logs.read(A, offset=0, limit=450).data == lines(0, 4)
    assert logs.read(A, offset=400, limit=50).data == lines(4, 5)[:50]
    assert logs.read(A, offset=900, limit=450).data == lines(9, 10) + b"half"


@pytest.mark.parametrize("begun_at", [0, 150, 5000], ids=["unread", "in the beginning", "in what is dropped"])
def test_a_reader_goes_on_where_it_was_and_hears_how_much_is_gone(tmp_path: Path, punch: Punch, begun_at: int) -> None:
    logs = Logs(tmp_path, BOUND, punch)
    append(logs.path(A), lines(0, 6000))
    offset = len(logs.read(A, offset=0, limit=begun_at * 100).data)
    append(logs.path(A), lines(6000, 20_000))
    logs.bound()
    data, dropped, end = read_all(logs, A, offset)
    assert offset + dropped + len(data) == end == 2_000_000
    assert dropped > 0
    assert numbers(data)[-1] == 19_999


def test_the_next_node_agent_knows_which_part_is_gone(tmp_path: Path, punch: Punch) -> None:
    logs = Logs(tmp_path, BOUND, punch)
    append(logs.path(A), lines(0, 20_000))
    logs.bound()
    assert read_all(Logs(tmp_path, BOUND, punch), A) == read_all(logs, A)
    append(logs.path(A), lines(20_000, 40_000))
    later = Logs(tmp_path, BOUND, punch)
    later.bound()
    assert room(later.path(A)) <= BOUND
    assert numbers(read_all(later, A)[0])[-1] == 39_999


def test_a_disk_that_is_too_full_for_the_note_of_what_goes_gets_its_room_all_the_same(tmp_path: Path) -> None:
    logs = Logs(tmp_path, BOUND)
    append(logs.path(A), lines(0, 20_000))
    obstacle = logs.path(A).with_suffix(".cut.tmp")
    obstacle.mkdir()
    logs.bound()
    assert room(logs.path(A)) <= BOUND
    before = read_all(logs, A)
    assert numbers(before[0])
    obstacle.rmdir()
    logs.bound()
    assert read_all(Logs(tmp_path, BOUND), A) == before


def test_a_log_of_one_endless_line_is_bounded(tmp_path: Path, punch: Punch) -> None:
    logs = Logs(tmp_path, BOUND, punch)
    append(logs.path(A), b"x" * 3_000_000)
    logs.bound()
    data, dropped, end = read_all(logs, A)
    assert set(data) == {ord("x")}
    assert (len(data) + dropped, room(logs.path(A)) <= BOUND) == (end, True)


def test_without_a_bound_all_is_kept(tmp_path: Path) -> None:
    logs = Logs(tmp_path, 0)
    append(logs.path(A), lines(0, 20_000))
    logs.bound()
    assert len(read_all(logs, A)[0]) == 2_000_000


def test_the_oldest_logs_go_with_their_notes_but_not_that_of_a_task_which_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node_agent.workers.logs.LOGS_MAX", 1)
    logs = Logs(tmp_path, BOUND)
    for age, task in enumerate(("new-1.0-a0", "old-1.0-a0", A)):
        append(logs.path(TaskId(task)), lines(0, 20_000))
        logs.bound()
        os.utime(logs.path(TaskId(task)), (1e9 - age, 1e9 - age))
    logs.prune({file_name(A)})
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        f"{name}{end}" for name in ("new-1.0-a0", A) for end in (".log", ".cut")
    }


def test_room_that_a_task_takes_beyond_the_end_of_its_log_is_freed_and_its_output_stays(tmp_path: Path) -> None:
    logs = Logs(tmp_path, BOUND)
    append(logs.path(A), lines(0, 100))
    take_room(logs.path(A), 8 * BOUND)
    assert (room(logs.path(A)) >= 8 * BOUND, logs.path(A).stat().st_size) == (True, 10_000)
    logs.bound()
    assert room(logs.path(A)) <= BOUND
    assert read_all(logs, A) == (lines(0, 100), 0, 10_000)
    append(logs.path(A), lines(100, 20_000))
    take_room(logs.path(A), 8 * BOUND)
    logs.bound()
    assert room(logs.path(A)) <= 2 * BOUND, "of one that has been cut, too"
    assert numbers(read_all(logs, A)[0])[-1] == 19_999


@pytest.fixture
def without_holes(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system that makes no holes in files."""
    folder = tmp_path / "ramfs"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "ramfs", "none", folder], capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount a ramfs")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_file_system_that_makes_no_holes_is_found_out_and_told_once(without_holes: Path) -> None:
    logs = Logs(without_holes, BOUND)
    with structlog.testing.capture_logs() as told:
        for part in range(4):
            append(logs.path(A), lines(part * 20_000, part * 20_000 + 20_000))
            logs.bound()
    assert [line["event"] for line in told] == ["log.rewritten"]
    data, dropped, end = read_all(logs, A)
    assert (len(data) + dropped, numbers(data)[-1], numbers(data)[:1000]) == (end, 79_999, list(range(1000)))


def test_a_bound_that_leaves_nothing_to_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="log_max_bytes is 4096; write 1048576 or more, or 0 for no bound"):
        parse({"node": "n1", "gpus": "nvml", "log_max_bytes": 4096}, source="node.toml")
    assert parse({"node": "n1", "gpus": "nvml"}, source="node.toml").log_max_bytes == 256 * 2**20


# --- at a whole site ------------------------------------------------------------------------------------------------

PRINTING = """
import os, sys, time
for part in range(3):
    while not os.path.exists(f"go-{part}"): time.sleep(0.01)
    sys.stdout.write("".join(f"{number:099d}\\n" for number in range(part * 20_000, part * 20_000 + 20_000)))
    sys.stdout.flush()
    open(f"done-{part}", "w").close()
while not os.path.exists("go-3"): time.sleep(0.01)
"""


def eventually(wanted: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not wanted():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ThreadSite]:
    made = ThreadSite(tmp_path / "site", ends_workers=False, log_max_bytes=BOUND)
    made.start()
    yield made
    made.stop()


def test_output_is_followed_across_cuts_and_a_restart_of_the_node_agent(
    site: ThreadSite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_client(site.socket) as client:
        command = (sys.executable, "-c", PRINTING)
        app = client.submit(AppSpec(trials=(command,), cwd=str(tmp_path), checkpoint_root=str(tmp_path / "saved")))
        seen = io.BytesIO()

        def follow() -> None:
            with open_client(site.socket) as own:
                follow_logs(own, app, follow=True, out=seen)

        follower = threading.Thread(target=follow)
        follower.start()
        (tmp_path / "go-0").touch()
        eventually((tmp_path / "done-0").exists)
        (path,) = Path(site.node.state_dir, "logs").glob("*.log")
        eventually(lambda: room(path) <= BOUND)
        site.stop_node()
        (tmp_path / "go-1").touch()
        eventually((tmp_path / "done-1").exists)
        assert room(path) > BOUND  # no node agent was there to see it
        site.start_node()
        eventually(lambda: room(path) <= BOUND)
        (tmp_path / "go-2").touch()
        eventually((tmp_path / "done-2").exists)
        eventually(lambda: room(path) <= BOUND)
        (tmp_path / "go-3").touch()
        follower.join(PATIENCE_S)
        assert not follower.is_alive()
        told = [int(line.split()[1]) for line in capsys.readouterr().err.splitlines() if "no longer kept" in line]
        halves = [line for line in seen.getvalue().splitlines() if len(line) < 99]  # the task was writing them
        assert len(halves) <= len(told) > 0
        kept = [int(line) for line in seen.getvalue().splitlines() if len(line) == 99]
        assert (kept[0], kept[-1], kept) == (0, 59_999, sorted(set(kept)))
        assert sum(told) + len(seen.getvalue()) == 6_000_000 + len(halves)

        late, end = io.BytesIO(), io.BytesIO()
        follow_logs(client, app, follow=False, out=late)
        assert (numbers(late.getvalue())[0], numbers(late.getvalue())[-1]) == (0, 59_999)
        (word,) = [line for line in capsys.readouterr().err.splitlines() if line]
        assert word == f"--- {6_000_000 - len(late.getvalue())} bytes of output are no longer kept ---"
        follow_logs(client, app, follow=False, tail=3, out=end)
        assert numbers(end.getvalue()) == [59_997, 59_998, 59_999]
        follow_logs(client, app, follow=False, tail=100_000, out=(more := io.BytesIO()))
        assert late.getvalue().endswith(more.getvalue())
        assert len(numbers(more.getvalue())) > 1000
