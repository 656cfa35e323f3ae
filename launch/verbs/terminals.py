"""`attach` and `ssh-proxy`: come to the terminal of an app, and bring ssh there."""

from __future__ import annotations

from typing import Annotated

import typer

from launch import completion
from launch.client import open_client
from launch.faults import usage
from launch.surface import answering, note


def add(app: typer.Typer) -> None:
    """Add this group's verbs to `app`."""
    app.command()(attach)
    app.command("ssh-proxy")(ssh_proxy)


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


def ssh_proxy(
    app: Annotated[
        str,
        typer.Argument(
            metavar="ID", autocompletion=completion.apps_to_wait_for, help="an app's id, or `last`, also with .gpu"
        ),
    ] = "",
    user: Annotated[
        str | None,
        typer.Option("--user", metavar="NAME", help="the user name that ssh will use; without it no name is compared"),
    ] = None,
    config: Annotated[bool, typer.Option("--config", help="print the lines for ssh")] = False,
) -> None:
    """Carry ssh, scp, rsync and editors to an app with a terminal. ssh starts this command itself.

    gpu-arbiter ssh-proxy --config > ~/.ssh/gpu-arbiter.conf

    With a first line `Include gpu-arbiter.conf` in ~/.ssh/config, `ssh ID.gpu` comes to the node, with the folder, the
    variables and the GPUs of the app.
    """
    with answering(as_json=False):
        from launch import ssh_proxy as proxy

        if config:
            typer.echo(proxy.configuration())
            note(
                "keep them in ~/.ssh/gpu-arbiter.conf; next: `Include gpu-arbiter.conf` as first line of ~/.ssh/config"
            )
            return
        host, app = app, app.removesuffix(proxy.SUFFIX)
        if not app:
            raise usage("ssh-proxy needs the id of an app", "gpu-arbiter ssh-proxy --config")
        if not proxy.NAME.fullmatch(app):
            raise usage(f"{app!r} is no id of an app", "gpu-arbiter ps")
        with open_client() as client:
            path, app = client.path, client.resolve(app)
            if any(record.app == app and not record.over and record.state != "running" for record in client.apps()):
                note(f"{app} has no GPUs yet; ssh waits for them (Ctrl-C ends the wait)")
        proxy.stay(path, app, host, user)
