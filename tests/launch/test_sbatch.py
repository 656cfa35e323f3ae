"""Batch scripts of Slurm, read as Slurm reads them: lines `#SBATCH`, flags, what they become, what is refused."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from launch import sbatch, slurm_shell
from launch.faults import Fault
from launch.sbatch import FLAGS, Batch, Refusals
from launch.slurm_shell import Around, Script
from launch.verbs import sbatch as command_line
from tests.support.pages import DOCS
from tests.support.patience import PATIENCE_S

BASH = "#!/bin/bash\n"


def read(*words: str, text: str = BASH, environ: Mapping[str, str] = {}) -> Batch:
    """Return what flags and a script mean together, in the folder `/home/ana`."""
    refusals = Refusals()
    line, rest = sbatch.read([*words, "a.sh"], refusals)
    assert rest[0] == "a.sh"
    of_script = sbatch.read_script(text, "a.sh", refusals)
    values = sbatch.overruled(of_script, sbatch.of_environment(environ, refusals), line)
    refusals.check()
    script = Script("/home/ana/a.sh", text, slurm_shell.interpreter_of(text, "a.sh"))
    return sbatch.batch(values, script, rest[1:], environ=environ, here="/home/ana", user="ana")


def wrong(*words: str, text: str = BASH) -> str:
    """Return the one sentence, and the mend, with which a script is refused."""
    with pytest.raises(Fault) as found:
        read(*words, text=text)
    assert found.value.next_step
    return f"{found.value.sentence}; {found.value.next_step}"


# --- lines and flags ------------------------------------------------------------------------------------------------


def test_lines_are_read_up_to_the_first_command_with_their_quotes_and_comments() -> None:
    text = (
        "#!/bin/bash -l\n"
        "#SBATCH --job-name='a b' -G 2   # --nodelist=n1\n"
        "\n"
        "  # a comment\n"
        "##SBATCH --nodelist=n2\n"
        "# SBATCH --nodelist=n3\n"
        "  #SBATCH --nodelist=n4\n"
        "#SBATCH --chdir=x\\ y -c4\n"
        "cd /data\n"
        "#SBATCH --nodelist=n5\n"
    )
    assert sbatch.directives(text, "a.sh") == [
        (2, ["--job-name=a b", "-G", "2"]),
        (8, ["--chdir=x y", "-c4"]),
    ]
    batch = read(text=text)
    assert (batch.submit["name"], batch.submit["gpus"], batch.submit["cpus"]) == ("a b", "2", 4.0)
    assert batch.cwd == "/home/ana/x y"


@pytest.mark.parametrize(
    "words",
    [
        ("--gpus=3",),
        ("--gpus", "3"),
        ("-G3",),
        ("-G", "3"),
        ("--gpus=1", "-G", "3"),
        ("-HG3",),
        ("--gres=gpu:3",),
        ("--gres", "gpu:a100:3"),
        ("--gpus-per-node=3", "--gpus-per-task=3"),
        ("--gpus-per-n=3",),
    ],
)
def test_a_flag_may_be_written_in_each_way_that_slurm_reads(words: tuple[str, ...]) -> None:
    assert read(*words).submit["gpus"] == "3"


@pytest.mark.parametrize(
    ("words", "gpu_type"),
    [
        (("--gres=gpu:a100:2",), "a100"),
        (("--gres=gpu:a100",), "a100"),
        (("--gpus=h100:2",), "h100"),
        (("--gpus-per-node=nvidia_a100-sxm4-80gb:2",), "nvidia_a100-sxm4-80gb"),
        (("--gpus=2", "--constraint=h100"), "h100"),
        (("-G2", "-C", "a100|h100"), "a100,h100"),
        (("-G2", "-C", "[a100|h100]"), "a100,h100"),
        (("--gpus=H100:2", "-C", "h100"), "H100"),
    ],
)
def test_a_type_of_gpu_is_the_type_that_submit_asks_for(words: tuple[str, ...], gpu_type: str) -> None:
    batch = read(*words)
    assert batch.submit["gpu_type"] == gpu_type
    assert f"--gpu-type={shlex.quote(gpu_type)}" in batch.native(batch.cwd)
    assert batch.notes == ()
    assert "gpu_type" not in read("-G2", "--gres=gpu:2").submit


def test_the_command_line_wins_over_the_environment_and_that_over_the_script() -> None:
    text = f"{BASH}#SBATCH -A vision -J one --time=10 --no-requeue\n"
    environ = {"SBATCH_ACCOUNT": "speech", "SBATCH_TIMELIMIT": "20", "SBATCH_UNKNOWN": "x", "SBATCH_WAIT": ""}
    batch = read("-J", "two", "--requeue", text=text, environ=environ)
    assert (batch.submit["tenant"], batch.submit["name"], batch.submit["time_limit"]) == ("speech", "two", "20m")
    assert batch.wait
    assert not any("requeue" in each for each in batch.notes)


def test_all_flags_that_are_not_known_are_told_in_one_error() -> None:
    text = f"{BASH}#SBATCH --nodelist=n1 --foo bar\n#SBATCH -X --gpus=1 stray\n"
    told = wrong("--begin", "now+1hour", "--bar=2", text=text)
    assert told == (
        "nothing is submitted, as sbatch has no such flag here: --begin (no flag chooses a time; submit it then), "
        "--bar, --nodelist (line 2; no flag chooses a node), --foo (line 2), "
        "-X (line 3), stray (line 3; a word that belongs to no flag); "
        "leave them out; docs/slurm.md, Slurm scripts as they are, has all flags"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--nodes=2",), "--nodes is 2, and a batch script runs on one node"),
        (("-n", "4"), "--ntasks is 4, and one task runs in a job; write --ntasks=1 and --gpus, and have torchrun"),
        (("--ntasks-per-node=2",), "--ntasks-per-node is 2"),
        (("--gpus=two",), "--gpus is 'two', which is no number of GPUs"),
        (("--gpus=1", "--gres=gpu:2"), "--gpus=1 and --gres=gpu:2 ask for different numbers of GPUs"),
        (("--gres=gpu:a:1,gpu:b:1",), "which names GPUs twice"),
        (("--gres=shard:1",), "--gres names 'shard'"),
        (
            ("--gres=gpu:a100:1", "-C", "h100"),
            "--gres=gpu:a100:1 and --constraint=h100 ask for different types of GPUs",
        ),
        (("--constraint=a100&nvlink",), "--constraint is 'a100&nvlink', and a constraint can name types of GPUs only"),
        (("--constraint=a100*2",), "--constraint is 'a100*2'"),
        (("-c", "0"), "--cpus-per-task is '0', which is no number from 1 on"),
        (("-c2", "--cpus-per-gpu=2"), "are both given"),
        (("--mem=1G", "--mem-per-gpu=1G"), "--mem and --mem-per-gpu are both given"),
        (("--mem=lots",), "--mem is 'LOTS', which is no amount of memory"),
        (("--time=soon",), "--time is 'soon', which is no time limit"),
        (("--signal=@60",), "--signal is '@60', which is no signal and time"),
        (("--nice=many",), "--nice is 'many'"),
        (("--array=5-1",), "--array: '5-1' names no index"),
        (("-d", "afternotok:a-1"), "'afternotok' has no counterpart here"),
        (("-d", "after:a-1+5"), "'after' has no counterpart here"),
        (("-d", "singleton"), "'singleton' has no counterpart here"),
        (("-d", "afterok:a-1?afterok:a-2"), "`?` has no counterpart"),
        (("-d", "afterok:a-1_3"), "'a-1_3' is no id of a job or of a whole array"),
        (("-d", "afterok:"), "'' is no id of a job"),
        (("-A", "Team_1"), "--account is 'Team_1', and names of tenants have lower-case letters"),
        (("--export=ALL,GONE",), "--export names GONE, and there is no such variable here; write --export=GONE=VALUE"),
        (("--open-mode=w",), "--open-mode is 'w'"),
        (("-o", "%q.out"), "'%q.out' names a file by %q, which has no meaning here"),
        (("--hold=yes",), "--hold takes no value, and has 'yes'"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_sentence_with_the_flag_and_the_mend(
    words: tuple[str, ...], sentence: str
) -> None:
    assert sentence in wrong(*words)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("echo\n", "a.sh is no batch script: its first line names no interpreter; begin it with #!/bin/bash"),
        ("#!/bin/bash\r\necho\r\n", "a.sh has lines that end as on DOS"),
        ("#!/bin/bash\n#SBATCH -J 'a\n", "line 2 of a.sh has a quote without an end"),
        ("#!/bin/bash\n#SBATCH --gpus\n", "--gpus has no value, in line 2"),
    ],
)
def test_a_script_that_cannot_be_read_is_one_sentence(text: str, sentence: str) -> None:
    assert sentence in wrong(text=text)


# --- what they mean -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "limit"),
    [
        ("90", "90m"),
        ("120", "2h"),
        ("10:30", "630s"),
        ("2:00:00", "2h"),
        ("1-12", "36h"),
        ("1-12:30", "2190m"),
        ("0-00:00:45", "45s"),
        ("0", None),
        ("UNLIMITED", None),
    ],
)
def test_a_time_limit_is_read_in_all_of_slurms_forms(written: str, limit: str | None) -> None:
    assert read(f"--time={written}").submit.get("time_limit") == limit


@pytest.mark.parametrize(
    ("words", "memory"),
    [
        (("--mem=16000",), "16000M"),
        (("--mem=1T",), "1024G"),
        (("--mem=8GB",), "8G"),
        (("--mem=0",), None),
        (("--mem-per-cpu=2G", "-c", "4"), "8G"),
        (("--mem-per-cpu=512",), "512M"),
        (("--mem-per-gpu=10G", "-G2"), "20G"),
    ],
)
def test_memory_is_that_of_the_whole_job(words: tuple[str, ...], memory: str | None) -> None:
    assert read(*words).submit.get("memory") == memory


@pytest.mark.parametrize(
    ("written", "after"),
    [
        ("afterok:a-1", ["a-1:ok"]),
        ("afterok:a-1:a-2,afterany:last", ["a-1:ok", "a-2:ok", "last:any"]),
        ("a-1", ["a-1:any"]),
    ],
)
def test_dependencies_are_those_of_submit(written: str, after: list[str]) -> None:
    assert read("-d", written).submit["after"] == after


def test_the_rest_of_the_flags_are_those_of_submit() -> None:
    batch = read("-A", "vision", "--nice", "--cpus-per-gpu=3", "-G2", "--signal=B:TERM@90", "-a", "0-8:4%1")
    assert batch.submit == {
        "name": "a.sh", "gpus": "2", "retry": 0, "tenant": "vision", "cpus": 6.0, "priority": -100, "grace": "90s",
        "array": "0-8:4%1",
    }  # fmt: skip
    assert batch.notes == ()


def test_flags_without_effect_are_told_once_for_each_reason() -> None:
    batch = read("-G1", "-p", "gpu", "--mail-user=a", "--mail-type", "END", "--signal=USR1@60", "--no-requeue")
    assert list(batch.notes) == [
        "--mail-type, --mail-user have no effect: nothing sends mail",
        "--partition has no effect: there are no partitions",
        "--no-requeue: a job that fails is not started again, but one that is preempted is",
        "a job gets SIGTERM, and no USR1, when it must leave its GPUs, and no signal before its time limit "
        "(docs/slurm.md, Slurm scripts as they are)",
    ]
    assert read().submit["gpus"] == "1"
    assert read().notes == ("the script asks for no GPU; it gets one, as every job has GPUs here",)


@pytest.mark.parametrize(
    ("export", "env"),
    [
        (None, ["LR", "PATH_TO"]),
        ("ALL", ["LR", "PATH_TO"]),
        ("ALL,SEED=1", ["SEED=1", "LR", "PATH_TO"]),
        ("NONE", None),
        ("LR", ["LR"]),
        ("SEED=1,OTHER", ["SEED=1", "OTHER"]),
    ],
)
def test_the_variables_that_travel_along_are_those_that_are_asked_for_or_named(
    export: str | None, env: list[str] | None
) -> None:
    text = f'{BASH}echo $LR "${{PATH_TO:-x}}" $PATH $SLURM_JOB_ID $HF_TOKEN $UNSET $PWD\n'
    names = ("LR", "PATH_TO", "PATH", "SLURM_JOB_ID", "HF_TOKEN", "PWD", "OTHER")
    batch = read("-G1", *([f"--export={export}"] if export else []), text=text, environ=dict.fromkeys(names, "1"))
    assert batch.submit.get("env") == env
    assert any("HF_TOKEN" in each for each in batch.notes) == (export in (None, "ALL", "ALL,SEED=1"))


# --- what the script finds ------------------------------------------------------------------------------------------

NODE = {
    "PATH": "/usr/bin:/bin",
    "GPU_ARBITER_JOB": "ana-kqz7.8",
    "GPU_ARBITER_ATTEMPT": "0",
    "GPU_ARBITER_GPUS": "2",
    "GPU_ARBITER_ARRAY_INDEX": "8",
}


def run(batch: Batch, folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run a job's command as a node does."""
    return subprocess.run(
        batch.command, cwd=folder, env=NODE | changes, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


def test_the_variables_of_a_script_are_those_of_slurm(tmp_path: Path) -> None:
    done = run(read("-a", "4,8-12:4", "-c", "3", text="#!/bin/sh\nset | grep ^SLURM\n"), tmp_path)
    told = dict(line.split("=", 1) for line in done.stdout.replace("'", "").splitlines())
    assert told.items() >= {
        "SLURM_JOB_ID": "ana-kqz7.8", "SLURM_ARRAY_JOB_ID": "ana-kqz7", "SLURM_ARRAY_TASK_ID": "8",
        "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "4", "SLURM_ARRAY_TASK_MAX": "12",
        "SLURM_ARRAY_TASK_STEP": "4", "SLURM_JOB_NAME": "a.sh", "SLURM_SUBMIT_DIR": "/home/ana",
        "SLURM_CPUS_PER_TASK": "3", "SLURM_GPUS_ON_NODE": "2", "SLURM_RESTART_COUNT": "0", "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "1",
    }.items()  # fmt: skip
    assert told["SLURMD_NODENAME"] == told["SLURM_JOB_NODELIST"] != ""
    (alone,) = run(read(text="#!/bin/bash\necho $SLURM_JOB_ID ${SLURM_ARRAY_TASK_ID-none}\n"), tmp_path).stdout.split(
        "\n"
    )[:1]
    assert alone == "ana-kqz7 none"


@pytest.mark.parametrize("shell", ["bash", "dash"])
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("srun -n 1 -c4 --gres=gpu:2 -u printf '<%s>' 'a  b' c", "<a  b><c>"),
        ("srun -n4 echo no; echo $?", "2"),
        ("srun --ntasks 4 echo no; echo $?", "2"),
        ("srun --gpus 1 echo no; echo $?", "2"),
        ("srun --pty bash; echo $?", "2"),
        ("scontrol requeue 7; echo $?", "1"),
        ("srun env | grep -c -E '^SLURM_(NTASKS|PROCID|LOCALID)='", "0"),
    ],
)
def test_srun_runs_one_task_and_refuses_more(shell: str, line: str, told: str, tmp_path: Path) -> None:
    done = run(read(text=f"#!/usr/bin/env {shell}\n{line}\n"), tmp_path)
    assert done.stdout.strip() == told
    assert ("srun: " in done.stderr or "scontrol: " in done.stderr) == (told in ("1", "2"))


@pytest.mark.parametrize("shell", ["bash", "dash"])
@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("srun python3 term.py; echo code $?", "ready\nsaved\ncode 7\n"),
        ("trap 'kill $(cat pid)' TERM; srun python3 term.py; echo code $?", "ready\nsaved\ncode 7\n"),
        ("set -eu; srun true; srun python3 -c 'import sys; print(sys.stdin.read())' < pid | tr -d 0-9", "\n\n"),
    ],
)
def test_srun_passes_sigterm_on_unless_the_script_has_a_trap_of_its_own(
    shell: str, script: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "term.py").write_text(
        "import os, signal, time\n"
        "def leave(*_): os.write(1, b'saved\\n'); os._exit(7)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "open('pid', 'w').write(str(os.getpid()))\n"
        "os.write(1, b'ready\\n')\n"
        "time.sleep(60)\n"
    )
    (tmp_path / "pid").write_text("1\n")
    batch = read(text=f"#!/usr/bin/env {shell}\n{script}\n")
    with subprocess.Popen(batch.command, cwd=tmp_path, env=NODE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        if "ready" in told:
            process.terminate()
        assert said + process.stdout.read() == told


@pytest.mark.skipif(shutil.which("python3") is None, reason="a program to be the last command")
def test_the_last_command_takes_the_place_of_the_shells(tmp_path: Path) -> None:
    script = 'echo $$\npython3 -c "import os; print(os.getpid())"\n\n'
    first, second = run(read(text=BASH + script), tmp_path).stdout.split()
    assert first == second, "signals reach the program, and there is no process more than needed"


@pytest.mark.parametrize(
    ("words", "files"),
    [
        (("-o", "logs/%x-%A_%a.%%"), {"logs/a.sh-ana-kqz7_8.%": "out\nerr\n"}),
        (("-o", "%3a", "-e", "b"), {"008": "out\n", "b": "err\n"}),
        (("-e", "%u.err"), {"ana.err": "err\n"}),
        (("-o", "both", "-e", "both"), {"both": "out\nerr\n"}),
        (("-o", "none"), {}),
    ],
)
def test_output_goes_to_the_files_as_well(words: tuple[str, ...], files: dict[str, str], tmp_path: Path) -> None:
    done = run(read("-a", "0-9", *words, text=f"{BASH}echo out\necho err >&2\nexit 3\n"), tmp_path)
    assert done.returncode == 3
    assert sorted((done.stdout + done.stderr).split()) == ["err", "out"]
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == files


@pytest.mark.parametrize(
    ("flag", "attempt", "left"),
    [
        ((), "0", "new\n"),
        ((), "1", "old\nnew\n"),
        (("--open-mode=append",), "0", "old\nnew\n"),
        (("--open-mode=truncate",), "1", "new\n"),
    ],
)
def test_a_file_that_is_there_is_kept_after_a_preemption(
    flag: tuple[str, ...], attempt: str, left: str, tmp_path: Path
) -> None:
    (tmp_path / "f").write_text("old\n")
    run(read("-o", "f", *flag, text=f"{BASH}echo new\n"), tmp_path, GPU_ARBITER_ATTEMPT=attempt)
    assert (tmp_path / "f").read_text() == left


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    done = run(read("-o", "f/out", text=f"{BASH}echo ran\n"), tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the job cannot write its output to f/out; see that the folder can be written" in done.stderr


def test_standard_input_is_a_file_if_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("read\n")
    assert run(read("-i", "f", "-o", "g", text=f"{BASH}cat\n"), tmp_path).stdout == "read\n"


def test_a_script_that_is_too_long_for_a_command_is_run_from_its_file(tmp_path: Path) -> None:
    text = (
        f"{BASH}#SBATCH -G1\n{'# ' + 'x' * 100 + chr(10) * 1}" * 1
        + "# y\n" * 40_000
        + 'srun echo "$0" "$1" $SLURM_NTASKS\n'
    )
    path = tmp_path / "long.sh"
    path.write_text(text)
    script = Script(str(path), text, ("/bin/bash",))
    command = slurm_shell.command(script, ["arg"], Around("n", "u", "/"))
    assert max(map(len, command)) < 131_072
    done = subprocess.run(command, env=NODE, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout == f"{path} arg 1\n"
    assert any("is read when the job starts, as its text is too long" in each for each in read(text=text).notes)


@pytest.mark.full
def test_lightning_starts_its_processes_itself(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    asks = "from lightning.fabric.plugins.environments import SLURMEnvironment as S; print(S.detect(), S.job_id())"
    done = run(read("--ntasks-per-node=1", text=f"{BASH}srun {sys.executable} -c '{asks}'\n"), tmp_path)
    assert done.stdout == "False None\n", done.stderr


def test_a_script_that_is_no_utf_8_is_run_from_its_file_and_its_lines_count(tmp_path: Path) -> None:
    path = tmp_path / "old.sh"
    path.write_bytes("#!/bin/bash\n# caf\xe9\n#SBATCH --gpus=2\necho \xe9\n".encode("latin-1"))
    batch = command_line.batch_of(["-J", "old", str(path)])
    assert (batch.submit["name"], batch.submit["gpus"]) == ("old", "2")
    assert f"{path} is read when the job starts, as it is no UTF-8 text; leave it as it is until then" in batch.notes
    done = subprocess.run(batch.command, env=NODE, capture_output=True, check=False, cwd=tmp_path)
    assert done.stdout == b"\xe9\n"


# --- the page -------------------------------------------------------------------------------------------------------


def test_the_page_has_each_flag_once() -> None:
    page = (DOCS / "slurm.md").read_text()
    section = page[page.index("## Slurm scripts as they are") : page.index("## What has no counterpart")]
    rows = [line for line in section.splitlines() if line.startswith("| `-")]
    used = [name for row in rows for name in re.findall(r"`--([a-z-]+)", row.split("|")[1])]
    assert sorted(used) == sorted(flag.name for flag in FLAGS.values() if flag.fate == "used")
    for fate, title in (("no effect", "**No effect.**"), ("refused", "**Refused.**")):
        (paragraph,) = [each for each in section.split("\n\n") if each.startswith(title)]
        named = re.findall(r"`--([a-z-]+)`", paragraph)
        assert sorted(named) == sorted(flag.name for flag in FLAGS.values() if flag.fate == fate)
