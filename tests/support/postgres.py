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
from typing import Self

from tests.support.rabbitmq import _die_with_parent, free_port

PROGRAMS = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), Path("/nowhere"))
START_TIMEOUT_S = 60.0
USER = "arbiter"
_names = itertools.count(1)


def missing() -> str:
    """Return what is missing to start a server and to talk to it; empty: nothing."""
    if not (PROGRAMS / "initdb").exists():
        return "PostgreSQL is not installed (apt-get install postgresql)"
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


class PrivatePostgres:
    """One server. `url(database)` is where to connect; `kill`, `start`, `freeze`, `thaw` are its fates.

    `fsync`: whether a commit waits for the disk, as in earnest; a test that measures nothing need not wait.
    """

    def __init__(self, *, fsync: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ga-postgres-"))
        self.port = free_port()
        self._fsync = fsync
        self._process: subprocess.Popen[bytes] | None = None
        user = _as_another_user()
        if user:
            os.chown(self.folder, pwd.getpwnam("nobody").pw_uid, -1)
        where = ("-D", str(self.folder / "data"), "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "-N")
        subprocess.run([*user, str(PROGRAMS / "initdb"), *where], check=True, capture_output=True, cwd=self.folder)

    def url(self, database: str, *, user: str = USER, port: int | None = None) -> str:
        """Return the address of a database."""
        return f"postgresql://{user}@127.0.0.1:{port or self.port}/{database}"

    def database(self) -> str:
        """Make a new database; return its address."""
        name = f"site{next(_names)}"
        self.sql("postgres", f"CREATE DATABASE {name}")
        return self.url(name)

    def sql(self, database: str, statement: str) -> list[tuple[object, ...]]:
        """Do one statement; return the rows."""
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            done = connection.execute(statement.encode())
            return done.fetchall() if done.description else []

    def start(self) -> None:
        """Start on what data there is, and return when connections are taken."""
        flags = [f"fsync={'on' if self._fsync else 'off'}", "listen_addresses=127.0.0.1", "max_connections=40"]
        flags += [f"unix_socket_directories={self.folder}", "shared_buffers=32MB", "autovacuum=off", "jit=off"]
        settings = [word for flag in flags for word in ("-c", flag)]
        where = ("-D", str(self.folder / "data"), "-p", str(self.port))
        with (self.folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                [*_as_another_user(), str(PROGRAMS / "postgres"), *where, *settings],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - started by the main thread only
            )
        deadline = time.monotonic() + START_TIMEOUT_S
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
        psutil.wait_procs(family[1:], timeout=START_TIMEOUT_S)
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

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        ready = [str(PROGRAMS / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(ready, check=False).returncode == 0
