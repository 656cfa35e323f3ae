"""A policy is one file and one line of the table: nothing else knows its name, its class or its settings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from arbiter.config import parse
from arbiter.core.policies.common.ordered import Ranked, by_least
from arbiter.core.registry import FAIRNESS_KNOB, POLICIES, RENAMED, Entry
from arbiter.core.seam import DEFAULT_POLICY, AppView, PolicySettings, Traits, View, require
from arbiter.core.state.model import ArbiterSettings
from protocol.config import ConfigError
from simulator import fluid
from simulator.experiment import Experiment, ExperimentError, execute, settings_of
from simulator.figures.results import Run

ROOT = Path(__file__).parents[2]
PRODUCT = (
    *("arbiter", "node_agent", "app_agent", "valuation", "protocol", "simulator", "launch"),
    *("gpu_arbiter.py", "packaging", "scripts"),
)
#: The policies themselves, their table, and the one default.
OWN = ("arbiter/core/policies/", "arbiter/core/registry.py", "arbiter/core/seam.py")
#: Modules that may say some of the names all the same, and why.
EXCEPTIONS = {
    "launch/verbs/auction.py": {"themis"},  # the verb of the auction itself: it solves one from a file
    "launch/verbs/simulation.py": {"themis"},  # examples of a drawn workload, which has its name from its paper
    "launch/verbs/web.py": {"rand"},  # the command `openssl rand`
    "simulator/experiment.py": {"fitgpp", "themis"},  # the workloads that are drawn after papers
    "simulator/figures/report.py": {"themis"},  # cites the paper that defines rho
    "simulator/workload/__init__.py": {"fitgpp", "themis"},  # exports the workloads that are drawn after papers
    "simulator/workload/fitgpp.py": {"fifo", "fit_gpp", "fitgpp"},  # the workload of a paper, and the load it aims at
    "simulator/workload/themis.py": {"themis"},  # the workloads of a paper
}


# --- nothing knows a policy ------------------------------------------------------------------------------------------


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield all code but the policies' own, the registry, and the one default."""
    for root in PRODUCT:
        paths = [ROOT / root] if root.endswith(".py") else sorted((ROOT / root).rglob("*.py"))
        for path in paths:
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(OWN):
                yield name, ast.parse(path.read_text())


def in_words(text: str) -> str:
    """Return the words of a text or a name, joined by underscores: of ``policy.yarn-cs``, and of ``YarnCs``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|\W", "_", text).lower()


def names() -> re.Pattern[str]:
    """Return what finds the name of a policy, or of its class, among the words of a text."""
    known = {in_words(name) for name in POLICIES} | {in_words(entry.kind.__name__) for entry in POLICIES.values()}
    return re.compile(rf"(?<![a-z0-9])({'|'.join(sorted(known, key=len, reverse=True))})(?![a-z0-9])")


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        match node:
            case (
                ast.Module(body=[ast.Expr(value=ast.Constant(value=str()) as text), *_])
                | ast.ClassDef(body=[ast.Expr(value=ast.Constant(value=str()) as text), *_])
                | ast.FunctionDef(body=[ast.Expr(value=ast.Constant(value=str()) as text), *_])
                | ast.AsyncFunctionDef(body=[ast.Expr(value=ast.Constant(value=str()) as text), *_])
            ):
                yield text


def named(tree: ast.Module) -> Iterator[str]:
    """Yield the policies that names, imports and strings of the code name; docstrings and comments may cite any."""
    find = names()
    prose = {id(text) for text in docstrings(tree)}
    for node in ast.walk(tree):
        if id(node) not in prose:
            for _, value in ast.iter_fields(node):
                for text in value if isinstance(value, list) else [value]:
                    if isinstance(text, str):
                        yield from find.findall(in_words(text))


def test_no_name_of_a_policy_stands_outside_its_own_package() -> None:
    assert {name: found for name, tree in sources() if (found := {*named(tree)})} == EXCEPTIONS


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('from x import Fifo\nif policy == "drf":\n    y.Themis()\n', ["drf", "fifo", "themis"]),
        ('FIELD = "policy.themis.leftover"', ["themis"]),
        ("from arbiter.core.policies.themis.auction import instance", ["themis"]),
        ('x = f"--policy themis {x}"', ["themis"]),
        ("def themis_x(): ...", ["themis"]),
        ("import x as Themis", ["themis"]),
        ("def f(yarn_cs): ...", ["yarn_cs"]),
        ("f(fitgpp=1)", ["fitgpp"]),
        ("class MaxMinFtf: ...", ["max_min_ftf"]),
        ('x = "gandiva-fair"', ["gandiva_fair"]),
        ('"""As `themis` does."""\nclass A:\n    """As themis."""\n# themis\nmkfifo(random, dormant, last)', []),
    ],
)
def test_a_name_of_a_policy_is_found(code: str, found: list[str]) -> None:
    assert sorted(named(ast.parse(code))) == found


def test_what_the_names_of_settings_became_are_settings() -> None:
    assert DEFAULT_POLICY in POLICIES
    for new in {*RENAMED.values(), FAIRNESS_KNOB} - {""}:
        kind, _, field = new.rpartition(".")
        settings = ArbiterSettings if kind == "arbiter" else POLICIES[kind.removeprefix("policy.")].settings
        assert field in settings.__struct_fields__, new


def test_a_policy_that_sells_has_slots_and_one_that_probes_has_bidders() -> None:
    for name, entry in POLICIES.items():
        assert entry.kind.traits.sells == (entry.made().slot_s > 0.0) == ("sell" in vars(entry.kind)), name
        assert entry.kind.traits.probes == ("bidders" in vars(entry.kind)), name


def test_what_is_for_sites_has_a_section_of_its_own_and_what_is_a_baseline_a_line_of_their_table() -> None:
    text = (ROOT / "docs" / "policies.md").read_text()
    sections = {*re.findall(r"^### ([a-z-]+)$", text, re.MULTILINE)}
    lines = {*re.findall(r"^\| `([a-z-]+)` \|", text.partition("\n## Baselines\n")[2], re.MULTILINE)}
    known = {name: entry.live for name, entry in POLICIES.items() if entry.kind is not Toy}
    live, baselines = ({name for name, each in known.items() if each == kind} for kind in (True, False))
    assert live == sections & known.keys(), "docs/policies.md: a live policy has a section ### of its name, others none"
    assert baselines == lines - {fluid.NAME}, (
        "docs/policies.md: a baseline has a row in the table Baselines, others none"
    )


# --- a policy of one file and one line -------------------------------------------------------------------------------


class Settings(PolicySettings, frozen=True):
    """What a toy needs to know."""

    widest_first: bool = False
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        require(self.patience_s >= 0.0, "patience_s", self.patience_s, "0 or more")


class Toy(Ranked):
    """The widest gang first, or the narrowest; who has waited longer than patience comes before all."""

    traits = Traits("lasting")
    by = "by width"

    def __init__(self, settings: Settings) -> None:
        self._sign = -1.0 if settings.widest_first else 1.0
        self._patience_s = settings.patience_s

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps by the width of their gangs."""
        late = [view.elapsed_s(app) > self._patience_s for app in view.apps]
        keys = [-1e9 if over else self._sign * app.gang for over, app in zip(late, view.apps, strict=True)]
        return by_least(view, keys)


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "toy", Entry(Toy, Settings))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """One job holds both GPUs for 10 s; while it runs a narrow job and a wide one come."""
    file = tmp_path / "jobs.csv"
    file.write_text("job_id,submit_s,gpus,duration_s\nfirst,0,2,10\nnarrow,1,1,100\nwide,2,2,100\n", encoding="utf-8")
    return str(file)


def starts(run: Run) -> list[str]:
    return [row.job for row in sorted(run.jobs, key=lambda row: row.first_start_s or 0.0)]


def run(trace: str, *knobs: tuple[str, str]) -> Run:
    return execute(Experiment(trace, "1x2", "toy", "none", knobs=knobs))


def test_a_toy_runs_in_the_simulator_and_its_settings_decide(trace: str) -> None:
    widest = ("policy.toy.widest_first", "true")
    assert starts(run(trace)) == ["first", "narrow", "wide"]
    wide = run(trace, widest)
    assert starts(wide) == ["first", "wide", "narrow"]
    assert starts(run(trace, widest, ("policy.toy.patience_s", "8.5"))) == ["first", "narrow", "wide"]
    assert (wide.settings["policy.toy.widest_first"], wide.settings["policy.toy.patience_s"]) == (True, 60.0)


def test_a_toy_is_set_in_the_file_and_by_words_and_refuses_what_is_out_of_range() -> None:
    fields = {"arbiter": {"policy": "toy"}, "policy": {"toy": {"patience_s": 5}}}
    loaded = parse(fields, "arbiter.toml").arbiter
    assert loaded.policy_settings == {"widest_first": False, "patience_s": 5.0}
    with pytest.raises(ConfigError, match=r"arbiter\.toml: policy\.toy: patience_s is -1\.0; it must be 0 or more"):
        parse({"policy": {"toy": {"patience_s": -1.0}}}, "arbiter.toml")
    with pytest.raises(ExperimentError, match=r"^policy\.toy\.patience_s is -1\.0; it must be 0 or more"):
        settings_of(Experiment("", "1x2", "toy", knobs=(("policy.toy.patience_s", "-1"),)))
