"""The demo's ledger is shown while another site runs on this host, as a new user does it: the two are not mixed."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.thread_site import thread_site

pytest.importorskip("starlette", reason="the extra `web` is not installed")

from launch.web.server import make_app
from launch.web.sources import Sources
from tests.launch.test_web import Browser


def test_the_ledger_of_a_real_site_is_shown_with_no_other_sites_present(tmp_path: Path) -> None:
    with ExitStack() as stack:
        one, other = (stack.enter_context(thread_site(tmp_path / name)) for name in ("one", "other"))
        ledgers = [Path(site.site.arbiter.state_dir, "ledger.db") for site in (one, other)]
        for ledger, site in zip(ledgers, (one, other), strict=True):
            assert "2 GPUs" in Browser(make_app(Sources(ledger, site.socket))).read("/").text
        mixed = Browser(make_app(Sources(ledgers[0], other.socket)))
        page = mixed.read("/")
        sites = re.findall(
            r"is of site (s-\w+), and the ledger of site (s-\w+)\. This page shows the ledger\.", page.text
        )
        assert len(sites) == 1
        assert len(set(sites[0])) == 2
        assert not page.tables
        assert "gpu_arbiter_up 0.0" in mixed.get("/metrics")[2]
