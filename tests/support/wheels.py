"""The wheels of this repository, and environments into which nothing but a wheel and its dependencies is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

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


def script_of_the_readme(root: Path = ROOT) -> str:
    """Return the training script of the README in `root`; it prints the steps that it trained."""
    blocks = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
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


def clone(folder: Path) -> Path:
    """Return a fresh clone of this repository in `folder`, with the changes of the working tree."""
    made = folder / "gpu-arbiter"
    subprocess.run(["git", "clone", "--quiet", ROOT, made], check=True)
    changed = ["git", "ls-files", "-z", "--modified", "--others", "--exclude-standard"]
    for name in subprocess.run(changed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]:
        (made / name).unlink(missing_ok=True)
        if (ROOT / name).is_file():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, made / name)
    return made


def environment_beside(folder: Path) -> Path:
    """Return the Python of a new environment in `folder` that has the packages of this one, but not ours."""
    python = environment(folder)
    pip(python, "uninstall", "--yes", "setuptools")  # which Python before 3.12 puts there, an old one
    (site,) = folder.glob("lib/python*/site-packages")
    # Lines of .pth files that lie in there are not read, so our own packages are not found.
    (site / "beside.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python


def lend(python: Path, *names: str) -> None:
    """Put packages of this environment, and what they need, into that of `python`, as links; none else."""
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    waiting, known = [*names], set()
    while waiting:
        found = distribution(waiting.pop())
        if found.name in known:
            continue
        known.add(found.name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(found.locate_file(top))
        needs = map(Requirement, found.requires or ())
        waiting += [one.name for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})]


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
