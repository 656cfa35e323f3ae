"""The ranks of one task, its training processes, stop at the same step: two phases, no collective, no cost per step.

A rank that stopped alone would leave the others waiting in a collective. So all ranks are first told to `hold` at a
step that none has reached; each answers at once whether it will stand there. The order itself is given once all will,
for that step. If one was late, all get a later step before any of them has parked. A task of one rank is told directly.

Of a job on several nodes the ranks here are some of all. The arbiter, which hears of all, names the step: here they are
told to `stand` there, and what they are then ordered is for that very step (`at_step`).

To the rest of the node agent this looks like one worker: `heard` returns the line that a single process would have
said, or nothing yet.

*Source:* findings on GPU mechanisms 3.3; Gavel and Determined agree by a barrier or a broadcast instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from protocol.messages import newest_metrics
from protocol.worker import (
    Counted,
    Finished,
    FromWorker,
    Hello,
    Late,
    Order,
    Progress,
    Ready,
    Refused,
    Resumed,
    Saved,
    Stacks,
    Suspended,
)

#: Steps between the furthest rank, as far as is known, and the step at which all are to stand.
AHEAD_STEPS = 2
#: The last known step of a rank may be so old (its progress comes every quarter of a second).
STALE_S = 0.5
#: The same, while no rank has said how long a step takes.
AHEAD_STEPS_BLIND = 20

TOGETHER = frozenset({"suspend", "leave", "save"})
NextSeq = Callable[[], int]


class Holding(Struct, frozen=True):
    """Phase 1: all ranks are to stand at the end of `at_step`; `ready` are those that will.

    If the wish itself is to `hold`, they stand until there is another.
    """

    wish: Order
    seq: int
    at_step: int
    ahead: int
    ready: frozenset[int] = frozenset()


class Doing(Struct, frozen=True):
    """Phase 2, or an order that needs no common step: `answers` so far, by rank."""

    wish: Order
    seq: int
    at_step: int = -1
    answers: Mapping[int, FromWorker] = {}


class Ranks(Struct, frozen=True):
    """The ranks of a task, as last heard of."""

    world: int = 1
    hellos: Mapping[int, Hello] = {}  #: of those connected now
    news: Mapping[int, Progress] = {}
    phase: Holding | Doing | None = None
    apart: bool = False  #: the job has ranks on other nodes, too
    stood: tuple[int, bool] = (-1, False)  #: the newest step to stand at that is answered, and whether all will
    late_at: int = -1  #: the furthest step that a rank has told as it was late to stand
    stuck: tuple[int, frozenset[int]] = (-1, frozenset())  #: the newest order to resume that was refused, and by which

    @property
    def told_to_stand(self) -> Order | None:
        """The order by which all stand, or will, until there is another."""
        phase = self.phase
        return phase.wish if isinstance(phase, Holding) and phase.wish.do == "hold" else None

    @property
    def complete(self) -> bool:
        """Whether all ranks are connected."""
        return len(self.hellos) >= self.world

    @property
    def halted(self) -> bool:
        """Whether a rank stands or is suspended, by no order that is still to be answered."""
        return self.phase is None and any(hello.state != "running" for hello in self.hellos.values())

    @property
    def all_stuck(self) -> bool:
        """Whether all ranks are suspended still, as all have refused to resume."""
        parked = sum(hello.state == "suspended" for hello in self.hellos.values())
        return len(self.stuck[1]) >= self.world and parked >= self.world

    @property
    def step(self) -> int:
        """The furthest step that is known of any rank."""
        steps = [line.step for line in self.hellos.values()] + [line.step for line in self.news.values()]
        return max(steps, default=-1)


def stand(ranks: Ranks, wish: Order) -> tuple[Ranks, list[Order]]:
    """Have all ranks stand at the step of `wish`, an order to `hold`, until there is another; return the orders."""
    return replace(ranks, phase=Holding(wish, wish.seq, wish.at_step, 0)), [wish]


def stand_no_more(ranks: Ranks, wish: Order) -> tuple[Ranks, list[Order]]:
    """Have all ranks that stand go on, by `wish`, an order to `resume`; return the orders."""
    return replace(ranks, phase=None, stood=(-1, False), hellos=_running(ranks.hellos)), [wish]


def _running(hellos: Mapping[int, Hello]) -> dict[int, Hello]:
    return {rank: replace(hello, state="running") for rank, hello in hellos.items()}


def ask(ranks: Ranks, wish: Order, next_seq: NextSeq) -> tuple[Ranks, list[Order]]:
    """Begin to have `wish` obeyed, at its step if it names one; return the orders for all ranks."""
    ranks = replace(ranks, stood=(-1, False))
    if ranks.world == 1:
        return replace(ranks, phase=None), [wish]
    if wish.at_step >= 0:  # all stand there, or will
        return replace(ranks, phase=Doing(wish, wish.seq, wish.at_step)), [wish]
    if wish.do not in TOGETHER:
        doing = Doing(wish, wish.seq)
        return replace(ranks, phase=doing if wish.do in ("resume", "probe") else ranks.phase), [wish]
    return _hold(ranks, wish, _steps_ahead(ranks), next_seq)


def heard(ranks: Ranks, rank: int, line: FromWorker, next_seq: NextSeq) -> tuple[Ranks, list[Order], FromWorker | None]:
    """Take a rank's line in; return the orders for all ranks, and the line of the task as a whole, if it says one."""
    if isinstance(line, Hello):
        ranks = replace(ranks, world=line.world, hellos={**ranks.hellos, rank: line})
    elif isinstance(line, Resumed):
        ranks = _stated(ranks, rank, "running")
    elif isinstance(line, Suspended) and ranks.world > 1:  # one alone may unpark without a word, to save and leave
        ranks = found_suspended(ranks, rank)
    if isinstance(line, Ready | Late):
        return _promised(ranks, rank, line, next_seq)
    if isinstance(line, Refused) and ranks.told_to_stand is not None:
        return _refused(ranks, line, next_seq)
    if ranks.world == 1:
        return ranks, [], line
    match line:
        case Hello():
            return ranks, [], _greeted(ranks)
        case Progress():
            ranks = replace(ranks, news={**ranks.news, rank: line})
            return ranks, [], _progress(ranks) if len(ranks.news) >= ranks.world else None
        case Finished() | Counted():
            return ranks, [], line
        case Refused():
            return _refused(_noted(ranks, rank, line), line, next_seq)
        case _:
            return _answered(ranks, rank, line)


def parted(ranks: Ranks, rank: int) -> Ranks:
    """Return the ranks without the connection of this one; it may come back."""
    return replace(ranks, hellos={each: hello for each, hello in ranks.hellos.items() if each != rank})


# --- phase 1 --------------------------------------------------------------------------------------------------------


def _steps_ahead(ranks: Ranks) -> int:
    step_s = max((line.step_s for line in ranks.news.values()), default=0.0)
    return AHEAD_STEPS + math.ceil(STALE_S / step_s) if step_s > 0 else AHEAD_STEPS_BLIND


def _hold(ranks: Ranks, wish: Order, ahead: int, next_seq: NextSeq) -> tuple[Ranks, list[Order]]:
    seq, at_step = next_seq(), ranks.step + ahead
    held = replace(ranks, phase=Holding(wish, seq, at_step, ahead))
    return held, [Order("hold", wish.gen, seq, at_step=at_step)]


def _promised(
    ranks: Ranks, rank: int, line: Ready | Late, next_seq: NextSeq
) -> tuple[Ranks, list[Order], FromWorker | None]:
    phase = ranks.phase
    if not isinstance(phase, Holding) or line.seq != phase.seq:
        return ranks, [], None
    if phase.wish.do == "hold":
        return _stands(ranks, phase, rank, line, next_seq)
    return *_held(ranks, phase, rank, line, next_seq), None


def _stands(
    ranks: Ranks, phase: Holding, rank: int, line: Ready | Late, next_seq: NextSeq
) -> tuple[Ranks, list[Order], FromWorker | None]:
    """Note whether a rank will stand where all are told to; if one cannot, the others need not either."""
    if isinstance(line, Late):
        late = replace(ranks, phase=None, stood=(phase.at_step, False), late_at=line.step)
        return late, [Order("resume", phase.wish.gen, next_seq())], None
    phase = replace(phase, ready=phase.ready | {rank})
    stood = (phase.at_step, True) if len(phase.ready) >= ranks.world else ranks.stood
    return replace(ranks, phase=phase, stood=stood), [], None


def _held(ranks: Ranks, phase: Holding, rank: int, line: Ready | Late, next_seq: NextSeq) -> tuple[Ranks, list[Order]]:
    if isinstance(line, Late):
        known = ranks.news.get(rank)
        if known is not None and line.step > known.step:
            ranks = replace(ranks, news={**ranks.news, rank: replace(known, step=line.step)})
        behind = max(0, line.step - ranks.step)
        return _hold(ranks, phase.wish, 2 * phase.ahead + behind, next_seq)
    ready = phase.ready | {rank}
    if len(ready) < ranks.world:
        return replace(ranks, phase=replace(phase, ready=ready)), []
    seq = next_seq()
    doing = Doing(phase.wish, seq, phase.at_step)
    return replace(ranks, phase=doing), [replace(phase.wish, seq=seq, at_step=phase.at_step)]


# --- phase 2 --------------------------------------------------------------------------------------------------------


def _answered(ranks: Ranks, rank: int, line: FromWorker) -> tuple[Ranks, list[Order], FromWorker | None]:
    phase = ranks.phase
    assert isinstance(line, Suspended | Resumed | Saved | Stacks)
    if not isinstance(phase, Doing) or line.seq != phase.seq:
        return ranks, [], None
    phase = replace(phase, answers={**phase.answers, rank: line})
    if len(phase.answers) < ranks.world:
        return replace(ranks, phase=phase), [], None
    return replace(ranks, phase=None, news=_caught_up(ranks, phase)), [], _joint_answer(phase)


def _caught_up(ranks: Ranks, phase: Doing) -> dict[int, Progress]:
    """Return the progress of all ranks, none older than its answer: no step may seem undone."""
    steps = {rank: line.step for rank, line in phase.answers.items() if isinstance(line, Suspended | Resumed | Saved)}
    return {rank: replace(line, step=max(line.step, steps.get(rank, -1))) for rank, line in ranks.news.items()}


def _joint_answer(phase: Doing) -> FromWorker:
    """Return the answers of all ranks as one, to the order `wish`."""
    lines = [phase.answers[rank] for rank in sorted(phase.answers)]
    seq = phase.wish.seq
    match lines[0]:
        case Suspended():
            parts = [line for line in lines if isinstance(line, Suspended)]
            return Suspended(
                seq,
                min(part.step for part in parts),
                sum(part.bytes for part in parts),
                sum(part.residue_bytes for part in parts),
                max(part.seconds for part in parts),
            )
        case Stacks():
            told = (f"rank {rank}:\n{line.text}" for rank, line in enumerate(lines) if isinstance(line, Stacks))
            return Stacks(seq, "\n".join(told)[:8192])
        case first:
            assert isinstance(first, Resumed | Saved)
            return replace(first, seq=seq)


def _noted(ranks: Ranks, rank: int, line: Refused) -> Ranks:
    """Note which ranks have refused to resume: the first of them speaks for the task, as others may never answer."""
    phase = ranks.phase
    if isinstance(phase, Doing) and phase.wish.do == "resume" and line.seq == phase.seq:
        return replace(ranks, stuck=(line.seq, frozenset({rank})))
    seq, some = ranks.stuck
    return replace(ranks, stuck=(seq, some | {rank})) if line.seq == seq else ranks


def _refused(ranks: Ranks, line: Refused, next_seq: NextSeq) -> tuple[Ranks, list[Order], FromWorker | None]:
    """Let the other ranks, which stand or have saved already, go on: this one cannot obey.

    If some may be suspended, it is for the caller to tell all, by an order that is watched.
    """
    phase = ranks.phase
    if phase is None or line.seq != phase.seq:
        return ranks, [], None
    together = phase.wish.do in ("leave", "save", "hold") or (phase.wish.do == "suspend" and ranks.apart)
    said = replace(line, seq=phase.wish.seq)
    if not together:
        return replace(ranks, phase=None), [], said
    told = replace(ranks, phase=None, hellos=_running(ranks.hellos))
    return told, [Order("resume", phase.wish.gen, next_seq())], said


# --- coming and going -----------------------------------------------------------------------------------------------


def _greeted(ranks: Ranks) -> Hello | None:
    """Return the hello of all ranks as one, once all are there: suspended if all are."""
    if not ranks.complete:
        return None
    hellos = [ranks.hellos[each] for each in sorted(ranks.hellos)]
    states = {hello.state for hello in hellos}
    state: Literal["running", "suspended"] = "suspended" if states == {"suspended"} else "running"
    first = hellos[0]
    sizes = [hello.state_bytes for hello in hellos]  # 0: that one does not know it yet
    metrics, diverged = newest_metrics(*((hello.metrics, hello.diverged) for hello in reversed(hellos)))
    return replace(
        first,
        state=state,
        step=min(hello.step for hello in hellos),
        saved_step=min(hello.saved_step for hello in hellos),
        can_park=all(hello.can_park for hello in hellos),
        can_checkpoint=all(hello.can_checkpoint for hello in hellos),
        finished=any(hello.finished for hello in hellos),
        state_bytes=sum(sizes) if all(sizes) else 0,
        metrics=metrics,
        diverged=diverged,
    )


def found_suspended(ranks: Ranks, rank: int) -> Ranks:
    """Return the ranks with this one as suspended."""
    return _stated(ranks, rank, "suspended")


def _stated(ranks: Ranks, rank: int, state: Literal["running", "suspended"]) -> Ranks:
    if rank not in ranks.hellos:
        return ranks
    return replace(ranks, hellos={**ranks.hellos, rank: replace(ranks.hellos[rank], state=state)})


def repeated_orders(ranks: Ranks, wish: Order, next_seq: NextSeq) -> tuple[Ranks, list[Order]]:
    """Return the orders to repeat after a reconnect, so that `wish` is obeyed; a repeated order is done once."""
    match ranks.phase:
        case Holding(wish=Order(seq=seq), at_step=at_step) as phase if seq == wish.seq:
            return ranks, [Order("hold", wish.gen, phase.seq, at_step=at_step)]
        case Doing(wish=Order(seq=seq), at_step=at_step) as phase if seq == wish.seq:
            return ranks, [replace(wish, seq=phase.seq, at_step=at_step)]
        case _:
            return ask(ranks, wish, next_seq)


def _progress(ranks: Ranks) -> Progress:
    lines = [ranks.news[rank] for rank in sorted(ranks.news)]
    metrics, diverged = newest_metrics(*((line.metrics, line.diverged) for line in reversed(lines)))
    return replace(
        lines[0],
        step=min(line.step for line in lines),
        step_s=max(line.step_s for line in lines),
        saved_step=min(line.saved_step for line in lines),
        can_park=all(line.can_park for line in lines),
        can_checkpoint=all(line.can_checkpoint for line in lines),
        metrics=metrics,
        diverged=diverged,
        state_bytes=sum(line.state_bytes for line in lines),
        arena_bytes=sum(line.arena_bytes for line in lines),
        peak_bytes=sum(line.peak_bytes for line in lines),
        trough_bytes=sum(line.trough_bytes for line in lines),
        samples=max(line.samples for line in lines),
        reserved_bytes=sum(line.reserved_bytes for line in lines),
    )
