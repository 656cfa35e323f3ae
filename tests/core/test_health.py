"""Which GPUs a node trusts, and how processes under no lease are treated."""

from __future__ import annotations

import msgspec
import pytest

from node_agent.core.events import (
    EndStranger,
    GpuProcess,
    GpuSample,
    HealthLedger,
    NodeFacts,
    QuarantineLifted,
    RememberHealth,
    StrangerSpared,
    StrangersPolicy,
    TaskFailure,
)
from node_agent.core.health import ENDS_MAX, FAULT_S, PATIENCE_S, TERMINATE_S, WINDOW_S, Health
from protocol.messages import AppId, GpuId, GpuStatus, JobId, NodeId, Outcome, TaskId, seat

ONE, OTHER, THIRD, SPARE = GpuId("GPU-1"), GpuId("GPU-2"), GpuId("GPU-3"), GpuId("GPU-9")
NOW = 1_000_000.0


def facts(**fields: object) -> NodeFacts:
    return msgspec.structs.replace(NodeFacts(NodeId("n1"), "r1", "boot", 7), **fields)


class Node:
    """A ledger with a clock that goes on by a minute at each end."""

    def __init__(self, ledger: HealthLedger | None = None, **fields: object) -> None:
        self.health = Health(facts(**fields), ledger)
        self.now = NOW
        self.ends = 0

    def end(
        self,
        app: str,
        *gpus: GpuId,
        outcome: Outcome = "failed",
        after_s: float = 60.0,
        begun: bool = True,
        goes_on: bool = True,
    ) -> None:
        """One more attempt of an app's job ends, after mini-batch 10 if it had `begun`; it may go on elsewhere."""
        self.now += after_s
        self.ends += 1
        step, job = 10 if begun else -1, JobId(f"{app}.0")
        end = TaskFailure(AppId(app), TaskId(f"{job}-a{self.ends}"), gpus, self.now, job, step)
        self.health.ended(end, outcome, begun=begun)
        if outcome == "failed" and goes_on:
            self.reach(app, step + 1, SPARE)

    def reach(self, app: str, step: int, *gpus: GpuId) -> None:
        self.health.progressed(JobId(f"{app}.0"), gpus, step, self.now)

    def fault(self, device: GpuId) -> None:
        sample = GpuSample(device, "H200", 2**37, "slot-0", 0, faults=("Xid 31 (GPU memory page fault)",))
        self.health.sampled([sample], self.now)

    def barred(self) -> list[GpuId]:
        return [gpu for gpu in (ONE, OTHER, THIRD) if self.health.quarantine(gpu)]


# --- quarantine -----------------------------------------------------------------------------------------------------


def test_a_gpu_on_which_jobs_of_two_apps_fail_is_quarantined_and_the_reason_names_them_and_the_mend() -> None:
    node = Node()
    node.end("ada-1", ONE)
    assert node.barred() == []
    node.end("bob-1", ONE)
    assert node.barred() == [ONE]
    why = node.health.quarantine(ONE)
    assert "ada-1 and bob-1" in why
    assert "unquarantine" in why


def test_two_scripts_that_cannot_begin_say_nothing_of_the_gpu() -> None:
    """`python nosuch.py`, mistyped by two owners, barred a healthy GPU."""
    node = Node()
    node.end("ada-1", ONE, begun=False)
    node.end("bob-1", ONE, begun=False)
    assert node.barred() == []
    assert node.health.news() == []


def test_jobs_that_fail_and_do_not_go_on_elsewhere_say_nothing_of_the_gpu() -> None:
    node = Node()
    for app in ("ada-1", "bob-1"):
        node.end(app, ONE, goes_on=False)
        node.reach(app, 10, OTHER)
        assert node.barred() == [], "it has got no further there than here"
        node.reach(app, 500, ONE)
        assert node.barred() == [], "it has got further on the same GPU"


def test_the_gpu_is_blamed_once_its_jobs_have_got_further_on_others() -> None:
    node = Node()
    node.end("ada-1", ONE, goes_on=False)
    node.end("bob-1", ONE, goes_on=False)
    node.reach("ada-1", 11, OTHER)
    assert node.barred() == []
    node.end("bob-1", THIRD, outcome="finished")
    assert node.barred() == [ONE], "a finish is further than any step"


def test_an_error_of_the_device_counts_before_the_first_mini_batch_too() -> None:
    node = Node()
    for app in ("ada-1", "bob-1"):
        node.fault(ONE)
        node.end(app, ONE, begun=False, goes_on=False, after_s=1.0)
        node.reach(app, 0, OTHER)
    assert node.barred() == [ONE]


def test_a_job_that_fails_again_and_again_never_blames_the_gpu() -> None:
    node = Node()
    for _ in range(30):
        node.end("ada-1", ONE)
    assert node.barred() == []


def test_all_seats_of_a_device_share_its_quarantine() -> None:
    node = Node()
    node.end("ada-1", seat(ONE, 1))
    node.end("bob-1", seat(ONE, 2))
    assert node.health.quarantine(seat(ONE, 3))
    assert node.barred() == [ONE]


@pytest.mark.parametrize("outcome", ["preempted", "stopped"])
def test_a_job_that_was_preempted_or_stopped_says_nothing_of_the_gpu(outcome: Outcome) -> None:
    node = Node()
    node.end("ada-1", ONE)
    node.end("bob-1", ONE, outcome=outcome)
    assert node.barred() == []


def test_a_finished_job_clears_what_was_held_against_its_gpu() -> None:
    node = Node()
    node.end("ada-1", ONE)
    node.end("eve-1", ONE, outcome="finished")
    node.end("bob-1", ONE)
    assert node.barred() == []


def test_a_job_that_finishes_on_a_quarantined_gpu_lifts_its_quarantine() -> None:
    node = Node()
    node.end("ada-1", ONE)
    node.end("bob-1", ONE)
    node.end("eve-1", ONE, outcome="finished")
    assert node.barred() == []


def test_an_app_that_fails_on_other_gpus_too_is_no_evidence_against_any_of_them() -> None:
    node = Node()
    node.end("ada-1", OTHER)
    node.end("ada-1", ONE)
    node.end("bob-1", ONE)
    assert node.barred() == []


def test_a_task_on_two_gpus_blames_only_the_one_on_which_another_app_fails_too() -> None:
    node = Node()
    node.end("ada-1", ONE, OTHER)
    node.end("bob-1", ONE)
    assert node.barred() == [ONE]


def test_while_all_that_ends_elsewhere_on_the_node_fails_too_no_gpu_is_blamed() -> None:
    node = Node()
    node.end("ada-1", ONE)
    node.end("bob-1", OTHER)
    node.end("eve-1", ONE)
    assert node.barred() == []


def test_a_finish_elsewhere_shows_that_the_gpu_is_sick_and_not_the_node() -> None:
    node = Node()
    node.end("ada-1", ONE)
    node.end("bob-1", OTHER)
    node.end("zoe-1", THIRD, outcome="finished")
    node.end("eve-1", ONE)
    assert node.barred() == [ONE]


def test_failures_of_more_than_a_day_ago_blame_no_gpu() -> None:
    node = Node()
    node.end("ada-1", ONE)
    node.end("bob-1", ONE, after_s=WINDOW_S + 1)
    assert node.barred() == []


def test_of_each_gpu_only_the_newest_failures_are_kept() -> None:
    node = Node()
    node.end("ada-1", ONE)
    for _ in range(ENDS_MAX):
        node.end("bob-1", THIRD)  # bob-1 fails everywhere, so it blames no GPU
        node.end("bob-1", ONE, OTHER)
    node.end("zoe-1", SPARE, outcome="finished")  # so the node is well
    node.end("eve-1", ONE)
    assert node.barred() == []


def test_the_quarantine_outlives_the_node_agent() -> None:
    node = Node()
    node.end("ada-1", ONE)
    node.end("bob-1", ONE)
    (effect,) = node.health.news()
    assert isinstance(effect, RememberHealth)
    assert node.health.news() == []
    written = msgspec.json.decode(msgspec.json.encode(effect.ledger), type=HealthLedger)
    assert Node(written).barred() == [ONE]


def test_what_was_held_against_a_gpu_outlives_the_node_agent_too() -> None:
    node = Node()
    node.end("ada-1", ONE)
    (effect,) = node.health.news()
    node = Node(effect.ledger)
    node.end("bob-1", ONE)
    assert node.barred() == [ONE]


@pytest.mark.parametrize("gpus", [(ONE,), ()])
def test_an_administrator_lifts_the_quarantine_and_the_count_begins_anew(gpus: tuple[GpuId, ...]) -> None:
    node = Node()
    node.end("ada-1", ONE)
    node.end("bob-1", ONE)
    node.health.told(QuarantineLifted(gpus), node.now)
    assert node.barred() == []
    node.end("bob-1", ONE)
    assert node.barred() == []
    node.end("eve-1", ONE)
    assert node.barred() == [ONE]


def test_lifting_one_leaves_the_others_barred() -> None:
    node = Node()
    for gpu, apps in ((ONE, ("a-1", "b-1")), (OTHER, ("c-1", "d-1"))):
        node.end("zoe-1", THIRD, outcome="finished")
        for app in apps:
            node.end(app, gpu)
            node.end("zoe-1", THIRD, outcome="finished")
    assert node.barred() == [ONE, OTHER]
    node.health.lift((ONE,), node.now)
    assert node.barred() == [OTHER]


def test_without_quarantine_nothing_is_barred_not_even_what_was() -> None:
    node = Node()
    node.end("ada-1", ONE)
    node.end("bob-1", ONE)
    (effect,) = node.health.news()
    assert Node(effect.ledger, quarantine=False).barred() == []


def test_a_seat_is_reported_with_the_quarantine_of_its_device_but_the_drivers_own_word_comes_first() -> None:
    node = Node()
    node.end("ada-1", ONE)
    node.end("bob-1", ONE)
    plain = GpuStatus(seat(ONE, 1), "H200", 2**37, "slot-0", healthy=True, empty=True, detail="being measured")
    barred = node.health.judged(plain)
    assert barred.quarantined
    assert barred.detail.startswith("quarantined: jobs of ada-1 and bob-1")
    assert node.health.judged(msgspec.structs.replace(plain, healthy=False, detail="Xid 48")).detail == "Xid 48"
    assert node.health.judged(msgspec.structs.replace(plain, gpu=OTHER)).detail == "being measured"


# --- strangers ------------------------------------------------------------------------------------------------------

STRANGER = GpuProcess(4711, 2**30, uid=1001, start_ticks=99)


def sample(*processes: GpuProcess, faults: tuple[str, ...] = (), gpu: GpuId = ONE) -> GpuSample:
    return GpuSample(gpu, "H200", 2**37, "slot-0", 2**30, processes, faults=faults)


def watch(process: GpuProcess, *at_s: float, policy: StrangersPolicy = "kill") -> tuple[Health, list[str]]:
    """Measure at these seconds; return the action on the process, one word for each measurement."""
    health = Health(facts(strangers=policy))
    done: list[str] = []
    for at in at_s:
        orders = health.sampled([sample(process)], NOW + at)
        assert all((order.pid, order.start_ticks, order.gpu) == (4711, process.start_ticks, ONE) for order in orders)
        done.append(orders[0].how if orders else "-")
    return health, done


def test_a_stranger_is_first_watched_then_terminated_then_killed_and_killed_again() -> None:
    t = PATIENCE_S
    times = (0, t - 0.1, t, t + TERMINATE_S - 0.1, t + TERMINATE_S, t + 2 * TERMINATE_S)
    health, done = watch(STRANGER, *times)
    assert done == ["-", "-", "terminate", "-", "kill", "kill"]
    assert "process 4711 uses GPU-1 under no lease; it was sent SIGKILL" in health.remark(ONE)
    health.sampled([sample()], NOW + 60)
    assert health.remark(ONE) == ""


@pytest.mark.parametrize("policy", ["warn", "exclude"])
def test_only_the_policy_kill_ends_strangers(policy: StrangersPolicy) -> None:
    health, done = watch(STRANGER, 0, 10, 30, policy=policy)
    assert done == ["-"] * 3
    assert policy in health.remark(ONE)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"uid": 0}, "system user 0"),
        ({"uid": 999}, "strangers_uid_min is 1000"),
        ({"uid": None}, "another container"),
        ({"start_ticks": 0}, "another container"),
        ({"compute": False}, "only draws"),
        ({"helper": True}, "node agent's own"),
    ],
)
def test_a_process_that_may_belong_to_the_system_is_left_alone_with_the_reason(
    fields: dict[str, object], says: str
) -> None:
    health, done = watch(msgspec.structs.replace(STRANGER, **fields), 0, 10, 30)
    assert done == ["-"] * 3
    assert says in health.remark(ONE)


def test_a_task_of_ours_is_no_stranger() -> None:
    _, done = watch(GpuProcess(4711, 2**30, TaskId("ada-1.0-a0"), uid=1001, start_ticks=99), 0, 10, 30)
    assert done == ["-"] * 3


def test_a_process_that_could_not_be_ended_is_asked_no_more() -> None:
    health = Health(facts(strangers="kill"))
    health.sampled([sample(STRANGER)], NOW)
    assert health.sampled([sample(STRANGER)], NOW + 10) == [EndStranger(ONE, 4711, 99, "terminate")]
    health.told(StrangerSpared(4711, 99, "no right to"), NOW + 11)
    assert health.sampled([sample(STRANGER)], NOW + 60) == []
    assert health.remark(ONE).endswith("no right to")


def test_another_process_with_the_same_number_is_watched_anew() -> None:
    health = Health(facts(strangers="kill"))
    health.sampled([sample(STRANGER)], NOW)
    assert health.sampled([sample(msgspec.structs.replace(STRANGER, start_ticks=100))], NOW + 10) == []


def test_a_stranger_on_two_gpus_is_signalled_once_and_told_of_both() -> None:
    health = Health(facts(strangers="kill"))
    both = [sample(STRANGER), sample(STRANGER, gpu=OTHER)]
    health.sampled(both, NOW)
    assert len(health.sampled(both, NOW + 10)) == 1
    assert "4711" in health.remark(ONE)
    assert "4711" in health.remark(OTHER)


# --- errors that a program must answer for --------------------------------------------------------------------------


def test_the_error_that_befell_a_program_is_remembered_as_long_as_it_may_take_to_die_of_it() -> None:
    health = Health(facts())
    health.sampled([sample(faults=("Xid 31 (GPU memory page fault)",))], NOW)
    assert "Xid 31" in health.fault((seat(ONE, 1),), NOW + FAULT_S - 1)
    assert health.fault((ONE,), NOW + FAULT_S) == ""
    assert health.fault((OTHER,), NOW) == ""
