"""The command line: `gpu-arbiter VERB [SELECTOR] [flags]`.

Verbs live in `launch.verbs`, exit codes in `protocol.exit_codes`, the form of answers in `launch.surface`.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from launch.surface import emit, note, say, wants_json
from launch.verbs import acts, auction, daemons, demo, doctor, inspection, simulation, submission, worlds
from protocol import exit_codes

app = typer.Typer(
    name="gpu-arbiter",
    help="Share bare-metal GPU hosts fairly for deep-learning training. Try it: gpu-arbiter up, then submit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (submission, acts, inspection, doctor, auction, simulation, worlds, daemons, demo):
    group.add(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        version(json=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Flags that stand before a verb."""


@app.command()
def version(json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False) -> None:
    """Print the version."""
    number = installed_version("gpu-arbiter")
    if wants_json(json):
        emit({"schema": "version/v1", "version": number})
    else:
        say(number)


def main() -> None:
    """Run the command line; a reader or a user who goes away causes no traceback."""
    try:
        app()
    except KeyboardInterrupt:
        note("interrupted")
        sys.exit(exit_codes.INTERRUPTED)
    except BrokenPipeError:
        # The reader needs no more (`gpu-arbiter ps | head`); keep Python from complaining when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(exit_codes.DONE)


if __name__ == "__main__":
    main()
