"""The release is known where the program was installed, and where it was not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from protocol.release import PROGRAM, release

ROOT = Path(__file__).parents[2]


def test_an_installed_program_says_the_release_of_its_package() -> None:
    assert release() == version(PROGRAM)


def test_a_source_tree_that_was_never_installed_says_its_release(tmp_path: Path) -> None:
    (tmp_path / "protocol").mkdir()
    for name in ("protocol/__init__.py", "protocol/release.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    line = (
        f"import sys; sys.path = [{str(tmp_path)!r}, *sys.path]; from protocol.release import release; print(release())"
    )
    # No packages of this environment, so no metadata of ours either.
    told = subprocess.run([sys.executable, "-I", "-S", "-c", line], capture_output=True, text=True, check=False)
    assert told.stdout.strip() == version(PROGRAM), told.stderr


def test_nothing_else_asks_the_metadata_that_a_source_tree_lacks() -> None:
    rooms = ("app_agent", "arbiter", "launch", "node_agent", "protocol", "simulator", "valuation")
    modules = (path for room in rooms for path in (ROOT / room).rglob("*.py"))
    asking = [
        path.name for path in modules if re.search(r"version\(\"gpu-arbiter\"\)|version\(PROGRAM\)", path.read_text())
    ]
    assert asking == ["release.py"]
