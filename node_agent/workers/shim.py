"""The small parent of every task: outlives the node agent and writes down how the task ended.

Run as a script, ``python -I -S shim.py FOLDER``, with the standard library alone, so that it starts in milliseconds and
nothing of the user's environment reaches it. It holds the lock on fd `LOCK_FD` as long as it lives, by which a new node
agent knows a task whose start was cut off half-way. It writes ``started.json`` and ``exit.json`` in FOLDER, and the
first of them to its standard output too.

Where a launcher starts tasks as their users, it runs as the user, ``python -I -S shim.py SOCKET``: root listens there
and sends what is to run, with descriptors of the node agent's own files, to which the user has no path. It checks the
task's folders as the user, and tells the end in the descriptor of ``exit.json``. SIGTERM is passed on to the task.

A task with a terminal gets one whose other end is here (`terminal`); all that it shows goes to the log, too.

The task gets a session of its own. It dies with the shim (PDEATHSIG). Processes that it left behind, also those in
other sessions, come back to the shim as their nearest subreaper and are killed before ``exit.json`` is written.
"""

# pathlib would double the time this takes to start.
# ruff: noqa: PTH103, PTH105, PTH108, PTH112, PTH113, PTH116, PTH118, PTH123, PTH208

from __future__ import annotations

import ctypes
import json
import os
import signal
import stat
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` itself is not needed to run
    from typing import Any

    Json = dict[str, Any]

LOCK_FD = 9
#: Of a task that a launcher started: its log and the record of its end; descriptors from there on are free.
LOG_FD, EXIT_FD, SPARE_FD = 10, 11, 20
#: The socket at which persons come to the terminal of a task that has one.
TERMINAL_FD = 12
#: Of a task that a launcher started, unless its user gives another.
LOGIN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
#: A process in an uninterruptible kernel call may never die; the task has ended all the same.
SURVIVORS_S = 5.0
#: The most that ``exit.json`` takes, but for survivors, of which there are few.
RESERVED_BYTES = 4096
#: Of a secret's file; the kernel takes variables of 128 KiB.
SECRET_BYTES_MAX = 100_000
#: Of the word of a worker that finished.
FINISHED_BYTES_MAX = 65_536


def main(place: str) -> int:
    """Run the task that is described in the folder `place`, or by the launcher at the socket `place`, to its end."""
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGPIPE"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    by_launcher = stat.S_ISSOCK(os.stat(place).st_mode)
    if by_launcher:
        spec = receive(place)
    else:
        with open(os.path.join(place, "spec.json"), "rb") as file:
            spec = json.load(file)
    reserve(exit_file(place, by_launcher))
    terminal = terminal_of(spec)
    pid, error = spawn(spec, terminal)
    if error:
        write_end(place, {"error": error}, by_launcher)
        return 1
    started = {"pid": pid, "start_ticks": start_ticks(pid), "shim": os.getpid(), "shim_ticks": start_ticks(os.getpid())}
    if by_launcher:
        # An interactive shell takes no notice of SIGTERM; that its terminal goes it does notice.
        pass_on(signal.SIGTERM, pid, signal.SIGTERM if terminal is None else signal.SIGHUP)
    else:
        write(place, "started.json", started)
    tell(started)
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    status = wait(pid) if terminal is None else terminal.serve(pid)
    lived_s = time.clock_gettime(time.CLOCK_BOOTTIME) - began
    survivors = end_survivors()
    code, number = (None, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.WEXITSTATUS(status), None)
    kills = oom_kills(spec.get("cgroup", ""))
    ended: Json = {"code": code, "signal": number, "survivors": survivors, "oom_kills": kills, "lived_s": lived_s}
    if by_launcher:
        ended["finished"] = finished(spec["checkpoint_dir"])
    if terminal is not None:
        terminal.end(os.waitstatus_to_exitcode(status) if number is None else 128 + number)
    write_end(place, ended, by_launcher)
    return 0


def terminal_of(spec: Json) -> Any:
    """Return the terminal of a task, if it is to have one; what makes it is read only then, as it takes its time."""
    if not spec.get("terminal"):
        return None
    os.set_inheritable(TERMINAL_FD, False)
    log, shim = log_file(spec), os.getpid()
    ssh = module_beside("ssh_server").SshServer(spec, log, lambda: bind(spec, shim))
    return module_beside("terminal").Terminal(TERMINAL_FD, log, ssh)


def module_beside(name: str) -> Any:
    """Return a module that lies beside this one: the folder is not on the path."""
    from importlib import util

    found = util.spec_from_file_location(name, __file__.replace("shim.py", f"{name}.py"))
    assert found is not None, "it lies beside this file"
    assert found.loader is not None, "it is a file of Python"
    module = util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def log_file(spec: Json) -> int:
    """Return a descriptor of the task's log; where a launcher starts tasks, it is one that came from the node agent."""
    return os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if "log" in spec else LOG_FD


def spawn(spec: Json, terminal: Any = None) -> tuple[int, str]:
    """Start the command; return its pid, or why it could not be started."""
    reader, writer = os.pipe()
    shim = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            become(spec, shim, terminal)
        except BaseException as error:  # noqa: BLE001 - the child must end here in any case
            os.write(writer, str(error).encode(errors="replace"))
        os._exit(127)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        complaint = pipe.read().decode(errors="replace")  # ends at exec, which closes the other end
    if complaint:
        os.waitpid(pid, 0)
    return pid, complaint


def become(spec: Json, shim: int, terminal: Any) -> None:
    """Turn this child into the task."""
    bind(spec, shim)
    if "log" not in spec:
        os.set_inheritable(EXIT_FD, False)
        check_folders(spec)
    if terminal is not None:
        terminal.become_controlling()
    else:
        log, null = log_file(spec), os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
    for descriptor in (LOCK_FD, LOG_FD):
        with suppress(OSError):  # started by hand, without a lock; or it has opened the log itself
            os.close(descriptor)
    os.chdir(spec["cwd"])
    reader = spec.get("reader", "the node agent's user")
    env = spec["env"] | {name: secret(name, path, reader) for name, path in spec.get("secrets", {}).items()}
    os.execvpe(spec["command"][0], spec["command"], env)  # noqa: S606 - a program, never a shell line


def bind(spec: Json, shim: int) -> None:
    """Put this child of the supervisor `shim` in a session, and in the group and on the cores of the task."""
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != shim:
        raise RuntimeError("the supervisor died while the task was being started")
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGPIPE"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    if spec.get("cgroup", "").startswith("/"):
        with open(os.path.join(spec["cgroup"], "cgroup.procs"), "w") as group:
            group.write("0")  # this very process; its children are born in the group
    if spec["cpus"]:
        os.sched_setaffinity(0, spec["cpus"])


def check_folders(spec: Json) -> None:
    """Refuse a task whose folders or program are not there for its user.

    Raises
    ------
    RuntimeError
        With the folder or the program, and the mend.
    """
    user, node, folder = spec["reader"], spec["node"], spec["checkpoint_dir"]
    if not os.path.isdir(spec["cwd"]):
        raise RuntimeError(
            f"the working directory {spec['cwd']} does not exist for {user} on node {node}; put it on storage that "
            "every node sees"
        )
    try:
        os.makedirs(folder, exist_ok=True)
        probe = os.path.join(folder, f".probe-{os.getpid()}")
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.unlink(probe)
    except OSError as error:
        raise RuntimeError(
            f"the checkpoint directory {folder} cannot be written by {user} on node {node} ({error.strerror}); name "
            "another with --checkpoint-dir, on storage that every node sees"
        ) from error
    program, path = spec["command"][0], spec["env"].get("PATH", os.defpath)
    places = [
        os.path.join(spec["cwd"], place, program) for place in ([""] if "/" in program else path.split(os.pathsep))
    ]
    if not any(os.path.isfile(place) and os.access(place, os.X_OK) for place in places):
        raise RuntimeError(
            f"the command {program!r} was not found by {user} on node {node}, or is not executable there; give its "
            "full path, or a PATH that has it with --env PATH=..."
        )


def secret(name: str, path: str, reader: str) -> str:
    """Return the content of the file at `path`, less the newline at its end, for the variable `name`.

    It is read here and not before: the value is in this process, which becomes the task, and in no file of ours.
    """
    mend = f"give --secret a regular file of text that {reader} can read, on every node"
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise RuntimeError(f"the secret {name} cannot be read from {path}: {error.strerror}; {mend}") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise RuntimeError(f"the secret {name} cannot be read from {path}, which is no regular file; {mend}")
    with os.fdopen(file, "rb") as content:
        value = content.read(SECRET_BYTES_MAX + 1)
    if len(value) > SECRET_BYTES_MAX or b"\0" in value:
        content_is = "a zero byte" if b"\0" in value else f"more than {SECRET_BYTES_MAX} bytes"
        raise RuntimeError(f"the secret {name} cannot be a variable: {path} holds {content_is}; {mend}")
    return os.fsdecode(value.removesuffix(b"\n").removesuffix(b"\r"))


def wait(pid: int) -> int:
    """Reap everything until `pid` has ended; return its status."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return status


def end_survivors() -> list[int]:
    """Kill the processes that the task left behind; return those that would not die."""
    deadline = time.monotonic() + SURVIVORS_S
    while left := descendants():
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return left
        reap()
        time.sleep(0.01)
    reap()
    return []


def reap() -> None:
    """Collect children that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def descendants() -> list[int]:
    """Return every living process under this one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] != b"Z":
                children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    queue = [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found.extend(below)
        queue.extend(below)
    return found


def oom_kills(cgroup: str) -> int:
    """Return how many processes of `cgroup` (``own``: this process's) the kernel killed when memory ran out."""
    with suppress(OSError):
        if cgroup == "own":
            with open("/proc/self/cgroup") as file:
                own = next((line[3:].strip() for line in file if line.startswith("0::")), "")
            cgroup = "/sys/fs/cgroup" + own
        with open(os.path.join(cgroup, "memory.events")) as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    return 0


def start_ticks(pid: int) -> int:
    """Return when `pid` started, in clock ticks since boot."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def receive(place: str) -> Json:
    """Return what the launcher at the socket `place` sends to run; put the descriptors that come with it in place."""
    import socket  # which a start without a launcher does not wait for

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as launcher:
        launcher.connect(place)
        data, found, _, _ = socket.recv_fds(launcher, 2**16, 5)
        while more := launcher.recv(2**16):
            data += more
    spare = [os.dup2(one, SPARE_FD + number) for number, one in enumerate(found)]
    for one in found:  # the task would inherit them
        os.close(one)
    for source, target in zip(spare, (LOG_FD, EXIT_FD, LOCK_FD, 1, TERMINAL_FD), strict=False):
        os.dup2(source, target)
    os.closerange(SPARE_FD, SPARE_FD + len(found))
    spec = json.loads(data)
    assert isinstance(spec, dict)
    spec["env"] = login_variables(spec["reader"]) | spec["env"]
    if bootstrap_dir := spec.get("bootstrap_dir"):  # a launcher of the version before has put it there itself
        paths = (bootstrap_dir, spec["env"].get("PYTHONPATH", ""))
        spec["env"]["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return spec


def login_variables(name: str) -> dict[str, str]:
    """Return the variables that a login of the user `name`, who is this one, would begin with."""
    import pwd  # which a start without a launcher does not wait for

    user = pwd.getpwnam(name)
    shell = user.pw_shell or "/bin/sh"
    return {"PATH": LOGIN_PATH, "LANG": "C.UTF-8", "HOME": user.pw_dir, "USER": name, "LOGNAME": name, "SHELL": shell}


def pass_on(number: int, pid: int, as_number: int) -> None:
    """Pass a signal on to the task from now on, as this one or another, waking it if it was stopped."""

    def send(*_: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, as_number)
            os.kill(pid, signal.SIGCONT)

    signal.signal(number, send)


def finished(checkpoint_dir: str) -> Json | None:
    """Return the word of a worker that finished, which the node agent may not be able to read."""
    with suppress(OSError, ValueError):
        fd = os.open(os.path.join(checkpoint_dir, "finished.json"), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                found = json.loads(file.read(FINISHED_BYTES_MAX))
                json.dumps(found, allow_nan=False)  # the record of the end is read strictly
                return found if isinstance(found, dict) else None
    return None


def exit_file(place: str, by_launcher: bool) -> int:
    """Return a descriptor of the file in which the end is told."""
    return EXIT_FD if by_launcher else os.open(os.path.join(place, "exit.json.tmp"), os.O_WRONLY | os.O_CREAT, 0o600)


def reserve(fd: int) -> None:
    """Take room for a file that has to be written when the disk may be full."""
    os.pwrite(fd, bytes(RESERVED_BYTES), 0)
    os.fsync(fd)
    if fd != EXIT_FD:
        os.close(fd)


def write_end(place: str, content: Json, by_launcher: bool) -> None:
    """Tell the end: in a file beside that gets its name, or in the one whose descriptor is all that there is."""
    if not by_launcher:
        write(place, "exit.json", content)
        return
    os.ftruncate(
        EXIT_FD, os.pwrite(EXIT_FD, json.dumps(content).encode(), 0)
    )  # with zeros after it, it counts for none
    os.fsync(EXIT_FD)


def write(folder: str, name: str, content: Json) -> None:
    """Write `content` so that a reader finds all of it or nothing, also after a power cut; in the room it has."""
    path = os.path.join(folder, name)
    fd = os.open(path + ".tmp", os.O_WRONLY | os.O_CREAT, 0o600)
    os.ftruncate(fd, os.write(fd, json.dumps(content).encode()))
    os.fsync(fd)
    os.close(fd)
    os.replace(path + ".tmp", path)


def tell(started: Json) -> None:
    """Tell the node agent, if it still listens, and let go of its pipes."""
    with suppress(OSError):  # it has died since; the next one reads started.json
        os.write(1, json.dumps(started).encode() + b"\n")
    null = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(null, target)


def prctl(option: int, value: int) -> None:
    """Ask the kernel for a property of this process."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
