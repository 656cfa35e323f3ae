"""`concurrent.futures` on GPUs: each call of a function is an app of its own, which waits for its GPUs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, Generic, ParamSpec, TypeVar

from app_agent import streams
from app_agent.client import Client, FunctionApp
from app_agent.control import Changes, ControlError, NotFoundError, UnreachableError
from app_agent.core.records import AppRecord

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")


class GpuFuture(Future[ResultT], Generic[ResultT]):
    """The call of a function as an app, whose id is `app.id`.

    It runs from the first time its app runs, and for good: an app that is preempted later runs again by itself.
    """

    app: FunctionApp[ResultT]
    _executor: GpuExecutor

    def cancel(self) -> bool:
        """Cancel the app while it waits for its first GPU; return False once it has run."""
        return self._executor._cancel(self)


class GpuExecutor(Executor):
    """Calls functions as apps of an app agent, each on GPUs of its own.

    Parameters
    ----------
    client
        The app agent; by default that at the usual socket.
    fields
        Fields of every app, as `Client.submit` takes them: ``gpus=2``, ``tenant="vision"``, ``env={...}``.

    Notes
    -----
    Futures go on when the app agent was started again. They end with UnreachableError when it is away for
    `app_agent.streams.AWAY_S`, and with NotFoundError when it comes back without memory of their apps.
    """

    def __init__(self, client: Client | None = None, **fields: Any) -> None:
        self._client = (client or Client()).with_fields(**fields)
        self._lock = threading.RLock()
        self._pending: dict[str, GpuFuture[Any]] = {}
        self._uncancelled: dict[str, FunctionApp[Any]] = {}  #: apps that are to be cancelled when the app agent is back
        self._watcher: threading.Thread | None = None
        self._mark = ""  #: of the changes that were taken in
        self._closed = False

    def submit(
        self, fn: Callable[ParamsT, ResultT], /, *args: ParamsT.args, **kwargs: ParamsT.kwargs
    ) -> GpuFuture[ResultT]:
        """Submit the call of a function, as `Client.submit_function` does.

        Raises
        ------
        RuntimeError
            After `shutdown`.
        ControlError
            If it cannot be submitted.
        """
        with self._lock:  # the watcher must not see an app's end before the app is known here
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            future: GpuFuture[ResultT] = GpuFuture()
            future._executor = self
            future.app = self._client.submit_function(fn, *args, **kwargs)
            self._pending[future.app.id] = future
            self._watch()
        return future

    def map(
        self,
        fn: Callable[..., ResultT],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        at_most: int | None = None,
    ) -> Iterator[ResultT]:
        """Yield the result of each call, in order; with `at_most`, so many apps at a time, submitted as others end.

        `timeout` in seconds counts from this call. `chunksize` has no meaning here.

        Raises
        ------
        TimeoutError
            As the result is asked for that has not come in time. The calls that are left are cancelled.
        ValueError
            If `at_most` is less than 1.
        """
        if at_most is None:
            return super().map(fn, *iterables, timeout=timeout)
        if at_most < 1:
            raise ValueError(f"at_most is {at_most}; give 1 or more, or leave it out")
        calls = zip(*iterables, strict=False)
        futures = deque(self.submit(fn, *args) for _, args in zip(range(at_most), calls, strict=False))
        return self._results(fn, calls, futures, None if timeout is None else monotonic() + timeout)

    def _results(
        self,
        fn: Callable[..., ResultT],
        calls: Iterator[tuple[Any, ...]],
        futures: deque[GpuFuture[ResultT]],
        deadline: float | None,
    ) -> Iterator[ResultT]:
        """Yield results in order; for each call that is over one more is submitted, whichever was first."""
        under_way = set(futures)
        try:
            while futures:
                while not futures[0].done():
                    left_s = None if deadline is None else max(0.0, deadline - monotonic())
                    over = wait_for(under_way, left_s, "FIRST_COMPLETED").done
                    if not over:
                        raise TimeoutError(f"{futures[0].app.id} has not ended in time")
                    under_way -= over
                    for args in (args for _, args in zip(over, calls, strict=False)):
                        futures.append(self.submit(fn, *args))
                        under_way.add(futures[-1])
                yield futures.popleft().result()
        finally:
            for future in futures:
                future.cancel()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; cancel those that wait for their first GPU, if told to; return when all have ended.

        With `wait` False return at once: the apps go on, and their futures with them as long as this process lives.
        """
        with self._lock:
            self._closed = True
            pending = list(self._pending.values())
        if cancel_futures:
            for future in pending:
                future.cancel()
        if wait:
            wait_for(pending)
            while self._uncancelled and self._watcher is not None:  # the app agent is away
                sleep(streams.PAUSE_S)

    # --- futures ----------------------------------------------------------------------------------------------------

    def _cancel(self, future: GpuFuture[Any]) -> bool:
        """Cancel a future whose app has not run yet, and its app, at once or when the app agent is back."""
        app = future.app
        with suppress(ControlError):  # the app agent is away: as far as is known, it waits
            if app.id in self._pending and not future.running():
                self._take(app.record())  # it may have begun since
        with self._lock:
            if app.id not in self._pending or not Future.cancel(future):
                return future.cancelled()
            future.set_running_or_notify_cancel()  # tells those that wait for it
            del self._pending[app.id]
            self._uncancelled[app.id] = app
        self._cancel_apps()
        return True

    def _cancel_apps(self) -> None:
        """Cancel the apps of futures that were cancelled; those that are left are for the watcher."""
        with self._lock:
            left = list(self._uncancelled.values())
        for app in left:
            try:
                app.cancel()
            except UnreachableError:
                with self._lock:
                    self._watch()
                return
            except ControlError:  # there is no such app any more
                pass
            app.discard()
            with self._lock:
                self._uncancelled.pop(app.id, None)

    def _take(self, record: AppRecord) -> None:
        """Change the future of an app whose record has changed."""
        with self._lock:
            future = self._pending.get(record.app)
            if future is None:
                return
            if record.state not in ("waiting", "held") and not future.running():
                future.set_running_or_notify_cancel()
            if not record.over:
                return
            del self._pending[record.app]
        try:
            future.set_result(future.app.conclude(record))
        except Exception as error:  # noqa: BLE001 - the function's own, for the future's owner
            future.set_exception(error)

    def _fail(self, app: str, error: Exception) -> None:
        """End the future of an app of which nothing more can be known."""
        with self._lock:
            future = self._pending.pop(app, None)
            if future is None:
                return
            if not future.running():
                future.set_running_or_notify_cancel()
        future.set_exception(error)

    # --- watching ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Have a thread follow the apps, as long as any future waits for one."""
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._follow, name="gpu-arbiter-futures", daemon=True)
            self._watcher.start()

    def _follow(self) -> None:
        try:
            for changes in self._client.talk(streams.changes(mark=self._mark)):
                self._mark = changes.mark
                self._take_all(changes)
                with self._lock:
                    if not self._pending and not self._uncancelled:
                        self._watcher = None
                        return
        except Exception as error:  # noqa: BLE001 - else futures would wait for ever
            with self._lock:
                self._watcher = None
                left = list(self._pending)
            for app in left:
                self._fail(app, error)

    def _take_all(self, changes: Changes) -> None:
        self._cancel_apps()
        for record in changes.apps:
            self._take(record)
        if changes.whole:
            self._miss({record.app for record in changes.apps})

    def _miss(self, known: set[str]) -> None:
        """End the futures of apps that the app agent has no record of."""
        with self._lock:
            missing = [future.app for app, future in self._pending.items() if app not in known]
        for app in missing:
            try:
                self._take(app.record())  # it may be newer than the list
            except NotFoundError as error:
                self._fail(app.id, error)
            except ControlError:
                pass  # the app agent is away again
