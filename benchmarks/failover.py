"""How long no arbiter decides once the leader is killed, or stands still: ``python benchmarks/failover.py [--quick]``.

With ``--lab`` each daemon, the broker and the database have a host of their own in the lab (`tests/lab/`, root).

Real processes: a private RabbitMQ, a private PostgreSQL that flushes each commit to the disk, two arbiters that share
it, two node agents with three simulated GPUs each, and an app agent. Three gangs of two GPUs share four of the GPUs, so
that these change hands at the end of each lease. The leader is killed with SIGKILL, in turn one arbiter and the other,
and started again as the standby. At the moment of each kill a user submits an app for which a GPU is free. Then it is
stopped a few times (SIGSTOP): the broker drops it once its heartbeat is overdue. It goes on when the next has decided.

Told is the time from the kill, or the stop, until the next leader has taken over, and until it has closed its first
round. In the end it is looked for damage: tasks that were signalled or ended without a last word, mini-batches that
were lost or made again, GPUs on which two trained, events that were written by an arbiter that did not lead (triggers
in the database write down who inserts), and records that the ledger lacks. The exit code is 1 if there was any damage,
or a goal was missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder, in which `simulator` would be a benchmark

from tests.lab import site as lab  # noqa: E402
from tests.support import postgres, rabbitmq  # noqa: E402
from tests.support.cluster import PARTIES  # noqa: E402
from tests.support.failover import Audit, Failover, Pair, running_pair  # noqa: E402

KILLS, QUICK_KILLS = 20, 3
STOPS, QUICK_STOPS = 5, 1
GOAL_S = 3.0
#: Of a leader that stands still, whose heartbeat is 5 s: the broker drops it after two to three of these.
STOP_GOAL_S = 15.0
#: What others say of themselves; nothing of it was measured here.
OTHERS = (
    "Slurm: a backup controller waits SlurmctldTimeout for the primary one before it takes over, by default 120 s "
    "(slurm.conf(5)).",
    "Nomad: its servers elect a new leader by raft; no time is promised (its page on the consensus protocol). Of two "
    "servers none may be lost.",
)


def quantile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that at least this part of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * part) - 1)]


def quantiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return two of them by their names; none without values."""
    parts = {50: 0.5, 95: 0.95} if values else {}
    return {f"{name}_p{number}_s": quantile(values, part) for number, part in parts.items()}


@contextmanager
def site(folder: Path, *, in_lab: bool) -> Iterator[Pair]:
    """Yield two arbiters at work with all that belongs to them, on this host or in the lab."""
    if in_lab:
        with lab.running_lab(folder) as made:
            made.keep_busy()
            made.wait_training(processes=2)
            yield made
        return
    with (
        rabbitmq.PrivateRabbitMQ(PARTIES) as broker,
        postgres.PrivatePostgres(fsync=True) as server,
        running_pair(folder, broker, "/", server) as pair,
    ):
        yield pair


def run(pair: Pair, kills: int, stops: int) -> tuple[list[Failover], list[Failover], Audit]:
    """Kill the leader so many times, stop it so many times, then look for damage."""
    killed = [told(f"kill {number + 1}", pair.fail_over()) for number in range(kills)]
    stopped = [told(f"stop {number + 1}", pair.stand_still()) for number in range(stops)]
    return killed, stopped, pair.audit()


def told(what: str, took: Failover) -> Failover:
    """Say how long it took."""
    print(f"{what}: led after {took.led_s:.2f} s, decided after {took.decided_s:.2f} s", file=sys.stderr, flush=True)
    return took


def verdict(samples: Sequence[Failover], stopped: Sequence[Failover], audit: Audit) -> dict[str, bool | None]:
    """Return which goals were met, None where nothing was measured, and as `passed` whether none was missed."""
    met = {
        "goal_met": within(samples, GOAL_S),
        "stop_goal_met": within(stopped, STOP_GOAL_S),
    }
    return {**met, "passed": audit.whole and False not in met.values()}


def within(samples: Sequence[Failover], goal_s: float) -> bool | None:
    """Whether the 95th percentile of the times to the first decision is at most `goal_s`; None without samples."""
    return quantile([each.decided_s for each in samples], 0.95) <= goal_s if samples else None


def document(samples: Sequence[Failover], stopped: Sequence[Failover], audit: Audit) -> dict[str, Any]:
    """Return the figures."""
    return {
        "schema": "bench-failover/v1",
        "kills": len(samples),
        **quantiles("first_decision", [each.decided_s for each in samples]),
        **quantiles("led", [each.led_s for each in samples]),
        "goal_s": GOAL_S,
        "stops": len(stopped),
        **quantiles("stop_first_decision", [each.decided_s for each in stopped]),
        "stop_goal_s": STOP_GOAL_S,
        **verdict(samples, stopped, audit),
        "load": os.getloadavg()[0],
        **msgspec.to_builtins(audit),
        "whole": audit.whole,
        "samples": msgspec.to_builtins(samples),
        "stop_samples": msgspec.to_builtins(stopped),
        "others": OTHERS,
    }


def row(found: dict[str, Any], name: str, words: str, goal: str = "") -> list[str]:
    """Return a line of quantiles, and whether they met the goal of that name; none where nothing was measured."""
    if f"{name}_p50_s" not in found:
        return []
    if goal:
        goal = f" (goal: p95 of at most {found[f'{goal}_s']:g} s, {'met' if found[f'{goal}_met'] else 'MISSED'})"
    return [f"{words} p50 {found[f'{name}_p50_s']:.2f} s, p95 {found[f'{name}_p95_s']:.2f} s{goal}"]


def in_words(found: dict[str, Any]) -> str:
    """Return the figures as lines."""
    damage = ("tasks_signalled", "mini_batches_lost", "mini_batches_repeated", "gpus_shared", "rows_of_deposed")
    untrue = ("ledger_gaps", "states_differ", "gpu_times_differ")
    lines = [
        f"{found['kills']} kills of the leader, and {found['stops']} stops, load {found['load']:.1f}",
        *row(found, "first_decision", "from the kill to the first decision:", "goal"),
        *row(found, "led", "from the kill to the next leader:   "),
        "each, in s: " + ", ".join(f"{sample['decided_s']:.2f}" for sample in found["samples"]),
        *row(found, "stop_first_decision", "from the stop to the first decision:", "stop_goal"),
        *(f"{name.replace('_', ' ')}: {found[name]}" for name in (*damage, *untrue)),
        f"states of leaders that a fresh replay was compared with: {found['states']}",
        f"of {found['mini_batches']} mini-batches, {found['hand_overs']} hand-overs of GPUs, {found['events']} events",
        *OTHERS,
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, help=f"of the leader ({KILLS}; with --quick {QUICK_KILLS})")
    parser.add_argument("--stops", type=int, help=f"of the leader ({STOPS}; with --quick {QUICK_STOPS})")
    parser.add_argument("--quick", action="store_true", help="a few kills and a stop only")
    parser.add_argument("--lab", action="store_true", help="each daemon on a host of its own; needs root")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args()
    if given.lab and (missing := lab.missing()):
        print(missing, file=sys.stderr)
        return 1
    if missing := postgres.missing() or ("" if rabbitmq.available() else "RabbitMQ is not installed"):
        print(missing, file=sys.stderr)
        return 1
    with (
        tempfile.TemporaryDirectory(prefix="ga-failover-") as folder,
        site(Path(folder), in_lab=given.lab) as pair,
    ):
        kills, stops = (QUICK_KILLS, QUICK_STOPS) if given.quick else (KILLS, STOPS)
        kills = kills if given.kills is None else given.kills
        stops = stops if given.stops is None else given.stops
        found = document(*run(pair, kills, stops)) | {"place": "lab" if given.lab else "one host"}
    print(json.dumps(found, indent=1) if given.json else in_words(found))
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
