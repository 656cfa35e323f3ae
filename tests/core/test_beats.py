"""On a large site restatements are spread: each beat restates a part, and agents report no more often than is told."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from arbiter.core.arbiter import Configured
from arbiter.core.state import beats
from protocol.core import Send
from protocol.messages import AppReport, Holdings, NodePlan, NodeReport
from tests.support import app_harness, node_harness
from tests.support.arbiter_site import SETTINGS, Effect, Site, sent

#: Two members a beat of 2 s; a turn is never longer than 10 s, a third of the silence of a node.
CROWDED = replace(SETTINGS, beat_s=2.0, restatements_per_s=1.0)


def restated(effects: list[Effect]) -> Counter[str]:
    """Count the restatements to each node and app."""
    said = [each.message for each in effects if isinstance(each, Send) and each.beat]
    return Counter(
        one.node if isinstance(one, NodePlan) else one.app for one in said if isinstance(one, NodePlan | Holdings)
    )


@pytest.mark.parametrize(
    ("members", "parts", "told_s"), [(0, 1, 0.0), (200, 1, 0.0), (201, 2, 4.0), (1000, 5, 10.0), (50_000, 10, 20.0)]
)
def test_the_beat_of_a_member_grows_with_their_number_up_to_a_third_of_the_silence(
    members: int, parts: int, told_s: float
) -> None:
    settings = replace(SETTINGS, beat_s=2.0, node_timeout_s=60.0, app_timeout_s=90.0)
    assert (beats.parts(settings, members), beats.told_s(settings, members)) == (parts, told_s)


def test_each_member_of_a_crowded_site_is_restated_once_in_the_beat_that_it_is_told() -> None:
    site = Site(CROWDED)
    for number in range(5):
        site.node(f"n{number}", 1)
        site.app(f"a{number}-1", demand=1)
    site.wait(4.0)  # all has been said that is new
    heard = [restated(site.wait(2.0)) for _ in range(3)]
    members = {*(f"n{number}" for number in range(5)), *(f"a{number}-1" for number in range(5))}
    assert sum(heard, Counter()) == Counter(dict.fromkeys(members, 1))
    assert all(heard), "some in each"
    again = site.wait(6.0)
    assert {plan.beat_s for plan in sent(again, NodePlan)} == {6.0} == {each.beat_s for each in sent(again, Holdings)}


def test_what_is_new_waits_for_no_part() -> None:
    site = Site(CROWDED)
    for number in range(8):
        site.node(f"n{number}", 1)
    site.wait(4.0)
    (told,) = sent(site.play_round(site.app("ana-1", demand=1) + site.wait(1.0)), Holdings)
    assert told.leases


def test_a_small_site_tells_no_beat() -> None:
    site = Site()
    site.node("n1", 1)
    effects = site.app("ana-1", demand=1) + site.wait(SETTINGS.beat_s)
    assert (
        {plan.beat_s for plan in sent(effects, NodePlan)} == {0.0} == {each.beat_s for each in sent(effects, Holdings)}
    )


def reports(bench: node_harness.Bench, seconds: float) -> list[NodeReport]:
    said = [each.message for each in bench.wait(seconds) if isinstance(each, Send)]
    return [message for message in said if isinstance(message, NodeReport)]


def test_a_node_agent_restates_no_more_often_than_it_is_told_and_says_the_new_at_once() -> None:
    bench = node_harness.Bench()
    bench.plan(beat_s=10.0)
    reports(bench, 10.0)
    told = reports(bench, 40.0)
    assert len(told) == 4
    assert {report.beat_s for report in told} == {10.0}
    bench.plan(node_harness.task_order("ana-1.0-a0", 0), beat_s=10.0)
    report = bench.report()
    assert report is not None
    assert report.tasks
    bench.plan()
    reports(bench, 10.0)
    assert len(reports(bench, 10.0)) == 5, "its own beat is 2 s"


def test_an_app_agent_restates_no_more_often_than_it_is_told() -> None:
    bench = app_harness.Bench()
    bench.holdings(beat_s=10.0)
    assert bench.agent.deadline() == bench.now + 10.0
    assert bench.tick(8.0) == []
    (send,) = bench.tick(2.0)
    assert isinstance(send.message, AppReport)
    assert send.message.beat_s == 10.0


@pytest.mark.parametrize(("claimed_s", "listens_s"), [(0.0, 5.0), (8.0, 16.0), (1e6, 20.0)])
def test_an_arbiter_that_listens_hears_every_agent_of_a_site_whose_beats_are_far_apart(
    claimed_s: float, listens_s: float
) -> None:
    site = Site(None)
    site.handle(Configured(CROWDED, "s-ours", adopt=True))
    began = site.now
    site.lead()
    site.node("n1", 1, site="s-ours", beat_s=claimed_s)
    assert site.arbiter.state.listens_until == began + listens_s
