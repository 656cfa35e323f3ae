"""A worker that speaks the line protocol by hand, with the standard library alone.

``hand_worker.py MODE``:

work        steps until told otherwise; obeys suspend, resume, leave, probe
finish      says finished and exits 0
stubborn    says hello and ignores every order, and SIGTERM
park-only   as work, but cannot save
sick GPU    as park-only; on that GPU it crashes after its fifth step
babble      sends nonsense first, then works
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress

mode = sys.argv[1]
state = {"step": -1, "suspended": False}


def connect() -> socket.socket:
    while True:
        sock = socket.socket(socket.AF_UNIX)
        if sock.connect_ex(os.environ["GPU_ARBITER_SOCKET"]) == 0:
            return sock
        time.sleep(0.05)


def say(sock: socket.socket, kind: str, **fields: object) -> None:
    sock.sendall(json.dumps({"type": kind, **fields}).encode() + b"\n")


def hello(sock: socket.socket) -> None:
    say(
        sock,
        "hello",
        proto=1,
        task=os.environ["GPU_ARBITER_TASK"],
        pid=os.getpid(),
        start_step=-1,
        total_steps=0,
        state="suspended" if state["suspended"] else "running",
        step=state["step"],
        can_park=True,
        can_checkpoint=mode == "work",
    )


def obey(sock: socket.socket, order: dict) -> None:
    do, seq, step = order["do"], order["seq"], state["step"]
    if mode == "stubborn":
        return
    if do == "suspend":
        state["suspended"] = True
        say(sock, "suspended", seq=seq, step=step, bytes=1, residue_bytes=0, seconds=0.0)
    elif do == "resume":
        state["suspended"] = False
        say(sock, "resumed", seq=seq, step=step, seconds=0.0)
    elif do == "leave":
        say(sock, "saved", seq=seq, step=step, dir="d", seconds=0.0, leaving=True)
        print(f"leaving at {step}", flush=True)
        sys.exit(75)


def progress(sock: socket.socket) -> None:
    say(
        sock,
        "progress",
        step=state["step"],
        step_s=0.05,
        start_step=-1,
        total_steps=0,
        can_park=True,
        can_checkpoint=mode == "work",
        saved_step=-1,
    )


def run(sock: socket.socket) -> None:
    buffer = b""
    hello(sock)
    while True:
        ready, _, _ = select.select([sock], [], [], 0.05)
        if ready:
            data = sock.recv(4096)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                obey(sock, json.loads(line))
        if not state["suspended"]:
            state["step"] += 1
            progress(sock)
            if state["step"] == 5 and os.environ["CUDA_VISIBLE_DEVICES"] in sys.argv[2:]:
                sys.exit(3)


if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "babble":
    with connect() as first:
        first.sendall(b"\x00GET / HTTP/1.1\n")
        first.recv(1)
if mode == "finish":
    with connect() as sock:
        hello(sock)
        say(sock, "finished", step=9, metrics={"accuracy": 0.5})
    sys.exit(0)
print("works", flush=True)
while True:
    with connect() as sock, suppress(OSError):
        run(sock)
