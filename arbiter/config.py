"""The arbiter's configuration: one TOML file, decoded once into one frozen value."""

from __future__ import annotations

from collections import Counter
from math import inf
from pathlib import Path
from typing import Literal

from msgspec import Struct

from arbiter.core.registry import POLICIES
from arbiter.core.state.model import ArbiterSettings
from protocol import config
from protocol.config import ConfigError

HistoryMode = Literal["auto", "resume", "begin"]
#: The most seats that a plan can give a GPU.
SEATS_MAX = 64


class ArbiterConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the arbiter runs and how it decides.

    `bus` is ``amqp[s]://user:password@host:port/vhost``; when empty, the daemon reads it from the file `bus_file`
    (systemd credential). `state_dir` holds the journal and the ledger. `shared_users` lists broker users that may
    speak for anyone: only for brokers where all daemons share one user.

    `history` says what is expected of the history of GPU time, which decides who is served next: ``auto`` resumes it,
    and refuses to start where the ledger tells of a past that the journal has not; ``resume`` refuses to start without
    one; ``begin`` accepts that it begins at nothing.

    `adopt_site` says, for one start after the journal was lost, that the site which is first heard becomes this one's:
    what runs there goes on (`arbiter.core.members.site`).
    """

    state_dir: str = "/var/lib/gpu-arbiter"
    bus: str = ""
    bus_file: str = ""
    prefix: str = ""  #: of queue and exchange names; the same in all daemons of a site
    shared_users: tuple[str, ...] = ()
    arbiter: ArbiterSettings = ArbiterSettings()
    history: HistoryMode = "auto"
    adopt_site: bool = False


def load(path: Path) -> ArbiterConfig:
    """Return the configuration in the TOML file at `path`; raises `ConfigError`."""
    return config.load(path, ArbiterConfig, check)


def check(arbiter: ArbiterConfig, source: str) -> None:
    """Refuse settings that cannot work.

    Raises
    ------
    ConfigError
        With `source`, the field and the mend.
    """
    settings = arbiter.arbiter
    if settings.policy not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise ConfigError(f"{source}: arbiter.policy is {settings.policy!r}; choose one of {known}")
    names = ("lease_s", "probe_s", "bid_s", "beat_s", "node_timeout_s", "app_timeout_s", "decide_grace_s", "probes_max")
    config.require_positive(settings, (*names, "quantum_s"), f"{source}: arbiter")
    pauses = ("renewal_lead_s", "round_pause_s", "admission_wait_s")
    config.require_not_negative(settings, pauses, f"{source}: arbiter")
    where = f"{source}: arbiter.policy_settings"
    config.require_positive(settings.policy_settings, ("solver_budget_ms", "las_threshold_gpu_s"), where)
    config.require_not_negative(settings.policy_settings, ("reasons_max", "gandiva_idle_s"), where)
    if not 1 <= settings.seats <= SEATS_MAX:
        raise ConfigError(f"{source}: arbiter.seats is {settings.seats}; give how many jobs may share a GPU, 1 to 64")
    if settings.align_after_leases != 0.0 and not 1.0 <= settings.align_after_leases < inf:
        raise ConfigError(
            f"{source}: arbiter.align_after_leases is {settings.align_after_leases}; give after how many leases of "
            "waiting, 1 or more, or 0 for never"
        )
    if settings.renewal_lead_s + settings.probe_s + settings.bid_s >= settings.lease_s:
        raise ConfigError(
            f"{source}: arbiter.lease_s is {settings.lease_s}, too short for renewal_lead_s + probe_s + bid_s; "
            "make the lease longer or the others shorter"
        )
    if settings.tenants_only and not settings.tenants:
        raise ConfigError(
            f"{source}: arbiter.tenants_only is true and no tenant is named, so no app could run; "
            "name tenants in arbiter.tenants (of a simulation: --tenants FILE), or leave it out"
        )
    names_of_tenants = Counter(each.name for each in settings.tenants)
    twice = [name for name, count in names_of_tenants.items() if count > 1]
    if twice:
        raise ConfigError(f"{source}: arbiter.tenants names {twice[0]} twice; give each tenant one table")
    config.require_positive(settings, ("apps_max", "weight_max"), f"{source}: arbiter")
    if not 0.0 <= settings.preemption_budget <= 1.0:
        raise ConfigError(
            f"{source}: arbiter.preemption_budget is {settings.preemption_budget}; give the part of its time that a "
            "job may lose, 0 to 1"
        )
    if not -1000 <= settings.priority_max <= 1000:
        raise ConfigError(
            f"{source}: arbiter.priority_max is {settings.priority_max}; give a number from -1000 to 1000"
        )
    if not settings.classes:
        raise ConfigError(f"{source}: arbiter.classes is empty, so no app could run; name batch, interactive or both")
    both = [each.name for each in settings.tenants if each.quota is not None and each.weight != 1.0]
    if both:
        raise ConfigError(
            f"{source}: arbiter.tenants gives {both[0]} a weight and a quota; leave one out, as a quota is its part"
        )
    try:
        for policy in POLICIES.values():  # whichever is chosen: a setting that another one could not have is a mistake
            policy(settings.policy_settings)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
