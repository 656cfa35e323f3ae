"""Two fresh hosts, each with a real systemd, joined by a cable: from nothing to the first job, an upgrade, and the end.

The tests are one story: each begins where the one before has ended. The first lines are typed as they stand in
docs/operations.md, "Two hosts from nothing". With the name of a commit in GPU_ARBITER_EARLIER the upgrade is from the
package of that commit, and not from that of the tree under an older number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import deb, pages
from tests.support.cluster import until
from tests.support.joined_hosts import MARKS, WORK, Hosts, joined_hosts
from tests.support.launcher_host import why_not

pytestmark = MARKS
HUB, NODE, USER = pages.below(pages.DOCS / "operations.md", "### Two hosts from nothing")
#: The version after the one of this tree, as far as the minor version is concerned.
NEXT = "0.2.0"
#: By host, the units of the daemons.
DAEMONS = {"hub": ("gpu-arbiter", "gpu-arbiter-app-agent@alice"), "n1": ("gpu-arbiter-node-agent",)}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if why_not():
        pytest.skip(why_not())
    with joined_hosts(tmp_path_factory.mktemp("hosts"), deb.earlier(), DAEMONS) as made:
        yield made


@pytest.fixture(scope="module")
def site(hosts: Hosts) -> Hosts:
    """Both hosts after the lines of root's on the page."""
    for line in HUB.commands():
        hosts.type("hub", line, "/srv/fresh")
    for line in NODE.commands():
        hosts.type("n1", line, "/root")
    hosts.wait_for_nodes("n1")
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
        until(lambda unit=unit: refused in site.log("hub", unit), f"{unit} refuses", site.logs)
        assert "Traceback" not in site.log("hub", unit)
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
