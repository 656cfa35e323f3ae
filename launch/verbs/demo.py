"""`demo`: the whole system in about a minute."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from launch.faults import Fault, usage
from launch.surface import answering, emit, note, say, wants_json
from protocol import exit_codes

#: Of the extra `demo`: real training, and a picture of it.
LIBRARIES = ("torch", "matplotlib")


def add(app: typer.Typer) -> None:
    """Add this group's verb to `app`."""
    app.command()(demo)


def demo(
    bus: Annotated[
        str, typer.Option(help="memory (one process), or a broker: amqp://user:password@host/vhost")
    ] = "memory",
    out: Annotated[Path, typer.Option(help="folder for summary.json, timeline.png and the logs")] = Path("out/demo"),
    steps: Annotated[int, typer.Option(min=30, help="mini-batches of one whole training")] = 500,
    step_ms: Annotated[float, typer.Option(min=0.0, help="pace of one mini-batch")] = 25.0,
    lease_s: Annotated[float, typer.Option(min=3.0, help="length of a lease")] = 6.0,
    json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Run six apps of two tenants on two nodes of four simulated GPUs, all training real models."""
    as_json = wants_json(json)
    with answering(as_json=as_json):
        _check_libraries()
        # Not at the top: a short command should not pay for the demo's imports.
        from launch import demo as show

        result = show.run(show.Options(bus=bus, out=out, steps=steps, step_ms=step_ms, lease_s=lease_s, quiet=as_json))
        if as_json:
            emit(result.summary)
        else:
            say(show.final_table(result.summary))
            for line in show.last_words(result.summary, out):
                note(line)
        if result.unfinished:
            raise Fault(
                f"{', '.join(result.unfinished)} did not finish", code=exit_codes.FAILED, next_step=f"ls {out}/logs"
            )


def _check_libraries() -> None:
    """Refuse to begin a demo that could not end.

    Raises
    ------
    Fault
        With the extra that has what is missing.
    """
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise usage(
            f"the demo needs {' and '.join(missing)}, which this environment lacks", "pip install 'gpu-arbiter[demo]'"
        )
