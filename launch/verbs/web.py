"""`web`: the site in a browser, from a process of its own."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from launch.faults import Fault, address_of, usage
from launch.surface import answering, note
from launch.web import PORT, check_libraries

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def add(app: typer.Typer) -> None:
    """Add this group's verb to `app`."""
    app.command()(web)


def web(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes one that is free")] = PORT,
    host: Annotated[
        str, typer.Option(help="the address to listen on; any but a loopback one needs a token")
    ] = "127.0.0.1",
    ledger: Annotated[
        Path | None, typer.Option(help="the arbiter's ledger.db  [default: that of `gpu-arbiter up`]")
    ] = None,
    journal_file: Annotated[
        Path | None,
        typer.Option(help="instead of --ledger: the arbiter's journal_file, if its ledger is in a database"),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="a file with the token, for your user only  [default: a new one at each start]")
    ] = None,
    traces: Annotated[
        str,
        typer.Option(
            metavar="URL", help="send a trace of each round to this collector, such as http://HOST:4318/v1/traces"
        ),
    ] = "",
) -> None:
    """Show the site in a browser: GPUs, timeline, fairness, rounds, apps and reports. Ctrl-C ends it.

    gpu-arbiter web --ledger /var/lib/gpu-arbiter/ledger.db

    It reads the ledger and asks the arbiter as your user; it changes nothing, and shows no output of tasks.
    """
    with answering(as_json=False):
        if traces and not traces.startswith(("http://", "https://")):
            raise usage(f"--traces is {traces!r}", "name an address such as http://localhost:4318/v1/traces")
        check_libraries(traces=bool(traces))
        token = "" if host in LOOPBACK and token_file is None else _token(token_file)
        from launch.site.site import user_folder
        from launch.web.process import serve_pages

        if ledger is not None and journal_file is not None:
            raise usage("--ledger and --journal-file are two places of one ledger", "name the one where it is")
        default = user_folder("XDG_STATE_HOME", ".local/state") / "gpu-arbiter" / "up" / "arbiter" / "ledger.db"
        place = ledger or default if journal_file is None else address_of(journal_file)
        shown = "" if token_file is None else f"; the token is in {token_file}"
        serve_pages(place, host=host, port=port, token=token, shown=shown, traces=traces, told=note)


def _token(file: Path | None) -> str:
    """Return the token of a file, or a new one.

    Raises
    ------
    Fault
        If the file cannot be read, is too short, or is open to other users.
    """
    if file is None:
        return secrets.token_urlsafe(24)
    try:
        text, mode = file.read_text(encoding="utf-8").strip(), file.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise Fault(f"cannot read the token of --token-file {file}: {error}") from None
    if mode & 0o077:
        raise Fault(f"other users may read --token-file {file}", next_step=f"chmod 600 {file}")
    if len(text) < 16 or not text.isascii() or any(each.isspace() for each in text):
        raise usage(f"--token-file {file} has no token: one word of 16 characters or more", "openssl rand -hex 16")
    return text
