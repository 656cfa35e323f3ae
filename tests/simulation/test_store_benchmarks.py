"""The benchmarks of failover and of journals: what they make of given samples, and with which code they end."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from msgspec.structs import replace

from benchmarks import failover, journals
from tests.support.failover import Audit, Failover

CLEAN = Audit(0, 100, 0, 0, 0, 0, 0, 2, 0, 0, 5, 50)
DAMAGED = replace(CLEAN, mini_batches_lost=1)


def decided(*seconds: float) -> list[Failover]:
    return [Failover(0.1, each) for each in seconds]


@pytest.mark.parametrize(
    ("kills", "stops", "audit", "met", "stop_met", "passed"),
    [
        (decided(0.2, 3.0), decided(12.0, 15.0), CLEAN, True, True, True),
        (decided(0.2, 3.1), decided(12.0), CLEAN, False, True, False),
        (decided(0.2), decided(12.0, 15.1), CLEAN, True, False, False),
        (decided(*[0.2] * 19, 9.0), [], CLEAN, True, None, True),  # the 95th of a hundred, and not the worst
        ([], decided(12.0), CLEAN, None, True, True),
        (decided(0.2), decided(12.0), DAMAGED, True, True, False),
    ],
)
def test_a_goal_that_is_missed_fails_the_benchmark_of_failover_as_damage_does(
    kills: Sequence[Failover],
    stops: Sequence[Failover],
    audit: Audit,
    met: bool | None,
    stop_met: bool | None,
    passed: bool,
) -> None:
    found = failover.document(kills, stops, audit)
    assert (found["goal_met"], found["stop_goal_met"], found["passed"]) == (met, stop_met, passed)
    assert ("MISSED" in failover.in_words(found)) == (False in (met, stop_met))


@pytest.mark.parametrize(("seconds", "code"), [(0.2, 0), (3.1, 1)])
def test_the_benchmark_of_failover_ends_with_its_verdict(
    seconds: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def nothing(*_args: object, **_options: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(sys, "argv", ["failover.py", "--json"])
    monkeypatch.setattr(failover.postgres, "missing", lambda: "")
    monkeypatch.setattr(failover.rabbitmq, "available", lambda: True)
    for module, name in ((failover.postgres, "PrivatePostgres"), (failover.rabbitmq, "PrivateRabbitMQ")):
        monkeypatch.setattr(module, name, nothing)
    monkeypatch.setattr(failover, "running_pair", nothing)
    monkeypatch.setattr(failover, "run", lambda *_args: (decided(seconds), [], CLEAN))
    assert failover.main() == code


@pytest.mark.parametrize(("round_s", "code"), [(1.3, 0), (1.31, 1)])
def test_the_benchmark_of_journals_ends_with_its_verdict(
    round_s: float, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Server:
        def __init__(self, **_options: object) -> None: ...
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...
        def database(self) -> str:
            return ""

    async def measured(*_args: object) -> dict[str, list[dict[str, Any]]]:
        rest = {"processor_s": 0.5, "commits": 2}
        return {"sqlite": [{"round_s": 1.0, **rest}], "postgres": [{"round_s": round_s, **rest}]}

    monkeypatch.setattr(sys, "argv", ["journals.py", "--agents", "5", "--rounds", "1"])
    monkeypatch.setattr(journals.postgres, "missing", lambda: "")
    monkeypatch.setattr(journals.postgres, "PrivatePostgres", Server)
    monkeypatch.setattr(journals, "measure", measured)
    monkeypatch.setattr(journals, "warm_up", lambda: None)
    monkeypatch.setattr(journals.structlog, "configure", lambda **_options: None)
    assert journals.main() == code
