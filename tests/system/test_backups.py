"""`backup`, `restore`, `journal check`, as an administrator types them, on an arbiter that runs."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result
from typer.testing import CliRunner

from arbiter.config import ArbiterConfig
from launch import cli
from launch.site.site import as_toml
from protocol import exit_codes
from protocol.journal import checksum
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


async def test_a_journal_whose_state_is_not_what_its_events_give_is_a_failure_in_one_sentence(
    config: Path, tmp_path: Path
) -> None:
    for app in ("ana-1", "ana-2"):  # each end writes a snapshot
        async with playing(tmp_path) as site:
            site.arbiter()
            await site.until_led(1)
            await site.submit(app)
    assert document(config, "journal", "check")["agreed"] == 1
    with closing(sqlite3.connect(tmp_path / "arbiter" / "journal.db")) as database, database:
        newest = "SELECT seq, now, state FROM snapshots ORDER BY seq DESC LIMIT 1"
        seq, now, packed = database.execute(newest).fetchone()
        state = msgspec.msgpack.decode(packed)
        state["round"] += 1
        packed = msgspec.msgpack.encode(state, order="deterministic")
        changed = (packed, checksum(seq, now, packed), seq)
        database.execute("UPDATE snapshots SET state = ?, sum = ? WHERE seq = ?", changed)
    result = run(config, "journal", "check")
    sentence, next_step = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (exit_codes.FAILED, "")
    assert sentence.endswith(f"replayed; after event {seq} the state is not what it was")
    assert "check it with the version that wrote it" in next_step
    told = json.loads(run(config, "journal", "check", "--json").stdout)
    assert (told["schema"], told["code"], told["differs_after"], told["agreed"]) == ("error/v1", 1, seq, 0)


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
