"""Wide gangs: leases that end one by one are brought to one end, so that a round has room for a gang that needs many.

A round may assign GPUs that are free and GPUs whose leases end soon. Leases are granted and renewed at all times, so
only a few end together. A wider gang would wait for as long as others renew, even when its turn has come. So when a
gang has waited for `align_after_leases` leases in which hardly a round had room for it, the arbiter picks the one
place where that disturbs the fewest apps. It draws out the leases there until the last of them ends; a lease that is
granted there meanwhile ends then, too. The next round has room for the gang. The policy decides which app gets the
GPUs, as ever, and is told which they are (`View.gathered`). If it is not that gang's turn, another such round comes
after as long a wait.

No GPU stands idle for it, no job leaves earlier than it would have, and no lease is longer than one that begins now,
nor drawn out again before a round has decided about it. A GPU that still drains for its winner ends as if its lease
began now. Where GPUs have several seats, leases are aligned for gangs only that share no GPU, since the others come as
guests; of each GPU it is the lease of its owner, and one that only guests are on is in play at any time.

*Source:* ours; Astraea and Themis, whose rounds look at all GPUs at once, have no such gangs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf

from msgspec.structs import replace

from arbiter.core.leases import leases
from arbiter.core.placement.locality import LOOSENESS, group, place_of
from arbiter.core.seam import GpuView, wait_start
from arbiter.core.state import model
from arbiter.core.state.index import Cache
from arbiter.core.state.model import App, BlockedGangs, Draining, Free, Gpu, Leased
from arbiter.core.turn import Turn
from protocol import gpu_kinds
from protocol.messages import LEVELS, AppId, GpuId, Level, Requirements

#: A round with room for a gang leaves so much of its wait. Several in each lease mean that it waits for its turn, not
#: for room; one in each may be of leases that end together and always go to others, and must not put it off for ever.
ROOM_LEAVES = 0.6

_Kind = tuple[int, bool, Level, tuple[str, ...], int]  #: of `BlockedGangs`, without the time
#: By app: the kind of its gangs, with the app that it was derived from.
KINDS: Cache[AppId, tuple[App, _Kind | None]] = Cache(lasting=True, by_app=True)


def look(turn: Turn, in_play: Sequence[GpuId]) -> None:
    """After a round about these GPUs: note which gangs it had no room for, and align leases for those that wait long.

    At most one place is aligned after each round, for the widest.
    """
    settings = turn.state.settings
    traits = turn.policy.traits
    if settings.align_after_leases <= 0.0 or traits.tenure != "lease" or traits.together:
        turn.state.blocked, turn.state.aligned = (), {}
        return
    turn.state.aligned = {gpu: end for gpu, end in turn.state.aligned.items() if end > turn.now}
    _keep_gangs_together(turn)
    waiting = _waiting(turn)
    since = {
        (each.gang, each.spans, each.level_max, each.gpu_types, each.min_memory_bytes): each.since
        for each in turn.state.blocked
    }
    blocked = []
    aligned = False
    for kind in sorted(waiting, reverse=True):
        began = since[kind] if kind in since else min(_waits_since(turn, app) for app in waiting[kind])
        gang, spans, level_max, gpu_types, min_memory_bytes = kind
        found = BlockedGangs(gang, spans, level_max, began, gpu_types, min_memory_bytes)
        waited_s = turn.now - found.since
        if _has_room(turn, found, in_play):
            found = replace(found, since=turn.now - ROOM_LEAVES * waited_s)
        elif not aligned and waited_s >= settings.align_after_leases * settings.lease_s:
            aligned = _align(turn, found, waiting[kind])
            found = replace(found, since=turn.now) if aligned else found
        blocked.append(found)
    turn.state.blocked = tuple(blocked)


def _waiting(turn: Turn) -> dict[_Kind, list[App]]:
    """Return the apps that have no GPU and are promised none, by the kind of their gangs."""
    index, apps, kinds, seen = turn.index, turn.state.apps, KINDS.of(turn.index), turn.state.seen
    timeout_s = turn.state.settings.app_timeout_s
    without = index.active - leases.promised(turn).keys()
    without -= {app_id for app_id in without & index.holders if leases.held(turn, app_id)}
    waiting: dict[_Kind, list[App]] = {}
    shared = _has_guests(turn)
    for app_id in without:
        app, known = apps[app_id], kinds.get(app_id)
        if known is None or known[0] is not app:
            known = kinds[app_id] = (app, _kind_of(app))
        kind = known[1]
        heard = turn.now - seen.get(app_id, app.arrived_at) <= timeout_s  # `turn.hears`
        if kind and (not shared or app.whole_gpus) and heard:
            waiting.setdefault(kind, []).append(app)
    return waiting


def _kind_of(app: App) -> _Kind | None:
    """Return the kind of an app's gangs; None if it has none of several GPUs that could wait for room."""
    if not (1 < app.gang <= app.demand_max and app.only is None):
        return None
    return app.gang, app.spans, app.level_max, app.requirements.gpu_types, app.requirements.min_memory_bytes


def _has_guests(turn: Turn) -> bool:
    """Whether GPUs are shared, or still are by some that came while they were."""
    gpus = turn.state.gpus.values() if turn.index.divided else ()
    return turn.state.settings.shared or any(
        not (model.is_first(gpu.id) or isinstance(gpu.state, Free)) for gpu in gpus
    )


def _waits_since(turn: Turn, app: App) -> float:
    """Return since when an app is known to wait, at the first round that finds it waiting."""
    return turn.now if app.tally.grants else wait_start(app.arrived_at, app.released_at)


def _has_room(turn: Turn, kind: BlockedGangs, in_play: Sequence[GpuId]) -> bool:
    """Whether these GPUs hold such a gang."""
    known, level = turn.state.gpus, _levels(kind)[-1]
    counts: Counter[tuple[str, ...]] = Counter()
    for gpu in _suitable(kind, [known[gpu] for gpu in in_play if gpu in known]):
        place = place_of(turn.index.show(gpu), level)
        counts[place] += 1
        if counts[place] >= kind.gang:
            return True
    return False


def _suitable(kind: BlockedGangs, gpus: Iterable[Gpu]) -> Iterable[Gpu]:
    """Return the GPUs of the kind that the users of such gangs asked for."""
    if not kind.gpu_types and not kind.min_memory_bytes:
        return gpus
    wished = Requirements(gpu_types=kind.gpu_types, min_memory_bytes=kind.min_memory_bytes)
    return [gpu for gpu in gpus if gpu_kinds.suits(wished, gpu.model, gpu.memory_bytes)]


def _levels(kind: BlockedGangs) -> Sequence[Level]:
    """Return the places that may hold such a gang, the tightest first."""
    loosest: Level = kind.level_max if kind.spans else min("machine", kind.level_max, key=LOOSENESS.__getitem__)
    tightest: Level = min("machine", loosest, key=LOOSENESS.__getitem__)
    return LEVELS[LOOSENESS[tightest] : LOOSENESS[loosest] + 1]


def _align(turn: Turn, kind: BlockedGangs, waiting: Sequence[App]) -> bool:
    """Let the leases in one place that holds such a gang end together; return whether there is such a place."""
    open_ = [gpu for gpu in _suitable(kind, _owned(turn)) if _ends(turn, gpu) < inf]
    views = [turn.index.show(gpu) for gpu in open_]
    for level in _levels(kind):
        best: list[Gpu] = []
        best_key = (inf, inf)
        places: dict[tuple[str, ...], list[GpuView]] = {}
        for view in views:
            places.setdefault(place_of(view, level), []).append(view)
        for _, inside in sorted(places.items()):
            chosen = _with_mates(turn, _soonest(turn, inside, kind.gang))
            taken = [gpu for gpu in chosen if not isinstance(gpu.state, Free)]
            end = max((_ends(turn, gpu) for gpu in taken), default=turn.now)
            leased = {_ends(turn, gpu) for gpu in taken if isinstance(gpu.state, Leased)}
            drain = any(isinstance(gpu.state, Draining) for gpu in taken)
            apart = drain or len(leased) > 1 or len(taken) < len(chosen)  # else a round decides about them all as it is
            late = end > turn.now + turn.state.settings.renewal_lead_s  # else it will not know of what comes meanwhile
            key = (len(taken), end)
            if chosen and apart and late and key < best_key:
                best, best_key = chosen, key
        if best:
            _end_together(turn, kind, best, best_key[1], waiting)
            return True
    return False


def _owned(turn: Turn) -> list[Gpu]:
    """Return all GPUs; where they have several seats, the seat of each that its owner has, or could have."""
    gpus = turn.state.gpus
    if not turn.index.divided:
        return [gpu for _, gpu in sorted(gpus.items())]

    def rank(gpu: Gpu) -> tuple[object, ...]:
        match gpu.state:
            case Draining(promised_to=winner) if winner is not None:
                return (0,)
            case Leased():
                return (1, *leases.seniority(gpu))
            case _:
                return (2, isinstance(gpu.state, Draining), gpu.parked, model.seat_number(gpu.id))

    return [min((gpus[seat] for seat in sorted(seats)), key=rank) for _, seats in sorted(turn.index.seats.items())]


def _ends(turn: Turn, gpu: Gpu) -> float:
    """Return when a round may assign this GPU, from now on; never where that is not known."""
    if not model.usable(turn.state, gpu) or gpu.id in turn.state.aligned:
        return inf
    match gpu.state:
        case Free():
            return turn.now if leases.is_in_play(turn, gpu) else inf
        case Leased(lease) if lease.guest:
            return turn.now
        case Leased(lease) if lease.expires_at <= turn.now + turn.state.settings.lease_s:
            return lease.expires_at
        case Draining(promised_to=winner) if winner is not None:
            return turn.now + turn.state.settings.lease_s
        case _:
            return inf


def _soonest(turn: Turn, inside: Sequence[GpuView], count: int) -> list[Gpu]:
    """Return so many GPUs of one place, from as few nodes as may be, those first that end soonest; or none."""
    if len(inside) < count:
        return []
    nodes = [[turn.state.gpus[view.gpu] for view in views] for views in group(inside, lambda view: view.node).values()]
    for gpus in nodes:
        gpus.sort(key=lambda gpu: (_ends(turn, gpu), gpu.id))
    nodes.sort(key=lambda gpus: (-min(len(gpus), count), _ends(turn, gpus[:count][-1]), gpus[0].node))
    return [gpu for gpus in nodes for gpu in gpus][:count]


def _with_mates(turn: Turn, gpus: Sequence[Gpu]) -> list[Gpu]:
    """Return these and whatever belongs to their gangs: of a gang that lost a part, the rest would be of no use."""
    found = {gpu.id: gpu for gpu in gpus}
    promised = leases.promised(turn)
    for gpu in gpus:
        app = turn.state.apps.get(_whose(gpu))
        if app is not None and app.gang > 1:
            mates = (*leases.held(turn, app.id), *promised.get(app.id, ()))
            found |= {
                mate.id: mate for mate in mates if (app.spans or mate.node == gpu.node) and _ends(turn, mate) < inf
            }
    return list(found.values())


def _whose(gpu: Gpu) -> AppId:
    """Return who has a GPU, or will have it once it is empty."""
    match gpu.state:
        case Leased(lease):
            return lease.app
        case Draining(promised_to=winner) if winner is not None:
            return winner
        case _:
            return AppId("")


def _keep_gangs_together(turn: Turn) -> None:
    """Let all that a gang was given in this round end with what of it is aligned."""
    for gpu_id, end in sorted(turn.state.aligned.items()):
        gpu = turn.state.gpus.get(gpu_id)
        if gpu is None or not isinstance(gpu.state, Leased) or turn.state.apps[gpu.state.lease.app].gang == 1:
            continue
        lease = gpu.state.lease
        if lease.round != turn.state.round or lease.expires_at > end:  # one renewed in the last moment ends later
            continue
        for mate in leases.held(turn, lease.app):
            if isinstance(mate.state, Leased) and mate.state.lease.round == lease.round:
                if mate.state.lease.expires_at > end:
                    turn.put_gpu(mate, Leased(replace(mate.state.lease, expires_at=end)))
                turn.state.aligned[mate.id] = end


def _end_together(turn: Turn, kind: BlockedGangs, gpus: Sequence[Gpu], end: float, waiting: Iterable[App]) -> None:
    taken = [gpu for gpu in gpus if not isinstance(gpu.state, Free)]
    turn.state.aligned |= {gpu.id: end for gpu in sorted(gpus, key=lambda gpu: gpu.id)}
    for gpu in taken:
        if isinstance(gpu.state, Leased) and gpu.state.lease.expires_at < end:
            turn.put_gpu(gpu, Leased(replace(gpu.state.lease, expires_at=end)))
            turn.tell(gpu.id, f"its lease goes on until others end, for a gang of {kind.gang}")
    nodes = ", ".join(sorted({gpu.node for gpu in taken}))
    for app in sorted(waiting, key=lambda app: app.id):
        turn.tell(
            app.id,
            f"no round had room for its gang of {kind.gang} for {turn.now - kind.since:.0f} s, so the leases of "
            f"{len(taken)} GPUs on {nodes} end together in {end - turn.now:.0f} s, when a round decides about them all",
        )
