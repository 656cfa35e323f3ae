"""Apps from Python: submit a command or a function, wait for it, read its output, cancel it; docs/python.md.

`Client` is for threads, of which any number may share one; `AsyncClient` has the same names for an event loop. Neither
keeps a connection: both go on when the app agent was started again. A call that fails raises the error
of its exit code's meaning (`app_agent.control.ERRORS`), with one sentence.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, ParamSpec, Self, TypeVar

import msgspec

from app_agent import streams
from app_agent.config import default_socket
from app_agent.control import (
    AsyncControl,
    CancelledError,
    Control,
    ControlError,
    FailedError,
    NotFoundError,
    NotPermittedError,
    OutdatedError,
    PreemptedError,
    RefusedError,
    UnreachableError,
    UsageError,
    WaitTimeoutError,
    error_of,
    exit_code,
)
from app_agent.core.records import AppRecord, RecordState
from app_agent.core.spec import INHERITED, AppSpec, as_held, nested
from app_agent.streams import Conversation, Question, Until
from protocol.config import ConfigError, in_words
from protocol.exit_codes import USAGE

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")
For = Literal["over", "running"]

#: The error of a function whose process died has so many of its last lines.
LINES_TOLD = 20

__all__ = [
    "App",
    "AppRecord",
    "AppSpec",
    "AsyncApp",
    "AsyncClient",
    "AsyncFunctionApp",
    "CancelledError",
    "Client",
    "ControlError",
    "DiedError",
    "FailedError",
    "FunctionApp",
    "NotFoundError",
    "NotPermittedError",
    "OutdatedError",
    "PreemptedError",
    "RefusedError",
    "UnreachableError",
    "UsageError",
    "WaitTimeoutError",
    "connect",
]


class DiedError(FailedError):
    """The process of a function ended without a result or an exception.

    `exit_code` is its own, as a shell would show it; `output` is the end of what it wrote, empty if that is out of
    reach.
    """

    def __init__(self, sentence: str, *, exit_code: int, output: str) -> None:
        super().__init__(f"{sentence}; the end of its output:\n{output}" if output else sentence, code=exit_code or 1)
        self.exit_code = exit_code
        self.output = output


# --- what both clients share ----------------------------------------------------------------------------------------


class _Address:
    """Where the app agent is, and what its client's apps have in common."""

    def __init__(self, path: str | Path | None = None, **fields: Any) -> None:
        try:
            self.path = Path(path) if path is not None else default_socket()
        except ConfigError as error:
            raise error_of(str(error), USAGE) from None
        self.fields = fields

    def with_fields(self, **fields: Any) -> Self:
        """Return a client whose apps have these fields unless `submit` is given others."""
        return type(self)(self.path, **(self.fields | fields))

    def spec(self, command: Sequence[str] | AppSpec | None = None, /, **fields: Any) -> AppSpec:
        """Return the specification of an app; see `Client.submit`."""
        if isinstance(command, AppSpec):
            if fields:
                raise error_of(f"{', '.join(fields)}: an AppSpec has its fields already; change them there", USAGE)
            return command
        return _spec(command, self.fields | fields)

    def _call(
        self, function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Path, AppSpec]:
        """Write the call of a function into a folder; return that, and the app that makes it."""
        from app_agent.training import function_call  # most clients submit no function

        fields = {"max_restarts": 0, "name": function_call.name_of(function)} | self.fields
        plain = _spec(("call",), fields)
        try:
            call = function_call.write(Path(plain.checkpoint_root, "calls"), function, args, kwargs)
        except function_call.CallError as error:
            raise error_of(str(error), USAGE) from None
        return call, _spec((sys.executable, "-P", os.path.abspath(function_call.__file__), str(call)), fields)  # noqa: PTH100


def _spec(command: Sequence[str] | None, given: dict[str, Any]) -> AppSpec:
    """Return the specification made of a command and of fields as `Client.submit` takes them."""
    fields = dict(given)
    if isinstance(command, str):
        raise error_of(f"command is text; give a list of words: {command.split()}", USAGE)
    if command is not None:
        words = tuple(os.fspath(word) if isinstance(word, os.PathLike) else word for word in command)
        fields["trials"] = (words,)
        fields.setdefault("name", default_name([str(word) for word in words]))
    elif "trials" not in fields:
        raise error_of('command is missing; give a list of words, such as ["python", "train.py"]', USAGE)
    gpus = fields.pop("gpus", None)
    if gpus is not None:
        sizes = tuple(gpus) if isinstance(gpus, Sequence) else ()
        fields |= {"gang": sizes[0] if sizes else gpus, "sizes": sizes if len(sizes) > 1 else ()}
    fields["cwd"] = _absolute(fields.get("cwd", ""))
    fields["checkpoint_root"] = _absolute(fields.get("checkpoint_root", "checkpoints"), fields["cwd"])
    own = {name: os.environ[name] for name in INHERITED if name in os.environ}
    given_env = fields.get("env", {})
    fields["env"] = own | given_env if isinstance(given_env, dict) else given_env
    try:
        spec = msgspec.convert(nested(as_held(_with_ids(fields))), AppSpec)
    except msgspec.ValidationError as error:
        told = in_words(error, AppSpec).replace("requirements.", "", 1)
        raise error_of(told.replace("gang", "gpus", 1) if gpus is not None else told, USAGE) from None
    except ValueError as error:
        raise error_of(str(error), USAGE) from None
    if spec.gpus_max:
        raise error_of("gpus_max is for simulations; leave it out, and list the numbers of GPUs: gpus=(1, 2, 4)", USAGE)
    return spec


def _with_ids(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with the ids of the apps in `after`; one app or one text stands for a list of it."""
    after = fields.get("after", ())
    some = after if isinstance(after, list | tuple) else (after,)
    ids = [each.id if isinstance(each, App | AsyncApp) else each for each in some]
    return fields | ({"after": ids} if ids else {})


def _absolute(path: Any, folder: Any = "") -> Any:
    """Return a path as every node should see it; anything else as it is. Links are left, as they are of this host."""
    known = isinstance(path, str | os.PathLike) and isinstance(folder, str)
    return os.path.abspath(os.path.join(folder, path)) if known else path  # noqa: PTH100, PTH118


def default_name(command: Sequence[str]) -> str:
    """Return a name for an app: its script's, else its program's."""
    script = next((word for word in command[1:] if word.endswith((".py", ".sh"))), command[0] if command else "")
    return Path(script).stem or "app"


def _conclude(app: str, call: Path, record: AppRecord, output: str) -> Any:
    """Return the result of the function whose app has ended so; raise its exception, or the reason why it has none.

    The folder of the call is gone after that.
    """
    from app_agent.training import function_call

    try:
        found = None if record.state == "cancelled" else function_call.outcome(call)
    except function_call.CallError as error:
        raise error_of(str(error), exit_code(record) or 1) from error
    finally:
        function_call.remove(call)
    if found is not None and found.error is not None:
        raise found.error
    if found is not None:
        return found.result
    code, name = exit_code(record), f"{app} ({record.name})"
    if record.refused or record.state == "cancelled":
        raise error_of(f"{name} was {'refused' if record.refused else 'cancelled'}: {record.reason}".rstrip(": "), code)
    told = record.reason or f"exit code {code}"
    raise DiedError(f"{name} ended without a result: {told}", exit_code=code, output=output)


def _needs_output(call: Path, record: AppRecord) -> bool:
    """Whether the output is wanted for an error."""
    from app_agent.training import function_call

    return record.state != "cancelled" and not record.refused and not (call / function_call.OUTCOME).exists()


class _Lines:
    """Cuts output into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[str]:
        """Return the lines that are whole now, each with its end."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") + "\n" for line in whole]

    def end(self) -> list[str]:
        """Return the line without an end, if there is one."""
        return [self._rest.decode(errors="replace")] if self._rest else []


def _goal_of(for_: For) -> Until:
    if for_ not in ("over", "running"):
        raise error_of(f"for_ is {for_!r}; choose 'over' or 'running'", USAGE)
    return "done" if for_ == "over" else "running"


# --- for threads ----------------------------------------------------------------------------------------------------


class Client(_Address):
    """An owner's app agent, for any number of threads.

    Parameters
    ----------
    path
        Its socket; by default $GPU_ARBITER_URL, or where `gpu-arbiter up` puts it.
    fields
        Fields of every app, as `submit` takes them.
    """

    @classmethod
    def connect(cls, path: str | Path | None = None, **fields: Any) -> Self:
        """Return a client of an app agent that answers.

        Raises
        ------
        UnreachableError
            If none does, with the command that starts one.
        """
        client = cls(path, **fields)
        client.ping()
        return client

    def submit(self, command: Sequence[str] | AppSpec | None = None, /, **fields: Any) -> App:
        """Submit an app.

        Parameters
        ----------
        command
            The words of the program; or a whole `AppSpec`.
        fields
            ``gpus`` (2, or (1, 2, 4) for a job that can change its size), ``cwd`` (this folder), ``checkpoint_root``
            (``checkpoints`` in it), ``env`` (beside `INHERITED`), ``trials`` for a search, ``array`` (``"0-19%4"``),
            ``after`` (an app, ``"ana-kqz7:any"``, or several); and all others of `AppSpec` and of
            `protocol.messages.Requirements`.

        Raises
        ------
        UsageError
            With the field and the mend.
        RefusedError
            If no node has so many GPUs.
        UnreachableError
            If no app agent answers.
        """
        return App(self, self._submit(self.spec(command, **fields)))

    def submit_function(
        self, function: Callable[ParamsT, ResultT], /, *args: ParamsT.args, **kwargs: ParamsT.kwargs
    ) -> FunctionApp[ResultT]:
        """Submit the call of a function as an app; `with_fields` says which GPUs it gets.

        The call is written to ``<checkpoint_root>/calls`` and made by this interpreter; it is not repeated after a
        failure unless the field ``max_restarts`` says so.

        Raises
        ------
        UsageError
            If the function cannot be found by its module and name, or an argument cannot be pickled.
        """
        from app_agent.training import function_call

        call, spec = self._call(function, args, kwargs)
        try:
            return FunctionApp(self, self._submit(spec), call)
        except ControlError:
            function_call.remove(call)
            raise

    def app(self, id: str = "last") -> App:  # noqa: A002 - the word of the command line
        """Return one of the owner's apps; raises NotFoundError."""
        return App(self, self._record(id).app)

    def apps(self) -> list[App]:
        """Return the owner's apps, oldest first."""
        records: list[AppRecord] = self._ask(lambda control: control.apps())
        return [App(self, record.app) for record in records]

    def ping(self) -> dict[str, Any]:
        """Return ``{"owner", "tenant", "connected", "reached", "bus"}`` of the app agent."""
        return dict(self._ask(lambda control: control.ping()))

    def _submit(self, spec: AppSpec) -> str:
        app: str
        (app,) = self.talk(streams.submission(spec))
        return app

    def _record(self, app: str) -> AppRecord:
        record: AppRecord = self._ask(lambda control: control.changes(app=app)).apps[0]
        return record

    def _ask(self, question: Question) -> Any:
        with Control(self.path) as control:
            return question(control)

    def talk(self, conversation: Conversation) -> Iterator[Any]:
        """Lead a conversation of `app_agent.streams`; yield what is told."""
        return streams.talk(conversation, self._ask)


class App:
    """A submitted app."""

    def __init__(self, client: Client, id: str) -> None:  # noqa: A002
        self.id = id
        self._client = client

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    def record(self) -> AppRecord:
        """Return all that the app agent knows of it."""
        return self._client._record(self.id)

    def state(self) -> RecordState:
        """Return ``waiting``, ``running``, ``suspended``, ``held``, ``finished``, ``failed`` or ``cancelled``."""
        return self.record().state

    def wait(self, timeout: float | None = None, for_: For = "over") -> AppRecord:
        """Return its record once it is over; or once it is running, or over.

        Raises
        ------
        WaitTimeoutError
            After `timeout` seconds.
        """
        record: AppRecord
        (record,) = self._client.talk(streams.reached(self.id, _goal_of(for_), timeout, answered=True))
        return record

    def cancel(self) -> str:
        """End it for good; return its state, which is another than ``cancelled`` if it was over already."""
        return str(self._client._ask(lambda control: control.cancel(self.id)))

    def logs(self, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
        """Yield the lines of its output; with `tail` the last of those it has, with `follow` until it is over.

        Where a node no longer keeps a part of a large output, the lines after it follow those before it.
        """
        lines = _Lines()
        for piece in self._client.talk(streams.output(self.id, follow=follow, tail=tail)):
            yield from lines.take(piece.data)
        yield from lines.end()

    def records(self) -> Iterator[AppRecord]:
        """Yield its record, and again after each change, until it is over: its steps and metrics as they grow.

        Of changes that follow closely upon each other the last is told.
        """
        for changes in self._client.talk(streams.changes(self.id, answered=True)):
            yield from changes.apps

    def states(self) -> Iterator[RecordState]:
        """Yield its state, and again when it is another, until it is over."""
        last = None
        for record in self.records():
            if record.state != last:
                yield record.state
            last = record.state


class FunctionApp(App, Generic[ResultT]):
    """A submitted call of a function."""

    def __init__(self, client: Client, id: str, call: Path) -> None:  # noqa: A002
        super().__init__(client, id)
        self._call = call
        self._concluded: Callable[[], ResultT] | None = None
        self._lock = threading.Lock()

    def result(self, timeout: float | None = None) -> ResultT:
        """Return the result once it is there, or raise the function's exception, with a note of where it was raised.

        Raises
        ------
        WaitTimeoutError
            After `timeout` seconds.
        DiedError
            If its process ended without either, with its exit code and the end of its output.
        CancelledError, RefusedError
            If the app was cancelled or refused.
        """
        return self.conclude(self.wait(timeout))

    def conclude(self, record: AppRecord) -> ResultT:
        """Return the result, or raise as `result` does, given the record of its end."""
        with self._lock:
            if self._concluded is None:
                output = self._last_lines() if _needs_output(self._call, record) else ""
                self._concluded = _kept(partial(_conclude, self.id, self._call, record, output))
        return self._concluded()

    def discard(self) -> None:
        """Remove the folder of the call, if neither a result nor the call is wanted any more."""
        from app_agent.training import function_call

        function_call.remove(self._call)

    def _last_lines(self) -> str:
        try:
            return "".join(self.logs(tail=LINES_TOLD))
        except ControlError:  # the arbiter is away, or the output is no longer kept: there is an error to tell
            return ""


def _kept(conclude: Callable[[], ResultT]) -> Callable[[], ResultT]:
    """Return a function that returns, or raises, again and again what `conclude` does once."""
    try:
        result = conclude()
    except Exception as error:  # noqa: BLE001 - raised for the caller, each time
        raised = error

        def fail() -> ResultT:
            raise raised

        return fail
    return lambda: result


connect = Client.connect


# --- for an event loop ----------------------------------------------------------------------------------------------


class AsyncClient(_Address):
    """An owner's app agent, for an event loop: `Client` with the same names and errors."""

    @classmethod
    async def connect(cls, path: str | Path | None = None, **fields: Any) -> Self:
        """Return a client of an app agent that answers; raises UnreachableError."""
        client = cls(path, **fields)
        await client.ping()
        return client

    async def submit(self, command: Sequence[str] | AppSpec | None = None, /, **fields: Any) -> AsyncApp:
        """Submit an app, as `Client.submit` does."""
        return AsyncApp(self, await self._submit(self.spec(command, **fields)))

    async def submit_function(
        self, function: Callable[ParamsT, ResultT], /, *args: ParamsT.args, **kwargs: ParamsT.kwargs
    ) -> AsyncFunctionApp[ResultT]:
        """Submit the call of a function, as `Client.submit_function` does."""
        import asyncio

        from app_agent.training import function_call

        call, spec = await asyncio.to_thread(self._call, function, args, kwargs)
        try:
            return AsyncFunctionApp(self, await self._submit(spec), call)
        except ControlError:
            function_call.remove(call)
            raise

    async def app(self, id: str = "last") -> AsyncApp:  # noqa: A002 - the word of the command line
        """Return one of the owner's apps; raises NotFoundError."""
        return AsyncApp(self, (await self._control.changes(app=id)).apps[0].app)

    async def apps(self) -> list[AsyncApp]:
        """Return the owner's apps, oldest first."""
        return [AsyncApp(self, record.app) for record in await self._control.apps()]

    async def ping(self) -> dict[str, Any]:
        """Return ``{"owner", "tenant", "connected", "reached", "bus"}`` of the app agent."""
        return await self._control.ping()

    async def _submit(self, spec: AppSpec) -> str:
        app: str
        (app,) = [told async for told in self.talk(streams.submission(spec))]
        return app

    @property
    def _control(self) -> AsyncControl:
        return AsyncControl(self.path)

    def talk(self, conversation: Conversation) -> AsyncIterator[Any]:
        """Lead a conversation of `app_agent.streams`; yield what is told."""
        return streams.talk_async(conversation, self._control)


class AsyncApp:
    """A submitted app; see `App`."""

    def __init__(self, client: AsyncClient, id: str) -> None:  # noqa: A002
        self.id = id
        self._client = client

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    async def record(self) -> AppRecord:
        """Return all that the app agent knows of it."""
        return (await self._client._control.changes(app=self.id)).apps[0]

    async def state(self) -> RecordState:
        """Return its state, as `App.state` does."""
        return (await self.record()).state

    async def wait(self, timeout: float | None = None, for_: For = "over") -> AppRecord:  # noqa: ASYNC109 - as `App`
        """Return its record once it is over, or running; raises WaitTimeoutError."""
        told = self._client.talk(streams.reached(self.id, _goal_of(for_), timeout, answered=True))
        record: AppRecord
        (record,) = [record async for record in told]
        return record

    async def cancel(self) -> str:
        """End it for good, as `App.cancel` does."""
        return await self._client._control.cancel(self.id)

    async def logs(self, *, tail: int | None = None, follow: bool = False) -> AsyncIterator[str]:
        """Yield the lines of its output, as `App.logs` does."""
        lines = _Lines()
        async for piece in self._client.talk(streams.output(self.id, follow=follow, tail=tail)):
            for line in lines.take(piece.data):
                yield line
        for line in lines.end():
            yield line

    async def records(self) -> AsyncIterator[AppRecord]:
        """Yield its record, and again after each change, as `App.records` does."""
        async for changes in self._client.talk(streams.changes(self.id, answered=True)):
            for record in changes.apps:
                yield record

    async def states(self) -> AsyncIterator[RecordState]:
        """Yield its state, and again when it is another, until it is over."""
        last = None
        async for record in self.records():
            if record.state != last:
                yield record.state
            last = record.state


class AsyncFunctionApp(AsyncApp, Generic[ResultT]):
    """A submitted call of a function; see `FunctionApp`."""

    def __init__(self, client: AsyncClient, id: str, call: Path) -> None:  # noqa: A002
        import asyncio

        super().__init__(client, id)
        self._call = call
        self._concluded: Callable[[], ResultT] | None = None
        self._lock = asyncio.Lock()

    async def result(self, timeout: float | None = None) -> ResultT:  # noqa: ASYNC109 - as `FunctionApp`
        """Return the result, or raise, as `FunctionApp.result` does."""
        import asyncio

        record = await self.wait(timeout)
        async with self._lock:
            if self._concluded is None:
                output = await self._last_lines() if _needs_output(self._call, record) else ""
                concluding = partial(_conclude, self.id, self._call, record, output)
                self._concluded = await asyncio.to_thread(_kept, concluding)
        assert self._concluded is not None
        return self._concluded()

    async def _last_lines(self) -> str:
        try:
            return "".join([line async for line in self.logs(tail=LINES_TOLD)])
        except ControlError:  # the arbiter is away, or the output is no longer kept: there is an error to tell
            return ""
