"""`gpu-arbiter-session` alone makes README's training script run by hand, in an environment that has nothing else."""

from __future__ import annotations

import subprocess
import textwrap
import tomllib
import zipfile
from email import message_from_string
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import wheels

#: They share one wheel.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheels.build(tmp_path_factory.mktemp("built"), "packaging/session")


def test_it_needs_nothing_and_has_the_training_side_only(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    told = message_from_string(archive.read(name).decode())
    main = tomllib.loads((wheels.ROOT / "pyproject.toml").read_text())["project"]
    assert (told["Name"], told["Version"], told["License-Expression"]) == (
        "gpu-arbiter-session",
        main["version"],
        main["license"],
    )
    assert told.get_all("Requires-Dist") is None
    modules = {path for path in archive.namelist() if not path.startswith("gpu_arbiter_session-")}
    folders = ("app_agent/training", "app_agent/integrations")
    there = {str(path.relative_to(wheels.ROOT)) for each in folders for path in (wheels.ROOT / each).glob("*.py")}
    assert modules == there | {"app_agent/__init__.py", "app_agent/session.py"}


def test_the_script_of_the_readme_runs_by_hand(wheel: Path, tmp_path: Path) -> None:
    python = wheels.environment(tmp_path / "bare", with_pip=False)
    wheels.pip_for(python, "install", "--no-index", wheel)
    script = tmp_path / "train.py"
    script.write_text(wheels.script_of_the_readme())
    done = subprocess.run(
        [python, "-W", "error", script], env=wheels.clean_environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "trained [0, 1, 2, 3, 4]\n"), done.stderr


@pytest.mark.skipif(find_spec("submitit") is None, reason="submitit missing: pip install 'gpu-arbiter[submitit]'")
def test_beside_submitit_it_is_the_plugin_of_jobs_and_says_what_submitting_needs(wheel: Path, tmp_path: Path) -> None:
    python = wheels.environment(tmp_path / "bare", with_pip=False)
    wheels.pip_for(python, "install", "--no-index", wheel)
    (site,) = (tmp_path / "bare" / "lib").glob("python*/site-packages")
    for name in ("submitit", "cloudpickle", "typing_extensions"):
        origin = Path(find_spec(name).origin)  # type: ignore[union-attr, arg-type]
        origin = origin.parent if origin.name == "__init__.py" else origin
        (site / origin.name).symlink_to(origin)
    program = """
        import submitit
        from submitit.core import plugins
        assert "gpuarbiter" in plugins.get_job_environments()
        assert submitit.AutoExecutor(folder="log").cluster == "local"
        try:
            submitit.AutoExecutor(folder="log", cluster="gpuarbiter")
        except RuntimeError as error:
            print(error)
        """
    line, env = [python, "-W", "error", "-c", textwrap.dedent(program)], wheels.clean_environment()
    done = subprocess.run(line, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "app_agent.client is missing here; pip install gpu-arbiter" in done.stdout
