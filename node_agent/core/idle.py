"""A terminal that no person and no program uses gives its GPUs back, after a warning that it shows.

In use is a task while something is typed or shown, while a connection of ssh is open, and while one of its GPUs works:
a training that says nothing is in use, and so is a person who reads what scrolls by. A GPU of which the driver tells no
utilisation counts as at work while a process of the task is on it.
"""

from __future__ import annotations

from node_agent.core import ladder
from node_agent.core.events import GpuSample, TerminalQuiet, WarnTerminal
from node_agent.core.model import Loading, Running
from node_agent.core.state import NodeState
from protocol.messages import TaskId, device_of

#: Of the time after which it ends, the part that is left when it is warned; and the most of it.
WARNED_PART, WARNED_S_MAX = 0.2, 300.0


def note_work(node: NodeState, samples: tuple[GpuSample, ...]) -> None:
    """Note which tasks with a terminal have a GPU at work."""
    here = {sample.gpu: sample for sample in samples}
    for task in node.in_order():
        if task.facts.quiet_s is not None and any(
            _works(here[gpu], task.id) for gpu in map(device_of, task.gpus) if gpu in here
        ):
            node.learn(task.id, worked_at=node.now)


def _works(sample: GpuSample, task: TaskId) -> bool:
    if sample.utilisation is not None:
        return sample.utilisation > 0
    return any(process.task == task for process in sample.processes)


def quiet(node: NodeState, event: TerminalQuiet) -> None:
    """Take in for how long a terminal has been quiet; warn, or end the task for good."""
    task = node.tasks.get(event.task)
    if task is None:
        return
    node.learn(task.id, quiet_s=event.quiet_s)
    if not isinstance(task.state, Loading | Running):
        node.learn(task.id, worked_at=node.now)  # it rests or ends; its time begins when it goes on
        return
    idle_s = min(event.quiet_s, node.now - task.facts.worked_at, task.age_s(node.now))
    warning_s = min(WARNED_S_MAX, WARNED_PART * event.idle_s)
    if idle_s < event.idle_s - warning_s:
        node.learn(task.id, warned_at=None)
    elif task.facts.warned_at is None:
        node.learn(task.id, warned_at=node.now)
        sentence = f"this terminal is unused; in {_length(warning_s)} its GPUs go back, unless a key is pressed"
        node.effects.append(WarnTerminal(task.id, sentence))
    elif node.now >= task.facts.warned_at + warning_s:
        ladder.stop(node, task, "finished", f"{_unused(event.idle_s)}, so its GPUs went back")


def _unused(idle_s: float) -> str:
    return f"for {_length(idle_s)} nothing was typed or shown and no GPU of it worked"


def _length(seconds: float) -> str:
    """Return a length of time in words."""
    number, unit = (seconds, "second") if seconds < 120 else (seconds / 60, "minute")
    whole = max(1, round(number))
    return f"{whole} {unit}{'s' * (whole != 1)}"
