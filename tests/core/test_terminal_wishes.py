"""What a user may ask of a terminal, and what an administrator may set."""

from __future__ import annotations

import pytest

from app_agent.core.spec import AppSpec, mistake
from node_agent import config
from protocol.config import ConfigError

SPEC = {"trials": (("bash",),), "cwd": "/home/ana", "checkpoint_root": "/ckpt", "tenant": "vision", "pty": True}
NODE = {"node": "n1", "gpus": "simulated:1"}


def spec_of(**changes: object) -> AppSpec:
    return AppSpec(**(SPEC | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"array": (0, 1)}, "an app with a terminal (pty) has one job on one node"),
        ({"trials": (("a",), ("b",)), "metric": "loss", "steps_total": 9}, "an app with a terminal (pty) has one job"),
        ({"pty": False, "idle_s": 60.0}, "idle_s is 60, but the program has no terminal"),
    ],
)
def test_a_terminal_is_of_one_job_and_idle_time_of_a_terminal(changes: dict[str, object], said: str) -> None:
    assert mistake(spec_of(idle_s=60.0)) is None
    assert said in str(mistake(spec_of(**changes)))


@pytest.mark.parametrize("place", ["7073", "gpu-1", "gpu-1:", "::1:7073:", ":7073", "gpu-1:port", "gpu-1:70000"])
def test_a_place_of_terminals_is_an_address_and_a_port(place: str) -> None:
    for good in ("", "0.0.0.0:7073", "127.0.0.1:0", "gpu-1:7073", "[::]:7073"):
        assert config.parse(NODE | {"terminals": good}, source="node.toml").terminals == good
    with pytest.raises(ConfigError, match=r"node\.toml: terminals is .*; write an address and a port"):
        config.parse(NODE | {"terminals": place}, source="node.toml")


def test_idle_time_is_no_less_than_none() -> None:
    with pytest.raises(ConfigError, match="idle_s is -1"):
        config.parse(NODE | {"idle_s": -1.0}, source="node.toml")
