"""The command line: `gpu-arbiter VERB [SELECTOR] [flags]`.

Verbs live in `launch.verbs`, and `launch.registry` says which in which module; exit codes in `protocol.exit_codes`, the
form of answers in `launch.surface`. Here and there nothing is imported that one verb alone needs.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from launch.registry import Verbs
from launch.surface import answering, check_form, note
from protocol import exit_codes

app = typer.Typer(
    name="gpu-arbiter",
    cls=Verbs,
    help="Share bare-metal GPU hosts fairly for deep-learning training. Try it: gpu-arbiter up, then submit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


#: A shell that wants to complete a command sets this.
COMPLETING = "_GPU_ARBITER_COMPLETE"


def _print_version(wanted: bool) -> None:
    if wanted:
        from launch.verbs.about import version

        version(json=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Take the flags that stand before a verb."""


def main() -> None:
    """Run the command line; a reader or a user who goes away causes no traceback."""
    try:
        if COMPLETING in os.environ:
            from launch.completion import describe_plainly

            describe_plainly()
        with answering(as_json=False):
            check_form()
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
