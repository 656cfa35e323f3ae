"""The systemd units and the example configurations beside them are ones that work."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

import app_agent.config
import app_agent.gateway
import arbiter.config
import node_agent.config
import node_agent.launcher.config
from arbiter.core.registry import POLICIES
from node_agent.workers.containment import LEAF

SYSTEMD = Path(__file__).resolve().parents[2] / "launch/site/systemd"
PROGRAM = "/opt/gpu-arbiter/bin/gpu-arbiter"
UNITS = sorted(SYSTEMD.glob("*.service"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed on this machine")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_nothing_wrong_with_a_unit(unit: Path, tmp_path: Path) -> None:
    # The unit as installed, but for the program, which systemd wants to exist; a template is verified as an instance.
    copy = tmp_path / unit.name.replace("@.", "@alice.")
    lines = unit.read_text().replace(PROGRAM, sys.executable).splitlines()
    copy.write_text("\n".join(line for line in lines if not line.startswith(unknown_settings())))
    verdict = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", copy],
        capture_output=True,
        text=True,
        check=False,
    )
    about_us = [line for line in verdict.stderr.splitlines() if unit.name.split("@")[0].split(".")[0] in line]
    assert (verdict.returncode, about_us) == (0, [])


def unknown_settings() -> tuple[str, ...]:
    """What this machine's systemd does not know yet and says so; it ignores them where it runs a unit."""
    version = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True, check=True).stdout
    return ("DelegateSubgroup=", "RestartSteps=", "RestartMaxDelaySec=") if int(version.split()[1]) < 254 else ()


def test_each_unit_starts_the_program_with_a_verb_and_a_configuration() -> None:
    for unit in UNITS:
        (start,) = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
        assert start.startswith(f"ExecStart={PROGRAM} ")
        assert " --config /etc/gpu-arbiter/" in start or unit.name == "gpu-arbiter-web.service"


def test_a_daemon_that_ends_is_started_again_however_often_it_did() -> None:
    for unit in UNITS:
        before, _, service = unit.read_text().partition("\n[Service]\n")
        assert "\nRestart=always\n" in service
        assert "\nStartLimitIntervalSec=0" in before, unit.name


def test_a_daemon_that_cannot_start_is_tried_ever_more_seldom() -> None:
    for unit in UNITS:
        told = dict(line.split("=", 1) for line in unit.read_text().splitlines() if line.startswith("Restart"))
        first = "1" if unit.name == "gpu-arbiter.service" else "5"
        pauses = {"RestartSec": first, "RestartSteps": "8", "RestartMaxDelaySec": "60"}
        assert told == {"Restart": "always", **pauses}, unit.name


def test_a_unit_refuses_calls_that_libraries_try_and_does_not_kill_the_daemon_for_them() -> None:
    bounded = [text for unit in UNITS if "SystemCallFilter=~@privileged @resources\n" in (text := unit.read_text())]
    assert len(bounded) == 4
    assert all("\nSystemCallErrorNumber=EPERM\n" in text for text in bounded)


def test_the_web_page_has_its_ledger_its_app_agent_and_its_token_where_other_units_put_them() -> None:
    lines = (SYSTEMD / "gpu-arbiter-web.service").read_text().splitlines()
    told = {name: value for name, equals, value in (line.partition("=") for line in lines) if equals}
    agent = tomllib.loads((SYSTEMD / "app.toml").read_text().replace("alice", told["User"]))
    assert f"Environment=GPU_ARBITER_URL=unix://{agent['socket']}" in lines
    folder = tomllib.loads((SYSTEMD / "arbiter.toml").read_text())["state_dir"]
    assert f'Environment="WEB_OPTIONS=--ledger {folder}/{arbiter.config.LEDGER}"' in lines
    assert f"User={told['User']}" in (SYSTEMD / "gpu-arbiter.service").read_text().splitlines(), "whose the ledger is"
    name, _, file = told["LoadCredential"].partition(":")
    assert told["ExecStart"].endswith(f"web --token-file /run/credentials/gpu-arbiter-web.service/{name} $WEB_OPTIONS")
    assert file == "/etc/gpu-arbiter/web.token"


def test_a_call_that_a_filter_does_not_let_through_ends_no_daemon() -> None:
    # numpy's OpenBLAS sets a NUMA policy when it is loaded, which @resources has; it goes on where that is refused.
    filtered = [unit for unit in UNITS if "SystemCallFilter=~" in unit.read_text()]
    assert {"gpu-arbiter.service", "gpu-arbiter-web.service"} <= {unit.name for unit in filtered}
    assert [unit.name for unit in filtered if "\nSystemCallErrorNumber=EPERM\n" not in unit.read_text()] == []


def test_a_restarted_node_agent_leaves_training_and_its_sockets_alone() -> None:
    lines = (SYSTEMD / "gpu-arbiter-node-agent.service").read_text().splitlines()
    assert {"KillMode=process", "RuntimeDirectoryPreserve=yes", "OOMPolicy=continue"} <= set(lines)
    # Without the leaf a second start of the agent would fail: its group hands controllers to the tasks' groups.
    assert {"Delegate=yes", f"DelegateSubgroup={LEAF}"} <= set(lines)
    # A private /tmp would vanish under the workers at the first restart.
    assert not [line for line in lines if line.startswith(("PrivateTmp=", "ProtectSystem=", "MemoryDenyWriteExecute="))]


def test_the_example_configurations_are_accepted() -> None:
    assert arbiter.config.load(SYSTEMD / "arbiter.toml").arbiter.policy == "themis"
    assert node_agent.config.load(SYSTEMD / "node.toml").gpus == "nvml"
    assert app_agent.config.load(SYSTEMD / "app.toml").owner == "alice"
    assert node_agent.launcher.config.load(SYSTEMD / "launcher.toml").node_user == "gpu-node"
    assert app_agent.gateway.load(SYSTEMD / "gateway.toml").name == "login1"


@pytest.mark.parametrize(
    ("name", "kind", "chosen"),
    [
        ("arbiter", arbiter.config.ArbiterConfig, {"bus_file"}),
        ("node", node_agent.config.NodeConfig, {"node", "gpus", "bus_file", "runtime_dir"}),
        ("app", app_agent.config.AppConfig, {"owner", "bus_file", "state_dir", "socket"}),
        ("launcher", node_agent.launcher.config.LauncherConfig, set()),
        ("gateway", app_agent.gateway.GatewayConfig, {"name", "bus_file"}),
    ],
)
def test_what_an_example_calls_a_default_is_one(name: str, kind: type[msgspec.Struct], chosen: set[str]) -> None:
    required = {"node": {"node": "n1", "gpus": "nvml"}, "app": {"owner": "alice"}, "gateway": {"name": "login1"}}.get(
        name, {}
    )
    defaults = msgspec.json.decode(msgspec.json.encode(kind(**required)))
    if name == "arbiter":
        tables = {policy: msgspec.to_builtins(entry.settings()) for policy, entry in POLICIES.items()}
        defaults["policy"] = {policy: table for policy, table in tables.items() if table}
    example = tomllib.loads((SYSTEMD / f"{name}.toml").read_text())
    assert _differences(example, defaults) == chosen - required.keys()


def _differences(example: dict[str, object], defaults: dict[str, object]) -> set[str]:
    found = set()
    for field, value in example.items():
        known = defaults[field]
        if isinstance(value, dict) and isinstance(known, dict):
            found |= _differences(value, known)
        elif value != known:
            found.add(field)
    return found
