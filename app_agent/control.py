"""The control socket between the command line and an app-agent daemon: one JSON line each way per request.

`submit`, `cancel` and `wait` concern the owner's apps and are answered by the daemon itself, `query` is answered by the
arbiter, and so are `act`, and `cancel` of an app that the daemon has no record of. A connection carries any number of
requests, one after the other. Every error is one sentence with the exit code that the command line ends with.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

import msgspec
from msgspec import Struct

from app_agent.config import default_socket
from app_agent.core.records import AppRecord
from app_agent.core.spec import AppSpec
from protocol.exit_codes import FAILED, INTERRUPTED, NOT_PERMITTED, REFUSED, UNREACHABLE, USAGE
from protocol.messages import ActKind, Count, QueryKind, Seconds, Sentence

#: Longest line either side accepts: an answer about a thousand apps takes 1 MB, a chunk of a log 90 kB.
LINE_BYTES_MAX = 16 * 2**20

#: The client waits so much longer than the daemon, whose answer names the cause.
GRACE_S = 5.0


class SubmitRequest(Struct, frozen=True, tag="submit", tag_field="do"):
    """Submit an app; answered by its id."""

    spec: AppSpec


class CancelRequest(Struct, frozen=True, tag="cancel", tag_field="do"):
    """End an app; answered by its id and the state it is in then. `app` may be ``last``, or an app of another owner.

    The arbiter is asked about an app that the daemon has no record of.
    """

    app: str


class ActRequest(Struct, frozen=True, tag="act", tag_field="do"):
    """Have the arbiter act on an app; answered by its id and the word for its state then, such as ``held``.

    `app` may be ``last``, or an app of another owner.
    """

    app: str
    kind: ActKind


class WaitRequest(Struct, frozen=True, tag="wait", tag_field="do"):
    """Answered by the app's record once it is over (``done``) or a task of it runs (``running``, or it is over)."""

    app: str
    until: Literal["done", "running"] = "done"
    timeout_s: Seconds | None = None


class QueryRequest(Struct, frozen=True, tag="query", tag_field="do"):
    """Ask the arbiter; answered by its document. The target of ``log`` may be an app, a job or a task.

    Of a list at most `limit` entries are told (0: as many as a message carries), from entry `offset` on. The arbiter
    may take `patience_s` seconds to answer, or as long as the daemon is configured to wait.
    """

    kind: QueryKind
    target: Sentence = ""
    offset: Count = 0
    limit: Count = 0
    patience_s: Seconds | None = None


class ListRequest(Struct, frozen=True, tag="list", tag_field="do"):
    """Answered by the records of the owner's apps, in the order of submission."""


class PingRequest(Struct, frozen=True, tag="ping", tag_field="do"):
    """Answered by the owner, and whether the broker is reached and the daemon's inbox there can be read."""


Request = SubmitRequest | CancelRequest | ActRequest | WaitRequest | QueryRequest | ListRequest | PingRequest

_decoder: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)


class ControlError(Exception):
    """A request that failed: one sentence, and the exit code of the command that made it."""

    def __init__(self, sentence: str, *, code: int) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.code = code


def decode_request(line: bytes) -> Request:
    """Return the request in `line`.

    Raises
    ------
    ControlError
        With code 2, naming the field that is wrong.
    """
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ControlError(f"the request cannot be used: {error}", code=USAGE) from error


def encode_line(document: object) -> bytes:
    """Return one JSON line."""
    return msgspec.json.encode(document) + b"\n"


class Control:
    """A client of the control socket, for one thread. Use it as a context manager.

    Parameters
    ----------
    path
        The socket; by default where the daemon puts it (`app_agent.config.default_socket`).
    timeout_s
        For anything but `wait`.

    Raises
    ------
    ControlError
        With code 6 if no daemon listens there, 7 if this user may not talk to it. Every method raises it, too, with the
        daemon's own sentence and code.
    """

    def __init__(self, path: Path | None = None, *, timeout_s: float = 30.0) -> None:
        self.path = path or default_socket()
        self._timeout_s = timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(os.fspath(self.path))
        except PermissionError as error:
            self._socket.close()
            raise ControlError(
                f"{self.path} belongs to another user; use your own daemon", code=NOT_PERMITTED
            ) from error
        except OSError as error:
            self._socket.close()
            sentence = f"no daemon answers at {self.path}; start one with `gpu-arbiter up`, or set GPU_ARBITER_URL"
            raise ControlError(sentence, code=UNREACHABLE) from error
        self._file = self._socket.makefile("rwb")

    def submit(self, spec: AppSpec) -> str:
        """Submit an app and return its id."""
        return str(self._ask(SubmitRequest(spec))["app"])

    def cancel(self, app: str) -> tuple[str, str]:
        """End an app; return its id and its state, which is another than ``cancelled`` if it was over already.

        Of an app that the daemon has no record of the arbiter decides: code 3 if it knows no such app either, code 7
        if this owner may not end it.
        """
        reply = self._ask(CancelRequest(app))
        return str(reply["app"]), str(reply["state"])

    def act(self, kind: ActKind, app: str) -> tuple[str, str]:
        """Have the arbiter act on an app; return its id and the word for its state then.

        The codes are those of `cancel`, and 1 if the app is over.
        """
        reply = self._ask(ActRequest(app, kind))
        return str(reply["app"]), str(reply["state"])

    def wait(
        self, app: str, *, until: Literal["done", "running"] = "done", timeout_s: float | None = None
    ) -> AppRecord:
        """Return the app's record once it is over, or runs; code 5 if `timeout_s` passes first."""
        client_s = None if timeout_s is None else timeout_s + GRACE_S
        reply = self._ask(WaitRequest(app, until, timeout_s), timeout_s=client_s)
        return msgspec.convert(reply["record"], AppRecord)

    def query(
        self, kind: QueryKind, target: str = "", offset: int = 0, *, limit: int = 0, patience_s: float | None = None
    ) -> dict[str, Any]:
        """Return the arbiter's document; for ``log`` one chunk, whose ``data`` is base64, for a list one page of it."""
        request = QueryRequest(kind, target, offset, limit, patience_s)
        return cast("dict[str, Any]", self._ask(request)["document"])

    def apps(self) -> list[AppRecord]:
        """Return the records of the owner's apps, oldest first."""
        return msgspec.convert(self._ask(ListRequest())["apps"], list[AppRecord])

    def ping(self) -> dict[str, Any]:
        """Return ``{"owner", "tenant", "connected", "reached", "bus"}``."""
        return dict(self._ask(PingRequest()))

    def _ask(self, request: Request, *, timeout_s: float | None = -1.0) -> Mapping[str, Any]:
        self._socket.settimeout(self._timeout_s if timeout_s == -1.0 else timeout_s)
        try:
            self._file.write(encode_line(request))
            self._file.flush()
            line = self._file.readline(LINE_BYTES_MAX)
        except TimeoutError as error:
            raise ControlError(
                f"the daemon at {self.path} does not answer; look at its log", code=UNREACHABLE
            ) from error
        except OSError as error:
            raise ControlError(f"the daemon at {self.path} went away: {error}", code=UNREACHABLE) from error
        if not line.endswith(b"\n"):
            raise ControlError(f"the daemon at {self.path} went away; its log says why", code=UNREACHABLE)
        reply: Mapping[str, Any] = json.loads(line)
        if "error" in reply:
            raise ControlError(str(reply["error"]), code=int(reply.get("code", FAILED)))
        return reply

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):  # a broken pipe while flushing has been reported already
            self._file.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def exit_code(record: AppRecord) -> int:
    """Return the exit status of `run` and `wait`: the app's own, 4 if it was refused, 130 if it was cancelled."""
    if record.refused:
        return REFUSED
    if record.state == "cancelled":
        return INTERRUPTED
    return record.exit_code or (FAILED if record.state == "failed" else 0)
