"""The arbiter's configuration: one TOML file, decoded once into one frozen value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from math import inf
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.registry import POLICIES, RENAMED
from arbiter.core.seam import Setting
from arbiter.core.state.model import ArbiterSettings
from protocol import config
from protocol.config import ConfigError
from protocol.journal.database import EXAMPLE, is_database, without_password
from protocol.messages import OwnerId, PartyId

#: Files of the state folder.
JOURNAL, LEDGER = "journal.db", "ledger.db"
HistoryMode = Literal["auto", "resume", "begin"]
#: As an owner of a gateway: all owners.
ALL = "*"
#: The most seats that a plan can give a GPU.
SEATS_MAX = 64
#: Below that a beat of a large site would have no bound but that of its silence.
RESTATEMENTS_MIN = 0.01
#: Fields of the state's settings that no file sets: the first comes from the tables of policies.
_HIDDEN = {"policies", "decide_grace_s"}
#: The fields of [arbiter].
FIELDS = tuple(name for name in ArbiterSettings.__struct_fields__ if name not in _HIDDEN)


class Gateway(Struct, frozen=True, forbid_unknown_fields=True):
    """A gateway, and the owners for whose apps it speaks; ``*``: all whom no other gateway names."""

    name: PartyId
    owners: tuple[str, ...] = (ALL,)


class _AllBut:
    """All owners but some."""

    def __init__(self, others: frozenset[str]) -> None:
        self._others = others

    def __contains__(self, owner: object) -> bool:
        return owner not in self._others


class ArbiterConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the arbiter runs and how it decides.

    `bus` is ``amqp[s]://user:password@host:port/vhost``; when empty, the daemon reads it from the file `bus_file`
    (systemd credential). `state_dir` holds the journal and the ledger, unless `journal` is the address of a database
    for both, ``postgresql://user:password@host1,host2/database``; `journal_file` is a file with that address.
    `shared_users` lists broker users that may speak for anyone: only for brokers where all daemons share one user.

    `gateways` lists the gateways of login hosts, each with the owners for whose apps it speaks as ``gateway-<name>``.

    `history` says what is expected of the history of GPU time, which decides who is served next: ``auto`` resumes it,
    and refuses to start where the ledger tells of a past that the journal has not; ``resume`` refuses to start without
    one; ``begin`` accepts that it begins at nothing.

    `adopt_site` says, for one start after the journal was lost, that the site which is first heard becomes this one's:
    what runs there goes on (`arbiter.core.members.site`). Records of the ledger that are older than `ledger_days` are
    deleted; 0: none are.
    """

    state_dir: str = "/var/lib/gpu-arbiter"
    bus: str = ""
    bus_file: str = ""
    journal: str = ""
    journal_file: str = ""
    prefix: str = ""  #: of queue and exchange names; the same in all daemons of a site
    shared_users: tuple[str, ...] = ()
    gateways: tuple[Gateway, ...] = ()
    arbiter: ArbiterSettings = ArbiterSettings()
    policy: Mapping[str, Mapping[str, Any]] = {}  #: a table for each policy that has settings: ``[policy.las]``
    history: HistoryMode = "auto"
    adopt_site: bool = False
    ledger_days: float = 0.0


def load(path: Path) -> ArbiterConfig:
    """Return the configuration in the TOML file at `path`; raises `ConfigError`."""
    return parse(config.read(path), str(path))


def parse(fields: Mapping[str, Any], source: str) -> ArbiterConfig:
    """Return the configuration made of these fields.

    Raises
    ------
    ConfigError
        With `source`, the table, the field and the mend.
    """
    _refuse_misplaced(fields, source)
    _refuse_unknown(fields.get("arbiter"), source)
    found = config.parse(fields, ArbiterConfig, check, source=source)
    policies = {name: _table(name, table, source) for name, table in found.policy.items()}
    return replace(found, arbiter=replace(found.arbiter, policies=policies))


def written(found: ArbiterConfig) -> dict[str, Any]:
    """Return the fields of a file from which `parse` makes this configuration."""
    fields: dict[str, Any] = msgspec.to_builtins(found)
    fields["policy"] = {**fields["policy"], **fields["arbiter"]["policies"]}
    fields["arbiter"] = {name: fields["arbiter"][name] for name in FIELDS}
    return fields


def database_url(found: ArbiterConfig) -> str:
    """Return the address of the database that holds journal and ledger; empty: the state folder holds them.

    Raises
    ------
    ConfigError
        If `journal_file` cannot be read, or has no such address.
    """
    return found.journal or (address_in(Path(found.journal_file)) if found.journal_file else "")


def address_in(journal_file: Path) -> str:
    """Return the address of a database that a `journal_file` has.

    Raises
    ------
    ConfigError
        If it cannot be read, or has no such address.
    """
    try:
        url = journal_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        unit = config.owner_of(journal_file)
        mend = (
            f"only the service {unit} can read it: give a command --journal-file FILE, the file that LoadCredential= "
            "of this service names"
            if unit
            else f"put {EXAMPLE} there"
        )
        raise ConfigError(f"journal_file {journal_file} cannot be read: {why}; {mend}") from error
    if not is_database(url):
        raise ConfigError(
            f"journal_file {journal_file} has {without_password(url)!r}, which is no address of a database; "
            f"write it like {EXAMPLE}"
        )
    return url


def _refuse_unknown(table: object, source: str) -> None:
    """Refuse fields of [arbiter] that are not known: a snapshot may have them, a file may not."""
    if not isinstance(table, Mapping):
        return
    old = table.get("policy_settings")
    if isinstance(old, Mapping):
        mends = "; ".join(map(renamed, old)) or "leave it out"
        raise ConfigError(f"{source}: arbiter.policy_settings is no table any more, each policy has its own: {mends}")
    for name in table:
        if name not in FIELDS:
            place = _place_of(name)
            mend = f"`{name}` belongs {place}" if place else f"leave it out or mend its name; {config.SHOWN}"
            raise ConfigError(f"{source}: unknown field `arbiter.{name}`; {mend}")


def _refuse_misplaced(fields: Mapping[str, object], source: str) -> None:
    """Refuse a field above all tables that is known in one of them."""
    policy = fields.get("policy")
    if isinstance(policy, str):
        raise ConfigError(f'{source}: policy = "{policy}" stands above all tables; write `policy` below `[arbiter]`')
    for name in fields:
        if name not in ArbiterConfig.__struct_fields__ and (place := _place_of(name)):
            raise ConfigError(f"{source}: unknown field `{name}`; `{name}` belongs {place}")


def _place_of(name: str) -> str:
    """Return where a field of that name stands, in words; empty if no table has it."""
    if name in ArbiterConfig.__struct_fields__:
        return "at the top of the file, above all tables"
    tables = ["[arbiter]"] if name in FIELDS else []
    tables += [f"[policy.{policy}]" for policy, entry in POLICIES.items() if name in entry.settings.__struct_fields__]
    return f"below {' or '.join(f'`{table}`' for table in tables)}" if tables else ""


def renamed(old: str) -> str:
    """Return how a setting is written now that was of all policies' one table."""
    if old not in RENAMED:
        return f"{old} is not known, leave it out"
    return f"{old} is now {RENAMED[old]}" if RENAMED[old] else f"{old} is no setting any more, leave it out"


def _table(name: str, table: Mapping[str, Any], source: str) -> dict[str, Setting]:
    """Return the settings of one policy, those included that are not named; raises `ConfigError`."""
    if name not in POLICIES:
        raise ConfigError(f"{source}: [policy.{name}] is of no policy; choose one of {', '.join(sorted(POLICIES))}")
    kind = POLICIES[name].settings
    try:
        typed = POLICIES[name].decoded(table)
    except msgspec.ValidationError as error:
        has = ", ".join(kind.__struct_fields__) or "no settings"
        raise ConfigError(f"{source}: policy.{name}: {config.in_words(error, kind)}; it has {has}") from error
    found: dict[str, Setting] = msgspec.to_builtins(typed)
    return found


def check(arbiter: ArbiterConfig, source: str) -> None:
    """Refuse settings of the arbiter that cannot work; policies check their own.

    Raises
    ------
    ConfigError
        With `source`, the field and the mend.
    """
    check_settings(arbiter.arbiter, source)
    config.require_not_negative(arbiter, ("ledger_days",), source)
    if arbiter.journal and not is_database(arbiter.journal):
        raise ConfigError(f"{source}: journal is {without_password(arbiter.journal)!r}; write it like {EXAMPLE}")
    told = Counter(owner for gateway in arbiter.gateways for owner in gateway.owners)
    twice = [owner for owner, count in told.items() if count > 1]
    if twice:
        raise ConfigError(f"{source}: gateways name {twice[0]!r} twice; an owner's apps are at one gateway only")
    for owner in told:
        if owner != ALL:
            config.require_id(owner, "gateways.owners", "alice", source)


def owners_by_gateway(arbiter: ArbiterConfig) -> dict[str, Container[OwnerId]]:
    """Return by the broker user of each gateway the owners for whose apps it speaks."""
    named = frozenset(owner for gateway in arbiter.gateways for owner in gateway.owners)
    return {
        f"gateway-{gateway.name}": _AllBut(named - set(gateway.owners))
        if ALL in gateway.owners
        else frozenset(map(OwnerId, gateway.owners))
        for gateway in arbiter.gateways
    }


def check_settings(settings: ArbiterSettings, source: str) -> None:
    """The same of the table [arbiter] alone."""
    if settings.policy not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise ConfigError(f"{source}: arbiter.policy is {settings.policy!r}; choose one of {known}")
    names = ("lease_s", "probe_s", "bid_s", "beat_s", "node_timeout_s", "app_timeout_s", "restatements_per_s")
    config.require_positive(settings, (*names, "quantum_s"), f"{source}: arbiter")
    if settings.restatements_per_s < RESTATEMENTS_MIN:
        raise ConfigError(
            f"{source}: arbiter.restatements_per_s is {settings.restatements_per_s}; give {RESTATEMENTS_MIN} or more"
        )
    pauses = ("renewal_lead_s", "round_pause_s", "admission_wait_s", "ask_max")
    config.require_not_negative(settings, pauses, f"{source}: arbiter")
    if not 1 <= settings.seats <= SEATS_MAX:
        raise ConfigError(f"{source}: arbiter.seats is {settings.seats}; give how many jobs may share a GPU, 1 to 64")
    if settings.align_after_leases != 0.0 and not 1.0 <= settings.align_after_leases < inf:
        raise ConfigError(
            f"{source}: arbiter.align_after_leases is {settings.align_after_leases}; give after how many leases of "
            "waiting, 1 or more, or 0 for never"
        )
    name = "renewal_lead_s" if settings.renewal_lead_s >= settings.round_pause_s else "round_pause_s"
    if getattr(settings, name) + settings.probe_s + settings.bid_s >= settings.lease_s:
        raise ConfigError(
            f"{source}: arbiter.lease_s is {settings.lease_s}, too short for {name} + probe_s + bid_s; "
            "make the lease longer or the others shorter"
        )
    config.require_positive(settings, ("solver_budget_ms",), f"{source}: arbiter")
    _check_bounds(settings, source)
    _check_tenants(settings, source)


def _check_bounds(settings: ArbiterSettings, source: str) -> None:
    """Refuse bounds on apps that no app could keep, or that bound nothing."""
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
    config.require_not_negative(settings, ("interactive_s",), f"{source}: arbiter")
    if not 0.0 <= settings.interactive_share <= 1.0:
        raise ConfigError(
            f"{source}: arbiter.interactive_share is {settings.interactive_share}; give the part of all GPUs that "
            "interactive apps may hold at others' cost, 0 to 1"
        )


def _check_tenants(settings: ArbiterSettings, source: str) -> None:
    """Refuse tenants that are named twice, due two things, or needed and not named."""
    if settings.tenants_only and not settings.tenants:
        raise ConfigError(
            f"{source}: arbiter.tenants_only is true and no tenant is named, so no app could run; "
            "name tenants in arbiter.tenants (of a simulation: --tenants FILE), or leave it out"
        )
    names_of_tenants = Counter(each.name for each in settings.tenants)
    twice = [name for name, count in names_of_tenants.items() if count > 1]
    if twice:
        raise ConfigError(f"{source}: arbiter.tenants names {twice[0]} twice; give each tenant one table")
    both = [each.name for each in settings.tenants if each.quota is not None and each.weight != 1.0]
    if both:
        raise ConfigError(
            f"{source}: arbiter.tenants gives {both[0]} a weight and a quota; leave one out, as a quota is its part"
        )
