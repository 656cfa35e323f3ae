"""`gpu-arbiter web` for other hosts: a token is needed, and one that others could read or guess is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from typer.testing import CliRunner

from launch import cli
from protocol import exit_codes
from tests.core.test_reports import Books
from tests.support.patience import PATIENCE_S

pytest.importorskip("starlette", reason="the extra `web` is not installed")


@pytest.mark.parametrize(
    ("content", "mode", "code", "says"),
    [
        ("0123456789abcdef\n", 0o644, exit_codes.FAILED, ["other users may read --token-file", "chmod 600"]),
        ("0123456789abcdef\n", 0o640, exit_codes.FAILED, ["other users may read --token-file", "chmod 600"]),
        ("0123456789abcde\n", 0o600, exit_codes.USAGE, ["one word of 16 characters or more", "openssl rand -hex 16"]),
        ("0123456789 abcdef\n", 0o600, exit_codes.USAGE, ["one word of 16 characters or more"]),
        ("", 0o600, exit_codes.USAGE, ["one word of 16 characters or more"]),
    ],
)
def test_a_token_that_others_can_read_or_guess_is_refused(
    tmp_path: Path, content: str, mode: int, code: int, says: list[str]
) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(mode)
    done = CliRunner().invoke(cli.app, ["web", "--port", "0", "--token-file", str(file)])
    assert done.exit_code == code, done.output
    assert [words for words in (str(file), *says) if words not in done.stderr] == []


def status(address: str, token: str = "") -> int:
    request = Request(address, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urlopen(request, timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


@pytest.mark.parametrize("own", [False, True], ids=["made", "of a file"])
def test_for_other_hosts_there_is_a_token_which_is_made_where_none_is_given(tmp_path: Path, *, own: bool) -> None:
    Books(tmp_path / "ledger.db")
    file = tmp_path / "token"
    file.write_text("a-token-of-my-own\n")
    file.chmod(0o600)
    flags = ("--token-file", str(file)) if own else ()
    command = (sys.executable, "-m", "launch.cli", "web", "--host", "0.0.0.0", "--port", "0", *flags)
    environment = os.environ | {"GPU_ARBITER_URL": f"unix://{tmp_path}/no.sock"}
    command += ("--ledger", str(tmp_path / "ledger.db"))
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            told = re.match(r"the site is at http://0\.0\.0\.0:(\d+)/(?:\?token=(\S+)\n)?", line)
            assert told is not None, line
            port, token = told[1], told[2] or "a-token-of-my-own"
            assert len(token) >= 16
            assert ("a-token-of-my-own" in (token, line)) is own
            assert "a-token-of-my-own" not in line, "the words of a daemon may stand in a journal"
            address = f"http://127.0.0.1:{port}/rounds"
            assert (status(address), status(address, token), status(address, f"{token}x")) == (401, 200, 401)
        finally:
            process.kill()
