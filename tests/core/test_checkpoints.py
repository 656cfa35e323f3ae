"""A checkpoint is complete or it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from app_agent import checkpoints


def save(folder: str) -> None:
    Path(folder, "state").write_text("weights")


def write(root: Path, attempt: int, step: int) -> Path:
    return checkpoints.write(root, attempt, step, 100, save)


def newest(root: Path, before_attempt: int) -> tuple[int, int] | None:
    found = checkpoints.newest(root, before_attempt)
    return None if found is None else (found.attempt, found.step)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_newest_is_of_the_latest_attempt_and_then_of_the_latest_step(tmp_path: Path) -> None:
    write(tmp_path, attempt=0, step=90)
    write(tmp_path, attempt=1, step=9)
    assert newest(tmp_path, before_attempt=2) == (1, 9)


def test_an_attempt_restores_nothing_of_its_own_or_later_attempts(tmp_path: Path) -> None:
    write(tmp_path, attempt=0, step=5)
    write(tmp_path, attempt=1, step=9)
    assert newest(tmp_path, before_attempt=1) == (0, 5)
    assert newest(tmp_path, before_attempt=0) is None


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert newest(tmp_path / "none", before_attempt=1) is None


def test_two_are_kept_and_a_zombies_late_one_removes_none_of_its_successors(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, attempt=0, step=step)
    assert names(tmp_path) == ["a0-s2", "a0-s3"]
    write(tmp_path, attempt=1, step=4)
    write(tmp_path, attempt=1, step=5)
    write(tmp_path, attempt=0, step=99)
    assert names(tmp_path) == ["a1-s4", "a1-s5"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "manifest.json").unlink(),
        lambda path: (path / "manifest.json").write_text('{"complete": tr'),
        lambda path: (path / "manifest.json").write_text("[]"),
        lambda path: (path / "state").unlink(),
        lambda path: (path / "state").write_text("wei"),
        lambda path: path.rename(path.with_name("a1-s8")),
        lambda path: path.rename(path.with_name("tmp-a1-s7")),
    ],
)
def test_what_is_not_whole_is_skipped(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    write(tmp_path, attempt=0, step=3)
    damage(write(tmp_path, attempt=1, step=7))
    assert newest(tmp_path, before_attempt=2) == (0, 3)


def test_a_save_function_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(folder: str) -> None:
        save(folder)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        checkpoints.write(tmp_path, 0, 1, 100, fail)
    assert names(tmp_path) == []


def test_a_save_function_that_writes_nothing_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wrote no file"):
        checkpoints.write(tmp_path, 0, 1, 100, lambda _: None)
    assert names(tmp_path) == []


def test_what_a_crashed_attempt_left_half_written_goes_with_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "tmp-a0-s5").mkdir()
    (tmp_path / "tmp-a0-s5" / "state").write_text("wei")
    write(tmp_path, attempt=1, step=6)
    assert names(tmp_path) == ["a1-s6"]


def test_a_step_saved_already_is_not_written_again(tmp_path: Path) -> None:
    first = write(tmp_path, attempt=0, step=1)
    assert checkpoints.write(tmp_path, 0, 1, 100, lambda _: pytest.fail("saved again")) == first


def test_folders_within_a_checkpoint_count_too(tmp_path: Path) -> None:
    def save_deep(folder: str) -> None:
        Path(folder, "rank0").mkdir()
        Path(folder, "rank0", "state").write_text("weights")

    path = checkpoints.write(tmp_path, 0, 1, 100, save_deep)
    assert newest(tmp_path, before_attempt=1) == (0, 1)
    (path / "rank0" / "state").write_text("")
    assert newest(tmp_path, before_attempt=1) is None
