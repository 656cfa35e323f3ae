"""A site's brokers as `provision site` makes them: private nodes of this host that know all by certificates."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from typer.testing import CliRunner

from launch import cli
from tests.support.ports import free_port
from tests.support.rabbitmq import PrivateRabbitMQ, Provisioned
from tests.support.startable import Startable


class ProvisionedBrokers(Startable):
    """One broker, or several in a cluster; a gateway `login1` beside the nodes and owners.

    `nodes` are the brokers' fates, and `url(user)` is where a participant connects.
    """

    def __init__(self, folder: Path, *, nodes: Sequence[str], owners: Sequence[str], brokers: int = 1) -> None:
        self.folder = folder
        self.nodes: list[PrivateRabbitMQ] = []
        self._ports = [free_port() for _ in range(brokers)]
        who = ("--nodes", ",".join(nodes), "--owners", ",".join(owners), "--gateways", "login1")
        self._make(*who)

    def _make(self, *who: str) -> None:
        """Provision a broker at each port, and make a private node of each."""
        ports = tuple(self._ports)
        hosts = {f"b{number}": port for number, port in enumerate(ports, 1)}
        self.provision(*who, "--hosts", ",".join(f"{name}=127.0.0.1:{port}" for name, port in hosts.items()))
        epmd_port = free_port()
        made = {port: Provisioned(self.folder, name, ports, epmd_port) for name, port in hosts.items()}
        self.nodes = [PrivateRabbitMQ(port=port, provisioned=each) for port, each in made.items()]

    def become(self, brokers: int) -> None:
        """Stop the only one, and start it on its data with others beside it, as the page says."""
        (alone,) = self.nodes
        alone.control("delete_vhost", "gpu")
        alone.stop()
        self._ports += [free_port() for _ in range(brokers - 1)]
        self._make()
        shutil.move(alone.folder / "data", self.nodes[0].folder / "data")
        alone.close()
        self.start()

    def provision(self, *words: str) -> str:
        """Have the command do something more in the folder; return what it leaves to do."""
        command = ["provision", "site", str(self.folder), "--installed", str(self.folder / "parties"), *words]
        done = CliRunner().invoke(cli.app, command)
        assert done.exit_code == 0, done.stderr
        return done.stderr

    def url(self, user: str) -> str:
        """Return the address that was made for a participant."""
        return self.nodes[0].url(user)

    def in_order_of(self, user: str) -> list[PrivateRabbitMQ]:
        """Return the brokers in the order in which a participant tries them."""
        url = self.url(user)
        return sorted(self.nodes, key=lambda node: url.index(f":{node.port}"))

    def start(self) -> None:
        """Start all brokers."""
        for node in self.nodes:
            node.start()

    def close(self) -> None:
        """End all of them, and forget their data."""
        for node in self.nodes:
            node.close()
