"""What shells complete: ids of apps with their states, names of nodes and tenants, and the words that a flag may take.

Each function here stands at a parameter as its `autocompletion`, and is called only when a shell asks. The user's own
app agent is asked, which may ask the arbiter; where none answers soon, nothing is offered and nothing is said.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import typer

from protocol.messages import AppStateName, EventKind, Kind, PreemptBy, Sharing

if TYPE_CHECKING:
    from app_agent.control import Control
    from app_agent.core.records import AppRecord

#: How long a shell may be kept waiting by the app agent, and by the arbiter.
PATIENCE_S = 0.5
#: Apps that are offered: the newest.
APPS_MAX = 500
Offered = Sequence[tuple[str, str]]  #: words with their descriptions
Completer = Callable[..., list[tuple[str, str]]]  #: of the word that is incomplete, and of its `ctx` if it has one


# --- words that never change ------------------------------------------------------------------------------------------


def one_of(words: Iterable[str]) -> Completer:
    """Return what completes one of these words."""
    offered = [(word, "") for word in words]

    def complete(incomplete: str) -> list[tuple[str, str]]:
        return _beginning(incomplete, offered)

    return complete


def some_of(words: Iterable[str]) -> Completer:
    """Return what completes the last of several of these words, with commas between."""
    offered = [(word, "") for word in words]

    def complete(incomplete: str) -> list[tuple[str, str]]:
        return _listed(incomplete, lambda: offered)

    return complete


states = some_of(get_args(AppStateName))
event_kinds = some_of(get_args(EventKind))
classes = one_of(get_args(Kind))
preempt_by = one_of(get_args(PreemptBy))
sharing = one_of(get_args(Sharing))
some_sharing = some_of(get_args(Sharing))


def policy_names() -> list[str]:
    """Return the names in the table of policies, read from its source: its import takes longer than a shell may wait.

    None are returned where the source is not there.
    """
    package = find_spec("arbiter.core")
    try:
        path = Path(str(package and package.origin)).with_name("registry.py")
        table = ast.parse(path.read_text(encoding="utf-8"))
    except OSError:
        return []
    return sorted(
        str(key.value)
        for node in table.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "POLICIES"
        if isinstance(node.value, ast.Dict)
        for key in node.value.keys
        if isinstance(key, ast.Constant)
    )


def policy(incomplete: str) -> list[tuple[str, str]]:
    """Return the policies whose names begin like this."""
    return one_of(policy_names())(incomplete)


def policies(incomplete: str) -> list[tuple[str, str]]:
    """Return what completes the last of several policies, with commas between."""
    return some_of((*policy_names(), "all"))(incomplete)


# --- apps -------------------------------------------------------------------------------------------------------------


def _ids(keep: Callable[[AppRecord], bool], *words: tuple[str, str]) -> Completer:
    """Return what completes ids of one's own apps that are kept, each once in a command, and these words."""

    def complete(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        given = {each for value in ctx.params.values() if isinstance(value, list | tuple) for each in value}
        records = _asked(lambda control: control.apps(), [])
        apps = [(str(record.app), _described(record)) for record in records if keep(record)][-APPS_MAX:]
        special = words if incomplete else ()  # nothing stands in the way of the only app there is
        return [each for each in _beginning(incomplete, (*apps, *special)) if each[0] not in given]

    return complete


def _described(record: AppRecord) -> str:
    gpus = f", {len(record.gpus)} GPU{'s' * (len(record.gpus) != 1)}" if record.gpus else ""
    return f"{record.state}{gpus}: {record.name}"


LAST = ("last", "your newest app")
ALL = ("all", "all of yours that it may concern")
apps = _ids(lambda _: True, LAST)
apps_to_cancel = _ids(lambda record: not record.over, LAST, ALL)
apps_to_hold = _ids(lambda record: not record.over and record.state != "held", LAST, ALL)
apps_to_release = _ids(lambda record: record.state == "held", LAST, ALL)
apps_to_requeue = _ids(lambda record: not record.over and bool(record.gpus), LAST, ALL)
apps_that_are_over = _ids(lambda record: record.over, LAST, ALL)
apps_to_wait_for = _ids(lambda record: not record.over, LAST)
apps_to_follow = apps_to_wait_for


def tasks(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete ids of apps, and after a dot those of their tasks."""
    if "." not in incomplete:
        return apps(ctx, incomplete)
    records = _asked(lambda control: control.apps(), [])
    offered = [(str(task), _described(record)) for record in records for task in record.tasks]
    return _beginning(incomplete, offered)


def app_names(incomplete: str) -> list[tuple[str, str]]:
    """Complete the names of one's own apps, as a list."""
    return _listed(incomplete, lambda: [(record.name, "") for record in _asked(lambda each: each.apps(), [])])


# --- what the arbiter knows -------------------------------------------------------------------------------------------


def nodes(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete a node."""
    return [each for each in _beginning(incomplete, _nodes()) if each[0] not in (ctx.params.get("nodes") or ())]


def some_nodes(incomplete: str) -> list[tuple[str, str]]:
    """Complete nodes, as a list."""
    return _listed(incomplete, _nodes)


def drained_nodes(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete a node that is being drained."""
    return [each for each in nodes(ctx, incomplete) if "drain" in each[1]]


def _nodes() -> Offered:
    known = _asked(lambda control: control.query("nodes", patience_s=PATIENCE_S), {"nodes": []})["nodes"]
    return [(str(node["id"]), _node_state(node)) for node in known]


def _node_state(node: Mapping[str, Any]) -> str:
    drain, gpus = node.get("drain"), len(node["gpus"])
    return f"{node['state']}, {drain['state']}" if drain else f"{node['state']}, {gpus} GPU{'s' * (gpus != 1)}"


def tenant(incomplete: str) -> list[tuple[str, str]]:
    """Complete a tenant."""
    return _beginning(incomplete, _tenants())


def some_tenants(incomplete: str) -> list[tuple[str, str]]:
    """Complete tenants, as a list."""
    return _listed(incomplete, _tenants)


def _tenants() -> Offered:
    known = _asked(lambda control: control.query("shares", patience_s=PATIENCE_S), {"tenants": []})["tenants"]
    return [(str(each["tenant"]), f"holds {each['held_gpus']:g} GPUs") for each in known]


def some_owners(incomplete: str) -> list[tuple[str, str]]:
    """Complete owners, as a list."""

    def owners() -> Offered:
        known = _asked(lambda control: control.query("apps", patience_s=PATIENCE_S), {"apps": []})["apps"]
        return [(owner, "") for owner in sorted({str(each["owner"]) for each in known})]

    return _listed(incomplete, owners)


# --- pieces -----------------------------------------------------------------------------------------------------------


def _beginning(incomplete: str, offered: Offered) -> list[tuple[str, str]]:
    return [(word, about) for word, about in dict(offered).items() if word.startswith(incomplete)]


def _listed(incomplete: str, offered: Callable[[], Offered]) -> list[tuple[str, str]]:
    """Complete the last name of a list; the names before it are not offered again."""
    before, comma, last = incomplete.rpartition(",")
    given = set(before.split(","))
    return [(f"{before}{comma}{word}", about) for word, about in _beginning(last, offered()) if word not in given]


def _asked(question: Callable[[Control], Any], otherwise: Any) -> Any:
    """Return the answer of the user's app agent, or something else where there is none."""
    from app_agent.control import Control, ControlError
    from protocol.config import ConfigError

    try:
        with Control(timeout_s=2 * PATIENCE_S) as control:
            return question(control)
    except (ControlError, ConfigError, OSError, ValueError):
        return otherwise


def describe_plainly() -> None:
    """Have descriptions handed to shells as they are.

    Typer would have rich look for markup in them, which takes longer than all the rest, and breaks long ones into
    lines, which shells take for further words.
    """
    from typer import _completion_classes

    _completion_classes._sanitize_help_text = lambda text: " ".join(text.split())
