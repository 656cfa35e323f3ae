"""Themis: finish-time fairness by partial-allocation auctions.

The (1 - f) fraction of apps with the greatest rho bids for all GPUs in play. A proportionally fair allocation with
hidden payments makes honest bids best; the GPUs that the payments leave go to apps that did not bid: first to the one
that holds the GPU (its renewal is no restart), then by lot in whole gangs. When none of those can use it, the setting
`leftover` decides: "idle" leaves it free for a round, so that over-reporting cannot pay; "bidders" gives it back to
bidders, so that no GPU idles, and then over-reporting can pay. A third way departs from the paper: "worst-off" deals
all that is left, gang by gang, in order of rho, with or without a bid. Where gangs are wide and few GPUs are in play
the worst-off bidder's payment takes nearly all that it won, and a lot would give it to an app that is better off.

With `tenants_first` the GPUs in play are split among tenants as Astraea would, and each part is auctioned among the
apps of its tenant alone: finish-time fairness within tenants, long-term GPU-time fairness between them. That is the
default: otherwise a tenant of many apps takes the GPUs that are due to a tenant of few. The paper knows no tenants; on
a site with one tenant the setting has no effect.

The rho that an app tells decides whether it bids, and the less it says that it takes in all, the greater is its rho. So
an app that has trained for more than `excess` times the GPU time that it declared comes to bid by a rho that is as many
times less. The auction itself is the same, if all rho of a bid are so many times greater. Training is GPU time without
starts, leaving and what was lost, as node agents measured these (`View.trained_gpu_s`): an honest search of short
trials has more of them than of training. By default no app is held to what it declared: an elastic job that loses speed
on many GPUs, and a job that lies far apart, may train for several times that.

An app whose leases end comes by a rho that is `renewal_factor` times as great, for `STAY` leases after it got its GPUs.
Where apps are about equally badly off, one would otherwise stop another at the end of each lease, and a later round
would turn that back. Each stop costs a checkpoint and a start, and no app is better off in the end. This rule is ours;
1 is the paper's.

Before the auction an app that has waited for its first GPUs for `start_within_s` seconds gets a gang (`starts`), and
GPUs that were brought together for a gang that has waited long go to such a gang (`gathered`).

An app that is silent (no rho, or no bid when it was offered) gets nothing new, but keeps its GPUs if no other app
takes them: its training goes on without its agent.

*Source:* Themis (NSDI 2020), section 4 and Pseudocode 1; defaults f = 0.8.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from arbiter.core.placement.assignment import Deal, gang_place, gpus, losses, shares
from arbiter.core.placement.locality import PLACE
from arbiter.core.placement.lots import ranked, shuffled
from arbiter.core.policies.common.gathered import Bundles
from arbiter.core.policies.common.ordered import Selection
from arbiter.core.policies.common.tenant_order import ENOUGH_TENANT, PATIENCE, Standings, tenant_by_tenant
from arbiter.core.policies.themis import gathered, starts
from arbiter.core.policies.themis.auction.bids import Award, Bidder, Entry, Settlement, enter, settle
from arbiter.core.policies.themis.auction.compiled import compiled_in_use
from arbiter.core.policies.themis.auction.explain import explain
from arbiter.core.policies.themis.auction.problem import TOLERANCE
from arbiter.core.policies.themis.auction.solve import FIRST_STEPS, Budget
from arbiter.core.policies.themis.before_auction import rest_of, with_bundles
from arbiter.core.seam import (
    Allocation,
    AppView,
    Clock,
    GpuView,
    Loss,
    Outcome,
    Policy,
    PolicySettings,
    Traits,
    View,
    require,
)
from protocol.messages import LEVELS, AppId, Bid, GpuId, TenantId

#: The part of the budget for explaining the outcome: a quarter of the part for finding it.
EXPLAINING = 0.2
#: Said where a round has no GPU to deal, or none that did not go before the auction; to which apps those went follows.
NONE_LEFT = "no other GPU is in play"
LEFTOVER = ("idle", "bidders", "worst-off")
#: The rho of an app that has trained for longer than it declared counts at least for this part.
HELD_MIN = 0.25
#: For so many leases after it got GPUs an app counts as worse off than it is: four hours by default.
STAY = 24.0


class Settings(PolicySettings, frozen=True):
    """The bidders, and the use of GPUs that payments leave."""

    fairness_knob: float = 0.8  #: f of PAPERS.md section 1: the (1 - f) fraction with the worst rho bids
    #: "idle": what hidden payments leave stays free for a round when no app outside the auction can use it; bidders
    #: cannot gain by lying. "bidders": it is given back to them; no GPU idles, but over-reporting can pay.
    #: "worst-off": all of it is dealt in order of rho, to bidders or not: fairer where gangs are wide, not the paper's
    #: rule.
    leftover: str = "bidders"
    tenants_first: bool = True  #: GPUs are split among tenants first, and auctioned within each one's part (ours)
    #: An app that has trained for so many times the GPU time that it declared bids later, as if its rho were less.
    #: inf: none does.
    excess: float = math.inf
    #: An app that waits so long for its first GPUs comes before the auctions. inf: none does.
    start_within_s: float = 3600.0
    #: The rho of an app that got GPUs in play less than `STAY` leases ago counts so many times, so that an app that is
    #: hardly worse off does not stop it. 1: as told.
    renewal_factor: float = 1.25

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        require(0.0 <= self.fairness_knob <= 1.0, "fairness_knob", self.fairness_knob, "from 0 to 1")
        require(self.excess > 1.0, "excess", self.excess, "a number above 1")
        require(self.start_within_s >= 0.0, "start_within_s", self.start_within_s, "0 or more")
        require(1.0 <= self.renewal_factor < math.inf, "renewal_factor", self.renewal_factor, "a number from 1 up")
        require(self.leftover in LEFTOVER, "leftover", f'"{self.leftover}"', f"one of {', '.join(LEFTOVER)}")


DEFAULTS = Settings()


class Themis(Policy):
    """Auctions among the worst-off."""

    traits = Traits("lease", probes=True)

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self._settings = settings
        #: The view that was split last, with its split: `bidders` and `allocate` are asked of one and the same view.
        self._last_split: tuple[View, Split] | None = None

    def bidders(self, view: View) -> Sequence[AppId]:
        """Return the ceil((1 - f) n) worst-off of the n apps that answered and want GPUs; ties are decided by lot.

        An app that got GPUs in play not long ago counts as worse off than it is (`renewal_factor`).

        With `tenants_first` that is so within each tenant that has a part of the GPUs in play; bids of others would not
        enter any auction.
        """
        able = [app for app in view.apps if app.app in view.rhos and app.wants]
        claims = _claims(view, self._settings)
        if not self._settings.tenants_first:
            return self._worst_off(view, able, claims)
        by_tenant: dict[TenantId, list[AppView]] = {}
        for app in able:
            by_tenant.setdefault(app.tenant, []).append(app)
        if len({app.tenant for app in view.apps}) > 1 and not _some_stay(view):
            of_gpus = frozenset(self._split(view).owner.values())
            by_tenant = {tenant: apps for tenant, apps in by_tenant.items() if tenant in of_gpus}
        chosen = {app for apps in by_tenant.values() for app in self._worst_off(view, apps, claims)}
        return tuple(app.app for app in view.apps if app.app in chosen)

    def _split(self, view: View) -> Split:
        """Return the tenant whose part each GPU in play is, for all offers of a round."""
        last = self._last_split
        if last is None or not _is_same(last[0], view):
            last = self._last_split = view, _split(view, self._settings)
        return last[1]

    def _worst_off(self, view: View, able: Sequence[AppView], claims: Mapping[AppId, float]) -> tuple[AppId, ...]:
        if not able:
            return ()
        # (1 - 0.7) * 10 is 3.0000000000000004 in binary.
        count = max(1, math.ceil((1.0 - self._settings.fairness_knob) * len(able) - 1e-9))
        order = ranked(view.seed, able, key=lambda app: -claims[app.app], name=lambda app: app.app, purpose="cutoff")
        return tuple(app.app for app in islice(order, count))

    def allocate(self, view: View, bids: Mapping[AppId, Bid], clock: Clock | None = None) -> Allocation:
        """Hold the auction, deal the leftovers, and say of every app what it got and why.

        Before it, GPUs that were brought together for a gang go to a gang (`gathered`), and apps that have waited long
        for their first GPUs get a gang (`starts`).
        """
        late = starts.late_apps(view, self._settings.start_within_s)
        in_parts = self._settings.tenants_first and len({app.tenant for app in view.apps}) > 1
        if view.gathered:
            may_bid = frozenset(self.bidders(view) if view.offered is None else view.offered)
            invited = {app: bid for app, bid in bids.items() if app in may_bid}
            standings = Standings(view, today_first=False) if in_parts else None
            rho_of = partial(_rho, view, excess=self._settings.excess)
            given, reasons = gathered.bundles(view, invited, rho_of, late, standings)
            if given:
                rest = self.allocate(rest_of(view, given), _other_bids(bids, given), clock)
                return with_bundles(view, bids, given, reasons, rest)
        if in_parts:
            return within_tenants(view, bids, clock, self._settings, self._split(view))
        given = starts.bundles(view, late)
        if not given:
            return self._auction(view, bids, clock)
        reasons = {app.app: starts.late_reason(view, app, given[app.app]) for app in late if app.app in given}
        rest = self._auction(rest_of(view, given), _other_bids(bids, given), clock)
        return with_bundles(view, bids, given, reasons, rest)

    def _auction(self, view: View, bids: Mapping[AppId, Bid], clock: Clock | None) -> Allocation:
        """Hold the auction about all GPUs in play, and deal the leftovers."""
        offered = frozenset(self.bidders(view) if view.offered is None else view.offered)
        entered = {app: bid for app, bid in bids.items() if app in offered}
        entry = enter(view, entered)
        budget_ms = view.budget_ms
        budget = Budget.of((1.0 - EXPLAINING) * budget_ms, clock)
        budget.steps = max(1, budget.steps)  # the first step finds a bound, without which no gap could be told
        settlement = settle(entry, budget)
        all_told = view.tells
        explaining = Budget.of(EXPLAINING * budget_ms if all_told and view.explains else 0.0, clock)
        why_lost = explain(view, entered, entry, settlement, explaining)
        round_ = _Round(view, offered, entry, settlement, why_lost, self._settings)
        if self._settings.leftover == "worst-off":
            round_.deal_to_worst_off()
        else:
            round_.deal_leftovers(to_bidders=self._settings.leftover == "bidders")
        told = view.apps
        if not all_told:
            told = tuple(app for app in told if app.app in entered or app.renewable or round_.deal.got.get(app.app))
        return Allocation(
            assign=round_.deal.assign,
            outcomes=tuple(round_.outcome(app) for app in told),
            rest=round_.rest if len(told) < len(view.apps) else "",
            proven=not settlement.solved.open(),
            facts=_facts(entry, settlement, explaining) | {"idle": float(len(round_.deal.left))},
        )


def _other_bids(bids: Mapping[AppId, Bid], given: Bundles) -> Mapping[AppId, Bid]:
    return {app: bid for app, bid in bids.items() if app not in given}


def _facts(entry: Entry, settlement: Settlement, explaining: Budget) -> dict[str, float]:
    """Return the auction's figures; sums of log V, 1 for yes."""
    solved = settlement.solved
    return {
        "sum_log_v": entry.log_none + solved.value,
        "upper_bound": entry.log_none + solved.upper,
        "gap": solved.upper - solved.value,
        "worst_gap": solved.worst_gap,
        "proven": float(solved.upper - solved.value <= TOLERANCE),
        "proven_payments": float(not solved.open()),
        "steps": float(solved.budget.spent),
        "steps_explaining": float(explaining.spent),
        "out_of_budget": float(bool(solved.open()) and solved.budget.left < FIRST_STEPS),
        "compiled": float(compiled_in_use()),
        "bidders": float(len(entry.bidders)),
        "winners": float(sum(bool(award.won) for award in settlement.awards)),
        "rows_thinned": float(entry.thinned),
        "leftover": float(len(settlement.leftover)),
    }


class _Round:
    """One auction's aftermath: leftovers and reasons."""

    def __init__(
        self,
        view: View,
        offered: frozenset[AppId],
        entry: Entry,
        settlement: Settlement,
        losses: Mapping[AppId, Loss],
        settings: Settings,
    ) -> None:
        self.deal = Deal(view)
        self._view = view
        self._settings = settings
        self._offered = offered
        self._number = {bidder.app: number for number, bidder in enumerate(entry.bidders)}
        self._bidders = {bidder.app: bidder for bidder in entry.bidders}
        self._solved = settlement.solved
        self._losses = losses
        self._awards: dict[AppId, Award] = {award.app: award for award in settlement.awards}
        for award in settlement.awards:
            self.deal.give(award.app, award.kept)
        self._winners = shares(award.app for award in settlement.awards for _ in award.kept)
        self._renewed: dict[AppId, int] = {}
        self._given: dict[AppId, int] = {}
        self._misfit: dict[AppId, str] = {}
        self._way = "by lot"

    # --- leftovers --------------------------------------------------------------------------------------------------

    def deal_leftovers(self, *, to_bidders: bool) -> None:
        others = [app for app in self._view.apps if app.app not in self._awards]
        self._renew(others)
        self._draw_lots([app for app in others if app.app in self._view.rhos and app.app not in self._offered])
        if to_bidders:
            bidders = [self._as_bid(app) for app in self._view.apps if app.app in self._awards]
            self._renew(bidders)
            self._draw_lots(bidders)

    def deal_to_worst_off(self) -> None:
        """Give one gang at a time to each app that has told its rho, the greatest first, whether it bid or not."""
        self._way = "in order of rho"
        apps = [self._as_bid(app) if app.app in self._awards else app for app in self._view.apps]
        answered = (app for app in apps if app.app in self._view.rhos)
        claims = _claims(self._view, self._settings)
        waiting = sorted(answered, key=lambda app: (-claims[app.app], app.app))
        while waiting:
            waiting = [app for app in waiting if self._give_one_gang(app)]
        self._renew(apps)

    def _renew(self, apps: Sequence[AppView]) -> None:
        for app in apps:
            self._renewed[app.app] = self.deal.renew(app)

    def _draw_lots(self, apps: Sequence[AppView]) -> None:
        """Give one gang at a time to each app in a random order, round after round, until none can use more."""
        if not self.deal.left and not self._view.tells:
            return
        waiting = shuffled(self._view.seed, apps, name=lambda app: app.app, purpose="leftover")
        while waiting:
            waiting = [app for app in waiting if self._give_one_gang(app)]

    def _give_one_gang(self, app: AppView) -> bool:
        if self.deal.room(app) <= 0:
            return False
        taken = self.deal.fill(app, app.gang)
        self._given[app.app] = self._given.get(app.app, 0) + taken
        if not taken:
            self._misfit.setdefault(app.app, self.deal.misfit(app))
        return taken > 0

    def _as_bid(self, app: AppView) -> AppView:
        """Return `app`, bound to the GPUs that its bid named."""
        only = self._bidders[app.app].only
        return app if only is None else replace(app, only=tuple(sorted(only)))

    # --- reasons ----------------------------------------------------------------------------------------------------

    def outcome(self, app: AppView) -> Outcome:
        got = self.deal.got[app.app]
        names = tuple(sorted(gpu.gpu for gpu in got))
        award, rho = self._awards.get(app.app), self._view.rhos.get(app.app)
        prospect = "" if names else starts.prospect(self._view, app, self._settings.start_within_s)
        tail = self._leftover_clause(app) + self.deal.losses(app) + prospect
        if award is None:
            return Outcome(app.app, names, self._outsider_reason(app) + tail, rho_now=rho)
        bidder = self._bidders[app.app]
        return Outcome(
            app=app.app,
            gpus=names,
            reason=self._bidder_reason(bidder, award) + self._gap_clause + tail,
            bid=True,
            won=len(award.won),
            fraction=award.fraction,
            rho_now=bidder.rho_none if rho is None else rho,
            rho_next=bidder.rho(got),
            fraction_gap=self._fraction_gap(award),
            loss=self._losses.get(app.app),
        )

    def _fraction_gap(self, award: Award) -> float:
        if not award.won:
            return 0.0
        value, upper = self._solved.best_without(self._number[award.app])
        return upper - value

    @cached_property
    def _gap_clause(self) -> str:
        """Said to every bidder when the search was not over."""
        if not self._solved.open():
            return ""
        gap = self._solved.worst_gap
        return f" (the solver's budget ran out: sums of log V and of c are certain to {gap:.2g} only)"

    def _bidder_reason(self, bidder: Bidder, award: Award) -> str:
        count = len(self._view.gpus)
        loss = self._losses.get(award.app)
        if not count:
            return f"bid, and {NONE_LEFT}"
        if not award.won:
            assert loss is not None, f"no reason is known why {award.app} lost"
            if len(bidder.new) == 0:
                return f"bid and won none of the {gpus(count)} in play: {loss.sentence}"
            best = max(range(len(bidder.new)), key=lambda row: (bidder.gain[row], -bidder.new[row]))
            level = LEVELS[bidder.level[best]]
            where = "" if level == "cluster" else f" within {PLACE[level]}"
            rho = bidder.rho_none * math.exp(-bidder.gain[best])
            return (
                f"bid and won none of the {gpus(count)} in play, which went to {self._winners or 'no app'}; its best "
                f"row, {gpus(int(bidder.new[best]))} more{where}, would have brought rho from {bidder.rho_none:.4g} to "
                f"{rho:.4g}; {loss.sentence}"
            )
        won = f"bid and won {len(award.won)} of the {gpus(count)} in play"
        keeps = len(award.kept)
        if keeps == len(award.won):
            paid = "keeps all of them" if award.fraction > 1.0 - 1e-9 else "keeps all of them by the lot of rounding"
        else:
            assert loss is not None, f"no reason is known why {award.app} keeps less than it won"
            paid = f"keeps {keeps or 'none'} after its hidden payment: {loss.text}"
        now, then = bidder.rho_none, bidder.rho(award.kept)
        return f"{won} and {paid} (c = {award.fraction:.3f}); rho goes from {now:.4g} to {then:.4g}"

    def _outsider_reason(self, app: AppView) -> str:
        if not app.wants:
            return _content(app)
        if app.app in self._offered:
            return "was offered the GPUs in play and did not bid in time"
        rho = self._view.rhos.get(app.app)
        if rho is None:
            return "did not answer the probe in time, so it took no part"
        if not self._view.gpus:
            return f"did not bid, its rho {self._claim_words(app)} being {self._cutoff}, and {NONE_LEFT}"
        winners = self._winners or "no app"
        return (
            f"did not bid, its rho {self._claim_words(app)} being {self._cutoff}; the auction's GPUs went to {winners}"
        )

    def _claim_words(self, app: AppView) -> str:
        """Return the rho by which an app comes to bid, and what makes it another one than the app's own."""
        rho, claim, whys = self._view.rhos[app.app], _claim(self._view, app, self._settings), []
        held = _rho(self._view, app, self._settings.excess)
        if held < rho:
            whys.append(f" divided by {rho / held:.3g}, as it has trained for longer than it declared")
        if claim > held:
            whys.append(f" times {claim / held:.3g}, as it got its GPUs {_stay_s(self._view, app):.0f} s ago")
        return f"{claim:.4g} ({rho:.4g}{' and'.join(whys)})" if whys else f"{claim:.4g}"

    @property
    def rest(self) -> str:
        """The sentence for apps that are not told one by one."""
        if not self._view.gpus:
            return NONE_LEFT
        return f"was not among the worst off, who bid; the auction's GPUs went to {self._winners or 'no app'}"

    @cached_property
    def _cutoff(self) -> str:
        bidders = [app for app in self._view.apps if app.app in self._offered and app.app in self._view.rhos]
        if not bidders:
            return "not among those that bid"
        least = min(bidders, key=lambda app: _claim(self._view, app, self._settings))
        return f"not above {self._claim_words(least)}, the least of the bidders"

    def _leftover_clause(self, app: AppView) -> str:
        renewed, given = self._renewed.get(app.app, 0), self._given.get(app.app, 0)
        parts = []
        if renewed:
            parts.append(f"keeps {gpus(renewed)} it holds, left over by the auction")
        if given:
            parts.append(f"was given {gpus(given)} {self._way} from what the auction left over")
        if not parts and self._view.gpus and app.app not in self._awards and app.app in self._misfit:
            parts.append(f"no leftovers fit: {self._misfit[app.app]}")
        return "".join(f"; {part}" for part in parts)


# --- tenants first ----------------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """The GPUs in play split among tenants."""

    owner: Mapping[GpuId, TenantId]  #: the tenant whose part each is
    turns: frozenset[TenantId]  #: those that won a turn
    is_all: bool  #: whether each GPU was won in a turn


def within_tenants(
    view: View, bids: Mapping[AppId, Bid], clock: Clock | None, settings: Settings, split: Split
) -> Allocation:
    """Split the GPUs in play among tenants by their GPU time of what was fair, and hold one auction in each part.

    The split is Astraea's tenant phase: gang by gang to the tenant with the least index, in it to late apps (`starts`)
    and then to the app with the greatest rho; the sum of each tenant's apps is its part.
    """
    tenants = sorted({app.tenant for app in view.apps})
    owner = split.owner
    parts = {tenant: tuple(gpu for gpu in view.gpus if owner.get(gpu.gpu) == tenant) for tenant in tenants}
    shared = replace(view, budget_ms=view.budget_ms / max(1, sum(map(bool, parts.values()))))
    policy = Themis(replace(settings, tenants_first=False))
    apps: dict[TenantId, list[AppView]] = {tenant: [] for tenant in tenants}
    for app in view.apps:
        apps[app.tenant].append(app)
    held = {
        tenant: policy.allocate(_part_of(shared, apps[tenant], part), bids, clock)
        for tenant, part in parts.items()
        if part
    }
    assign = dict(sorted((gpu, app) for each in held.values() for gpu, app in each.assign.items()))
    outcomes = {outcome.app: outcome for each in held.values() for outcome in each.outcomes}
    told = [app for app in view.apps if app.app in outcomes or (view.tells and not parts[app.tenant])]
    partless = _Partless(view, settings.start_within_s, split)
    return Allocation(
        assign=assign,
        outcomes=tuple(_told(app, outcomes.get(app.app), partless, owner, assign) for app in told),
        proven=all(each.proven for each in held.values()),
        facts=_all_facts([each.facts for each in held.values()]),
        rest="" if len(told) == len(view.apps) else _rest(assign) if view.gpus else NONE_LEFT,
    )


def _is_same(one: View, other: View) -> bool:
    """Whether two views are the very same in all that a split depends on."""
    fields = (name for name in View.__struct_fields__ if name not in ("offered", "ideal_times_s", "tells", "explains"))
    return all(getattr(one, name) is getattr(other, name) for name in fields)


def _some_stay(view: View) -> bool:
    """Whether an interactive app may keep GPUs in play, which then are no part of any tenant; see `interactive`."""
    return any(app.renewable and app.requirements.kind == "interactive" for app in view.apps)


def _split(view: View, settings: Settings) -> Split:
    """Split the GPUs in play among tenants; one of no use to any app is of the part of its holder's tenant."""
    standings = Standings(view, today_first=False, patient=True)  # the worst off of equal tenants comes first
    selection = Selection(view, view.apps, told=False)
    late = {app.app for app in starts.late_apps(view, settings.start_within_s)}
    worths = {app: -claim for app, claim in _claims(view, settings).items()}

    def worth(app: AppView) -> float:
        return worths.get(app.app, math.inf)

    def place(app: AppView) -> float:
        return -math.inf if late and app.app in late else worth(app)

    #: By tenant with late apps, the worth of all its apps: late ones take the turns of the worst off, as many as come.
    claims: dict[TenantId, list[float]] = {app.tenant: [] for app in view.apps if late and app.app in late}
    for app in view.apps if claims else ():
        if app.tenant in claims:
            claims[app.tenant].append(worth(app))
    for claim in claims.values():
        claim.sort()
    turns: Counter[TenantId] = Counter()

    def tie(app: AppView) -> float:
        claim = claims.get(app.tenant)
        return worth(app) if claim is None else claim[min(turns[app.tenant], len(claim) - 1)]

    for app, gpus_max in tenant_by_tenant(view, selection, standings, place, tie):
        turns[app.tenant] += selection.take(app, gpus_max) > 0
    selection.settle()
    tenants = {app.app: app.tenant for app in view.apps}
    holders = {gpu: app.tenant for app in view.apps for gpu in app.renewable}
    won = {gpu: tenants[app] for gpu, app in (selection.incumbents() | selection.newcomers()).items()}
    return Split(holders | won, frozenset(won.values()), len(won) == len(view.gpus))


def _part_of(view: View, apps: Sequence[AppView], part: tuple[GpuView, ...]) -> View:
    there = {gpu.gpu for gpu in part}
    own = frozenset(app.app for app in apps)
    return replace(
        view,
        gpus=part,
        gathered=frozenset(),
        apps=tuple([_confined_to(app, there) for app in apps]),
        offered=None if view.offered is None else tuple(app for app in view.offered if app in own),
    )


def _confined_to(app: AppView, part: set[GpuId]) -> AppView:
    """Return an app with those GPUs in play that it holds of a part."""
    if part.issuperset(app.renewable):
        return app
    return replace(app, renewable=tuple(gpu for gpu in app.renewable if gpu in part))


def _rest(assign: Mapping[GpuId, AppId]) -> str:
    """Return the sentence for apps that are not told one by one."""
    return (
        "its tenant has no part of the GPUs in play, or it was not among the worst off of that tenant, who bid; they "
        f"went to {shares(assign.values()) or 'no app'}"
    )


class _Partless:
    """Why a tenant has no part of the GPUs in play, said to each of its apps."""

    def __init__(self, view: View, start_within_s: float, split: Split) -> None:
        self.rhos = view.rhos
        self._view, self._start_within_s, self._split = view, start_within_s, split
        self._whys: dict[TenantId, str] = {}
        self._in_play = Deal(view)
        self._standings = Standings(view, today_first=False, patient=True)
        self._misfits: dict[tuple[object, ...], str] = {}

    def reason(self, app: AppView) -> str:
        """Return what keeps `app` from having any: its own demand, its gang, or other tenants."""
        if not app.wants:
            return _content(app)
        if not self._in_play.left:
            return NONE_LEFT
        misfit = self._misfit(app)
        why = f"nothing in play fits: {misfit}" if misfit else self._no_part(app.tenant)
        return why + starts.prospect(self._view, app, self._start_within_s)

    def _no_part(self, tenant: TenantId) -> str:
        no_part = f"its tenant {tenant} has no part of the GPUs in play"
        if tenant not in self._whys:
            self._whys[tenant] = " and ".join(self._reasons(tenant))
        return f"{no_part}: {self._whys[tenant]}"

    def _reasons(self, tenant: TenantId) -> Iterator[str]:
        """Yield why other tenants came before this one, and what was left in its own turn."""
        place, index = self._places_of(tenant)
        before = [other for other in self._winners if other[0] <= place]
        if any(at < place and other < index for at, other in before):
            yield "others have had less of what is fair for them"
        if any(at < place and other >= index for at, other in before):
            yield f"others have had about as much, and their apps go on for up to {PATIENCE:.0f} leases"
        if any(at == place for at, _ in before):
            same = "more than is fair, as it has" if place[0] >= ENOUGH_TENANT else "about as much"
            yield f"others have had {same}, and have apps that are worse off, got GPUs not long ago or came sooner"
        if not before or not self._split.is_all:
            yield "no gang of its apps fits what others left"

    @cached_property
    def _winners(self) -> Sequence[tuple[tuple[float, bool], float]]:
        """The places and indices of the tenants that won a turn."""
        return [self._places_of(tenant) for tenant in sorted(self._split.turns)]

    def _places_of(self, tenant: TenantId) -> tuple[tuple[float, bool], float]:
        return self._standings.place_of_tenant(tenant), self._standings.of_tenant(tenant)

    def _misfit(self, app: AppView) -> str:
        """Return why `app` could use nothing if all in play were its; empty where it could."""
        alike = (app.gang, app.spans, app.level_max, app.want, app.kept, app.only)
        if alike not in self._misfits:
            self._misfits[alike] = self._try(app)
        return self._misfits[alike]

    def _try(self, app: AppView) -> str:
        deal = self._in_play
        if deal.fill(app, app.gang):
            deal.take_back(app.app)
            return ""
        count = len(deal.left)
        if app.only is None and app.gang > count and gang_place(app) == "cluster":
            return f"it needs a gang of {app.gang}, and {gpus(count)} {'is' if count == 1 else 'are'} in play"
        return deal.misfit(app)


def _told(
    app: AppView,
    outcome: Outcome | None,
    partless: _Partless,
    owner: Mapping[GpuId, TenantId],
    assign: Mapping[GpuId, AppId],
) -> Outcome:
    """Return an app's outcome with what its tenant's part was to it."""
    lost = losses([gpu for gpu in app.renewable if owner.get(gpu) != app.tenant], assign)
    if outcome is None:
        return Outcome(app.app, (), partless.reason(app) + lost, rho_now=partless.rhos.get(app.app))
    return replace(outcome, reason=f"in the part of {app.tenant}: {outcome.reason}{lost}")


def _all_facts(facts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of all auctions: sums, of yes and no whether all say so, of gaps the widest."""
    merged: dict[str, float] = {}
    for name in facts[0] if facts else ():
        values = [each[name] for each in facts]
        if name.startswith("proven") or name == "compiled":
            merged[name] = min(values)
        else:
            merged[name] = max(values) if "gap" in name or name == "out_of_budget" else math.fsum(values)
    return merged


def _content(app: AppView) -> str:
    return f"wants no more than the {gpus(len(app.kept))} it keeps"


def _rho(view: View, app: AppView, excess: float) -> float:
    """Return an app's rho, less by so many times as it has trained for longer than it declared."""
    rho = view.rhos[app.app]
    if excess == math.inf or not app.declared_gpu_s:
        return rho
    trained_gpu_s = view.trained_gpu_s(app)
    if trained_gpu_s <= excess * app.declared_gpu_s:
        return rho
    return rho * max(HELD_MIN, app.declared_gpu_s / trained_gpu_s)


def _claim(view: View, app: AppView, settings: Settings) -> float:
    """Return the rho by which an app comes to bid: greater where it got GPUs in play not long ago."""
    rho = _rho(view, app, settings.excess)
    if not app.renewable or not app.leases or _stay_s(view, app) >= STAY * view.lease_s:
        return rho
    return rho * settings.renewal_factor


def _claims(view: View, settings: Settings) -> dict[AppId, float]:
    """Return the rho by which each app comes to bid that has told its own; see `_claim`."""
    rhos, all_are_held = view.rhos, settings.excess < math.inf
    others = (app for app in view.apps if app.app in rhos and (app.renewable or all_are_held))
    return {**rhos, **{app.app: _claim(view, app, settings) for app in others}}


def _stay_s(view: View, app: AppView) -> float:
    """Return for how long an app has held its GPUs; of several leases the mean."""
    return view.now - app.granted_sum / app.leases
