"""The suite for real GPUs, as far as it can be tried without one: its command, its document, its processes."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu import __main__ as suite
from benchmarks.gpu import apart, goals
from benchmarks.gpu import sections as table
from benchmarks.gpu.record import SCHEMA, Section, Setting, Skip, merged
from benchmarks.gpu.sections import PART_S, SECTIONS, Entry, driver, env, park, parts
from benchmarks.gpu.trainee import Child, answer

# Sections run in forked processes, and those that run tests beside us have threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
ROOT = Path(__file__).parents[2]


class Played(Entry):
    """A section that does what it is given."""

    def __init__(
        self, play: Callable[[Section], None], needs: tuple[str, ...] = (), limit_s: float = 60.0, part: int = 1
    ) -> None:
        super().__init__("played", needs, limit_s=limit_s, part=part)
        object.__setattr__(self, "play", play)

    def run(self, setting: Setting, section: Section) -> None:
        self.play(section)  # type: ignore[attr-defined]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict[str, object]]]:
    """Run the suite with these sections on a machine that has all that is needed; return its code and document."""
    monkeypatch.setattr(suite, "why_not", lambda setting: "")
    monkeypatch.setattr(suite, "host", lambda: {"gpus": ["H100"], "driver": "580.1"})

    def run(*arguments: str, **sections: Entry) -> tuple[int, dict[str, object]]:
        for module in (suite, table):
            monkeypatch.setattr(module, "SECTIONS", sections)
        code = suite.main([*arguments, "--out", str(tmp_path)])
        name = "rehearsal.json" if "--rehearse" in arguments else "gpu.json"
        return code, json.loads((tmp_path / name).read_text())

    return run


def no_driver(name: str) -> None:
    raise OSError(name)


def test_without_a_cuda_device_it_says_why_in_one_sentence_and_of_every_section(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite.ctypes, "CDLL", no_driver)
    assert suite.main(["--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert document["schema"] == SCHEMA
    assert {name: told["status"] for name, told in document["sections"].items()} == dict.fromkeys(SECTIONS, "skipped")
    reasons = {told["reason"] for told in document["sections"].values()}
    assert reasons == {"not run: no NVIDIA GPU (the driver's library libcuda.so.1 cannot be loaded)"}
    assert capsys.readouterr().out.startswith("nothing was measured: no NVIDIA GPU")


def test_what_was_measured_stays_in_the_document_where_there_is_no_gpu(
    play: Callable[..., tuple[int, dict]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def cut_short(section: Section) -> None:
        section.note(rate=1.0)
        raise KeyError("gpu")

    play(cut=Played(cut_short), right=Played(lambda section: section.note(rate=2.0)))
    monkeypatch.setattr(suite, "why_not", lambda setting: "no NVIDIA GPU (it is gone)")
    assert suite.main(["--out", str(tmp_path)]) == 0
    sections = json.loads((tmp_path / "gpu.json").read_text())["sections"]
    assert {name: told["figures"]["rate"] for name, told in sections.items()} == {"cut": 1.0, "right": 2.0}


def test_without_pytorch_it_names_the_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(suite, "missing", list)
    assert suite.main(["--out", str(tmp_path), "--rehearse"]) == 0
    sections = json.loads((tmp_path / "rehearsal.json").read_text())["sections"]
    assert {told["reason"] for told in sections.values()} == {"not run: PyTorch is not installed (pip install torch)"}


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


def test_every_section_is_in_a_part_that_one_call_has_the_time_for() -> None:
    assert [name for names in parts().values() for name in names] == list(SECTIONS)
    for names in parts().values():
        assert sum(SECTIONS[name].limit_s for name in names) <= PART_S == 8 * 60
    assert PART_S + apart.GRACE_S + apart.KILLED_S <= 600 - 60  # and the installation, and the first load of PyTorch


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
        {"name": "bits come back", "ok": False, "judged": True, "seen": {"got": "other"}, "untried": ""}
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


def test_each_section_says_when_where_and_by_which_command_it_was_measured(
    play: Callable[..., tuple[int, dict]],
) -> None:
    told = play(right=Played(lambda section: None))[1]["sections"]["right"]
    assert told["host"] == {"gpus": ["H100"], "driver": "580.1"}
    assert told["command"].startswith("python -m benchmarks.gpu")
    assert told["date"].startswith("20")


def test_a_section_whose_process_dies_keeps_what_it_had_found_and_the_others_go_on(
    play: Callable[..., tuple[int, dict]],
) -> None:
    def die(section: Section) -> None:
        section.note(rate=1.0)
        section.check("one is one", ok=True)
        os.kill(os.getpid(), signal.SIGKILL)

    code, document = play(dead=Played(die), right=Played(lambda section: None))
    dead = document["sections"]["dead"]
    assert code == 1
    assert (dead["status"], dead["reason"]) == ("error", "its process ended with code 137")
    assert (dead["figures"], len(dead["checks"]), dead["host"]["driver"]) == ({"rate": 1.0}, 1, "580.1")
    assert document["sections"]["right"]["status"] == "passed"


def test_a_section_that_takes_too_long_is_ended_marked_and_run_again_and_the_others_are_kept(
    play: Callable[..., tuple[int, dict]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    wound_up = tmp_path / "wound up"

    def slow(section: Section) -> None:
        try:
            section.note(rate=1.0)
            time.sleep(600)
        finally:
            wound_up.touch()

    def count(section: Section) -> None:
        with runs.open("a") as file:
            file.write("once\n")

    sections = {"quick": Played(count), "slow": Played(slow, limit_s=3.0)}
    code, document = play(**sections)
    told = document["sections"]["slow"]
    assert code == 1
    assert (told["status"], told["figures"]) == ("unfinished", {"rate": 1.0})
    assert told["reason"].startswith("ended after ")
    assert wound_up.exists()
    capsys.readouterr()
    code, document = play(**sections | {"slow": Played(lambda section: section.note(rate=2.0))})
    assert code == 0
    assert (document["sections"]["slow"]["status"], document["sections"]["slow"]["figures"]) == (
        "passed",
        {"rate": 2.0},
    )
    assert runs.read_text() == "once\n"
    assert "quick: passed, 0 of 0 checks held" in capsys.readouterr().out
    play("--again", **sections | {"slow": Played(lambda section: None)})
    assert runs.read_text() == "once\nonce\n"


def test_nothing_that_a_section_has_started_outlives_it(play: Callable[..., tuple[int, dict]], tmp_path: Path) -> None:
    def leave_behind(section: Section) -> None:
        # As a daemon leaves: its parent has ended, and it leads a session of its own.
        line = ["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"]
        done = subprocess.run(line, capture_output=True, text=True, check=True)
        section.note(pid=int(done.stdout))
        assert psutil.pid_exists(section.figures["pid"])

    document = play(behind=Played(leave_behind))[1]
    assert document["sections"]["behind"]["status"] == "passed"
    assert not psutil.pid_exists(document["sections"]["behind"]["figures"]["pid"])


def test_a_process_without_a_parent_that_ends_during_its_section_is_gone_at_once(
    play: Callable[..., tuple[int, dict]],
) -> None:
    def outlive(section: Section) -> None:
        line = ["sh", "-c", "setsid sleep 0.1 >/dev/null 2>&1 & echo $!"]
        pid = int(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
        deadline = time.monotonic() + 20
        while psutil.pid_exists(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        section.check("it is gone", not psutil.pid_exists(pid))

    code, document = play(outlive=Played(outlive))
    assert code == 0, document


def test_a_section_that_does_not_end_when_it_is_told_to_is_killed() -> None:
    def stubborn() -> None:
        while True:
            try:
                time.sleep(600)
            except apart.Ended:
                continue

    assert apart.run_apart(stubborn, limit_s=1.0, grace_s=0.5) == apart.OVER_TIME


SUITE = """
import signal, sys, time
from pathlib import Path
from benchmarks.gpu import apart
signal.signal(signal.SIGTERM, apart.leave)
folder = Path(sys.argv[1])
def work():
    try:
        (folder / "begun").touch()
        time.sleep(600)
    finally:
        (folder / "ended").touch()
apart.run_apart(work, 600.0)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_section_is_wound_up_when_the_suite_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SUITE, str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL) as program:
        wait_for(tmp_path / "begun")
        program.send_signal(number)
        wait_for(tmp_path / "ended")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.02)


def test_a_part_begins_no_section_for_which_it_has_no_time_left(
    play: Callable[..., tuple[int, dict]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "PART_S", suite.BEGIN_S - 1)
    document = play("--part", "2", first=Played(lambda section: None), second=Played(lambda section: None, part=2))[1]
    assert document["sections"] == {}
    assert "second: not begun" in capsys.readouterr().out


def told_as(folder: Path, device: str = "cuda", **sections: tuple[str, str]) -> Path:
    """Write a document with sections of these dates and outcomes."""
    folder.mkdir()
    told = {
        name: {
            "status": status,
            "date": date,
            "device": device,
            "gb": 4.0,
            "figures": {"from": folder.name},
            "checks": [],
        }
        for name, (date, status) in sections.items()
    }
    path = folder / "gpu.json"
    path.write_text(json.dumps({"schema": SCHEMA, "date": "", "sections": told}))
    return path


def test_documents_are_merged_by_section_and_what_came_to_its_end_counts_more_than_what_is_newer(
    tmp_path: Path,
) -> None:
    first = told_as(tmp_path / "first", park=("2026-01-01", "passed"), pack=("2026-01-01", "failed"))
    second = told_as(tmp_path / "second", park=("2026-02-01", "unfinished"), pack=("2026-02-01", "passed"))
    third = told_as(tmp_path / "third", demo=("2026-03-01", "error"))
    told_as(tmp_path / "rehearsed", "cpu", env=("2026-04-01", "passed"))
    with_all = [
        word for path in (first, second, third, tmp_path / "rehearsed" / "gpu.json") for word in ("-w", str(path))
    ]
    assert (
        suite.main(["--merge-only", *with_all, "-w", str(tmp_path / "none.json"), "--out", str(tmp_path / "all")]) == 0
    )
    sections = json.loads((tmp_path / "all" / "gpu.json").read_text())["sections"]
    assert {name: told["figures"]["from"] for name, told in sections.items()} == {
        "park": "first",
        "pack": "second",
        "demo": "third",
    }


def test_what_was_measured_at_another_size_is_not_done(tmp_path: Path) -> None:
    document = merged(Setting("cuda", tmp_path, 4.0), [told_as(tmp_path / "first", park=("2026-01-01", "passed"))])
    assert document.done("park", Setting("cuda", tmp_path, 4.0))
    assert not document.done("park", Setting("cuda", tmp_path, 12.0))
    assert not document.done("pack", Setting("cuda", tmp_path, 4.0))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"schema": "gpu-suite/v1", "sections": {}}', "schema is 'gpu-suite/v1', and this suite knows 'gpu-suite/v2'"),
        ("[]", "is no document of this suite"),
        ("{", "is no document of this suite"),
    ],
)
def test_a_file_that_is_no_document_of_this_suite_is_named_and_left_alone(
    content: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(content)
    assert suite.main(["--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert f"{path}" in told
    assert says in told
    assert "move it away" in told
    assert path.read_text() == content


PARK = next(goal for goal in goals.GOALS if goal.section == "park")


def verdict(told: dict[str, object] | None, goal: goals.Goal = PARK) -> tuple[str, str]:
    """Return the verdict on a goal, and why, when its section says this."""
    found = goals.judged({} if told is None else {goal.section: told})[goals.GOALS.index(goal)]
    return found["verdict"], found["why"]


def park_told(device: str = "cuda", status: str = "passed", reason: str = "", **check: object) -> dict[str, object]:
    told = [{"name": f"{PARK.checks[0]}: large", "ok": True, "judged": True, "seen": {}, "untried": ""} | check]
    return {"status": status, "reason": reason, "device": device, "checks": told if check else [], "date": "2026-01-01"}


def test_a_goal_is_met_or_missed_by_the_checks_of_its_section_or_it_is_said_why_it_could_not_run() -> None:
    name = f"{PARK.checks[0]}: large"
    assert verdict(park_told(ok=True)) == ("met", "")
    assert verdict(park_told(ok=False)) == ("missed", name)
    assert verdict(park_told("cpu", ok=False)) == ("missed", name)
    assert verdict(park_told("cpu", ok=True)) == ("rehearsed", "")
    assert verdict(park_told("cpu", ok=False, judged=False)) == ("rehearsed", "")
    assert verdict(park_told(ok=False, judged=False, untried="no arena")) == ("could not run", f"{name}: no arena")
    assert verdict(park_told(status="skipped", reason="no NVIDIA GPU")) == ("could not run", "no NVIDIA GPU")
    assert verdict(park_told()) == ("could not run", f"passed, without: {PARK.checks[0]}")
    assert verdict(None) == ("could not run", "the section park was not run yet")


def test_a_goal_of_several_checks_is_met_by_all_of_them_only() -> None:
    goal = next(goal for goal in goals.GOALS if len(goal.checks) > 1)
    check = {"ok": True, "judged": True, "untried": ""}
    told = park_told() | {"checks": [check | {"name": name} for name in goal.checks]}
    assert verdict(told, goal) == ("met", "")
    told["checks"] = told["checks"][:-1]  # type: ignore[index]
    assert verdict(told, goal) == ("could not run", f"passed, without: {goal.checks[-1]}")


def test_every_goal_is_one_of_a_section_and_the_document_tells_each_with_date_gpu_driver_and_command(
    play: Callable[..., tuple[int, dict]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert {goal.section for goal in goals.GOALS} <= set(SECTIONS)
    document = play(park=Played(lambda section: section.check(f"{PARK.checks[0]}: all", ok=True)))[1]
    assert [told["name"] for told in document["goals"]] == [goal.name for goal in goals.GOALS]
    told = document["goals"][goals.GOALS.index(PARK)]
    assert (told["verdict"], told["gpus"], told["driver"]) == ("met", ["H100"], "580.1")
    assert told["date"] == document["sections"]["park"]["date"]
    assert told["command"].startswith("python -m benchmarks.gpu")
    said = capsys.readouterr().out
    assert f"  met: {PARK.name}\n" in said
    assert "packed against turns" not in said  # of a section that is not in the document


@pytest.mark.parametrize(
    ("surplus_mib", "expected"), [(0, "met"), (1, "met"), (500, "missed"), (-500, "missed"), (None, "could not run")]
)
def test_memory_that_does_not_add_up_to_the_total_is_a_missed_goal(surplus_mib: int | None, expected: str) -> None:
    section = Section(rehearsal=False, status="passed", origin={"device": "cuda"})
    memory = {"total": 2**34, "reserved": 2**29, "free": 2**33, "used": 2**34 - 2**29 - 2**33}
    told = "NVMLError: no" if surplus_mib is None else memory | {"used": memory["used"] + surplus_mib * 2**20}
    section.note(memory=told)
    env._judge_memory(section)
    assert verdict(section.told(), goals.GOALS[0])[0] == expected


def test_the_command_for_a_host_without_a_registry_is_short_enough_and_told_alike_everywhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(suite.COMMAND) <= 2000
    assert f"```sh\n{suite.COMMAND}```" in (ROOT / "docs" / "developer.md").read_text()
    with pytest.raises(SystemExit):
        suite.parse(["--help"])
    assert suite.COMMAND in capsys.readouterr().out


IMPORTED = """
import importlib, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
ours = "benchmarks protocol valuation arbiter node_agent app_agent launch"
known = sys.stdlib_module_names | {*ours.split(), *sys.argv[1].split(",")}
class Known:
    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, path, target) if name.partition(".")[0] in known else None
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Known()]
for name in sys.argv[2:]:
    importlib.import_module(name)
"""
#: What an image for GPUs has; NVIDIA's bindings are imported where they are used.
IMAGE = {"torch", "numpy", "psutil"}
#: What comes with PyTorch, and what PyTorch asks for.
TORCH = {"torch", "torchgen", "functorch", "sympy", "mpmath", "typing_extensions", "filelock", "jinja2", "markupsafe"}


#: These import PyTorch, in three seconds each; so does `pack`, which `make check` tries.
SLOW = ("demo", "driver", "graph", "park", "trough")
IMPORTS = [pytest.param(each, marks=[pytest.mark.full] if each in SLOW else []) for each in SECTIONS]


@pytest.mark.parametrize("section", IMPORTS)
def test_a_section_imports_nothing_but_what_it_says_and_what_the_image_and_the_wheels_have(section: str) -> None:
    carried = {line for line in (ROOT / "benchmarks/gpu/wheels.txt").read_text().splitlines() if line[0] != "#"}
    needs = set(SECTIONS[section].needs) - {"pynvml", "cuda.bindings"}
    assert needs <= carried | IMAGE
    line = [sys.executable, "-c", IMPORTED, ",".join(needs | TORCH | {"numpy"}), f"benchmarks.gpu.sections.{section}"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def gpu_wheels(folder: Path, mib: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script on a pip that finds one wheel of that size, and writes its arguments beside it."""
    program = folder / "python3"
    program.write_text(
        '#!/bin/sh\nto=; for word; do [ "$last" = --dest ] && to=$word; last=$word; done\n'
        f'echo "$*" > {folder}/words\ntruncate -s {mib}M "$to/one.whl"\n'
    )
    program.chmod(0o755)
    line = ["sh", str(ROOT / "scripts" / "gpu-wheels"), "--to", str(folder / "wheels"), *arguments]
    env = os.environ | {"PYTHON": str(program)}
    return subprocess.run(line, env=env, capture_output=True, text=True, check=False)


def test_wheels_that_are_too_large_to_carry_are_refused_with_their_size(tmp_path: Path) -> None:
    done = gpu_wheels(tmp_path, 60)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/wheels: 1 wheels for Python 3.12, 60 MiB\n")
    done = gpu_wheels(tmp_path, 61, "--python-version", "3.13")
    assert done.returncode == 1
    assert "for Python 3.13, 61 MiB" in done.stdout
    assert "more than 60 MiB" in done.stderr
    assert "--python-version 3.13 --constraint requirements.lock" in (tmp_path / "words").read_text()


def test_wheels_of_an_earlier_collection_are_removed(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "old-1.whl").touch()
    assert gpu_wheels(tmp_path, 1).returncode == 0
    assert [path.name for path in (tmp_path / "wheels").iterdir()] == ["one.whl"]


def test_a_wrong_argument_of_the_script_for_wheels_is_named(tmp_path: Path) -> None:
    done = gpu_wheels(tmp_path, 1, "--python-version", "twelve")
    assert done.returncode == 2
    assert "--python-version twelve: write --python-version 3.12" in done.stderr


def test_promises_about_speed_are_not_judged_in_a_rehearsal(play: Callable[..., tuple[int, dict]]) -> None:
    slow = Played(lambda section: section.check("it is fast", ok=False, gpu_only=True))
    assert play("--rehearse", slow=slow)[0] == 0
    assert play(slow=slow)[0] == 1


def test_figures_of_a_rehearsal_never_come_among_those_of_a_gpu(
    play: Callable[..., tuple[int, dict]], tmp_path: Path
) -> None:
    one = Played(lambda section: section.note(rate=1.0))
    assert play(one=one)[1]["sections"]["one"]["device"] == "cuda"
    assert play("--rehearse", "--with", str(tmp_path / "gpu.json"), one=one)[1]["sections"]["one"]["device"] == "cpu"
    assert json.loads((tmp_path / "gpu.json").read_text())["sections"]["one"]["device"] == "cuda"


def test_a_rehearsal_leaves_out_what_needs_cuda_or_a_driver_that_is_not_even_played() -> None:
    simulated = Setting("cpu", Path(), 0.1)
    with pytest.raises(Skip, match=r"not run: no NVIDIA GPU .* needs CUDA in PyTorch"):
        suite.refuse(SECTIONS["graph"], simulated)
    with pytest.raises(Skip, match=r"not run: no NVIDIA GPU .*--rehearse played has one"):
        suite.refuse(SECTIONS["driver"], simulated)
    assert "pynvml" in SECTIONS["estimator"].needs
    assert "pynvml" not in SECTIONS["estimator"].simulated_needs


def test_a_rehearsal_with_a_played_driver_needs_the_packages_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "missing", list)
    with pytest.raises(Skip, match=r"\(pip install cuda-bindings nvidia-ml-py\)"):
        suite.refuse(SECTIONS["driver"], Setting("cpu", Path(), 0.1, played=True))
    with pytest.raises(Skip, match="needs CUDA in PyTorch"):
        suite.refuse(SECTIONS["graph"], Setting("cpu", Path(), 0.1, played=True))


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
        "time.sleep(1.0)",
        """print('{"ok": true, "state": "suspended"}', flush=True)""",
    )
    found = driver.ask(helper, {"do": "suspend"})
    assert found["ok"] is True
    assert set(found["phases"]) == {"start", "lock", "checkpoint"}
    assert found["phases"]["checkpoint"] > found["phases"]["lock"]


def test_a_helper_that_crashes_is_no_answer_but_says_where_it_was(tmp_path: Path) -> None:
    helper = program(tmp_path, """print('{"at": "restore", "pid": 1}', flush=True)""", "raise SystemExit(9)")
    found = driver.ask(helper, {"do": "resume"})
    assert found["ok"] is False
    assert found["reason"] == "it hung or crashed in 'restore'"


#: Answers as a helper would, with the user and the capabilities that it runs with.
WHO = """
import json, os
rights = [line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")]
print(json.dumps({"ok": os.getuid() > 0, "reason": f"user {os.getuid()}, rights {int(rights[0], 16):x}"}))
"""
SYS_PTRACE = 1 << 19


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder that every user can read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        path.chmod(0o755)
        yield path


@pytest.mark.parametrize(("scope", "rights"), [(None, 0), ("0", 0), ("1", SYS_PTRACE)])
def test_the_service_user_has_the_right_that_the_kernel_asks_for_and_no_other(
    readable: Path, monkeypatch: pytest.MonkeyPatch, scope: str | None, rights: int
) -> None:
    helper = ("/usr/bin/python3", "-I", program(readable, WHO)[1])
    if os.getuid() or shutil.which("setpriv") is None or not Path(helper[0]).exists():
        pytest.skip("it takes root, setpriv (util-linux) and a Python for all users")
    monkeypatch.setattr(driver, "PTRACE_SCOPE", readable / "scope")
    if scope is not None:
        (readable / "scope").write_text(f"{scope}\n")
    section = Section(rehearsal=False)
    driver._judge_service(section, helper)
    (check,) = section.checks
    number = pwd.getpwnam(driver.service_user()).pw_uid
    assert check.ok
    assert check.seen["reason"] == f"user {number}, rights {rights:x}"
    told = section.figures["service"]
    assert told["as_shipped"]["reason"] == f"user {number}, rights 0"
    assert told["with_right"]["reason"] == f"user {number}, rights {SYS_PTRACE:x}"


def test_a_helper_that_the_service_user_cannot_read_is_no_verdict_but_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    section = Section(rehearsal=False)
    driver._judge_service(section, ("/usr/bin/python3", "-I", program(tmp_path, WHO)[1]))
    (check,) = section.checks
    assert not check.judged
    assert "cannot run" in check.untried or "only root" in check.untried or "not installed" in check.untried


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
