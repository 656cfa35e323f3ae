"""Checkpoints in host memory of tasks that a launcher starts: the notes of the node agent, and the words of helpers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from node_agent.launcher.requests import Drive, Keep, Keeping
from node_agent.workers import launched_memory, supervisors
from node_agent.workers.flush import Owner
from node_agent.workers.launched_memory import LaunchedMemory, in_own_thread
from node_agent.workers.memory_helper import answer
from node_agent.workers.supervisors import CannotStart, Launcher
from protocol.messages import JobId, TaskId
from tests.support.patience import PATIENCE_S

OWNER = Owner(JobId("ana-1.0"), TaskId("ana-1.0-a0"), "/ckpt", "r1", "login1")


class Helpers(Launcher):
    """Helpers that say what a test has them say."""

    def __init__(self, says: Callable[[Keep], bytes]) -> None:
        self.says, self.asked = says, list[Keep]()

    def answered(self, request: Drive | Keep) -> int:
        assert isinstance(request, Keep)
        self.asked.append(request)
        reader, writer = os.pipe()
        data = self.says(request)
        os.set_blocking(writer, False)
        os.write(writer, data)
        if data:
            os.close(writer)  # else it never answers
        return reader


def memory(tmp_path: Path, says: Callable[[Keep], bytes]) -> tuple[LaunchedMemory, Helpers]:
    helpers = Helpers(says)
    root = tmp_path / "memory"
    root.mkdir(exist_ok=True)
    return LaunchedMemory(helpers, root, tmp_path / "state"), helpers


@pytest.mark.parametrize(
    "said",
    [
        b"no JSON\n",
        b'{"found": 7}\n',
        b'{"error": "' + b"x" * 9000 + b'"}\n',
        b'{"found": "' + b"a" * 300 + b'"}\n',
        b'{"found": ""}' + b" " * 2 * supervisors.LINE_BYTES_MAX + b"\n",  # of a word that would be taken
        b"",
    ],
)
def test_what_a_helper_of_a_user_says_is_read_within_bounds(
    tmp_path: Path, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launched_memory, "LOOK_S", 0.05)
    monkeypatch.setattr(launched_memory, "FLUSH_S", 0.05)
    kept, _helpers = memory(tmp_path, lambda _: said)
    kept.offer(OWNER)
    assert kept.unflushed(OWNER) is not None, "there may be one"
    assert kept.flush(OWNER).startswith("no helper has told of the checkpoint in memory of ana-1.0: ")
    kept.release(OWNER)
    assert kept.owners() == [OWNER], "it is not known to be on the disk"


async def test_no_other_call_waits_for_a_helper_that_does_not_answer() -> None:
    reader, writer = os.pipe()
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        hung = [group.create_task(in_own_thread(os.read, reader, 1)) for _ in range(40)]
        await asyncio.sleep(0)
        assert await in_own_thread(str, 7) == "7"
        assert await asyncio.to_thread(str, 8) == "8"
        for one in hung:
            one.cancel()
        os.close(writer)  # which lets the threads end


def checkpoint(root: Path, step: int, run: str = "r1") -> Path:
    folder = root / f"a0-s{step}"
    folder.mkdir(parents=True)
    (folder / "made").write_text("12")
    manifest = f'{{"complete": true, "attempt": 0, "step": {step}, "files": {{"made": 2}}, "run": "{run}"}}'
    (folder / "manifest.json").write_text(manifest)
    return folder


def test_an_attempt_has_its_checkpoint_found_copied_and_forgotten_by_helpers_and_the_next_node_agent_knows_of_it(
    tmp_path: Path,
) -> None:
    durable, folder = tmp_path / "durable", tmp_path / "memory/2001"

    def helper(request: Keep) -> bytes:
        kept = answer(Keeping(str(folder), str(durable), request))
        return f'{{"found": "{kept.found}", "error": "{kept.error}"}}\n'.encode()

    first, _ = memory(tmp_path, helper)
    assert first.unflushed(OWNER) is None, "no attempt was offered anything"
    first.offer(OWNER)
    assert first.unflushed(OWNER) is None
    saved = checkpoint(folder / first._note(OWNER).name, 12)
    assert first.unflushed(OWNER) is not None
    first.release(OWNER)
    assert saved.exists(), "it is on no disk yet"

    kept, helpers = memory(tmp_path, helper)
    assert kept.owners() == [OWNER]
    assert kept.flush(OWNER) == ""
    assert (durable / "a0-s12/made").read_text() == "12"
    assert kept.unflushed(OWNER) is None
    kept.release(OWNER, 1)
    assert (saved.exists(), kept.owners()) == (False, [OWNER]), "the job goes on"
    kept.release(OWNER)
    assert (saved.parent.exists(), kept.owners()) == (False, [])
    asked = helpers.asked[0]
    assert (asked.gateway, asked.run, asked.job, asked.attempt) == ("login1", "r1", "ana-1.0", 0)


def test_a_note_is_not_made_where_the_launcher_has_made_no_folder(tmp_path: Path) -> None:
    kept, _ = memory(tmp_path, lambda _: b"{}\n")
    (tmp_path / "memory").rmdir()
    with pytest.raises(FileNotFoundError):
        kept.offer(OWNER)
    assert kept.owners() == []


def test_a_launcher_that_refuses_is_told_with_its_words(tmp_path: Path) -> None:
    def refuses(_: Keep) -> bytes:
        raise CannotStart("the launcher refused it: no attempt 0 of ana-1.0 was started here that may use memory_dir")

    kept, _ = memory(tmp_path, refuses)
    kept.offer(OWNER)
    assert "that may use memory_dir" in kept.flush(OWNER)
