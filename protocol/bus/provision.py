"""An administrator's work, once per site and per participant, as command lines and configuration for RabbitMQ."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from protocol.messages import Party
from protocol.topology import CONSUMER_TIMEOUT_MS, Permissions, Topology

#: A daemon has one connection; more for the moment in which the broker has not noticed the first's death.
CONNECTIONS_MAX = 3
CHANNELS_MAX = 16
#: A gateway has a connection for each of its owners.
GATEWAY_CONNECTIONS_MAX = 2000
#: Where a broker's host keeps the files that `definitions` and `tls_config` speak of.
BROKER_FOLDER = "/etc/rabbitmq"


class User(Struct, frozen=True):
    """A user of the broker: its name, its rights, and how many connections and channels it may have."""

    name: str
    rights: Permissions
    connections_max: int = CONNECTIONS_MAX
    channels_max: int = CHANNELS_MAX

    @property
    def limits(self) -> Mapping[str, int]:
        """The limits as the broker names them."""
        return {"max-connections": self.connections_max, "max-channels": self.channels_max}


def user(party: Party, topology: Topology) -> User:
    """Return the broker user of `party`, with no more rights than it needs."""
    return User(party.user, topology.permissions(party))


def gateway_user(name: str, topology: Topology) -> User:
    """Return the broker user of a gateway, which speaks for many app agents.

    The broker lets it speak for every owner. The arbiter's configuration says for which it may.
    """
    prefix = re.escape(topology.prefix)
    rights = Permissions(
        configure="^$",
        write=rf"^{prefix}ga\.agents$",
        read=rf"^{prefix}app\.[a-z0-9-]+$",
        topic_write=r"^(bid|hb)\.app-[a-z0-9-]+$",
    )
    return User(f"gateway-{name}", rights, GATEWAY_CONNECTIONS_MAX, GATEWAY_CONNECTIONS_MAX * 4)


# --- as command lines -----------------------------------------------------------------------------------------------


def user_commands(party: Party, topology: Topology | None = None, vhost: str = "/") -> list[str]:
    """Return the `rabbitmqctl` lines that create the broker user of `party`.

    The password is read from standard input, so that it stands in no shell history.
    """
    topology = topology or Topology()
    return _commands(user(party, topology), topology, vhost)


def gateway_commands(name: str, topology: Topology | None = None, vhost: str = "/") -> list[str]:
    """Return the `rabbitmqctl` lines that create the broker user of a gateway."""
    topology = topology or Topology()
    return _commands(gateway_user(name, topology), topology, vhost)


def _commands(made: User, topology: Topology, vhost: str) -> list[str]:
    rights = made.rights
    limits = ",".join(f'"{name}":{value}' for name, value in made.limits.items())
    rows: list[list[str]] = [
        ["rabbitmqctl", "add_user", made.name],
        ["rabbitmqctl", "set_user_limits", made.name, f"{{{limits}}}"],
        ["rabbitmqctl", "set_permissions", "-p", vhost, made.name, rights.configure, rights.write, rights.read],
        *(
            ["rabbitmqctl", "set_topic_permissions", "-p", vhost, made.name, exchange, write, rights.topic_read]
            for exchange, write in _topic_rights(rights, topology)
        ),
    ]
    return [shlex.join(row) for row in rows]


def _topic_rights(rights: Permissions, topology: Topology) -> Iterator[tuple[str, str]]:
    """Yield each topic exchange with the routing keys that may be written there."""
    for exchange in topology.exchanges:
        if exchange.kind == "topic":
            yield exchange.name, rights.topic_write if exchange.name == topology.up else "^$"


# --- as files -------------------------------------------------------------------------------------------------------


def definitions(users: Sequence[User], topology: Topology, vhost: str, *, replicated: bool) -> dict[str, object]:
    """Return what RabbitMQ imports when it starts: a virtual host, and users without passwords with their rights.

    There are no queues in it: the arbiter declares them all when it leads. `replicated`: queues of the virtual host
    are quorum queues unless the one who declares them says otherwise, so that they outlive one of three brokers.
    """
    permissions: list[dict[str, str]] = []
    topic_permissions: list[dict[str, str]] = []
    for each in users:
        rights, of = each.rights, {"user": each.name, "vhost": vhost}
        permissions.append({**of, "configure": rights.configure, "write": rights.write, "read": rights.read})
        for exchange, write in _topic_rights(rights, topology):
            topic_permissions.append({**of, "exchange": exchange, "write": write, "read": rights.topic_read})
    metadata = {"default_queue_type": "quorum"} if replicated else {}
    return {
        "users": [
            {
                "name": each.name,
                "password_hash": "",  # by which the broker lets no client in
                "hashing_algorithm": "rabbit_password_hashing_sha256",
                "tags": "",
                "limits": dict(each.limits),
            }
            for each in users
        ],
        "vhosts": [{"name": vhost, "metadata": {"description": "gpu-arbiter", "tags": [], **metadata}}],
        "permissions": permissions,
        "topic_permissions": topic_permissions,
    }


def broker_config() -> str:
    """Return the lines that `rabbitmq.conf` needs, each with its reason."""
    return "\n".join(
        (
            "# A leading arbiter holds one message unacknowledged for as long as it leads; the default is 30 minutes.",
            f"consumer_timeout = {CONSUMER_TIMEOUT_MS}",
            "heartbeat = 10",
            "channel_max = 64",
            "",
        )
    )


def tls_config(port: int, brokers: Sequence[str] = (), folder: str = BROKER_FOLDER) -> str:
    """Return the lines that have a broker speak TLS alone, and know each user by a certificate.

    Parameters
    ----------
    port
        Where it listens.
    brokers
        The short host names of all brokers, if there are several: they form a cluster.
    folder
        The folder of its certificate, its key, those whom it trusts, and the definitions.
    """
    lines = [
        "# TLS alone. The certificate names the user, and no client is let in without one.",
        "listeners.tcp = none",
        f"listeners.ssl.default = {port}",
        f"ssl_options.cacertfile = {folder}/ca.pem",
        f"ssl_options.certfile = {folder}/cert.pem",
        f"ssl_options.keyfile = {folder}/key.pem",
        "ssl_options.verify = verify_peer",
        "ssl_options.fail_if_no_peer_cert = true",
        "ssl_cert_login_from = common_name",
        "auth_mechanisms.1 = EXTERNAL",
        "# The virtual host, the users and their rights. It deletes nothing.",
        f"load_definitions = {folder}/definitions.json",
    ]
    if len(brokers) > 1:
        names = (f"cluster_formation.classic_config.nodes.{at} = rabbit@{name}" for at, name in enumerate(brokers, 1))
        lines += [
            "# One cluster. A broker that does not see most of the others stands still until it does.",
            "cluster_formation.peer_discovery_backend = classic_config",
            *names,
            "cluster_partition_handling = pause_minority",
        ]
    return "\n".join((*lines, ""))
