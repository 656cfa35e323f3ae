"""The thread in which policies decide, so that the loop of the arbiter never waits for a decision."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog
from msgspec.structs import replace

from arbiter.core.effects import Decide, Decided
from arbiter.core.policies.themis.auction.compiled import COMPILED
from arbiter.core.policies.themis.auction.instance import warm_up
from arbiter.core.rounds.decision import decide, failed

_log = structlog.get_logger("solver")


class Solver:
    """Answers `Decide`, one at a time; of those that wait only the newest, as the others' rounds are over."""

    def __init__(self) -> None:
        """Begin with nothing to decide."""
        self._newest: Decide | None = None
        self._asked = asyncio.Event()

    def ask(self, effect: Decide) -> None:
        """Have this decided as soon as the thread is free; returns at once."""
        self._newest = effect
        self._asked.set()

    async def run(self, post: Callable[[Decided], None], *, ready: Callable[[], None] | None = None) -> None:
        """Hand each decision to `post`, until cancelled.

        Before the first one, and before `ready` is called, the auction's loops are compiled; without `ready` they are
        not, for policies that hold no auction. A decision in hand cannot be interrupted: its thread ends with it, and
        the process not before.
        """
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, thread_name_prefix="solver")
        try:
            if ready is not None:
                # Before the first decision: it would run into its deadline while its loops are compiled.
                await loop.run_in_executor(thread, get_ready)
                ready()
            while True:
                post(await loop.run_in_executor(thread, decide_timed, await self._next()))
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    async def _next(self) -> Decide:
        while self._newest is None:
            self._asked.clear()
            await self._asked.wait()
        effect, self._newest = self._newest, None
        return effect


def get_ready() -> None:
    """Have the auction's loops compiled, which takes a minute at the first start and a second after it."""
    if not COMPILED:
        _log.warning("solver.slow", why="numba is not installed; auctions are solved some 50 times slower")
        return
    begun = time.perf_counter()
    warm_up()
    _log.info("solver.ready", took_s=round(time.perf_counter() - begun, 1))


def decide_timed(effect: Decide) -> Decided:
    """Decide, and add to the allocation's facts how long it took: `solver_ms`, of the wall clock."""
    begun = time.perf_counter()
    try:
        decided = decide(effect, time.perf_counter)
    except Exception as error:  # noqa: BLE001 - it costs this round, and is told aloud by the core
        decided = failed(effect, error)
    solver_ms = (time.perf_counter() - begun) * 1000.0
    _log.debug("round.decided", round=effect.round, solver_ms=round(solver_ms, 3))
    allocation = replace(decided.allocation, facts={**decided.allocation.facts, "solver_ms": solver_ms})
    return replace(decided, allocation=allocation)
