"""Slurm scripts, unchanged but for the command, on a site of two nodes with four simulated GPUs each."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.page_site import PageSite, page_site
from tests.support.patience import PATIENCE_S

#: They share one site.
pytestmark = pytest.mark.slow

TRAIN = """\
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --partition=gpu              # a site's own word
#SBATCH --nodes=1 --ntasks-per-node=1
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=4
#SBATCH --mem=8G
#SBATCH --time=1-00:00:00
#SBATCH --array=0-3%2
#SBATCH --output="logs/%x-%A_%a.out"
#SBATCH --mail-type=END,FAIL
##SBATCH --nodelist=n7

set -euo pipefail
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
seeds=(11 22 33 44)
mkdir -p results
echo "task $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT in $SLURM_ARRAY_JOB_ID"
srun --ntasks=1 --cpu-bind=none python one.py --seed "${seeds[$SLURM_ARRAY_TASK_ID]}" "$@"
"""
#: One program of the array; a job that is the third at a time would be seen.
ONE = """
import os, sys, time
from pathlib import Path
index = os.environ["SLURM_ARRAY_TASK_ID"]
(Path("now") / index).touch()
together = len(list(Path("now").iterdir()))
time.sleep(0.3)
assert "SLURM_NTASKS" not in os.environ, "frameworks would take it for a start by srun"
Path("results", index).write_text(" ".join([*sys.argv[1:], os.environ["SLURM_GPUS_ON_NODE"], str(together)]))
(Path("now") / index).unlink()
"""
COLLECT = """\
#!/bin/bash
#SBATCH -J collect -G1
#SBATCH -o collect.out
cat results/* > all.txt
echo "$SLURM_JOB_NAME has $(wc -l < <(ls results)) results"
"""
PIPELINE = """
jid=$(sbatch --parsable train.sh --epochs 3)
sbatch --dependency=afterok:$jid --wait collect.sh
echo "$jid"
"""


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageSite]:
    with page_site(tmp_path_factory.mktemp("sbatch")) as running:
        shim = running.folder / "bin" / "sbatch"
        shim.write_text('#!/bin/sh\nexec gpu-arbiter sbatch "$@"\n')
        shim.chmod(0o755)
        yield running


@pytest.fixture
def site(shared_site: PageSite) -> Iterator[PageSite]:
    yield shared_site
    shared_site.begin_anew()


def shell(site: PageSite, line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line in the shell of a user."""
    return subprocess.run(
        ["bash", "-ec", line],
        cwd=site.folder,
        env=os.environ | site.env | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def submitted(site: PageSite, name: str, text: str, flags: str = "") -> str:
    """Submit a script; return its id."""
    (site.folder / name).write_text(text)
    done = shell(site, f"sbatch --parsable {flags} {name}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_for(what: Callable[[], bool], told: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, told()
        time.sleep(0.02)


def logs(site: PageSite, app: str) -> str:
    return site.type(f"gpu-arbiter logs {app}").stdout


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_script_with_an_array_and_one_that_depends_on_it_run_unchanged(site: PageSite) -> None:
    for name, text in (("train.sh", TRAIN), ("one.py", ONE), ("collect.sh", COLLECT)):
        (site.folder / name).write_text(text)
    (site.folder / "now").mkdir()
    done = shell(site, PIPELINE)
    assert done.returncode == 0, done.stderr
    first, array = done.stdout.splitlines()
    assert re.fullmatch(r"Submitted batch job alice-[a-z]{3}\d+", first)
    results = [(site.folder / "results" / str(index)).read_text().split() for index in range(4)]
    assert [each[:-1] for each in results] == [
        ["--seed", seed, "--epochs", "3", "2"] for seed in ("11", "22", "33", "44")
    ]
    assert max(int(each[-1]) for each in results) <= 2, "more than %2 of them ran at a time"
    outputs = [(site.folder / "logs" / f"train-{array}_{index}.out").read_text() for index in range(4)]
    assert outputs == [f"task {index} of 4 in {array}\n" for index in range(4)]
    assert logs(site, f"{array}.2") == outputs[2], "the output is where logs finds it, too"
    assert (site.folder / "collect.out").read_text() == "collect has 4 results\n"
    assert "--partition has no effect: there are no partitions" in done.stderr


def test_a_script_may_be_changed_once_it_is_submitted(site: PageSite) -> None:
    site.let_programs_end()
    app = submitted(site, "edited.sh", "#!/bin/sh\n# second line\necho $0: $1 >&2; badly 2>&1\n", "--hold --gpus=1")
    (site.folder / "edited.sh").write_text("#!/bin/sh\necho another text\n")
    site.wait_state(app, "held", "failed", "leaving")
    site.type(f"gpu-arbiter release {app}")
    site.type(f"gpu-arbiter wait {app}")
    assert logs(site, app).startswith(f"{site.folder}/edited.sh:")
    assert ": 3: " in logs(site, app), "a message of the shell names the line as the file has it"
    assert "another" not in logs(site, app)


TRAPPED = """\
#!/bin/bash
#SBATCH --gpus=1 --output=trapped.out
trap 'echo saving; exit 0' TERM
echo "attempt $SLURM_RESTART_COUNT of $SLURM_JOB_ID"
while [ ! -e end ]; do sleep 0.05; done
"""


def test_a_script_that_must_leave_its_gpus_hears_of_it_and_goes_on_in_the_same_file(site: PageSite) -> None:
    (site.folder / "trapped.out").write_text("of an earlier run\n")
    app = submitted(site, "trapped.sh", TRAPPED)
    output = site.folder / "trapped.out"
    wait_for(lambda: text_of(output) == f"attempt 0 of {app}\n", lambda: text_of(output))
    assert site.type(f"gpu-arbiter hold {app}").code == 0
    site.wait_state(app, "held")
    assert text_of(output) == f"attempt 0 of {app}\nsaving\n"
    assert site.type(f"gpu-arbiter release {app}").code == 0
    wait_for(lambda: "attempt 1" in text_of(output), lambda: text_of(output))
    site.let_programs_end()
    assert site.type(f"gpu-arbiter wait {app}").code == 0
    assert text_of(output) == f"attempt 0 of {app}\nsaving\nattempt 1 of {app}\n"
    assert logs(site, app) == f"attempt 1 of {app}\n"


COOPERATES = """
from pathlib import Path
from time import sleep
from app_agent import session
start = session.restore(lambda folder: int(Path(folder, "step").read_text()))
print("from", start, flush=True)
for step in range(start, 10**6):
    sleep(0.01)
    if session.step_end(step, save=lambda folder: Path(folder, "step").write_text(str(step))):
        raise SystemExit(session.EXIT_REQUEUE)
    if Path("end").exists():
        break
session.done()
"""


@pytest.mark.parametrize("output", ["", "#SBATCH -o steps.out -e steps.err\n"])
@pytest.mark.parametrize("line", ["python steps.py", "srun python steps.py\necho after >&2"])
def test_a_training_script_within_it_saves_and_goes_on_where_it_was(site: PageSite, output: str, line: str) -> None:
    (site.folder / "steps.py").write_text(COOPERATES)
    app = submitted(site, "steps.sh", f"#!/bin/bash\n#SBATCH --gpus=1\n{output}{line}\n")
    site.wait_state(app, "running")
    wait_for(lambda: "from 0" in logs(site, app), lambda: logs(site, app))
    assert site.type(f"gpu-arbiter hold {app}").code == 0
    site.wait_state(app, "held")
    assert site.type(f"gpu-arbiter release {app}").code == 0
    wait_for(lambda: re.match("from [1-9]", logs(site, app)) is not None, lambda: logs(site, app))
    site.let_programs_end()
    assert site.type(f"gpu-arbiter wait {app}").code == 0
    if output:
        assert re.fullmatch(r"from 0\nfrom [1-9]\d*\n", text_of(site.folder / "steps.out"))


def test_a_script_that_fails_fails_once_with_its_own_exit_code(site: PageSite) -> None:
    text = "#!/bin/bash\n#SBATCH -o fails.out -G1\nseq 3\nexit 7\n"
    (site.folder / "fails.sh").write_text(text)
    done = shell(site, "sbatch --wait fails.sh || echo code $?")
    assert done.stdout.splitlines()[-1] == "code 7"
    assert text_of(site.folder / "fails.out").split() == ["1", "2", "3"]


def test_all_of_the_output_is_in_the_file_although_the_file_takes_it_slowly(site: PageSite) -> None:
    os.mkfifo(site.folder / "slow.out")
    end = os.open(site.folder / "slow.out", os.O_RDWR | os.O_NONBLOCK)  # takes 64 KiB until it is read
    text = "#!/bin/bash\n#SBATCH -o slow.out -G1 --open-mode=append\nseq -w 20000\ntouch printed\n"
    app = submitted(site, "slow.sh", text)
    wait_for((site.folder / "printed").exists, lambda: logs(site, app))
    got = b""
    while len(got) < 120_000 and site.record(app)["state"] != "failed":
        with suppress(BlockingIOError):
            got += os.read(end, 2**20)
        if site.record(app)["state"] == "finished":
            with suppress(BlockingIOError):
                got += os.read(end, 2**20)
            break
    os.close(end)
    assert got.decode().split() == [f"{number:05}" for number in range(1, 20001)]


def test_what_is_left_behind_with_the_output_open_does_not_keep_the_job(site: PageSite) -> None:
    text = "#!/bin/bash\n#SBATCH -o left.out -G1\nsleep 600 &\necho done\n"
    (site.folder / "left.sh").write_text(text)
    assert shell(site, "sbatch --wait left.sh").returncode == 0
    assert text_of(site.folder / "left.out") == "done\n"


def test_a_script_of_another_interpreter_and_one_on_standard_input_run(site: PageSite) -> None:
    text = (
        "#!/usr/bin/env python\n#SBATCH --gpus=1\nimport os, sys; print(os.environ['SLURM_JOB_NAME'], sys.argv[1:])\n"
    )
    app = submitted(site, "report.py", text)
    done = shell(
        site, "sbatch --wait report.py a 'b c'; sbatch --wait <<'END'\n#!/bin/bash\n#SBATCH -G1\necho in $1\nEND"
    )
    assert done.returncode == 0, done.stderr
    _, first, second = [app, *re.findall(r"alice-\w+", done.stdout)]
    assert logs(site, first) == "report.py ['a', 'b c']\n"
    assert logs(site, second) == "in\n"


def test_a_variable_that_the_script_names_travels_along_and_a_secret_does_not(site: PageSite) -> None:
    text = "#!/bin/bash\n#SBATCH -G1\necho $LR ${API_TOKEN:-none} $OTHER\n"
    (site.folder / "named.sh").write_text(text)
    done = shell(site, "LR=0.3 API_TOKEN=x sbatch --wait named.sh")
    (app,) = re.findall(r"alice-\w+", done.stdout)
    assert logs(site, app) == "0.3 none\n"
    assert "API_TOKEN of your environment may be secret" in done.stderr


def test_the_commands_that_explain_prints_submit_the_same(site: PageSite) -> None:
    (site.folder / "tell.sh").write_text(
        '#!/bin/bash\n#SBATCH -G 2 -c 4 --mem=8G\necho "$SLURM_JOB_NAME $A $PWD $1 $SLURM_GPUS"\n'
    )
    (site.folder / "sub").mkdir(exist_ok=True)
    line = "sbatch --account=vision --nice=5 --signal=B:TERM@30 -D sub --export=ALL,A=\"it's\" tell.sh 'a  b'"
    explained = shell(site, line.replace("sbatch", "sbatch --explain", 1)).stdout
    assert explained.startswith(f"cd {site.folder}/sub && gpu-arbiter submit ")
    own, native = shell(site, line), shell(site, explained)
    assert (own.returncode, native.returncode) == (0, 0), native.stderr
    apps = [re.findall(r"alice-\w+", done.stdout)[-1] for done in (own, native)]
    assert site.type(f"gpu-arbiter wait {' '.join(apps)}").code == 0
    told = [logs(site, app) for app in apps]
    assert told == [f"tell.sh it's {site.folder}/sub a  b 2\n"] * 2
    fields = ("name", "tenant", "priority", "cpus", "host_bytes", "grace_s")
    wished = [[site.record(app)[field] for field in fields] for app in apps]
    assert wished == [["tell.sh", "vision", -5, 4.0, 8 * 2**30, 30.0]] * 2


def test_nothing_is_submitted_if_one_flag_is_not_known(site: PageSite) -> None:
    (site.folder / "odd.sh").write_text("#!/bin/bash\n#SBATCH --bar=a100 --foo\n#SBATCH --ntasks=4\n")
    before = site.type("gpu-arbiter ps -a").stdout
    done = shell(site, "sbatch odd.sh || echo code $?")
    assert done.stdout == "code 2\n"
    assert "--bar (line 2" in done.stderr
    assert "--foo (line 2)" in done.stderr
    assert site.type("gpu-arbiter ps -a").stdout.count("alice-") == before.count("alice-")
