"""The benchmark of scrapes: how it counts series, and that both of its goals are met."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("starlette", reason="the extra `web` is not installed")

from benchmarks.scrapes import SERIES_MAX, series_of
from benchmarks.sites.crowd import Crowd
from protocol.messages import Party
from tests.support import rabbitmq
from tests.support.pages import ROOT

SCRAPE = """# HELP gpu_arbiter_up whether the arbiter answers
gpu_arbiter_up 1.0
gpu_arbiter_wait_seconds_bucket{le="+Inf",tenant="a"} 1.0
gpu_arbiter_wait_seconds_count{tenant="a"} 1.0
gpu_arbiter_wait_seconds_sum{tenant="a"} 7.0
"""


def test_tenants_that_have_not_waited_yet_count_as_if_they_had() -> None:
    assert series_of(SCRAPE, 1) == 4
    assert series_of(SCRAPE, 3) == 4 + 2 * 3


def test_each_owner_is_a_tenant_where_that_is_wanted() -> None:
    one, other = Crowd(1, 1, 20), Crowd(1, 1, 20, own_tenants=True)
    assert {one.tenant_of(owner) for owner in one.owners} == {"team"}
    assert [other.tenant_of(owner) for owner in other.owners] == ["o0", "o1"]
    assert other.tenant_of(Party("app", "o1")) == "o1"


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.broker
@pytest.mark.timeout(600)
@pytest.mark.skipif(not rabbitmq.available(), reason="rabbitmq-server is not installed; see scripts/ensure-rabbitmq.sh")
def test_scrapes_cost_little_and_have_few_series() -> None:
    command = [sys.executable, "benchmarks/scrapes.py", "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert (told["gpus"], told["owners"], told["met"]) == (104, 50, True)
    assert 1000 < told["series"] <= told["series_max"] == SERIES_MAX
