"""The commands in the pages of docs/ do what the pages say, on one site of two nodes with simulated GPUs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping

import pytest

from tests.support import pages
from tests.support.page_site import Done, PageSite, page_site
from tests.support.patience import PATIENCE_S

#: They share one site.
pytestmark = pytest.mark.slow
SLURM = pages.DOCS / "slurm.md"
HEADER = "| Slurm | gpu-arbiter | what differs |"
ID = re.compile(r"alice-[a-z]{3}\d+")
#: What the flags of `submit` make of an app, as the arbiter tells it.
WISHES: Mapping[str, tuple[str, object]] = {
    "-g 2": ("want", 2),
    "--name big": ("name", "big"),
    "--tenant vision": ("tenant", "vision"),
    "--class interactive": ("class", "interactive"),
    "--cpus 4": ("cpus", 4.0),
    "--memory 8G": ("host_bytes", 8 * 2**30),
    "--priority -5": ("priority", -5),
    "--grace 2m": ("grace_s", 120.0),
}
#: The state that `ID` has before a command, `running` unless it is named here; and the state after it.
BEFORE = {"release": "held"}
AFTER = {"cancel": "cancelled", "hold": "held", "release": "running", "requeue": "running"}


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageSite]:
    with page_site(tmp_path_factory.mktemp("pages")) as running:
        yield running


@pytest.fixture
def site(shared_site: PageSite) -> Iterator[PageSite]:
    yield shared_site
    shared_site.begin_anew()


# --- docs/slurm.md --------------------------------------------------------------------------------------------------

ROWS = [(theirs, re.findall(r"`([^`]+)`", ours)) for theirs, ours, _ in pages.rows(SLURM, HEADER)]


def submitted(site: PageSite, *flags: str, state: str = "running") -> str:
    """Submit an app, and return its id once it has that state."""
    done = site.type(f"gpu-arbiter submit {' '.join(flags)} -- python train.py")
    assert done.code == 0, done.said
    app = done.stdout.strip()
    site.wait_state(app, state)
    return app


@pytest.mark.full
@pytest.mark.parametrize(("theirs", "ours"), ROWS, ids=[" and ".join(ours) for _, ours in ROWS])
def test_what_slurm_can_do_is_done_by_the_command_beside_it(site: PageSite, theirs: str, ours: list[str]) -> None:
    app = ""
    for line in ours:
        verb = line.split()[1]
        if " ID" in line:
            app = submitted(site, *(["--array", "2,3"] if "ID.3" in line else []))
            if BEFORE.get(verb) == "held":
                assert site.type(f"gpu-arbiter hold {app}").code == 0
                site.wait_state(app, "held")
        elif verb in ("ps", "cancel"):
            submitted(site)
            app = stage_of_two(site)
        if verb == "undrain":
            assert site.type(line.replace("undrain", "drain")).code == 0
        if verb == "run" or ENDLESS.search(line) or "logs" in line:
            site.let_programs_end()
        if line.endswith("-w"):
            assert app in watched(site, line)
            continue
        done = site.type(line.replace(" ID", f" {app}"))
        assert done.code == 0, (line, done.said)
        if verb in ("submit", "sbatch") and "--dry-run" not in line:
            (app,) = ID.findall(done.stdout)
        check(site, line, verb, app, done)


def stage_of_two(site: PageSite) -> str:
    """Have an app named `big` that waits; return its id."""
    submitted(site, "-g 4")
    return submitted(site, "-g 4", "--name big", state="waiting")


def check(site: PageSite, line: str, verb: str, app: str, done: Done) -> None:
    """Demand of a row's command what it is there for."""
    answer = json.loads(done.stdout) if "--json" in line else {}
    if "--dry-run" in line:
        assert "would start" in done.stdout
    elif "ID." in line:
        assert f"{app}.3 " in done.stderr
        site.wait_state(app, "running")
        return
    elif verb in ("submit", "sbatch"):
        alone = verb == "submit" or "--parsable" in line
        assert done.stdout == ("" if alone else "Submitted batch job ") + f"{app}\n"
        known = site.record(app)
        assert [(flag, known[field]) for flag, (field, _) in WISHES.items() if flag in line] == [
            (flag, value) for flag, (_, value) in WISHES.items() if flag in line
        ]
        assert ("--wait" in line) <= (known["state"] == "finished")
        assert ("--after" in line) <= (known["state"] == "waiting")
    elif verb in ("run", "logs"):
        assert done.stdout == "trained\n"
    elif verb == "ps":
        found = [each["id"] for each in answer["apps"]] if answer else ID.findall(done.stdout)
        assert app in found
        assert (len(set(found)) == 1) == ("waiting" in line or " ID" in line)
    elif verb == "cancel":
        assert f"{app} is cancelled" in done.stderr
        alone = "--state" in line or " ID" in line
        assert (len(done.stderr.splitlines()) == 1) == alone
    elif verb == "explain":
        if answer:
            assert {"rho", "ltgf", "binding"} <= answer.keys()
        else:
            assert done.stdout.startswith(f"{app} of tenant default is running")
    elif verb == "nodes":
        told = [node["id"] for node in answer["nodes"]] if answer else re.findall(r"^n\d", done.stdout, re.MULTILINE)
        assert sorted(set(told)) == ["n1", "n2"]
    elif verb == "init":
        assert len(done.stdout.split()) == 4
    else:
        assert re.search(WORDS[verb], done.said), done.said
    if verb in AFTER:
        site.wait_state(app, AFTER[verb])


#: Among what the other commands print.
WORDS = {
    "hold": "is (leaving|held)",
    "release": "is ",
    "requeue": "is ",
    "wait": "^$",
    "rounds": r"^ +ROUND|^ROUND",
    "doctor": r"arbiter +ok",
    "shares": "(TENANT|OWNER) ",
    "report": "GPU-hours in all|no GPU time",
    "drain": "n2 is drained",
    "undrain": "n2 is in use",
    "version": r"^\d+\.\d+",
}


def watched(site: PageSite, line: str) -> str:
    """Return what a command prints that goes on until Ctrl-C."""
    with subprocess.Popen(
        ("sh", "-c", f"exec {line}"), cwd=site.folder, env=os.environ | site.env, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        told = "".join(process.stdout.readline() for _ in range(4))
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    return told


def test_each_table_of_the_slurm_page_is_read() -> None:
    told = re.findall(r"^\| .*`gpu-arbiter .*\|$", SLURM.read_text(), re.MULTILINE)
    assert len(told) == len(ROWS) > 30
    assert all(ours and all(line.startswith("gpu-arbiter ") for line in ours) for _, ours in ROWS)


# --- blocks of commands ---------------------------------------------------------------------------------------------

BLOCKS = [block for page in ("user", "admin", "cli", "slurm") for block in pages.blocks(pages.DOCS / f"{page}.md")]
TYPED = [block for block in BLOCKS if block.language == "sh"]
#: The user's own files that pages speak of.
FILES = {
    "app.toml": 'command = ["python", "train.py"]\ngang = 2\n',
    "evaluate.py": "print('evaluated')\n",
    "clean.py": "print('cleaned')\n",
    "grid.txt": "--lr 0.1\n--lr 0.01\n",
    "trace.csv": "job_id,submit_s,gpus,duration_s\n1,0,2,60\n2,10,4,30\n",
}
#: These end once the program does.
ENDLESS = re.compile("gpu-arbiter (run|wait|logs -f) | --wait (--|script)")


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=block.id, marks=[pytest.mark.full, pytest.mark.timeout(500)] if block.full else [])
        for block in TYPED
        if not block.not_run
    ],
)
def test_the_commands_of_a_page_run(site: PageSite, block: pages.Block) -> None:
    for name, text in FILES.items():
        (site.folder / name).write_text(text)
    shutil.copytree(pages.ROOT / "examples", site.folder / "examples", dirs_exist_ok=True)
    shutil.copy(pages.ROOT / "examples" / "auction.json", site.folder)
    submitted(site)  # which pages call `last`
    if ENDLESS.search(block.text):
        site.let_programs_end()
    commands = block.commands()
    for line in ["\n".join(commands)] if "$" in block.text else commands:
        done = site.type(line)
        assert done.code == 0, (line, done.said)


def test_a_block_that_is_not_run_says_why() -> None:
    assert [block.id for block in BLOCKS if not block.language] == [], "say what is in it: ```sh, ```toml"
    reasons = [block.not_run or block.full for block in TYPED if block.not_run or block.full]
    assert [reason for reason in reasons if len(reason.split()) < 3] == []
    told = [len(re.findall("<!-- (?:not run|run in full)", page.read_text())) for page in pages.DOCS.glob("*.md")]
    assert sum(told) == len(reasons), "a reason stands right above a block of one of these pages"
    assert len(TYPED) > 2 * len(reasons) > 0
