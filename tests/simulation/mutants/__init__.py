"""Faults planted in the cores, one at a time: each of them some fault world must notice.

A mutant is a context manager; while it is open the cores have the fault. All of them are mistakes that somebody might
make in good faith: a check left out, an order of two steps, a message not repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from app_agent.core import demand, jobs
from app_agent.core.agent import AppAgent
from app_agent.core.tuning import array
from app_agent.core.tuning.array import Array
from arbiter.core import outbox
from arbiter.core.arbiter import Arbiter
from arbiter.core.layers import guests
from arbiter.core.leases import leases, plans
from arbiter.core.members import apps, nodes, sales, site
from arbiter.core.rounds import phases
from arbiter.core.seam import AppView
from arbiter.core.state import beats, model
from arbiter.core.state.gpu_time import History
from arbiter.core.state.model import Bidding, Draining, Free, Leased
from node_agent.core import ladder, plan_news, worker_news
from node_agent.core.health import Health
from node_agent.core.model import Task
from node_agent.core.packing import Packs
from node_agent.core.proof import Gpus
from node_agent.core.slicing import Slices
from node_agent.core.state import NodeState
from node_agent.core.suspend_methods import SuspendMethods
from node_agent.core.verdict import Verdict, judge
from protocol import gpu_kinds
from protocol.messages import LeaseId
from simulator.faults.formers import Former
from simulator.faults.injector import FaultInjector
from simulator.faults.journals import Record, Standby, Writer
from simulator.world import World

Mutant = Callable[[], AbstractContextManager[None]]
MUTANTS: dict[str, Mutant] = {}


def mutant(plant: Callable[[], Iterator[None]]) -> Mutant:
    """Enter a planted fault into the table, under its name."""
    made = contextmanager(plant)
    MUTANTS[plant.__name__] = made
    return made


def _nothing(*_args: Any, **_options: Any) -> None:
    pass


# --- the arbiter ----------------------------------------------------------------------------------------------------


@mutant
def a_drained_node_gets_new_leases() -> Iterator[None]:
    with patch.object(model, "usable", model.in_service):
        yield


@mutant
def every_gpu_is_of_the_kind_that_is_asked_for() -> Iterator[None]:
    with patch.object(gpu_kinds, "suits", lambda *_: True):
        yield


@mutant
def the_end_of_an_app_is_never_acknowledged() -> Iterator[None]:
    say = outbox._say_holdings

    def silent(turn: Any, app: Any, *args: Any, **options: Any) -> None:
        if app.active:
            say(turn, app, *args, **options)

    with patch.object(outbox, "_say_holdings", silent):
        yield


@mutant
def a_gpu_is_granted_while_it_drains() -> Iterator[None]:
    revoke = leases.revoke

    def hasty(turn: Any, gpu: Any, reason: str, *, promised_to: Any = None, preempted: Any = None) -> None:
        revoke(turn, gpu, reason, promised_to=promised_to, preempted=preempted)
        if promised_to is not None:
            turn.put_gpu(turn.state.gpus[gpu.id], Free(turn.now))
            leases.grant(turn, turn.state.gpus[gpu.id], turn.state.apps[promised_to], round=turn.state.round)

    with patch.object(leases, "revoke", hasty):
        yield


@mutant
def a_restarted_arbiter_keeps_its_epoch() -> Iterator[None]:
    lead = Arbiter._lead

    def forgetful(self: Arbiter, turn: Any, epoch: int) -> None:
        before = self.state.epoch
        lead(self, turn, epoch)
        self.state.epoch = before or epoch

    with patch.object(Arbiter, "_lead", forgetful):
        yield


@mutant
def a_bid_for_an_earlier_round_counts() -> Iterator[None]:
    def gullible(turn: Any, bid: Any) -> None:
        phase = turn.state.phase
        if isinstance(phase, Bidding) and bid.app in phase.awaited:
            phase.awaited.remove(bid.app)
            phase.bids[bid.app] = bid

    with patch.object(phases, "take_bid", gullible):
        yield


@mutant
def the_answer_to_an_older_sale_counts() -> Iterator[None]:
    take = sales.take_answer

    def gullible(turn: Any, sold: Any) -> Any:
        sale = turn.state.sale
        return take(turn, sold if sale is None else replace(sold, number=sale.number, epoch=sale.epoch))

    with patch.object(sales, "take_answer", gullible):
        yield


@mutant
def a_report_on_an_older_plan_proves_a_release() -> Iterator[None]:
    prove = nodes._take_proofs
    with patch.object(
        nodes, "_take_proofs", lambda turn, node, report: prove(turn, node, replace(report, plan_seq=2**60))
    ):
        yield


@mutant
def a_report_of_an_older_epoch_proves_a_release() -> Iterator[None]:
    take = nodes.take_report

    def gullible(turn: Any, report: Any) -> None:
        take(turn, replace(report, epoch=turn.state.epoch, plan_seq=2**50) if report.epoch else report)

    with patch.object(nodes, "take_report", gullible):
        yield


@mutant
def leases_never_end() -> Iterator[None]:
    with patch.object(leases, "expire", _nothing):
        yield


@mutant
def what_an_app_gives_back_is_not_taken() -> Iterator[None]:
    with patch.object(apps, "_take_releases", _nothing):
        yield


@mutant
def the_gpus_of_a_silent_node_are_free() -> Iterator[None]:
    lose = nodes.lose_silent

    def rash(turn: Any) -> None:
        lose(turn)
        for gpu in list(turn.state.gpus.values()):
            if isinstance(gpu.state, Draining) and "was lost" in gpu.state.reason:
                turn.put_gpu(gpu, Free(turn.now))

    with patch.object(nodes, "lose_silent", rash):
        yield


@mutant
def the_next_attempt_does_not_wait_for_the_last() -> Iterator[None]:
    with patch.object(plans, "_haunts", lambda *_: False):
        yield


@mutant
def a_lease_has_a_number_from_outside_the_state() -> Iterator[None]:
    grant, numbers = leases.grant, itertools.count()

    def careless(turn: Any, gpu: Any, app: Any, **options: Any) -> Any:
        lease = grant(turn, gpu, app, **options)
        lease = replace(lease, id=LeaseId(f"{app.id}/n{next(numbers)}"))
        turn.put_gpu(turn.state.gpus[gpu.id], Leased(lease))
        return lease

    with patch.object(leases, "grant", careless):
        yield


@mutant
def a_silent_app_keeps_what_it_does_not_use() -> Iterator[None]:
    with patch.object(apps, "leave_out_silent", _nothing):
        yield


@mutant
def plans_and_holdings_are_said_only_once() -> Iterator[None]:
    say_plan, say_holdings = outbox._say_plan, outbox._say_holdings

    def plan(turn: Any, node: Any, *, restate: bool) -> None:
        say_plan(turn, node, restate=False)

    def holdings(turn: Any, app: Any, *, restate: bool) -> None:
        say_holdings(turn, app, restate=False)

    with patch.object(outbox, "_say_plan", plan), patch.object(outbox, "_say_holdings", holdings):
        yield


@mutant
def one_part_of_a_large_site_is_restated_at_every_beat() -> Iterator[None]:
    part = beats.part

    def first(state: Any, members: Any, count: int) -> Any:
        return part(replace(state, beats=0), members, count)

    with patch.object(beats, "part", first):
        yield


# --- node agents ----------------------------------------------------------------------------------------------------


@mutant
def a_node_obeys_older_plans() -> Iterator[None]:
    take_plan = plan_news.take_plan

    def obedient(node: NodeState, message: Any) -> None:
        node.fence = min(node.fence, (message.epoch, message.seq))
        take_plan(node, message)
        node.fence = (message.epoch, message.seq)

    with patch.object(plan_news, "take_plan", obedient):
        yield


@mutant
def what_a_parked_task_keeps_is_never_found_out() -> Iterator[None]:
    with patch.object(Gpus, "kept_by", lambda *_args, **_options: ""):
        yield


@mutant
def a_gpu_counts_as_empty_while_its_worker_leaves() -> Iterator[None]:
    with patch.object(Gpus, "obstacle", lambda *_args, **_options: ""):
        yield


@mutant
def a_node_does_not_ask_workers_to_leave() -> Iterator[None]:
    with patch.object(ladder, "vacate", _nothing):
        yield


@mutant
def a_crash_counts_as_a_finish() -> Iterator[None]:
    def kind(task: Any, gone: Any) -> Verdict:
        verdict = judge(task, gone)
        return Verdict("finished", "", 0) if verdict.outcome == "failed" else verdict

    with patch.object(worker_news, "judge", kind):
        yield


# --- GPUs that are shared ---------------------------------------------------------------------------------------------


@mutant
def a_start_does_not_wait_until_the_gpu_is_free() -> Iterator[None]:
    with patch.object(Gpus, "obstacle_to", lambda *_args, **_options: ""):
        yield


@mutant
def seats_of_one_gpu_count_as_gpus() -> Iterator[None]:
    with patch.object(Task, "devices", property(lambda self: frozenset(self.gpus))):
        yield


@mutant
def turns_never_end() -> Iterator[None]:
    with patch.object(ladder, "rest", _nothing):
        yield


@mutant
def a_turn_goes_to_the_same_task_again() -> Iterator[None]:
    with patch.object(Slices, "_rank", lambda _, each: (not each.fixed, not each.leaving, each.tasks)):
        yield


@mutant
def two_are_packed_whose_memory_exceeds_the_gpu() -> Iterator[None]:
    with patch.object(Packs, "_fits", lambda *_: True), patch.object(Gpus, "_too_small_for", lambda *_: ""):
        yield


@mutant
def host_memory_for_parked_workers_has_no_end() -> Iterator[None]:
    with patch.object(SuspendMethods, "has_host_memory", lambda *_: True):
        yield


@mutant
def a_task_lost_by_the_driver_counts_as_refused() -> Iterator[None]:
    checkpointed = worker_news.checkpointed

    def hopeful(node: NodeState, event: Any) -> None:
        checkpointed(node, replace(event, lost=False))

    with patch.object(worker_news, "checkpointed", hopeful):
        yield


# --- GPU time -------------------------------------------------------------------------------------------------------


@mutant
def a_gpu_that_is_being_left_counts_for_nobody() -> Iterator[None]:
    book = History.book

    def forgetful(self: Any, lease: Any, app: Any, tenant: Any, part: float, *, drains: bool, now: float) -> bool:
        return book(self, lease, app, tenant, 0.0 if drains else part, drains=False, now=now)

    with patch.object(History, "book", forgetful):
        yield


@mutant
def what_an_app_has_lost_is_not_its_tenants() -> Iterator[None]:
    def end_attempt(self: Any, app: Any, _tenant: Any, *, lost_gpu_s: float, starting_gpu_s: float, now: float) -> None:
        account = self.apps[app]
        lost_gpu_s += account.spent.lost_gpu_s
        self.apps[app] = replace(account, spent=replace(account.spent, lost_gpu_s=lost_gpu_s))

    with patch.object(History, "end_attempt", end_attempt):
        yield


# --- app agents -----------------------------------------------------------------------------------------------------


@mutant
def an_app_says_its_wish_only_once() -> Iterator[None]:
    with (
        patch.object(AppAgent, "tick", lambda *_: []),
        patch.object(AppAgent, "restate", lambda *_: []),
        patch.object(AppAgent, "deadline", lambda *_: None),
    ):
        yield


@mutant
def an_attempt_keeps_its_number() -> Iterator[None]:
    def lazy(job: Any, *, preempted: bool, left_s: float | None = None) -> Any:
        return replace(job, state=jobs.Waiting(job.state.attempt, left_s), preempted=preempted)

    with patch.object(jobs, "next_attempt", lazy):
        yield


@mutant
def parked_jobs_wish_for_the_same_gpus() -> Iterator[None]:
    with patch.object(demand, "displaced", lambda *_: False):
        yield


# --- journals -------------------------------------------------------------------------------------------------------


@mutant
def the_journal_is_written_after_handling() -> Iterator[None]:
    def late(append: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def wait(self: Any, entry: Any) -> None:
            waiting = getattr(self, "waiting", None)
            self.waiting = entry
            if waiting is not None:
                append(self, waiting)

        return wait

    with patch.object(Record, "append", late(Record.append)), patch.object(Writer, "append", late(Writer.append)):
        yield


@mutant
def a_standby_is_one_event_behind() -> Iterator[None]:
    def late(self: Any) -> None:
        begin, self._done = self._done, max(self._done, len(self._record.entries) - 1)
        self._record.replay(self.core, begin, self._done)

    with patch.object(Standby, "follow", late):
        yield


@mutant
def a_standby_takes_an_event_in_twice() -> Iterator[None]:
    def repeated(self: Any) -> None:
        begin, self._done = max(0, self._done - 1), len(self._record.entries)
        self._record.replay(self.core, begin, self._done)

    with patch.object(Standby, "follow", repeated):
        yield


@mutant
def effects_are_performed_before_the_commit() -> Iterator[None]:
    watch = FaultInjector._watch

    def eager(self: FaultInjector, actor: Any, event: Any, effects: Any) -> bool:
        watch(self, actor, event, effects)
        return True

    with patch.object(FaultInjector, "_watch", eager):
        yield


@mutant
def the_store_takes_what_a_former_leader_commits() -> Iterator[None]:
    with patch.object(World, "leads", lambda *_: True):
        yield


@mutant
def a_former_leader_performs_what_is_refused() -> Iterator[None]:
    may_perform = Former.may_perform

    def eager(self: Former, event: Any, effects: Any) -> bool:
        may_perform(self, event, effects)
        return True

    with patch.object(Former, "may_perform", eager):
        yield


@mutant
def what_nodes_know_of_later_epochs_is_not_heard() -> Iterator[None]:
    with patch.object(site, "note_epoch", lambda *_: True):
        yield


@mutant
def nodes_obey_an_arbiter_that_has_forgotten_plans() -> Iterator[None]:
    with patch.object(plan_news, "_knows_too_little", lambda *_: False):
        yield


@mutant
def what_is_found_running_is_not_adopted() -> Iterator[None]:
    with patch.object(leases, "adopt", lambda *_: (0, 0)):
        yield


@mutant
def a_standby_keeps_what_the_journal_has_lost() -> Iterator[None]:
    older = FaultInjector._older

    def keep(self: FaultInjector, loss: Any) -> Arbiter:
        standby = self.standby
        core = older(self, loss)
        self.standby = standby
        return core

    with patch.object(FaultInjector, "_older", keep):
        yield


@mutant
def a_snapshot_leaves_out_a_counter() -> Iterator[None]:
    restored = Arbiter.restored.__func__  # type: ignore[attr-defined]

    def forgetful(kind: Any, blob: bytes) -> Any:
        arbiter = restored(kind, blob)
        arbiter.state.leases_made = 0
        return arbiter

    with patch.object(Arbiter, "restored", classmethod(forgetful)):
        yield


@mutant
def an_array_goes_beyond_its_bound() -> Iterator[None]:
    with patch.object(Array, "runnable", lambda self, search, trials: tuple(array._in_order(search, trials))):
        yield


@mutant
def a_job_of_a_fatal_fault_is_a_client_of_mps_again() -> Iterator[None]:
    with patch.object(Health, "may_use_mps", lambda *_: True):
        yield


@mutant
def the_driver_suspends_clients_of_mps() -> Iterator[None]:
    usable = SuspendMethods.usable

    def unaware(self: SuspendMethods, task: Task, among: Any, tasks: Any) -> Any:
        return usable(self, replace(task, facts=replace(task.facts, mps=False)), among, tasks)

    with patch.object(SuspendMethods, "usable", unaware):
        yield


@mutant
def a_gpu_of_a_job_on_several_nodes_has_guests() -> Iterator[None]:
    with patch.object(AppView, "whole_gpus", property(lambda _: False)):
        yield


@mutant
def guests_stay_however_far_their_own_gpus_lie() -> Iterator[None]:
    with patch.object(guests, "_lie_close", lambda *_: True):
        yield
