"""Former leaders: an arbiter that lives on beside the one that has taken over from it, until it learns of that.

It learns it from the store of the journal, which refuses its next commit, as live (`arbiter.daemon`). It may still
perform the effects that it committed before that, however late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from arbiter.core.effects import EpochTaken
from protocol.core import Send
from protocol.journal import Deposed
from simulator.faults.journals import Effects, Record, Writer
from simulator.faults.scenario import Lives
from simulator.world import Actor, World

Aside = Callable[[Actor, Any], object]  #: told of a former leader, and what it has handled or why it is deposed


class Former:
    """A former leader: its process, and what that has handled and not committed.

    Parameters
    ----------
    world, record, actor
        Its world, the journal, and its process.
    lives
        How it is that it lives. One that is cut from the others hears nothing, and commits each event. One that is slow
        hears what the leader hears, and commits all of that at once. One that was stopped does the same with what had
        come before.
    late
        Effects of its last commit as the leader, which it has not performed yet.
    commit
        Commits what it has written, or raises `Deposed`.
    aside, on_deposed
        Told what it has handled; told that it is deposed, and has performed nothing of that.
    """

    def __init__(
        self,
        world: World,
        record: Record,
        actor: Actor,
        lives: Lives,
        late: Effects,
        commit: Callable[[Writer, Actor], None],
        aside: Aside,
        on_deposed: Callable[[Former], None],
    ) -> None:
        self.actor = actor
        self._world = world
        self._late = late
        self._commit, self._aside, self._on_deposed = commit, aside, on_deposed
        actor.log = self._writer = Writer(record, world, actor)
        self._withheld: list[Any] = []  #: effects of what it has handled since its last commit
        self._in_batches = lives != "cut"
        if lives == "slow":
            world.beside = actor

    def may_perform(self, event: Any, effects: Effects) -> bool:
        """Whether it may perform these effects of an event: only if the store has taken it."""
        self._aside(self.actor, event)
        if self._in_batches:
            self._withheld += effects
            return False
        return self._is_taken()

    def go_on(self) -> None:
        """Let it perform what it had committed, hear what waits, and commit that."""
        if not self.actor.up:  # it knows by now that it is deposed
            return
        late, self._late = self._late, ()
        try:
            for effect in late:  # its records would go with its next commit, and so would what its policy answers
                if isinstance(effect, Send):
                    self._world.carry(self.actor.party, effect)
                elif isinstance(effect, EpochTaken):
                    self._world.take_epoch(self.actor, effect.epoch)
        except Deposed as deposed:
            self._be_deposed(deposed)
            return
        if self.actor.held is None:
            self.actor.held = []
        self._in_batches = True
        self._world.go_on(self.actor)
        self._world.call_later(0.0, self._end_batch)

    def end(self) -> None:
        """End its process."""
        self._world.end(self.actor)
        self._world.beside = None

    def _end_batch(self) -> None:
        """Let it commit what it has handled, and perform that if the store takes it."""
        if self.actor.up and self._is_taken():
            withheld, self._withheld = self._withheld, []
            self._world.perform(self.actor, withheld)

    def _is_taken(self) -> bool:
        """Whether the store takes what it has handled; if not, it leads no more."""
        try:
            self._commit(self._writer, self.actor)
        except Deposed as deposed:
            self._be_deposed(deposed)
            return False
        return True

    def _be_deposed(self, deposed: Deposed) -> None:
        self._aside(self.actor, deposed)
        self.end()
        self._on_deposed(self)
