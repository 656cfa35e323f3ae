"""A worker that speaks the line protocol by hand, with the standard library alone.

``hand_worker.py MODE``:

work        steps until told otherwise; obeys suspend, resume, leave, probe
finish      says finished and exits 0
stubborn    says hello and ignores every order, and SIGTERM
park-only   as work, but cannot save
sick GPU    as park-only; on that GPU it crashes after its fifth step
babble      sends nonsense first, then works
client STEP as park-only, and a client of a played MPS, as CUDA makes a process one; its kernel faults at that step
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
from pathlib import Path

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
        peak_bytes=2**30 if mode == "client" else 0,
    )


def tell_mps(word: str) -> str:
    """Do what CUDA does in a process that finds MPS in its environment; without it, nothing."""
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "")
    if not pipe:
        return ""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(f"{pipe}/control")
        link.sendall(f"{word} {os.getpid()}".encode())
        return link.recv(4096).decode().strip()


def compute() -> None:
    """Fault where that is wished, and end where another client has."""
    faults = state["step"] == int(sys.argv[2])
    if faults:
        tell_mps("fault")
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "")
    if faults or (pipe and Path(pipe, "faulted").exists()):
        print("CUDA error: an illegal memory access was encountered", flush=True)
        sys.exit(1)


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
            if mode == "client":
                compute()
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
if mode == "client" and tell_mps("client") == "refused":
    sys.exit("CUDA error: the MPS server is not ready to accept new MPS client requests")
print("works", flush=True)
while True:
    with connect() as sock, suppress(OSError):
        run(sock)
