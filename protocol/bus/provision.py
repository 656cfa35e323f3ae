"""An administrator's work, once per site and per participant, as command lines and configuration to copy."""

from __future__ import annotations

import re
import shlex

from protocol.messages import Party
from protocol.topology import CONSUMER_TIMEOUT_MS, Topology

#: A daemon has one connection; more for the moment in which the broker has not noticed the first's death.
CONNECTIONS_MAX = 3
CHANNELS_MAX = 16
#: A gateway has a connection for each of its owners.
GATEWAY_CONNECTIONS_MAX = 2000


def user_commands(party: Party, topology: Topology | None = None, vhost: str = "/") -> list[str]:
    """Return the `rabbitmqctl` lines that create the broker user of `party` with no more rights than it needs.

    The password is read from standard input, so that it stands in no shell history.
    """
    topology = topology or Topology()
    rights = topology.permissions(party)
    limits = f'{{"max-connections":{CONNECTIONS_MAX},"max-channels":{CHANNELS_MAX}}}'
    rows: list[list[str]] = [
        ["rabbitmqctl", "add_user", party.user],
        ["rabbitmqctl", "set_user_limits", party.user, limits],
        ["rabbitmqctl", "set_permissions", "-p", vhost, party.user, rights.configure, rights.write, rights.read],
        *(
            ["rabbitmqctl", "set_topic_permissions", "-p", vhost, party.user, exchange.name, write, rights.topic_read]
            for exchange in topology.exchanges
            if exchange.kind == "topic"
            for write in (rights.topic_write if exchange.name == topology.up else "^$",)
        ),
    ]
    return [shlex.join(row) for row in rows]


def gateway_commands(name: str, topology: Topology | None = None, vhost: str = "/") -> list[str]:
    """Return the `rabbitmqctl` lines that create the broker user of a gateway, which speaks for many app agents.

    The broker lets it speak for every owner. The arbiter's configuration says for which it may.
    """
    topology = topology or Topology()
    user, prefix = f"gateway-{name}", re.escape(topology.prefix)
    limits = f'{{"max-connections":{GATEWAY_CONNECTIONS_MAX},"max-channels":{GATEWAY_CONNECTIONS_MAX * 4}}}'
    read = rf"^{prefix}app\.[a-z0-9-]+$"
    rows: list[list[str]] = [
        ["rabbitmqctl", "add_user", user],
        ["rabbitmqctl", "set_user_limits", user, limits],
        ["rabbitmqctl", "set_permissions", "-p", vhost, user, "^$", rf"^{prefix}ga\.agents$", read],
        *(
            ["rabbitmqctl", "set_topic_permissions", "-p", vhost, user, exchange.name, write, "^$"]
            for exchange in topology.exchanges
            if exchange.kind == "topic"
            for write in (r"^(bid|hb)\.app-[a-z0-9-]+$" if exchange.name == topology.up else "^$",)
        ),
    ]
    return [shlex.join(row) for row in rows]


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
