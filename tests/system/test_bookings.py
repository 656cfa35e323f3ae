"""OASiS on a site of real processes and simulated GPUs: one app is refused with its price, another one grows."""

from __future__ import annotations

import sys
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest

from app_agent.core.spec import AppSpec
from arbiter.core.policies.oasis.policy import Oasis
from arbiter.core.policies.oasis.settings import Terms
from arbiter.core.registry import POLICIES, Entry
from arbiter.core.state.model import ArbiterSettings
from launch.client import ending, open_client
from launch.site.site import in_process, local_site, memory_bus, wait_ready
from protocol.exit_codes import DONE
from protocol.messages import Requirements
from protocol.utility_forms import parse
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: Each step is a tenth of a second of GPU time, divided among the GPUs it has; "STEP GPUS" is written down at each.
SCRIPT = """
    import os, sys, time
    from app_agent import session
    session.init(total_steps=int(sys.argv[2]))
    gpus = len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    def save(folder):
        open(folder + "/step", "w").write(str(step + 1))
    def load(folder):
        pass
    told = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for step in range(session.restore(load), int(sys.argv[2])):
        time.sleep(0.1 / gpus)
        os.write(told, f"{step} {gpus}\\n".encode())
        if session.step_end(step, save=save):
            sys.exit(session.EXIT_REQUEUE)
    """
STEP_S, SLOT_S = 0.1, 3.0
#: A GPU costs 1 for a slot, however much of the slot is sold.
PRICE = 3600.0 / SLOT_S
SETTINGS = ArbiterSettings(
    policy="oasis",
    policies={"oasis": {"slot_s": SLOT_S, "slots": 40, "price_min": PRICE, "price_max": PRICE, "margin": 0.2}},
    round_pause_s=0.1,
    beat_s=0.2,
    admission_wait_s=0.5,
)


@pytest.fixture(autouse=True)
def _margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The margin of bookings is no setting of a site."""
    monkeypatch.setitem(POLICIES, "oasis", Entry(Oasis, Terms))


def spec(folder: Path, name: str, gpu_s: float, utility: str, sizes: tuple[int, ...]) -> AppSpec:
    steps = round(gpu_s / STEP_S)
    return AppSpec(
        trials=((sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder / name), str(steps)),),
        cwd=str(folder),
        checkpoint_root=str(folder / "checkpoints"),
        tenant="vision",
        name=name,
        gang=sizes[0],
        sizes=sizes if len(sizes) > 1 else (),
        steps_total=steps,
        step_serial_s=STEP_S,
        restart_s=0.2,
        requirements=Requirements(grace_s=10.0, utility=parse(utility)),
    )


def steps_of(folder: Path, name: str) -> list[tuple[int, int]]:
    """Every step that was made, in order, and on how many GPUs."""
    lines = (folder / name).read_text().splitlines()
    return [(int(step), int(gpus)) for step, gpus in (line.split() for line in lines)]


def test_an_app_is_refused_with_its_price_and_another_runs_on_a_changing_number_of_gpus(tmp_path: Path) -> None:
    site = local_site(tmp_path, nodes=1, gpus="simulated:4", settings=SETTINGS)
    with in_process(site, memory_bus()) as check:
        wait_ready(site, check)
        with open_client(site.socket) as client:
            rigid = client.submit(spec(tmp_path, "rigid", 15.0, "soft:20s,1000", (3,)))
            client.wait(rigid, until="running", timeout_s=PATIENCE_S)
            elastic = client.submit(spec(tmp_path, "elastic", 36.0, "soft:60s,1000", (1, 2, 4)))
            # Ten slots of a GPU and more cost 10 and more, and it is worth 2 however late.
            poor = client.wait(
                client.submit(spec(tmp_path, "poor", 32.0, "none:2", (1,))), until="done", timeout_s=PATIENCE_S
            )
            ends = [client.wait(app, until="done", timeout_s=PATIENCE_S) for app in (rigid, elastic)]
            explained = client.query("explain", elastic)
        check()
    refusal = ending(poor)
    assert "is refused: its 0.008889 GPU-hours cost" in refusal.sentence
    assert "and it is worth 2 when they end" in refusal.sentence
    assert "submit it with a worth of more than" in refusal.sentence
    assert not (tmp_path / "poor").exists(), "it has never run"
    assert [ending(record).code for record in ends] == [DONE, DONE]
    made = steps_of(tmp_path, "elastic")
    assert [step for step, _ in made] == list(range(360)), "no step was lost or made twice"
    sizes = [size for _, size in made]
    assert sizes[0] == 1, "three GPUs were booked"
    assert max(sizes) == 4, "it never grew"
    assert {size for _, size in steps_of(tmp_path, "rigid")} == {3}
    story = "\n".join(line["what"] for line in explained["story"])
    assert "is booked 1 to 4 GPUs in" in story
    assert any(after > before for before, after in pairwise(sizes))
