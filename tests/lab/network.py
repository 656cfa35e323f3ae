"""Hosts as network namespaces, joined by virtual cables that can be cut. Needs root and iproute2.

Each network is a bridge in a namespace of its own, and each host has a cable to each network that it is on. A cable
that is cut loses every packet, and no program is told: connections stay open at both ends, as when a switch dies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from tests.support.startable import Startable


def missing() -> str:
    """Return what is missing to have hosts; empty: nothing."""
    if shutil.which("ip") is None:
        return "there is no `ip` (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    name = f"gal{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        entered = subprocess.run(["ip", "netns", "exec", name, "true"], capture_output=True, text=True, check=False)
        subprocess.run(["ip", "netns", "delete", name], check=True)
        tried = entered
    return f"`ip netns` does not work here: {tried.stderr.strip()}" if tried.returncode else ""


class Network(Startable):
    """Hosts and the networks that they are on.

    Parameters
    ----------
    hosts
        By host, the names of its networks. The first host of a network has the address 10.77.N.1 there.
    """

    def __init__(self, hosts: Mapping[str, Sequence[str]]) -> None:
        self._prefix = f"gal{os.getpid()}"
        self._hosts = hosts
        self._made: list[str] = []
        networks = list(dict.fromkeys(name for names in hosts.values() for name in names))
        on = {name: [host for host, names in hosts.items() if name in names] for name in networks}
        self.addresses = {
            (host, name): f"10.77.{networks.index(name) + 1}.{on[name].index(host) + 1}"
            for name in networks
            for host in on[name]
        }

    def start(self) -> None:
        """Make the hosts, the networks and all cables."""
        self._make("net")
        for name in dict.fromkeys(name for _host, name in self.addresses):
            self._ip("net", "link", "add", f"br-{name}", "type", "bridge")
            self._ip("net", "link", "set", f"br-{name}", "up")
        for host in self._hosts:
            self._make(host)
            self._ip(host, "link", "set", "lo", "up")
        for (host, name), address in self.addresses.items():
            self._lay(host, name, address)

    def within(self, host: str) -> Sequence[str]:
        """Return the beginning of a command that runs on a host."""
        return ("ip", "netns", "exec", self._space(host))

    def cut(self, host: str, name: str) -> None:
        """Cut a host's cable to a network."""
        subprocess.run(self.cut_command(host, name, "down"), check=True)

    def mend(self, host: str, name: str) -> None:
        """Lay it again."""
        subprocess.run(self.cut_command(host, name, "up"), check=True)

    def cut_command(self, host: str, name: str, state: str) -> Sequence[str]:
        """Return the command that cuts a cable (``down``) or lays it again (``up``)."""
        return ("ip", "-n", self._space("net"), "link", "set", f"{host}-{name}", state)

    def close(self) -> None:
        """Take all namespaces away. Processes that are still there keep their own until they end."""
        for space in self._made:
            with suppress(subprocess.CalledProcessError):
                subprocess.run(["ip", "netns", "delete", space], check=True, capture_output=True)
        self._made.clear()

    def _space(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _make(self, host: str) -> None:
        subprocess.run(["ip", "netns", "add", self._space(host)], check=True)
        self._made.append(self._space(host))

    def _lay(self, host: str, name: str, address: str) -> None:
        """Lay the cable from a host to a network."""
        port = f"{host}-{name}"
        self._ip("net", "link", "add", port, "type", "veth", "peer", "name", name, "netns", self._space(host))
        self._ip("net", "link", "set", port, "master", f"br-{name}", "up")
        self._ip(host, "address", "add", f"{address}/24", "dev", name)
        self._ip(host, "link", "set", name, "up")

    def _ip(self, host: str, *words: str) -> None:
        subprocess.run(["ip", "-n", self._space(host), *words], check=True)
