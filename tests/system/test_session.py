"""The training side with real processes and, where it counts, real PyTorch: what a node agent sees and gets."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app_agent import session
from protocol.worker import (
    EXIT_REQUEUE,
    Finished,
    Hello,
    Late,
    Progress,
    Ready,
    Refused,
    Resumed,
    Saved,
    Stacks,
    Suspended,
    encode_line,
)
from tests.support.worker_agent import BOOTSTRAP, ROOT, Worker, WorkerAgent

DIGITS = str(ROOT / "launch" / "training" / "digits.py")
PLAIN = str(ROOT / "launch" / "training" / "plain.py")
OPTIONS = ("--steps", "60", "--step-ms", "20", "--hidden", "512", "--eval-every", "30")

#: A training loop without PyTorch: what the socket says does not depend on it, and it starts at once.
LOOP = """
import sys, time
from app_agent import session
session.init(total_steps={steps})
def save(folder):
    open(folder + "/step", "w").write(str(step))
def load(folder):
    assert open(folder + "/step").read().isdecimal()
start = session.restore(load)
for step in range(start, {steps}):
    time.sleep(0.01)
    if session.step_end(step, save=save, metrics={{"loss": 1.0 / (step + 1)}}):
        sys.exit(session.EXIT_REQUEUE)
session.done(accuracy=0.5)
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[WorkerAgent]:
    with WorkerAgent(tmp_path / "agent.sock") as one:
        yield one


def loop(steps: int) -> tuple[str, str]:
    return "-c", LOOP.format(steps=steps)


def script(text: str) -> tuple[str, str]:
    return "-c", textwrap.dedent(text)


def past(step: int) -> object:
    return lambda value: value >= step


@pytest.fixture(scope="module")
def solo() -> str:
    """The output of the scripts when they are left alone."""
    command = [sys.executable, DIGITS, "--steps", "60", "--hidden", "512"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


# --- exactness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [pytest.param(DIGITS, marks=pytest.mark.full), PLAIN])
def test_a_script_suspended_and_resumed_twice_ends_with_the_weights_of_an_undisturbed_run(
    agent: WorkerAgent, tmp_path: Path, solo: str, path: str
) -> None:
    with Worker(tmp_path, path, *OPTIONS) as worker:
        for step in (5, 25):
            agent.wait(Progress, step=past(step))
            suspended = agent.wait(Suspended, seq=agent.order("suspend").seq)
            assert suspended.bytes > 3 * 4 * 64 * 512  # weights and both moments of the first layer alone
            agent.wait(Resumed, seq=agent.order("resume").seq, step=suspended.step)
        code, out, err = worker.end()
    assert (code, out, err) == (0, solo, "")
    agent.wait(Finished, step=59)


@pytest.mark.full
def test_a_script_that_left_and_restarted_ends_with_the_weights_of_an_undisturbed_run(
    agent: WorkerAgent, tmp_path: Path, solo: str
) -> None:
    with Worker(tmp_path, DIGITS, *OPTIONS) as first:
        agent.wait(Progress, step=past(10), can_checkpoint=True)
        saved = agent.wait(Saved, seq=agent.order("leave").seq, leaving=True)
        assert first.end()[0] == EXIT_REQUEUE
    assert not [message for message in agent.heard if isinstance(message, Finished)]
    assert Path(saved.dir).parent == first.checkpoints
    heard = len(agent.heard)
    with Worker(tmp_path, DIGITS, *OPTIONS, attempt=1) as second:
        agent.wait(Progress, since=heard, start_step=saved.step)
        assert second.end() == (0, solo, "")
    finished = agent.wait(Finished, since=heard)
    assert finished.metrics["accuracy"] == pytest.approx(float(solo.split()[2]), abs=1e-4)


def test_a_script_that_never_saved_does_not_go_on_from_a_strangers_checkpoint_of_the_same_app_and_says_so(
    agent: WorkerAgent, tmp_path: Path
) -> None:
    with Worker(tmp_path, *loop(steps=100_000), GPU_ARBITER_RUN="me-1-77") as stranger:
        agent.wait(Progress, step=past(10), can_checkpoint=True)
        saved = agent.wait(Saved, seq=agent.order("leave").seq)
        assert stranger.end()[0] == EXIT_REQUEUE
    heard = len(agent.heard)
    with Worker(tmp_path, *loop(steps=20), attempt=1, GPU_ARBITER_RUN="me-1-5f") as worker:
        code, _, err = worker.end()
    assert code == 0
    finished = agent.wait(Finished, since=heard)
    assert finished.step == 19
    assert {line.start_step for line in agent.heard[heard:] if isinstance(line, Progress)} == {-1}
    assert f"{saved.dir} is a checkpoint of run me-1-77, not of this one, and is not loaded" in err
    assert err.count("gpu-arbiter:") == 1
    assert json.loads((worker.checkpoints / "finished.json").read_text())["run"] == "me-1-5f"


def test_parked_state_leaves_the_memory_that_stands_for_the_gpu(agent: WorkerAgent, tmp_path: Path) -> None:
    text = """
        import time, torch
        from app_agent import session
        state = torch.ones(40_000_000)
        while True:
            time.sleep(0.01)
            session.step_end()
        """
    with Worker(tmp_path, *script(text)) as worker:
        agent.wait(Progress, step=past(1))
        running = worker.rss_bytes("RssAnon")
        agent.order("suspend")
        suspended = agent.wait(Suspended)
        parked, arena = worker.rss_bytes("RssAnon"), worker.rss_bytes("RssShmem")
        agent.order("resume")
        agent.wait(Resumed)
        resumed = worker.rss_bytes("RssAnon")
    assert suspended.bytes == 160_000_000
    assert min(running, resumed) - parked > 0.95 * suspended.bytes
    assert arena >= suspended.bytes


def test_a_process_tells_how_much_it_would_park_and_makes_room_for_it_while_it_trains(
    agent: WorkerAgent, tmp_path: Path
) -> None:
    text = """
        import time, torch
        from app_agent import session
        state = torch.ones(10_000_000)
        while True:
            time.sleep(0.01)
            session.step_end()
        """
    with Worker(tmp_path, *script(text)) as worker:
        told = agent.wait(Progress, state_bytes=past(40_000_000), peak_bytes=past(40_000_000))
        assert told.arena_bytes == 0
        assert told.state_bytes < told.trough_bytes <= told.peak_bytes
        order = agent.order("arena", bytes=told.state_bytes)
        ready = agent.wait(Progress, seq=order.seq)
        assert ready.arena_bytes >= told.state_bytes
        arena = worker.rss_bytes("RssShmem")
        assert arena >= ready.arena_bytes
        agent.wait(Progress, step=past(ready.step + 2))  # it trains on
        suspended = agent.wait(Suspended, seq=agent.order("suspend").seq)
        assert told.state_bytes - 64 * 100 <= suspended.bytes <= ready.arena_bytes
        assert worker.rss_bytes("RssShmem") == arena
        too_large = agent.order("arena", bytes=2**50)
        assert agent.wait(Progress, seq=too_large.seq).arena_bytes == ready.arena_bytes  # not while state lies in it
        agent.order("resume")
        agent.wait(Resumed)
        assert "host memory does not hold" in agent.wait(Refused, seq=agent.order("arena", bytes=2**50).seq).reason


# --- the contract ---------------------------------------------------------------------------------------------------


def test_hello_comes_first_and_says_who_speaks(agent: WorkerAgent, tmp_path: Path) -> None:
    with Worker(tmp_path, *loop(steps=20)) as worker:
        hello = agent.wait(Hello)
        assert worker.end()[0] == 0
    assert agent.heard[0] == hello
    assert (hello.task, hello.pid, hello.state, hello.step) == ("me-1.0-a0", worker.process.pid, "running", -1)


def test_progress_tells_step_time_capabilities_and_metrics(agent: WorkerAgent, tmp_path: Path) -> None:
    with Worker(tmp_path, *loop(steps=100_000)):
        progress = agent.wait(Progress, step=past(50), step_s=lambda value: value > 0)
    assert 0.01 <= progress.step_s < 0.1
    assert (progress.can_park, progress.can_checkpoint, progress.total_steps) == (True, True, 100_000)
    assert 0 < progress.metrics["loss"] < 1


def test_a_finished_job_says_so_and_leaves_it_in_writing(agent: WorkerAgent, tmp_path: Path) -> None:
    with Worker(tmp_path, *loop(steps=5)) as worker:
        assert worker.end()[0] == 0
    finished = agent.wait(Finished)
    assert (finished.step, finished.metrics["accuracy"]) == (4, 0.5)
    assert json.loads((worker.checkpoints / "finished.json").read_text()) == {
        "schema": "finished/v1",
        "task": "me-1.0-a0",
        "attempt": 0,
        "step": 4,
        "metrics": finished.metrics,
        "run": "",
    }


def test_an_order_that_comes_after_the_end_is_refused_after_finished_was_said_again(
    agent: WorkerAgent, tmp_path: Path
) -> None:
    command, text = loop(steps=5)
    with Worker(tmp_path, command, text + "sys.stdin.readline()\n") as worker:
        agent.wait(Finished)
        heard = len(agent.heard)
        agent.order("leave")
        agent.wait(Refused, since=heard)
        # Or a node agent might hear the refusal alone, go on to SIGTERM, and undo a training that is whole.
        assert [type(message) for message in agent.heard[heard:] if not isinstance(message, Progress)] == [
            Finished,
            Refused,
        ]
        worker.process.communicate("\n")


def test_the_end_is_in_writing_even_when_no_agent_was_ever_there(tmp_path: Path) -> None:
    with Worker(tmp_path, *loop(steps=5)) as worker:
        assert worker.end()[0] == 0
    assert json.loads((worker.checkpoints / "finished.json").read_text())["task"] == "me-1.0-a0"


def test_a_program_that_never_names_the_library_is_finished_when_it_ends_normally(
    agent: WorkerAgent, tmp_path: Path
) -> None:
    with Worker(tmp_path, "-c", "print('hello')") as worker:
        assert worker.end() == (0, "hello\n", "")
    agent.wait(Finished, step=-1)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("raise RuntimeError('broken')", 1),
        ("sys.exit(3)", 3),
        ("sys.exit('broken')", 1),
        ("session.init(total_steps=10); sys.exit(0)", 0),  # only one of ten steps was made
        ("os._exit(0)", 0),
    ],
)
def test_a_program_that_ends_badly_never_says_finished(agent: WorkerAgent, tmp_path: Path, end: str, code: int) -> None:
    text = f"import os, sys\nfrom app_agent import session\nsession.step_end(0)\n{end}\n"
    with Worker(tmp_path, "-c", text) as worker:
        assert worker.end()[0] == code
    assert not [message for message in agent.heard if isinstance(message, Finished)]
    assert not (worker.checkpoints / "finished.json").exists()


def test_measurements_may_be_tensors_and_those_that_are_no_numbers_are_left_out(
    agent: WorkerAgent, tmp_path: Path
) -> None:
    text = """
        import torch, warnings
        from app_agent import session
        session.init()
        with warnings.catch_warnings(record=True) as caught:
            session.report(loss=torch.ones(1, requires_grad=True) * 2, broken=float("nan"), text="good")
        assert "metric text is str" in str(caught[0].message), caught
        session.done()
        """
    with Worker(tmp_path, *script(text)) as worker:
        assert worker.end() == (0, "", "")
    assert agent.wait(Finished).metrics == {"loss": 2.0}


def test_a_step_that_is_no_index_is_named() -> None:
    with pytest.raises(TypeError, match="step is '7'; give a whole number"):
        session.step_end("7")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="total_steps is -1; give 0 or more"):
        session.init(total_steps=-1)


STEP = "    optimizer.step()\n"


@pytest.mark.full
def test_the_example_in_the_docs_leaves_and_goes_on(agent: WorkerAgent, tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "checkpointed.py")
    text = Path(example).read_text()
    assert STEP in text
    slow = tmp_path / "slow.py"  # its 200 steps would be over before the order comes
    slow.write_text(
        text.replace("import sys\n", "import sys\nimport time\n").replace(STEP, STEP + "    time.sleep(0.1)\n")
    )
    with Worker(tmp_path, str(slow)) as worker:
        agent.wait((Hello, Progress), can_checkpoint=True)
        agent.order("leave")
        assert worker.end()[0] == EXIT_REQUEUE
    with Worker(tmp_path, example, attempt=1) as worker:
        assert worker.end() == (0, "y = 3.00 x + 1.00\n", "")


def test_a_program_told_to_leave_that_just_ends_has_not_finished(agent: WorkerAgent, tmp_path: Path) -> None:
    text = """
        import time
        from app_agent import session
        session.restore(lambda folder: None)
        while not session.should_preempt():
            time.sleep(0.01)
        """
    with Worker(tmp_path, *script(text)) as worker:
        agent.wait((Hello, Progress), can_checkpoint=True)
        agent.order("leave")
        assert worker.end() == (0, "", "")
    assert not [message for message in agent.heard if isinstance(message, Finished)]


#: A program without mini-batches of its own that saves wherever it is; it makes some, so that it can be suspended.
ANYWHERE = """
import signal, sys, threading, time
from app_agent import session
def leave(*_):
    print("parked" if session._session.parked else "whole")
    session.left()
    sys.exit(session.EXIT_REQUEUE)
signal.signal(signal.SIGUSR2, leave)
main = threading.main_thread().ident
session.save_at_once(lambda: signal.pthread_kill(main, signal.SIGUSR2))
while {steps}:
    session.step_end()
    time.sleep(0.01)
time.sleep(600)
"""


def test_a_script_that_saves_wherever_it_is_leaves_at_once(agent: WorkerAgent, tmp_path: Path) -> None:
    with Worker(tmp_path, *script(ANYWHERE.format(steps=False))) as worker:
        agent.wait((Hello, Progress), can_checkpoint=True, can_park=False)
        agent.order("save")
        assert "only as it leaves" in agent.wait(Refused).reason
        order = agent.order("leave")
        assert agent.wait(Saved, leaving=True).seq == order.seq
        assert worker.end() == (EXIT_REQUEUE, "whole\n", "")
    assert not [message for message in agent.heard if isinstance(message, Finished)]


def test_a_suspended_script_that_saves_wherever_it_is_leaves_once_its_memory_is_back(
    agent: WorkerAgent, tmp_path: Path
) -> None:
    with Worker(tmp_path, *script(ANYWHERE.format(steps=True))) as worker:
        agent.wait(Progress, step=past(1))
        agent.order("suspend")
        agent.wait(Suspended)
        agent.order("leave")
        agent.wait(Saved, leaving=True)
        assert worker.end() == (EXIT_REQUEUE, "whole\n", "")


def test_orders_that_come_twice_are_answered_twice_and_done_once(agent: WorkerAgent, tmp_path: Path) -> None:
    with Worker(tmp_path, *loop(steps=100_000)):
        agent.wait(Progress, step=past(1))
        order = agent.order("save")
        saved = agent.wait(Saved)
        agent.wait(Progress, since=len(agent.heard), step=past(saved.step + 1))
        heard = len(agent.heard)
        agent.say(encode_line(order))
        assert agent.wait(Saved, since=heard) == saved


def test_orders_of_an_older_agent_are_ignored(agent: WorkerAgent, tmp_path: Path) -> None:
    with Worker(tmp_path, *loop(steps=100_000)) as worker:
        agent.wait(Progress, step=past(1))
        agent.order("probe", gen=5)
        agent.wait(Stacks)
        agent.order("leave", gen=4)
        agent.order("save", gen=5)
        agent.wait(Saved, leaving=False)
        assert worker.process.poll() is None


def test_a_younger_order_takes_the_place_of_one_not_yet_obeyed(agent: WorkerAgent, tmp_path: Path) -> None:
    text = """
        from app_agent import session
        session.init()
        input()
        session.step_end(0)
        """
    with Worker(tmp_path, *script(text)) as worker:
        agent.wait(Hello)
        agent.order("suspend")
        agent.wait(Resumed, seq=agent.order("resume").seq)
        assert worker.process.stdin is not None
        worker.process.stdin.write("now make a step\n")
        assert worker.end()[0] == 0
        assert not [message for message in agent.heard if isinstance(message, Suspended)]


def test_a_suspended_process_can_be_told_to_leave(agent: WorkerAgent, tmp_path: Path) -> None:
    with Worker(tmp_path, *loop(steps=100_000)) as worker:
        agent.wait(Progress, step=past(3))
        agent.order("suspend")
        suspended = agent.wait(Suspended)
        agent.wait(Suspended, seq=agent.order("suspend").seq)
        agent.wait(Refused, seq=agent.order("save").seq)
        agent.order("leave")
        assert worker.end()[0] == EXIT_REQUEUE
        assert agent.wait(Saved).step == suspended.step


def test_a_script_without_save_function_refuses_to_leave_and_says_the_mend(agent: WorkerAgent, tmp_path: Path) -> None:
    text = """
        import time
        from app_agent import session
        while True:
            time.sleep(0.01)
            session.step_end()
        """
    with Worker(tmp_path, *script(text)) as worker:
        agent.wait(Progress, step=past(1), can_checkpoint=False)
        agent.order("leave")
        assert "step_end(step, save=...)" in agent.wait(Refused).reason
        agent.wait(Progress, since=len(agent.heard))
        assert worker.process.poll() is None


def test_a_save_function_that_fails_is_refused_and_training_goes_on(agent: WorkerAgent, tmp_path: Path) -> None:
    text = """
        import time
        from app_agent import session
        def save(folder):
            open(folder + "/half", "w").close()
            raise OSError("disk full")
        while True:
            time.sleep(0.01)
            session.step_end(save=save)
        """
    with Worker(tmp_path, *script(text)) as worker:
        agent.wait((Hello, Progress), can_checkpoint=True)
        agent.order("leave")
        assert "OSError: disk full" in agent.wait(Refused).reason
        agent.wait(Progress, since=len(agent.heard))
        assert list(worker.checkpoints.iterdir()) == []


def test_a_probe_tells_where_the_training_thread_hangs(agent: WorkerAgent, tmp_path: Path) -> None:
    text = """
        def wait_for_ever():
            print("waiting", flush=True)
            input()
        wait_for_ever()
        """
    with Worker(tmp_path, *script(text)) as worker:
        agent.wait(Hello)
        assert worker.process.stdout is not None
        assert worker.process.stdout.readline() == "waiting\n"  # the agent is greeted before the script begins
        agent.order("probe")
        assert "wait_for_ever" in agent.wait(Stacks).text


def test_nonsense_from_the_agent_costs_the_connection_and_nothing_else(agent: WorkerAgent, tmp_path: Path) -> None:
    with Worker(tmp_path, *loop(steps=100_000)) as worker:
        for count, nonsense in enumerate((b"\xff\n", b"[]\n", b'{"type":"order"}\n', b"x" * 70_000), start=1):
            agent.wait(Hello, pid=lambda _, count=count: len(agent.hellos) == count)
            agent.say(nonsense)
        agent.wait(Hello, pid=lambda _: len(agent.hellos) == 5)
        agent.say(b'{"type":"order","do":"dance","gen":1,"seq":1}\n')
        assert "knows no order" in agent.wait(Refused).reason
        assert worker.process.poll() is None


def test_what_needs_no_boundary_is_answered_at_once_and_takes_no_other_orders_place(
    agent: WorkerAgent, tmp_path: Path
) -> None:
    text = """
        from app_agent import session
        session.init()
        input()
        session.step_end(0)
        """
    with Worker(tmp_path, *script(text)) as worker:
        agent.wait(Hello)
        suspend = agent.order("suspend")
        for order in (agent.order("tell"), agent.order("cap", bytes=2**30), agent.order("arena", bytes=8192)):
            agent.wait(Progress, seq=order.seq)
        agent.wait(Stacks, seq=agent.order("probe").seq)
        assert worker.process.stdin is not None
        worker.process.stdin.write("now make a step\n")
        worker.process.stdin.flush()
        suspended = agent.wait(Suspended)
        assert suspended.seq == suspend.seq
        agent.wait(Progress, seq=agent.order("tell").seq)
        heard = len(agent.heard)
        agent.say(encode_line(suspend))
        assert agent.wait(Suspended, since=heard) == suspended
        agent.order("resume")
        assert worker.end()[0] == 0


# --- stopping at a step ---------------------------------------------------------------------------------------------


def test_a_process_stands_at_the_end_of_the_step_it_promised_until_it_is_told_to_go_on(
    agent: WorkerAgent, tmp_path: Path
) -> None:
    path = tmp_path / "agent.sock"
    with Worker(tmp_path, *loop(steps=100_000)) as worker:
        step = agent.wait(Progress, step=past(3)).step + 50
        ready = agent.wait(Ready, seq=agent.order("hold", at_step=step).seq)
        assert ready.step < step
        agent.wait(Progress, step=step)
        standing = agent.wait(Progress, seq=agent.order("tell").seq)
        assert standing.step == step
        agent.die()
        with WorkerAgent(path, gen=2) as successor:
            hello = successor.wait(Hello)
            assert (hello.state, hello.step) == ("held", step)
            assert 0 < hello.metrics["loss"] < 1, "what it has reported is said again"
            successor.wait(Ready, seq=successor.order("hold", at_step=step).seq, step=step)
            assert successor.wait(Suspended, seq=successor.order("suspend", at_step=step).seq).step == step
            assert successor.wait(Resumed, seq=successor.order("resume").seq).step == step
            again = successor.wait(Progress, step=past(step + 3)).step + 50
            successor.wait(Ready, seq=successor.order("hold", at_step=again).seq)
            successor.wait(Resumed, seq=successor.order("resume").seq)  # those that would stand go on too
            successor.wait(Progress, step=past(again + 3))
            last = successor.wait(Progress, seq=successor.order("tell").seq).step + 50
            successor.wait(Ready, seq=successor.order("hold", at_step=last).seq)
            assert successor.wait(Saved, seq=successor.order("save", at_step=last).seq).step == last
            successor.wait(Progress, step=past(last + 1))
            assert successor.wait(Saved, seq=successor.order("leave", at_step=last + 100).seq).step == last + 100
            assert worker.end()[0] == EXIT_REQUEUE


def test_a_step_that_is_over_is_said_to_be_and_the_process_goes_on(agent: WorkerAgent, tmp_path: Path) -> None:
    with Worker(tmp_path, *loop(steps=100_000)):
        step = agent.wait(Progress, step=past(10)).step
        late = agent.wait(Late, seq=agent.order("hold", at_step=3).seq)
        assert late.step >= step
        agent.wait(Progress, since=len(agent.heard), step=past(late.step + 2))
        for do in ("suspend", "save"):
            refused = agent.wait(Refused, seq=agent.order(do, at_step=3).seq)  # type: ignore[arg-type]
            assert "step 3 is over" in refused.reason
            here = agent.wait(Progress, seq=agent.order("tell").seq).step
            agent.wait(Progress, since=len(agent.heard), step=past(here + 2))
        agent.wait(Suspended, seq=agent.order("suspend").seq)
        assert "resume it first" in agent.wait(Refused, seq=agent.order("hold", at_step=9999).seq).reason


def test_a_promise_to_stand_at_a_step_is_kept_however_fast_the_steps_are(agent: WorkerAgent, tmp_path: Path) -> None:
    text = """
        from app_agent import session
        session.init()
        while True:
            sum(range(200))
            session.step_end()
        """
    dice, kept = random.Random(7), 0
    with Worker(tmp_path, *script(text)):
        agent.wait(Progress, step=past(10))
        for _ in range(80):
            known = agent.wait(Progress, seq=agent.order("tell").seq).step
            step = known + dice.choice((1, 100, 1000, 5000, 30_000))
            answer = agent.wait((Ready, Late), seq=agent.order("hold", at_step=step).seq)
            if isinstance(answer, Late):
                assert answer.step >= step
                continue
            kept += 1
            assert answer.step < step
            assert agent.wait(Suspended, seq=agent.order("suspend", at_step=step).seq).step == step
            agent.wait(Resumed, seq=agent.order("resume").seq)
    assert kept > 8


# --- several training processes -------------------------------------------------------------------------------------


def torchrun(folder: Path, kind: str, *, steps: int = 60, attempt: int = 0, **env: str) -> Worker:
    command = ("-m", "torch.distributed.run", str(ROOT / "tests" / "support" / "ddp_train.py"), kind, str(steps), "40")
    path = os.pathsep.join((str(BOOTSTRAP), str(ROOT)))
    return Worker(
        folder, *command, attempt=attempt, PYTHONPATH=path, PET_NPROC_PER_NODE="2", OMP_NUM_THREADS="1", **env
    )


def spawning(folder: Path, kind: str, *, steps: int = 60, attempt: int = 0, **env: str) -> Worker:
    """The same training, its processes started by `torch.multiprocessing.spawn`."""
    command = (str(ROOT / "tests" / "support" / "spawn_train.py"), "2", kind, str(steps), "40")
    path = os.pathsep.join((str(BOOTSTRAP), str(ROOT)))
    return Worker(folder, *command, attempt=attempt, PYTHONPATH=path, OMP_NUM_THREADS="1", **env)


def digests(folder: Path) -> list[str]:
    return [(folder / f"digest-{rank}").read_text(encoding="ascii").split()[0] for rank in range(2)]


def hold_all(agent: WorkerAgent) -> int:
    """Have both ranks stand at the same step, as a node agent does; return it."""
    ahead = 3
    while True:
        order = agent.order("tell")
        known = [agent.wait(Progress, by=rank, seq=order.seq).step for rank in range(2)]
        order = agent.order("hold", at_step=max(known) + ahead)
        answers = [agent.wait((Ready, Late), by=rank, seq=order.seq) for rank in range(2)]
        if all(isinstance(answer, Ready) for answer in answers):
            return order.at_step
        ahead *= 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """The end state of each kind of training that is left alone."""

    @functools.cache
    def run(kind: str) -> list[str]:
        folder = tmp_path_factory.mktemp(kind)
        with torchrun(folder, kind) as worker:
            assert worker.end()[0] == 0
        return digests(folder)

    return run


@pytest.mark.full  # tests/system/test_several_nodes.py has ranks in each run
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("start", "kind"),
    [(spawning, "ddp"), *((torchrun, kind) for kind in ("ddp", "views", "fsdp"))],
)
def test_ranks_stop_at_the_same_step_outlive_the_agent_and_end_with_the_state_of_an_undisturbed_run(
    tmp_path: Path, undisturbed: Callable[[str], list[str]], start: Callable[..., Worker], kind: str
) -> None:
    path = tmp_path / "agent.sock"
    agent = WorkerAgent(path)
    with start(tmp_path, kind) as worker:
        assert {agent.wait(Hello, by=rank, world=2).rank for rank in range(2)} == {0, 1}
        for rank in range(2):
            agent.wait(Progress, by=rank, step=past(3))
        step = hold_all(agent)
        order = agent.order("suspend", at_step=step)
        assert [agent.wait(Suspended, by=rank, seq=order.seq).step for rank in range(2)] == [step] * 2
        agent.die()
        agent = WorkerAgent(path, gen=2)
        assert [agent.wait(Hello, by=rank).state for rank in range(2)] == ["suspended"] * 2
        order = agent.order("resume")
        for rank in range(2):
            agent.wait(Resumed, by=rank, seq=order.seq)
        step = hold_all(agent)
        for rank in range(2):
            agent.wait(Progress, by=rank, step=step)
        agent.die()  # between the two phases
        agent = WorkerAgent(path, gen=3)
        assert [agent.wait(Hello, by=rank).state for rank in range(2)] == ["held"] * 2
        order = agent.order("hold", at_step=1)
        assert [agent.wait(Late, by=rank, seq=order.seq).step for rank in range(2)] == [step] * 2
        assert worker.end()[0] == 0
    agent.die()
    assert digests(tmp_path) == undisturbed(kind)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.full
@pytest.mark.parametrize("start", [torchrun, spawning])
def test_ranks_leave_with_one_checkpoint_in_memory_and_go_on_from_it(
    agent: WorkerAgent, tmp_path: Path, undisturbed: Callable[[str], list[str]], start: Callable[..., Worker]
) -> None:
    memory = tmp_path / "memory"
    with start(tmp_path, "ddp", GPU_ARBITER_MEMORY_DIR=str(memory)) as first:
        for rank in range(2):
            agent.wait(Progress, by=rank, step=past(3), can_checkpoint=True)
        step = hold_all(agent)
        order = agent.order("leave", at_step=step)
        saved = [agent.wait(Saved, by=rank, seq=order.seq, leaving=True) for rank in range(2)]
        assert first.end()[0] == EXIT_REQUEUE  # of the launcher itself, which would call it a failure
    assert {(line.dir, line.step) for line in saved} == {(str(memory / f"a0-s{step}"), step)}
    assert sorted(path.name for path in (memory / f"a0-s{step}").iterdir()) == ["manifest.json", "rank0.pt", "rank1.pt"]
    heard = len(agent.heard)
    with start(tmp_path, "ddp", attempt=1, GPU_ARBITER_MEMORY_DIR=str(memory)) as second:
        for rank in range(2):
            agent.wait(Progress, since=heard, by=rank, start_step=step)
        assert second.end()[0] == 0
    assert agent.wait(Finished, since=heard, by=1).step == 59
    assert digests(tmp_path) == undisturbed("ddp")
    assert (tmp_path / "digest-0").read_text().split()[1] == str(60 * 32)
    assert json.loads((second.checkpoints / "finished.json").read_text())["task"] == "me-1.0-a1"


@pytest.mark.parametrize(
    ("rank", "world", "said"),
    [("1", "4", (1, 4)), ("", "", (0, 1)), ("0", "", (0, 1))],
)
def test_a_launcher_leaves_the_socket_to_the_processes_that_it_starts(
    agent: WorkerAgent, tmp_path: Path, rank: str, world: str, said: tuple[int, int]
) -> None:
    child = "import sys; from app_agent import session; session.done(); sys.exit(75)"
    text = f"""
        import os, subprocess, sys
        from app_agent import session
        assert not session.active
        session.init()
        names = {{"LOCAL_RANK": {rank!r}, "LOCAL_WORLD_SIZE": {world!r}}}
        env = os.environ | {{name: value for name, value in names.items() if value}}
        subprocess.run([sys.executable, "-c", "from multiprocessing import resource_tracker"], check=True, env=env)
        subprocess.run([sys.executable, "-c", {child!r}], check=True, env=env)
        """
    (tmp_path / "torchrun").write_text(textwrap.dedent(text))
    with Worker(tmp_path, "torchrun") as worker:
        assert worker.end() == (EXIT_REQUEUE, "", "")
    assert [(hello.rank, hello.world) for hello in agent.hellos] == [said]


@pytest.mark.parametrize(
    ("codes", "end"),
    [((75, 75), 75), ((75, -15), 75), ((75, 3), 1), ((-15,), 1), ((75, -11), 1), ((3,), 1)],
)
def test_a_launcher_reports_a_failure_as_ever_unless_its_processes_left_as_they_were_told(
    agent: WorkerAgent, tmp_path: Path, codes: tuple[int, ...], end: int
) -> None:
    text = f"""
        from types import SimpleNamespace
        class ChildFailedError(Exception):
            failures = {{rank: SimpleNamespace(exitcode=code) for rank, code in enumerate({codes})}}
        raise ChildFailedError
        """
    (tmp_path / "torchrun").write_text(textwrap.dedent(text))
    with Worker(tmp_path, "torchrun") as worker:
        code, _, err = worker.end()
    assert code == end
    assert ("ChildFailedError" in err) is (end == 1)


def test_a_rank_that_cannot_be_is_told_so_and_runs_alone(agent: WorkerAgent, tmp_path: Path) -> None:
    with Worker(tmp_path, *loop(steps=3), LOCAL_RANK="2", LOCAL_WORLD_SIZE="2") as worker:
        code, _, err = worker.end()
    assert code == 0
    assert "LOCAL_RANK '2' is not below LOCAL_WORLD_SIZE '2'" in err
    assert agent.hellos == []


# --- where checkpoints lie ------------------------------------------------------------------------------------------


def test_a_process_leaves_by_memory_saves_on_the_disk_and_counts_its_samples(
    agent: WorkerAgent, tmp_path: Path
) -> None:
    memory = tmp_path / "memory"
    text = """
        import sys, time
        from app_agent import session
        def save(folder):
            open(folder + "/state", "w").close()
        start = session.restore(lambda folder: None)
        print(start, session.samples(), flush=True)
        for step in range(start, 100_000):
            time.sleep(0.01)
            if session.step_end(step, save=save, samples=8):
                sys.exit(session.EXIT_REQUEUE)
        """
    with Worker(tmp_path, *script(text), GPU_ARBITER_MEMORY_DIR=str(memory)) as first:
        agent.wait(Progress, step=past(3), samples=past(32), can_checkpoint=True)
        durable = agent.wait(Saved, seq=agent.order("save").seq)
        left = agent.wait(Saved, seq=agent.order("leave").seq, leaving=True)
        assert first.end()[:2] == (EXIT_REQUEUE, "0 0\n")
    assert Path(durable.dir).parent == first.checkpoints
    assert Path(left.dir).parent == memory
    with Worker(tmp_path, *script(text), attempt=1, GPU_ARBITER_MEMORY_DIR=str(memory)) as second:
        heard = len(agent.heard)
        agent.wait(Progress, since=heard, start_step=left.step)
        agent.wait(Saved, since=heard, seq=agent.order("leave").seq)
        assert second.end()[1] == f"{left.step + 1} {8 * (left.step + 1)}\n"


# --- without an agent -----------------------------------------------------------------------------------------------


def test_run_by_hand_every_call_does_nothing(tmp_path: Path) -> None:
    text = """
        import threading
        from app_agent import session
        session.init(total_steps=3)
        assert not session.active
        assert session.restore(lambda folder: 1 / 0) == 0
        for step in range(3):
            assert session.step_end(step, save=lambda folder: 1 / 0, metrics={"loss": 1.0}) is False
        assert not session.should_preempt()
        session.report(loss=1.0)
        session.done(accuracy=1.0)
        assert (session.gpus(), session.checkpoint_dir()) == (1, None)
        assert threading.active_count() == 1
        """
    subprocess.run([sys.executable, *script(text)], check=True, cwd=tmp_path, env={**os.environ})
    assert list(tmp_path.iterdir()) == []


def test_training_goes_on_while_the_agent_is_dead_and_meets_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with WorkerAgent(path) as agent, Worker(tmp_path, *loop(steps=100_000)) as worker:
        before = agent.wait(Progress, step=past(3))
        agent.die()
        with WorkerAgent(path, gen=2) as successor:
            hello = successor.wait(Hello)
            assert hello.step >= before.step
            successor.wait(Progress, step=past(hello.step + 5))
            successor.order("leave")
            assert worker.end()[0] == EXIT_REQUEUE


def test_a_suspended_process_stays_so_while_the_agent_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with WorkerAgent(path) as agent, Worker(tmp_path, *loop(steps=100_000)):
        agent.wait(Progress, step=past(3))
        agent.order("suspend")
        suspended = agent.wait(Suspended)
        agent.die()
        with WorkerAgent(path, gen=2) as successor:
            hello = successor.wait(Hello)
            assert (hello.state, hello.step, hello.gen, hello.seq) == ("suspended", suspended.step, 1, suspended.seq)
            successor.order("resume")
            assert successor.wait(Resumed).step == suspended.step


def test_finished_waits_for_an_agent_when_it_cannot_be_written_down(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with Worker(tmp_path, *loop(steps=5)) as worker:
        assert worker.process.stderr is not None
        assert "could not record the end of training" in worker.process.stderr.readline()
        with WorkerAgent(tmp_path / "agent.sock") as late:
            assert late.wait(Hello).finished
            assert late.wait(Finished).metrics["accuracy"] == 0.5
            assert worker.end()[0] == 0


# --- processes around it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_processes_do_not_speak_for_the_task(agent: WorkerAgent, tmp_path: Path, method: str) -> None:
    text = f"""
        import multiprocessing, os, subprocess, sys
        from app_agent import session
        def child():
            from app_agent import session
            session.init()
            os._exit(int(session.active or session.step_end(7)))
        if __name__ == "__main__":
            session.init()
            process = multiprocessing.get_context("{method}").Process(target=child)
            process.start()
            process.join()
            assert process.exitcode == 0
            subprocess.run([sys.executable, "-c", "pass"], check=True)
            session.done()
        """
    (tmp_path / "train.py").write_text(textwrap.dedent(text))
    with Worker(tmp_path, "train.py") as worker:
        assert worker.end() == (0, "", "")
    assert [hello.pid for hello in agent.hellos] == [worker.process.pid]


@pytest.mark.full
def test_data_loader_workers_do_not_speak_for_the_task(agent: WorkerAgent, tmp_path: Path) -> None:
    text = """
        import torch
        if __name__ == "__main__":
            model = torch.nn.Linear(8, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            data = torch.utils.data.TensorDataset(torch.ones(16, 8))
            for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2):
                model(batch).sum().backward()
                optimizer.step()
        """
    (tmp_path / "train.py").write_text(textwrap.dedent(text))
    with Worker(tmp_path, "train.py") as worker:
        assert worker.end() == (0, "", "")
    assert [hello.pid for hello in agent.hellos] == [worker.process.pid]
    agent.wait(Finished, step=3)


COUNTED = """
    import os, torch
    import torch.multiprocessing as mp
    def train(rank, steps):
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
    """


@pytest.mark.full
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_an_unchanged_script_that_spawns_is_as_many_training_processes_as_it_spawns(
    agent: WorkerAgent, tmp_path: Path, method: str
) -> None:
    text = (
        COUNTED
        + f"""
    if __name__ == "__main__":
        assert mp.start_processes(train, (7,), nprocs=2, start_method="{method}") is None
        assert "GPU_ARBITER_SOCKET" not in os.environ
    """
    )
    (tmp_path / "train.py").write_text(textwrap.dedent(text))
    with Worker(tmp_path, "train.py") as worker:
        assert worker.end() == (0, "", "")
    hellos = [(hello.rank, hello.world) for hello in agent.hellos]
    assert (hellos[0], set(hellos[1:])) == ((0, 1), {(0, 2), (1, 2)})
    assert [agent.wait(Finished, by=rank).step for rank in range(2)] == [6, 6]
    assert json.loads((worker.checkpoints / "finished.json").read_text())["step"] == 6


@pytest.mark.full
def test_a_script_that_trains_after_the_processes_it_spawned_is_the_training_process_again(
    agent: WorkerAgent, tmp_path: Path
) -> None:
    text = (
        COUNTED
        + """
    if __name__ == "__main__":
        mp.spawn(train, (0,), nprocs=2)
        train(0, 9)
    """
    )
    (tmp_path / "train.py").write_text(textwrap.dedent(text))
    with Worker(tmp_path, "train.py") as worker:
        assert worker.end() == (0, "", "")
    assert [hello.pid for hello in agent.hellos if hello.world == 1] == [worker.process.pid] * 2
    assert json.loads((worker.checkpoints / "finished.json").read_text())["step"] == 8


@pytest.mark.full
def test_a_script_that_trains_itself_stays_the_training_process_whatever_it_spawns(
    agent: WorkerAgent, tmp_path: Path
) -> None:
    text = (
        COUNTED
        + """
    if __name__ == "__main__":
        train(0, 9)
        mp.spawn(train, (3,), nprocs=2)
    """
    )
    (tmp_path / "train.py").write_text(textwrap.dedent(text))
    with Worker(tmp_path, "train.py") as worker:
        assert worker.end() == (0, "", "")
    assert [hello.pid for hello in agent.hellos] == [worker.process.pid]
    agent.wait(Finished, step=8)


@pytest.mark.full
def test_a_spawned_rank_that_fails_fails_the_script_and_nobody_says_that_it_finished(
    agent: WorkerAgent, tmp_path: Path
) -> None:
    text = """
        import torch.multiprocessing as mp
        def train(rank):
            raise RuntimeError("no data")
        if __name__ == "__main__":
            mp.spawn(train, nprocs=2)
        """
    (tmp_path / "train.py").write_text(textwrap.dedent(text))
    with Worker(tmp_path, "train.py") as worker:
        code, _, err = worker.end()
    assert code == 1
    assert "ProcessRaisedException" in err
    assert "no data" in err
    assert not [line for line in agent.heard if isinstance(line, Finished)]
    assert not (worker.checkpoints / "finished.json").exists()


def test_an_interpreter_without_our_packages_is_served_too(agent: WorkerAgent, tmp_path: Path) -> None:
    python = str(Path(sys.base_prefix) / "bin" / "python3")
    text = """
        import sys
        from app_agent import session
        assert session.active
        assert not any("gpu" in name or "msgspec" in name for name in sys.modules), sys.modules
        session.done()
        """
    with Worker(tmp_path, *script(text), python=python) as worker:
        assert worker.end() == (0, "", "")
    agent.wait(Finished)


def test_the_environments_own_sitecustomize_still_runs(agent: WorkerAgent, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = True\n")
    path = os.pathsep.join((str(BOOTSTRAP), str(tmp_path)))
    with Worker(tmp_path, "-c", "assert customized", PYTHONPATH=path) as worker:
        assert worker.end() == (0, "", "")
    agent.wait(Finished)


def test_an_explicit_step_end_is_the_only_boundary_once_it_is_called(agent: WorkerAgent, tmp_path: Path) -> None:
    text = """
        import torch
        from app_agent import session
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            for half in range(2):
                optimizer.step()
            session.step_end()
        """
    with Worker(tmp_path, *script(text)) as worker:
        assert worker.end() == (0, "", "")
    agent.wait(Finished, step=4)


@pytest.mark.full
def test_an_optimizer_that_steps_inside_backward_is_no_boundary(agent: WorkerAgent, tmp_path: Path) -> None:
    text = """
        import torch
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        while True:
            model(torch.ones(4, 8)).sum().backward()
        """
    with Worker(tmp_path, *script(text)):
        agent.wait(Progress, step=past(1))
        agent.order("suspend")
        assert "inside backward" in agent.wait(Refused).reason
