"""The cost of a submission under `oasis` in the arbiter's loop: ``python benchmarks/sales.py [--apps N] [--json]``.

Apps arrive one by one, 20 s apart, at a site of 8-GPU nodes; half of them span nodes. *Loop* is the processor time
inside `Arbiter.handle` from an app's first report to its admission or refusal, the answer `Sold` included. *Sale* is
that of `sale_batch.sell`, which the daemon runs in a thread of its own. The named alternative sells inside `handle`,
so its loop takes the sum of both. *Slot* are the same figures for the first event of a time slot in which all apps lag.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from arbiter.core.effects import Sell
from arbiter.core.members.sale_batch import sell
from arbiter.core.state.model import ArbiterSettings
from protocol.utility_forms import parse
from tests.support.arbiter_site import Effect, Event, Site, wish

SLOT_S = 3600.0
SETTINGS = ArbiterSettings(policy="oasis", beat_s=1e6, node_timeout_s=1e9, app_timeout_s=1e9, admission_wait_s=0.0)
NODE_GPUS = 8


class Timed(Site):
    """A site that notes the processor time of its arbiter and of its policy's sales."""

    def __init__(self) -> None:
        super().__init__(None, start=100 * SLOT_S)
        self.loop_s = self.sale_s = 0.0
        self.lead(SETTINGS)

    def handle(self, event: Event) -> list[Effect]:
        """Tell the arbiter, and have the policy sell at once."""
        begun = time.process_time()
        effects = list(self.arbiter.handle(event, self.now))
        self.loop_s += time.process_time() - begun
        for ask in [effect for effect in effects if isinstance(effect, Sell)]:
            begun = time.process_time()
            sold = sell(ask)
            self.sale_s += time.process_time() - begun
            effects += self.handle(sold)
        return effects

    def taken(self) -> tuple[float, float]:
        """Return both times since this was last asked."""
        taken = self.loop_s, self.sale_s
        self.loop_s = self.sale_s = 0.0
        return taken


def submit(site: Timed, dice: random.Random, number: int, left: float = 1.0) -> None:
    """Let an app arrive, or report that this part of its work is left."""
    sizes = dice.choice(((1, 2, 4), (2, 4, 8), (8,), (4, 8, 16), (16, 32)))
    hours = dice.uniform(0.5, 8.0) * sizes[-1]
    kind = dice.choice((f"soft:{dice.uniform(2, 48):.3g}h", f"deadline:{dice.uniform(2, 72):.3g}h", "none"))
    site.app(
        f"a{number}-1",
        gang=sizes[0],
        demand=sizes[-1],
        sizes=sizes if len(sizes) > 1 else (),
        jobs=[wish(f"a{number}-1", 0, [])],
        left_gpu_s=left * hours * 3600.0,
        utility=parse(f"{kind}{',' if ':' in kind else ':'}{hours * dice.uniform(0.5, 5.0):.4g}"),
        spans=sizes[-1] > NODE_GPUS,
    )


def measured(apps: int, nodes: int) -> dict[str, list[tuple[float, float]]]:
    """Return (loop, sale) in seconds of every submission, and of the time slot in which all lag."""
    site = Timed()
    for number in range(nodes):
        site.node(f"n{number:03}", NODE_GPUS)
    site.taken()
    submissions = []
    for number in range(apps):
        site.now += 20.0
        submit(site, random.Random(number), number)
        submissions.append(site.taken())
    for number in range(apps):
        submit(site, random.Random(number), number, left=1.5)
    site.taken()
    site.now = (site.now // SLOT_S + 1) * SLOT_S
    site.node("n000")
    return {"submission": submissions, "slot": [site.taken()]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--apps", type=int, default=250)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = {}
    for name, times in measured(options.apps, options.nodes).items():
        loops, sums = [loop for loop, _ in times], [loop + sale for loop, sale in times]
        figures[name] = {
            "loop_ms": [1e3 * statistics.median(loops), 1e3 * max(loops)],
            "sold_inside_ms": [1e3 * statistics.median(sums), 1e3 * max(sums)],
            "ratio": statistics.median(sums) / statistics.median(loops),
        }
    if options.json:
        print(json.dumps(figures, indent=1))
        return 0
    for name, each in figures.items():
        loop, inside = each["loop_ms"], each["sold_inside_ms"]
        print(
            f"{name}: loop {loop[0]:.1f} ms in the median, {loop[1]:.1f} at most; "
            f"sold inside {inside[0]:.1f} and {inside[1]:.1f}; ratio {each['ratio']:.0f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
