"""Metrics for Prometheus: the present in numbers, from the same look at the site that the first page has.

Ids of apps are labels of `gpu_arbiter_gpu_info` only, which has one series for each GPU, or seat that an app has; so
there are never more series than GPUs, nodes and tenants make. It can be joined with the metrics of NVIDIA's DCGM
exporter by the GPU's id. While the arbiter does not answer there is `gpu_arbiter_up` alone, and it is 0.

Two histograms, of waits and of the phases of rounds, count what the ledger has got since the first look of this
process: Prometheus takes a new beginning of them for what it is.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from app_agent.streams import OVER
from launch import overview, views
from launch.surface import Document
from launch.web.sources import WATCH_S, Sources
from protocol.journal import JournalError
from protocol.messages import AppId, TenantId

CONTENT_TYPE = CONTENT_TYPE_LATEST
#: States of apps that wait for GPUs.
WAITING = frozenset({"waiting", "suspended", "enrolling"})
#: GPU-seconds of tenants: the name, the field of ``shares/v1``, the help.
_GPU_SECONDS = (
    ("gpu_seconds", "gpu_seconds", "GPU time that a tenant has had"),
    ("draining_gpu_seconds", "draining_gpu_seconds", "of that, the time in which GPUs were being left"),
    ("lost_gpu_seconds", "lost_gpu_seconds", "of that, work that has to be done again"),
    ("starting_gpu_seconds", "starting_gpu_seconds", "of that, the time until first mini-batches"),
    ("parked_gpu_seconds", "parked_gpu_seconds", "beside that, GPUs times the time in which jobs lay parked on them"),
    ("fair_gpu_seconds", "fair_gpu_seconds", "GPU time that was fair for a tenant"),
)


#: Upper bounds, in seconds: from a second to two days, and from a hundredth of a second to a minute.
WAITS_S = (1.0, 10.0, 60.0, 300.0, 1800.0, 7200.0, 43200.0, 172800.0)
PHASES_S = (0.01, 0.05, 0.2, 1.0, 5.0, 15.0, 60.0)


class Metrics:
    """All metrics of a site; any thread may ask for them."""

    def __init__(self, sources: Sources) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each set of labels
        self._asking = threading.Lock()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collected(sources))

    def exposition(self) -> bytes:
        """Return them in Prometheus's text format."""
        with self._asking:
            return generate_latest(self._registry)


class _Followed:
    """Histograms of what comes into the ledger between two looks."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._seen: tuple[float, int] | None = None  #: the begin of the newest round, the id of the newest event
        #: Waits of apps that the arbiter's answer, of this time, did not have yet: the ledger is read after it.
        self._early: tuple[float, Sequence[tuple[AppId, TenantId, float]]] = (0.0, ())
        words = "from the submission of an app to its first GPU"
        labels = ("tenant", "class")
        self._waits = Histogram("gpu_arbiter_wait_seconds", words, labels, buckets=WAITS_S, registry=None)
        words = "each phase of a round: probe and bids, where the policy asks apps, and decision"
        self._phases = Histogram("gpu_arbiter_round_seconds", words, ("phase",), buckets=PHASES_S, registry=None)

    def collect(self, apps: Iterable[Document], at_s: float) -> Iterator[Metric]:
        """Take in what is new, and yield both histograms; while the ledger cannot be read they stay as they were.

        The class of an app that the arbiter has forgotten by now is ``unknown``.
        """
        with suppress(JournalError):  # /readyz tells of it
            self._follow({str(app["id"]): str(app["class"]) for app in apps}, at_s)
        yield from self._waits.collect()
        yield from self._phases.collect()

    def _follow(self, classes: Mapping[str, str], at_s: float) -> None:
        with self._sources.ledger() as ledger:
            newest = ledger.newest_event()
            round_at, event = self._seen or (ledger.newest_round_at(), newest)
            rounds, waits = ledger.rounds_after(round_at), ledger.first_grants(event, newest)
        self._seen = max((each.at for each in rounds), default=round_at), newest
        for each in rounds:
            for phase, took_s in each.phases_s.items():
                self._phases.labels(phase).observe(took_s)
        since_s, early = self._early
        fresh = [*waits, *(early if at_s == since_s else ())]
        for app, tenant, wait_s in early if at_s > since_s else ():
            self._waits.labels(tenant, classes.get(app, "unknown")).observe(wait_s)
        for app, tenant, wait_s in fresh:
            if app in classes:
                self._waits.labels(tenant, classes[app]).observe(wait_s)
        self._early = at_s, [wait for wait in fresh if wait[0] not in classes]


class _Collected(Collector):
    def __init__(self, sources: Sources) -> None:
        self._sources, self._followed = sources, _Followed(sources)

    def describe(self) -> Iterable[Metric]:
        """Describe nothing before it is asked for: a look costs the arbiter answers."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of now."""
        present, _ = self._sources.tried(lambda: self._sources.present(WATCH_S))
        yield _gauge("up", "whether the arbiter answers", 0.0 if present is None else 1.0)
        if present is not None:
            yield from _rounds(present)
            yield from _counts(present["counts"])
            yield from _process(present["process"], present["at_s"])
            yield from _apps(present)
            yield from _gpus(present)
            yield from _tenants(present["shares"])
            yield from self._followed.collect(present["apps"], present["at_s"])


def _gauge(name: str, words: str, value: float | None = None) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"gpu_arbiter_{name}", words, value=value)


def _labelled(
    name: str, words: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float | None]]
) -> GaugeMetricFamily:
    """Return a gauge with a series for each value that is known."""
    family = GaugeMetricFamily(f"gpu_arbiter_{name}", words, labels=labels)
    for names, value in values:
        if value is not None:
            family.add_metric(names, value)
    return family


def _counted(name: str, words: str, labels: tuple[str], counts: Mapping[str, float]) -> CounterMetricFamily:
    """Return a counter with a series for each label."""
    family = CounterMetricFamily(f"gpu_arbiter_{name}", words, labels=labels)
    for label, count in counts.items():
        family.add_metric((label,), count)
    return family


def _rounds(present: Document) -> Iterator[Metric]:
    yield CounterMetricFamily("gpu_arbiter_rounds", "rounds since the ledger began", value=present["round_count"])
    failures = present["policy_failures"]
    yield CounterMetricFamily("gpu_arbiter_policy_failures", "exceptions of policies, which are bugs", value=failures)
    if present["epoch"] is not None:
        yield _gauge("leader_epoch", "the epoch in which the arbiter leads; it grows with each start", present["epoch"])
    words = "for how long a round has been under way, or due and not begun; 0 if none is"
    yield _gauge("round_overdue_seconds", words, present["round_overdue_s"])
    for newest in present["rounds"]:
        since_s = max(0.0, present["at_s"] - views.seconds_of(newest["at"]))
        yield _gauge("seconds_since_round", "since the newest round was decided", since_s)
        yield _gauge("newest_round_seconds", "from the start of the newest round to its decision", newest["took_s"])


def _counts(counts: Document) -> Iterator[Metric]:
    """Yield what the arbiter counts from the beginning of its journal on."""
    yield _counted(
        "preemptions", "GPUs taken from apps that wanted them still", ("reason",), counts.get("preemptions", {})
    )
    words = "mini-batches that had to be done again"
    yield CounterMetricFamily("gpu_arbiter_steps_lost", words, value=counts.get("steps_lost", 0))
    words = "claims of apps that were found to differ from measurements, anew or by another ratio"
    yield _counted("claims_off", words, ("owner",), counts.get("claims_off", {}))


def _process(process: Document, at_s: float) -> Iterator[Metric]:
    """Yield what the arbiter's process knows of itself."""
    took = process.get("journal_commits")
    if took is not None:
        family = HistogramMetricFamily(
            "gpu_arbiter_journal_commit_seconds", "each commit of the journal, since the arbiter was started"
        )
        within = [*map(float, accumulate(took["counts"]))]
        bounds = [*map(floatToGoString, took["bounds_s"]), "+Inf"]
        family.add_metric((), [*zip(bounds, within, strict=True)], took["sum_s"])
        yield family
    words = "until the first certificate in a file of the arbiter's expires; below 0 once it has"
    left = (((file,), end - at_s) for file, end in process.get("certificates", {}).items())
    yield _labelled("certificate_expiry_seconds", words, ("file",), left)


def _apps(present: Document) -> Iterator[Metric]:
    alive = [app for app in present["apps"] if app["state"] not in OVER]
    states = Counter((app["tenant"], app["state"]) for app in alive)
    yield _labelled("apps", "apps that are not over", ("tenant", "state"), states.items())
    pending, waits = Counter[tuple[str]](), defaultdict[tuple[str], float](float)
    rhos = defaultdict[tuple[str], float](float)
    for app in alive:
        key = (str(app["tenant"]),)
        rhos[key] = max(rhos[key], app["rho"] or 0.0)
        if app["state"] in WAITING:
            pending[key] += max(0, app["want"] - len(app["gpus"]))
            waits[key] = max(waits[key], app["elapsed_s"])
    yield _labelled("pending_gpus", "GPUs that apps without any wait for", ("tenant",), pending.items())
    yield _labelled("oldest_wait_seconds", "age of the oldest app that waits", ("tenant",), waits.items())
    known = ((key, rho) for key, rho in rhos.items() if rho)
    yield _labelled("rho_max", "finish-time fairness of the worst-off app; 1 or less is fair", ("tenant",), known)


def _gpus(present: Document) -> Iterator[Metric]:
    gpus = [(node, gpu) for node in present["nodes"] for gpu in node["gpus"]]
    apps = {app["id"]: app for app in present["apps"]}
    states = Counter((overview.gpu_state(node, gpu),) for node, gpu in gpus)
    yield _labelled("gpus", "GPUs by state", ("state",), states.items())
    up = (((str(node["id"]),), float(node["state"] == "up")) for node in present["nodes"])
    yield _labelled("node_up", "whether a node reports", ("node",), up)
    words = "plans of other sites or of former leaders that a node agent has refused since it started"
    refused = {str(node["id"]): node.get("plans_refused", 0) for node in present["nodes"]}  # an older arbiter: none
    yield _counted("plans_refused", words, ("node",), refused)
    leaving = (((str(gpu["id"]), str(node["id"])), float(gpu.get("draining_s") or 0.0)) for node, gpu in gpus)
    words = "for how long a GPU, or a seat on it, has been left and not been proven empty; 0 if none is"
    yield _labelled("gpu_draining_seconds", words, ("gpu", "node"), leaving)
    held = (
        ((gpu["id"], node["id"], app, apps.get(app, {}).get("owner", ""), apps.get(app, {}).get("tenant", "")), 1.0)
        for node, gpu in gpus
        for app in overview.holders(gpu) or ("",)
    )
    yield _labelled("gpu_info", "the app that has a GPU", ("gpu", "node", "app", "owner", "tenant"), held)


def _tenants(shares: Document) -> Iterator[Metric]:
    tenants = shares["tenants"]
    for name, field, words in _GPU_SECONDS:
        family = CounterMetricFamily(f"gpu_arbiter_{name}", words, labels=("tenant",))
        for each in tenants:
            if field in each:  # an arbiter of the version before does not tell all of them
                family.add_metric((each["tenant"],), each[field])
        yield family
    for name, words in (("ltgf", "long-term GPU-time fairness; 1 or more is fair"), ("held_gpus", "GPUs held")):
        yield _labelled(name, words, ("tenant",), (((each["tenant"],), each[name]) for each in tenants))
    if "idle_gpu_seconds" in shares:
        words = "GPU time of GPUs that may be given out and that no app held, counted from the version on that tells it"
        yield CounterMetricFamily("gpu_arbiter_idle_gpu_seconds", words, value=shares["idle_gpu_seconds"])
    if shares["since"] is not None:
        began = views.seconds_of(shares["since"])
        yield _gauge("history_since_timestamp_seconds", "when the count of GPU time began", began)
