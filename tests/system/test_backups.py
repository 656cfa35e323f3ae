"""`backup`, `restore`, `journal check`, as an administrator types them, on an arbiter that runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from arbiter.config import ArbiterConfig
from launch import cli
from launch.site.site import as_toml
from protocol import exit_codes
from tests.support.memory_site import QUICK, playing
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "arbiter.toml"
    path.write_text(as_toml(ArbiterConfig(state_dir=str(tmp_path / "arbiter"), arbiter=QUICK)))
    return path


def run(config: Path, *words: str | Path) -> Result:
    result = CliRunner().invoke(cli.app, [*map(str, words), "--config", str(config)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def document(config: Path, *words: str | Path) -> Any:
    result = run(config, *words, "--json")
    assert result.exit_code == exit_codes.DONE, result.output
    return json.loads(result.stdout)


async def test_a_backup_of_an_arbiter_that_runs_is_restored_and_what_was_forgotten_is_said(
    config: Path, tmp_path: Path
) -> None:
    file = tmp_path / "site.gab"
    async with playing(tmp_path) as site:
        site.arbiter()
        epoch = await site.until_led(1)
        await site.enrol_node()
        await site.submit("ana-1")
        made = await asyncio.to_thread(document, config, "backup", file)
        assert (made["schema"], made["epoch"], made["place"]) == ("backup/v1", epoch, str(tmp_path / "arbiter"))
        assert made["events"] > 0
        assert made["at"].startswith("20")
        await site.submit("ana-2")
        busy = await asyncio.to_thread(run, config, "restore", file, "--replace")
        assert (busy.exit_code, "in use by another process; stop it" in busy.stderr) == (exit_codes.FAILED, True)
        checked = await asyncio.to_thread(document, config, "journal", "check")
        assert checked["events"] > made["events"]
    kept = run(config, "restore", file)
    assert (kept.exit_code, "journal.db is there already; --replace" in kept.stderr) == (exit_codes.FAILED, True)
    restored = run(config, "restore", file, "--replace")
    assert restored.exit_code == exit_codes.DONE
    assert "what was decided since is forgotten" in restored.stderr

    async with playing(tmp_path) as site:
        site.arbiter()
        assert await site.until_led(1) > epoch
        await site.say_report("ana-2")
        async with asyncio.timeout(PATIENCE_S):
            while not (told := [line["what"] for line in site.said("object.noted") if "forgotten" in line["what"]]):
                await site.report()
                await asyncio.sleep(0.05)
        (sentence,) = told
        assert sentence.startswith("restored from the backup of 20")
        assert "0.0 hours old: what was decided since is forgotten" in sentence
        assert "1 apps were new to it" in sentence
        assert sorted(each["id"] for each in (await site.ask("apps"))["apps"]) == ["ana-1", "ana-2"]
    async with playing(tmp_path) as site:
        site.arbiter()
        await site.until_led(1)
        await site.enrol_node()
        assert [line for line in site.said("object.noted") if "restored" in line["what"]] == [], "it is told once"
    assert document(config, "journal", "check")["differs_after"] is None


def test_wrong_usage_is_one_sentence(config: Path, tmp_path: Path) -> None:
    for words, said in (
        (("backup", tmp_path / "site.gab"), "there is no"),
        (("restore", tmp_path / "site.gab"), "give a file that the verb backup has made"),
        (("journal", "check"), "give the arbiter's configuration with --config"),
    ):
        result = run(config, *words)
        assert result.exit_code == exit_codes.FAILED
        assert said in result.stderr
        assert result.stderr.count("\n") <= 2
    assert not (tmp_path / "site.gab").exists()
