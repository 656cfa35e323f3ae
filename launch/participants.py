"""Who may speak on the bus, by the name of its broker user, and what the broker must be told of it."""

from __future__ import annotations

import msgspec

from launch.faults import usage
from protocol.bus.provision import gateway_commands, user_commands
from protocol.messages import ARBITER, Party
from protocol.topology import Topology


def commands(user: str, vhost: str, prefix: str = "") -> list[str]:
    """Return the `rabbitmqctl` lines that make a participant's broker user; raises `Fault` if there is none such."""
    topology = Topology(prefix=prefix)
    if user.startswith("gateway-"):
        name = party(user.replace("gateway-", "app-", 1)).id
        return gateway_commands(name, topology, vhost)
    return user_commands(party(user), topology, vhost)


def party(user: str) -> Party:
    """Return the participant that the broker knows as `user`; raises `Fault` if there is none such."""
    if user == ARBITER.user:
        return ARBITER
    role, _, name = user.partition("-")
    try:
        return msgspec.convert({"role": role, "id": name} if role in ("node", "app") else None, Party)
    except msgspec.ValidationError:
        raise usage(
            f"{user!r} is no participant",
            "write arbiter, node-<id>, app-<owner> or gateway-<name>; ids are lower-case letters, digits, dashes; "
            "or site FOLDER for all of them",
        ) from None


def checked_id(role: str, name: str, option: str) -> str:
    """Return `name`, which the broker can know a participant by; raises `Fault` that names `option` if it cannot."""
    try:
        return msgspec.convert({"role": role, "id": name}, Party).id
    except msgspec.ValidationError:
        raise usage(f"{option}: {name!r} is no id", "write lower-case letters, digits and dashes, such as n1") from None
