"""The wheel alone, in an environment without torch and without test tools, gives a command that works."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from email import message_from_string
from pathlib import Path

import pytest

from tests.support import wheels
from tests.support.patience import PATIENCE_S

#: They share one environment.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
#: Keeps a program from its end until a user has looked at it.
NAMES = ("launch", "protocol", "simulator", "arbiter")


@dataclass(frozen=True)
class Program:
    """The installed command, with the folder and the variables of its user."""

    path: Path
    folder: Path
    env: dict[str, str]

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run one command to its end."""
        line = [self.path, *words]
        return subprocess.run(
            line, cwd=self.folder, env=self.env, capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start one command."""
        return subprocess.Popen([self.path, *words], cwd=self.folder, env=self.env, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheels.build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel."""
    python = wheels.environment(tmp_path_factory.mktemp("installed"))
    wheels.install(python, wheel)
    return python


@pytest.fixture(scope="module")
def program(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Run the installed command in a folder where a user has modules that are named as our packages."""
    return program_of(python, tmp_path_factory.mktemp("user"))


def program_of(python: Path, folder: Path) -> Program:
    """The command in the environment of `python`, for a user with modules that are named as our packages."""
    home, project = folder / "home", folder / "project"
    home.mkdir()
    project.mkdir()
    for name in NAMES:
        (project / f"{name}.py").write_text("raise RuntimeError('this is the user\\'s own')\n")
    env = wheels.clean_environment() | {"HOME": str(home), "GPU_ARBITER_URL": f"unix://{home}/control.sock"}
    env |= {"PYTHONPATH": str(project), "NUMBA_CACHE_DIR": str(home / "loops")}
    return Program(python.with_name("gpu-arbiter"), project, env)


@pytest.fixture(scope="module")
def site(program: Program) -> Iterator[Program]:
    """The command beside a site that is up."""
    with program.start("up", "--fresh", "--gpus", "simulated:2", "--policy", "fifo") as process:
        assert process.stderr is not None
        told = process.stderr.readline()
        assert "gpu-arbiter is up: 1 node, 2 GPUs" in told, told + process.stderr.read()
        yield program
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0


def test_units_examples_scripts_and_their_data_are_in_it(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    followed = subprocess.run(
        ["git", "ls-files", "launch", "simulator", "app_agent"],
        cwd=wheels.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(followed.stdout.split()) - held == set()


def test_it_depends_on_no_test_tool_and_not_on_torch(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    wanted = message_from_string(archive.read(name).decode()).get_all("Requires-Dist", [])
    always = {re.split(r"[^\w.-]", line)[0] for line in wanted if "extra ==" not in line}
    assert "msgspec" in always
    unwanted = {"hypothesis", "joblib", "matplotlib", "mypy", "pytest", "ruff", "scikit-learn", "setuptools", "torch"}
    assert always & unwanted == set()


@pytest.mark.full
def test_a_program_runs_on_it(site: Program, python: Path) -> None:
    done = site("run", "--", str(python), "-c", "print(42)")
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


@pytest.mark.full
def test_an_app_is_queued_and_listed(site: Program, python: Path) -> None:
    submitted = site("submit", "--", str(python), "-c", "pass")
    assert (submitted.returncode, submitted.stderr) == (0, "")
    listed = site("ps", "-a", "--json")
    assert submitted.stdout.strip() in [app["id"] for app in json.loads(listed.stdout)["apps"]]


@pytest.mark.full
def test_doctor_finds_the_site_and_tells_which_extra_the_demo_needs(site: Program) -> None:
    checks = {check["name"]: check for check in json.loads(site("doctor", "--json").stdout)["checks"]}
    assert checks["arbiter"]["verdict"] == "ok"
    assert (checks["torch"]["verdict"], "gpu-arbiter[demo]" in checks["torch"]["mend"]) == ("note", True)


def test_a_trace_is_simulated(program: Program) -> None:
    done = program("simulate", "themis:1?apps=3&scale=0.05", "--cluster", "themis-64", "--policy", "fifo", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"].startswith("simulat")


def test_the_files_of_a_site_are_written(program: Program, tmp_path: Path) -> None:
    written = program("init", str(tmp_path), "--nodes", "n1,n2", "--owner", "alice")
    assert (written.returncode, len(written.stdout.split())) == (0, 4), written.stderr
    units = program("units", "--to", str(tmp_path / "units"))
    assert units.returncode == 0, units.stderr
    assert f"ExecStart={program.path} arbiter" in (tmp_path / "units" / "gpu-arbiter.service").read_text()


def test_the_first_hour_of_the_readme_goes_as_it_says(program: Program, tmp_path: Path) -> None:
    # The other one compiles the auction's loops, as users do; here half a minute of that would lie beside all commands.
    first_hour(replace(program, env=program.env | {"NUMBA_DISABLE_JIT": "1"}), wheels.ROOT, tmp_path)


@pytest.mark.full
def test_the_first_hour_goes_as_the_readme_says_from_a_fresh_clone(tmp_path: Path) -> None:
    clone = wheels.clone(tmp_path)
    page = (clone / "README.md").read_text()
    install = page[page.index("## Install") : page.index("## The first hour")]
    (line,) = re.findall(r"^pip install \.", install, re.MULTILINE)
    python = wheels.environment_beside(tmp_path / "environment")
    env = wheels.clean_environment() | {"PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    env["PATH"] = f"{python.parent}{os.pathsep}{env['PATH']}"
    done = subprocess.run(line, shell=True, cwd=clone, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(clone / "launch")  # what is installed stands by itself
    first_hour(program_of(python, tmp_path), clone, tmp_path)


def first_hour(program: Program, root: Path, folder: Path) -> None:
    """Type what the README in `root` says, on a site with its state in `folder`."""
    page = (root / "README.md").read_text()
    hour = page[page.index("## The first hour") : page.index("## Before you switch")]
    (program.folder / "train.py").write_text(wheels.script_of_the_readme(root))
    blocks = re.findall(r"```\n(.*?)```", hour, re.DOTALL)
    commands = [line.strip() for block in blocks for line in block.splitlines() if line.strip()]
    assert [line.split()[1] for line in commands] == ["up", "submit", "ps", "explain", "nodes", "logs"]
    env = program.env | {
        "PATH": f"{program.path.parent}{os.pathsep}{program.env['PATH']}",
        "GPU_ARBITER_URL": f"unix://{folder}/control.sock",
        "XDG_STATE_HOME": str(folder / "state"),
    }
    shell = {"shell": True, "cwd": program.folder, "env": env, "text": True}
    with subprocess.Popen(f"exec {commands[0]}", stderr=subprocess.PIPE, **shell) as site:  # type: ignore[call-overload]
        assert "gpu-arbiter is up: 1 node, 4 GPUs" in (told := site.stderr.readline()), told + site.stderr.read()
        done = [
            subprocess.run(line, capture_output=True, check=False, **shell)  # type: ignore[call-overload]
            for line in commands[1:]
        ]
        trained = subprocess.run(  # type: ignore[call-overload]
            "gpu-arbiter run -- python train.py", capture_output=True, check=False, **shell
        )
        site.send_signal(signal.SIGINT)
        assert site.wait(PATIENCE_S) == 0
    assert [each.returncode for each in done] == [0] * 5, done
    app = done[0].stdout.strip()
    assert re.fullmatch(r"me-[a-z]{3}1", app)
    assert app in done[1].stdout
    assert re.fullmatch(r"GPU-sim-\S+-\d,GPU-sim-\S+-\d", done[-1].stdout.splitlines()[-1])
    assert trained.stdout.splitlines()[-1] == "trained [0, 1, 2, 3, 4]", trained


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("demo",), "gpu-arbiter[demo]"),
        (
            ("sweep", "themis:1?apps=3", "--cluster", "4x4", "--policies", "fifo,las", "--jobs", "2"),
            "gpu-arbiter[sweep]",
        ),
    ],
)
def test_a_command_that_needs_an_extra_names_it(program: Program, words: tuple[str, ...], extra: str) -> None:
    done = program(*words)
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (2, "", False)
    assert extra in done.stderr
