"""`provision site`: what a run makes, what the next one keeps, and what neither overwrites."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the package cryptography, in the extra `users`, is not installed")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.verification import PolicyBuilder, Store
from msgspec.structs import replace
from typer.testing import CliRunner

from launch import cli
from launch.buses import open_bus
from launch.faults import Fault
from launch.site.provision import Fate, Host, Outcome, Wishes, provide, read_host
from protocol import exit_codes
from protocol.bus.amqp import AmqpBus
from protocol.messages import ARBITER, Party

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)
ONE = (Host("b1", "10.0.0.1"),)
THREE = (Host("b1", "10.0.0.1"), Host("b2", "b2.example.org"), Host("b3", "fd00::3", 5673))
SITE = Wishes(hosts=ONE, nodes=("n1", "n2"), owners=("alice",), gateways=("login1",))
USERS = ("arbiter", "node-n1", "node-n2", "app-alice", "gateway-login1")


def after(days: float) -> datetime:
    return NOW + timedelta(days=days)


def texts(folder: Path) -> Mapping[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def common_name(path: Path) -> str:
    ((name,),) = (list(part) for part in certificate(path).subject.rdns)
    return str(name.value)


def trusted(path: Path) -> Store:
    """Those whom the holder of a file trusts."""
    return Store(x509.load_pem_x509_certificates(path.read_bytes()))


def accepts(trusts: Path, shown: Path, now: datetime) -> bool:
    """Whether a broker that has these authorities takes that certificate of a client."""
    verifier = PolicyBuilder().store(trusted(trusts)).time(now).build_client_verifier()
    try:
        verifier.verify(certificate(shown), [])
    except x509.verification.VerificationError:
        return False
    return True


def fates(outcome: Outcome, fate: str) -> set[str]:
    return {each.of for each in outcome.fates if each.fate == fate}


def definitions(folder: Path, host: str = "b1") -> Any:
    return json.loads((folder / f"brokers/{host}/definitions.json").read_text())


# --- the first run --------------------------------------------------------------------------------------------------


def test_a_party_has_a_certificate_in_the_name_of_its_broker_user_and_an_address_that_names_it(tmp_path: Path) -> None:
    outcome = provide(tmp_path, SITE, NOW)
    assert fates(outcome, "made") == {"ca", "brokers/b1", *(f"parties/{user}" for user in USERS)}
    for user in USERS:
        folder = tmp_path / "parties" / user
        url = (folder / "broker.url").read_text().strip()
        bus = AmqpBus(url)
        assert (bus.user(ARBITER), common_name(folder / "cert.pem")) == (user, user)
        assert url.startswith(f"amqps://{user}@10.0.0.1:5671/gpu?auth=external&")
        assert f"keyfile=/etc/gpu-arbiter/tls/{user}/key.pem" in url
        assert accepts(tmp_path / "brokers/b1/ca.pem", folder / "cert.pem", after(364))


def test_a_broker_has_a_certificate_for_its_address_and_its_name(tmp_path: Path) -> None:
    provide(tmp_path, Wishes(hosts=THREE), NOW)
    for host in THREE:
        shown = certificate(tmp_path / f"brokers/{host.name}/cert.pem")
        names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        ips = [str(each) for each in names.get_values_for_type(x509.IPAddress)]
        assert {host.address, host.name} == {*ips, *names.get_values_for_type(x509.DNSName)}
        subject = x509.DNSName(host.name)
        builder = PolicyBuilder().store(trusted(tmp_path / "parties/arbiter/ca.pem")).time(NOW)
        assert builder.build_server_verifier(subject).verify(shown, [])


def test_private_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    provide(tmp_path / "made", Wishes(hosts=THREE, nodes=("n1",)), NOW)
    secret = [path for name in ("*.key", "key.pem", "erlang.cookie") for path in tmp_path.rglob(name)]
    assert len(secret) == 1 + 3 + 2 + 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700
    others = [path for path in tmp_path.rglob("*") if path.is_file() and path not in secret]
    assert [path for path in others if b"PRIVATE" in path.read_bytes()] == []


def test_the_broker_is_told_users_without_passwords_and_their_rights(tmp_path: Path) -> None:
    provide(tmp_path, SITE, NOW)
    told = definitions(tmp_path)
    assert [(user["name"], user["password_hash"], user["tags"]) for user in told["users"]] == [
        (user, "", "") for user in USERS
    ]
    rights = {
        each["user"]: (each["vhost"], each["configure"], each["write"], each["read"]) for each in told["permissions"]
    }
    assert rights["node-n1"] == ("gpu", "^$", r"^ga\.agents$", r"^node\.n1$")
    topics = {(each["user"], each["exchange"]): each["write"] for each in told["topic_permissions"]}
    assert topics["app-alice", "ga.agents"] == r"^(bid|hb)\.{username}$"
    assert topics["gateway-login1", "ga.dlx"] == "^$"
    assert told["vhosts"][0]["metadata"].get("default_queue_type") is None
    assert (tmp_path / "brokers/b1/enabled_plugins").read_text() == "[rabbitmq_auth_mechanism_ssl].\n"
    config = (tmp_path / "brokers/b1/rabbitmq.conf").read_text()
    assert {"listeners.tcp = none", "ssl_cert_login_from = common_name", "auth_mechanisms.1 = EXTERNAL"} <= {
        *config.splitlines()
    }
    assert "consumer_timeout = " in config
    assert "cluster" not in config


def test_three_brokers_are_one_cluster_whose_queues_are_replicated_and_whom_all_know(tmp_path: Path) -> None:
    provide(tmp_path, Wishes(hosts=THREE, nodes=("n1", "n2", "n3", "n4")), NOW)
    cookies = {(tmp_path / f"brokers/{host.name}/erlang.cookie").read_bytes() for host in THREE}
    assert len(cookies) == 1
    for host in THREE:
        assert definitions(tmp_path, host.name)["vhosts"][0]["metadata"]["default_queue_type"] == "quorum"
        lines = (tmp_path / f"brokers/{host.name}/rabbitmq.conf").read_text().splitlines()
        assert [line.rpartition(" ")[2] for line in lines if "nodes." in line] == [
            "rabbit@b1",
            "rabbit@b2",
            "rabbit@b3",
        ]
        assert {f"listeners.ssl.default = {host.port}", "cluster_partition_handling = pause_minority"} <= {*lines}
    urls = [path.read_text() for path in sorted(tmp_path.glob("parties/*/broker.url"))]
    hosts = [url.partition("@")[2].partition("/")[0].split(",") for url in urls]
    assert {tuple(sorted(each)) for each in hosts} == {("10.0.0.1:5671", "[fd00::3]:5673", "b2.example.org:5671")}
    assert len({each[0] for each in hosts}) > 1, "not all connect to the same one"


# --- the next run ---------------------------------------------------------------------------------------------------


def test_a_second_run_changes_nothing_and_needs_not_be_told_again(tmp_path: Path) -> None:
    provide(tmp_path, SITE, NOW)
    before = texts(tmp_path)
    outcome = provide(tmp_path, Wishes(), after(1))
    assert fates(outcome, "kept") == {"ca", "brokers/b1", *(f"parties/{user}" for user in USERS)}
    assert (outcome.written, texts(tmp_path)) == ((), before)


def test_a_new_node_and_a_new_owner_leave_the_others_as_they_were(tmp_path: Path) -> None:
    provide(tmp_path, SITE, NOW)
    before = texts(tmp_path)
    outcome = provide(tmp_path, Wishes(nodes=("n3",), owners=("bob",)), after(1))
    assert fates(outcome, "made") == {"parties/node-n3", "parties/app-bob"}
    now = texts(tmp_path)
    changed = {path for path, text in before.items() if now[path] != text}
    assert changed == {"site.json", "brokers/b1/definitions.json"}
    assert {"node-n1", "node-n3", "app-alice", "app-bob"} <= {user["name"] for user in definitions(tmp_path)["users"]}


def test_what_expires_soon_is_renewed_and_the_run_says_why(tmp_path: Path) -> None:
    provide(tmp_path, SITE, NOW)
    provide(tmp_path, Wishes(nodes=("n3",)), after(200))
    old = (tmp_path / "parties/node-n1/key.pem").read_bytes()
    outcome = provide(tmp_path, Wishes(renew_days=30), after(340))
    assert fates(outcome, "kept") == {"ca", "parties/node-n3"}
    renewed = next(each for each in outcome.fates if each.of == "parties/node-n1")
    assert renewed == Fate("parties/node-n1", "renewed", "2028-10-31", "it expires in 25 days")
    assert (tmp_path / "parties/node-n1/key.pem").read_bytes() != old
    assert accepts(tmp_path / "brokers/b1/ca.pem", tmp_path / "parties/node-n1/cert.pem", after(340 + 364))


def test_an_authority_that_ends_is_followed_by_another_and_both_are_trusted_meanwhile(tmp_path: Path) -> None:
    provide(tmp_path, SITE, after(-3630))
    provide(tmp_path, Wishes(renew_days=5), after(-10))
    (tmp_path / "old.pem").write_bytes((tmp_path / "parties/node-n1/cert.pem").read_bytes())
    outcome = provide(tmp_path, Wishes(), NOW)
    assert fates(outcome, "kept") == set()
    assert outcome.fates[0] == Fate("ca", "renewed", "2036-11-23", "it expires in 20 days")
    assert {each.why for each in outcome.fates[1:]} == {"the authority is new"}
    for shown in ("old.pem", "parties/node-n1/cert.pem"):
        assert accepts(tmp_path / "brokers/b1/ca.pem", tmp_path / shown, NOW), shown
    provide(tmp_path, Wishes(), after(300))
    assert not accepts(tmp_path / "brokers/b1/ca.pem", tmp_path / "old.pem", NOW), "it is forgotten once it has ended"


def test_a_certificate_ends_no_later_than_its_authority(tmp_path: Path) -> None:
    provide(tmp_path, Wishes(hosts=ONE, days=9000), NOW)
    ends = [certificate(tmp_path / name).not_valid_after_utc for name in ("ca.pem", "parties/arbiter/cert.pem")]
    assert ends[0] == ends[1]


def test_a_broker_that_moved_gets_another_certificate_and_all_hear_of_it(tmp_path: Path) -> None:
    provide(tmp_path, SITE, NOW)
    outcome = provide(tmp_path, Wishes(hosts=(Host("b1", "10.0.0.9"),)), NOW)
    assert [(each.of, each.why) for each in outcome.fates if each.fate == "renewed"] == [
        ("brokers/b1", "its address is new")
    ]
    assert {path.name for path in outcome.written} == {"cert.pem", "key.pem", "broker.url"}
    assert "@10.0.0.9:5671/" in (tmp_path / "parties/node-n2/broker.url").read_text()


def test_one_broker_becomes_three(tmp_path: Path) -> None:
    provide(tmp_path, SITE, NOW)
    outcome = provide(tmp_path, Wishes(hosts=THREE[1:]), NOW)
    assert fates(outcome, "made") == {"brokers/b2", "brokers/b3"}
    cookies = {path.read_bytes() for path in tmp_path.glob("brokers/*/erlang.cookie")}
    assert (len(cookies), cookies) == (1, {(tmp_path / "brokers/b1/erlang.cookie").read_bytes()})
    assert "rabbit@b3" in (tmp_path / "brokers/b1/rabbitmq.conf").read_text()


def test_this_host_is_the_broker_until_another_takes_its_place(tmp_path: Path) -> None:
    here = provide(tmp_path, replace(SITE, hosts=()), NOW).hosts[0].name
    before = texts(tmp_path)
    with pytest.raises(Fault, match=f"two brokers, here {' and '.join(sorted((here, 'b1')))}, stand") as refused:
        provide(tmp_path, Wishes(hosts=ONE), NOW)
    assert f"--remove {here};" in str(refused.value.next_step)
    assert texts(tmp_path) == before
    outcome = provide(tmp_path, Wishes(hosts=ONE, removed=(here,)), NOW)
    assert (outcome.hosts, "@10.0.0.1:5671/" in (tmp_path / "parties/node-n1/broker.url").read_text()) == (ONE, True)


def test_a_site_keeps_a_broker_and_never_has_two(tmp_path: Path) -> None:
    provide(tmp_path, replace(SITE, hosts=THREE), NOW)
    before = texts(tmp_path)
    for removed, says in [
        (("b1", "b2", "b3"), "--remove: without b1 and b2 and b3 the site has no broker"),
        (("b2",), "two brokers, here b1 and b3, stand still"),
    ]:
        with pytest.raises(Fault, match=says):
            provide(tmp_path, Wishes(removed=removed), NOW)
    assert texts(tmp_path) == before, "this host did not become a broker unasked"
    assert provide(tmp_path, Wishes(removed=("b2", "b3")), NOW).hosts == ONE


def test_who_is_removed_has_no_user_any_more_and_may_come_back(tmp_path: Path) -> None:
    provide(tmp_path, SITE, NOW)
    outcome = provide(tmp_path, Wishes(removed=("app-alice", "node-n2")), NOW)
    assert fates(outcome, "removed") == {"parties/app-alice", "parties/node-n2"}
    assert not (tmp_path / "parties/app-alice").exists()
    assert "app-alice" not in (tmp_path / "site.json").read_text()
    assert [user["name"] for user in definitions(tmp_path)["users"]] == ["arbiter", "node-n1", "gateway-login1"]
    assert fates(provide(tmp_path, Wishes(owners=("alice",)), NOW), "made") == {"parties/app-alice"}


@pytest.mark.parametrize("lost", ["parties/node-n1/cert.pem", "parties/node-n1/key.pem"])
def test_a_file_that_is_lost_is_made_anew_with_what_belongs_to_it(tmp_path: Path, lost: str) -> None:
    provide(tmp_path, SITE, NOW)
    (tmp_path / lost).unlink()
    outcome = provide(tmp_path, Wishes(), NOW)
    assert {each.of for each in outcome.fates if each.fate != "kept"} == {"parties/node-n1"}
    assert {path.name for path in outcome.written} == {"cert.pem", "key.pem"}
    assert fates(provide(tmp_path, Wishes(), NOW), "kept") >= {"parties/node-n1"}


# --- what is not overwritten ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["brokers/b1/rabbitmq.conf", "parties/node-n1/key.pem", "ca.pem", "parties/node-n3/cert.pem"]
)
def test_a_file_of_another_hand_stays_and_nothing_else_is_written(tmp_path: Path, path: str) -> None:
    provide(tmp_path, SITE, NOW)
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text("of an administrator\n")
    before = texts(tmp_path)
    with pytest.raises(Fault, match=f"{path} is not as this command made it"):
        provide(tmp_path, Wishes(nodes=("n3",)), NOW)
    assert texts(tmp_path) == before


def test_a_key_of_the_authority_that_is_kept_elsewhere_is_asked_for(tmp_path: Path) -> None:
    provide(tmp_path, SITE, NOW)
    key = (tmp_path / "ca.key").rename(tmp_path / "elsewhere")
    before = texts(tmp_path)
    with pytest.raises(Fault, match=r"ca\.key, the key of the authority, is not there"):
        provide(tmp_path, Wishes(nodes=("n3",)), NOW)
    assert texts(tmp_path) == before
    key.rename(tmp_path / "ca.key")
    assert fates(provide(tmp_path, Wishes(nodes=("n3",)), NOW), "made") == {"parties/node-n3"}


def test_a_run_that_is_cut_short_is_made_good_by_the_next(tmp_path: Path) -> None:
    provide(tmp_path, SITE, NOW)
    (tmp_path / "parties/node-n3").write_text("in the way of a folder")
    with pytest.raises(Fault, match="cannot be"):
        provide(tmp_path, Wishes(nodes=("n3",)), NOW)
    (tmp_path / "parties/node-n3").unlink()
    outcome = provide(
        tmp_path, Wishes(nodes=("n3", "n4")), NOW
    )  # and the users that were written meanwhile are its own
    assert fates(outcome, "made") == {"parties/node-n3", "parties/node-n4"}
    assert {"node-n3", "node-n4"} <= {user["name"] for user in definitions(tmp_path)["users"]}
    assert provide(tmp_path, Wishes(), NOW).written == ()


def test_a_certificate_that_was_renewed_without_its_key_is_renewed_again(tmp_path: Path) -> None:
    provide(tmp_path, SITE, NOW)
    in_the_way = tmp_path / "parties/node-n1/key.pem.tmp"
    in_the_way.mkdir()
    with pytest.raises(Fault, match="cannot be written"):
        provide(tmp_path, Wishes(), after(340))
    in_the_way.rmdir()
    outcome = provide(tmp_path, Wishes(), after(340))
    assert Fate("parties/node-n1", "renewed", "", "its key was another's") in [
        replace(each, until="") for each in outcome.fates
    ]
    shown = certificate(tmp_path / "parties/node-n1/cert.pem")
    key = load_pem_private_key((tmp_path / "parties/node-n1/key.pem").read_bytes(), None)
    assert shown.public_key() == key.public_key()


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("GPU_ARBITER_OUTPUT", raising=False)
    return lambda *words: CliRunner().invoke(cli.app, ["provision", *map(str, words)])


def test_the_command_says_what_it_made_and_what_is_left_to_do(tmp_path: Path, run: Any) -> None:
    done = run("site", tmp_path, "--nodes", "n1", "--owners", "alice", "--hosts", "b1=10.0.0.1", "--json")
    told = json.loads(done.stdout)
    assert (told["schema"], [each["of"] for each in told["certificates"]]) == (
        "provision-site/v1",
        ["ca", "brokers/b1", "parties/arbiter", "parties/node-n1", "parties/app-alice"],
    )
    assert {*told["written"]} == {str(path) for path in tmp_path.rglob("*") if path.is_file()} - {
        str(tmp_path / "site.json")
    }
    assert ["b1" in told["next"][0], "arbiter, node-n1" in told["next"][1]] == [True, True]
    done = run("site", tmp_path, "--nodes", "n2")
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [
        ["ca", "kept"],
        ["brokers/b1", "kept"],
        ["parties/arbiter", "kept"],
        ["parties/node-n1", "kept"],
        ["parties/node-n2", "made"],
        ["parties/app-alice", "kept"],
    ]
    assert "rabbitmqctl import_definitions" in done.stderr, "a new user needs no restart of the broker"
    assert "restart that broker" not in done.stderr
    done = run("site", tmp_path, "--hosts", "b2=10.0.0.2,b3=10.0.0.3")
    assert done.stderr.count("erlang.cookie to /var/lib/rabbitmq/.erlang.cookie, and restart that broker") == 3
    assert "forget_cluster_node rabbit@b3" in run("site", tmp_path, "--remove", "b2,b3").stderr
    assert "delete_user app-alice" in run("site", tmp_path, "--remove", "app-alice").stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("site",), "`provision site` needs a folder"),
        (("site", "F", "--nodes", "N1"), "--nodes: 'N1' is no id"),
        (("site", "F", "--owners", "alice,alice"), "--owners has alice twice"),
        (("site", "F", "--gateways", "a" * 60), f"--gateways: '{'a' * 60}' is too long for a certificate"),
        (("site", "F", "--hosts", "b1.example.org"), "--hosts: 'b1.example.org' is no short host name"),
        (("site", "F", "--hosts", "b1=10.0.0.1:99999"), "names no address"),
        (("site", "F", "--hosts", "b1=a_b"), "names no address"),
        (("site", "F", "--hosts", "b1,b2"), "two brokers, here b1 and b2, stand still as soon as one of them does"),
        (("site", "F", "--hosts", "b1,b2"), "name one in --hosts, or three"),
        (("site", "F", "--days", "30"), "--days 30 is not more than --renew-days 30"),
        (("site", "F", "--remove", "arbiter"), "--remove: arbiter is no node, owner, gateway or broker"),
        (("arbiter", "F"), "FOLDER is of `provision site`"),
        (("broker", "--hosts", "b1"), "--hosts is of `provision site`"),
        (("broker", "--days", "3"), "--days is of `provision site`"),
        (("arbiter", "--renew-days", "0"), "--renew-days is of `provision site`"),
        (("sites",), "'sites' is no participant"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any, words: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*words)
    assert (done.exit_code, says in done.stderr) == (exit_codes.USAGE, True), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_addresses_of_brokers_are_read_as_people_write_them() -> None:
    assert read_host("b1") == Host("b1", "b1", 5671)
    assert read_host("b1=b1.example.org:5672") == Host("b1", "b1.example.org", 5672)
    assert read_host("b1=fd00::3") == Host("b1", "fd00::3", 5671)
    assert read_host("b1=[fd00::3]:5672") == Host("b1", "fd00::3", 5672)


def test_an_address_with_a_host_that_cannot_be_is_refused_without_its_password() -> None:
    for url in ("amqp://u:secret@b1:x,b2/gpu", "amqp://u:secret@b1,,b2/gpu", "amqp://u:secret@b1, b2/gpu"):
        with pytest.raises(Fault, match=r"bus is 'amqp://\.\.\.@b1") as refused:
            open_bus(url)
        assert ("secret" in str(refused.value), refused.value.code) == (False, exit_codes.USAGE)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("amqp://h1:secret@h1,h2/gpu", "amqp://h1:***@h1,h2/gpu"),
        ("amqp://h1@h1:5672,[fd00::3]:5673/h1?auth=external", "amqp://h1@h1:5672,[fd00::3]:5673/h1?auth=external"),
        ("amqp://u:secret@h1/gpu", "amqp://u:***@h1/gpu"),
    ],
)
def test_a_bus_tells_all_its_brokers_and_no_password(url: str, told: str) -> None:
    assert AmqpBus(url).url == told


def test_a_party_is_who_the_address_says_also_for_a_gateway_that_speaks_for_others() -> None:
    bus = AmqpBus("amqps://gateway-login1@b1:5671,b2:5671/gpu?auth=external")
    assert bus.user(Party("app", "alice")) == "gateway-login1"
