"""The app agent: values allocations, bids, divides the GPUs it holds among its jobs. A core; one per app.

It is told the arbiter's messages (`hear`) and that time has passed (`tick`), and answers with messages. Its wish is one
`AppReport`, stated whole when it changes and again every beat; its GPUs are those of the arbiter's newest `Holdings`,
with `Preempt` as earlier news of the same, and `Grant` of an arbiter of the version before. (epoch, seq) orders these,
so that loss, repetition and reordering change nothing that the next beat does not mend. A lease's remaining time is
ignored: when the arbiter is silent an app keeps its GPUs, since no other app can have been granted them (fail-static).

After every event the same four steps run, in this order: jobs follow the node agents' reports (`holdings`), the search
advances (`search`), GPUs are divided (`placement`), and the report goes out if it says something new (`reporting`). A
round's questions change no job and are answered by `bidding`. All of these are functions over one `App`.

Kept out: event loop, clock, dice, files, sockets; other apps.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Literal, assert_never

from app_agent.core import bidding, holdings, placement, reporting, search
from app_agent.core.app import App
from app_agent.core.model import AppState, Job, Over, Placed
from app_agent.core.spec import AppSpec
from app_agent.core.spread import UNMEASURED, Spread
from app_agent.core.tuning import scheduler_for
from protocol.core import Send
from protocol.messages import AppId, GpuId, Grant, Holdings, JobId, Offer, Preempt, Probe, Refusal

ToOneApp = Probe | Offer | Grant | Preempt | Holdings | Refusal


class AppAgent:
    """The agent of one app; `state` is all it knows."""

    def __init__(self, state: AppState, *, beat_s: float) -> None:
        self.app = App(state)
        self.beat_s = beat_s

    @classmethod
    def of(
        cls, app: AppId, spec: AppSpec, *, now: float, beat_s: float, run: str = "", spread: Spread = UNMEASURED
    ) -> AppAgent:
        """Return the agent of a new app; `spec` has no mistake, `spread` is that of the owner's apps that are over."""
        fresh = tuple(Job(JobId(f"{app}.{number}"), place) for place, number in enumerate(spec.numbers))
        search = scheduler_for(spec).begin()
        state = AppState(app, spec, fresh, search, now, run=run, after=spec.after, spread_before=spread)
        return cls(state, beat_s=beat_s)

    @property
    def state(self) -> AppState:
        """The state as a snapshot holds it."""
        return self.app.state

    # --- events -----------------------------------------------------------------------------------------------------

    def hear(self, message: ToOneApp, now: float) -> list[Send]:
        """Take in the arbiter's message; answer."""
        match message:
            case Probe():
                return bidding.answer_probe(self.app, message)
            case Offer():
                return bidding.answer_offer(self.app, message, now)
            case Grant() | Preempt() | Holdings():
                return self._hear_news(message, now)
            case Refusal(run=run) if run not in ("", self.state.run):
                return []  # an older app had this id
            case Refusal(reason=reason, cancelled=cancelled):
                return self._be_refused(reason, now, cancelled=cancelled)
            case _ as never:
                assert_never(never)

    def tick(self, now: float) -> list[Send]:
        """Restate the whole wish if a beat is due; end waits for the rest of a gang or for better GPUs."""
        if self.state.settled:
            return []
        if now >= self._beat_due():
            return self.restate(now)
        return self._follow(now) if self._wait_over(now) else []

    def restate(self, now: float) -> list[Send]:
        """State the whole wish again, now."""
        return [] if self.state.settled else self._follow(now, restate=True)

    def cancel(self, now: float) -> list[Send]:
        """End the app at its user's word; an app that is over stays as it is."""
        if self.state.over is None:
            search.end(self.app, "cancelled", "cancelled by its owner", now)
        return self._follow(now)

    def cancel_job(self, job: JobId, now: float) -> list[Send]:
        """End one job of an array at its user's word; a job that is over stays as it is."""
        if self.state.over is None:
            search.leave_out(self.app, job)
        return self._follow(now)

    def hear_end(self, other: AppId, over: Over, now: float) -> list[Send]:
        """Take in that another app of the owner is over, which this one was to begin after.

        It begins when no process of the other is left, too; what can never begin ends at once.
        """
        state = self.state
        broken = any(each.app == other and each.ended == "ok" for each in state.after) and over.state != "finished"
        if not (broken or over.gone or over.settled):
            return []
        state.after = tuple(each for each in state.after if each.app != other)
        state.queued_at = now
        if state.settled:
            return []
        if broken and state.over is None:
            past = "was cancelled" if over.state == "cancelled" else over.state
            why = f"{other} {past}, and this app was to begin only after {other} had finished (--after {other}:ok)"
            search.end(self.app, "cancelled", why, now)
        return self._follow(now)

    def deadline(self) -> float | None:
        """Return when `tick` is wanted, or None when everything is said and heard."""
        if self.state.settled:
            return None
        return min([self._beat_due(), *self._waits()])

    def _beat_due(self) -> float:
        return self.state.beat_at + max(self.beat_s, self.state.told_beat_s)

    def _waits(self) -> list[float]:
        """Return until when it waits before it asks for more GPUs, or gives some back."""
        return [until for until in (self.state.patient_until, self.state.content_until) if until is not None]

    def _wait_over(self, now: float) -> bool:
        return any(now >= until for until in self._waits())

    def _be_refused(self, reason: str, now: float, *, cancelled: bool) -> list[Send]:
        """End without another word: the arbiter, which refused or cancelled the app, need not hear that it is over."""
        if self.state.over is None:
            outcome: Literal["cancelled", "failed"] = "cancelled" if cancelled else "failed"
            self.state.over = Over(outcome, reason, self.state.seq + 1, now, refused=not cancelled, settled=True)
        return []

    def _hear_news(self, message: Grant | Preempt | Holdings, now: float) -> list[Send]:
        """Follow the arbiter's newest word on leases and tasks, unless it changes nothing."""
        state = self.state
        before, probed = (state.held, state.jobs, state.over), state.probes
        if holdings.disbelieve(self.app, message):
            return self._follow(now, restate=True)  # it is told, and speaks again
        if not holdings.take(self.app, message, now):
            return []
        # It is over, and the arbiter does not seem to know. Leases that leave a lost GPU may be told of for ever.
        contradicted = state.settled and any(not lease.leaving for lease in state.held.values())
        same = (state.held, state.jobs, state.over) == before and (state.probes == probed or state.over is not None)
        if same and not contradicted and not self._wait_over(now):
            return []  # its consequences were said when it was new
        return self._follow(now, restate=contradicted, ran_on={gpu for job in before[1] for gpu in job.gpus})

    # --- after every event ------------------------------------------------------------------------------------------

    def _follow(self, now: float, *, restate: bool = False, ran_on: AbstractSet[GpuId] = frozenset()) -> list[Send]:
        """Draw the consequences of all that is known, and say so if they are new; jobs were on `ran_on` before."""
        if self.state.over is None:
            search.advance(self.app, now)
        if self.state.over is None:
            placement.divide(self.app, now, ran_on)
        return reporting.report(self.app, now, restate=restate)

    def validate(self) -> None:
        """Assert the promises that always hold for the state."""
        self.app.validate()
        state = self.state
        claimed = [gpu for job in state.jobs if isinstance(job.state, Placed) for gpu in job.state.gpus]
        assert len(claimed) == len(set(claimed)), f"{state.app} put two jobs on one GPU: {claimed}"
        for job in state.jobs:
            nodes = {state.held[gpu].node for gpu in job.gpus if gpu in state.held}
            assert len(nodes) <= 1 or state.spec.spans, f"{job.id} lies on several nodes: {sorted(nodes)}"
        assert state.view == (-1, -1) or state.view >= (0, 0)
        assert len({job.id for job in state.jobs}) == len(state.jobs)
