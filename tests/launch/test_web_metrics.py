"""Metrics, health, alert rules and the dashboard: what rules and panels name is exposed, and faults raise alerts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

pytest.importorskip("starlette", reason="the extra `web` is not installed")

from arbiter import queries
from arbiter.core.state.gpu_time import Standing
from launch.web.server import make_app
from protocol import certificates
from protocol.durations import Durations
from protocol.journal import JournalError
from protocol.messages import AppId, EventFilter, TenantId
from tests.core.test_reports import Books
from tests.launch.test_doctor import a_certificate
from tests.launch.test_web import Asked, Browser, at
from tests.support.arbiter_site import gpu_id
from tests.support.pages import ROOT, blocks

PROMTOOL = shutil.which("promtool")
SAMPLE = re.compile(r"^(gpu_arbiter_\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
PAGE = ROOT / "docs" / "operations.md"
NAME = re.compile(r"gpu_arbiter_\w+")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    books = Books(tmp_path / "ledger.db")
    books.note(books.site.app("eve-1", gang=2, demand=2))
    books.note(books.site.wait(3.0))
    monkeypatch.setattr("launch.web.sources.FRESH_S", -1.0)  # each look is a new one
    with at(monkeypatch, books.site.now):
        yield Asked(books, tmp_path / "ledger.db")


@pytest.fixture
def browser(asked: Asked) -> Browser:
    return Browser(make_app(asked))


def samples(browser: Browser) -> dict[tuple[str, str], float]:
    """Every sample of a scrape, by name and labels."""
    status, headers, body = browser.get("/metrics")
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/plain")
    return {(name, labels or ""): float(value) for name, labels, value in SAMPLE.findall(body)}


def expressions() -> list[str]:
    """Every expression of a rule or a panel."""
    rules = [rule["expr"] for group in shipped("alerts.yml")["groups"] for rule in group["rules"]]
    panels = [target["expr"] for panel in shipped("dashboard.json")["panels"] for target in panel["targets"]]
    return [*rules, *panels]


def shipped(name: str) -> Any:
    text = (files("launch.web") / name).read_text("utf-8")
    return json.loads(text) if name.endswith("json") else yaml.safe_load(text)


def test_the_figures_are_those_of_the_arbiter(browser: Browser, asked: Asked) -> None:
    told, site = samples(browser), asked.books.site
    history = site.arbiter.state.history
    for tenant in ("team", "other"):
        standing = history.of_tenant(tenant, site.now)  # type: ignore[arg-type]
        label = f'tenant="{tenant}"'
        assert told["gpu_arbiter_gpu_seconds_total", label] == standing.allocated_gpu_s
        assert told["gpu_arbiter_draining_gpu_seconds_total", label] == standing.draining_gpu_s
        assert told["gpu_arbiter_starting_gpu_seconds_total", label] == standing.starting_gpu_s
        assert told["gpu_arbiter_fair_gpu_seconds_total", label] == standing.fair_gpu_s
    assert told["gpu_arbiter_up", ""] == 1.0
    assert told["gpu_arbiter_gpus", 'state="leased"'] == told["gpu_arbiter_gpus", 'state="free"'] == 1.0
    assert told["gpu_arbiter_pending_gpus", 'tenant="team"'] == 2.0
    assert told["gpu_arbiter_oldest_wait_seconds", 'tenant="team"'] == 3.0
    assert told["gpu_arbiter_node_up", 'node="n1"'] == 1.0
    assert told["gpu_arbiter_rounds_total", ""] == asked.books.ledger.round_count() > 0


def test_an_arbiter_of_the_version_before_that_tells_of_no_starts_has_all_other_figures(
    browser: Browser, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_figures = queries._spent

    def before(standing: Standing) -> dict[str, float]:
        return {name: value for name, value in all_figures(standing).items() if name != "starting_gpu_seconds"}

    monkeypatch.setattr(queries, "_spent", before)
    told = samples(browser)
    assert told["gpu_arbiter_lost_gpu_seconds_total", 'tenant="team"'] == 0.0
    assert ("gpu_arbiter_starting_gpu_seconds_total", 'tenant="team"') not in told


def test_the_wait_of_an_app_and_the_phases_of_rounds_are_counted_once(browser: Browser, asked: Asked) -> None:
    waits = 'class="batch",tenant="team"'
    before = samples(browser)
    assert ("gpu_arbiter_wait_seconds_count", waits) not in before, "what was granted before the first look"
    assert ("gpu_arbiter_round_seconds_count", 'phase="decision"') not in before
    books = asked.books
    rounds, submitted = books.ledger.round_count(), books.site.arbiter.state.apps[AppId("eve-1")].arrived_at
    books.note(books.site.wait(2.0) + books.site.node("n2", 2) + books.site.wait(1.0))
    (granted,) = [each.at for _, each in books.ledger.events(EventFilter(kinds=("granted",), ids=("eve-1",)), limit=9)]
    for _ in range(2):
        told = samples(browser)
        assert told["gpu_arbiter_wait_seconds_count", waits] == 1.0
        assert told["gpu_arbiter_wait_seconds_sum", waits] == granted - submitted > 1.0
        assert told["gpu_arbiter_wait_seconds_bucket", 'class="batch",le="1.0",tenant="team"'] == 0.0
        assert told["gpu_arbiter_wait_seconds_bucket", 'class="batch",le="10.0",tenant="team"'] == 1.0
        new = books.ledger.round_count() - rounds
        assert told["gpu_arbiter_round_seconds_count", 'phase="decision"'] == new > 0


def test_an_app_that_is_newer_than_the_arbiters_answer_is_counted_by_the_next_one_with_its_class(
    browser: Browser, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    books, gone = asked.books, AppId("ben-9")
    samples(browser)
    books.note(books.site.node("n2", 4) + books.site.wait(1.0))
    answer = asked.present()
    books.note(books.site.app("ben-7") + books.site.app(gone) + books.site.wait(2.0))
    with monkeypatch.context() as patch:
        patch.setattr(asked, "present", lambda *_: answer)
        for _ in range(2):
            assert waits_counted(browser) == {"batch": 1.0}, "eve-1"
    with at(monkeypatch, books.site.now):
        new = asked.present()
    new["apps"] = [app for app in new["apps"] if app["id"] != gone]
    with monkeypatch.context() as patch:
        patch.setattr(asked, "present", lambda *_: new)
        for _ in range(2):
            assert waits_counted(browser) == {"batch": 2.0, "unknown": 1.0}


def waits_counted(browser: Browser) -> dict[str, float]:
    """How many waits there are by class."""
    told = samples(browser).items()
    return {labels.split('"')[1]: value for (name, labels), value in told if name == "gpu_arbiter_wait_seconds_count"}


def test_a_ledger_that_is_away_leaves_the_histograms_as_they_were(
    browser: Browser, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples(browser)
    books = asked.books
    books.note(books.site.node("n2", 2) + books.site.wait(1.0))
    key = ("gpu_arbiter_round_seconds_count", 'phase="decision"')
    counted, present = samples(browser)[key], asked.present()

    def away() -> None:
        raise JournalError("the database does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(asked, "ledger", away)
        patch.setattr(asked, "present", lambda *_: present)
        assert samples(browser)[key] == counted


def test_ids_of_apps_are_on_one_metric_only(browser: Browser, asked: Asked) -> None:
    told = samples(browser)
    assert {name for name, labels in told if 'app="' in labels or "ben-1" in labels} == {"gpu_arbiter_gpu_info"}
    (gpu,) = asked.books.site.held("ben-1")
    assert told["gpu_arbiter_gpu_info", f'app="ben-1",gpu="{gpu}",node="n1",owner="ben",tenant="other"'] == 1.0
    assert sum(name == "gpu_arbiter_gpu_info" for name, _ in told) == 2


def test_while_the_arbiter_is_away_only_that_is_told(browser: Browser, asked: Asked) -> None:
    assert browser.get("/readyz")[0] == 200
    asked.away = True
    assert samples(browser) == {("gpu_arbiter_up", ""): 0.0}
    status, _, body = browser.get("/readyz")
    assert (status, "does not answer" in body) == (503, True)
    assert browser.get("/healthz")[0] == 200


def whole(asked: Asked) -> None:
    """Let the site have something to tell of each metric, but of what is new in the ledger."""
    commits = Durations((1.0,))
    commits.add(0.5)
    asked.process = lambda: {"journal_commits": commits.document(), "certificates": {"ca.pem": 9e9}}
    counts = asked.books.site.arbiter.state.counts
    counts.claims_off["ben"], counts.preemptions["outbid"] = 1, 1
    app = asked.books.site.arbiter.state.apps[AppId("ben-1")]
    asked.books.site.arbiter.state.apps[app.id] = replace(app, basis="measured")
    asked.books.site.arbiter.state.rhos[app.id] = 1.5


def test_each_name_in_a_rule_or_a_panel_is_exposed(browser: Browser, asked: Asked) -> None:
    whole(asked)
    exposed = set(re.findall(r"^# TYPE (\w+) ", browser.get("/metrics")[2], re.MULTILINE))
    part = re.compile(r"_seconds_(bucket|sum|count)$")
    used = {part.sub("_seconds", name) for expression in expressions() for name in NAME.findall(expression)}
    assert used <= exposed, sorted(used - exposed)
    assert len(used) > 12


def test_the_rules_and_the_dashboard_are_served(browser: Browser) -> None:
    (group,) = yaml.safe_load(browser.get("/alerts.yml")[2])["groups"]
    assert len(group["rules"]) == RULES == len(RAISED)
    assert all(rule["annotations"].keys() == {"summary", "mend"} for rule in group["rules"])
    dashboard = json.loads(browser.get("/dashboard.json")[2])
    assert [panel["id"] for panel in dashboard["panels"]] == list(range(1, len(dashboard["panels"]) + 1))


def test_a_hundred_gpus_and_fifty_owners_make_fewer_than_two_thousand_series(browser: Browser, asked: Asked) -> None:
    """Each owner is a tenant, and has an app of each class."""
    site = asked.books.site
    for number in range(50):
        tenant = TenantId(f"t{number}")
        asked.books.note(site.app(f"zoe{number}-1", tenant=tenant))
        asked.books.note(site.app(f"zoe{number}-2", tenant=tenant, kind="interactive"))
    samples(browser)
    for node in range(2, 15):
        asked.books.note(site.node(f"n{node}", 8))
    for _ in range(4):
        asked.books.note(site.wait(1.5))
    told = samples(browser)
    assert sum('tenant="t' in labels for name, labels in told if name == "gpu_arbiter_gpu_info") >= 100
    assert sum(name == "gpu_arbiter_wait_seconds_count" for name, _ in told) >= 100
    assert len(told) < 2000


# --- Prometheus's own word on it ------------------------------------------------------------------------------------

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here: run scripts/ensure-prometheus.sh")


def promtool(*words: str, told: str | None = None) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *words], input=told, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_promtool
def test_prometheus_reads_the_metrics_without_a_remark(browser: Browser) -> None:
    assert promtool("check", "metrics", told=browser.get("/metrics")[2]) == ""


def recipe_for(folder: Path, target: str) -> str:
    """What the page on operating says for prometheus.yml, with the files in `folder` and another target."""
    (text,) = [block.text for block in blocks(PAGE) if block.language == "yaml" and "scrape_configs:" in block.text]
    assert (text.count("/etc/prometheus/"), text.count("localhost:8470")) == (2, 1)
    return text.replace("/etc/prometheus/", f"{folder}/").replace("localhost:8470", target)


@needs_promtool
def test_prometheus_reads_the_recipe_of_the_page_on_operating(tmp_path: Path) -> None:
    (tmp_path / "gpu-arbiter.token").write_text("a-token")
    (tmp_path / "gpu-arbiter-alerts.yml").write_text((files("launch.web") / "alerts.yml").read_text("utf-8"))
    (tmp_path / "prometheus.yml").write_text(recipe_for(tmp_path, "localhost:8470"))
    told = promtool("check", "config", str(tmp_path / "prometheus.yml"))
    assert f"SUCCESS: {RULES} rules found" in told


@needs_promtool
def test_prometheus_reads_each_expression(tmp_path: Path) -> None:
    rules = [{"record": f"r:{number}", "expr": each} for number, each in enumerate(expressions())]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(tmp_path / "rules.yml"))


def series(name: str, values: str) -> dict[str, str]:
    return {"series": name, "values": values}


RULES = 12
#: Of an alert, the series that raise it, and after how many minutes it must stand; a minute between two values.
RAISED: dict[str, tuple[list[dict[str, str]], int]] = {
    "ArbiterAway": ([series("gpu_arbiter_up", "1 1 0x30")], 5),
    "NoRoundWhilePending": (
        [
            series("gpu_arbiter_round_overdue_seconds", "0+60x30"),
            series('gpu_arbiter_pending_gpus{tenant="a"}', "2x30"),
        ],
        8,
    ),
    "GpuDrainingTooLong": ([series('gpu_arbiter_gpu_draining_seconds{gpu="g",node="n"}', "0+60x60")], 20),
    "CertificateExpires": ([series('gpu_arbiter_certificate_expiry_seconds{file="f"}', "1210000-60x60")], 10),
    "HistoryBeganAnew": ([series("gpu_arbiter_history_since_timestamp_seconds", "100x5 900x5")], 8),
    "NodeLost": ([series('gpu_arbiter_node_up{node="n"}', "1 0x30")], 5),
    "PolicyFails": ([series("gpu_arbiter_policy_failures_total", "0x3 1x9")], 6),
    "PlansRefused": ([series('gpu_arbiter_plans_refused_total{node="n"}', "0x3 3 6 9x20")], 8),
    "GpusOutOfService": (
        [series('gpu_arbiter_gpus{state="lost"}', "2x30"), series('gpu_arbiter_gpus{state="free"}', "8x30")],
        15,
    ),
    "TenantBelowItsShare": ([series('gpu_arbiter_ltgf{tenant="a"}', "0.5x400")], 365),
    "AppWaitsForADay": ([series('gpu_arbiter_oldest_wait_seconds{tenant="a"}', "86000+100x20")], 8),
    "WorkIsLost": (
        [
            series('gpu_arbiter_lost_gpu_seconds_total{tenant="a"}', "0+10x60"),
            series('gpu_arbiter_gpu_seconds_total{tenant="a"}', "0+60x60"),
        ],
        40,
    ),
}


def filled(text: str, labels: dict[str, str]) -> str:
    """A text of a rule with its labels."""
    return re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], text)


@needs_promtool
def test_faults_raise_their_alerts_and_a_calm_site_none(tmp_path: Path) -> None:
    rules = {rule["alert"]: rule for rule in shipped("alerts.yml")["groups"][0]["rules"]}
    calm = [series("gpu_arbiter_up", "1x60"), series('gpu_arbiter_node_up{node="n"}', "1x60")]
    calm += [series("gpu_arbiter_round_overdue_seconds", "2x60"), series('gpu_arbiter_gpus{state="free"}', "1x60")]
    calm += [series('gpu_arbiter_pending_gpus{tenant="a"}', "2x60"), series('gpu_arbiter_ltgf{tenant="a"}', "0.9x60")]
    calm += [series('gpu_arbiter_plans_refused_total{node="n"}', "5x20 7x40")]  # late plans of a leader that was killed
    tests = [
        {
            "interval": "1m",
            "input_series": calm,
            "alert_rule_test": [
                {"eval_time": moment, "alertname": name, "exp_alerts": []}
                for name in rules
                for moment in ("5m", "25m", "59m")
            ],
        }
    ]
    for name, (inputs, minutes) in RAISED.items():
        tests.append(
            {
                "interval": "1m",
                "input_series": inputs,
                "alert_rule_test": [
                    {"eval_time": f"{minutes}m", "alertname": name, "exp_alerts": raised(rules[name], inputs)}
                ],
            }
        )
    run_tests(tmp_path, "1m", tests)


def every_15s(*parts: tuple[str, float]) -> str:
    """Values of a series, a scrape each: of each part its notation, and the seconds that it lasts."""
    return " ".join(f"{values}x{seconds / 15:.0f}" for values, seconds in parts)


#: Of the four faults that must be told within two minutes: the series, as Prometheus scrapes it every 15 s, and the
#: second at which the fault has lasted for as long as it is borne. Nodes are sent a plan every two seconds.
ON_TIME: dict[str, tuple[list[dict[str, str]], float]] = {
    "PlansRefused": ([series('gpu_arbiter_plans_refused_total{node="n"}', every_15s(("0", 600), ("7+7", 600)))], 600),
    "GpuDrainingTooLong": (
        [series('gpu_arbiter_gpu_draining_seconds{gpu="g",node="n"}', every_15s(("0", 585), ("0+15", 1800)))],
        600 + 900,
    ),
    "NoRoundWhilePending": (
        [
            series("gpu_arbiter_round_overdue_seconds", every_15s(("0", 585), ("0+15", 900))),
            series('gpu_arbiter_pending_gpus{tenant="a"}', every_15s(("2", 1800))),
        ],
        600 + 300,
    ),
    "HistoryBeganAnew": (
        [series("gpu_arbiter_history_since_timestamp_seconds", every_15s(("100", 585), ("900", 600)))],
        600,
    ),
}


@needs_promtool
@pytest.mark.parametrize("name", ON_TIME)
def test_a_fault_raises_its_alert_within_two_minutes_of_its_time_and_not_before(name: str, tmp_path: Path) -> None:
    inputs, at_s = ON_TIME[name]
    rule = next(rule for rule in shipped("alerts.yml")["groups"][0]["rules"] if rule["alert"] == name)
    silent = [(f"{second}s", []) for second in range(0, int(at_s), 15)]
    told = [*silent, (f"{at_s + 120:.0f}s", raised(rule, inputs))]
    looks = [{"eval_time": when, "alertname": name, "exp_alerts": alerts} for when, alerts in told]
    run_tests(tmp_path, "15s", [{"interval": "15s", "input_series": inputs, "alert_rule_test": looks}])


def raised(rule: Any, inputs: list[dict[str, str]]) -> list[dict[str, Any]]:
    """The alert of a rule with the labels of the first series, unless it sums over them."""
    whole = rule["expr"].startswith("sum(")
    labels = dict(re.findall(r'(\w+)="(\w+)"', inputs[0]["series"]) if not whole else ()) | rule["labels"]
    words = {key: filled(text, labels) for key, text in rule["annotations"].items()}
    return [{"exp_labels": labels, "exp_annotations": words}]


def run_tests(folder: Path, interval: str, tests: list[dict[str, Any]]) -> None:
    """Let promtool look at the rules, as they are shipped, over series that a test gives."""
    (folder / "alerts.yml").write_text((files("launch.web") / "alerts.yml").read_text("utf-8"))
    document = {"rule_files": ["alerts.yml"], "evaluation_interval": interval, "tests": tests}
    (folder / "tests.yml").write_text(json.dumps(document))
    promtool("test", "rules", str(folder / "tests.yml"))


def test_a_round_is_overdue_while_the_policy_does_not_answer_and_not_while_an_app_cannot_be_served(
    browser: Browser, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = asked.books.site
    for _ in range(3):
        asked.books.note(site.node("n1", tasks=asked.books.others, used=site.held("ben-1")) + site.wait(20.0))
    with at(monkeypatch, site.now):
        told = samples(browser)
    assert told["gpu_arbiter_pending_gpus", 'tenant="team"'] == 2.0, "eve-1 wants two, and one is free"
    assert told["gpu_arbiter_seconds_since_round", ""] > 50.0
    assert told["gpu_arbiter_round_overdue_seconds", ""] == 0.0
    site.decides_late = True
    asked.books.note(site.app("eve-1", gang=2, demand=2) + site.node("n2", 2) + site.wait(1.0))
    site.now += 7.0
    assert 7.0 <= samples(browser)["gpu_arbiter_round_overdue_seconds", ""] < 9.0


def test_plans_that_a_node_refuses_are_counted(browser: Browser, asked: Asked) -> None:
    key = ("gpu_arbiter_plans_refused_total", 'node="n1"')
    assert samples(browser)[key] == 0.0
    asked.books.note(asked.books.site.node("n1", plans_refused=4))
    assert samples(browser)[key] == 4.0


def test_a_gpu_that_is_being_left_is_told(browser: Browser, asked: Asked) -> None:
    site = asked.books.site
    site.app("ben-1", state="finished", tenant="other")  # type: ignore[arg-type]
    (gpu,) = [each for each in (gpu_id("n1", 0), gpu_id("n1", 1)) if site.holder(each) == "ben-1"]
    site.now += 7.0
    told = {labels: value for (name, labels), value in samples(browser).items() if name.endswith("draining_seconds")}
    assert told == {f'gpu="{each}",node="n1"': 7.0 * (each == gpu) for each in (gpu_id("n1", 0), gpu_id("n1", 1))}


def test_counts_of_the_arbiter_are_told(browser: Browser, asked: Asked) -> None:
    site = asked.books.site
    before = samples(browser)
    assert before["gpu_arbiter_leader_epoch", ""] == site.epoch == 1.0
    assert before["gpu_arbiter_steps_lost_total", ""] == 0.0
    assert not [labels for name, labels in before if name == "gpu_arbiter_preemptions_total"]
    site.app("ben-1", tenant="other", steps_lost=12)  # type: ignore[arg-type]
    site.node("n1", sick=site.held("ben-1"))
    site.arbiter.state.counts.claims_off["ben"] = 3
    site.lead()
    told = samples(browser)
    assert told["gpu_arbiter_leader_epoch", ""] == 2.0
    assert told["gpu_arbiter_steps_lost_total", ""] == 12.0
    assert told["gpu_arbiter_preemptions_total", 'reason="out-of-service"'] == 1.0
    assert told["gpu_arbiter_claims_off_total", 'owner="ben"'] == 3.0
    idle = site.arbiter.state.history.idle.at(site.now)
    assert told["gpu_arbiter_idle_gpu_seconds_total", ""] == idle > 0.0


def test_commits_of_the_journal_are_a_histogram(browser: Browser, asked: Asked) -> None:
    commits = Durations((0.01, 1.0))
    asked.process = lambda: {"journal_commits": commits.document()}
    for took_s in (0.01, 0.02, 0.5, 7.0):
        commits.add(took_s)
    told = {labels: value for (name, labels), value in samples(browser).items() if "commit_seconds_b" in name}
    assert told == {'le="0.01"': 1.0, 'le="1.0"': 3.0, 'le="+Inf"': 4.0}
    assert samples(browser)["gpu_arbiter_journal_commit_seconds_count", ""] == 4.0
    assert samples(browser)["gpu_arbiter_journal_commit_seconds_sum", ""] == 7.53


def test_the_time_until_a_certificate_expires_is_told_and_a_new_one_is_noticed(
    browser: Browser, asked: Asked, tmp_path: Path
) -> None:
    files = certificates.named_in(f"amqps://broker/gpu?cafile={tmp_path}/ca.pem&certfile={tmp_path}/own.pem")
    asked.process = lambda: {"certificates": certificates.ends(files)}
    key = ("gpu_arbiter_certificate_expiry_seconds", f'file="{tmp_path}/own.pem"')
    for days in (12, 400):
        a_certificate(tmp_path / "own.pem", days=days)
        with pytest.MonkeyPatch.context() as patch, at(patch, datetime.now(UTC).timestamp()):
            told = samples(browser)
        assert days * 86_400.0 < told[key] <= days * 86_400.0 + 3600.0
    assert [labels for name, labels in told if name == key[0]] == [key[1]], "the other file is not there"


def test_the_page_on_operating_lists_each_metric_with_its_labels(browser: Browser, asked: Asked) -> None:
    listed = {
        name: sorted(re.findall(r"`(\w+)`", labels))
        for name, labels in re.findall(r"^\| `(gpu_arbiter_\w+)` \|(.*?)\|", PAGE.read_text("utf-8"), re.MULTILINE)
    }
    whole(asked)
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)", browser.get("/metrics")[2], re.MULTILINE))
    assert listed.keys() == types.keys(), sorted(listed.keys() ^ types.keys())
    seen = {
        re.sub(r"_(bucket|sum|count)$", "", name): sorted({*re.findall(r'(\w+)="', labels)} - {"le"})
        for name, labels in samples(browser)
    }
    assert len(seen) >= len(types) - 2, "the histograms of rounds and waits have nothing yet"
    assert seen == {name: listed[name] for name in seen}
