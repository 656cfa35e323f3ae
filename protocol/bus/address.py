"""The address of a broker, or of several: ``amqps://user:password@host1:port,host2:port/vhost?query``, in parts."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from msgspec import Struct


class Address(Struct, frozen=True):
    """An address; its parts together are its text. `places`: each ``host``, ``host:port`` or ``[address]:port``."""

    scheme: str  #: with ``://``
    credentials: str  #: with ``@``; empty if it has none
    places: tuple[str, ...]
    rest: str  #: from the virtual host on

    @property
    def text(self) -> str:
        """The whole address."""
        return f"{self.scheme}{self.credentials}{','.join(self.places)}{self.rest}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names or addresses of all brokers, without their ports."""
        return tuple(host for place in self.places if (host := urlsplit(f"//{place}").hostname))


def split(url: str) -> Address:
    """Return an address in its parts, which may be of no use."""
    scheme, separator, rest = url.partition("://")
    place = re.match(r"[^/?#]*", rest)
    assert place is not None, "it may be empty"
    credentials, at, hosts = place[0].rpartition("@")
    return Address(f"{scheme}{separator}", f"{credentials}{at}", tuple(hosts.split(",")), rest[place.end() :])
