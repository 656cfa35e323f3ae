"""`init`: the configuration files of a site. `units`: the systemd units of its daemons."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from launch.faults import Fault, usage
from launch.surface import answering, emit, note, say, wants_json
from protocol.messages import Party

Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]
#: Folders that the units hide from the daemons.
HIDDEN = ("/home", "/root", "/run/user")


def add(app: typer.Typer) -> None:
    """Add this group's verbs to `app`."""
    app.command()(init)
    app.command()(units)


def init(
    folder: Annotated[Path, typer.Argument(help="where the files are written")] = Path(),
    nodes: Annotated[str, typer.Option(help="ids of the GPU hosts, with commas between them")] = "n1",
    owner: Annotated[str, typer.Option(help="the Unix user that submits first")] = "alice",
    json: Json = False,
) -> None:
    """Write the configuration files of a site: commented, every field with its default. Nothing is overwritten.

    Example: gpu-arbiter init site --nodes n1,n2 --owner alice
    """
    as_json = wants_json(json)
    with answering(as_json=as_json):
        from launch.site import shipped

        names = [_id("node", name, "--nodes") for name in nodes.split(",")]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise usage(f"--nodes has {twice[0]} twice", "give each node an id of its own")
        written = _write(shipped.configurations(names, _id("app", owner, "--owner")), folder)
        steps = [
            "gpu-arbiter provision broker   # for rabbitmq.conf; then once more for each participant: "
            + ", ".join(("arbiter", *(f"node-{name}" for name in names), f"app-{owner}")),
            "gpu-arbiter units --to /etc/systemd/system   # on each host; docs/operations.md says what goes where",
            "systemctl enable --now gpu-arbiter   # on the arbiter's host; the agents follow, each on its own",
        ]
        _tell("init/v1", written, steps, as_json=as_json)


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
        program = Path(sys.executable).with_name("gpu-arbiter")
        if not program.is_file():
            raise Fault(f"there is no {program}, which the units would start", next_step="pip install gpu-arbiter")
        written = _write(shipped.units(str(program)), to)
        if str(program).startswith(HIDDEN):
            note(f"the units hide {program.parent} from the daemons; make its environment in /opt: docs/operations.md")
        _tell("units/v1", written, ["systemctl daemon-reload"], as_json=as_json)


def _id(role: str, name: str, option: str) -> str:
    """Return `name`, which the broker can know a participant by.

    Raises
    ------
    Fault
        If it cannot.
    """
    try:
        return msgspec.convert({"role": role, "id": name}, Party).id
    except msgspec.ValidationError:
        raise usage(f"{option}: {name!r} is no id", "write lower-case letters, digits and dashes, such as n1") from None


def _write(files: Mapping[str, str], folder: Path) -> list[Path]:
    """Write `files`; raises `Fault` with the file that is in the way."""
    from launch.site import shipped

    try:
        return shipped.write(files, folder)
    except FileExistsError as error:
        raise usage(f"{error} exists already and has another text", "move it away, or name another folder") from None
    except OSError as error:
        raise Fault(f"{folder} cannot be written: {error.strerror}", next_step="name a folder of yours") from None


def _tell(schema: str, files: Sequence[Path], steps: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        emit({"schema": schema, "files": [str(path) for path in files], "next": list(steps)})
        return
    say("\n".join(map(str, files)))
    for step in steps:
        note(f"next: {step}")
