"""The commands of docs/operations.md, "What may fail: three levels", as they stand there; hosts are processes.

Each command is run in the order of the page. The brokers of level 2 fail in `test_provisioned_site`.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the package cryptography, in the extra `users`, is not installed")

from arbiter.config import ArbiterConfig
from launch import doctor
from launch.site.site import as_toml
from protocol.journal.database import _unawaited
from protocol.messages import ARBITER
from tests.support import pages, postgres, rabbitmq
from tests.support.memory_site import QUICK, MemorySite, playing
from tests.support.needs import lack
from tests.support.patience import PATIENCE_S
from tests.support.patient_bus import patient_bus
from tests.support.ports import free_port
from tests.support.postgres import PrivatePostgres
from tests.support.rabbitmq import PrivateRabbitMQ, Provisioned

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAGE = pages.DOCS / "operations.md"
CERTIFICATES = "### TLS and certificates"
#: Of the hosts that a database lets in.
ADDRESSES = "10.0.0.1/32 10.0.0.2/32"


def commands(heading: str) -> list[str]:
    """The commands below a heading, one by one."""
    return [command for block in pages.below(PAGE, heading) for command in block.commands()]


def of_database() -> tuple[list[str], list[str], list[str]]:
    """The commands of level 2 for the database: as postgres on db1, on db2, and on db1 when db2 runs."""
    one, two, three, *_brokers = pages.below(PAGE, "### Level 2")
    return one.commands(), two.commands(), three.commands()


def in_prose(words: str) -> str:
    """A command that stands in the midst of a sentence."""
    (found,) = [part for part in PAGE.read_text(encoding="utf-8").split("`") if part.startswith(words)]
    return found


class Hosts:
    """The hosts that the page speaks of: their files are in one folder."""

    def __init__(self, folder: Path, places: Mapping[str, str]) -> None:
        self.folder = folder
        ours = {"/backup/": f"{folder}/backup/", "/etc/gpu-arbiter/": f"{folder}/etc/", ADDRESSES: "127.0.0.1/32"}
        self._places = {**ours, **places}
        for name in ("backup", "etc", "bin"):
            (folder / name).mkdir(exist_ok=True)
        program = folder / "bin/gpu-arbiter"  # the command line of this tree, whatever is installed
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -P {pages.ROOT}/gpu_arbiter.py "$@"\n')
        program.chmod(0o755)

    def here(self, line: str) -> str:
        """The line with the places of this host."""
        for place, ours in self._places.items():
            line = line.replace(place, ours)
        return line

    def type(self, line: str) -> str:
        """Type a command of ours; return what it says."""
        environment = {**os.environ, "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "HOME": str(self.folder)}
        command = ["bash", "-c", self.here(line)]
        done = subprocess.run(
            command, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0 or " doctor " in line, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def reach_others(self) -> None:
        """Have the folders of other hosts below that of this one, and `scp` copy to them."""
        scp = self.folder / "bin/scp"
        scp.write_text(
            f'#!/bin/bash\nto="${{@: -1}}"; to="{self.folder}/${{to%%:*}}${{to#*:}}"\n'
            'mkdir -p "$to" && cp "${@:1:$#-1}" "$to"\n'
        )
        scp.chmod(0o755)

    def configure(self, name: str, config: ArbiterConfig) -> None:
        (self.folder / "etc" / name).write_text(as_toml(config))


def test_the_page_has_commands_at_each_level() -> None:
    assert [len(commands(f"### Level {level}")) for level in range(3)] == [3, 6, 17]


def test_from_nothing_to_the_first_job_on_two_hosts_a_person_types_ten_commands_at_most() -> None:
    assert 0 < len(commands("### Two hosts from nothing")) <= 10  # `test_two_hosts` types them


def test_all_that_is_copied_to_other_hosts_is_made(tmp_path: Path) -> None:
    make, *copies = commands(CERTIFICATES)
    Hosts(tmp_path, {}).type(make)
    copied = {path for line in copies for path in re.findall(r"scp (?:-r )?(certs\S+)", line)}
    assert copied == {"certs/brokers/b1/*", "certs/parties/node-n1"}
    assert all(len(list(tmp_path.glob(path.removesuffix("/*") + "/*"))) >= 4 for path in copied)
    (url,) = {path for line in copies for path in re.findall(r"/etc/gpu-arbiter/tls/(\S+url)", line)}
    assert "/etc/gpu-arbiter/tls/node-n1/key.pem" in (tmp_path / "certs/parties" / url).read_text()


@pytest.mark.full  # `test_backups` is its quick form
async def test_level_0_a_backup_brings_the_site_back_after_the_loss_of_its_disk(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, {})
    state = tmp_path / "arbiter"
    hosts.configure("arbiter.toml", ArbiterConfig(state_dir=str(state), arbiter=QUICK))
    backup, check, restore = commands("### Level 0")
    async with playing(tmp_path) as site:
        site.arbiter()
        epoch = await site.until_led(1)
        await site.submit("ana-1")
        await asyncio.to_thread(hosts.type, backup)
    assert "events" in hosts.type(check)
    state.rename(tmp_path / "lost")
    hosts.type(restore)
    async with playing(tmp_path) as site:
        site.arbiter()
        assert await site.until_led(1) > epoch
        await _until_it_knows_of_the_backup(site)
        assert [each["id"] for each in (await site.ask("apps"))["apps"]] == ["ana-1"]


@pytest.fixture
def db1() -> Iterator[PrivatePostgres]:
    if reason := postgres.missing():
        lack(reason)
    with PrivatePostgres(superuser="postgres") as server:
        let_nobody_in(server)
        server.typed(RELOAD)
        yield server


RELOAD = 'psql --command "select pg_reload_conf()"'


def let_nobody_in(server: PrivatePostgres) -> None:
    """Have it as Debian installs it: the user postgres of its own host is let in, and no other host."""
    (server.folder / "data/pg_hba.conf").write_text("local all postgres trust\n")


def make_first(db1: PrivatePostgres, hosts: Hosts) -> str:
    """Make the database of level 1; return its address."""
    for line in commands("### Level 1")[:3]:
        db1.typed(hosts.here(line))
    db1.kill()
    db1.start()
    return db1.url("gpu", user=ARBITERS)


#: The user of the arbiters with the password that the page has.
ARBITERS = "arbiter:PASSWORD"


@pytest.fixture
def db2(db1: PrivatePostgres, tmp_path: Path) -> Iterator[PrivatePostgres]:
    """A replica of db1, for which no commit waits yet."""
    server = PrivatePostgres(empty=True, superuser="postgres")
    try:
        places = {"host=db1": f"host=127.0.0.1 port={db1.port}", "/var/lib/postgresql/15/main": f"{server.folder}/data"}
        hosts = Hosts(tmp_path, places)
        make_first(db1, hosts)
        on_db1, on_db2, _at_last = of_database()
        for line in on_db1:
            db1.typed(hosts.here(line))
        for line in on_db2:
            server.typed(hosts.here(line))
        let_nobody_in(server)  # there it is no part of the data
        server.start()
        for line in (*commands("### Level 1"), *on_db1):
            if line.startswith("printf"):
                server.typed(hosts.here(line))
        server.typed(RELOAD)
        yield server
    finally:
        server.close()


@pytest.mark.full
async def test_level_1_a_site_moves_from_files_to_a_database_and_two_arbiters(
    tmp_path: Path, db1: PrivatePostgres
) -> None:
    hosts = Hosts(tmp_path, {})
    *_made, backup, restore, examine = commands("### Level 1")
    url = make_first(db1, hosts)
    (tmp_path / "etc/journal.url").write_text(f"{url}\n")
    (tmp_path / "etc/journal.url").chmod(0o600)
    hosts.configure("arbiter.toml", ArbiterConfig(state_dir=str(tmp_path / "arbiter"), arbiter=QUICK))
    moved = ArbiterConfig(state_dir=str(tmp_path / "a"), journal_file=str(tmp_path / "etc/journal.url"), arbiter=QUICK)
    hosts.configure("arbiter-with-database.toml", moved)
    async with playing(tmp_path) as site:
        site.arbiter()
        epoch = await site.until_led(1)
        await site.submit("ana-1")
    for line in (backup, restore):
        hosts.type(line)
    async with playing(tmp_path, url) as site:
        site.arbiter()
        assert await site.until_led(1) > epoch
        await _until_it_knows_of_the_backup(site)
        site.arbiter()
        site.drop_leader()
        await site.until_led(2)
        assert [each["id"] for each in (await site.ask("apps"))["apps"]] == ["ana-1"]
        said = await asyncio.to_thread(hosts.type, examine)
        (row,) = [line.split() for line in said.splitlines() if line.startswith("store ")]
        assert row[1] == "ok"
        assert "has led last, in epoch" in " ".join(row)


def test_level_2_the_brokers_are_told_of_each_other_and_the_daemons_of_all(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, {})
    (line,) = [each for each in commands("### Level 2") if each.startswith("gpu-arbiter")]
    hosts.type(line)
    for user in ("arbiter", "node-n1", "node-n2", "app-alice"):
        url = (tmp_path / f"certs/parties/{user}/broker.url").read_text().strip()
        assert patient_bus(url).user(ARBITER) == user
        assert {each for each in ("10.0.0.1:5671", "10.0.0.2:5671", "10.0.0.3:5671") if each in url} == {
            *url.partition("@")[2].partition("/")[0].split(",")
        }
    assert sorted(path.name for path in tmp_path.glob("certs/brokers/b1/*")) == [
        *("ca.pem", "cert.pem", "definitions.json", "enabled_plugins", "erlang.cookie", "key.pem", "rabbitmq.conf")
    ]


@pytest.mark.full
async def test_level_2_either_database_may_be_lost_and_nothing_that_was_decided_is(
    tmp_path: Path, db1: PrivatePostgres, db2: PrivatePostgres
) -> None:
    wait, look = of_database()[-1]
    db1.typed(wait)
    await _until_synchronous(db1, look)
    url = f"postgresql://{ARBITERS}@127.0.0.1:{db1.port},127.0.0.1:{db2.port}/gpu"
    async with playing(tmp_path, url) as site:
        site.arbiter()
        first = await site.until_led(1)
        await site.submit("ana-1")

        db2.kill()
        await _until_it_stands_by(site, 1)
        assert site.epochs() == [first], "nobody leads while db1 waits for db2"
        await asyncio.to_thread(db1.typed, in_prose('psql --command "alter system reset'))
        second = await site.until_led(2)
        assert second > first

        db2.start()  # in this thread, as it is to die with that
        await asyncio.to_thread(db1.typed, wait)
        await _until_synchronous(db1, look)
        await site.submit("ana-2")
        db1.kill()
        await _until_it_stands_by(site, 2)
        await asyncio.to_thread(db2.typed, in_prose('psql --command "select pg_promote()"'))
        assert await site.until_led(3) > second
        apps = (await site.ask("apps"))["apps"]
        assert sorted(each["id"] for each in apps) == ["ana-1", "ana-2"]


async def test_the_doctor_names_a_replica_that_would_take_over_without_the_newest_events_and_the_mend(
    db1: PrivatePostgres, db2: PrivatePostgres
) -> None:
    url = f"postgresql://{ARBITERS}@127.0.0.1:{db2.port},127.0.0.1:{db1.port}/gpu"
    wait, look = of_database()[-1]
    await _until_synchronous(db1, look, state="async")

    def found() -> tuple[str, str, str]:
        (check,) = doctor._replicas(url)
        return check.verdict, check.found, check.mend

    lost = "if it takes over, the newest events are lost"
    verdict, said, mend = found()
    assert (verdict, said) == ("note", f"no commit waits for db2 (synchronous_standby_names): {lost}")
    assert wait in mend, "it is the line of the page"
    db1.typed(wait)
    await _until_synchronous(db1, look)
    assert found() == ("ok", "commits wait for db2", "")
    db1.typed('psql --command "alter role arbiter set synchronous_commit = local"')
    verdict, said, mend = found()
    assert (verdict, said) == ("note", f"no commit waits for db2 (synchronous_commit): {lost}")
    assert "set synchronous_commit to on" in mend


@pytest.mark.parametrize(
    ("listed", "commit", "setting"),
    [
        ("", "on", "synchronous_standby_names"),
        ("db2", "on", ""),
        ("DB2", "remote_write", ""),
        ("*", "on", ""),
        ('ANY 1 (db3, "db2")', "on", ""),
        ("FIRST 1 (db3, db22)", "on", "synchronous_standby_names"),
        ("db2", "off", "synchronous_commit"),
    ],
)
def test_commits_wait_for_a_replica_that_the_settings_name(listed: str, commit: str, setting: str) -> None:
    assert _unawaited("db2", listed, commit) == setting


# --- brokers ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.broker
@pytest.mark.timeout(900)
async def test_level_2_three_brokers_of_which_two_have_run_alone_become_a_cluster(tmp_path: Path) -> None:
    if not rabbitmq.available():
        lack(f"RabbitMQ is not installed ({rabbitmq.SERVER} is missing): run scripts/ensure-rabbitmq.sh")
    if os.geteuid() != 0 or "rabbitmq" not in {each.pw_name for each in pwd.getpwall()}:
        pytest.skip("only root may give files to the user rabbitmq")
    make, alone, each = (block.commands() for block in pages.below(PAGE, "### Level 2")[3:])
    ports = {f"b{number}": free_port() for number in (1, 2, 3)}
    hosts = Hosts(
        tmp_path,
        {f"={address}": f"=127.0.0.1:{port}" for address, port in zip(OF_BROKERS, ports.values(), strict=True)},
    )
    hosts.reach_others()
    for line in make:
        hosts.type(line)
    (tmp_path / "site/brokers").mkdir(parents=True)
    epmd_port = free_port()
    brokers = {}
    try:
        for name, port in ports.items():
            (tmp_path / "site/brokers" / name).symlink_to(tmp_path / name / "etc/rabbitmq")
            made = Provisioned(tmp_path / "site", name, tuple(ports.values()), epmd_port)
            brokers[name] = PrivateRabbitMQ(port=port, provisioned=made)
            (brokers[name].folder / ".erlang.cookie").unlink()
        for name in ("b2", "b3"):
            run_alone(brokers[name])
            for line in alone:
                await asyncio.to_thread(on_broker, hosts, name, brokers[name], line)
        said = [on_broker(hosts, name, broker, line) for name, broker in brokers.items() for line in each]
        assert all(
            f"test{port}@localhost" in said[-1].partition("Running Nodes")[2].partition("Versions")[0]
            for port in ports.values()
        )
        url = (tmp_path / "certs/parties/arbiter/broker.url").read_text().strip()
        link = await patient_bus(url.replace("/etc/gpu-arbiter/tls", f"{tmp_path}/certs/parties")).connect(ARBITER)
        await link.lead()
        await link.close()
    finally:
        for broker in brokers.values():
            broker.close()


OF_BROKERS = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


def run_alone(broker: PrivateRabbitMQ) -> None:
    """Start it as Debian does when it is installed: it knows of no other."""
    config = broker.folder / "rabbitmq.conf"
    own = config.read_text()
    config.write_text(f"listeners.tcp.1 = 127.0.0.1:{broker.port}\n")
    broker.start()
    config.write_text(own)


def on_broker(hosts: Hosts, name: str, broker: PrivateRabbitMQ, line: str) -> str:
    """Type a line on the host of a broker; return what it says."""
    match line.partition("#")[0].split():
        case ["systemctl", verb, "rabbitmq-server"]:
            if verb == "start":
                broker.start()
            elif broker.running:
                broker.stop()
            return ""
        case ["rabbitmqctl", *words]:
            return broker.control(*words)
        case _:
            places = {
                "/etc/rabbitmq/": f"{hosts.folder}/{name}/etc/rabbitmq/",
                "/var/lib/rabbitmq/mnesia": f"{broker.folder}/data",
            }
            return Hosts(hosts.folder, {**places, "/var/lib/rabbitmq/": f"{broker.folder}/"}).type(line)


async def _until_synchronous(db1: PrivatePostgres, look: str, state: str = "sync") -> None:
    async with asyncio.timeout(PATIENCE_S):
        while f" {state}\n" not in await asyncio.to_thread(db1.typed, look):  # noqa: ASYNC110 - another process says it
            await asyncio.sleep(0.1)


async def _until_it_knows_of_the_backup(site: MemorySite) -> None:
    """Report until an arbiter says that it was restored."""
    async with asyncio.timeout(PATIENCE_S):
        while not (told := [line["what"] for line in site.said("object.noted") if "restored" in line["what"]]):
            await site.say_report("ana-1")
            await asyncio.sleep(0.05)
    assert "restored from the backup of 20" in told[0]


async def _until_it_stands_by(site: MemorySite, times: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(site.said("arbiter.stands_by")) < times:  # noqa: ASYNC110 - a log has no event to wait for
            await asyncio.sleep(0.05)
