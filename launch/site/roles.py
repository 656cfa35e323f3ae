"""What a host needs for its part in a site, as steps: the arbiter's, a node's, a login host's, the broker's.

docs/operations.md says the same in commands for a person. `steps_of` is what `install` does, `removal` what `uninstall`
does.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote, urlsplit

import msgspec
from msgspec import Struct

from launch import participants
from launch.faults import Fault, usage
from launch.site import host_files, shipped
from launch.site.host_files import HostFiles
from launch.site.steps import (
    PACKAGED_UNITS,
    UNITS,
    Absent,
    Accounts,
    Enabled,
    File,
    Folder,
    Host,
    Kept,
    Look,
    Planned,
    Reloaded,
    Started,
    StateFolder,
    Step,
    Stopped,
    is_written,
    put_aside,
    write,
)
from node_agent.workers.records import Record
from protocol import exit_codes
from protocol.bus.provision import broker_config, tls_config

Role = Literal["arbiter", "node", "login", "broker"]
ETC = "/etc/gpu-arbiter"
#: Where the broker's host keeps the addresses that it made for participants.
ADDRESSES = f"{ETC}/broker"
SYSUSERS = "/etc/sysusers.d/gpu-arbiter.conf"
TMPFILES = "/etc/tmpfiles.d/gpu-arbiter.conf"
PROFILE = "/etc/profile.d/gpu-arbiter.sh"
BROKER_CONFIG = "/etc/rabbitmq/conf.d/90-gpu-arbiter.conf"
BROKER_UNIT = "rabbitmq-server.service"
BROKER_ACCOUNT, PLUGINS = "rabbitmq", "/etc/rabbitmq/enabled_plugins"
#: In the plan of a broker that gets certificates.
ALONE = "TLS alone: clients without a certificate, also those of other programs, are let in no more"
DRIVER_UNIT = "nvidia-persistenced.service"
ARBITER, NODE, LAUNCHER = ("gpu-arbiter.service", "gpu-arbiter-node-agent.service", "gpu-arbiter-launcher.service")
GATEWAY, APP = ("gpu-arbiter-gateway.service", "gpu-arbiter-app-agent@.service")
LAUNCHER_SOCKET = "/run/gpu-arbiter-launcher/launcher.sock"
GATEWAY_SOCKET = "/run/gpu-arbiter-gateway/control.sock"
GATEWAY_KEY = "/var/lib/gpu-arbiter-gateway/gateway.key.pub"  #: that nodes' launchers need
PROFILE_TEXT = f"export GPU_ARBITER_URL=unix://{GATEWAY_SOCKET}\n"
#: Read after the gateway's, where a host has both.
OWNERS_PROFILE = "/etc/profile.d/gpu-arbiter.user.sh"
OWNERS_TEXT = f"""# A user with an app agent of their own submits there.
if [ -e "{ETC}/app-$(id -un).toml" ]; then
    export GPU_ARBITER_URL="unix:///run/gpu-arbiter-app/$(id -un)/control.sock"
fi
"""
#: A node agent beside a launcher is not the user that trains.
LAUNCHER_DROP_IN = f"{UNITS}/{NODE}.d/launcher.conf"
LAUNCHER_USER = "[Service]\nUser=gpu-node\nGroup=gpu-node\n"
#: What a role also brings, for an admin who wants the web page, with an app agent to ask through; it is not started.
UNSTARTED = {"arbiter": ("gpu-arbiter-web.service", APP)}
#: State folders, and what within them belongs to users.
STATE = {
    "/var/lib/gpu-arbiter": (),
    "/var/lib/gpu-arbiter-node": ("logs",),
    "/var/lib/gpu-arbiter-gateway": (),
    "/var/lib/gpu-arbiter-launcher": (),
    "/var/lib/gpu-arbiter-app": (),
}
TRAINING_HOME = "/var/lib/gpu-train"


class Wish(Struct, frozen=True):
    """What an admin asks for on one host.

    A node or a gateway is named by `id`, or else by its host. `address` is the broker's, with its password; with
    `replaces_address` it takes the place of another. `parties` are the broker users that the broker's host makes, who
    reach it at `broker_host`. `given` are the certificates of the host's broker or daemon, with its address. `program`
    is the command that the units start.
    """

    role: Role
    id: str = ""
    host_name: str = ""
    owner: str = ""
    launcher: bool = False
    start: bool = False
    address: str = ""
    replaces_address: bool = False
    parties: tuple[str, ...] = ()
    vhost: str = "gpu"
    broker_host: str = ""
    given: HostFiles = HostFiles(())
    program: str = shipped.PROGRAM


class Daemon(Struct, frozen=True):
    """A daemon of a role: its unit as it is enabled, its participant's user, and its files of `/etc/gpu-arbiter`.

    `account` is the Unix user as which it runs.
    """

    unit: str
    user: str = ""
    account: str = "root"
    configuration: str = ""
    text: str = ""
    address: str = ""  #: the file with the broker's

    @property
    def file(self) -> str:
        """Return the name of its unit's file."""
        return _file_of(self.unit)

    @property
    def files(self) -> tuple[str, ...]:
        """Return its own files in `/etc/gpu-arbiter`."""
        return tuple(f"{ETC}/{name}" for name in (self.configuration, self.address) if name)


def _file_of(unit: str) -> str:
    """Return the name of a unit's file, which is one for all instances of a template."""
    return re.sub("@.*[.]", "@.", unit)


def daemons_of(wish: Wish, host: Host) -> list[Daemon]:
    """Return the daemons of a role, in the order in which they start.

    Raises
    ------
    Fault
        If a name cannot be, or the host's configuration has another.
    """
    if wish.role == "arbiter":
        text = shipped.configurations([], [])["arbiter.toml"]
        return [Daemon(ARBITER, "arbiter", "gpu-arbiter", "arbiter.toml", text, "arbiter.url")]
    if wish.role == "node":
        name = _id_on(host, "node.toml", "node", wish)
        _demand_launcher_as_installed(wish, host)
        text = shipped.node(name, LAUNCHER_SOCKET if wish.launcher else "")
        account = "gpu-node" if wish.launcher else "gpu-train"
        node = Daemon(NODE, f"node-{name}", account, "node.toml", text, "node.url")
        launcher = Daemon(LAUNCHER, configuration="launcher.toml", text=shipped.file("launcher.toml"))
        return [launcher, node] if wish.launcher else [node]
    if wish.role == "login" and wish.owner:
        owner = participants.checked_id("app", wish.owner, "--owner")
        if host.account(owner) is None:
            raise usage(f"--owner: this host has no user {owner}", "name a Unix user of this host")
        text = shipped.configurations([], [owner])[f"app-{owner}.toml"]
        unit = APP.replace("@", f"@{owner}")
        return [Daemon(unit, f"app-{owner}", owner, f"app-{owner}.toml", text, f"app-{owner}.url")]
    if wish.role == "login":
        name = _id_on(host, "gateway.toml", "name", wish)
        text = shipped.gateway(name)
        return [Daemon(GATEWAY, f"gateway-{name}", "gpu-gateway", "gateway.toml", text, "gateway.url")]
    return []


def _id_on(host: Host, configuration: str, field: str, wish: Wish) -> str:
    """Return the id that a daemon of the host has, or is to have; raises `Fault` if those differ."""
    known = setting(host.at(f"{ETC}/{configuration}"), field)
    if known and wish.id and known != wish.id:
        raise usage(
            f"--id is {wish.id}, and {ETC}/{configuration} says {field} = {known!r}", "change the one that is wrong"
        )
    named = known or wish.id or wish.host_name.partition(".")[0].lower()
    return participants.checked_id("node", named, "--id")


def _demand_launcher_as_installed(wish: Wish, host: Host) -> None:
    """Raise `Fault` if the node's configuration, which is kept, says otherwise of a launcher."""
    file = f"{ETC}/node.toml"
    known = setting(host.at(file), "launcher")
    if not host.at(file).exists() or bool(known) == wish.launcher:
        return
    if wish.launcher:
        raise usage(
            f"--launcher is given, and {file} says launcher = {known!r}",
            f'write launcher = "{LAUNCHER_SOCKET}" there, or leave out --launcher',
        )
    raise usage(
        f"--launcher is not given, and {file} says launcher = {known!r}",
        'add --launcher; or write launcher = "" there, and remove the launcher with `gpu-arbiter uninstall`',
    )


def setting(path: Path, field: str) -> str:
    """Return a text in a configuration; empty if it is not there. Raises `Fault` if the file cannot be read."""
    try:
        value = tomllib.loads(path.read_text(encoding="utf-8")).get(field, "")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise Fault(f"{path} cannot be read: {error}", next_step="mend it, or move it away") from None
    return value if isinstance(value, str) else ""


# --- install ----------------------------------------------------------------------------------------------------------


def steps_of(wish: Wish, host: Host) -> list[Step]:
    """Return what the host needs for the role, in the order in which it is done.

    Raises
    ------
    Fault
        Before anything is done: if a name is wrong, or a daemon that is to be started cannot start.
    """
    if wish.role == "broker":
        return list(_broker(wish, host))
    daemons = daemons_of(wish, host)
    _demand_own_address(daemons, wish)
    if wish.start:
        _demand_addresses(daemons, wish, host)
    return list(_site_role(daemons, wish, host))


def _site_role(daemons: Sequence[Daemon], wish: Wish, host: Host) -> Iterator[Step]:
    sysusers = shipped.file("sysusers.conf")
    yield File(SYSUSERS, sysusers, elsewhere=("/usr/lib/sysusers.d/gpu-arbiter.conf",), replaces=True)
    yield Accounts("gpu-arbiter.conf", tuple(re.findall(r"^u (\S+)", sysusers, re.MULTILINE)))
    if wish.role == "node" and not wish.launcher:
        tmpfiles = shipped.file("tmpfiles.conf")
        yield File(TMPFILES, tmpfiles, elsewhere=("/usr/lib/tmpfiles.d/gpu-arbiter.conf",), replaces=True)
        yield StateFolder("gpu-arbiter.conf", TRAINING_HOME, "gpu-train", 0o750)
    yield Folder(ETC)
    if wish.launcher:
        yield Folder(f"{ETC}/gateways")
    for each in daemons:
        yield File(f"{ETC}/{each.configuration}", each.text)
        if wish.address and each.address:
            yield from _files_of(wish.given, each.account)
            yield File(f"{ETC}/{each.address}", f"{wish.address}\n", 0o600, replaces=wish.replaces_address)
    if wish.role == "login":
        yield File(OWNERS_PROFILE, OWNERS_TEXT) if wish.owner else File(PROFILE, PROFILE_TEXT)
    units = shipped.units(wish.program)
    for file in (*(each.file for each in daemons), *UNSTARTED.get(wish.role, ())):
        packaged = tuple(f"{folder}/{file}" for folder in PACKAGED_UNITS)
        yield File(f"{UNITS}/{file}", units[file], elsewhere=packaged, replaces=True)
    if wish.launcher:
        yield File(LAUNCHER_DROP_IN, LAUNCHER_USER, replaces=True)
    if host.live:
        yield Reloaded(tuple(each.unit for each in daemons))
    driver = [DRIVER_UNIT] if wish.role == "node" and _has_unit(host, DRIVER_UNIT) else []
    for unit in (*driver, *(each.unit for each in daemons)):
        yield Enabled(unit)
    if wish.start:
        for unit in driver:
            yield Started(unit)
        for each in daemons:
            made = GATEWAY_KEY if each.unit == GATEWAY else ""
            yield Started(each.unit, (*each.files, *(file.path for file in wish.given.files)), makes=made)


def _files_of(given: HostFiles, account: str) -> Iterator[Step]:
    """Yield the files that `provision site` has made for a host; what is secret belongs to the account."""
    for folder in dict.fromkeys(str(Path(each.path).parent) for each in given.files if each.secret):
        if Path(folder).parent == Path(ETC, "tls"):
            yield Folder(f"{ETC}/tls", exact=True)
        yield Folder(folder, exact=True)
    for each in given.files:
        owner = account if each.secret else "root"
        note = ALONE if each.path == host_files.TLS_CONFIG else ""
        mode = 0o600 if each.secret else 0o644
        yield File(each.path, each.text, mode, replaces=True, owner=owner, exact=True, note=note)


def certificates(wish: Wish, host: Host, folder: Path) -> HostFiles:
    """Return what a folder of `provision site` has for the role's daemon on this host.

    Raises
    ------
    Fault
        If it has nothing for it.
    """
    if wish.role == "broker":
        return host_files.of_broker(folder, wish.host_name.partition(".")[0])
    (user,) = (each.user for each in daemons_of(wish, host) if each.user)
    return host_files.of_party(folder, user)


def _has_unit(host: Host, unit: str) -> bool:
    return any(host.at(f"{folder}/{unit}").is_file() for folder in (UNITS, *PACKAGED_UNITS))


def writes_units(steps: Sequence[Step], host: Host) -> bool:
    """Whether some unit is not a package's."""
    files = (each for each in steps if isinstance(each, File) and each.path.endswith(".service"))
    return any(not any(host.at(place).is_file() for place in each.elsewhere) for each in files)


def _demand_own_address(daemons: Sequence[Daemon], wish: Wish) -> None:
    """Raise `Fault` if the address is for another user of the broker than the daemon's."""
    user = unquote(urlsplit(wish.address).username or "")
    for each in daemons:
        if wish.address and each.address and user != each.user:
            raise usage(
                f"--bus-file: its address is for {f'the user {user}' if user else 'no user'} of the broker, and "
                f"{each.unit} is {each.user}",
                f"name the file with the address of {each.user}",
            )


def _demand_addresses(daemons: Sequence[Daemon], wish: Wish, host: Host) -> None:
    for each in daemons:
        if each.address and not wish.address and not host.at(f"{ETC}/{each.address}").exists():
            raise usage(
                f"there is no {ETC}/{each.address}, without which {each.unit} does not start",
                f"give the broker's address in a file, amqp://{each.user}:PASSWORD@BROKER-HOST:5672/{wish.vhost}: "
                "--bus-file FILE; or what `gpu-arbiter provision site` has made: --certs FOLDER",
            )


def made_address(wish: Wish, host: Host) -> Path | None:
    """Return the file with the address that `install broker` made here for the role's participant, if there is one."""
    for each in daemons_of(wish, host):
        place = host.at(f"{ADDRESSES}/{each.user}.url")
        if each.user and place.is_file():
            return place
    return None


def left_to_do(wish: Wish, host: Host) -> list[str]:
    """Return what remains for the admin, as commands."""
    left = []
    for each in daemons_of(wish, host):
        if each.address and not wish.address and not host.at(f"{ETC}/{each.address}").exists():
            url = f"amqp://{each.user}:PASSWORD@BROKER-HOST:5672/{wish.vhost}"
            left.append(f"install -m 600 /dev/stdin {ETC}/{each.address} <<< '{url}'   # or again with --bus-file")
        if not wish.start:
            left.append(
                f"systemctl start {each.unit}   # or again with --start; edit {ETC}/{each.configuration} before"
            )
    if (wish.launcher or (wish.role == "login" and not wish.owner)) and find_spec("cryptography") is None:
        left.append("/opt/gpu-arbiter/bin/pip install 'gpu-arbiter[users]'   # signatures need it")
    if wish.launcher:
        left.append(f"copy {GATEWAY_KEY} of each login host to {ETC}/gateways/NAME.pub   # docs/operations.md")
    if wish.role == "login" and not wish.owner:
        left.append("name this gateway in arbiter.toml, [[gateways]]   # docs/operations.md, Tasks as their users")
    if wish.owner:
        socket = f"unix:///run/gpu-arbiter-app/{wish.owner}/control.sock"
        left.append(f"export GPU_ARBITER_URL={socket}   # as {wish.owner}, or log in anew")
    if wish.role == "broker":
        if not wish.start:
            left.append(f"systemctl restart {BROKER_UNIT.removesuffix('.service')}   # or again with --start")
        left += [f"copy {path} to the host of {path.name}: --certs {path.name} there" for path in wish.given.others]
        if not wish.parties and not host.at(host_files.TLS_CONFIG).exists() and not wish.given.files:
            left.append(
                "gpu-arbiter install broker --start --party arbiter --party node-n1 --party app-alice   # with yours"
            )
        left += [f"copy {ADDRESSES}/{user}.url to the host of {user}: --bus-file there" for user in wish.parties]
    return left


# --- the broker's host ------------------------------------------------------------------------------------------------


def _broker(wish: Wish, host: Host) -> Iterator[Step]:
    if not _has_unit(host, BROKER_UNIT):
        raise Fault("RabbitMQ is not on this host", next_step="apt-get install rabbitmq-server")
    if wish.parties and host.at(host_files.TLS_CONFIG).exists():
        raise usage(
            f"--party makes a user with a password, and by {host_files.TLS_CONFIG} this broker lets none in",
            "`gpu-arbiter provision site` makes another participant; then here: --certs FOLDER",
        )
    if wish.parties and not host.live:
        raise usage("--party asks the broker that runs here", "leave out --root, or --party")
    written = _has_lines(host)
    if written:
        yield Kept(written, "it has the lines that the broker needs")
    else:
        yield File(BROKER_CONFIG, broker_config(), replaces=True)
    if wish.given.files:
        yield Plugin(host_files.PLUGIN)
        yield from _files_of(wish.given, BROKER_ACCOUNT)
    yield Enabled(BROKER_UNIT)
    if wish.start:
        given = (PLUGINS, *(each.path for each in wish.given.files)) if wish.given.files else ()
        files = (written or BROKER_CONFIG, host_files.TLS_CONFIG, *given)
        yield Started(BROKER_UNIT, files, wait=True)
    if wish.parties:
        yield Folder(ETC)
        yield Folder(ADDRESSES, 0o700)
        yield VirtualHost(wish.vhost)
        for user in wish.parties:
            lines = tuple(participants.commands(user, wish.vhost))
            yield Participant(user, lines, wish.vhost, f"{wish.broker_host}:5672/{quote(wish.vhost, safe='')}")


def _has_lines(host: Host) -> str:
    """Return the main configuration of the broker if an admin has put the lines there; else nothing."""
    main = "/etc/rabbitmq/rabbitmq.conf"
    try:
        there = _settings(host.at(main).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return main if _settings(broker_config()).items() <= there.items() else ""


def _settings(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\s*([\w.]+)\s*=\s*(.*?)\s*$", text, re.MULTILINE))


def _listed(host: Host, kind: str) -> set[str] | None:
    """Return the names that the broker here lists; None if it does not answer."""
    done = host.call("rabbitmqctl", "--quiet", kind)
    return {line.split("\t")[0] for line in done.stdout.splitlines()[1:]} if done.returncode == 0 else None


def _on_the_broker(host: Host, before: Sequence[Planned], kind: str, name: str) -> Look:
    """Look whether the broker lists a name; one that does not run may be started by a step before."""
    listed = _listed(host, kind)
    if listed is not None:
        return Look("keep") if name in listed else Look("make")
    if any(isinstance(each.step, Started) and each.look.act != "keep" for each in before):
        return Look("make", "unless the broker has it once it runs")
    raise Fault("the broker on this host does not answer", next_step="do the same with --start")


class Plugin(Struct, frozen=True):
    """The broker loads a plugin when it starts, beside those that an admin has chosen."""

    name: str
    path: str = PLUGINS

    @property
    def what(self) -> str:
        """Return its name."""
        return f"plugin {self.name} of the broker"

    def look(self, host: Host, before: Sequence[Planned]) -> Look:
        """Read which ones it loads."""
        return Look("keep" if self.name in _plugins(host) else "make")

    def do(self, host: Host) -> None:
        """Add it to them; comments stay."""
        path, known = host.inside(self.path), _plugins(host)
        text = path.read_text(encoding="utf-8") if known else ""
        more, found = re.subn(r"^([^%\n]*)\]", rf"\g<1>,{self.name}]", text, count=1, flags=re.MULTILINE)
        write(path, more if found else f"[{','.join((*known, self.name))}].\n", 0o644)


def _plugins(host: Host) -> list[str]:
    """Return the plugins that the broker loads, which stand in a list of Erlang's."""
    try:
        text = host.at(PLUGINS).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return re.findall(r"\w+", re.sub("%.*", "", text))


class VirtualHost(Struct, frozen=True):
    """The broker has a virtual host of that name."""

    name: str

    @property
    def what(self) -> str:
        """Return its name."""
        return f"virtual host {self.name} of the broker"

    def look(self, host: Host, before: Sequence[Planned]) -> Look:
        """Ask the broker."""
        return _on_the_broker(host, before, "list_vhosts", self.name)

    def do(self, host: Host) -> None:
        """Make it."""
        if self.name not in (_listed(host, "list_vhosts") or ()):
            host.do("rabbitmqctl", "add_vhost", self.name)


class Participant(Struct, frozen=True):
    """The broker knows a participant, whose address with a new password lies in a file of root's."""

    user: str
    commands: tuple[str, ...]
    vhost: str
    place: str  #: host, port and virtual host

    @property
    def what(self) -> str:
        """Return its name."""
        return f"user {self.user} of the broker"

    def look(self, host: Host, before: Sequence[Planned]) -> Look:
        """Ask the broker."""
        found = _on_the_broker(host, before, "list_users", self.user)
        if found.act == "make" and not found.why:
            return Look("make", f"with its address in {self._file}")
        if found.act == "keep" and self._lacks_rights(host):
            return Look("change", "it has not got all of its rights")
        if found.act == "keep" and not host.at(self._file).exists():
            return Look("keep", f"its password is not known here: rabbitmqctl change_password {self.user} sets another")
        return found

    def _lacks_rights(self, host: Host) -> bool:
        """Whether the broker has not got all of its rights, as where an installation was cut short.

        Rights that an admin has changed are rights. The limits are set before them.
        """
        wanted = [shlex.split(line) for line in self.commands]
        topics = {words[5] for words in wanted if words[1] == "set_topic_permissions"}
        return not (
            self._rights(host, "list_user_permissions", "vhost")
            and topics <= self._rights(host, "list_user_topic_permissions", "exchange")
        )

    def _rights(self, host: Host, kind: str, field: str) -> set[str]:
        """Return a field of what the broker lists of its rights in the virtual host."""
        listed = host.do("rabbitmqctl", "--quiet", "--formatter", "json", kind, self.user)
        return {str(row[field]) for row in json.loads(listed) if row["vhost"] == self.vhost}

    def do(self, host: Host) -> None:
        """Make it, with a password that is in the file only; give it its rights if it has not got them."""
        add, *rights = map(shlex.split, self.commands)
        if self.user not in (_listed(host, "list_users") or ()):
            password = secrets.token_urlsafe(24)
            write(host.at(self._file), f"amqp://{self.user}:{password}@{self.place}\n", 0o600)
            host.do(*add, text=f"{password}\n")
        elif not self._lacks_rights(host):
            return
        for line in rights:
            host.do(*line)

    @property
    def _file(self) -> str:
        return f"{ADDRESSES}/{self.user}.url"


# --- uninstall --------------------------------------------------------------------------------------------------------


def training(host: Host) -> list[str]:
    """Return the tasks that run on this host now, under whichever node agent."""
    places = {"/var/lib/gpu-arbiter-node", setting(host.at(f"{ETC}/node.toml"), "state_dir")} - {""}
    records = (path for place in sorted(places) for path in sorted(host.at(f"{place}/workers").glob("*")))
    # A lock that is not there would be made, and be root's.
    return [path.name for path in records if (path / "lock").exists() and Record(path).alive]


def demand_no_training(host: Host) -> None:
    """Raise `Fault` while training runs here."""
    tasks = training(host)
    if tasks:
        named = ", ".join(tasks[:3]) + (f" and {len(tasks) - 3} more" if len(tasks) > 3 else "")
        raise Fault(
            f"training runs on this node: {named}",
            code=exit_codes.REFUSED,
            next_step="empty the node with `gpu-arbiter drain NODE --wait`, or add --force: training then goes on",
        )


def _may_train(host: Host) -> bool:
    """Whether training runs here, or cannot be looked for, as the node's configuration is damaged."""
    try:
        return bool(training(host))
    except Fault:
        return True


def removal(host: Host, *, purge: bool) -> list[Step]:
    """Return what is to be removed of all roles; with `purge` state and configuration, too."""
    return list(_removal(host, purge=purge))


def _removal(host: Host, *, purge: bool) -> Iterator[Step]:
    yield from (Stopped(unit) for unit in host.units("gpu-arbiter*.service") if _file_of(unit) in shipped.units())
    yield from _made(host, purge=purge)
    busy = _may_train(host)
    if host.live:
        yield from (Absent(path) for path in ("/run/gpu-arbiter-node",) if Path(path).exists() and not busy)
    drop_ins = {f"/{path.relative_to(host.root)}" for path in host.at(UNITS).glob("gpu-arbiter*.service.d")}
    configuration = [ETC, host_files.FOLDER, *sorted(drop_ins)]
    for path in (*configuration, *STATE):
        if host.at(path).exists() and not _is_ours_alone(host.at(path)):
            kind = "configuration" if path in configuration else "state"
            yield Absent(path, kind, STATE.get(path, ())) if purge else Kept(path, f"{kind}, which --purge removes")
    if host.live:
        yield Reloaded()
    if host.at(TRAINING_HOME).exists():
        yield Kept(TRAINING_HOME, "it is the home of training, with users' files")
    packaged = next((f"{folder}/{ARBITER}" for folder in PACKAGED_UNITS if host.at(f"{folder}/{ARBITER}").exists()), "")
    if packaged:
        yield Kept("the units, accounts and program of the package", "dpkg --remove gpu-arbiter")


def _is_ours_alone(path: Path) -> bool:
    """Whether a folder has nothing but the drop-in of `install`, with which it goes."""
    ours = path / Path(LAUNCHER_DROP_IN).name
    alone = path.is_dir() and list(path.iterdir()) == [ours]
    return alone and ours.is_file() and not ours.is_symlink() and is_written(ours, LAUNCHER_USER)


def _made(host: Host, *, purge: bool) -> Iterator[Step]:
    """Yield the files that `install` or `units` makes besides configuration and state; an admin's own text stays."""
    units = {f"{UNITS}/{name}": text for name, text in shipped.units().items()}
    for path, text in {**units, **_texts(host)}.items():
        place = host.at(path)
        if place.is_symlink():
            yield Kept(path, f"it is a link to {place.readlink()}")
        elif place.is_file() and is_written(place, text):
            yield Absent(path)
        elif place.exists() and not (purge and path == LAUNCHER_DROP_IN):  # that goes with its folder
            yield Kept(path, "it is not as `install` writes it: it is yours, or of an earlier version")
        for name in (each.name for each in put_aside(place)):
            aside = str(Path(path).with_name(name))
            yield Absent(aside) if purge else Kept(aside, "`install` has put it aside, and --purge removes it")


def _texts(host: Host) -> dict[str, str]:
    """Return the texts of the files of `install` that are neither units nor configuration, by path."""
    port = re.search(r"^listeners[.]ssl[.]default = (\d+)$", _text(host, host_files.TLS_CONFIG), re.MULTILINE)
    return {
        host_files.TLS_CONFIG: tls_config(int(port[1]) if port else 0, folder=host_files.FOLDER),
        LAUNCHER_DROP_IN: LAUNCHER_USER,
        SYSUSERS: shipped.file("sysusers.conf"),
        TMPFILES: shipped.file("tmpfiles.conf"),
        PROFILE: PROFILE_TEXT,
        OWNERS_PROFILE: OWNERS_TEXT,
        BROKER_CONFIG: broker_config(),
    }


def _text(host: Host, path: str) -> str:
    """Return the text of a file; empty if there is none."""
    try:
        return host.at(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


class _BrokerUser(Struct, frozen=True):
    name: str


class _Definitions(Struct, frozen=True):
    """What a definitions.json says of users."""

    users: tuple[_BrokerUser, ...] = ()


def _users(host: Host) -> list[str]:
    """Return the users that `install` has given the broker on this host."""
    made = [path.stem for path in sorted(host.at(ADDRESSES).glob("*.url"))]
    try:
        text = _text(host, f"{host_files.FOLDER}/{host_files.DEFINITIONS}")
        return [*made, *(each.name for each in msgspec.json.decode(text, type=_Definitions).users)]
    except msgspec.DecodeError:  # there is none, or it is damaged
        return made


def left_after(host: Host) -> list[str]:
    """Return what remains for the admin after an uninstallation, as commands."""
    accounts = re.findall(r"^u (\S+)", shipped.file("sysusers.conf"), re.MULTILINE)
    there = [name for name in accounts if host.account(name) is not None]
    left = [f"userdel {name}   # once no file is left of it" for name in there]
    users = _users(host)
    if users:
        left += [f"rabbitmqctl delete_user {user}" for user in users]
        left.append("rabbitmqctl delete_vhost gpu   # with all queues of the site")
    if host.at(f"{shipped.PROGRAM}").exists():
        left.append(f"rm -rf {Path(shipped.PROGRAM).parents[1]}   # the program, unless a package brought it")
    return left
