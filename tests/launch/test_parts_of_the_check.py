"""What `make check` runs when: scripts/parts.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.cluster import until

SCRIPT = Path(__file__).parents[2] / "scripts" / "parts.py"
#: Two parts that end only if they run beside each other, one that takes its time, and one that fails at once.
MAKEFILE = """
first second later:
\t@echo $@ >> order
meets:
\t@touch there; n=0; until test -e met; do n=$$((n+1)); test $$n -lt 200 || exit 1; sleep 0.05; done; echo $@ >> order
met:
\t@n=0; until test -e there; do n=$$((n+1)); test $$n -lt 200 || exit 1; sleep 0.05; done; touch met
pauses:
\t@sleep 2; echo $@ >> order
fails:
\t@false
"""


def run(folder: Path, *groups: str) -> tuple[int, list[str], str]:
    """Run these groups; return the exit code, which parts said that they ran, and the table."""
    (folder / "Makefile").write_text(MAKEFILE)
    done = subprocess.run([sys.executable, SCRIPT, *groups], cwd=folder, capture_output=True, text=True, check=False)
    order = folder / "order"
    return done.returncode, order.read_text().split() if order.exists() else [], done.stdout


def test_parts_of_a_chain_come_one_after_the_other_beside_those_of_another_chain(tmp_path: Path) -> None:
    code, order, table = run(tmp_path, "meets,second+met", "later")
    assert (code, order) == (0, ["meets", "second", "later"])
    assert [line.split()[0] for line in table.splitlines()[-5:]] == ["meets", "met", "second", "later", "all"]


def test_parts_of_the_first_chain_print_at_once_and_an_interrupted_run_tells_what_the_others_have_said(
    tmp_path: Path,
) -> None:
    (tmp_path / "Makefile").write_text("says waits:\n\t@echo $@ here; touch $@; sleep 60\n")
    command = [sys.executable, SCRIPT, "says+waits"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "says here\n"
        until((tmp_path / "waits").exists, "the part aside has begun")
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stdout.read()
    assert "waits here\n" in rest.partition("processor s")[0]
    assert [line.split()[-2:] for line in rest.splitlines()[-3:-1]] == [["was", "stopped"]] * 2


def test_after_a_part_that_fails_no_other_begins_and_those_that_run_end(tmp_path: Path) -> None:
    code, order, table = run(tmp_path, "pauses,second+fails,first+later", "met")
    assert (code, order) == (1, ["pauses"])
    assert "failed (2)" in table
