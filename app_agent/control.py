"""The control socket between an owner's tools and an app-agent daemon: one JSON line each way per request.

`submit`, `cancel` and `wait` concern the owner's apps and are answered by the daemon itself, `query` is answered by the
arbiter, and so are `act`, and `cancel` of an app that the daemon has no record of. A connection carries any number of
requests, one after the other. Every error is one sentence with the exit code that the command line ends with.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

import msgspec
from msgspec import Struct

from app_agent.config import default_socket
from app_agent.core.records import AppRecord
from app_agent.core.spec import AppSpec
from protocol.exit_codes import (
    CHANGED,
    FAILED,
    INTERRUPTED,
    NOT_FOUND,
    NOT_PERMITTED,
    PREEMPTED,
    REFUSED,
    TIMED_OUT,
    UNREACHABLE,
    USAGE,
)
from protocol.messages import AppActKind, Count, Edges, EventFilter, NodeActKind, QueryKind, Seconds, Sentence

#: Longest line either side accepts: an answer about a thousand apps takes 1 MB, a chunk of a log 90 kB.
LINE_BYTES_MAX = 16 * 2**20

#: The client waits so much longer than the daemon, whose answer names the cause.
GRACE_S = 5.0
#: A client waits so long for an answer to a request that has no time limit of its own.
TIMEOUT_S = 30.0
ALL_EVENTS = EventFilter()


class SubmitRequest(Struct, frozen=True, tag="submit", tag_field="do"):
    """Submit an app; answered by its id."""

    spec: AppSpec


class DryRunRequest(Struct, frozen=True, tag="dry-run", tag_field="do"):
    """Ask what would become of an app if it was submitted now; answered by the arbiter's document."""

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
    kind: AppActKind


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
    events: EventFilter = EventFilter()
    edges: Edges = ()


class NodeRequest(Struct, frozen=True, tag="node", tag_field="do"):
    """Drain a node, or let it be used again; answered by the arbiter's document, for administrators only.

    `force` ends also the tasks that cannot save.
    """

    kind: NodeActKind
    node: Sentence
    reason: Sentence = ""
    force: bool = False


class ListRequest(Struct, frozen=True, tag="list", tag_field="do"):
    """Answered by the records of the owner's apps, in the order of submission."""


class ChangesRequest(Struct, frozen=True, tag="changes", tag_field="do"):
    """Answered by a mark, and by the records that changed after the one given, of all apps or of `app`.

    The answer waits until there are any, at most `timeout_s` seconds. Without a mark, and with one that another daemon
    gave, all records have changed; of changes that follow closely upon each other the last is told.
    """

    mark: Sentence = ""
    app: Sentence = ""
    timeout_s: Seconds = 0.0


class PingRequest(Struct, frozen=True, tag="ping", tag_field="do"):
    """Answered by the owner, whether the broker is reached and the daemon's inbox there can be read, and an outage.

    The outage is why an arbiter cannot decide, as the last word that was heard of one; else it is empty.
    """


Request = (
    SubmitRequest
    | DryRunRequest
    | CancelRequest
    | ActRequest
    | WaitRequest
    | QueryRequest
    | NodeRequest
    | ListRequest
    | ChangesRequest
    | PingRequest
)

_decoder: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)


class Changes(Struct, frozen=True):
    """The records that have changed, oldest change first, and the mark after them; `whole`: those of all apps."""

    mark: str
    apps: list[AppRecord]
    whole: bool = False


# --- errors ---------------------------------------------------------------------------------------------------------


class ControlError(Exception):
    """A request that failed: one sentence, and the exit code of the command that made it.

    Clients raise the class of the code's meaning.
    """

    def __init__(self, sentence: str, *, code: int) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.code = code


class FailedError(ControlError):
    """It was tried and failed, or an app failed."""


class UsageError(ControlError):
    """The request is wrong; the sentence names the field and the mend."""


class NotFoundError(ControlError):
    """There is no such app, task or node."""


class RefusedError(ControlError):
    """The policy or the site refuses it, or it can never fit."""


class WaitTimeoutError(ControlError, TimeoutError):
    """Time was over before it came to pass."""


class UnreachableError(ControlError, ConnectionError):
    """No app agent, arbiter or broker answers."""


class NotPermittedError(ControlError):
    """It is for another user, or for an administrator."""


class OutdatedError(ControlError):
    """The state that the request was based on has changed underneath."""


class PreemptedError(ControlError):
    """The app ended preempted and will not be started again."""


class CancelledError(ControlError):
    """The app was cancelled."""


#: The class of each exit code; any other code is that of a program that failed.
ERRORS: Mapping[int, type[ControlError]] = {
    FAILED: FailedError,
    USAGE: UsageError,
    NOT_FOUND: NotFoundError,
    REFUSED: RefusedError,
    TIMED_OUT: WaitTimeoutError,
    UNREACHABLE: UnreachableError,
    NOT_PERMITTED: NotPermittedError,
    CHANGED: OutdatedError,
    PREEMPTED: PreemptedError,
    INTERRUPTED: CancelledError,
}


def error_of(sentence: str, code: int) -> ControlError:
    """Return the error of the class that `code` means."""
    return ERRORS.get(code, FailedError)(sentence, code=code)


# --- lines ----------------------------------------------------------------------------------------------------------


def as_named(text: str) -> str:
    """Return an id as apps and jobs are named: those who know Slurm, and submitit, write ``ID_3`` for ``ID.3``."""
    return text.replace("_", ".", 1) if "." not in text else text


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


def decode_reply(line: bytes, path: Path) -> Mapping[str, Any]:
    """Return the reply in `line`, which the daemon at `path` sent.

    Raises
    ------
    ControlError
        That of the daemon; or with code 6 for a line that it did not end.
    """
    if not line.endswith(b"\n"):
        raise error_of(f"the daemon at {path} went away; its log says why", UNREACHABLE)
    reply: Mapping[str, Any] = json.loads(line)
    if "error" in reply:
        raise error_of(str(reply["error"]), int(reply.get("code", FAILED)))
    return reply


# --- clients --------------------------------------------------------------------------------------------------------


class Control:
    """A client of the control socket, for one thread. Use it as a context manager.

    Parameters
    ----------
    path
        The socket; by default where the daemon puts it (`app_agent.config.default_socket`).
    timeout_s
        For anything but `wait` and `changes`.

    Raises
    ------
    ControlError
        With code 6 if no daemon listens there, 7 if this user may not talk to it. Every method raises it, too, with the
        daemon's own sentence and code.
    """

    def __init__(self, path: Path | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self.path = path or default_socket()
        self._timeout_s = timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(os.fspath(self.path))
        except OSError as error:
            self._socket.close()
            raise _no_connection(self.path, error) from error
        self._file = self._socket.makefile("rwb")

    def submit(self, spec: AppSpec) -> str:
        """Submit an app and return its id."""
        return str(self._ask(SubmitRequest(spec))["app"])

    def dry_run(self, spec: AppSpec) -> dict[str, Any]:
        """Return the arbiter's document on what would become of an app if it was submitted now; nothing changes.

        The codes are those of `submit`, and 4 if the arbiter would refuse the app.
        """
        return cast("dict[str, Any]", self._ask(DryRunRequest(spec))["document"])

    def cancel(self, app: str) -> str:
        """End an app; return its state, which is another than ``cancelled`` if it was over already.

        Of an app that the daemon has no record of the arbiter decides: code 3 if it knows no such app either, code 7
        if this owner may not end it.
        """
        return str(self._ask(CancelRequest(app))["state"])

    def act(self, kind: AppActKind, app: str) -> str:
        """Have the arbiter act on an app; return the word for its state after that, such as ``held``.

        It is done also where work is lost by it: `at_risk_s` of the app's tasks says how much (`query("apps")`).
        The codes are those of `cancel`, and 1 if the app is over.
        """
        return str(self._ask(ActRequest(app, kind))["state"])

    def wait(
        self, app: str, *, until: Literal["done", "running"] = "done", timeout_s: float | None = None
    ) -> AppRecord:
        """Return the app's record once it is over, or runs; code 5 if `timeout_s` passes first."""
        reply = self._ask(WaitRequest(app, until, timeout_s), timeout_s=_patience(timeout_s))
        return msgspec.convert(reply["record"], AppRecord)

    def query(
        self,
        kind: QueryKind,
        target: str = "",
        offset: int = 0,
        *,
        limit: int = 0,
        patience_s: float | None = None,
        events: EventFilter = ALL_EVENTS,
        edges: Sequence[float] = (),
    ) -> dict[str, Any]:
        """Return the arbiter's document; for ``log`` one chunk, whose ``data`` is base64, for a list one page of it.

        `events` says which events are meant, where these are asked for, and `edges` the periods of a ``report``.
        """
        request = QueryRequest(kind, target, offset, limit, patience_s, events, tuple(edges))
        return cast("dict[str, Any]", self._ask(request)["document"])

    def drain(self, node: str, *, reason: str = "", force: bool = False) -> dict[str, Any]:
        """Have a node emptied; return its ``node``, its ``state`` and the ``tasks`` it still holds, with their fates.

        Code 3 if there is no such node, 7 if this owner is no administrator of the site.
        """
        return cast("dict[str, Any]", self._ask(NodeRequest("drain", node, reason, force))["document"])

    def undrain(self, node: str) -> dict[str, Any]:
        """Let a node be used again; the answer and the codes are those of `drain`."""
        return cast("dict[str, Any]", self._ask(NodeRequest("undrain", node))["document"])

    def apps(self) -> list[AppRecord]:
        """Return the records of the owner's apps, oldest first."""
        return msgspec.convert(self._ask(ListRequest())["apps"], list[AppRecord])

    def changes(self, mark: str = "", *, app: str = "", timeout_s: float = 0.0) -> Changes:
        """Return the records that changed after `mark`; of all apps or of `app`, none if `timeout_s` passes first."""
        request = ChangesRequest(mark, app, timeout_s)
        return msgspec.convert(self._ask(request, timeout_s=_patience(timeout_s)), Changes)

    def ping(self) -> dict[str, Any]:
        """Return ``{"owner", "tenant", "connected", "reached", "bus", "outage", "release", "signs"}``."""
        return dict(self._ask(PingRequest()))

    def _ask(self, request: Request, *, timeout_s: float | None = -1.0) -> Mapping[str, Any]:
        self._socket.settimeout(self._timeout_s if timeout_s == -1.0 else timeout_s)
        try:
            self._file.write(encode_line(request))
            self._file.flush()
            line = self._file.readline(LINE_BYTES_MAX)
        except OSError as error:
            raise _no_answer(self.path, error) from error
        return decode_reply(line, self.path)

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


class AsyncControl:
    """The same for an event loop; each request has a connection of its own, and any number may be under way."""

    def __init__(self, path: Path, *, timeout_s: float = TIMEOUT_S) -> None:
        self.path = path
        self._timeout_s = timeout_s

    async def submit(self, spec: AppSpec) -> str:
        """Submit an app and return its id."""
        return str((await self._ask(SubmitRequest(spec)))["app"])

    async def cancel(self, app: str) -> str:
        """End an app; return its state, as `Control.cancel` does."""
        return str((await self._ask(CancelRequest(app)))["state"])

    async def wait(
        self, app: str, *, until: Literal["done", "running"] = "done", timeout_s: float | None = None
    ) -> AppRecord:
        """Return the app's record once it is over, or runs; code 5 if `timeout_s` passes first."""
        reply = await self._ask(WaitRequest(app, until, timeout_s), timeout_s=_patience(timeout_s))
        return msgspec.convert(reply["record"], AppRecord)

    async def query(
        self,
        kind: QueryKind,
        target: str = "",
        offset: int = 0,
        *,
        limit: int = 0,
        patience_s: float | None = None,
        events: EventFilter = ALL_EVENTS,
        edges: Sequence[float] = (),
    ) -> dict[str, Any]:
        """Return the arbiter's document, as `Control.query` does."""
        request = QueryRequest(kind, target, offset, limit, patience_s, events, tuple(edges))
        return cast("dict[str, Any]", (await self._ask(request))["document"])

    async def apps(self) -> list[AppRecord]:
        """Return the records of the owner's apps, oldest first."""
        return msgspec.convert((await self._ask(ListRequest()))["apps"], list[AppRecord])

    async def changes(self, mark: str = "", *, app: str = "", timeout_s: float = 0.0) -> Changes:
        """Return the records that changed after `mark`, as `Control.changes` does."""
        reply = await self._ask(ChangesRequest(mark, app, timeout_s), timeout_s=_patience(timeout_s))
        return msgspec.convert(reply, Changes)

    async def ping(self) -> dict[str, Any]:
        """Return ``{"owner", "tenant", "connected", "reached", "bus", "outage", "release", "signs"}``."""
        return dict(await self._ask(PingRequest()))

    async def _ask(self, request: Request, *, timeout_s: float | None = -1.0) -> Mapping[str, Any]:
        import asyncio  # the command line, which does without, starts in half the time

        try:
            reader, writer = await asyncio.open_unix_connection(self.path, limit=LINE_BYTES_MAX)
        except OSError as error:
            raise _no_connection(self.path, error) from error
        try:
            async with asyncio.timeout(self._timeout_s if timeout_s == -1.0 else timeout_s):
                writer.write(encode_line(request))
                await writer.drain()
                line = await reader.readline()
        except (OSError, ValueError) as error:
            raise _no_answer(self.path, error) from error
        finally:
            writer.close()
            with suppress(OSError):  # has been reported already
                await writer.wait_closed()
        return decode_reply(line, self.path)


def _patience(timeout_s: float | None) -> float | None:
    """Return how long a client waits for an answer that the daemon gives after `timeout_s` at the latest."""
    return None if timeout_s is None else timeout_s + GRACE_S


def _no_connection(path: Path, error: OSError) -> ControlError:
    """Return the error of a socket that cannot be connected to."""
    if isinstance(error, PermissionError):
        return error_of(f"{path} belongs to another user; use your own daemon", NOT_PERMITTED)
    sentence = f"no daemon answers at {path}; start one with `gpu-arbiter up`, or set GPU_ARBITER_URL"
    return error_of(sentence, UNREACHABLE)


def _no_answer(path: Path, error: Exception) -> ControlError:
    """Return the error of a conversation that broke off."""
    if isinstance(error, TimeoutError):
        return error_of(f"the daemon at {path} does not answer; look at its log", UNREACHABLE)
    return error_of(f"the daemon at {path} went away: {error}", UNREACHABLE)


def exit_code(record: AppRecord) -> int:
    """Return the exit status of `run` and `wait`: the app's own, 4 if it was refused, 130 if it was cancelled."""
    if record.refused:
        return REFUSED
    if record.state == "cancelled":
        return INTERRUPTED
    return record.exit_code or (FAILED if record.state == "failed" else 0)
