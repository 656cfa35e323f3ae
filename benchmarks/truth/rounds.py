"""Many rounds: the whole cluster is auctioned every lease until the apps are done, and what counts is when that is.

Each round is a round of the arbiter: the worst-off bid, winners keep what the rounding rule leaves them, and the rest
is dealt with the arbiter's own `Deal`: apps outside the auction keep what they hold of it, then take whole gangs by
lot, and the setting `leftover` says whether bidders may have what is left then. Work is done at the speed of Eq. 1.
There is no cost of moving, so that what differs between two runs is the mechanism.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.placement.assignment import Deal
from arbiter.core.placement.lots import draw, shuffled
from arbiter.core.policies.themis.auction.instance import Bidding, Host, Instance
from arbiter.core.policies.themis.auction.rounding import Counts, keep
from arbiter.core.seam import AppView, GpuView, View
from benchmarks.truth.one_shot import Outcome, by_machine, hold
from benchmarks.truth.rules import PRODUCTION, RULES, Lot
from benchmarks.truth.setting import LIES, SCHEMA, claim, parts_worth_trying
from protocol.messages import AppId, GpuId, NodeId, TenantId

#: Steps for each auction, as milliseconds. Not all are proven within it, as not all are in a live arbiter.
BUDGET_MS = 20.0
#: An app that ends within this share of a lease after its end ends with it.
ROUNDING = 1e-9
#: More rounds than any run here takes.
ROUNDS_MAX = 2_000
#: A lie about rho at the probe only, which decides who bids; the bid itself is true.
PROBE = "claims a worse rho at the probe"


class Player(Struct, frozen=True):
    """An app as it truly is, and when it comes. `elapsed_s` is how old it is then."""

    app: Bidding
    arrival_s: float = 0.0

    @property
    def name(self) -> str:
        """Its id."""
        return self.app.id


class Scheme(Struct, frozen=True):
    """What is compared: rounding rule, share of apps that do not bid, and what happens to leftovers nobody may have."""

    rule: str = PRODUCTION
    fairness_knob: float = 0.0
    leftover: str = "idle"
    lease_s: float = 3600.0


class Lie(Struct, frozen=True):
    """Who lies in every round, about what and by how much (1.0 is 100 %)."""

    liar: str
    kind: str
    by: float


class Run(Struct, frozen=True):
    """How a run ended, by app."""

    took_s: dict[str, float]  #: from its arrival to its end
    rho: dict[str, float]  #: finish-time fairness, with the run's own N_avg
    withheld: float  #: share of all GPU time that nobody had though an app would have used it
    bids: dict[str, int]  #: rounds that each app bid in
    gaps: list[float]  #: of each round's auction


def play(
    machines: Sequence[Host],
    players: Sequence[Player],
    scheme: Scheme,
    *,
    seed: int,
    lie: Lie | None = None,
    until: str | None = None,
) -> Run:
    """Return what becomes of the apps.

    Parameters
    ----------
    machines
        The cluster, all of it free.
    players
        The apps.
    scheme
        The rules.
    seed
        Decides ties and lots, the same ones whatever the other arguments are, as far as they arise.
    lie
        Somebody's claims; None when all tell the truth.
    until
        Stop when this app is done; None for all of them.
    """
    game = _Game(machines, players, scheme, seed, lie)
    for _ in range(ROUNDS_MAX):
        if game.over(until):
            return game.run()
        game.play_round()
    raise AssertionError(f"not done after {ROUNDS_MAX} rounds")


class _Game:
    def __init__(
        self, machines: Sequence[Host], players: Sequence[Player], scheme: Scheme, seed: int, lie: Lie | None
    ) -> None:
        self._machines = list(machines)
        self._rack = {host.id: host.rack for host in machines}
        self._gpus = {
            GpuId(f"{host.id}/{index}"): GpuView(GpuId(f"{host.id}/{index}"), NodeId(host.id), host.rack, "s")
            for host in machines
            for index in range(host.free)
        }
        self._players = {player.name: player for player in players}
        self._scheme, self._seed, self._lie = scheme, seed, lie
        self._round = 0
        self._left_s = {player.name: player.app.work_left for player in players}
        self._holds: dict[str, tuple[GpuId, ...]] = {player.name: () for player in players}
        self._took_s: dict[str, float] = {}
        self._presence_s: dict[str, float] = defaultdict(float)  # integral of the number of apps over each app's life
        self._bids: dict[str, int] = defaultdict(int)
        self._withheld_s = 0.0
        self._gaps: list[float] = []

    # --- outcome ----------------------------------------------------------------------------------------------------

    def over(self, until: str | None) -> bool:
        return until in self._took_s if until is not None else len(self._took_s) == len(self._players)

    def run(self) -> Run:
        total_s = len(self._gpus) * max(self._took_s[name] + self._players[name].arrival_s for name in self._took_s)
        rho = {
            name: (self._players[name].app.elapsed + took_s)
            / self._ideal_s(self._players[name].app, self._apps_mean(name))
            for name, took_s in self._took_s.items()
        }
        return Run(dict(self._took_s), rho, self._withheld_s / total_s, dict(self._bids), self._gaps)

    def _ideal_s(self, app: Bidding, apps_mean: float) -> float:
        return app.work_left / min(len(self._gpus), app.demand_max) * apps_mean

    def _apps_mean(self, name: str) -> float:
        age_s = self._took_s.get(name, self._now_s - self._players[name].arrival_s)
        return max(1.0, self._presence_s[name] / age_s) if age_s > 0.0 else float(len(self._active()))

    # --- a round ----------------------------------------------------------------------------------------------------

    @property
    def _now_s(self) -> float:
        return self._round * self._scheme.lease_s

    def _active(self) -> list[str]:
        return [
            name
            for name, player in self._players.items()
            if name not in self._took_s and player.arrival_s <= self._now_s
        ]

    def play_round(self) -> None:
        active = self._active()
        if active:
            claims = {name: self._claim(name) for name in active}
            bidders = self._bidders(claims)
            for name in bidders:
                self._bids[name] += 1
            self._deal(claims, bidders)
            self._work(active)
        self._round += 1

    def _true(self, name: str) -> Bidding:
        player = self._players[name]
        elapsed_s = player.app.elapsed + self._now_s - player.arrival_s
        return replace(player.app, elapsed=elapsed_s, work_left=self._left_s[name])

    def _claim(self, name: str) -> Bidding:
        """Return what an app says of itself; its T_id follows from the work it claims to have had in all."""
        true = self._true(name)
        lie = self._lie
        said = true
        if lie is not None and lie.liar == name and lie.kind in LIES:
            said = claim(true, lie.kind, lie.by, self._scheme.lease_s)
        done_s = self._players[name].app.work_left - true.work_left
        whole = replace(said, work_left=done_s + said.work_left)
        return replace(said, t_id=self._ideal_s(whole, self._apps_mean(name)))

    def _bidders(self, claims: Mapping[str, Bidding]) -> list[str]:
        """Return the ceil((1 - f) n) apps that claim the worst rho, in the order that decides ties of the auction."""
        count = max(1, math.ceil((1.0 - self._scheme.fairness_knob) * len(claims) - 1e-9))
        turn = f"cutoff {self._round}"
        ranked = sorted(claims, key=lambda name: (-self._rho(claims[name]), draw(self._seed, turn, name)))
        return shuffled(self._seed, ranked[:count], name=str, purpose=f"order {self._round}")

    def _rho(self, claim: Bidding) -> float:
        """Return rho as answered to a probe: all leases end, so an app keeps nothing."""
        shared_s = claim.elapsed + self._scheme.lease_s + claim.work_left * claim.slowdown.machine
        lie = self._lie
        worse = 1.0 + lie.by if lie is not None and lie.liar == claim.id and lie.kind == PROBE else 1.0
        return worse * shared_s / claim.t_id

    # --- who gets what ----------------------------------------------------------------------------------------------

    def _deal(self, claims: Mapping[str, Bidding], bidders: Sequence[str]) -> None:
        outcome = hold(
            Instance(SCHEMA, self._scheme.lease_s, self._machines, [claims[name] for name in bidders]), BUDGET_MS
        )
        self._gaps.append(outcome.gap)
        holder = {gpu: AppId(name) for name, gpus in self._holds.items() for gpu in gpus}
        views = {name: self._view(claim) for name, claim in claims.items()}
        gpus = tuple(replace(gpu, holder=holder.get(gpu.gpu)) for gpu in self._gpus.values())
        deal = Deal(View(self._round, self._seed, self._scheme.lease_s, len(gpus), gpus, tuple(views.values())))
        for at, name in enumerate(bidders):
            kept = self._kept(outcome, at, name)
            deal.give(AppId(name), self._concrete(deal, name, by_machine(outcome.entry.places, kept)))
        outsiders = [views[name] for name in claims if name not in bidders]
        self._leftovers(deal, outsiders)
        if self._scheme.leftover == "bidders":
            self._leftovers(deal, [views[name] for name in claims if name in bidders])
        self._holds.update({name: tuple(gpu.gpu for gpu in deal.got[AppId(name)]) for name in claims})
        if any(deal.room(view) >= claims[name].gang for name, view in views.items()):
            self._withheld_s += len(deal.left) * self._scheme.lease_s

    def _view(self, claim: Bidding) -> AppView:
        return AppView(
            app=AppId(claim.id),
            tenant=TenantId("t"),
            gang=1,  # gangs may lie across machines here
            demand_max=claim.demand_max,
            level_max="cluster",
            arrived_at=-claim.elapsed,
            kept=(),
            renewable=self._holds[claim.id],
        )

    def _kept(self, outcome: Outcome, at: int, name: str) -> Counts:
        bundle = outcome.bundle(at)
        if not bundle.won:
            return {}
        lot = draw(self._seed, f"keep {self._round}", name)
        if self._scheme.rule == PRODUCTION:
            return keep(bundle.worth, bundle.won, bundle.log_c, bundle.places, lot=lot)
        return _drawn(RULES[self._scheme.rule](bundle), lot)

    def _concrete(self, deal: Deal, name: str, counts: Mapping[str, int]) -> list[GpuView]:
        """Return GPUs of those machines that are left: its own first, then those that nobody has."""
        own = set(self._holds[name])
        chosen: list[GpuView] = []
        for machine, count in counts.items():
            here = [gpu for gpu in deal.left if gpu.node == machine]
            here.sort(key=lambda gpu: (gpu.gpu not in own, gpu.holder is not None, gpu.gpu))
            chosen += here[:count]
        return chosen

    def _leftovers(self, deal: Deal, apps: Sequence[AppView]) -> None:
        for app in apps:
            deal.renew(app)
        waiting = shuffled(self._seed, apps, name=lambda app: app.app, purpose=f"leftover {self._round}")
        while waiting and deal.left:
            waiting = [app for app in waiting if self._give_one_gang(deal, app)]

    def _give_one_gang(self, deal: Deal, app: AppView) -> bool:
        gang = self._players[app.app].app.gang
        if min(deal.room(app), len(deal.left)) < gang:
            return False
        return deal.fill(app, gang) > 0

    # --- what it is good for ----------------------------------------------------------------------------------------

    def _work(self, active: Sequence[str]) -> None:
        lease_s = self._scheme.lease_s
        for name in active:
            speed = self._speed(self._players[name].app, self._holds[name])
            left_s = self._left_s[name]
            if speed > 0.0 and left_s / speed <= lease_s * (1.0 + ROUNDING):
                self._took_s[name] = self._now_s + left_s / speed - self._players[name].arrival_s
                self._holds[name] = ()
            self._left_s[name] = left_s - speed * lease_s
        for name in active:
            stayed_s = self._took_s.get(name, math.inf) + self._players[name].arrival_s - self._now_s
            for other in active:
                other_s = self._took_s.get(other, math.inf) + self._players[other].arrival_s - self._now_s
                self._presence_s[name] += min(lease_s, stayed_s, other_s)

    def _speed(self, app: Bidding, gpus: Sequence[GpuId]) -> float:
        """Return serial GPU-seconds per second: GPUs at work over S; what slows it down is left unused."""
        counts: dict[str, int] = defaultdict(int)
        for gpu in gpus:
            counts[self._gpus[gpu].node] += 1
        best = 0.0
        for part in parts_worth_trying(self._machines, counts):
            used = app.gang * (min(sum(part.values()), app.demand_max) // app.gang)
            best = max(best, used / self._slowdown(app, part))
        return best

    def _slowdown(self, app: Bidding, part: Mapping[str, int]) -> float:
        if len(part) <= 1:
            return app.slowdown.machine
        return app.slowdown.rack if len({self._rack[machine] for machine in part}) == 1 else app.slowdown.cross


def _drawn(lot: Lot, at: float) -> Counts:
    """Return the part that `at` in [0, 1) draws."""
    for chance, part in lot:
        if at < chance:
            return part
        at -= chance
    return lot[-1][1]
