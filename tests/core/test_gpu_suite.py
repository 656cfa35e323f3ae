"""The suite for real GPUs, as far as it can be tried without one: its command, its document, its processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as suite
from benchmarks.gpu import record as records
from benchmarks.gpu.record import SCHEMA, Section, Setting, Skip
from benchmarks.gpu.sections import SECTIONS, Entry, driver, park
from benchmarks.gpu.trainee import Child, answer


class Played(Entry):
    """A section that does what it is given."""

    def __init__(self, play: Callable[[Section], None], needs: tuple[str, ...] = ()) -> None:
        super().__init__("played", needs)
        object.__setattr__(self, "play", play)

    def run(self, setting: Setting, section: Section) -> None:
        self.play(section)  # type: ignore[attr-defined]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict[str, object]]]:
    """Run the suite with these sections on a machine that has all that is needed."""
    monkeypatch.setattr(suite, "why_not", lambda setting: "")
    monkeypatch.setattr(records, "host", dict)

    def run(*arguments: str, **sections: Entry) -> tuple[int, dict[str, object]]:
        for name in [*SECTIONS]:
            monkeypatch.delitem(SECTIONS, name)
        for name, entry in sections.items():
            monkeypatch.setitem(SECTIONS, name, entry)
        code = suite.main([*arguments, "--out", str(tmp_path)])
        return code, json.loads((tmp_path / "gpu.json").read_text())

    return run


def test_without_a_cuda_device_it_says_why_in_one_sentence_and_in_the_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_driver(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(suite.ctypes, "CDLL", no_driver)
    assert suite.main(["--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert document["schema"] == SCHEMA
    assert "no CUDA device" in document["skipped"]
    assert document["sections"] == {}
    assert capsys.readouterr().out == f"nothing was measured: {document['skipped']}\n"


def test_without_pytorch_it_names_the_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(suite, "missing", list)
    assert suite.main(["--out", str(tmp_path), "--rehearse"]) == 0
    assert "pip install torch" in json.loads((tmp_path / "gpu.json").read_text())["skipped"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "park,brakes"], "there is no section 'brakes'; choose of env,pcie,park"),
        (["--only", ","], "there is no section"),
        (["--gb", "0"], "0 GiB are no memory of a GPU"),
    ],
)
def test_a_wrong_argument_is_named_with_the_mend(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        suite.parse(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_sections_run_once_each_in_the_order_asked_for() -> None:
    assert suite.parse(["--only", "driver, park,driver"]).only == ("driver", "park")
    assert suite.parse([]).only == tuple(SECTIONS)


def test_only_a_check_that_failed_or_a_section_that_broke_fails_the_run(play: Callable[..., tuple[int, dict]]) -> None:
    def skip(section: Section) -> None:
        raise Skip("the driver is too old")

    code, document = play(
        right=Played(lambda section: section.check("one is one", ok=True)), absent=Played(lambda s: None, ("nowhere",)),
        old=Played(skip),
    )  # fmt: skip
    told = document["sections"]
    assert code == 0
    assert {name: told[name]["status"] for name in told} == {"right": "passed", "absent": "skipped", "old": "skipped"}
    assert told["absent"]["reason"] == "not installed: nowhere (pip install nowhere)"
    assert told["old"]["reason"] == "the driver is too old"


@pytest.mark.parametrize("skipped", [False, True])
def test_a_failed_check_fails_the_run_also_if_the_rest_of_its_section_was_left_out(
    play: Callable[..., tuple[int, dict]], skipped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(section: Section) -> None:
        section.check("bits come back", ok=False, got="other")
        if skipped:
            raise Skip("no more can be tried")

    code, document = play(wrong=Played(wrong), right=Played(lambda section: section.note(rate=1.0)))
    assert code == 1
    assert document["sections"]["wrong"]["status"] == "failed"
    assert document["sections"]["wrong"]["checks"] == [
        {"name": "bits come back", "ok": False, "judged": True, "seen": {"got": "other"}}
    ]
    assert document["sections"]["right"]["figures"] == {"rate": 1.0}
    assert "FAILED: bits come back" in capsys.readouterr().out


def test_a_section_that_breaks_is_an_error_and_the_others_go_on(play: Callable[..., tuple[int, dict]]) -> None:
    def broken(section: Section) -> None:
        raise KeyError("gpu")

    code, document = play(broken=Played(broken), right=Played(lambda section: None))
    assert code == 1
    assert document["sections"]["broken"]["status"] == "error"
    assert document["sections"]["broken"]["reason"] == "KeyError: 'gpu'"
    assert document["sections"]["right"]["status"] == "passed"


def test_promises_about_speed_are_not_judged_in_a_rehearsal(play: Callable[..., tuple[int, dict]]) -> None:
    slow = Played(lambda section: section.check("it is fast", ok=False, timed=True))
    assert play("--rehearse", slow=slow)[0] == 0
    assert play(slow=slow)[0] == 1


def test_a_rehearsal_leaves_out_what_needs_a_gpu_and_the_packages_of_the_driver() -> None:
    rehearsal = Setting("cpu", Path(), 0.1)
    with pytest.raises(Skip, match="needs a CUDA device"):
        suite.refuse(SECTIONS["graph"], rehearsal)
    assert "pynvml" in SECTIONS["estimator"].needs
    assert "pynvml" not in SECTIONS["estimator"].rehearsal_needs


def test_missing_packages_are_told_by_the_names_that_pip_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "missing", list)
    with pytest.raises(Skip, match=r"\(pip install cuda-bindings nvidia-ml-py\)"):
        suite.refuse(SECTIONS["driver"], Setting("cuda", Path(), 1.0))


def test_what_is_asked_of_a_process_and_goes_wrong_there_is_an_answer() -> None:
    child = Child("cpu")
    assert answer(child, {"call": f"{__name__}:double", "with": {"number": 2}}) == {"made": 4}
    assert answer(child, {"call": f"{__name__}:double", "with": {"number": None}})["failed"].startswith("TypeError")
    assert answer(child, {"call": "nowhere:nothing", "with": {}})["failed"].startswith("ModuleNotFoundError")


def double(child: Child, *, number: int) -> dict[str, int]:
    return {"made": 2 * number}


def program(folder: Path, *lines: str) -> tuple[str, str]:
    path = folder / "helper.py"
    path.write_text("\n".join(lines))
    return sys.executable, str(path)


def test_the_calls_of_the_driver_are_timed_one_by_one(tmp_path: Path) -> None:
    helper = program(
        tmp_path,
        "import time",
        """print('{"at": "lock", "pid": 1}', flush=True)""",
        """print('{"at": "checkpoint", "pid": 1}', flush=True)""",
        "time.sleep(0.3)",
        """print('{"ok": true, "state": "suspended"}', flush=True)""",
    )
    found = driver.ask(helper, {"do": "suspend"})
    assert found["ok"] is True
    assert set(found["phases"]) == {"start", "lock", "checkpoint"}
    assert found["phases"]["checkpoint"] >= 0.3 > found["phases"]["lock"]


def test_a_helper_that_crashes_is_no_answer_but_says_where_it_was(tmp_path: Path) -> None:
    helper = program(tmp_path, """print('{"at": "restore", "pid": 1}', flush=True)""", "raise SystemExit(9)")
    found = driver.ask(helper, {"do": "resume"})
    assert found["ok"] is False
    assert found["reason"] == "it hung or crashed in 'restore'"


class Ended:
    """A process whose training ends with this digest after so many mini-batches."""

    def __init__(self, steps: int, sha256: str) -> None:
        self._answers = {"run": {"steps": steps}, "digest": {"sha256": sha256}}

    def ask(self, what: Callable[..., object], **arguments: object) -> dict[str, object]:
        return self._answers[what.__name__]


def test_each_training_is_compared_with_its_own_kind_at_its_own_mini_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def reference(setting: Setting, steps: list[int], **options: object) -> dict[int, str]:
        asked.append((steps, options))
        return {each: f"{options['gb']}@{each}" for each in steps}

    monkeypatch.setattr(park, "reference", reference)
    section = Section(rehearsal=False)
    undisturbed = park.Undisturbed(Setting("cuda", tmp_path, 1.0), section, "exact")
    undisturbed.end("small", Ended(5, "1@5"), gb=1)
    undisturbed.end("large", Ended(5, "4@5"), gb=4)
    undisturbed.end("small, later", Ended(9, "1@5"), gb=1)
    undisturbed.compare()
    assert asked == [([5, 9], {"gb": 1}), ([5], {"gb": 4})]
    assert {check.name: check.ok for check in section.checks} == {
        "exact: small": True,
        "exact: small, later": False,
        "exact: large": True,
    }
