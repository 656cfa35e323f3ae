"""The arbiter's answers as text for people: pure functions from a document to lines."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from app_agent.streams import OVER
from launch.surface import Document, duration, number, plural, table

#: A task that has had its GPUs for so long and has told no step is taken for one that tells none, in seconds.
SILENT_S = 60.0
EXPLAINED_ROUNDS = 5
TOLD_CHAPTERS = 12
TOLD_RECEIPTS = 5
#: Of the tasks that tell no steps, those that `explain` names.
TOLD_WITHOUT_STEPS = 3
#: Of the apps that an app waits for, those that `ps` names.
WAITS_SHOWN = 2
APP_COLUMNS = (
    *("ID", "TENANT", "NAME", "STATE", "GPUS", "WANT", "RHO", "LTGF", "STEP", "LOST", "PREEMPTED", "AGE", "WHERE"),
    *("TIMED-BY", "WAITS-FOR"),
)
#: What a signal cannot tell.
BY_SIGNAL = "A time by a signal is that of one forward and backward pass: a micro-batch, if gradients are accumulated."
#: Columns that change all the time.
DRIFTING = frozenset({"RHO", "LTGF", "STEP", "LOST", "AGE", "TIMED-BY"})


def apps_table(document: Document, *, everything: bool = False, some: bool = False) -> str:
    """Return `ps`: apps that are not over yet, or all of them; `some`: the document holds those that were asked for."""
    rows = [_app_row(app) for app in _apps(document, everything=everything)]
    if not rows and some:
        return "no app matches"
    return table(APP_COLUMNS, rows) if rows else "no apps; start one with: gpu-arbiter submit -- python train.py"


def apps_news(document: Document, *, everything: bool = False) -> object:
    """Return what of `ps` changes only when something happens: its rows without ages, progress and shares."""
    rows = (zip(APP_COLUMNS, _app_row(app), strict=True) for app in _apps(document, everything=everything))
    return [[cell for column, cell in row if column not in DRIFTING] for row in rows]


def _apps(document: Document, *, everything: bool) -> list[Document]:
    return [app for app in document["apps"] if everything or app["state"] not in OVER]


def _app_row(app: Document) -> tuple[str, ...]:
    return (
        str(app["id"]),
        str(app["tenant"]),
        str(app["name"]) + _array(app),
        str(app["state"]) + (", interactive" if app.get("class") == "interactive" else ""),
        str(len(app["gpus"])),
        str(app["want"]),
        number(app["rho"] or None),
        number(app.get("ltgf")),
        progress(app),
        duration(app.get("lost_gpu_seconds") or None),
        str(app.get("preemptions", 0) or "-"),
        duration(app["elapsed_s"] if app["jct_s"] is None else app["jct_s"]),
        ",".join(sorted({str(task["node"]) for task in app["tasks"] if task["phase"] != "exited"})) or "-",
        _timed(app),
        _waits_for(app),
    )


def _array(app: Document) -> str:
    """Return how many jobs of an array are over, of how many."""
    array = app.get("array")
    return f" [{array['over']}/{array['jobs']}]" if array else ""


def _waits_for(app: Document) -> str:
    """Return what an app waits for by id, or in one word; `explain` says it at length."""
    waits = app.get("waits_for")
    if not waits:
        return "-"
    ids = [str(each) for each in waits["ids"]]
    more = [f"+{len(ids) - WAITS_SHOWN}"] if len(ids) > WAITS_SHOWN else []
    return ",".join(ids[:WAITS_SHOWN] + more) or str(waits["kind"])


def progress(app: Document) -> str:
    """Return an app's progress: of its newest attempts, or of the last checkpoint while it has no attempt."""
    saved = app.get("saved") or {"steps": 0}
    if app["tasks"] or not saved["steps"] or app["state"] in OVER:
        return steps(app["tasks"])
    return f"{saved['steps']}/{saved['total_steps']}" if saved["total_steps"] else str(saved["steps"])


def steps(tasks: Sequence[Document]) -> str:
    """Return the progress of the newest attempt of the furthest job: mini-batches done, of all; ``-``: none told."""
    if not tasks:
        return "-"
    furthest = max(tasks, key=lambda task: (task["step"], task["total_steps"]))
    if tells_no_steps(furthest):
        return "-"
    done, total = furthest["step"] + 1, furthest["total_steps"]
    return f"{done}/{total}" if total else str(done)


def tells_no_steps(task: Document) -> bool:
    """Whether a task has run for a while, and its script has told no step."""
    ran_s = (task.get("measured") or {}).get("ran_s") or 0.0
    return bool(task["step"] < 0 and task["phase"] in ("starting", "running") and ran_s >= SILENT_S)


def timed_by(task: Document) -> str:
    """Return the source of a task's mini-batch time, with its confidence and the signals that agree, or why not."""
    measured = task.get("measured") or {}
    source = str(measured.get("source") or "unknown")
    periods: Document = measured.get("periods") or {}
    if source == "unknown":
        told = ", ".join(f"{signal} {_period(period_s)}" for signal, period_s in sorted(periods.items()))
        return f"unknown: {told}" if told else "-"
    if source == "steps":
        passes = int(measured.get("micro_batches") or 0)
        return f"steps of {passes} micro-batches" if passes else source
    others = sorted(periods.keys() - {source})
    agree = f", as {' and '.join(others)}" if others else ""
    return f"{source} {float(measured.get('confidence') or 0.0):.0%}{agree}"


def _period(seconds: float) -> str:
    """Return a period as a person would say it: mini-batches take from milliseconds to minutes."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _timed(app: Document) -> str:
    """Return how the mini-batch time of an app's tasks is known, of the least certain."""
    tasks = [task for task in app["tasks"] if task["phase"] != "exited"]
    if not tasks:
        return "-"
    return timed_by(min(tasks, key=lambda task: (task.get("measured") or {}).get("confidence") or 0.0))


def shares_table(document: Document) -> str:
    """Return `shares`: one line per tenant, GPU time in GPU-hours."""
    tenants = document["tenants"]
    policy = f"policy: {document['policy']}" if document.get("policy") else ""
    if not tenants:
        return f"no tenants yet; a tenant appears with its first app, or with [[arbiter.tenants]]\n{policy}"
    headers = ("TENANT", "WEIGHT", "QUOTA", "WANT", "HELD", "APPS", "GPU-H", "FAIR-GPU-H", "LTGF", "LTGF-QUOTA")
    named = sum(tenant.get("quota_gpus_named") or 0 for tenant in tenants)
    lines = [table(headers, [_tenant_row(tenant) for tenant in tenants]), policy]
    if named > document["gpus"]:
        lines.append(
            f"the quotas are of {named} GPUs, and there are {document['gpus']}: each is cut in proportion, and tenants "
            "without a quota are due nothing; give less in [[arbiter.tenants]]"
        )
    return "\n".join(lines)


def owners_table(document: Document) -> str:
    """Return `shares --by owner`: one line per owner, GPU time in GPU-hours."""
    if "owners" not in document:
        return "this arbiter does not tell GPU time by owner; it is older than this program"
    headers = ("OWNER", "WANT", "HELD", "APPS", "GPU-H", "FAIR-GPU-H", "LOST-GPU-H", "LTGF")
    rows = [_owner_row(owner) for owner in document["owners"]]
    since = f"since {document['owners_since']}" if document.get("owners_since") else ""
    return f"{table(headers, rows)}\n{since}" if rows else "no owners yet; an owner appears with the first app"


def _owner_row(owner: Document) -> tuple[str, ...]:
    return (
        str(owner["owner"]),
        str(owner["wanted_gpus"]),
        f"{owner['held_gpus']:g}",
        str(owner["apps"]),
        f"{owner['gpu_seconds'] / 3600:.2f}",
        f"{owner['fair_gpu_seconds'] / 3600:.2f}",
        f"{owner['lost_gpu_seconds'] / 3600:.2f}",
        number(owner["ltgf"]),
    )


def _tenant_row(tenant: Document) -> tuple[str, ...]:
    return (
        str(tenant["tenant"]),
        f"{tenant['weight']:g}",
        f"{tenant['quota_gpus']:.1f}",
        str(tenant["wanted_gpus"]),
        f"{tenant['held_gpus']:g}",
        str(tenant["apps"]),
        f"{tenant['gpu_seconds'] / 3600:.2f}",
        f"{tenant['fair_gpu_seconds'] / 3600:.2f}",
        number(tenant["ltgf"]),
        number(tenant["ltgf_quota"]),
    )


#: The columns of a report that name the tenant, owner or app of a row.
_WHOSE = {"tenant": ("tenant",), "owner": ("owner",), "app": ("app", "owner", "tenant")}


def report_sheet(document: Document) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    """Return `report` as columns and rows, in GPU-seconds."""
    figures = ("gpu_seconds", "draining_gpu_seconds", "lost_gpu_seconds")
    columns = ("from", "to", *_WHOSE[document["by"]], *figures)
    return columns, [[row[column] for column in columns] for row in document["report"]]


def report_table(document: Document) -> str:
    """Return `report`: a line for each tenant, owner or app of each period, GPU time in GPU-hours, and the whole."""
    rows = document["report"]
    if not rows:
        return "no GPU time in that period"
    whose = _WHOSE[document["by"]]
    periods = len({row["from"] for row in rows}) > 1
    total = sum(float(row["gpu_seconds"]) for row in rows)
    headers = (*(("FROM",) if periods else ()), *map(str.upper, whose), "GPU-H", "SHARE", "LEAVING-GPU-H", "LOST-GPU-H")
    lines = [_report_row(row, whose, total, periods=periods) for row in rows]
    begin, end = min(row["from"] for row in rows), max(row["to"] for row in rows)
    whole = f"{total / 3600:.2f} GPU-hours in all, {_local(begin)} to {_local(end)}"
    return f"{table(headers, lines)}\n{whole}"


def _report_row(row: Document, whose: Sequence[str], total: float, *, periods: bool) -> tuple[str, ...]:
    hours = [f"{row[f'{kind}gpu_seconds'] / 3600:.2f}" for kind in ("", "draining_", "lost_")]
    share = f"{row['gpu_seconds'] / total:.0%}" if total else "-"
    begin = (_local(row["from"]),) if periods else ()
    return (*begin, *(str(row[each]) for each in whose), hours[0], share, *hours[1:])


def _local(instant: str) -> str:
    """Return an instant in the reader's time, to the minute."""
    return datetime.fromtimestamp(seconds_of(instant)).strftime("%Y-%m-%d %H:%M")  # noqa: DTZ006 - the reader's time


def nodes_table(document: Document, now: float) -> str:
    """Return `nodes`: one line per GPU, and after them the nodes that are drained."""
    rows = [_gpu_row(node, gpu) for node in document["nodes"] for gpu in node["gpus"]]
    if not rows:
        return "no nodes; start one with: gpu-arbiter node-agent --config node.toml"
    headers = ("NODE", "RACK", "NODE-STATE", "SEEN", "GPU", "SLOT", "MODEL", "STATE", "APP", "TASK", "DETAIL")
    drains = [_drain(node, now) for node in document["nodes"] if node.get("drain")]
    return "\n".join([table(headers, rows), *drains])


def _drain(node: Document, now: float) -> str:
    """Return who has a node emptied, why and since when, and the tasks that are still there."""
    drain = node["drain"]
    since = f"by {drain['by']} since {_ago(drain['since'], now)}"
    why = f": {drain['reason']}" if drain["reason"] else ""
    return f"{drained(str(node['id']), str(drain['state']), drain['tasks'])}\n  {since}{why}"


def drained(node: str, state: str, tasks: Sequence[Document]) -> str:
    """Return how far a node is on its way to hold no task: one line, and one for each task that it still holds."""
    waits = sum(bool(task["stays"]) for task in tasks)
    line = f"{node} is {state}"
    if tasks:
        line += f": it holds {plural(len(tasks), 'task')}" + (
            f", and waits for {waits} that stay{'s' * (waits == 1)}" if waits else ""
        )
    return "\n".join([line, *(f"  {_leaver(task)}" for task in tasks)])


def _leaver(task: Document) -> str:
    step = f", step {task['step']}" if int(task["step"]) >= 0 else ""
    return f"{task['task']} ({task['phase']}{step}, has run {duration(task['ran_s'])}) {task['text']}"


def _gpu_row(node: Document, gpu: Document) -> tuple[str, ...]:
    ailment = "quarantined" if gpu.get("quarantined") else "unhealthy"
    health = str(gpu["state"]) if gpu["healthy"] else f"{gpu['state']}, {ailment}"
    apps = [str(seat["app"]) for seat in (gpu, *(gpu.get("seats") or ())) if seat["app"]]
    return (
        str(node["id"]),
        str(node["rack"]),
        str(node["state"]) + (f", {node['drain']['state']}" if node.get("drain") else ""),
        duration(node["last_seen_s"]) + " ago",
        str(gpu["id"]),
        str(gpu["slot"]),
        str(gpu["model"]),
        health,
        ",".join(apps) or "-",
        ",".join(map(str, gpu.get("tasks") or ())) or "-",
        str(gpu["detail"] or ""),
    )


def rounds_table(document: Document, now: float) -> str:
    """Return `rounds`: one line per round, newest first."""
    rounds = document["rounds"]
    if not rounds:
        return "no round has been decided yet; `gpu-arbiter explain ID` says why an app waits"
    lines = [table(("ROUND", "WHEN", "TOOK", "GPUS", "WON", "WITHOUT"), [_round_row(each, now) for each in rounds])]
    if document["count"] > len(rounds):
        lines.append(f"{len(rounds)} of {document['count']} rounds; for more: gpu-arbiter rounds --limit N")
    return "\n".join(lines)


def _round_row(entry: Document, now: float) -> tuple[str, ...]:
    """Return a round's line: the GPUs on offer, the apps that got some, and the number of apps that got none."""
    won = [f"{outcome['app']} ({len(outcome['gpus'])})" for outcome in entry["outcomes"] if outcome["gpus"]]
    without = len(entry["outcomes"]) + entry["outcomes_left_out"] - len(won)
    return (
        str(entry["round"]),
        _ago(entry["at"], now),
        f"{entry['took_s']:.1f}s",
        str(len(entry["gpus"])),
        ", ".join(won) or "-",
        str(without),
    )


def event_line(event: Document) -> str:
    """Return an event as one line: its local time, the app, node or arbiter that it happened to, its kind, and more."""
    when = datetime.fromtimestamp(float(event["at_s"])).strftime("%Y-%m-%d %H:%M:%S")  # noqa: DTZ006 - the reader's time
    about = str(event["app"] or event["node"] or "arbiter")
    line = f"{when}  {about:<12}  {event['kind']:<11}  {event['what']}"
    return "".join(each if each.isprintable() else "?" for each in line).rstrip()


def explanation(document: Document, now: float) -> str:
    """Return `explain`: state, GPUs held, the rounds that decided it, its story, and one next step."""
    if "app" not in document:  # a task, node, GPU or lease: only its story
        return "\n\n".join(part for part in (_receipts(document, now), _story(document, now)) if part)
    parts = [_headline(document), _fairness(document), _gpu_time(document), _claims(document), _rounds(document, now)]
    parts += [_receipts(document, now), _story(document, now), _tasks(document)]
    parts.append("next: " + next_step(document))
    return "\n\n".join(part for part in parts if part)


def _headline(document: Document) -> str:
    held = document.get("held") or []
    holding = f"holds {len(held)} of the {document['want']} GPUs it can use"
    kind = ", interactive" if document.get("class") == "interactive" else ""
    line = f"{document['app']}{kind} of tenant {document['tenant']} is {document['state']}"
    after = (document.get("waits_for") or {}).get("kind") == "after"
    if document["state"] not in OVER and not after:
        line += f" and {holding}"
    if held:
        line += ": " + ", ".join(map(str, held))
    for share in document.get("shares") or ():
        line += f"; it shares {share['gpu']} with {', '.join(share['with'])}"
    why = document.get("refusal") or document.get("waiting_for") or document.get("reason")
    return line + "." + (f"\nReason: {why}" if why else "") + _binding(document)


def _binding(document: Document) -> str:
    """Return the obstacle that keeps it from starting: without that the next round would give it GPUs.

    It is not told twice where it is what the app waits for.
    """
    binding = document.get("binding")
    if not binding or binding["text"] == document.get("waiting_for"):
        return ""
    estimate = " (an estimate, made without the bids of the apps)" if binding["estimate"] else ""
    return f"\nIn its way{estimate}: {binding['text']}"


#: How far apart the GPUs of an app would lie, by the level that holds them all.
_LEVEL = {
    "slot": ", in one slot",
    "machine": ", across its slots",
    "rack": ", in one rack",
    "cluster": ", in several racks",
}


def forecast(document: Document) -> str:
    """Return `submit --dry-run`: whether the app would start now and where, or what it would wait for."""
    gpus = document["gpus"]
    if document["starts"]:
        lines = [_would_get(document), *_leavers(gpus)]
    else:
        lines = ["It would wait" + (f", with {plural(len(gpus), 'GPU')} of a gang." if gpus else ".")]
    why = document["reason"] or document["waiting_for"]
    lines += [f"Reason: {why}"] if why else []
    lines += [told] if (told := _binding(document).strip()) else []
    booking = document.get("booking")
    if booking:
        lines.append(f"Booking: {booking['text'] or 'nothing is left to sell to it'}")
    if document["estimate"]:
        others = document["guessed"]
        names = ", ".join(map(str, others[:WAITS_SHOWN])) + (", ..." if len(others) > WAITS_SHOWN else "")
        lines.append(
            f"This is an estimate: {plural(len(others), 'other app')} would bid too ({names}), and those bids are "
            "guessed from what the apps last reported."
        )
    return "\n".join(lines)


def _would_get(document: Document) -> str:
    gpus, nodes = document["gpus"], document["nodes"]
    apart = _LEVEL.get(str(document["level"]), "") if len(gpus) > 1 else ""
    names = ", ".join(str(gpu["id"]) for gpu in gpus)
    share = "" if len(gpus) == document["want"] else f" of the {document['want']} that it can use"
    return (
        f"It would start now, with {plural(len(gpus), 'GPU')}{share} on {', '.join(map(str, nodes))}{apart}: {names}."
    )


def _leavers(gpus: Sequence[Document]) -> list[str]:
    """Return the apps that have the GPUs before, and have to leave them first."""
    holders: dict[str, list[str]] = {}
    for gpu in gpus:
        if gpu["app"]:
            holders.setdefault(str(gpu["app"]), []).append(str(gpu["id"]))
    return [f"First {app} leaves {', '.join(names)}." for app, names in sorted(holders.items())]


#: The basis of an app's finish-time fairness in words, by its `rho_basis`.
_BASIS = {"declared": ", by the times that its owner declared", "measured": ", by times as measured"}


def _fairness(document: Document) -> str:
    if document["state"] in OVER and not document.get("rho"):  # it was never in a round
        return ""
    return _rho(document) + _next_round(document)


def _rho(document: Document) -> str:
    rho = document.get("rho")
    if not rho:
        return "Its finish-time fairness rho is unknown until its first mini-batches are measured."
    basis = _BASIS.get(str(document.get("rho_basis")), "")
    verdict = "no later than alone on its share" if rho <= 1 else f"{rho:.2f} times as late as alone on its share"
    rule = ""
    if document["state"] not in OVER:
        auction = document.get("auction", True)
        rule = "; the worst-off apps bid in each round" if auction else f"; the policy is {document['policy']}"
    return f"Its finish-time fairness rho is {rho:.2f}, {verdict}{basis}{rule}."


def _gpu_time(document: Document) -> str:
    """Return a sentence on its GPU time, with the losses worth a word."""
    had = document.get("gpu_seconds")
    if not had:
        return ""
    kinds = (("lost", "was lost to preemptions and failures"), ("draining", "went by while GPUs were being left"))
    told = [
        f"{duration(seconds)} {fate}"
        for kind, fate in kinds
        if (seconds := document.get(f"{kind}_gpu_seconds") or 0.0) >= 1.0
    ]
    parked = document.get("parked_gpu_seconds") or 0.0
    of_that = f"; of that {' and '.join(told)}" if told else ""
    beside = f"; it lay parked for {duration(parked)} beside that" if parked >= 1.0 else ""
    return f"It has had {duration(had)} of GPU time{of_that}{beside}."


def _claims(document: Document) -> str:
    return "\n".join(f"It {claim['text']}." for claim in document.get("claims") or ())


def _next_round(document: Document) -> str:
    wait_s = document.get("next_round_s")
    if document["state"] in OVER or wait_s is None:
        return ""
    if wait_s < 1.0:
        return " The next round decides now."
    return f" The next round decides in at most {duration(wait_s)}, sooner if a GPU comes free or an app arrives."


def _rounds(document: Document, now: float) -> str:
    rounds = sorted(document.get("rounds") or [], key=lambda entry: -int(entry["round"]))[:EXPLAINED_ROUNDS]
    if not rounds:
        return "" if document["state"] in OVER else "No round has decided about it yet."
    lines = ["Last rounds, newest first:"]
    for entry in rounds:
        lines.append(f"  round {entry['round']}, {_ago(entry['at'], now)}: {entry['reason']}")
        if winners := entry.get("winners"):
            lines.append("    went to: " + ", ".join(f"{winner['app']} ({winner['gpus']})" for winner in winners))
    return "\n".join(lines)


def _receipts(document: Document, now: float) -> str:
    """Return the newest preemptions of an app, each with its receipt."""
    newest = (document.get("receipts") or [])[-TOLD_RECEIPTS:]
    if not newest:
        return ""
    lines = [f"  {_ago(each['at'], now)}: {receipt(each)}" for each in reversed(newest)]
    return "\n".join(["GPUs taken from it, newest first:", *lines])


def receipt(told: Document) -> str:
    """Return one preemption in a sentence: the GPUs, the winner, the reason, the cost, and the return of GPUs."""
    winners = f" for {', '.join(map(str, told['for']))}" if told["for"] else ""
    taken = f"{plural(len(told['gpus']), 'GPU')} on {', '.join(map(str, told['nodes']))}{winners} ({told['why']})"
    costs = (("draining", "until they were empty"), ("lost", "of work to do again"))
    cost = [
        f"{duration(told[f'{kind}_gpu_seconds'])} {words}"
        for kind, words in costs
        if told[f"{kind}_gpu_seconds"] >= 1.0
    ]
    paid = f"it cost {' and '.join(cost)} of GPU time" if cost else "it cost less than a second of GPU time"
    return f"{taken}; {paid}; {_got_back(told)}"


def _got_back(told: Document) -> str:
    count, missing = len(told["gpus"]), int(told["missing"])
    nodes = ", ".join(dict.fromkeys(str(node) for each in told["returned"] for node in each["nodes"]))
    if not missing:
        return f"it had {'one' if count == 1 else 'as many'} again after {duration(told['away_s'])}, on {nodes}"
    return f"it has got {count - missing} of them back, on {nodes}" if missing < count else "it has got none back yet"


def _story(document: Document, now: float) -> str:
    chapters = (document.get("story") or [])[-TOLD_CHAPTERS:]
    if not chapters:
        return ""
    return "\n".join(["Its story:", *(f"  {_ago(chapter['at'], now)}: {chapter['what']}" for chapter in chapters)])


def _ago(instant: str, now: float) -> str:
    return duration(now - seconds_of(instant)) + " ago"


def seconds_of(instant: str) -> float:
    """Return the UNIX time of an ISO-8601 instant."""
    return datetime.fromisoformat(instant).timestamp()


def _tasks(document: Document) -> str:
    tasks = document.get("tasks") or []
    if not tasks:
        return ""
    headers = ("TASK", "NODE", "PHASE", "STEP", "TIMED-BY", "SHARE", "REASON")
    lines = [table(headers, [_task_row(task) for task in tasks])]
    if any((task.get("measured") or {}).get("periods") for task in tasks):
        lines.append(BY_SIGNAL)
    lines += [_without_steps(task) for task in tasks if tells_no_steps(task)][:TOLD_WITHOUT_STEPS]
    return "\n".join(lines)


def _without_steps(task: Document) -> str:
    """Say of a task that its script tells no steps, and what that means for its work."""
    said = f"{task['task']}: this script tells nothing of its steps"
    if not task.get("at_risk_s"):
        return f"{said}; it can be suspended all the same, so nothing is lost where it stays on its GPUs."
    return (
        f"{said}, so it is not known to be able to save or to be suspended: when it has to leave, the "
        f"{duration(task['at_risk_s'])} of work that it has done are lost. The mend is session.step_end() after each "
        "mini-batch."
    )


def _task_row(task: Document) -> tuple[str, ...]:
    """Return a task's line: the source of its mini-batch time, and the part of the time in which it has its GPUs."""
    measured = task.get("measured") or {}
    share = float(measured.get("share", 1.0))
    return (
        str(task["task"]),
        str(task["node"]),
        str(task["phase"]),
        steps([task]),
        timed_by(task),
        "all" if share >= 1.0 else f"{share:.0%}",
        str(task.get("reason") or measured.get("remark") or ""),
    )


def next_step(document: Document) -> str:
    """Return the one command that helps most now."""
    app = document["app"]
    match str(document["state"]):
        case "refused":
            return "submit it again with the change that the refusal names"
        case "failed" if any(str(chapter["what"]).startswith("refused") for chapter in document.get("story") or ()):
            return "submit it again with the change that the refusal names"
        case "failed" if not document.get("has_run", True):  # no process has started, so there is no output
            return "submit it again once what the reason names is mended"
        case "failed":
            return f"gpu-arbiter logs {app}"
        case "finished" | "cancelled":
            return f"gpu-arbiter logs {app}   # its output stays readable for a while"
        case "held":
            return f"gpu-arbiter release {app}"
        case _ if document.get("held"):
            return f"gpu-arbiter logs -f {app}"
        case _ if (document.get("waits_for") or {}).get("kind") == "after":
            return f"gpu-arbiter explain {document['waits_for']['ids'][0]}"
        case _:
            return f"gpu-arbiter wait {app} --for running   # or: gpu-arbiter nodes, to see the holders of GPUs"
