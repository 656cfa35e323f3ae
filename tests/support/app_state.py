"""The state folder of an app agent, as a test wants to find it."""

from __future__ import annotations

from pathlib import Path

from app_agent.config import AppConfig
from app_agent.core.host import Event
from protocol.journal.sqlite import SqliteJournal


def with_plain_ids(config: AppConfig) -> AppConfig:
    """Let this app agent give ids without letters, ``ada-1``, ``ada-2``, so that a test can name them beforehand."""
    with SqliteJournal[Event].of(Path(config.state_dir) / f"app-{config.owner}.db", Event) as journal:
        journal.set("tag", "")
    return config
