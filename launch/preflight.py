"""Checks before an app is submitted: its program must exist, and its gang must fit a node.

The files are searched on this host as a node agent searches its own, since both see the same folders. The arbiter knows
the nodes.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app_agent.core.spec import INHERITED, AppSpec
from launch.faults import Fault, usage
from launch.spec import telling
from launch.surface import plural
from protocol import exit_codes, gpu_kinds, limits

#: Seconds that the arbiter may take to list the nodes: a user does not want to wait for one that is away.
PATIENCE_S = 1.0
UNCHECKED = "mend it; or, if it is only on the nodes, submit with --no-check"

_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
#: Interpreters with a script as their first word, if that is no flag; Python's flags are known in detail.
_RUNNERS = frozenset({"bash", "dash", "sh", "zsh", "torchrun"})
#: Flags of Python that take the next word, and those after which no script comes.
_WITH_WORD, _WITHOUT_SCRIPT = frozenset("WX"), frozenset("cmhV?")


def check_files(spec: AppSpec) -> None:
    """Refuse an app whose folder, program or script is not on this host.

    Raises
    ------
    Fault
        With code 2, naming the missing file or folder.
    """
    if _is_lacking(Path(spec.cwd)):
        raise usage(f"the working folder {spec.cwd} does not exist on this host", UNCHECKED)
    path = spec.env.get("PATH", os.defpath)
    for command in dict.fromkeys(spec.trials):
        program = command[0]
        if shutil.which(program if "/" not in program else str(Path(spec.cwd, program)), path=path) is None:
            raise usage(f"the command {program!r} was not found on this host, or is not executable", UNCHECKED)
        script = script_of(command)
        if script and not _exists(script, program, spec.cwd, path):
            raise usage(f"the script {Path(spec.cwd, script)} does not exist on this host", UNCHECKED)


def _exists(script: str, program: str, cwd: str, path: str) -> bool:
    """Whether a script exists; a shell also searches the folders of programs."""
    if not _is_lacking(Path(cwd, script)):
        return True
    return not _PYTHON.fullmatch(Path(program).name) and shutil.which(script, path=path) is not None


def _is_lacking(path: Path) -> bool:
    """Whether there is no such file or folder; False where this user may not look."""
    try:
        return not path.exists()
    except PermissionError:
        return False


def script_of(command: Sequence[str]) -> str:
    """Return the script that an interpreter is to run; empty if there is none, or if that cannot be told."""
    name, words = Path(command[0]).name, command[1:]
    if name in _RUNNERS:
        return words[0] if words and not words[0].startswith("-") else ""
    return _script_of_python(words) if _PYTHON.fullmatch(name) else ""


def _script_of_python(words: Sequence[str]) -> str:
    """Return the script among Python's arguments, read as `python --help` says."""
    rest = iter(words)
    for word in rest:
        if word == "--":
            return next(rest, "")
        if word.startswith("--") or word == "-":
            return ""  # Python reads standard input, or runs no script
        if not word.startswith("-"):
            return word
        for place, flag in enumerate(word[1:], start=2):
            if flag in _WITHOUT_SCRIPT:
                return ""
            if flag in _WITH_WORD:
                if place == len(word):
                    next(rest, "")
                break
    return ""


def exposed(spec: AppSpec) -> list[str]:
    """Return a warning, if variables that sound secret are given by value."""
    names = telling(name for name in spec.env if name not in INHERITED)
    if not names:
        return []
    are = "are" if len(names) > 1 else "is"
    return [
        f"{', '.join(names)} {are} given by value, which messages and journals hold; to keep a value secret, put it "
        f"into a file: --secret {names[0]}=FILE"
    ]


def absent_secrets(spec: AppSpec) -> list[str]:
    """Return a note for each secret's file that is not on this host: it may be on the nodes, which read it."""
    gone = [(name, file) for name, file in spec.secrets.items() if _is_lacking(Path(file))]
    return [f"the file {file} of secret {name} is not on this host; every node must have it" for name, file in gone]


def _check_limits(spec: AppSpec, capacity: Mapping[str, Any]) -> None:
    allowed = {name: capacity[name] for name in ("priority_max", "weight_max", "classes")}
    beyond = limits.excess(spec.requirements, **allowed)
    if beyond is not None:
        raise Fault(beyond[0], code=exit_codes.REFUSED, next_step=beyond[1])


def check_room(spec: AppSpec, capacity: Mapping[str, Any]) -> list[str]:
    """Return notes on when an app can start, given the arbiter's ``capacity/v1`` document.

    Raises
    ------
    Fault
        With code 4, if the site does not allow such an app, or its gang fits no node that is known, or none with GPUs
        of the kind that it asks for.
    """
    _check_limits(spec, capacity)
    where = "gpus" if spec.spans else "largest_node_gpus"
    known, usable = int(capacity[f"{where}_known"]), int(capacity[where])
    if not known:
        return ["no node has enrolled yet; the app waits for one"]
    if spec.gang > known:
        has = "all nodes together have" if spec.spans else "the largest node has"
        raise Fault(
            f"each job needs {spec.gang} GPUs{'' if spec.spans else ' on one node'}, and {has} {known}",
            code=exit_codes.REFUSED,
            next_step=f"ask for at most {known} with --gpus",
        )
    fit = gpu_kinds.fit_of(spec.requirements, capacity)
    never = gpu_kinds.misfit(spec.requirements, spec.gang, fit) if fit is not None else None
    if never is not None:
        raise Fault(never[0], code=exit_codes.REFUSED, next_step=never[1])
    return [
        *_notes_on_tenant(spec, capacity),
        *_notes_on_sharing(spec, capacity),
        *_notes_on_service(spec, usable, fit),
        *_notes_on_host(spec, capacity),
    ]


def _notes_on_tenant(spec: AppSpec, capacity: Mapping[str, Any]) -> list[str]:
    """Return a note, if the site names tenants and not this one, which may be a slip; refuse what it would refuse."""
    named = capacity.get("tenants", [])
    unnamed = limits.unnamed_tenant(spec.tenant, named) if spec.tenant and named else ""
    if unnamed and capacity["tenants_only"]:
        raise Fault(unnamed, code=exit_codes.REFUSED, next_step="name one: --tenant")
    return [f"{unnamed}; it has weight 1, as every tenant that is not named"] if unnamed else []


def _notes_on_sharing(spec: AppSpec, capacity: Mapping[str, Any]) -> list[str]:
    sharing = capacity.get("sharing", "exclusive")
    if spec.spans and spec.gang > 1 and sharing != "exclusive":
        own = "but not for a job that may lie on several nodes: it waits for GPUs of its own"
        return [f"sharing is {sharing} here, {own}"]
    return []


def _notes_on_service(spec: AppSpec, usable: int, fit: gpu_kinds.Fit | None) -> list[str]:
    """Return a note, if too few GPUs for a gang are in service now; `usable` counts those of every kind."""
    if fit is not None and spec.gang > fit.in_service:
        wanted = gpu_kinds.counted(spec.requirements, spec.gang)
        if spec.spans:
            return [f"{wanted} are not in service now; the app waits until they are"]
        return [f"no node has {wanted} in service now; the app waits until one has"]
    if spec.gang <= usable:
        return []
    if spec.spans:
        return [f"{usable} GPUs are in service now; the app waits until {spec.gang} are"]
    has = f"the largest has {usable} of its GPUs in service" if usable else "no GPU is in service"
    return [f"no node has {plural(spec.gang, 'GPU')} in service now ({has}); the app waits until one has"]


def _notes_on_host(spec: AppSpec, capacity: Mapping[str, Any]) -> list[str]:
    """Return a note for each resource of a host of which no node has as much as is asked for."""
    notes = []
    for asked, most, resource in (
        (spec.requirements.cpus, capacity["cpus_max"], "CPU cores"),
        (spec.requirements.host_bytes / 2**30, capacity["host_bytes_max"] / 2**30, "GiB of host memory"),
    ):
        if asked > most > 0:
            notes.append(
                f"each job asks for {asked:g} {resource}, and no node says that it has more than {most:.4g}; "
                "under a policy that looks at that the app never starts"
            )
    return notes
