"""The past, by a copy of a journal: the answers are those that were given then, forwards and backwards."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from arbiter.core.arbiter import Arbiter, Event
from arbiter.ledger import Ledger
from arbiter.past import Past
from arbiter.queries import Queries
from launch import overview
from protocol.journal import JournalError
from protocol.journal.sqlite import SqliteJournal
from protocol.messages import Answer, Measured, Party, Query
from tests.support.arbiter_site import SETTINGS, Site, task, wish


def played() -> Site:
    """ana-1 trains on a GPU and is over; then ben-1 has it."""
    site = Site(SETTINGS)
    site.node("n1", 1)
    site.app("ana-1")
    site.wait(5.0)
    gpus = site.held("ana-1")
    site.app("ana-1", jobs=[wish("ana-1", 0, gpus)])
    ran = Measured(utilisation=0.87, peak_bytes=3 * 2**29)
    site.node("n1", tasks=[task("ana-1", 0, gpus, measured=ran)], used=gpus)
    site.app("ben-1")
    site.wait(10.0)
    site.app("ana-1", state="finished")
    site.node("n1")
    site.app("ben-1")
    site.wait(5.0)
    return site


def asked(arbiter: Arbiter, kind: Any, now: float) -> dict[str, Any]:
    (send,) = Queries(arbiter, Ledger(":memory:")).ask(Party("app", "a"), Query("q", kind), now)
    assert isinstance(send.message, Answer)
    return msgspec.json.decode(send.message.document)  # type: ignore[no-any-return]


def then(site: Site, kind: Any, moment: float) -> dict[str, Any]:
    """The answer of an arbiter that has lived through all events until a moment."""
    arbiter = Arbiter()
    for now, event in site.journal:
        if now <= moment:
            arbiter.handle(event, now)
    return asked(arbiter, kind, moment)


def written(site: Site, folder: Path, *, snapshot_at: int | None = None) -> SqliteJournal[Event]:
    """The journal of a site, with a snapshot after so many events, if any."""
    journal: SqliteJournal[Event] = SqliteJournal.of(folder / "journal.db", Event)
    arbiter = Arbiter()
    for number, (now, event) in enumerate(site.journal):
        journal.append(now, event)
        arbiter.handle(event, now)
        if number == snapshot_at:
            journal.snapshot(arbiter.snapshot())
    journal.commit()
    return journal


@pytest.mark.parametrize("snapshot_at", [None, 6, 12])
def test_each_moment_is_as_it_was_while_the_arbiter_still_writes(tmp_path: Path, snapshot_at: int | None) -> None:
    site = played()
    moments = sorted({now for now, _ in site.journal})
    with closing(written(site, tmp_path, snapshot_at=snapshot_at)), Past(tmp_path) as past:
        told = [moment for moment in moments if moment >= past.begin]
        assert len(told) > 2
        for moment in (*told, *reversed(told), told[-1] - 0.5):
            assert past.go_to(moment) == moment
            for kind in ("apps", "nodes", "shares"):
                assert past.ask(kind) == then(site, kind, moment), (kind, moment)  # type: ignore[arg-type]


def test_the_past_ends_where_the_journal_does_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, copies = played(), tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(copies))
    with closing(written(site, tmp_path)):
        files = (tmp_path / "journal.db", tmp_path / "journal.db-wal")
        before = [file.read_bytes() for file in files]
        with Past(tmp_path / "journal.db") as past:
            assert (past.begin, past.end) == (site.journal[0][0], site.now)
            assert past.go_to(1e12) == past.end
            assert past.go_to(0.0) == past.begin
            assert any(copies.iterdir())
        assert [file.read_bytes() for file in files] == before
    assert not any(copies.iterdir())
    with pytest.raises(JournalError, match="no journal at"):
        Past(tmp_path / "nowhere")


def test_the_screen_shows_holders_use_tenants_and_the_newest_round(tmp_path: Path) -> None:
    site = played()
    with closing(written(site, tmp_path)), Past(tmp_path) as past:
        moment = past.go_to(site.now - 6.0)
        text = overview.screen(overview.gather(past.ask, moment))
        later = overview.screen(overview.gather(past.ask, past.go_to(site.now)))
    head, latest, *rest = text.splitlines()
    assert "policy fifo  1 GPU: 1 leased  2 apps: 1 running, 1 waiting" in head
    assert latest.startswith("round 1, ")
    assert latest.endswith("ana-1 (1)")
    (gpu,) = [line.split() for line in rest if line.startswith("n1 ")]
    assert gpu == ["n1", "GPU-n1-0", "leased", "ana-1", "87%", "1.5", "running"]
    (tenant,) = [line.split() for line in rest if line.startswith("team ")]
    assert tenant[1:3] == ["1", "2"]
    assert "ben-1 (1)" in later.splitlines()[1]
