"""`provision site`: a folder with all that brokers and daemons of a site need to know each other by certificates.

::

    ca.pem, ca.key           the authority; only this folder has its key
    site.json                what was asked for so far, and a fingerprint of each file that was made
    brokers/HOST/            for /etc/rabbitmq on that host
    parties/USER/            for the host of that daemon; broker.url names the other files

A run computes the files that there are to be, from what was asked for and what is there, and only then writes them. A
file that is there with another text than the last run gave it is not this command's, and then nothing is written.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Literal
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from launch.faults import Fault, usage
from launch.site import certificates
from launch.site.certificates import Signed, Use
from launch.site.host_files import (
    BROKERS,
    CERTIFICATE,
    CONFIG,
    COOKIE,
    DEFINITIONS,
    KEY,
    PARTIES,
    PLUGIN,
    TRUSTED,
    URL_FILE,
)
from protocol.bus.provision import broker_config, definitions, gateway_user, tls_config, user
from protocol.messages import ARBITER, Party
from protocol.topology import Topology

RECORD = "site.json"
AUTHORITY, AUTHORITY_KEY = "ca.pem", "ca.key"
SECRET = frozenset((AUTHORITY_KEY, KEY, COOKIE))
PLUGINS = f"[{PLUGIN}].\n"
TLS_PORT = 5671
#: The folder of a party's files on its own host has the name of its broker user, and lies here.
INSTALLED = "/etc/gpu-arbiter/tls"

FateKind = Literal["made", "renewed", "kept", "removed"]


class Host(Struct, frozen=True):
    """A broker's host: its short name, and where clients reach the broker."""

    name: str
    address: str
    port: int = TLS_PORT

    @property
    def authority(self) -> str:
        """The address and port as a URL has them."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


class Wishes(Struct, frozen=True):
    """The wishes for one run. A field that is empty is as the run before had it."""

    hosts: tuple[Host, ...] = ()
    nodes: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    gateways: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()  #: broker users and hosts of brokers
    vhost: str = ""
    prefix: str = ""
    installed: str = ""
    days: float = 365.0
    renew_days: float = 30.0


class Record(Struct, frozen=True):
    """What all runs were asked for together, and the fingerprints of the files that they made."""

    hosts: tuple[Host, ...] = ()
    nodes: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    gateways: tuple[str, ...] = ()
    vhost: str = "gpu"
    prefix: str = ""
    installed: str = INSTALLED
    files: dict[str, tuple[str, ...]] = {}

    @property
    def users(self) -> tuple[str, ...]:
        """The broker user of every party."""
        nodes, owners = (f"node-{each}" for each in self.nodes), (f"app-{each}" for each in self.owners)
        return (ARBITER.user, *nodes, *owners, *(f"gateway-{each}" for each in self.gateways))


class Fate(Struct, frozen=True):
    """What became of a certificate. `of`: the folder that has it; `until`: the day on which it ends."""

    of: str
    fate: FateKind
    until: str
    why: str = ""


class Outcome(Struct, frozen=True):
    """What a run did: the fate of each certificate, and the files that are new or other than before."""

    hosts: tuple[Host, ...]
    fates: tuple[Fate, ...]
    written: tuple[Path, ...]


def provide(folder: Path, wishes: Wishes, now: datetime) -> Outcome:
    """Make or renew what the folder of a site lacks.

    Raises
    ------
    Fault
        With what is in the way; nothing was written.
    """
    before = _load(folder)
    run = _Run(folder, _merged(before, wishes), wishes, now)
    run.compute()
    run.check_nothing_is_in_the_way()
    try:
        written = run.write()
    except OSError as error:
        raise Fault(f"{folder} cannot be written: {error.strerror}", next_step="name a folder of yours") from None
    return Outcome(run.record.hosts, tuple(run.fates), tuple(written))


def _load(folder: Path) -> Record:
    path = folder / RECORD
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except FileNotFoundError:
        return Record()
    except OSError as error:
        raise Fault(f"{path} cannot be read: {error.strerror}", next_step="name a folder of yours") from None
    except msgspec.DecodeError as error:
        raise Fault(f"{path} is damaged: {error}", next_step="bring it back, or begin in another folder") from None


def _merged(before: Record, wishes: Wishes) -> Record:
    gone = set(wishes.removed)
    removable = {*before.users, *(host.name for host in before.hosts)} - {ARBITER.user}
    if not gone <= removable:
        name = min(gone - removable)
        mend = f"one of these may go: {', '.join(sorted(removable))}" if removable else "it has no participant yet"
        raise usage(f"--remove: {name} is no node, owner, gateway or broker of this site", mend)

    def merged(role: str, old: Sequence[str], new: Sequence[str]) -> tuple[str, ...]:
        return tuple(sorted(each for each in {*old, *new} if f"{role}-{each}" not in gone))

    return replace(
        before,
        hosts=_merged_hosts(before, wishes),
        nodes=merged("node", before.nodes, wishes.nodes),
        owners=merged("app", before.owners, wishes.owners),
        gateways=merged("gateway", before.gateways, wishes.gateways),
        vhost=wishes.vhost or before.vhost,
        prefix=wishes.prefix or before.prefix,
        installed=wishes.installed or before.installed,
    )


def _merged_hosts(before: Record, wishes: Wishes) -> tuple[Host, ...]:
    """Return the hosts of brokers; this one if none was ever named. Raises `Fault` if there would be none, or two."""
    hosts = {host.name: host for host in (*before.hosts, *wishes.hosts) if host.name not in wishes.removed}
    if not hosts and before.hosts:
        last = " and ".join(host.name for host in before.hosts)
        raise usage(f"--remove: without {last} the site has no broker", "name another one in --hosts")
    if not hosts:
        return (read_host(socket.gethostname().partition(".")[0]),)
    if len(hosts) == 2:
        one, other = sorted(hosts)
        known = [host.name for host in before.hosts if host.name in hosts]
        mend = "name one in --hosts, or three"
        if known:
            mend = f"take one out, by --remove {known[0]}; or name a third in --hosts"
        raise usage(f"two brokers, here {one} and {other}, stand still as soon as one of them does", mend)
    return tuple(hosts[name] for name in sorted(hosts))


class _Run:
    """One run: what is there, and what there is to be."""

    def __init__(self, folder: Path, record: Record, wishes: Wishes, now: datetime) -> None:
        self.folder, self.record, self.wishes, self.now = folder, record, wishes, now
        self.fates: list[Fate] = []
        self._wanted: dict[str, bytes] = {}
        self._obsolete: list[str] = []

    # --- what there is to be ----------------------------------------------------------------------------------------

    def compute(self) -> None:
        """Find all files that there are to be, and those that are to go."""
        authority = self._authority()
        topology = Topology(prefix=self.record.prefix)
        parties = [Party("node", each) for each in self.record.nodes]
        parties += [Party("app", each) for each in self.record.owners]
        users = [user(each, topology) for each in (ARBITER, *parties)]
        users += [gateway_user(each, topology) for each in self.record.gateways]
        hosts = self.record.hosts
        replicated = len(hosts) > 1
        imported = definitions(users, topology, self.record.vhost, replicated=replicated)
        for host in hosts:
            config = broker_config() + tls_config(host.port, [each.name for each in hosts])
            of = f"{BROKERS}/{host.name}"
            self._certificate(of, authority, host.name, "broker", list(dict.fromkeys((host.address, host.name))))
            self._wanted[f"{of}/{CONFIG}"] = config.encode()
            self._wanted[f"{of}/enabled_plugins"] = PLUGINS.encode()
            self._wanted[f"{of}/{DEFINITIONS}"] = json.dumps(imported, indent=1).encode() + b"\n"
            if replicated:
                self._wanted[f"{of}/{COOKIE}"] = self._cookie()
        for name in self.record.users:
            of = f"{PARTIES}/{name}"
            self._certificate(of, authority, name, "party", [name])
            self._wanted[f"{of}/{URL_FILE}"] = f"{self._url(name)}\n".encode()
        self._drop_removed()

    def _authority(self) -> Signed:
        """Return the authority, a new one where there is none or its end is near. Older ones stay trusted."""
        pem, key = self._made(AUTHORITY), self._made(AUTHORITY_KEY)
        if pem and not key:
            path = self.folder / AUTHORITY_KEY
            raise Fault(
                f"{path}, the key of the authority, is not there",
                next_step=f"bring it back; or delete {AUTHORITY} beside it, and all certificates are made anew",
            )
        known = [each for each in _split(pem) if not certificates.expiry(certificates.read(each), self.now, 0.0)]
        why = certificates.expiry(certificates.read(known[0]), self.now, self.wishes.renew_days) if known else ""
        if known and not why:
            authority = Signed(known[0], key)
        else:
            authority = certificates.make_authority(self.now)
            known.insert(0, authority.certificate)
        self._wanted[AUTHORITY], self._wanted[AUTHORITY_KEY] = b"".join(known), authority.key
        self._tell("ca", authority, made=authority.key != key, before=pem, why=why or ("it had expired" if pem else ""))
        return authority

    def _certificate(self, of: str, authority: Signed, name: str, use: Use, addresses: Sequence[str]) -> None:
        certificate, key = f"{of}/{CERTIFICATE}", f"{of}/{KEY}"
        found = Signed(self._made(certificate), self._made(key))
        why = "" if found.certificate else "it was gone" if certificate in self.record.files else "it is new"
        if not why:
            end = self.wishes.renew_days
            why = certificates.why_not(found, authority.certificate, name, addresses, self.now, end)
        signed = certificates.issue(authority, name, use, addresses, self.now, self.wishes.days) if why else found
        self._wanted[certificate], self._wanted[key] = signed.certificate, signed.key
        self._wanted[f"{of}/{TRUSTED}"] = self._wanted[AUTHORITY]
        self._tell(of, signed, made=bool(why), before=found.certificate, why=why if found.certificate else "")

    def _tell(self, of: str, signed: Signed, *, made: bool, before: bytes, why: str) -> None:
        fate: FateKind = "kept" if not made else "renewed" if before else "made"
        until = certificates.certificate_end(certificates.read(signed.certificate))
        self.fates.append(Fate(of, fate, until, why if made else ""))

    def _cookie(self) -> bytes:
        """Return the secret by which the brokers of a cluster know each other: the one that there is, or a new one."""
        for there in (self._wanted, None):
            for host in self.record.hosts:
                path = f"{BROKERS}/{host.name}/{COOKIE}"
                found = there.get(path) if there is not None else self._made(path)
                if found:
                    return found
        return secrets.token_hex(32).encode()

    def _url(self, name: str) -> str:
        """Return the address of the brokers for a user; users begin with different ones."""
        hosts = [host.authority for host in self.record.hosts]
        first = zlib.crc32(name.encode()) % len(hosts)
        where = f"{self.record.installed.rstrip('/')}/{name}"
        files = {"cafile": f"{where}/{TRUSTED}", "certfile": f"{where}/{CERTIFICATE}", "keyfile": f"{where}/{KEY}"}
        query = urlencode({"auth": "external", **files}, safe="/")
        vhost = quote(self.record.vhost, safe="")
        return f"amqps://{name}@{','.join((*hosts[first:], *hosts[:first]))}/{vhost}?{query}"

    def _drop_removed(self) -> None:
        for name in self.wishes.removed:
            for of in (f"{PARTIES}/{name}", f"{BROKERS}/{name}"):
                files = [path for path in self.record.files if path.startswith(f"{of}/") and path not in self._wanted]
                self._obsolete += files
                self.fates += [Fate(of, "removed", "")] if files else []

    # --- what is there ----------------------------------------------------------------------------------------------

    def _made(self, path: str) -> bytes:
        """Return a file as an earlier run made it; empty if it is not there, or another's."""
        text = self._found(path)
        return text if text and self._is_ours(path, text) else b""

    def _found(self, path: str) -> bytes | None:
        try:
            return (self.folder / path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Fault(f"{self.folder / path} cannot be read: {error.strerror}") from None

    def _is_ours(self, path: str, text: bytes) -> bool:
        return _fingerprint(text) in self.record.files.get(path, ())

    def check_nothing_is_in_the_way(self) -> None:
        """Refuse to overwrite what is not as an earlier run made it.

        Raises
        ------
        Fault
            With that file.
        """
        for path in (*self._wanted, *self._obsolete):
            text = self._found(path)
            if text is None or text == self._wanted.get(path) or self._is_ours(path, text):
                continue
            raise usage(
                f"{self.folder / path} is not as this command made it, and would be overwritten",
                "move it away, and run this again; keep settings of your own in /etc/rabbitmq/conf.d",
            )

    # --- writing ----------------------------------------------------------------------------------------------------

    def write(self) -> Sequence[Path]:
        """Write what is new or other than before; return the paths. The next run mends a write that was cut short."""
        new = {path: text for path, text in self._wanted.items() if self._found(path) != text}
        after = {path: (_fingerprint(text),) for path, text in self._wanted.items()}
        kept = {path: marks for path, marks in self.record.files.items() if path not in self._obsolete}
        during = {path: tuple({*self.record.files.get(path, ()), *after.get(path, ())}) for path in {*kept, *after}}
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write_record({**{path: self.record.files[path] for path in self._obsolete}, **during})
        for path, text in new.items():
            _write(self.folder / path, text, secret=Path(path).name in SECRET)
        for path in self._obsolete:
            (self.folder / path).unlink(missing_ok=True)
            with suppress(OSError):  # something of another's is in it
                (self.folder / path).parent.rmdir()
        self._write_record({**kept, **after})
        return [self.folder / path for path in new]

    def _write_record(self, files: Mapping[str, tuple[str, ...]]) -> None:
        record = replace(self.record, files=dict(sorted(files.items())))
        _write(self.folder / RECORD, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n", secret=False)


def _fingerprint(text: bytes) -> str:
    return sha256(text).hexdigest()


def _split(pem: bytes) -> list[bytes]:
    """Return the certificates of a file one by one."""
    end = b"-----END CERTIFICATE-----\n"
    return [part + end for part in pem.split(end)[:-1]]


def _write(path: Path, text: bytes, *, secret: bool) -> None:
    """Write a file at once, as a whole; a secret one for this user only, from its first byte on."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), 0o600 if secret else 0o644)  # whatever the umask
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


# --- what a person writes -------------------------------------------------------------------------------------------


def read_host(text: str) -> Host:
    """Return a broker's host from ``name``, ``name=address`` or ``name=address:port``; raises `Fault`."""
    name, _, address = text.partition("=")
    address, port = _split_port(address or name)
    if not _is_label(name):
        raise usage(f"--hosts: {name!r} is no short host name", "write b1=b1.example.org: name, =, address")
    if not (_is_address(address) and 0 < port < 65536):
        raise usage(f"--hosts: {text!r} names no address", "write b1=10.0.0.1, b1=b1.example.org or b1=10.0.0.1:5671")
    return Host(name, address, port)


def _split_port(text: str) -> tuple[str, int]:
    address, colon, port = text.rpartition(":")
    if colon and port.isdecimal() and (address.startswith("[") or ":" not in address):
        return address.strip("[]"), int(port)
    return text.strip("[]"), TLS_PORT


def _is_address(text: str) -> bool:
    with suppress(ValueError):
        return bool(ip_address(text))
    return len(text) < 254 and all(map(_is_label, text.split(".")))


def _is_label(text: str) -> bool:
    letters = text.replace("-", "a")
    return letters.isascii() and letters.isalnum() and len(text) < 64 and text[0] != "-" and text[-1] != "-"
