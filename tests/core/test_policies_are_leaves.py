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
PRODUCT = ("arbiter", "node_agent", "app_agent", "valuation", "protocol", "simulator", "launch")
#: Here the names are those of papers' workloads, not of policies.
WORKLOADS = ("simulator/workload/fitgpp.py",)


# --- nothing knows a policy ------------------------------------------------------------------------------------------


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Return all code but the policies' own, the registry, and the one default."""
    own = ("arbiter/core/policies/", "arbiter/core/registry.py", "arbiter/core/seam.py", *WORKLOADS)
    for folder in PRODUCT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(own):
                yield name, ast.parse(path.read_text())


def named(tree: ast.Module) -> Iterator[str]:
    """Yield the names of policies and of their classes that stand in code; prose may cite them."""
    classes = {entry.kind.__name__ for entry in POLICIES.values()}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if text in POLICIES:
                yield text
            case ast.Name(id=text) | ast.alias(name=text) | ast.Attribute(attr=text) if text in classes:
                yield text


def test_no_name_of_a_policy_stands_outside_its_own_package() -> None:
    assert {name: found for name, tree in sources() if (found := sorted(set(named(tree))))} == {}


def test_a_name_of_a_policy_is_found() -> None:
    tree = ast.parse('from x import Fifo\nif policy == "drf":\n    y.Themis()\n')
    assert sorted(named(tree)) == ["Fifo", "Themis", "drf"]


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
