"""Units under a real systemd: daemons live with the bounds of theirs, and the web page serves the arbiter's ledger."""

# Processes of other programs offer no event to wait for.

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra `web` is not installed")

from launch.site import shipped
from tests.support.launcher_host import REPOSITORY, Host, launcher_host, why_not
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

UNIT = "gpu-arbiter-web.service"
TOKEN = "a-token-of-this-test"
LEDGER = "/var/lib/gpu-arbiter/ledger.db"
#: The interpreter of this test run may be in a home folder.
DROP_IN = f"""
[Service]
WorkingDirectory={REPOSITORY}
Environment=PYTHONDONTWRITEBYTECODE=1
ProtectHome=no
StandardError=file:/var/log/web
"""
#: Prints the status and the text of an address.
GET = """
import sys
from urllib.error import HTTPError
from urllib.request import Request, urlopen
wanted = Request(sys.argv[1], headers={"Authorization": f"Bearer {sys.argv[2]}"} if sys.argv[2:] else {})
try:
    with urlopen(wanted, timeout=30) as answer: print(answer.status, answer.read().decode())
except HTTPError as error: print(error.code, error.read().decode())
except OSError as error: print(0, error)
"""
MAKE_LEDGER = f"from pathlib import Path; from arbiter.ledger import Ledger; Ledger(Path({LEDGER!r})).close()"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    if why_not():
        pytest.skip(why_not())
    with launcher_host(tmp_path_factory.mktemp("host") / "h") as host:
        host.run("ip", "link", "set", "lo", "up")
        host.run("useradd", "--system", "--no-create-home", "gpu-arbiter")
        host.run("install", "-d", "-o", "gpu-arbiter", "-m", "700", "/var/lib/gpu-arbiter")
        own = ("env", "-C", str(REPOSITORY), "setpriv", "--reuid", "gpu-arbiter", "--clear-groups")
        host.run(*own, sys.executable, "-c", MAKE_LEDGER)
        host.write("/etc/gpu-arbiter/web.token", TOKEN, mode="600")
        host.write(f"/etc/systemd/system/{UNIT}", shipped.units(f"{sys.executable} -m gpu_arbiter")[UNIT])
        host.write(f"/etc/systemd/system/{UNIT}.d/test.conf", DROP_IN)
        host.run("systemctl", "daemon-reload")
        yield host


#: What the program of a unit loads first.
LOADED = {
    "gpu-arbiter.service": "arbiter.daemon",
    "gpu-arbiter-app-agent@.service": "app_agent.daemon",
    "gpu-arbiter-gateway.service": "app_agent.gateway",
    "gpu-arbiter-launcher.service": "node_agent.launcher.service",
}


@pytest.mark.parametrize("unit", LOADED)
def test_a_daemon_can_be_loaded_with_the_system_calls_that_its_unit_leaves_it(host: Host, unit: str) -> None:
    bounds = [line for line in shipped.units()[unit].splitlines() if line.startswith("SystemCall")]
    assert bounds
    load = f"{sys.executable} -c 'import {LOADED[unit]}'"
    more = ("Type=oneshot", "RemainAfterExit=yes", f"WorkingDirectory={REPOSITORY}", f"ExecStart={load}")
    name = f"load-{LOADED[unit]}.service"
    host.write(f"/etc/systemd/system/{name}", "\n".join(("[Service]", "User=gpu-arbiter", *more, *bounds)))
    host.run("systemctl", "daemon-reload")
    told = host.run("systemctl", "start", name, check=False)
    assert host.run("systemctl", "is-active", name, check=False).strip() == "active", told


def test_a_daemon_that_ends_at_once_is_started_again_however_often(host: Host) -> None:
    unit = "gpu-arbiter.service"
    text = shipped.units("/bin/false")[unit].replace("LoadCredential=", "#")
    for pause, shorter in (("RestartSec=1", "RestartSec=100ms"), ("RestartMaxDelaySec=60", "RestartMaxDelaySec=200ms")):
        assert f"\n{pause}\n" in text
        text = text.replace(f"\n{pause}\n", f"\n{shorter}\n")
    host.write(f"/etc/systemd/system/{unit}", text)
    host.run("systemctl", "daemon-reload")
    host.run("systemctl", "start", "--no-block", unit)
    deadline = time.monotonic() + PATIENCE_S
    while int(host.run("systemctl", "show", "-p", "NRestarts", "--value", unit)) < 20:
        assert time.monotonic() < deadline, "it is not started any more"
        assert host.run("systemctl", "is-failed", unit, check=False).strip() != "failed"
        time.sleep(0.1)
    host.run("systemctl", "stop", unit)


def get(host: Host, page: str, *token: str) -> str:
    return host.run(sys.executable, "-c", GET, f"http://localhost:8470/{page}", *token)


def test_it_shows_the_ledger_of_an_arbiter_that_is_stopped_to_those_who_bring_the_token(host: Host) -> None:
    assert not Path(f"{LEDGER}-wal").exists()
    host.run("systemctl", "start", UNIT)
    deadline = time.monotonic() + PATIENCE_S
    while get(host, "healthz").strip() != "200 ok":
        assert time.monotonic() < deadline, host.run("cat", "/var/log/web")
        time.sleep(0.2)
    assert get(host, "rounds").startswith("401 ")
    assert get(host, "rounds", TOKEN).startswith("200 ")
    assert "gpu_arbiter_up 0.0" in get(host, "metrics", TOKEN), "there is no app agent"
    said = host.run("cat", "/var/log/web")
    assert "the site is at http://127.0.0.1:8470/" in said
    assert TOKEN not in said
    assert host.run("systemctl", "show", "-p", "User", "--value", UNIT).strip() == "gpu-arbiter"
