"""What a person reads who has made a mistake in a TOML file of a daemon, or whose command cannot read what it names."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from launch import cli
from launch.buses import open_bus
from launch.faults import Fault


def run(*words: str | Path) -> Result:
    result = CliRunner().invoke(cli.app, [*map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


CREDENTIAL = "/run/credentials/gpu-arbiter.service/journal-url"


@pytest.mark.parametrize("words", [("backup", "site.gab"), ("journal", "check")])
def test_a_command_that_cannot_read_a_credential_of_the_service_names_the_flag(
    words: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config, address = tmp_path / "arbiter.toml", tmp_path / "journal.url"
    config.write_text(f'journal_file = "{CREDENTIAL}"\n')
    told = run(*words, "--config", config).stderr
    assert "only the service gpu-arbiter.service can read it: give a command --journal-file FILE" in told
    assert "put postgresql://" not in told
    address.write_text("mysql://host/gpu")
    told = run(*words, "--config", config, "--journal-file", address).stderr
    assert f"journal_file {address} has 'mysql://host/gpu'" in told


def test_a_daemon_that_cannot_read_a_credential_of_its_service_says_who_can() -> None:
    with pytest.raises(Fault, match=r"bus_file .* cannot be read") as caught:
        open_bus("", file="/run/credentials/gpu-arbiter-node-agent.service/broker-url")
    assert caught.value.next_step.startswith("only the service gpu-arbiter-node-agent.service can read it: begin it by")
    with pytest.raises(Fault) as caught:
        open_bus("", file="/etc/nowhere.url")
    assert caught.value.next_step == "put the broker's URL there"
