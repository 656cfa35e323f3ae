"""`doctor --site`: what is wrong with a whole site is found, and each finding names its mend."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace

from arbiter.core.registry import POLICIES, tables
from arbiter.core.state.model import ArbiterSettings
from launch import doctor, escape, site_checks
from launch.faults import Fault
from launch.gpu_checks import Check
from launch.site_checks import Daemon, Escape, Word
from protocol.bus import provision
from protocol.journal.sqlite import SqliteJournal
from protocol.messages import ARBITER, Party
from protocol.release import release
from protocol.topology import CONSUMER_TIMEOUT_MS, Topology, with_prefix
from simulator import self_test
from tests.support import rabbitmq
from tests.support.rabbitmq import PrivateRabbitMQ

OURS = release()
NODE = Daemon("node", "n1", OURS, 0.25)


def found(checks: object) -> dict[str, Check]:
    assert hasattr(checks, "__iter__")
    return {check.name: check for check in checks}


# --- clocks and releases ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead_s", "here_s", "verdict", "says"),
    [
        (0.5, -0.2, "ok", "of 2 clocks none differs from the arbiter's by more than 0.5 s"),
        (12.0, 0.0, "note", "node agent n1 is 12 s ahead"),
        (-90.0, 7.0, "fail", "node agent n1 is 90 s behind, this host is 7 s ahead"),
        (None, 0.0, "ok", "of 1 clocks"),
    ],
)
def test_clocks_that_differ_are_named_with_the_worst_first(
    ahead_s: float | None, here_s: float, verdict: str, says: str
) -> None:
    (check,) = site_checks.clocks(Word(OURS, here_s, (replace(NODE, clock_ahead_s=ahead_s),)))
    assert (check.verdict, says in check.found, "NTP" in check.mend) == (verdict, True, verdict != "ok"), check


def test_releases_that_differ_are_named_and_a_minor_version_apart_is_no_fault() -> None:
    word = Word("1.4.0", 0.0, (replace(NODE, release="1.4.0"), Daemon("app", "ana", "1.3.2")))
    major, minor = OURS.split(".")[:2]
    (check,) = site_checks.releases(replace(word, release=OURS, daemons=(NODE,)), OURS)
    assert (check.verdict, OURS in check.found) == ("ok", True)
    older = f"{major}.{int(minor) + 1}.0"
    (check,) = site_checks.releases(replace(word, release=OURS, daemons=(replace(NODE, release=older),)), OURS)
    assert (check.verdict, f"node agent n1: {older}" in check.found) == ("note", True)
    far = f"{major}.{int(minor) + 2}.0"
    (check,) = site_checks.releases(replace(word, release=OURS, daemons=(replace(NODE, release=far),)), OURS)
    assert (check.verdict, "Upgrading" in check.mend) == ("fail", True)
    (check,) = site_checks.releases(Word(OURS, 0.0, (replace(NODE, release=""),)), OURS)
    assert (check.verdict, "node agent n1: one that tells no release" in check.found) == ("fail", True)
    many = tuple(Daemon("node", f"n{number}", far) for number in range(9))
    (check,) = site_checks.releases(Word(OURS, 0.0, many), OURS)
    assert "and 4 more" in check.found


# --- the broker -------------------------------------------------------------------------------------------------------

#: As RabbitMQ 3.10 tells it, shortened.
STATUS = {
    "rabbitmq_version": "3.10.8",
    "alarms": [],
    "file_descriptors": {"total_limit": 65436, "total_used": 40},
    "vm_memory_high_watermark_limit": 2**30,
    "memory": {"total": {"rss": 2**27, "allocated": 2**27, "erlang": 2**26}},
    "listeners": [{"interface": "[::]", "port": 5671, "protocol": "amqp/ssl"}],
}


def of_broker(participants: int = 10, timeout_ms: int = CONSUMER_TIMEOUT_MS, **changes: object) -> dict[str, Check]:
    """What is found of a broker that tells this of itself."""

    def ctl(*words: str) -> str:
        return json.dumps(STATUS | changes) if words[0] == "status" else f"{{ok,{timeout_ms}}}\n"

    return found(site_checks.broker(participants, ctl))


def test_a_broker_in_order_is_found_so() -> None:
    checks = of_broker()
    assert {check.verdict for check in checks.values()} == {"ok"}, checks
    assert set(checks) == {"broker version", "broker files", "broker memory", "leader token", "broker listeners"}


@pytest.mark.parametrize(
    ("name", "verdict", "mend", "changes"),
    [
        ("broker version", "fail", "3.10 or newer", {"rabbitmq_version": "3.8.9"}),
        ("broker files", "fail", "LimitNOFILE=65536", {"file_descriptors": {"total_limit": 1024, "total_used": 9}}),
        ("broker files", "note", "/proc/PID/limits", {"file_descriptors": {}}),
        ("broker memory", "fail", "give it memory", {"alarms": [{"resource": "memory"}]}),
        ("broker memory", "note", "vm_memory_high_watermark", {"memory": {"total": {"rss": 2**30}}}),
        ("leader token", "fail", "install broker", {"timeout_ms": 1_800_000}),
        (
            "broker listeners",
            "note",
            "amqps://",
            {"listeners": [{"interface": "[::]", "port": 5672, "protocol": "amqp"}]},
        ),
    ],
)
def test_each_fault_of_a_broker_is_found_with_its_mend(
    name: str, verdict: str, mend: str, changes: dict[str, object]
) -> None:
    checks = of_broker(**changes)  # type: ignore[arg-type]
    assert (checks[name].verdict, mend in checks[name].mend) == (verdict, True), checks[name]
    assert {check.verdict for other, check in checks.items() if other != name} == {"ok"}


def test_a_large_site_needs_more_files() -> None:
    few = {"total_limit": 4096, "total_used": 40}
    assert of_broker(700, file_descriptors=few)["broker files"].verdict == "ok"
    assert of_broker(800, file_descriptors=few)["broker files"].verdict == "fail"


def test_a_broker_that_tells_nothing_here_is_noted_with_what_cannot_be_known() -> None:
    def ctl(*words: str) -> str:
        raise Fault(f"no rabbitmqctl answers on this host to {words[0]}")

    (check,) = site_checks.broker(3, ctl)
    assert (check.verdict, "cannot be known" in check.found, "broker's host" in check.mend) == ("note", True, True)


def test_which_broker_is_on_this_host_is_known_by_its_address() -> None:
    assert site_checks.is_here("localhost")
    assert site_checks.is_here("127.0.0.1")
    assert not site_checks.is_here("192.0.2.1"), "of no host: RFC 5737"
    assert not site_checks.is_here("no-such-host.invalid")


@pytest.mark.parametrize(
    ("bus", "verdict", "says"),
    [
        ("amqps://app-ana:***@broker:5671/gpu", "ok", "speaks TLS"),
        ("amqp://app-ana:***@127.0.0.1:5672/gpu", "ok", "on this host"),
        ("amqp://app-ana:***@localhost/gpu", "ok", "on this host"),
        ("amqp://app-ana:***@broker:5672/gpu", "note", "in the clear to broker"),
        ("amqp://app-ana:***@localhost:5672,b2:5672,b3/gpu", "note", "in the clear to b2, b3"),
        ("amqps://app-ana@b1:5671,b2:5671/gpu", "ok", "speaks TLS"),
        ("memory://", "ok", "within one process"),
    ],
)
def test_a_way_to_the_broker_without_tls_is_noted(bus: str, verdict: str, says: str) -> None:
    (check,) = site_checks.transport(bus)
    assert (check.verdict, says in check.found) == (verdict, True)


@pytest.mark.parametrize(
    ("bus", "name", "says"),
    [
        (
            "amqps://app-ana@192.0.2.1,198.51.100.1:5671/gpu",
            "broker limits",
            "the brokers are on 192.0.2.1, 198.51.100.1",
        ),
        ("amqps://app-ana@192.0.2.1:5671/gpu", "broker limits", "the broker is on 192.0.2.1"),
        ("amqps://app-ana@192.0.2.1:5671,127.0.0.1:5671/gpu", "broker version", "RabbitMQ 3.13.7"),
        ("amqps://app-ana@127.0.0.1:5671,192.0.2.1:5671/gpu", "broker version", "RabbitMQ 3.13.7"),
    ],
)
def test_a_broker_of_several_is_asked_if_any_is_on_this_host(bus: str, name: str, says: str) -> None:
    def ctl(*words: str) -> str:
        return json.dumps({"rabbitmq_version": "3.13.7"}) if words[0] == "status" else ""

    assert says in found(site_checks.brokers(bus, 3, ctl))[name].found


@pytest.mark.broker
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(not rabbitmq.available(), reason="rabbitmq-server is not installed")
def test_a_real_broker_tells_its_limits() -> None:
    broker = PrivateRabbitMQ([Party("app", "ana")])
    try:
        broker.start()

        def ctl(*words: str) -> str:
            return broker.control("--quiet", *words)

        checks = found(site_checks.broker(3, ctl))
        assert set(checks) == {"broker version", "broker files", "broker memory", "leader token", "broker listeners"}
        assert {name: check.verdict for name, check in checks.items() if name != "broker files"} == {
            "broker version": "ok",
            "broker memory": "ok",
            "leader token": "ok",
            "broker listeners": "ok",
        }
        assert "MiB of its watermark of" in checks["broker memory"].found
        assert "open files are used" in checks["broker files"].found
        (rights,) = site_checks.rights("/", ctl)
        assert rights.verdict in ("ok", "note"), "the right of each is as it was made"
        broker.control("set_permissions", "app-ana", "^$", ".*", ".*")
        (rights,) = site_checks.rights("/", ctl)
        assert (rights.verdict, rights.found.split()[0]) == ("fail", "app-ana")
        broker.control("eval", "application:set_env(rabbit, consumer_timeout, 1800000).")
        assert found(site_checks.broker(3, ctl))["leader token"].verdict == "fail"
    finally:
        broker.close()


def with_rights(*extra: tuple[str, str], prefix: str = "", wide: str = "") -> Check:
    """What is found of a broker with an arbiter, a node, an owner, a gateway and `extra` users, one with all rights."""
    topology = with_prefix(Topology(), prefix)
    users = [provision.user(party, topology) for party in (ARBITER, Party("node", "n1"), Party("app", "ana"))]
    users.append(provision.gateway_user("login1", topology))
    made = provision.definitions(users, topology, "gpu", replicated=False)
    permissions = [{**each, "write": ".*"} if each["user"] == wide else each for each in made["permissions"]]  # type: ignore[attr-defined]
    permissions += [{"user": name, "configure": right, "write": right, "read": right} for name, right in extra]

    def ctl(*words: str) -> str:
        assert words[1:3] == ("--vhost", "gpu")
        return json.dumps(permissions if words[0] == "list_permissions" else made["topic_permissions"])

    (check,) = site_checks.rights("gpu", ctl)
    return check


@pytest.mark.parametrize("prefix", ["", "lab-2."])
def test_the_rights_of_a_broker_s_users_are_those_that_their_parts_need(prefix: str) -> None:
    check = with_rights(prefix=prefix)
    assert (check.verdict, check.found) == ("ok", "each of 4 users has the rights that its part needs")
    for wide in ("node-n1", "app-ana", "gateway-login1", "arbiter"):
        check = with_rights(prefix=prefix, wide=wide)
        assert (check.verdict, check.found.split()[0]) == ("fail", wide)
        assert f"gpu-arbiter provision {wide} --vhost gpu" in check.mend


def test_a_user_of_the_virtual_host_who_is_no_part_of_the_site_is_named() -> None:
    check = with_rights(("guest", ".*"))
    assert (check.verdict, "guest may use the virtual host gpu" in check.found) == ("note", True)
    assert check.mend == "rabbitmqctl clear_permissions --vhost gpu guest"


def test_where_the_broker_tells_nothing_its_rights_are_not_judged() -> None:
    def ctl(*words: str) -> str:
        raise Fault(f"no rabbitmqctl answers on this host to {words[0]}")

    assert list(site_checks.rights("gpu", ctl)) == []


# --- the store --------------------------------------------------------------------------------------------------------


def test_the_version_of_the_stores_tables_is_told_and_a_newer_one_is_a_fault(tmp_path: Path) -> None:
    journal: SqliteJournal[None] = SqliteJournal(tmp_path / "journal.db", lambda _: b"", lambda _: None)
    journal.append(time.time(), None)
    journal.commit()
    journal.close()
    check = doctor._store(tmp_path)
    assert (check.verdict, "tables of version 2" in check.found) == ("ok", True), check
    with sqlite3.connect(tmp_path / "journal.db") as database:
        database.execute("PRAGMA user_version = 99")
    check = doctor._store(tmp_path)
    assert (check.verdict, "newer than 2; upgrade" in check.found) == ("fail", True), check


# --- isolation --------------------------------------------------------------------------------------------------------

HELD = Escape("n1", "alice", "gpu-node", dict.fromkeys(site_checks.ESCAPES, "") | {"gpu": None})


def test_a_task_that_could_get_at_nothing_is_told_with_what_was_not_there_to_try() -> None:
    (check,) = site_checks.isolated(HELD)
    assert check.verdict == "ok"
    assert "on node n1 a task of alice could get at none of: address, signal, environ" in check.found
    assert check.found.endswith("; there was none of: gpu")


@pytest.mark.parametrize("forecast", [{"starts": False, "gpus": []}, {"starts": True, "gpus": [{"state": "leased"}]}])
def test_where_no_gpu_is_free_no_task_is_submitted(forecast: dict[str, object]) -> None:
    client = SimpleNamespace(dry_run=lambda spec: forecast)  # without a way to submit
    (check,) = site_checks.isolation(client, signs=True)  # type: ignore[arg-type]
    assert (check.verdict, "take a GPU from another app" in check.found) == ("note", True), check
    assert check.mend == "do the same when a GPU is free"


def test_where_no_gateway_signs_launches_that_is_said_and_no_gpu_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 2001)
    monkeypatch.setattr(escape, "addresses", lambda: None)
    (check,) = site_checks.isolation(SimpleNamespace(), signs=False)  # type: ignore[arg-type]  # without a way to ask
    assert (check.name, check.verdict, "no GPU was taken" in check.found) == ("isolation", "note", True)
    monkeypatch.setattr(escape, "addresses", lambda: "/etc/rabbitmq/key.pem")
    _, opened = site_checks.isolation(SimpleNamespace(), signs=False)  # type: ignore[arg-type]
    assert (opened.name, opened.verdict) == ("isolation: address", "fail")
    assert opened.found.endswith(": /etc/rabbitmq/key.pem")


@pytest.mark.parametrize("name", site_checks.ESCAPES)
def test_each_try_that_leads_out_is_a_fault_with_its_mend(name: str) -> None:
    (check,) = site_checks.isolated(replace(HELD, tries=HELD.tries | {name: "/the/thing"}))
    assert (check.name, check.verdict) == (f"isolation: {name}", "fail")
    assert check.found.endswith(": /the/thing")
    assert check.mend


def test_where_tasks_run_as_the_node_agents_user_that_is_said() -> None:
    (check,) = site_checks.isolated(replace(HELD, user="gpu-node", tries=HELD.tries | {"signal": "process 7"}))
    assert (check.verdict, "has no launcher" in check.found) == ("note", True)
    note, address = site_checks.isolated(replace(HELD, user="gpu-node", tries=HELD.tries | {"address": "/key"}))
    assert (note.verdict, address.verdict, address.name) == ("note", "fail", "isolation: address")


def test_the_tries_of_a_task_see_what_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "own"))
        agent.listen()
        env = {"GPU_ARBITER_SOCKET": str(tmp_path / "own"), "GPU_ARBITER_GPUS": "1"}
        told = msgspec.convert(escape.tried(env), Escape)
        assert told.user == told.agent
        assert set(told.tries) == set(site_checks.ESCAPES)
        assert (told.tries["signal"], told.tries["sockets"]) == (f"process {os.getpid()}", str(tmp_path))
        assert escape.launcher(str(tmp_path / "own")) == str(tmp_path / "own")
    assert escape.launcher(str(tmp_path / "own")) == "", "nothing listens there"
    assert escape.launcher(str(tmp_path / "none")) is None
    for number in range(2):
        (tmp_path / f"nvidia{number}").touch()
    pattern = f"{tmp_path}/nvidia[0-9]*"
    assert escape.gpus(1, pattern) == f"{tmp_path}/nvidia0, {tmp_path}/nvidia1"
    assert escape.gpus(2, pattern) is None, "there are no more to open"
    assert set(escape.process(0).values()) == {None}, "it is outside the namespace of the task"
    assert escape.gpus(1, f"{tmp_path}/none*") is None
    (tmp_path / "node.url").write_text("amqp://node-n1:secret@broker/gpu\n")
    (tmp_path / "app.url").write_text("amqps://broker/gpu\n")
    (tmp_path / "node.toml").write_text(f'node = "n1"\nbus_file = "{tmp_path}/key"\n')
    (tmp_path / "key").write_text("-----BEGIN PRIVATE KEY-----\n")
    named = ([f"{tmp_path}/*.url"], f"{tmp_path}/node.toml")
    assert escape.addresses(*named) == "", "they are this user's own"
    assert escape.addresses([], f"{tmp_path}/none") is None
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert escape.addresses(*named) == f"{tmp_path}/key, {tmp_path}/node.url"


# --- fairness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["astraea", "maxmin-ftf", "gandiva-fair"])
def test_a_policy_that_promises_each_tenant_its_part_keeps_that_to_five_per_cent(policy: str) -> None:
    had = self_test.ltgf(ArbiterSettings(policy=policy))
    assert set(had) == set(self_test.APPS)
    assert self_test.is_fair(had), had


@pytest.mark.parametrize("policy", ["fifo", "las"])
def test_a_policy_that_goes_by_apps_is_found_to_give_the_tenant_with_more_apps_more(policy: str) -> None:
    had = self_test.ltgf(ArbiterSettings(policy=policy))
    assert had["self-test-many"] > 1.3 > 0.7 > had["self-test-few"]
    assert not self_test.is_fair(had)


def configuration(folder: Path, text: str) -> Path:
    file = folder / "arbiter.toml"
    file.write_text(text)
    return file


def test_the_sites_own_settings_are_tried(tmp_path: Path) -> None:
    (check,) = site_checks.fairness(configuration(tmp_path, '[arbiter]\npolicy = "maxmin-ftf"\n'), "maxmin-ftf")
    assert (check.verdict, "maxmin-ftf, set as" in check.found) == ("ok", True), check
    text = """
    [arbiter]
    policy = "maxmin-ftf"
    tenants_only = true
    [[arbiter.tenants]]
    name = "vision"
    [policy.maxmin-ftf]
    tenants_first = false
    """
    (check,) = site_checks.fairness(configuration(tmp_path, text), "maxmin-ftf")
    assert (check.verdict, "it promises tenants no part" in check.found) == ("note", True), check


def test_a_configuration_that_is_not_in_force_or_cannot_be_read_is_told(tmp_path: Path) -> None:
    in_force, _ = site_checks.fairness(configuration(tmp_path, '[arbiter]\npolicy = "astraea"\n'), "fifo")
    assert "astraea, and the arbiter goes by fifo" in in_force.found
    assert "restart" in in_force.mend
    (check,) = site_checks.fairness(configuration(tmp_path, "[arbiter]\nlease = 5\n"), "fifo")
    assert (check.verdict, "lease" in check.found) == ("fail", True)


def test_without_the_configuration_the_policy_in_force_is_tried_as_it_is_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_checks, "CONFIG", tmp_path / "none")
    (check,) = site_checks.fairness(None, "fifo")
    assert (check.verdict, "fifo as it is shipped" in check.found) == ("note", True)
    (check,) = site_checks.fairness(None, "")
    assert (check.verdict, check.found) == ("note", "not tried: the policy is not known")


def test_a_promise_that_is_broken_is_a_fault() -> None:
    check = site_checks._tried({"self-test-many": 1.2, "self-test-few": 0.8}, "astraea", promised=True, where="")
    assert (check.verdict, "1.20 and 0.80" in check.found, "docs/policies.md" in check.mend) == ("fail", True, True)


def test_which_policies_promise_is_known_of_all_that_there_are() -> None:
    promising = {name for name in POLICIES if site_checks._promises(ArbiterSettings(policy=name))}
    assert promising == {"astraea", "gandiva-fair", "themis", "maxmin-ftf"}
    without = ArbiterSettings(policy="themis", policies=tables("themis", tenants_first=False))
    assert not site_checks._promises(without)
