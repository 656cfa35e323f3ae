"""Folders and files of a daemon's state, which are for its own user only.

They hold the commands and environments of all apps. Journals and ledgers are made for that user only, and closed if an
earlier version left them open to others.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import structlog

from protocol.config import ConfigError

#: The files that SQLite keeps beside a database, with the same rights.
_BESIDE = ("", "-wal", "-shm", "-journal")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO

_log = structlog.get_logger("state")


def state_folder(folder: Path) -> Path:
    """Make the folder of a daemon's state for this user only, and return it.

    One that is open to other users is closed, and so are the databases in it; that is one line in the log. A folder
    that belongs to another user is left as its administrator made it, with a warning, unless every user may write
    there.

    Raises
    ------
    ConfigError
        If it cannot be made, or every user may write there and it is not ours to change.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if not found.st_mode & _OTHERS:
            return folder
        if found.st_uid == os.geteuid() and not found.st_mode & stat.S_ISVTX:
            folder.chmod(0o700)
            closed = [path.name for path in sorted(folder.glob("*.db*")) if path.is_file() and _close(path)]
            _log.warning("state.closed", folder=str(folder), before=_mode(found), files=closed)
            return folder
    except OSError as error:
        raise ConfigError(
            f"state_dir {folder} cannot be made: {error.strerror}; give a folder this user owns"
        ) from error
    if found.st_mode & stat.S_IWOTH:
        raise ConfigError(f"state_dir {folder} is a folder where every user may write; give one that this user owns")
    _log.warning("state.open", folder=str(folder), mode=_mode(found), meaning="other users may look into it")
    return folder


def private_file(path: Path) -> None:
    """Make a database for this user only, or close it if other users may read it.

    Raises
    ------
    OSError
        If it cannot be made, or is another user's and open.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    for suffix in _BESIDE:
        _close(path.with_name(path.name + suffix))


def _close(path: Path) -> bool:
    """Take a file's rights from other users; return whether they had any."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    if mode & _OTHERS:
        path.chmod(stat.S_IMODE(mode) & ~_OTHERS)
    return bool(mode & _OTHERS)


def _mode(found: os.stat_result) -> str:
    return f"{stat.S_IMODE(found.st_mode):04o}"
