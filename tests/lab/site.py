"""The lab: a leader and a standby, two nodes with simulated GPUs, one owner, a broker and a database, each on its host.

```
            host-a  host-b   n1   n2   login   mq        network `bus`
              |       |      |    |      |      |
            --+-------+------+----+------+------+--
            --+-------+--+--
              |       |  |
            host-a host-b db                             network `store`
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, assert_never

from tests.lab import network
from tests.lab.network import Network
from tests.support import postgres, rabbitmq
from tests.support.cluster import PARTIES, DaemonProcess, started
from tests.support.failover import HOSTS, WITNESSES, Pair
from tests.support.postgres import PrivatePostgres
from tests.support.rabbitmq import PrivateRabbitMQ

Link = Literal["leader-broker", "leader-store", "leader-nodes", "standby-store"]
LINKS: Sequence[Link] = ("leader-broker", "leader-store", "leader-nodes", "standby-store")
NODES = ("n1", "n2")
PLACES = {
    "mq": ("bus",),
    "db": ("store",),
    **dict.fromkeys(HOSTS, ("bus", "store")),
    **dict.fromkeys((*NODES, "login"), ("bus",)),
}


def missing() -> str:
    """Return what is missing to have a lab; empty: nothing."""
    broker = "" if rabbitmq.available() else "RabbitMQ is not installed: run scripts/ensure-rabbitmq.sh"
    return network.missing() or broker or postgres.missing()


class Lab(Pair):
    """A pair of arbiters and the rest of their site, each on a host of its own."""

    def __init__(self, folder: Path, network: Network, broker: PrivateRabbitMQ, store: PrivatePostgres) -> None:
        url = store.database()
        self.network, self.store = network, store
        super().__init__(folder, broker, "/", url)
        self.url_here = store.url_here(url.rpartition("/")[2])
        for name, daemon in self.places.items():
            daemon.within = network.within(name)

    @property
    def places(self) -> Mapping[str, DaemonProcess]:
        """The daemon of each host that has one."""
        return {**dict(zip(HOSTS, self.arbiters, strict=True)), **self.nodes, "login": self.app_agent}

    def cables(self, link: Link) -> Sequence[tuple[str, str]]:
        """Return the cables that a link goes over, as it is now: each is a host and a network."""
        leads = HOSTS[self.arbiters.index(self.leader())]
        (follows,) = set(HOSTS) - {leads}
        match link:
            case "leader-broker":
                return [(leads, "bus")]
            case "leader-store":
                return [(leads, "store")]
            case "leader-nodes":
                return [(node, "bus") for node in NODES]
            case "standby-store":
                return [(follows, "store")]
            case _ as never:
                assert_never(never)

    @contextmanager
    def without(self, link: Link) -> Iterator[None]:
        """Cut a link until the block ends."""
        cables = self.cables(link)
        for cable in cables:
            self.network.cut(*cable)
        try:
            yield
        finally:
            for cable in cables:
                self.network.mend(*cable)


@contextmanager
def running_lab(folder: Path) -> Iterator[Lab]:
    """A lab that is ready; nothing of it is left behind."""
    with ExitStack() as stack:
        hosts = stack.enter_context(Network(PLACES))
        at = hosts.addresses
        broker = PrivateRabbitMQ(PARTIES, address=at["mq", "bus"], within=hosts.within("mq"))
        stack.enter_context(broker)
        store = stack.enter_context(PrivatePostgres(address=at["db", "store"], within=hosts.within("db")))
        lab = stack.enter_context(started(Lab(folder, hosts, broker, store)))
        lab.wait_paired()
        store.sql(lab.url.rpartition("/")[2], WITNESSES)
        yield lab
