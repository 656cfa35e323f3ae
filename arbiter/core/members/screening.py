"""Screening of reports: those that contradict themselves are refused, and wishes beyond the site's limits.

An app agent is its owner's, who may have written it anew. So what is bounded is bounded here, whatever the app agent
says, and what cannot be meant is refused with the field's name before any policy sees it.
"""

from __future__ import annotations

import re

from arbiter.core.state.index import Index
from arbiter.core.state.model import ArbiterSettings, State
from protocol import limits
from protocol.messages import LEVELS, WORKS_MAX, AppReport, JobWish

#: Names in a refusal: it has to fit into a message.
NAMES_MAX = 20
_NUMBERED = re.compile(r"[a-z]*[0-9]{1,18}")
_NUMBER = re.compile(r"[0-9]{1,9}")


def mistake(report: AppReport) -> str:
    """Return what in a report contradicts the rest of it, in one sentence that names the field; empty if nothing."""
    if not _NUMBERED.fullmatch(report.app.rpartition("-")[2]):
        return f"app is {report.app!r}; an id is the owner's name, a dash, letters if any, and a number"
    if report.demand_max % report.gang:
        return f"demand_max is {report.demand_max}, which is no multiple of gang ({report.gang})"
    if list(report.sizes) != sorted(set(report.sizes)) or any(size % report.gang for size in report.sizes):
        return f"sizes are {list(report.sizes)[:NAMES_MAX]}; they must rise and be multiples of gang ({report.gang})"
    return _mistake_in_standing(report) or _mistake_in_jobs(report)


def _mistake_in_standing(report: AppReport) -> str:
    standing = report.standing
    if standing is None:
        return ""
    levels = [LEVELS.index(terms.level) for terms in standing.terms]
    if levels != sorted(set(levels)):
        return "the levels of standing.terms do not rise from tight to loose"
    works = sum(map(len, standing.phases))
    if works > WORKS_MAX:
        return f"standing.phases have {works} jobs in all; they may have {WORKS_MAX}, an app of more is asked"
    demands = standing.phase_demands
    if demands and len(demands) != len(standing.phases):
        return f"standing.phase_demands has {len(demands)} numbers for {len(standing.phases)} phases; give one for each"
    sizes, least = standing.sizes, min(report.gang, *(terms.job_demand_max for terms in standing.terms))
    if list(sizes) != sorted(set(sizes)) or (sizes and sizes[0] > least):
        return f"standing.sizes are {list(sizes)[:NAMES_MAX]}; they must rise, from {least} or less"
    return ""


def _mistake_in_jobs(report: AppReport) -> str:
    names = [wish.job for wish in report.jobs]
    strange = next((name for name in names if not _is_job_of(name, report.app)), None)
    if strange is not None:
        return f"its jobs must be named {report.app}.<number>, not {strange}"
    if len(set(names)) < len(names):
        return "two of its jobs have the same name"
    gpus = [gpu for wish in report.jobs for gpu in wish.gpus]
    if len(set(gpus)) < len(gpus):
        return "two of its jobs wish for the same GPU"
    broken = next((wish for wish in report.jobs if len(wish.gpus) % report.gang), None)
    if broken is not None:
        return f"job {broken.job} wishes for {len(broken.gpus)} GPUs, which is no multiple of gang ({report.gang})"
    return next(filter(None, map(_mistake_in_launch, report.jobs)), "")


def _is_job_of(name: str, app: str) -> bool:
    owner, _, number = name.rpartition(".")
    return owner == app and _NUMBER.fullmatch(number) is not None


def _mistake_in_launch(wish: JobWish) -> str:
    launch = wish.launch
    for field, folder in (("cwd", launch.cwd), ("checkpoint_dir", launch.checkpoint_dir)):
        if not folder.startswith("/"):
            return f"{field} of job {wish.job} is {folder[:200]!r}, which is no full path"
    if not launch.command[0]:
        return f"the command of job {wish.job} begins with an empty word"
    return ""


def presumption(state: State, index: Index, owner: str, report: AppReport) -> str:
    """Return what a new app is beyond what the site allows its owner, in one sentence; empty if nothing."""
    settings = state.settings
    beyond = limits.excess(
        report.requirements,
        priority_max=settings.priority_max,
        weight_max=settings.weight_max,
        classes=settings.classes,
    )
    if beyond is not None:
        return "; ".join(beyond)
    # Others are refused for that at their admission, once nodes have had time to enrol.
    unnamed = unnamed_tenant(settings, report.tenant) if report.after else ""
    return _no_member(settings, owner, report) or unnamed or _too_many(settings, index, owner)


def unnamed_tenant(settings: ArbiterSettings, tenant: str) -> str:
    """Return why an app of that tenant is refused, where only tenants that the site names may run apps; or nothing."""
    unnamed = limits.unnamed_tenant(tenant, [each.name for each in settings.tenants])
    return f"{unnamed}; name one: --tenant" if settings.tenants_only and unnamed else ""


def _no_member(settings: ArbiterSettings, owner: str, report: AppReport) -> str:
    terms = next((each for each in settings.tenants if each.name == report.tenant), None)
    if terms is None or not terms.members or owner in terms.members:
        return ""
    own = [each.name for each in settings.tenants if owner in each.members][:NAMES_MAX]
    mend = f"name one of yours: --tenant {' or '.join(own)}" if own else "ask the administrator to name you there"
    return f"{owner} is no member of tenant {report.tenant}; {mend}"


def _too_many(settings: ArbiterSettings, index: Index, owner: str) -> str:
    limit = settings.apps_max
    if index.owned[owner] < limit:
        return ""
    return (
        f"{owner} has {limit} apps that are not over, and this site allows no more at a time (apps_max); "
        "submit it again when some of them have ended"
    )
