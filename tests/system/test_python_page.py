"""docs/python.md is one program: it runs, and prints what its comments say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from app_agent import control
from protocol import exit_codes
from tests.support.thread_site import thread_site

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
FILE = re.compile(r"# (\w+\.py)\n")
PRINTED = re.compile(r"^ *print\(.*\) *# (.+)$", re.MULTILINE)


def test_the_page_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    program = []
    for block in blocks:
        if found := FILE.match(block):
            (tmp_path / found[1]).write_text(block)
        else:
            program.append(block)
    (tmp_path / "page.py").write_text("\n".join(program))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with thread_site(tmp_path / "site") as site:
        environment = os.environ | {"GPU_ARBITER_URL": f"unix://{site.socket}", "PATH": path}
        done = subprocess.run(
            (sys.executable, "page.py"), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    said = PRINTED.findall("\n".join(program))
    assert done.stdout.splitlines() == said
    assert len(said) == "\n".join(program).count("print(") - 4, "all but those within commands"


def test_the_page_has_a_row_for_each_error() -> None:
    rows = dict(re.findall(r"^\| (\d+)[^|]*\| `(\w+)`", PAGE.read_text(), re.MULTILINE))
    assert rows == {str(code): kind.__name__ for code, kind in control.ERRORS.items()}
    assert control.ERRORS.keys() == exit_codes.MEANING.keys() - {exit_codes.DONE, exit_codes.WOULD_WAIT}
