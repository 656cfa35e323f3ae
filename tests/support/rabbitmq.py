"""A private RabbitMQ node for tests: own ports, own data, own epmd, and it dies with the process that started it."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from protocol.bus.provision import broker_config
from protocol.messages import Party
from protocol.topology import Topology
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port
from tests.support.startable import Startable

SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
CONTROL = SERVER.with_name("rabbitmqctl")
#: Says the first word of AMQP to an address, where this process cannot reach it.
_KNOCK = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1.0) as probe:
        probe.sendall(b"AMQP\\x00\\x00\\x09\\x01")
        sys.exit(probe.recv(1) != b"\\x01")
except OSError:
    sys.exit(1)
"""
PASSWORD = "secret"
ADMIN = "admin"
_PR_SET_PDEATHSIG = 1


def available() -> bool:
    """Whether Debian's rabbitmq-server is installed."""
    return SERVER.exists()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _password_hash(password: str) -> str:
    salt = secrets.token_bytes(4)
    return base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()


def definitions(parties: Iterable[Party], vhosts: Iterable[str], topology: Topology) -> dict[str, object]:
    """Return what RabbitMQ imports at boot: users with the product's own permission table, and an administrator."""
    vhosts, parties = list(vhosts), list(parties)
    users = [ADMIN, *(party.user for party in parties)]
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    permissions: list[dict[str, str]] = []
    topic_permissions: list[dict[str, str]] = []
    for vhost in vhosts:
        permissions.append({"user": ADMIN, "vhost": vhost, **everything})
        for party in parties:
            rights = topology.permissions(party)
            plain = {"configure": rights.configure, "write": rights.write, "read": rights.read}
            permissions.append({"user": party.user, "vhost": vhost, **plain})
            topic = {"exchange": topology.up, "write": rights.topic_write, "read": rights.topic_read}
            topic_permissions.append({"user": party.user, "vhost": vhost, **topic})
    return {
        "users": [
            {
                "name": user,
                "password_hash": _password_hash(PASSWORD),
                "hashing_algorithm": "rabbit_password_hashing_sha256",
                "tags": "administrator" if user == ADMIN else "",
            }
            for user in users
        ],
        "vhosts": [{"name": vhost} for vhost in vhosts],
        "permissions": permissions,
        "topic_permissions": topic_permissions,
    }


class Provisioned(Struct, frozen=True):
    """What `provision site` has made in `site` for its broker `name`, which is a private node of this host.

    `ports` of all brokers, in the order in which they were named; the Erlang node of one is named after its port.
    """

    site: Path
    name: str
    ports: tuple[int, ...]
    epmd_port: int

    @property
    def folder(self) -> Path:
        """Its own files."""
        return self.site / "brokers" / self.name

    def url(self, user: str) -> str:
        """Return the address that was made for a participant: it has a virtual host, and names all brokers."""
        return (self.site / "parties" / user / "broker.url").read_text().strip()

    def config(self, port: int) -> str:
        """Return its `rabbitmq.conf`, with the places of its files and the names of its nodes as they are here."""
        lines = [
            (self.folder / "rabbitmq.conf").read_text().replace("/etc/rabbitmq/", f"{self.folder}/"),
            f"listeners.ssl.default = 127.0.0.1:{port}",
        ]
        if len(self.ports) > 1:
            nodes = enumerate(self.ports, 1)
            lines += [f"cluster_formation.classic_config.nodes.{at} = test{each}@localhost" for at, each in nodes]
        return "\n".join(lines)


class PrivateRabbitMQ(Startable):
    """One broker node. `url(user)` is where to connect; `kill`, `stop`, `start`, `freeze`, `thaw` are its fates.

    It listens at `address`, of the host that the command `within` enters; by default of this one. One that is
    `provisioned` listens at `port`, speaks TLS alone and has no passwords.
    """

    def __init__(
        self,
        parties: Iterable[Party] = (),
        vhosts: Iterable[str] = ("/",),
        topology: Topology | None = None,
        *,
        memory_max: str = "1GB",
        address: str = "127.0.0.1",
        within: Sequence[str] = (),
        port: int = 0,
        provisioned: Provisioned | None = None,
    ) -> None:
        self.address, self._within, self._provisioned = address, within, provisioned
        memory = Path("/dev/shm")  # a disk under load makes quorum queues ten times slower
        self.folder = Path(tempfile.mkdtemp(prefix="ga-rabbit-", dir=memory if os.access(memory, os.W_OK) else None))
        self.port = port or free_port()
        self._epmd_port = free_port() if provisioned is None else provisioned.epmd_port
        self._process: subprocess.Popen[bytes] | None = None
        self._write_files(definitions(parties, vhosts, topology or Topology()), memory_max)
        # Nodes of a cluster share one; a second one on the same port ends at once.
        self._epmd = subprocess.Popen(
            [*within, "epmd", "-port", str(self._epmd_port), "-address", "127.0.0.1"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - started by the main thread only
        )

    def url(self, user: str = ADMIN, vhost: str = "/", *, port: int | None = None, password: str = PASSWORD) -> str:
        """Return the address for `user`, optionally through a proxy's `port`. A provisioned one has its own."""
        if self._provisioned is not None:
            assert (vhost, port) == ("/", None), "its certificate is for one address"
            return self._provisioned.url(user)
        path = "%2F" if vhost == "/" else vhost
        return f"amqp://{user}:{password}@{self.address}:{port or self.port}/{path}"

    def start(self) -> None:
        """Start on what data there is, and return when connections are taken."""
        with (self.folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                [*self._within, str(SERVER)],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - started by the main thread only
            )
        deadline = time.monotonic() + PATIENCE_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"RabbitMQ did not start:\n{(self.folder / 'output').read_text()[-4000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM, as systemd does; return when it has ended."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(PATIENCE_S)

    def forget(self) -> None:
        """Delete its data, queues and all; it must not be running."""
        shutil.rmtree(self.folder / "data")

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process of the broker."""
        assert self._process is not None
        return self._process.pid

    def control(self, *words: str) -> str:
        """Have `rabbitmqctl` do something; return what it says."""
        command = [*self._within, str(CONTROL), "--node", f"test{self.port}@localhost", *words]
        done = subprocess.run(
            command, env=self.environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"rabbitmqctl {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill it and forget its data."""
        if self._process is not None:
            self.kill()
        self._epmd.kill()
        self._epmd.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write_files(self, imported: dict[str, object], memory_max: str) -> None:
        cookie = self.folder / ".erlang.cookie"
        shared = self._provisioned.folder / "erlang.cookie" if self._provisioned else cookie
        cookie.write_text(shared.read_text() if shared.exists() else secrets.token_hex(16))
        cookie.chmod(0o400)
        lines = [
            "loopback_users = none",
            "log.console = false",
            f"vm_memory_high_watermark.absolute = {memory_max}",
            "disk_free_limit.absolute = 50MB",
            "raft.wal_max_size_bytes = 16777216",
        ]
        if self._provisioned is None:
            plugins = "[].\n"
            (self.folder / "definitions.json").write_text(json.dumps(imported))
            lines.append(f"listeners.tcp.1 = {self.address}:{self.port}")
            lines.append(f"load_definitions = {self.folder / 'definitions.json'}")
            lines.append(broker_config())
        else:
            plugins = (self._provisioned.folder / "enabled_plugins").read_text()
            lines.append(self._provisioned.config(self.port))
        (self.folder / "plugins").write_text(plugins)
        (self.folder / "rabbitmq.conf").write_text("\n".join(lines))

    def environment(self) -> dict[str, str]:
        """Return the environment of the broker and of those that ask it."""
        folder = str(self.folder)
        return {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": folder,
            "RABBITMQ_NODENAME": f"test{self.port}@localhost",
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{folder}/none",
            "RABBITMQ_MNESIA_BASE": f"{folder}/data",
            "RABBITMQ_LOG_BASE": f"{folder}/log",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/plugins",
            "RABBITMQ_DIST_PORT": str(free_port()),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_CRASH_DUMP": "/dev/null",
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-noinput -kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_ALLOW_INPUT": "1",  # makes the script exec, so that signals hit the broker itself
        }

    def _answers(self) -> bool:
        if self._within:
            knock = [*self._within, sys.executable, "-c", _KNOCK, self.address, str(self.port)]
            return subprocess.run(knock, check=False).returncode == 0
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as probe:
                if self._provisioned is not None:  # it answers to TLS alone
                    return True
                probe.sendall(b"AMQP\x00\x00\x09\x01")
                return probe.recv(1) == b"\x01"
        except OSError:
            return False
