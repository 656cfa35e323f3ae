"""What the command line says, without a site: specs, tables, explanations, logs, notices to systemd."""

from __future__ import annotations

import base64
import io
import socket
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any, cast

import pytest
import typer
from typer.testing import CliRunner

from app_agent.client import default_name
from app_agent.core.records import AppRecord
from app_agent.streams import BEYOND
from launch import cli, notify, registry, spec, surface, timeline, views
from launch.client import Client
from launch.faults import Fault
from launch.follow import follow_logs
from launch.pictures import Picture, show_changes
from launch.registry import Verbs
from launch.site import site
from launch.verbs import submission
from protocol import exit_codes

# --- specs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "value"), [("120", 120), ("90s", 90), ("2m", 120), ("1.5h", 5400), ("1d", 86400)])
def test_lengths_of_time_are_read_as_people_write_them(text: str, value: float) -> None:
    assert spec.seconds(text, "--grace") == value


@pytest.mark.parametrize("text", ["", "s", "soon", "-1", "nan", "inf", "1w"])
def test_what_is_no_length_of_time_names_its_flag(text: str) -> None:
    with pytest.raises(Fault, match="--grace"):
        spec.seconds(text, "--grace")


def test_gpus_are_one_number_or_the_sizes_that_a_job_accepts() -> None:
    assert spec.gpu_sizes("2", "--gpus") == (2,)
    assert spec.gpu_sizes("1,2, 4", "--gpus") == (1, 2, 4)


@pytest.mark.parametrize(
    ("text", "value"), [("8G", 8 * 2**30), ("512m", 512 * 2**20), ("0", 0), ("0.5K", 512), ("80GiB", 80 * 2**30)]
)
def test_amounts_of_memory_are_read_with_their_units(text: str, value: int) -> None:
    assert spec.size(text, "--memory") == value


@pytest.mark.parametrize("text", ["", "much", "-1G", "8X", "nan", "iB", "GiB", "8GB"])
def test_what_is_no_amount_of_memory_is_refused_with_the_flag(text: str) -> None:
    with pytest.raises(Fault, match="--memory"):
        spec.size(text, "--memory")


@pytest.mark.parametrize(
    ("text", "mend"),
    [("8", "8G"), ("1.5", "1.5G"), ("1000", "1000M"), ("8589934592", "8192M"), ("8589934593", "8193M")],
)
def test_an_amount_of_memory_without_a_unit_is_refused_with_the_mend(text: str, mend: str) -> None:
    with pytest.raises(Fault) as caught:
        spec.size(text, "--memory")
    assert (caught.value.code, caught.value.sentence) == (
        exit_codes.USAGE,
        f"--memory {text} has no unit; write {mend}",
    )


def test_types_of_gpus_are_read_from_a_flag_and_from_a_file() -> None:
    assert spec.gpu_types("H200", "--gpu-type") == ("H200",)
    assert spec.gpu_types("H100, RTX 4090", "--gpu-type") == ("H100", "RTX 4090")
    assert spec.gpu_types(["H100", "H200"], "gpu_type") == ("H100", "H200")


@pytest.mark.parametrize("value", ["", "H100,", "-sxm", "H100;", 100, [100]])
def test_what_is_no_type_of_gpu_is_refused_with_the_mend(value: object) -> None:
    with pytest.raises(Fault, match=r"--gpu-type is .*, which is no type of GPU") as caught:
        spec.gpu_types(value, "--gpu-type")
    assert caught.value.next_step == "write H200, or H100,H200 for a job that can have either"


@pytest.mark.parametrize("types", ['"H100,H200"', '["H100", "H200"]'])
def test_a_kind_of_gpus_in_a_spec_file_is_that_of_the_flags(tmp_path: Path, types: str) -> None:
    file = tmp_path / "app.toml"
    file.write_text(f'{SPEC}gpu_type = {types}\nmin_memory = "80G"\n')
    wished = spec.build(spec.load(file)).requirements
    assert (wished.gpu_types, wished.min_memory_bytes) == (("H100", "H200"), 80 * 2**30)


SPEC = 'trials = [["true"]]\ncwd = "/"\ncheckpoint_root = "/c"\n'


def test_a_spec_file_says_what_the_flags_say(tmp_path: Path) -> None:
    file = tmp_path / "app.toml"
    file.write_text(SPEC + 'class = "trial"\ncpus = 4\nmemory = "8G"\nsteps = 10\nstep_time = "2s"\ngrace = "2m"\n')
    fields = spec.load(file)
    app = spec.build(fields)
    wished = app.requirements
    assert (wished.kind, wished.cpus, wished.host_bytes, app.steps_total) == ("interactive", 4.0, 8 * 2**30, 10)
    assert (app.step_serial_s, wished.grace_s) == (2.0, 120.0)
    assert spec.build(fields | {"kind": "batch"}).requirements.kind == "batch", "flags win"
    file.write_text(SPEC + 'class = "trial"\nkind = "batch"\n')
    with pytest.raises(Fault, match="says both class and kind, which are the same"):
        spec.load(file)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("memory = 8", 'memory 8 has no unit; write "8G"'),
        ("memory = 1.5", 'memory 1.5 has no unit; write "1.5G"'),
        ('memory = "8"', 'memory 8 has no unit; write "8G"'),
        ("memory = true", 'memory must be text such as "8G", and is true or false'),
    ],
)
def test_memory_in_a_spec_file_needs_a_unit_too(tmp_path: Path, line: str, sentence: str) -> None:
    file = tmp_path / "app.toml"
    file.write_text(f"{SPEC}{line}\n")
    with pytest.raises(Fault) as caught:
        spec.load(file)
    assert (caught.value.code, caught.value.sentence) == (exit_codes.USAGE, sentence)


@pytest.mark.parametrize(("line", "value"), [("memory = 0", 0), ("memory = 0.0", 0), ("host_bytes = 8", 8)])
def test_no_memory_needs_no_unit_and_bytes_are_bytes(tmp_path: Path, line: str, value: int) -> None:
    file = tmp_path / "app.toml"
    file.write_text(f"{SPEC}{line}\n")
    assert spec.build(spec.load(file)).requirements.host_bytes == value


@pytest.mark.parametrize(
    ("line", "sentence", "mend"),
    [
        ("command = \"python train.py --lr '0 1'\"", "command is text", '["python", "train.py", "--lr", "0 1"]'),
        ('command = "python \'train.py"', "command is text", 'command = ["python", "train.py"]'),
        ('command = ""', "command is text", 'command = ["python", "train.py"]'),
        ("command = 5", "command is a whole number", 'command = ["python", "train.py"]'),
        ('command = ["python", 5]', "command holds a whole number", 'command = ["python", "5"]'),
        ("command = []", "no command was given", "gpu-arbiter submit -- python train.py"),
        ('command = ["a"]\nutility = 5', "utility is a whole number", 'utility = "deadline:6h"'),
        ('command = ["a"]\nutility = ["deadline:6h"]', "utility is a list", 'utility = "deadline:6h"'),
        ('command = ["a"]\nenv = 5', "the spec cannot be used: env must be a table, and is a whole number", "mend it"),
        ('command = ["a"]\ncwd = 5', "the spec cannot be used: cwd must be text, and is a whole number", "mend it"),
    ],
)
def test_what_a_spec_file_holds_in_the_wrong_form_is_said_with_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, sentence: str, mend: str
) -> None:
    monkeypatch.delenv("GPU_ARBITER_OUTPUT", raising=False)
    (tmp_path / "app.toml").write_text(f"{line}\n")
    result = CliRunner().invoke(cli.app, ["submit", "-f", str(tmp_path / "app.toml")])
    said, next_step = result.stderr.splitlines()
    assert result.exit_code == exit_codes.USAGE
    assert sentence in said
    assert mend in next_step


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("kind", "trail", r"kind \(--class\) is 'trail', which is none of 'batch', 'interactive'"),
        ("weight", -1.0, r"weight \(--weight\) must be more than 0"),
        (
            "preempt_by",
            "now",
            r"preempt_by \(--preempt-by\) is 'now', which is none of 'auto', 'checkpoint', 'suspend'",
        ),
        ("host_bytes", "8G", r"host_bytes \(--memory\) must be a whole number, and is text"),
        ("memroy", 1, "unknown field `memroy`"),
    ],
)
def test_a_wrong_field_is_named_with_its_flag_and_its_choices(field: str, value: object, said: str) -> None:
    with pytest.raises(Fault, match=said):
        spec.build({"trials": [["true"]], "cwd": "/", "checkpoint_root": "/c", field: value})


def test_each_flag_that_an_error_names_is_one_of_submit() -> None:
    assert {*spec.FLAGS, *spec.WORDS.keys() - {"class", "idle"}} <= signature(submission.submit).parameters.keys()


@pytest.mark.parametrize("text", ["sigmoid:0,1/h,6h", "deadline:1e-12s", "sigmoid:1,1e9/s,1e12d"])
def test_a_utility_beyond_all_bounds_names_its_flag(text: str) -> None:
    with pytest.raises(Fault, match="--utility"):
        spec.utility(text, "--utility")


@pytest.mark.parametrize("text", ["", "0", "-1", "two", "1,", "1,0", "1.5", "\u00b2", "99999"])
def test_what_is_no_number_of_gpus_names_its_flag(text: str) -> None:
    with pytest.raises(Fault, match="--gpus"):
        spec.gpu_sizes(text, "--gpus")


def test_the_gang_of_an_elastic_job_is_the_first_of_its_sizes() -> None:
    fields = {"trials": [["a"]], "cwd": "/", "checkpoint_root": "/"}
    assert spec.build(fields | {"sizes": [2, 4]}).gang == 2
    assert spec.build(fields | {"sizes": [2, 4], "gang": 1}).gang == 1, "which the app agent refuses"
    with pytest.raises(Fault, match="gpus_max is 4") as caught:
        spec.build(fields | {"gpus_max": 4})
    assert "sizes = [1, 2, 4]" in caught.value.next_step


def test_only_a_few_variables_and_those_asked_for_travel() -> None:
    here = {"PATH": "/bin", "SECRET": "x", "SEED": "1"}
    assert spec.environment(["SEED", "A=b=c"], here) == {"PATH": "/bin", "SEED": "1", "A": "b=c"}
    with pytest.raises(Fault, match="has no name"):
        spec.environment(["=1"], here)


def test_names_that_sound_secret_are_told_from_those_that_do_not() -> None:
    secret = ["WANDB_API_KEY", "KEY", "HF_TOKEN", "authtoken", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "OPENAI_APIKEY"]
    plain = ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "MONKEY", "KEYBOARD", "SEED", "PASS", "SSH_AUTH_SOCK"]
    assert spec.telling(secret + plain) == secret


def test_the_file_of_a_secret_is_named_as_every_node_sees_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    files = spec.secret_files(["A=key=1", "B=~/b", "C=/c"])
    assert spec.whole_paths(files) == {"A": f"{tmp_path}/key=1", "B": "/home/ada/b", "C": "/c"}
    for item in ("A", "A=", "=f", ""):
        with pytest.raises(Fault, match=r"--secret .* is no NAME=FILE") as caught:
            spec.secret_files([item])
        assert caught.value.code == exit_codes.USAGE


def test_trials_come_from_a_file_and_from_flags(tmp_path: Path) -> None:
    (tmp_path / "trials").write_text("--lr 1\n\n# a remark\n--lr '2 3'\n")
    found = spec.trials(("train",), tmp_path / "trials", ["--lr 4"])
    assert found == (("train", "--lr", "1"), ("train", "--lr", "2 3"), ("train", "--lr", "4"))
    assert spec.trials(("train",), None, []) == (("train",),)


def test_an_app_is_named_after_its_script() -> None:
    assert default_name(["python", "-u", "src/train.py", "--x"]) == "train"
    assert default_name(["/usr/bin/true"]) == "true"


def test_an_unknown_field_is_refused_with_those_there_are() -> None:
    with pytest.raises(Fault) as caught:
        spec.build({"trials": [["a"]], "cwd": "/", "checkpoint_root": "/", "gpu": 1})
    assert "gpu" in caught.value.sentence
    assert "gang" in caught.value.next_step


def test_the_fields_are_listed_by_the_names_that_users_write() -> None:
    listed = set(spec.FIELDS.split(", "))
    assert {"command", "gang", "class", "memory", "steps", "step_time", "grace", "checkpoint_dir", "utility"} <= listed
    assert not listed & {"kind", "host_bytes", "steps_total", "step_serial_s", "grace_s", "checkpoint_root"}
    guide = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
    example = guide[guide.index("```toml\ncommand") :].split("```")[1]
    assert {line.split(" = ")[0] for line in example.splitlines()[1:]} <= listed


def test_a_job_on_several_nodes_is_asked_for_by_a_flag_or_in_the_file() -> None:
    fields = {"trials": [["a"]], "cwd": "/", "checkpoint_root": "/"}
    assert not spec.build(fields).spans
    assert spec.build(fields | {"spans": True}).spans
    assert "spans" in spec.FIELDS


# --- tables ---------------------------------------------------------------------------------------------------------


def test_a_table_is_aligned_with_numbers_to_the_right() -> None:
    assert surface.table(("ID", "N"), [("a", "1"), ("bcd", "-"), ("e", "22")]) == "ID    N\na     1\nbcd   -\ne    22"


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0, "0s"), (59.9, "59s"), (185, "3m05s"), (7800, "2h10m"), (360000, "4d04h")]
)
def test_durations_read_as_people_say_them(value: float | None, text: str) -> None:
    assert surface.duration(value) == text


def app(**changes: Any) -> dict[str, Any]:
    return {
        "id": "ada-1", "tenant": "t", "name": "n", "state": "running", "gpus": ["g0"], "want": 2, "rho": 1.5,
        "jct_s": None, "elapsed_s": 61.0, "tasks": [], "reason": "",
    } | changes  # fmt: skip


def task(**changes: Any) -> dict[str, Any]:
    return {"task": "ada-1.0-a0", "node": "n1", "phase": "running", "step": 4, "total_steps": 9, "reason": ""} | changes


def test_ps_shows_what_is_not_over_unless_asked_for_all() -> None:
    measured = {"source": "steps", "confidence": 1.0}
    unsure = {"source": "gpm", "confidence": 0.71, "periods": {"gpm": 0.5}}
    document = {"apps": [app(tasks=[task(measured=measured)]), app(id="ada-2", state="failed", jct_s=5.0)]}
    row = views.apps_table(document).splitlines()[1]
    assert " ".join(row.split()) == "ada-1 t n running 1 2 1.50 - 5/9 - - 1m01s n1 steps -"
    two = [task(measured=measured), task(measured=unsure), task(phase="exited")]
    assert "n1 gpm 71%" in " ".join(views.apps_table({"apps": [app(tasks=two)]}).split())
    assert "ada-2" not in views.apps_table(document)
    assert "ada-2" in views.apps_table(document, everything=True)
    assert "gpu-arbiter submit" in views.apps_table({"apps": []})


def test_a_task_that_has_told_no_step_for_a_while_is_said_to_tell_none() -> None:
    silent = task(step=-1, total_steps=0, measured={"ran_s": 365.0}, at_risk_s=366.0)
    said = (
        "ada-1.0-a0: this script tells nothing of its steps, so it is not known to be able to save or to be suspended: "
        "when it has to leave, the 6m06s of work that it has done are lost."
    )
    assert said in explained(state="running", tasks=[silent])
    assert views.progress(app(tasks=[silent])) == "-"
    assert "suspended all the same" in explained(state="running", tasks=[silent | {"at_risk_s": 0.0}])
    for telling in (task(step=-1, total_steps=0, measured={"ran_s": 9.0}), task(step=0, measured={"ran_s": 99.0})):
        assert "tells nothing of its steps" not in explained(state="running", tasks=[telling])
        assert views.progress(app(tasks=[telling])) != "-"


def test_ps_names_a_few_of_the_apps_that_one_waits_for_and_counts_the_rest() -> None:
    def last_cell(kind: str, *ids: str) -> str:
        waits = {"kind": kind, "ids": list(ids)}
        return views.apps_table({"apps": [app(waits_for=waits, preemptions=3)]}).split()[-1]

    assert last_cell("apps", "bob-1") == "bob-1"
    assert last_cell("apps", "bob-1", "bob-2", "bob-3", "bob-4") == "bob-1,bob-2,+2"
    assert last_cell("solver") == "solver"


def test_a_quarantined_gpu_is_listed_with_the_reason() -> None:
    gpu = {"id": "g0", "slot": "0", "model": "m", "state": "free", "healthy": False, "quarantined": True, "app": None,
           "detail": "quarantined: jobs of ada-1 and bob-1 failed on g0"}  # fmt: skip
    node = {"id": "n1", "rack": "r", "state": "up", "last_seen_s": 1.0, "gpus": [gpu]}
    row = views.nodes_table({"nodes": [node]}, 0.0).splitlines()[1]
    assert "free, quarantined" in row
    assert row.endswith("quarantined: jobs of ada-1 and bob-1 failed on g0")


def test_ps_says_how_far_a_job_has_saved_while_it_waits() -> None:
    saved = {"steps": 113, "total_steps": 400}
    assert views.progress(app(state="waiting", saved=saved)) == "113/400"
    assert views.progress(app(state="waiting", saved={"steps": 113, "total_steps": 0})) == "113"
    assert views.progress(app(state="running", saved=saved, tasks=[task()])) == "5/9"
    assert views.progress(app(state="finished", saved=saved)) == "-"


def test_rounds_say_who_won_and_how_many_got_nothing() -> None:
    outcomes = [{"app": "ada-1", "gpus": ["g0", "g1"]}, {"app": "bob-1", "gpus": []}, {"app": "bob-2", "gpus": ["g2"]}]
    newest = {
        "round": 7, "at": "2026-01-01T00:00:30Z", "took_s": 1.25, "gpus": ["g0", "g1", "g2"], "outcomes": outcomes,
        "outcomes_left_out": 4,
    }  # fmt: skip
    text = views.rounds_table({"count": 9, "rounds": [newest]}, now=views.seconds_of("2026-01-01T00:01:00Z"))
    assert " ".join(text.splitlines()[1].split()) == "7 30s ago 1.2s 3 ada-1 (2), bob-2 (1) 5"
    assert text.splitlines()[-1] == "1 of 9 rounds; for more: gpu-arbiter rounds --limit N"
    assert "gpu-arbiter explain" in views.rounds_table({"count": 0, "rounds": []}, now=0.0)


def explained(**changes: Any) -> str:
    story = {"app": "ada-1", "held": [], "rounds": [], "story": [], "refusal": "", "waiting_for": ""}
    return views.explanation(app(**story) | changes, now=views.seconds_of("2026-01-01T00:01:00Z"))


def test_an_explanation_says_who_won_instead_and_what_to_do_next() -> None:
    lost = {
        "round": 7,
        "at": "2026-01-01T00:00:30Z",
        "reason": "bid and lost",
        "winners": [{"app": "bob-1", "gpus": 2}],
    }
    text = explained(state="waiting", rounds=[lost])
    assert "ada-1 of tenant t is waiting and holds 0 of the 2 GPUs it can use." in text
    assert "round 7, 30s ago: bid and lost" in text
    assert "went to: bob-1 (2)" in text
    assert text.splitlines()[-1].startswith("next: gpu-arbiter wait ada-1 --for running")


def test_an_explanation_names_what_is_in_the_way_and_when_the_next_round_is_at_the_latest() -> None:
    binding = {"estimate": False, "text": "bob-1 holds g0 on n1, its lease ends in 44 s"}
    text = explained(state="waiting", binding=binding, next_round_s=547.0)
    assert "\nIn its way: bob-1 holds g0 on n1, its lease ends in 44 s\n" in text
    assert "The next round decides in at most 9m07s, sooner if a GPU comes free or an app arrives." in text
    text = explained(state="waiting", binding=binding | {"estimate": True})
    assert "\nIn its way (an estimate, made without the bids of the apps): bob-1 holds g0 on n1" in text
    assert "In its way" not in explained(state="waiting", binding=None)


def test_rho_is_unknown_until_something_is_measured_and_says_what_it_rests_on() -> None:
    text = explained(state="running", rho=None, rho_basis="guess")
    assert "Its finish-time fairness rho is unknown until its first mini-batches are measured." in text
    text = explained(state="running", rho=1.5, rho_basis="declared")
    assert "rho is 1.50, 1.50 times as late as alone on its share, by the times that its owner declared;" in text
    assert "by times as measured" in explained(state="running", rho=0.5, rho_basis="measured")


def test_gpu_time_says_what_was_lost_and_parked() -> None:
    text = explained(
        state="running",
        gpu_seconds=217.0,
        lost_gpu_seconds=90.0,
        draining_gpu_seconds=4.0,
        parked_gpu_seconds=30.0,
    )
    assert (
        "It has had 3m37s of GPU time; of that 1m30s was lost to preemptions and failures and 4s went by while GPUs "
        "were being left; it lay parked for 30s beside that."
    ) in text
    assert "It has had 40s of GPU time." in explained(state="running", gpu_seconds=40.0)
    (row,) = views.apps_table({"apps": [app(lost_gpu_seconds=90.0)]}).splitlines()[1:]
    assert "1m30s" in row.split()


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        ({"state": "running", "held": ["g0"]}, "gpu-arbiter logs -f ada-1"),
        ({"state": "failed"}, "gpu-arbiter logs ada-1"),
        ({"state": "failed", "has_run": True}, "gpu-arbiter logs ada-1"),
        ({"state": "failed", "has_run": False}, "next: submit it again once what the reason names is mended"),
        ({"state": "refused", "refusal": "too large"}, "submit it again"),
        ({"state": "failed", "story": [{"at": "2026-01-01T00:00:00Z", "what": "refused: x"}]}, "submit it again"),
    ],
)
def test_each_state_has_its_next_step(changes: dict[str, Any], command: str) -> None:
    assert command in explained(**changes).splitlines()[-1]


# --- logs -----------------------------------------------------------------------------------------------------------


class Node:
    """A client whose arbiter has these chunks of output, one per question, and this state of the app after each."""

    def __init__(self, *answers: tuple[str, int, bytes, int, bool], dropped: int = 0) -> None:
        self._answers = list(answers)
        self._dropped = dropped  #: before the last of them
        self.asked: list[int] = []

    def apps(self) -> list[AppRecord]:
        return []  # it is another owner's

    def query(self, kind: str, target: str = "", offset: int = 0) -> dict[str, Any]:
        if kind == "apps":
            return {"apps": [app(state="running" if self._answers else "finished")]}
        self.asked.append(offset)
        if not self._answers:
            raise Fault("no node has output of it", code=exit_codes.NOT_FOUND)
        name, start, data, size, ended = self._answers.pop(0)
        assert start == offset
        dropped = 0 if self._answers else self._dropped
        return {"task": name, "data": base64.b64encode(data).decode(), "size": size, "ended": ended, "dropped": dropped}


def followed(node: Node, *, follow: bool = True) -> bytes:
    out = io.BytesIO()
    follow_logs(cast("Client", node), "ada-1", follow=follow, out=out, pause=lambda _: None)
    return out.getvalue()


def test_output_is_followed_until_the_app_is_over() -> None:
    node = Node(("a0", 0, b"one\n", 4, False), ("a0", 4, b"", 4, False), ("a0", 4, b"two\n", 8, True))
    assert followed(node) == b"one\ntwo\n"


def test_a_new_attempt_is_read_from_its_beginning() -> None:
    node = Node(("a0", 0, b"one\n", 4, True), ("a1", 4, b"", 4, False), ("a1", 0, b"1\n2\n", 4, True))
    assert followed(node) == b"one\n1\n2\n"
    assert node.asked == [0, 4, 0]


def test_without_follow_all_that_there_is_now_is_printed_once() -> None:
    node = Node(("a0", 0, b"one\n", 8, False), ("a0", 4, b"two\n", 8, False))
    assert followed(node, follow=False) == b"one\ntwo\n"


def test_a_line_of_which_the_rest_is_no_longer_kept_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    node = Node(("a0", 0, b"one\ntw", 6, False), ("a0", 6, b"nine\n", 40, True), dropped=29)
    assert followed(node) == b"one\ntw\nnine\n"
    assert "29 bytes of output are no longer kept" in capsys.readouterr().err


def test_logs_of_nothing_fail_unless_it_may_still_come() -> None:
    with pytest.raises(Fault, match="no node has output"):
        followed(Node(), follow=False)
    assert followed(Node()) == b""


class Output:
    """A client of an arbiter whose one task has written `data`, told at most `most` bytes a question."""

    def __init__(self, data: bytes, most: int = 65_536) -> None:
        self._data = data
        self._most = most
        self.told = 0

    def apps(self) -> list[AppRecord]:
        return []

    def query(self, kind: str, target: str = "", offset: int = 0) -> dict[str, Any]:
        if kind == "apps":
            return {"apps": [app(state="finished")]}
        data = self._data[offset : offset + self._most]
        self.told += len(data)
        return {
            "task": "ada-1.0-a0",
            "data": base64.b64encode(data).decode(),
            "size": len(self._data),
            "ended": True,
        }


def tail(output: Output, lines: int, *, follow: bool = False) -> bytes:
    out = io.BytesIO()
    follow_logs(cast("Client", output), "ada-1", follow=follow, tail=lines, out=out, pause=lambda _: None)
    return out.getvalue()


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize(
    ("lines", "shown"),
    [(0, b""), (1, b"three\n"), (2, b"\nthree\n"), (4, b"one\ntwo\n\nthree\n"), (9, b"one\ntwo\n\nthree\n")],
)
def test_the_tail_of_an_output_is_its_last_lines(lines: int, shown: bytes, follow: bool) -> None:
    assert tail(Output(b"one\ntwo\n\nthree\n"), lines, follow=follow) == shown


def test_a_last_line_without_an_end_is_a_line() -> None:
    assert tail(Output(b"one\ntwo"), 1) == b"two"
    assert tail(Output(b""), 3) == b""


def test_the_tail_of_a_long_output_costs_little_and_may_reach_far_back() -> None:
    lines = b"".join(b"line %d\n" % number for number in range(300_000))
    short = Output(lines)
    assert tail(short, 2) == b"line 299998\nline 299999\n"
    assert short.told < len(lines) / 20
    assert tail(Output(lines, most=50_000), 250_000) == lines[lines.index(b"line 50000\n") :]


def test_the_attempt_after_a_tail_is_shown_whole() -> None:
    name = "ada-1.0-a0"
    node = Node((name, BEYOND, b"", 8, False), (name, 0, b"one\ntwo\n", 8, False), (name, 4, b"two\n", 8, True),
                ("ada-1.0-a1", 8, b"", 4, True), ("ada-1.0-a1", 0, b"new\n", 4, True))  # fmt: skip
    out = io.BytesIO()
    follow_logs(cast("Client", node), "ada-1", follow=True, tail=1, out=out, pause=lambda _: None)
    assert out.getvalue() == b"two\nnew\n"


# --- a picture that changes -----------------------------------------------------------------------------------------


def watched(out: io.StringIO, *pictures: Picture) -> str:
    """Return what is shown of these pictures until Ctrl-C."""
    left = list(pictures)

    def look() -> Picture:
        if not left:
            raise KeyboardInterrupt
        return left.pop(0)

    with pytest.raises(KeyboardInterrupt):
        show_changes(look, out=out, pause=lambda _: None)
    return out.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


PICTURES = (Picture("a 1s", "a"), Picture("a 2s", "a"), Picture("b 3s", "b"), Picture("b 3s", "b"))


def test_on_a_pipe_a_picture_is_shown_again_when_there_is_news() -> None:
    assert watched(io.StringIO(), *PICTURES) == "a 1s\nb 3s\n"


def test_a_terminal_shows_each_change_over_the_last_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    home = "\x1b[H\x1b[J"
    assert watched(Terminal(), *PICTURES) == f"{home}a 1s\n{home}a 2s\n{home}b 3s\n"
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setenv("LINES", "4")
    tall = Picture("123456789012\n2\n3\n4\n5", None)
    assert watched(Terminal(), tall) == f"{home}1234567890\n2\nand 3 more\n"
    monkeypatch.setenv("TERM", "dumb")
    assert watched(Terminal(), *PICTURES) == "a 1s\nb 3s\n"


def test_ages_and_progress_of_apps_are_no_news_but_their_states_are() -> None:
    before = views.apps_news({"apps": [app(tasks=[task()])]})
    assert before == views.apps_news({"apps": [app(tasks=[task(step=5)], elapsed_s=99.0, rho=1.6, ltgf=0.9)]})
    for change in ({"state": "waiting"}, {"gpus": []}, {"tasks": [task(node="n2")]}, {"id": "ada-2"}):
        assert before != views.apps_news({"apps": [app(**{"tasks": [task()]} | change)]})


# --- systemd --------------------------------------------------------------------------------------------------------


def test_systemd_hears_ready_once_and_then_the_watchdog_in_time(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        times = iter((0.0, 1.0, 1.9, 2.0, 3.0, 4.5))
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "8000000"}
        alive = notify.feeder(environment, clock=lambda: next(times))
        for _ in range(6):
            alive()
        heard = [systemd.recv(100).decode() for _ in range(4)]
        with pytest.raises(BlockingIOError):  # and no more
            systemd.recv(100)
    assert heard == ["READY=1", "WATCHDOG=1", "WATCHDOG=1", "WATCHDOG=1"]


def test_without_systemd_nobody_is_told_and_nothing_fails(tmp_path: Path) -> None:
    assert notify.notify("READY=1", {}) is False
    assert notify.notify("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "nobody")}) is False
    assert notify.watchdog_s({"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "1"}) is None


# --- the rest -------------------------------------------------------------------------------------------------------


def test_every_configuration_written_for_a_daemon_reads_back_the_same(tmp_path: Path) -> None:
    import tomllib

    import msgspec

    local = site.local_site(tmp_path / 'a "quoted" folder', nodes=2, gpus="simulated:1")
    for config in (local.arbiter, *local.nodes, local.app):
        assert msgspec.convert(tomllib.loads(site.toml(msgspec.to_builtins(config))), type(config)) == config


def test_the_exit_codes_in_the_documentation_are_those_of_the_program() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
    section = text[text.index("## Exit codes") :]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")]
    assert {int(row) for row in rows if row.isdigit()} == exit_codes.MEANING.keys()


def test_the_timeline_is_a_picture_even_of_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timeline.draw([], {}, tmp_path / "empty.png")
    timeline.draw([{"gpu": "g", "node": "n", "app": "a", "from": 1.0, "to": 2.0}], {}, tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


#: What takes longer to import than a verb that only asks may take.
HEAVY = (
    *("aio_pika", "structlog", "sqlite3", "numba", "numpy", "pydantic", "rich", "importlib.metadata"),
    *("arbiter.daemon", "node_agent.daemon", "app_agent.core.host", "simulator"),
)


def loaded_by(*words: str, path: Path) -> set[str]:
    """Return the heavy modules, and the verbs' modules, that a command has imported at its end."""
    program = (
        "import atexit, sys; from launch import cli\n"
        f"heavy = {HEAVY}\n"
        "atexit.register(lambda: print(*(m for m in sys.modules if m in heavy or m.startswith('launch.verbs.'))))\n"
        f"sys.argv = {['gpu-arbiter', *words]}\n"
        "cli.main()"
    )
    environment = {"GPU_ARBITER_URL": f"unix://{path}/control.sock", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "Traceback" not in run.stderr
    return set(run.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("module", ["launch.site.up", "launch.demo", "launch.doctor"])
def test_what_needs_no_broker_loads_no_client_of_rabbitmq(module: str) -> None:
    line = [sys.executable, "-c", f"import sys, {module}; print({{'aio_pika', 'aiormq', 'pamqp'}} & {{*sys.modules}})"]
    assert subprocess.run(line, capture_output=True, text=True, check=True).stdout == "set()\n"


# A person types them all day long, and a script calls them in a loop: most of their time was spent on such imports.
@pytest.mark.parametrize(
    ("words", "module"),
    [
        (("ps", "--state", "running", "ada-1"), "inspection"),
        (("explain", "last"), "inspection"),
        (("logs", "-f", "--tail", "3", "last"), "inspection"),
        (("rounds", "--limit", "3"), "inspection"),
        (("events", "ada-1", "--since", "2h", "--tail", "3"), "events"),
        (("cancel", "ada-1", "ada-2", "--yes"), "acts"),
        (("wait", "ada-1", "--for", "running"), "submission"),
        (("submit", "--dry-run", "--json", "--", "true"), "submission"),
        (("sbatch", "--wrap", "true", "--export=A=1"), "sbatch submission"),
        (("submit", "-g", "1", "--steps", "3", "--env", "A=1", "--", "true"), "submission"),
    ],
)
def test_a_verb_that_only_asks_loads_its_own_module_and_nothing_heavy(
    words: tuple[str, ...], module: str, tmp_path: Path
) -> None:
    assert loaded_by(*words, path=tmp_path) == {f"launch.verbs.{each}" for each in module.split()}


def test_the_list_of_verbs_loads_none_of_them(tmp_path: Path) -> None:
    assert loaded_by("--help", path=tmp_path) == set()


def test_the_list_of_verbs_says_what_each_verb_says_of_itself() -> None:
    group = typer.main.get_command(cli.app)
    assert isinstance(group, Verbs)
    listed = {verb: registry.help_line(verb) for verb in registry.MODULE_OF}
    assert list(group.load_all()) == list(listed), "each module has the verbs that the table names"
    assert listed == {verb: (command.help or "").partition("\n")[0] for verb, command in group.commands.items()}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("rounds", "--limit", "0"), "Invalid value for '--limit'"),
        (("rounds", "--limit", "x"), "Invalid value for '--limit'"),
        (("wait", "a", "--for", "ever"), "Invalid value for '--for'"),
        (("explain",), "Missing argument 'ID'"),
        (("psx",), "Did you mean 'ps'?"),
    ],
)
def test_what_cannot_be_read_is_refused_as_ever(words: tuple[str, ...], sentence: str) -> None:
    result = CliRunner().invoke(cli.app, list(words))
    assert result.exit_code == exit_codes.USAGE
    assert sentence in result.stderr
