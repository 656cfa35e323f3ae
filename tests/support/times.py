"""The processor time and the wall time of each test file, summed for the table of `make check`."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

#: The environment names the file that gets a line "file processor_s wall_s" for each test file.
TIMES_FILE = "GPU_ARBITER_TEST_TIMES"
FILES_SHOWN = 8
PROPERTY = "processor_s"


class TestTimes:
    """A pytest plugin. A worker of xdist measures; the process that reports sums."""

    __test__ = False

    def __init__(self) -> None:
        self._processor_s: Counter[str] = Counter()
        self._wall_s: Counter[str] = Counter()
        self._last = used_s()

    def pytest_collection_finish(self) -> None:
        self._last = used_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> object:
        report: pytest.TestReport = yield
        now = used_s()
        report.user_properties.append((PROPERTY, now - self._last))
        self._last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._processor_s[file] += sum(float(str(value)) for name, value in report.user_properties if name == PROPERTY)
        self._wall_s[file] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        rows = [(file, self._processor_s[file], self._wall_s[file]) for file in self._wall_s]
        if rows and os.environ.get(TIMES_FILE) and not hasattr(config, "workerinput"):
            with Path(os.environ[TIMES_FILE]).open("a") as out:
                out.writelines(f"{file} {processor_s:.2f} {wall_s:.2f}\n" for file, processor_s, wall_s in rows)
            terminalreporter.section("processor time and wall time by file")
            for file, processor_s, wall_s in sorted(rows, key=lambda row: -row[1])[:FILES_SHOWN]:
                terminalreporter.line(f"{processor_s:7.1f} s {wall_s:7.1f} s  {file}")


def used_s() -> float:
    """Return what this process and its ended children have used of a processor."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
