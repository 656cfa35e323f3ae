"""What the pages name exists: settings with their defaults, flags, files, verbs, schemas."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from arbiter.core.registry import POLICIES
from arbiter.core.state.model import ArbiterSettings
from launch import spec
from launch.registry import MODULE_OF
from launch.sbatch import FLAGS
from node_agent.config import NodeConfig
from tests.support.pages import DOCS, ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
CODE = (".py", ".toml", ".service", ".csv", ".json", ".sh", "Makefile")
#: Names of other programs, of variables of the environment, and of files that users have.
FOREIGN = {
    "--install-completion",
    "condor_ssh_to_job pam_slurm_adopt --stdio",
    "NODE_FAIL NO_COLOR HF_HOME ID_3 wait_job",
    "close_all_user_connections cluster_status delete_user delete_vhost",
    "pg_promote pg_reload_conf synchronous_standby_names",
    "finished.json manifest.json tenant_shares.csv throughputs.csv two_weeks.csv",
    "gpu_arbiter_parked_gpu_seconds_total",  # put together from its parts; test_web_metrics.py knows them all
}
KNOWN = frozenset(" ".join(FOREIGN).split()) | {f"--{name}" for name in FLAGS}


def followed() -> list[str]:
    """The files of the repository."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


FILES = followed()
SOURCE = "\n".join(
    (ROOT / file).read_text(encoding="utf-8")
    for file in FILES
    if file.endswith(CODE) and Path(__file__).name not in file  # which has the names of `KNOWN`
)
WORDS = frozenset(re.findall(r"\w+", SOURCE)) | {Path(file).stem for file in FILES}


def unknown(text: str) -> Iterator[str]:
    """What a page names within backticks that is nowhere in the code."""
    for span in re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)):
        yield from (name for name in re.findall(r"(?<![\w/.-])[a-zA-Z]\w*_\w+", span) if name not in WORDS)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", span):
            if flag not in SOURCE and flag[2:].replace("-", "_") not in WORDS:
                yield flag
        file = re.fullmatch(r"[\w/]+\.(py|toml|md|sh|csv|service|json)", span)
        if file and not any(each == span or each.endswith(f"/{span}") for each in FILES) and span not in SOURCE:
            yield span


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_what_a_page_names_is_in_the_code(page: Path) -> None:
    assert sorted(set(unknown(page.read_text(encoding="utf-8"))) - KNOWN) == []


def test_a_name_that_is_not_in_the_code_would_be_found() -> None:
    text = (
        "`no_such_setting`, `--no-such-flag`, `nosuchpage.py`; `lease_s`, `--gpus`, `node.toml`\n```\nno_block_s\n```\n"
    )
    assert list(unknown(text)) == ["no_such_setting", "--no-such-flag", "nosuchpage.py"]


# --- the picture of the rooms ---------------------------------------------------------------------------------------

#: The rooms whose modules the picture of the architecture lists one by one.
LISTED = (
    *("protocol", "protocol/bus", "protocol/journal", "valuation", "arbiter", "arbiter/core", "arbiter/core/state"),
    *("arbiter/core/members", "arbiter/core/leases", "arbiter/core/rounds", "arbiter/core/layers"),
    *(
        "arbiter/core/placement",
        "node_agent",
        "node_agent/core",
        "node_agent/devices",
        "node_agent/workers",
        "app_agent",
    ),
    *("app_agent/core", "app_agent/training", "simulator", "simulator/faults", "simulator/figures", "launch"),
    "launch/web",
)


@pytest.mark.parametrize("room", LISTED)
def test_each_module_of_a_listed_room_is_in_the_picture(room: str) -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    picture = page[page.index("\nprotocol/    the shared language") : page.index("\nNothing in a core may import")]
    modules = {Path(file).stem for file in FILES if re.fullmatch(rf"{room}/[a-z]\w*\.py", file)}
    assert modules, "there is no such room"
    assert sorted(modules - set(re.findall(r"\w+", picture))) == [], "docs/architecture.md: give each a few words"


# --- defaults -------------------------------------------------------------------------------------------------------

TABLES = [ArbiterSettings(), NodeConfig(node="n1", gpus="nvml")]
TABLES += [entry.settings() for entry in POLICIES.values()]
DEFAULTS: dict[str, list[object]] = {}
for table in TABLES:
    for field in table.__struct_fields__:
        DEFAULTS.setdefault(field, []).append(getattr(table, field))


def stated(text: str) -> Iterator[tuple[str, object]]:
    """The defaults of settings that a page states, as in: `lease_s` (600)."""
    for name, value in re.findall(r"`([a-z]+_[a-z_]+)` \((-?[\d.]+|true|false|\"[^\"]+\")[);,]", text):
        if name in DEFAULTS:
            yield name, json.loads(value)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_defaults_that_a_page_states_are_those_of_the_code(page: Path) -> None:
    assert [pair for pair in stated(page.read_text(encoding="utf-8")) if pair[1] not in DEFAULTS[pair[0]]] == []


def test_defaults_are_found_in_the_pages() -> None:
    found = {name for page in PAGES for name, _ in stated(page.read_text(encoding="utf-8"))}
    assert {"interactive_share", "interactive_s", "threshold_gpu_s", "pack_gain_min"} <= found


# --- the page of the command line -----------------------------------------------------------------------------------


def test_each_verb_has_a_row_in_the_page_of_the_command_line() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    table = page[page.index("| verb | does |") : page.index("`ID` is an app's id")]
    rows = [re.findall(r"`([a-z-]+)", line.split("|")[1]) for line in table.splitlines()[2:] if line]
    assert sorted(verb for row in rows for verb in row) == sorted(MODULE_OF)


def test_each_schema_of_an_answer_is_in_the_page_of_the_command_line() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    verbs = "\n".join((ROOT / file).read_text() for file in FILES if re.match(r"launch/(verbs/\w+|faults)\.py", file))
    printed = set(re.findall(r'"([a-z-]+/v1)"', verbs))
    assert printed - set(re.findall(r"`?([a-z-]+/v1)", page)) == set()
    assert "submitted/v1" in printed


def spec_file_part() -> str:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    return page[page.index("**Spec file.**") : page.index("## Arrays and chains")]


def test_the_page_of_the_command_line_names_each_field_of_a_spec_file() -> None:
    prose, table = spec_file_part().split("| field | says |")
    named = {word.strip("-") for word in re.findall(r"`([a-z_]+)`", prose)}
    shown = set(re.findall(r"^\| `([a-z_]+) =", table, re.MULTILINE))
    assert named | shown == set(spec.FIELDS.split(", "))


@pytest.mark.parametrize("line", re.findall(r"^\| `([a-z_]+ = [^`]+)`", spec_file_part(), re.MULTILINE))
def test_each_field_that_the_page_shows_can_be_written_so(line: str, tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(line)
    fields = spec.load(path)
    (name,) = fields
    needed = {"cwd": "/home/ana", "checkpoint_root": "/", "trials": [["true"]], "restart_s": 5.0}
    needed |= {"array": "0-19"} if name == "array_at_most" else {}
    assert getattr(spec.build(needed | fields), name) != getattr(spec.build(needed), name)
