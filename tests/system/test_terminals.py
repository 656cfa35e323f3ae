"""`run --pty` and `attach` as a person uses them: in a real terminal, on a running site."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol import exit_codes
from tests.support.patience import PATIENCE_S
from tests.support.screen import WHY_NOT, Screen, screen
from tests.support.up_site import PROGRAM, running_up

pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT), pytest.mark.full]

GA = " ".join(PROGRAM)
#: A shell on the node, whose prompt is ``there:``.
SHELL = "env 'PS1=there: ' bash --norc --noprofile"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("terminals")
    own = {name: value for name, value in os.environ.items() if not name.startswith(("GPU_ARBITER_", "TMUX"))}
    return own | {"GPU_ARBITER_URL": f"unix://{folder}/control.sock", "HOME": str(folder), "TERM": "xterm"}


@pytest.fixture(scope="module")
def site(environment: dict[str, str]) -> Iterator[None]:
    with running_up(environment):
        yield


@pytest.fixture
def window(site: None, environment: dict[str, str], tmp_path: Path) -> Iterator[Screen]:
    with screen(environment, str(tmp_path)) as made:
        yield made


def ask(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *words], env=environment, capture_output=True, text=True, check=False)


def begin(window: Screen, *flags: str, command: str = SHELL) -> str:
    """Start a shell on the node; return its app."""
    window.type(f"{GA} run {' '.join(flags)} --pty -- {command}; echo code $?", "Enter")
    app = window.wait(r"^(\S+) is queued; its terminal follows")[1]
    window.wait(r"^there:")
    return app


def leave(window: Screen) -> None:
    window.type("Enter", "~.")
    window.wait(r"^you have left")


def test_a_shell_on_the_node_edits_lines_hears_ctrl_c_knows_the_window_and_tells_its_code(
    window: Screen, tmp_path: Path
) -> None:
    window.type(f"stty -g > {tmp_path}/before", "Enter")
    begin(window)
    window.type("echo $CUDA_VISIBLE_DEVICES; tty; stty size", "Enter")
    window.wait(r"^GPU-sim-n1-\d+\n/dev/pts/\d+\n30 100$")
    window.resize(90, 20)
    window.type("stty size", "Enter")
    window.wait(r"^20 90$")
    window.type("echo wrog", "Left", "n", "Enter")  # within the line
    window.wait(r"^wrong$")
    window.type("sleep 1000", "Enter")
    window.wait(r"sleep 1000$")
    window.type("C-c")
    window.wait(r"\^C")
    window.type("echo after $?", "Enter")
    window.wait(r"^after 130$")
    window.type("exit 7", "Enter")
    window.wait(r"^code 7$")
    window.type(f"stty -g > {tmp_path}/after", "Enter", "echo compared", "Enter")
    window.wait(r"^compared$")
    assert (tmp_path / "before").read_text() == (tmp_path / "after").read_text()


def test_a_person_leaves_a_shell_comes_back_from_another_terminal_and_the_newest_has_it(
    window: Screen, environment: dict[str, str], tmp_path: Path
) -> None:
    app = begin(window)
    window.type("KEPT=kept", "Enter", "echo is $KEPT", "Enter")
    window.wait(r"^is kept$")
    leave(window)
    window.wait(r"^code 0$")
    assert app in ask(environment, "ps").stdout, "the shell goes on"
    with screen(environment, str(tmp_path), 80, 25) as other:
        window.type("clear", "Enter", f"{GA} attach {app}", "Enter")
        # What was there is shown again, below the command and not above it.
        window.wait(rf"attach {app}\n(?:.*\n)*there: echo is \$KEPT\nis kept\nthere:")
        other.type(f"{GA} attach last", "Enter")
        other.wait(r"^there:")
        window.wait(r"^another command of yours has the terminal")
        other.type("echo still $KEPT; stty size", "Enter")
        other.wait(r"^still kept\n25 80$")
        other.type("exit", "Enter")
        other.wait(r"^here\$", count=2)
    assert json.loads(ask(environment, "wait", app, "--json").stdout)["apps"] == [{"id": app, "code": 0}]


def test_a_shell_without_use_is_warned_and_gives_its_gpu_back(window: Screen, environment: dict[str, str]) -> None:
    app = begin(window, "--idle", "10s")
    window.type("echo begun", "Enter")
    window.wait(r"^\[this terminal is unused; in \d seconds? its GPUs go back, unless a key is pressed\]")
    window.type("Enter")  # a key
    window.wait(r"^\[this terminal is unused", count=2)
    window.wait(rf"^{app} finished: for 10 seconds nothing was typed or shown and no GPU of it worked")
    window.wait(r"^code 0$")
    by = time.monotonic() + PATIENCE_S
    while app in holders(environment):
        assert time.monotonic() < by
        time.sleep(0.2)


def holders(environment: dict[str, str]) -> list[str]:
    nodes = json.loads(ask(environment, "nodes", "--json").stdout)["nodes"]
    return [gpu["app"] for node in nodes for gpu in node["gpus"]]


def test_a_terminal_is_put_back_when_the_command_is_ended_in_the_middle(
    window: Screen, environment: dict[str, str], tmp_path: Path
) -> None:
    window.type(f"stty -g > {tmp_path}/before", "Enter")
    app = begin(window)
    window.type("printf '\\033[?1049h\\033[?25lfull'", "Enter")  # as an editor does
    window.wait(r"full")
    os.kill(int(subprocess.run(["pgrep", "-P", pane(window)], capture_output=True, check=True).stdout), signal.SIGTERM)
    window.wait(r"^code 143$")
    assert window.do("display-message", "-p", "#{alternate_on} #{cursor_flag}").strip() == "0 1"
    window.type(f"stty -g > {tmp_path}/after", "Enter", "echo compared", "Enter")
    window.wait(r"^compared$")
    assert (tmp_path / "before").read_text() == (tmp_path / "after").read_text()
    ask(environment, "cancel", app)


def pane(window: Screen) -> str:
    return window.do("display-message", "-p", "#{pane_pid}").strip()


def test_a_shell_that_had_to_leave_begins_anew_in_the_same_window(window: Screen, environment: dict[str, str]) -> None:
    app = begin(window)
    window.type("echo first $((6*7)) $KEPT; KEPT=kept", "Enter")
    window.wait(r"^first 42")
    assert ask(environment, "requeue", "--force", app).returncode == 0
    window.wait(rf"^{app} had to leave its GPUs: requeued by its owner; it waits to begin anew")
    window.type("echo kept:$KEPT:", "Enter")
    window.wait(r"^kept::$")
    window.type("exit", "Enter")
    window.wait(r"^code 0$")


def test_a_flood_of_output_is_held_back_and_ctrl_c_comes_through(window: Screen, environment: dict[str, str]) -> None:
    app = begin(window)
    window.type("yes", "Enter")
    window.wait(r"^y$", count=200)
    window.type("C-c")
    window.wait(r"\^C")
    window.type("echo after $?", "Enter")
    window.wait(r"^after 130$")
    assert ask(environment, "cancel", app).returncode == 0
    window.wait(r"^code 130$")  # an interactive shell would take no notice of SIGTERM


def test_what_is_no_terminal_is_refused_before_anything_is_submitted(site: None, environment: dict[str, str]) -> None:
    done = ask(environment, "run", "--pty", "--", "bash")
    assert done.returncode == exit_codes.USAGE
    assert re.search(r"a terminal is wanted.*\nnext: leave --pty out in scripts", done.stderr)


def test_an_app_without_a_terminal_says_so(window: Screen, environment: dict[str, str]) -> None:
    app = ask(environment, "submit", "--", "sleep", "1000").stdout.strip()
    ask(environment, "wait", app, "--for", "running")
    window.type(f"{GA} attach {app}; echo code $?", "Enter")
    window.wait(r"or has no terminal; `gpu-arbiter run --pty` starts one that has")
    window.wait(r"^code 1$")
    ask(environment, "cancel", app)
