"""What `provision site` has made for one host, as `install --certs` lays it down there.

Certificates are not read here, so a host needs no library for them.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from msgspec import Struct

from launch.faults import Fault, usage
from protocol.bus.provision import BROKER_FOLDER, broker_config

#: Files of each broker and each party, in the folder of a site.
TRUSTED, CERTIFICATE, KEY, URL_FILE, COOKIE = "ca.pem", "cert.pem", "key.pem", "broker.url", "erlang.cookie"
CONFIG, DEFINITIONS = "rabbitmq.conf", "definitions.json"
BROKERS, PARTIES = "brokers", "parties"
#: By which the broker knows a client from its certificate.
PLUGIN = "rabbitmq_auth_mechanism_ssl"
#: Where a broker's host keeps them, and the lines that name them, apart from files of an admin's own.
FOLDER = f"{BROKER_FOLDER}/gpu-arbiter"
TLS_CONFIG = f"{BROKER_FOLDER}/conf.d/91-gpu-arbiter-tls.conf"
#: The parts of an address that name files, and which these are.
_NAMED = {"cafile": TRUSTED, "certfile": CERTIFICATE, "keyfile": KEY}


class HostFile(Struct, frozen=True):
    """A file of a host; a secret one is its daemon's alone."""

    path: str
    text: str
    secret: bool = False


class HostFiles(Struct, frozen=True):
    """The files of one broker or one party, and the broker's address for the latter.

    `others` are the folders of parties beside those of a broker, which their hosts need.
    """

    files: tuple[HostFile, ...]
    address: str = ""
    others: tuple[Path, ...] = ()


def of_party(folder: Path, user: str) -> HostFiles:
    """Return the files of the party `user`: in its own folder, or in that of the site.

    Raises
    ------
    Fault
        If the folder has none, or those of another party.
    """
    place = folder if (folder / URL_FILE).is_file() else folder / PARTIES / user
    address = _text(place, URL_FILE, user).strip()
    url = urlsplit(address)
    if url.username != user:
        raise usage(f"--certs: {place} is of {url.username}, and this host's daemon is {user}", f"copy that of {user}")
    to = dict(parse_qsl(url.query))
    if not _NAMED.keys() <= to.keys():
        raise usage(f"--certs: the address in {place / URL_FILE} names no certificates", "make it by `provision site`")
    places = {part: Path(to[part]) for part in _NAMED}
    own = places["cafile"].parent
    in_own = own.is_absolute() and own.name == user and ".." not in own.parts
    if not in_own or any(places[part] != own / name for part, name in _NAMED.items()):
        raise usage(
            f"--certs: the address in {place / URL_FILE} names other files than {', '.join(_NAMED.values())} in one "
            f"folder {user}",
            "make it by `provision site`",
        )
    files = (HostFile(to[part], _text(place, name, user), secret=name == KEY) for part, name in _NAMED.items())
    return HostFiles(tuple(files), address)


def of_broker(folder: Path, host: str) -> HostFiles:
    """Return the files of the broker on `host`: in its own folder, or in that of the site, or the site's only one.

    Raises
    ------
    Fault
        If the folder has none, or those of a cluster.
    """
    place = folder if (folder / CONFIG).is_file() else _broker_in(folder / BROKERS, host)
    if (place / COOKIE).exists():
        raise usage(
            f"--certs: {place} is of one of three brokers, which are set up by hand",
            "docs/operations.md, Level 2",
        )
    config = _text(place, CONFIG, host).removeprefix(broker_config())
    lines = config.replace(f"{BROKER_FOLDER}/", f"{FOLDER}/")
    names = (TRUSTED, CERTIFICATE, KEY, DEFINITIONS)
    files = [HostFile(f"{FOLDER}/{name}", _text(place, name, host), secret=name == KEY) for name in names]
    return HostFiles((*files, HostFile(TLS_CONFIG, lines)), others=tuple(sorted((folder / PARTIES).glob("*"))))


def _broker_in(brokers: Path, host: str) -> Path:
    """Return the folder of a broker: that of the host's name, or the only one."""
    named = sorted(path.name for path in brokers.glob("*") if path.is_dir())
    if host in named or len(named) == 1:
        return brokers / (host if host in named else named[0])
    if not named:
        raise usage(f"--certs: there is no broker in {brokers}", "name the folder that `provision site` has made")
    raise usage(
        f"--certs: this host is {host}, and {brokers} has {', '.join(named)}", f"name one of them: {brokers / named[0]}"
    )


def _text(place: Path, name: str, of: str) -> str:
    try:
        return (place / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise usage(
            f"--certs: there is no {place / name}",
            f"name the folder that `provision site` has made, or a copy of that of {of}",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise Fault(f"{place / name} cannot be read: {error}", next_step="do the same with sudo") from None
