"""The table of policies: command line, simulator, tests, docs and benchmarks read it. One file each beside this one."""

from __future__ import annotations

from collections.abc import Callable

from arbiter.core.policies.fifo import Fifo
from arbiter.core.policies.themis import Themis
from arbiter.core.policy import Policy, Settings

POLICIES: dict[str, Callable[[Settings], Policy]] = {"themis": Themis, "fifo": Fifo}
