"""The wheels of this repository, and environments into which nothing but a wheel and its dependencies is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.lock"
#: What Git does not follow; setuptools would take stale files out of them.
MADE = shutil.ignore_patterns(".*", "build", "out", "dist", "*.egg-info", "__pycache__")

#: What README's lines leave to the user.
GIVEN = """
import sys
total, trained, accuracy = 5, [], 1.0
train = trained.append
def load(folder): raise RuntimeError("there is no checkpoint")
def save(folder): raise RuntimeError("no GPU is taken away")
"""


def script_of_the_readme() -> str:
    """Return README's training script; it prints the steps that it trained."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (lines,) = [textwrap.dedent(block) for block in blocks if "from app_agent import session" in block]
    return f"{GIVEN}{lines}\nprint('trained', trained)\n"


def build(folder: Path, project: str = ".") -> Path:
    """Return the wheel of the `project` of this repository, built in `folder`; the repository stays as it is."""
    copy = folder / "source"
    shutil.copytree(ROOT, copy, ignore=MADE, dirs_exist_ok=True)
    out = folder / "wheels"
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, copy / project)
    (wheel,) = out.glob("*.whl")
    return wheel


def environment(folder: Path, *, with_pip: bool = True) -> Path:
    """Return the Python of a new environment in `folder`."""
    venv.create(folder, with_pip=with_pip, symlinks=True)
    return folder / "bin" / "python"


def install(python: Path, *wanted: str | Path) -> None:
    """Install into the environment of `python`, at the locked versions."""
    pip(python, "install", "--no-compile", "--constraint", LOCK, *wanted)


def pip_for(python: Path, *words: str | Path) -> None:
    """Run this environment's pip for that of `python`, which has none."""
    pip(sys.executable, "--python", python, *words)


def pip(python: str | Path, *words: str | Path) -> None:
    """Run pip, and show its complaints."""
    line: Sequence[str | Path] = (python, "-m", "pip", "--quiet", "--disable-pip-version-check", *words)
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=clean_environment())
    assert done.returncode == 0, done.stderr


def clean_environment() -> dict[str, str]:
    """Return this process's variables without those that lead to this environment's packages or to a site."""
    lead = ("GPU_ARBITER_", "PYTHONPATH", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(lead)}
