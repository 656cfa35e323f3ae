"""From what drivers, ledger and kernel say to figures: rounds by phase, daemons, queues, and the goals."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct

from arbiter.core.effects import RoundRecord
from benchmarks.sites.cores import Used
from benchmarks.sites.record import Account, Span
from simulator.figures.results import percentile

#: By phase: the kinds of its messages. Those of the last go on after the round, until each node has obeyed.
PHASES = {
    "probe": ("Probe", "ProbeReply"),
    "offer": ("Offer", "Bid"),
    "decide": (),
    "grant": ("Preempt", "Holdings", "AppReport"),
    "obey": ("NodePlan", "NodeReport"),
}
ROUND_GOAL_S = 0.5
#: What an app hears later than so after a decision came free later.
GRANTED_S = 1.0
GRANT_GOAL_S = 1.0
#: A round is a whole one if so many of the GPUs are in play.
WHOLE = 0.5


class Timed(Struct, frozen=True):
    """One round: how long its phases took, in seconds, from its beginning to the last grant that an app has heard.

    `used` is what the arbiter's threads have used in that time, for this round and for all else that they did.
    """

    gpus: int
    asked: int
    bidders: int
    phases: dict[str, float]
    used: Used = Used(0.0, 0.0)

    @property
    def seconds(self) -> float:
        """All phases together."""
        return sum(self.phases.values())


def grants_of(records: Sequence[RoundRecord], grants: Iterable[float]) -> dict[int, list[float]]:
    """Return when apps heard of new leases after each round, by its number: until the next round was decided."""
    ordered = sorted(records, key=lambda record: record.round)
    decided = [record.at + record.took_s for record in ordered]
    found: dict[int, list[float]] = {record.round: [] for record in ordered}
    for at in grants:
        place = bisect_right(decided, at)
        if place:
            found[ordered[place - 1].round].append(at)
    return found


def timed(
    record: RoundRecord,
    heard: Mapping[str, Span],
    grants: Sequence[float] = (),
    used: Callable[[float, float], Used] = lambda _start, _end: Used(0.0, 0.0),
) -> Timed:
    """Return the times of a round, by the arbiter's record and by what apps heard and said; `grants` are this round's.

    `used` says what the arbiter's threads have used between two moments. A GPU that still had to be emptied for its
    winner is not waited for: its grant is no work of the round's.
    """
    decided = record.at + record.took_s
    asked_until = heard["Offer"].first if "Offer" in heard else decided if "Probe" in heard else record.at
    bid_until = heard["Bid"].last if "Bid" in heard else asked_until
    granted = max((at for at in grants if at <= decided + GRANTED_S), default=decided)
    moments = [record.at, asked_until, bid_until, decided, granted]
    spans = [max(0.0, after - before) for before, after in pairwise(moments)]
    phases = dict(zip(("probe", "offer", "decide", "grant"), spans, strict=True))
    return Timed(
        len(record.gpus), len(record.asked), len(record.bidders), phases, used(record.at, max(decided, granted))
    )


def spread(values: Iterable[float]) -> dict[str, float | None]:
    """Return the middle, the 95th percentile and the greatest of some times."""
    known = list(values)
    return {
        "p50_s": percentile(known, 50),
        "p95_s": percentile(known, 95),
        "max_s": max(known, default=None),
    }


def rounds_told(rounds: Sequence[Timed], gpus: int, accounts: Sequence[Account]) -> dict[str, Any]:
    """Return the figures of the rounds: times of all, of those with most GPUs in play, and by phase."""
    news = summed(account.news for account in accounts)
    each = max(1, len(rounds))
    whole = [one for one in rounds if one.gpus >= WHOLE * gpus]
    phases: dict[str, dict[str, Any]] = {}
    for phase, kinds in PHASES.items():
        times = {} if phase == "obey" else spread(one.phases[phase] for one in rounds)
        phases[phase] = times | {"messages": sum(news[kind] for kind in kinds) / each}
    return {
        "count": len(rounds),
        **spread(one.seconds for one in rounds),
        "arbiter_ran": spread(one.used.ran_s for one in rounds),
        "arbiter_waited": spread(one.used.waited_s for one in rounds),
        "whole": {
            "count": len(whole),
            **spread(one.seconds for one in whole),
            "arbiter_ran": spread(one.used.ran_s for one in whole),
        },
        "gpus_in_play_p50": percentile([one.gpus for one in rounds], 50),
        "asked_p50": percentile([one.asked for one in rounds], 50),
        "bidders_p50": percentile([one.bidders for one in rounds], 50),
        "messages": sum(news.values()) / each,
        "phases": phases,
    }


def summed(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Return the sums, by name."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total


def beats_told(accounts: Sequence[Account], seconds: float) -> dict[str, float]:
    """Return the restatements per second, by kind."""
    restated = summed(account.restated for account in accounts)
    return {kind: count / seconds for kind, count in sorted(restated.items())}


def queues_of(listing: str) -> dict[str, int]:
    """Return the messages in each queue, from the words of ``rabbitmqctl list_queues name messages``."""
    rows = (line.split("\t") for line in listing.splitlines() if "\t" in line)
    return {name: int(messages) for name, messages in rows}


def depth(queues: Mapping[str, int]) -> dict[str, Any]:
    """Return how many messages wait in all queues, and in which of them the most."""
    most = max(queues.values(), default=0)
    deepest = min((name for name, messages in queues.items() if messages == most > 0), default="")
    return {"messages": sum(queues.values()), "deepest": deepest, "deepest_messages": most}


def goals(told: Mapping[str, Any], agents: int) -> list[dict[str, Any]]:
    """Return the goals of a site of a thousand nodes and a thousand apps, and whether this one meets them.

    A queue grows if after the rounds more messages wait than before them, by more than one for each agent: so many may
    be under way at any moment. What waits in lanes at the end counts as grown, as nothing waits there at the beginning.
    """
    queues = told["queues"]
    grown = queues["after"]["messages"] - queues["before"]["messages"] + queues["lanes"]["messages"]
    found = [
        ("95th percentile of a round, seconds", ROUND_GOAL_S, told["rounds"]["p95_s"]),
        (
            "95th percentile of the arbiter's processor time while a round lasts, seconds",
            ROUND_GOAL_S,
            told["rounds"]["arbiter_ran"]["p95_s"],
        ),
        ("95th percentile from submit to grant, seconds", GRANT_GOAL_S, told["submit_to_grant"]["p95_s"]),
        ("messages more in queues than before the rounds", agents, grown),
    ]
    return [
        {"name": name, "goal": goal, "ours": ours, "met": ours is not None and ours <= goal}
        for name, goal, ours in found
    ]
