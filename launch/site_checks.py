"""`doctor --site`: checks of a whole running site: its broker, transport, clocks, releases, store, isolation, fairness.

The findings depend on where it runs. The daemons' own words are heard everywhere, through an app agent; the
broker's limits are told to root or `rabbitmq` on its host, and the settings by the arbiter's configuration.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from ipaddress import ip_address
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Struct

from app_agent import streams
from app_agent.control import Control, ControlError
from app_agent.core.spec import AppSpec
from launch import escape
from launch.client import Client, open_client
from launch.faults import Fault
from launch.gpu_checks import Check, CheckVerdict
from protocol import exit_codes
from protocol.bus.address import split
from protocol.bus.provision import broker_config, gateway_user
from protocol.config import ConfigError
from protocol.messages import ARBITER, Party
from protocol.release import release
from protocol.topology import CONSUMER_TIMEOUT_MS, Permissions, Topology, with_prefix

if TYPE_CHECKING:
    from arbiter.core.state.model import ArbiterSettings

CONFIG = Path("/etc/gpu-arbiter/arbiter.toml")
#: The broker's own words wait for its node, which may be busy.
CONTROL_S = 30.0
#: Clocks that differ by less are set by NTP, and a report is that long on its way on a busy site.
CLOCK_NOTE_S = 5.0
#: Nodes refuse launches that a gateway has signed so far ahead of their clock (`skew_max_s` of launchers).
CLOCK_FAIL_S = 60.0
#: Names in one sentence.
NAMED_MAX = 5
#: Files that a broker has open per participant: its connection, and a few for its queues; and for itself.
FILES_PER_PARTICIPANT, FILES_OF_BROKER = 4, 1000
#: Oldest RabbitMQ that is supported.
BROKER_OLDEST = (3, 10)

#: For a GPU to come free and a task to try what it can.
ESCAPE_S = 60.0
#: Of each node.
ESCAPE_PYTHON = "python3"
#: The tries of `launch.escape`: what a task could do if one led out, and the mend.
ESCAPES = {
    "address": ("read the address of the broker with its password", "chmod 600 these files: docs/operations.md"),
    "gpu": (
        "open more GPUs than it has",
        "the launcher must close device files: its node needs cgroup v2, or the devices controller; see systemctl show "
        "-p DevicePolicy of the task's unit",
    ),
    "signal": ("send signals to the node agent", "give node agent and tasks users of their own; no task may be root"),
    "environ": ("read the variables of the node agent", "give node agent and tasks users of their own"),
    "files": ("open files of the node agent by its process", "give node agent and tasks users of their own"),
    "sockets": ("find the sockets of other tasks", "chmod 711 this folder, which is runtime_dir of the node agent"),
    "launcher": ("connect to the launcher", "chmod 600 its socket, and have it owned by the node agent's user"),
}
#: Where tasks of all users run as one.
LAUNCHER_MEND = "install a launcher on each node, and a gateway: docs/operations.md, Tasks as their users"

Ctl = Callable[..., str]  #: has `rabbitmqctl` do something with these words; raises `Fault`


class Daemon(Struct, frozen=True):
    """What the arbiter tells of a daemon that reports to it."""

    role: str
    id: str
    release: str = ""
    clock_ahead_s: float | None = None
    last_heard_s: float = 0.0

    @property
    def name(self) -> str:
        """Return its name for a person."""
        return f"{'node agent' if self.role == 'node' else 'app agent'} {self.id}"


class Escape(Struct, frozen=True):
    """What came of the tries of `launch.escape`: empty: held; else what was opened; None: there was nothing to try."""

    node: str
    user: str  #: that the task ran as
    agent: str  #: the user of the node agent
    tries: dict[str, str | None]


class Word(Struct, frozen=True):
    """The arbiter's word on all daemons; `here_ahead_s` is how far this host's clock is ahead of the arbiter's."""

    release: str
    here_ahead_s: float
    daemons: tuple[Daemon, ...]


def checks(config: Path | None = None, ctl: Ctl | None = None) -> Iterator[Check]:
    """Check the site whose app agent answers here.

    Parameters
    ----------
    config
        The arbiter's configuration, whose settings are tried; by default that of this host, if there is one.
    ctl
        Has the broker's `rabbitmqctl` do something.
    """
    participants, bus = 0, ""
    policy = ""
    try:
        with open_client() as client:
            met = client.ping()
            bus = str(met["bus"])
            word = heard(client)
            participants = len(word.daemons)
            yield from clocks(word)
            yield from releases(word, str(met.get("release", "")))
            yield Check("store of the arbiter", "ok", "written to: the arbiter decides and answers")
            policy = str(client.query("shares")["policy"])
            yield from isolation(client, signs=bool(met.get("signs", True)))
    except Fault as fault:
        yield Check("daemons", "fail", fault.sentence, fault.next_step)
    yield from brokers(bus, participants, ctl or rabbitmqctl)
    yield from transport(bus)
    yield from fairness(config, policy)


# --- daemons ----------------------------------------------------------------------------------------------------------


def heard(client: Control) -> Word:
    """Return what the arbiter has heard of all daemons; raises `Fault`."""
    found: list[Daemon] = []
    offset: int | None = 0
    told, here_ahead_s = "", 0.0
    while offset is not None:
        asked_at = time.time()
        page = Control.query(client, "nodes", "daemons", offset)
        if page["schema"] != "daemons/v1":
            raise Fault("the arbiter is of an older version and does not tell of daemons", next_step="upgrade it")
        told = page["release"]
        here_ahead_s = (asked_at + time.time()) / 2.0 - datetime.fromisoformat(page["at"]).timestamp()
        found += [
            Daemon(each["role"], each["id"], each["release"], each["clock_ahead_s"], each["last_heard_s"])
            for each in page["daemons"]
        ]
        offset = page["next_offset"]
    return Word(told, here_ahead_s, tuple(found))


def clocks(word: Word) -> Iterator[Check]:
    """Compare the clocks of all hosts with the arbiter's."""
    ahead = {each.name: each.clock_ahead_s for each in word.daemons if each.clock_ahead_s is not None}
    ahead["this host"] = word.here_ahead_s
    off = {name: value for name, value in ahead.items() if abs(value) > CLOCK_NOTE_S}
    if not off:
        widest = max(map(abs, ahead.values()))
        yield Check(
            "clocks", "ok", f"of {len(ahead)} clocks none differs from the arbiter's by more than {widest:.1f} s"
        )
        return
    worst = sorted(off, key=lambda name: -abs(off[name]))
    said = ", ".join(f"{name} {_offset_words(off[name])}" for name in worst[:NAMED_MAX]) + _more(worst)
    verdict: CheckVerdict = "fail" if abs(off[worst[0]]) > CLOCK_FAIL_S else "note"
    yield Check(
        "clocks", verdict, f"by the arbiter's clock {said}", "set the clocks of all hosts by NTP, such as chrony"
    )


def _offset_words(seconds: float) -> str:
    return f"is {abs(seconds):.0f} s {'ahead' if seconds > 0 else 'behind'}"


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""


def releases(word: Word, app_agent: str) -> Iterator[Check]:
    """Compare the releases of all daemons with the arbiter's: they may be a minor version apart while one upgrades."""
    said = {each.name: each.release or "one that tells no release" for each in word.daemons}
    said |= {"the app agent here": app_agent or "one that tells no release", "this command": release()}
    other = sorted(name for name, told in said.items() if told != word.release)
    if not other:
        yield Check("releases", "ok", f"all of {len(said)} daemons and commands are of {word.release}, as the arbiter")
        return
    named = ", ".join(f"{name}: {said[name]}" for name in other[:NAMED_MAX]) + _more(other)
    far = any(not _near(said[name], word.release) for name in other)
    mend = "upgrade them, in the order of docs/operations.md, Upgrading"
    yield Check("releases", "fail" if far else "note", f"the arbiter is of {word.release}; {named}", mend)


def _near(one: str, other: str) -> bool:
    """Whether two releases understand one another: the same major version, and a minor version apart at most."""
    ours, theirs = (re.match(r"(\d+)\.(\d+)", each) for each in (one, other))
    if ours is None or theirs is None:
        return False
    return ours[1] == theirs[1] and abs(int(ours[2]) - int(theirs[2])) <= 1


# --- the broker -------------------------------------------------------------------------------------------------------


def rabbitmqctl(*words: str) -> str:
    """Have the `rabbitmqctl` of this host do something; raises `Fault` if it is not here, or may not."""
    try:
        done = subprocess.run(
            ("rabbitmqctl", "--quiet", *words), capture_output=True, text=True, check=False, timeout=CONTROL_S
        )
    except (OSError, subprocess.TimeoutExpired):
        raise Fault("no rabbitmqctl answers on this host") from None
    if done.returncode:
        raise Fault("the broker here does not answer this user's rabbitmqctl")
    return done.stdout


def brokers(bus: str, participants: int, ctl: Ctl) -> Iterator[Check]:
    """Check the broker of this host; say where they are if there is none."""
    hosts = split(bus).hosts
    if not bus or any(map(is_here, hosts)):
        yield from broker(participants, ctl)
        yield from rights(unquote(urlsplit(bus).path[1:]) or "/", ctl)
    elif hosts:
        where = f"the broker is on {hosts[0]}" if len(hosts) == 1 else f"the brokers are on {', '.join(hosts)}"
        yield _unknown_limits(where)


def broker(participants: int, ctl: Ctl) -> Iterator[Check]:
    """Check the broker's limits, as it tells them on its own host."""
    try:
        status = json.loads(ctl("status", "--formatter", "json"))
        timeout = ctl("eval", "application:get_env(rabbit, consumer_timeout).")
    except (Fault, RuntimeError, ValueError) as error:
        yield _unknown_limits(error.sentence if isinstance(error, Fault) else "rabbitmqctl gives no status")
        return
    yield _version(str(status.get("rabbitmq_version", "")))
    yield _descriptors(status.get("file_descriptors") or {}, participants)
    yield _memory(status)
    found = re.search(r"\{ok,\s*(\d+)\}", timeout)
    yield _consumer_timeout(int(found[1]) if found else None)
    yield from _listeners(status.get("listeners") or ())


def rights(vhost: str, ctl: Ctl) -> Iterator[Check]:
    """Check that no user of the broker may more than its part in the site needs."""
    try:
        of_user, topics = (
            json.loads(ctl(verb, "--vhost", vhost, "--formatter", "json"))
            for verb in ("list_permissions", "list_topic_permissions")
        )
    except (Fault, RuntimeError, ValueError):
        return  # `broker` has said why
    topology = _topology_of(of_user)
    needed = {each["user"]: _needed(each["user"], topology) for each in of_user}
    strangers = [user for user, rights in needed.items() if rights is None]
    wrong = [
        each["user"]
        for each in of_user
        if (rights := needed[each["user"]]) is not None and not _has_only(each, topics, rights, topology)
    ]
    if wrong:
        found = f"{_some(wrong)} may do more at the broker than its part in the site needs, such as speak for others"
        lines = f"run the lines of `gpu-arbiter provision {wrong[0]} --vhost {vhost}`"
        mend = f"{lines}, then `rabbitmqctl close_all_user_connections {wrong[0]} rights`"
        yield Check("broker rights", "fail", found, mend)
    elif strangers:
        found = f"{_some(strangers)} may use the virtual host {vhost} and is no part of the site"
        yield Check("broker rights", "note", found, f"rabbitmqctl clear_permissions --vhost {vhost} {strangers[0]}")
    else:
        yield Check("broker rights", "ok", f"each of {len(of_user)} users has the rights that its part needs")


def _has_only(
    has: Mapping[str, str], topics: Sequence[Mapping[str, str]], needed: Permissions, topology: Topology
) -> bool:
    """Whether a user has these rights, on all that it may write to upwards too."""
    of_topics = [each["write"] for each in topics if (each["user"], each["exchange"]) == (has["user"], topology.up)]
    own = (has["configure"], has["write"], has["read"])
    return own == (needed.configure, needed.write, needed.read) and of_topics == [needed.topic_write]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED_MAX]) + _more(names)


def _topology_of(of_user: Sequence[Mapping[str, str]]) -> Topology:
    """Return the topology of a site with these rights; its prefix is the one that the arbiter's rights begin with."""
    own = next((each["configure"] for each in of_user if each["user"] == ARBITER.user), "")
    found = re.match(r"\^\((.*?)ga", own)
    return with_prefix(Topology(), found[1].replace("\\", "") if found else "")


def _needed(user: str, topology: Topology) -> Permissions | None:
    """Return the rights of a user by its name; None if it is no part of a site."""
    role, _, name = user.partition("-")
    match role:
        case "arbiter" if not name:
            return topology.permissions(ARBITER)
        case "gateway" if name:
            return gateway_user(name, topology).rights
        case "app" | "node" if name:
            return topology.permissions(Party(role, name))
        case _:
            return None


def is_here(host: str) -> bool:
    """Whether a name or an address is of this host: only then can a socket have it."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as own:
                own.bind(address)
                return True
    except OSError:
        pass
    return False


def _unknown_limits(why: str) -> Check:
    found = f"its limits for files and memory, and its listeners, cannot be known here: {why}"
    return Check("broker limits", "note", found, "do the same as root on the broker's host")


def _version(told: str) -> Check:
    numbers = tuple(int(each) for each in re.findall(r"\d+", told)[:2])
    if numbers and numbers < BROKER_OLDEST:
        return Check("broker version", "fail", f"RabbitMQ {told}", "install RabbitMQ 3.10 or newer")
    return Check("broker version", "ok", f"RabbitMQ {told or 'of unknown version'}")


def _descriptors(told: Mapping[str, object], participants: int) -> Check:
    limit = told.get("total_limit")
    if not isinstance(limit, int):
        return Check(
            "broker files", "note", "this RabbitMQ does not tell its limit", "see /proc/PID/limits of beam.smp"
        )
    needed = FILES_OF_BROKER + FILES_PER_PARTICIPANT * participants
    found = f"{told.get('total_used', 'some')} of {limit} open files are used; {participants} daemons may need {needed}"
    mend = "systemctl edit rabbitmq-server: [Service] LimitNOFILE=65536; then restart it, training goes on"
    return Check("broker files", "ok" if limit >= needed else "fail", found, "" if limit >= needed else mend)


def _memory(status: Mapping[str, object]) -> Check:
    """Check that the broker does not hold publishers back, as it does beyond its memory watermark or on a full disk."""
    alarms = status.get("alarms") or ()
    if alarms:
        mend = "give it memory, or room on its disk; until then it takes no message"
        return Check("broker memory", "fail", f"it has raised {json.dumps(alarms)}", mend)
    limit, memory = status.get("vm_memory_high_watermark_limit"), status.get("memory")
    used = memory.get("total") if isinstance(memory, Mapping) else None
    used = used.get("rss") if isinstance(used, Mapping) else used
    if not isinstance(limit, int) or not isinstance(used, int | float):
        return Check("broker memory", "ok", "it has raised no alarm")
    found = f"{used / 2**20:.0f} MiB of its watermark of {limit / 2**20:.0f} MiB are used"
    if used > 0.8 * limit:
        return Check("broker memory", "note", found, "raise vm_memory_high_watermark in rabbitmq.conf")
    return Check("broker memory", "ok", found)


def _consumer_timeout(timeout_ms: int | None) -> Check:
    if timeout_ms is None or timeout_ms >= CONSUMER_TIMEOUT_MS:
        return Check("leader token", "ok", "the broker lets the leading arbiter hold it")
    lines = next(line for line in broker_config().splitlines() if line.startswith("consumer_timeout"))
    found = f"the broker takes it from the leading arbiter after {timeout_ms / 60_000.0:.0f} min"
    return Check("leader token", "fail", found, f"gpu-arbiter install broker --start, which sets {lines}")


def _listeners(listeners: Iterable[Mapping[str, object]]) -> Iterator[Check]:
    """Say whether the broker takes connections without TLS from other hosts."""
    opened = [each for each in listeners if str(each.get("protocol")) == "amqp" and _reachable(str(each["interface"]))]
    if opened:
        ports = ", ".join(sorted({str(each["port"]) for each in opened}))
        found = f"the broker takes connections without TLS from other hosts (port {ports})"
        yield Check("broker listeners", "note", found, "listeners.tcp = none in rabbitmq.conf, and amqps:// everywhere")
    else:
        yield Check("broker listeners", "ok", "it takes no connection without TLS from other hosts")


def _reachable(interface: str) -> bool:
    """Whether other hosts may reach a listener at that address."""
    try:
        return not ip_address(interface.strip("[]")).is_loopback
    except ValueError:
        return interface != "localhost"


def transport(bus: str) -> Iterator[Check]:
    """Say whether this host's way to the broker is by TLS."""
    address = split(bus)
    away = [host for host in address.hosts if _reachable(host)]
    if address.scheme == "amqps://":
        yield Check("TLS", "ok", "this host speaks TLS with the broker")
    elif address.scheme == "amqp://" and not away:
        yield Check("TLS", "ok", "none, and none is needed: the broker is on this host")
    elif address.scheme == "amqp://":
        found = f"messages and the password of this host cross the network in the clear to {', '.join(away)}"
        yield Check("TLS", "note", found, "use amqps:// in the file that bus_file names")
    elif bus:
        yield Check("TLS", "ok", "none is needed: the bus is within one process")


# --- isolation --------------------------------------------------------------------------------------------------------


def isolation(client: Client, *, signs: bool) -> Iterator[Check]:
    """Have a task of this user's try to leave its bounds, if a gateway `signs` it: else no launcher starts it."""
    if not signs:
        yield from unsigned(escape.addresses() if os.geteuid() else None)
        return
    try:
        found = _attempt(client)
    except ControlError as error:
        mend = error.next_step if isinstance(error, Fault) else "gpu-arbiter ps"
        yield Check("isolation", "note", f"not tried: {error.sentence}", mend)
        return
    yield from isolated(found)


def unsigned(addresses: str | None) -> Iterator[Check]:
    """Say what holds where no gateway signs launches; `addresses` are files with keys that this user can read here."""
    found = (
        "not tried, and no GPU was taken: no gateway signs what is submitted here, so it starts only on nodes without "
        "a launcher, where tasks of all users run as one and can reach each other"
    )
    yield Check("isolation", "note", found, LAUNCHER_MEND)
    if addresses:
        done, mend = ESCAPES["address"]
        yield Check("isolation: address", "fail", f"on this host this user could {done}: {addresses}", mend)


def _attempt(client: Client) -> Escape:
    """Run the task of `launch.escape`, and return what it tells.

    Raises
    ------
    Fault
        If no GPU is free, or it does not end in time, or tells nothing.
    """
    spec = AppSpec(
        trials=((ESCAPE_PYTHON, "-I", "-c", Path(escape.__file__).read_text()),),
        cwd="/tmp",  # noqa: S108 - each node has it, and nothing is written there but a folder with a name of its own
        checkpoint_root=f"/tmp/gpu-arbiter-{token_hex(8)}",  # noqa: S108 - the same
        name="doctor",
        max_restarts=0,
        time_limit_s=ESCAPE_S,
    )
    forecast = client.dry_run(spec)
    if not forecast["starts"] or any(gpu["state"] != "free" for gpu in forecast["gpus"]):
        raise Fault("its task would wait, or take a GPU from another app", next_step="do the same when a GPU is free")
    app = client.submit(spec)
    try:
        record = client.outlast(app, "done", ESCAPE_S)
    except Fault as fault:
        if fault.code != exit_codes.TIMED_OUT:
            raise
        raise Fault(
            f"its task {app} was not over within {ESCAPE_S:g} s", next_step="do the same when a GPU is free"
        ) from None
    finally:
        client.cancel(app)
    if record.state != "finished":
        raise Fault(f"its task {app} {record.state}: {record.reason}", next_step=f"gpu-arbiter explain {app}")
    pieces = streams.talk(streams.output(app), lambda question: question(client))
    output = b"".join(piece.data for piece in pieces).decode(errors="replace")
    try:
        return msgspec.json.decode(output.rpartition(escape.MARK)[2].partition("\n")[0], type=Escape)
    except msgspec.DecodeError:
        raise Fault(f"its task {app} has told nothing", next_step=f"gpu-arbiter logs {app}") from None


def isolated(found: Escape) -> Iterator[Check]:
    """Judge what came of an attempt to escape: each try that led out is a fault of its own."""
    alone = found.user != found.agent
    if not alone:
        sentence = (
            f"node {found.node} has no launcher: tasks of all users run as {found.user}, and can reach each other"
        )
        yield Check("isolation", "note", sentence, LAUNCHER_MEND)
    # Files of other users, such as the key of a broker, are closed to tasks without a launcher, too.
    led_out = {name: what for name, what in found.tries.items() if what and (alone or name == "address")}
    for name, what in led_out.items():
        done, mend = ESCAPES.get(name, (name, "see docs/operations.md, Tasks as their users"))
        sentence = f"on node {found.node} a task of {found.user} could {done}: {what}"
        yield Check(f"isolation: {name}", "fail", sentence, mend)
    if alone and not led_out:
        tries = [name for name, what in found.tries.items() if what is not None]
        not_there = [name for name, what in found.tries.items() if what is None]
        rest = f"; there was none of: {', '.join(not_there)}" if not_there else ""
        sentence = f"on node {found.node} a task of {found.user} could get at none of: {', '.join(tries)}{rest}"
        yield Check("isolation", "ok", sentence)


# --- fairness ---------------------------------------------------------------------------------------------------------


def fairness(config: Path | None, policy: str) -> Iterator[Check]:
    """Have two tenants compete under the site's settings, in virtual time."""
    if "numba" not in sys.modules:
        # Four GPUs are auctioned in no time without compiled loops, and these take a minute to compile.
        os.environ.setdefault("NUMBA_DISABLE_JIT", "1")
    from arbiter.config import load
    from arbiter.core.registry import POLICIES
    from arbiter.core.state.model import ArbiterSettings
    from simulator import self_test

    try:
        where = config or (CONFIG if os.access(CONFIG, os.R_OK) else None)
        settings = ArbiterSettings() if where is None else load(where).arbiter
    except ConfigError as error:
        yield Check("fairness", "fail", str(error), "mend the arbiter's configuration")
        return
    if where is None and policy not in POLICIES:
        yield Check("fairness", "note", "not tried: the policy is not known", "name arbiter.toml: --config FILE")
        return
    if where is None:
        settings = ArbiterSettings(policy=policy)
    elif policy and policy != settings.policy:
        found = f"{where} says {settings.policy}, and the arbiter goes by {policy}"
        yield Check("policy in force", "note", found, "systemctl restart gpu-arbiter; training goes on")
    yield _tried(self_test.ltgf(settings), settings.policy, promised=_promises(settings), where=str(where or ""))


def _promises(settings: ArbiterSettings) -> bool:
    """Whether the policy promises each tenant its part, as it is set."""
    from arbiter.core.registry import POLICIES

    entry = POLICIES[settings.policy]
    own = entry.decoded(settings.policy_settings)
    return entry.kind.traits.tenant_shares or bool(getattr(own, "tenants_first", False))


def _tried(had: Mapping[str, float], policy: str, *, promised: bool, where: str) -> Check:
    from simulator import self_test

    said = " and ".join(f"{value:.2f}" for value in had.values())
    by = f"{policy}, set as {where} says" if where else f"{policy} as it is shipped"
    found = f"under {by}, two tenants with many and few apps had {said} of the GPU time that was fair"
    if self_test.is_fair(had):
        return Check("fairness", "ok", found)
    if promised:
        mend = "lease_s, round_pause_s or a setting of the policy stands against it: docs/policies.md"
        return Check("fairness", "fail", found, mend)
    mend = "where groups are to have their parts, choose a policy that sees to it: docs/policies.md"
    return Check("fairness", "note", f"{found}; it promises tenants no part", mend)
