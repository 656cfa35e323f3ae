"""A new wish of a user takes one field of `Requirements`: nothing on its way to the policies names it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_new_wish_reaches_the_policy_from_a_flag_and_from_a_file_with_no_other_edit(tmp_path: Path) -> None:
    file = tmp_path / "app.toml"
    file.write_text('command = ["train"]\nerrand = 3\nmemory = "4G"\n')
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.new_wish", str(file)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[(3, 4), (7, 8)]\n"), done.stderr


def test_a_new_wish_is_checked_by_its_type_alone(tmp_path: Path) -> None:
    file = tmp_path / "app.toml"
    file.write_text('command = ["train"]\nerrand = -1\n')
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.new_wish", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "errand must be at least 0" in done.stderr
