"""Two users of one node, and then of two, from the package and the shipped units alone: gateway, launchers, agents.

The tests are one story: each begins where the one before has ended. The lines are typed as they stand in
docs/operations.md, "With tasks as their users".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

import pytest

from tests.support import deb, pages
from tests.support.cluster import until
from tests.support.joined_hosts import MARKS, WORK, Hosts, joined_hosts
from tests.support.launcher_host import UIDS, OwnTerminal, as_user, why_not

pytestmark = MARKS
HUB, NODE, HUB_AGAIN, SECOND_NODE = pages.below(pages.DOCS / "operations.md", "#### With tasks as their users")
DAEMONS = {
    "hub": ("gpu-arbiter", "gpu-arbiter-gateway"),
    "n1": ("gpu-arbiter-launcher", "gpu-arbiter-node-agent"),
    "n2": ("gpu-arbiter-launcher", "gpu-arbiter-node-agent"),
}
USERS = ("alice", "bob")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if why_not():
        pytest.skip(why_not())
    with joined_hosts(tmp_path_factory.mktemp("hosts"), deb.package(), DAEMONS) as hosts:
        for line in HUB.commands():
            hosts.type("hub", line, "/srv/fresh")
        for line in NODE.commands():
            hosts.type("n1", line, "/root")
        hosts.wait_for_nodes("n1")
        yield hosts


def steps_of(site: Hosts, user: str) -> list[tuple[int, int]]:
    """Every mini-batch that a user's training has made, as process and number."""
    lines = site.n1.run("cat", f"{WORK}/{user}/steps", check=False).splitlines()
    return [(int(line.split()[0]), int(line.split()[1])) for line in lines if re.fullmatch(r"\d+ \d+", line)]


def wait_for_more(site: Hosts, count: int = 20) -> None:
    """Wait until each user's training has made more mini-batches."""
    goals = {user: len(steps_of(site, user)) + count for user in USERS}
    until(lambda: all(len(steps_of(site, user)) >= goals[user] for user in USERS), "mini-batches of both", site.logs)


@pytest.fixture(scope="module")
def trainings(site: Hosts) -> dict[str, str]:
    """The app of each user, which trains; its folder is closed to the other."""
    apps = {}
    for user in USERS:
        folder = f"{WORK}/{user}"
        site.hub.run("install", "-d", "-o", user, "-m", "700", folder)
        program = f"/opt/gpu-arbiter/bin/python {WORK}/telling_steps.py {folder}/steps --steps 1000000 --step-ms 50"
        apps[user] = site.logged_in(user, f"cd {folder}", f"gpu-arbiter submit -- {program}").strip()
    wait_for_more(site)
    return apps


def test_each_user_trains_as_oneself_and_neither_sees_the_other(site: Hosts, trainings: dict[str, str]) -> None:
    for user, other in (USERS, USERS[::-1]):
        pids = {pid for pid, _step in steps_of(site, user)}
        assert len(pids) == 1
        (uid,) = {line.split()[0] for line in site.n1.run("ps", "-o", "uid=", "-p", str(*pids)).splitlines()}
        assert int(uid) == UIDS[user]
        assert "Permission denied" in site.n1.run("cat", f"{WORK}/{other}/steps", user=user, check=False)
        assert "Permission denied" in site.n1.run("cat", "/etc/gpu-arbiter/tls/node-n1/key.pem", user=user, check=False)
        told = site.logged_in(user, f"gpu-arbiter cancel {trainings[other]}", check=False)
        assert "belongs to" in told or "there is no app" in told
        assert f" {other} " in site.logged_in(user, "gpu-arbiter ps -a"), "that it is there is no secret"


@pytest.mark.parametrize(
    ("host", "unit"),
    [("hub", "gpu-arbiter-gateway"), ("n1", "gpu-arbiter-node-agent"), ("n1", "gpu-arbiter-launcher")],
)
@pytest.mark.usefixtures("trainings")
def test_a_restart_of_a_shipped_unit_leaves_training_untouched(site: Hosts, host: str, unit: str) -> None:
    before = site.process(host, unit)
    site.type(host, f"systemctl restart {unit}", "/root")
    until(lambda: site.process(host, unit) not in ("", before), "the daemon is up again", site.logs)
    wait_for_more(site)
    for user in USERS:
        made = steps_of(site, user)
        assert len({pid for pid, _step in made}) == 1, "one process has made all"
        assert [step for _pid, step in made] == list(range(len(made))), "each once and in order"
        assert site.n1.run("cat", f"{WORK}/{user}/steps.words") == "", "it was told a signal, or has ended"


@pytest.fixture(scope="module")
def second_node(site: Hosts) -> None:
    for line in HUB_AGAIN.commands():
        site.type("hub", line, "/srv/fresh")
    for line in SECOND_NODE.commands():
        site.type("n2", line, "/root")
    site.wait_for_nodes("n1", "n2")


@pytest.mark.usefixtures("second_node")
def test_a_task_moves_to_another_node_with_its_checkpoint_as_the_same_user(
    site: Hosts, trainings: dict[str, str]
) -> None:
    site.type("hub", "sed -i 's/^admins = .*/admins = [\"alice\"]/' /etc/gpu-arbiter/arbiter.toml", "/root")
    site.type("hub", "systemctl restart gpu-arbiter", "/root")
    site.wait_for_nodes("n1", "n2")
    first = {user: len(steps_of(site, user)) for user in USERS}
    site.as_alice("gpu-arbiter drain n1 --reason 'new memory' --wait --timeout 5m")
    wait_for_more(site)
    n2 = site.each["n2"]
    for user, other in (USERS, USERS[::-1]):
        made = steps_of(site, user)
        assert [step for _pid, step in made] == list(range(len(made))), "each once and in order"
        before, now = dict.fromkeys(pid for pid, _step in made)
        assert len(made) > first[user]
        assert n2.run("ps", "-o", "user=", "-p", str(now)).split() == [user]
        assert site.n1.run("pgrep", "-u", user, check=False) == "", "nothing of it is left there"
        assert site.hub.run("cat", f"{WORK}/{user}/steps.words") == f"{before} left\n", "it saved, and left"
        (saved,) = site.hub.run("find", f"{WORK}/{user}/checkpoints", "-name", "made").split()[-1:]
        assert site.hub.run("stat", "-c", "%U", saved).split() == [user]
        assert "Permission denied" in n2.run("cat", saved, user=other, check=False)
        moved = site.logged_in(user, f"gpu-arbiter events {trainings[user]}")
        assert "moved" in moved
    site.as_alice("gpu-arbiter undrain n1")


def test_what_is_proven_of_the_site_is_told_to_a_user(site: Hosts, trainings: dict[str, str]) -> None:
    for user, app in trainings.items():
        site.logged_in(user, f"gpu-arbiter cancel {app}")

    def are_over() -> bool:
        return not any(site.each[name].run("pgrep", "-u", "alice,bob", check=False).strip() for name in ("n1", "n2"))

    until(are_over, "the trainings are over", site.logs)
    told = site.told("gpu-arbiter doctor --site")
    found = {each["name"]: each for each in told["checks"]}
    assert found["isolation"]["verdict"] == "ok", found["isolation"]
    assert [each for each in told["checks"] if each["name"].startswith("isolation: ")] == []


def test_a_checkpoint_in_memory_is_copied_by_the_shipped_launcher(site: Hosts) -> None:
    memory = "/run/gpu-arbiter-memory"
    for file, line in (("launcher", f'memory_dir = "{memory}"'), ("node", f'memory_dir = "{memory}"')):
        there = f"/etc/gpu-arbiter/{file}.toml"
        site.type("n1", f"sed -i 's|^memory_dir = [^#]*|{line} |' {there} && grep -q '^{line}' {there}", "/root")
    (block,) = (
        each for each in pages.below(pages.DOCS / "operations.md", "## Tasks as their users") if memory in each.text
    )
    for line in block.commands():
        site.type("n1", line, "/root")
    site.as_alice("gpu-arbiter drain n2 --wait --timeout 1m")
    site.wait_for_nodes("n1", "n2")
    folder = f"{WORK}/alice"
    program = f"/opt/gpu-arbiter/bin/python {WORK}/telling_steps.py {folder}/held --steps 1000000 --step-ms 50"
    app = site.as_alice(f"cd {folder}", f"gpu-arbiter submit --checkpoint-dir {folder}/kept -- {program}").strip()
    made = f"{folder}/held"
    until(lambda: len(site.n1.lines(f"cat {made}")) > 20, "it trains", site.logs)
    site.as_alice(f"gpu-arbiter requeue {app}")
    until(
        lambda: len({line.split()[0] for line in site.n1.run("cat", made).splitlines()}) == 2, "it is back", site.logs
    )
    steps = [int(line.split()[1]) for line in site.n1.run("cat", made).splitlines()]
    assert steps == list(range(len(steps))), "each once and in order"
    until(lambda: bool(site.n1.lines(f"find {folder}/kept -name made")), "it is on the disk", site.logs)
    assert site.n1.run("stat", "-c", "%U %a", f"{memory}/{UIDS['alice']}").split() == ["alice", "700"]
    assert "memory.unanswered" not in site.log("n1", "gpu-arbiter-node-agent")
    site.as_alice(f"gpu-arbiter cancel {app}", "gpu-arbiter undrain n2")


SECRET, PLAIN = "tr0ub4dor-and-3", "correct-horse-battery"
#: Folders of daemons, of the broker, of systemd and of its journal; those of users are their own.
OF_DAEMONS = ("/var/lib/gpu-arbiter*", "/var/lib/rabbitmq", "/var/lib/systemd", "/var/log", "/etc", "/run", "/root")


def test_the_value_of_a_secret_is_in_no_file_and_no_process_of_the_site_but_the_task_in_a_terminal(
    site: Hosts,
) -> None:
    for name in ("n1", "n2"):
        terminals = """sed -i 's/^terminals = .*/terminals = "0.0.0.0:7073"/' /etc/gpu-arbiter/node.toml"""
        site.type(name, f"{terminals} && systemctl restart gpu-arbiter-node-agent", "/root")
    site.wait_for_nodes("n1", "n2")
    folder = f"{WORK}/alice"
    site.hub.write(f"{folder}/key", f"{SECRET}\n", owner="alice", mode="600")
    line = f"gpu-arbiter run --pty --secret KEY={folder}/key --env OTHER={PLAIN} -- sh -c 'echo $KEY | sha256sum; cat'"
    shell = OwnTerminal([*site.hub.enter, *as_user("alice"), "bash", "-lc", f"cd {folder}; {line}"])
    try:
        shell.read_until(hashlib.sha256(f"{SECRET}\n".encode()).hexdigest())
        found = {name: host.holding(SECRET, *OF_DAEMONS) for name, host in site.each.items()}
        plain = {name: host.holding(PLAIN, *OF_DAEMONS) for name, host in site.each.items()}
        shown = {name: host.telling(SECRET, "cmdline") for name, host in site.each.items()}
        known = {
            name: {host.run("ps", "-o", "user=", "-p", pid).strip() for pid in host.telling(SECRET, "environ")}
            for name, host in site.each.items()
        }
        journals = {name: host.run("journalctl", "--no-pager", "-a") for name, host in site.each.items()}
    finally:
        shell.close()
    assert any("journal.db" in path for path in plain["hub"]), "what is no secret is found there"
    assert (found, shown) == ({name: set() for name in site.each}, {name: set() for name in site.each})
    assert sorted(known.values(), key=len) == [set(), set(), {"alice"}], "the task alone knows it, on its node"
    for name, told in journals.items():
        assert "gpu-arbiter" in told
        assert SECRET not in told, name
