"""State that is damaged is refused by the daemon whose it is, with a sentence that names the mend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from arbiter.core.state.model import ArbiterSettings
from launch.site.site import as_toml, local_site
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: By verb of the command line: the file that must not be lost, and what is said of it.
FILES = {
    "arbiter": ("arbiter/journal.db", "is damaged or no journal"),
    "app-agent": ("app/app-me.db", "is damaged or no journal"),
    "node-agent": ("node-n1/agent.json", "is damaged, and without it an outdated plan could be obeyed"),
}
DAMAGES = {"noise": bytes(range(256)) * 40, "truncated": b"SQLite format 3\0" + bytes(200)}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
@pytest.mark.parametrize("verb", sorted(FILES))
def test_a_daemon_refuses_its_damaged_state_with_a_sentence_and_leaves_it_as_it_is(
    tmp_path: Path, verb: str, damage: str
) -> None:
    site = local_site(tmp_path, nodes=1, gpus="simulated:1", owner="me", settings=ArbiterSettings())
    config = {"arbiter": site.arbiter, "app-agent": site.app, "node-agent": site.nodes[0]}[verb]
    name, words = FILES[verb]
    (tmp_path / name).parent.mkdir(mode=0o700, exist_ok=True)
    (tmp_path / name).write_bytes(DAMAGES[damage])
    (tmp_path / "config.toml").write_text(as_toml(replace(config, bus="amqp://a:b@127.0.0.1:9/")))
    command = [sys.executable, "-m", "launch.cli", verb, "--config", str(tmp_path / "config.toml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode in (1, 2)
    assert words in ended.stderr
    assert str(tmp_path / name) in ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout
    assert (tmp_path / name).read_bytes() == DAMAGES[damage]
