"""Start the lab for people, and say how to use it."""

from __future__ import annotations

import shlex
import signal
import sys
import tempfile
import threading
from pathlib import Path

from tests.lab.network import Network
from tests.lab.site import NODES, Lab, missing, running_lab
from tests.support.failover import HOSTS

USAGE = """\
The lab runs, in {folder}. Ctrl-C ends it. In another terminal, as root:

  export GPU_ARBITER_URL=unix://{socket}
  gpu-arbiter submit -g 2 -- sleep 600          # then ps, nodes, explain last
  {shell} bash                                  # a shell on host-a; likewise {others}
  tail -f {folder}/host-a.jsonl                 # the log of a daemon
  kill -9 {pid}                                 # the leader; the other arbiter goes on

Cut a cable, and lay it again with `up` in place of `down`:
  {bus}    # an arbiter from the broker
  {store}  # an arbiter from the database
  {node}        # a node from the site
"""


def usage(lab: Lab, network: Network) -> str:
    """Return how to use a lab that runs."""

    def words(host: str, name: str) -> str:
        return shlex.join(network.cut_command(host, name, "down"))

    return USAGE.format(
        folder=lab.folder,
        socket=lab.site.socket,
        shell=shlex.join(network.within(HOSTS[0])),
        others=", ".join((*HOSTS[1:], *NODES, "login", "mq", "db")),
        pid=lab.leader().pid,
        bus=words(HOSTS[0], "bus"),
        store=words(HOSTS[0], "store"),
        node=words(NODES[0], "bus"),
    )


def main() -> None:
    """Run a lab until a signal comes."""
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    if reason := missing():
        sys.exit(f"no lab here: {reason}")
    with tempfile.TemporaryDirectory(prefix="ga-lab-") as folder, running_lab(Path(folder)) as lab:
        print(usage(lab, lab.network), flush=True)
        stopping.wait()


if __name__ == "__main__":
    main()
