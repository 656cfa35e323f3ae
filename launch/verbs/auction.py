"""`auction solve`: one auction from a file, without a site: "what if" questions, checks, benchmarks."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from launch.faults import usage
from launch.surface import answering, note, number, plural, say, table, wants_json

# Not at the top, here and below: numba takes longer to import than most commands to run.
if TYPE_CHECKING:
    from arbiter.core.policies.themis.auction.instance import Instance, Result

#: Nodes of one app that a line of the table shows.
SHOWN_NODES = 6
#: Compiled code is kept on disk; after this wait a note says that it is compiled only this once.
PATIENCE_S = 2.0


def add(app: typer.Typer) -> None:
    """Add this group, which has verbs of its own, to `app`."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    group.callback()(auction)
    group.command()(solve)
    app.add_typer(group, name="auction")


def auction() -> None:
    """The auction on its own: solve one from a file."""


def solve(
    file: Annotated[str, typer.Argument(metavar="FILE.json", help="schema themis-auction-1; - reads stdin")],
    budget_ms: Annotated[float, typer.Option(help="bounds the search, in milliseconds")] = 500.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="decides ties, and the lots of rounding")] = 0,
    json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Solve one auction: the GPUs that each app wins and keeps, their value, and the distance to the optimum.

    examples/auction.json is an example, docs/cli.md describes each field.
    """
    as_json = wants_json(json)
    with answering(as_json=as_json):
        if not 0.0 < budget_ms < math.inf:
            raise usage(f"--budget-ms is {budget_ms:g}", "give milliseconds, more than 0")
        instance = _read(file)
        prepare()
        from arbiter.core.policies.themis.auction.instance import solve as solve_instance

        result = solve_instance(instance, budget_ms, seed=seed, clock=time.perf_counter)
        say(msgspec.json.encode(result).decode() if as_json else view(result))


def _read(file: str) -> Instance:
    """Return the auction in a file, or on stdin for ``-``.

    Raises
    ------
    Fault
        If it cannot be read; or naming the field that is wrong.
    """
    from arbiter.core.policies.themis.auction.instance import BYTES_MAX, InstanceError, parse

    # A path may hold bytes that are no text.
    name = "stdin" if file == "-" else file.encode("utf-8", "backslashreplace").decode()
    next_step = "see docs/cli.md for the fields, examples/auction.json for an example"
    try:
        # One byte more than allowed, so that `parse` sees that it is too large, even of a source without end.
        if file != "-":
            with Path(file).open("rb") as source:
                data = source.read(BYTES_MAX + 1)
        elif sys.stdin:
            data = sys.stdin.buffer.read(BYTES_MAX + 1)
        else:
            raise usage("stdin is closed", next_step)
        return parse(data)
    except OSError as error:
        raise usage(f"{name} cannot be read: {error.strerror}", next_step) from None
    except InstanceError as error:
        raise usage(f"{name}: {error}", next_step) from None


def prepare() -> None:
    """Have the solver compiled, so that its times are those of solving; a note says so if that takes long."""
    from arbiter.core.policies.themis.auction.compiled import COMPILED
    from arbiter.core.policies.themis.auction.instance import warm_up

    if not COMPILED:
        note("numba is not installed: the same answers, tens of times slower; pip install numba")
        return
    notice = threading.Timer(PATIENCE_S, note, ("compiling the solver, once",))
    notice.daemon = True
    notice.start()
    try:
        warm_up()
    finally:
        notice.cancel()


def view(result: Result) -> str:
    """Return an outcome as a table of the apps and a line about the whole."""
    rows = [
        (
            app,
            counts(won),
            counts(result.grants[app]),
            number(result.log_v[app], 4),
            f"{math.exp(-result.log_v[app]):.4g}",
            number(result.c[app], 3),
        )
        for app, won in result.allocation.items()
    ]
    certainty = "proven optimal" if result.proven else f"gap {result.gap:.2g}, not all proven"
    summary = (
        f"sum of log V {number(result.sum_log_v, 4)}, {certainty}; solved in {number(result.solve_ms)} ms; "
        f"left over: {counts(result.leftover)}"
    )
    return f"{table(('APP', 'WON', 'KEPT', 'LOG V', 'RHO', 'C'), rows)}\n\n{summary}"


def counts(by_node: Mapping[str, int]) -> str:
    """Return GPUs by node as ``m1:4 m2:1``, ``-`` for none; of many nodes the first few."""
    items = sorted(by_node.items())
    shown = [f"{node}:{gpus}" for node, gpus in items[:SHOWN_NODES]]
    rest = items[SHOWN_NODES:]
    if rest:
        shown.append(f"and {sum(gpus for _, gpus in rest)} on {plural(len(rest), 'more node')}")
    return " ".join(shown) or "-"
