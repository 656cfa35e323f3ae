"""`init` writes files with which the daemons start, and `units` units that start this installation."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

import app_agent.config
import arbiter.config
import node_agent.config
from launch import cli
from launch.site import shipped

ROOT = Path(__file__).parents[2]
FILES = ["app-bob.toml", "arbiter.toml", "node-gpu-host-17.toml", "node-n2.toml"]


def run(*words: str | Path, code: int = 0) -> tuple[str, str]:
    """Run one command; return its stdout and its stderr."""
    done = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done.stdout, done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where `init` has written a site of two nodes."""
    folder = tmp_path / "new" / "site"
    run("init", folder, "--nodes", "gpu-host-17,n2", "--owner", "bob")
    return folder


def test_the_files_of_a_site_are_written_and_the_next_three_commands_told(tmp_path: Path) -> None:
    told, noted = run("init", tmp_path, "--nodes", "gpu-host-17,n2", "--owner", "bob")
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert sorted(told.split()) == [str(tmp_path / name) for name in FILES]
    assert [line.split()[1:3] for line in noted.splitlines()] == [
        ["gpu-arbiter", "provision"],
        ["gpu-arbiter", "units"],
        ["systemctl", "enable"],
    ]
    again = tmp_path / "again"
    document = json.loads(run("init", again, "--nodes", "gpu-host-17,n2", "--owner", "bob", "--json")[0])
    assert document["schema"] == "init/v1"
    assert (sorted(document["files"]), document["kept"]) == ([str(again / name) for name in FILES], [])
    assert len(document["next"]) == 3


def test_a_site_that_is_there_gets_the_files_that_it_lacks_and_keeps_the_others_as_they_are(folder: Path) -> None:
    edited = folder / "arbiter.toml"
    edited.write_text("# ours\n" + edited.read_text())
    before = {path: path.read_text() for path in folder.iterdir()}
    told, noted = run("init", folder, "--nodes", "n2,n3")
    assert told.split() == [str(folder / "node-n3.toml")], "no app agent of alice, as bob has one"
    assert noted.startswith(f"kept as they are: {edited}, {folder / 'node-n2.toml'}\n")
    assert "each participant: node-n3\n" in noted
    assert {path: path.read_text() for path in before} == before
    told, noted = run("init", folder, "--nodes", "n2")
    assert (told, len(noted.splitlines())) == ("", 1), "nothing is left to do"


def test_each_file_is_read_by_its_daemon(folder: Path) -> None:
    assert arbiter.config.load(folder / "arbiter.toml").arbiter.policy == "themis"
    nodes = [node_agent.config.load(folder / f"node-{name}.toml").node for name in ("gpu-host-17", "n2")]
    assert nodes == ["gpu-host-17", "n2"]
    agent = app_agent.config.load(folder / "app-bob.toml")
    assert (agent.owner, agent.state_dir) == ("bob", "/var/lib/gpu-arbiter-app/bob")


def test_but_for_the_names_and_spaces_the_files_are_the_shipped_examples(folder: Path) -> None:
    def words(path: Path) -> list[str]:
        return path.read_text().split()

    examples = {"arbiter": ("", ""), "node-gpu-host-17": ("gpu-host-17", "n1"), "app-bob": ("bob", "alice")}
    for name, (given, example) in examples.items():
        shipped_file = shipped.FOLDER / f"{name.split('-')[0]}.toml"
        there = words(folder / f"{name}.toml")
        assert there == [word.replace(example, given) if example else word for word in words(shipped_file)]
        changed = {
            field
            for field, value in tomllib.loads((folder / f"{name}.toml").read_text()).items()
            if value != tomllib.loads(shipped_file.read_text())[field]
        }
        assert (
            changed
            == {"arbiter": set(), "node": {"node"}, "app": {"owner", "bus_file", "state_dir", "socket"}}[
                name.split("-")[0]
            ]
        )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--nodes", "n1,N2"), "--nodes: 'N2' is no id"),
        (("--nodes", ""), "--nodes: '' is no id"),
        (("--nodes", "n1,n1"), "--nodes has n1 twice"),
        (("--owner", 'a"\n'), "--owner: 'a\"\\n' is no id"),
    ],
)
def test_a_name_that_no_participant_can_have_is_refused(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    _, noted = run("init", tmp_path, *words, code=2)
    assert says in noted
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named() -> None:
    assert "/proc/site cannot be written" in run("init", "/proc/site", code=1)[1]


def test_units_start_the_program_of_this_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "bin" / "python"))
    assert "which the units would start" in run("units", "--to", tmp_path / "units", code=1)[1]
    program = tmp_path / "env" / "bin" / "gpu-arbiter"
    program.parent.mkdir(parents=True)
    program.touch()
    told, _ = run("units", "--to", tmp_path / "units")
    assert len(told.split()) == len(shipped.units())
    for path in map(Path, told.split()):
        (start,) = [line for line in path.read_text().splitlines() if line.startswith("ExecStart=")]
        assert start.startswith(f"ExecStart={program} ")
        assert (shipped.FOLDER / path.name).read_text() == path.read_text().replace(str(program), shipped.PROGRAM)


def test_without_a_folder_units_tells_where_they_are() -> None:
    told = run("units")[0].split()
    assert [Path(path).suffix for path in told] == [".service"] * len(shipped.units())
    assert all(Path(path).is_file() for path in told)


def test_a_program_that_the_units_hide_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.verbs.installation.HIDDEN", (str(tmp_path),))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "gpu-arbiter").touch()
    assert "make its environment in /opt" in run("units", "--to", tmp_path / "units")[1]


def test_the_page_on_uninstalling_removes_every_file_that_a_site_has_on_a_host(tmp_path: Path) -> None:
    site, root = tmp_path / "site", tmp_path / "root"
    run("init", site, "--nodes", "n1", "--owner", "alice")
    for path in (*site.iterdir(), *map(Path, run("units")[0].split())):
        text = path.read_text()
        for name in re.findall(r"/(?:etc|opt)/gpu-arbiter/[\w./%@-]+", text):
            _make(root / name.replace("%i", "alice").lstrip("/"))
        for kind, folder in (("State", "var/lib"), ("Runtime", "run")):
            for name in re.findall(rf"^{kind}Directory=(.+)$", text, re.MULTILINE):
                _make(root / folder / name.replace("%i", "alice") / "file")
        for name in re.findall(r"\"(/(?:var/lib|run)/gpu-arbiter[\w./@-]*)\"", text):
            _make(root / name.lstrip("/") / "file")
    for name in shipped.units():
        instance = name.replace("@.", "@alice.")
        for path in (name, f"{instance}.d/override.conf", f"multi-user.target.wants/{instance}"):
            _make(root / "etc/systemd/system" / path)
    _make(root / "etc/systemd/system/other.service")
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    block = page[page.index("## Uninstalling") : page.index("## Permissions")]
    lines = [line for line in block.splitlines() if line.startswith("rm ")]
    assert lines
    for line in lines:
        assert all(word.startswith(("/", "-rf")) for word in line.split()[1:]), "each path goes below the test's folder"
        subprocess.run(line.replace(" /", f" {root}/"), shell=True, check=True)
    left = [path for path in root.rglob("*") if path.is_file()]
    assert left == [root / "etc/systemd/system/other.service"]


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_dir():
        path.touch()


def test_the_debian_package_is_built_from_the_locked_versions_each_with_a_hash() -> None:
    """Its extras are those that the Makefile names; pip refuses a requirement that has no hash."""
    extras = re.findall(r"^DEB_EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
    hashed = re.findall(
        r"^([a-z0-9-]+)==(\S+)(.*(?:\n    --hash=sha256:[0-9a-f]{64}.*)+)$",
        (ROOT / "packaging/deb/requirements.lock").read_text(),
        re.MULTILINE,
    )
    named = {name: version for name, version, _hashes in hashed}
    lines = (ROOT / "packaging/deb/requirements.lock").read_text().splitlines()
    assert len(hashed) == sum("==" in line and not line.startswith((" ", "#")) for line in lines), "one has no hash"
    locked = dict(re.findall(r"^([^#=\s]+)==(\S+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    locked = {canonicalize_name(name): version for name, version in locked.items()}
    elsewhere = {"colorama", "tzdata"}  # for Windows
    assert {name: locked[name] for name in named if name not in elsewhere} == {
        name: version for name, version in named.items() if name not in elsewhere
    }
    for line in requires("gpu-arbiter") or ():
        needed = Requirement(line)
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
            assert canonicalize_name(needed.name) in named
