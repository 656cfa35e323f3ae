"""A task that tries to leave its bounds, for `doctor --site`: the text of this file runs on a node.

Standard library alone, of any Python from 3.7 on, as that of the node may be older than ours. It harms nothing: the
signal that it sends is 0, and it tells nothing of what it reads. It prints one line: what came of each try.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import socket
import struct
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` itself is not needed to run
    from collections.abc import Callable, Iterable, Mapping

#: Before the line of the answer.
MARK = "gpu-arbiter-escape "
GPU_FILES = "/dev/nvidia[0-9]*"
CONFIG = "/etc/gpu-arbiter/node.toml"
#: Where daemons of a node, and those beside it, may have the address of the broker with its password, or a key.
ADDRESS_FILES = (
    "/etc/gpu-arbiter/*.url",
    "/etc/gpu-arbiter/broker/*",
    "/etc/gpu-arbiter/tls/*/*",
    "/run/credentials/gpu-arbiter-*/*",
)
SECRETS = rb"PRIVATE KEY|://[^/@\s]*:[^/@\s]+@"
READ_BYTES_MAX = 2**16
LAUNCHER = "/run/gpu-arbiter-launcher/launcher.sock"


def addresses(patterns: Iterable[str] = ADDRESS_FILES, config: str = CONFIG) -> str | None:
    """Return the files with passwords and keys that can be read; None if no file is known to be there."""
    paths = {path for pattern in patterns for path in _named(pattern)}
    try:
        named = re.findall(r'^\s*bus_file\s*=\s*"(/[^"]*)"', Path(config).read_text(), re.MULTILINE)
        paths |= set(map(Path, named))
    except OSError:
        pass  # closed, which is well, too
    return readable(sorted(paths), SECRETS) if paths else None


def _named(pattern: str) -> list[Path]:
    try:
        return list(Path("/").glob(pattern.lstrip("/")))
    except OSError:
        return []


def readable(paths: Iterable[Path], telling: bytes = b"") -> str:
    """Return those of the files that can be read, have the pattern `telling` in them and are not this user's own."""
    found = []
    for path in paths:
        try:
            with path.open("rb") as file:
                content = file.read(READ_BYTES_MAX)
                if re.search(telling, content) and os.fstat(file.fileno()).st_uid != os.getuid():
                    found.append(str(path))
        except OSError:
            pass
    return ", ".join(found)


def gpus(held: int, pattern: str = GPU_FILES) -> str | None:
    """Return the GPUs that can be opened if they are more than this task has; None if the node has no more."""
    paths = sorted(map(str, _named(pattern)))
    opened = []
    for path in paths:
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except PermissionError:
            continue
        except OSError:
            pass  # the driver has refused it, and the bounds of the task have not
        opened.append(path)
    return None if len(paths) <= held else ", ".join(opened) if len(opened) > held else ""


def process(pid: int) -> dict[str, str | None]:
    """Return what can be done with the process of the node agent; None: it has no number in this namespace."""
    if pid <= 0:  # the signal would be for this process's own group
        return dict.fromkeys(("signal", "environ", "files"))
    return {
        "signal": _opened(lambda: os.kill(pid, 0), f"process {pid}"),
        "environ": readable([Path(f"/proc/{pid}/environ")]),
        "files": _listed(Path(f"/proc/{pid}/fd")),
    }


def sockets(own: str) -> str:
    """Return the folder of the sockets of tasks if it can be listed, and so those of others be found."""
    return _listed(Path(own).parent)


def launcher(path: str = LAUNCHER) -> str | None:
    """Return the socket of the launcher if a task can connect to it; None if there is none."""
    if not Path(path).exists():
        return None
    with socket.socket(socket.AF_UNIX) as connection:
        return _opened(lambda: connection.connect(path), path)


def _listed(folder: Path) -> str:
    return _opened(lambda: list(folder.iterdir()), str(folder))


def _opened(attempt: Callable[[], object], what: str) -> str:
    try:
        attempt()
    except OSError:
        return ""
    return what


def _agent(path: str) -> tuple[int, int]:
    """Return the number and the user of the process that listens at the socket of this task."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", found)
    return pid, uid


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def tried(env: Mapping[str, str]) -> dict[str, object]:
    """Return what came of each try: an empty text if it was held, else what it has opened; None: nothing was there.

    `env` has the variables of a task.
    """
    own = env["GPU_ARBITER_SOCKET"]
    pid, uid = _agent(own)
    return {
        "node": socket.gethostname(),
        "user": _name(os.getuid()),
        "agent": _name(uid),
        "tries": {
            "address": addresses(),
            "gpu": gpus(int(env["GPU_ARBITER_GPUS"])),
            "sockets": sockets(own),
            "launcher": launcher(),
            **process(pid),
        },
    }


def main() -> None:
    """Print what came of it, and remove the folders that were made for this task."""
    print(MARK + json.dumps(tried(os.environ)))
    folder = Path(os.environ["GPU_ARBITER_CHECKPOINT_DIR"])
    try:
        for made in (folder, *list(folder.parents)[:2]):  # of the job, of the app, and the one that was asked for
            made.rmdir()
    except OSError:
        pass


if __name__ == "__main__":
    main()
