"""The Python client against a site with real processes: apps, functions, futures, and what goes wrong with them."""

from __future__ import annotations

import functools
import itertools
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, wait
from pathlib import Path

import pytest

from app_agent import client as errors
from app_agent import streams
from app_agent.client import AsyncClient, Client, DiedError, FunctionApp, connect
from app_agent.executor import GpuExecutor
from tests.support import called_functions as functions
from tests.support.patience import PATIENCE_S
from tests.support.thread_site import ThreadSite, thread_site, until


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadSite]:
    with thread_site(tmp_path_factory.mktemp("client")) as running:
        yield running


@pytest.fixture
def client(site: ThreadSite, tmp_path: Path) -> Client:
    return connect(site.socket, cwd=tmp_path)


def python(line: str) -> tuple[str, ...]:
    return (sys.executable, "-c", line)


# --- commands -------------------------------------------------------------------------------------------------------


def test_a_command_is_submitted_waited_for_and_read(client: Client, tmp_path: Path) -> None:
    line = "import os; print('one'); print(os.getcwd()); print(os.environ['A'], os.environ['CUDA_VISIBLE_DEVICES'])"
    app = client.submit(python(line), gpus=2, env={"A": "b"}, name="mine")
    record = app.wait(PATIENCE_S)
    assert (record.app, record.name, record.state, record.exit_code) == (app.id, "mine", "finished", 0)
    assert app.state() == "finished"
    one, cwd, last = app.logs()
    assert (one, cwd) == ("one\n", f"{tmp_path}\n")
    assert last.startswith("b ")
    assert len(last.split(",")) == 2
    assert list(app.logs(tail=2)) == [cwd, last]
    assert client.app(app.id).record() == record
    assert app.id in [each.id for each in client.apps()]


def test_a_failed_command_tells_its_exit_code(client: Client) -> None:
    record = client.submit(python("raise SystemExit(3)"), max_restarts=0).wait(PATIENCE_S)
    assert (record.state, record.exit_code) == ("failed", 3)


def test_states_are_told_as_they_come_and_logs_are_followed(client: Client, tmp_path: Path) -> None:
    app = client.submit(
        python("import tests.support.called_functions as f; print(1, flush=True); print(f.wait_for('x'))"),
        env={"PYTHONPATH": str(Path.cwd())},
    )
    states = app.states()
    seen = list(itertools.takewhile(lambda state: state != "running", states))
    lines = app.logs(follow=True)
    assert next(lines) == "1\n"
    assert app.wait(PATIENCE_S, for_="running").state == "running"
    with pytest.raises(TimeoutError, match=f"{app.id} is still running"):
        app.wait(0.05)
    (tmp_path / "x").write_text("text")
    assert list(lines) == ["text\n"]
    seen += states
    assert seen in (["waiting", "finished"], ["finished"])


def test_a_cancelled_app_is_over(client: Client) -> None:
    app = client.submit(python("import time; time.sleep(600)"))
    app.wait(PATIENCE_S, for_="running")
    assert app.cancel() == "cancelled"
    assert app.wait(PATIENCE_S).state == "cancelled"


@pytest.mark.parametrize(
    ("command", "fields", "says"),
    [
        ("python train.py", {}, r"command is text; give a list of words: \['python', 'train.py'\]"),
        (None, {}, "command is missing"),
        (("true",), {"gpus": 0}, "gpus must be at least 1"),
        (("true",), {"gpus": (1, 3, 2)}, "list each number of GPUs once, the smallest first"),
        (("true",), {"tenant": "Team A"}, "tenant is 'Team A'; use lower-case letters"),
        (("true",), {"kind": "quick"}, "kind is 'quick', which is none of"),
        (("true",), {"nodes": 2}, "unknown field `nodes`"),
        (("true",), {"env": {"A": 1}}, "env.* must be text"),
        (("true",), {"env": 1}, "env must be a table, and is a whole number"),
        (("true",), {"cwd": 1}, "cwd must be text, and is a whole number"),
        (("true", 5), {}, "trials.* must be text, and is a whole number"),
        (("true",), {"gpus_max": 8}, "gpus_max is for simulations"),
        ((), {}, "give 1 entry or more"),
    ],
)
def test_a_wrong_field_is_named_with_the_mend(
    client: Client, command: object, fields: dict[str, object], says: str
) -> None:
    with pytest.raises(errors.UsageError, match=says) as refused:
        client.submit(command, **fields)  # type: ignore[arg-type]
    assert refused.value.code == 2


def test_an_app_that_is_not_there_is_not_found(client: Client) -> None:
    with pytest.raises(errors.NotFoundError, match="there is no app me-nosuch1"):
        client.app("me-nosuch1")


def test_what_no_node_can_hold_is_refused(client: Client) -> None:
    with pytest.raises(errors.RefusedError, match="gpus is 3, and the largest node has 2; ask for at most 2"):
        client.submit(("true",), gpus=3)
    with pytest.raises(errors.RefusedError, match="each job needs 1 H200, and no node has one; the GPUs here are sim"):
        client.submit(("true",), gpu_types=["H200"])
    with pytest.raises(errors.RefusedError, match=r"gpus is 9, and all nodes together have \d+; ask for at most"):
        client.submit(("true",), gpus=9, spans=True)


def test_no_daemon_is_said_with_the_command_that_starts_one(tmp_path: Path) -> None:
    with pytest.raises(errors.UnreachableError, match="start one with `gpu-arbiter up`") as refused:
        connect(tmp_path / "none.sock")
    assert refused.value.code == 6
    assert isinstance(refused.value, ConnectionError)
    with pytest.raises(errors.UnreachableError), GpuExecutor(Client(tmp_path / "none.sock", cwd=tmp_path)) as executor:
        executor.submit(functions.add, 1)
    assert list((tmp_path / "checkpoints" / "calls").iterdir()) == [], "the call that was not submitted is gone"


# --- functions ------------------------------------------------------------------------------------------------------


def test_a_function_gives_its_result_from_a_process_with_a_gpu(client: Client, tmp_path: Path) -> None:
    call = client.with_fields(gpus=2).submit_function(functions.process)
    interpreter, cwd, gpus = call.result(PATIENCE_S)
    assert (interpreter, cwd, len(gpus.split(","))) == (sys.executable, str(tmp_path), 2)
    assert call.result() == (interpreter, cwd, gpus), "it is kept"
    assert list((tmp_path / "checkpoints" / "calls").iterdir()) == []
    assert call.record().name == "process"


def test_an_exception_comes_back_with_the_traceback_of_its_process(client: Client) -> None:
    call = client.submit_function(functions.refuse, 3)
    for _ in range(2):
        with pytest.raises(ValueError, match="3 is too small") as raised:
            call.result(PATIENCE_S)
    (note,) = raised.value.__notes__
    assert "called_functions.py" in note
    assert "in refuse" in note
    assert call.record().state == "failed"


def test_an_exception_that_cannot_travel_is_told_in_its_words(client: Client) -> None:
    with pytest.raises(RuntimeError, match="OddError: 1 and 3 are odd") as raised:
        client.submit_function(functions.refuse_oddly).result(PATIENCE_S)
    assert "in refuse_oddly" in raised.value.__notes__[0]


def test_a_result_that_cannot_travel_is_said_with_the_mend(client: Client) -> None:
    with pytest.raises(TypeError, match="the result of unpicklable cannot be pickled"):
        client.submit_function(functions.unpicklable).result(PATIENCE_S)


def test_a_function_whose_process_dies_tells_exit_code_and_output(client: Client) -> None:
    call = client.submit_function(functions.killed)
    with pytest.raises(DiedError, match="ended without a result") as died:
        call.result(PATIENCE_S)
    assert died.value.exit_code == 137
    assert died.value.output == "the last words\n"
    assert "the last words" in str(died.value)
    with pytest.raises(DiedError) as died:
        client.submit_function(functions.ended).result(PATIENCE_S)
    assert died.value.exit_code == 7


def test_a_function_is_called_again_only_if_told_to(client: Client, tmp_path: Path) -> None:
    with pytest.raises(DiedError):
        client.submit_function(functions.dies_once, str(tmp_path / "one")).result(PATIENCE_S)
    again = client.with_fields(max_restarts=1)
    assert again.submit_function(functions.dies_once, str(tmp_path / "two")).result(PATIENCE_S) == "the second"
    with pytest.raises(DiedError, match="ended without a result"):  # the exception of the first call is out of date
        again.submit_function(functions.refuses_then_dies, str(tmp_path / "three")).result(PATIENCE_S)


def test_a_function_that_a_node_cannot_find_is_refused_with_the_mend(client: Client, tmp_path: Path) -> None:
    held = threading.Lock()

    def inner() -> None:
        held.acquire()

    for function in (lambda: 1, inner):
        with pytest.raises(errors.UsageError, match="define it with `def` at the top of a module"):
            client.submit_function(function)
    with pytest.raises(errors.UsageError, match=r"argument 2 of add cannot be pickled: .*; give plain values"):
        client.submit_function(functions.add, 1, held)  # type: ignore[arg-type]
    with pytest.raises(errors.UsageError, match="argument two of add cannot be pickled"):
        client.submit_function(functions.add, 1, two=held)  # type: ignore[arg-type]
    assert not (tmp_path / "checkpoints").exists()


def test_a_function_of_a_script_is_found_by_loading_the_script_again(site: ThreadSite, tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    body = "from app_agent.client import connect\ndef double(n):\n    return 2 * n\n"
    work = f"client = connect({str(site.socket)!r})\nprint(client.submit_function(double, 4).result({PATIENCE_S}))\n"
    script.write_text(f"{body}if __name__ == '__main__':\n    " + work.replace("\n", "\n    "))
    done = subprocess.run((sys.executable, script), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("8\n", 0), done.stderr
    script.write_text(body + work)
    done = subprocess.run((sys.executable, script), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "submit it behind `if __name__ ==" in done.stderr
    done = subprocess.run(
        (sys.executable, "-"), input=body + work, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "move it into a module, and import it from there" in done.stderr


def test_a_cancelled_function_says_so(client: Client, tmp_path: Path) -> None:
    call: FunctionApp[str] = client.submit_function(functions.wait_for, str(tmp_path / "x"))
    call.cancel()
    with pytest.raises(errors.CancelledError, match="was cancelled"):
        call.result(PATIENCE_S)


# --- futures --------------------------------------------------------------------------------------------------------


def test_futures_give_results_and_exceptions(client: Client) -> None:
    with GpuExecutor(client) as executor:
        future = executor.submit(functions.add, 1, two=2)
        refused = executor.submit(functions.refuse, 1)
        assert future.result(PATIENCE_S) == 3
        assert isinstance(refused.exception(PATIENCE_S), ValueError)
        assert (future.done(), future.running(), future.cancel()) == (True, False, False)
        assert future.app.state() == "finished"
        assert list(executor.map(functions.add, (1, 2, 3), (10, 20, 30), timeout=PATIENCE_S)) == [11, 22, 33]
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(functions.add, 1)


def test_a_future_runs_when_its_app_does_and_can_be_cancelled_before(client: Client, tmp_path: Path) -> None:
    with GpuExecutor(client, gpus=2) as executor:
        first = executor.submit(functions.wait_for, str(tmp_path / "x"))
        until(first.running)
        second, third = (executor.submit(functions.add, number) for number in (1, 2))
        assert (second.running(), second.done()) == (False, False)
        assert (second.cancel(), second.cancel(), second.cancelled()) == (True, True, True)
        assert second in wait([second, third], PATIENCE_S, FIRST_COMPLETED).done
        assert second.app.wait(PATIENCE_S).state == "cancelled"
        assert not first.cancel(), "it runs"
        (tmp_path / "x").write_text("go")
        assert (first.result(PATIENCE_S), third.result(PATIENCE_S)) == ("go", 2)
        with pytest.raises(CancelledError):
            second.result()
    assert list((tmp_path / "checkpoints" / "calls").iterdir()) == []


def test_shutdown_cancels_what_waits_if_told_to(client: Client, tmp_path: Path) -> None:
    executor = GpuExecutor(client, gpus=2)
    first = executor.submit(functions.wait_for, str(tmp_path / "x"))
    until(first.running)
    second = executor.submit(functions.add, 1)
    executor.shutdown(wait=False, cancel_futures=True)
    assert (second.cancelled(), first.done()) == (True, False)
    (tmp_path / "x").write_text("go")
    executor.shutdown()
    assert first.done()


def test_a_future_ends_with_an_error_if_its_app_is_cancelled_elsewhere(client: Client, tmp_path: Path) -> None:
    with GpuExecutor(client) as executor:
        future = executor.submit(functions.wait_for, str(tmp_path / "x"))
        client.app(future.app.id).cancel()
        assert isinstance(future.exception(PATIENCE_S), errors.CancelledError)
        died = executor.submit(functions.killed).exception(PATIENCE_S)
        assert isinstance(died, DiedError)
        assert died.output == "the last words\n"


def test_a_map_submits_no_more_than_it_may_at_a_time(client: Client, tmp_path: Path) -> None:
    own, gates = [str(tmp_path / f"own{n}") for n in range(4)], [tmp_path / f"gate{n}" for n in range(4)]
    with GpuExecutor(client) as executor:
        results = executor.map(functions.note_and_wait_for, own, map(str, gates), at_most=1, timeout=PATIENCE_S)
        for number, gate in enumerate(gates):
            until(Path(own[number]).exists)
            assert [Path(path).exists() for path in own] == [other <= number for other in range(4)]
            gate.write_text(str(number))
            assert next(results) == str(number)
        assert list(results) == []
        with pytest.raises(ValueError, match="at_most is 0"):
            executor.map(functions.add, [1], at_most=0)
        slow = executor.map(functions.wait_for, [str(tmp_path / "never")] * 3, at_most=1, timeout=0.2)
        with pytest.raises(TimeoutError):
            next(slow)
        client.app("last").cancel()


def test_futures_and_waits_go_on_over_a_restart_of_the_app_agent(
    site: ThreadSite, client: Client, tmp_path: Path
) -> None:
    gate = tmp_path / "x"
    with GpuExecutor(client, gpus=2) as executor:
        running = executor.submit(functions.wait_for, str(gate))
        until(running.running)
        waiting = executor.submit(functions.add, 1)
        dropped = executor.submit(functions.wait_for, str(tmp_path / "never"))  # it may have begun when it is cancelled
        states: list[str] = []
        reader = threading.Thread(target=lambda: states.extend(running.app.states()))
        waited: list[str] = []
        waiters = [threading.Thread(target=lambda: waited.append(waiting.app.wait(PATIENCE_S).state)) for _ in range(2)]
        reader.start()
        waiters[0].start()
        until(lambda: bool(states))
        site.stop_app_agent()
        try:
            waiters[1].start()  # its first question finds no app agent
            gate.write_text("while it was away")
            assert dropped.cancel(), "it waits, as far as is known"
            with pytest.raises(errors.UnreachableError):
                executor.submit(functions.add, 3)
        finally:
            site.start_app_agent()
        assert running.result(PATIENCE_S) == "while it was away"
        assert waiting.result(PATIENCE_S) == 1
        for thread in (reader, *waiters):
            thread.join(PATIENCE_S)
    assert dropped.app.wait(PATIENCE_S).state == "cancelled", "told when the app agent was back"
    assert (states[-1], waited) == ("finished", ["finished", "finished"])


def test_futures_end_if_the_app_agent_stays_away_or_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with thread_site(tmp_path / "site") as own:
        client = connect(own.socket, cwd=tmp_path)
        with GpuExecutor(client) as executor:
            future = executor.submit(functions.wait_for, str(tmp_path / "x"))
            until(future.running)
            own.stop_app_agent()
            shutil.rmtree(tmp_path / "site" / "app")
            own.start_app_agent()
            error = future.exception(PATIENCE_S)
            assert isinstance(error, errors.NotFoundError), "it has a new journal"
            assert f"there is no app {future.app.id}" in str(error)
            assert executor.submit(functions.add, 1).result(PATIENCE_S) == 1
        monkeypatch.setattr(streams, "AWAY_S", 1.0)
        with GpuExecutor(client) as executor:
            future = executor.submit(functions.wait_for, str(tmp_path / "x"))
            until(future.running)
            own.stop_app_agent()
            assert isinstance(future.exception(PATIENCE_S), errors.UnreachableError)
        own.start_app_agent()


# --- on an event loop -----------------------------------------------------------------------------------------------


async def test_an_event_loop_has_the_same_names(site: ThreadSite, tmp_path: Path) -> None:
    client = await AsyncClient.connect(site.socket, cwd=tmp_path)
    app = await client.submit(python("print('a word')"))
    states = [state async for state in app.states()]
    assert states[-1] == "finished"
    assert (await app.wait(PATIENCE_S)).exit_code == 0
    assert [line async for line in app.logs(follow=True)] == ["a word\n"]
    assert (await (await client.app(app.id)).state()) == "finished"
    assert app.id in [each.id for each in await client.apps()]
    assert await (await client.submit_function(functions.add, 1, two=2)).result(PATIENCE_S) == 3
    with pytest.raises(ValueError, match="3 is too small"):
        await (await client.submit_function(functions.refuse, 3)).result(PATIENCE_S)
    with pytest.raises(DiedError, match="the last words"):
        await (await client.submit_function(functions.killed)).result(PATIENCE_S)
    long = await client.submit(python("import time; time.sleep(600)"))
    with pytest.raises(TimeoutError):
        await long.wait(0.05)
    assert await long.cancel() == "cancelled"
    with pytest.raises(errors.UsageError, match="define it with `def`"):
        await client.submit_function(functools.partial(lambda: 1))
    with pytest.raises(errors.UnreachableError):
        await AsyncClient.connect(tmp_path / "none.sock")
