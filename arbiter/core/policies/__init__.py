"""The table of policies: command line, simulator, tests, docs and benchmarks read it. One file each beside this one."""

from __future__ import annotations

from collections.abc import Callable

from arbiter.core.policies.allox import Allox
from arbiter.core.policies.astraea import Astraea
from arbiter.core.policies.backfill import Backfill
from arbiter.core.policies.dorm import Dorm
from arbiter.core.policies.drf import Drf
from arbiter.core.policies.fifo import Fifo
from arbiter.core.policies.fitgpp import FitGpp
from arbiter.core.policies.gandiva import Gandiva
from arbiter.core.policies.gandiva_fair import GandivaFair
from arbiter.core.policies.gandiva_placement import GandivaPlacement
from arbiter.core.policies.hived import Hived
from arbiter.core.policies.las import Las
from arbiter.core.policies.lrtp import Lrtp
from arbiter.core.policies.oasis import Oasis
from arbiter.core.policies.optimus import Optimus
from arbiter.core.policies.rand import Rand
from arbiter.core.policies.rrh import Rrh
from arbiter.core.policies.slaq import Slaq
from arbiter.core.policies.srsf import Srsf
from arbiter.core.policies.srtf import Srtf
from arbiter.core.policies.themis import Themis
from arbiter.core.policies.yarn_cs import YarnCs
from arbiter.core.policy import Policy, Settings

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
