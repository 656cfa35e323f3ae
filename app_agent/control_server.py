"""The control socket's daemon side: each request meets the core, and waits for the effect that carries its number."""

from __future__ import annotations

import asyncio
import secrets
import socket
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count, takewhile
from os import fspath, umask
from pathlib import Path
from typing import Annotated, assert_never

import msgspec
import structlog
from msgspec import Meta, Struct

from app_agent.config import AppConfig
from app_agent.control import (
    ActRequest,
    CancelRequest,
    ChangesRequest,
    ControlError,
    DryRunRequest,
    ListRequest,
    NodeRequest,
    PingRequest,
    QueryRequest,
    Request,
    SubmitRequest,
    WaitRequest,
    as_named,
    decode_request,
    encode_line,
)
from app_agent.core.host import (
    Accepted,
    AppHost,
    Ask,
    Cancel,
    Changed,
    Declined,
    Intervene,
    OwnEffect,
    OwnEvent,
    Submit,
)
from app_agent.core.records import AppRecord
from app_agent.core.spec import AppSpec
from protocol.bus import Bus
from protocol.config import ConfigError
from protocol.core import Send
from protocol.exit_codes import FAILED, NOT_FOUND, TIMED_OUT, UNREACHABLE, USAGE
from protocol.log_ends import without_log_end
from protocol.messages import (
    ARBITER,
    ActKind,
    Answer,
    AnyMessage,
    AppId,
    AppReport,
    Bid,
    Offer,
    Outage,
    Party,
    Probe,
    ProbeReply,
    Query,
)
from protocol.release import release
from protocol.shell import Shell

#: Longest request: a search of a thousand trials of a hundred words each.
REQUEST_BYTES_MAX = 2**20
#: A waiting client that hung up is noticed after this long.
HANGUP_S = 1.0
#: The longest wait for the arbiter's answer, where the client does not say how long it waits.
ANSWER_S = 10.0
#: The same for a dry run, which waits for the end of a round and takes as long as a few; and so many questions of the
#: arbiter it replies to: a probe and an offer.
DRY_RUN_S, QUESTIONS_MAX = 9.0, 2
#: A question without an answer is asked again after this long.
ASK_AGAIN_S = 1.0
#: So many apps that were forgotten may be in the list of changes.
CHANGES_KEPT = 1_000
#: A broker that has come, or whose queues were deleted, is noticed after this long.
LOOK_AGAIN_S = 0.25
#: An owner without apps introduces itself to an arbiter that is away at least this often.
INTRODUCE_S_MAX = 10.0
#: The state of the site while no arbiter leads.
UNDECIDED = "while no arbiter decides, training goes on, and no app is granted a GPU or loses one"
#: Longest path of a Unix socket (sun_path of Linux, without the closing zero).
SOCKET_PATH_BYTES_MAX = 107

_log = structlog.get_logger("app-agent")


# --- the socket -----------------------------------------------------------------------------------------------------


def listen(path: Path) -> socket.socket:
    """Return the control socket, which only this user can use.

    Raises
    ------
    ConfigError
        If another daemon listens there, or it cannot be made.
    """
    if len(fspath(path).encode()) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(f"socket {path} is longer than {SOCKET_PATH_BYTES_MAX} bytes; choose a shorter path")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _clear_away(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = umask(0o177)
        try:
            listener.bind(fspath(path))
        finally:
            umask(before)
    except OSError as error:
        raise ConfigError(f"socket {path} cannot be made: {error.strerror}; choose another path") from error
    return listener


def _clear_away(path: Path) -> None:
    """Remove the socket that a daemon left behind which is no more."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"socket {path} exists and is no socket; choose another path or move it away")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ConfigError(f"another daemon listens at {path}; stop it, or give this one a socket of its own")


class Refusal(Struct, frozen=True):
    """The answer to a user who may ask nothing here: a sentence and an exit code."""

    sentence: str
    code: int


async def serve(
    listener: socket.socket,
    server_of: Callable[[socket.socket], ControlServer | Refusal],
    group: asyncio.TaskGroup,
) -> asyncio.Server:
    """Serve each connection in a task of `group`, which also ends it, by the server of the user who has connected."""

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        conversation = _converse(reader, writer, server_of(writer.get_extra_info("socket")))
        try:
            task = group.create_task(conversation)
        except RuntimeError:  # the group is ending: hang up, or the client would wait for an answer
            conversation.close()
            writer.close()
            return
        # Not in the task itself, which may be cancelled before it begins.
        task.add_done_callback(lambda _: writer.close())

    return await asyncio.start_unix_server(accept, sock=listener, limit=REQUEST_BYTES_MAX)


async def _converse(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: ControlServer | Refusal
) -> None:
    """Answer one client's requests until it hangs up."""
    with suppress(ConnectionError):  # the client went away
        while True:
            try:
                line = await reader.readline()
            except ValueError:
                writer.write(_refusal(f"a request is longer than {REQUEST_BYTES_MAX} bytes", USAGE))
                await writer.drain()
                return
            if not line:
                return
            writer.write(await _reply(line, server, reader))
            await writer.drain()


async def _reply(line: bytes, server: ControlServer | Refusal, reader: asyncio.StreamReader) -> bytes:
    if isinstance(server, Refusal):
        return _refusal(server.sentence, server.code)
    try:
        return encode_line({"ok": True, **await server.serve(decode_request(line), hung_up=reader.at_eof)})
    except ControlError as error:
        return _refusal(error.sentence, error.code)


def _refusal(sentence: str, code: int) -> bytes:
    return encode_line({"error": sentence, "code": code})


# --- requests -------------------------------------------------------------------------------------------------------


class ControlServer:
    """Where requests of the control socket meet the core: each waits for the effect that carries its number.

    `signs` tells that this daemon is a gateway, whose launches are signed.
    """

    def __init__(self, host: AppHost, config: AppConfig, *, signs: bool = False) -> None:
        self._host, self._signs = host, signs
        self._config = config
        self._numbers = (f"q{prefix}-{number}" for prefix in [secrets.token_hex(4)] for number in count())
        self._replies: dict[str, asyncio.Future[Accepted | Declined | Answer]] = {}
        self._news: set[asyncio.Event] = set()
        self._boot = secrets.token_hex(4)
        self._changed: dict[AppId, int] = {}  #: the number of each app's newest change, rising
        self._changes = 0
        self._outage: tuple[str, float] | None = None  #: what an arbiter that cannot decide said, and since when

    def attach(self, shell: Shell[OwnEvent, OwnEffect], bus: Bus) -> None:
        """Learn where events go."""
        self._shell = shell
        self._bus = bus

    async def perform(self, effect: OwnEffect) -> None:
        """Wake the requests that wait for `effect`."""
        match effect:
            case Accepted(request) | Declined(request):
                self._resolve(request, effect)
            case Changed(record):
                if record.over:
                    _log.info("app.ended", app=record.app, state=record.state, reason=without_log_end(record.reason))
                self._note_change(record.app)
                for news in self._news:
                    news.set()
            case _ as never:
                assert_never(never)

    def take_answer(self, sender: Party, message: AnyMessage) -> Sequence[Send] | None:
        """Take the arbiter's answers past the core: they change nothing, and need not be remembered."""
        if isinstance(message, Outage):
            self._outage = message.why, self._shell.now() - message.lasted_s
            return ()
        self._outage = None  # an arbiter leads
        if not isinstance(message, Answer):
            return None
        self._resolve(message.query_id, message)
        return ()

    def _resolve(self, request: str, reply: Accepted | Declined | Answer) -> None:
        future = self._replies.get(request)
        if future is not None and not future.done():
            future.set_result(reply)

    async def serve(self, request: Request, *, hung_up: Callable[[], bool]) -> dict[str, object]:
        """Return the answer to one request.

        Raises
        ------
        ControlError
            With a sentence and an exit code.
        """
        match request:
            case SubmitRequest(spec):
                token = secrets.token_hex(4)
                return {"app": await self._change(lambda number: Submit(number, spec, token))}
            case DryRunRequest(spec):
                return {"document": await self._dry_run(spec)}
            case CancelRequest(app):
                return await self._cancel(app)
            case ActRequest(app, kind):
                return await self._intervene(kind, self._known(app) if app == "last" else _app_id(app))
            case WaitRequest(app, until, timeout_s):
                record = await self._wait(self._known(app), until, timeout_s, hung_up)
                return {"record": record}
            case QueryRequest():
                return {"document": await self._query(request)}
            case NodeRequest(kind, node, reason, force):
                number = next(self._numbers)
                act = Intervene(number, kind, node, reason, force)
                return {"document": await self._persist(number, act, ANSWER_S)}
            case ListRequest():
                return {"apps": self._host.records()}
            case ChangesRequest(mark, app, timeout_s):
                return await self._tell_changes(mark, self._known(app) if app else None, timeout_s, hung_up)
            case PingRequest():
                return {
                    "owner": self._config.owner,
                    "tenant": self._host.state.tenant,
                    "connected": self._shell.connected,
                    "reached": self._shell.reached,
                    "bus": self._bus.url,
                    "outage": self._told_outage(),
                    "release": release(),
                    "signs": self._signs,
                }
            case _ as never:
                assert_never(never)

    async def _change(self, event: Callable[[str], Submit | Cancel]) -> AppId:
        """Let the core decide; return the app it did it for."""
        number = next(self._numbers)
        reply = await self._expect(number, event(number))
        if isinstance(reply, Declined):
            raise ControlError(reply.reason, code=NOT_FOUND if reply.missing else USAGE)
        assert isinstance(reply, Accepted)
        return reply.app

    async def _expect(self, number: str, event: OwnEvent | Send) -> Accepted | Declined | Answer:
        """Post `event`, or send it past the core, and return the reply that carries its number."""
        future: asyncio.Future[Accepted | Declined | Answer] = asyncio.get_running_loop().create_future()
        self._replies[number] = future
        try:
            if isinstance(event, Send):
                self._shell.say([event])
            else:
                self._shell.post(event)
            return await future
        finally:
            del self._replies[number]

    async def _cancel(self, app: str) -> dict[str, object]:
        """End one of the owner's apps; of one that is not among them the arbiter decides."""
        whole, dot, job = as_named(app).partition(".")
        if whole != "last" and whole not in self._host.state.records:
            return await self._intervene("cancel", _app_id(app))
        known = self._known(whole)
        ended = await self._change(lambda number: Cancel(number, known, f"{known}.{job}" if dot else ""))
        if dot:
            return {"app": f"{ended}.{job}", "state": self._host.state_of_job(known, f"{known}.{job}")}
        return {"app": ended, "state": self._host.state.records[ended].state}

    async def _intervene(self, kind: ActKind, app: AppId) -> dict[str, object]:
        """Have the arbiter act on an app; return the app and its state."""
        number = next(self._numbers)
        try:
            document = await self._persist(number, Intervene(number, kind, app), ANSWER_S)
        except ControlError as error:
            if error.code != UNREACHABLE or app in self._host.state.records:
                raise
            raise ControlError(f"your app agent has no app {app}, and {error.sentence}", code=UNREACHABLE) from error
        try:
            done = msgspec.json.decode(document, type=_Done)
        except msgspec.DecodeError as error:
            raise ControlError(f"the arbiter's answer about {app} cannot be read: {error}", code=FAILED) from error
        return {"app": done.app, "state": done.state}

    async def _query(self, request: QueryRequest) -> msgspec.Raw:
        """Ask the arbiter; return its document as it is."""
        number = next(self._numbers)
        target = self._target(request.kind, request.target)
        patience_s = ANSWER_S if request.patience_s is None else request.patience_s
        ask = Ask(number, request.kind, target, request.offset, request.limit, request.events, request.edges)
        return await self._persist(number, ask, patience_s)

    async def _dry_run(self, spec: AppSpec) -> msgspec.Raw:
        """Ask the arbiter what would become of an app, replying to what it would ask the app; return its document.

        The app's agent is made for this and is thrown away; the core and its journal never hear of it.
        """
        now = self._shell.now()
        agent = self._host.draft(spec, secrets.token_hex(4), now)
        if isinstance(agent, str):
            raise ControlError(agent, code=USAGE)
        (report,) = [send.message for send in agent.restate(now)]
        assert isinstance(report, AppReport)
        said: list[ProbeReply | Bid] = []
        for _ in range(1 + QUESTIONS_MAX):
            number = next(self._numbers)
            query = Query(number, "dry-run", site=self._host.site, report=report, said=tuple(said))
            document = await self._persist(number, Send(ARBITER, query), DRY_RUN_S)
            question = _question_in(document)
            if question is None:
                return document
            replies = [send.message for send in agent.hear(question, now)]
            said += [reply for reply in replies if isinstance(reply, ProbeReply | Bid)]
        raise ControlError("the arbiter asks the app more than a round does; it may be of another version", code=FAILED)

    async def _persist(self, number: str, ask: Ask | Intervene | Send, patience_s: float) -> msgspec.Raw:
        """Ask the arbiter until its answer comes, and return its document; a question that finds no broker is lost.

        Raises
        ------
        ControlError
            With the arbiter's own sentence and code; or code 6 if no answer has come for `patience_s` seconds.
        """
        try:
            async with asyncio.timeout(patience_s):
                while True:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(min(ASK_AGAIN_S, patience_s / 3)):
                            reply = await self._expect(number, ask)
                            break
        except TimeoutError:
            raise ControlError(self._silence(patience_s), code=UNREACHABLE) from None
        assert isinstance(reply, Answer)
        if reply.error:
            raise ControlError(reply.error, code=_code_of(reply))
        return msgspec.Raw(reply.document)

    def _silence(self, waited_s: float) -> str:
        """Say why no answer has come."""
        if not self._shell.reached:
            return f"the broker at {self._bus.url} cannot be reached; {UNDECIDED}"
        silence = f"the arbiter has not answered within {waited_s:g} s"
        if self._outage is None:
            return f"{silence}, though the broker at {self._bus.url} was reached; {UNDECIDED}"
        return f"{silence}: {self._told_outage()}; {UNDECIDED}"

    def _told_outage(self) -> str:
        """Return why an arbiter cannot decide, and since when; empty if none has said so since one led."""
        if self._outage is None:
            return ""
        why, since = self._outage
        return f"{why}, since {datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M:%S} UTC"

    async def introduce(self) -> None:
        """Ask the arbiter something whenever this daemon has no inbox, until cancelled.

        An owner without apps says nothing, and the arbiter makes an inbox for an owner that has said something.
        """
        pause_s = ASK_AGAIN_S
        while True:
            without = self._shell.reached and not self._shell.connected
            if without:
                self._shell.post(Ask(next(self._numbers), "capacity"))
            await asyncio.sleep(pause_s if without else LOOK_AGAIN_S)
            pause_s = min(2 * pause_s, INTRODUCE_S_MAX) if without else ASK_AGAIN_S

    async def _wait(self, app: AppId, until: str, timeout_s: float | None, hung_up: Callable[[], bool]) -> AppRecord:
        """Return the app's record once it is as wanted."""
        try:
            await self._reach(lambda: _reached(self._host.state.records[app], until), timeout_s, hung_up)
        except TimeoutError:
            record = self._host.state.records[app]
            sentence = f"{app} is still {record.state} after {timeout_s:g} s; `gpu-arbiter explain {app}` says why"
            raise ControlError(sentence, code=TIMED_OUT) from None
        return self._host.state.records[app]

    async def _reach(self, reached: Callable[[], bool], timeout_s: float | None, hung_up: Callable[[], bool]) -> None:
        """Return once it is so, looking again at each change of any record; raises TimeoutError."""
        news = asyncio.Event()
        self._news.add(news)
        try:
            async with asyncio.timeout(timeout_s):
                while not reached():
                    news.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(HANGUP_S):
                            await news.wait()
                    if hung_up():
                        raise ControlError("the client hung up", code=UNREACHABLE)
        finally:
            self._news.discard(news)

    def _note_change(self, app: AppId) -> None:
        """Number the newest change; apps that the host has forgotten go, too, when they are many."""
        self._changes += 1
        self._changed.pop(app, None)
        self._changed[app] = self._changes
        records = self._host.state.records
        if len(self._changed) > 2 * len(records) + CHANGES_KEPT:
            self._changed = {known: number for known, number in self._changed.items() if known in records}

    async def _tell_changes(
        self, mark: str, app: AppId | None, timeout_s: float, hung_up: Callable[[], bool]
    ) -> dict[str, object]:
        """Return the records that changed after `mark`, once there are any or time is over."""
        boot, _, number = mark.rpartition("-")
        if boot != self._boot or not number.isdecimal():
            apps = list(self._host.state.records) if app is None else [app]
            return self._as_changes(apps) | {"whole": app is None}
        with suppress(TimeoutError):
            await self._reach(lambda: bool(self._changed_after(int(number), app)), timeout_s, hung_up)
        return self._as_changes(self._changed_after(int(number), app))

    def _as_changes(self, apps: Sequence[AppId]) -> dict[str, object]:
        records = self._host.state.records
        return {"mark": f"{self._boot}-{self._changes}", "apps": [records[app] for app in apps if app in records]}

    def _changed_after(self, number: int, app: AppId | None) -> list[AppId]:
        """Return the apps, or the one of interest, with a change after that number, oldest change first."""
        if app is not None:
            return [app] if self._changed.get(app, 0) > number else []
        newer = takewhile(lambda known: self._changed[known] > number, reversed(self._changed))
        return list(newer)[::-1]

    def _known(self, app: str) -> AppId:
        """Return the id of one of the owner's apps; ``last`` is the newest.

        Raises
        ------
        ControlError
            With code 3 if there is no such app.
        """
        records = self._host.state.records
        if app == "last" and records:
            return next(reversed(records))
        if app not in records:
            which = "you have submitted no app yet" if app == "last" else f"there is no app {app}"
            raise ControlError(f"{which}; `gpu-arbiter ps` lists yours", code=NOT_FOUND)
        return AppId(app)

    def _target(self, kind: str, target: str) -> str:
        """Return the target of a question to the arbiter: ``last`` resolved; if it is about a task, an app's newest."""
        whole, dot, part = as_named(target).partition(".")
        target = f"{self._known(whole) if whole == 'last' else whole}{dot}{part}"
        if kind not in ("log", "terminal"):
            return target
        app = target.split(".", 1)[0]
        record = self._host.state.records.get(AppId(app))
        if record is None or "-a" in target.partition(".")[2]:
            return target  # a task, or another owner's: the arbiter knows
        tasks = [task for task in record.tasks if target in (app, task.rpartition("-a")[0])]
        if not tasks and (record.ended or self._has_begun(AppId(app), target)):
            return target  # of an array's jobs that are not there now the arbiter knows
        if not tasks:
            sentence = f"{target} has not started yet; `gpu-arbiter explain {app}` says why"
            raise ControlError(sentence, code=NOT_FOUND)
        return tasks[0]

    def _has_begun(self, app: AppId, target: str) -> bool:
        """Whether the job called `target`, or any job of the app that is called so, has had a task."""
        known = self._host.state.apps.get(app)
        return known is not None and any(job.seen >= 0 and target in (app, job.id) for job in known.jobs)


class _Asked(Struct):
    """Of a ``dry-run/v1`` document: what the arbiter would ask the app's agent in a round."""

    question: Probe | Offer | None = None


def _question_in(document: msgspec.Raw) -> Probe | Offer | None:
    try:
        return msgspec.json.decode(document, type=_Asked).question
    except msgspec.DecodeError as error:
        raise ControlError(f"the arbiter's answer to a dry run cannot be read: {error}", code=FAILED) from error


class _Done(Struct):
    """The arbiter's word that it has acted: an app, and the state it is in now."""

    app: AppId
    state: str


class _Error(Struct):
    """Of an ``error/v1`` document: the exit code of the command that asked."""

    code: Annotated[int, Meta(ge=1, le=125)]


def _app_id(app: str) -> AppId:
    """Return `app` if it can be an app's id; the arbiter need not be asked about any other.

    Raises
    ------
    ControlError
        With code 3.
    """
    try:
        return msgspec.convert(app, AppId)
    except msgspec.ValidationError:
        raise ControlError(f"there is no app {app}", code=NOT_FOUND) from None


def _code_of(refused: Answer) -> int:
    """Return the code that the arbiter gives with an error: in a document of its own, or else nothing was found."""
    try:
        return msgspec.json.decode(refused.document, type=_Error).code
    except msgspec.DecodeError:
        return NOT_FOUND


def _reached(record: AppRecord, until: str) -> bool:
    return record.over or (until == "running" and record.state == "running")
