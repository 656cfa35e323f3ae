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
from tests.support.failover import HOSTS, POLICY

USAGE = """\
The lab runs, in {folder}; {leader} leads. Ctrl-C ends it. In another terminal, as root:

  export GPU_ARBITER_URL=unix://{socket}
  alias gpu-arbiter={program}
  gpu-arbiter submit -g 2 -- sleep 600   # then ps, nodes, explain last; it waits for up to {admission_s:g} s first
  {shell} bash
                                         # a shell on {leader}; likewise {others}
  tail -f {folder}/{leader}.jsonl
                                         # the log of a daemon; the leader's last bus.connected has the newest epoch

Cut a cable, and lay it again with `up` in place of `down`:
  {bus}
                                         # the leader from the broker: the other arbiter leads after 10 to 15 s
  {store}
                                         # the leader from the database, likewise
  {node}
                                         # a node from the site; it counts as lost after {lost_s:g} s

End the leader: the other arbiter leads at once. Start it again in a terminal of its own, and end it there:
  kill -9 {pid}
  {again}
"""


def usage(lab: Lab, network: Network) -> str:
    """Return how to use a lab that runs."""

    def words(host: str, name: str) -> str:
        return shlex.join(network.cut_command(host, name, "down"))

    leader = HOSTS[lab.arbiters.index(lab.leader())]
    return USAGE.format(
        folder=lab.folder,
        leader=leader,
        socket=lab.site.socket,
        program=Path(sys.executable).with_name("gpu-arbiter"),
        admission_s=POLICY.admission_wait_s,
        lost_s=POLICY.node_timeout_s,
        shell=shlex.join(network.within(leader)),
        others=", ".join((*(host for host in HOSTS if host != leader), *NODES, "login", "mq", "db")),
        pid=lab.leader().pid,
        again=shlex.join(lab.leader().command),
        bus=words(leader, "bus"),
        store=words(leader, "store"),
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
