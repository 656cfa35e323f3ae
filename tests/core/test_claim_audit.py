"""What apps claim beside what was measured of their tasks: honest ones are not mentioned, others once per change."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from arbiter.core.effects import RoundRecord
from arbiter.core.state.model import Claim
from arbiter.ledger import Ledger
from arbiter.queries import Queries
from launch.views import explanation
from protocol.messages import Measured, Offer, Party, Probe, Query, TaskStatus
from tests.support.arbiter_site import SETTINGS, Effect, Site, gpu_id, records, sent, task, wish, with_auction

ONE, TWO = gpu_id("n1", 0), gpu_id("n1", 1)
#: 2 s a mini-batch, 100 of 1000 done: 900 left, 1800 s.
MEASURED = Measured(source="steps", confidence=1.0)
LEFT_S = 1800.0


def running(app: str = "ana-1", index: int = 0, gpu: str = ONE, **more: object) -> TaskStatus:
    known: dict[str, object] = {"step": 99, "start_step": -1, "total_steps": 1000, "step_s": 2.0, "measured": MEASURED}
    return task(app, index, [gpu], **(known | more))  # type: ignore[arg-type]


class Court:
    """`ana-1` runs on one GPU of two; a round is held whenever another app comes. Every round is in the ledger."""

    def __init__(self, policy: str = "srtf") -> None:
        self.site = Site(replace(SETTINGS, policy=policy))
        self.ledger = Ledger(":memory:")
        self.site.node("n1", 2)
        self.site.play_round(self.site.app("ana-1") + self.site.wait(0))
        assert self.site.held("ana-1") == [ONE]
        self.others = 0

    def round(
        self, *tasks: TaskStatus, left_gpu_s: float = LEFT_S, left_s: float | None = None, **more: object
    ) -> tuple[Claim, ...]:
        """Hold a round after these reports; return the claims in its record."""
        site = self.site
        jobs = [wish("ana-1", index, each.gpus) for index, each in enumerate(tasks)]
        site.wait(2.0)
        site.node("n1", tasks=tasks, used=[gpu for each in tasks for gpu in each.gpus])
        effects = site.app("ana-1", jobs=jobs, left_gpu_s=left_gpu_s, left_s=left_s, **more)  # type: ignore[arg-type]
        self.others += 1
        effects += site.app(f"bob-{self.others}") + site.wait(0.0)
        (record,) = records(effects)
        self._write(effects)
        return record.claims

    def _write(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, RoundRecord):
                self.ledger.write(effect)
                self.ledger.write(effect)


def test_an_honest_app_is_not_mentioned() -> None:
    court = Court()
    assert court.round(running(), left_gpu_s=LEFT_S, left_s=LEFT_S) == ()
    assert court.round(running(), left_gpu_s=LEFT_S * 1.2, left_s=LEFT_S / 1.2) == ()
    assert "claims" not in court.site.told("ana-1")


def test_twice_what_was_measured_is_recorded_with_its_ratio() -> None:
    (claim,) = Court().round(running(), left_gpu_s=2 * LEFT_S)
    assert (claim.app, claim.what, claim.source, claim.confidence) == ("ana-1", "left_gpu_s", "steps", 1.0)
    assert (claim.claimed, claim.measured, claim.ratio) == (2 * LEFT_S, LEFT_S, 2.0)


def test_of_one_job_too_little_is_off_as_well_and_so_is_the_run_time() -> None:
    found = Court().round(running(), left_gpu_s=LEFT_S / 2, left_s=3 * LEFT_S)
    assert [(claim.what, claim.ratio) for claim in found] == [("left_gpu_s", 0.5), ("left_s", 3.0)]


@pytest.mark.parametrize(
    "doubtful",
    [
        {"step": 28},  # the noise of its start
        {"start_step": 70},
        {"total_steps": 0},
        {"total_steps": 129},
        {"step_s": 0.0},
        {"phase": "suspending"},
        {"measured": Measured(share=0.5)},
        {"measured": Measured(packed_with=("bob-1.0-a0",))},  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_compared_is_left_out(doubtful: dict[str, object]) -> None:
    court = Court()
    assert court.round(running(**doubtful), left_gpu_s=50 * LEFT_S) == ()
    assert court.round(running(), left_gpu_s=50 * LEFT_S)


def test_a_difference_that_messages_explain_is_left_out() -> None:
    quick = {"step_s": 0.01}  # 9 s left
    assert Court().round(running(**quick), left_gpu_s=18.0) == ()
    assert Court().round(running(**quick), left_gpu_s=20.0)


@pytest.mark.parametrize("late", ["node", "app"])
def test_time_that_has_passed_since_either_reported_is_counted(late: str) -> None:
    court = Court()
    site = court.site
    jobs = [wish("ana-1", 0, [ONE])]
    court.round(running(total_steps=145), left_gpu_s=90.0)  # 45 steps of 2 s
    for passed_s in (12, 24):
        site.wait(12.0)
        if late == "node":
            site.app("ana-1", jobs=jobs, left_gpu_s=90.0 - passed_s)
        else:
            site.node("n1", tasks=[running(step=99 + passed_s // 2, total_steps=145)], used=[ONE])
    (record,) = records(site.app("bob-9") + site.wait(3.0))
    assert record.claims == ()


def test_of_several_jobs_only_too_much_is_off_and_all_must_run() -> None:
    court = Court()
    court.site.app("ana-1", demand=2)
    court.site.wait(2.0)
    assert court.site.held("ana-1") == [ONE, TWO]
    court.site.app("ana-1", demand=2)
    both = [running(), running(index=1, gpu=TWO)]

    def claims(*tasks: TaskStatus, left_gpu_s: float) -> list[float]:
        site = court.site
        jobs = [wish("ana-1", index, [gpu]) for index, gpu in enumerate((ONE, TWO))]
        site.node("n1", tasks=tasks, used=[ONE, TWO])
        site.app("ana-1", demand=2, jobs=jobs, left_gpu_s=left_gpu_s, left_s=9 * LEFT_S)
        court.others += 1
        effects = site.app(f"bob-{court.others}") + site.wait(2.0)
        return [round(claim.ratio, 1) for record in records(effects) for claim in record.claims]

    assert claims(*both, left_gpu_s=2 * LEFT_S) == []
    assert claims(*both, left_gpu_s=LEFT_S) == []
    assert claims(*both, left_gpu_s=4 * LEFT_S) == [2.0]
    assert claims(both[0], replace(both[1], step=3), left_gpu_s=4 * LEFT_S) == []


def test_a_story_says_it_once_per_change_and_when_it_is_over() -> None:
    court = Court()
    for claimed in (2.0, 2.0, 2.1, 4.0, 4.0, 1.0, 1.0):
        court.round(running(), left_gpu_s=claimed * LEFT_S)
    told = [line for line in court.site.told("ana-1").splitlines() if "left_gpu_s" in line]
    assert told == [
        "claims left_gpu_s 3600, which is 2 times what was measured of its tasks (1800, from steps, confidence 1)",
        "claims left_gpu_s 7200, which is 4 times what was measured of its tasks (1800, from steps, confidence 1)",
        "its left_gpu_s agrees with what was measured of its tasks again",
    ]
    assert court.site.replayed() == court.site.arbiter.snapshot()


def test_the_ledger_keeps_the_claims_of_every_round() -> None:
    court = Court()
    court.round(running(), left_gpu_s=2 * LEFT_S)
    court.round(running())
    court.round(running(), left_gpu_s=3 * LEFT_S)
    kept = court.ledger.claims(limit=10)
    assert [(number, claim.ratio) for number, claim in kept] == [(kept[0][0], 2.0), (kept[0][0] + 2, 3.0)]
    assert [claim.ratio for _, claim in court.ledger.claims(limit=1)] == [3.0]
    assert [claim.ratio for record in court.ledger.rounds(limit=9) for claim in record.claims] == [3.0, 2.0]


def test_explain_says_it() -> None:
    court = Court()
    court.round(running(), left_gpu_s=2 * LEFT_S)
    queries = Queries(court.site.arbiter, court.ledger)
    (send,) = queries.ask(Party("app", "ana"), Query("q", "explain", "ana-1"), court.site.now)
    document = msgspec.json.decode(send.message.document)  # type: ignore[union-attr]
    assert [(claim["what"], claim["ratio"]) for claim in document["claims"]] == [("left_gpu_s", 2.0)]
    assert "It claims left_gpu_s 3600, which is 2 times what was measured" in explanation(document, court.site.now)


@with_auction
@pytest.mark.parametrize(("lie", "found"), [(1.0, []), (2.0, ["rho", "rho_none"])])
def test_the_answer_to_a_probe_and_what_a_bid_says_of_nothing_are_compared_too(lie: float, found: list[str]) -> None:
    site = Court("themis").site
    site.wait(2.0)
    site.node("n1", tasks=[running()], used=[ONE])
    jobs = [wish("ana-1", 0, [ONE])]
    (probe,) = sent(
        site.app("ana-1", jobs=jobs, demand=2, left_gpu_s=LEFT_S, left_s=LEFT_S / 2) + site.wait(1.0), Probe
    )
    rho = (probe.elapsed_s + LEFT_S) / (2000.0 / 2)  # alone it would have both GPUs
    assert sent(site.rho("ana-1", lie * rho), Offer)
    (record,) = records(site.bid("ana-1", {2: 0.9}, none=lie * rho))
    assert [claim.what for claim in record.claims] == found
    assert all(claim.ratio == pytest.approx(lie, rel=0.01) for claim in record.claims)
