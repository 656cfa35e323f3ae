"""The shipped examples show every field there is, as their first lines and error messages say."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from msgspec import Struct

from app_agent.config import AppConfig
from app_agent.gateway import GatewayConfig
from arbiter.config import FIELDS, ArbiterConfig, parse
from arbiter.core.registry import tables
from arbiter.core.state.model import ArbiterSettings
from launch.site.site import as_toml
from node_agent.config import NodeConfig
from node_agent.launcher.config import LauncherConfig

SYSTEMD = Path(__file__).resolve().parents[2] / "launch/site/systemd"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("arbiter.toml", ArbiterConfig),
        ("node.toml", NodeConfig),
        ("app.toml", AppConfig),
        ("launcher.toml", LauncherConfig),
        ("gateway.toml", GatewayConfig),
    ],
)
def test_every_field_of_a_configuration_is_named_in_its_file(name: str, kind: type[Struct]) -> None:
    text = (SYSTEMD / name).read_text()
    remarks = " ".join(re.findall(r"#(.*)", text))
    assert list(_missing(kind, tomllib.loads(text), remarks)) == []


def _missing(kind: type[Struct], table: dict[str, Any], remarks: str) -> Iterator[str]:
    """Yield the fields that are neither set in `table` nor written as ``field = `` or as a table in a remark."""
    for field, of in get_type_hints(kind).items():
        if kind is ArbiterSettings and field not in FIELDS:
            continue  # no file sets it
        if field not in table and not re.search(rf"\b{field}( = |\]\])", remarks):
            yield field
        for inner in (of, *get_args(of)):
            if isinstance(inner, type) and issubclass(inner, Struct):
                within = table.get(field, {})
                yield from (f"{field}.{each}" for each in _missing(inner, within, remarks))


def test_a_field_that_no_file_names_is_found() -> None:
    missing = set(_missing(ArbiterConfig, {"arbiter": {"lease_s": 600.0}}, "[[arbiter.tenants]] weight = 2.0"))
    assert {"state_dir", "arbiter.policy", "arbiter.interactive_s", "arbiter.tenants.quota"} <= missing
    assert not {"arbiter", "arbiter.lease_s", "arbiter.tenants", "arbiter.tenants.weight"} & missing


def test_what_one_daemon_writes_for_another_reads_as_it_was() -> None:
    settings = ArbiterSettings(lease_s=300.0, policies=tables("las", threshold_gpu_s=20.0))
    given = ArbiterConfig(arbiter=settings, state_dir="state")
    assert parse(tomllib.loads(as_toml(given)), "a file").arbiter == settings
