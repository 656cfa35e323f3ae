"""The table of policies: configuration, command line, simulator and tests read it; the policies are in `policies/`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from arbiter.core.policies.fitgpp.lrtp import Lrtp
from arbiter.core.policies.fitgpp.policy import FitGpp
from arbiter.core.policies.fitgpp.rand import Rand
from arbiter.core.policies.gandiva.placement import GandivaPlacement
from arbiter.core.policies.gandiva.policy import Gandiva
from arbiter.core.policies.oasis.dorm import Dorm
from arbiter.core.policies.oasis.policy import Oasis
from arbiter.core.policies.oasis.rrh import Rrh
from arbiter.core.policies.queues.backfill import Backfill
from arbiter.core.policies.queues.fifo import Fifo
from arbiter.core.policies.queues.las import Las
from arbiter.core.policies.queues.optimus import Optimus
from arbiter.core.policies.queues.slaq import Slaq
from arbiter.core.policies.queues.srsf import Srsf
from arbiter.core.policies.queues.srtf import Srtf
from arbiter.core.policies.tenants.allox import Allox
from arbiter.core.policies.tenants.astraea import Astraea
from arbiter.core.policies.tenants.drf import Drf
from arbiter.core.policies.tenants.gandiva_fair import GandivaFair
from arbiter.core.policies.tenants.hived import Hived
from arbiter.core.policies.tenants.yarn_cs import YarnCs
from arbiter.core.policies.themis.policy import Themis
from arbiter.core.seam import Policy, Settings

POLICIES: dict[str, Callable[[Settings], Policy]] = {
    "themis": Themis,
    "fifo": Fifo,
    "backfill": Backfill,
    "srtf": Srtf,
    "srsf": Srsf,
    "las": Las,
    "drf": Drf,
    "optimus": Optimus,
    "slaq": Slaq,
    "gandiva-placement": GandivaPlacement,
    "gandiva": Gandiva,
    "fitgpp": FitGpp,
    "lrtp": Lrtp,
    "rand": Rand,
    "oasis": Oasis,
    "rrh": Rrh,
    "dorm": Dorm,
    "astraea": Astraea,
    "yarn-cs": YarnCs,
    "hived": Hived,
    "allox": Allox,
    "gandiva-fair": GandivaFair,
}


@lru_cache(maxsize=16)
def _made(kind: Callable[[Settings], Policy], settings: Settings) -> Policy:
    return kind(settings)


def policy_of(name: str, settings: Settings) -> Policy:
    """Return the policy of that name; policies are stateless, so one serves everybody."""
    return _made(POLICIES[name], settings)
