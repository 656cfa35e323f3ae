from __future__ import annotations

import signal

import pytest

from tests.support.auctions import compile_all
from tests.support.effort import choose_examples
from tests.support.times import TestTimes

choose_examples()


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts its background jobs with this signal ignored, and what they start would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(TestTimes())


@pytest.fixture(scope="session")
def compiled_auction() -> None:
    """The auction's loops are compiled by now, or read from the cache: see below."""


def pytest_collection_finish(session: pytest.Session) -> None:
    # The first compilation takes minutes on a busy machine and would count against one test's time limit.
    if not session.config.option.collectonly and any("compiled_auction" in item.fixturenames for item in session.items):
        compile_all()
