"""`gpu-arbiter auction solve`, as a user types it: one answer on stdout, one sentence for what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from msgspec.structs import replace
from typer.testing import CliRunner

from arbiter.core.policies.themis.auction import compiled, instance
from launch import cli, surface
from launch.verbs import auction
from protocol import exit_codes
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "auction.json"


@pytest.fixture(autouse=True)
def _no_wish_for_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPU_ARBITER_OUTPUT", raising=False)


def run(*words: str | Path, stdin: bytes | None = None) -> Result:
    result = CliRunner().invoke(cli.app, ["auction", "solve", *map(str, words)], input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def solved(*words: str | Path, stdin: bytes | None = None) -> dict[str, Any]:
    result = run(*words, "--json", stdin=stdin)
    assert result.exit_code == exit_codes.DONE
    assert result.stdout.count("\n") == 1
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def timeless(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in {"solve_ms", "total_ms"}}


# --- answers --------------------------------------------------------------------------------------------------------


def test_json_is_one_result_of_the_example_and_nothing_else() -> None:
    document = solved(EXAMPLE)
    assert document["schema"] == "auction-result/v1"
    assert document["proven"] is True
    assert document["gap"] == pytest.approx(0.0, abs=1e-9)
    assert document["sum_log_v"] == pytest.approx(sum(document["log_v"].values()))
    assert 0.0 < document["solve_ms"] <= document["total_ms"]
    free = {machine["id"]: machine["free"] for machine in json.loads(EXAMPLE.read_bytes())["machines"]}
    for machine, gpus in free.items():
        assert sum(won.get(machine, 0) for won in document["allocation"].values()) <= gpus
        kept = sum(grant.get(machine, 0) for grant in document["grants"].values())
        assert kept + document["leftover"].get(machine, 0) == gpus


def test_stdin_gives_what_the_file_gives_and_the_same_seed_the_same() -> None:
    document = timeless(solved(EXAMPLE, "--seed", "3"))
    assert timeless(solved("-", "--seed", "3", stdin=EXAMPLE.read_bytes())) == document
    lots = [timeless(solved(EXAMPLE, "--seed", str(seed)))["grants"] for seed in range(8)]
    assert any(lot != lots[0] for lot in lots)


def test_without_json_there_is_a_line_per_app_and_one_about_the_whole() -> None:
    document, result = solved(EXAMPLE), run(EXAMPLE)
    header, *rows, blank, summary = result.stdout.splitlines()
    assert header.split() == ["APP", "WON", "KEPT", "LOG", "V", "RHO", "C"]
    assert [row.split()[0] for row in rows] == list(document["allocation"])
    assert blank == ""
    assert f"sum of log V {document['sum_log_v']:.4f}, proven optimal; solved in " in summary
    assert f"; left over: {auction.counts(document['leftover'])}" in summary
    bob = next(row for row in rows if row.startswith("bob-1"))
    assert auction.counts(document["allocation"]["bob-1"]) in bob
    assert f"{document['log_v']['bob-1']:.4f}" in bob
    assert bob.endswith(f"{document['c']['bob-1']:.3f}")


def test_the_environment_can_ask_for_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_ARBITER_OUTPUT", "json")
    assert json.loads(run(EXAMPLE).stdout)["schema"] == "auction-result/v1"


def test_a_budget_too_small_for_anything_still_gives_an_answer_and_a_bound() -> None:
    result = run(EXAMPLE, "--budget-ms", "1e-9", "--json")
    assert result.exit_code == exit_codes.DONE
    assert "Infinity" not in result.stdout
    answer = json.loads(result.stdout)
    assert answer["proven"] is False
    assert answer["gap"] == pytest.approx(answer["upper_bound"] - answer["sum_log_v"], abs=1e-9)
    assert "proven optimal" not in run(EXAMPLE, "--budget-ms", "1e-9").stdout
    found = instance.solve(instance.parse(EXAMPLE.read_bytes()))
    assert "gap 0.01, not all proven" in auction.view(replace(found, gap=0.01, proven=False))


def test_an_auction_of_nothing_has_an_empty_table() -> None:
    nothing = {"schema": "themis-auction-1", "lease": 600, "machines": [], "apps": []}
    result = run("-", stdin=json.dumps(nothing).encode())
    assert result.stdout.startswith("APP  WON  KEPT  LOG V  RHO  C\n\nsum of log V 0.0000, proven optimal")


def test_many_machines_are_summed_up() -> None:
    assert auction.counts({}) == "-"
    assert auction.counts({"b": 1, "a": 2}) == "a:2 b:1"
    assert auction.counts({f"m{index}": index for index in range(1, 9)}).endswith("m5:5 m6:6 and 15 on 2 more nodes")


# --- what is wrong --------------------------------------------------------------------------------------------------


def refused(*words: str | Path, stdin: bytes | None = None) -> str:
    """Return the sentence; with `--json` it is on stdout too, as everywhere, and without nothing is."""
    result = run(*words, stdin=stdin)
    assert result.exit_code == exit_codes.USAGE
    assert result.stdout == ""
    sentence, next_step = result.stderr.splitlines()
    assert next_step.startswith("next: ")
    as_json = run(*words, "--json", stdin=stdin)
    document = json.loads(as_json.stdout)
    assert (as_json.exit_code, document["schema"], document["code"]) == (exit_codes.USAGE, "error/v1", exit_codes.USAGE)
    assert sentence == f"gpu-arbiter: {document['error']}"
    return sentence.removeprefix("gpu-arbiter: ")


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"gang": 4', '"gangs": 4', "stdin: apps[2].gangs: there is no such field"),
        ('"t_id": 9000, ', "", "stdin: apps[0].t_id is missing"),
        ('"rack": 1.05', '"rack": 0.5', "stdin: apps[2].slowdown.rack: "),
        ('"lease": 600', '"lease": NaN', "stdin: lease has a value that cannot be used"),
        ('"free": 2}', '"free": 3}', "stdin: machines[3].free: 3 of 2 GPUs"),
        ('"oslo-1": 1', '"oslo-9": 1', "stdin: apps[3].held: there is no machine oslo-9"),
        ('"id": "bob-2"', '"id": "bob-1"', "stdin: apps[3].id: bob-1 is there twice"),
        ("themis-auction-1", "themis-auction-2", "stdin: schema has a value that cannot be used"),
        ('"machines": [', '"machines": ', "stdin: the file cannot be read as JSON"),
        ('"lease"', '"\\ud800"', "stdin: the file cannot be read as JSON"),
    ],
)
def test_a_wrong_field_is_named(old: str, new: str, sentence: str) -> None:
    text = EXAMPLE.read_text()
    assert text.count(old) == 1
    assert refused("-", stdin=text.replace(old, new).encode()).startswith(sentence)


def test_what_cannot_be_read_is_said_with_its_name(tmp_path: Path) -> None:
    assert refused(tmp_path / "none.json") == f"{tmp_path}/none.json cannot be read: No such file or directory"
    assert refused(tmp_path) == f"{tmp_path} cannot be read: Is a directory"
    (tmp_path / "empty.json").touch()
    assert refused(tmp_path / "empty.json").startswith(f"{tmp_path}/empty.json: the file is empty; ")
    assert refused("/dev/zero").startswith("/dev/zero: the file has more than 32 MiB; ")


@pytest.mark.parametrize("budget", ["0", "-1", "nan", "inf"])
def test_a_budget_must_be_more_than_nothing(budget: str) -> None:
    assert refused(EXAMPLE, f"--budget-ms={budget}").startswith(f"--budget-ms is {float(budget):g}")


@pytest.mark.parametrize("words", [(), (EXAMPLE, "--budget-ms", "soon"), (EXAMPLE, "--seed", "-1"), (EXAMPLE, "--jsn")])
def test_wrong_usage_says_nothing_on_stdout(words: tuple[str | Path, ...]) -> None:
    result = run(*words)
    assert (result.exit_code, result.stdout) == (exit_codes.USAGE, "")


# --- preparing ------------------------------------------------------------------------------------------------------


def test_who_has_to_wait_for_the_compiler_is_told_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COMPILED", True)
    monkeypatch.setattr(instance, "warm_up", lambda: None)
    assert run(EXAMPLE, "--json").stderr == ""
    told = threading.Event()
    monkeypatch.setattr(auction, "PATIENCE_S", 0.0)
    monkeypatch.setattr(auction, "note", lambda sentence: (surface.note(sentence), told.set()))
    monkeypatch.setattr(instance, "warm_up", lambda: told.wait(60.0))
    assert run(EXAMPLE, "--json").stderr == "compiling the solver, once\n"


def test_without_numba_this_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COMPILED", False)
    result = run(EXAMPLE, "--json")
    assert json.loads(result.stdout)["proven"] is True
    assert result.stderr.count("numba is not installed") == 1
    assert result.stderr.count("\n") == 1


# --- the program ----------------------------------------------------------------------------------------------------


def program(*words: str, stdin: bytes | None = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "launch.cli", "auction", "solve", *words]
    return subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, check=False, timeout=PATIENCE_S)


def test_the_program_itself_answers_and_refuses_without_a_traceback() -> None:
    done = program("examples/auction.json", "--json")
    assert (done.returncode, json.loads(done.stdout)["schema"]) == (exit_codes.DONE, "auction-result/v1")
    refusal = program("-", stdin=b"{}")
    assert (refusal.returncode, refusal.stdout) == (exit_codes.USAGE, b"")
    assert refusal.stderr.startswith(b"gpu-arbiter: stdin: schema is missing; ")


def test_the_documentation_describes_every_field() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    section = text[text.index("## Auctions") :].split("\n## ")[0]
    example = json.loads(EXAMPLE.read_bytes())
    inputs = {*example, *example["machines"][0], *example["apps"][0], *example["apps"][0]["slowdown"]}
    for field in inputs | instance.Result.__annotations__.keys():
        assert f"`{field}`" in section
