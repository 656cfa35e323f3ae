"""`sbatch`: a batch script of Slurm, with its lines `#SBATCH`, submitted as it is."""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from launch import sbatch as reading
from launch.client import Client, open_client
from launch.faults import Fault, usage
from launch.slurm_shell import Script, interpreter_of
from launch.surface import answering, emit, note, say, wants_json
from launch.verbs import submission

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FLAGS OF SLURM] [SCRIPT [ARGS]...]", help="the script and its arguments; none: standard input"
    ),
]
Explain = Annotated[bool, typer.Option("--explain", help="submit nothing; print the commands that do the same")]


class Flags(TyperCommand):
    """A command that has the flags of Slurm beside its own: in its help, and for shells."""

    #: As they are typed.
    of_slurm = frozenset(f"--{name}" for name in reading.FLAGS) | {
        f"-{each.short}" for each in reading.FLAGS.values() if each.short
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave all words to `launch.sbatch`, which reads them as Slurm does."""
        return super().parse_args(ctx, args if args[:1] in (["-h"], ["--help"]) else ["--", *args])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the flags of Slurm below our own."""
        super().format_options(ctx, formatter)
        with formatter.section("Flags of Slurm, here and in lines #SBATCH"):
            formatter.write_dl([(each.spelled, each.does) for each in reading.FLAGS.values() if each.fate == "used"])

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete a flag."""
        from typer.core import CompletionItem  # type: ignore[attr-defined]

        names = {f"--{each.name}": each.does for each in reading.FLAGS.values() if each.fate == "used"}
        ours = super().shell_complete(ctx, incomplete)
        theirs = [CompletionItem(name, help=does) for name, does in names.items() if name.startswith(incomplete)]
        return [*ours, *theirs] if incomplete.startswith("-") else ours


def add(app: typer.Typer) -> None:
    """Add this group's verbs to `app`."""
    app.command(cls=Flags)(sbatch)


def sbatch(words: Words = None, explain: Explain = False, json: submission.Json = False) -> None:
    """Submit a batch script of Slurm, by its lines #SBATCH.

    gpu-arbiter sbatch --gpus=2 --array=0-9%4 train.sh --epochs 3

    docs/slurm.md says what becomes of each flag, and what the script finds on the node.
    """
    words = ["--explain"] * explain + ["--json"] * json + list(words or ())
    as_json = wants_json(_asks_for_json(words))
    with answering(as_json=as_json):
        batch = batch_of(words)
        if batch.explain:
            _explain(batch, as_json=as_json)
            return
        with open_client() as client:
            _submit(client, batch, as_json=as_json)


def _submit(client: Client, batch: reading.Batch, *, as_json: bool) -> NoReturn:
    """Submit the job, say so as Slurm does, and leave with the exit code."""
    flags = dict.fromkeys(signature(submission.submit).parameters) | dict(batch.submit)
    flags |= {"command": list(batch.command), "cwd": batch.cwd}
    flags["tenant"] = flags["tenant"] or os.environ.get("GPU_ARBITER_TENANT") or None
    app_spec = submission.specified(flags)
    if batch.test_only:
        _tell(batch.notes)
        raise SystemExit(submission.forecast(client, app_spec, checked=True, as_json=as_json))
    app, remarks, code = submission.hand_over(client, app_spec, checked=True)
    notes = [*batch.notes, *remarks]
    if as_json and not batch.parsable:
        submission.tell_submitted(app, notes, as_json=True)
    elif batch.parsable or not batch.quiet:
        say(app if batch.parsable else f"Submitted batch job {app}")
        _tell([] if batch.quiet else notes)
    if batch.hold:
        client.act("hold", app)
    raise SystemExit(submission.outcome(client, app, None) if batch.wait else code)


def _asks_for_json(words: list[str]) -> bool:
    """Whether there is the flag for it; another word of the script may be spelled so."""
    try:
        return "json" in reading.read(words, reading.Refusals())[0]
    except Fault:
        return "--json" in words


def _tell(notes: Sequence[str]) -> None:
    for sentence in notes:
        note(sentence)


def _explain(batch: reading.Batch, *, as_json: bool) -> None:
    native = batch.native(str(Path.cwd()))
    if as_json:
        emit({"schema": "sbatch/v1", "command": native, "notes": batch.notes})
    else:
        say(native)
    _tell(batch.notes)


def batch_of(words: list[str]) -> reading.Batch:
    """Return what the words of the command line, and the script that they name, mean."""
    refusals = reading.Refusals()
    line, rest = reading.read(words, refusals)
    script, arguments = _script(line, rest, refusals)
    of_script = reading.read_script(script.text, script.path, refusals)
    values = reading.overruled(of_script, reading.of_environment(os.environ, refusals), line)
    refusals.check()
    return reading.batch(values, script, arguments, environ=os.environ, here=str(Path.cwd()), user=getpass.getuser())


def _script(line: reading.Values, words: list[str], refusals: reading.Refusals) -> tuple[Script, list[str]]:
    """Return the script that is meant, and its arguments."""
    if "wrap" in line:
        if words:
            raise usage(f"--wrap is a command in place of a script, and there is {words[0]!r}, too", "leave one out")
        return Script("wrap", f"#!/bin/bash\n{line['wrap']}\n", ("bash",), has_file=False), []
    if not words or words[0] == "-":
        if sys.stdin.isatty():
            raise usage("no script was given", "gpu-arbiter sbatch train.sh")
        data, path, name = sys.stdin.buffer.read(), "sbatch", "the script on standard input"
    else:
        path = os.path.abspath(words[0])  # noqa: PTH100 - resolve() would follow the links of this host only
        name = words[0]
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            refusals.check()  # a flag that is not known may have taken a value, which then seems to be the script
            raise usage(f"the script {name} cannot be read: {error.strerror}", "give a file on this host") from None
    text = data.decode(errors="replace")
    has_file = bool(words) and words[0] != "-"
    return Script(path, text, interpreter_of(text, name), _is_text(data), has_file), words[1:]


def _is_text(data: bytes) -> bool:
    """Whether a script can be a word of a command."""
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False
