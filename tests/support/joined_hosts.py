"""Hosts, each with a real systemd and journal, joined by a network and a shared folder, and the people who type there.

The host `hub` has the broker, the arbiter and the users; `n1` and further nodes have two GPUs, which are stand-ins.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.support import deb, rabbitmq, telling_steps
from tests.support.cluster import until
from tests.support.launcher_host import Host, join, launcher_host
from tests.support.stand_in import StandIn, cards

#: Auctions of a few GPUs need no compiled loops.
DROP_IN = "[Service]\nEnvironment=NUMBA_DISABLE_JIT=1\n"
DRIVER = "/opt/driver"
#: Of all tests on such hosts.
MARKS = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not rabbitmq.available(), reason="rabbitmq-server is not installed"),
    pytest.mark.skipif(bool(deb.why_not()), reason=deb.why_not()),
]
WORK = "/srv/work"  #: the folder that all hosts share


class Hosts:
    """The hosts, and the people who type there."""

    def __init__(self, hosts: Mapping[str, Host], daemons: Mapping[str, Sequence[str]]) -> None:
        self.hub, self.n1 = hosts["hub"], hosts["n1"]
        self.each, self._daemons = hosts, daemons

    def type(self, host: str, line: str, folder: str) -> str:
        """Type a line as root; return what it says."""
        if line.startswith("scp "):
            self._copy(line, folder)
            return ""
        answer = "y\n"  # to the question of apt-get whether to continue
        return self.each[host].run("env", "-C", folder, "HOME=/root", "bash", "-c", line, text=answer)

    def upgrade(self, host: str, package: Path) -> None:
        """Install another version on a host as the page on upgrading says; dpkg restarts the daemons that run."""
        shutil.copy(package, self.each[host].root / "root/other.deb")
        self.type(host, "dpkg -i other.deb", "/root")

    def _copy(self, line: str, folder: str) -> None:
        """Copy from the hub as `scp` does, which the lab has no daemon for: the files get the rights that they have."""
        *sources, to = [word for word in shlex.split(line)[1:] if not word.startswith("-")]
        host, _, place = to.partition(":")
        for source in sources:
            (path,) = self.hub.root.glob(str(Path(folder, source)).lstrip("/"))
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, self.each[host].root / "root" / place / path.name)

    def as_alice(self, *lines: str, check: bool = True) -> str:
        """Have alice log in to the hub and type lines; return what they say."""
        return self.logged_in("alice", *lines, check=check)

    def logged_in(self, user: str, *lines: str, check: bool = True) -> str:
        """Likewise for a user."""
        return self.hub.run("bash", "-lc", "\n".join(lines), user=user, check=check)

    def told(self, line: str) -> Any:
        """The document that a command says to alice; None while there is none."""
        try:
            return json.loads(self.as_alice(f"{line} --json", check=False))
        except ValueError:
            return None

    def wait_for_nodes(self, *names: str) -> None:
        """Wait until the arbiter knows the GPUs of these nodes and of no others."""

        def are_up() -> bool:
            told = self.told("gpu-arbiter nodes")
            found = {node["id"]: node["state"] for node in told.get("nodes", ())} if told else {}
            return found == dict.fromkeys(names, "up")

        until(are_up, f"{', '.join(names)} up", self.logs)

    def log(self, host: str, unit: str) -> str:
        """What a daemon has written into the journal of its host."""
        return self.each[host].run("journalctl", "-o", "cat", "--no-pager", "-u", unit)

    def logs(self) -> str:
        """The ends of all logs."""
        ends = [(unit, self.log(name, unit)[-1000:]) for name, units in self._daemons.items() for unit in units]
        return "\n".join(f"{unit}: {end}" for unit, end in ends)

    def process(self, host: str, unit: str) -> str:
        """The process of a daemon that is up; empty without one."""
        up = self.each[host].run("systemctl", "is-active", unit, check=False).strip() == "active"
        return self.each[host].run("systemctl", "show", "-p", "MainPID", "--value", unit).strip() if up else ""

    def processes(self) -> dict[str, str]:
        """The process of each daemon."""
        return {unit: self.process(host, unit) for host, units in self._daemons.items() for unit in units}

    def releases(self) -> dict[str, str]:
        """What `doctor --site` says of releases: its verdict, and what it found."""
        told = self.told("gpu-arbiter doctor --site")
        return next((each for each in told["checks"] if each["name"] == "releases"), {}) if told else {}


#: The journal runs, and nothing that would touch the devices of the host that runs the tests.
JOURNAL = "systemctl mask systemd-udevd systemd-udev-trigger; systemctl start systemd-journald"


@contextmanager
def joined_hosts(folder: Path, package: Path, daemons: Mapping[str, Sequence[str]]) -> Iterator[Hosts]:
    """Yield fresh hosts; `package` lies in /srv/fresh of the hub. `daemons`: their units, by host."""
    with ExitStack() as stack:
        # All hosts have the same /dev, and so what lies there.
        shared = stack.enter_context(TemporaryDirectory(dir="/dev/shm"))
        Path(shared).chmod(0o777)
        shutil.copy(telling_steps.__file__, shared)
        made = {name: stack.enter_context(launcher_host(folder / name)) for name in daemons}
        join(made)
        for number, (name, host) in enumerate(made.items()):
            for unit in daemons[name]:
                folder_of = f"/etc/systemd/system/{re.sub('@.*', '@', unit)}.service.d"
                host.write(f"{folder_of}/test.conf", DROP_IN.format(unit=unit))
            host.run("sh", "-ec", f"{JOURNAL}; mkdir {WORK}; mount --bind {shared} {WORK}")
            if name != "hub":
                driver = StandIn(folder / f"driver-{name}", *cards(2, first=2 * number))
                shutil.copytree(driver.folder, host.root / DRIVER.lstrip("/"))
                host.write("/etc/ld.so.conf.d/driver.conf", f"{DRIVER}\n")
                host.run("ldconfig")
        made["hub"].run("install", "-d", "/srv/fresh")
        shutil.copy(package, made["hub"].root / "srv/fresh")
        yield Hosts(made, daemons)
