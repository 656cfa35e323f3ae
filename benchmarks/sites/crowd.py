"""The nodes and the apps of the measured site, which both drivers and the arbiter's side agree on by their numbers.

The apps ask for half as many GPUs again as there are, so each round has losers. One more node has GPUs of another kind,
which only the apps of one owner ask for, so that some are free while all others are contended.
"""

from __future__ import annotations

from msgspec import Struct

from app_agent.core.spec import AppSpec
from protocol.messages import ARBITER, AppId, NodeId, Party, Requirements, TenantId
from simulator.cluster import GIB, RACK_SIZE, SLOT_SIZE, NodeSpec
from simulator.jobs import JobFacts

APPS_PER_OWNER = 10
#: The GPUs that apps ask for, relative to those that there are.
CROWDING = 1.5
#: The gangs of apps, in turn, where a node has so many GPUs.
GANGS = (1, 2, 4)
#: Long enough to outlast every measurement; a job says every so many mini-batches how far it is.
STEPS, STEP_S, STEPS_PER_REPORT = 100_000, 0.5, 20
COMMON, SPARE = "A100", "H100"
SPARE_NODE = Party("node", "spare")
SPARE_OWNER = Party("app", "spare")


class Crowd(Struct, frozen=True):
    """How many there are of each; `gpus` are those of one node. Owners are of one tenant, or of `own_tenants`."""

    nodes: int
    gpus: int
    apps: int
    own_tenants: bool = False

    @property
    def owners(self) -> tuple[Party, ...]:
        """All owners but the one who asks for spare GPUs."""
        return tuple(Party("app", f"o{number}") for number in range(-(-self.apps // APPS_PER_OWNER)))

    @property
    def parties(self) -> tuple[Party, ...]:
        """All participants, the arbiter first."""
        return (ARBITER, *self.owners, SPARE_OWNER, *self.node_parties)

    @property
    def node_parties(self) -> tuple[Party, ...]:
        """All nodes, as participants."""
        return tuple(Party("node", node.id) for node in self.node_specs)

    @property
    def node_specs(self) -> tuple[NodeSpec, ...]:
        """All nodes, the spare one last."""
        names = [(f"n{number}", f"rack-{number // RACK_SIZE}", COMMON) for number in range(self.nodes)]
        slots = tuple(min(SLOT_SIZE, self.gpus - first) for first in range(0, self.gpus, SLOT_SIZE))
        return tuple(
            NodeSpec(NodeId(name), rack, slots, kind, 80 * GIB)
            for name, rack, kind in [*names, (SPARE_NODE.id, "rack-spare", SPARE)]
        )

    @property
    def gangs(self) -> tuple[int, ...]:
        """The gangs of apps, in turn."""
        return tuple(gang for gang in GANGS if gang <= self.gpus)

    @property
    def jobs_per_app(self) -> int:
        """How many jobs each app has, all of which want GPUs at once."""
        mean = sum(self.gangs) / len(self.gangs)
        return max(1, round(CROWDING * self.nodes * self.gpus / self.apps / mean))

    def tenant_of(self, owner: Party) -> TenantId:
        """Return who pays for the apps of an owner."""
        return TenantId(owner.id if self.own_tenants else "team")

    def specs_of(self, owner: Party) -> list[AppSpec]:
        """Return the apps of an owner."""
        first = int(owner.id.removeprefix("o")) * APPS_PER_OWNER
        count = min(APPS_PER_OWNER, self.apps - first)
        return [self._spec(self.gangs[number % len(self.gangs)], COMMON) for number in range(first, first + count)]

    def gang_of(self, app: AppId) -> int:
        """Return the gang of an app by the id that its app agent gives it; a later one asks as an earlier one did."""
        owner, _, number = app.rpartition("-")
        if owner == SPARE_OWNER.id:
            return 1
        specs = self.specs_of(Party("app", owner))
        return specs[(int(number) - 1) % len(specs)].gang

    @property
    def spare_spec(self) -> AppSpec:
        """An app for which GPUs are free."""
        return self._spec(1, SPARE, jobs=1)

    def _spec(self, gang: int, kind: str, jobs: int = 0) -> AppSpec:
        return AppSpec(
            trials=(("python", "train.py", "--lr", "0.1"),) * (jobs or self.jobs_per_app),
            cwd="/home/user/project",
            checkpoint_root="/srv/checkpoints",
            gang=gang,
            steps_total=STEPS,
            step_serial_s=STEP_S * gang,
            search="all",
            requirements=Requirements(gpu_types=(kind,)),
        )


def facts_of(gang: int) -> JobFacts:
    """Return the truth about a job of so many GPUs, whose app agent knows it well."""
    reports = tuple((step, 0.0) for step in range(STEPS_PER_REPORT, STEPS, STEPS_PER_REPORT))
    return JobFacts(STEPS * STEP_S * gang, STEPS, gang, lambda _gpus, _level: 1.0, reports)
