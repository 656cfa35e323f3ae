"""From a daemon's configuration to its bus."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from launch.faults import usage
from protocol.bus import Bus
from protocol.config import owner_of
from protocol.topology import Topology

EXAMPLE = "amqp://node-n1:password@broker-host:5672/gpu"


def open_bus(url: str, *, file: str = "", prefix: str = "") -> Bus:
    """Return the bus at `url`, or at the URL that stands in `file` (a systemd credential).

    Raises
    ------
    Fault
        Naming the field that is missing or wrong.
    """
    if file and not url:
        url = _read(Path(file))
    parts = urlsplit(url)
    if parts.scheme not in ("amqp", "amqps") or not parts.hostname:
        raise usage(
            f"bus is {_without_password(url)!r}, which is no broker's address",
            f"write it like {EXAMPLE} in bus or bus_file",
        )
    from protocol.bus.amqp import AmqpBus  # a site without a broker needs no client of RabbitMQ

    try:
        return AmqpBus(url, topology=Topology(prefix=prefix))
    except ValueError as error:
        raise usage(f"bus is {_without_password(url)!r}: {error}", f"write it like {EXAMPLE}") from None


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError as error:
        unit = owner_of(file)
        mend = (
            f"only the service {unit} can read it: begin it by systemctl start {unit}, or let bus_file name the file "
            "that LoadCredential= of this service names"
            if unit
            else "put the broker's URL there"
        )
        raise usage(f"bus_file {file} cannot be read: {error.strerror}", mend) from None


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}...@{rest.rpartition('@')[2]}" if "@" in rest else url
