"""The arbiter's daemon: what a restart finds, and settings that cannot work."""

from __future__ import annotations

import asyncio
import re
import time
import tomllib
from contextlib import closing, suppress
from pathlib import Path
from secrets import token_hex

import msgspec
import pytest
from msgspec.structs import replace

from arbiter import daemon
from arbiter.config import ArbiterConfig, load
from arbiter.core.arbiter import Arbiter, Event
from arbiter.core.effects import AppRecord, LeaseRecord
from arbiter.core.registry import POLICIES, policy_of
from arbiter.core.state.model import ArbiterSettings, Leased, Up
from arbiter.daemon import _Performer, _restore, run_arbiter
from arbiter.ledger import Ledger
from protocol.bus import NotProvisioned, Outgoing
from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.codec import decode, encode
from protocol.config import ConfigError
from protocol.core import Connected
from protocol.journal import JournalError, StoreAway
from protocol.journal.sqlite import SqliteJournal
from protocol.messages import (
    ARBITER,
    Answer,
    AppId,
    AppReport,
    GpuId,
    LeaseId,
    NodeId,
    Party,
    Query,
    Requirements,
    TenantId,
)
from tests.support.arbiter_site import SETTINGS, Site, gpu_id, task, wish
from tests.support.patience import PATIENCE_S


def a_site_of_long_ago() -> Site:
    """One app trains on one GPU; nobody has heard of the arbiter since."""
    site = Site(start=time.time() - 5000)
    site.node("n1", 1)
    site.play_round(site.app("ana-1") + site.wait(0))
    gpu = gpu_id("n1", 0)
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
    site.node("n1", tasks=[task("ana-1", 0, [gpu])], used=[gpu])
    return site


def opened(folder: Path) -> SqliteJournal[Event]:
    return SqliteJournal[Event].of(folder / "journal.db", Event)


def leading(
    arbiter: Arbiter, journal: SqliteJournal[Event], folder: Path, settings: ArbiterSettings, at: float | None = None
) -> int:
    """Have an arbiter take over, as it does once it has the leader token, at `at`; return its epoch."""
    wall = time.time if at is None else lambda: at
    config = ArbiterConfig(state_dir=str(folder), arbiter=settings)
    with closing(Ledger(folder / "ledger.db")) as ledger:
        return asyncio.run(_Performer(arbiter, journal, ledger, config, wall)._take_over(1))


def restarted(site: Site, folder: Path, settings: ArbiterSettings) -> Arbiter:
    """The arbiter as a daemon finds it in a journal of that site's events, about to lead."""
    with opened(folder) as journal:
        for now, event in site.journal:
            journal.append(now, event)
        journal.commit()
    with opened(folder) as journal:
        arbiter = _restore(journal, Ledger(folder / "ledger.db"))
        assert arbiter.snapshot() == site.arbiter.snapshot()
        leading(arbiter, journal, folder, settings)
        return arbiter


def test_an_arbiter_that_was_away_for_hours_takes_nothing_from_anyone(tmp_path: Path) -> None:
    site = a_site_of_long_ago()
    changed = replace(SETTINGS, lease_s=200.0)
    arbiter = restarted(site, tmp_path, changed)
    arbiter.handle(Connected(2), time.time())
    arbiter.validate()
    assert arbiter.state.settings == changed
    assert isinstance(arbiter.state.nodes["n1"].state, Up)  # type: ignore[index]
    assert isinstance(arbiter.state.gpus[gpu_id("n1", 0)].state, Leased)  # type: ignore[index]


def test_what_a_start_ends_with_new_settings_stands_in_the_ledger(tmp_path: Path) -> None:
    """Two jobs shared a GPU, and from this start on GPUs are shared no more."""
    site = Site(replace(SETTINGS, policy="backfill", sharing="timeslice", seats=2))
    gpu = gpu_id("n1", 0)
    site.node("n1", 1)
    site.node("n1")
    site.play_round(site.app("ana-1") + site.wait(2.0))
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
    site.node("n1", tasks=[task("ana-1", 0, [gpu], cooperative=True, can_checkpoint=True, step=0)], used=[gpu])
    site.play_round(site.app("bob-1") + site.wait(3.0))
    assert (site.held("ana-1"), len(site.held("bob-1"))) == ([gpu], 1)
    site.wait(8.0)
    restarted(site, tmp_path, SETTINGS)
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        told = [stretch for app in ("ana-1", "bob-1") for stretch in ledger.stretches_of(AppId(app))]
    assert [stretch.app for stretch in told if stretch.end == site.arbiter.state.now] == ["bob-1"]


def test_a_history_that_should_be_there_and_is_not_is_an_error_and_never_a_silent_zero(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        ledger = Ledger(tmp_path / "ledger.db")
        assert _restore(journal, ledger).state.history.tenants == {}  # the first start of all
        with pytest.raises(ConfigError, match=r"journal.db is empty, but a history of GPU time is to be resumed"):
            _restore(journal, ledger, "resume")
        ledger.write(LeaseRecord(LeaseId("l"), AppId("ana-1"), GpuId("g"), NodeId("n1"), 0.0, 60.0, "over"))
        with pytest.raises(ConfigError, match=r"is told of by the ledger; bring the state folder back, or set history"):
            _restore(journal, ledger)
        assert _restore(journal, ledger, "begin").state.history.tenants == {}


def test_an_arbiter_that_lost_its_journal_is_obeyed_by_those_who_knew_it(tmp_path: Path) -> None:
    """Nodes obey no epoch before the last they heard of, and a journal that counts from 1 would repeat those."""
    began = time.time()
    for _ in range(2):
        with opened(tmp_path) as journal:
            arbiter = _restore(journal, Ledger(tmp_path / "ledger.db"), "begin")
            assert leading(arbiter, journal, tmp_path, SETTINGS) >= int(began)
        (tmp_path / "journal.db").unlink()


def test_no_epoch_is_given_out_again_by_an_older_journal_and_a_broker_that_counts_anew(tmp_path: Path) -> None:
    """A host was put back to an image of this morning, with journal and broker."""
    with opened(tmp_path) as journal:
        morning = leading(_restore(journal, Ledger(tmp_path / "ledger.db")), journal, tmp_path, SETTINGS, at=1000.0)
    image = (tmp_path / "journal.db").read_bytes()
    epochs = [morning]
    for at in (5000.0, 9000.0):
        (tmp_path / "journal.db").write_bytes(image)
        with opened(tmp_path) as journal:
            arbiter = _restore(journal, Ledger(tmp_path / "ledger.db"))
            assert journal.last_seq > 0
            epochs.append(leading(arbiter, journal, tmp_path, SETTINGS, at=at))
    assert epochs == sorted(set(epochs))


def test_a_snapshot_of_a_version_that_kept_no_books_is_refused_with_the_mend(tmp_path: Path) -> None:
    site = a_site_of_long_ago()
    state = msgspec.msgpack.decode(site.arbiter.snapshot())
    del state["history"]
    with opened(tmp_path) as journal:
        journal.append(site.now, site.journal[0][1])
        journal.snapshot(msgspec.msgpack.encode(state, order="deterministic"))
        ledger = Ledger(tmp_path / "ledger.db")
        with pytest.raises(ConfigError, match=r'holds no history of GPU time.* set history = "begin" for one start'):
            _restore(journal, ledger)
        restored = _restore(journal, ledger, "begin")
    assert restored.state.history.since == site.now
    assert restored.state.history.of_app(AppId("ana-1"), site.now + 5.0).allocated_gpu_s == 5.0


def test_a_damaged_ledger_is_one_sentence_with_the_mend(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    file.write_bytes(b"not a database" * 1000)
    with pytest.raises(JournalError, match=r"ledger\.db: file is not a database; .*only the record of past rounds"):
        Ledger(file)


def test_apps_that_are_over_are_in_the_ledger_with_what_they_had(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    record = AppRecord(AppId("ana-1"), TenantId("vision"), 2.0, 0.0, 60.0, 50.0, 40.0, 30.0)
    ledger.write(record)
    ledger.write(record)  # a restart records the last ones again
    assert ledger.apps(limit=10) == [record]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[arbiter]\npolicy = 'lottery'\n",
            f"arbiter.policy is 'lottery'; choose one of {', '.join(sorted(POLICIES))}",
        ),
        ("[arbiter]\nlease_s = 20.0\n", "arbiter.lease_s is 20.0, too short for renewal_lead_s + probe_s + bid_s"),
        ("[arbiter]\nround_pause_s = 597\n", "arbiter.lease_s is 600.0, too short for round_pause_s + probe_s + bid_s"),
        ("[arbiter]\nbeat_s = 0.0\n", "beat_s is 0.0; it must be above 0"),
        ("[policy.themis]\nfairness_knob = 1.5\n", "policy.themis: fairness_knob is 1.5; it must be from 0 to 1"),
        (
            "[policy.themis]\nknob = 0.5\n",
            "policy.themis: unknown field `knob`; leave it out or mend its name; "
            "it has fairness_knob, leftover, tenants_first",
        ),
        (
            "[policy.fifo]\nknob = 0.5\n",
            "policy.fifo: unknown field `knob`; leave it out or mend its name; it has no settings",
        ),
        ("[policy.themis]\ntenants_first = 'no'\n", "policy.themis: tenants_first must be true or false, and is text"),
        ("[policy.lottery]\nknob = 0.5\n", "[policy.lottery] is of no policy; choose one of allox, "),
        ("[policy]\nthemis = 0.5\n", "policy[...] must be a table, and is a number"),
        (
            "[arbiter.policy_settings]\nlas_threshold_gpu_s = 1.0\ntrial_s = 1.0\nreasons_max = 1\nodd = 2\n",
            "arbiter.policy_settings is no table any more, each policy has its own: "
            "las_threshold_gpu_s is now policy.las.threshold_gpu_s; trial_s is now arbiter.interactive_s; "
            "reasons_max is no setting any more, leave it out; odd is not known, leave it out",
        ),
        ("[arbiter]\npolicies = {}\n", "unknown field `arbiter.policies`; leave it out or mend its name"),
        ("[arbiter]\ninteractive_share = 1.5\n", "arbiter.interactive_share is 1.5; give the part of all GPUs"),
        ("[arbiter]\ninteractive_s = inf\n", "interactive_s is inf; it must be a finite number, 0 or more"),
        ("[arbiter]\nprobe_s = nan\n", "arbiter: probe_s is nan; it must be a finite number above 0"),
        ("[arbiter]\ndecide_grace_s = 5.0\n", "unknown field `arbiter.decide_grace_s`"),
        ("[arbiter]\nlease_s = inf\n", "arbiter: lease_s is inf; it must be a finite number above 0"),
        ("[arbiter]\nask_max = -1\n", "arbiter: ask_max is -1; it must be 0 or more"),
        ("[arbiter]\nprobes_max = 64\n", "unknown field `arbiter.probes_max`; leave it out or mend its name"),
        ("[arbiter]\nrenewal_lead_s = -5.0\n", "arbiter: renewal_lead_s is -5.0; it must be 0 or more"),
        (
            "[arbiter]\nalign_after_leases = 0.5\n",
            "arbiter.align_after_leases is 0.5; give after how many leases of waiting",
        ),
        (
            "[arbiter]\nalign_after_leases = nan\n",
            "arbiter.align_after_leases is nan; give after how many leases of waiting",
        ),
        ("[arbiter]\nround_pause_s = -5.0\n", "arbiter: round_pause_s is -5.0; it must be 0 or more"),
        ("[arbiter]\nadmission_wait_s = nan\n", "admission_wait_s is nan; it must be a finite number, 0 or more"),
        ("[policy.las]\nthreshold_gpu_s = nan\n", "policy.las: threshold_gpu_s is nan; it must be a finite"),
        ("[arbiter]\nsolver_budget_ms = inf\n", "arbiter: solver_budget_ms is inf; it must be a finite"),
        (
            "[arbiter]\npolicy = 'fifo'\n[policy.themis]\nfairness_knob = nan\n",
            "policy.themis: fairness_knob is nan; it must be from 0 to 1",
        ),
        ("[arbiter]\nlease = 600\n", "unknown field `arbiter.lease`"),
        ("[[arbiter.tenants]]\nname = 'a'\nweight = 0\n", "arbiter.tenants[0].weight"),
        ("[[arbiter.tenants]]\nname = 'a'\nquota = 0\n", "arbiter.tenants[0].quota"),
        (
            "[[arbiter.tenants]]\nname = 'Team A'\n",
            "arbiter.tenants[0].name cannot be that; use lower-case letters, digits and dashes, such as team-a",
        ),
        ("[[arbiter.tenants]]\nname = ''\n", "arbiter.tenants[0].name cannot be that; use lower-case letters, digits"),
        ("[[arbiter.tenants]]\nweight = 2\n", "name"),
        (
            "[[arbiter.tenants]]\nname = 'a'\n[[arbiter.tenants]]\nname = 'a'\n",
            "arbiter.tenants names a twice; give each tenant one table",
        ),
        ("[arbiter]\ntenants_only = true\n", "arbiter.tenants_only is true and no tenant is named"),
        ("history = 'perhaps'\n", "history"),
        ("[arbiter]\nrestatements_per_s = 1e-300\n", "arbiter.restatements_per_s is 1e-300; give 0.01 or more"),
        ("[arbiter]\nseats = 0\n", "arbiter.seats is 0; give how many jobs may share a GPU, 1 to 64"),
        ("[arbiter]\nquantum_s = 0.0\n", "quantum_s is 0"),
        ("[arbiter]\nsharing = 'sometimes'\n", "arbiter.sharing"),
        ("history = 'fresh'\n", "history is 'fresh', which is none of 'auto', "),
        ("[[arbiter.tenants]]\nname = 'a'\nweight = 2.0\nquota = 4\n", "gives a a weight and a quota; leave one out"),
        ("[policy.gandiva]\nidle_s = -1.0\n", "policy.gandiva: idle_s is -1"),
        ("[policy.rrh]\nthreshold = nan\n", "policy.rrh: threshold is nan; it must be a number"),
        (
            "[arbiter]\nlease_s = 'long'\n",
            "arbiter.lease_s must be a number, and is text; the files of `gpu-arbiter init` show",
        ),
        ("[arbiter]\npolicy = 'las'\n[policy.las]\nthreshold_gpu_s = 0.0\n", "policy.las: threshold_gpu_s is 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_file_field_and_mend(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "arbiter.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert str(path) in str(error.value)
    assert says in str(error.value)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_chosen_and_set_in_the_file(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "arbiter.toml"
    entry = POLICIES[policy]
    path.write_text(
        f"[arbiter]\npolicy = '{policy}'\n[policy.{policy}]\n[policy.las]\nthreshold_gpu_s = 7200\n".replace(
            "[policy.las]\n[policy.las]", "[policy.las]"
        )
    )
    loaded = load(path).arbiter
    assert loaded.policy == policy
    assert loaded.policies["las"]["threshold_gpu_s"] == 7200.0
    assert set(loaded.policy_settings) == set(entry.settings.__struct_fields__)
    assert type(policy_of(loaded.policy, loaded.policy_settings)) is entry.kind


def test_the_settings_that_are_shipped_are_the_defaults_and_name_every_policy() -> None:
    shipped = Path(__file__).parents[2] / "launch" / "site" / "systemd" / "arbiter.toml"
    loaded = load(shipped).arbiter
    assert replace(loaded, policies={}) == ArbiterSettings()
    defaults = {name: entry.settings() for name, entry in POLICIES.items() if entry.settings.__struct_fields__}
    assert loaded.policies == msgspec.to_builtins(defaults)
    written = tomllib.loads(shipped.read_text())["policy"]
    assert {name: set(table) for name, table in written.items()} == {
        name: set(settings.__struct_fields__) for name, settings in defaults.items()
    }
    words = set(re.findall(r"[a-z-]+", shipped.read_text()))
    assert [name for name in POLICIES if name not in words] == []


async def test_an_arbiter_that_is_told_to_end_ends_also_where_its_store_has_just_gone_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are on one host that is shut down, and the last snapshot finds no database."""
    began, begins_anew = asyncio.Event(), asyncio.Event()

    async def run_once(*_: object) -> None:
        (begins_anew if began.is_set() else began).set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise StoreAway("the database does not answer") from None

    monkeypatch.setattr("arbiter.daemon._run_once", run_once)
    monkeypatch.setattr("arbiter.daemon.RETRY_S", 0.0)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(run_arbiter(ArbiterConfig(state_dir=str(tmp_path)), MemoryBus(MemoryBroker())))
        await began.wait()
        running.cancel()
        waiting = group.create_task(begins_anew.wait())
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        for task in (running, waiting):
            task.cancel()
    assert not begins_anew.is_set(), "the service manager sends no second signal"


async def test_a_restart_under_a_wall_clock_that_is_400_days_ahead_makes_nobody_older(tmp_path: Path) -> None:
    """Ages and finish-time fairness were absurd from then on, also when the clock was right again."""
    config = ArbiterConfig(state_dir=str(tmp_path), arbiter=replace(SETTINGS, policy="fifo", admission_wait_s=0.0))
    app = Party("app", "ana")
    report = AppReport(AppId("ana-1"), TenantId("team"), "train", 1, "active", 1, 1, (), Requirements())
    for ahead_s in (0.0, 400 * 86_400.0, 0.0):
        bus = MemoryBus(MemoryBroker())
        async with asyncio.TaskGroup() as group:
            arbiter = group.create_task(run_arbiter(config, bus, wall=lambda ahead_s=ahead_s: time.time() + ahead_s))
            elapsed_s = await _elapsed_s(bus, app, report)
            arbiter.cancel()
        assert 0.0 <= elapsed_s < 60.0


async def _elapsed_s(bus: MemoryBus, app: Party, report: AppReport) -> float:
    """How old the arbiter takes an app for, whose agent has just said who it is."""
    link = await bus.connect(app)
    query = Query("q1", "explain", report.app)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            outgoing = [Outgoing(ARBITER, encode(each, sender=app, id=token_hex(8))) for each in (report, query)]
            await link.send(outgoing)
            with suppress(NotProvisioned):
                await link.consume()
                break
            await asyncio.sleep(0.05)
        await link.send([Outgoing(ARBITER, encode(query, sender=app, id=token_hex(8)))])
        while True:
            body = decode((await link.receive()).data).body
            if isinstance(body, Answer) and not body.error:
                return float(msgspec.json.decode(body.document)["elapsed_s"])


async def test_records_older_than_ledger_days_go_while_the_arbiter_runs_and_newer_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "PRUNED_MAX", 2)
    monkeypatch.setattr(daemon, "PRUNE_PAUSE_S", 0.01)
    monkeypatch.setattr(daemon, "PRUNE_EVERY_S", 0.05)
    config = ArbiterConfig(state_dir=str(tmp_path), ledger_days=2.0, arbiter=SETTINGS)

    def over(app: str, days_ago: float) -> AppRecord:
        return AppRecord(AppId(app), TenantId("team"), 1.0, 0.0, time.time() - days_ago * 86_400.0, 50.0, 40.0, 30.0)

    newer = [over("ana-1", 1.9), over("ana-2", 0.0)]
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        ledger.write(*newer, *(over(f"bob-{number}", 2.1 + number) for number in range(5)))
        async with asyncio.TaskGroup() as group:
            arbiter = group.create_task(run_arbiter(config, MemoryBus(MemoryBroker())))
            async with asyncio.timeout(PATIENCE_S):
                await _until_apps_are(ledger, newer)
                ledger.write(over("bob-9", 2.1))  # it looks again when none was left
                await _until_apps_are(ledger, newer)
            arbiter.cancel()


async def _until_apps_are(ledger: Ledger, records: list[AppRecord]) -> None:
    while ledger.apps(limit=10) != records:  # noqa: ASYNC110 - a file has no event to wait for
        await asyncio.sleep(0.02)
