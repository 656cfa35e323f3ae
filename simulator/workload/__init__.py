"""Workloads to simulate: apps and their jobs, from real traces or drawn from published figures."""

from __future__ import annotations

from simulator.workload.curves import loss_curve
from simulator.workload.fitgpp import fitgpp_workload
from simulator.workload.load import load
from simulator.workload.plans import AppPlan, JobPlan, Search, Workload, WorkloadError, gpu_seconds, halving_share
from simulator.workload.themis import themis_workload

__all__ = [
    "AppPlan",
    "JobPlan",
    "Search",
    "Workload",
    "WorkloadError",
    "fitgpp_workload",
    "gpu_seconds",
    "halving_share",
    "load",
    "loss_curve",
    "themis_workload",
]
