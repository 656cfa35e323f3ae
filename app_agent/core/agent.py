"""The app agent: values allocations, bids, divides what it holds among its jobs. A core; one per app.

It is told what the arbiter says (`hear`) and that time has passed (`tick`), and answers with messages. What it wants is
one `AppReport`, stated whole when it changes and again every beat; what it has is the arbiter's newest `Holdings`, with
`Grant` and `Preempt` as earlier news of the same. (epoch, seq) orders these three, so that loss, repetition and
reordering change nothing that the next beat does not mend. A lease's remaining time is ignored: when the arbiter is
silent an app keeps what it has, since nobody else can have been granted it (fail-static).

After every event the same four steps run, in this order: jobs follow what node agents reported, the search advances,
GPUs are divided, and the report goes out if it says something new.

What may not enter: event loop, clock, dice, files, sockets; other apps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Literal, assert_never

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from app_agent.core import bids, division, jobs, valuation
from app_agent.core.division import Asking
from app_agent.core.model import (
    AppState,
    Done,
    Dropped,
    Failed,
    HeldGpu,
    Job,
    Leaving,
    Over,
    Placed,
    Stopping,
    Suspended,
    Waiting,
    locality,
)
from app_agent.core.spec import AppSpec
from app_agent.core.tuning import AppScheduler, Left, Search, Trial, scheduler_for
from app_agent.core.valuation import LevelTerms, Valuation
from protocol.core import Send
from protocol.messages import (
    ARBITER,
    LEVELS,
    AppId,
    AppReport,
    Basis,
    Bid,
    GpuId,
    Grant,
    Holdings,
    JobId,
    JobWish,
    LaunchSpec,
    LeaseTerms,
    Level,
    Offer,
    OfferedGpu,
    Preempt,
    Probe,
    ProbeReply,
    Refusal,
    TaskStatus,
    TenantId,
    device_of,
)

#: What a job whose length nobody knows is taken for: an hour of one GPU.
UNKNOWN_WORK_S = 3600.0
#: A job of unknown length that runs on beyond that is taken to have a tenth of its steps still to do.
UNKNOWN_LEFT_SHARE = 0.1
#: A part of a gang is kept this long, and a quarter of a lease at least, for the rest to be freed by its holder.
GANG_PATIENCE_S = 60.0
#: Levels at which a job lies in one machine.
CLOSE: tuple[Level, ...] = ("slot", "machine")
#: The metric that an app which names none, and wants less of it, is taken to report.
LOSS = "loss"
#: An elastic job grows when that saves more than so many restarts, of which what was measured counts if it was.
GROWTH_GAIN_MIN = 2.0

ToOneApp = Probe | Offer | Grant | Preempt | Holdings | Refusal


class _Facts(Struct, frozen=True):
    """What follows from the jobs and the search: derived, never part of the state."""

    jobs: tuple[Job, ...]
    search: Search
    slowdown: Mapping[Level, float]
    trials: tuple[Trial, ...]
    runnable: tuple[int, ...]
    serials_s: tuple[float, ...]  #: each job's time of one mini-batch on one GPU, as measured or as the median
    serial_median_s: float  #: the median job's, or a guess (Eq. 2)

    def serial_of_s(self, left: Left) -> float:
        """Return the time of one mini-batch on one GPU; a job of a phase to come is taken for the median one."""
        return self.serial_median_s if left.trial is None else self.serials_s[left.trial]


class AppAgent:
    """The agent of one app; `state` is all it knows."""

    def __init__(self, state: AppState, *, beat_s: float) -> None:
        self.state = state
        self.beat_s = beat_s
        self._scheduler: AppScheduler = scheduler_for(state.spec)
        self._facts: _Facts | None = None

    @classmethod
    def of(cls, app: AppId, spec: AppSpec, *, now: float, beat_s: float, run: str = "") -> AppAgent:
        """Return the agent of a new app; `spec` has no mistake."""
        fresh = tuple(Job(JobId(f"{app}.{number}"), number) for number in range(len(spec.trials)))
        return cls(AppState(app, spec, fresh, scheduler_for(spec).begin(), now, run=run), beat_s=beat_s)

    # --- events -----------------------------------------------------------------------------------------------------

    def hear(self, message: ToOneApp, now: float) -> list[Send]:
        """Take in what the arbiter said; answer."""
        match message:
            case Probe():
                return self._answer_probe(message)
            case Offer():
                return self._answer_offer(message, now)
            case Grant() | Preempt() | Holdings():
                return self._hear_news(message, now)
            case Refusal(run=run) if run not in ("", self.state.run):
                return []  # an older app had this id
            case Refusal(reason=reason, cancelled=cancelled):
                return self._be_refused(reason, now, cancelled=cancelled)
            case _ as never:
                assert_never(never)

    def tick(self, now: float) -> list[Send]:
        """Restate the whole wish if a beat is due; give back what has waited for the rest of its gang for too long."""
        if self._quiet():
            return []
        if now >= self._beat_due():
            return self.restate(now)
        return self._follow(now) if self._patience_over(now) else []

    def restate(self, now: float) -> list[Send]:
        """State the whole wish again, now."""
        return [] if self._quiet() else self._follow(now, restate=True)

    def cancel(self, now: float) -> list[Send]:
        """End the app at its user's word; an app that is over stays as it is."""
        if self.state.over is None:
            self._end("cancelled", "cancelled by its owner", now)
        return self._follow(now)

    def deadline(self) -> float | None:
        """Return when `tick` is wanted, or None when everything is said and heard."""
        if self._quiet():
            return None
        patient_until = self.state.patient_until
        return self._beat_due() if patient_until is None else min(self._beat_due(), patient_until)

    def _beat_due(self) -> float:
        return self.state.beat_at + self.beat_s

    def _quiet(self) -> bool:
        return self.state.over is not None and self.state.over.settled

    def _be_refused(self, reason: str, now: float, *, cancelled: bool) -> list[Send]:
        """End without another word: who refused or cancelled the app need not hear that it is over."""
        if self.state.over is None:
            outcome: Literal["cancelled", "failed"] = "cancelled" if cancelled else "failed"
            self.state.over = Over(outcome, reason, self.state.seq + 1, now, refused=not cancelled, settled=True)
        return []

    # --- what the arbiter knows -------------------------------------------------------------------------------------

    def _hear_news(self, message: Grant | Preempt | Holdings, now: float) -> list[Send]:
        """Update the leases, and the jobs if tasks were told of, unless something newer was heard already."""
        state = self.state
        if (message.epoch, message.seq) < state.view:
            return []
        state.view = (message.epoch, message.seq)
        before = (state.held, state.jobs, state.over)
        match message:
            case Grant():
                self._hold((*message.leases, *message.renewed))
            case Preempt():
                state.news = message.reason
                lost = set(message.leases)
                state.held = {
                    gpu: replace(held, leaving=held.leaving or held.lease in lost) for gpu, held in state.held.items()
                }
            case Holdings():
                self._take_holdings(message, now)
            case _ as never:
                assert_never(never)
        contradicted = self._quiet() and bool(state.held)  # it is over, and the arbiter does not seem to know
        if (state.held, state.jobs, state.over) == before and not contradicted and not self._patience_over(now):
            return []  # what follows from it was said when it was new
        return self._follow(now, restate=contradicted)

    def _patience_over(self, now: float) -> bool:
        return self.state.patient_until is not None and now >= self.state.patient_until

    def _hold(self, terms: Iterable[LeaseTerms]) -> None:
        self.state.held = self.state.held | {each.gpu: HeldGpu.of(each) for each in terms}

    def _take_holdings(self, message: Holdings, now: float) -> None:
        state = self.state
        state.held = {each.gpu: HeldGpu.of(each) for each in message.leases}
        state.acked = max(state.acked, message.acked)
        state.cluster_gpus = message.cluster_gpus or state.cluster_gpus
        state.site = message.site or state.site
        tasks: dict[tuple[JobId, int], list[TaskStatus]] = {}
        for task in message.tasks:
            tasks.setdefault((task.job, task.attempt), []).append(task)
        known = [jobs.recall(job, tasks) for job in state.jobs]
        seen = [
            jobs.observe(job, self._told(job, tasks), state.spec, state.held, acked=message.acked, now=now)
            for job in known
        ]
        state.jobs = tuple(
            replace(job, state=before.state) if _is_late(job, before, seen) else job
            for job, before in zip(seen, state.jobs, strict=True)
        )
        self._note_loss(now)
        if state.over is not None and state.acked >= state.over.since_seq and not state.held:
            state.over = replace(state.over, settled=True)

    def _told(self, job: Job, tasks: Mapping[tuple[JobId, int], Sequence[TaskStatus]]) -> TaskStatus | None:
        """Return what was told of the job's present attempt, whose parts may be on several nodes."""
        parts = tasks.get((job.id, _attempt(job)), ())
        if not self.state.spec.spans:
            return parts[-1] if parts else None
        return jobs.gathered(parts, job.gpus)

    def _note_loss(self, now: float) -> None:
        """Remember the last two losses that were reported, if a loss is what the app reports."""
        state = self.state
        loss = self.metrics().get(state.spec.metric or LOSS) if state.spec.mode == "min" else None
        if loss is not None and loss not in (last for _, last in state.losses[-1:]):
            state.losses = (*state.losses[-1:], (now, loss))

    # --- after every event ------------------------------------------------------------------------------------------

    def _follow(self, now: float, *, restate: bool = False) -> list[Send]:
        """Draw the consequences of what is known, and say so if they are new."""
        if self.state.over is None:
            self._advance_search(now)
        if self.state.over is None:
            self._divide(now)
        return self._report(now, restate=restate)

    def _advance_search(self, now: float) -> None:
        """Let the search decide; drop what it goes on without; end the app when it has its answer or can have none."""
        state = self.state
        state.search = self._scheduler.advance(state.search, self.trials())
        following = state.seq + 1
        state.jobs = tuple(
            job if job.number in state.search.survivors else jobs.drop(job, since_seq=following) for job in state.jobs
        )
        trials = self.trials()
        failures = [job.state for job in state.jobs if isinstance(job.state, Failed)]
        answer = self._scheduler.answer(state.search, trials)
        if answer is not None:
            self._end("finished", self._remark(state.jobs[answer]), now)
        elif state.search.fault:
            self._end("failed", state.search.fault, now, exit_code=1)
        elif all(isinstance(state.jobs[number].state, Failed) for number in state.search.survivors):
            last = failures[-1] if failures else Failed("every trial has failed", 1)
            self._end("failed", last.reason, now, exit_code=last.exit_code)

    def _remark(self, answer: Job) -> str:
        """Return what a user should know of an app that has finished nevertheless, `answer` being its result."""
        metric = self.state.spec.metric
        failed = [job for job in self.state.jobs if isinstance(job.state, Failed)]
        remarks = [job.state.remark for job in self.state.jobs if isinstance(job.state, Done) and job.state.remark]
        for job in failed[:1]:
            assert isinstance(job.state, Failed)
            remarks.append(
                f"{len(failed)} of {len(self.state.jobs)} trials failed, the first because {job.state.reason}"
            )
        if metric in answer.diverged:
            remarks.append(f"{answer.id} has diverged: the newest {metric} that it reported is no number")
        return "; ".join(remarks)

    def _end(
        self, outcome: Literal["finished", "failed", "cancelled"], reason: str, now: float, *, exit_code: int = 0
    ) -> None:
        self.state.over = Over(outcome, reason, self.state.seq + 1, now, exit_code)
        self.state.patient_until = None  # nothing is divided any more, so nobody else would end this wait

    def trials(self) -> tuple[Trial, ...]:
        """Return the jobs as the search sees them."""
        return self._now().trials

    def _now(self) -> _Facts:
        """Return what follows from the jobs and the search; both are replaced, never changed, so identity tells."""
        state, facts = self.state, self._facts
        if facts is None or facts.jobs is not state.jobs or facts.search is not state.search:
            slowdown = valuation.slowdowns(job.times for job in state.jobs)
            trials = tuple(self._trial(job, slowdown) for job in state.jobs)
            runnable = self._scheduler.runnable(state.search, trials)
            measured_s = [self._measured_s(job, slowdown) for job in state.jobs]
            guess_s = state.spec.step_serial_s or UNKNOWN_WORK_S / trials[0].steps_total
            median_s = median([serial_s for serial_s in measured_s if serial_s > 0] or [guess_s])
            serials_s = tuple(serial_s or median_s for serial_s in measured_s)
            facts = self._facts = _Facts(state.jobs, state.search, slowdown, trials, runnable, serials_s, median_s)
        return facts

    def _trial(self, job: Job, slowdown: Mapping[Level, float]) -> Trial:
        standing: Literal["live", "done", "failed"] = "live"
        if isinstance(job.state, Done):
            standing = "done"
        elif isinstance(job.state, Failed):
            standing = "failed"
        metric = self.state.spec.metric
        return Trial(
            number=job.number,
            steps_done=job.steps_done,
            steps_total=self._steps_total(job, slowdown),
            state=standing,
            metric=math.nan if metric in job.diverged else job.metrics.get(metric),
            resting=isinstance(job.state, Waiting | Suspended),
            steps_before=job.start_step + 1 if job.step >= 0 else 0,
        )

    # --- division ---------------------------------------------------------------------------------------------------

    def _divide(self, now: float) -> None:
        """Take jobs off GPUs they must leave, start those that wait, grow one that gains, give back what is useless."""
        state = self.state
        wanted = self._now().runnable
        self._clear(set(wanted), now)
        self._start([state.jobs[number] for number in wanted], now)
        held_back = self._hold_back(wanted)
        held_back |= self._grow(wanted, held_back, now)
        self._give_back(wanted, held_back, now)

    def _put(self, job: Job) -> None:
        self.state.jobs = tuple(job if other.id == job.id else other for other in self.state.jobs)

    def _clear(self, wanted: set[int], now: float) -> None:
        """Let placed jobs leave that have lost a GPU, or whose phase is over.

        One that accepts a smaller size goes on with what it keeps as soon as it has left, in its next attempt.
        """
        held, following = self.state.held, self.state.seq + 1
        for job in self.state.jobs:
            if isinstance(job.state, Placed):
                lost = any(gpu in held and held[gpu].leaving for gpu in job.state.gpus)
                if lost or job.number not in wanted:
                    self._put(jobs.leave(job, since_seq=following, now=now))

    def _free(self) -> list[HeldGpu]:
        """Return the GPUs that are the app's to stay, and that no process of its own may be on."""
        busy = {gpu for job in self.state.jobs for gpu in self._occupied(job)}
        given_back = set(self.state.given_back)
        return [
            held
            for gpu, held in sorted(self.state.held.items())
            if gpu not in busy and not held.leaving and held.lease not in given_back
        ]

    def _occupied(self, job: Job) -> tuple[GpuId, ...]:
        """Return the GPUs kept from other jobs by `job`; a parked job keeps them only when it can be resumed there."""
        if isinstance(job.state, Suspended):
            return self._seats(job) if self._resumable(job) else ()
        return job.gpus

    def _seats(self, job: Job) -> tuple[GpuId, ...]:
        """Return the seats that the app has on the GPUs where `job` is parked; none unless one on each."""
        held = {device_of(gpu): gpu for gpu, lease in sorted(self.state.held.items()) if not lease.leaving}
        seats = tuple(held[device_of(gpu)] for gpu in job.gpus if device_of(gpu) in held)
        return seats if len(seats) == len(job.gpus) else ()

    def _resumable(self, job: Job) -> bool:
        wanted = job.number in self._now().runnable and not self._displaced(job)
        return wanted and bool(self._seats(job))

    def _displaced(self, job: Job) -> bool:
        """Whether a parked job waits for another of the app's on its GPUs: one not parked, or parked and before it."""
        mine, runnable = set(map(device_of, job.gpus)), self._now().runnable
        others = (other for other in self.state.jobs if other.id != job.id)
        rivals = (other for other in others if not mine.isdisjoint(map(device_of, other.gpus)))
        return any(
            not isinstance(other.state, Suspended) or (other.number < job.number and other.number in runnable)
            for other in rivals
        )

    def _start(self, wanted: Sequence[Job], now: float) -> None:
        waiting = [job for job in wanted if isinstance(job.state, Waiting)]
        for job_id, gpus in division.divide(self._free(), self._asking(waiting)).items():
            job = next(job for job in waiting if job.id == job_id)
            self._put(jobs.place(job, gpus, since_seq=self.state.seq + 1, now=now))

    def _asking(self, some: Iterable[Job]) -> list[Asking]:
        spec = self.state.spec
        return [Asking(job.id, spec.gang, spec.job_demand_max, spec.spans, spec.sizes) for job in some]

    def _hold_back(self, wanted: Sequence[int]) -> set[GpuId]:
        """Return the free GPUs that jobs will use which are still leaving others, as if these had left already."""
        state = self.state
        pending = [job for job in self._wanted_jobs(wanted) if isinstance(job.state, Waiting | Leaving)]
        soon = [
            held
            for job in pending
            for held in (state.held.get(gpu) for gpu in job.gpus)
            if held is not None and not held.leaving
        ]
        plan = division.divide([*self._free(), *soon], self._asking(pending))
        return {gpu for gpus in plan.values() for gpu in gpus}

    def _wanted_jobs(self, wanted: Sequence[int]) -> list[Job]:
        return [self.state.jobs[number] for number in wanted]

    def _grow(self, wanted: Sequence[int], held_back: set[GpuId], now: float) -> set[GpuId]:
        """Let elastic jobs leave in order to start again on more GPUs that they can reach; return those GPUs."""
        state = self.state
        used: set[GpuId] = set()
        for job in self._wanted_jobs(wanted):
            if not isinstance(job.state, Placed) or not self._growable(job):
                continue
            nodes = {state.held[gpu].node for gpu in job.gpus if gpu in state.held}
            free = [held for held in self._free() if held.gpu not in held_back | used]
            more = [held for held in free if held.node in nodes]
            if state.spec.spans:
                more += [held for held in free if held.node not in nodes]
            (asking,) = self._asking([job])
            size = asking.fitting(len(job.gpus) + len(more))
            more = more[: size - len(job.gpus)]
            if size > len(job.gpus) and self._gains(job, size, self._looser(job, more)):
                used |= {held.gpu for held in more}
                self._put(jobs.leave(job, since_seq=state.seq + 1, now=now))
        return used

    def _looser(self, job: Job, more: Sequence[HeldGpu]) -> float:
        """Return how much slower a job's GPUs are together with `more` than by themselves, for they lie further apart.

        A job that stays on its node counts as no slower.
        """
        if not self.state.spec.spans:
            return 1.0
        slowdown = self._now().slowdown
        own = [self.state.held[gpu] for gpu in job.gpus if gpu in self.state.held]
        return slowdown[locality([*own, *more])] / slowdown[locality(own)]

    def _growable(self, job: Job) -> bool:
        """Whether a running job could be started again on more GPUs without losing work, and that would pay."""
        return self._resizable(job) and _begun(job) and self._gains(job, self.state.spec.job_demand_max)

    def _resizable(self, job: Job) -> bool:
        """Whether an attempt can go on with another number of GPUs: it is known to save a checkpoint when it leaves."""
        spec = self.state.spec
        return spec.elastic and job.cooperative and jobs.movable(job, spec)

    def _gains(self, job: Job, gpus: int, slower: float = 1.0) -> bool:
        left_s = max(0, self.trials()[job.number].steps_total - job.steps_done) * self._now().serials_s[job.number]
        saved_s = left_s / max(1, len(job.gpus)) - slower * left_s / gpus
        return saved_s > GROWTH_GAIN_MIN * (self.move_s() or self.state.spec.restart_s)

    def move_s(self) -> float:
        """Return what moving a job costs, the median of what the last moves did (see `jobs.observe`); 0: unknown."""
        return median([cost_s for job in self.state.jobs for cost_s in job.moves_s] or [0.0])

    def _give_back(self, wanted: Sequence[int], held_back: set[GpuId], now: float) -> None:
        """Release what no job can use; a part of a gang only when the rest of it has not come for a while."""
        state = self.state
        useless = {held.lease for held in self._free() if held.gpu not in held_back}
        hoping = any(isinstance(job.state, Waiting | Leaving | Suspended) for job in self._wanted_jobs(wanted))
        patience_s = max(GANG_PATIENCE_S, state.lease_s / 4) if hoping and state.spec.gang > 1 else 0.0
        state.useless_since = {lease: state.useless_since.get(lease, now) for lease in sorted(useless)}
        given_back = {lease for lease, since in state.useless_since.items() if now >= since + patience_s}
        hoped_for = [since for lease, since in state.useless_since.items() if lease not in given_back]
        state.patient_until = min(hoped_for) + patience_s if hoped_for else None
        still_there = {held.lease for held in state.held.values()}
        state.given_back = tuple(sorted((given_back | set(state.given_back)) & still_there))

    # --- valuation --------------------------------------------------------------------------------------------------

    def _answer_probe(self, probe: Probe) -> list[Send]:
        """Phase 1: say how fair the app's lot is now."""
        if self.state.over is not None or probe.epoch < self.state.view[0]:
            return []
        self.state.cluster_gpus = probe.cluster_gpus
        self.state.apps_mean = probe.apps_mean
        value = self._value(elapsed_s=probe.elapsed_s, apps_mean=probe.apps_mean)
        staying = [_where(held) for held in self.state.held.values() if not held.leaving]
        rho = bids.rho_kept(value, bids.reach_of(staying, (), gang=value.gang, spans=self.state.spec.spans, levels=()))
        return [Send(ARBITER, ProbeReply(self.state.app, probe.round, rho))]

    def _answer_offer(self, offer: Offer, now: float) -> list[Send]:
        """Phase 2: bid for whole gangs, up to what the app can use now; N_avg is that of the newest probe."""
        state = self.state
        if state.over is not None or offer.epoch < state.view[0]:
            return []
        state.lease_s = offer.lease_s
        value = self._value(elapsed_s=now - state.submitted_at, apps_mean=state.apps_mean)
        only = self._only(offer)
        named = None if only is None else set(only)
        usable = [gpu for gpu in offer.gpus if named is None or gpu.gpu in named]
        levels = [terms.level for terms in value.terms]
        reach = bids.reach_of(offer.kept, usable, gang=value.gang, spans=state.spec.spans, levels=levels)
        rho_none = bids.rho_kept(value, reach)
        rows = bids.bid_rows(value, reach, rho_none=rho_none, gpus_max=self.demand_max())
        return [Send(ARBITER, Bid(state.app, offer.round, rho_none, rows, only))]

    def _only(self, offer: Offer) -> tuple[GpuId, ...] | None:
        """Return the offered GPUs that jobs are bound to which can go on nowhere else, if that is so of all jobs."""
        wanted = self._wanted_jobs(self._now().runnable)
        bound = [job for job in wanted if self._bound(job)]
        if not wanted or len(bound) < len(wanted):
            return None
        reachable = {device_of(gpu.gpu) for gpu in (*offer.gpus, *offer.kept)}
        devices = [set(map(device_of, job.gpus)) for job in bound]
        homes = {device for job in devices if job <= reachable for device in job}
        return tuple(gpu.gpu for gpu in offer.gpus if device_of(gpu.gpu) in homes)

    def _bound(self, job: Job) -> bool:
        """Whether this job's process can go on only on the GPUs it is on: parked, or it would have to be parked."""
        if isinstance(job.state, Suspended):
            return True
        return isinstance(job.state, Placed | Leaving) and not jobs.movable(job, self.state.spec)

    def demand_max(self) -> int:
        """Return the most GPUs the app can use now."""
        if self.state.over is not None:
            return 0
        runnable = self._now().runnable
        return sum(self._demand(self.state.jobs[number]) for number in runnable)

    def gang(self) -> int:
        """Return how many GPUs the app takes at once: of a lone job that is parked, all on which it is parked.

        On a part of them it cannot go on. What an app of several jobs gets, it gives to the job that can use it.
        """
        job = self.state.jobs[0]
        alone = len(self.state.jobs) == 1 and isinstance(job.state, Suspended)
        return len(job.gpus) if alone and self._demand(job) else self.state.spec.gang

    def _demand(self, job: Job) -> int:
        if isinstance(job.state, Suspended):
            return 0 if self._displaced(job) else len(job.gpus)
        if isinstance(job.state, Placed) and not self._growable(job):
            return len(job.gpus)
        return self.state.spec.job_demand_max

    def _value(self, *, elapsed_s: float, apps_mean: float) -> Valuation:
        """Return what rho of any allocation follows from, as things stand."""
        state = self.state
        terms = self._terms()
        return Valuation(
            phases=self._works_s(),
            gang=self.gang(),
            terms=terms,
            elapsed_s=elapsed_s,
            lease_s=state.lease_s,
            fair_s=valuation.fair_time_s(self.ideal_s(), apps_mean=apps_mean),
            # A gang may be larger than every machine: to hope for better would mean never to bid for what there is.
            hoped=terms[-1].level if state.spec.spans and state.spec.gang > 1 else "machine",
            sizes=state.spec.sizes,
        )

    def _works_s(self) -> tuple[tuple[float, ...], ...]:
        """Return the serial seconds each job has left, phase by phase, at the rate at which it runs now.

        A job that has its GPUs for a share of the time makes share / step_s steps a second, and so takes 1 / share
        times as long; it is taken to go on like that. Its time alone, T_id, knows of no sharing.
        """
        facts = self._now()
        left = self._scheduler.left(self.state.search, facts.trials)
        return tuple(tuple(item.steps * facts.serial_of_s(item) / self._rate(item) for item in phase) for phase in left)

    def _rate(self, left: Left) -> float:
        """Return at which part of its speed alone a job runs; 1 for one that does not run."""
        if left.trial is None:
            return 1.0
        job = self.state.jobs[left.trial]
        running = isinstance(job.state, Placed) and job.seen == job.state.attempt
        return job.pace.rate if running else 1.0

    def _terms(self) -> tuple[LevelTerms, ...]:
        """Return what each level means to this app.

        A level bounds the union of the app's GPUs, but each job stands on one node. So one job accepts nothing beyond a
        machine; several jobs are as fast in a cluster as in a machine, only that a job cannot count on more than its
        gang when the GPUs lie scattered.

        Jobs that span accept all levels up to the loosest that their user does. Of several such jobs each is taken to
        lie as far apart as all together, which is the worst case.
        """
        spec = self.state.spec
        slowdown = self._now().slowdown
        if spec.spans:
            accepted = LEVELS[: LEVELS.index(spec.level_max) + 1]
            return tuple(LevelTerms(level, slowdown[level], spec.job_demand_max) for level in accepted)
        tight: list[Level] = ["slot"] if spec.level_max == "slot" else ["slot", "machine"]
        terms = [LevelTerms(level, slowdown[level], spec.job_demand_max) for level in tight]
        if len(self.state.jobs) > 1:
            terms.append(LevelTerms("cluster", slowdown[tight[-1]], spec.gang))
        return tuple(terms)

    def ideal_s(self) -> float:
        """Return T_cluster, its finish time alone on the whole cluster; 0: the cluster or its work is not known."""
        state = self.state
        unmeasured = state.over is not None and not any(job.steps_done for job in state.jobs)
        if state.cluster_gpus == 0 or unmeasured:
            return 0.0
        budget_s = self._scheduler.budget_steps(self.trials(), state.search) * self._now().serial_median_s
        demand_max = state.spec.job_demand_max * len(state.jobs)
        return valuation.cluster_time_s(budget_s, cluster_gpus=state.cluster_gpus, demand_max=demand_max)

    def _steps_total(self, job: Job, slowdown: Mapping[Level, float]) -> int:
        """Return the steps of `job`: as made, as its script declared, as its user said, or as many as take an hour."""
        made = job.steps_done if isinstance(job.state, Done) else 0
        known = made or job.total_steps or self.state.spec.steps_total
        if known:
            return known
        serial_s = self._measured_s(job, slowdown) or self.state.spec.step_serial_s or 1.0
        return max(round(UNKNOWN_WORK_S / serial_s), round(job.steps_done * (1 + UNKNOWN_LEFT_SHARE)), 1)

    def _measured_s(self, job: Job, slowdown: Mapping[Level, float]) -> float:
        """Return the job's time of one mini-batch on one GPU by its newest measurement, 0 if there is none."""
        if not job.times:
            return 0.0
        newest = job.times[-1]
        demand_max = self.state.spec.job_demand_max
        return valuation.serial_time_s(
            newest.step_s, slowdown=slowdown[newest.level], gpus=newest.gpus, job_demand_max=demand_max
        )

    # --- report -----------------------------------------------------------------------------------------------------

    def _report(self, now: float, *, restate: bool) -> list[Send]:
        """Say the whole wish if it is new, or if it is due to be said again."""
        state = self.state
        report = self.wish()
        new = state.said is None or _urgent(report) != _urgent(state.said)
        if not new and not restate:
            return []
        state.seq += 1
        state.said = report
        state.beat_at = now
        return [Send(ARBITER, replace(report, seq=state.seq), beat=not new)]

    def wish(self) -> AppReport:
        """Return the whole wish, as yet without its number."""
        state = self.state
        over = state.over
        left_s, left_gpu_s = self._left()
        return AppReport(
            app=state.app,
            tenant=TenantId(state.spec.tenant),
            name=state.spec.name,
            seq=0,
            state=over.state if over else "active",
            gang=self.gang(),
            demand_max=self.demand_max(),
            jobs=() if over else tuple(filter(None, map(self._wish, state.jobs))),
            requirements=state.spec.requirements,
            releases=() if over else state.given_back,
            level_max=self._level_max(),
            ideal_s=self.ideal_s(),
            reason=over.reason if over else "",
            migrations=sum(job.migrations for job in state.jobs),
            steps_lost=sum(job.lost for job in state.jobs),
            suspensions=sum(job.suspensions_before + job.suspensions for job in state.jobs),
            metrics=self.metrics(),
            left_s=left_s,
            left_gpu_s=left_gpu_s,
            loss_drop=self._loss_drop(),
            sizes=self._sizes(),
            move_s=self.move_s(),
            run=state.run,
            site=state.site,
            basis=self._basis(),
            start_s=median([job.start_s for job in state.jobs if job.start_s] or [0.0]),
        )

    def _sizes(self) -> tuple[int, ...]:
        """Return the sizes its jobs accept; none while a job of it runs that cannot go on with another one."""
        spec = self.state.spec
        rigid = any(
            isinstance(job.state, Suspended)
            or (isinstance(job.state, Placed) and _begun(job) and not self._resizable(job))
            for job in self.state.jobs
        )
        return () if self.state.over is not None or not spec.elastic or rigid else spec.accepted

    def _basis(self) -> Basis:
        """Return what the app's times rest on: nothing but a guess, while its steps or their time are not known."""
        state = self.state
        steps_known = bool(state.spec.steps_total) or all(
            job.total_steps or isinstance(job.state, Done | Failed | Dropped) for job in state.jobs
        )
        if steps_known and any(job.times for job in state.jobs):
            return "measured"
        return "declared" if steps_known and state.spec.step_serial_s > 0 else "guess"

    def _left(self) -> tuple[float | None, float | None]:
        """Return the run time left with all the app can use, close together, and the GPU-seconds that takes.

        A job that has its GPUs for a share of the time takes 1 / share times as long, and no more GPU-seconds. None
        while nobody knows how many steps there are, or how long one takes.

        Source: Themis, Eq. 2 at full demand: sum_i max_j W_ij / job_demand_max; one job is a phase by itself.
        """
        state = self.state
        steps_known = bool(state.spec.steps_total) or len(state.jobs) > 1 or state.jobs[0].total_steps > 0
        time_known = state.spec.step_serial_s > 0 or any(job.times for job in state.jobs)
        if state.over is not None or not (steps_known and time_known):
            return None, None
        left = self._scheduler.left(state.search, self.trials())
        works = [[(item.steps * self._close_serial_s(item), self._rate(item)) for item in phase] for phase in left]
        longest_s = math.fsum(max((work_s / rate for work_s, rate in phase), default=0.0) for phase in works)
        return longest_s / state.spec.job_demand_max, math.fsum(work_s for phase in works for work_s, _ in phase)

    def _close_serial_s(self, left: Left) -> float:
        """Return a job's time of one mini-batch on one GPU, by what owes least to a guess of S.

        What was measured across machines says that only by way of S, which may be but the crude table's; so what was
        measured in one machine comes first, then what the user declared.
        """
        spec, facts = self.state.spec, self._now()
        times = () if left.trial is None else self.state.jobs[left.trial].times
        if not spec.spans or (times and times[-1].level in CLOSE):
            return facts.serial_of_s(left)
        close = [time for time in times if time.level in CLOSE]
        if not close:
            return spec.step_serial_s or facts.serial_of_s(left)
        newest = close[-1]
        return valuation.serial_time_s(
            newest.step_s,
            slowdown=facts.slowdown[newest.level],
            gpus=newest.gpus,
            job_demand_max=spec.job_demand_max,
        )

    def _loss_drop(self) -> float:
        """Return the share of its loss that the app expects to lose in one more lease, at the pace last seen."""
        if len(self.state.losses) < 2:
            return 0.0
        (earlier, before), (later, after) = self.state.losses
        if not (later > earlier and math.isfinite(before) and 0.0 < before > after):
            return 0.0
        return (before - after) / before * self.state.lease_s / (later - earlier)

    def _level_max(self) -> Level:
        """Return the loosest level of the *union* of the app's GPUs: a single job that does not span has one node."""
        if self.state.spec.spans:
            return self.state.spec.level_max
        if len(self.state.jobs) > 1:
            return "cluster"
        return min(self.state.spec.level_max, "machine", key=LEVELS.index)

    def _wish(self, job: Job) -> JobWish | None:
        """Return what the app wants of `job`, or None when it wants nothing more."""
        match job.state:
            case Done() | Failed() | Dropped() | Stopping():
                return None
            case Waiting(attempt) | Leaving(attempt):
                return self._wish_for(job, attempt, ())
            case Placed(attempt, gpus, _):
                return self._wish_for(job, attempt, gpus)
            case Suspended(attempt, gpus):
                wanted = job.number in self._now().runnable and not self._displaced(job)
                return self._wish_for(job, attempt, (self._seats(job) or gpus) if wanted else (), suspended=True)
            case _ as never:
                assert_never(never)

    def _wish_for(self, job: Job, attempt: int, gpus: tuple[GpuId, ...], *, suspended: bool = False) -> JobWish:
        spec = self.state.spec
        launch = LaunchSpec(
            command=spec.trials[job.number],
            cwd=spec.cwd,
            # Not by the app's id alone: another site, or this one after its state was lost, may give that again.
            checkpoint_dir=f"{spec.checkpoint_root}/{self.state.run or self.state.app}/{job.number}",
            env=spec.env,
            run=self.state.run,
            secrets=spec.secrets,
        )
        return JobWish(job.id, attempt, gpus, launch, suspended)

    def metrics(self) -> dict[str, float]:
        """Return what was last reported of the model that is the app's answer, or may become it."""
        state = self.state
        answer = self._scheduler.answer(state.search, self.trials())
        if answer is not None:
            return state.jobs[answer].metrics
        return self._best().metrics

    def _best(self) -> Job:
        """Return the surviving job with the best metric so far."""
        spec = self.state.spec
        sign = -1.0 if spec.mode == "max" else 1.0
        standing = [self.state.jobs[number] for number in self.state.search.survivors] or list(self.state.jobs)
        return min(standing, key=lambda job: sign * job.metrics.get(spec.metric, sign * math.inf))

    # --- for people -------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Assert what must always be true of the state."""
        state = self.state
        claimed = [gpu for job in state.jobs if isinstance(job.state, Placed) for gpu in job.state.gpus]
        assert len(claimed) == len(set(claimed)), f"{state.app} put two jobs on one GPU: {claimed}"
        for job in state.jobs:
            nodes = {state.held[gpu].node for gpu in job.gpus if gpu in state.held}
            assert len(nodes) <= 1 or state.spec.spans, f"{job.id} lies on several nodes: {sorted(nodes)}"
        assert state.view == (-1, -1) or state.view >= (0, 0)
        assert len({job.id for job in state.jobs}) == len(state.jobs)


def _is_late(job: Job, before: Job, all_jobs: Sequence[Job]) -> bool:
    """Whether a parked job is said to go on where another has been put meanwhile: by a plan that is overtaken."""
    if not (isinstance(before.state, Suspended) and isinstance(job.state, Placed)):
        return False
    others = (other for other in all_jobs if other.number != job.number and isinstance(other.state, Placed))
    return any(not set(job.gpus).isdisjoint(other.gpus) for other in others)


def _attempt(job: Job) -> int:
    return job.state.attempt if isinstance(job.state, Waiting | Placed | Leaving | Suspended | Stopping) else -1


def _begun(job: Job) -> bool:
    """Whether the present attempt has made a mini-batch, as far as anybody has told."""
    return job.seen == _attempt(job) and job.step >= 0


def _where(held: HeldGpu) -> OfferedGpu:
    return OfferedGpu(held.gpu, held.node, held.rack, held.slot)


def _urgent(report: AppReport) -> bytes:
    """Return what of a report the arbiter must hear at once; figures can wait for the beat."""
    calm = replace(
        report,
        seq=0,
        ideal_s=0.0,
        migrations=0,
        steps_lost=0,
        suspensions=0,
        metrics={},
        left_s=None,
        left_gpu_s=None,
        loss_drop=0.0,
        move_s=0.0,
        start_s=0.0,
    )
    return msgspec.msgpack.encode(calm)
