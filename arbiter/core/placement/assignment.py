"""Assignment of the GPUs in play by whole gangs, admission, and the sentences on it: shared by all policies.

Rounds may have thousands of apps and of GPUs, and most apps get nothing. So what is left is kept by node, an app
that cannot be served is passed over without a look at any GPU, and only an app that gets new GPUs has places compared.

Preferred are, in this order: GPUs the app holds (a renewal is no restart), for an app that spans nodes the rack
where it is already, nodes where it is already, one node that holds all it gets (else, for an app that spans, one
rack), free GPUs before those that another app must leave, the tightest hole, one slot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush
from types import MappingProxyType

from arbiter.core.placement.locality import LOOSENESS, PLACE, dense, most_whole, place_of
from arbiter.core.seam import Admission, AppView, GpuView, View
from protocol import gpu_kinds
from protocol.messages import AppId, GpuId, Level, NodeId, locality

Pool = dict[GpuId, GpuView]

#: What is left for apps that name the GPUs that they can use is kept for so many such names.
PARTS_KEPT = 16
#: The cost of a move while none was measured, seconds: the upper end for restarts of training scripts.
MOVE_S = 60.0


class Holes:
    """GPUs that are left, by node; nodes with none are not there.

    `departures` names those that a holder must leave first, and says how much that is to be avoided (1 or more).
    """

    def __init__(self, gpus: Iterable[GpuView], departures: Mapping[GpuId, int] = MappingProxyType({})) -> None:
        self.nodes: dict[NodeId, Pool] = {}
        self.views: Pool = {}
        for gpu in gpus:
            self._put(gpu)
        self.departures: dict[GpuId, int] = {}
        self._occupied: Counter[NodeId] = Counter()
        self._alike = True  # every departure weighs 1
        #: By node, as far as known: the weights of what is left of it, rising, and how many GPUs are vacant.
        self._weights: dict[NodeId, tuple[list[int], int]] = {}
        self._rankings: dict[object, _Ranking] = {}
        self._changes: list[NodeId] = []  #: nodes of which anything has changed since the first ranking was made
        self.removed: list[GpuId] = []  #: all that were taken out, in that order
        self.otherwise = 0  #: how often anything else has changed than that a GPU was taken out
        for gpu_id in self.views if departures else ():
            if gpu_id in departures:
                self.add_departure(gpu_id, departures[gpu_id])

    def __len__(self) -> int:
        return len(self.views)

    def __contains__(self, gpu: GpuId) -> bool:
        return gpu in self.views

    def __iter__(self) -> Iterator[GpuView]:
        return iter(self.views.values())

    def _put(self, gpu: GpuView) -> None:
        self.views[gpu.gpu] = gpu
        pool = self.nodes.get(gpu.node)
        if pool is None:
            pool = self.nodes[gpu.node] = {}
        pool[gpu.gpu] = gpu

    def _note_change(self, node: NodeId) -> None:
        self._weights.pop(node, None)
        if self._rankings:
            self._changes.append(node)

    def add_departure(self, gpu: GpuId, weight: int) -> None:
        """Say, or say anew, that a holder must leave this GPU first; a GPU that is not left is passed over."""
        view = self.views.get(gpu)
        if view is not None:
            self.otherwise += 1
            if gpu not in self.departures:
                self._occupied[view.node] += 1
            self.departures[gpu] = weight
            self._note_change(view.node)
            self._alike = self._alike and weight == 1

    def level_departures(self) -> None:
        """Let every departure weigh 1."""
        self.otherwise += 1
        self.departures = dict.fromkeys(self.departures, 1)
        self._weights.clear()
        self._rankings.clear()
        self._changes.clear()
        self._alike = True

    def add(self, gpu: GpuView) -> None:
        """Put back a GPU, which no app must leave first."""
        self.otherwise += 1
        self._put(gpu)
        self._note_change(gpu.node)

    def remove(self, gpu: GpuId) -> GpuView:
        """Take out a GPU, which must be left."""
        view = self.views.pop(gpu)
        self.removed.append(gpu)
        pool = self.nodes[view.node]
        del pool[gpu]
        if not pool:
            del self.nodes[view.node]
        if self.departures.pop(gpu, None) is not None:
            self._occupied[view.node] -= 1
        self._note_change(view.node)
        return view

    def _first(self, name: object, key_of: Callable[[NodeId, Pool], tuple[int, ...] | None]) -> _Keyed | None:
        """Return the node with the least key, and of equal ones by its name; those without a key do not count.

        Kept by `name`: between two questions few nodes change, and only these get their keys anew.
        """
        ranking = self._rankings.get(name)
        if ranking is None:
            keys = {node: key for node, pool in self.nodes.items() if (key := key_of(node, pool)) is not None}
            ranking = self._rankings[name] = _Ranking(keys, len(self._changes))
        elif ranking.seen < len(self._changes):
            for node in sorted(set(self._changes[ranking.seen :])):
                pool = self.nodes.get(node)
                ranking.put(node, None if pool is None else key_of(node, pool))
            ranking.seen = len(self._changes)
        return ranking.first()

    def largest(self) -> int:
        """Return the most GPUs that are left on one node."""
        found = self._first("largest", lambda _, pool: (-len(pool),))
        return 0 if found is None else -found[0][0]

    def tightest(self, count: int) -> NodeId | None:
        """Return the node with the fewest GPUs left that has so many vacant ones; None when there is none."""

        def size(node: NodeId, pool: Pool) -> tuple[int, ...] | None:
            return (len(pool),) if len(pool) - self._occupied.get(node, 0) >= count else None

        found = self._first(count, size)
        return None if found is None else found[1]

    def best(self, left: int, chunk: int) -> tuple[NodeId, int] | None:
        """Return the best node for `left` more GPUs of an app that has none on any, and how many to take there."""

        def key(node: NodeId, pool: Pool) -> tuple[int, ...] | None:
            take = most_whole(len(pool), left, 0, chunk)
            return _key(self, node, pool, take, left) if take else None

        found = self._first((left, chunk), key)
        return None if found is None else (found[1], most_whole(len(self.nodes[found[1]]), left, 0, chunk))

    def disturbed(self, node: NodeId, pool: Pool, take: int, held: Collection[GpuId]) -> tuple[int, int]:
        """Return the greatest weight of a departure for taking so many GPUs of `pool`, and the number of departures."""
        occupied = self._occupied.get(node, 0)
        if not occupied:
            return (0, 0)
        if not held and len(pool) == len(self.nodes[node]):
            if self._alike:
                touched = max(0, take - len(pool) + occupied)
                return (min(1, touched), touched)
            known = self._weights.get(node)
            if known is None:
                rising = sorted(self.departures.get(gpu, 0) for gpu in pool)
                known = self._weights[node] = rising, bisect_right(rising, 0)
            return known[0][take - 1], max(0, take - known[1])
        weights = sorted(0 if gpu in held else self.departures.get(gpu, 0) for gpu in pool)[:take]
        return (weights[-1], sum(weight > 0 for weight in weights))


_Keyed = tuple[tuple[int, ...], NodeId]


class _Ranking:
    """Nodes by their keys, the least first; the heap may hold keys that are no more."""

    def __init__(self, keys: dict[NodeId, tuple[int, ...]], seen: int) -> None:
        self.seen = seen  #: so many of the changes are taken in
        self._keys = keys
        self._heap: list[_Keyed] = [(key, node) for node, key in keys.items()]
        heapify(self._heap)

    def put(self, node: NodeId, key: tuple[int, ...] | None) -> None:
        """Give a node another key, or none."""
        if key is None:
            self._keys.pop(node, None)
        elif self._keys.get(node) != key:
            self._keys[node] = key
            heappush(self._heap, (key, node))

    def first(self) -> _Keyed | None:
        """Return the least key and its node."""
        heap = self._heap
        while heap and self._keys.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0] if heap else None


class _Part:
    """Those of the GPUs that are left which some apps can use at all; it follows what is taken out."""

    def __init__(self, left: Holes, only: Sequence[GpuId]) -> None:
        self.only = only
        self._left, self._seen, self._otherwise = left, len(left.removed), left.otherwise
        self._holes = Holes((left.views[gpu] for gpu in only if gpu in left), left.departures)

    def is_of(self, only: Sequence[GpuId]) -> bool:
        """Whether it is of these very GPUs, and nothing has changed but that some were taken out."""
        return self.only is only and self._otherwise == self._left.otherwise

    def holes(self) -> Holes:
        """Return what there is of them."""
        removed = self._left.removed
        for gpu in removed[self._seen :]:
            if gpu in self._holes:
                self._holes.remove(gpu)
        self._seen = len(removed)
        return self._holes


class Deal:
    """The GPUs in play while they are dealt: those that are left, and those of each app; none goes to two apps.

    Unless given, `gpus` are all that are in play, and `departures` (see `Holes`) those that an app of the view holds.
    """

    def __init__(
        self, view: View, gpus: Iterable[GpuView] | None = None, departures: Mapping[GpuId, int] | None = None
    ) -> None:
        if departures is None:
            departures = {gpu: 1 for app in view.apps for gpu in app.renewable}
        self.left = Holes(view.gpus if gpus is None else gpus, departures)
        self.got: defaultdict[AppId, list[GpuView]] = defaultdict(list)
        self._owner: dict[GpuId, AppId] = {}
        self._aside: set[GpuId] = set()
        self._parts: dict[int, _Part] = {}  #: by the id of the GPUs that apps can use, which many have in common

    @property
    def assign(self) -> dict[GpuId, AppId]:
        """The assignment so far, by GPU."""
        return dict(sorted(self._owner.items()))

    def give(self, app: AppId, gpus: Iterable[GpuView]) -> None:
        """Give these GPUs, which must be left, to `app`."""
        for gpu in gpus:
            self.got[app].append(self.left.remove(gpu.gpu))
            self._owner[gpu.gpu] = app

    def take_back(self, app: AppId) -> None:
        """Put all GPUs that `app` got back to those that are left, vacant."""
        for gpu in self.got.pop(app, ()):
            self.left.add(gpu)
            del self._owner[gpu.gpu]

    def renew(self, app: AppView, gpus_max: int | None = None) -> int:
        """Give `app` as many of the GPUs it holds as are left and make whole gangs; return how many."""
        own = [self.left.views[gpu] for gpu in app.renewable if gpu in self.left]
        room = self._room(app, gpus_max)
        if not own or room <= 0:
            return 0
        near = (*app.kept, *self.got[app.app])
        if len(own) > room or not _stands(app, own, near):
            own = pick(Holes(app.usable(own)), app, room, near=near, held=app.renewable)
        self.give(app.app, own)
        return len(own)

    def fill(self, app: AppView, gpus_max: int | None = None) -> int:
        """Give `app` whole gangs of what is left, up to all it wants or `gpus_max`; return how many GPUs."""
        room = self._room(app, gpus_max)
        near = (*app.kept, *self.got[app.app])
        if room <= 0 or not self.left or (not near and min(room, self.left.largest()) < app.chunk):
            return 0
        bundle = pick(self._pool(app), app, room, near=near, held=app.renewable)
        self.give(app.app, bundle)
        return len(bundle)

    def room(self, app: AppView) -> int:
        """Return how many GPUs `app` could still use."""
        return app.want - len(self.got[app.app])

    def _room(self, app: AppView, gpus_max: int | None) -> int:
        room = self.room(app)
        return room if gpus_max is None else min(room, gpus_max)

    def _pool(self, app: AppView) -> Holes:
        """Return what is left and `app` can use at all."""
        if app.only is None:
            return self.left
        part = self._parts.get(id(app.only))
        if part is None or not part.is_of(app.only):
            part = self._parts[id(app.only)] = _Part(self.left, app.only)
            if len(self._parts) > PARTS_KEPT:
                del self._parts[next(iter(self._parts))]
        return part.holes()

    def hole(self, app: AppView) -> int:
        """Return the most GPUs that are left and `app` can use in one place that could hold its gang."""
        return _largest(self._pool(app), gang_place(app))

    def set_aside(self, app: AppView, most: int | None = None) -> int:
        """Leave what is left and `app` can use, `most` GPUs at most, to no other app; return how many."""
        found = sorted(gpu.gpu for gpu in self._pool(app))[:most]
        for gpu in found:
            self.left.remove(gpu)
        self._aside.update(found)
        return len(found)

    def waits_for_set_aside(self, app: AppView) -> bool:
        """Whether `app` can use certain GPUs only, and some of them are set aside for an app before it."""
        return app.only is not None and not self._aside.isdisjoint(app.only)

    def losses(self, app: AppView) -> str:
        """Return a clause on the GPUs `app` held and does not get again; empty when there are none."""
        return losses([gpu for gpu in app.renewable if self._owner.get(gpu) != app.app], self._owner)

    def misfit(self, app: AppView) -> str:
        """Return a clause on why nothing that is left serves `app`, now."""
        if not self.left:
            return self._all_gone
        pool = self._pool(app)
        if not pool:
            return unusable(app, len(self.left))
        if self.room(app) < app.gang:
            return f"it can use {gpus(self.room(app))} more, and its gangs are of {app.gang}"
        place = gang_place(app)
        hole = _largest(pool, place)
        if hole < app.gang and app.by_kind:
            needs = gpu_kinds.counted(app.requirements, app.gang)
            return f"it needs {needs} within {PLACE[place]}, and the largest hole of that kind is {hole}"
        if hole < app.gang:
            if place == "cluster":
                return too_few_left(app, hole)
            return f"it needs a gang of {app.gang} on {PLACE[place]}, and the largest hole is {hole}"
        return f"none of the {gpus(len(pool))} left is within {PLACE[app.level_max]} together with what it has"

    @cached_property
    def _all_gone(self) -> str:
        """Said to every app that comes too late; when nothing is left nothing changes any more."""
        return all_gone(self._owner.values())


# --- which GPUs -----------------------------------------------------------------------------------------------------


def move_s(app: AppView) -> float:
    """Return what it costs to move a job of `app`, in seconds: as measured, else a guess."""
    return app.move_s or MOVE_S


def pick(
    holes: Holes,
    app: AppView,
    count: int,
    *,
    near: Sequence[GpuView] = (),
    held: Collection[GpuId] = (),
) -> list[GpuView]:
    """Return up to `count` GPUs of `holes` that make up a good bundle of whole gangs; fewer when no more fit.

    Parameters
    ----------
    holes
        What may be chosen from; `app.only` is not looked at.
    app
        Its `level_max` bounds the union of the chosen and `near`; on each node chosen from, they are a multiple of
        its `chunk`, and if its gangs span nodes, a multiple of its `gang` in all.
    count
        The most GPUs to choose.
    near
        GPUs the app has anyway.
    held
        GPUs to take first, vacant or not.
    """
    if app.spans:
        count = min(count, len(holes))
        count -= (len(near) + count) % app.gang
    if count <= 0:
        return []
    if not near and not held and app.level_max != "slot" and count % app.chunk == 0:
        node = holes.tightest(count)
        if node is not None:
            return _of_node(holes, holes.nodes[node], count, (), ())
    if app.spans and app.level_max == "cluster" and (near or count > holes.largest()):
        bundle = _best(holes, app, count, "rack", near, held)
        if len(bundle) == count and _owned(bundle, held) == min(count, sum(gpu in holes for gpu in held)):
            return bundle
    return _best(holes, app, count, app.level_max, near, held)


def _best(
    holes: Holes, app: AppView, count: int, level: Level, near: Sequence[GpuView], held: Collection[GpuId]
) -> list[GpuView]:
    """Return the best bundle in one place of that level."""
    homes = {place_of(gpu, level) for gpu in near}
    if len(homes) > 1:
        return []  # its own GPUs already lie further apart than that, so no union can lie closer
    kept_on: Mapping[NodeId, int] = Counter([gpu.node for gpu in near]) if near else {}
    owned_on: Mapping[NodeId, int] = Counter([holes.views[gpu].node for gpu in held if gpu in holes]) if held else {}
    best: list[GpuView] = []
    best_key = (0, 0, False, 0, 0)
    # There is one cluster, with which no other place is compared.
    if level == "cluster":
        best = _fill(holes, holes.nodes, count, app.chunk, near, held, kept_on, owned_on)
    else:
        for place, pools in _places(holes, level):
            if homes and place not in homes:
                continue
            bundle = _fill(holes, pools, count, app.chunk, near, held, kept_on, owned_on)
            if bundle:
                own = _owned(bundle, held)
                one = len(pools) == 1 or len({gpu.node for gpu in bundle}) == 1
                touched = (
                    sum(gpu.gpu in holes.departures and gpu.gpu not in held for gpu in bundle)
                    if holes.departures
                    else 0
                )
                key = (len(bundle), own, one, -touched, -sum(map(len, pools.values())))
                if not best or key > best_key:
                    best, best_key = bundle, key
    if app.spans and (len(near) + len(best)) % app.gang:
        short = len(best) - (len(near) + len(best)) % app.gang
        return _best(holes, app, short, level, near, held) if short > 0 else []
    return best


def _owned(bundle: Sequence[GpuView], held: Collection[GpuId]) -> int:
    """Return how many GPUs of a bundle are among those that are held."""
    return sum(gpu.gpu in held for gpu in bundle) if held else 0


def _places(holes: Holes, level: Level) -> Iterator[tuple[tuple[str, ...], Mapping[NodeId, Pool]]]:
    """Yield the places of that level within the cluster, by name, each with what is left in it by node."""
    places: dict[tuple[str, ...], dict[NodeId, Pool]] = {}
    for node, pool in holes.nodes.items():
        if level != "slot":  # GPUs of one node are in one rack
            places.setdefault(place_of(next(iter(pool.values())), level), {})[node] = pool
            continue
        for gpu in pool.values():
            places.setdefault(place_of(gpu, level), {}).setdefault(node, {})[gpu.gpu] = gpu
    yield from sorted(places.items())


def _fill(
    holes: Holes,
    pools: Mapping[NodeId, Pool],
    count: int,
    chunk: int,
    near: Sequence[GpuView],
    held: Collection[GpuId],
    kept_on: Mapping[NodeId, int],
    owned_on: Mapping[NodeId, int],
) -> list[GpuView]:
    """Return up to `count` GPUs of `pools`, node by node."""
    chosen: list[GpuView] = []
    if pools is holes.nodes and not kept_on and not owned_on:
        first = holes.best(count, chunk)
        if first is None:
            return chosen
        node, take = first
        chosen = _of_node(holes, pools[node], take, near, held)
        if len(chosen) == count:
            return chosen
        open_ = {other: pool for other, pool in pools.items() if other != node}
    else:
        open_ = dict(pools)
    while len(chosen) < count:
        left = count - len(chosen)
        # A node with GPUs of the app comes before any other, so only without one are the others looked at.
        own = [node for node in {*kept_on, *owned_on} if node in open_]
        best = _next(holes, open_, own, left, chunk, held, kept_on, owned_on)
        if best is None:
            best = _next(holes, open_, open_, left, chunk, held, kept_on, owned_on)
        if best is None:
            return chosen
        node, take = best
        del open_[node]
        chosen += _of_node(holes, pools[node], take, (*near, *chosen), held)
    return chosen


def _next(
    holes: Holes,
    pools: Mapping[NodeId, Pool],
    among: Iterable[NodeId],
    left: int,
    chunk: int,
    held: Collection[GpuId],
    kept_on: Mapping[NodeId, int],
    owned_on: Mapping[NodeId, int],
) -> tuple[NodeId, int] | None:
    """Return the best of these nodes for `left` more GPUs, with the least key of all, and the GPUs to take."""
    best: tuple[tuple[int, ...], NodeId] | None = None
    best_take = 0
    for node in among:
        pool, kept, owned = pools[node], kept_on.get(node, 0), owned_on.get(node, 0)
        take = most_whole(len(pool), left, kept, chunk)
        if not take:
            continue
        key = (-min(take, owned), -kept, *_key(holes, node, pool, take, left, held if owned else ())), node
        if best is None or key < best:
            best, best_take = key, take
    return None if best is None else (best[1], best_take)


def _key(holes: Holes, node: NodeId, pool: Pool, take: int, left: int, held: Collection[GpuId] = ()) -> tuple[int, ...]:
    """Return how good a node is to take so many of `left` GPUs from, the least the best.

    First one that has them all: of these the one with the lightest departures, and the fullest; then the one with most.
    """
    worst, touched = holes.disturbed(node, pool, take, held) if holes.departures else (0, 0)
    size = len(pool)
    return (0, worst, touched, size, 0) if take >= left else (1, -take, worst, touched, size)


def _of_node(holes: Holes, pool: Pool, count: int, near: Sequence[GpuView], held: Collection[GpuId]) -> list[GpuView]:
    """Return `count` GPUs of one node: those with the lightest departures, from as few slots as may be."""
    if count == len(pool):
        return list(pool.values())
    departures = (
        {gpu: holes.departures[gpu] for gpu in pool if gpu in holes.departures and gpu not in held}
        if holes.departures
        else {}
    )
    found = list(pool.values())
    if departures:
        worst = sorted(departures.get(gpu, 0) for gpu in pool)[count - 1]
        found = [gpu for gpu in found if departures.get(gpu.gpu, 0) <= worst]
    return dense(found, count, near=near, held=held, avoid=departures)


def _stands(app: AppView, own: Sequence[GpuView], near: Sequence[GpuView]) -> bool:
    """Whether GPUs that `app` holds are whole gangs, close enough together and all usable, as they are."""
    if app.only is not None and len(list(app.usable(own))) < len(own):
        return False
    union = (*near, *own)
    if app.spans:
        return len(union) % app.gang == 0 and LOOSENESS[locality(union)] <= LOOSENESS[app.level_max]
    if app.gang > 1:
        nodes = {gpu.node for gpu in own}
        counts = Counter(gpu.node for gpu in union)
        if any(counts[node] % app.gang for node in nodes):
            return False
    return app.level_max == "cluster" or LOOSENESS[locality(union)] <= LOOSENESS[app.level_max]


def gang_place(app: AppView) -> Level:
    """Return the place that must hold a gang of `app`."""
    if app.spans:
        return app.level_max
    return "slot" if app.level_max == "slot" else "machine"


def _largest(holes: Holes, place: Level) -> int:
    """Return the most GPUs that are left in one place of that level."""
    match place:
        case "machine":
            return holes.largest()
        case "cluster":
            return len(holes)
        case _:
            return max(Counter(place_of(gpu, place) for gpu in holes).values(), default=0)


# --- admission ------------------------------------------------------------------------------------------------------


def admit_what_fits(cluster: Sequence[GpuView], app: AppView, kinds: str = "") -> Admission:
    """Refuse an app whose gang is larger than every place that must hold it; admit all others.

    Of an app that asks for a kind of GPUs only those count; `kinds` names those that there are.

    That place is a node (a slot, if it accepts nothing wider), or what it accepts if its gangs span nodes. A cluster
    without GPUs says nothing yet: the app is admitted and waits for nodes.
    """
    if not cluster or (app.gang <= 1 and app.only is None):
        return Admission(admitted=True)
    place = gang_place(app)
    counts: Counter[tuple[str, ...]] = Counter()
    for gpu in app.usable(cluster):
        name = place_of(gpu, place)
        counts[name] += 1
        if counts[name] >= app.gang:
            return Admission(admitted=True)
    largest = max(counts.values(), default=0)
    noun = {"slot": "slot", "machine": "node", "rack": "rack", "cluster": "cluster"}[place]
    where = "" if place == "cluster" else f" {'in' if place == 'rack' else 'on'} one {noun}"
    whole = "the cluster" if place == "cluster" else f"the largest {noun}"
    if app.only is not None:
        needs = gpu_kinds.counted(app.requirements, app.gang)
        most = f"{whole} has {largest} of that kind" if largest else "there is none of that kind"
        mend = f"ask for at most {largest} with --gpus, or for another kind" if largest else "ask for another kind"
        return Admission(
            admitted=False,
            reason=f"{app.app} needs {needs}{where}, and {most}; the GPUs here are {kinds}; {mend}",
        )
    return Admission(
        admitted=False,
        reason=f"{app.app} needs a gang of {app.gang} GPUs{where}, {whole} has {largest}; "
        f"ask for at most {largest} with --gpus",
    )


# --- words ----------------------------------------------------------------------------------------------------------


def losses(lost: Sequence[GpuId], owner: Mapping[GpuId, AppId]) -> str:
    """Return a clause on these GPUs that an app lost, `owner` being who has them now; empty when there are none."""
    if not lost:
        return ""
    taken = [owner[gpu] for gpu in lost if gpu in owner]
    idle = len(lost) - len(taken)
    parts = [f"{len(taken)} went to {shares(taken)}"] * bool(taken)
    parts += [f"{idle} {'stays' if idle == 1 else 'stay'} free"] * bool(idle)
    return f"; of the GPUs it held, {' and '.join(parts)}"


def all_gone(owners: Iterable[AppId]) -> str:
    """Return a clause on which apps got the GPUs in play, all of them; without any: that there are none."""
    named = shares(owners)
    return f"nothing is left of the GPUs in play, which went to {named}" if named else "no GPU is in play"


def too_few_left(app: AppView, left: int) -> str:
    """Return a clause on a gang that is larger than all that is left."""
    return f"it needs a gang of {app.gang}, and {gpus(left)} {'is' if left == 1 else 'are'} left"


def shares(owners: Iterable[AppId]) -> str:
    """Return ``a-1 (3), b-2 (1)``: how many each app got, most first."""
    counts: Mapping[AppId, int] = Counter(owners)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{app} ({count})" for app, count in ranked[:8]]
    return ", ".join(named) + (f" and {len(ranked) - 8} others" if len(ranked) > 8 else "")


def gpus(count: int) -> str:
    """Return ``1 GPU`` or ``n GPUs``."""
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def unusable(app: AppView, left: int) -> str:
    """Return a clause on so many GPUs that are left, of which `app` can use none."""
    if app.bound:
        return f"none of the {gpus(left)} left is one it can use (its parked jobs cannot move there)"
    return f"it asks for {gpu_kinds.in_words(app.requirements)}, and none of the {gpus(left)} left is one"


def accepted(app: AppView, count: int) -> int:
    """Return the most of so many GPUs that an app can run on: one job of accepted sizes would give others back."""
    if not app.sizes or app.sizes[-1] < app.demand_max:
        return count
    return max((size for size in app.sizes if size <= count), default=0)
