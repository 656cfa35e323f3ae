"""Arrays and chains with real processes: nothing is lost, and nothing runs twice, over restarts of the daemons."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app_agent.client import App, Client, UsageError, connect
from tests.support.patience import PATIENCE_S
from tests.support.thread_site import ThreadSite, thread_site, until


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadSite]:
    with thread_site(tmp_path_factory.mktemp("chains")) as running:
        yield running


@pytest.fixture
def client(site: ThreadSite, tmp_path: Path) -> Client:
    return connect(site.socket, cwd=tmp_path, max_restarts=0)


def line(word: str, file: str) -> list[str]:
    return ["sh", "-c", f"echo {word} >> {file}"]


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def chained(client: Client, links: int, first: App) -> App:
    """Submit a chain of apps, each after the one before; return its last."""
    app = first
    for number in range(links):
        app = client.submit(line(str(number), "chain"), after=app)
    return app


def ran_through(site: ThreadSite, client: Client, folder: Path, *, jobs: int, links: int) -> None:
    """Run an array and a chain after its end, and start every daemon but the node agent anew meanwhile."""
    array = client.submit(line("$GPU_ARBITER_ARRAY_INDEX", "array"), array=f"1-{jobs}")
    last = chained(client, links, array)
    for part in (1, 2, 3):
        until(lambda: len(lines(folder / "array")) > part * jobs // 4, PATIENCE_S)  # noqa: B023 - waited for here
        site.stop_arbiter()
        if part == 2:
            site.stop_app_agent()
            site.start_app_agent()
        site.start_arbiter()
    assert lines(folder / "chain") == []
    assert array.wait(PATIENCE_S).state == "finished"
    until(lambda: len(lines(folder / "chain")) > links // 2, PATIENCE_S)
    site.stop_arbiter()
    site.start_arbiter()
    assert last.wait(PATIENCE_S).state == "finished"
    assert sorted(map(int, lines(folder / "array"))) == list(range(1, jobs + 1))
    assert lines(folder / "chain") == [str(number) for number in range(links)]


def test_an_array_and_a_chain_run_once_over_restarts(site: ThreadSite, client: Client, tmp_path: Path) -> None:
    ran_through(site, client, tmp_path, jobs=24, links=6)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_an_array_of_a_thousand_and_a_chain_of_fifty_run_once_over_restarts(
    site: ThreadSite, client: Client, tmp_path: Path
) -> None:
    ran_through(site, client, tmp_path, jobs=1000, links=50)


def test_what_can_never_begin_is_cancelled_with_a_reason(client: Client) -> None:
    broken = client.submit(["sh", "-c", "exit 3"])
    after = client.submit(["true"], after=broken)
    anyway = client.submit(["true"], after=f"{broken.id}:any")
    assert after.wait(PATIENCE_S).state == "cancelled"
    assert f"{broken.id} failed, and this app was to begin only after" in after.record().reason
    assert anyway.wait(PATIENCE_S).state == "finished"
    with pytest.raises(UsageError, match=f"{broken.id} failed, so nothing can begin only after it"):
        client.submit(["true"], after=broken)


def test_a_job_beyond_its_time_limit_is_stopped_and_the_others_of_its_array_go_on(client: Client) -> None:
    script = 'test "$GPU_ARBITER_ARRAY_INDEX" = 1 && exec sleep 600; true'
    record = client.submit(["sh", "-c", script], array="0-3%2", time_limit_s=5.0).wait(PATIENCE_S)
    assert (record.state, record.exit_code) == ("failed", 124)
    assert record.reason == f"1 of 4 jobs failed, the first because {record.app}.1 ran for its time limit of 5 s"


def test_a_job_of_an_array_can_be_cancelled_and_read_by_its_index(client: Client) -> None:
    array = client.submit(["sh", "-c", "echo $GPU_ARBITER_ARRAY_INDEX; exec sleep 600"], array="5,9%1")
    until(lambda: bool(array.record().jobs), PATIENCE_S)
    client.app(array.id)  # it is an app as any other
    assert App(client, f"{array.id}.5").cancel() == "cancelled"
    until(lambda: [job.job for job in array.record().jobs] == [f"{array.id}.9"], PATIENCE_S)
    until(lambda: list(App(client, f"{array.id}.9").logs()) == ["9\n"], PATIENCE_S)
    array.cancel()
    assert array.wait(PATIENCE_S).state == "cancelled"
