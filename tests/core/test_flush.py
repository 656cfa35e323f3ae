"""A checkpoint in host memory gets to a disk whole, or it stays where it is and the user is told."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from app_agent.training import checkpoints
from app_agent.training.checkpoints import Root
from node_agent.workers import flush
from node_agent.workers.flush import MemoryCheckpoints, Owner
from protocol.messages import JobId, TaskId


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, "PAUSE_S", 0.0)


@pytest.fixture
def memory(tmp_path: Path) -> MemoryCheckpoints:
    return MemoryCheckpoints(tmp_path / "memory")


@pytest.fixture
def owner(tmp_path: Path, memory: MemoryCheckpoints) -> Owner:
    one = Owner(JobId("me-1.0"), TaskId("me-1.0-a0"), str(tmp_path / "disk"))
    memory.offer(one)
    return one


def save(folder: str) -> None:
    Path(folder, "rank0").mkdir()
    Path(folder, "rank0", "state").write_text("weights")


def leave(memory: MemoryCheckpoints, owner: Owner, attempt: int = 0, step: int = 5) -> Path:
    """Write a checkpoint into memory as a worker does."""
    return checkpoints.write([Root(memory.folder(owner), durable=False)], attempt, step, {"samples": 3}, save)


def on_disk(owner: Owner) -> tuple[int, int, int] | None:
    found = checkpoints.newest([Root(Path(owner.checkpoint_dir))], 10)
    return None if found is None else (found.attempt, found.step, found.samples)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_worker_left_in_memory_is_found_copied_and_trusted_by_the_next(
    memory: MemoryCheckpoints, owner: Owner
) -> None:
    assert memory.unflushed(owner) is None
    path = leave(memory, owner)
    assert memory.unflushed(owner) == path
    assert memory.flush(owner) == ""
    assert on_disk(owner) == (0, 5, 3)
    assert names(Path(owner.checkpoint_dir)) == ["a0-s5"]
    assert memory.unflushed(owner) is None
    assert path.exists()  # for an attempt that starts here


def test_what_is_no_newer_than_the_disks_is_not_copied(memory: MemoryCheckpoints, owner: Owner) -> None:
    leave(memory, owner)
    checkpoints.write([Root(Path(owner.checkpoint_dir))], 1, 2, {}, save)
    assert memory.unflushed(owner) is None
    memory.flush(owner)
    assert names(Path(owner.checkpoint_dir)) == ["a1-s2"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "manifest.json").unlink(),
        lambda path: (path / "rank0" / "state").write_text("wei"),
        lambda path: (path / "more").write_text("more"),
        lambda path: path.rename(path.with_name("a0-s9")),
    ],
)
def test_what_is_not_whole_is_not_copied(
    memory: MemoryCheckpoints, owner: Owner, damage: Callable[[Path], object]
) -> None:
    damage(leave(memory, owner))
    assert memory.unflushed(owner) is None


def test_a_copy_that_is_not_like_its_manifest_is_never_named_as_one(
    memory: MemoryCheckpoints, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = flush._verify

    def lossy(copy: Path) -> None:
        (copy / "rank0" / "state").write_text("")
        verify(copy)

    leave(memory, owner)
    monkeypatch.setattr(flush, "_verify", lossy)
    assert "mend that folder, or copy it there by hand" in memory.flush(owner)
    assert names(Path(owner.checkpoint_dir)) == []
    assert memory.unflushed(owner) is not None


def test_a_disk_that_comes_back_in_time_gets_it(
    memory: MemoryCheckpoints, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(memory, owner)
    Path(owner.checkpoint_dir).write_text("a file where the folder should be")
    monkeypatch.setattr(flush.time, "sleep", lambda _: Path(owner.checkpoint_dir).unlink())
    assert memory.flush(owner) == ""
    assert on_disk(owner) == (0, 5, 3)


def test_what_a_cut_off_copy_left_is_replaced(memory: MemoryCheckpoints, owner: Owner) -> None:
    path = leave(memory, owner)
    shutil.copytree(path, Path(owner.checkpoint_dir) / "tmp-a0-s5-flush")
    shutil.copytree(path, Path(owner.checkpoint_dir) / "a0-s5")
    (Path(owner.checkpoint_dir) / "a0-s5" / "manifest.json").unlink()
    assert memory.flush(owner) == ""
    assert names(Path(owner.checkpoint_dir)) == ["a0-s5"]
    assert on_disk(owner) == (0, 5, 3)


def test_an_attempt_that_saves_meanwhile_takes_the_half_made_copy_away_and_nothing_is_owed(
    memory: MemoryCheckpoints, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = flush._verify

    def overtaken(copy: Path) -> None:
        checkpoints.write([Root(Path(owner.checkpoint_dir))], 1, 7, {}, save)
        verify(copy)

    leave(memory, owner)
    monkeypatch.setattr(flush, "_verify", overtaken)
    assert memory.flush(owner) == ""
    assert names(Path(owner.checkpoint_dir)) == ["a1-s7"]


def test_what_another_run_of_the_same_job_left_is_neither_copied_nor_forgotten_nor_taken_for_newer(
    memory: MemoryCheckpoints, owner: Owner
) -> None:
    first, second = (Owner(owner.job, owner.task, owner.checkpoint_dir, run) for run in ("me-1-77", "me-1-5f"))
    assert memory.folder(first) != memory.folder(second)
    memory.offer(first)
    memory.offer(second)
    strange = Root(Path(owner.checkpoint_dir), run="me-1-77")
    checkpoints.write([strange], 7, 70, {}, save)
    mine = Root(memory.folder(second), durable=False, run="me-1-5f")
    left = checkpoints.write([mine], 0, 5, {}, save)
    assert memory.unflushed(second) == left, "the other's is newer, and on the disk"
    assert memory.flush(second) == ""
    assert names(Path(owner.checkpoint_dir)) == ["a0-s5", "a7-s70"]
    memory.release(second)
    assert memory.folder(first).exists()
    moved = checkpoints.write([mine], 7, 70, {}, save)
    assert "a7-s70 is a checkpoint of another run" in memory.flush(second)
    assert moved.exists()


def test_only_what_is_on_the_disk_is_forgotten(memory: MemoryCheckpoints, owner: Owner) -> None:
    folder = memory.folder(owner)
    leave(memory, owner)
    memory.release(owner)
    assert names(folder) == ["a0-s5", "owner.json"]
    memory.flush(owner)
    memory.release(owner, before_attempt=0)
    assert names(folder) == ["a0-s5", "owner.json"]
    memory.release(owner, before_attempt=1)
    assert names(folder) == ["owner.json"]
    memory.release(owner)
    assert not folder.exists()


def test_when_memory_is_short_the_oldest_that_are_on_a_disk_give_way(
    memory: MemoryCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = [Owner(JobId(f"me-{n}.0"), TaskId(f"me-{n}.0-a0"), str(tmp_path / f"disk{n}")) for n in range(4)]
    for age, one in enumerate(owners):
        memory.offer(one)
        os.utime(leave(memory, one), (age, age))
        if age != 1:
            memory.flush(one)
    kept = [path.name for one in owners for path in memory.folder(one).glob("a*")]
    assert len(kept) == 4

    def usage(root: Path) -> object:
        left = len(list(root.glob("*/a*")))
        return shutil._ntuple_diskusage(100, 0, 10 if left > 2 else 90)  # type: ignore[attr-defined]

    monkeypatch.setattr(flush.shutil, "disk_usage", usage)
    memory.offer(Owner(JobId("me-9.0"), TaskId("me-9.0-a0"), str(tmp_path / "disk9")))
    assert [bool(list(memory.folder(one).glob("a*"))) for one in owners] == [False, True, False, True]


def test_the_next_node_agent_finds_the_owners(memory: MemoryCheckpoints, owner: Owner) -> None:
    (memory.root / "nonsense").mkdir()
    assert MemoryCheckpoints(memory.root).owners() == [owner]
