"""A host of its own for tests of the launcher: a real systemd in namespaces, users that are nowhere else, a launcher.

All of it lies on an overlay in memory, and the host that runs the tests keeps its users, files and services.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from launch.site import shipped
from tests.support.node_site import NodeProcess
from tests.support.patience import PATIENCE_S

REPOSITORY = Path(__file__).resolve().parents[2]
BOOT = Path(__file__).with_name("boot_systemd.sh")
UIDS = {"alice": 2001, "bob": 2002, "gpu-node": 993}
RUNTIME = "/run/gpu-arbiter-node"
GATEWAY_SOCKET = "/run/gpu-arbiter-gateway/control.sock"
LAUNCHER = "/run/gpu-arbiter-launcher/launcher.sock"
UNIT = "gpu-arbiter-launcher.service"
#: The interpreter of this test run may be in a home folder, which the unit hides.
DROP_IN = f"""
[Service]
WorkingDirectory={REPOSITORY}
ProtectHome=no
StandardError=file:/var/log/launcher
"""


def why_not() -> str:
    """Why no host can be made here; empty if one can."""
    if os.geteuid():
        return "booting a systemd in namespaces needs root"
    if REPOSITORY.is_relative_to("/tmp"):
        return "the booted host does not see this checkout, which lies below /tmp"
    needed = ("unshare", "nsenter", "setpriv", "useradd", "systemd-run", "pgrep")
    missing = [name for name in needed if shutil.which(name) is None]
    if missing or not Path("/lib/systemd/systemd").exists():
        return f"booting a systemd in namespaces needs {', '.join(missing) or 'Debian systemd'}"
    mounts = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
    )
    return "root may not mount here, as in most containers" if mounts.returncode else ""


class Host:
    """A running host; `pid` is its init as seen from outside."""

    def __init__(self, folder: Path) -> None:
        self.pid = (folder / "pid").read_text().strip()
        self.enter = ["nsenter", "-t", self.pid, "-m", "-p", "-u", "-i", "-n", "-C", "--"]
        self.root = Path(f"/proc/{self.pid}/root")  #: its files, as seen from outside

    def run(self, *command: str, user: str = "", check: bool = True, text: str | None = None) -> str:
        """Run a command to its end, as root or as `user`; return what it printed."""
        done = subprocess.run(
            [*self.enter, *as_user(user), *command], input=text, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout if done.returncode == 0 else f"{done.stdout}{done.stderr}"

    def lines(self, command: str, user: str = "") -> set[str]:
        """What a line of shell prints, word by word; that something is gone or closed does not matter."""
        return set(self.run("sh", "-c", f"{command} 2>/dev/null; true", user=user).split())

    def holding(self, word: str, *folders: str, user: str = "") -> set[str]:
        """The files below these folders that have a word in them and this user can read."""
        return self.lines(f"grep -ral --devices=skip -e {word} {' '.join(folders)}", user)

    def telling(self, word: str, file: str, *, user: str = "") -> set[str]:
        """The processes whose command lines or variables have a word in them, as far as this user can read that."""
        # The brackets keep the search from finding itself.
        found = self.lines(f"grep -al -e '{word[:-1]}[{word[-1]}]' /proc/[0-9]*/{file}", user)
        return {path.split("/")[2] for path in found}

    def write(self, path: str, content: str, *, owner: str = "root", mode: str = "644") -> None:
        self.run("install", "-D", "-o", owner, "-m", mode, "/dev/stdin", path, text=content)

    def make_users(self) -> None:
        lines = [
            f"groupadd -g {uid} {name}; useradd -u {uid} -g {uid} -m {name}; chmod 700 /home/{name}"
            for name, uid in UIDS.items()
        ]
        # The interpreter and the packages of this test run may be in a folder that only root may pass through.
        paths = {REPOSITORY, Path(sys.executable).resolve(), *map(Path, sys.path)}
        folders = {folder for path in paths for folder in (path, *path.parents) if folder.is_dir()}
        closed = [shlex.quote(str(folder)) for folder in sorted(folders) if not folder.stat().st_mode & 0o001]
        if closed:
            lines.append(f"chmod o+x {' '.join(closed)}")
        self.run("sh", "-ec", "\n".join(lines))

    def start_launcher(self, **settings: object) -> None:
        settings = {"bootstrap_dir": "/srv"} | settings  # the workers of these tests speak for themselves
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        self.write("/etc/gpu-arbiter/launcher.toml", "\n".join(lines) + "\n")
        program = f"{sys.executable} -m gpu_arbiter"
        self.write(f"/etc/systemd/system/{UNIT}", shipped.units(program)[UNIT])
        self.write(f"/etc/systemd/system/{UNIT}.d/test.conf", DROP_IN)
        self.run("systemctl", "daemon-reload")
        self.run("systemctl", "restart", UNIT)

    @asynccontextmanager
    async def node(self, **fields: object) -> AsyncIterator[NodeProcess]:
        """A node agent as the user gpu-node, on the state that an earlier one left."""
        settings = {"launcher": LAUNCHER, "runtime_dir": RUNTIME} | fields
        self.run("install", "-d", "-o", "gpu-node", "-m", "711", RUNTIME)
        self.run("install", "-d", "-o", "gpu-node", "-m", "755", "/srv/node")  # what is closed is closed by the daemon
        process = await asyncio.create_subprocess_exec(
            *self.enter,
            *as_user("gpu-node"),
            *("env", "-C", str(REPOSITORY), "PYTHONDONTWRITEBYTECODE=1"),
            *(sys.executable, "-m", "tests.support.node_site", "/srv/node", json.dumps(settings)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=None,
            limit=2**20,
        )
        node = NodeProcess(process)
        try:
            yield node
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            process._transport.close()  # type: ignore[attr-defined] - closes the pipes before the loop ends

    @asynccontextmanager
    async def whole_site(self) -> AsyncIterator[None]:
        """The daemons of `whole_site.py` as the user gpu-node; the launcher knows the gateway's key."""
        for folder in (RUNTIME, str(Path(GATEWAY_SOCKET).parent), "/srv/whole"):
            self.run("install", "-d", "-o", "gpu-node", "-m", "711", folder)
        self.run("rm", "-f", GATEWAY_SOCKET)  # of an earlier site that was killed
        process = await asyncio.create_subprocess_exec(
            *self.enter,
            *as_user("gpu-node"),
            *("env", "-C", str(REPOSITORY), "PYTHONDONTWRITEBYTECODE=1"),
            *(sys.executable, "-m", "tests.support.whole_site", "/srv/whole"),
        )
        try:
            public = "/srv/whole/gateway/gateway.key.pub"
            there = (
                f"for n in $(seq {PATIENCE_S * 5:.0f}); do test -S {GATEWAY_SOCKET} && exit; sleep 0.2; done; exit 1"
            )
            await asyncio.to_thread(self.run, "sh", "-c", there)
            self.write("/etc/gpu-arbiter/gateways/login2.pub", self.run("cat", public))
            yield
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    def _owner(self, user: str) -> Sequence[str]:
        """The words before a program of a user's, to which `gpu-arbiter` is known."""
        program = ("env", "-C", f"/home/{user}", f"PYTHONPATH={REPOSITORY}", "PYTHONDONTWRITEBYTECODE=1")
        return (*program, f"GPU_ARBITER_URL=unix://{GATEWAY_SOCKET}", sys.executable)

    def as_owner_runs(self, user: str, script: str, *words: str) -> str:
        """What a script of Python prints to a user of this host."""
        return self.run(*self._owner(user), "-c", script, *words, user=user)

    def terminal_of(self, user: str, *words: str) -> OwnTerminal:
        """`gpu-arbiter` in a terminal of a user of this host."""
        return OwnTerminal([*self.enter, *as_user(user), *self._owner(user), "-m", "gpu_arbiter", *words])

    def ssh_of(self, user: str, *words: str) -> list[str]:
        """`ssh` of a user of this host, with the configuration in the user's home folder."""
        return [*self.enter, *as_user(user), *self._owner(user)[:-1], "ssh", "-F", f"/home/{user}/config", *words]

    def as_owner(self, user: str, *words: str, check: bool = True) -> str:
        """What `gpu-arbiter` prints to a user of this host."""
        return self.run(*self._owner(user), "-m", "gpu_arbiter", *words, user=user, check=check)


class OwnTerminal:
    """A command that has a terminal of its own, whose other end is here."""

    def __init__(self, command: Sequence[str]) -> None:
        self._end, program = os.openpty()
        self._process = subprocess.Popen(command, stdin=program, stdout=program, stderr=program)
        os.close(program)
        self._shown = ""

    def read_until(self, pattern: str) -> str:
        """All that was shown once `pattern` is among it."""
        by = time.monotonic() + PATIENCE_S
        while not re.search(pattern, self._shown):
            ready, _, _ = select.select([self._end], [], [], 1.0)
            with suppress(OSError):
                self._shown += os.read(self._end, 4096).decode() if ready else ""
            assert time.monotonic() < by, f"no {pattern!r} is shown, but: {self._shown}"
        return self._shown

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._end)


def as_user(name: str) -> Sequence[str]:
    """The words before a command that make it one of the user's, with no right of root's left."""
    if not name:
        return []
    uid = str(UIDS[name])  # it dies with its parent here, and so with a signal to that
    return [
        "setpriv",
        "--reuid",
        uid,
        "--regid",
        uid,
        "--clear-groups",
        "--no-new-privs",
        "--pdeathsig",
        "KILL",
        "env",
        f"HOME=/home/{name}",
    ]


def join(hosts: Mapping[str, Host]) -> None:
    """Lay a cable from the first host to each other one; they get addresses from 10.0.0.1 on, and know each by name."""
    first, *others = hosts.values()
    first.run("ip", "link", "add", "lan", "type", "bridge")
    for number, other in enumerate(others):
        enter = ("nsenter", "-t", first.pid, "-n", "ip", "link", "add", f"to{number}", "up", "master", "lan")
        subprocess.run([*enter, "type", "veth", "peer", "name", "lan", "netns", other.pid], check=True)
    addresses = {name: f"10.0.0.{number}" for number, name in enumerate(hosts, 1)}
    known = "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **addresses}.items())
    for name, host in hosts.items():
        host.run("hostname", name)
        host.write("/etc/hosts", known)
        host.run("ip", "link", "set", "lo", "up")
        host.run("ip", "address", "add", f"{addresses[name]}/24", "dev", "lan")
        host.run("ip", "link", "set", "lan", "up")


@contextmanager
def launcher_host(folder: Path) -> Iterator[Host]:
    """A host with the users of `UIDS`."""
    subprocess.run(["bash", str(BOOT), "start", str(folder)], check=True)
    try:
        host = Host(folder)
        host.make_users()
        yield host
    finally:
        subprocess.run(["bash", str(BOOT), "stop", str(folder)], check=False)
