"""How long `ps` takes while another owner floods the arbiter: ``python benchmarks/flood.py [--json] [--reports N]``.

The arbiter is a process of its own on a private RabbitMQ. Ana asks for the list of apps, again as soon as she is
answered, first while nothing else happens and then while Eve sends reports of new apps as fast as the broker takes
them. The ratio is that of the medians; the gate is the longest wait during the flood.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import structlog
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from arbiter.config import ArbiterConfig, written
from arbiter.core.state.model import ArbiterSettings
from launch.site.site import toml
from protocol.bus.amqp import AmqpBus
from protocol.messages import ARBITER, Answer, Party, Query
from tests.support.owner_agent import Agent, enrolled, report
from tests.support.rabbitmq import PrivateRabbitMQ, available

ANA, EVE = Party("app", "ana"), Party("app", "eve")
VHOST = "flood"
GOAL_S = 1.0
REST_QUESTIONS, LAST_QUESTIONS = 200, 20
TIMEOUT_S = 300.0
REPORTS_AT_ONCE = 200


async def ask(ana: Agent, number: int) -> float:
    """Ask for all apps; return how long the answer took, in seconds."""
    asked = time.perf_counter()
    await ana.say(Query(f"q{number}", "apps"))
    answer = await ana.hear(Answer)
    assert isinstance(answer, Answer)
    assert answer.query_id == f"q{number}"
    assert not answer.error
    return time.perf_counter() - asked


async def flood(eve: Agent, reports: int) -> None:
    """Say of so many new apps that they are there."""
    for first in range(2, reports + 2, REPORTS_AT_ONCE):
        await eve.say(*(report(EVE, number) for number in range(first, first + REPORTS_AT_ONCE)))


async def deaf(eve: Agent) -> None:
    """Take what the arbiter says to Eve, who does not read it."""
    while True:
        await (await eve.link.receive()).ack()


async def measure(url_of: dict[Party, str], reports: int) -> dict[str, float]:
    """Return the figures of one run."""
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        ana = await enrolled(AmqpBus(url_of[ANA]), ANA)
        eve = await enrolled(AmqpBus(url_of[EVE]), EVE)
        reader = group.create_task(deaf(eve))
        rest = [await ask(ana, number) for number in range(REST_QUESTIONS)]
        began = time.perf_counter()
        flooding = group.create_task(flood(eve, reports))
        during: list[float] = []
        while not flooding.done():
            during.append(await ask(ana, REST_QUESTIONS + len(during)))
        sent_s = time.perf_counter() - began
        after = [await ask(ana, 10**6 + number) for number in range(LAST_QUESTIONS)]
        reader.cancel()
    during += after
    return {
        "reports": reports,
        "sent_s": sent_s,
        "questions_rest": len(rest),
        "questions_flood": len(during),
        "rest_median_s": statistics.median(rest),
        "rest_max_s": max(rest),
        "flood_median_s": statistics.median(during),
        "flood_max_s": max(during),
        "ratio": statistics.median(during) / statistics.median(rest),
    }


def run(reports: int) -> dict[str, float]:
    """Start a broker and an arbiter, and measure."""
    with (
        tempfile.TemporaryDirectory(prefix="flood-") as name,
        PrivateRabbitMQ([ARBITER, ANA, EVE], [VHOST]) as broker,
    ):
        folder = Path(name)
        settings = replace(ArbiterSettings(), policy="fifo", admission_wait_s=0.5, apps_max=100)
        config = ArbiterConfig(state_dir=str(folder / "arbiter"), bus=broker.url(ARBITER.user, VHOST), arbiter=settings)
        (folder / "arbiter.toml").write_text(toml(written(config)))
        with (folder / "arbiter.jsonl").open("wb") as log:
            command = [sys.executable, "-m", "launch.cli", "arbiter", "--config", str(folder / "arbiter.toml")]
            arbiter = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            return asyncio.run(measure({each: broker.url(each.user, VHOST) for each in (ANA, EVE)}, reports))
        finally:
            arbiter.kill()
            arbiter.wait()


def main() -> int:
    """Print the figures; 1 if an answer took too long."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--reports", type=int, default=20_000)
    wanted = arguments.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    if not available():
        print("RabbitMQ is not installed: run scripts/ensure-rabbitmq.sh", file=sys.stderr)
        return 1
    reports: int = wanted.reports
    figures = run(reports)
    passed = figures["flood_max_s"] <= GOAL_S
    if wanted.json:
        print(json.dumps({"schema": "bench-flood/v1", "goal_s": GOAL_S, "passed": passed, **figures}, indent=1))
    else:
        rest_ms, rest_max_ms = figures["rest_median_s"] * 1e3, figures["rest_max_s"] * 1e3
        flood_ms, flood_max_ms = figures["flood_median_s"] * 1e3, figures["flood_max_s"] * 1e3
        print(f"{reports} reports sent in {figures['sent_s']:.1f} s")
        print(f"an answer at rest: median {rest_ms:.1f} ms, at most {rest_max_ms:.0f} ms")
        print(
            f"during the flood:  median {flood_ms:.1f} ms, at most {flood_max_ms:.0f} ms (gate: {GOAL_S * 1e3:.0f} ms)"
        )
        print(f"ratio of the medians: {figures['ratio']:.1f}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
