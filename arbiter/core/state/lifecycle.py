"""Which state may follow which, as data. A pair that is not in the table is our own bug and stops the arbiter.

GPU::

    Free --grant--> Leased --revoke--> Draining --prove--> Free
                    Leased --renew---> Leased
                                       Draining --revise-> Draining   (promised to another; plan renumbered)

App::

    Dependent --queue--> Enrolling          Dependent --settle--> Settled
    Enrolling --admit--> Active --settle--> Settled
    Enrolling --refuse-> Refused            Enrolling --settle--> Settled      Refused --settle--> Settled
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from arbiter.core.state import model

GPU_TRANSITIONS: Mapping[tuple[type[Struct], type[Struct]], str] = {
    (model.Free, model.Leased): "grant",
    (model.Leased, model.Leased): "renew",
    (model.Leased, model.Draining): "revoke",
    (model.Draining, model.Draining): "revise",
    (model.Draining, model.Free): "prove",
}

APP_TRANSITIONS: Mapping[tuple[type[Struct], type[Struct]], str] = {
    (model.Dependent, model.Enrolling): "queue",
    (model.Dependent, model.Settled): "settle",
    (model.Enrolling, model.Active): "admit",
    (model.Enrolling, model.Refused): "refuse",
    (model.Enrolling, model.Settled): "settle",
    (model.Active, model.Settled): "settle",
    (model.Refused, model.Settled): "settle",
}


class IllegalTransition(AssertionError):  # noqa: N818 - its name says what it is
    """Our own bug: an object was about to enter a state that cannot follow; carries its whole story."""

    def __init__(self, id: str, start: str, finish: str, story: Sequence[model.StoryLine]) -> None:  # noqa: A002
        """Build the sentence from the object's id, the two state names and its story."""
        self.id, self.start, self.finish, self.story = id, start, finish, tuple(story)
        told = "; ".join(f"{chapter.at:.3f} {chapter.what}" for chapter in story) or "none"
        super().__init__(f"{id} cannot go from {start} to {finish}; its story: {told}")


def gpu_transition(gpu: model.Gpu, finish: model.GpuState, story: Sequence[model.StoryLine]) -> str:
    """Return the verb of this transition.

    Raises
    ------
    IllegalTransition
        If the table has no such pair, or a lease would follow another without the proof that the GPU is empty.
    """
    old = None if isinstance(gpu.state, model.Free) else gpu.state.lease.id
    new = None if isinstance(finish, model.Free) else finish.lease.id
    if old and new and old != new:
        raise IllegalTransition(gpu.id, f"the lease {old}", f"the lease {new}", story)
    return _verb(GPU_TRANSITIONS, gpu.id, gpu.state, finish, story)


def app_transition(app: model.App, finish: model.AppState, story: Sequence[model.StoryLine]) -> str:
    """Return the verb of this transition.

    Raises
    ------
    IllegalTransition
        If the table has no such pair.
    """
    return _verb(APP_TRANSITIONS, app.id, app.state, finish, story)


def _verb(
    table: Mapping[tuple[type[Struct], type[Struct]], str],
    id: str,  # noqa: A002
    start: Struct,
    finish: Struct,
    story: Sequence[model.StoryLine],
) -> str:
    verb = table.get((type(start), type(finish)))
    if verb is None:
        raise IllegalTransition(id, type(start).__name__, type(finish).__name__, story)
    return verb
