"""A checkpoint is complete or it is not there."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app_agent.training import checkpoints
from app_agent.training.checkpoints import Root, Team


def save(folder: str) -> None:
    Path(folder, "state").write_text("weights")


def write(root: Path, attempt: int, step: int) -> Path:
    return checkpoints.write([Root(root)], attempt, step, {}, save)


def newest(root: Path, before_attempt: int) -> tuple[int, int] | None:
    found = checkpoints.newest([Root(root)], before_attempt)
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
        checkpoints.write([Root(tmp_path)], 0, 1, {}, fail)
    assert names(tmp_path) == []


def test_a_save_function_that_writes_nothing_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wrote no file"):
        checkpoints.write([Root(tmp_path)], 0, 1, {}, lambda _: None)
    assert names(tmp_path) == []


def test_what_a_crashed_attempt_left_half_written_goes_with_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "tmp-a0-s5").mkdir()
    (tmp_path / "tmp-a0-s5" / "state").write_text("wei")
    write(tmp_path, attempt=1, step=6)
    assert names(tmp_path) == ["a1-s6"]


def test_a_step_saved_already_is_not_written_again(tmp_path: Path) -> None:
    first = write(tmp_path, attempt=0, step=1)
    assert checkpoints.write([Root(tmp_path)], 0, 1, {}, lambda _: pytest.fail("saved again")) == first


def test_folders_within_a_checkpoint_count_too(tmp_path: Path) -> None:
    def save_deep(folder: str) -> None:
        Path(folder, "rank0").mkdir()
        Path(folder, "rank0", "state").write_text("weights")

    path = checkpoints.write([Root(tmp_path)], 0, 1, {}, save_deep)
    assert newest(tmp_path, before_attempt=1) == (0, 1)
    (path / "rank0" / "state").write_text("")
    assert newest(tmp_path, before_attempt=1) is None


# --- two runs -------------------------------------------------------------------------------------------------------


def of(run: str, folder: Path) -> Root:
    return Root(folder, run=run)


@pytest.mark.parametrize(("theirs", "mine"), [("ana-1-77", "ana-1-5f"), ("", "ana-1-5f"), ("ana-1-77", "")])
def test_a_checkpoint_of_another_run_is_not_loaded_and_the_sentence_names_it_and_the_way_to_go_on(
    tmp_path: Path, theirs: str, mine: str
) -> None:
    path = checkpoints.write([of(theirs, tmp_path)], 0, 70, {}, save)
    with pytest.warns(UserWarning, match="is not loaded") as told:
        assert checkpoints.newest([of(mine, tmp_path)], 1) is None
    (sentence,) = (str(each.message) for each in told)
    assert f"{path} is a checkpoint of " in sentence
    assert f'if its manifest.json says "run": "{mine}"' in sentence
    manifest = path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"run": mine}))
    found = checkpoints.newest([of(mine, tmp_path)], 1)
    assert found is not None
    assert found.step == 70


@pytest.mark.filterwarnings("ignore:gpu-arbiter")
def test_checkpoints_of_another_run_are_not_counted_among_those_that_are_kept_and_never_removed(tmp_path: Path) -> None:
    strange, own = of("ana-1-77", tmp_path), of("ana-1-5f", tmp_path)
    checkpoints.write([strange], 3, 8, {}, save)
    checkpoints.write([strange], 3, 9, {}, save)
    for step in range(5):
        checkpoints.write([own], 0, step, {}, save)
    assert names(tmp_path) == ["a0-s3", "a0-s4", "a3-s8", "a3-s9"]
    found = checkpoints.newest([own], 1)
    assert found is not None
    assert found.step == 4


def test_a_step_that_another_run_has_saved_is_not_taken_for_saved_and_not_written_over(tmp_path: Path) -> None:
    path = checkpoints.write([of("ana-1-77", tmp_path)], 0, 5, {}, save)
    with pytest.raises(FileExistsError, match="a0-s5 is a checkpoint of run ana-1-77, not of this one; move it away"):
        checkpoints.write([of("ana-1-5f", tmp_path)], 0, 5, {}, lambda folder: Path(folder, "state").write_text("own"))
    assert (path / "state").read_text() == "weights"
    assert names(tmp_path) == ["a0-s5"]


def test_the_finish_of_another_run_is_set_aside_with_a_sentence(tmp_path: Path) -> None:
    checkpoints.write_finished(of("ana-1-77", tmp_path), {"step": 70})
    with pytest.warns(UserWarning, match=r"finished.json was of run ana-1-77; it is set aside"):
        checkpoints.write_finished(of("ana-1-5f", tmp_path), {"step": 9})
    assert json.loads((tmp_path / "finished.json").read_text()) == {"run": "ana-1-5f", "step": 9}
    assert json.loads((tmp_path / "finished-ana-1-77.json").read_text()) == {"run": "ana-1-77", "step": 70}


# --- two roots ------------------------------------------------------------------------------------------------------


def both(folder: Path) -> list[Root]:
    return [Root(folder / "memory", durable=False), Root(folder / "disk")]


def test_the_first_root_that_takes_it_gets_it_and_the_newest_of_all_counts(tmp_path: Path) -> None:
    memory, disk = both(tmp_path)
    checkpoints.write([disk], 0, 5, {}, save)
    assert checkpoints.write([memory, disk], 0, 9, {"samples": 70}, save) == tmp_path / "memory" / "a0-s9"
    found = checkpoints.newest([memory, disk], 1)
    assert found is not None
    assert (found.path, found.samples) == (tmp_path / "memory" / "a0-s9", 70)
    checkpoints.write([disk], 1, 2, {}, save)
    assert newest(tmp_path / "disk", 2) == (1, 2)
    found = checkpoints.newest([memory, disk], 2)
    assert found is not None
    assert (found.attempt, found.step) == (1, 2)


def test_a_root_that_refuses_is_passed_over_and_the_last_ones_reason_is_told(tmp_path: Path) -> None:
    def full(folder: str) -> None:
        save(folder)
        if "memory" in folder:
            raise RuntimeError("PytorchStreamWriter failed writing file")

    memory, disk = both(tmp_path)
    assert checkpoints.write([memory, disk], 0, 5, {}, full) == tmp_path / "disk" / "a0-s5"
    assert names(tmp_path / "memory") == []
    memory.path.rmdir()
    memory.path.write_text("a file where a folder should be")
    assert checkpoints.write([memory, disk], 0, 6, {}, save) == tmp_path / "disk" / "a0-s6"
    with pytest.raises(ValueError, match="wrote no file"):
        checkpoints.write([memory, disk], 0, 7, {}, lambda _: None)


def test_a_step_that_is_durable_already_is_not_written_to_memory(tmp_path: Path) -> None:
    memory, disk = both(tmp_path)
    checkpoints.write([disk], 0, 5, {}, save)
    path = checkpoints.write([memory, disk], 0, 5, {}, lambda _: pytest.fail("saved again"))
    assert path == tmp_path / "disk" / "a0-s5"


# --- several ranks --------------------------------------------------------------------------------------------------

Outcome = Path | BaseException


def together(
    roots: list[Root],
    saves: list[Callable[[str], object] | None],
    *,
    order: str = "g1-q7",
    patience_s: float = 0.4,
    apart: bool = False,
) -> list[Outcome]:
    """Have one rank for each of `saves` write together; None is a rank that never comes."""

    def rank(number: int) -> Outcome:
        mine = saves[number]
        assert mine is not None
        try:
            return checkpoints.write(roots, 0, 5, {}, mine, Team(number, len(saves), order, patience_s, apart=apart))
        except (OSError, RuntimeError) as error:
            return error

    with ThreadPoolExecutor(len(saves)) as pool:
        return list(pool.map(rank, [number for number, mine in enumerate(saves) if mine is not None]))


def share(name: str) -> Callable[[str], object]:
    return lambda folder: Path(folder, name).write_text("weights")


def broken(folder: str) -> None:
    raise RuntimeError("no weights")


def test_ranks_write_into_one_folder_and_all_get_the_sealed_one(tmp_path: Path) -> None:
    paths = together([Root(tmp_path)], [share("rank0"), share("rank1"), lambda _: None])
    assert paths == [tmp_path / "a0-s5"] * 3
    assert names(tmp_path / "a0-s5") == ["manifest.json", "rank0", "rank1"]
    assert names(tmp_path) == ["a0-s5"]
    assert newest(tmp_path, 1) == (0, 5)


def test_a_slow_rank_is_waited_for_before_the_seal(tmp_path: Path) -> None:
    def slow(folder: str) -> None:
        time.sleep(0.2)
        share("rank1")(folder)

    together([Root(tmp_path)], [share("rank0"), slow])
    assert newest(tmp_path, 1) == (0, 5)
    assert "rank1" in names(tmp_path / "a0-s5")


@pytest.mark.parametrize(
    ("saves", "blamed"), [([broken, share("1"), share("2")], 0), ([share("0"), share("1"), broken], 2)]
)
def test_a_rank_that_fails_makes_all_give_up_and_the_next_try_is_not_met_by_its_marks(
    tmp_path: Path, saves: list[Callable[[str], object] | None], blamed: int
) -> None:
    errors = together([Root(tmp_path)], saves)
    assert [str(error).count("no weights") for error in errors] == [1, 1, 1]
    assert str(errors[blamed]) == "no weights"
    assert newest(tmp_path, 1) is None
    assert together([Root(tmp_path)], [share("rank0"), share("rank1")], order="g1-q8") == [tmp_path / "a0-s5"] * 2
    assert names(tmp_path) == ["a0-s5"]


@pytest.mark.parametrize(
    ("saves", "reason"),
    [
        ([None, share("rank1")], "rank 0 did not begin"),
        ([share("rank0"), None], "rank 1 did not save its share"),
    ],
)
def test_a_rank_that_never_comes_is_named(
    tmp_path: Path, saves: list[Callable[[str], object] | None], reason: str
) -> None:
    (error,) = together([Root(tmp_path)], saves)
    assert isinstance(error, TimeoutError)
    assert reason in str(error)
    assert newest(tmp_path, 1) is None


def test_ranks_on_other_nodes_have_their_file_system_look_anew_while_they_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS remembers that a file was not there; a change of the folder makes it ask again."""
    monkeypatch.setattr(checkpoints, "LOOK_ANEW_S", 0.02)
    changed: list[Path] = []
    monkeypatch.setattr("os.utime", lambda folder: changed.append(Path(folder)))

    def slow(folder: str) -> None:
        time.sleep(0.2)
        share("rank0")(folder)

    assert together([Root(tmp_path)], [slow, share("rank1")], apart=True, patience_s=30.0) == [tmp_path / "a0-s5"] * 2
    assert tmp_path in changed
    changed.clear()
    together([Root(tmp_path / "near")], [slow, share("rank1")], patience_s=30.0)
    assert not changed


@pytest.mark.parametrize("culprit", [0, 1])
def test_ranks_turn_to_the_disk_together_when_memory_is_full_for_one_of_them(tmp_path: Path, culprit: int) -> None:
    def full(folder: str) -> None:
        if "memory" in folder:
            raise OSError(28, "No space left on device")
        share("culprit")(folder)

    saves: list[Callable[[str], object] | None] = [share("other"), share("other")]
    saves[culprit] = full
    assert together(both(tmp_path), saves) == [tmp_path / "disk" / "a0-s5"] * 2
    assert names(tmp_path / "disk" / "a0-s5") == ["culprit", "manifest.json", "other"]
    assert checkpoints.newest([Root(tmp_path / "memory")], 1) is None


def test_ranks_turn_to_the_disk_at_once_when_rank_0_cannot_even_make_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_empty = checkpoints._make_empty

    def full(folder: Path) -> None:
        if "memory" in str(folder):
            raise OSError(28, "No space left on device")
        make_empty(folder)

    monkeypatch.setattr(checkpoints, "_make_empty", full)
    begun = time.monotonic()
    paths = together(both(tmp_path), [share("rank0"), share("rank1")], patience_s=20)
    assert paths == [tmp_path / "disk" / "a0-s5"] * 2
    assert time.monotonic() - begun < 10


def test_a_rank_that_is_cut_off_in_saving_names_the_one_that_gave_up(tmp_path: Path) -> None:
    saving = threading.Event()

    def cut_off(folder: str) -> None:
        saving.set()
        while Path(folder).exists():
            time.sleep(0.01)
        share("rank1")(folder)

    def broken_late(folder: str) -> None:
        saving.wait(5)
        broken(folder)

    errors = together([Root(tmp_path)], [broken_late, cut_off], patience_s=20)
    assert [str(error).count("no weights") for error in errors] == [1, 1]
