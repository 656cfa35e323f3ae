"""What apps that are over have left behind on the disks that this host sees: found, measured, removed.

Only folders of apps that the owner's app agent knows to be over are removed. A folder that looks like one of the
owner's, but of which nothing is known, is told of. No symbolic link is followed below a folder of checkpoints.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from pwd import getpwuid
from typing import Literal

from msgspec import Struct

from app_agent.core.records import AppRecord
from app_agent.training import checkpoints, function_call

#: The names that app agents give to submissions, and the Python client to calls.
_RUN = re.compile(r"[a-z0-9-]+-[0-9a-f]{8}")
_CALL = re.compile(r".+-[0-9a-f]{12}")
CALLS = "calls"
#: Files that a call consists of.
_CALL_FILES = frozenset({function_call.CALL, function_call.OUTCOME}) | {
    Path(name).with_suffix(".part").name for name in (function_call.CALL, function_call.OUTCOME)
}
#: Names of a script's own files that are told.
TOLD = 3

What = Literal["checkpoints", "call"]


class Folder(Struct, frozen=True):
    """A folder that may go: what it is, whose, and how much it takes on the disk."""

    path: str
    what: What
    app: AppRecord
    bytes: int
    files: int


class Left(Struct, frozen=True):
    """A folder that stays, or an app whose folders do, and why; `app` is empty if it is not known."""

    path: str
    app: str
    reason: str


def find(records: Iterable[AppRecord], *, ended_before: float, named: bool) -> tuple[list[Folder], list[Left]]:
    """Return the folders that these apps have left behind, and what stays.

    Parameters
    ----------
    records
        What the app agent knows of them.
    ended_before
        UNIX time; an app that ended later stays.
    named
        Whether the user named each app. Then also files of its script go, and each app that stays is told of.
    """
    folders, left = list[Folder](), list[Left]()
    for record in records:
        young = not record.over or (record.ended_at or 0.0) > ended_before
        if young and named:
            reason = "it ended later than --older-than says" if record.over else f"it is {record.state}"
            left.append(Left(record.checkpoint_dir, record.app, reason))
        for path, what in () if young else _folders(record):
            own = _not_ours(path, what)
            if own and not named:
                more = ", ..." if len(own) > TOLD else ""
                reason = f"it has files of the script ({', '.join(own[:TOLD])}{more}); name the app to remove them, too"
                left.append(Left(str(path), record.app, reason))
            else:
                folders.append(Folder(str(path), what, record, *_measure(path)))
    return folders, left


def unknown(records: Sequence[AppRecord], owner: str) -> list[Left]:
    """Return the folders beside those of `records`, all that the app agent knows, that look like others of `owner`."""
    known = {path for record in records for path in (record.checkpoint_dir, record.call_dir) if path}
    roots = sorted({Path(record.checkpoint_dir).parent for record in records if record.checkpoint_dir})
    runs = (path for root in roots for path in _entries(root) if _is_run(path, owner))
    calls = (path for root in roots for path in _entries(root / CALLS) if _is_call(path))
    reason = "nothing is known of its app; remove it yourself if you do not need it"
    return [Left(str(path), "", reason) for path in (*runs, *calls) if str(path) not in known]


def remove(folder: Folder) -> str:
    """Remove a folder; return why that is not possible, in one sentence, or nothing."""
    try:
        shutil.rmtree(folder.path)  # takes a symbolic link for what it is, also if it has come only now
    except FileNotFoundError:
        return ""
    except OSError as error:
        path = Path(str(error.filename or folder.path))
        return f"{folder.path} cannot be removed: {path.name}: {error.strerror}{_mend(Path(folder.path))}"
    return ""


def _mend(path: Path) -> str:
    """Name the user who may remove a folder, if that is another one."""
    try:
        owner = path.lstat().st_uid
        return "" if owner == os.getuid() else f"; it belongs to the user {getpwuid(owner).pw_name}, who may remove it"
    except (OSError, KeyError):
        return ""


def any_of(record: AppRecord) -> bool:
    """Return whether an app has left a folder behind."""
    return any(_folders(record))


def _folders(record: AppRecord) -> Iterator[tuple[Path, What]]:
    if record.checkpoint_dir and _is_folder(path := Path(record.checkpoint_dir)):
        yield path, "checkpoints"
    if record.call_dir and _is_call(path := Path(record.call_dir)):
        yield path, "call"


def _not_ours(path: Path, what: What) -> list[str]:
    """Return the names in a folder that a script has given, relative to it."""
    if what == "call":
        return sorted(each.name for each in _entries(path) if each.name not in _CALL_FILES)
    jobs = [each for each in _entries(path) if each.name.isdecimal() and _is_folder(each)]
    strange = [each for each in _entries(path) if each not in jobs]
    strange += [each for job in jobs for each in _entries(job) if not checkpoints.is_ours(each.name)]
    return sorted(str(each.relative_to(path)) for each in strange)


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _is_run(path: Path, owner: str) -> bool:
    fits = path.name.startswith(f"{owner}-") and _RUN.fullmatch(path.name) is not None
    return fits and _is_folder(path) and any(each.name.isdecimal() for each in _entries(path))


def _is_call(path: Path) -> bool:
    fits = path.parent.name == CALLS and _CALL.fullmatch(path.name) is not None
    return fits and _is_folder(path) and (path / function_call.CALL).is_file()


def _entries(folder: Path) -> list[Path]:
    """Return what is in a folder; nothing if it is none, or cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _measure(path: Path) -> tuple[int, int]:
    """Return the room that a folder takes on its disk in bytes, and the number of its files."""
    bytes_, files = 0, 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                bytes_ += Path(folder, name).lstat().st_blocks * 512
            except OSError:
                continue
            files += 1
    return bytes_, files
