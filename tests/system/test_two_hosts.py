"""Two fresh hosts, each with a real systemd, joined by a cable: from nothing to the first job, an upgrade, and the end.

The tests are one story: each begins where the one before has ended. The first lines are typed as they stand in
docs/operations.md, "Two hosts from nothing". With the name of a commit in GPU_ARBITER_EARLIER the upgrade is from the
package of that commit, and not from that of the tree under an older number.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support import deb, pages, rabbitmq, telling_steps
from tests.support.cluster import until
from tests.support.launcher_host import Host, join, launcher_host, why_not
from tests.support.stand_in import StandIn, cards

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not rabbitmq.available(), reason="rabbitmq-server is not installed"),
    pytest.mark.skipif(bool(deb.why_not()), reason=deb.why_not()),
]
HUB, NODE, USER = pages.below(pages.DOCS / "operations.md", "### Two hosts from nothing")
#: The version after the one of this tree, as far as the minor version is concerned.
NEXT = "0.2.0"
#: By host, the units of the daemons.
DAEMONS = {"hub": ("gpu-arbiter", "gpu-arbiter-app-agent@alice"), "n1": ("gpu-arbiter-node-agent",)}
#: The hosts have no journald. Auctions of two GPUs need no compiled loops.
DROP_IN = """[Service]
Environment=NUMBA_DISABLE_JIT=1
StandardError=append:/var/log/{unit}
"""
DRIVER = "/opt/driver"
WORK = "/srv/work"


class Hosts:
    """The two hosts, and the people who type there."""

    def __init__(self, hosts: Mapping[str, Host]) -> None:
        self.hub, self.n1 = hosts["hub"], hosts["n1"]
        self._hosts = hosts

    def type(self, host: str, line: str, folder: str) -> str:
        """Type a line as root; return what it says."""
        if line.startswith("scp "):
            self._copy(line, folder)
            return ""
        answer = "y\n"  # to the question of apt-get whether to continue
        return self._hosts[host].run("env", "-C", folder, "HOME=/root", "bash", "-c", line, text=answer)

    def upgrade(self, host: str, package: Path) -> None:
        """Install another version on a host as the page on upgrading says; dpkg restarts the daemons that run."""
        shutil.copy(package, self._hosts[host].root / "root/other.deb")
        self.type(host, "dpkg -i other.deb", "/root")

    def _copy(self, line: str, folder: str) -> None:
        """Copy from the hub as `scp` does, which the lab has no daemon for: the files get the rights that they have."""
        *sources, to = [word for word in shlex.split(line)[1:] if not word.startswith("-")]
        host, _, place = to.partition(":")
        for source in sources:
            (path,) = (self.hub.root / folder.lstrip("/")).glob(source)
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, self._hosts[host].root / "root" / place / path.name)

    def as_alice(self, *lines: str, check: bool = True) -> str:
        """Have alice log in to the hub and type lines; return what they say."""
        return self.hub.run("bash", "-lc", "\n".join(lines), user="alice", check=check)

    def told(self, line: str) -> Any:
        """The document that a command says to alice; None while there is none."""
        try:
            return json.loads(self.as_alice(f"{line} --json", check=False))
        except ValueError:
            return None

    def wait_for_node(self) -> None:
        """Wait until the arbiter knows the GPUs of n1."""

        def is_up() -> bool:
            told = self.told("gpu-arbiter nodes")
            return bool(told and [node["state"] for node in told.get("nodes", ())] == ["up"])

        until(is_up, "the node is up", self.logs)

    def logs(self) -> str:
        """The ends of all logs."""
        ends = [
            f"{unit}: {self._hosts[name].run('tail', '-n', '5', f'/var/log/{unit}', check=False)}"
            for name, units in DAEMONS.items()
            for unit in units
        ]
        return "\n".join(ends)

    def process(self, host: str, unit: str) -> str:
        """The process of a daemon that is up; empty without one."""
        up = self._hosts[host].run("systemctl", "is-active", unit, check=False).strip() == "active"
        return self._hosts[host].run("systemctl", "show", "-p", "MainPID", "--value", unit).strip() if up else ""

    def processes(self) -> dict[str, str]:
        """The process of each daemon."""
        return {unit: self.process(host, unit) for host, units in DAEMONS.items() for unit in units}

    def releases(self) -> dict[str, str]:
        """What `doctor --site` says of releases: its verdict, and what it found."""
        told = self.told("gpu-arbiter doctor --site")
        return next((each for each in told["checks"] if each["name"] == "releases"), {}) if told else {}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if why_not():
        pytest.skip(why_not())
    folder = tmp_path_factory.mktemp("hosts")
    driver = StandIn(folder / "driver", *cards(2))
    with ExitStack() as stack:
        made = {name: stack.enter_context(launcher_host(folder / name)) for name in DAEMONS}
        join(made)
        for name, host in made.items():
            for unit in DAEMONS[name]:
                folder_of = f"/etc/systemd/system/{re.sub('@.*', '@', unit)}.service.d"
                host.write(f"{folder_of}/test.conf", DROP_IN.format(unit=unit))
            host.run("install", "-d", "-m", "777", WORK)
        shutil.copytree(driver.folder, made["n1"].root / DRIVER.lstrip("/"))
        made["n1"].write("/etc/ld.so.conf.d/driver.conf", f"{DRIVER}\n")
        made["n1"].run("ldconfig")
        shutil.copy(telling_steps.__file__, made["n1"].root / WORK.lstrip("/"))
        shutil.copy(telling_steps.__file__, made["hub"].root / WORK.lstrip("/"))
        made["hub"].run("install", "-d", "/srv/fresh")
        shutil.copy(deb.earlier(), made["hub"].root / "srv/fresh")
        yield Hosts(made)


@pytest.fixture(scope="module")
def site(hosts: Hosts) -> Hosts:
    """Both hosts after the lines of root's on the page."""
    for line in HUB.commands():
        hosts.type("hub", line, "/srv/fresh")
    for line in NODE.commands():
        hosts.type("n1", line, "/root")
    hosts.wait_for_node()
    return hosts


def test_the_lines_of_the_page_lead_two_fresh_hosts_to_the_first_job(site: Hosts) -> None:
    assert "it works\n" in site.as_alice(*USER.commands()), site.logs()
    logs = site.n1.run("sh", "-c", "cat /var/lib/gpu-arbiter-node/logs/*.log")
    assert logs == "it works\n", "it ran on the node"
    assert site.n1.run("grep", "^gpus", "/etc/gpu-arbiter/node.toml").startswith('gpus = "nvml"')


def test_no_word_crosses_the_network_in_the_clear_and_no_client_is_let_in_without_a_certificate(site: Hosts) -> None:
    for name in ("arbiter.url", "app-alice.url"):
        assert site.hub.run("cat", f"/etc/gpu-arbiter/{name}").startswith("amqps://")
    assert site.n1.run("cat", "/etc/gpu-arbiter/node.url").startswith("amqps://node-n1@10.0.0.1:5671/gpu?")
    ports = re.findall(r":(567\d)\b", site.hub.run("ss", "-ltn"))
    assert set(ports) == {"5671"}, "5672 is the port without TLS"
    key = site.n1.run("stat", "-c", "%U %a", "/etc/gpu-arbiter/tls/node-n1/key.pem").split()
    assert key == ["gpu-train", "600"]
    told = site.told("gpu-arbiter doctor --site")
    assert next(each["verdict"] for each in told["checks"] if each["name"] == "TLS") == "ok"


@pytest.fixture(scope="module")
def newer() -> Path:
    return deb.package(NEXT)


class Training:
    """A training of alice's on n1, which writes down every mini-batch and every signal."""

    def __init__(self, site: Hosts) -> None:
        self.site = site
        line = f"/opt/gpu-arbiter/bin/python {WORK}/telling_steps.py {WORK}/steps --steps 1000000 --step-ms 50"
        self.app = site.as_alice(f"cd {WORK}", f"gpu-arbiter submit -- {line}").strip()
        self.wait_for_more()

    def steps(self) -> list[list[int]]:
        """Every mini-batch so far, as process and number."""
        lines = self.site.n1.run("cat", f"{WORK}/steps", check=False).splitlines()
        return [[int(word) for word in line.split()] for line in lines if re.fullmatch(r"\d+ \d+", line)]

    def wait_for_more(self, count: int = 20) -> None:
        """Wait until it has made more mini-batches."""
        goal = len(self.steps()) + count
        until(lambda: len(self.steps()) >= goal, "more mini-batches", self.site.logs)

    def assert_untouched(self) -> None:
        """One process has made all mini-batches, each once and in order, and was told no signal."""
        self.wait_for_more()
        made = self.steps()
        assert len({process for process, _step in made}) == 1
        assert [step for _process, step in made] == list(range(len(made)))
        assert self.site.n1.run("cat", f"{WORK}/steps.words") == "", "it was told a signal, or has ended"


@pytest.fixture(scope="module")
def training(site: Hosts) -> Training:
    return Training(site)


def test_a_site_is_upgraded_host_by_host_while_training_goes_on(site: Hosts, training: Training, newer: Path) -> None:
    own = site.hub.run("gpu-arbiter", "version").strip()
    before = site.processes()
    site.hub.run("install", "-d", "-o", "gpu-arbiter", "/backup")
    backup = "gpu-arbiter backup /backup/site.gab --config /etc/gpu-arbiter/arbiter.toml"
    site.hub.run("setpriv", "--reuid", "gpu-arbiter", "--clear-groups", *backup.split())

    site.upgrade("n1", newer)
    until(lambda: f"node agent n1: {NEXT}" in site.releases().get("found", ""), "the node tells its version", site.logs)
    assert site.releases()["verdict"] == "note"
    training.assert_untouched()

    site.upgrade("hub", newer)
    until(lambda: site.releases().get("verdict") == "ok", "all are of one version", site.logs)
    assert f" are of {NEXT}, as the arbiter" in site.releases()["found"]
    assert own not in site.releases()["found"]
    assert all(process != before[unit] for unit, process in site.processes().items()), "each was restarted"
    training.assert_untouched()


def test_the_older_version_refuses_in_one_sentence_what_the_newer_has_written_and_the_newer_goes_on(
    site: Hosts, training: Training, newer: Path
) -> None:
    site.upgrade("hub", deb.earlier())
    refused = f"version {NEXT} of gpu-arbiter has written it, newer than "
    for unit in DAEMONS["hub"]:
        until(lambda unit=unit: refused in site.hub.run("cat", f"/var/log/{unit}"), f"{unit} refuses", site.logs)
        assert "Traceback" not in site.hub.run("cat", f"/var/log/{unit}")
    training.assert_untouched()
    site.upgrade("hub", newer)
    until(lambda: all(site.processes().values()), "the daemons of the newer version run again", site.logs)
    until(lambda: site.releases().get("verdict") == "ok", "all are of one version", site.logs)
    training.assert_untouched()


def test_an_uninstallation_waits_for_training_and_leaves_what_is_the_users(site: Hosts, training: Training) -> None:
    def is_refused() -> bool:
        return "training runs on this node" in site.n1.run("gpu-arbiter", "uninstall", "--dry-run", check=False)

    assert is_refused()
    assert "training runs on this node" in site.n1.run("gpu-arbiter", "uninstall", check=False)
    training.assert_untouched()
    site.as_alice(f"gpu-arbiter cancel {training.app}")
    until(lambda: not is_refused(), "the training is over", site.logs)
    for host in (site.n1, site.hub):
        host.run("gpu-arbiter", "uninstall", "--purge")
        host.run("dpkg", "--purge", "gpu-arbiter")
    logs = site.n1.run("sh", "-c", "cat /var/lib/gpu-arbiter-node/logs/*.log")
    assert "it works\n" in logs
    assert site.n1.run("stat", "-c", "%s", f"{WORK}/steps") != "0\n"
    for host in (site.n1, site.hub):
        kinds = "/etc/gpu-arbiter /etc/rabbitmq/gpu-arbiter /opt/gpu-arbiter /etc/rabbitmq/conf.d/9?-gpu-arbiter*"
        assert host.run("sh", "-c", f"ls -d {kinds} /etc/profile.d/gpu-arbiter* 2>/dev/null", check=False) == ""
        assert host.run("pgrep", "-f", "^/opt/gpu-arbiter", check=False) == ""
