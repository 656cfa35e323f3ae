"""Which site this is, whether this arbiter may lead it, and what becomes of what its journal does not know.

A site has an id. It stands in the arbiter's journal; nodes and app agents take it over with the first word of an
arbiter, and say it in every report. So an arbiter with the journal of another site, or with an empty one where a site
is at work, is found out before it has said anything:

- *First start.* As long as no node has ever enrolled, the arbiter only listens for `admission_wait_s`. A voice of
  another site then, or before the first node of its own: it resigns, and has touched nothing.
- *Adoption* (`--adopt-site`, after a loss): the site that is first heard becomes its own, and the epoch goes beyond all
  that nodes have seen. It listens until all have spoken, and then leases to apps what their tasks are found running on.
- *A journal that is older than what nodes have seen*, such as a copy of the folder, or one of which a power cut took
  the last moments: a report of a newer epoch says so, or of a later plan of an epoch before, or of a node of this
  site that the journal does not know, or of an app with GPUs that were never its own by the journal. Nodes obey no
  plan of an arbiter that does not know what they have obeyed (`NodePlan.after`), so nothing is lost until it has heard
  of it. The epoch goes beyond, and what runs is adopted likewise. No job begins of an app that has told no newer
  wish, as its wish in the journal is older, too.
- *A journal that was restored from a backup* says so itself, also where nodes have seen no newer epoch: the arbiter of
  the backup may have led on in its epoch. It listens first, as nodes would obey it, and adopts what runs.

A node or an app agent of another site is refused, each by itself, and disturbs nothing else.

An arbiter that was given no id, as in simulations, knows nothing of sites; for it all voices are its own.
"""

from __future__ import annotations

from msgspec.structs import replace

from arbiter.core.effects import EpochTaken, Resign
from arbiter.core.leases import leases
from arbiter.core.members import apps, nodes
from arbiter.core.rounds import phases
from arbiter.core.state import beats
from arbiter.core.state.model import Refused, Settled, State, Up
from arbiter.core.turn import Turn
from protocol.messages import AppReport, NodeReport, Party, device_of

#: An epoch beyond that was given out by no arbiter: those count starts, or began at the seconds of a clock.
EPOCH_MAX = 2**52
#: GPUs of an app that a sentence names.
GPUS_NAMED = 3
#: Parties of other sites that are remembered, each with its site.
FOREIGN_MAX = 1000
MEND = "bring the journal of that site back, or start this arbiter once with --adopt-site, if that journal is lost"


def begin(turn: Turn, before: int) -> None:
    """Begin to lead: as long as this arbiter has no nodes, or is to adopt a site, it listens first.

    So does one that was restored from a backup; `before` is the epoch in which that was made. And so does one that
    ended while it listened because it was behind: it has adopted nothing yet, and goes on with what it has heard.
    """
    state = turn.state
    state.heard_own = False
    state.foreign.clear()
    state.unheard = {node.id for node in state.nodes.values() if isinstance(node.state, Up)}
    state.unheard_apps = set(state.apps)
    if state.behind and state.listens_until is not None:
        _listen(turn)
        return
    state.behind = False
    state.journal_epoch, state.epoch_before = 0, state.epoch - 1
    for node in list(state.nodes.values()):
        state.nodes[node.id] = replace(node, plan_seq_before=node.plan_seq, plan_seq_unknown=0)
    if state.site and state.restored:
        state.behind, state.journal_epoch = True, before
        turn.tell("rounds", f"restored from {state.restored}; it listens before it says anything", loudly=True)
        _listen(turn)
    elif state.site and (state.adopting or not (state.nodes or state.alone)):
        _listen(turn)


def _listen(turn: Turn) -> None:
    settings = turn.state.settings
    turn.state.listens_until = turn.now + max(settings.admission_wait_s, 2 * settings.beat_s)


def listen_for(turn: Turn, beat_s: float) -> None:
    """While it listens: listen until all agents have spoken twice, if their beat is that of a large site."""
    state = turn.state
    if state.listens_until is not None and beat_s > 0.0:
        known_s = min(beat_s, beats.longest_s(state.settings))
        state.listens_until = max(state.listens_until, state.started_at + 2 * known_s)


def may_speak(turn: Turn, sender: Party, site: str, *, knows_epoch: int = 0) -> bool:
    """Whether what `sender` says is for this arbiter: it is of this site, or of none yet.

    A sender that names no site, but knows an epoch, is of a version that had none; where this arbiter never had a node
    another one led it.
    """
    state = turn.state
    if not state.site or site == state.site:
        state.heard_own = state.heard_own or bool(site)
        return True
    if not site and not (knows_epoch and not state.nodes):
        return True
    if state.adopting and not state.heard_own:
        _adopt_site(turn, site or state.site, sender)
        return True
    _refuse(turn, sender, site or "of an earlier version")
    return False


def _adopt_site(turn: Turn, site: str, sender: Party) -> None:
    state = turn.state
    state.site, state.adopting, state.heard_own, state.behind = site, False, True, True
    turn.effects.append(EpochTaken(state.epoch, site))
    turn.tell("rounds", f"adopts site {site}, which {sender.user} belongs to", loudly=True)


def _refuse(turn: Turn, sender: Party, site: str) -> None:
    state = turn.state
    if state.foreign.get(sender.user) != site and (len(state.foreign) < FOREIGN_MAX or sender.user in state.foreign):
        state.foreign[sender.user] = site
        why = f"belongs to site {site}, and this arbiter leads site {state.site}; refused"
        turn.tell(sender.id if sender.role == "node" else sender.user, why, loudly=True)
    if not state.nodes and not state.heard_own:
        _resign(turn)


def _resign(turn: Turn) -> None:
    user, site = next(iter(sorted(turn.state.foreign.items())))
    knows = "knows no site" if not turn.state.nodes else f"is of site {turn.state.site}"
    turn.effects.append(Resign(f"{user} belongs to site {site}, and this arbiter's journal {knows}; {MEND}"))


def check(turn: Turn) -> None:
    """Resign where only parties of another site have spoken for as long as a node may be silent."""
    state = turn.state
    if state.foreign and not state.heard_own and turn.now >= state.started_at + state.settings.node_timeout_s:
        _resign(turn)


def note_epoch(turn: Turn, report: NodeReport) -> bool:
    """Lead on in a newer epoch, and beyond the plan, that a node has seen; return whether its report makes sense."""
    state = turn.state
    if report.epoch > max(EPOCH_MAX, state.epoch):
        turn.tell(report.node, f"reports epoch {report.epoch}, which no arbiter has given out; refused", loudly=True)
        return False
    if report.plan_seq > EPOCH_MAX:
        turn.tell(report.node, f"reports plan {report.plan_seq}, which no arbiter has sent; refused", loudly=True)
        return False
    known = state.nodes.get(report.node)
    sent = known.plan_seq if known is not None else 0
    if (report.epoch, report.plan_seq) > (state.epoch, sent if report.epoch == state.epoch else 0):
        _overtake(turn, report.epoch, f"{_knows(report)}, newer than ours ({state.epoch})")
    elif known is not None and report.plan_seq > known.plan_seq_unknown and nodes.knows_more(state, known, report):
        knows = f"and ours knows its plans up to {known.plan_seq_before}"
        turn.tell(known.id, f"has obeyed plan {report.plan_seq} of epoch {report.epoch}, {knows}", loudly=True)
        if not state.behind and _just_began(turn):
            _overtake(turn, report.epoch, f"{_knows(report)}, {knows}")
    elif _is_forgotten(state, report) and not state.behind and _just_began(turn):
        _overtake(turn, report.epoch, f"{_knows(report)}, and ours does not know that node")
    _note_obeyed(turn, report)
    state.unheard.discard(report.node)
    return True


def note_app(turn: Turn, sender: Party, report: AppReport) -> None:
    """Listen first where an app of this site has GPUs of which the journal knows nothing: it has lost their leases.

    The app's nodes say so, too, but may be heard later than a round has given these GPUs to another app, or other GPUs
    to the app; and once it is told that they are not its own, an app begins its jobs anew.
    """
    state = turn.state
    of_ours = bool(state.site) and report.site == state.site and apps.speaks_for(sender, report)
    if not of_ours or state.behind or not _just_began(turn):
        return
    known = state.apps.get(report.app)
    if known is not None and report.seq <= known.report_seq:  # it came late: the app has lost these GPUs since
        return
    gpus = sorted(apps.unknown_gpus(state, known, report))
    if gpus:
        unknown = "that app" if known is None else "these leases"
        _overtake(turn, 0, f"{report.app} has {', '.join(gpus[:GPUS_NAMED])}, and ours does not know {unknown}")


def _knows(report: NodeReport) -> str:
    return f"{report.node} knows plan {report.plan_seq} of epoch {report.epoch}"


def _is_forgotten(state: State, report: NodeReport) -> bool:
    """Whether our journal, which forgets no node, knows nothing of one that has obeyed a plan of this site."""
    of_ours = bool(state.site) and report.site == state.site
    return of_ours and report.plan_seq > 0 and report.node not in state.nodes


def _note_obeyed(turn: Turn, report: NodeReport) -> None:
    """Note the plan of an earlier epoch that a node has obeyed: it obeys no later epoch that does not know it."""
    known = turn.state.nodes.get(report.node)
    if known is None or report.epoch >= turn.state.epoch:
        return
    if report.plan_seq > max(known.plan_seq_before, known.plan_seq_unknown):
        seq = max(known.plan_seq, report.plan_seq)
        turn.state.nodes[known.id] = replace(known, plan_seq=seq, plan_seq_unknown=report.plan_seq, plan_digest="")
        turn.nodes.add(known.id)


def _just_began(turn: Turn) -> bool:
    return turn.now <= turn.state.started_at + turn.state.settings.node_timeout_s


def _overtake(turn: Turn, epoch: int, why: str) -> None:
    """Lead on in an epoch of our own beyond `epoch`; at first only listen, until all have said what runs."""
    state = turn.state
    before, state.epoch = state.epoch, max(state.epoch, epoch) + 1
    state.journal_epoch = state.journal_epoch if state.restored else before
    turn.effects.append(EpochTaken(state.epoch, state.site))
    found = "this journal is older than what nodes have seen"
    turn.tell("rounds", f"{why}: {found}; leading on in epoch {state.epoch}", loudly=True)
    nodes.plan_anew(turn)
    turn.apps |= state.apps.keys()
    if _just_began(turn) and not state.behind and state.site:
        state.behind = True
        phases.abort(turn, "its journal is older than what nodes have seen")
        _listen(turn)


def listens(turn: Turn) -> bool:
    """Whether this arbiter still only listens; once it does not, it has adopted what was found running."""
    state = turn.state
    if state.listens_until is None:
        return False
    if turn.now < state.listens_until or (turn.now < _given_up_at(state) and _is_unheard(state)):
        return True
    state.listens_until = None
    state.news = True
    turn.nodes |= state.nodes.keys()  # all that has changed meanwhile is still to be said
    turn.apps |= state.apps.keys()
    leases.extend(turn)  # it is we who could not renew them
    assert turn.index.next_end > turn.now, "a lease is over though no round could renew it"
    if state.behind:
        apps.admit_waiting(turn)
        apps.doubt_wishes(turn)
        found, over = leases.adopt(turn)
        if state.restored:
            _tell_forgotten(turn, found, over)
    return False


def _tell_forgotten(turn: Turn, found: int, over: int) -> None:
    """Say in one sentence what a restored journal did not know, now that all have spoken."""
    state = turn.state
    new = sum(app.arrived_at >= state.started_at for app in state.apps.values())
    turn.tell(
        "rounds",
        f"restored from {state.restored}: what was decided since is forgotten, and with it the GPU time of each app; "
        f"{found} leases go on that it did not know, {over} are over that it knew, {new} apps were new to it",
        loudly=True,
    )
    state.restored = ""


def deadline(state: State) -> float | None:
    """Return when listening ends, if it does not end by what is said; None if it is over."""
    until = state.listens_until
    return _given_up_at(state) if until is not None and state.now >= until else until


def _given_up_at(state: State) -> float:
    """Return when a node that has said nothing since this arbiter leads is given up for lost."""
    return state.started_at + state.settings.node_timeout_s


def _is_unheard(state: State) -> bool:
    """Whether a journal that has lost its end has yet to hear of a node what runs there.

    That is a node that it knows, or one that it does not, of whose GPUs an app says that they are its own. As long as
    the arbiter does not know of them, it would tell the app so, which begins its jobs anew while they run there.
    """
    if not state.behind:
        return False
    if state.unheard:
        return True
    asked = (app for app in state.apps.values() if not isinstance(app.state, Settled | Refused))
    return any(device_of(gpu) not in state.gpus for app in asked for job in app.jobs for gpu in job.gpus)
