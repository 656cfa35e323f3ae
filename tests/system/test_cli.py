"""The command line against a running site, as a user types it: answers, exit codes, sentences."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from arbiter.core.registry import POLICIES
from protocol import exit_codes
from tests.support.patience import PATIENCE_S
from tests.support.web_process import shown_as

PROGRAM = (sys.executable, "-m", "launch.cli")
POLICY_NAMES = ", ".join(sorted(POLICIES))
Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("cli")
    own = {name: value for name, value in os.environ.items() if not name.startswith("GPU_ARBITER_")}
    return own | {"GPU_ARBITER_URL": f"unix://{folder}/control.sock", "HOME": str(folder)}


@pytest.fixture(scope="module")
def site(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """`gpu-arbiter up` with four simulated GPUs, up when the fixture is."""
    command = [*PROGRAM, "up", "--fresh", "--gpus", "simulated:4"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "gpu-arbiter is up: 1 node, 4 GPUs" in process.stderr.readline()
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0


@pytest.fixture
def cli(site: subprocess.Popen[str], environment: dict[str, str], tmp_path: Path) -> Cli:
    """Run one command to its end, in an empty folder."""
    return _runner(environment, tmp_path)


@pytest.fixture
def lonely(environment: dict[str, str], tmp_path: Path) -> Cli:
    """The same where no daemon answers."""
    return _runner(environment | {"GPU_ARBITER_URL": f"unix://{tmp_path}/nobody.sock"}, tmp_path)


def _runner(environment: dict[str, str], folder: Path) -> Cli:
    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [*PROGRAM, *words]
        return subprocess.run(
            command,
            env=environment | variables,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )

    return run


def script(line: str) -> tuple[str, ...]:
    """Return the words that run `line` in Python."""
    return ("--", sys.executable, "-c", line)


# --- submitting -----------------------------------------------------------------------------------------------------


def test_an_array_and_an_app_after_it_are_looked_at_and_acted_on_by_their_ids(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "array.toml").write_text(
        'command = ["sh", "-c", "echo index $GPU_ARBITER_ARRAY_INDEX; exec sleep 600"]\n'
        'array = "3,7%2"\ntime_limit = "1h"\nretry = 0\nname = "many"\n'
    )
    array = cli("submit", "-f", "array.toml").stdout.strip()
    after = cli("submit", "--after", f"last:any,{array}:any", "--", "true").stdout.strip()
    cli("wait", array, "--for", "running")
    (told,) = json.loads(cli("ps", array, "--json").stdout)["apps"]
    assert (told["array"], told["want"]) == ({"jobs": 2, "over": 0}, 2)
    assert re.search(rf"^{array} +default +many \[0/2\] ", cli("ps").stdout, re.MULTILINE)
    (told,) = json.loads(cli("ps", after, "--json").stdout)["apps"]
    assert (told["state"], told["waits_for"]) == ("waiting", {"kind": "after", "ids": [array]})
    assert f"it begins after {array} has ended" in cli("explain", after).stdout
    dry = cli("submit", "--dry-run", "--after", after, "--", "true")
    assert (dry.returncode, dry.stdout) == (
        exit_codes.WOULD_WAIT,
        f"It would wait.\nReason: it begins after {after} has ended (submit --after)\n",
    )
    while cli("logs", f"{array}.7").stdout != "index 7\n":
        pass
    assert f"{array}.3 is cancelled" in cli("cancel", f"{array}.3").stderr
    missing = cli("cancel", f"{array}.4")
    assert (missing.returncode, f"there is no app {array}.4" in missing.stderr) == (exit_codes.NOT_FOUND, True)
    assert f"{array} is cancelled" in cli("cancel", array).stderr
    assert cli("wait", after).returncode == 0
    done = cli("submit", "--after", array, "--", "true")
    assert (done.returncode, done.stdout) == (exit_codes.USAGE, "")
    assert f"{array} was cancelled, so nothing can begin only after it has finished" in done.stderr


def test_submit_prints_the_id_and_nothing_else(cli: Cli) -> None:
    done = cli("submit", *script("pass"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().startswith("me-")
    assert len(done.stdout.split()) == 1


def test_run_shows_the_output_and_returns_the_programs_own_exit_code(cli: Cli) -> None:
    done = cli("run", "--retry", "0", *script("print('a word'); raise SystemExit(3)"))
    assert done.returncode == 3
    assert done.stdout == "a word\n"
    assert "exited with code 3" in done.stderr


def test_a_program_with_flags_of_its_own_needs_no_dashes_before_them(cli: Cli) -> None:
    done = cli("run", sys.executable, "-c", "import sys; print(sys.argv[1:])", "--json", "-g", "7")
    assert (done.returncode, done.stdout) == (0, "['--json', '-g', '7']\n")


def test_a_program_runs_where_it_was_submitted_with_the_variables_asked_for(cli: Cli, tmp_path: Path) -> None:
    line = "import os; print(os.getcwd(), os.environ['A'], os.environ['B'], os.environ.get('C'))"
    done = cli("run", "--env", "A=1", "--env", "B", *script(line), B="2", C="3")
    assert done.stdout == f"{tmp_path} 1 2 None\n"


def test_a_program_finds_its_secrets_whether_a_flag_or_a_spec_file_names_the_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from a file\n")
    line = "import os; print(os.environ['API_KEY'])"
    done = cli("run", "--secret", "API_KEY=key", *script(line))
    assert (done.returncode, done.stdout) == (0, "from a file\n")
    command = json.dumps([sys.executable, "-c", line])
    (tmp_path / "app.toml").write_text(f"command = {command}\n[secrets]\nAPI_KEY = 'key'\n")
    done = cli("run", "-f", "app.toml")
    assert (done.returncode, done.stdout) == (0, "from a file\n")
    done = cli("run", "--retry", "0", "--secret", "API_KEY=none", *script(line))
    assert done.returncode == exit_codes.FAILED
    assert f"the secret API_KEY cannot be read from {tmp_path}/none: No such file or directory" in done.stderr


def test_a_spec_file_is_overruled_by_flags(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "app.toml").write_text('command = ["true"]\nname = "filed"\ntenant = "vision"\ngang = 2\n')
    app = cli("submit", "-f", "app.toml", "--name", "flagged").stdout.strip()
    (listed,) = [each for each in json.loads(cli("ps", "--json").stdout)["apps"] if each["id"] == app]
    assert (listed["name"], listed["tenant"], listed["gang"]) == ("flagged", "vision", 2)


def test_what_can_never_fit_is_refused_with_the_mend(cli: Cli) -> None:
    before = len(json.loads(cli("ps", "-a", "--json").stdout)["apps"])
    for verb in ("submit", "run"):
        done = cli(verb, "-g", "100", "--", "true")
        assert (done.returncode, done.stdout) == (exit_codes.REFUSED, "")
        assert done.stderr.splitlines() == [
            "gpu-arbiter: each job needs 100 GPUs on one node, and the largest node has 4",
            "next: ask for at most 4 with --gpus",
        ]
    assert len(json.loads(cli("ps", "-a", "--json").stdout)["apps"]) == before


def test_a_program_that_is_not_there_is_refused_before_it_is_submitted(cli: Cli) -> None:
    for verb in ("submit", "run"):
        done = cli(verb, "--", "/no/such/program")
        assert (done.returncode, done.stdout) == (exit_codes.USAGE, "")
        assert "the command '/no/such/program' was not found on this host" in done.stderr
        done = cli(verb, "--", sys.executable, "nosuch.py")
        assert (done.returncode, done.stdout) == (exit_codes.USAGE, "")
        assert "nosuch.py does not exist on this host" in done.stderr


def test_a_program_that_is_on_no_node_either_fails_with_the_mend(cli: Cli) -> None:
    done = cli("run", "--no-check", "--", "/no/such/program")
    assert done.returncode == exit_codes.FAILED
    assert "'/no/such/program' was not found on node n1" in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("submit",), "no command was given"),
        (("submit", "--env", "NOT_SET", "--", "true"), "--env NOT_SET: no such variable here"),
        (("submit", "--grace", "soon", "--", "true"), "--grace is 'soon', which is no length of time"),
        (("submit", "--memory", "", "--", "true"), "--memory is '', which is no amount of memory"),
        (("submit", "--step-time", "0", "--", "true"), "--step-time is '0'; it must be more than 0"),
        (("submit", "--step-time", "", "--", "true"), "--step-time is '', which is no length of time"),
        (("submit", "--trial", "--lr 1", "--", "true"), "a search needs at least two trials"),
        (("submit", "--trial", "1", "--trial", "2", "--", "true"), "2 trials but no metric"),
        (("submit", "-g", "0", "--", "true"), "--gpus is '0', which is no number of GPUs"),
        (("submit", "--array", "9-1", "--", "true"), "array: '9-1' names no index; write the smaller one first"),
        (("submit", "--array", "0-9", "--trial", "1", "--trial", "2", "--", "true"), "leave one of them out"),
        (("submit", "--after", "me-nnn1:soon", "--", "true"), "after: 'me-nnn1:soon' is no dependency; write"),
        (
            ("submit", "--after", "me-nnn1", "--", "true"),
            "after names me-nnn1, and your app agent remembers no such app",
        ),
        (("submit", "--time-limit", "0", "--", "true"), "--time-limit is '0'; it must be more than 0"),
        (("submit", "-g", "4,2", "--", "true"), "sizes are 4,2; list each number of GPUs once, the smallest first"),
        (
            ("submit", "--preempt-by", "magic", "--", "true"),
            "preempt_by (--preempt-by) is 'magic', which is none of 'auto'",
        ),
        (("submit", "-f", "missing.toml"), "missing.toml cannot be read"),
        (("submit", "--tenant", "Team A", "--", "true"), "tenant is 'Team A'; use lower-case letters"),
    ],
)
def test_a_wrong_submission_is_one_sentence_and_code_2(cli: Cli, words: tuple[str, ...], sentence: str) -> None:
    done = cli(*words)
    assert (done.returncode, done.stdout) == (exit_codes.USAGE, "")
    assert sentence in done.stderr.splitlines()[0]


def test_a_priority_that_the_site_does_not_allow_is_refused_with_code_4(cli: Cli) -> None:
    done = cli("submit", "--priority", "1", "--", "true")
    assert (done.returncode, done.stdout) == (exit_codes.REFUSED, "")
    assert "priority is 1, and this site allows at most 0" in done.stderr


def test_a_job_on_several_nodes_may_need_more_gpus_than_any_node_has_but_not_than_all_have(cli: Cli) -> None:
    done = cli("submit", "-g", "8", "--spans", "--", "true")
    assert (done.returncode, done.stdout) == (exit_codes.REFUSED, "")
    assert "each job needs 8 GPUs, and all nodes together have 4" in done.stderr


def test_a_job_that_lists_sizes_is_given_the_largest_that_is_free(cli: Cli) -> None:
    done = cli("run", "-g", "1,2", "--priority", "-1", *script("import os; print(os.environ['GPU_ARBITER_GPUS'])"))
    assert (done.returncode, done.stdout) == (0, "2\n")


# --- looking --------------------------------------------------------------------------------------------------------


def test_an_app_can_be_waited_for_explained_and_cancelled(cli: Cli) -> None:
    app = cli("submit", *script("import time; print('on', flush=True); time.sleep(600)")).stdout.strip()
    assert cli("wait", "--for", "running", "--timeout", "30s", app).returncode == 0
    assert app in cli("ps").stdout
    late = cli("wait", "--timeout", "0.2", app)
    assert (late.returncode, app in late.stderr) == (exit_codes.TIMED_OUT, True)
    why = cli("explain", "last")
    assert f"{app} of tenant default is" in why.stdout
    assert why.stdout.rstrip().splitlines()[-1].startswith("next: ")
    cancelled = cli("cancel", "last")
    assert (cancelled.returncode, cancelled.stderr) == (0, f"{app} is cancelled\n")
    assert cli("wait", app).returncode == exit_codes.INTERRUPTED


def test_an_app_that_is_held_leaves_its_gpu_until_it_is_released(cli: Cli) -> None:
    def state() -> str:
        (listed,) = json.loads(cli("ps", app, "--json").stdout)["apps"]
        return str(listed["state"])

    app = cli("submit", *script("import time; time.sleep(600)")).stdout.strip()
    assert cli("wait", "--for", "running", "--timeout", "30s", app).returncode == 0
    held = cli("hold", "--force", app)
    assert (held.returncode, held.stderr) == (0, f"{app} is held\n")
    deadline = time.monotonic() + 30
    while state() != "held":
        assert time.monotonic() < deadline
    why = cli("explain", app).stdout
    assert f"Reason: it is held by its owner, and gets no GPU until `gpu-arbiter release {app}`" in why
    assert why.rstrip().endswith(f"next: gpu-arbiter release {app}")
    assert json.loads(cli("release", "all", "--json").stdout) == {"schema": "released/v1", "apps": [app]}
    assert cli("wait", "--for", "running", "--timeout", "30s", app).returncode == 0
    assert cli("cancel", app).returncode == 0
    over = cli("hold", app)
    assert (over.returncode, over.stderr.splitlines()[0]) == (1, f"gpu-arbiter: {app} is over, so it cannot be held")


def test_an_app_that_is_requeued_leaves_its_gpu_and_starts_again(cli: Cli) -> None:
    app = cli("submit", *script("import time; print('on', flush=True); time.sleep(600)")).stdout.strip()
    assert cli("wait", "--for", "running", "--timeout", "30s", app).returncode == 0
    done = cli("requeue", "--force", app, "--json")
    assert json.loads(done.stdout) == {"schema": "requeued/v1", "apps": [app]}
    deadline = time.monotonic() + 40
    while True:
        (listed,) = json.loads(cli("ps", app, "--json").stdout)["apps"]
        assert (listed["preemptions"], listed["held_by"]) == (1, "")
        if listed["state"] == "running" and listed["tasks"][0]["attempt"] > 0:
            break
        assert time.monotonic() < deadline, listed
    assert cli("cancel", app).returncode == 0


def test_an_app_that_can_neither_save_nor_be_suspended_is_held_with_force_only(cli: Cli) -> None:
    app = cli("submit", *script("import time; print('on', flush=True); time.sleep(600)")).stdout.strip()
    assert cli("wait", "--for", "running", "--timeout", "30s", app).returncode == 0
    time.sleep(3.0)
    held = cli("hold", app)
    assert (held.returncode, held.stdout) == (exit_codes.REFUSED, "")
    assert f"{app} is not held: it is not known to be able to save or to be suspended" in held.stderr
    assert json.loads(cli("ps", app, "--json").stdout)["apps"][0]["held_by"] == ""
    assert cli("hold", app, "--force").stderr == f"{app} is held\n"
    assert cli("cancel", app).returncode == 0


def test_an_app_of_which_no_process_was_started_has_no_output_and_says_what_to_mend(cli: Cli) -> None:
    app = cli("submit", "--retry", "0", "--no-check", "--", "/no/such/program").stdout.strip()
    assert cli("wait", "--timeout", "30s", app).returncode != 0
    assert cli("explain", app).stdout.rstrip().endswith("next: submit it again once what the reason names is mended")
    logs = cli("logs", app)
    assert (logs.returncode, logs.stdout) == (0, "")
    assert logs.stderr.startswith(f"{app} has no output: ")
    silent = cli("submit", "--retry", "0", *script("raise SystemExit(3)")).stdout.strip()
    assert cli("wait", "--timeout", "30s", silent).returncode == 3
    assert cli("explain", silent).stdout.rstrip().endswith(f"next: gpu-arbiter logs {silent}")
    assert cli("logs", "--tail", "0", silent).stderr == ""


def test_logs_follow_until_the_app_is_over(cli: Cli) -> None:
    app = cli("submit", *script("import time; print('one', flush=True); time.sleep(1); print('two')")).stdout.strip()
    assert cli("logs", "-f", app).stdout == "one\ntwo\n"
    assert cli("logs", "--tail", "1", app).stdout == "two\n"
    assert cli("logs", "-f", "--tail", "5", app).stdout == "one\ntwo\n"


def test_ps_prints_a_new_table_at_each_change_until_it_is_interrupted(cli: Cli, environment: dict[str, str]) -> None:
    app = cli("submit", *script("import time; time.sleep(600)")).stdout.strip()
    assert cli("wait", "--for", "running", app).returncode == 0
    command = [*PROGRAM, "ps", "-w"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        while app not in watch.stdout.readline():
            pass
        cli("cancel", app)
        while "no apps" not in watch.stdout.readline():
            pass
        watch.send_signal(signal.SIGINT)
        assert watch.communicate(timeout=PATIENCE_S) == ("", "")
    assert watch.returncode == exit_codes.INTERRUPTED


def test_events_tell_what_happened_to_an_app_and_go_on_until_they_are_interrupted(
    cli: Cli, environment: dict[str, str]
) -> None:
    app = cli("submit", "--tenant", "vision", *script("import time; time.sleep(600)")).stdout.strip()
    assert cli("wait", "--for", "running", app).returncode == 0
    command = [*PROGRAM, "events", "last", "--tail", "1", "--follow"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as follow:
        assert follow.stdout is not None
        while "  running  " not in follow.stdout.readline():  # until the arbiter knows of it, too
            pass
        cli("cancel", app)
        while "  freed  " not in follow.stdout.readline():
            pass
        follow.send_signal(signal.SIGINT)
        assert follow.communicate(timeout=PATIENCE_S) == ("", "")
    assert follow.returncode == exit_codes.INTERRUPTED
    told = cli("events", app, "--since", "1h").stdout.splitlines()
    assert [line[21:].split()[:2] for line in told if " exited " not in line] == [
        [app, kind] for kind in ("submitted", "admitted", "granted", "starting", "running", "cancelled", "freed")
    ]
    by_tenant = json.loads(cli("events", "--tenant", "vision", "--kind", "granted", "--json").stdout)
    assert app in {event["app"] for event in by_tenant["events"]}
    assert app in cli("events", "--node", "n1").stdout


def test_a_shell_completes_ids_with_states_nodes_and_tenants_of_a_site(
    cli: Cli, environment: dict[str, str], tmp_path: Path
) -> None:
    app = cli("submit", "--tenant", "biology", "-g", "2", *script("import time; time.sleep(600)")).stdout.strip()
    over = cli("submit", "--", "true").stdout.strip()
    assert cli("wait", over).returncode == 0
    assert cli("wait", "--for", "running", app).returncode == 0
    program = tmp_path / "gpu-arbiter"
    program.write_text(f"#!{sys.executable}\nfrom launch.cli import main\nmain()\n")
    program.chmod(0o755)
    own = environment | {"PATH": f"{tmp_path}:{environment['PATH']}"}

    def asked(line: str, shell: str = "bash") -> list[str]:
        words = f"gpu-arbiter {line}"
        asks = {"_GPU_ARBITER_COMPLETE": f"complete_{shell}", "COMP_WORDS": words, "_TYPER_COMPLETE_ARGS": words}
        asks["COMP_CWORD"] = str(words.count(" "))
        run = subprocess.run([program], env=own | asks, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
        assert run.stderr == ""
        return run.stdout.split("\n")[:-1]

    assert app in asked("cancel ")
    assert over not in asked("cancel ")
    assert {app, over} <= set(asked("explain "))
    assert app not in asked(f"hold {app} ")
    assert asked(f"logs {app}.") == [f"{app}.0-a0"]
    assert asked("drain ") == ["n1"]
    assert asked("events --tenant default,b") == ["default,biology"]
    assert f'"{app}":"running, 2 GPUs\\\\: python"' in "\n".join(asked("requeue ", "zsh"))
    shell = f"""
        eval "$(_GPU_ARBITER_COMPLETE=source_bash gpu-arbiter)"; COMP_WORDS=(gpu-arbiter release {app[:3]}) COMP_CWORD=2
        _gpu_arbiter_completion gpu-arbiter; echo "${{COMPREPLY[*]}}"
    """
    cli("hold", "--force", app)
    deadline = time.monotonic() + 30
    while app not in asked("release "):
        assert time.monotonic() < deadline, "its app agent's record says that it is held"
    assert cli("wait", "--for", "running", "--timeout", "0.1s", app).stderr.startswith(
        f"gpu-arbiter: {app} is still held"
    )
    run = subprocess.run(["bash", "-c", shell], env=own, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert run.stdout.split() == [app]
    cli("cancel", app)


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("me-999",), exit_codes.NOT_FOUND, "there is no app me-999"),
        (("--node", "n9"), exit_codes.NOT_FOUND, "there is no node n9"),
        (("--kind", "preempt"), exit_codes.USAGE, "next: try --kind preempted"),
        (("--since", "yesterday"), exit_codes.USAGE, "--since is 'yesterday', which is no length of time"),
        (tuple(f"me-{number}" for number in range(101)), exit_codes.USAGE, "ID has 101 names"),
    ],
)
def test_events_of_what_there_is_not_are_refused(cli: Cli, words: tuple[str, ...], code: int, sentence: str) -> None:
    done = cli("events", *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert sentence in done.stderr


def test_the_version_is_a_flag_too(cli: Cli) -> None:
    assert cli("--version").stdout == cli("version").stdout != ""


def test_every_answer_for_programs_names_its_schema(cli: Cli) -> None:
    cli("submit", "--", "true")
    for words, schema in [
        (("ps",), "apps/v1"),
        (("nodes",), "nodes/v1"),
        (("rounds",), "rounds/v1"),
        (("events", "--tail", "2"), "events/v1"),
        (("explain", "last"), "explain/v1"),
        (("doctor",), "doctor/v1"),
        (("version",), "version/v1"),
        (("submit", "--json", "--", "true"), "submitted/v1"),
        (("explain", "nobody-1"), "error/v1"),
    ]:
        done = cli(*words, GPU_ARBITER_OUTPUT="json")
        assert json.loads(done.stdout)["schema"] == schema, words


def test_doctor_hears_of_every_daemon_of_the_site_and_tries_its_policy(cli: Cli) -> None:
    app = cli("submit", *script("import time; time.sleep(600)")).stdout.strip()
    cli("wait", app, "--for", "running")
    (policy,) = {json.loads(cli("shares", "--json").stdout)["policy"]}
    done = cli("doctor", "--site", "--json")
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert found["clocks"]["verdict"] == "ok", found["clocks"]
    assert found["clocks"]["found"].startswith("of 3 clocks"), "the node agent's, the app agent's, and this host's"
    assert found["releases"]["verdict"] == "ok"
    assert found["releases"]["found"].startswith("all of 4 daemons and commands are of ")
    assert found["store of the arbiter"]["verdict"] == found["TLS"]["verdict"] == "ok"
    assert found["isolation"]["verdict"] == "note", found["isolation"]
    assert "no GPU was taken: no gateway signs what is submitted here" in found["isolation"]["found"]
    assert (found["fairness"]["verdict"], f"under {policy}" in found["fairness"]["found"]) == ("ok", True)
    cli("cancel", app)


def test_nodes_says_who_holds_which_gpu(cli: Cli) -> None:
    listed = cli("nodes").stdout
    assert [f"GPU-sim-n1-{index}" in listed for index in range(4)] == [True] * 4


def test_a_second_site_is_refused_with_the_way_to_have_one_and_that_works(
    cli: Cli, environment: dict[str, str]
) -> None:
    done = cli("up")
    refused, next_step = done.stderr.splitlines()
    assert done.returncode == exit_codes.FAILED
    assert refused.startswith("gpu-arbiter: a site is up already: its app agent answers at ")
    typed = next_step.partition("second: ")[2].replace("gpu-arbiter ", f"{' '.join(PROGRAM)} ")
    folder = Path(environment["HOME"]) / "second"
    command = f"exec env {typed.replace('FOLDER', str(folder))}"
    with subprocess.Popen(["bash", "-c", command], env=environment, stderr=subprocess.PIPE, text=True) as second:
        assert second.stderr is not None
        assert "gpu-arbiter is up: 1 node, 4 GPUs" in second.stderr.readline()
        second.send_signal(signal.SIGINT)
        second.communicate(timeout=PATIENCE_S)
    assert folder.is_dir()


@pytest.mark.parametrize("words", [("explain", "me-999"), ("logs", "me-999"), ("cancel", "me-999"), ("wait", "me-999")])
def test_what_does_not_exist_is_code_3(cli: Cli, words: tuple[str, ...]) -> None:
    done = cli(*words)
    assert done.returncode == exit_codes.NOT_FOUND
    assert done.stderr.startswith("gpu-arbiter: ")
    assert "Traceback" not in done.stderr


# --- without a site -------------------------------------------------------------------------------------------------


def test_without_a_daemon_every_verb_says_how_to_start_one(lonely: Cli) -> None:
    for words in (("ps",), ("nodes",), ("submit", "--", "true"), ("wait", "last")):
        done = lonely(*words)
        assert done.returncode == exit_codes.UNREACHABLE, words
        assert "start one with `gpu-arbiter up`" in done.stderr


def test_doctor_names_the_mend_of_what_is_broken(lonely: Cli) -> None:
    done = lonely("doctor", "--json", "--bus", "amqp://guest:guest@127.0.0.1:1/")
    assert done.returncode == exit_codes.FAILED
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert found["python"]["verdict"] == "ok"
    assert found["broker"]["verdict"] == found["app agent"]["verdict"] == "fail"
    assert "guest:guest" not in done.stdout
    assert "gpu-arbiter up" in found["app agent"]["found"]
    done = lonely("doctor", "--site", "--json")
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert (done.returncode, found["daemons"]["verdict"]) == (exit_codes.FAILED, "fail")
    assert "--config is of no use without --site" in lonely("doctor", "--config", "arbiter.toml").stderr


@pytest.mark.parametrize(
    ("verb", "text", "sentence"),
    [
        ("arbiter", "lease = 3", "unknown field `lease`"),
        ("arbiter", "", "bus is '', which is no broker's address"),
        ("arbiter", 'bus = "http://secret@x"', "bus is 'http://...@x'"),
        ("arbiter", '[arbiter]\npolicy = "chance"', f"arbiter.policy is 'chance'; choose one of {POLICY_NAMES}"),
        ("node-agent", 'node = "n1"', "missing required field `gpus`"),
        ("node-agent", 'node = "n1"\ngpus = "simulated:1"\nbus_file = "/none"', "bus_file /none cannot be read"),
        ("app-agent", 'owner = "Alice"', "owner is 'Alice'; use lower-case letters"),
    ],
)
def test_a_wrong_configuration_is_one_sentence_and_code_2(
    lonely: Cli, tmp_path: Path, verb: str, text: str, sentence: str
) -> None:
    (tmp_path / "daemon.toml").write_text(text)
    done = lonely(verb, "--config", "daemon.toml")
    assert done.returncode == exit_codes.USAGE
    assert sentence in done.stderr.splitlines()[0]


def test_real_gpus_are_never_replaced_by_simulated_ones(lonely: Cli) -> None:
    done = lonely("up", "--fresh", "--gpus", "cuda")
    assert done.returncode == exit_codes.USAGE
    assert "simulated:4" in done.stderr


def test_a_site_is_not_started_with_an_arbiters_file_that_is_wrong(lonely: Cli, tmp_path: Path) -> None:
    (tmp_path / "arbiter.toml").write_text("[arbiter]\npolicy = 'everything'\n")
    done = lonely("up", "--fresh", "--config", "arbiter.toml")
    assert done.returncode == exit_codes.USAGE
    assert "arbiter.toml: arbiter.policy is 'everything'; choose one of" in done.stderr


def test_an_arbiters_file_says_what_becomes_of_the_history(lonely: Cli, tmp_path: Path) -> None:
    (tmp_path / "arbiter.toml").write_text('history = "resume"\n')
    done = lonely("up", "--state-dir", "state", "--config", "arbiter.toml")
    assert done.returncode == exit_codes.USAGE
    assert "is empty, but a history of GPU time is to be resumed" in done.stderr


@pytest.mark.parametrize(("option", "mend"), [("--sharing", "timeslice"), ("--policy", "themis")])
def test_a_site_is_not_started_with_a_policy_or_a_sharing_that_there_is_not(
    lonely: Cli, option: str, mend: str
) -> None:
    done = lonely("up", "--fresh", option, "everything")
    assert done.returncode == exit_codes.USAGE
    assert option in done.stderr
    assert mend in done.stderr


def test_provision_prints_the_least_rights_of_a_participant(lonely: Cli) -> None:
    lines = lonely("provision", "app-alice", "--vhost", "gpu").stdout
    assert "rabbitmqctl set_permissions -p gpu app-alice" in lines
    assert lonely("provision", "Alice").returncode == exit_codes.USAGE
    assert "consumer_timeout" in lonely("provision", "broker").stdout


def test_a_reader_that_goes_away_is_no_error(lonely: Cli) -> None:
    command = f"{' '.join(PROGRAM)} provision app-alice | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


# --- staying --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_apps_survive_a_restart_of_up(environment: dict[str, str], tmp_path: Path) -> None:
    own = environment | {"GPU_ARBITER_URL": f"unix://{tmp_path}/control.sock", "XDG_STATE_HOME": str(tmp_path)}
    cli, gate = _runner(own, tmp_path), tmp_path / "gate"
    line = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.05)\nprint('through')"
    with _up(own):
        app = cli("submit", *script(line)).stdout.strip()
        assert cli("wait", "--for", "running", "--timeout", "30s", app).returncode == 0
    with _up(own):
        gate.touch()
        assert cli("wait", "--timeout", "60s", app).returncode == 0
        (seen,) = json.loads(cli("ps", "--json").stdout)["apps"]
        assert (seen["state"], seen["preemptions"], seen["migrations"]) == ("finished", 0, 0)
        events = json.loads(cli("events", "--json").stdout)["events"]
        kinds = [event["kind"] for event in events if event["app"] == app or event["kind"] == "led"]
        assert kinds[:2] == ["led", "submitted"], "from before the restart"
        assert kinds.count("led") == 2
        assert "finished" in kinds
        assert sorted(event["at_s"] for event in events) == [event["at_s"] for event in events]


@pytest.mark.slow
def test_up_takes_tenants_and_settings_from_an_arbiters_file(environment: dict[str, str], tmp_path: Path) -> None:
    own = environment | {"GPU_ARBITER_URL": f"unix://{tmp_path}/control.sock", "XDG_STATE_HOME": str(tmp_path)}
    (tmp_path / "arbiter.toml").write_text(
        "[arbiter]\npolicy = 'astraea'\ntenants_only = true\n[[arbiter.tenants]]\nname = 'vision'\nweight = 2.0\n"
    )
    cli = _runner(own, tmp_path)
    with _up(own, "--config", str(tmp_path / "arbiter.toml")) as greeting:
        assert "policy astraea" in greeting
        document = json.loads(cli("shares", "--json").stdout)
        assert document["policy"] == "astraea"
        assert [(each["tenant"], each["weight"]) for each in document["tenants"]] == [("vision", 2.0)]
        assert cli("shares").stdout.splitlines()[-1] == "policy: astraea"
        refused = cli("submit", "--tenant", "visoin", *script("pass"))
        assert refused.returncode == exit_codes.REFUSED
        assert (
            "tenant visoin is not among the tenants of this site (vision)\nnext: name one: --tenant" in refused.stderr
        )


@pytest.mark.full
def test_up_says_how_to_see_the_site_in_a_browser(environment: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("starlette", reason="the extra `web` is not installed")
    own = environment | {"GPU_ARBITER_URL": f"unix://{tmp_path}/control.sock"}
    command = [*PROGRAM, "up", "--state-dir", str(tmp_path / "a state"), "--gpus", "simulated:2"]
    with subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = [process.stderr.readline()]
        while said[-1] and not said[-1].startswith("next: "):
            said.append(process.stderr.readline())
        (line,) = [each for each in said if each.startswith("in a browser: ")]
        with shown_as(line, own) as address, urlopen(f"{address}now.json", timeout=PATIENCE_S) as answer:
            assert "simulated" in answer.read().decode()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0


@pytest.mark.full
def test_up_shows_the_site_in_a_browser_until_it_ends(environment: dict[str, str], tmp_path: Path) -> None:
    own = environment | {"GPU_ARBITER_URL": f"unix://{tmp_path}/control.sock", "XDG_STATE_HOME": str(tmp_path)}
    command = [*PROGRAM, "up", "--fresh", "--gpus", "simulated:2", "--web"]
    with subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address = next(line.split()[-1] for line in process.stderr if line.startswith("the site is at "))
        app = _runner(own, tmp_path)("submit", *script("pass")).stdout.strip()
        _runner(own, tmp_path)("wait", "--timeout", "60s", app)
        for page in ("now.json", f"apps/{app}.json", "report.json", "metrics", "readyz"):
            with urlopen(f"{address}{page}", timeout=PATIENCE_S) as answer:
                assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    with pytest.raises(URLError):
        urlopen(address, timeout=PATIENCE_S)


def _up(environment: dict[str, str], *options: str) -> _Up:
    return _Up(environment, options)


class _Up:
    """`gpu-arbiter up`, ended by Ctrl-C."""

    def __init__(self, environment: dict[str, str], options: Sequence[str]) -> None:
        self._environment = environment
        self._command = [*PROGRAM, "up", *options]

    def __enter__(self) -> str:
        self._process = subprocess.Popen(self._command, env=self._environment, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        greeting = self._process.stderr.readline()
        if "is up" not in greeting:
            self._process.kill()
            raise AssertionError(greeting)
        return greeting

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.communicate(timeout=PATIENCE_S)
        assert self._process.returncode == 0
