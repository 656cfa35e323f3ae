"""A wish that only `Requirements` names goes from a flag, or a file, to what a policy sees. Run as a program.

The field is written into the source of `protocol.messages` before any other module is imported. So the program fails
if any module copies wishes one by one.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

FIELD = "    errand: Count = 0\n"
AFTER = "    spans: bool = False "


def with_the_wish() -> None:
    """Import `protocol.messages` with one more field of `Requirements`."""
    found = find_spec("protocol.messages")
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).read_text()
    assert source.count(AFTER) == 1
    module = ModuleType("protocol.messages")
    module.__file__ = found.origin
    sys.modules["protocol.messages"] = module
    exec(compile(source.replace(AFTER, FIELD + AFTER), found.origin, "exec"), module.__dict__)


def main(file: str) -> None:
    """Submit one app by a flag and one by `file`, let the arbiter hold a round, and print what the policy sees."""
    with_the_wish()
    from app_agent.core.host import AppHost, Configured, Submit
    from arbiter.core.arbiter import Arbiter
    from launch.verbs import submission
    from protocol.codec import decode, encode
    from protocol.core import Connected, Send
    from protocol.messages import AppReport, OwnerId, Party
    from tests.support.arbiter_site import Site

    unsaid = dict.fromkeys(
        ("command", "gpus", "checkpoint_dir", "utility", "env", "secret", "file", "trials", "trial", "memory")
    )
    flags = [unsaid | {"command": ["train"], "errand": 7, "memory": "8G"}, unsaid | {"file": Path(file)}]
    host = AppHost(OwnerId("ada"), tenant="team-a")
    sent = [*host.handle(Configured("team-a", 5.0, ""), 0.0), *host.handle(Connected(), 0.0)]
    for number, given in enumerate(flags):
        sent += host.handle(Submit(f"r{number}", submission.specified(given)), 0.0)
    site = Site()
    site.decides_late = True
    for effect in AppHost.restore(host.snapshot()).handle(Connected(), 1.0):
        if isinstance(effect, Send) and isinstance(effect.message, AppReport):
            sender = Party("app", "ada")
            site.hear(sender, decode(encode(effect.message, sender=sender, id="1")).body)  # type: ignore[arg-type]
    site.node("n1", 2)
    site.wait(2.0)
    seen = {app.requirements for asked in site.undecided for app in asked.view.apps}
    kept = Arbiter.restored(site.arbiter.snapshot()).state.apps.values()
    assert seen == {app.requirements for app in kept}
    print(sorted((wished.errand, wished.host_bytes // 2**30) for wished in seen))  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(sys.argv[1])
