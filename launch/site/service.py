"""Run a daemon's coroutines as a well-behaved process: signals, systemd, and one sentence for an expected failure."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence

import structlog

from launch.faults import Fault
from launch.notify import notify
from node_agent.devices import DeviceError
from node_agent.workers.manager import WorkersError
from protocol import exit_codes
from protocol.bus import NotPermitted
from protocol.config import ConfigError
from protocol.journal import JournalError

Daemon = Coroutine[None, None, None]
#: Errors for the operator to mend; their messages are sentences. Any other error is a bug and ends in a traceback.
EXPECTED: dict[type[Exception], int] = {
    ConfigError: exit_codes.USAGE,
    JournalError: exit_codes.FAILED,
    DeviceError: exit_codes.USAGE,
    WorkersError: exit_codes.USAGE,
    NotPermitted: exit_codes.NOT_PERMITTED,
}
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(
    daemons: Callable[[], Sequence[Daemon]],
    *,
    started: Callable[[], Daemon] | None = None,
    stopping: Callable[[], Daemon] | None = None,
) -> None:
    """Run `daemons` until a signal says stop or one of them fails.

    `started` runs beside them and may end; `stopping` runs after the first signal and before they end. A second
    signal does not wait for it.

    Raises
    ------
    Fault
        For an expected failure, with its sentence.
    """
    with faults():
        asyncio.run(_serve(daemons, started, stopping))


class faults:  # noqa: N801 - used as a context manager, as contextlib's are
    """Turn the expected failure of a daemon into a `Fault`."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        cause = root_cause(error) if error else None
        code = next((code for kind, code in EXPECTED.items() if isinstance(cause, kind)), None)
        if code is not None:
            raise Fault(str(cause), code=code) from None


def root_cause(error: BaseException) -> BaseException:
    """Return the first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _serve(
    daemons: Callable[[], Sequence[Daemon]],
    started: Callable[[], Daemon] | None,
    stopping: Callable[[], Daemon] | None,
) -> None:
    """Run all daemons; the first signal ends them in order."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(daemon) for daemon in daemons()]
        if started is not None:
            running.append(group.create_task(started()))
        await signals.get()
        notify("STOPPING=1")
        if stopping is not None:
            await _either(stopping(), signals.get())
        for task in running:
            task.cancel()
    structlog.get_logger("launch").info("daemon.stopped")


async def _either(work: Daemon, interruption: Coroutine[None, None, object]) -> None:
    """Do `work`, or stop when interrupted."""
    async with asyncio.TaskGroup() as group:
        working = group.create_task(work)
        interrupting = group.create_task(interruption)
        await asyncio.wait((working, interrupting), return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        interrupting.cancel()
