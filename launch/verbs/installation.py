"""`init`: a site's configuration files. `units`: its systemd units. `install`, `uninstall`: a host's part in a site."""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast
from urllib.parse import urlsplit

import typer
from msgspec.structs import replace

from launch.faults import Fault, usage
from launch.participants import checked_id
from launch.surface import answering, emit, note, plural, say, wants_json
from protocol import exit_codes

if TYPE_CHECKING:
    from launch.site.roles import Role
    from launch.site.steps import Host, Step

Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]
#: Folders that the units hide from the daemons.
HIDDEN = ("/home", "/root", "/run/user")


def add(app: typer.Typer) -> None:
    """Add this group's verbs to `app`."""
    app.command()(init)
    app.command()(units)
    app.command()(install)
    app.command()(uninstall)


def init(
    folder: Annotated[Path, typer.Argument(help="where the files are written")] = Path(),
    nodes: Annotated[str, typer.Option(help="ids of the GPU hosts, with commas between them")] = "n1",
    owner: Annotated[str, typer.Option(help="the Unix user that submits first; alice where there is none yet")] = "",
    json: Json = False,
) -> None:
    """Write the configuration files of a site: commented, every field with its default. Nothing is overwritten.

    A folder that has them gets those that it lacks, such as those of further nodes.

    Example: gpu-arbiter init site --nodes n1,n2 --owner alice
    """
    as_json = wants_json(json)
    with answering(as_json=as_json):
        from launch.site import shipped

        names = [checked_id("node", name, "--nodes") for name in nodes.split(",")]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise usage(f"--nodes has {twice[0]} twice", "give each node an id of its own")
        owners = [checked_id("app", owner, "--owner")] if owner else ["alice"] * (not any(folder.glob("app-*.toml")))
        files = shipped.configurations(names, owners)
        kept = [folder / name for name in files if (folder / name).exists()]
        written = _write({name: text for name, text in files.items() if folder / name not in kept}, folder)
        parties = (path.stem for path in written)
        steps = [
            "gpu-arbiter provision broker   # for rabbitmq.conf; then once more for each participant: "
            + ", ".join(parties),
            "gpu-arbiter units --to /etc/systemd/system   # on each host; docs/operations.md says what goes where",
            "systemctl enable --now gpu-arbiter   # on the arbiter's host; the agents follow, each on its own",
        ]
        if kept:
            note(f"kept as they are: {', '.join(map(str, kept))}")
        _tell("init/v1", written, steps if written else [], as_json=as_json, kept=[str(path) for path in kept])


def units(
    to: Annotated[Path | None, typer.Option(help="write them there, for the program of this installation")] = None,
    json: Json = False,
) -> None:
    """Print where the systemd units of the daemons are, or write them to a folder.

    Example: gpu-arbiter units --to /etc/systemd/system
    """
    as_json = wants_json(json)
    with answering(as_json=as_json):
        from launch.site import shipped

        if to is None:
            _tell("units/v1", [shipped.FOLDER / name for name in shipped.units()], [], as_json=as_json)
            return
        program = _program()
        written = _write(shipped.units(str(program)), to)
        _tell_of_hidden(program)
        _tell("units/v1", written, ["systemctl daemon-reload"], as_json=as_json)


def install(
    role: Annotated[str, typer.Argument(help="of this host: arbiter, node, login or broker")],
    start: Annotated[bool, typer.Option("--start", help="also start the daemons, or start them anew")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and change nothing")] = False,
    bus_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a file with the broker's address for the daemon")
    ] = None,
    certs: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="certificates for TLS: what `provision site` has made, or its part"),
    ] = None,
    id: Annotated[str, typer.Option(help="of a node or a gateway; by default the host's name")] = "",  # noqa: A002
    launcher: Annotated[bool, typer.Option("--launcher", help="of a node: tasks run as their users")] = False,
    owner: Annotated[str, typer.Option(help="of a login host: this user's app agent in place of the gateway")] = "",
    party: Annotated[
        list[str] | None, typer.Option(metavar="USER", help="of the broker: make this participant; repeatable")
    ] = None,
    vhost: Annotated[str, typer.Option(help="the broker's virtual host")] = "gpu",
    address: Annotated[str, typer.Option(help="the broker's host, as participants reach it; default: its name")] = "",
    root: Annotated[Path, typer.Option(metavar="FOLDER", help="install below this folder")] = Path("/"),
    json: Json = False,
) -> None:
    """Give this host its part in a site: accounts, folders, configuration and units. Nothing of yours is overwritten.

    The plan is printed first, one line for each step. A second run finds nothing left to do.

    Example: gpu-arbiter install node --id n1 --bus-file node-n1.url --dry-run
    """
    as_json = wants_json(json)
    with answering(as_json=as_json):
        from launch.site import roles

        given = {"--id": id, "--launcher": launcher, "--owner": owner, "--party": party, "--bus-file": bus_file}
        given["--certs"] = certs
        _demand_fitting(role, [option for option, value in given.items() if value])
        _demand_root(dry_run=dry_run)
        host = _host(root)
        wish = roles.Wish(
            cast("Role", role),
            id=id,
            host_name=socket.gethostname(),
            owner=owner,
            launcher=launcher,
            start=start,
            parties=tuple(party or ()),
            vhost=vhost,
            broker_host=address or socket.gethostname(),
        )
        with _readable(host):
            if certs is not None:
                given_files = roles.certificates(wish, host, certs)
                wish = replace(wish, given=given_files, address=given_files.address, replaces_address=True)
            else:
                address = _address(bus_file, roles.made_address(wish, host))
                wish = replace(wish, address=address, replaces_address=bus_file is not None)
            steps = roles.steps_of(wish, host)
            if roles.writes_units(steps, host):
                program = _program()
                _tell_of_hidden(program)
                steps = roles.steps_of(replace(wish, program=str(program)), host)
        _perform("install/v1", steps, lambda: roles.left_to_do(wish, host), host, as_json=as_json, dry_run=dry_run)


def uninstall(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and change nothing")] = False,
    purge: Annotated[bool, typer.Option("--purge", help="remove state and configuration, too")] = False,
    force: Annotated[bool, typer.Option("--force", help="also while training runs here, which then goes on")] = False,
    root: Annotated[Path, typer.Option(metavar="FOLDER", help="uninstall below this folder")] = Path("/"),
    json: Json = False,
) -> None:
    """Stop this host's daemons, and remove their units and what `install` made. Files of users stay.

    Example: gpu-arbiter uninstall --dry-run
    """
    as_json = wants_json(json)
    with answering(as_json=as_json):
        from launch.site import roles

        _demand_root(dry_run=dry_run)
        host = _host(root)
        with _readable(host):
            if not force:
                roles.demand_no_training(host)
            steps = roles.removal(host, purge=purge)
        _perform("uninstall/v1", steps, lambda: roles.left_after(host), host, as_json=as_json, dry_run=dry_run)


#: The options that a role has of its own.
OPTIONS = {
    "arbiter": ("--bus-file", "--certs"),
    "node": ("--bus-file", "--certs", "--id", "--launcher"),
    "login": ("--bus-file", "--certs", "--id", "--owner"),
    "broker": ("--certs", "--party"),
}


def _demand_fitting(role: str, given: Sequence[str]) -> None:
    """Raise `Fault` if there is no such role, or it has no such option."""
    if role not in OPTIONS:
        raise usage(f"{role!r} is no role of a host", f"write one of {', '.join(OPTIONS)}")
    wrong = next((option for option in given if option not in OPTIONS[role]), "")
    if wrong:
        of = " or ".join(each for each, options in OPTIONS.items() if wrong in options)
        raise usage(f"{wrong} is not for the role {role}, but for {of}", "leave it out")
    if {"--id", "--owner"} <= set(given):
        raise usage("--id names a gateway, which --owner replaces by an app agent", "leave one of them out")
    for other in ("--bus-file", "--party"):
        if {"--certs", other} <= set(given):
            raise usage(f"--certs brings participants and addresses, in place of {other}", "leave one of them out")


def _demand_root(*, dry_run: bool) -> None:
    if os.geteuid() and not dry_run:
        raise Fault(
            "only root can do this, for accounts, owners of files and units",
            code=exit_codes.NOT_PERMITTED,
            next_step="do the same with sudo, or look at the plan with --dry-run",
        )


def _host(root: Path) -> Host:
    """Return the host below a folder; raises `Fault` if there is no such folder."""
    from launch.site.steps import Host

    if not root.is_dir():
        raise usage(f"--root: there is no folder {root}", "name the root of a host")
    return Host(root.resolve())


def _program() -> Path:
    """Return the command of this installation; raises `Fault` if there is none."""
    program = Path(sys.executable).with_name("gpu-arbiter")
    if not program.is_file():
        raise Fault(f"there is no {program}, which the units would start", next_step="pip install gpu-arbiter")
    return program


def _tell_of_hidden(program: Path) -> None:
    """Tell of a program that the daemons cannot start: it or its interpreter is in a folder that the units hide."""
    for path in (program, Path(sys.executable).resolve()):
        if str(path).startswith(HIDDEN):
            note(f"the units hide {path.parent} from the daemons; make its environment in /opt: docs/operations.md")
            return


@contextmanager
def _readable(host: Host) -> Iterator[None]:
    """Turn an OSError of the looking inside into a `Fault`."""
    try:
        yield
    except OSError as error:
        mend = "do the same with sudo" if os.geteuid() else "mend that, and do the same again"
        raise Fault(f"{host.root} cannot be looked at: {error}", next_step=mend) from None


def _address(given: Path | None, made: Path | None) -> str:
    """Return the broker's address in a file; empty without one. Raises `Fault` if it has none."""
    if given is None and made is None:
        return ""
    file = given or made
    assert file is not None
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise usage(f"--bus-file: {file} cannot be read: {error}", "name a file with the broker's address") from None
    if urlsplit(text).scheme not in ("amqp", "amqps") or len(text.split()) != 1:
        raise usage(
            f"--bus-file: {file} has no address of a broker", "write amqp://USER:PASSWORD@HOST:5672/gpu into it"
        )
    return text


def _perform(
    schema: str,
    steps: Sequence[Step],
    left: Callable[[], Sequence[str]],
    host: Host,
    *,
    as_json: bool,
    dry_run: bool,
) -> None:
    """Print the plan, and carry it out unless that is all that was asked for. Raises `Fault`."""
    from launch.site.steps import carry_out, plan

    with _readable(host):
        planned = plan(steps, host)
        remains = list(left())
    if not as_json:
        say("\n".join(each.line for each in planned) or "nothing of it is on this host")
    todo = sum(each.look.act != "keep" for each in planned)
    done = 0 if dry_run else carry_out(planned, host)
    if as_json:
        rows = [{"act": each.look.act, "what": each.step.what, "why": each.look.why} for each in planned]
        emit({"schema": schema, "steps": rows, "done": done, "left": todo - done, "next": remains})
        return
    if not todo:
        note("nothing is left to do" if planned else "nothing was done")
    else:
        note(f"{plural(todo, 'step')} would be done" if dry_run else f"{plural(done, 'step')} done")
    for line in remains:
        note(f"next: {line}")


def _write(files: Mapping[str, str], folder: Path) -> list[Path]:
    """Write `files`; raises `Fault` with the file that is in the way."""
    from launch.site import shipped

    try:
        return shipped.write(files, folder)
    except FileExistsError as error:
        raise usage(f"{error} exists already and has another text", "move it away, or name another folder") from None
    except OSError as error:
        raise Fault(f"{folder} cannot be written: {error.strerror}", next_step="name a folder of yours") from None


def _tell(schema: str, files: Sequence[Path], steps: Sequence[str], *, as_json: bool, **more: object) -> None:
    if as_json:
        emit({"schema": schema, "files": [str(path) for path in files], **more, "next": list(steps)})
        return
    if files:
        say("\n".join(map(str, files)))
    for step in steps:
        note(f"next: {step}")
