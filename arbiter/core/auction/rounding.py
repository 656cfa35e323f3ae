"""Whole GPUs: what keeping a fraction c of a bundle means when GPUs cannot be cut.

The bidder keeps a sub-bundle worth c V(G): of two neighbours A and B with V(A) <= c V(G) <= V(B) one is drawn by lot,
so that the expected value is exact. Rounding the count down would leave most winners of a small auction without a GPU;
rounding it up makes over-reporting pay. The value of nothing is the one that was bid, and c V(G) is never below it,
because giving the bidder nothing and the others what they would have without it is an allocation too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from arbiter.core.auction.problem import TOLERANCE, Bidder
from arbiter.core.chance import draw
from arbiter.core.placement import dense, group
from arbiter.core.policy import GpuView


def prefixes(bidder: Bidder, won: Sequence[GpuView]) -> list[tuple[GpuView, ...]]:
    """Return the sub-bundles of `won` in steps of whole gangs, nothing first and all of it last.

    Machines where the bidder has most GPUs come first, on each those it holds already; so what it keeps is dense.
    """
    kept = {node: len(gpus) for node, gpus in group(bidder.kept, lambda gpu: gpu.node).items()}
    machines = group(sorted(won, key=lambda gpu: gpu.gpu), lambda gpu: gpu.node)
    steps: list[tuple[GpuView, ...]] = [()]
    for node in sorted(machines, key=lambda node: (-kept.get(node, 0) - len(machines[node]), node)):
        before = steps[-1]
        gpus = dense(machines[node], len(machines[node]), near=(*bidder.kept, *before), held=bidder.held)
        first = -kept.get(node, 0) % bidder.gang or bidder.gang  # a gang broken by an earlier round is completed first
        ends = range(first, len(gpus) + 1, bidder.gang)
        assert len(gpus) in ends, f"{bidder.app} won a broken gang on {node}"
        steps += [(*before, *gpus[:end]) for end in ends]
    return steps


def keep(bidder: Bidder, won: Sequence[GpuView], fraction: float, *, seed: int) -> tuple[GpuView, ...]:
    """Return the part of `won` that is worth `fraction` of it, exactly in expectation over `seed`.

    `fraction` is c, from the value of nothing relative to that of `won` up to 1.
    """
    if fraction >= 1.0 - TOLERANCE:
        return tuple(won)
    steps = prefixes(bidder, won)
    # A bidder need not use all it has, so more is never worth less.
    gains = list(accumulate((bidder.gain(step) for step in steps), max))
    worth = [math.exp(gain - gains[-1]) for gain in gains]
    above = next((index for index, value in enumerate(worth) if value > fraction + TOLERANCE), len(steps) - 1)
    below = worth.index(worth[max(0, above - 1)])
    span = worth[above] - worth[below]
    chance = 1.0 if span <= 0.0 else (fraction - worth[below]) / span
    assert chance >= -TOLERANCE / max(span, TOLERANCE), f"{bidder.app} is worth less than nothing with a part kept"
    return steps[above] if draw(seed, "keep", bidder.app) < chance else steps[below]
