"""Looks for a checkpoint that an attempt has left in memory, copies it to its disk, or forgets it: as the task's user.

Where a launcher starts tasks as their users, a node agent may neither read nor write what is theirs. So the launcher
starts this program as the user, ``python -I memory_helper.py SOCKET``: root listens there and sends the request
(`node_agent.launcher.requests.Keeping`), and the pipe for the answer, one JSON line.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # which `-I` leaves out

from node_agent.launcher.requests import Keeping, Kept
from node_agent.workers.driver_helper import received
from node_agent.workers.flush import MemoryCheckpoints, Owner
from protocol.messages import TaskId


def answer(keeping: Keeping) -> Kept:
    """Carry out one request."""
    request = keeping.request
    memory = MemoryCheckpoints(Path(keeping.folder))
    task = TaskId(f"{request.job}-a{request.attempt}")
    owner = Owner(request.job, task, keeping.checkpoint_dir, request.run)
    match request.do:
        case "find":
            found = memory.unflushed(owner)
            return Kept(found="" if found is None else found.name)
        case "flush":
            return Kept(error=memory.flush(owner))
        case "release":
            memory.release(owner, request.before)
            return Kept()


def main(place: str) -> int:
    """Carry out the request that comes from the socket `place`, and write the answer."""
    request, out = received(place)
    os.write(out, msgspec.json.encode(answer(msgspec.convert(request, Keeping))) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
