"""A private PostgreSQL server for tests: own port, own data, and it dies with the process that started it."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port
from tests.support.rabbitmq import _die_with_parent
from tests.support.startable import Startable

PROGRAMS = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), Path("/nowhere"))
USER = "arbiter"
_names = itertools.count(1)


def missing() -> str:
    """Return what is missing to start a server and to talk to it; empty: nothing."""
    if not (PROGRAMS / "initdb").exists():
        return "PostgreSQL is not installed: run scripts/ensure-postgres.sh"
    if find_spec("psycopg") is None:
        return "psycopg is not installed (pip install 'gpu-arbiter[postgres]')"
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        return "PostgreSQL refuses to run as root, and there is no setpriv"
    return ""


def _as_another_user() -> Sequence[str]:
    """Return what a command begins with so that it does not run as root."""
    if os.geteuid() != 0:
        return ()
    user = pwd.getpwnam("nobody")
    return ("setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "--pdeathsig=KILL")


class PrivatePostgres(Startable):
    """One server. `url(database)` is where to connect; `kill`, `start`, `freeze`, `thaw` are its fates.

    `fsync`: whether a commit waits for the disk, as in earnest; a test that measures nothing need not wait. It listens
    at `address`, of the host that the command `within` enters, and for this host on a Unix socket. One that is `empty`
    has no data yet: it is to be made a replica, or to `make_data` on a disk of its own.
    """

    def __init__(
        self,
        *,
        fsync: bool = False,
        address: str = "127.0.0.1",
        within: Sequence[str] = (),
        superuser: str = USER,
        empty: bool = False,
    ) -> None:
        self._address, self._within, self._superuser = address, within, superuser
        self.folder = Path(tempfile.mkdtemp(prefix="ga-postgres-"))
        self.port = free_port()
        self._fsync = fsync
        self._process: subprocess.Popen[bytes] | None = None
        if _as_another_user():
            os.chown(self.folder, pwd.getpwnam("nobody").pw_uid, -1)
        if not empty:
            self.make_data()

    def make_data(self) -> None:
        """Make the data of a new server in `folder`/data, which may be there and must be empty."""
        where = (
            "-D",
            str(self.folder / "data"),
            "-U",
            self._superuser,
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
            "-N",
        )
        command = [*_as_another_user(), str(PROGRAMS / "initdb"), *where]
        subprocess.run(command, check=True, capture_output=True, cwd=self.folder)
        if self._address != "127.0.0.1":
            with (self.folder / "data" / "pg_hba.conf").open("a") as access:
                access.write(f"host all all {self._address}/24 trust\n")

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._process is not None and self._process.poll() is not None

    def url(self, database: str, *, user: str = USER, port: int | None = None) -> str:
        """Return the address of a database."""
        return f"postgresql://{user}@{self._address}:{port or self.port}/{database}"

    def url_here(self, database: str) -> str:
        """Return the address of a database for processes of this very host, wherever the server is."""
        return f"postgresql://{self._superuser}@/{database}?host={self.folder}&port={self.port}"

    def database(self) -> str:
        """Make a new database; return its address."""
        name = f"site{next(_names)}"
        self.sql("postgres", f"CREATE DATABASE {name}")
        return self.url(name)

    def sql(self, database: str, statement: str) -> list[tuple[object, ...]]:
        """Do one statement; return the rows."""
        import psycopg

        with psycopg.connect(self.url_here(database), autocommit=True) as connection:
            done = connection.execute(statement.encode())
            return done.fetchall() if done.description else []

    def typed(self, line: str) -> str:
        """Have a shell on its host do a line, as the user of the server; return what it says."""
        environment = {
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
            "PGHOST": str(self.folder),
            "PGPORT": str(self.port),
            "PGUSER": self._superuser,
            "HOME": str(self.folder),
        }
        command = [*_as_another_user(), "bash", "-euo", "pipefail", "-c", line]
        done = subprocess.run(
            command, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self) -> None:
        """Start on what data there is, and return when connections are taken."""
        flags = [f"fsync={'on' if self._fsync else 'off'}", f"listen_addresses={self._address}", "max_connections=40"]
        flags += [f"unix_socket_directories={self.folder}", "shared_buffers=32MB", "autovacuum=off", "jit=off"]
        settings = [word for flag in flags for word in ("-c", flag)]
        where = ("-D", str(self.folder / "data"), "-p", str(self.port))
        with (self.folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                [*self._within, *_as_another_user(), str(PROGRAMS / "postgres"), *where, *settings],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - started by the main thread only
            )
        deadline = time.monotonic() + PATIENCE_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start:\n{(self.folder / 'output').read_text()[-4000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, and no process of the server is left: the next one finds no shared memory in use."""
        import psutil

        assert self._process is not None
        family: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):  # it has ended by itself
            server = psutil.Process(self._process.pid)
            server.suspend()  # so that it starts no child any more
            family = [server, *server.children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(family[1:], timeout=PATIENCE_S)
        (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill it and forget its data."""
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        """Signal the server and its children, which are processes of their own."""
        assert self._process is not None
        import psutil

        server = psutil.Process(self._process.pid)
        for process in [*server.children(recursive=True), server]:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def _answers(self) -> bool:
        ready = [str(PROGRAMS / "pg_isready"), "-q", "-h", str(self.folder), "-p", str(self.port)]
        return subprocess.run(ready, check=False).returncode == 0
