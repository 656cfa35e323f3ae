"""A node agent's end of the worker contract, small enough to see through: it listens, gives orders and remembers."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal, Self, TypeVar

from protocol.worker import FromWorker, Hello, Order, decode_line, encode_line
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
BOOTSTRAP = ROOT / "app_agent" / "training" / "bootstrap"

MessageT = TypeVar("MessageT")
Do = Literal["suspend", "resume", "leave", "save", "probe", "tell", "arena", "cap", "hold", "sample", "trough"]


class WorkerAgent:
    """Listens on a Unix socket. `heard` grows for ever, `hellos` counts the connections made; `ranks` are connected."""

    def __init__(self, path: Path, gen: int = 1) -> None:
        self.path, self.gen, self.seq = path, gen, 0
        self.heard: list[FromWorker] = []
        self.speakers: list[int] = []  #: the rank that said each of `heard`
        self.ranks: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    @property
    def hellos(self) -> list[Hello]:
        return [message for message in self.heard if isinstance(message, Hello)]

    def wait(
        self, kind: type[MessageT] | tuple[type[MessageT], ...], since: int = 0, by: int | None = None, **facts: object
    ) -> MessageT:
        """Wait for a message of this kind, heard after the first `since`, by this rank, with at least these values."""

        def find() -> MessageT | None:
            for message, speaker in zip(self.heard[since:], self.speakers[since:], strict=True):
                if by is not None and speaker != by:
                    continue
                if isinstance(message, kind) and all(_holds(message, name, fact) for name, fact in facts.items()):
                    return message
            return None

        with self._changed:
            assert self._changed.wait_for(lambda: find() is not None, PATIENCE_S), f"no {kind} {facts} in {self.heard}"
            found = find()
            assert found is not None
            return found

    def order(self, do: Do, to: int | None = None, **fields: int) -> Order:
        """Give an order to a rank or to all, the next in turn unless `gen` or `seq` say otherwise."""
        self.seq += 1
        order = Order(do, **{"gen": self.gen, "seq": self.seq} | fields)
        self.say(encode_line(order), to)
        return order

    def say(self, data: bytes, to: int | None = None) -> None:
        for rank, connection in self.ranks.items():
            if to in (None, rank):
                connection.sendall(data)

    def die(self) -> None:
        """Vanish as a killed agent does."""
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(PATIENCE_S)  # a worker that connects at this moment is in the list below, or never
        self._listener.close()
        self.path.unlink()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        rank = -1
        with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as lines:
            for line in lines:
                message = decode_line(line)
                with self._changed:
                    if isinstance(message, Hello):
                        rank = message.rank
                        self.ranks[rank] = connection
                    self.heard.append(message)
                    self.speakers.append(rank)
                    self._changed.notify_all()


def _holds(message: object, name: str, fact: object) -> bool:
    value = getattr(message, name)
    return bool(fact(value)) if callable(fact) else bool(value == fact)


class Worker:
    """A training process started as a node agent starts one."""

    def __init__(self, folder: Path, *command: str, attempt: int = 0, python: str = sys.executable, **env: str) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        environment = {
            **os.environ,
            "PYTHONPATH": str(BOOTSTRAP),
            "GPU_ARBITER_SOCKET": str(folder / "agent.sock"),
            "GPU_ARBITER_TASK": f"me-1.0-a{attempt}",
            "GPU_ARBITER_JOB": "me-1.0",
            "GPU_ARBITER_ATTEMPT": str(attempt),
            "GPU_ARBITER_CHECKPOINT_DIR": str(self.checkpoints),
            "GPU_ARBITER_GPUS": "1",
            "MALLOC_MMAP_THRESHOLD_": "131072",
            "MALLOC_TRIM_THRESHOLD_": "131072",
            "THP_MEM_ALLOC_ENABLE": "1",
            **env,
        }
        self.process = subprocess.Popen(
            [python, *command],
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; return exit code, output and errors."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err

    def rss_bytes(self, kind: Literal["RssAnon", "RssShmem"]) -> int:
        """Memory in use now, of the kernel's kind `kind`."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))
