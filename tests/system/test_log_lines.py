"""What a daemon writes to its log when the broker goes away: lines that a program can read, and no tracebacks."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from app_agent.config import AppConfig
from arbiter.config import ArbiterConfig
from launch import log_lines
from protocol.bus import ConnectionLost
from protocol.bus.amqp import AmqpBus
from protocol.messages import ARBITER, Party
from tests.support.cluster import DaemonProcess, until
from tests.support.ports import free_port
from tests.support.rabbitmq import PrivateRabbitMQ

ADA = Party("app", "ada")


@pytest.fixture
def broker() -> Iterator[PrivateRabbitMQ]:
    with PrivateRabbitMQ([ARBITER, ADA]) as broker:
        yield broker


@pytest.mark.slow
@pytest.mark.broker
def test_a_lost_broker_is_told_in_lines_and_never_in_tracebacks(broker: PrivateRabbitMQ, tmp_path: Path) -> None:
    of_arbiter = ArbiterConfig(state_dir=str(tmp_path / "arbiter"), bus=broker.url(ARBITER.user))
    of_app = AppConfig(
        owner="ada", state_dir=str(tmp_path / "ada"), socket=str(tmp_path / "ada.sock"), bus=broker.url(ADA.user)
    )
    daemons = [
        DaemonProcess("arbiter", of_arbiter, tmp_path, "arbiter"),
        DaemonProcess("app-agent", of_app, tmp_path, "ada"),
    ]

    def everyone(event: str, times: int) -> bool:
        return all(len(daemon.logged(event)) >= times for daemon in daemons)

    try:
        for daemon in daemons:
            daemon.start()
        until(lambda: everyone("bus.connected", 1), "the daemons are connected")
        broker.kill()
        until(lambda: everyone("bus.unavailable", 4), "the daemons have tried again")
    finally:
        for daemon in daemons:
            daemon.kill()
    for daemon in daemons:
        odd = [line for line in daemon.log.read_text().splitlines() if not _is_json(line)]
        assert odd == []
        told = [json.loads(line) for line in daemon.log.read_text().splitlines()]
        assert [line for line in told if "exception" in line or "library" in line] == []


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


async def test_a_connection_that_could_not_be_made_leaves_nothing_to_clear_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the library clears it away when memory is collected, and warns if that happens in another thread."""
    monkeypatch.setattr(logging.getLogger("aiormq.connection"), "disabled", True)  # pytest keeps what is logged
    last = []
    try:
        await AmqpBus(f"amqp://nobody:x@127.0.0.1:{free_port()}/").connect(ADA)
    except ConnectionLost as lost:
        last.append(lost)
    assert len(last) == 1
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        await asyncio.to_thread(last.clear)
        await asyncio.to_thread(gc.collect)
    assert [str(warning.message) for warning in warned] == []


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where a daemon's log goes, as if it were stderr; afterwards all is as it was."""
    before, handlers = structlog.get_config(), logging.getLogger().handlers[:]
    stream = io.StringIO()
    log_lines.configure(json=True, stream=stream)
    yield stream
    structlog.configure(**before)
    logging.captureWarnings(capture=False)
    logging.getLogger().handlers = handlers


def told(stream: io.StringIO, name: str, error: BaseException | None = None) -> dict[str, Any]:
    """What becomes of a library's record of two lines."""
    logging.getLogger(name).error("what\nmore", exc_info=error)
    (line,) = stream.getvalue().splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_bug_keeps_its_traceback_on_its_one_line(stream: io.StringIO) -> None:
    def broken() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug") as caught:
        broken()
    line = told(stream, "asyncio", caught.value)
    assert (line["event"], line["library"], line["what"], line["level"]) == ("library.said", "asyncio", "what", "error")
    assert "in broken" in line["exception"]


def test_an_error_of_a_connection_that_nothing_waited_for_is_one_sentence(stream: io.StringIO) -> None:
    line = told(stream, "asyncio", ConnectionResetError(104, "reset by peer"))
    assert line["error"] == "ConnectionResetError: [Errno 104] reset by peer"
    assert "exception" not in line


def test_a_broker_that_blocks_its_clients_is_still_told_of(stream: io.StringIO) -> None:
    assert told(stream, "aiormq.connection")["what"] == "what"
