"""The table of policies: configuration, command line, simulator and tests read it; the policies are in `policies/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec import Struct

from arbiter.core.policies.fitgpp import baselines as fitgpp_baselines
from arbiter.core.policies.fitgpp import policy as fitgpp
from arbiter.core.policies.fitgpp.preemption import Reserving
from arbiter.core.policies.gandiva import placement as gandiva_placement
from arbiter.core.policies.gandiva import policy as gandiva
from arbiter.core.policies.maxmin import policy as maxmin
from arbiter.core.policies.oasis import dorm, rrh
from arbiter.core.policies.oasis import policy as oasis
from arbiter.core.policies.oasis.settings import Settings as OasisSettings
from arbiter.core.policies.queues import backfill, fifo, las, optimus, shortest, slaq
from arbiter.core.policies.tenants import allox, astraea, drf, gandiva_fair, hived, yarn_cs
from arbiter.core.policies.themis import policy as themis
from arbiter.core.policies.themis.auction import compiled
from arbiter.core.policies.themis.auction.instance import load, warm_up
from arbiter.core.seam import Policy, PolicySettings, Setting, Table


class Loops(Struct, frozen=True):
    """Loops of a policy that run as machine code once they are compiled, and as plain Python until then."""

    compilable: bool  #: what compiles them is installed
    kept: Callable[[], bool]  #: whether compiled code is kept on disk, so that one process can compile for another
    use_plain: Callable[[], None]
    use_compiled: Callable[[], None]
    warm_up: Callable[[], None]  #: reaches every loop, so that all are compiled, or read from the disk, after it
    load: Callable[[], bool]  #: has machine code used if all of it is on disk; returns whether it is, and compiles none


class Entry(Struct, frozen=True, cache_hash=True):
    """One policy: its class, the type of its settings, and whether it is for sites or a baseline of evaluations."""

    kind: type[Policy]
    settings: type[PolicySettings] = PolicySettings
    live: bool = False
    loops: Loops | None = None  #: what an arbiter compiles before the first round

    def decoded(self, table: Mapping[str, Any]) -> PolicySettings:
        """Return the settings in one table, the defaults for what it does not name.

        Raises
        ------
        msgspec.ValidationError
            For a field that the policy does not have, and a value of the wrong type or out of range.
        """
        return msgspec.convert(dict(table), self.settings)

    def made(self, **fields: Setting) -> Policy:
        """Return the policy with these of its settings; raises as `decoded` does."""
        return self.kind(self.decoded(fields))


_AUCTION = Loops(compiled.COMPILED, compiled.kept, compiled.use_plain, compiled.use_compiled, warm_up, load)

POLICIES: Final[dict[str, Entry]] = {
    "themis": Entry(themis.Themis, themis.Settings, live=True, loops=_AUCTION),
    "maxmin-ftf": Entry(maxmin.MaxMinFtf, maxmin.Settings, live=True),
    "fifo": Entry(fifo.Fifo, live=True),
    "backfill": Entry(backfill.Backfill, live=True),
    "srtf": Entry(shortest.Srtf, shortest.Settings),
    "srsf": Entry(shortest.Srsf, shortest.Settings),
    "las": Entry(las.Las, las.Settings, live=True),
    "drf": Entry(drf.Drf, live=True),
    "optimus": Entry(optimus.Optimus),
    "slaq": Entry(slaq.Slaq),
    "gandiva-placement": Entry(gandiva_placement.GandivaPlacement, gandiva_placement.Settings),
    "gandiva": Entry(gandiva.Gandiva, gandiva.Settings, live=True),
    "fitgpp": Entry(fitgpp.FitGpp, fitgpp.Settings, live=True),
    "lrtp": Entry(fitgpp_baselines.Lrtp, Reserving),
    "rand": Entry(fitgpp_baselines.Rand, Reserving),
    "oasis": Entry(oasis.Oasis, OasisSettings, live=True),
    "rrh": Entry(rrh.Rrh, rrh.Settings),
    "dorm": Entry(dorm.Dorm, dorm.Settings),
    "astraea": Entry(astraea.Astraea, live=True),
    "yarn-cs": Entry(yarn_cs.YarnCs),
    "hived": Entry(hived.Hived, live=True),
    "allox": Entry(allox.Allox, allox.Settings),
    "gandiva-fair": Entry(gandiva_fair.GandivaFair),
}
#: Where ``--fairness-knob`` of the command line stands.
FAIRNESS_KNOB: Final = "policy.themis.fairness_knob"

#: Settings as they were called when all policies had one table, and as they are called now; "": no site sets it.
RENAMED: Final[Mapping[str, str]] = {
    "fairness_knob": FAIRNESS_KNOB,
    "solver_budget_ms": "arbiter.solver_budget_ms",
    "leftover": "policy.themis.leftover",
    "reasons_max": "",
    "las_threshold_gpu_s": "policy.las.threshold_gpu_s",
    "gandiva_idle_s": "policy.gandiva.idle_s",
    "astraea_quota_variant": "",
    "astraea_until_fair": "",
    "tenants_first": "policy.themis.tenants_first",
    "fitgpp_s": "policy.fitgpp.s",
    "fitgpp_p": "policy.fitgpp.p",
    "trial_nodes": "policy.fitgpp.reserved_nodes",
    "interactive_nodes": "policy.fitgpp.reserved_nodes",
    "trial_share": "arbiter.interactive_share",
    "interactive_share": "arbiter.interactive_share",
    "trial_s": "arbiter.interactive_s",
    "interactive_s": "arbiter.interactive_s",
    "allox_alpha": "policy.allox.alpha",
    "oasis_slot_s": "policy.oasis.slot_s",
    "oasis_slots": "policy.oasis.slots",
    "oasis_price_max": "policy.oasis.price_max",
    "oasis_price_min": "policy.oasis.price_min",
    "oasis_margin": "",
    "oasis_second_look": "",
    "oasis_promise": "",
    "rrh_threshold": "policy.rrh.threshold",
    "dorm_fairness": "policy.dorm.fairness",
    "dorm_adjusted": "policy.dorm.adjusted",
}


def tables(name: str, **fields: Setting) -> dict[str, dict[str, Setting]]:
    """Return these settings of one policy as `ArbiterSettings.policies` holds them; raises as `decoded` does."""
    found: dict[str, Setting] = msgspec.to_builtins(POLICIES[name].decoded(fields))
    return {name: found}


@lru_cache(maxsize=64)
def _made(entry: Entry, table: tuple[tuple[str, Setting], ...]) -> Policy:
    return entry.made(**dict(table))


def policy_of(name: str, table: Table) -> Policy:
    """Return the policy of that name with the settings in its table; policies are stateless, so one serves all."""
    return _made(POLICIES[name], tuple(table.items()))
