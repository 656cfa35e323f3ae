"""Receipts of preemptions: the app that won the GPUs, the reason, the cost, and the GPUs that came back since.

They follow from the ledger: from an app's events ``preempted`` and ``granted``, the stretches in which its GPUs
drained, and its losses. So they outlive the arbiter's state, and nothing new has to be kept in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.effects import EventRecord, LossRecord, StretchRecord
from arbiter.ledger import Ledger
from protocol.clock import instant
from protocol.messages import AppId, EventFilter, GpuId, NodeId

#: Receipts that are told of an app: the newest.
RECEIPTS_MAX = 20
#: Events of an app that are read for them: the newest.
EVENTS_READ_MAX = 1_000


Change = EventRecord | StretchRecord | LossRecord


class Returned(Struct, frozen=True):
    """GPUs that an app was granted after it had lost others."""

    at: float
    gpus: tuple[GpuId, ...]
    nodes: tuple[NodeId, ...]


class Receipt(Struct, frozen=True):
    """One preemption: all that was taken from an app at one moment."""

    app: AppId
    at: float
    gpus: tuple[GpuId, ...]
    nodes: tuple[NodeId, ...]
    winners: tuple[str, ...]  #: the apps for which; none: no other app has won them
    why: str
    draining_gpu_s: float = 0.0  #: from then until the GPUs were proven empty
    lost_gpu_s: float = 0.0  #: work that had to be done again
    returned: tuple[Returned, ...] = ()  #: grants since, until the app had as many GPUs again

    @property
    def missing(self) -> int:
        """How many of the GPUs it has not got back."""
        return len(self.gpus) - sum(len(each.gpus) for each in self.returned)

    @property
    def away_s(self) -> float | None:
        """How long it had fewer GPUs: until it was granted the last of as many. None while some are missing."""
        return None if self.missing else self.returned[-1].at - self.at


def receipts(ledger: Ledger, app: AppId, live: Sequence[StretchRecord] = ()) -> list[Receipt]:
    """Return the newest receipts of an app, oldest first; `live` are the stretches that are not over."""
    among = EventFilter(ids=(app,), kinds=("preempted", "granted"))
    first = ledger.newest_event(among, number=EVENTS_READ_MAX)
    found = ledger.events(among, after=max(0, first - 1), limit=EVENTS_READ_MAX) if first else ()
    events = [event for _, event in found]
    if not any(event.kind == "preempted" for event in events):
        return []
    drained = [each for each in (*ledger.stretches_of(app), *live) if each.draining and each.app == app]
    return receipts_of(events, drained, ledger.losses_of(app))[-RECEIPTS_MAX:]


def receipts_of(
    events: Sequence[EventRecord], drained: Sequence[StretchRecord], losses: Sequence[LossRecord]
) -> list[Receipt]:
    """Return an app's receipts, oldest first, from all its preemptions and grants in the order of time.

    GPUs that it is granted count as got back for the oldest preemption of which some are missing. Draining and losses
    count for the newest preemption before them of the same GPU, unless the app was granted that GPU in between.
    """
    told = list[Receipt]()
    holder: dict[GpuId, int] = {}  #: by GPU, the receipt of the last preemption there, until it is granted again
    changes: list[Change] = [*events, *drained, *losses]
    for change in sorted(changes, key=_moment):
        match change:
            case EventRecord(kind="preempted"):
                if not told or told[-1].at != change.at:
                    told.append(_begun(change))
                else:
                    told[-1] = _joined(told[-1], change)
                holder |= dict.fromkeys(change.gpus, len(told) - 1)
            case EventRecord():
                for gpu in change.gpus:
                    holder.pop(gpu, None)
                _give_back(told, change)
            case StretchRecord(gpu=gpu) if gpu in holder:
                receipt = told[holder[gpu]]
                seconds = receipt.draining_gpu_s + change.gpu_s(change.start, change.end)
                told[holder[gpu]] = replace(receipt, draining_gpu_s=seconds)
            case LossRecord(gpus=gpus):
                numbers = {holder[gpu] for gpu in gpus if gpu in holder}
                if numbers:
                    receipt = told[max(numbers)]
                    told[max(numbers)] = replace(receipt, lost_gpu_s=receipt.lost_gpu_s + change.lost_gpu_s)
            case _:
                pass
    return told


def _moment(change: Change) -> tuple[float, int]:
    """Return the place of a change in the order; a preemption comes before its consequences of the same moment."""
    match change:
        case EventRecord(kind="preempted"):
            return change.at, 0
        case StretchRecord():
            return change.start, 1  # a preempted GPU drains from that moment on
        case LossRecord():
            return change.at, 2
        case EventRecord():
            return change.at, 3


def _begun(event: EventRecord) -> Receipt:
    assert event.app is not None
    winners = () if event.by is None else (event.by,)
    return Receipt(event.app, event.at, event.gpus, _nodes(event), winners, _why(event))


def _joined(receipt: Receipt, event: EventRecord) -> Receipt:
    winners = dict.fromkeys((*receipt.winners, *([] if event.by is None else [event.by])))
    nodes = dict.fromkeys((*receipt.nodes, *_nodes(event)))
    reasons = dict.fromkeys((*receipt.why.split("; "), _why(event)))
    gpus = (*receipt.gpus, *event.gpus)
    return replace(receipt, gpus=gpus, nodes=tuple(nodes), winners=tuple(winners), why="; ".join(reasons))


def _nodes(event: EventRecord) -> tuple[NodeId, ...]:
    return () if event.node is None else (event.node,)


def _why(event: EventRecord) -> str:
    """Return the reason of a preemption, without the GPUs that its event begins with."""
    where = f"{', '.join(event.gpus)} on {event.node}: "
    return event.what.removeprefix(where)


def _give_back(told: list[Receipt], event: EventRecord) -> None:
    """Count granted GPUs for the oldest receipts of which some are missing."""
    gpus = list(event.gpus)
    for number, receipt in enumerate(told):
        if gpus and receipt.missing:
            taken, gpus = tuple(gpus[: receipt.missing]), gpus[receipt.missing :]
            returned = Returned(event.at, taken, _nodes(event))
            told[number] = replace(receipt, returned=(*receipt.returned, returned))


def document(receipt: Receipt) -> dict[str, Any]:
    """Return a receipt as a part of an answer."""
    return {
        "at": instant(receipt.at),
        "at_s": receipt.at,
        "gpus": list(receipt.gpus),
        "nodes": list(receipt.nodes),
        "for": list(receipt.winners),
        "why": receipt.why,
        "draining_gpu_seconds": receipt.draining_gpu_s,
        "lost_gpu_seconds": receipt.lost_gpu_s,
        "missing": receipt.missing,
        "away_s": receipt.away_s,
        "returned": [
            {"at": instant(each.at), "at_s": each.at, "gpus": list(each.gpus), "nodes": list(each.nodes)}
            for each in receipt.returned
        ],
    }
