"""Two tenants that are alike but for their number of apps, on four GPUs, under the settings of a site.

Each wants more than half of the GPUs all the time, so half is fair to each. The same core decides as live. After some
leases the tenants' LTGF tells whether these settings split GPU time among tenants, or by something else.

*Source:* Astraea (TPDS 2021), Eq. 8: LTGF is the GPU time that a tenant had, by the GPU time that was fair.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from arbiter.core.state.model import ArbiterSettings
from simulator.cluster import parse_cluster
from simulator.costs import NONE
from simulator.profiles import built_in
from simulator.run import INTERVAL_S, simulate
from simulator.workload import AppPlan, JobPlan, Workload

CLUSTER = "2x2"
#: Apps of each tenant, of one GPU each. A policy that goes by apps gives the first tenant three quarters of the GPUs.
APPS = {"self-test-many": 12, "self-test-few": 4}
#: Leases after which the tenants are compared: the seats of a GPU that is taken late weigh little by then.
LEASES = 24
#: By so much an LTGF may be below or above 1.
TOLERANCE = 0.05


def ltgf(settings: ArbiterSettings) -> Mapping[str, float]:
    """Return the LTGF of each of the two tenants under `settings`."""
    until_s = max(LEASES * settings.lease_s, 8 * INTERVAL_S)
    job = JobPlan(duration_s=1.25 * until_s, steps=1000)
    plans = [
        AppPlan(id=f"{tenant}-{number}", tenant=tenant, submit_s=0.0, gpus=1, gpus_max=1, jobs=(job,))
        for tenant, apps in APPS.items()
        for number in range(apps)
    ]
    run = simulate(
        Workload("self-test", tuple(plans)),
        parse_cluster(CLUSTER),
        policy=settings.policy,
        settings=replace(settings, tenants_only=False),
        costs=NONE,
        profiles=built_in(),
        seed=settings.seed,
    )
    last_s = max(point.at_s for point in run.tenants if point.at_s <= until_s)
    return {
        point.tenant: point.allocated_gpu_s / point.fair_gpu_s
        for point in run.tenants
        if point.at_s == last_s and point.tenant in APPS
    }


def is_fair(found: Mapping[str, float]) -> bool:
    """Return whether each tenant has had what is fair, within `TOLERANCE`."""
    return all(abs(value - 1.0) <= TOLERANCE + 1e-9 for value in found.values())
