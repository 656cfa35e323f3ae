"""Reports of GPU time: by tenant, owner and app, of periods, from the ledger and from what is held now."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from arbiter.core.effects import AppRecord, LeaseRecord, Record, StretchRecord
from arbiter.ledger import Ledger
from arbiter.queries import Queries
from launch import views
from launch.surface import comma_separated
from protocol import exit_codes
from protocol.journal import JournalError
from protocol.messages import Answer, AppId, GpuId, LeaseId, NodeId, Party, Query, TenantId
from tests.core.test_gpu_time import FIFO
from tests.support.arbiter_site import Site, task, wish

ANA = Party("app", "ana")


class Books:
    """ana-1 has trained on a GPU for 20 s from 1000 s on and left it within 5 s; ben-1 of another tenant trains on."""

    def __init__(self, path: Path | str = ":memory:") -> None:
        self.site, self.ledger = Site(FIFO), Ledger(path)
        site = self.site
        site.app("ana-1")
        site.app("ben-1", tenant=TenantId("other"))
        self.note(site.node("n1", 2) + site.wait(0.0))
        mine, his = site.held("ana-1") + site.held("ben-1")
        site.app("ana-1", jobs=[wish("ana-1", 0, [mine])])
        self.others = [task("ben-1", 0, [his])]
        self.note(site.node("n1", tasks=[task("ana-1", 0, [mine]), *self.others], used=[mine, his]))
        self.note(site.wait(20.0))
        self.note(site.app("ana-1", state="finished"))
        self.note(site.wait(5.0))
        over = task("ana-1", 0, [mine], "exited", outcome="finished")
        self.note(site.node("n1", tasks=[over, *self.others], used=[his]))
        self.note(site.wait(15.0))

    def note(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Record):
                self.ledger.write(effect)

    def answer(self, by: str, *edges: float, **page: int) -> Answer:
        query = Query("q", "report", by, edges=edges, **page)
        (send,) = Queries(self.site.arbiter, self.ledger).ask(ANA, query, self.site.now)
        assert isinstance(send.message, Answer)
        return send.message

    def document(self, by: str, *edges: float, **page: int) -> dict[str, Any]:
        answer = self.answer(by, *edges, **page)
        assert answer.error == ""
        return msgspec.json.decode(answer.document)  # type: ignore[no-any-return]

    def told(self, by: str, *edges: float) -> list[tuple[str, float, float]]:
        rows = self.document(by, *edges)["report"]
        return [(row[by], row["gpu_seconds"], row["draining_gpu_seconds"]) for row in rows]


def test_gpu_time_is_summed_by_tenant_owner_and_app_what_is_held_now_included() -> None:
    books = Books()
    assert books.told("tenant") == [("other", 40.0, 0.0), ("team", 25.0, 5.0)]
    assert books.told("owner") == [("ana", 25.0, 5.0), ("ben", 40.0, 0.0)]
    assert books.told("app") == [("ben-1", 40.0, 0.0), ("ana-1", 25.0, 5.0)]
    (ben, _) = books.document("app")["report"]
    assert (ben["owner"], ben["tenant"]) == ("ben", "other")


def test_a_period_has_its_part_of_leases_that_go_beyond_it_and_periods_add_up() -> None:
    books = Books()
    assert books.told("tenant", 1010.0, 1022.0) == [("other", 12.0, 0.0), ("team", 12.0, 2.0)]
    assert books.told("owner", 900.0, 1021.5, 1035.0) == [
        *(("ana", 21.5, 1.5), ("ben", 21.5, 0.0)),
        *(("ana", 3.5, 3.5), ("ben", 13.5, 0.0)),
    ]
    assert books.told("tenant", 1035.0, 2000.0) == [("other", 5.0, 0.0)], "no longer than now"
    assert books.told("tenant", 500.0, 900.0) == []


def test_a_lease_that_ended_after_the_question_is_not_counted_twice() -> None:
    books = Books()
    query = Query("q", "report", "tenant")
    report = Queries(books.site.arbiter, books.ledger).report(ANA, query, books.site.now)
    books.note(books.site.app("ben-1", state="finished"))
    books.note(books.site.wait(3.0))
    books.note(books.site.node("n1", tasks=[], used=[]))
    books.note(books.site.wait(3.0))
    rows = report.rows(books.ledger)  # type: ignore[union-attr]
    assert {row.tenant: row.had_gpu_s for row in rows} == {"other": 40.0, "team": 25.0}


def test_pages_follow_each_other() -> None:
    books = Books()
    first = books.document("app", limit=1)
    second = books.document("app", limit=1, offset=first["next_offset"])
    assert [row["app"] for row in (*first["report"], *second["report"])] == ["ben-1", "ana-1"]
    assert second["next_offset"] is None


@pytest.mark.parametrize(
    ("by", "edges", "names"),
    [("node", (), "'node'"), ("tenant", (5.0,), "two at least"), ("tenant", (9.0, 5.0), "rise")],
)
def test_what_cannot_be_summed_is_refused(by: str, edges: tuple[float, ...], names: str) -> None:
    answer = Books().answer(by, *edges)
    assert names in answer.error
    assert json.loads(answer.document)["code"] == exit_codes.USAGE


def test_the_table_has_the_whole_and_the_sheet_has_gpu_seconds_and_no_formulas() -> None:
    document = Books().document("owner", 900.0, 1021.5, 1035.0)
    table = views.report_table(document)
    assert table.splitlines()[-1].startswith("0.02 GPU-hours in all, ")
    assert [line.split()[2] for line in table.splitlines()[1:5]] == ["ana", "ben", "ana", "ben"]
    header, first, *_ = comma_separated(*views.report_sheet(document)).splitlines()
    assert header == "from,to,owner,gpu_seconds,draining_gpu_seconds,lost_gpu_seconds"
    assert first == "1970-01-01T00:15:00.000Z,1970-01-01T00:17:01.500Z,ana,21.5,1.5,0.0"
    assert comma_separated(("name",), [["=cmd()"], ["-"], [-1.5]]) == "name\n'=cmd()\n-\n-1.5\n"


def test_leases_of_a_ledger_from_before_count_as_one_stretch_each(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with closing(Ledger(path)) as ledger:
        ledger.write(LeaseRecord(LeaseId("l1"), AppId("ana-1"), GpuId("g"), NodeId("n1"), 0.0, 60.0, "over", 45.0))
        ledger.write(AppRecord(AppId("ana-1"), TenantId("team"), 1.0, 0.0, 60.0, 45.0, 40.0, 30.0))
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE stretches")
    with pytest.raises(JournalError, match="older arbiter"):
        Ledger.reader(path)
    for _ in range(2):  # opened twice: once only
        with closing(Ledger(path)) as ledger:
            assert ledger.gpu_time(0.0, 20.0, known=100.0) == [("ana-1", "team", 15.0, 0.0)]


def test_a_reader_reads_beside_the_writer_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    stretch = StretchRecord(LeaseId("l"), AppId("a-1"), TenantId("t"), GpuId("g"), NodeId("n"), 0.0, 9.0, 0.5, True)
    with closing(Ledger(path)) as ledger, closing(Ledger.reader(path)) as reader:
        ledger.write(stretch)
        assert reader.stretches_of(AppId("a-1")) == [stretch]
        with pytest.raises(JournalError, match="readonly"):
            reader.write(stretch)
    with pytest.raises(JournalError, match="no ledger at"):
        Ledger.reader(tmp_path / "other.db")
