"""The view of a run in progress: a live table on a terminal, else a plain line per change."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from launch.surface import Document, duration, number
from launch.views import progress

if TYPE_CHECKING:
    from rich.live import Live

HEADERS = ("APP", "TENANT", "NAME", "STATE", "GPUS", "RHO", "STEP", "GRANTS", "RENEWED", "PREEMPTED", "MOVED")


class Display(Protocol):
    """Shows the state of every app."""

    def show(self, apps: Document, elapsed_s: float) -> None:
        """Show the ``apps/v1`` document."""
        ...


@contextmanager
def display(*, quiet: bool) -> Iterator[Display]:
    """Yield the display that suits stderr: stdout belongs to the result."""
    if quiet:
        yield _Silence()
    elif sys.stderr.isatty():
        with _table() as table:
            yield table
    else:
        yield _Lines()


def row(app: Document) -> tuple[str, ...]:
    """Return an app's line of the table."""
    return (
        str(app["id"]),
        str(app["tenant"]),
        str(app["name"]),
        str(app["state"]),
        f"{len(app['gpus'])}/{app['want']}",
        number(app["rho"]),
        progress(app),
        str(app["grants"]),
        str(app["renewals"]),
        str(app["preemptions"]),
        str(app["migrations"]),
    )


class _Silence:
    def show(self, apps: Document, elapsed_s: float) -> None:
        """Show nothing: the reader is a program."""


class _Lines:
    """One line per app whose state or number of GPUs changed."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, int]] = {}

    def show(self, apps: Document, elapsed_s: float) -> None:
        """Print a line for each app that changed."""
        for app in apps["apps"]:
            now = (str(app["state"]), len(app["gpus"]))
            if self._seen.get(app["id"]) != now:
                self._seen[app["id"]] = now
                sys.stderr.write(
                    f"{elapsed_s:6.1f} s  {app['id']:<8} {app['name']:<12} {now[0]:<10} {now[1]} GPUs"
                    f"  rho {number(app['rho'])}  step {progress(app)}\n"
                )
        sys.stderr.flush()


@contextmanager
def _table() -> Iterator[Display]:
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True, no_color=True), auto_refresh=False) as live:
        yield _Table(live)


class _Table:
    """The whole table, drawn over the last one."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, apps: Document, elapsed_s: float) -> None:
        """Draw it."""
        from rich.table import Table

        table = Table(title=f"after {duration(elapsed_s)}", box=None, header_style="")
        for header in HEADERS:
            table.add_column(header)
        for app in apps["apps"]:
            table.add_row(*row(app))
        self._live.update(table, refresh=True)
