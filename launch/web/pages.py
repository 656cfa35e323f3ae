"""The pages, one for each address, from the ledger and from the arbiter's answers. They change nothing.

No page shows the output of a task: that is for its owner only, and this page does not know its reader. `Sources.ask`
and `sheet` cut it out of reasons.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import cast

from msgspec import Struct
from msgspec.structs import astuple

from app_agent.streams import OVER
from arbiter import receipts, reports
from arbiter.core.effects import Decide, RoundRecord, StretchRecord
from arbiter.core.state.gpu_time import ratio
from arbiter.ledger import INPUTS_MAX, Ledger
from launch import overview, periods, views
from launch.faults import Fault, usage
from launch.surface import Document
from launch.web import history
from launch.web.drawing import LINES_MAX, Bar, Scale, lines, timeline
from launch.web.history import Interruption
from launch.web.sheets import ROWS_MAX, Cell, Column, Page, Sheet, read_on, rows_before, sheet
from launch.web.sources import Sources
from protocol.clock import instant
from protocol.exit_codes import NOT_FOUND
from protocol.messages import AppId

APP, ROUND = Column("app", "/apps/"), Column("round", "/rounds/")
APP_COLUMNS = (APP, "owner", "tenant", "name", "state", "gpus", "want", "rho", "ltgf", "step", "preempted", "waits_for")
GPUS_DRAWN = 64
DAY_S = 86400.0
#: A year, and the newest week.
WEEKS_DRAWN = 53


class Wanted(Struct, frozen=True):
    """The wishes for a page: its number, from 1 on, and the words after the question mark of its address."""

    number: int = 1
    wishes: Mapping[str, str] = {}

    @property
    def edges(self) -> Sequence[float]:
        """The edges of the periods that are wished, in UNIX seconds; none for all time.

        Raises
        ------
        Fault
            Naming the word that is wrong.
        """
        begin, end, since, every = (self.wishes.get(word) or None for word in ("from", "to", "since", "every"))
        return periods.edges(begin=begin, end=end, since=since, every=every, now=time.time())


class NoSuchPage(Exception):  # noqa: N818 - its name says what it is
    """There is no app or round of that name; the message is for the reader."""


def now(sources: Sources, wanted: Wanted) -> Page:
    """Return GPUs by node with their holders and use, the apps, and the tenants."""
    present, why = sources.tried(sources.present)
    if present is None:
        return Page("now", "Now", (), wanted.number, notes=(why,))
    gpus = sheet(
        "gpus",
        "GPUs",
        ("node", "gpu", "model", "state", APP, "owner", "tenant", "busy", "memory_gib", "task", "detail"),
        _gpu_rows(present),
        wanted.number,
    )
    apps = sheet("apps", "Apps that are not over", APP_COLUMNS, _app_rows(present), wanted.number)
    rounds = sheet("rounds", "The newest round", ROUND_COLUMNS, map(_told_round, present["rounds"]), wanted.number)
    return Page("now", "Now", (gpus, apps, rounds), wanted.number, text=overview.headline(present))


def _gpu_rows(present: Document) -> Iterator[tuple[Cell, ...]]:
    apps, tasks = {app["id"]: app for app in present["apps"]}, overview.tasks_by_gpu(present["apps"])
    for node in present["nodes"]:
        for gpu in node["gpus"]:
            here = tasks.get(gpu["id"], ())
            for holder in overview.holders(gpu) or ("",):
                own = [task for task in here if task["task"].startswith(f"{holder}.")]
                busy, peak = overview.use(own)
                app = apps.get(holder, {})
                state = overview.gpu_state(node, gpu)
                phase = ", ".join(f"{task['task']} {task['phase']}" for task in own)
                whose = (holder or None, app.get("owner"), app.get("tenant"))
                used = (busy if own else None, round(peak / overview.GIB, 2) if peak else None)
                yield (node["id"], gpu["id"], gpu["model"], state, *whose, *used, phase or None, gpu["detail"] or None)


def _app_rows(present: Document) -> Iterator[tuple[Cell, ...]]:
    for app in present["apps"]:
        if app["state"] not in OVER:
            waits = app.get("waits_for")
            yield (
                *(app["id"], app["owner"], app["tenant"], app["name"], app["state"], len(app["gpus"]), app["want"]),
                *(app["rho"], app["ltgf"], views.progress(app), app["preemptions"]),
                ", ".join(waits["ids"]) or waits["kind"] if waits else None,
            )


ROUND_COLUMNS = (ROUND, "at", "took_s", "gpus", "bidders", "won", "without", "failure")


def _told_round(told: Document) -> tuple[Cell, ...]:
    """Return the row of a round, as `rounds` tells it."""
    won = [f"{each['app']} ({len(each['gpus'])})" for each in told["outcomes"] if each["gpus"]]
    without = len(told["outcomes"]) + told.get("outcomes_left_out", 0) - len(won)
    counts = (len(told["gpus"]), len(told["bidders"]), ", ".join(won) or None, without)
    return (told["round"], told["at"], round(told["took_s"], 2), *counts, told["failure"] or None)


def _recorded_round(record: RoundRecord) -> tuple[Cell, ...]:
    won = [f"{each.app} ({len(each.gpus)})" for each in record.outcomes if each.gpus]
    counts = (len(record.gpus), len(record.bidders), ", ".join(won) or None, len(record.outcomes) - len(won))
    return (record.round, instant(record.at), round(record.took_s, 2), *counts, record.failure or None)


def rounds(sources: Sources, wanted: Wanted) -> Page:
    """Return the rounds, newest first."""
    before = rows_before(wanted.number)
    with sources.ledger() as ledger:
        found = ledger.rounds(limit=ROWS_MAX + 1, offset=before)
    listed = sheet("rounds", "Rounds", ROUND_COLUMNS, map(_recorded_round, found), wanted.number, skipped=before)
    return Page("rounds", "Rounds", (listed,), wanted.number)


def one_round(sources: Sources, name: str, number: int) -> Page:
    """Return the bids, winners, losers and payments of one round."""
    with sources.ledger() as ledger:
        record = ledger.round(int(name)) if name.isdecimal() and len(name) < 16 else None
        inputs = None if record is None else ledger.inputs(record.round)
    if record is None:
        raise NoSuchPage(f"there is no round {name}; /rounds lists them")
    columns = (APP, "bid", "silent", "gpus", "won_before_payment", "payment", "rho_now", "rho_next", "reason", "got")
    rows = (
        (
            *(each.app, each.bid, each.app in record.silent, len(each.gpus), each.won, 1.0 - each.fraction),
            *(each.rho_now, each.rho_next, each.reason, ", ".join(each.gpus) or None),
        )
        for each in sorted(record.outcomes, key=lambda each: (-len(each.gpus), not each.bid, each.app))
    )
    facts = sheet("facts", "Figures of the policy", ("figure", "value"), sorted(record.facts.items()), number)
    offered = f"{record.took_s:.2f} s and had {len(record.gpus)} GPUs on offer"
    took = f"Round {record.round} at {instant(record.at)} took {offered}."
    notes = (record.failure,) if record.failure else ()
    sheets = [sheet("outcomes", "Outcomes: winners first", columns, rows, number)]
    if inputs is not None:
        sheets.append(sheet("bids", "Bids: rho with so many GPUs in all", BID_COLUMNS, _bids(inputs), number))
    elif any(each.bid for each in record.outcomes):
        took += (
            f" The rows of its bids are not kept any more: the ledger has those of the newest {INPUTS_MAX} auctions."
        )
    if record.facts:
        sheets.append(facts)
    return Page("round", f"Round {record.round}", tuple(sheets), number, text=took, notes=notes)


BID_COLUMNS = (APP, "gpus", "level", "new_gpus_on", "rho")


def _bids(inputs: Decide) -> Iterator[tuple[Cell, ...]]:
    """Yield what each app bid: rho if it wins nothing, and rho of each row."""
    for app, bid in sorted(inputs.bids.items()):
        yield (app, None, None, None, bid.rho_none)
        for row in sorted(bid.rows, key=lambda row: (row.gpus, -row.rho)):
            yield (app, row.gpus, row.level, None, row.rho)
        for each in bid.explicit:
            yield (app, None, None, ", ".join(f"{node} ({count})" for node, count in each.new), each.rho)


def one_app(sources: Sources, name: str, number: int) -> Page:
    """Return why an app waits, with the words of `explain`; its rounds; its receipts; and its GPU time."""
    app = AppId(name)
    told, why = _explained(sources, name)
    of_now = history.live(sources)[0] if told else ()
    with sources.ledger() as ledger:
        found = ledger.rounds(limit=ROWS_MAX + 1, offset=rows_before(number), app=app)
        stretches = ledger.stretches_of(app)
        live = [each for each in of_now if each.app == app and not ledger.has(each)]
        taken = told["receipts"] if told else [receipts.document(each) for each in receipts.receipts(ledger, app)]
        known = told is not None or stretches or ledger.rounds(limit=1, app=app)
    if not known:
        raise NoSuchPage(f"nothing here is called {name}; / lists the apps that are not over")
    columns = (ROUND, "at", "bid", "won", "got", "payment", "rho_now", "rho_next", "reason", "winners")
    own = (_own_round(record, app) for record in found)
    bids = sheet("rounds", "Round by round, newest first", columns, own, number, skipped=rows_before(number))
    newest = map(_receipt, reversed(taken))
    lost = sheet("receipts", "GPUs taken from it, newest first", RECEIPT_COLUMNS, newest, number)
    time_had = [*(_stretch(each, held_now=True) for each in live), *map(_stretch, stretches[::-1])]
    held = sheet("gpu_time", "Its GPU time, newest first", STRETCH_COLUMNS, time_had, number)
    text = views.explanation(told, time.time()) if told else ""
    return Page("app", name, (bids, lost, held), number, text=text, notes=(why,) if why else ())


def _explained(sources: Sources, name: str) -> tuple[Document | None, str]:
    """Return the document of `explain`; or None, and why there is none, unless no app is called so."""
    try:
        return sources.ask("explain", name), ""
    except Fault as fault:
        return None, "" if fault.code == NOT_FOUND else f"{fault.sentence}. This page shows the ledger."


def _own_round(record: RoundRecord, app: AppId) -> tuple[Cell, ...]:
    outcome = next(each for each in record.outcomes if each.app == app)
    winners = ", ".join(f"{each.app} ({len(each.gpus)})" for each in record.outcomes if each.gpus)
    figures = (outcome.bid, outcome.won, len(outcome.gpus), 1.0 - outcome.fraction, outcome.rho_now, outcome.rho_next)
    return (record.round, instant(record.at), *figures, outcome.reason, winners or None)


RECEIPT_COLUMNS = (
    "at",
    "gpus",
    "nodes",
    "for",
    "why",
    "leaving_gpu_s",
    "lost_gpu_s",
    "back",
    "back_after_s",
    "missing",
)


def _receipt(told: Document) -> tuple[Cell, ...]:
    return (
        *(told["at"], ", ".join(told["gpus"]), ", ".join(told["nodes"]), ", ".join(told["for"]) or None, told["why"]),
        *(told["draining_gpu_seconds"], told["lost_gpu_seconds"], "; ".join(map(_returned, told["returned"])) or None),
        *(told["away_s"], told["missing"]),
    )


def _returned(back: Document) -> str:
    """Return GPUs that an app was granted since, with their nodes and the moment."""
    return f"{', '.join(back['gpus'])} on {', '.join(back['nodes'])} at {back['at']}"


STRETCH_COLUMNS = ("from", "to", "held_now", "node", "gpu", APP, "tenant", "part", "leaving", "gpu_seconds")


def _stretch(each: StretchRecord, *, held_now: bool = False) -> tuple[Cell, ...]:
    whose = (held_now, each.node, each.gpu, each.app, each.tenant)
    return (
        *(instant(each.start), instant(each.end), *whose),
        *(each.part, each.draining, each.gpu_s(each.start, each.end)),
    )


def _stretches(ledger: Ledger, live: Sequence[StretchRecord], period: tuple[float, float], number: int) -> Sheet:
    def read(limit: int, offset: int) -> Sequence[tuple[Cell, ...]]:
        return [_stretch(each) for each in ledger.stretches_between(*period, limit=limit, offset=offset)]

    rows = read_on([_stretch(each, held_now=True) for each in live], read, number)
    title = "Stretches of GPU time: what is held now, then the last to end first"
    return sheet("stretches", title, STRETCH_COLUMNS, rows, number, skipped=rows_before(number))


INTERRUPTION_COLUMNS = ("what", "from", "to", "node", "gpus", APP, "task", "for")


def _interruption(each: Interruption) -> tuple[Cell, ...]:
    event = each.event
    until = None if each.until is None else instant(each.until)
    what = "parked" if each.park else "preempted"
    return (what, instant(event.at), until, event.node, ", ".join(each.gpus), event.app, event.task, event.by)


def over_time(sources: Sources, wanted: Wanted) -> Page:
    """Return which app had which GPU when, with parks and preemptions: drawn, and as tables."""
    moment, number = time.time(), wanted.number
    edges = wanted.edges or (moment - DAY_S, moment)
    start, end = edges[0], edges[-1]
    held, why = history.live(sources)
    first, last = (number - 1) * GPUS_DRAWN, number * GPUS_DRAWN
    with sources.ledger() as ledger:
        live = [each for each in held if each.start < end and each.end > start and not ledger.has(each)]
        known = sorted({*ledger.gpus_between(start, end), *((each.node, each.gpu) for each in live)})
        drawn = known[first:last]
        names = [gpu for _, gpu in drawn]
        over = ledger.stretches_between(start, end, gpus=names) if names else ()
        shown = [each for each in (*over, *live) if each.gpu in names]
        interruptions = history.Interruptions(ledger, live, start, end)
        marks, cut = interruptions.marks(shown, moment)
        tables = (
            _stretches(ledger, live, (start, end), number),
            sheet(
                "interruptions",
                "Preemptions and parks: parks from before that time, then newest first",
                INTERRUPTION_COLUMNS,
                map(_interruption, interruptions.listed(number)),
                number,
                skipped=rows_before(number),
            ),
        )
    bars = [Bar(each.gpu, each.app, each.start, each.end, each.draining) for each in shown]
    which = f"GPUs {first + 1} to {first + len(drawn)} of {len(known)} are drawn" if drawn else "no GPU is drawn"
    return Page(
        "timeline",
        "Timeline",
        tables,
        number,
        text=f"{instant(start)} to {instant(end)}; {which}.",
        drawing=timeline(drawn, bars, marks, Scale(start, end)) if drawn else "",
        drawing_more=last < len(known),
        notes=tuple(each for each in (why, cut) if each),
    )


def fairness(sources: Sources, wanted: Wanted) -> Page:
    """Return the GPU-hours that tenants have had and were due, LTGF over weeks, and the rho of apps."""
    present, why = sources.tried(sources.present)
    with sources.ledger() as ledger:
        by_week = list(_weeks(ledger))
    weeks = sheet(
        "weeks",
        "LTGF by week: 1 or more is fair",
        ("week", "tenant", "had_gpu_h", "due_gpu_h", "lost_gpu_h", "ltgf"),
        map(astuple, by_week),
        wanted.number,
    )
    drawing, left_out = _weeks_drawn(by_week)
    notes = tuple(each for each in (why, left_out) if each)
    if present is None:
        return Page("fairness", "Fairness", (weeks,), wanted.number, drawing=drawing, notes=notes)
    columns = ("tenant", "weight", "quota_gpus", "held_gpus", "want_gpus", "had_gpu_h", "due_gpu_h", "lost_gpu_h")
    tenants = (
        (
            *(each["tenant"], each["weight"], each["quota_gpus"], each["held_gpus"], each["wanted_gpus"]),
            *(each[f"{kind}gpu_seconds"] / 3600 for kind in ("", "fair_", "lost_")),
            *(each["ltgf"], each["ltgf_quota"]),
        )
        for each in present["shares"]["tenants"]
    )
    named = sheet("tenants", "Tenants", (*columns, "ltgf", "ltgf_quota"), tenants, wanted.number)
    late = sorted((app for app in present["apps"] if app["rho"]), key=lambda app: -app["rho"])
    rhos = ((app["id"], app["tenant"], app["state"], app["rho"], app["rho_basis"], app["ltgf"]) for app in late)
    columns_of_apps = (APP, "tenant", "state", "rho", "rho_by", "ltgf_in_tenant")
    return Page(
        "fairness",
        "Fairness",
        (named, weeks, sheet("apps", "Latest apps first", columns_of_apps, rhos, wanted.number)),
        wanted.number,
        drawing=drawing,
        notes=notes,
    )


class Week(Struct, frozen=True):
    """The GPU time of a tenant in a week, in GPU-hours; its LTGF, if anything was due."""

    week: str
    tenant: str
    had_gpu_h: float
    due_gpu_h: float
    lost_gpu_h: float
    ltgf: float | None


def _weeks_drawn(weeks: Sequence[Week]) -> tuple[str, str]:
    """Return the LTGF of tenants over weeks as lines; and a sentence if tenants are left out, which were due least."""
    due, known = Counter[str](), sorted({each.week for each in weeks})[-WEEKS_DRAWN:]
    for each in weeks:
        if each.week in known:
            due[each.tenant] += round(each.due_gpu_h)
    tenants = sorted(name for name, _ in due.most_common(LINES_MAX))
    points = {(each.tenant, each.week): each.ltgf for each in weeks if each.ltgf is not None}
    series = {name: [points.get((name, week)) for week in known] for name in tenants}
    some = (
        f"Only the {LINES_MAX} tenants that were due most are drawn; the table has all." if len(due) > LINES_MAX else ""
    )
    return lines(known, series) if known else "", some


def _weeks(ledger: Ledger) -> Iterator[Week]:
    """Yield the GPU time of each tenant, had and due, in each week (from Monday on, local time), newest week first.

    It is the difference between samples, which are an hour apart; an hour counts for the week in which it ends.
    """
    samples: defaultdict[str, list[tuple[float, tuple[float, float, float]]]] = defaultdict(list)
    for at, tenant, each in ledger.standings():
        samples[tenant].append((at, (each.allocated_gpu_s, each.fair_gpu_s, each.lost_gpu_s)))
    sums: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for name, told in samples.items():
        for (_, before), (at, after) in pairwise([(0.0, (0.0, 0.0, 0.0)), *told]):
            began_anew = any(new < old - 1e-6 for new, old in zip(after, before, strict=True))
            since = (0.0, 0.0, 0.0) if began_anew else before
            year, week, _ = datetime.fromtimestamp(at).isocalendar()  # noqa: DTZ006 - this host's calendar
            total = sums[f"{year}-W{week:02d}", name]
            for place, (new, old) in enumerate(zip(after, since, strict=True)):
                total[place] += new - old
    for week_name, name in sorted(sums, reverse=True):
        had, due, lost = sums[week_name, name]
        yield Week(week_name, name, had / 3600, due / 3600, lost / 3600, ratio(had, due))


def report(sources: Sources, wanted: Wanted) -> Page:
    """Return GPU time by tenant, owner or app and period."""
    by, moment = wanted.wishes.get("by") or "tenant", time.time()
    if by not in reports.SUMMED_BY:
        raise usage(f"by is {by!r}", f"choose one of {', '.join(reports.SUMMED_BY)}")
    found, why = history.report(sources, cast("reports.By", by), wanted.edges, moment)
    before = rows_before(wanted.number)
    shown = [reports.document(row) for row in found[before : before + ROWS_MAX + 1]]
    columns, rows = views.report_sheet({"by": by, "report": shown})
    named = [APP if column == "app" else Column(column) for column in columns]
    total = sum(row.had_gpu_s for row in found)
    text = f"{total / 3600:.2f} GPU-hours in all."
    table = sheet("report", "GPU time", named, rows, wanted.number, skipped=before)  # type: ignore[arg-type]
    return Page("report", "Report", (table,), wanted.number, text=text, notes=(why,) if why else ())


#: The pages without a name in their address.
PAGES: Mapping[str, Callable[[Sources, Wanted], Page]] = {
    "": now,
    "now": now,
    "timeline": over_time,
    "fairness": fairness,
    "rounds": rounds,
    "report": report,
}
#: Those of one thing, by the folder in their address.
NAMED: Mapping[str, Callable[[Sources, str, int], Page]] = {"apps": one_app, "rounds": one_round}
