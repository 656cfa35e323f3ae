"""The auction's hot loops, on flat arrays: relaxation, enumeration, packing, repair. Numbers in, numbers out.

All of them live in this one file because the cache of compiled code notices changes of the file a function is in and
of no other. Every loop counts its work and stops at a limit: "stopped" is an answer of its own, never "there is none".

A selection of options *fits* when every named place holds what is fixed to it and the rest can be packed: gangs and
pieces of GPUs on one machine (or slot) each, blocks in one rack each, and loose GPUs anywhere. Places are nested, so
loose GPUs are a matter of counting.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from arbiter.core.policies.themis.auction.compiled import compiled, inlined

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Hashes = NDArray[np.uint64]
Bytes = NDArray[np.int8]

#: What an option asks for, beside counts in named places: GPUs anywhere; pieces on one machine each; one piece on one
#: slot; a block in one rack; pieces, all in one rack.
LOOSE, PIECES, ON_SLOT, BLOCK, GANGS = range(5)
#: What a row asks for that can never be met.
NEVER = -1
#: Answers of packing.
NO, YES, UNKNOWN = range(3)
# Arguments of the loops that are constants, as numpy's numbers: for each literal Numba would compile the callee again.
#: A bidder that is left out, or a rack: none in particular.
NONE = cast(int, np.int64(-1))
#: An option takes its places, or gives them back.
TAKE, GIVE_BACK = cast(int, np.int64(1)), cast(int, np.int64(-1))
#: Of equal machines the one in the rack with the least room; the whole machine, not one slot.
SNUG, WHOLE = cast(bool, np.bool_(True)), cast(bool, np.bool_(False))
#: How many of its options a bidder tries, best first: when it is put back, and for more than it has.
TRIES_BACK, TRIES_MORE = cast(int, np.int64(6)), cast(int, np.int64(4))
#: Sums of gains closer than this are equal.
EPS = 1e-9
#: How much better a new best must be.
STEP_UP = 1e-12
#: Machine-level chunk sizes that bound packing.
CHUNKS = 8
#: Slots of the table of packing answers, as a power of two.
MEMO_BITS = 15
MEMO = 1 << MEMO_BITS
#: How much may be lost against the relaxation, one attempt after the other.
_BETAS = "1e-9 1e-4 5e-4 2e-3 5e-3 0.01 0.015 0.02 0.03 0.04 0.06 0.09 0.13 0.2 0.3 0.5 1 3 10 1e300"
BETAS = np.array(_BETAS.split(), dtype=np.float64)


class Ground(NamedTuple):
    """The places: slots, then machines, racks and named cells. `slot_off[m]`, `rack_off[r]` index what lies inside."""

    room: Ints
    parent: Ints
    slot_off: Ints
    rack_off: Ints
    first_machine: int
    first_rack: int
    first_cell: int
    total: int


class Options(NamedTuple):
    """The options of all bidders, bidder i's from `off[i]` to `off[i + 1]`; `place` is the rack of bound gangs."""

    off: Ints
    new: Ints
    gain: Floats
    kind: Ints
    pieces: Ints
    size: Ints
    place: Ints
    fixed_off: Ints
    fixed_place: Ints
    fixed_count: Ints


# --- needs: from rows to options ------------------------------------------------------------------------------------


@compiled
def needs(ground: Ground, owner: Ints, new: Ints, level: Ints, gain: Floats, home: Ints, gangs: Ints) -> Options:
    """Return the options of rows sorted by (owner, loosest level first, new), without the dominated ones.

    A row falls to one at least as loose with no more GPUs and no less gain, and to nothing. Rows that can never be met
    fall too.
    """
    bidders, room, most = len(gangs), ground.room, extent(ground)
    count = len(owner)
    off = np.zeros(bidders + 1, np.int64)
    o_new = np.empty(count, np.int64)
    o_gain = np.empty(count, np.float64)
    o_kind = np.empty(count, np.int64)
    o_pieces = np.zeros(count, np.int64)
    o_size = np.zeros(count, np.int64)
    o_place = np.full(count, -1, np.int64)
    f_off = np.zeros(count + 1, np.int64)
    f_place = np.empty(count, np.int64)
    f_count = np.empty(count, np.int64)
    fixed = 0
    used = 0
    at = 0
    best = np.zeros(ground.total + 2, np.float64)  # best[k]: the most that a looser row gains with at most k GPUs
    seen = np.zeros(ground.total + 2, np.float64)
    for bidder in range(bidders):
        off[bidder] = used
        best[:] = 0.0
        own = home[bidder, 0], home[bidder, 1], home[bidder, 2]
        while at < count and owner[at] == bidder:
            where = level[at]
            end = at
            while end < count and owner[end] == bidder and level[end] == where:
                end += 1
            seen[:] = best
            top = 0.0
            for row in range(at, end):
                k = new[row]
                if k <= 0 or k > ground.total:
                    continue
                worth = gain[row]
                if worth <= max(top, best[k]):
                    continue
                kind, pieces, size, place, bound = asked(room, most, own, gangs[bidder], where, k)
                if kind == NEVER:
                    continue
                top = worth
                o_new[used], o_gain[used], o_kind[used] = k, worth, kind
                o_pieces[used], o_size[used], o_place[used] = pieces, size, place
                if bound >= 0:
                    f_place[fixed], f_count[fixed] = bound, k
                    fixed += 1
                used += 1
                f_off[used] = fixed
                seen[k] = max(seen[k], worth)
            top = 0.0
            for k in range(ground.total + 1):
                top = max(top, seen[k])
                best[k] = top
            at = end
    off[bidders] = used
    return Options(
        off, o_new[:used], o_gain[:used], o_kind[:used], o_pieces[:used], o_size[:used], o_place[:used],
        f_off[: used + 1], f_place[:fixed], f_count[:fixed],
    )  # fmt: skip


class Extent(NamedTuple):
    """The most GPUs that a slot, a machine and a rack have; how many slots and racks there are."""

    in_slot: int
    in_machine: int
    in_rack: int
    slots: int
    racks: int


@compiled
def extent(ground: Ground) -> Extent:
    """Return what the places have at most."""
    in_slot, in_machine, in_rack = 0, 0, 0
    for place in range(ground.first_cell):
        if place < ground.first_machine:
            in_slot = max(in_slot, ground.room[place])
        elif place < ground.first_rack:
            in_machine = max(in_machine, ground.room[place])
        else:
            in_rack = max(in_rack, ground.room[place])
    return Extent(in_slot, in_machine, in_rack, ground.first_machine, len(ground.rack_off) - 1)


@inlined
def asked(
    room: Ints, most: Extent, own: tuple[int, int, int], gang: int, level: int, count: int
) -> tuple[int, int, int, int, int]:
    """Return what a row of `count` GPUs at a level asks for: kind, pieces, size, rack of gangs, place it is bound to.

    The kind is NEVER where the row can never be met; no rack or place is -1. `own` is the slot, machine and rack where
    the bidder's own GPUs are: -1 where it has none, -2 where they are in several.
    """
    in_slot, in_machine, in_rack = own
    never = (NEVER, 0, 0, -1, -1)
    if gang > 1 and count % gang != 0:
        return never
    if level == 3 or (level == 2 and most.racks == 1) or (in_machine == -1 and count == 1):
        if gang > 1:
            return (PIECES, count // gang, gang, -1, -1) if gang <= most.in_machine else never
        return LOOSE, 0, 0, -1, -1
    if level == 2:
        if in_rack == -2 or count > (room[in_rack] if in_rack >= 0 else most.in_rack):
            return never
        if gang > 1 and in_rack < 0 and count == gang:
            return PIECES, 1, gang, -1, -1
        if gang > 1:
            return GANGS, count // gang, gang, in_rack, -1
        return (LOOSE, 0, 0, -1, in_rack) if in_rack >= 0 else (BLOCK, 0, 0, -1, -1)
    if level == 1 or most.slots == 0:
        if in_machine == -2 or count > (room[in_machine] if in_machine >= 0 else most.in_machine):
            return never
        return (LOOSE, 0, 0, -1, in_machine) if in_machine >= 0 else (PIECES, 1, count, -1, -1)
    if in_slot == -2 or count > (room[in_slot] if in_slot >= 0 else most.in_slot):
        return never
    return (LOOSE, 0, 0, -1, in_slot) if in_slot >= 0 else (ON_SLOT, 1, count, -1, -1)


# --- the relaxation: one price for a GPU ----------------------------------------------------------------------------


@compiled
def hulls(off: Ints, new: Ints, worth: Floats) -> tuple[Ints, Ints, Floats]:
    """Return the steps (owner, GPUs, worth per GPU) of each bidder's concave hull over nothing, steepest first."""
    bidders = len(off) - 1
    owner = np.empty(len(new), np.int64)
    width = np.empty(len(new), np.int64)
    slope = np.empty(len(new), np.float64)
    count = 0
    for bidder in range(bidders):
        low, high = off[bidder], off[bidder + 1]
        order = np.argsort(new[low:high], kind="mergesort")
        start = count
        at_k, at_w = 0, 0.0
        for position in order:
            k, w = new[low + position], worth[low + position]
            if w <= at_w + 0.0:
                continue
            while count > start:
                # Compare with the last corner: the step before must stay steeper.
                if k > at_k and (w - at_w) < slope[count - 1] * (k - at_k):
                    break
                count -= 1
                at_k -= width[count]
                at_w -= slope[count] * width[count]
            if count == start:
                at_k, at_w = 0, 0.0
            owner[count] = bidder
            width[count] = k - at_k
            slope[count] = (w - at_w) / (k - at_k)
            count += 1
            at_k, at_w = k, w
    order = np.argsort(-slope[:count], kind="mergesort")
    return owner[order], width[order], slope[order]


@compiled
def price(owner: Ints, width: Ints, slope: Floats, total: int, skip: int) -> float:
    """Return lambda: what the last GPU is worth, 0 when they do not run out. `skip` is a bidder to leave out."""
    left = total
    for step in range(len(owner)):
        if owner[step] != skip:
            left -= width[step]
            if left < 0:
                return float(slope[step])
    return 0.0


@compiled
def relaxed(off: Ints, new: Ints, worth: Floats, total: int, each: float, skip: int) -> float:
    """Return the Lagrangian bound at the price `each` per GPU."""
    value = each * total
    for bidder in range(len(off) - 1):
        best = 0.0
        if bidder != skip:
            for option in range(off[bidder], off[bidder + 1]):
                best = max(best, worth[option] - each * new[option])
        value += best
    return value


# --- packing --------------------------------------------------------------------------------------------------------


@compiled
def mix(one: int, other: int) -> np.uint64:
    """Return a hash of two small integers."""
    value = np.uint64(one) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(other) * np.uint64(0xC2B2AE3D27D4EB4F)
    value ^= value >> np.uint64(29)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(32)
    value *= np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return value


@compiled
def take(room: Ints, parent: Ints, place: int, count: int) -> bool:
    """Take GPUs in a place and all around it; say whether they were there. What was taken stays taken."""
    enough = True
    while place >= 0:
        room[place] -= count
        if room[place] < 0:
            enough = False
        place = parent[place]
    return enough


@compiled
def take_fixed(room: Ints, parent: Ints, options: Options, option: int, sign: int) -> bool:
    """Take (or give back, with sign -1) what an option fixes to named places; say whether it was there."""
    enough = True
    for index in range(options.fixed_off[option], options.fixed_off[option + 1]):
        if not take(room, parent, options.fixed_place[index], sign * options.fixed_count[index]):
            enough = False
    return enough


@compiled
def signature(ground: Ground, room: Ints, machine: int) -> np.uint64:
    """Return a hash of a machine's state: equal states are interchangeable."""
    place = ground.first_machine + machine
    value = mix(room[place] + 1, 7)
    for slot in range(ground.slot_off[machine], ground.slot_off[machine + 1]):
        value += mix(room[slot] + 1, 11)
    return mix(int(value & np.uint64(0x7FFFFFFFFFFF)), 13)


@compiled
def rack_signature(ground: Ground, room: Ints, rack: int) -> np.uint64:
    """Return a hash of a rack's state."""
    value = mix(room[ground.first_rack + rack] + 1, 17)
    for machine in range(ground.rack_off[rack], ground.rack_off[rack + 1]):
        value += signature(ground, room, machine)
    return mix(int(value & np.uint64(0x7FFFFFFFFFFF)), 19)


@compiled
def best_machine(ground: Ground, room: Ints, size: int, rack: int, slot: bool, snug: bool) -> int:
    """Return the place (slot or machine) where a piece fits best, -1 for none; in `rack` only, if that is >= 0.

    Best is the smallest hole; among equals the rack with the least room (`snug`) or the most.
    """
    best, best_hole, best_rack = -1, 1 << 40, 0
    low, high = (0, len(ground.rack_off) - 1) if rack < 0 else (rack, rack + 1)
    for r in range(low, high):
        around = room[ground.first_rack + r]
        if around < size:
            continue
        for m in range(ground.rack_off[r], ground.rack_off[r + 1]):
            hole = room[ground.first_machine + m]
            if hole < size:
                continue
            if slot:
                for s in range(ground.slot_off[m], ground.slot_off[m + 1]):
                    inner = room[s] * 64 + min(63, hole)
                    if room[s] >= size and inner < best_hole:
                        best, best_hole = s, inner
            elif hole < best_hole or (hole == best_hole and (around < best_rack if snug else around > best_rack)):
                best, best_hole, best_rack = ground.first_machine + m, hole, around
    return best


@compiled
def best_rack(ground: Ground, room: Ints, size: int) -> int:
    """Return the rack with the least room for a block, -1 for none."""
    best, best_hole = -1, 1 << 40
    for r in range(len(ground.rack_off) - 1):
        hole = room[ground.first_rack + r]
        if size <= hole < best_hole:
            best, best_hole = r, hole
    return best


@compiled
def put(ground: Ground, room: Ints, kind: int, size: int, pieces: int, rack: int, snug: bool, spots: Ints) -> bool:
    """Put one item where it fits best and note its places in `spots`; undone and False if it does not fit.

    A block takes a rack; gangs take pieces in one rack.
    """
    if kind == BLOCK:
        r = best_rack(ground, room, size)
        if r < 0:
            return False
        spots[0] = ground.first_rack + r
        room[spots[0]] -= size
        return True
    if kind != GANGS:
        for piece in range(pieces):
            place = best_machine(ground, room, size, NONE, kind == ON_SLOT, snug)
            if place < 0:
                for back in range(piece):
                    take(room, ground.parent, spots[back], -size)
                return False
            spots[piece] = place
            take(room, ground.parent, place, size)
        return True
    low, high = (0, len(ground.rack_off) - 1) if rack < 0 else (rack - ground.first_rack, rack - ground.first_rack + 1)
    best, best_hole = -1, 1 << 40
    for r in range(low, high):
        hole = room[ground.first_rack + r]
        if hole < size * pieces or hole >= best_hole:
            continue
        chunks = 0
        for m in range(ground.rack_off[r], ground.rack_off[r + 1]):
            chunks += room[ground.first_machine + m] // size
        if chunks >= pieces:
            best, best_hole = r, hole
    if best < 0:
        return False
    for piece in range(pieces):
        spots[piece] = best_machine(ground, room, size, best, WHOLE, snug)
        take(room, ground.parent, spots[piece], size)
    return True


@compiled
def pack(ground: Ground, room: Ints, options: Options, chosen: Ints, spots: Ints, work: Ints, nodes_max: int) -> int:
    """Say whether the chosen options, whose fixed counts are taken from `room` already, can be packed.

    Parameters
    ----------
    ground, options
        The problem.
    room
        What is left, by place; unchanged afterwards.
    chosen
        Options, at most one per bidder.
    spots : (len(chosen), w)
        Receives the places of each chosen option's pieces or block, when the answer is YES.
    work : (1,)
        Grows by the work done.
    nodes_max
        Nodes of the search, after which the answer is UNKNOWN.
    """
    count = 0
    for option in chosen:
        if options.kind[option] != LOOSE:
            count += 1
    if count == 0:
        return YES
    items = np.empty(count, np.int64)
    keys = np.empty(count, np.int64)
    at = 0
    for index in range(len(chosen)):
        if options.kind[chosen[index]] != LOOSE:
            items[at] = index
            at += 1
    trial = room.copy()
    # Orders: blocks first; pieces first, in full racks; pieces first, in empty racks; by size.
    for attempt in range(4):
        for position in range(count):
            option = chosen[items[position]]
            kind, size, pieces = options.kind[option], options.size[option], options.pieces[option]
            bulk = options.new[option] if kind == BLOCK else size * pieces if kind == GANGS else size
            wide = kind in (BLOCK, GANGS)
            keys[position] = -bulk
            if (attempt == 0 and not wide) or (attempt in (1, 2) and wide):
                keys[position] += 1 << 30
            if options.place[option] >= 0:
                keys[position] -= 1 << 32  # bound to its rack: first
        order = np.argsort(keys, kind="mergesort")
        trial[:] = room
        done = True
        work[0] += count * (len(room) - ground.first_machine) // 24 + 4
        for position in order:
            index = items[position]
            option = chosen[index]
            kind = options.kind[option]
            size = options.new[option] if kind == BLOCK else options.size[option]
            if not put(
                ground, trial, kind, size, options.pieces[option], options.place[option], attempt != 2, spots[index]
            ):
                done = False
                break
        if done:
            return YES
    if not chunks_fit(ground, room, options, chosen):
        return NO
    return search_packing(ground, room, options, chosen, items, spots, work, nodes_max)


@compiled
def chunks_fit(ground: Ground, room: Ints, options: Options, chosen: Ints) -> bool:
    """Whether a necessary condition of packing holds: for each t, pieces hold no more chunks of t GPUs than places."""
    racks = len(ground.rack_off) - 1
    biggest = 1
    for option in chosen:
        kind = options.kind[option]
        if kind == BLOCK:
            biggest = max(biggest, options.new[option])
        elif kind != LOOSE:
            biggest = max(biggest, options.size[option])
    for t in range(1, biggest + 1):
        on_machines, in_racks = 0, 0
        matters = t == 1
        for option in chosen:
            kind = options.kind[option]
            if kind == BLOCK:
                in_racks += options.new[option] // t
                matters = matters or options.new[option] == t
            elif kind != LOOSE:
                on_machines += options.pieces[option] * (options.size[option] // t)
                matters = matters or options.size[option] == t
        if not matters:
            continue
        have_machines, have_racks = 0, 0
        for r in range(racks):
            chunks = 0
            whole = room[ground.first_rack + r] // t
            for m in range(ground.rack_off[r], ground.rack_off[r + 1]):
                chunks += room[ground.first_machine + m] // t
            have_machines += min(chunks, whole)
            have_racks += whole
        if on_machines > have_machines or on_machines + in_racks > have_racks:
            return False
    return True


class Kinds(NamedTuple):
    """Items that ask for the same, by kind of item: of so many `parts` with `size` GPUs each, `bulk` in all.

    `first` is the position of a kind's first item in the order of items, `bound` the rack it is bound to or -1.
    """

    first: Ints
    kind: Ints
    size: Ints
    parts: Ints
    bulk: Ints
    bound: Ints


@compiled
def search_packing(
    ground: Ground,
    room: Ints,
    options: Options,
    chosen: Ints,
    items: Ints,
    spots: Ints,
    work: Ints,
    nodes_max: int,
) -> int:
    """Answer a packing question by exhaustion: rack by rack, all ways to fill it that leave little enough unused.

    Items that ask for the same are one *kind*, so that only counts are chosen: how many of each kind go into a rack.
    What a rack leaves unused comes off the slack, all room less all that is asked; states that failed are remembered.
    """
    racks = len(ground.rack_off) - 1
    order, kinds_asked, rest = group_items(options, chosen, items)
    k_kind, k_size, k_parts = kinds_asked.kind, kinds_asked.size, kinds_asked.parts
    k_bulk, k_bound = kinds_asked.bulk, kinds_asked.bound
    kinds = len(rest)
    slack, parts_in_all = 0, 0
    for r in range(racks):
        slack += room[ground.first_rack + r]
    for k in range(kinds):
        slack -= rest[k] * k_bulk[k]
        parts_in_all += rest[k] * k_parts[k]
    if slack < 0:
        return NO
    by_room = order_racks(ground, room)
    taken = np.zeros((racks, kinds), np.int64)
    unused = np.zeros(racks + 1, np.int64)  # slack before each rack
    unused[0] = slack
    failed = np.zeros(nodes_max * 4, np.uint64)
    fits_keys = np.zeros(1 << 12, np.uint64)
    fits_answers = np.zeros(1 << 12, np.int8)
    left = np.empty((racks, kinds + 1), np.int64)  # room left in a rack before each kind
    tail = np.empty((racks, kinds + 1), np.int64)  # GPUs that kinds from each on still ask for, on entering a rack
    nodes, unsure = 0, False
    where = np.empty(parts_in_all + 1, np.int64)
    rack_at, k, down = 0, 0, True
    entering = True
    while rack_at >= 0:
        if entering:
            if rack_at == racks:
                break
            left[rack_at, 0] = room[ground.first_rack + by_room[rack_at]]
            tail[rack_at, kinds] = 0
            for kind in range(kinds - 1, -1, -1):
                tail[rack_at, kind] = tail[rack_at, kind + 1] + rest[kind] * k_bulk[kind]
            k, down, entering = 0, True, False
        rack = by_room[rack_at]
        nodes += 1
        if nodes > nodes_max:
            work[0] += nodes
            return UNKNOWN
        if down and k == kinds:
            # A filling is complete: is so little left unused, and do its pieces fit on the machines?
            waste = left[rack_at, kinds]
            good = waste <= unused[rack_at]
            for kind in range(kinds):
                if k_bound[kind] == ground.first_rack + rack and rest[kind] > 0:
                    good = False
            if good:
                key = mix(rack + 1, 29)
                for kind in range(kinds):
                    if k_kind[kind] != BLOCK and taken[rack_at, kind] > 0:
                        key += mix(kind + 1, taken[rack_at, kind] * k_parts[kind])
                answer = recall(fits_keys, fits_answers, key, 12)
                if answer < 0:
                    answer = fits_in_rack(ground, room, rack, k_kind, k_size, k_parts, taken[rack_at], where, work)
                    note(fits_keys, fits_answers, key, answer, 12)
                if answer == UNKNOWN:
                    unsure = True
                good = answer == YES
            if good:
                unused[rack_at + 1] = unused[rack_at] - waste
                if rack_at + 1 == racks:
                    done = True
                    for kind in range(kinds):
                        done = done and rest[kind] == 0
                    if done:
                        rack_at += 1
                        break
                    good = False
                else:
                    if known(failed, rest_key(rack_at + 1, rest)):
                        good = False
            if good:
                rack_at += 1
                entering = True
                continue
            down = False
            k = kinds - 1
            if k < 0:
                rack_at -= 1
            continue
        if down:
            # As many of this kind as fit; then fewer.
            here = ground.first_rack + rack
            most = min(rest[k], left[rack_at, k] // k_bulk[k])
            if k_bound[k] >= 0:
                most = rest[k] if k_bound[k] == here else 0
                if most * k_bulk[k] > left[rack_at, k]:
                    down = False
                    k -= 1
                    if k < 0:
                        failed_at(failed, rack_at, rest)
                        rack_at, k = rack_at - 1, kinds - 1
                    continue
            if k_kind[k] != BLOCK:
                chunks = 0
                for m in range(ground.rack_off[rack], ground.rack_off[rack + 1]):
                    chunks += room[ground.first_machine + m] // k_size[k]
                most = min(most, chunks // k_parts[k])
            taken[rack_at, k] = most
            rest[k] -= most
            left[rack_at, k + 1] = left[rack_at, k] - most * k_bulk[k]
            reachable = min(left[rack_at, k + 1], tail[rack_at, k + 1])
            if left[rack_at, k + 1] - reachable > unused[rack_at]:
                # Even all that follows leaves too much unused, and fewer of this kind would leave more.
                rest[k] += most
                taken[rack_at, k] = 0
                down = False
                k -= 1
                if k < 0:
                    failed_at(failed, rack_at, rest)
                    rack_at, k = rack_at - 1, kinds - 1
                continue
            k += 1
            continue
        # Going back: one less of this kind, or further back.
        lowest = taken[rack_at, k] if k_bound[k] >= 0 else 0
        if taken[rack_at, k] > lowest:
            taken[rack_at, k] -= 1
            rest[k] += 1
            left[rack_at, k + 1] += k_bulk[k]
            reachable = min(left[rack_at, k + 1], tail[rack_at, k + 1])
            if left[rack_at, k + 1] - reachable <= unused[rack_at]:
                k += 1
                down = True
                continue
        rest[k] += taken[rack_at, k]
        taken[rack_at, k] = 0
        k -= 1
        if k < 0:
            failed_at(failed, rack_at, rest)
            rack_at, k = rack_at - 1, kinds - 1
    work[0] += nodes
    if rack_at < racks:
        return UNKNOWN if unsure else NO
    return hand_out(ground, room, options, chosen, items, order, kinds_asked, by_room, taken, where, spots, work)


@compiled
def group_items(options: Options, chosen: Ints, items: Ints) -> tuple[Ints, Kinds, Ints]:
    """Return the order of the items by kind, the kinds, and how many of each are asked for.

    Pieces come first, large ones first, then gangs, then blocks. `items` are indices into `chosen`.
    """
    count = len(items)
    ranks = np.empty(count, np.int64)
    for position in range(count):
        option = chosen[items[position]]
        kind = options.kind[option]
        group = 0 if kind == PIECES else 1 if kind == ON_SLOT else 2 if kind == GANGS else 3
        bulk = options.new[option] if kind == BLOCK else options.size[option]
        ranks[position] = (
            group * (1 << 50) - bulk * (1 << 34) - options.pieces[option] * (1 << 22) + options.place[option] + 1
        )
    order = np.argsort(ranks, kind="mergesort")
    kinds = 0
    first = np.empty(count + 1, np.int64)
    for position in range(count):
        if position == 0 or ranks[order[position]] != ranks[order[position - 1]]:
            first[kinds] = position
            kinds += 1
    first[kinds] = count
    k_kind, k_size, k_parts = np.empty(kinds, np.int64), np.empty(kinds, np.int64), np.empty(kinds, np.int64)
    k_bulk, k_bound, rest = np.empty(kinds, np.int64), np.empty(kinds, np.int64), np.empty(kinds, np.int64)
    for k in range(kinds):
        option = chosen[items[order[first[k]]]]
        k_kind[k] = options.kind[option]
        k_size[k] = options.new[option] if k_kind[k] == BLOCK else options.size[option]
        k_parts[k] = 1 if k_kind[k] == BLOCK else options.pieces[option]
        k_bulk[k] = k_size[k] * k_parts[k]
        k_bound[k] = options.place[option]
        rest[k] = first[k + 1] - first[k]
        if k_kind[k] == PIECES and k_parts[k] > 1:
            # Pieces that may lie anywhere are pieces one by one.
            rest[k] *= k_parts[k]
            k_parts[k] = 1
            k_bulk[k] = k_size[k]
    return order, Kinds(first, k_kind, k_size, k_parts, k_bulk, k_bound), rest


@compiled
def order_racks(ground: Ground, room: Ints) -> Ints:
    """Return the racks in order of their room, small ones first, equal ones side by side."""
    racks = len(ground.rack_off) - 1
    ranks = np.empty(racks, np.float64)
    for r in range(racks):
        ranks[r] = room[ground.first_rack + r] + np.float64(rack_signature(ground, room, r) >> np.uint64(12)) / 2.0**53
    return np.argsort(ranks, kind="mergesort")


@compiled
def hand_out(
    ground: Ground,
    room: Ints,
    options: Options,
    chosen: Ints,
    items: Ints,
    order: Ints,
    kinds: Kinds,
    by_room: Ints,
    taken: Ints,
    where: Ints,
    spots: Ints,
    work: Ints,
) -> int:
    """Hand the places to the items when all racks are filled; YES, or UNKNOWN where a rack's places are not found.

    Parameters
    ----------
    items, order : (items,)
        Indices into `chosen`, and their order by kind.
    by_room : (racks,), taken : (racks, kinds)
        The racks in the order of filling, and how many of each kind each got.
    where : (pieces,)
        Memory for the places in one rack.
    spots : (len(chosen), w)
        Receives the places.
    """
    given = np.zeros(len(kinds.kind), np.int64)
    for index in range(len(by_room)):
        rack = by_room[index]
        if fits_in_rack(ground, room, rack, kinds.kind, kinds.size, kinds.parts, taken[index], where, work) != YES:
            return UNKNOWN
        at = 0
        for kind in range(len(given)):
            for _ in range(taken[index, kind]):
                if kinds.kind[kind] == BLOCK:
                    spots[items[order[kinds.first[kind] + given[kind]]], 0] = ground.first_rack + rack
                elif kinds.kind[kind] == PIECES:
                    parts = options.pieces[chosen[items[order[kinds.first[kind]]]]]
                    item = items[order[kinds.first[kind] + given[kind] // parts]]
                    spots[item, given[kind] % parts] = where[at]
                    at += 1
                else:
                    item = items[order[kinds.first[kind] + given[kind]]]
                    for part in range(kinds.parts[kind]):
                        spots[item, part] = where[at]
                        at += 1
                given[kind] += 1
    return YES


@compiled
def failed_at(failed: Hashes, rack_at: int, rest: Ints) -> None:
    """Remember that what is left on entering a rack cannot be packed."""
    if rack_at > 0:
        remember(failed, rest_key(rack_at, rest))


@compiled
def rest_key(rack_at: int, rest: Ints) -> np.uint64:
    """Return a hash of what is left of each kind on entering a rack."""
    key = mix(rack_at, 31)
    for kind in range(len(rest)):
        key += mix(kind + 7, rest[kind] + 1000)
    return key


#: Nodes of the search for places on the machines of one rack.
RACK_NODES = 2000


@compiled
def fits_in_rack(
    ground: Ground,
    room: Ints,
    rack: int,
    k_kind: Ints,
    k_size: Ints,
    k_parts: Ints,
    counts: Ints,
    where: Ints,
    work: Ints,
) -> int:
    """Say whether so many pieces of each kind fit on the machines of a rack; `where` receives their places in order."""
    total, biggest = 0, 1
    for k in range(len(counts)):
        if k_kind[k] != BLOCK and counts[k] > 0:
            total += counts[k] * k_parts[k]
            biggest = max(biggest, k_size[k])
    if total == 0:
        return YES
    if total > len(where):
        return UNKNOWN
    first, last = ground.first_machine + ground.rack_off[rack], ground.first_machine + ground.rack_off[rack + 1]
    if not rack_chunks_fit(room, first, last, k_kind, k_size, k_parts, counts, biggest):
        return NO
    u_size, u_slot = list_pieces(k_kind, k_size, k_parts, counts, total)
    # Slots first, as they are the narrower places; large ones first.
    order = np.argsort(-(u_size + u_slot * 4096), kind="mergesort")
    state = room.copy()
    moved = np.full(total, -1, np.int64)
    depth, nodes, forward = 0, 0, True
    tried_hole = np.zeros((total, 64), np.int64)
    tries = np.zeros(total, np.int64)
    while depth >= 0:
        if depth == total:
            for position in range(total):
                where[order[position]] = moved[position]
            work[0] += nodes * (last - first) // 16
            return YES
        nodes += 1
        if nodes > RACK_NODES:
            work[0] += nodes * (last - first) // 16
            return UNKNOWN
        unit = order[depth]
        size, slot = u_size[unit], u_slot[unit]
        if forward:
            tries[depth] = 0
        else:
            take(state, ground.parent, moved[depth], -size)
        # The tightest place of a kind that was not tried here. Pieces of one size go in falling or equal order of
        # machines' holes by the memory of tried ones only: equal holes (and slots) are interchangeable.
        best, best_hole, best_shape = -1, 1 << 40, 0
        for machine in range(first, last):
            hole = state[machine]
            if hole < size:
                continue
            low, high = machine, machine + 1
            if slot == 1:
                low = ground.slot_off[machine - ground.first_machine]
                high = ground.slot_off[machine - ground.first_machine + 1]
            for place in range(low, high):
                if state[place] < size:
                    continue
                shape = hole * 65536 + state[place]
                for s in range(
                    ground.slot_off[machine - ground.first_machine], ground.slot_off[machine - ground.first_machine + 1]
                ):
                    shape = shape * 31 + state[s] + 1
                value = state[place] * 4096 + hole
                if value >= best_hole:
                    continue
                fresh = True
                for index in range(tries[depth]):
                    if tried_hole[depth, index] == shape:
                        fresh = False
                        break
                if fresh:
                    best, best_hole, best_shape = place, value, shape
        if best < 0 or tries[depth] >= 63:
            depth -= 1
            forward = False
            continue
        tried_hole[depth, tries[depth]] = best_shape
        tries[depth] += 1
        moved[depth] = best
        take(state, ground.parent, best, size)
        depth += 1
        forward = True
    work[0] += nodes * (last - first) // 16
    return NO


@compiled
def rack_chunks_fit(
    room: Ints, first: int, last: int, k_kind: Ints, k_size: Ints, k_parts: Ints, counts: Ints, biggest: int
) -> bool:
    """Whether a necessary condition holds: for each t, pieces hold no more chunks of t GPUs than a rack's machines.

    `first` and `last` bound the rack's machines as places; `biggest` is the size of the largest piece.
    """
    for t in range(1, biggest + 1):
        need, have = 0, 0
        for k in range(len(counts)):
            if k_kind[k] != BLOCK:
                need += counts[k] * k_parts[k] * (k_size[k] // t)
        for machine in range(first, last):
            have += room[machine] // t
        if need > have:
            return False
    return True


@compiled
def list_pieces(k_kind: Ints, k_size: Ints, k_parts: Ints, counts: Ints, total: int) -> tuple[Ints, Ints]:
    """Return (pieces,) the size of each of the `total` pieces in order of kinds, and 1 for those that take one slot."""
    sizes = np.empty(total, np.int64)
    slots = np.empty(total, np.int64)
    at = 0
    for k in range(len(counts)):
        if k_kind[k] != BLOCK:
            for _ in range(counts[k] * k_parts[k]):
                sizes[at], slots[at] = k_size[k], 1 if k_kind[k] == ON_SLOT else 0
                at += 1
    return sizes, slots


@compiled
def remember(table: Hashes, key: np.uint64) -> None:
    """Put a key into an open hash table that is never more than a quarter full."""
    at = np.int64(key % np.uint64(len(table)))
    while table[at] != np.uint64(0) and table[at] != key:
        at = (at + 1) % len(table)
    table[at] = key


@compiled
def known(table: Hashes, key: np.uint64) -> bool:
    """Whether a key is in the table."""
    at = np.int64(key % np.uint64(len(table)))
    while table[at] != np.uint64(0):
        if table[at] == key:
            return True
        at = (at + 1) % len(table)
    return False


# --- enumeration: all allocations that lose little against the relaxation -------------------------------------------


@compiled
def recall(keys: Hashes, answers: Bytes, key: np.uint64, bits: int) -> int:
    """Return the remembered answer to a packing question, -1 for none."""
    last = (1 << bits) - 1
    at = np.int64(key & np.uint64(last))
    for _ in range(8):
        if keys[at] == key:
            return int(answers[at])
        at = (at + 1) & last
    return -1


@compiled
def note(keys: Hashes, answers: Bytes, key: np.uint64, answer: int, bits: int) -> None:
    """Remember an answer; an old one may go for it."""
    last = (1 << bits) - 1
    at = np.int64(key & np.uint64(last))
    first = at
    for _ in range(8):
        if keys[at] == np.uint64(0) or keys[at] == key:
            keys[at], answers[at] = key, answer
            return
        at = (at + 1) & last
    keys[first], answers[first] = key, answer


@compiled
def question(options: Options, chosen: Ints) -> np.uint64:
    """Return a hash of what the chosen options ask of packing, whoever asks it."""
    value = np.uint64(1)
    for option in chosen:
        kind = options.kind[option]
        if kind == BLOCK:
            value += mix(options.new[option], 3)
        elif kind != LOOSE:
            shape = kind * 100003 + options.pieces[option]
            value += mix(shape, options.size[option] * 65537 + options.place[option] + 1)
        for index in range(options.fixed_off[option], options.fixed_off[option + 1]):
            value += mix(options.fixed_place[index] + 5, options.fixed_count[index] + 1000003)
    return value if value != np.uint64(0) else np.uint64(1)


@compiled
def answer_packing(
    ground: Ground,
    room: Ints,
    options: Options,
    chosen: Ints,
    spots: Ints,
    keys: Hashes,
    answers: Bytes,
    work: Ints,
    nodes_max: int,
) -> int:
    """As `pack`, with a memory over all questions of one auction; spots are filled only by a fresh YES."""
    key = question(options, chosen)
    found = recall(keys, answers, key, MEMO_BITS)
    if found in (NO, UNKNOWN):
        return found
    answer = pack(ground, room, options, chosen, spots, work, nodes_max)
    if found < 0:
        note(keys, answers, key, answer, MEMO_BITS)
    return answer


class Core(NamedTuple):
    """The choices (an option, or -1 for nothing) that lose little: bidder i's are `choices[off[i]:off[i + 1]]`.

    `loss` is what each option loses against its bidder's best choice, `loss_none` (by bidder) what nothing loses.
    """

    off: Ints
    choices: Ints
    loss: Floats
    loss_none: Floats


class Settled(NamedTuple):
    """The bidders with one choice: options chosen, their GPUs, gains and losses, and whether named places hold them."""

    picked: int
    used: int
    gain: float
    loss: float
    fits: bool


class Outlook(NamedTuple):
    """The open bidders in order, and the least that those from each position on lose.

    `path[p]` is how many GPUs are used before position p when all take their best choices; `table[p, j]` the least
    loss from there on with `max(0, path[p] - reach) + j` GPUs used before.
    """

    order: Ints
    path: Ints
    reach: int
    table: Floats


class Spare(NamedTuple):
    """Chunks that are still free: of t + 1 GPUs on machines (`machine[t]`), of `marks[i]` GPUs in racks (`rack[i]`)."""

    machine: Ints
    rack: Ints
    marks: Ints


@compiled
def explore(
    ground: Ground,
    options: Options,
    worth: Floats,
    constant: float,
    types: Ints,
    skip: int,
    each: float,
    picks: Ints,
    spots: Ints,
    keys: Hashes,
    answers: Bytes,
    work: Ints,
    work_max: int,
    nodes_max: int,
) -> tuple[float, float]:
    """Return (value, upper bound) of the best allocation without bidder `skip`; improves on `picks` in place.

    Parameters
    ----------
    ground, options, types
        The problem; equal types are interchangeable bidders.
    worth : (options,)
        Gain less the price of scarce places; `constant` is what those places are worth at these prices, so that for
        everything that fits, the sum of gains is at most `constant` and the sum of worths.
    each
        The price of a GPU.
    picks : (bidders,), spots : (bidders, w)
        An allocation that fits (option or -1) and the places of its pieces; improved in place.
    keys, answers
        Memory of packing answers.
    work : (1,), work_max
        Work done so far, and where to stop.
    nodes_max
        As in `pack`.
    """
    bidders, total = len(options.off) - 1, ground.total
    base = constant + relaxed(options.off, options.new, worth, total, each, skip)
    value = 0.0
    for bidder in range(bidders):
        if picks[bidder] >= 0:
            value += options.gain[picks[bidder]]
    upper = base
    work[0] += len(options.new) + bidders
    core, least = losses(options, worth, each)
    chosen = np.empty(bidders, np.int64)
    trial_spots = np.empty_like(spots)
    for beta in BETAS:
        gap = base - value
        if upper - value <= EPS or gap <= EPS:
            return value, min(upper, base)
        if work[0] > work_max:
            return value, upper
        allow = min(beta, gap)
        last = allow >= gap
        keep_choices(options, core, allow, skip)
        room = ground.room.copy()
        settled = settle_bidders(ground, options, core, skip, room, chosen)
        if not settled.fits or settled.used > total:
            upper = min(upper, max(value, base - allow))
            continue
        order = order_open(core, types, least)
        path, reach = path_and_reach(options, core, order, settled.used, allow)
        width: int = min(total, 2 * reach) + 1
        cells = 0
        for bidder in order:
            cells += width * (core.off[bidder + 1] - core.off[bidder])
        if work[0] + cells // 2 > work_max or len(order) * width > 20_000_000:
            return value, upper
        outlook = Outlook(order, path, reach, least_losses(total, options, core, each, order, path, reach, width, work))
        bound = settled.loss + outlook.table[0, settled.used - max(0, path[0] - reach)]
        if bound > allow:
            upper = min(upper, max(value, base - allow))
            if work[0] > work_max:
                return value, upper
            continue
        upper = min(upper, max(value, base - bound))
        spare = spare_chunks(ground, room, block_marks(options, core))
        work[0] += len(room) * CHUNKS // 2
        fitting = True
        for index in range(settled.picked):
            if not chunk(options, chosen[index], TAKE, spare.machine, spare.rack, spare.marks):
                fitting = False
        if not fitting:
            upper = min(upper, max(value, base - allow))
            if last:
                return value, upper
            continue
        value, unsure, stopped = descend(
            ground, options, core, types, settled, outlook, spare, room, chosen, value, base, allow,
            picks, spots, trial_spots, keys, answers, work, work_max, nodes_max,
        )  # fmt: skip
        if stopped:
            return value, upper
        upper = min(upper, max(value, base - allow, unsure))
        if last:
            return value, upper
    return value, upper


@compiled
def losses(options: Options, worth: Floats, each: float) -> tuple[Core, Floats]:
    """Return the losses of all choices, with no choice kept yet, and (by bidder) the least loss of a second choice."""
    off, new = options.off, options.new
    bidders, count = len(off) - 1, len(new)
    loss = np.empty(count, np.float64)
    loss_none = np.zeros(bidders, np.float64)
    least = np.full(bidders, 1e300)
    for bidder in range(bidders):
        best, second = 0.0, -1e300
        for option in range(off[bidder], off[bidder + 1]):
            net = worth[option] - each * new[option]
            if net > best:
                best, second = net, best
            elif net > second:
                second = net
        loss_none[bidder] = best
        least[bidder] = best - second
        for option in range(off[bidder], off[bidder + 1]):
            loss[option] = best - (worth[option] - each * new[option])
    return Core(np.zeros(bidders + 1, np.int64), np.empty(count + bidders, np.int64), loss, loss_none), least


@compiled
def keep_choices(options: Options, core: Core, allow: float, skip: int) -> None:
    """Keep in `core` the choices that lose no more than `allow`; bidder `skip` has nothing for its only choice."""
    off, choices, loss, loss_none = core.off, core.choices, core.loss, core.loss_none
    bidders = len(off) - 1
    size = 0
    for bidder in range(bidders):
        off[bidder] = size
        if bidder == skip or loss_none[bidder] <= allow:
            choices[size] = -1
            size += 1
        if bidder != skip:
            for option in range(options.off[bidder], options.off[bidder + 1]):
                if loss[option] <= allow:
                    choices[size] = option
                    size += 1
    off[bidders] = size


@compiled
def settle_bidders(ground: Ground, options: Options, core: Core, skip: int, room: Ints, chosen: Ints) -> Settled:
    """Settle the bidders that have one choice only; `chosen` receives their options, `room` (places,) loses GPUs."""
    count, used, gain, lost = 0, 0, 0.0, 0.0
    fits = True
    for bidder in range(len(core.off) - 1):
        if core.off[bidder + 1] - core.off[bidder] > 1:
            continue
        option = core.choices[core.off[bidder]]
        if option >= 0:
            used += options.new[option]
            gain += options.gain[option]
            lost += core.loss[option]
            chosen[count] = option
            count += 1
            if not take_fixed(room, ground.parent, options, option, TAKE):
                fits = False
        elif bidder != skip:
            lost += core.loss_none[bidder]
    return Settled(count, used, gain, lost, fits)


@compiled
def order_open(core: Core, types: Ints, least: Floats) -> Ints:
    """Return the bidders with more than one choice: those with most to lose first, equal ones side by side."""
    order = np.flatnonzero(core.off[1:] - core.off[:-1] > 1)
    order = order[np.argsort(types[order].astype(np.float64), kind="mergesort")]
    return order[np.argsort(-least[order], kind="mergesort")]


@compiled
def path_and_reach(options: Options, core: Core, order: Ints, used: int, allow: float) -> tuple[Ints, int]:
    """Return the path of the best choices, and how far the GPUs used can stray from it within the allowance.

    The path (open bidders + 1,) is how many GPUs are used before each open bidder, and at the end; `used` by the
    settled ones.
    """
    new, off, choices, loss, loss_none = options.new, core.off, core.choices, core.loss, core.loss_none
    opened = len(order)
    ratios = np.empty(opened, np.float64)  # the most GPUs that a bidder moves per loss
    spans = np.empty(opened, np.float64)  # the most GPUs that it moves
    path = np.empty(opened + 1, np.int64)
    path[0] = used
    for position in range(opened):
        bidder = order[position]
        at, at_loss = 0, 1e300
        for index in range(off[bidder], off[bidder + 1]):
            option = choices[index]
            lost = loss[option] if option >= 0 else loss_none[bidder]
            if lost < at_loss:
                at, at_loss = new[option] if option >= 0 else 0, lost
        ratio, span = 0.0, 0.0
        for index in range(off[bidder], off[bidder + 1]):
            option = choices[index]
            lost = loss[option] if option >= 0 else loss_none[bidder]
            moved = abs((new[option] if option >= 0 else 0) - at)
            if moved > 0:
                span = max(span, moved)
                ratio = max(ratio, moved / max(lost, 1e-15))
        ratios[position], spans[position] = ratio, span
        path[position + 1] = path[position] + at
    stray, budget = 1.0, allow
    for position in np.argsort(-ratios, kind="mergesort"):
        if ratios[position] <= 0.0:
            break
        cost = spans[position] / ratios[position]
        if cost <= budget:
            stray += spans[position]
            budget -= cost
        else:
            stray += budget * ratios[position]
            break
    return path, int(stray) + 1  # the path may lie above `total` by as much, where ties abound


@compiled
def least_losses(
    total: int,
    options: Options,
    core: Core,
    each: float,
    order: Ints,
    path: Ints,
    reach: int,
    width: int,
    work: Ints,
) -> Floats:
    """Return the table (open bidders + 1, width) of an `Outlook`; GPUs nobody uses lose their price `each`."""
    new, off, choices, loss, loss_none = options.new, core.off, core.choices, core.loss, core.loss_none
    opened = len(order)
    table = np.full((opened + 1, width), np.inf)
    low = max(0, path[opened] - reach)
    for u in range(low, min(total, path[opened] + reach, low + width - 1) + 1):
        table[opened, u - low] = each * (total - u)
    low_next = low
    for position in range(opened - 1, -1, -1):
        bidder = order[position]
        low = max(0, path[position] - reach)
        high = min(total, path[position] + reach, low + width - 1)
        work[0] += (high - low + 1) * (off[bidder + 1] - off[bidder])
        for index in range(off[bidder], off[bidder + 1]):
            option = choices[index]
            lost = loss[option] if option >= 0 else loss_none[bidder]
            k = new[option] if option >= 0 else 0
            first = max(low, low_next - k)
            final = min(high, low_next + width - 1 - k, total - k)
            for u in range(first, final + 1):
                there = lost + table[position + 1, u + k - low_next]
                if there < table[position, u - low]:
                    table[position, u - low] = there
        low_next = low
    return table


@compiled
def block_marks(options: Options, core: Core) -> Ints:
    """Return the chunk sizes that racks are counted in: the small ones, and the first sizes of blocks in the core."""
    marks = np.empty(CHUNKS + 24, np.int64)
    for t in range(CHUNKS):
        marks[t] = t + 1
    count = CHUNKS
    for index in range(core.off[len(core.off) - 1]):
        option = core.choices[index]
        if option < 0 or options.kind[option] != BLOCK or count >= len(marks):
            continue
        fresh = True
        for mark in range(CHUNKS, count):
            if marks[mark] == options.new[option]:
                fresh = False
                break
        if fresh and options.new[option] > 1:
            marks[count] = options.new[option]
            count += 1
    return marks[:count]


@compiled
def spare_chunks(ground: Ground, room: Ints, marks: Ints) -> Spare:
    """Return the chunks that machines and racks hold: options that ask for more of one size cannot be packed."""
    machine = np.zeros(CHUNKS, np.int64)
    rack = np.zeros(len(marks), np.int64)
    for r in range(len(ground.rack_off) - 1):
        around = room[ground.first_rack + r]
        for mark in range(len(marks)):
            rack[mark] += around // marks[mark]
        for t in range(CHUNKS):
            chunks = 0
            for m in range(ground.rack_off[r], ground.rack_off[r + 1]):
                chunks += room[ground.first_machine + m] // (t + 1)
            machine[t] += min(chunks, around // (t + 1))
    return Spare(machine, rack, marks)


@compiled
def descend(
    ground: Ground,
    options: Options,
    core: Core,
    types: Ints,
    settled: Settled,
    outlook: Outlook,
    spare: Spare,
    room: Ints,
    chosen: Ints,
    value: float,
    base: float,
    allow: float,
    picks: Ints,
    spots: Ints,
    trial_spots: Ints,
    keys: Hashes,
    answers: Bytes,
    work: Ints,
    work_max: int,
    nodes_max: int,
) -> tuple[float, float, bool]:
    """Try the open bidders' choices depth first; return (value, greatest sum in doubt, whether work ran out).

    Parameters
    ----------
    settled, room, spare, chosen : (bidders,)
        The settled options and what they leave; the first `settled.picked` of `chosen` are theirs.
    value, base, allow
        The best known sum of gains; the bound before losses; the losses that are looked at.
    """
    # Arrays apart, as numba counts the references of all arrays of a tuple at each use. For the same reason choices are
    # taken and given back here, not in a function of their own: to hand that `options` made explore a fifth slower.
    new, gain, options_off, parent = options.new, options.gain, options.off, ground.parent
    off, choices, loss, loss_none = core.off, core.choices, core.loss, core.loss_none
    order, path, table = outlook.order, outlook.path, outlook.table
    spare_machine, spare_rack, marks = spare.machine, spare.rack, spare.marks
    opened, total, reach = len(order), ground.total, outlook.reach
    unsure = -1e300
    most = 1
    for bidder in order:
        most = max(most, off[bidder + 1] - off[bidder])
    totals = np.empty((opened + 1, most), np.float64)  # by depth and choice: the least loss in all, inf once tried
    choice = np.full(opened + 1, -2, np.int64)  # the index into `choices` taken at a depth, -2 for none yet
    used = np.empty(opened + 1, np.int64)
    lost = np.empty(opened + 1, np.float64)
    used[0], lost[0] = settled.used, settled.loss
    depth, fresh = 0, True
    while depth >= 0:
        limit = min(allow, base - value - STEP_UP)
        if depth == opened:
            picked, worth_it = gather_leaf(gain, choices, choice, opened, chosen, settled.picked, settled.gain)
            back = depth - 1
            if worth_it > value + STEP_UP:
                answer = answer_packing(
                    ground, room, options, chosen[:picked], trial_spots, keys, answers, work, nodes_max
                )
                if answer == YES:
                    value = worth_it
                    adopt_leaf(options_off, chosen[:picked], trial_spots, picks, spots)
                else:
                    if answer == UNKNOWN:
                        unsure = max(unsure, worth_it)
                    back = last_to_blame(
                        ground, options, choices, choice, chosen, settled.picked, opened, trial_spots, keys, answers,
                        work, nodes_max,
                    )  # fmt: skip
                    for position in range(opened - 1, back, -1):
                        option = choices[choice[position]]
                        if option >= 0:
                            take_fixed(room, parent, options, option, GIVE_BACK)
                            chunk(options, option, GIVE_BACK, spare_machine, spare_rack, marks)
                        choice[position] = -2
            depth, fresh = back, False
            continue
        bidder = order[depth]
        first, final = off[bidder], off[bidder + 1]
        if fresh:
            low = max(0, path[depth + 1] - reach)
            for index in range(first, final):
                option = choices[index]
                u = used[depth] + (new[option] if option >= 0 else 0)
                there = np.inf
                if low <= u <= total and u - low < table.shape[1]:
                    there = (
                        lost[depth] + (loss[option] if option >= 0 else loss_none[bidder]) + table[depth + 1, u - low]
                    )
                totals[depth, index - first] = there
            if depth > 0 and types[order[depth - 1]] == types[bidder]:
                bar_swaps(options_off, off, choices, order, depth, choice, totals)
            choice[depth] = -2
            work[0] += final - first + 2
            if work[0] > work_max:
                return value, unsure, True
        elif choice[depth] >= 0:
            option = choices[choice[depth]]
            if option >= 0:
                take_fixed(room, parent, options, option, GIVE_BACK)
                chunk(options, option, GIVE_BACK, spare_machine, spare_rack, marks)
        best, best_total = -1, np.inf
        for index in range(first, final):
            if totals[depth, index - first] < best_total:
                best, best_total = index, totals[depth, index - first]
        if best < 0 or best_total > limit:
            choice[depth] = -2
            depth, fresh = depth - 1, False
            continue
        totals[depth, best - first] = np.inf
        choice[depth] = best
        option = choices[best]
        if option >= 0:
            fixed_fits = take_fixed(room, parent, options, option, TAKE)
            chunks_are_there = chunk(options, option, TAKE, spare_machine, spare_rack, marks)
            if not fixed_fits or not chunks_are_there:
                fresh = False
                work[0] += 4
                continue
        used[depth + 1] = used[depth] + (new[option] if option >= 0 else 0)
        lost[depth + 1] = lost[depth] + (loss[option] if option >= 0 else loss_none[bidder])
        depth, fresh = depth + 1, True
    return value, unsure, False


@inlined
def gather_leaf(
    gain: Floats, choices: Ints, choice: Ints, opened: int, chosen: Ints, count: int, worth_it: float
) -> tuple[int, float]:
    """Return how many options a leaf has, and its sum of gains; `count` and `worth_it` are those of the settled ones.

    `chosen` (bidders,) receives the options after the settled ones; `choice` (open bidders + 1,) indexes `choices`.
    """
    for position in range(opened):
        option = choices[choice[position]]
        if option >= 0:
            chosen[count] = option
            count += 1
            worth_it += gain[option]
    return count, worth_it


@compiled
def adopt_leaf(off: Ints, chosen: Ints, chosen_spots: Ints, picks: Ints, spots: Ints) -> None:
    """Make a leaf's options and their places the best allocation."""
    picks[:] = -1
    for index in range(len(chosen)):
        bidder = np.searchsorted(off, chosen[index], side="right") - 1
        picks[bidder] = chosen[index]
        spots[bidder] = chosen_spots[index]


@inlined
def bar_swaps(
    options_off: Ints, off: Ints, choices: Ints, order: Ints, depth: int, choice: Ints, totals: Floats
) -> None:
    """Bar choices in the row `totals[depth]` that are earlier options than an equal bidder's before."""
    bidder, other = order[depth], order[depth - 1]
    before = choices[choice[depth - 1]]
    rank_before = before - options_off[other] if before >= 0 else -1
    first = off[bidder]
    for index in range(first, off[bidder + 1]):
        option = choices[index]
        rank = option - options_off[bidder] if option >= 0 else -1
        if rank < rank_before:
            totals[depth, index - first] = np.inf


@compiled
def chunk(options: Options, option: int, sign: int, spare_machine: Ints, spare_rack: Ints, marks: Ints) -> bool:
    """Take an option's chunks from the spare ones (give them back with sign -1); say whether they were there."""
    kind = options.kind[option]
    if kind == LOOSE:
        return True
    enough = True
    if kind == BLOCK:
        size, pieces = options.new[option], 1
    else:
        size, pieces = options.size[option], options.pieces[option]
        for t in range(CHUNKS):
            spare_machine[t] -= sign * pieces * (size // (t + 1))
            if spare_machine[t] < 0:
                enough = False
    for mark in range(len(spare_rack)):
        spare_rack[mark] -= sign * pieces * (size // marks[mark])
        if spare_rack[mark] < 0:
            enough = False
    return enough


@compiled
def last_to_blame(
    ground: Ground,
    options: Options,
    core: Ints,
    choice: Ints,
    chosen: Ints,
    settled: int,
    opened: int,
    spots: Ints,
    keys: Hashes,
    answers: Bytes,
    work: Ints,
    nodes_max: int,
) -> int:
    """Return the depth to go back to after a leaf that does not pack: the last choice of the shortest such prefix."""
    room = np.empty_like(ground.room)
    low, high = 0, opened  # a prefix of `low` may pack, one of `high` does not
    while high - low > 1:
        length = (low + high) // 2
        room[:] = ground.room
        picked = settled
        for position in range(length):
            option = core[choice[position]]
            if option >= 0:
                chosen[picked] = option
                picked += 1
        for index in range(picked):
            take_fixed(room, ground.parent, options, chosen[index], TAKE)
        if answer_packing(ground, room, options, chosen[:picked], spots, keys, answers, work, nodes_max) == NO:
            high = length
        else:
            low = length
    return high - 1


@compiled
def explore_all(
    ground: Ground,
    options: Options,
    worth: Floats,
    constant: float,
    types: Ints,
    picks: Ints,
    spots: Ints,
    values: Floats,
    uppers: Floats,
    twin: Ints,
    keys: Hashes,
    answers: Bytes,
    work: Ints,
    root_max: int,
    each_max: int,
    all_max: int,
    nodes_max: int,
) -> None:
    """Explore the whole problem and then each without one winner.

    Parameters
    ----------
    picks : (bidders + 1, bidders), spots : (bidders + 1, bidders, w), values, uppers : (bidders + 1,)
        What is known of each problem, that without bidder i in row i and the whole one last; improved in place.
    twin : (bidders,)
        Receives, per bidder, the row that answers for it: its own, that of an equal bidder with the same option, or
        the whole problem for one that wins nothing.
    root_max, each_max, all_max
        Work for the whole problem, for each other, and for all of them; 0 leaves the whole problem as it is.
    """
    owner, width, slope = hulls(options.off, options.new, worth)
    bidders = len(options.off) - 1
    if root_max > 0:
        values[bidders], upper = explore(
            ground, options, worth, constant, types, NONE, price(owner, width, slope, ground.total, NONE),
            picks[bidders], spots[bidders], keys, answers, work, work[0] + root_max, nodes_max,
        )  # fmt: skip
        uppers[bidders] = min(uppers[bidders], upper)
    share_out(options, types, picks, spots, values, uppers, twin)
    for bidder in range(bidders):
        if twin[bidder] == bidder and uppers[bidder] - values[bidder] > EPS and each_max > 0 and work[0] < all_max:
            values[bidder], upper = explore(
                ground, options, worth, constant, types, bidder, price(owner, width, slope, ground.total, bidder),
                picks[bidder], spots[bidder], keys, answers, work, work[0] + each_max, nodes_max,
            )  # fmt: skip
            uppers[bidder] = min(uppers[bidder], upper)


@compiled
def share_out(
    options: Options, types: Ints, picks: Ints, spots: Ints, values: Floats, uppers: Floats, twin: Ints
) -> None:
    """Find each bidder's `twin`, and start each problem without a winner from the whole one's allocation."""
    bidders = len(types)
    for bidder in range(bidders):
        option = picks[bidders, bidder]
        twin[bidder] = bidders
        if option < 0:
            continue
        twin[bidder] = bidder
        for other in range(bidder):
            there = picks[bidders, other]
            if types[other] == types[bidder] and there - options.off[other] == option - options.off[bidder]:
                twin[bidder] = other
                break
        uppers[bidder] = min(uppers[bidder], uppers[bidders])
        if twin[bidder] == bidder and values[bidder] < values[bidders] - options.gain[option]:
            values[bidder] = values[bidders] - options.gain[option]
            picks[bidder] = picks[bidders]
            picks[bidder, bidder] = -1
            spots[bidder] = spots[bidders]


# --- repair: remove a few, put them back better ---------------------------------------------------------------------


@compiled
def dice(state: Hashes, below: int) -> int:
    """Return a number from 0 up to `below`; the state is the seed of what follows."""
    value = state[0]
    value ^= value << np.uint64(13)
    value ^= value >> np.uint64(7)
    value ^= value << np.uint64(17)
    state[0] = value
    return np.int64((value >> np.uint64(11)) % np.uint64(below))  # type: ignore[return-value]  # else unsigned


@compiled
def lift(ground: Ground, room: Ints, options: Options, option: int, spots: Ints, sign: int) -> None:
    """Take out an option that is in its `spots` (put it back with sign -1)."""
    take_fixed(room, ground.parent, options, option, -sign)
    kind = options.kind[option]
    if kind == BLOCK:
        room[spots[0]] += sign * options.new[option]
    elif kind != LOOSE:
        for piece in range(options.pieces[option]):
            take(room, ground.parent, spots[piece], -sign * options.size[option])


@compiled
def drop_in(ground: Ground, room: Ints, options: Options, option: int, spots: Ints) -> bool:
    """Put an option where it fits best; unchanged and False if it does not fit."""
    fits = take_fixed(room, ground.parent, options, option, TAKE)
    kind = options.kind[option]
    if fits and kind != LOOSE:
        size = options.new[option] if kind == BLOCK else options.size[option]
        fits = put(ground, room, kind, size, options.pieces[option], options.place[option], SNUG, spots)
    if not fits:
        take_fixed(room, ground.parent, options, option, GIVE_BACK)
    return fits


@compiled
def insert_best(
    ground: Ground,
    room: Ints,
    left: int,
    options: Options,
    worth: Floats,
    each: float,
    bidder: int,
    above: float,
    spots: Ints,
    tries: int,
) -> int:
    """Put in the bidder's option worth most at the price `each` that fits; return it, -1 if none is above `above`."""
    ceiling = np.inf
    for _ in range(tries):
        best, best_net = -1, above
        for option in range(options.off[bidder], options.off[bidder + 1]):
            net = worth[option] - each * options.new[option]
            if best_net < net < ceiling and options.new[option] <= left:
                best, best_net = option, net
        if best < 0:
            return -1
        if drop_in(ground, room, options, best, spots):
            return best
        ceiling = best_net
    return -1


class Draft(NamedTuple):
    """An allocation that fits, in the making: options (bidders,), places of their pieces (bidders, w), room (places,).

    `left` (1,) is how many GPUs are left, `value` (1,) the sum of gains.
    """

    picks: Ints
    spots: Ints
    room: Ints
    left: Ints
    value: Floats


@compiled
def repair(
    ground: Ground,
    options: Options,
    worth: Floats,
    each: float,
    skip: int,
    picks: Ints,
    spots: Ints,
    seed: int,
    target: float,
    work: Ints,
    work_max: int,
) -> float:
    """Improve `picks` and `spots` in place by ruin and recreate; return the value.

    A few bidders, most of them neighbours in one rack, are taken out and put back in random order at about the price
    `each` plus that of scarce places, and what is left over goes to some who gain by it. Stops at `target`.
    """
    bidders = len(options.off) - 1
    state = np.empty(1, np.uint64)
    state[0] = mix(seed + 1, skip + 3) | np.uint64(1)
    best = draft_of(ground, options, picks, spots)
    now = draft_of(ground, options, picks.copy(), spots.copy())
    order = np.arange(bidders)
    out = np.empty(bidders, np.int64)
    turn = 0
    while work[0] < work_max and best.value[0] < target:
        turn += 1
        factor = each * (0.7 + 0.06 * dice(state, 11))
        if turn == 1:  # nobody is taken out yet, but all who have nothing are put in
            factor = each
            gone = list_absent(options, worth, each, skip, now.picks, out, work)
        else:
            gone = choose_few(ground, options, skip, now.picks, now.spots, order, out, state, work)
            take_out(ground, options, now, out[:gone])
            shuffle(out[:gone], state)
        put_back(ground, options, worth, factor, turn > 1, now, out[:gone], state, work)
        share_leftover(ground, options, skip, turn == 1, now, out[:gone], state, work)
        work[0] += (len(now.room) + bidders * spots.shape[1]) // 128
        if now.value[0] > best.value[0] + STEP_UP:
            copy_draft(now, best)
        elif now.value[0] < best.value[0] - 0.004 * dice(state, 8):
            copy_draft(best, now)
    return float(best.value[0])


@compiled
def draft_of(ground: Ground, options: Options, picks: Ints, spots: Ints) -> Draft:
    """Return the draft of an allocation; it shares `picks` and `spots`."""
    room = ground.room.copy()
    left = np.full(1, ground.total, np.int64)
    value = np.zeros(1, np.float64)
    for bidder in range(len(picks)):
        option = picks[bidder]
        if option >= 0:
            lift(ground, room, options, option, spots[bidder], GIVE_BACK)
            left[0] -= options.new[option]
            value[0] += options.gain[option]
    return Draft(picks, spots, room, left, value)


@compiled
def copy_draft(source: Draft, target: Draft) -> None:
    """Make one draft equal to another."""
    target.picks[:] = source.picks
    target.spots[:] = source.spots
    target.room[:] = source.room
    target.left[0] = source.left[0]
    target.value[0] = source.value[0]


@compiled
def list_absent(options: Options, worth: Floats, each: float, skip: int, picks: Ints, out: Ints, work: Ints) -> int:
    """List in `out` (bidders,) those who have nothing, by the GPUs of their best option, large first; return how many.

    An option's worth less its GPUs at the price `each` is what makes it the best.
    """
    off, new = options.off, options.new
    bidders = len(picks)
    keys = np.zeros(bidders, np.int64)
    for bidder in range(bidders):
        best = 0.0
        for option in range(off[bidder], off[bidder + 1]):
            if worth[option] - each * new[option] > best:
                best = worth[option] - each * new[option]
                keys[bidder] = -new[option]
    count = 0
    for bidder in np.argsort(keys, kind="mergesort"):
        if bidder != skip and picks[bidder] < 0 and off[bidder + 1] > off[bidder]:
            out[count] = bidder
            count += 1
    work[0] += len(new)
    return count


@compiled
def choose_few(
    ground: Ground,
    options: Options,
    skip: int,
    picks: Ints,
    spots: Ints,
    order: Ints,
    out: Ints,
    state: Hashes,
    work: Ints,
) -> int:
    """List in `out` (bidders,) a few bidders to take out; return how many.

    They are some at random, or most of those in one or two racks and some at random. `order` (bidders,) is any order
    of the bidders, and changes.
    """
    off, kinds, parent = options.off, options.kind, ground.parent
    bidders, racks = len(picks), len(ground.rack_off) - 1
    mode = dice(state, 4)
    one, two = dice(state, racks), dice(state, racks)
    room_for = 2 + dice(state, 5) if mode == 0 else 4 + dice(state, 9)
    others = room_for if mode == 0 else 1 + dice(state, 4)
    count = 0
    for position in range(bidders):
        other = position + dice(state, bidders - position)
        order[position], order[other] = order[other], order[position]
        bidder = order[position]
        option = picks[bidder]
        if bidder == skip or off[bidder + 1] == off[bidder]:
            continue
        near = False
        if mode > 0 and option >= 0 and spots[bidder, 0] >= 0 and kinds[option] != LOOSE:
            place = spots[bidder, 0]
            while parent[place] >= 0:
                place = parent[place]
            near = place == ground.first_rack + one or (mode > 1 and place == ground.first_rack + two)
        if not near:
            if others <= 0:
                continue
            others -= 1
        out[count] = bidder
        count += 1
        if count >= room_for:
            break
    work[0] += bidders // 8
    return count


@compiled
def take_out(ground: Ground, options: Options, now: Draft, out: Ints) -> None:
    """Take the bidders in `out` out of a draft."""
    picks, spots, room, left, value = now.picks, now.spots, now.room, now.left, now.value
    for bidder in out:
        option = picks[bidder]
        if option >= 0:
            lift(ground, room, options, option, spots[bidder], TAKE)
            left[0] += options.new[option]
            value[0] -= options.gain[option]
            picks[bidder] = -1


@compiled
def shuffle(numbers: Ints, state: Hashes) -> None:
    """Put numbers into random order."""
    count = len(numbers)
    for position in range(count):
        other = position + dice(state, count - position)
        numbers[position], numbers[other] = numbers[other], numbers[position]


@compiled
def put_back(
    ground: Ground,
    options: Options,
    worth: Floats,
    each: float,
    vary: bool,
    now: Draft,
    out: Ints,
    state: Hashes,
    work: Ints,
) -> None:
    """Put each bidder in `out`, in order, into a draft with what is worth most at the price `each`, if anything fits.

    `vary` lowers the price for each of them, or raises it, by chance.
    """
    off, new, gain = options.off, options.new, options.gain
    picks, spots, room, left, value = now.picks, now.spots, now.room, now.left, now.value
    machines = ground.first_rack - ground.first_machine
    for bidder in out:
        factor = each * (0.85 + 0.03 * dice(state, 11)) if vary else each
        option = insert_best(ground, room, left[0], options, worth, factor, bidder, 0.0, spots[bidder], TRIES_BACK)
        work[0] += (off[bidder + 1] - off[bidder] + machines) // 8 + 10
        if option >= 0:
            picks[bidder] = option
            left[0] -= new[option]
            value[0] += gain[option]


@compiled
def share_leftover(
    ground: Ground,
    options: Options,
    skip: int,
    everybody: bool,
    now: Draft,
    out: Ints,
    state: Hashes,
    work: Ints,
) -> None:
    """Offer what is left over in a draft to bidders, one after the other; each takes an option that gains it more.

    `everybody` is asked in turn; else those in `out`, and some at random.
    """
    off, new, gain = options.off, options.new, options.gain
    picks, spots, room, left, value = now.picks, now.spots, now.room, now.left, now.value
    bidders, gone = len(picks), len(out)
    machines = ground.first_rack - ground.first_machine
    for position in range(bidders if everybody else gone + 6):
        if left[0] <= 0:
            break
        bidder = position if everybody else out[position] if position < gone else dice(state, bidders)
        if bidder == skip:
            continue
        had = picks[bidder]
        had_gain = gain[had] if had >= 0 else 0.0
        had_new = new[had] if had >= 0 else 0
        better = False
        for option in range(off[bidder], off[bidder + 1]):
            if gain[option] > had_gain + STEP_UP and new[option] <= left[0] + had_new:
                better = True
                break
        work[0] += (off[bidder + 1] - off[bidder]) // 16 + 2
        if not better:
            continue
        if had >= 0:
            lift(ground, room, options, had, spots[bidder], TAKE)
            left[0] += had_new
        before = spots[bidder].copy()
        option = insert_best(
            ground, room, left[0], options, gain, 0.0, bidder, had_gain + STEP_UP, spots[bidder], TRIES_MORE
        )
        work[0] += (off[bidder + 1] - off[bidder] + machines) // 8 + 10
        if option >= 0:
            picks[bidder] = option
            left[0] -= new[option]
            value[0] += gain[option] - had_gain
        else:
            spots[bidder] = before
            if had >= 0:
                lift(ground, room, options, had, spots[bidder], GIVE_BACK)
                left[0] -= had_new


# --- patterns: what a rack can earn ---------------------------------------------------------------------------------


@compiled
def best_pattern(
    free: Ints,
    at_home: Floats,
    in_rack: float,
    loose: float,
    sizes: Ints,
    piece: Floats,
    blocks: Ints,
    block: Floats,
    pieces_out: Ints,
    blocks_out: Ints,
    home_out: Ints,
    rest_out: Ints,
) -> float:
    """Return the most that a rack earns at these prices, and with what.

    Parameters
    ----------
    free, at_home : (machines,)
        GPUs of each machine, and the price of one for those at home there.
    in_rack, loose
        The price of a GPU for those at home in the rack, and for anybody.
    sizes, piece : (p,), blocks, block : (b,)
        Sizes on one machine and within the rack, and their prices.
    pieces_out : (p,), blocks_out : (b,), home_out : (machines,), rest_out : (2,)
        Receive the pattern; `rest_out` the GPUs for those at home in the rack and the loose ones.
    """
    machines = len(free)
    total, most = 0, 0
    for m in range(machines):
        total += free[m]
        most = max(most, free[m])
    alone, alone_by = earn_alone(most, sizes, piece)
    sums, split, inner = earn_on_machines(free, at_home, loose, alone, total)
    wide, wide_by = earn_in_rack(total, max(loose, in_rack), blocks, block)
    best, best_used = -1e300, 0
    for used in range(total + 1):
        if sums[machines, used] + wide[total - used] > best + 1e-12:
            best, best_used = sums[machines, used] + wide[total - used], used
    # The best choice is read back: blocks and single GPUs of the rack, then each machine's pieces.
    pieces_out[:] = 0
    blocks_out[:] = 0
    home_out[:] = 0
    rest_out[:] = 0
    x = total - best_used
    while x > 0:
        if wide_by[x] >= 0:
            blocks_out[wide_by[x]] += 1
            x -= blocks[wide_by[x]]
        else:
            rest_out[0 if in_rack > loose else 1] += 1
            x -= 1
    u = best_used
    for m in range(machines - 1, -1, -1):
        here, a = split[m + 1, u], inner[m + 1, u]
        home_out[m] = here - a
        while a > 0:
            if alone_by[a] >= 0:
                pieces_out[alone_by[a]] += 1
                a -= sizes[alone_by[a]]
            else:
                rest_out[1] += 1
                a -= 1
        u -= here
    return best


@compiled
def earn_alone(most: int, sizes: Ints, piece: Floats) -> tuple[Floats, Ints]:
    """Return (most + 1,) the most that u GPUs of one machine earn in pieces, and by what.

    That is the index of the last piece, -2 for one GPU that is wasted, -1 for none.
    """
    alone = np.zeros(most + 1, np.float64)
    alone_by = np.full(most + 1, -1, np.int64)
    for u in range(1, most + 1):
        alone[u] = alone[u - 1]
        alone_by[u] = -2  # one of them is wasted here: it would not be, elsewhere
        for index in range(len(sizes)):
            s = sizes[index]
            if s <= u and alone[u - s] + piece[index] > alone[u]:
                alone[u] = alone[u - s] + piece[index]
                alone_by[u] = index
    return alone, alone_by


@compiled
def earn_on_machines(free: Ints, at_home: Floats, loose: float, alone: Floats, total: int) -> tuple[Floats, Ints, Ints]:
    """Return (machines + 1, total + 1) the most that the first m machines earn with u GPUs, and how.

    That is how many GPUs of the last machine are used, and how many of these in pieces; others are for those at home.
    """
    machines = len(free)
    sums = np.full((machines + 1, total + 1), -1e300)
    sums[0, 0] = 0.0
    split = np.zeros((machines + 1, total + 1), np.int64)
    inner = np.zeros((machines + 1, total + 1), np.int64)
    reached = 0
    for m in range(machines):
        for u in range(free[m] + 1):
            best, best_a = -1e300, 0
            if at_home[m] > loose:
                for a in range(u + 1):
                    if alone[a] + at_home[m] * (u - a) > best:
                        best, best_a = alone[a] + at_home[m] * (u - a), a
            else:
                best, best_a = alone[u], u
            for before in range(reached + 1):
                if sums[m, before] + best > sums[m + 1, before + u]:
                    sums[m + 1, before + u] = sums[m, before] + best
                    split[m + 1, before + u] = u
                    inner[m + 1, before + u] = best_a
        reached += free[m]
    return sums, split, inner


@compiled
def earn_in_rack(total: int, unit: float, blocks: Ints, block: Floats) -> tuple[Floats, Ints]:
    """Return (total + 1,) the most that x GPUs of a rack earn in blocks and one by one, and by what.

    That is the index of the last block, -1 for a single GPU, which earns `unit`.
    """
    wide = np.zeros(total + 1, np.float64)
    wide_by = np.full(total + 1, -1, np.int64)
    for x in range(1, total + 1):
        wide[x] = wide[x - 1] + unit
        for index in range(len(blocks)):
            k = blocks[index]
            if k <= x and wide[x - k] + block[index] > wide[x] + 1e-12:
                wide[x] = wide[x - k] + block[index]
                wide_by[x] = index
    return wide, wide_by


# --- placing: who stands where --------------------------------------------------------------------------------------


@compiled
def rank(room: Ints, own: Ints, claims: Ints, machine: int, size: int) -> int:
    """Return how well `size` GPUs of a machine suit a bidder, least is best: its own first, then nobody else's."""
    mine: int = min(size, own[machine])
    unclaimed = max(0, room[machine] - (claims[machine] - own[machine]))
    touched: int = max(0, size - mine - unclaimed)
    return (1 << 20) * (touched - mine)


@compiled
def prefer_spot(ground: Ground, room: Ints, own: Ints, claims: Ints, size: int, rack: int, slot: bool) -> int:
    """Return the place that suits a piece best, -1 for none; in the rack with that number only, unless it is -1."""
    best, best_key = -1, 1 << 60
    low, high = (0, len(ground.rack_off) - 1) if rack < 0 else (rack, rack + 1)
    for r in range(low, high):
        if room[ground.first_rack + r] < size:
            continue
        for m in range(ground.rack_off[r], ground.rack_off[r + 1]):
            machine = ground.first_machine + m
            if room[machine] < size:
                continue
            key = rank(room, own, claims, machine, size) + 1024 * min(1023, room[machine])
            if not slot:
                if key < best_key:
                    best, best_key = machine, key
                continue
            for s in range(ground.slot_off[m], ground.slot_off[m + 1]):
                if room[s] >= size and key + room[s] < best_key:
                    best, best_key = s, key + room[s]
    return best


@compiled
def fill(ground: Ground, room: Ints, own: Ints, claims: Ints, bundle: Ints, count: int, rack: int) -> None:
    """Take `count` GPUs for a bidder where it is already, in few machines; in one rack, unless that is -1."""
    low, high = (0, len(ground.rack_off) - 1) if rack < 0 else (rack, rack + 1)
    while count > 0:
        best, best_key = -1, 1 << 60
        for r in range(low, high):
            if room[ground.first_rack + r] <= 0:
                continue
            here = False
            for m in range(ground.rack_off[r], ground.rack_off[r + 1]):
                if bundle[ground.first_machine + m] > 0:
                    here = True
            for m in range(ground.rack_off[r], ground.rack_off[r + 1]):
                machine = ground.first_machine + m
                hole = room[machine]
                if hole <= 0:
                    continue
                key = 4096 * rank(room, own, claims, machine, min(count, hole))
                key += (1 << 30) * (0 if bundle[machine] > 0 else 1 if here else 2)
                key += hole if hole >= count else 1_000_000 - hole
                if key < best_key:
                    best, best_key = machine, key
        share = min(count, room[best])
        take(room, ground.parent, best, share)
        bundle[best] += share
        count -= share


@compiled
def place_all(ground: Ground, options: Options, picks: Ints, spots: Ints, held: Ints, out: Ints) -> None:
    """Give each winner its GPUs by place.

    Parameters
    ----------
    picks : (bidders,), spots : (bidders, w)
        An allocation that fits.
    held : (bidders, places)
        GPUs in play that each holds now, by machine.
    out : (bidders, places)
        Receives the GPUs of each by slot, machine or cell.
    """
    claims, anybody = sum_claims(picks, held)
    room = ground.room.copy()
    for option in picks:
        if option >= 0:
            take_fixed(room, ground.parent, options, option, TAKE)
    chosen_spots = spots.copy()
    order = order_winners(options, picks)
    if not anybody or not stand_near(ground, options, picks, held, claims, order, room, chosen_spots):
        stand_as_packed(ground, options, picks, order, room, chosen_spots)
    count_pieces(ground, options, picks, chosen_spots, out)
    # Blocks and what is fixed to a rack have taken their rack's GPUs as a whole so far, loose ones none yet.
    for bidder in order:
        if picks[bidder] >= 0:
            fill_racks(
                ground, room, options, picks[bidder], chosen_spots[bidder], held[bidder], claims, out[bidder]
            )  # fmt: skip
    for bidder in order:
        option = picks[bidder]
        if option >= 0:
            rest = options.new[option]
            for place in range(out.shape[1]):
                rest -= out[bidder, place]
            fill(ground, room, held[bidder], claims, out[bidder], rest, NONE)


@compiled
def sum_claims(picks: Ints, held: Ints) -> tuple[Ints, bool]:
    """Return how many GPUs of each place winners hold now, and whether they hold any."""
    claims = np.zeros(held.shape[1], np.int64)
    anybody = False
    for bidder in range(len(picks)):
        if picks[bidder] >= 0:
            for place in range(held.shape[1]):
                claims[place] += held[bidder, place]
                anybody = anybody or held[bidder, place] > 0
    return claims, anybody


@compiled
def order_winners(options: Options, picks: Ints) -> Ints:
    """Return the bidders in the order of placing: bound gangs, then blocks and gangs, then pieces, large ones first."""
    keys = np.empty(len(picks), np.int64)
    for bidder in range(len(picks)):
        option = picks[bidder]
        keys[bidder] = 1 << 40
        if option >= 0:
            wide = options.kind[option] in (BLOCK, GANGS)
            bulk = options.new[option] if wide else options.size[option]
            keys[bidder] = (0 if wide else 1 << 30) - bulk * 4096 - (1 if options.place[option] >= 0 else 0) * (1 << 31)
    return np.argsort(keys, kind="mergesort")


@compiled
def stand_near(
    ground: Ground,
    options: Options,
    picks: Ints,
    held: Ints,
    claims: Ints,
    order: Ints,
    room: Ints,
    spots: Ints,
) -> bool:
    """Put each winner's pieces or block, in order, where it is already; undone and False if one does not fit any more.

    `room` (places,) loses their GPUs, `spots` (bidders, w) receives their places.
    """
    room_before, spots_before = room.copy(), spots.copy()
    for bidder in order:
        option = picks[bidder]
        if option < 0 or options.kind[option] == LOOSE:
            continue
        if not put_near(ground, room, options, option, held[bidder], claims, spots[bidder]):
            room[:] = room_before
            spots[:] = spots_before
            return False
    return True


@compiled
def put_near(ground: Ground, room: Ints, options: Options, option: int, own: Ints, claims: Ints, spots: Ints) -> bool:
    """Put the pieces or the block of an option in the places that suit its bidder best; False if one does not fit."""
    kind, size = options.kind[option], options.size[option]
    rack = -1
    if kind in (BLOCK, GANGS):
        rack = prefer_rack(ground, room, options, option, own)
        if rack < 0:
            return False
    if kind == BLOCK:
        spots[0] = ground.first_rack + rack
        room[spots[0]] -= options.new[option]
        return True
    for piece in range(options.pieces[option]):
        spot = prefer_spot(ground, room, own, claims, size, rack, kind == ON_SLOT)
        if spot < 0:
            return False
        take(room, ground.parent, spot, size)
        spots[piece] = spot
    return True


@compiled
def prefer_rack(ground: Ground, room: Ints, options: Options, option: int, own: Ints) -> int:
    """Return the number of the rack that suits a block or gangs best, -1 for none: most of its own, then least room."""
    new, size, gangs = options.new[option], options.size[option], options.kind[option] == GANGS
    best, best_key = -1, 1 << 60
    for r in range(len(ground.rack_off) - 1):
        hole = room[ground.first_rack + r]
        elsewhere = options.place[option] >= 0 and ground.first_rack + r != options.place[option]
        if hole < new or elsewhere:
            continue
        chunks, mine = 0, 0
        for m in range(ground.rack_off[r], ground.rack_off[r + 1]):
            mine += min(own[ground.first_machine + m], room[ground.first_machine + m])
            if gangs:
                chunks += room[ground.first_machine + m] // size
        if gangs and chunks < options.pieces[option]:
            continue
        key = hole - (1 << 20) * min(mine, new)
        if key < best_key:
            best, best_key = r, key
    return best


@compiled
def stand_as_packed(ground: Ground, options: Options, picks: Ints, order: Ints, room: Ints, spots: Ints) -> None:
    """Take the GPUs of all winners' pieces and blocks from `room` (places,), where packing put them."""
    for bidder in order:
        option = picks[bidder]
        if option < 0:
            continue
        if options.kind[option] == BLOCK:
            room[spots[bidder, 0]] -= options.new[option]
        elif options.kind[option] != LOOSE:
            for piece in range(options.pieces[option]):
                take(room, ground.parent, spots[bidder, piece], options.size[option])


@compiled
def count_pieces(ground: Ground, options: Options, picks: Ints, spots: Ints, out: Ints) -> None:
    """Count in `out` what stands in slots, machines and cells: pieces, and what is fixed to one of them."""
    for bidder in range(len(picks)):
        option = picks[bidder]
        if option < 0:
            continue
        for index in range(options.fixed_off[option], options.fixed_off[option + 1]):
            place = options.fixed_place[index]
            if place < ground.first_rack or place >= ground.first_cell:
                out[bidder, place] += options.fixed_count[index]
        if options.kind[option] != LOOSE and options.kind[option] != BLOCK:
            for piece in range(options.pieces[option]):
                out[bidder, spots[bidder, piece]] += options.size[option]


@compiled
def fill_racks(
    ground: Ground,
    room: Ints,
    options: Options,
    option: int,
    spots: Ints,
    own: Ints,
    claims: Ints,
    bundle: Ints,
) -> None:
    """Give a bidder the machines' GPUs for its block, and for what is fixed to a rack."""
    for index in range(options.fixed_off[option], options.fixed_off[option + 1]):
        place = options.fixed_place[index]
        if ground.first_rack <= place < ground.first_cell:
            count = options.fixed_count[index]
            room[place] += count
            fill(ground, room, own, claims, bundle, count, place - ground.first_rack)
    if options.kind[option] == BLOCK:
        place, count = spots[0], options.new[option]
        room[place] += count
        fill(ground, room, own, claims, bundle, count, place - ground.first_rack)
