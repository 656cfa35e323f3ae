"""`ssh-proxy` as editors, `ssh` and `scp` use it: with OpenSSH itself on both sides, on a running site."""

from __future__ import annotations

import os
import pwd
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from node_agent.workers.ssh_server import SERVER_FOLDERS
from protocol import exit_codes
from tests.support.patience import PATIENCE_S
from tests.support.up_site import PROGRAM, running_up

HAS_SERVER = any(Path(folder, "sshd").exists() for folder in SERVER_FOLDERS)
pytestmark = [
    pytest.mark.skipif(not HAS_SERVER, reason="sshd is not installed (apt-get install openssh-server)"),
    pytest.mark.full,
]

#: Variables that no line of a configuration of sshd could carry.
VARIABLES = {"LINES_OF_TEXT": "one\n two", "QUOTED": 'it\'s "so" \\n $HOME # %h'}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("ssh")
    own = {name: value for name, value in os.environ.items() if not name.startswith(("GPU_ARBITER_", "XDG_", "SSH_"))}
    return own | {"GPU_ARBITER_URL": f"unix://{folder}/control.sock", "HOME": str(folder)}


@pytest.fixture(scope="module")
def site(environment: dict[str, str]) -> Iterator[None]:
    with running_up(environment):
        yield


def ask(environment: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *words], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def config(environment: dict[str, str]) -> Path:
    """What a user includes in ``~/.ssh/config``."""
    told = ask(environment, "ssh-proxy", "--config")
    assert told.returncode == 0, told.stderr
    path = Path(environment["HOME"], "config")
    path.write_text(told.stdout)
    return path


@pytest.fixture
def app(site: None, environment: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """An app with a terminal, a secret and odd variables, which runs."""
    (tmp_path / "token").write_text("hunter2\n")
    (tmp_path / "app.toml").write_text('pty = true\ncommand = ["sleep", "1000"]\n')
    given = [word for name, value in VARIABLES.items() for word in ("--env", f"{name}={value}")]
    made = submit(environment, tmp_path, "-f", "app.toml", *given, "--secret", f"TOKEN={tmp_path}/token")
    yield made
    ask(environment, "cancel", made)


def submit(environment: Mapping[str, str], folder: Path, *words: str) -> str:
    done = subprocess.run(
        [*PROGRAM, "submit", *words], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ask(environment, "wait", done.stdout.strip(), "--for", "running").returncode == 0
    return done.stdout.strip()


def ssh(config: Path, environment: Mapping[str, str], *words: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        ["ssh", "-F", config, *words], env=environment, capture_output=True, text=True, check=False, **more
    )


def test_a_command_has_the_gpus_the_folder_and_all_variables_of_the_app_and_tells_its_code(
    app: str, config: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    asks = (
        'echo $CUDA_VISIBLE_DEVICES; pwd; printf "%s|" "$LINES_OF_TEXT" "$QUOTED" "$TOKEN" "$GPU_ARBITER_JOB"; exit 7'
    )
    done = ssh(config, environment, f"{app}.gpu", asks)
    assert done.returncode == 7, done.stderr
    gpus, folder, rest = done.stdout.split("\n", 2)
    assert gpus.startswith("GPU-sim-n1-")
    assert folder == str(tmp_path)
    assert rest == f"{VARIABLES['LINES_OF_TEXT']}|{VARIABLES['QUOTED']}|hunter2|{app}.0|"


def test_a_shell_has_the_variables_and_a_terminal_of_its_own(
    app: str, config: Path, environment: dict[str, str]
) -> None:
    done = ssh(config, environment, "-tt", f"{app}.gpu", input="tty; echo is $TOKEN; exit 5\n")
    assert done.returncode == 5, done.stderr
    assert "/dev/pts/" in done.stdout
    assert "is hunter2" in done.stdout


def test_files_travel_both_ways(app: str, config: Path, environment: dict[str, str], tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    (tmp_path / "here").write_bytes(content)
    for source, target in ((tmp_path / "here", f"{app}.gpu:there"), (f"{app}.gpu:there", tmp_path / "back")):
        done = subprocess.run(["scp", "-F", config, source, target], env=environment, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "there").read_bytes() == content, "a path is one from the folder of the app"
    assert (tmp_path / "back").read_bytes() == content


def test_several_connections_at_a_time_find_one_host_key(
    app: str, config: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    command = ["ssh", "-F", str(config), f"{app}.gpu", "cat"]
    several = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=-1, text=True) for _ in range(3)
    ]
    assert [one.communicate("here\n", timeout=PATIENCE_S)[0] for one in several] == ["here\n"] * 3
    assert [one.returncode for one in several] == [0] * 3
    known = Path(environment["HOME"], ".local/state/gpu-arbiter/ssh/known_hosts").read_text()
    assert known.count(f"{app}.gpu ") == 1


def test_the_end_of_the_app_ends_the_session_and_all_that_it_has_started(
    app: str, config: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    program = f"setsid sleep 1000 & echo $! > {tmp_path}/pid; echo begun; wait"
    command = ["ssh", "-F", str(config), f"{app}.gpu", program]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as session:
        assert session.stdout is not None
        assert session.stdout.readline() == "begun\n"
        assert ask(environment, "cancel", app).returncode == 0
        assert session.wait(PATIENCE_S) == 255
    by = time.monotonic() + PATIENCE_S
    while Path("/proc", (tmp_path / "pid").read_text().strip()).exists():
        assert time.monotonic() < by, "it goes on"
        time.sleep(0.1)


def test_another_name_and_an_app_without_a_terminal_get_a_sentence(
    app: str, config: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    done = ssh(config, environment, f"mallory@{app}.gpu", "true")
    name = pwd.getpwuid(os.getuid()).pw_name
    assert f"the tasks of that node run as {name}, and ssh comes as mallory\nnext: ssh {name}@{app}.gpu" in done.stderr
    other = submit(environment, tmp_path, "--", "sleep", "1000")
    done = ssh(config, environment, f"{other}.gpu", "true")
    assert "has no terminal; `gpu-arbiter run --pty` starts one that has" in done.stderr
    ask(environment, "cancel", other)
    done = ssh(config, environment, f"{other}.gpu", "true")
    assert f"{other} is over" in done.stderr
    for words in ((), ("a b.gpu",), ("$(id).gpu",), ("a\n.gpu",)):
        assert ask(environment, "ssh-proxy", *words).returncode == exit_codes.USAGE


def test_no_other_key_is_let_in(app: str, config: Path, environment: dict[str, str], tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    own = Path(environment["HOME"], ".local/state/gpu-arbiter/ssh/id_ed25519")
    (tmp_path / "config").write_text(config.read_text().replace(str(own), str(tmp_path / "other")))
    done = ssh(tmp_path / "config", environment, "-o", "BatchMode=yes", f"{app}.gpu", "true")
    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr
