"""A server of ssh beside the program of a task, for editors, `scp` and `rsync`: OpenSSH's own, one for each connection.

Standard library alone, as `shim`, in whose process it runs, and so as the user of the task. `sshd -i` gets the
connection itself and listens nowhere. It has no rights of its own: it lets in one key, which came with the connection,
and one user, that of the task. Its configuration and keys are files in memory, which it opens below the supervisor's
``/proc``: no other user can open them, and nothing is left when the task ends.

Run as a script, ``python -I -S ssh_server.py FILE``, it is the command that sshd starts in each session in place of
the one that was asked for: it has the folder and the variables of the task, and then starts that one. sshd's own
``SetEnv`` could not do that: it knows no line ends, no quotes before OpenSSH 8.7, and would have secrets in a file.
"""

# pathlib would double the time this takes to start.
# ruff: noqa: PTH103, PTH110, PTH118, PTH119, PTH120, PTH123

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from shlex import join
from tempfile import TemporaryDirectory

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` itself is not needed to run
    import socket
    from collections.abc import Callable
    from typing import Any

    Json = dict[str, Any]

SERVER_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/usr/bin")
KEYGEN_FOLDERS = ("/usr/bin", "/usr/local/bin")
#: Where a key is made, since ssh-keygen writes files only; a host that lacks it has the key on a disk for a moment.
MEMORY_FOLDER = "/dev/shm"  # noqa: S108 - a folder of this user's own is made there
#: The terminal is not served meanwhile.
KEYGEN_S = 20.0
#: Debian and its kin; Fedora and its kin; Arch; SUSE.
SFTP_FOLDERS = ("/usr/lib/openssh", "/usr/libexec/openssh", "/usr/lib/ssh", "/usr/libexec/ssh")
#: Where sshd of root wants an empty folder; a system that starts none may lack it.
PRIVILEGES_FOLDER = "/run/sshd"
#: Variables that are those of the session, whatever the task's are.
OF_SESSION = ("TERM", "DISPLAY", "MAIL")


class SshServer:
    """The servers of one task.

    Parameters
    ----------
    spec
        How the task is started.
    log
        The descriptor of the task's log, for complaints of servers.
    bind
        Puts the calling process where the task's are: in its session, group and cores, to die with the supervisor.
    """

    def __init__(self, spec: Json, log: int, bind: Callable[[], None]) -> None:
        self._spec, self._log, self._bind = spec, log, bind
        self._host_key: tuple[int, str] | None = None  #: the private part, as a file in memory, and the public part
        self._files: dict[int, tuple[int, ...]] = {}  #: by server

    def __bool__(self) -> bool:
        """Whether there are connections."""
        return bool(self._files)

    def open(self, connection: socket.socket, asked: bytes, answer: Callable[[bytes], None]) -> None:
        """Start a server on a connection for the key in `asked`; `answer` is called with the host key and the user.

        Raises
        ------
        RuntimeError
            If there can be none; with the mend.
        """
        server = _program("sshd", SERVER_FOLDERS)
        key, user = _key_in(asked), _user()
        host_key, public = self._host_key = self._host_key or _make_host_key()
        if os.geteuid() == 0:
            os.makedirs(PRIVILEGES_FOLDER, 0o755, exist_ok=True)
        answer(json.dumps({"host_key": public, "user": user}).encode())
        entry = {name: self._spec.get(name) for name in ("cwd", "env", "secrets", "reader")}
        files = (_in_memory(key.encode()), _in_memory(json.dumps(entry).encode()))
        config = _in_memory(_config(_path(host_key), *map(_path, files)).encode())
        pid = os.fork()
        if pid == 0:
            try:
                self._bind()
                os.set_blocking(connection.fileno(), True)
                for source, target in ((connection.fileno(), 0), (connection.fileno(), 1), (self._log, 2)):
                    os.dup2(source, target)
                os.execv(server, [server, "-i", "-e", "-f", _path(config, os.getppid())])  # noqa: S606 - no shell
            except BaseException as error:  # noqa: BLE001 - the child must end here in any case
                os.write(self._log, f"the ssh server could not be started: {error}\n".encode(errors="replace"))
            os._exit(127)
        self._files[pid] = (*files, config)

    def ended(self, pid: int) -> bool:
        """Whether the process that has ended was a server; its files go."""
        files = self._files.pop(pid, ())
        for file in files:
            os.close(file)
        return bool(files)


def _config(host_key: str, keys: str, entry: str) -> str:
    """Return what sshd is to do, by the paths of its files."""
    command = join([sys.executable, "-I", "-S", __file__, entry])
    sftp = next((path for path in (f"{folder}/sftp-server" for folder in SFTP_FOLDERS) if os.path.exists(path)), "")
    lines = (
        f"HostKey {host_key}",
        f"AuthorizedKeysFile {keys}",
        "AuthenticationMethods publickey",
        "StrictModes no",  # those files are below /proc; no other user can open them
        "UsePAM no",
        "PidFile none",
        "PermitUserRC no",
        "LogLevel ERROR",
        *([f"Subsystem sftp {sftp}"] if sftp else []),
        f"ForceCommand exec {command}",
    )
    return "".join(f"{line}\n" for line in lines)


def _key_in(asked: bytes) -> str:
    try:
        key = json.loads(asked)["key"]
    except (ValueError, LookupError, TypeError):
        key = None
    key = key.strip() if isinstance(key, str) else ""
    if not key.startswith(("ssh-", "ecdsa-", "sk-")) or not (key.isascii() and key.isprintable()):
        raise RuntimeError("the request for an ssh server names no public key; use `gpu-arbiter ssh-proxy`")
    return f"{key}\n"


def _make_host_key() -> tuple[int, str]:
    """Return a key of this task's own: the private part as a file in memory, and the public part."""
    program = _program("ssh-keygen", KEYGEN_FOLDERS)
    memory = MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else None
    with TemporaryDirectory(dir=memory) as folder:  # for this user alone
        path = os.path.join(folder, "key")
        made = [program, "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", path]
        try:
            subprocess.run(made, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=KEYGEN_S)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"no host key could be made on this node within {KEYGEN_S:g} s; try again") from error
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"no host key could be made on this node: {error.stderr.decode().strip()}") from error
        with open(path, "rb") as private, open(f"{path}.pub") as public:
            return _in_memory(private.read()), public.read().strip()


def _program(name: str, folders: tuple[str, ...]) -> str:
    for folder in folders:
        if os.access(path := f"{folder}/{name}", os.X_OK):
            return path
    raise RuntimeError(f"this node has no {name}; an administrator installs the package openssh-server there")


def _in_memory(content: bytes) -> int:
    """Return a descriptor of a file in memory that this user alone can open."""
    file = os.memfd_create("ssh")
    os.fchmod(file, 0o600)
    os.write(file, content)
    return file


def _path(file: int, pid: int = 0) -> str:
    return f"/proc/{pid or os.getpid()}/fd/{file}"


def _user() -> str:
    """Return the name of this user, with which ssh can come."""
    try:
        account = pwd.getpwuid(os.geteuid())
    except KeyError:
        raise RuntimeError(
            f"this node knows no name of user {os.geteuid()}, and sshd wants one; an administrator adds the user there"
        ) from None
    name, shell = account.pw_name, account.pw_shell or "/bin/sh"
    if not os.access(shell, os.X_OK) or os.path.basename(shell) in ("nologin", "false"):
        raise RuntimeError(
            f"ssh needs a login shell, and {name} has {shell} on this node; an administrator gives one there: "
            f"usermod -s /bin/sh {name}"
        )
    return name


def enter(file: str) -> None:
    """Become the command that was asked for, or a shell, with the folder and the variables of the task.

    Raises
    ------
    RuntimeError
        If a secret cannot be read any more; with the mend.
    """
    with open(file) as content:
        task = json.load(content)
    own = dict(os.environ)
    command = own.pop("SSH_ORIGINAL_COMMAND", "")
    kept = {name: value for name, value in own.items() if name in OF_SESSION or name.startswith("SSH_")}
    env = {name: value for name, value in task["env"].items() if name not in OF_SESSION}
    env |= {name: _secret(name, path, task["reader"]) for name, path in (task["secrets"] or {}).items()}
    os.chdir(task["cwd"])
    shell = own.get("SHELL", "/bin/sh")
    # For a command of ssh, bash of Debian and Fedora reads ~/.bashrc, which could change the variables of the task,
    # unless it is below another shell; and it is: sshd has started that one.
    level = {"SHLVL": "1"} if command else {}
    words = [shell, "-c", command] if command else [shell]
    os.execve(shell, words, own | env | kept | level)  # noqa: S606 - the user's own


def _secret(name: str, path: str, reader: str | None) -> str:
    from importlib import import_module

    sys.path.insert(0, os.path.dirname(__file__))
    value: str = import_module("shim").secret(name, path, reader or "the node agent's user")
    return value


if __name__ == "__main__":
    try:
        enter(sys.argv[1])
    except (OSError, RuntimeError) as error:
        sys.exit(f"gpu-arbiter: {error}")
