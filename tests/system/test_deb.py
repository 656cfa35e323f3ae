"""The Debian package on a fresh host with a real systemd: from `dpkg -i` to the first job, and what stays after it."""

# Processes of other programs offer no event to wait for.

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import deb
from tests.support.launcher_host import Host, launcher_host, why_not
from tests.support.patience import PATIENCE_S

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(deb.why_not()), reason=deb.why_not()),
]
ROOT = Path(__file__).parents[2]
UNITS = {path.name for path in (ROOT / "launch/site/systemd").glob("*.service")}
ACCOUNTS = ("gpu-arbiter", "gpu-gateway", "gpu-node", "gpu-train")


@pytest.fixture(scope="module")
def package() -> Path:
    return deb.package()


@pytest.fixture(scope="module")
def host(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    if why_not():
        pytest.skip(why_not())
    with launcher_host(tmp_path_factory.mktemp("host") / "h") as host:
        shutil.copy(package, host.root / "srv/gpu-arbiter.deb")
        yield host


@pytest.mark.skipif(shutil.which("lintian") is None, reason="lintian is not installed: apt-get install lintian")
def test_lintian_finds_nothing_but_what_the_package_says_why(package: Path) -> None:
    line = ["lintian", "--fail-on", "error,warning", str(package)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=package.parent)
    assert done.returncode == 0, done.stdout


def test_no_environment_is_made_where_a_package_has_another_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    builder = runpy.run_path(str(deb.BUILDER))
    pin = re.findall(r"^idna==\S+", builder["LOCK"].read_text(), re.MULTILINE)[0]
    wrong = tmp_path / "requirements.lock"
    wrong.write_text(f"{pin} --hash=sha256:{'0' * 64}\n")
    monkeypatch.setitem(builder["environment"].__globals__, "LOCK", wrong)
    with pytest.raises(subprocess.CalledProcessError):
        builder["environment"](tmp_path / "opt", tmp_path / "none.whl")
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err


def test_it_depends_on_the_python_it_was_built_for_and_nothing_lies_outside_its_places(package: Path) -> None:
    needs = subprocess.run(["dpkg-deb", "-f", package, "Depends"], capture_output=True, text=True, check=True).stdout
    assert f"python{sys.version_info.major}.{sys.version_info.minor}" in needs
    listed = subprocess.run(["dpkg-deb", "-c", package], capture_output=True, text=True, check=True).stdout
    paths = {line.split(" ./")[1] for line in listed.splitlines() if " ./" in line}
    places = ("opt/gpu-arbiter/", "lib/systemd/system/gpu-arbiter", "usr/", "etc/gpu-arbiter/")
    assert [path for path in paths if path and not path.endswith("/") and not path.startswith(places)] == []
    assert any("/cuda/bindings/" in path for path in paths), "without it the driver suspends no job"
    assert {path.rsplit("/", 1)[1] for path in paths if path.startswith("lib/systemd/system/g")} == UNITS


def test_on_a_fresh_host_a_user_runs_a_job_after_one_command_of_root(host: Host) -> None:
    told = host.run("dpkg", "-i", "/srv/gpu-arbiter.deb")
    assert "Setting up gpu-arbiter" in told
    for account in ACCOUNTS:
        assert host.run("getent", "passwd", account).startswith(f"{account}:")
    listed = host.run("systemctl", "list-unit-files", "--no-legend", "gpu-arbiter*").splitlines()
    assert {line.split()[0]: line.split()[1] for line in listed} == dict.fromkeys(UNITS, "disabled")
    assert host.run("stat", "-c", "%U %a", "/var/lib/gpu-train").split() == ["gpu-train", "750"]

    planned = json.loads(host.run("gpu-arbiter", "install", "node", "--id", "n1", "--dry-run", "--json"))["steps"]
    made = {step["what"] for step in planned if step["act"] != "keep"}
    assert made == {"file /etc/gpu-arbiter/node.toml", "start of gpu-arbiter-node-agent.service with the host"}

    site = ("gpu-arbiter", "up", "--gpus", "simulated:2", "--policy", "fifo")
    where = ("--uid=alice", "--working-directory=/home/alice", "--setenv=HOME=/home/alice")
    host.run("systemd-run", "--unit=site", *where, *site)
    deadline = time.monotonic() + PATIENCE_S
    job = ("gpu-arbiter", "run", "--", "python3", "-c", "print(6 * 7)")
    while "42" not in (said := host.run("env", "-C", "/home/alice", *job, user="alice", check=False)):
        assert time.monotonic() < deadline, said
        time.sleep(0.5)
    host.run("systemctl", "stop", "site")


def test_a_package_that_is_installed_again_leaves_a_task_alone_and_one_that_goes_leaves_the_ledger(host: Host) -> None:
    host.run("systemd-run", "--unit=task", "sleep", "600")
    task = host.run("systemctl", "show", "-p", "MainPID", "--value", "task")
    host.write("/etc/gpu-arbiter/arbiter.toml", "")
    host.write("/var/lib/gpu-arbiter/ledger.db", "who had which GPU")
    host.run("dpkg", "-i", "/srv/gpu-arbiter.deb")
    assert host.run("cat", "/etc/gpu-arbiter/arbiter.toml") == ""
    told = host.run("dpkg", "--purge", "gpu-arbiter")
    assert "/var/lib/gpu-arbiter is left" in told
    assert host.run("cat", "/var/lib/gpu-arbiter/ledger.db") == "who had which GPU"
    gone = ("/opt/gpu-arbiter", "/etc/gpu-arbiter", "/usr/bin/gpu-arbiter")
    assert host.run("ls", "-d", *gone, check=False).count("No such file") == len(gone)
    assert host.run("systemctl", "show", "-p", "MainPID", "--value", "task") == task != "0\n"
