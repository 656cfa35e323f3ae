"""`attach`: come to the terminal of an app."""

from __future__ import annotations

from typing import Annotated

import typer

from launch import completion
from launch.client import open_client
from launch.surface import answering, note


def add(app: typer.Typer) -> None:
    """Add this group's verbs to `app`."""
    app.command()(attach)


def attach(
    app: Annotated[
        str, typer.Argument(metavar="ID", autocompletion=completion.apps_to_wait_for, help="an app's id, or `last`")
    ],
) -> None:
    """Come to the terminal of an app that `run --pty` started; Enter ~ . leaves it again.

    gpu-arbiter attach last

    The program goes on while no person is there. If another command of yours has the terminal, it gives it up. The exit
    code is that of the app, or 0 when you leave.
    """
    with answering(as_json=False):
        from launch import terminals

        terminals.check_terminal()
        with open_client() as client:
            path, app = client.path, client.resolve(app)
            if any(record.app == app and not record.over and record.state != "running" for record in client.apps()):
                note(f"{app} has no GPUs yet; its terminal follows (Ctrl-C ends the wait)")
        raise SystemExit(terminals.stay(path, app))
