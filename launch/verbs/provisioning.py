"""`provision`: what a broker must know of the participants of a site, as commands to copy or as files."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from launch import participants
from launch.faults import Fault, usage
from launch.surface import answering, emit, note, plural, say, table, wants_json
from protocol.bus.provision import broker_config
from protocol.messages import Party

if TYPE_CHECKING:
    from launch.site.provision import Outcome, Wishes

SITE = "site"
#: Characters of a name in a certificate that is also one in DNS.
NAME_MAX = 63
#: How long a new certificate is good, and how long before its end it is made anew.
DAYS, RENEW_DAYS = 365, 30


def add(app: typer.Typer) -> None:
    """Add this group's verbs to `app`."""
    app.command()(provision)


def provision(
    party: Annotated[
        str,
        typer.Argument(
            help="site; or arbiter, node-<id>, app-<owner>, gateway-<name>; or broker for rabbitmq.conf without TLS"
        ),
    ],
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="of `site`: where its files are made, and kept")
    ] = None,
    nodes: Annotated[str, typer.Option(help="of `site`: ids of GPU hosts, with commas between them")] = "",
    owners: Annotated[str, typer.Option(help="of `site`: Unix users with an app agent of their own")] = "",
    gateways: Annotated[str, typer.Option(help="of `site`: names of gateways")] = "",
    hosts: Annotated[
        str,
        typer.Option(
            help="of `site`: of brokers, one or three: b1=10.0.0.1,b2=10.0.0.2,b3=10.0.0.3  [default: this host]"
        ),
    ] = "",
    remove: Annotated[
        str, typer.Option(help="of `site`: broker users and hosts that are no more, such as app-bob")
    ] = "",
    days: Annotated[
        int | None, typer.Option(min=1, help="of `site`: how long a new certificate is good  [default: 365]")
    ] = None,
    renew_days: Annotated[
        int | None,
        typer.Option(min=0, help="of `site`: certificates that end within so many days are made anew  [default: 30]"),
    ] = None,
    installed: Annotated[
        str, typer.Option(help="of `site`: where hosts keep the folders of parties  [default: /etc/gpu-arbiter/tls]")
    ] = "",
    vhost: Annotated[str, typer.Option(help="the broker's virtual host  [default: gpu]")] = "",
    prefix: Annotated[str, typer.Option(help="of queue names; the same in all daemons of a site")] = "",
    json: Annotated[bool, typer.Option("--json", help="of `site`: print one JSON document")] = False,
) -> None:
    """Print the rabbitmqctl lines for one participant; or make the certificates and files of a whole site.

    Example: gpu-arbiter provision site certs --nodes n1,n2 --owners alice --hosts b1=10.0.0.1
    """
    as_json = wants_json(json) and party == SITE
    with answering(as_json=as_json):
        if party == SITE:
            site = _library()
            good = DAYS if days is None else days
            renewed = RENEW_DAYS if renew_days is None else renew_days
            if good <= renewed:
                raise usage(f"--days {good} is not more than --renew-days {renewed}", "give it more days")
            if folder is None:
                raise usage("`provision site` needs a folder for its files", "gpu-arbiter provision site FOLDER ...")
            wishes = site.Wishes(
                hosts=tuple(site.read_host(each) for each in _parts("--hosts", hosts)),
                nodes=_ids("node", "--nodes", nodes),
                owners=_ids("app", "--owners", owners),
                gateways=_ids("gateway", "--gateways", gateways),
                removed=_parts("--remove", remove),
                vhost=vhost,
                prefix=prefix,
                installed=installed,
                days=good,
                renew_days=renewed,
            )
            _tell(folder, site.provide(folder, wishes, datetime.now(UTC)), wishes, as_json=as_json)
            return
        given: dict[str, object] = {
            "FOLDER": folder,
            "--nodes": nodes,
            "--owners": owners,
            "--gateways": gateways,
            "--hosts": hosts,
        }
        given |= {"--remove": remove, "--days": days, "--renew-days": renew_days, "--installed": installed}
        for name, value in given.items():
            if value not in (None, ""):
                raise usage(f"{name} is of `provision site`, and this is `provision {party}`", "leave it out")
        say(broker_config() if party == "broker" else "\n".join(participants.commands(party, vhost or "gpu", prefix)))


# --- a whole site ---------------------------------------------------------------------------------------------------


def _library() -> ModuleType:
    """Return the module that makes certificates; raises `Fault` where its library is not installed."""
    try:
        from launch.site import provision as site
    except ImportError as error:
        if not str(error.name).startswith("cryptography"):
            raise
        mend = "pip install 'gpu-arbiter[users]'"
        raise Fault("certificates need the package cryptography", next_step=mend) from None
    return site


def _tell(folder: Path, done: Outcome, wishes: Wishes, *, as_json: bool) -> None:
    steps = _next_steps(folder, done, wishes)
    if as_json:
        emit(
            {
                "schema": "provision-site/v1",
                "certificates": [msgspec.to_builtins(each) for each in done.fates],
                "written": [str(path) for path in done.written],
                "next": steps,
            }
        )
        return
    rows = [(each.of, each.fate, each.until or "-", each.why or "-") for each in done.fates]
    say(table(("CERTIFICATE", "IS", "UNTIL", "WHY"), rows))
    note(f"{plural(len(done.written), 'file')} in {folder} {'is' if len(done.written) == 1 else 'are'} new or changed")
    for step in steps:
        note(f"next: {step}")


def _next_steps(folder: Path, done: Outcome, wishes: Wishes) -> list[str]:
    """Return what is left to do by hand: bring what is new to where it is used."""
    changed: dict[str, set[str]] = {}
    for path in done.written:
        changed.setdefault(path.parent.relative_to(folder).as_posix(), set()).add(path.name)
    brokers = {of: names for of, names in changed.items() if of.startswith("brokers/")}
    users = "rabbitmqctl import_definitions /etc/rabbitmq/definitions.json"
    steps: list[str] = []
    if brokers and all(names == {"definitions.json"} for names in brokers.values()):
        copies = ", ".join(f"{of} to {of.partition('/')[2]}" for of in brokers)
        steps.append(f"copy definitions.json to /etc/rabbitmq ({copies}), then on one of them: {users}")
    else:
        for of, names in brokers.items():
            cookie = "erlang.cookie to /var/lib/rabbitmq/.erlang.cookie, " if "erlang.cookie" in names else ""
            host = of.partition("/")[2]
            steps.append(f"copy {folder}/{of}/* to /etc/rabbitmq on {host}, {cookie}and restart that broker")
    parties = [of.partition("/")[2] for of in changed if of.startswith("parties/")]
    if parties:
        steps.append(f"copy from {folder}/parties, each to its host, and restart its daemon: {', '.join(parties)}")
    for name in wishes.removed:
        if any(each.of == f"parties/{name}" for each in done.fates):
            steps.append(f"rabbitmqctl delete_user {name}; rabbitmqctl close_all_user_connections {name} removed")
        else:
            steps.append(f"rabbitmqctl forget_cluster_node rabbit@{name}   # on another broker, once it is stopped")
    return steps


def _parts(option: str, text: str) -> tuple[str, ...]:
    """Return the names in an option; raises `Fault` with one that is there twice."""
    parts = [part.strip() for part in text.split(",")] if text else []
    twice = [part for part, count in Counter(parts).items() if count > 1]
    if twice:
        raise usage(f"{option} has {twice[0]} twice", "name each once")
    return tuple(parts)


def _ids(role: str, option: str, text: str) -> tuple[str, ...]:
    """Return the ids in an option; raises `Fault` with one that no participant, or no certificate, can have."""
    parts = _parts(option, text)
    for each in parts:
        try:
            # The broker knows a gateway by a name like that of an owner.
            msgspec.convert({"role": "node" if role == "node" else "app", "id": each}, Party)
        except msgspec.ValidationError:
            mend = "write lower-case letters, digits and dashes, such as n1"
            raise usage(f"{option}: {each!r} is no id", mend) from None
        if len(f"{role}-{each}") > NAME_MAX:
            most = NAME_MAX - len(role) - 1
            raise usage(f"{option}: {each!r} is too long for a certificate", f"write at most {most} characters")
    return parts
