"""What a person reads who has made a mistake in a TOML file of a daemon, or whose command cannot read what it names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import app_agent.gateway
import node_agent.launcher.config
from arbiter.config import load
from launch import cli, spec
from launch.buses import open_bus
from launch.faults import Fault
from launch.selection import Filters
from launch.site import shipped
from protocol.config import ConfigError


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


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ('sharing = "pack"', "unknown field `sharing`; `sharing` belongs below `[arbiter]`"),
        ('policy = "fifo"', "write `policy` below `[arbiter]`"),
        ("fairness_knob = 0.5", "`fairness_knob` belongs below `[policy.themis]`"),
        ("[arbiter]\nfairness_knob = 0.5", "`fairness_knob` belongs below `[policy.themis]`"),
        ('[arbiter]\nbus = "amqp://x/gpu"', "`bus` belongs at the top of the file, above all tables"),
    ],
)
def test_a_setting_of_another_table_is_told_where_it_belongs(text: str, mend: str, tmp_path: Path) -> None:
    config = tmp_path / "arbiter.toml"
    config.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(config)
    assert mend in str(caught.value)
    assert "leave it out" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "read"), [("gateway.toml", app_agent.gateway.load), ("launcher.toml", node_agent.launcher.config.load)]
)
def test_a_file_that_init_does_not_write_is_shown_among_the_shipped_ones(
    name: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    config = tmp_path / "own.toml"
    config.write_text("odd = 1")
    with pytest.raises(ConfigError) as caught:
        read(config)
    assert f"the shipped {name}, beside the units that `gpu-arbiter units` names, shows every field" in str(
        caught.value
    )
    assert "gpu-arbiter init" not in str(caught.value)
    assert (shipped.FOLDER / name).is_file()


def test_words_of_slurm_are_told_in_ours(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("gpus = 2")
    with pytest.raises(Fault, match=r"job.toml: unknown field `gpus`; gpus is called gang \(or sizes\)"):
        spec.load(file)
    with pytest.raises(Fault, match="a state of Slurm") as caught:
        Filters.of(state="pending", tenant=None, owner=None, name=None)
    assert caught.value.next_step == "try --state waiting"


def test_what_is_no_backup_or_no_toml_is_told_so(tmp_path: Path) -> None:
    config, file = tmp_path / "arbiter.toml", tmp_path / "site.gab"
    config.touch()
    file.write_text("hello")
    assert f"{file} is no file that `backup` has made" in run("restore", file, "--config", config).stderr
    config.write_text("[arbiter]\npolicy = fifo")
    with pytest.raises(ConfigError, match=r"line 2, column 10\); mend that line"):
        load(config)
