"""A gateway: one daemon on a login host that hosts the app agents of all its owners, and signs their launches.

Its socket is open to every local user. The kernel names the user who connects (SO_PEERCRED), and that user is the
owner: a user cannot submit in another's name, and a new user needs nothing from an administrator. Each owner has a host
core with a journal of its own, exactly as in an owner's own daemon, and a connection to the broker.

A launch is signed when its app wishes GPUs for it, with the user's number and groups on this host. The signature stays
the same until the attempt or its GPUs change, or it has become old: the arbiter would hear news where there is none.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from msgspec import Struct
from msgspec.structs import replace

from app_agent import control_server
from app_agent.config import AppConfig
from app_agent.control_server import ControlServer
from app_agent.core.host import OwnEffect, OwnEvent
from app_agent.daemon import SNAPSHOT_EVERY, DatedHost, open_journal, restored
from protocol import config, warrants
from protocol.bus import Bus
from protocol.config import ConfigError
from protocol.core import Connected, Received, Send, Tick
from protocol.exit_codes import FAILED, NOT_PERMITTED
from protocol.journal import JournalError
from protocol.messages import AppId, AppReport, JobId, JobWish, LaunchSpec, Party, Warrant
from protocol.private import state_folder
from protocol.shell import Shell

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

#: A signature that is older is made anew; launchers take one of an hour unless they are told otherwise.
RENEW_S = 900.0
#: Users below this are the system's own.
UID_MIN = 1000
ALL = "*"
ALIVE_S = 1.0
_OWNER = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")

_log = structlog.get_logger("gateway")


class GatewayConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a gateway runs.

    Attributes
    ----------
    name
        Its name: the broker user is ``gateway-<name>``, and nodes keep its public key as ``<name>.pub``.
    owners
        The users who may submit here; ``["*"]``: all local users.
    tenants
        The tenant that pays for an owner's apps that name none, by owner; for all others it is the owner.
    uid_min
        Users below this submit nothing; 1000 or more.
    bus, bus_file
        ``amqp[s]://user:password@host:port/vhost``, or the file that holds it.
    prefix
        The prefix of queue and exchange names; the same in all daemons of a site.
    state_dir
        Folder of the key and of the owners' journals.
    key
        The private key with which launches are signed; made at the first start. By default in `state_dir`.
    socket
        The control socket, in a folder that all users may pass through.
    shared_users
        Broker users that may speak for every participant: only for brokers where all daemons share one user.
    beat_s
        Every so often each app states its whole wish again.
    """

    name: str
    owners: tuple[str, ...] = (ALL,)
    tenants: Mapping[str, str] = {}
    uid_min: int = UID_MIN
    bus: str = ""
    bus_file: str = ""
    prefix: str = ""
    state_dir: str = "/var/lib/gpu-arbiter-gateway"
    key: str = ""
    socket: str = "/run/gpu-arbiter-gateway/control.sock"
    shared_users: tuple[str, ...] = ()
    beat_s: float = 2.0


def load(path: Path) -> GatewayConfig:
    """Return the configuration in the TOML file at `path`; raises `ConfigError`."""
    return config.load(path, GatewayConfig, check, shown=config.shipped("gateway.toml"))


def check(gateway: GatewayConfig, source: str) -> None:
    """Refuse settings that cannot work.

    Raises
    ------
    ConfigError
        With `source`, the field and the mend.
    """
    config.require_id(gateway.name, "name", "login1", source)
    for owner in gateway.owners:
        if owner != ALL:
            config.require_id(owner, "owners", "alice", source)
    for owner, tenant in gateway.tenants.items():
        config.require_id(tenant, f"tenants.{owner}", "vision", source)
    config.require_positive(gateway, ("beat_s",), source)
    if gateway.uid_min < UID_MIN:
        raise ConfigError(
            f"{source}: uid_min is {gateway.uid_min}; write {UID_MIN} or more, system users submit nothing"
        )


async def run_gateway(
    gateway: GatewayConfig,
    bus: Bus,
    *,
    on_alive: Callable[[], None] | None = None,
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Host the apps of all owners until cancelled.

    Parameters
    ----------
    gateway, bus
        Its settings, and the way to the arbiter.
    on_alive
        Called at least once a second, for a watchdog.
    on_ready
        Called once the socket listens.

    Raises
    ------
    ConfigError
        If the key, the socket or the state folder cannot be had.
    """
    folder = state_folder(Path(gateway.state_dir))
    signer = Signer(gateway.name, _key(gateway, folder))
    known = sorted(path.stem.removeprefix("app-") for path in folder.glob("app-*.db"))
    with _listening(Path(gateway.socket)) as listener, ExitStack() as journals:
        async with asyncio.TaskGroup() as group:
            hosts = Hosts(gateway, bus, signer, folder, journals, group)
            for owner in known:
                hosts.of(owner)  # one whose journal cannot be read is told so, and harms no other
            server = await control_server.serve(listener, hosts.asked_by, group)
            _log.info("control.listening", socket=gateway.socket, gateway=gateway.name, owners=len(hosts))
            if on_ready is not None:
                on_ready()
            try:
                while True:
                    if on_alive is not None:
                        on_alive()
                    await asyncio.sleep(ALIVE_S)
            finally:
                server.close()


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """Yield the control socket, which every local user may connect to."""
    with control_server.listen(path) as listener:
        path.chmod(0o666)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


class Hosts:
    """The hosts of all owners, each with its journal and its shell, from an owner's first request on."""

    def __init__(
        self,
        gateway: GatewayConfig,
        bus: Bus,
        signer: Signer,
        folder: Path,
        journals: ExitStack,
        group: asyncio.TaskGroup,
    ) -> None:
        self._gateway, self._bus, self._signer = gateway, bus, signer
        self._folder, self._journals, self._group = folder, journals, group
        self._controls: dict[str, ControlServer] = {}

    def __len__(self) -> int:
        return len(self._controls)

    def asked_by(self, connection: socket.socket) -> ControlServer | control_server.Refusal:
        """Return the control server of the user who has connected, or why the user may not submit here."""
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        wrong, name = self._user(uid)
        if wrong:
            _log.warning("request.refused", uid=uid, reason=wrong)
            return control_server.Refusal(wrong, NOT_PERMITTED)
        return self.of(name)

    def _user(self, uid: int) -> tuple[str, str]:
        """Return why a user may not submit here, empty if so, and the user's name."""
        gateway = self._gateway
        if uid < gateway.uid_min:
            return f"the gateway {gateway.name} serves users from number {gateway.uid_min} on, and yours is {uid}", ""
        try:
            name = pwd.getpwuid(uid).pw_name
        except KeyError:
            return f"the user with the number {uid} has no name on this host; an administrator must make one", ""
        if not _OWNER.fullmatch(name):
            return f"the user name {name!r} is no owner's id, which has lower-case letters, digits and dashes only", ""
        if ALL not in gateway.owners and name not in gateway.owners:
            return f"the gateway {gateway.name} does not serve {name}; an administrator adds names to its `owners`", ""
        return "", name

    def of(self, owner: str) -> ControlServer | control_server.Refusal:
        """Return the control server of an owner, whose host is started if it is not running; or why it cannot be."""
        if owner not in self._controls:
            try:
                self._controls[owner] = self._started(owner)
            except JournalError as error:
                _log.error("owner.unhosted", owner=owner, reason=str(error))
                return control_server.Refusal(f"your apps cannot be hosted: {error}; tell an administrator", FAILED)
        return self._controls[owner]

    def _started(self, owner: str) -> ControlServer:
        gateway = self._gateway
        app = AppConfig(
            owner,
            gateway.tenants.get(owner, ""),
            prefix=gateway.prefix,
            state_dir=str(self._folder),
            beat_s=gateway.beat_s,
        )
        journal = self._journals.enter_context(closing(open_journal(app)))
        host, clock = restored(journal, app)
        control = ControlServer(host, app, signs=True)
        shell: Shell[OwnEvent, OwnEffect] = Shell(
            _SigningHost(DatedHost(host), self._signer, owner),
            self._bus,
            Party("app", owner),
            perform=control.perform,
            journal=journal,
            snapshot=host.snapshot,
            snapshot_every=SNAPSHOT_EVERY,
            clock=clock,
            shared_users=frozenset(gateway.shared_users),
            answer=control.take_answer,
        )
        control.attach(shell, self._bus)
        self._group.create_task(shell.run(), name=f"apps of {owner}")
        self._group.create_task(control.introduce(), name=f"introduction of {owner}")
        _log.info("owner.hosted", owner=owner, apps=len(host.state.apps))
        return control


# --- signing --------------------------------------------------------------------------------------------------------


class _Made(Struct, frozen=True):
    """A signature that was made: for this wish, at this time."""

    wish: JobWish
    signed: LaunchSpec
    at_s: float


class Signer:
    """Signs the launches of a gateway; `clock` is UNIX time in seconds."""

    def __init__(self, gateway: str, key: Ed25519PrivateKey, clock: Callable[[], float] = time.time) -> None:
        self._gateway, self._key, self._clock = gateway, key, clock
        self._made: dict[AppId, dict[JobId, _Made]] = {}

    def signed(self, report: AppReport, user: str) -> AppReport:
        """Return `report` in which each launch that may start is signed for `user`; none is without such a user."""
        try:
            known = pwd.getpwnam(user)
        except KeyError:
            _log.warning("launch.unsigned", user=user, reason="this host has no such user any more")
            return report
        before, made = self._made.pop(report.app, {}), {}
        for wish in report.jobs:
            if wish.gpus:
                made[wish.job] = self._renewed(before.get(wish.job), report.app, wish, known)
        if made:
            self._made[report.app] = made
        jobs = (replace(wish, launch=made[wish.job].signed) if wish.job in made else wish for wish in report.jobs)
        return replace(report, jobs=tuple(jobs))

    def _renewed(self, made: _Made | None, app: AppId, wish: JobWish, user: pwd.struct_passwd) -> _Made:
        now = self._clock()
        key = (wish.launch, wish.attempt, wish.gpus)
        if (
            made is not None
            and (made.wish.launch, made.wish.attempt, made.wish.gpus) == key
            and 0 <= now - made.at_s < RENEW_S
        ):
            return made
        others = set(os.getgrouplist(user.pw_name, user.pw_gid)) - {user.pw_gid}
        gids = (user.pw_gid, *sorted(others))
        warrant = Warrant(self._gateway, user.pw_name, user.pw_uid, gids, wish.gpus, int(now))
        launch = warrants.signed(wish.launch, warrant, self._key, app=app, job=wish.job, attempt=wish.attempt)
        return _Made(wish, launch, now)


class _SigningHost:
    """The host core of an owner, whose reports are signed as they leave; the core itself knows no key."""

    def __init__(self, host: DatedHost, signer: Signer, owner: str) -> None:
        self._host, self._signer, self._owner = host, signer, owner
        self.deadline = host.deadline

    def handle(self, event: OwnEvent | Received | Tick | Connected, now: float) -> Sequence[OwnEffect | Send]:
        return [self._with_signature(effect) for effect in self._host.handle(event, now)]

    def _with_signature(self, effect: Any) -> Any:
        if isinstance(effect, Send) and isinstance(effect.message, AppReport):
            return replace(effect, message=self._signer.signed(effect.message, self._owner))
        return effect


def _key(gateway: GatewayConfig, folder: Path) -> Ed25519PrivateKey:
    """Return the gateway's key, which is made if there is none."""
    path = Path(gateway.key) if gateway.key else folder / "gateway.key"
    try:
        if not path.exists():
            warrants.make_key(path)
            _log.info("key.made", public=str(warrants.public_file(path)), meaning="copy it to the nodes' launchers")
        return warrants.private_key(path)
    except warrants.WarrantError as error:
        raise ConfigError(str(error)) from error
