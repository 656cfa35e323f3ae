"""The thread in which policies decide and sell, so that the loop of the arbiter never waits for them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import structlog
from msgspec.structs import replace

from arbiter.core.effects import Decide, Decided, Sell, Sold
from arbiter.core.members import sale_batch
from arbiter.core.registry import POLICIES, Loops
from arbiter.core.rounds.decision import decide, failed

#: Compiles the loops of a policy in a process of its own and leaves them on disk. Its arguments are the policy's name
#: and the path of this process: a module of the current folder is not ours.
COMPILE = (
    *(sys.executable, "-I", "-c"),
    "import sys; policy, *sys.path[:] = sys.argv[1:]; "
    "from arbiter.core.registry import POLICIES; POLICIES[policy].loops.warm_up()",
)

_log = structlog.get_logger("solver")

ResultT = TypeVar("ResultT")


class Solver:
    """Answers `Decide` and `Sell`, one at a time; of each kind only the newest that waits, as the others are over."""

    def __init__(self) -> None:
        """Begin with nothing to decide."""
        self._waiting: dict[type, Decide | Sell] = {}  #: by its kind, in the order in which they came
        self._asked = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="solver")

    def ask(self, effect: Decide | Sell) -> None:
        """Have this answered as soon as the thread is free; returns at once."""
        self._waiting[type(effect)] = effect
        self._asked.set()

    async def run(self, post: Callable[[Decided | Sold], None]) -> None:
        """Hand each answer to `post`, until cancelled.

        A decision in hand cannot be interrupted: its thread ends with it, and the process not before.
        """
        loop = asyncio.get_running_loop()
        try:
            while True:
                post(await loop.run_in_executor(self._thread, answer, await self._next()))
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def prepare(self, policy: str, ready: Callable[[], None]) -> None:
        """Have a policy's loops compiled, which takes a minute at the first start, or read from the disk.

        Where compiled code is kept on disk, `ready` is called at once. What is not there another process compiles, and
        until it has, auctions are solved by plain Python. Where no code can be kept there, this process compiles, and
        `ready` is called after that.
        """
        begun = time.perf_counter()
        loops = POLICIES[policy].loops
        if loops is None:
            ready()
            return
        if not loops.compilable:
            _log.warning("solver.slow", why="numba is not installed; auctions are solved some 50 times slower")
            ready()
            return
        if not loops.kept():
            await self._between_decisions(loops.warm_up)
            ready()
        else:
            loops.use_plain()
            ready()
            if not await self._between_decisions(loops.load):
                failure = await _compile_elsewhere(policy, loops)
                if not failure and not await self._between_decisions(loops.load):
                    failure = "another process compiled them, and they are not on disk"
                if failure:
                    why = f"auctions are solved some 50 times slower; compiling failed: {failure}"
                    _log.warning("solver.slow", why=why)
                    return
        _log.info("solver.ready", took_s=round(time.perf_counter() - begun, 1))

    async def _between_decisions(self, act: Callable[[], ResultT]) -> ResultT:
        """Do this in the thread that decides, so that no decision goes on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, act)

    async def _next(self) -> Decide | Sell:
        while not self._waiting:
            self._asked.clear()
            await self._asked.wait()
        return self._waiting.pop(next(iter(self._waiting)))


async def _compile_elsewhere(policy: str, loops: Loops) -> str:
    """Compile the loops in a process that ends with this one; return why it failed."""
    try:
        process = await asyncio.create_subprocess_exec(
            *COMPILE,
            policy,
            *sys.path,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:  # no room for another process
        return str(error)
    try:
        _, told = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        loops.use_compiled()
        await process.communicate()  # it is gone, and its pipe closed, before the loop is
        raise
    if process.returncode == 0:
        return ""
    lines = told.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"it ended with {process.returncode}"


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
