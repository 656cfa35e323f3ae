"""Fairness: the formulas, each with its source, and nothing else.

Finish-time fairness (Themis) is reported by the apps, as only they know their work; the arbiter knows the two numbers
it needs for that, the time since an app came and N_avg, and sends them with each probe.
"""

from __future__ import annotations

from msgspec import Struct


class TimeMean(Struct, frozen=True):
    """The time-weighted mean of a number that changes in steps, as a value: observing gives a new one.

    One serves all apps: an app keeps `integral` at its arrival and asks `mean_since` later.
    """

    total: float  #: the integral up to `since`
    last_value: float  #: the number since then
    since: float  #: when it last changed, seconds
    start: float  #: when counting began, seconds

    @classmethod
    def begin(cls, value: float, now: float) -> TimeMean:
        """Return a mean that starts `now` (seconds) with `value`."""
        return cls(0.0, value, now, now)

    def observe(self, value: float, now: float) -> TimeMean:
        """Return the mean with the number being `value` from `now` (seconds) on."""
        return TimeMean(self.integral(now), value, now, self.start)

    def integral(self, now: float) -> float:
        """Return the integral of the number from the start to `now` (seconds)."""
        assert now >= self.since, f"time went back from {self.since} to {now}"
        return self.total + self.last_value * (now - self.since)

    def mean(self, now: float) -> float:
        """Return the mean from the start to `now` (seconds); the number itself when no time has passed."""
        return self.mean_since(0.0, self.start, now)

    def mean_since(self, integral_then: float, then: float, now: float) -> float:
        """Return the mean from `then` to `now` (seconds), given the `integral` at `then`.

        For the number of active apps and `then` an app's arrival this is the app's N_avg.

        *Source:* Themis (NSDI 2020), Eq. 1: N_avg is the time-weighted mean number of apps over the app's life.
        """
        if now <= then:
            return self.last_value
        return (self.integral(now) - integral_then) / (now - then)


def ideal_time_s(*, cluster_s: float, apps_mean: float) -> float:
    """Return T_id in seconds, the finish time alone on 1/N_avg of the cluster.

    `cluster_s` is T_cluster, the finish time alone on all of it; `apps_mean` is N_avg, at least 1 for an app that
    is there itself.

    *Source:* Themis (NSDI 2020), Eq. 1: T_id = T_cluster * N_avg.
    """
    return cluster_s * max(1.0, apps_mean)


def rho(*, shared_s: float, ideal_s: float) -> float:
    """Return the finish-time fairness T_sh / T_id: 1 is fair, smaller is better, sharing incentive holds up to 1.

    Raises
    ------
    ValueError
        When `ideal_s` is not positive: an app without work has no finish-time fairness.

    *Source:* Themis (NSDI 2020), Eq. 1: rho = T_sh / T_id.
    """
    if ideal_s <= 0:
        raise ValueError(f"ideal_s is {ideal_s}; it must be above 0")
    return shared_s / ideal_s
