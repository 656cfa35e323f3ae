"""A thread for the calls of a driver's library, with a watchdog, and a look at the GPUs by another process."""

from __future__ import annotations

import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from node_agent.devices import HungError

T = TypeVar("T")

#: Between two looks for GPUs that answer again.
LOOK_EVERY_S = 30.0


class WatchedThread:
    """One daemon thread that runs calls in order; a call that does not return is abandoned."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._stuck: Future[Any] | None = None
        # A daemon thread: one that hangs in the kernel must not keep the node agent from ending.
        self._thread = threading.Thread(target=self._work, name="nvml", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread; raise what it raises, or HungError if it does not return in time."""
        if self._stuck is not None and not self._stuck.done():
            raise HungError("NVML still hangs in an earlier call; if that lasts, the node needs a reboot")
        future: Future[T] = Future()
        self._calls.put((work, future))
        try:
            return future.result(self._timeout_s)
        except TimeoutError as error:
            if future.done():
                raise  # the call itself raised it
            self._stuck = future
            raise HungError(f"NVML did not answer within {self._timeout_s:g} s; a GPU of this node hangs") from error

    def close(self) -> None:
        """End the thread, unless it hangs."""
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - handed to the caller, whose call it was
                future.set_exception(error)


class Look:
    """Looks for GPUs that answer again, every `LOOK_EVERY_S` and by a process of its own, without waiting for it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._next = 0.0

    def answering(self) -> set[str]:
        """Return the UUIDs that the last look found, once; empty while it runs or none is due."""
        if self._process is None:
            if time.monotonic() >= self._next:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            return set()
        if self._process.poll() is None:
            return set()  # it may hang in the driver for ever; then no GPU is ever found, and no caller waits
        found, _ = self._process.communicate()
        self._process, self._next = None, time.monotonic() + LOOK_EVERY_S
        return set(found.decode(errors="replace").split())

    def close(self) -> None:
        """End a running look; one that hangs in the driver is left to the system."""
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=1.0)
