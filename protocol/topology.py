"""Exchanges, queues, routes, limits and permissions: data only, read by both buses and by the provisioning commands.

::

    nodes --ack.<user>---> ga.agents --ack.*-----> arbiter.inbox   quorum, one active consumer: the leader
    nodes --pulse.<user>-> ga.agents --pulse.*---> arbiter.tele    restatements; the oldest are dropped
    apps --bid, hb.<user>> ga.agents --*.<user>--> arbiter.from... a lane for each owner that the leader has heard of
                           ga.agents ------------> ga.lobby -----> arbiter.lobby   all that has no queue: first words
    arbiter -------------> default exchange -----> app.<owner>     keeps the newest
    arbiter -------------> default exchange -----> node.<id>       refuses when full; expired ones are dead-lettered
    broker --------------> ga.dlx -------#-------> arbiter.dead    expired and rejected messages
    (one token) ---------------------------------> arbiter.leader  never acknowledged: its holder leads

Agents declare nothing and may write to `ga.agents` only, with their own user name as the last word of the routing key.

A lane is the leader's own: it goes with the leader's connection, and its messages are restated or asked again. So an
owner whose agent floods the arbiter fills one lane, and the other owners' are read in turn with it. A message that an
app agent restates is dropped from its lane after some seconds, so that an arbiter that lags catches up.
"""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from protocol.messages import Party

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
#: The broker's own name for the exchange that routes by queue name, as permissions spell it.
DEFAULT_EXCHANGE = "amq.default"
#: A leader holds its token unacknowledged for as long as it leads; RabbitMQ's default closes its channel after 30 min.
CONSUMER_TIMEOUT_MS = 31_622_400_000

Argument = str | int | bool


class ExchangeSpec(Struct, frozen=True):
    """A durable exchange. A message it has no queue for goes to the exchange `alternate`, if it names one."""

    name: str
    kind: Literal["topic", "fanout"] = "topic"
    alternate: str = ""


class QueueSpec(Struct, frozen=True):
    """A durable queue, the arguments it is declared with and its bindings (exchange, pattern).

    An `exclusive` one is no durable one: it goes with the connection that declared it, and its name is only a part.
    """

    name: str
    arguments: dict[str, Argument]
    bindings: tuple[tuple[str, str], ...] = ()
    exclusive: bool = False

    @property
    def quorum(self) -> bool:
        """Replicated and always stored; dead messages and redelivery counts are kept across broker crashes."""
        return self.arguments.get("x-queue-type") == "quorum"

    def limit(self, argument: str) -> int | None:
        """Return a numeric argument, or None if the queue has no such limit."""
        value = self.arguments.get(argument)
        return None if value is None else int(value)


class Route(Struct, frozen=True):
    """The way of a message. Empty `exchange`: straight to the queue `key`. `mandatory`: a missing queue is an error.

    The broker drops a message that has waited for `ttl_ms`; 0: for as long as its queue keeps it.
    """

    exchange: str
    key: str
    persistent: bool
    mandatory: bool
    ttl_ms: int = 0


class Permissions(Struct, frozen=True):
    """Regular expressions as `rabbitmqctl` takes them; the broker searches, it does not match whole names."""

    configure: str
    write: str
    read: str
    topic_write: str = "^$"
    topic_read: str = "^$"


class Topology(Struct, frozen=True):
    """Every name and limit of one site; all daemons of a site use the same value.

    `prefix` keeps several sites apart on one virtual host. Limits in messages, times in milliseconds.
    """

    prefix: str = ""
    #: One owner may run a thousand apps, each of which may have a probe, an offer, a grant and its holdings under way.
    app_max: int = 4096
    #: Older than a round's deadlines by far: an offer of a minute ago is answered by no app.
    app_ttl_ms: int = MINUTE_MS
    #: An owner that is away for a day is forgotten by the broker; its first report provisions it again.
    app_expires_ms: int = 24 * HOUR_MS
    node_max: int = 1000
    #: A plan is restated every beat; an undelivered one of a minute ago says that the node is away.
    node_ttl_ms: int = MINUTE_MS
    inbox_max: int = 20_000
    #: A message that killed its reader twenty times is put aside.
    inbox_delivery_limit: int = 20
    #: Five beats of two thousand agents.
    tele_max: int = 10_000
    tele_ttl_ms: int = 10_000
    dead_max: int = 10_000
    #: Of an owner: as many as the arbiter handles in some seconds.
    lane_max: int = 4096
    #: Of all owners that the leader has not heard of yet; their agents introduce themselves again.
    lobby_max: int = 4096
    #: Beyond 20 the rate no longer grows, and prefetched messages are handled twice after a crash.
    arbiter_prefetch: int = 100
    #: Of what an app agent restates: by then it has been said again. It waits in a lane, before what is said once.
    beat_ttl_ms: int = 10_000
    #: From each owner's lane; these wait in turn with those of others.
    lane_prefetch: int = 20
    app_prefetch: int = 64
    node_prefetch: int = 8

    def name(self, name: str) -> str:
        """Return the name on the broker of the exchange or queue `name`."""
        return f"{self.prefix}{name}"

    @property
    def up(self) -> str:
        """The exchange that all agents write to."""
        return self.name("ga.agents")

    @property
    def lobby_exchange(self) -> str:
        """The exchange for messages of agents before there is a queue for them."""
        return self.name("ga.lobby")

    @property
    def dead_letter_exchange(self) -> str:
        """The exchange for expired and rejected messages."""
        return self.name("ga.dlx")

    @property
    def exchanges(self) -> tuple[ExchangeSpec, ...]:
        """All exchanges, each after those that it names."""
        lobby = ExchangeSpec(self.lobby_exchange, "fanout")
        return (lobby, ExchangeSpec(self.up, alternate=lobby.name), ExchangeSpec(self.dead_letter_exchange))

    @property
    def leader(self) -> QueueSpec:
        """The queue of the leader token.

        The broker counts its deliveries, durably; a delivery limit would one day throw the token away. Surplus
        tokens are bounded by the length, never delivered while the first lives, and purged by the leader.
        """
        arguments: dict[str, Argument] = {
            "x-queue-type": "quorum",
            "x-single-active-consumer": True,
            "x-max-length": 1,
            "x-overflow": "reject-publish",
        }
        return QueueSpec(self.name("arbiter.leader"), arguments)

    @property
    def arbiter_inbox(self) -> QueueSpec:
        """The messages that node agents send once: changed reports, logs."""
        arguments: dict[str, Argument] = {
            "x-queue-type": "quorum",
            "x-single-active-consumer": True,
            "x-delivery-limit": self.inbox_delivery_limit,
            "x-dead-letter-exchange": self.dead_letter_exchange,
            "x-max-length": self.inbox_max,
            "x-overflow": "reject-publish",
        }
        return QueueSpec(self.name("arbiter.inbox"), arguments, ((self.up, "ack.*"),))

    @property
    def telemetry(self) -> QueueSpec:
        """The reports that node agents restate every beat; stale ones are worth nothing."""
        arguments: dict[str, Argument] = {
            "x-max-length": self.tele_max,
            "x-overflow": "drop-head",
            "x-message-ttl": self.tele_ttl_ms,
        }
        return QueueSpec(self.name("arbiter.tele"), arguments, ((self.up, "pulse.*"), (self.up, "tele.*")))

    @property
    def lobby(self) -> QueueSpec:
        """The first words of owners; a message that waits too long has been sent again."""
        arguments: dict[str, Argument] = {
            "x-max-length": self.lobby_max,
            "x-overflow": "drop-head",
            "x-message-ttl": self.tele_ttl_ms,
        }
        return QueueSpec(self.name("arbiter.lobby"), arguments, ((self.lobby_exchange, "#"),))

    def lane(self, party: Party) -> QueueSpec:
        """Return the queue from which the leader reads the messages of this owner's app agent."""
        arguments: dict[str, Argument] = {"x-max-length": self.lane_max, "x-overflow": "drop-head"}
        bindings = ((self.up, f"bid.{party.user}"), (self.up, f"hb.{party.user}"))
        return QueueSpec(self.name(f"arbiter.from.{party.user}"), arguments, bindings, exclusive=True)

    @property
    def dead_letters(self) -> QueueSpec:
        """The messages that never arrived, for the arbiter."""
        arguments: dict[str, Argument] = {"x-max-length": self.dead_max, "x-overflow": "drop-head"}
        return QueueSpec(self.name("arbiter.dead"), arguments, ((self.dead_letter_exchange, "#"),))

    @property
    def arbiter_queues(self) -> tuple[QueueSpec, ...]:
        """All queues that exist before any agent comes."""
        return (self.leader, self.arbiter_inbox, self.telemetry, self.lobby, self.dead_letters)

    @property
    def read_by_leader(self) -> tuple[QueueSpec, ...]:
        """Those of them that the leader reads, beside the lanes."""
        return (self.arbiter_inbox, self.dead_letters, self.telemetry, self.lobby)

    def inbox(self, party: Party) -> QueueSpec:
        """Return the queue that `party` reads."""
        match party.role:
            case "arbiter":
                return self.arbiter_inbox
            case "app":
                return QueueSpec(self.name(f"app.{party.id}"), self._app_arguments())
            case "node":
                return QueueSpec(self.name(f"node.{party.id}"), self._node_arguments())

    def _app_arguments(self) -> dict[str, Argument]:
        # No dead letters: a message that an app missed is restated, and a report of each would be a flood.
        return {
            "x-max-length": self.app_max,
            "x-overflow": "drop-head",
            "x-message-ttl": self.app_ttl_ms,
            "x-expires": self.app_expires_ms,
        }

    def _node_arguments(self) -> dict[str, Argument]:
        return {
            "x-max-length": self.node_max,
            "x-overflow": "reject-publish",
            "x-message-ttl": self.node_ttl_ms,
            "x-dead-letter-exchange": self.dead_letter_exchange,
        }

    def prefetch(self, party: Party) -> int:
        """Return how many messages `party` may hold unsettled."""
        return {"arbiter": self.arbiter_prefetch, "app": self.app_prefetch, "node": self.node_prefetch}[party.role]

    def route(self, sender: Party, to: Party, *, beat: bool) -> Route:
        """Return the way from `sender` to `to`; whether it is permitted is the broker's decision."""
        if to.role != "arbiter":
            return Route("", self.inbox(to).name, persistent=not beat, mandatory=not beat)
        words = ("hb", "bid") if sender.role == "app" else ("pulse", "ack")
        word = words[0] if beat else words[1]
        ttl_ms = self.beat_ttl_ms if beat and sender.role == "app" else 0  # that of nodes has a queue of its own
        return Route(self.up, f"{word}.{sender.user}", persistent=not beat, mandatory=not beat, ttl_ms=ttl_ms)

    def permissions(self, party: Party) -> Permissions:
        """Return the rights of `party` at the broker. Anchored, because it searches for a match anywhere."""
        prefix = re.escape(self.prefix)
        if party.role == "arbiter":
            own = rf"{prefix}(arbiter|app|node)\..+"
            return Permissions(
                configure=rf"^({prefix}ga\.(agents|lobby|dlx)|{own})$",
                write=rf"^({re.escape(DEFAULT_EXCHANGE)}|{prefix}ga\.(lobby|dlx)|{own})$",
                read=rf"^({prefix}ga\.(agents|lobby|dlx)|{own})$",
                topic_read=".*",  # bindings of the inboxes; no writing, so that it cannot forge a bid
            )
        words = {"app": "bid|hb", "node": "ack|pulse|tele"}[party.role]
        return Permissions(
            configure="^$",
            write=rf"^{prefix}ga\.agents$",
            read=rf"^{re.escape(self.inbox(party).name)}$",
            topic_write=rf"^({words})\.{{username}}$",
        )


def with_prefix(topology: Topology, prefix: str) -> Topology:
    """Return `topology` under other names, for a run of its own on a shared broker."""
    return replace(topology, prefix=prefix)
