"""App schedulers decide which of an app's jobs get GPUs: a single job, an array, and four searches over trials."""

from __future__ import annotations

from typing import assert_never

from app_agent.core.spec import AppSpec
from app_agent.core.tuning.array import Array
from app_agent.core.tuning.curve import CurveStopping
from app_agent.core.tuning.exhaustive import Exhaustive
from app_agent.core.tuning.halving import Halving
from app_agent.core.tuning.hyperband import Hyperband
from app_agent.core.tuning.scheduler import AppScheduler, Curve, Left, Search, Trial
from app_agent.core.tuning.single import Single

__all__ = [
    "AppScheduler",
    "Array",
    "Curve",
    "CurveStopping",
    "Exhaustive",
    "Halving",
    "Hyperband",
    "Left",
    "Search",
    "Single",
    "Trial",
    "scheduler_for",
]


def scheduler_for(spec: AppSpec) -> AppScheduler:
    """Return the app scheduler that `spec` asks for; among one trial there is nothing to search, but it may end early.

    `spec` has no mistake.
    """
    if spec.array:
        return Array.of(spec)
    if spec.search == "curve":
        return CurveStopping.of(spec)
    if len(spec.trials) == 1:
        return Single()
    match spec.search:
        case "halving":
            return Halving.of(spec)
        case "hyperband":
            return Hyperband.of(spec)
        case "all":
            return Exhaustive.of(spec)
        case _ as never:
            assert_never(never)
