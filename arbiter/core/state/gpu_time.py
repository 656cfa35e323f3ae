"""Long-term GPU-time fairness (LTGF): the GPU time that each app and tenant has had, and that was fair.

All figures are integrals over time of numbers that change at events only: an app comes, goes or wants another number
of GPUs, a GPU changes hands, a job is parked, the cluster grows or shrinks. The time that apps and tenants have had is
the sum of their leases, so that all of them, and the ledger's rows, add up. They are part of the arbiter's state, so
the journal and its snapshots keep them over restarts, and a tenant's outlive its apps.

How it works. Apps that share GPUs by weight are in a `Pool`: one of all apps (Eq. 3), one of each tenant's (Eq. 13). Of
a pool with C GPUs an app of weight w that can use d of them has a fair rate of min(d, w C / sum of weights), which is
the same for all apps of one weight and demand. So a pool keeps one integral per distinct pair of those, a `Group`, and
an app only what that integral was when it joined. The cost of an event is therefore the distinct pairs in the cluster's
pool and in one tenant's, not their apps; where the number of GPUs or of tenants changes, those of all tenants.

*Source:* Astraea (Ye et al., TPDS 2021), Eq. 1-8, 12, 13, 15, 16. Here larger is better, and 1 or more is fair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import fsum
from typing import Annotated

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from protocol.messages import AppId, LeaseId, OwnerId, TenantId, Weight

#: An app below this is counted as treated unfairly. Source: Astraea, its figures on jobs.
UNFAIR_BELOW = 0.95


class TenantTerms(Struct, frozen=True, forbid_unknown_fields=True):
    """The dues of a tenant: a part of the GPUs by its `weight`, or the GPUs of its `quota`; others have weight 1.

    `members` are the owners whose apps may be its; where none is named, all may.
    """

    name: TenantId
    weight: Weight = 1.0
    quota: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    members: tuple[OwnerId, ...] = ()


class Flow(Struct, frozen=True, array_like=True):
    """An integral over time of a number that changes in steps, as a value."""

    total: float = 0.0  #: up to `since`
    rate: float = 0.0  #: the number since then
    since: float = 0.0  #: seconds

    def at(self, now: float) -> float:
        """Return the integral up to `now` (seconds)."""
        return self.total + self.rate * (now - self.since)

    def changed(self, rate: float, now: float) -> Flow:
        """Return it with another `rate` from `now` on."""
        return Flow(self.at(now), rate, now)


class Group(Struct, array_like=True):
    """The apps of one pool that are of one weight and want as many GPUs, and what was fair for each of them."""

    weight: float
    demand: int
    apps: int = 0
    fair_gpu_s: float = 0.0  #: of one app that is in it since it was made, up to `Pool.since`


class Pool(Struct):
    """Apps that share `gpus` GPUs by weight; see this file's head."""

    gpus: float = 0.0
    since: float = 0.0
    groups: dict[str, Group] = field(default_factory=dict)

    @property
    def demand(self) -> int:
        """The GPUs that its apps can use (Eq. 7)."""
        return sum(group.demand * group.apps for group in self.groups.values())

    @property
    def gpus_per_weight(self) -> float:
        """The GPUs of an app of weight 1, however few it can use."""
        if not self.groups:
            return 0.0
        weight = fsum(group.weight * group.apps for group in self.groups.values())
        return self.gpus / weight if weight > 0.0 else 0.0

    def advance(self, now: float) -> None:
        """Bring every group up to `now`; before anything changes."""
        elapsed = now - self.since
        if elapsed > 0.0 and self.groups:
            per_weight = self.gpus_per_weight
            for group in self.groups.values():
                group.fair_gpu_s += min(group.demand, group.weight * per_weight) * elapsed
        self.since = now

    def accrued(self, now: float) -> dict[str, float]:
        """Return what was fair for one app of each group by `now`, by the group's key."""
        if not self.groups:
            return {}
        per_weight, elapsed = self.gpus_per_weight, now - self.since
        return {
            key: group.fair_gpu_s + min(group.demand, group.weight * per_weight) * elapsed
            for key, group in self.groups.items()
        }

    def accrued_by(self, key: str, now: float) -> float:
        """Return what was fair for one app of this group by `now`."""
        group = self.groups[key]
        return group.fair_gpu_s + min(group.demand, group.weight * self.gpus_per_weight) * (now - self.since)

    def join(self, key: str, weight: float, demand: int) -> float:
        """Take one app in, once `advance` was called; return what its group had by then."""
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = Group(weight, demand)
        group.apps += 1
        return group.fair_gpu_s

    def leave(self, key: str) -> float:
        """Let one app go, once `advance` was called; return what its group had by then."""
        group = self.groups[key]
        group.apps -= 1
        if not group.apps:
            del self.groups[key]
        return group.fair_gpu_s


class LeaseBook(Struct, frozen=True):
    """The GPU time of one lease: had, and of that what passed while its app was leaving."""

    app: AppId
    tenant: TenantId
    had: Flow = Flow()
    draining: Flow = Flow()


class Spent(Struct, frozen=True):
    """Where GPU time went, of an app or a tenant, beside what it has had.

    `draining` is of what it has had: from the end of a lease until the GPU was proven empty. `lost` likewise: what had
    to be done again, as attempts ended without having saved it. So is `starting`: what passed until the first
    mini-batches of attempts that are over. `untrained` is the two together, but no more than what the app had trained
    by then: a node that is cut off goes on without its GPUs counting as had, and then loses more than that. `parked` is
    not of what it has had: GPUs times the time in which jobs lay parked on them, while they were free or others had
    them.
    """

    draining: Flow = Flow()
    parked: Flow = Flow()
    lost_gpu_s: float = 0.0
    starting_gpu_s: float = 0.0
    untrained_gpu_s: float = 0.0

    def untrained(self, starting_gpu_s: float = 0.0) -> Flow:
        """Return what of the GPU time had was no training, with so much of starts that are not counted yet."""
        return replace(self.draining, total=self.draining.total + self.untrained_gpu_s + starting_gpu_s)


class AppAccount(Struct, frozen=True):
    """The GPU time that an app has had, and that was fair.

    `fair_all` and `fair_within` are its integrals by Eq. 4 and Eq. 15 up to when it joined its present group, less what
    that group had then; while it is in none (`demand` 0), the whole of them.
    """

    tenant: TenantId
    weight: float = 1.0
    demand: int = 0  #: GPUs that it can use while it is active
    allocated: Flow = Flow()  #: GPUs it holds, until proven empty; of a shared GPU its part
    fair_all: float = 0.0
    fair_within: float = 0.0
    spent: Spent = Spent()

    @property
    def key(self) -> str:
        """The name of the group it is in."""
        return f"{self.demand}/{self.weight!r}"


class TenantAccount(Struct, frozen=True):
    """The GPU time that a tenant has had, and that was fair; both outlive its apps."""

    allocated: Flow = Flow()
    fair: Flow = Flow()  #: of min(demand, quota); Eq. 8
    quota: Flow = Flow()  #: of its quota, whatever it wants; Eq. 16
    spent: Spent = Spent()


class Standing(Struct, frozen=True):
    """LTGF of an app or a tenant at one moment; in GPU-seconds."""

    allocated_gpu_s: float
    fair_gpu_s: float  #: of an app Eq. 4, among all apps; of a tenant Eq. 8
    other_gpu_s: float  #: of an app Eq. 15, within its tenant; of a tenant Eq. 16
    draining_gpu_s: float = 0.0  #: as in `Spent`
    parked_gpu_s: float = 0.0
    lost_gpu_s: float = 0.0
    starting_gpu_s: float = 0.0
    untrained_gpu_s: float = 0.0

    @property
    def trained_gpu_s(self) -> float:
        """What of the GPU time had was training that counts, as far as attempts are over."""
        return max(0.0, self.allocated_gpu_s - self.draining_gpu_s - self.untrained_gpu_s)

    @property
    def ltgf(self) -> float | None:
        """The index of Eq. 5, of a tenant Eq. 12: 1 or more is fair. None while nothing was due."""
        return ratio(self.allocated_gpu_s, self.fair_gpu_s)

    @property
    def ltgf_other(self) -> float | None:
        """The index by the other fair share: of an app within its tenant, of a tenant by its whole quota."""
        return ratio(self.allocated_gpu_s, self.other_gpu_s)


def _standing(had_gpu_s: float, fair_gpu_s: float, other_gpu_s: float, spent: Spent, now: float) -> Standing:
    return Standing(
        allocated_gpu_s=had_gpu_s,
        fair_gpu_s=fair_gpu_s,
        other_gpu_s=other_gpu_s,
        draining_gpu_s=spent.draining.at(now),
        parked_gpu_s=spent.parked.at(now),
        lost_gpu_s=spent.lost_gpu_s,
        starting_gpu_s=spent.starting_gpu_s,
        untrained_gpu_s=spent.untrained_gpu_s,
    )


def ratio(allocated_gpu_s: float, fair_gpu_s: float) -> float | None:
    """Return an LTGF index, or None while nothing was due."""
    return allocated_gpu_s / fair_gpu_s if fair_gpu_s > 0.0 else None


class History(Struct):
    """Everything that LTGF needs. `since` is when counting began, None while nothing has happened yet."""

    since: float | None = None
    gpus: int = 0  #: that may be assigned: M
    idle: Flow = Flow()  #: of those, the ones that no app has
    terms: tuple[TenantTerms, ...] = ()
    pool: Pool = field(default_factory=Pool)  #: all active apps
    pools: dict[TenantId, Pool] = field(default_factory=dict)  #: those of each tenant
    tenants: dict[TenantId, TenantAccount] = field(default_factory=dict)
    apps: dict[AppId, AppAccount] = field(default_factory=dict)
    leases: dict[LeaseId, LeaseBook] = field(default_factory=dict)  #: those that are not over

    # --- what happens -----------------------------------------------------------------------------------------------

    def resize(self, gpus: int, terms: tuple[TenantTerms, ...], now: float) -> None:
        """From `now` on there are so many GPUs, and tenants are due what `terms` say."""
        self.gpus, self.terms = gpus, terms
        self.pool.advance(now)
        self.pool.gpus = float(gpus)
        for each in terms:
            self._open(each.name)
        self._share_out(now)

    def lie_idle(self, gpus: int, now: float) -> None:
        """From `now` on no app holds so many of the GPUs that may be assigned."""
        if gpus != self.idle.rate:
            self.idle = self.idle.changed(float(gpus), now)

    def follow(self, app: AppId, tenant: TenantId, *, weight: float, demand: int, now: float) -> None:
        """From `now` on an app can use so many GPUs; 0 once it is over."""
        account = self.apps.get(app)
        if account is None:
            if not demand:
                return
            account = AppAccount(tenant, weight, 0)
        if (account.weight, account.demand) == (weight, demand):
            return
        pool = self._open(account.tenant)
        was_there = bool(pool.groups)
        self.pool.advance(now)
        pool.advance(now)
        fair_all, fair_within = account.fair_all, account.fair_within
        if account.demand:
            fair_all += self.pool.leave(account.key)
            fair_within += pool.leave(account.key)
        account = replace(account, weight=weight, demand=demand)
        if demand:
            fair_all -= self.pool.join(account.key, weight, demand)
            fair_within -= pool.join(account.key, weight, demand)
        self.apps[app] = replace(account, fair_all=fair_all, fair_within=fair_within)
        if bool(pool.groups) != was_there and all(each.name != account.tenant for each in self.terms):
            self._share_out(now)
        else:
            self._take_share(account.tenant, self.tenants[account.tenant].quota.rate, now)

    def book(self, lease: LeaseId, app: AppId, tenant: TenantId, part: float, *, drains: bool, now: float) -> bool:
        """From `now` on a lease is worth this part of a GPU, 0 out of service; return whether that is new."""
        book = self.leases.get(lease) or LeaseBook(app, tenant)
        had, draining = part, part if drains else 0.0
        if lease in self.leases and (book.had.rate, book.draining.rate) == (had, draining):
            return False
        if had != book.had.rate:
            self._hold(book, had - book.had.rate, now)
        if draining != book.draining.rate:
            self._spend(book.app, book.tenant, now, draining=draining - book.draining.rate)
        self.leases[lease] = replace(
            book, had=book.had.changed(had, now), draining=book.draining.changed(draining, now)
        )
        return True

    def close(self, lease: LeaseId, now: float) -> LeaseBook:
        """A lease is over; return what its GPU time was."""
        book = self.leases[lease]
        self.book(lease, book.app, book.tenant, 0.0, drains=False, now=now)
        return self.leases.pop(lease)

    def _hold(self, book: LeaseBook, change: float, now: float) -> None:
        account = self.apps.get(book.app) or AppAccount(book.tenant)
        held = account.allocated
        self.apps[book.app] = replace(account, allocated=held.changed(held.rate + change, now))
        self._open(account.tenant)
        whole = self.tenants[account.tenant]
        held = whole.allocated
        self.tenants[account.tenant] = replace(whole, allocated=held.changed(held.rate + change, now))

    def park(self, app: AppId, tenant: TenantId, gpus: int, now: float) -> None:
        """From `now` on jobs of an app lie parked on so many GPUs."""
        account = self.apps.get(app)
        before = account.spent.parked.rate if account is not None else 0.0
        if gpus != before:
            self._spend(app, tenant, now, parked=gpus - before)

    def end_attempt(
        self, app: AppId, tenant: TenantId, *, lost_gpu_s: float, starting_gpu_s: float, now: float
    ) -> None:
        """An attempt is over: so much of what an app has had has to be done again, and so much were starts."""
        if lost_gpu_s or starting_gpu_s:
            untrained_gpu_s = min(lost_gpu_s + starting_gpu_s, self.of_app(app, now).trained_gpu_s)
            self._spend(
                app, tenant, now,
                lost_gpu_s=lost_gpu_s, starting_gpu_s=starting_gpu_s, untrained_gpu_s=untrained_gpu_s,
            )  # fmt: skip

    def _spend(
        self, app: AppId, tenant: TenantId, now: float, *, draining: float = 0.0, parked: float = 0.0, **more: float
    ) -> None:
        """Add to where the GPU time of an app went, and to its tenant's; `more` are fields of `Spent`, GPU-seconds."""

        def added(spent: Spent) -> Spent:
            return replace(
                spent,
                draining=spent.draining.changed(spent.draining.rate + draining, now) if draining else spent.draining,
                parked=spent.parked.changed(spent.parked.rate + parked, now) if parked else spent.parked,
                **{name: getattr(spent, name) + gpu_s for name, gpu_s in more.items()},
            )

        account = self.apps.get(app) or AppAccount(tenant)
        self.apps[app] = replace(account, spent=added(account.spent))
        self._open(account.tenant)
        whole = self.tenants[account.tenant]
        self.tenants[account.tenant] = replace(whole, spent=added(whole.spent))

    def forget(self, app: AppId) -> None:
        """An app is over and remembered no more; its tenant's figures stay."""
        account = self.apps.pop(app, None)
        assert account is None or not account.demand, f"{app} is forgotten while it wants GPUs"

    # --- what follows -----------------------------------------------------------------------------------------------

    def of_app(self, app: AppId, now: float) -> Standing:
        """Return where an app stands."""
        account = self.apps.get(app)
        if account is None:
            return Standing(0.0, 0.0, 0.0)
        fair_all, fair_within = account.fair_all, account.fair_within
        if account.demand:
            fair_all += self.pool.accrued_by(account.key, now)
            fair_within += self.pools[account.tenant].accrued_by(account.key, now)
        return _standing(account.allocated.at(now), max(0.0, fair_all), max(0.0, fair_within), account.spent, now)

    def of_tenant(self, tenant: TenantId, now: float) -> Standing:
        """Return where a tenant stands."""
        account = self.tenants.get(tenant, TenantAccount())
        had, fair, quota = (flow.at(now) for flow in (account.allocated, account.fair, account.quota))
        return _standing(had, fair, quota, account.spent, now)

    def weight_of(self, tenant: TenantId) -> float:
        """Return the weight of a tenant."""
        return next((each.weight for each in self.terms if each.name == tenant), 1.0)

    # --- shares -----------------------------------------------------------------------------------------------------

    def _open(self, tenant: TenantId) -> Pool:
        if tenant not in self.tenants:
            self.tenants[tenant] = TenantAccount()
            self.pools[tenant] = Pool()
        return self.pools[tenant]

    def _share_out(self, now: float) -> None:
        """Give every tenant its quota anew."""
        present = [name for name, pool in self.pools.items() if pool.groups]
        quotas = quotas_of(self.gpus, self.terms, present)
        for tenant in self.tenants:
            self._take_share(tenant, quotas.get(tenant, 0.0), now)

    def _take_share(self, tenant: TenantId, quota: float, now: float) -> None:
        pool, account = self.pools[tenant], self.tenants[tenant]
        fair = min(float(pool.demand), quota)
        if (account.fair.rate, account.quota.rate) == (fair, quota) and pool.gpus == fair:
            return
        pool.advance(now)
        pool.gpus = fair
        self.tenants[tenant] = replace(
            account, fair=account.fair.changed(fair, now), quota=account.quota.changed(quota, now)
        )


def quotas_of(gpus: int, terms: Sequence[TenantTerms], present: Iterable[TenantId]) -> dict[TenantId, float]:
    """Return the GPUs that each tenant is due: of those with terms always, of others while they have active apps.

    Quotas that are given in GPUs come first, cut in proportion if there are not so many; what they leave is divided by
    weight.

    *Source:* Astraea, Eq. 6: Quota_j = M W_j / sum_k W_k.
    """
    given = {each.name: float(each.quota) for each in terms if each.quota is not None}
    total = fsum(given.values())
    cut = min(1.0, gpus / total) if total > 0.0 else 1.0
    weights = {each.name: each.weight for each in terms if each.quota is None}
    for tenant in present:
        if tenant not in given:
            weights.setdefault(tenant, 1.0)
    whole = fsum(weights.values())
    left = max(0.0, gpus - total)
    return {name: quota * cut for name, quota in given.items()} | {
        name: left * weight / whole for name, weight in weights.items()
    }
