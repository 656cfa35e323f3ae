"""Long conversations with an app agent, each written once for blocking clients and for event loops.

A conversation is a generator. It yields a question (a function of a client, whose methods have the same names in
`Control` and `AsyncControl`), a `Pause`, or a `Told` with a piece of its result; the answer to a question, or its
error, comes back into it. `talk` and `talk_async` lead a conversation to its end.
"""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, Literal

from msgspec import Struct

from app_agent.control import AsyncControl, ControlError, UnreachableError, error_of
from app_agent.core.spec import AppSpec
from protocol import gpu_kinds
from protocol.exit_codes import NOT_FOUND, REFUSED

#: A reader's patience between two questions when nothing new was written, or the app agent is away.
PAUSE_S = 0.5
#: The arbiter may take so long to tell how large its nodes are; without it an app is submitted all the same.
PATIENCE_S = 1.0
#: An app agent that has answered before may be away so long.
AWAY_S = 300.0
#: An answer about changes is waited for so long, and then asked for again.
CHANGES_S = 20.0
#: An offset at which no output is: the answer tells the size.
BEYOND = 2**53
#: Bytes of the end of an output that are searched first for its last lines.
REACH_BYTES = 65_536

#: The arbiter's words for an app that has ended.
OVER = frozenset({"finished", "failed", "cancelled", "refused"})

Until = Literal["done", "running"]


class Pause(Struct, frozen=True):
    """Wait so long before the next question."""

    seconds: float


class Told(Struct, frozen=True):
    """A piece of the conversation's result."""

    value: Any


class Piece(Struct, frozen=True):
    """Output of a task, as the task wrote it; `dropped` bytes before it are no longer kept on the node."""

    task: str
    data: bytes
    dropped: int = 0


Question = Callable[[Any], Any]
Conversation = Generator[Question | Pause | Told, Any, None]


# --- leading a conversation -----------------------------------------------------------------------------------------


def talk(
    conversation: Conversation, ask: Callable[[Question], Any], *, pause: Callable[[float], None] = time.sleep
) -> Iterator[Any]:
    """Lead a conversation by `ask`, which puts a question to a client; yield what is told.

    Raises
    ------
    ControlError
        That the conversation cannot go on with.
    """
    answer, error = None, None
    while True:
        try:
            step = conversation.send(answer) if error is None else conversation.throw(error)
        except StopIteration:
            return
        answer, error = None, None
        if isinstance(step, Told):
            yield step.value
        elif isinstance(step, Pause):
            pause(step.seconds)
        else:
            try:
                answer = ask(step)
            except ControlError as refusal:
                error = refusal


async def talk_async(conversation: Conversation, control: AsyncControl) -> AsyncIterator[Any]:
    """Lead a conversation on an event loop, as `talk` does."""
    import asyncio  # the command line, which does without, starts in half the time

    answer, error = None, None
    while True:
        try:
            step = conversation.send(answer) if error is None else conversation.throw(error)
        except StopIteration:
            return
        answer, error = None, None
        if isinstance(step, Told):
            yield step.value
        elif isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
        else:
            try:
                answer = await step(control)
            except ControlError as refusal:
                error = refusal


# --- conversations --------------------------------------------------------------------------------------------------


def output(target: str, *, follow: bool = False, tail: int | None = None) -> Conversation:
    """Tell the output of an app, a job or a task as pieces.

    With `follow` until it is over, also if the arbiter is away. With `tail` that many last lines of what there is come
    first, in place of all; attempts that follow are whole.
    """
    task, offset = "", 0
    while True:
        try:
            if tail is not None:
                task, offset = yield from _last_lines(target, tail)
                tail = None
            chunk = yield _log(target, offset)
        except ControlError as error:
            known, over = yield from _standing(target)
            if not follow or not known or (over and error.code != NOT_FOUND):
                raise
            if over:  # it never started, or its output is no longer kept
                return
            yield Pause(PAUSE_S)  # it waits for its first GPU, or the arbiter is away
            continue
        if chunk["task"] != task:
            task = str(chunk["task"])
            if offset:  # asked at the offset of another attempt's output
                offset = 0
                continue
        data, dropped = base64.b64decode(chunk["data"]), _dropped(chunk)
        offset += dropped + len(data)
        if data or dropped:
            yield Told(Piece(task, data, dropped))
        if offset < chunk["size"]:
            continue
        if not follow or (chunk["ended"] and (yield from _standing(target))[1]):
            return
        yield Pause(PAUSE_S)


def changes(app: str = "", mark: str = "", *, answered: bool = False) -> Conversation:
    """Tell each `Changes` after `mark` of all apps, or of `app` until it is over.

    An app agent that has answered before (with `answered`: another question), and starts again, is waited for.
    """
    answered, away_s = answered or bool(mark), 0.0
    while True:
        try:
            news = yield _changes_after(mark, app)
        except UnreachableError:
            if not answered or away_s >= AWAY_S:
                raise
            away_s += PAUSE_S
            yield Pause(PAUSE_S)
            continue
        mark, answered, away_s = news.mark, True, 0.0
        yield Told(news)
        if app and any(record.over for record in news.apps):
            return


def reached(app: str, until: Until, timeout_s: float | None, *, answered: bool = False) -> Conversation:
    """Tell the record of `app` once it runs, or is over.

    An app agent that has answered before (with `answered`: another question), and starts again, is waited for.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    away_s = 0.0
    while True:
        left_s = None if deadline is None else max(0.0, round(deadline - time.monotonic(), 3))
        try:
            if not answered:
                yield _changes_after("", app)
                answered = True
            record = yield _wait(app, until, left_s)
        except UnreachableError:
            if not answered or away_s >= AWAY_S or left_s == 0.0:
                raise
            away_s += PAUSE_S
            yield Pause(PAUSE_S)
            continue
        yield Told(record)
        return


def submission(spec: AppSpec) -> Conversation:
    """Submit an app and tell its id.

    Raises
    ------
    RefusedError
        If no node that the arbiter knows has the GPUs that a job needs at once, of the kind that it asks for.
    """
    if spec.gang > 1 or gpu_kinds.wishes_kind(spec.requirements):
        try:
            capacity = yield lambda client: client.query("capacity", patience_s=PATIENCE_S)
        except UnreachableError:  # the app agent is asked again below; the arbiter may be away
            pass
        else:
            known = int(capacity["gpus_known" if spec.spans else "largest_node_gpus_known"])
            if 0 < known < spec.gang:
                has = "all nodes together have" if spec.spans else "the largest node has"
                raise error_of(f"gpus is {spec.gang}, and {has} {known}; ask for at most {known}", REFUSED)
            fit = gpu_kinds.fit_of(spec.requirements, capacity)
            never = gpu_kinds.misfit(spec.requirements, spec.gang, fit) if fit is not None else None
            if never is not None:
                raise error_of("; ".join(never), REFUSED)
    app = yield lambda client: client.submit(spec)
    yield Told(str(app))


def _standing(target: str) -> Generator[Question, Any, tuple[bool, bool]]:
    """Return whether the app that `target` is or belongs to is known, and whether it will write no more."""
    name = target.split(".", 1)[0]
    records = yield lambda client: client.apps()  # the app agent answers for its own apps without the arbiter
    for record in records:
        if record.app == name:
            return True, record.over
    document = yield lambda client: client.query("apps", name)
    app = next(iter(document["apps"]), None)
    return app is not None, app is None or app["state"] in OVER


def _log(target: str, offset: int) -> Question:
    return lambda client: client.query("log", target, offset)


def _changes_after(mark: str, app: str) -> Question:
    return lambda client: client.changes(mark, app=app, timeout_s=CHANGES_S)


def _wait(app: str, until: Until, timeout_s: float | None) -> Question:
    return lambda client: client.wait(app, until=until, timeout_s=timeout_s)


def _last_lines(target: str, lines: int) -> Generator[Question, Any, tuple[str, int]]:
    """Return the task whose output `target` means, and the byte at which its last `lines` lines begin.

    Lines before a part that is no longer kept do not count.
    """
    end = yield _log(target, BEYOND)
    task, size = str(end["task"]), int(end["size"])
    reach = REACH_BYTES
    while True:
        asked = max(0, size - reach)
        start, data = yield from _bytes(task, asked, size)
        at = _begin_of(data, lines)
        if at is not None or start == 0 or start > asked:
            return task, start + (at or 0)
        reach *= 4


def _bytes(task: str, start: int, end: int) -> Generator[Question, Any, tuple[int, bytes]]:
    """Return the bytes from `start` to `end` of a task's output, or fewer if there are no more, and their offset.

    That is larger than `start` if a part is no longer kept: what comes after it is returned.
    """
    data = b""
    while start + len(data) < end:
        chunk = yield _log(task, start + len(data))
        if dropped := _dropped(chunk):
            start, data = start + len(data) + dropped, b""
        more = base64.b64decode(chunk["data"])
        if not more:
            break
        data += more
    return start, data[: max(0, end - start)]


def _dropped(chunk: Any) -> int:
    """Return how many bytes before a chunk are gone; an arbiter of the version before does not say so."""
    return int(chunk.get("dropped", 0))


def _begin_of(data: bytes, lines: int) -> int | None:
    """Return where the last `lines` lines of `data` begin; None if they may begin before it."""
    if lines == 0:
        return len(data)
    at = len(data) - data.endswith(b"\n")
    for _ in range(lines):
        at = data.rfind(b"\n", 0, at)
        if at < 0:
            return None
    return at + 1
