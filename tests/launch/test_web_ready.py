"""`/readyz`: the ledger can be read, the arbiter answers, and rounds are decided."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from tests.core.test_reports import Books

pytest.importorskip("starlette", reason="the extra `web` is not installed")

from launch.web.server import OVERDUE_S_MAX, make_app
from tests.launch.test_web import Asked, Browser


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(Books(tmp_path / "ledger.db"), tmp_path / "ledger.db")


def test_a_site_whose_rounds_are_not_decided_is_not_ready(asked: Asked) -> None:
    site = asked.books.site

    def answer() -> tuple[int, str]:
        status, _, body = Browser(make_app(asked)).get("/readyz")
        asked._seen = None  # the site's clock runs faster than the one for which a look is fresh
        return status, body

    assert answer() == (200, "ready\n")
    site.decides_late = True
    asked.books.note(site.app("eve-1") + site.node("n2", 2) + site.wait(1.0))
    site.now += OVERDUE_S_MAX - 5.0
    assert answer() == (200, "ready\n"), "a slow policy may take its time"
    site.now += 10.0
    status, body = answer()
    assert (status, body.partition(" for ")[0]) == (503, "the round that is due has not been decided")
    asked.books.note(site.decide())
    assert answer() == (200, "ready\n")


def test_it_is_not_ready_where_the_alert_on_rounds_begins() -> None:
    rules = (files("launch.web") / "alerts.yml").read_text("utf-8")
    (bound,) = re.findall(r"gpu_arbiter_round_overdue_seconds > (\d+)", rules)
    assert float(bound) == OVERDUE_S_MAX


def test_without_the_arbiter_or_the_ledger_it_is_not_ready(asked: Asked) -> None:
    asked.away = True
    assert Browser(make_app(asked)).get("/readyz")[::2] == (503, "the arbiter does not answer\n")
    Path(asked.place).unlink()
    status, _, body = Browser(make_app(asked)).get("/readyz")
    assert (status, "there is no ledger at" in body) == (503, True)
