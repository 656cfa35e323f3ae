"""Plays ``nvidia-cuda-mps-control`` and ``nvidia-cuda-mps-server``, by the name that it is started with.

The daemon knows the commands that a node agent gives, and two that stand for what CUDA does in a process: ``client
PID`` connects it, ``fault PID`` has its kernel fault. After a fault the server's state is FAULT until all clients have
ended, as NVIDIA documents it. Flags of the scenario beside it: `mps-no-daemon`, `mps-no-server` (the lines of its log
are those of NVIDIA/k8s-device-plugin#685), `mps-hangs`, `mps-stays` (the daemon does not obey `quit`, and
its server outlives it).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(sys.argv[0]).resolve().parent
NAME = Path(sys.argv[0]).name
PIPE = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
LOGS = Path(os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps"))
GPU = os.environ.get("CUDA_VISIBLE_DEVICES", "")


def flag(word: str) -> bool:
    return word in (HERE / "scenario").read_text().splitlines()


def log(name: str, line: str) -> None:
    with (LOGS / name).open("a") as file:
        file.write(f"[2026-01-01 00:00:00.000 {name[:7]} {os.getpid()}] {line}\n")


def lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


class Daemon:
    def __init__(self) -> None:
        self.servers: list[subprocess.Popen[bytes]] = []
        self.clients: set[int] = set()
        self.over = False

    @property
    def faulted(self) -> bool:
        return (PIPE / "faulted").exists()

    def run(self, told: int) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(PIPE / "control"))
            listener.listen()
            (PIPE / "nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}\n")
            log("control.log", "Starting control daemon")
            os.close(told)
            while not self.over:
                link, _ = listener.accept()
                with link:
                    words = link.recv(4096).decode().split()
                    self.look()
                    link.sendall(self.answer(words).encode() if words else b"")
        (PIPE / "nvidia-cuda-mps-control.pid").unlink()
        (PIPE / "control").unlink()

    def look(self) -> None:
        self.servers = [server for server in self.servers if server.poll() is None]
        self.clients = {pid for pid in self.clients if lives(pid)}
        if not self.clients:
            (PIPE / "faulted").unlink(missing_ok=True)

    def answer(self, words: list[str]) -> str:
        match words:
            case ["get_server_list"]:
                return "".join(f"{server.pid}\n" for server in self.servers)
            case ["get_server_status", pid] if int(pid) in [server.pid for server in self.servers]:
                return "FAULT\n" if self.faulted else "ACTIVE\n"
            case ["get_client_list", _]:
                return "".join(f"{pid}\n" for pid in sorted(self.clients))
            case ["start_server", "-uid", _]:
                self.start_server()
                return ""
            case ["terminate_client", _, pid]:
                self.clients.discard(int(pid))
                log("server.log", f"Client {pid} is terminated")
                return ""
            case ["client", pid]:
                return self.connect(int(pid))
            case ["fault", pid]:
                (PIPE / "faulted").touch()
                log("server.log", f"Server is handling a fatal GPU error of {len(self.clients)} clients")
                return ""
            case ["quit", *_] if not flag("mps-stays"):
                for server in self.servers:
                    server.kill()
                    server.wait()
                self.over = True
                return ""
            case _:
                return f"Unknown command: {' '.join(words)}\n"

    def connect(self, pid: int) -> str:
        if self.faulted:
            return "refused\n"
        if not self.servers:
            self.start_server()
        self.clients.add(pid)
        (HERE / f"mps.{pid}").write_text(GPU)
        return "welcome\n"

    def start_server(self) -> None:
        if flag("mps-no-server"):
            log("control.log", "Server encountered a fatal exception. Shutting down")
            log("control.log", "Server 95 exited with status 1")
        elif not self.servers:
            self.servers.append(subprocess.Popen([HERE / "nvidia-cuda-mps-server"]))


def serve() -> None:
    (HERE / f"on.{os.getpid()}").write_text(GPU)
    log("server.log", "Server has started")
    parent = os.getppid()
    while os.getppid() == parent or flag("mps-stays"):
        time.sleep(0.2)


def front_end() -> int:
    if flag("mps-hangs"):
        signal.pause()
    for line in sys.stdin:
        try:
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(str(PIPE / "control"))
                link.sendall(line.encode())
                print(link.recv(65536).decode(), end="", flush=True)
        except OSError:
            print("Cannot find MPS control daemon process")
            return 1
    return 0


def daemonise() -> int:
    if flag("mps-no-daemon"):
        print("An instance of this daemon may not run as this user", file=sys.stderr)
        return 1
    ready, told = os.pipe()
    if os.fork():
        os.close(told)
        os.read(ready, 1)
        return 0
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(ready)
    Daemon().run(told)
    return 0


if NAME == "nvidia-cuda-mps-server":
    serve()
elif sys.argv[1:] == ["-d"]:
    sys.exit(daemonise())
else:
    sys.exit(front_end())
