"""A site's brokers as `provision site` makes them: private nodes of this host that know all by certificates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from typer.testing import CliRunner

from launch import cli
from tests.support.rabbitmq import PrivateRabbitMQ, Provisioned, free_port
from tests.support.startable import Startable


class ProvisionedBrokers(Startable):
    """One broker, or several in a cluster; a gateway `login1` beside the nodes and owners.

    `nodes` are the brokers' fates, and `url(user)` is where a participant connects.
    """

    def __init__(self, folder: Path, *, nodes: Sequence[str], owners: Sequence[str], brokers: int = 1) -> None:
        self.folder = folder
        ports = tuple(free_port() for _ in range(brokers))
        self.names = [f"b{number}" for number in range(1, brokers + 1)]
        hosts = ",".join(f"{name}=127.0.0.1:{port}" for name, port in zip(self.names, ports, strict=True))
        who = ("--nodes", ",".join(nodes), "--owners", ",".join(owners), "--gateways", "login1")
        self.provision(*who, "--hosts", hosts)
        epmd_port = free_port()
        made = (Provisioned(folder, name, ports, epmd_port) for name in self.names)
        self.nodes = [PrivateRabbitMQ(port=port, provisioned=each) for port, each in zip(ports, made, strict=True)]

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
