"""The thread in which policies decide and sell, so that the loop of the arbiter never waits for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog
from msgspec.structs import replace

from arbiter.core.effects import Decide, Decided, Sell, Sold
from arbiter.core.members import sale_batch
from arbiter.core.policies.themis.auction.compiled import COMPILED
from arbiter.core.policies.themis.auction.instance import warm_up
from arbiter.core.rounds.decision import decide, failed

_log = structlog.get_logger("solver")


class Solver:
    """Answers `Decide` and `Sell`, one at a time; of each kind only the newest that waits, as the others are over."""

    def __init__(self) -> None:
        """Begin with nothing to decide."""
        self._waiting: dict[type, Decide | Sell] = {}  #: by its kind, in the order in which they came
        self._asked = asyncio.Event()

    def ask(self, effect: Decide | Sell) -> None:
        """Have this answered as soon as the thread is free; returns at once."""
        self._waiting[type(effect)] = effect
        self._asked.set()

    async def run(self, post: Callable[[Decided | Sold], None], *, ready: Callable[[], None] | None = None) -> None:
        """Hand each answer to `post`, until cancelled.

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
                post(await loop.run_in_executor(thread, answer, await self._next()))
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    async def _next(self) -> Decide | Sell:
        while not self._waiting:
            self._asked.clear()
            await self._asked.wait()
        return self._waiting.pop(next(iter(self._waiting)))


def get_ready() -> None:
    """Have the auction's loops compiled, which takes a minute at the first start and a second after it."""
    if not COMPILED:
        _log.warning("solver.slow", why="numba is not installed; auctions are solved some 50 times slower")
        return
    begun = time.perf_counter()
    warm_up()
    _log.info("solver.ready", took_s=round(time.perf_counter() - begun, 1))


def answer(effect: Decide | Sell) -> Decided | Sold:
    """Let the policy decide, or sell."""
    return decide_timed(effect) if isinstance(effect, Decide) else sell_timed(effect)


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


def sell_timed(effect: Sell) -> Sold:
    """Sell, and log how long it took, of the wall clock."""
    begun = time.perf_counter()
    try:
        sold = sale_batch.sell(effect)
    except Exception as error:  # noqa: BLE001 - it costs these sales, and is told aloud by the core
        sold = sale_batch.failed(effect, error)
    took_ms = (time.perf_counter() - begun) * 1000.0
    _log.debug("sale.answered", sale=effect.number, apps=len(effect.asks), took_ms=round(took_ms, 3))
    return sold
