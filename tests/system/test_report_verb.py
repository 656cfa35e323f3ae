"""`report --csv` of a real site: the figures of the arbiter, in a form that other programs read."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.client import Client
from tests.support.cluster import until
from tests.support.page_site import OWNER, PageSite, page_site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageSite]:
    """Two apps of two tenants are over."""
    with page_site(tmp_path_factory.mktemp("report")) as made:
        made.let_programs_end()
        for tenant, gpus in (("vision", 2), ("speech", 1)):
            done = made.type(f"gpu-arbiter submit --tenant {tenant} --gpus {gpus} -- python train.py")
            made.wait_state(done.stdout.split()[-1], "finished")
        with made.client() as client:  # until its GPUs are proven empty an app still has them
            until(lambda: len({figures(client), figures(client)}) == 1, "no app has any more GPU time")
        yield made


def figures(client: Client) -> str:
    """Return the GPU time of each app, as the arbiter tells it now."""
    time.sleep(0.05)
    return json.dumps([[app["id"], app["gpu_seconds"]] for app in client.query("apps")["apps"]])


@pytest.mark.parametrize(
    ("by", "whose"),
    [("tenant", ["tenant"]), ("owner", ["owner"]), ("app", ["app", "owner", "tenant"])],
)
def test_the_values_are_those_of_the_arbiter(site: PageSite, by: str, whose: list[str]) -> None:
    done = site.type(f"gpu-arbiter report --by {by} --csv")
    assert (done.code, done.stderr) == (0, "")
    header, *rows = csv.reader(io.StringIO(done.stdout))
    assert header == ["from", "to", *whose, "gpu_seconds", "draining_gpu_seconds", "lost_gpu_seconds"]
    with site.client() as client:
        told = client.query("report", by)["report"]
        had = {app["id"]: app["gpu_seconds"] for app in client.query("apps")["apps"]}
    # The period ends now, so its edges are of the question; the rest is what was had.
    assert [row[2:] for row in rows] == [[str(entry[column]) for column in header[2:]] for entry in told]
    assert rows
    assert sum(float(row[header.index("gpu_seconds")]) for row in rows) == pytest.approx(sum(had.values()))
    if by == "app":
        assert {row[header.index("app")] for row in rows} == set(had)
        assert {row[header.index("owner")] for row in rows} == {OWNER}
        assert {row[header.index("tenant")] for row in rows} == {"vision", "speech"}


def test_a_period_in_which_nothing_was_had_has_a_header_only(site: PageSite, tmp_path: Path) -> None:
    done = site.type("gpu-arbiter report --from 2020-01-01 --to 2020-01-02 --every hour --csv")
    assert (done.code, done.stdout.count("\n")) == (0, 1)
    assert done.stdout.startswith("from,to,tenant,gpu_seconds,")
