"""Which of an app's trials get GPUs: one job, or successive halving over several."""

from __future__ import annotations

from app_agent.core.spec import AppSpec
from app_agent.core.tuning.halving import Halving
from app_agent.core.tuning.shape import AppScheduler, Left, Search, Trial
from app_agent.core.tuning.single import Single

__all__ = ["AppScheduler", "Halving", "Left", "Search", "Single", "Trial", "scheduler_for"]


def scheduler_for(spec: AppSpec) -> AppScheduler:
    """Return the app scheduler that `spec` asks for."""
    return Halving.of(spec) if len(spec.trials) > 1 else Single()
