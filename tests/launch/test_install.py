"""`install` gives a host its part in a site, once; `uninstall` takes it back, and leaves what belongs to users.

All of it below a folder (`--root`): this host's accounts, files and units stay as they are.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

import app_agent.config
import app_agent.gateway
import arbiter.config
import node_agent.config
import node_agent.launcher.config
from launch import cli, participants
from launch.site import host_files, roles, shipped
from launch.site.steps import Host, Look, plan
from protocol.bus.provision import broker_config, tls_config
from tests.support import rabbitmq

MISSING = [name for name in ("systemctl", "systemd-sysusers", "systemd-tmpfiles") if shutil.which(name) is None]
#: Files get owners, and accounts are made.
as_root = pytest.mark.skipif(
    bool(os.geteuid() or MISSING), reason=f"it needs root and {', '.join(MISSING) or 'systemd'}"
)
needs_systemctl = pytest.mark.skipif("systemctl" in MISSING, reason="systemctl is not on this host")
ACCOUNTS = {"gpu-arbiter", "gpu-gateway", "gpu-node", "gpu-train"}
#: What an installation writes besides units and configuration.
WRITTEN = (
    roles.LAUNCHER_DROP_IN,
    roles.SYSUSERS,
    roles.TMPFILES,
    roles.PROFILE,
    roles.OWNERS_PROFILE,
    roles.BROKER_CONFIG,
    host_files.TLS_CONFIG,
)
ADDRESS = "amqp://arbiter:secret@broker:5672/gpu"


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command of an environment that the units can start."""
    program = tmp_path / "env/bin/gpu-arbiter"
    program.parent.mkdir(parents=True)
    program.touch()
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    return program


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host on which nothing was installed, with a user and a broker's unit."""
    root = tmp_path / "root"
    write(root / "etc/passwd", "alice:x:2001:2001::/home/alice:/bin/sh\n")
    write(root / "lib/systemd/system/rabbitmq-server.service", "[Install]\nWantedBy=multi-user.target\n")
    return root


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def run(*words: str | Path, code: int = 0) -> tuple[str, str]:
    """Run one command; return its stdout and its stderr."""
    done = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done.stdout, done.stderr


def acts(told: str) -> dict[str, str]:
    """Of a printed plan, the act of each thing."""
    return {line[8:].partition(": ")[0]: line[:8].strip() for line in told.splitlines()}


def files(root: Path) -> dict[str, str]:
    """The files of a host with their texts."""
    there = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(root)): path.read_text() for path in there}


ROLES: Mapping[tuple[str, ...], set[str]] = {
    ("arbiter",): {"arbiter.toml"},
    ("node", "--id", "n7"): {"node.toml"},
    ("node", "--id", "n7", "--launcher"): {"node.toml", "launcher.toml"},
    ("login", "--id", "login7"): {"gateway.toml"},
    ("login", "--owner", "alice"): {"app-alice.toml"},
    ("broker",): set(),
}


@needs_systemctl
@pytest.mark.parametrize("words", ROLES, ids=" ".join)
def test_a_dry_run_prints_a_line_for_each_step_and_changes_nothing(root: Path, words: tuple[str, ...]) -> None:
    before = files(root)
    told, noted = run("install", *words, "--root", root, "--dry-run")
    assert "make" in set(acts(told).values()) <= {"make", "keep"}
    assert f"{list(acts(told).values()).count('make')} step" in noted
    assert files(root) == before


@as_root
@pytest.mark.parametrize("words", ROLES, ids=" ".join)
def test_an_installation_makes_everything_and_the_next_one_finds_nothing_left_to_do(
    root: Path, words: tuple[str, ...]
) -> None:
    planned = acts(run("install", *words, "--root", root, "--dry-run")[0])
    told, noted = run("install", *words, "--root", root)
    assert acts(told) == planned
    assert "done" in noted
    made = files(root)
    assert {Path(name).name for name in made if name.startswith("etc/gpu-arbiter/")} == ROLES[words]
    told, noted = run("install", *words, "--root", root)
    assert (set(acts(told).values()), noted.splitlines()[0]) == ({"keep"}, "nothing is left to do")
    assert files(root) == made


@as_root
def test_what_is_installed_is_read_by_the_daemons_and_started_by_systemd(root: Path, program: Path) -> None:
    for words in ROLES:
        if words != ("node", "--id", "n7"):
            run("install", *words, "--root", root)
    etc = root / "etc/gpu-arbiter"
    assert arbiter.config.load(etc / "arbiter.toml").arbiter.policy == "themis"
    node = node_agent.config.load(etc / "node.toml")
    assert (node.node, node.launcher) == ("n7", roles.LAUNCHER_SOCKET)
    assert node_agent.launcher.config.load(etc / "launcher.toml").socket == node.launcher
    assert app_agent.config.load(etc / "app-alice.toml").owner == "alice"
    gateway = app_agent.gateway.load(etc / "gateway.toml")
    assert gateway.name == "login7"
    assert (root / "etc/profile.d/gpu-arbiter.sh").read_text() == f"export GPU_ARBITER_URL=unix://{gateway.socket}\n"
    assert {name for name in ACCOUNTS if Host(root).account(name)} == ACCOUNTS
    started = {path.name for path in (root / "etc/systemd/system/multi-user.target.wants").iterdir()}
    ours = {name.replace("@", "@alice") for name in shipped.units()}
    assert started == {*ours, "rabbitmq-server.service"} - {"gpu-arbiter-web.service"}
    for name in shipped.units():
        assert f"ExecStart={program} " in (root / "etc/systemd/system" / name).read_text()
    assert (root / "etc/rabbitmq/conf.d/90-gpu-arbiter.conf").read_text() == broker_config()


@as_root
def test_training_of_a_node_without_a_launcher_has_a_home(root: Path) -> None:
    run("install", "node", "--id", "n1", "--root", root)
    home = (root / "var/lib/gpu-train").stat()
    assert ((home.st_uid, home.st_gid), home.st_mode & 0o7777) == (Host(root).account("gpu-train"), 0o750)


@as_root
def test_nothing_of_the_admins_is_overwritten(root: Path) -> None:
    mine = {
        "arbiter.toml": "# mine\n",
        "arbiter.url": "amqp://mine\n",
    }
    for name, text in mine.items():
        write(root / "etc/gpu-arbiter" / name, text)
    write(root / "etc/gpu-arbiter/broker/arbiter.url", ADDRESS)
    told, _ = run("install", "arbiter", "--root", root)
    assert {name: (root / "etc/gpu-arbiter" / name).read_text() for name in mine} == mine
    assert acts(told)["file /etc/gpu-arbiter/arbiter.toml"] == "keep"


@as_root
def test_the_brokers_address_is_for_root_alone_also_where_it_was_open(root: Path) -> None:
    address = write(root / "address", f"{ADDRESS}\n")
    run("install", "arbiter", "--root", root, "--bus-file", address)
    installed = root / "etc/gpu-arbiter/arbiter.url"
    assert (installed.read_text(), installed.stat().st_mode & 0o777) == (f"{ADDRESS}\n", 0o600)
    installed.chmod(0o644)
    told, _ = run("install", "arbiter", "--root", root, "--bus-file", address)
    assert "change  file /etc/gpu-arbiter/arbiter.url: its mode 644 is wider than 600" in told
    assert installed.stat().st_mode & 0o777 == 0o600


@as_root
def test_an_address_that_is_given_replaces_another(root: Path) -> None:
    old = write(root / "etc/gpu-arbiter/arbiter.url", "amqp://arbiter:old@broker\n")
    given = write(root / "address", ADDRESS)
    told, _ = run("install", "arbiter", "--root", root, "--bus-file", given)
    assert acts(told)["file /etc/gpu-arbiter/arbiter.url"] == "change"
    assert (old.read_text(), old.stat().st_mode & 0o777) == (f"{ADDRESS}\n", 0o600)
    aside = old.with_name("arbiter.url.old")
    assert (aside.read_text(), aside.stat().st_mode & 0o777) == ("amqp://arbiter:old@broker\n", 0o600)
    told, _ = run("install", "arbiter", "--root", root, "--bus-file", given)
    assert set(acts(told).values()) == {"keep"}


@needs_systemctl
@pytest.mark.parametrize(
    ("address", "says"),
    [
        (ADDRESS, "its address is for the user arbiter of the broker, and gpu-arbiter-node-agent.service is node-n1"),
        ("amqps://broker:5671/gpu", "its address is for no user of the broker, and "),
    ],
)
def test_an_address_of_another_participant_is_refused(root: Path, address: str, says: str) -> None:
    words = (
        "install",
        "node",
        "--id",
        "n1",
        "--root",
        root,
        "--dry-run",
        "--bus-file",
        write(root / "address", address),
    )
    assert f"--bus-file: {says}" in run(*words, code=2)[1]
    (root / "address").write_text("amqps://node-n1@b1:5671,b2:5671/gpu?cafile=x")
    run(*words)


@as_root
def test_the_address_that_the_brokers_host_made_is_taken_there(root: Path) -> None:
    made = write(root / "etc/gpu-arbiter/broker/node-n1.url", "amqp://node-n1:secret@broker:5672/gpu\n")
    _, noted = run("install", "node", "--id", "n1", "--root", root)
    assert (root / "etc/gpu-arbiter/node.url").read_text() == made.read_text()
    assert "PASSWORD" not in noted
    _, noted = run("install", "arbiter", "--root", root)
    assert "/etc/gpu-arbiter/arbiter.url <<< 'amqp://arbiter:PASSWORD@" in noted


# --- certificates -----------------------------------------------------------------------------------------------------


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    """What `provision site` makes for a site with one broker."""
    pytest.importorskip("cryptography", reason="the extra `users` is not installed")
    folder = tmp_path / "certs"
    run(
        "provision", "site", folder, "--nodes", "n1", "--owners", "alice", "--gateways", "g1", "--hosts", "hub=10.0.0.1"
    )
    return folder


CERTIFIED: Mapping[tuple[str, ...], tuple[str, str, str]] = {
    ("arbiter",): ("arbiter", "arbiter.url", "gpu-arbiter"),
    ("node", "--id", "n1"): ("node-n1", "node.url", "gpu-train"),
    ("node", "--id", "n1", "--launcher"): ("node-n1", "node.url", "gpu-node"),
    ("login", "--id", "g1"): ("gateway-g1", "gateway.url", "gpu-gateway"),
    ("login", "--owner", "alice"): ("app-alice", "app-alice.url", "alice"),
}


@as_root
@pytest.mark.parametrize("words", CERTIFIED, ids=" ".join)
@pytest.mark.parametrize("alone", [False, True], ids=["from the site's folder", "from a copy of the part"])
def test_a_daemon_gets_its_certificates_and_its_key_is_its_own(
    root: Path, certs: Path, words: tuple[str, ...], *, alone: bool
) -> None:
    user, address, account = CERTIFIED[words]
    given = shutil.copytree(certs / "parties" / user, root.parent / user) if alone else certs
    told, noted = run("install", *words, "--root", root, "--certs", given)
    assert "PASSWORD" not in noted
    for name, mode in (("ca.pem", 0o644), ("cert.pem", 0o644), ("key.pem", 0o600)):
        laid = root / "etc/gpu-arbiter/tls" / user / name
        assert laid.read_text() == (certs / "parties" / user / name).read_text()
        owner = Host(root).account(account) if name == "key.pem" else (0, 0)
        assert ((laid.stat().st_uid, laid.stat().st_gid), laid.stat().st_mode & 0o777) == (owner, mode)
    installed = root / "etc/gpu-arbiter" / address
    assert installed.read_text() == (certs / "parties" / user / "broker.url").read_text()
    assert installed.stat().st_mode & 0o777 == 0o600
    told, _ = run("install", *words, "--root", root, "--certs", given)
    assert set(acts(told).values()) == {"keep"}


@as_root
def test_certificates_that_were_laid_by_hand_and_closed_are_opened_to_the_daemon(root: Path, certs: Path) -> None:
    line = ("install", "node", "--id", "n1", "--root", root, "--certs", certs)
    run(*line)
    folder = root / "etc/gpu-arbiter/tls/node-n1"
    right = {path: path.stat() for path in (folder.parent, folder, *sorted(folder.iterdir()))}
    for path in right:
        path.chmod(0o700 if path.is_dir() else 0o400)
        os.chown(path, 2001, 2001)
    run(*line)
    for path, before in right.items():
        now = path.stat()
        assert (now.st_uid, now.st_gid, now.st_mode) == (before.st_uid, before.st_gid, before.st_mode), path
    assert list(folder.glob("*.old*")) == []
    (folder / "ca.pem").chmod(0o600)
    assert acts(run(*line)[0])["file /etc/gpu-arbiter/tls/node-n1/ca.pem"] == "change"
    assert set(acts(run(*line)[0]).values()) == {"keep"}


def test_a_site_is_provisioned_with_the_same_modes_by_a_root_who_keeps_files_closed(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra `users` is not installed")
    before = os.umask(0o077)
    try:
        run("provision", "site", tmp_path / "certs", "--nodes", "n1", "--hosts", "hub=10.0.0.1")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "certs/parties/node-n1").iterdir()}
    assert (modes["cert.pem"], modes["key.pem"]) == (0o644, 0o600)


@needs_systemctl
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/etc/gpu-arbiter/tls/node-n1/ca.pem", "/etc/ssl/certs/ca-certificates.crt"),
        ("/etc/gpu-arbiter/tls/node-n1/", "/etc/ssl/certs/"),
        ("/etc/gpu-arbiter/tls/node-n1/", "/etc/gpu-arbiter/../node-n1/"),
        ("/etc/gpu-arbiter/tls/node-n1/", "tls/node-n1/"),
        ("node-n1/key.pem", "node-n1/cert.pem"),
    ],
)
def test_an_address_whose_files_are_not_in_the_participants_folder_is_refused(
    root: Path, certs: Path, old: str, new: str
) -> None:
    url = certs / "parties/node-n1/broker.url"
    url.write_text(url.read_text().replace(old, new))
    line = ("install", "node", "--id", "n1", "--root", root, "--dry-run", "--certs", certs)
    assert "names other files than ca.pem, cert.pem, key.pem in one folder node-n1" in run(*line, code=2)[1]


@as_root
def test_a_plugin_is_added_between_the_admins_comments(root: Path) -> None:
    host, step = Host(root), roles.Plugin("ours")
    for text, after in (
        ("% [mine]\n[a, % first]\n b].\n", "% [mine]\n[a, % first]\n b,ours].\n"),
        ("[]. % none\n", "[ours].\n"),
        ("", "[ours].\n"),
    ):
        path = write(root / "etc/rabbitmq/enabled_plugins", text)
        step.do(host)
        assert path.read_text() == after
        assert step.look(host, []).act == "keep"


@as_root
def test_a_certificate_that_was_made_anew_replaces_the_old_one(root: Path, certs: Path) -> None:
    line = ("install", "node", "--id", "n1", "--root", root, "--certs", certs)
    run(*line)
    key = root / "etc/gpu-arbiter/tls/node-n1/key.pem"
    before = key.read_text()
    run("provision", "site", certs, "--renew-days", "800", "--days", "900")
    told, _ = run(*line)
    assert {what for what, act in acts(told).items() if act == "change"} == {
        f"file /etc/gpu-arbiter/tls/node-n1/{name}" for name in ("cert.pem", "key.pem")
    }
    assert key.read_text() == (certs / "parties/node-n1/key.pem").read_text() != before
    aside = key.with_name("key.pem.old").stat()
    assert (aside.st_uid, aside.st_mode & 0o777) == (0, 0o600)
    run("uninstall", "--root", root, "--purge")
    assert not key.parent.exists()


@as_root
def test_the_broker_gets_certificates_beside_what_is_the_admins(root: Path, certs: Path) -> None:
    with (root / "etc/passwd").open("a") as accounts:
        accounts.write("rabbitmq:x:2999:2998::/var/lib/rabbitmq:/bin/sh\n")
    mine = write(root / "etc/rabbitmq/rabbitmq.conf", "log.console = true\n")
    plugins = write(root / "etc/rabbitmq/enabled_plugins", "[rabbitmq_management]. % mine\n")
    line = ("install", "broker", "--root", root, "--certs", certs)
    told, noted = run(*line)
    assert "91-gpu-arbiter-tls.conf: TLS alone: clients without a certificate" in told
    assert f"next: copy {certs}/parties/node-n1 to the host of node-n1: --certs node-n1 there" in noted
    assert mine.read_text() == "log.console = true\n"
    assert plugins.read_text() == "[rabbitmq_management,rabbitmq_auth_mechanism_ssl]. % mine\n"
    lines = (root / "etc/rabbitmq/conf.d/91-gpu-arbiter-tls.conf").read_text()
    assert lines == tls_config(5671, ["hub"], "/etc/rabbitmq/gpu-arbiter")
    named = set(re.findall("= (/etc/rabbitmq/.*)", lines))
    assert len(named) == 4
    assert all((root / path.lstrip("/")).is_file() for path in named)
    key = (root / "etc/rabbitmq/gpu-arbiter/key.pem").stat()
    assert (key.st_uid, key.st_gid, key.st_mode & 0o777) == (2999, 2998, 0o600)
    assert set(acts(run(*line)[0]).values()) == {"keep"}
    assert set(acts(run("install", "broker", "--root", root)[0]).values()) == {"keep"}, "TLS stays"
    refused = run("install", "broker", "--root", root, "--party", "node-n2", code=2)[1]
    assert "this broker lets none in" in refused
    assert "provision site" in refused
    told, noted = run("uninstall", "--root", root)
    assert acts(told)["/etc/rabbitmq/gpu-arbiter"] == "keep"
    assert "next: rabbitmqctl delete_user app-alice" in noted
    run("uninstall", "--root", root, "--purge")
    left = [name for name in files(root) if name.startswith("etc/rabbitmq/")]
    assert set(left) == {"etc/rabbitmq/enabled_plugins", "etc/rabbitmq/rabbitmq.conf"}


@as_root
def test_a_broker_that_ran_when_its_certificates_came_is_started_anew_by_the_next_installation(
    root: Path, certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (root / "etc/passwd").open("a") as accounts:
        accounts.write("rabbitmq:x:2999:2998::/var/lib/rabbitmq:/bin/sh\n")
    clock = write(tmp_path / "started", "")
    asked = f'case "$*" in *is-active*) echo active;; *is-enabled*) echo enabled;; *show*) cat {clock};; esac'
    program = write(tmp_path / "bin/systemctl", f"#!/bin/sh\n{asked}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    run("install", "broker", "--root", root, "--certs", certs)

    def look(start: datetime) -> Look:
        clock.write_text(f"{start:%a %Y-%m-%d %H:%M:%S.%f} UTC\n")
        host = Host(root)
        wish = roles.Wish("broker", host_name="hub", start=True)
        wish = replace(wish, given=roles.certificates(wish, host, certs))
        *files, last = plan(roles.steps_of(wish, host), host)
        assert {each.look.act for each in files} == {"keep"}
        return last.look

    now = datetime.now(UTC)
    assert look(now - timedelta(hours=1)).act == "change", "it goes on in the clear"
    assert "is newer than its start" in look(now - timedelta(hours=1)).why
    assert look(now + timedelta(seconds=1)) == Look("keep")
    later = now.timestamp() + 60
    os.utime(root / roles.PLUGINS.lstrip("/"), (later, later))
    assert look(now + timedelta(seconds=1)).act == "change", "a plugin is loaded at the start only"
    assert look(now + timedelta(seconds=90)) == Look("keep")


@needs_systemctl
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("node", "--id", "n2", "--certs", "certs"), "/parties/node-n2/broker.url"),
        (("node", "--id", "n1", "--certs", "certs/parties/app-alice"), "is of app-alice, and this host's daemon is"),
        (("broker", "--certs", "certs/parties"), "--certs: there is no broker in "),
        (("broker", "--certs", "certs", "--party", "arbiter"), "--certs brings participants and addresses, in place"),
        (("arbiter", "--certs", "certs", "--bus-file", "x"), "--certs brings participants and addresses, in place"),
    ],
)
def test_certificates_of_another_host_are_refused(
    root: Path, certs: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(certs.parent)
    before = files(root)
    assert says in run("install", "--root", root, "--dry-run", *words, code=2)[1]
    assert files(root) == before


@needs_systemctl
def test_a_broker_of_three_is_set_up_by_hand(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra `users` is not installed")
    hosts = "b1=10.0.0.1,b2=10.0.0.2,b3=10.0.0.3"
    run("provision", "site", tmp_path / "certs", "--hosts", hosts)
    line = ("install", "broker", "--root", root, "--dry-run", "--certs")
    assert "has b1, b2, b3" in run(*line, tmp_path / "certs", code=2)[1]
    assert "is of one of three brokers" in run(*line, tmp_path / "certs/brokers/b2", code=2)[1]


def test_a_user_who_logs_in_finds_an_app_agent_of_their_own(root: Path) -> None:
    text = roles.OWNERS_TEXT.replace("/etc/", f"{root}/etc/")
    line = ["sh", "-c", f'{text}\necho "${{GPU_ARBITER_URL:-none}}"']
    me = pwd.getpwuid(os.geteuid()).pw_name
    assert subprocess.run(line, capture_output=True, text=True, check=True).stdout == "none\n"
    write(root / f"etc/gpu-arbiter/app-{me}.toml", "")
    said = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    assert said == f"unix:///run/gpu-arbiter-app/{me}/control.sock\n"
    assert said.strip().removeprefix("unix://") in shipped.configurations([], [me])[f"app-{me}.toml"]


@as_root
def test_what_the_package_has_brought_is_kept(root: Path) -> None:
    for name in shipped.units():
        write(root / "lib/systemd/system" / name, shipped.units()[name])
    for name, kind in (("sysusers.conf", "sysusers.d"), ("tmpfiles.conf", "tmpfiles.d")):
        write(root / "usr/lib" / kind / "gpu-arbiter.conf", shipped.file(name))
    told, _ = run("install", "node", "--id", "n1", "--root", root)
    found = acts(told)
    packaged = ("/etc/sysusers.d/gpu-arbiter.conf", "/etc/tmpfiles.d/gpu-arbiter.conf", f"{roles.UNITS}/{roles.NODE}")
    assert [found[f"file {path}"] for path in packaged] == ["keep"] * 3
    assert Host(root).account("gpu-train")
    assert not any((root / path.lstrip("/")).exists() for path in packaged)
    assert (root / f"etc/systemd/system/multi-user.target.wants/{roles.NODE}").is_symlink()
    told, _ = run("uninstall", "--root", root)
    assert "dpkg --remove gpu-arbiter" in told
    assert (root / "lib/systemd/system" / roles.NODE).exists()


@as_root
def test_a_unit_of_another_version_is_replaced_and_kept_beside(root: Path) -> None:
    unit = write(root / "etc/systemd/system/gpu-arbiter.service", "[Service]\nExecStart=/bin/old\n")
    told, _ = run("install", "arbiter", "--root", root)
    assert acts(told)["file /etc/systemd/system/gpu-arbiter.service"] == "change"
    assert unit.with_name("gpu-arbiter.service.old").read_text() == "[Service]\nExecStart=/bin/old\n"
    assert "/bin/old" not in unit.read_text()


@as_root
def test_what_was_put_aside_before_is_not_overwritten(root: Path) -> None:
    unit = root / "etc/systemd/system/gpu-arbiter.service"
    for name in ("old", "old.1", "old.2"):
        write(unit, name)
        told, _ = run("install", "arbiter", "--root", root)
        assert (
            f"change  file /etc/systemd/system/{unit.name}: it has another text, which is kept as {unit.name}.{name}"
            in told
        )
    for name in ("old", "old.1", "old.2"):
        assert unit.with_name(f"{unit.name}.{name}").read_text() == name
    told, _ = run("uninstall", "--root", root, "--purge")
    assert list(unit.parent.glob("gpu-arbiter.service*")) == []


@as_root
def test_a_unit_of_another_environment_is_not_put_aside(root: Path, program: Path) -> None:
    unit = write(
        root / "etc/systemd/system/gpu-arbiter.service", shipped.units("/srv/old/gpu-arbiter")["gpu-arbiter.service"]
    )
    told, _ = run("install", "arbiter", "--root", root)
    assert acts(told)["file /etc/systemd/system/gpu-arbiter.service"] == "change"
    assert unit.read_text() == shipped.units(str(program))["gpu-arbiter.service"]
    assert list(unit.parent.glob("*.old*")) == []


@as_root
def test_what_is_a_link_is_left_alone_as_a_unit_that_is_masked(root: Path) -> None:
    elsewhere = write(root / "elsewhere", "mine")
    elsewhere.chmod(0o666)
    unit = root / "etc/systemd/system/gpu-arbiter.service"
    unit.parent.mkdir(parents=True)
    unit.symlink_to(elsewhere)
    told, noted = run("install", "arbiter", "--root", root, code=1)
    assert f"keep    file /etc/systemd/system/gpu-arbiter.service: it is a link to {elsewhere}" in told
    assert "failed" in noted, "systemctl enables no such unit, and says so"
    assert (elsewhere.read_text(), elsewhere.stat().st_mode & 0o777) == ("mine", 0o666)


@as_root
def test_daemons_may_read_what_was_made_by_a_root_who_keeps_files_closed(root: Path) -> None:
    before = os.umask(0o077)
    try:
        run("install", "broker", "--root", root)
        run("install", "arbiter", "--root", root)
    finally:
        os.umask(before)
    for name in ("etc/rabbitmq/conf.d", "etc/rabbitmq/conf.d/90-gpu-arbiter.conf", "etc/gpu-arbiter/arbiter.toml"):
        assert (root / name).stat().st_mode & 0o004, name


@needs_systemctl
def test_lines_that_an_admin_has_put_into_the_brokers_own_file_are_enough(root: Path) -> None:
    main = write(root / "etc/rabbitmq/rabbitmq.conf", f"listeners.tcp.1 = 5672\n{broker_config()}")
    told, _ = run("install", "broker", "--root", root, "--dry-run")
    assert "keep    /etc/rabbitmq/rabbitmq.conf: it has the lines" in told
    main.write_bytes("# f\u00fcr alle\n".encode("latin-1") + main.read_bytes())
    assert run("install", "broker", "--root", root, "--dry-run")[0] == told
    main.write_text(main.read_text(encoding="latin-1"))
    main.write_text(main.read_text().replace("heartbeat = 10", "heartbeat = 60"))
    told, _ = run("install", "broker", "--root", root, "--dry-run")
    assert acts(told)["file /etc/rabbitmq/conf.d/90-gpu-arbiter.conf"] == "make"


@needs_systemctl
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("node", "--id", "N 1"), "--id: 'N 1' is no id"),
        (("master",), "'master' is no role of a host"),
        (("arbiter", "--launcher"), "--launcher is not for the role arbiter, but for node"),
        (("broker", "--bus-file", "x"), "--bus-file is not for the role broker, but for arbiter or node or login"),
        (("login", "--id", "l", "--owner", "alice"), "--id names a gateway, which --owner replaces"),
        (("login", "--owner", "nobody-here"), "--owner: this host has no user nobody-here"),
        (("broker", "--party", "arbiter"), "--party asks the broker that runs here"),
        (("arbiter", "--bus-file", "/nowhere"), "--bus-file: /nowhere cannot be read"),
        (("arbiter", "--bus-file", "/etc/hostname"), "--bus-file: /etc/hostname has no address of a broker"),
        (("arbiter", "--root", "/nowhere"), "--root: there is no folder /nowhere"),
        (("arbiter", "--start"), "there is no /etc/gpu-arbiter/arbiter.url, without which gpu-arbiter.service does"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_done(root: Path, words: tuple[str, ...], says: str) -> None:
    before = files(root)
    assert says in run("install", "--root", root, "--dry-run", *words, code=2)[1]
    assert files(root) == before


@needs_systemctl
def test_an_id_that_differs_from_the_installed_one_is_named(root: Path) -> None:
    write(root / "etc/gpu-arbiter/node.toml", 'node = "n1"\ngpus = "nvml"\n')
    assert (
        "--id is n2, and /etc/gpu-arbiter/node.toml says node = 'n1'"
        in run("install", "node", "--id", "n2", "--root", root, "--dry-run", code=2)[1]
    )
    told, _ = run("install", "node", "--root", root, "--dry-run")
    assert acts(told)["file /etc/gpu-arbiter/node.toml"] == "keep"


@needs_systemctl
@pytest.mark.parametrize(
    ("setting", "words", "says"),
    [
        ("", ("--launcher",), "--launcher is given, and /etc/gpu-arbiter/node.toml says launcher = ''"),
        (f'launcher = "{roles.LAUNCHER_SOCKET}"', (), "--launcher is not given, and /etc/gpu-arbiter/node.toml says"),
    ],
    ids=["without a launcher", "with a launcher"],
)
def test_a_node_is_not_installed_otherwise_than_its_configuration_says(
    root: Path, setting: str, words: tuple[str, ...], says: str
) -> None:
    config = write(root / "etc/gpu-arbiter/node.toml", f'node = "n1"\ngpus = "nvml"\n{setting}\n')
    assert says in run("install", "node", *words, "--root", root, "--dry-run", code=2)[1]
    config.write_text(config.read_text().replace(setting, "") if setting else f'launcher = "{roles.LAUNCHER_SOCKET}"\n')
    run("install", "node", *words, "--root", root, "--dry-run")


def test_who_is_not_root_may_only_look(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for verb in (("install", "arbiter"), ("uninstall",)):
        _, noted = run(*verb, "--root", root, code=7)
        assert noted.startswith("gpu-arbiter: only root can do this")
        assert "--dry-run" in noted


@as_root
def test_a_step_that_fails_is_named_and_the_next_try_goes_on_from_there(root: Path) -> None:
    obstacle = write(root / "etc/systemd/system/multi-user.target.wants", "not a folder")
    _, noted = run("install", "login", "--id", "login1", "--root", root, code=1)
    assert f"start of {roles.GATEWAY} with the host: `systemctl enable {roles.GATEWAY}` failed: " in noted
    obstacle.unlink()
    told, _ = run("install", "login", "--id", "login1", "--root", root)
    assert acts(told)["file /etc/gpu-arbiter/gateway.toml"] == "keep"
    assert acts(told)[f"start of {roles.GATEWAY} with the host"] == "make"


@as_root
def test_the_document_names_each_step(root: Path) -> None:
    told = json.loads(run("install", "arbiter", "--root", root, "--json")[0])
    assert (told["schema"], told["done"], told["left"]) == ("install/v1", len(told["steps"]), 0)
    again = json.loads(run("install", "arbiter", "--root", root, "--json")[0])
    assert (again["done"], {step["act"] for step in again["steps"]}) == (0, {"keep"})
    gone = json.loads(run("uninstall", "--root", root, "--dry-run", "--json")[0])
    assert (gone["schema"], gone["done"], gone["left"]) == (
        "uninstall/v1",
        0,
        sum(step["act"] == "remove" for step in gone["steps"]),
    )


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[rabbitmq.PrivateRabbitMQ]:
    """A broker of its own, which `rabbitmqctl` of this test asks."""
    with rabbitmq.PrivateRabbitMQ() as broker:
        for name, value in broker.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PATH", f"{rabbitmq.CONTROL.parent}:{os.environ['PATH']}")
        yield broker


@as_root
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(not rabbitmq.available(), reason="rabbitmq-server is not installed")
def test_a_broker_user_whose_making_was_cut_short_gets_its_rights(root: Path, broker: rabbitmq.PrivateRabbitMQ) -> None:
    host = Host(root)
    address = write(root / roles.ADDRESSES.lstrip("/") / "arbiter.url", ADDRESS)
    lines = participants.commands("arbiter", "/")
    step = roles.Participant("arbiter", tuple(lines), "/", "broker:5672/%2F")
    broker.control("add_user", "arbiter", "secret")
    assert step.look(host, []) == Look("change", "it has not got all of its rights")
    broker.control(*shlex.split(lines[2])[1:])
    assert step.look(host, []).act == "change", "those for topics are missing"
    step.do(host)
    assert step.look(host, []) == Look("keep")
    assert "max-connections" in broker.control("list_user_limits", "--user", "arbiter")
    assert address.read_text() == ADDRESS, "its password is not another"


# --- uninstall --------------------------------------------------------------------------------------------------------


@pytest.fixture
def whole(root: Path) -> Path:
    """A host with all roles, and state of each daemon."""
    for words in ROLES:
        if words != ("node", "--id", "n7"):
            run("install", *words, "--root", root)
    write(root / host_files.TLS_CONFIG.lstrip("/"), tls_config(5671, folder=host_files.FOLDER))
    write(root / "etc/systemd/system/gpu-arbiter.service.d/override.conf", "[Service]\n")
    own = write(root / "etc/systemd/system/gpu-arbiter-nightly.service", "[Install]\nWantedBy=multi-user.target\n")
    (own.parent / "multi-user.target.wants" / own.name).symlink_to(own)
    for name in ("gpu-arbiter/ledger.db", "gpu-arbiter-node/agent.json", "gpu-arbiter-node/logs/a.log"):
        write(root / "var/lib" / name, name)
    write(root / "var/lib/gpu-arbiter-app/alice/app-alice.db", "")
    write(root / "var/lib/gpu-train/cache", "")
    write(root / "home/alice/checkpoints/run/a-1.0/step-5", "")
    return root


@as_root
def test_it_removes_what_install_made_and_leaves_state_configuration_and_the_users_files(whole: Path) -> None:
    (whole / "etc/gpu-arbiter/arbiter.toml").write_text("# mine\n")
    told, _ = run("uninstall", "--root", whole)
    left = files(whole)
    mine = [name for name in left if "gpu-arbiter" in name and not name.startswith(("etc/gpu-arbiter/", "var/lib/"))]
    assert set(mine) == {
        "etc/systemd/system/gpu-arbiter.service.d/override.conf",
        "etc/systemd/system/gpu-arbiter-nightly.service",
    }
    assert [path.name for path in whole.rglob("*.wants/gpu-arbiter*")] == ["gpu-arbiter-nightly.service"]
    assert left["etc/gpu-arbiter/arbiter.toml"] == "# mine\n"
    assert {name for name in left if name.startswith(("var/lib", "home"))} == {
        "var/lib/gpu-arbiter/ledger.db",
        "var/lib/gpu-arbiter-node/agent.json",
        "var/lib/gpu-arbiter-node/logs/a.log",
        "var/lib/gpu-arbiter-app/alice/app-alice.db",
        "var/lib/gpu-train/cache",
        "home/alice/checkpoints/run/a-1.0/step-5",
    }
    assert acts(told)["/var/lib/gpu-arbiter"] == "keep"


@as_root
def test_a_purge_leaves_what_belongs_to_users_alone(whole: Path) -> None:
    run("uninstall", "--root", whole, "--purge")
    accounts = {name for name in files(whole) if name.startswith("etc/") and name.count("/") == 1}
    assert files(whole).keys() - accounts == {
        "lib/systemd/system/rabbitmq-server.service",
        "etc/systemd/system/gpu-arbiter-nightly.service",
        "var/lib/gpu-arbiter-node/logs/a.log",
        "var/lib/gpu-train/cache",
        "home/alice/checkpoints/run/a-1.0/step-5",
    }
    told, noted = run("uninstall", "--root", whole, "--purge")
    assert set(acts(told).values()) == {"keep"}
    assert noted.startswith("nothing is left to do")


@as_root
@pytest.mark.parametrize("purge", [(), ("--purge",)], ids=["without purge", "with purge"])
@pytest.mark.parametrize("name", [path.lstrip("/") for path in (*WRITTEN, "/etc/systemd/system/gpu-arbiter.service")])
def test_what_an_admin_has_edited_is_left(whole: Path, name: str, purge: tuple[str, ...]) -> None:
    write(whole / roles.TMPFILES.lstrip("/"), shipped.file("tmpfiles.conf"))  # of a node without a launcher
    mine = (whole / name).read_text() + "# mine\n"
    (whole / name).write_text(mine)
    told, _ = run("uninstall", "--root", whole, *purge)
    if purge and name == roles.LAUNCHER_DROP_IN.lstrip("/"):
        assert not (whole / name).parent.exists(), "settings of units are configuration"
        return
    assert f"keep    /{name}: it is not as `install` writes it" in told
    assert (whole / name).read_text() == mine
    gone = {path.lstrip("/") for path in WRITTEN} - {name}
    assert not any((whole / each).exists() for each in gone)


@as_root
def test_what_was_put_aside_goes_with_purge_only(root: Path) -> None:
    unit = write(root / "etc/systemd/system/gpu-arbiter.service", "[Service]\nExecStart=/bin/old\n")
    other = write(root / "etc/systemd/system/gpu-arbiter.service.older", "")
    run("install", "arbiter", "--root", root)
    old = unit.with_name("gpu-arbiter.service.old")
    told, _ = run("uninstall", "--root", root)
    assert acts(told)[f"/etc/systemd/system/{old.name}"] == "keep"
    assert (old.read_text(), unit.exists()) == ("[Service]\nExecStart=/bin/old\n", False)
    run("uninstall", "--root", root, "--purge")
    assert (old.exists(), other.exists()) == (False, True)


@as_root
@pytest.mark.parametrize("target", ["/dev/null", "/srv/units/gpu-arbiter.service"])
def test_a_unit_that_is_a_link_of_the_admins_stays(root: Path, target: str) -> None:
    write(root / "srv/units/gpu-arbiter.service", "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=a.target\n")
    unit = root / "etc/systemd/system/gpu-arbiter.service"
    wanted = unit.parent / "a.target.wants/gpu-arbiter.service"
    wanted.parent.mkdir(parents=True)
    for link in (unit, wanted):
        link.symlink_to(target)
    for purge in ((), ("--purge",)):
        told, _ = run("uninstall", "--root", root, *purge)
        assert f"keep    /etc/systemd/system/gpu-arbiter.service: it is a link to {target}" in told
        assert str(unit.readlink()) == target
    assert wanted.is_symlink() == (target == "/dev/null"), "systemctl leaves what is masked as it is"


@as_root
def test_a_dry_run_of_an_uninstallation_removes_nothing(whole: Path) -> None:
    before = files(whole)
    planned, _ = run("uninstall", "--root", whole, "--purge", "--dry-run")
    assert files(whole) == before
    assert run("uninstall", "--root", whole, "--purge")[0] == planned


@as_root
@pytest.mark.parametrize("state_dir", ["/var/lib/gpu-arbiter-node", "/srv/state"])
def test_it_refuses_while_training_runs_here_unless_it_is_forced(root: Path, state_dir: str) -> None:
    run("install", "node", "--id", "n1", "--root", root)
    config = root / "etc/gpu-arbiter/node.toml"
    config.write_text(config.read_text().replace("/var/lib/gpu-arbiter-node", state_dir))
    lock = write(root / state_dir.lstrip("/") / "workers/alice-1.0-a1/lock", "")
    write(root / state_dir.lstrip("/") / "workers/alice-1.1-a1/spec.json", "")  # of one that was never started
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        before = files(root)
        _, noted = run("uninstall", "--root", root, code=4)
        assert noted.startswith("gpu-arbiter: training runs on this node: alice-1.0-a1\n")
        assert files(root) == before
        run("uninstall", "--root", root, "--force")
    assert not (root / roles.UNITS.lstrip("/") / roles.NODE).exists()
    run("uninstall", "--root", root)  # the task is over


@as_root
@pytest.mark.parametrize("text", ["{", "[]", '{"users": [1]}', '{"users": 3}', "", "{}"])
def test_damaged_definitions_of_a_broker_hold_no_removal_up(root: Path, text: str) -> None:
    write(root / host_files.FOLDER.lstrip("/") / host_files.DEFINITIONS, text)
    write(root / roles.ADDRESSES.lstrip("/") / "arbiter.url", ADDRESS)
    assert "next: rabbitmqctl delete_user arbiter" in run("uninstall", "--root", root)[1]


@as_root
def test_a_damaged_configuration_of_a_node_holds_no_forced_removal_up(root: Path) -> None:
    run("install", "node", "--id", "n1", "--root", root)
    config = write(root / "etc/gpu-arbiter/node.toml", "node = \n")
    assert f"{config} cannot be read" in run("uninstall", "--root", root, code=1)[1]
    run("uninstall", "--root", root, "--force")
    assert not (root / roles.UNITS.lstrip("/") / roles.NODE).exists()
    assert config.exists()


@as_root
@pytest.mark.parametrize("link", ["etc/gpu-arbiter", "etc/systemd", "var/lib/gpu-arbiter-node", "var/lib"])
def test_no_link_leads_out_of_the_folder_that_is_given(root: Path, tmp_path: Path, link: str) -> None:
    outside = tmp_path / "outside"
    for name in ("gpu-arbiter-node/logs/a.log", "gpu-arbiter-node/agent.json", "logs/a.log", "arbiter.toml"):
        write(outside / name, "mine")
    (root / link).parent.mkdir(parents=True, exist_ok=True)
    (root / link).symlink_to(outside)
    before = files(outside)
    verb = ("uninstall", "--purge") if link.startswith("var") else ("install", "arbiter")
    _, noted = run(*verb, "--root", root, code=1)
    assert f"a link on the way to it leads to {outside}" in noted
    assert files(outside) == before
    assert not (root / "etc/sysusers.d").exists(), "nothing is done before"


@as_root
def test_a_link_within_the_folder_that_is_given_is_followed(root: Path) -> None:
    (root / "srv/etc").mkdir(parents=True)
    (root / "etc/gpu-arbiter").symlink_to("../srv/etc")
    run("install", "arbiter", "--root", root)
    assert (root / "srv/etc/arbiter.toml").is_file()


def test_steps_that_only_look_change_nothing_even_as_root(root: Path) -> None:
    host = Host(root)
    before = files(root)
    if "systemctl" not in MISSING:
        plan(roles.steps_of(roles.Wish("node", id="n1", launcher=True), host), host)
    assert files(root) == before
