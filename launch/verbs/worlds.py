"""`worlds`: many small sites full of faults, one for each seed, judged at every instant."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch import completion
from launch.faults import Fault
from launch.surface import answering, emit, note, plural, say, wants_json
from protocol import exit_codes

# Not at the top, here and below: the world and its libraries take longer to import than most commands to run.
if TYPE_CHECKING:
    from simulator.faults.runs import WorldVerdict

#: Seconds before the first line of progress, and between two lines: on a terminal, and in a file.
PATIENCE_S = 2.0
PATIENCE_FILE_S = 60.0
COUNT_MAX = 1_000_000


def add(app: typer.Typer) -> None:
    """Add this group's verb to `app`."""
    app.command()(worlds)


def worlds(
    count: Annotated[int, typer.Option(min=1, max=COUNT_MAX, help="how many worlds")] = 200,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="of the first; each next one has the next")] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="processes (0: one for each core)")] = 0,
    policy: Annotated[
        str,
        typer.Option(autocompletion=completion.policy, help="the only policy, in place of one or more drawn for each"),
    ] = "",
    standby: Annotated[
        bool, typer.Option("--standby", help="only worlds in which a second arbiter takes over, from that seed on")
    ] = False,
    stale: Annotated[
        bool, typer.Option("--stale", help="only worlds in which the arbiter's journal loses its end; likewise")
    ] = False,
    trace: Annotated[bool, typer.Option("--trace", help="print every event, too")] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Run worlds full of faults: safety must hold at every instant, and every app that can finish must.

    A world that fails is printed with its last events and the command that repeats it. docs/fault-worlds.md lists the
    faults and the checks.
    """
    as_json = wants_json(json)
    with answering(as_json=as_json):
        from arbiter.core.registry import POLICIES
        from simulator.faults.runs import cores, report, run_world, run_worlds, summary
        from simulator.faults.scenario import has_stale_journal, has_standby

        if policy and policy not in POLICIES:
            known = ", ".join(sorted(POLICIES))
            raise Fault(
                f"there is no policy {policy}", code=exit_codes.USAGE, next_step=f"--policy with one of {known}"
            )
        drawn: Iterator[int] = itertools.count(seed)
        for wished, has in ((standby, has_standby), (stale, has_stale_journal)):
            drawn = filter(has, drawn) if wished else drawn
        seeds = list(itertools.islice(drawn, count))
        progress = _Progress(count)
        verdicts: list[WorldVerdict] = []
        tell = note if as_json else say
        traced = (run_world(each, policy=policy, tell=tell) for each in seeds)
        for verdict in traced if trace else run_worlds(seeds, jobs=min(jobs or cores(), count), policy=policy):
            verdicts.append(verdict)
            progress.show(verdicts)
            if verdict.wrong and not as_json:
                say(report(verdict))
        figures = summary(verdicts)
        if as_json:
            emit(_document(seed, figures, verdicts))
        else:
            say(_in_words(figures))
        if figures["failed"]:
            failed = len(figures["failed"])
            step = failed_of(verdicts)[0].command
            raise Fault(f"{plural(failed, 'world')} of {count} failed", code=exit_codes.FAILED, next_step=step)


def failed_of(verdicts: list[WorldVerdict]) -> list[WorldVerdict]:
    """Return the verdicts on worlds that failed."""
    return [verdict for verdict in verdicts if verdict.wrong]


def _document(seed: int, figures: dict[str, Any], verdicts: list[WorldVerdict]) -> dict[str, Any]:
    failures = [
        {
            "seed": verdict.seed,
            "wrong": verdict.wrong,
            "objects": list(verdict.objects),
            "at_s": verdict.at,
            "command": verdict.command,
            "lines": list(verdict.lines),
        }
        for verdict in failed_of(verdicts)
    ]
    waiting = {str(verdict.seed): verdict.waiting for verdict in verdicts if verdict.waiting}
    return {"schema": "worlds/v1", "seed": seed, "summary": figures, "failures": failures, "waiting": waiting}


def _in_words(figures: dict[str, Any]) -> str:
    apps = ", ".join(f"{count} {state}" for state, count in figures["apps"].items())
    used = figures["used"]
    return (
        f"{figures['passed']} of {plural(figures['worlds'], 'world')} passed: {figures['events']} events, "
        f"{figures['restarts']} restarts, {figures['deposed']} former leaders refused; apps: {apps}; "
        f"{figures['waiting']} could not finish, all for a known reason\n"
        f"after the faults they needed at most {used['seconds']:.0%} of the time that they may take, "
        f"{used['messages']:.0%} of the messages, {used['rounds']:.0%} of the rounds; {figures['cpu_s']:.1f} s CPU"
    )


class _Progress:
    """Tells how far a run is: a person at a terminal, and the reader of a file."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._patience_s = PATIENCE_S if sys.stderr.isatty() else PATIENCE_FILE_S
        self._next = time.monotonic() + self._patience_s

    def show(self, verdicts: list[WorldVerdict]) -> None:
        """Write a line now and then."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._patience_s
            note(f"{len(verdicts)} of {plural(self._total, 'world')}, {len(failed_of(verdicts))} failed")
