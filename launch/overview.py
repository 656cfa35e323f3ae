"""The whole site on one screen: GPUs by node with their holders and real use, tenants, apps, and the newest round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from app_agent.streams import OVER
from launch import views
from launch.surface import Document, duration, number, plural, table
from protocol.messages import GpuId, QueryKind, device_of

GIB = 2**30


class Source(Protocol):
    """Answers questions about one moment: the present, by the arbiter, or a moment of the past, by its journal."""

    def __call__(self, kind: QueryKind, target: str = "", *, limit: int = 0) -> dict[str, Any]:
        """Return a document, as the arbiter answers."""
        ...


def gather(ask: Source, now: float) -> dict[str, Any]:
    """Return all that the screen shows, as one document."""
    rounds = ask("rounds", limit=1)
    return {
        "schema": "top/v1",
        "at": datetime.fromtimestamp(now).astimezone().isoformat(timespec="seconds"),
        "at_s": now,
        "nodes": ask("nodes")["nodes"],
        "apps": ask("apps")["apps"],
        "shares": ask("shares"),
        "rounds": rounds["rounds"],
        "round_count": rounds["count"],
        "policy_failures": rounds["policy_failures"],
        "round_overdue_s": rounds.get("overdue_s", 0.0),  # an arbiter before this version tells none of these
        "epoch": rounds.get("epoch"),
        "counts": rounds.get("counts", {}),
        "process": rounds.get("process", {}),
    }


def screen(document: Document) -> str:
    """Return the document of `gather` as text for a terminal."""
    parts = [headline(document), _gpus(document), _tenants(document["shares"])]
    parts.append(views.apps_table(document))
    return "\n\n".join(part for part in parts if part)


def headline(document: Document) -> str:
    """Return the document in two lines: GPUs and apps by state, and the newest round."""
    gpus = [gpu for node in document["nodes"] for gpu in node["gpus"]]
    states = Counter(gpu_state(node, gpu) for node in document["nodes"] for gpu in node["gpus"])
    apps = Counter(str(app["state"]) for app in document["apps"] if app["state"] not in OVER)
    when = datetime.fromtimestamp(document["at_s"]).strftime("%Y-%m-%d %H:%M:%S")  # noqa: DTZ006 - the reader's time
    lines = [
        f"{when}  policy {document['shares']['policy']}  {plural(len(gpus), 'GPU')}{_counted(states)}  "
        f"{plural(apps.total(), 'app')}{_counted(apps)}"
    ]
    for entry in document["rounds"]:
        won = ", ".join(f"{each['app']} ({len(each['gpus'])})" for each in entry["outcomes"] if each["gpus"])
        ago = duration(document["at_s"] - views.seconds_of(entry["at"]))
        lines.append(f"round {entry['round']}, {ago} ago, took {entry['took_s']:.1f}s: {won or 'no app won a GPU'}")
    return "\n".join(lines)


def _counted(states: Mapping[str, int]) -> str:
    return f": {', '.join(f'{count} {state}' for state, count in sorted(states.items()))}" if states else ""


def gpu_state(node: Document, gpu: Document) -> str:
    """Return the state of a GPU in one word; out of service are those of lost nodes, drained nodes and sick GPUs."""
    if node["state"] != "up":
        return "lost"
    if gpu.get("quarantined"):
        return "quarantined"
    if not gpu["healthy"]:
        return "unhealthy"
    if node.get("drain") and gpu["state"] == "free":
        return str(node["drain"]["state"])
    return str(gpu["state"])


def tasks_by_gpu(apps: Iterable[Document]) -> Mapping[str, Sequence[Document]]:
    """Return the tasks on each GPU that are not over, by the GPU's id."""
    found: dict[str, list[Document]] = {}
    for app in apps:
        for task in app["tasks"]:
            for gpu in task["gpus"] if task["phase"] != "exited" else ():
                found.setdefault(device_of(GpuId(gpu)), []).append(task)
    return found


def use(tasks: Sequence[Document]) -> tuple[float | None, int]:
    """Return how busy tasks keep a GPU (0 to 1; None if that is not measured), and the most memory they took, bytes."""
    measured = [task.get("measured") or {} for task in tasks]
    busy = [float(each["utilisation"]) for each in measured if each.get("utilisation") is not None]
    return (min(1.0, max(busy)) if busy else None), sum(int(each.get("peak_bytes") or 0) for each in measured)


def holders(gpu: Document) -> Sequence[str]:
    """Return the apps that have a GPU, or a seat on it."""
    return [str(seat["app"]) for seat in (gpu, *(gpu.get("seats") or ())) if seat["app"]]


def _gpus(document: Document) -> str:
    tasks = tasks_by_gpu(document["apps"])
    rows = []
    for node in document["nodes"]:
        for gpu in node["gpus"]:
            here = tasks.get(str(gpu["id"]), ())
            busy, peak = use(here)
            rows.append(
                (
                    str(node["id"]),
                    str(gpu["id"]),
                    gpu_state(node, gpu),
                    ",".join(holders(gpu)) or "-",
                    "-" if busy is None or not here else f"{busy:.0%}",
                    f"{peak / GIB:.1f}" if peak else "-",
                    ",".join(str(task["phase"]) for task in here) or "-",
                )
            )
    return table(("NODE", "GPU", "STATE", "APP", "BUSY", "GIB", "TASK"), rows) if rows else "no nodes"


def _tenants(document: Document) -> str:
    rows = [
        (
            str(tenant["tenant"]),
            f"{tenant['held_gpus']:g}",
            str(tenant["wanted_gpus"]),
            f"{tenant['gpu_seconds'] / 3600:.2f}",
            number(tenant["ltgf"]),
        )
        for tenant in document["tenants"]
    ]
    return table(("TENANT", "HELD", "WANT", "GPU-H", "LTGF"), rows) if rows else ""
