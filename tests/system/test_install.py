"""`install` and `uninstall` on a fresh host with a real systemd and a real RabbitMQ: from nothing to the first job."""

# Processes of other programs offer no event to wait for.

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import rabbitmq
from tests.support.launcher_host import Host, launcher_host, why_not
from tests.support.patience import PATIENCE_S

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not rabbitmq.available(), reason="rabbitmq-server is not installed"),
]
ROOT = Path(__file__).parents[2]
PROGRAM = Path(sys.executable).with_name("gpu-arbiter")
DAEMONS = {"gpu-arbiter": "arbiter", "gpu-arbiter-node-agent": "node", "gpu-arbiter-app-agent@alice": "app-alice"}
#: The interpreter of this test run may be in a home folder, which the units hide.
DROP_IN = "[Service]\nProtectHome=no\n"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    if why_not():
        pytest.skip(why_not())
    if not PROGRAM.is_file() or shutil.which("ip") is None:
        pytest.skip("the command is not installed beside the interpreter, or `ip` is not on this host")
    with launcher_host(tmp_path_factory.mktemp("host") / "h") as host:
        host.run("ip", "link", "set", "lo", "up")
        yield host


def do(host: Host, *words: str, code: int = 0) -> dict[str, list[dict[str, str]]]:
    """Do a verb as root; return what it would do or did, by act."""
    done = json.loads(host.run(str(PROGRAM), *words, "--json", check=code == 0).splitlines()[0])
    if code:
        assert done["code"] == code, done
        return done  # type: ignore[no-any-return]
    acts: dict[str, list[dict[str, str]]] = {}
    for step in done["steps"]:
        acts.setdefault(step["act"], []).append(step)
    return acts


def test_one_command_for_each_role_leads_to_a_users_first_job_and_a_second_one_changes_nothing(host: Host) -> None:
    parties = [word for user in ("arbiter", "node-n1", "app-alice") for word in ("--party", user)]
    lines = [
        ("install", "broker", "--start", "--address", "localhost", *parties),
        ("install", "arbiter"),
        ("install", "node", "--id", "n1"),
        ("install", "login", "--owner", "alice"),
    ]
    for line in lines:
        assert do(host, *line, "--dry-run").keys() & {"make", "change"}
        assert do(host, *line).keys() & {"make", "change"}
        assert do(host, *line).keys() == {"keep"}
    rights = host.run("rabbitmqctl", "list_permissions", "-p", "gpu")
    assert [user in rights for user in ("arbiter", "node-n1", "app-alice")] == [True] * 3
    assert "{consumer_timeout,31622400000}" in host.run("rabbitmqctl", "environment")

    for unit, name in DAEMONS.items():
        config = f"/etc/gpu-arbiter/{name}.toml"
        host.run("sed", "-i", 's|"nvml"|"simulated:2"|; s|^policy = "themis"|policy = "fifo"|', config)
        host.write(f"/etc/systemd/system/{unit.replace('@alice', '@')}.service.d/test.conf", DROP_IN)
    for line in lines[1:]:
        assert do(host, *line, "--start").keys() >= {"make"}
    url = "GPU_ARBITER_URL=unix:///run/gpu-arbiter-app/alice/control.sock"
    host.run("install", "-d", "-o", "alice", "-m", "777", "/srv/work")  # where training of gpu-train may write
    job = ("env", "-C", "/srv/work", url, str(PROGRAM), "run", "--", "echo", "trained")
    deadline = time.monotonic() + PATIENCE_S
    while "trained\n" not in (said := host.run(*job, user="alice", check=False)):
        assert time.monotonic() < deadline, said
        time.sleep(0.5)


def test_what_trains_keeps_a_node_and_what_goes_leaves_the_users_files(host: Host) -> None:
    workers = "/var/lib/gpu-arbiter-node/workers/app.0-a1"
    host.write(f"{workers}/lock", "")
    host.write("/var/lib/gpu-arbiter-node/logs/app.0-a1.log", "trained")
    host.run("systemd-run", "--unit=task", "flock", f"{workers}/lock", "sleep", "600")
    while do_training(host) == []:
        pass
    refused = do(host, "uninstall", code=4)
    assert "training runs on this node: app.0-a1" in str(refused["error"])
    assert host.run("systemctl", "is-active", "gpu-arbiter-node-agent").strip() == "active"

    removed = do(host, "uninstall", "--force")
    stopped = {step["what"] for step in removed["remove"] if step["what"].startswith("daemon")}
    assert stopped == {f"daemon {unit}.service" for unit in DAEMONS}
    assert host.run("systemctl", "is-active", "task").strip() == "active", "training goes on"
    for unit in DAEMONS:
        assert "active" not in host.run("systemctl", "is-active", unit, check=False).replace("inactive", "")
    left = host.run("sh", "-c", "ls -d /etc/systemd/system/gpu-arbiter* /etc/gpu-arbiter /var/lib/gpu-arbiter*")
    assert set(left.split()) == {
        "/etc/gpu-arbiter",
        *(f"/etc/systemd/system/{unit.replace('@alice', '@')}.service.d" for unit in DAEMONS),
        *(f"/var/lib/gpu-arbiter{kind}" for kind in ("", "-node", "-app")),
    }
    host.run("systemctl", "stop", "task")
    assert do(host, "uninstall", "--purge").keys() == {"remove", "change", "keep"}  # units are read anew
    logs = "/var/lib/gpu-arbiter-node/logs/"
    files = host.run("find", "/var/lib/gpu-arbiter-node", "-type", "f").split()
    assert f"{logs}app.0-a1.log" in files
    assert [file for file in files if not file.startswith(logs)] == []
    gone = host.run(
        "sh", "-c", "ls -d /etc/systemd/system/gpu-arbiter* /etc/gpu-arbiter /var/lib/gpu-arbiter", check=False
    )
    assert gone.count("No such file") == 3


def do_training(host: Host) -> list[str]:
    """The tasks that an uninstallation would name."""
    script = (
        "from pathlib import Path; from launch.site import roles; from launch.site.steps import Host; "
        "print(*roles.training(Host(Path('/'))))"
    )
    return host.run("env", "-C", str(ROOT), sys.executable, "-c", script).split()
