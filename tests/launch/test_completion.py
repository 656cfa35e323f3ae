"""What shells complete where no site is reached: words that never change, quickly and in silence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import typer

from app_agent.core.spec import SearchName
from arbiter.core.registry import POLICIES
from launch import cli, completion
from launch.registry import Verbs
from protocol.messages import AppStateName

#: Imports that take longer than a shell may be kept waiting.
HEAVY = ("pydantic", "rich", "numpy", "arbiter.core.registry", "structlog", "asyncio")


def completed(line: str, shell: str, folder: Path) -> tuple[list[str], str]:
    """What the program prints to a shell that completes `line`; heavy modules that it imported are on stderr."""
    program = (
        f"import atexit, sys; from launch import cli; heavy = {HEAVY}\n"
        "atexit.register(lambda: sys.stderr.write(' '.join(each for each in heavy if each in sys.modules)))\n"
        "sys.argv = ['gpu-arbiter']; cli.main()"
    )
    environment = {"GPU_ARBITER_URL": f"unix://{folder}/control.sock", "PATH": os.environ["PATH"]}
    words = f"gpu-arbiter {line}"
    asks = {"_GPU_ARBITER_COMPLETE": f"complete_{shell}", "COMP_WORDS": words, "_TYPER_COMPLETE_ARGS": words}
    asks["COMP_CWORD"] = str(words.count(" "))
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env=environment | asks, capture_output=True, text=True, check=False, cwd=folder)
    return run.stdout.splitlines(), run.stderr


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("rel", ["release"]),
        ("drain --for", ["--force"]),
        ("ps --state held,sus", ["held,suspended"]),
        ("wait ada-1 --for ", ["done", "running"]),
        ("submit --search ", list(get_args(SearchName))),
        ("up --policy gandiva-", ["gandiva-fair", "gandiva-placement"]),
        ("arbiter --log-level w", ["warning"]),
        ("sbatch --gpus-per", ["--gpus-per-node", "--gpus-per-task"]),
        ("sbatch --exp", ["--explain", "--export"]),
        ("cancel ", []),
        ("drain n", []),
        ("events --tenant ", []),
    ],
)
def test_words_are_completed_quickly_and_in_silence_where_no_site_is_reached(
    line: str, offered: list[str], tmp_path: Path
) -> None:
    told, heavy = completed(line, "bash", tmp_path)
    assert (told, heavy) == (offered or [""], "")


def test_zsh_is_given_descriptions_each_on_one_line(tmp_path: Path) -> None:
    told, heavy = completed("ps --sta", "zsh", tmp_path)
    states = ", ".join(get_args(AppStateName))
    assert told == [f"""_arguments '*: :(("--state":"only apps in these states\\\\: {states}"))'"""]
    assert heavy == ""
    assert completed("hold ", "zsh", tmp_path)[0] == ["_files"], "as a shell does by itself"


def test_the_policies_that_are_offered_are_those_that_there_are() -> None:
    assert set(completion.policy_names()) == set(POLICIES)


def test_every_parameter_of_a_kind_that_the_site_knows_is_completed() -> None:
    group = typer.main.get_command(cli.app)
    assert isinstance(group, Verbs)
    parameters = [(verb, each) for verb, command in group.load_all().items() for each in getattr(command, "params", ())]
    known = ("apps", "app", "ids", "tenant", "node", "policy", "policies", "state", "log_level", "sharing")
    bare = [
        f"{verb} {each.name}" for verb, each in parameters if each.name in known and not each._custom_shell_complete
    ]
    assert bare == []


def test_a_list_is_completed_at_its_last_name_and_offers_none_twice() -> None:
    assert completion.states("waiting,") == [
        (f"waiting,{state}", "") for state in get_args(AppStateName) if state != "waiting"
    ]
