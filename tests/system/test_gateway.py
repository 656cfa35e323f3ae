"""A gateway: the user who connects is the owner, and what an app wishes to start is signed for that user."""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("cryptography", reason="the package cryptography, in the extra `users`, is not installed")

import arbiter.config
from app_agent import gateway
from app_agent.control import (
    ActRequest,
    CancelRequest,
    ChangesRequest,
    ControlError,
    FailedError,
    ListRequest,
    NotFoundError,
    NotPermittedError,
    PingRequest,
    QueryRequest,
    Request,
    SubmitRequest,
    WaitRequest,
    decode_reply,
    encode_line,
)
from app_agent.core.spec import AppSpec
from app_agent.gateway import GatewayConfig, Signer, run_gateway
from arbiter.config import ArbiterConfig, Gateway, owners_by_gateway
from arbiter.core.state.model import ArbiterSettings
from arbiter.daemon import run_arbiter
from node_agent.config import NodeConfig
from node_agent.daemon import run_node_agent
from protocol import warrants
from protocol.bus import Link, NotPermitted, Outgoing
from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.bus.provision import gateway_commands
from protocol.codec import decode, encode
from protocol.config import ConfigError
from protocol.messages import (
    ARBITER,
    AppId,
    AppReport,
    GpuId,
    Holdings,
    JobId,
    JobWish,
    LaunchSpec,
    LeaseId,
    LeaseTerms,
    NodeId,
    OwnerId,
    Party,
    Requirements,
    TenantId,
)
from tests.support.gateway import Hand, connected_as
from tests.support.patience import PATIENCE_S
from tests.support.patient_bus import patient_bus
from tests.support.rabbitmq import PASSWORD, PrivateRabbitMQ

NOBODY = pwd.getpwnam("nobody")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="connecting as another user needs root")
GPU = GpuId("GPU-0a")
APP, JOB = AppId("nobody-xyz1"), JobId("nobody-xyz1.0")


class Site:
    """A gateway on the in-process bus, and the arbiter's end of that."""

    def __init__(self, folder: Path, link: Link) -> None:
        self.folder, self.link = folder, link
        self.path = folder / "run/control.sock"
        self.numbers = count(1)

    async def asked(self, request: Request, uid: int = NOBODY.pw_uid) -> Mapping[str, Any]:
        """What the gateway answers to a user."""
        with await asyncio.to_thread(connected_as, uid, self.path) as connection:
            reader, writer = await asyncio.open_unix_connection(sock=connection)
            writer.write(encode_line(request))
            try:
                return decode_reply(await reader.readline(), self.path)
            finally:
                writer.close()

    async def asked_until(self, wanted: Callable[[Any], bool], request: QueryRequest, uid: int) -> None:
        """Ask again and again until the document is `wanted`; what is not there yet is asked for again, too."""
        async with asyncio.timeout(PATIENCE_S):
            document = None
            while document is None or not wanted(document):
                with suppress(NotFoundError):
                    document = (await self.asked(request, uid))["document"]

    async def report(self, wanted: Callable[[AppReport], bool]) -> AppReport:
        """The next report of an app that is `wanted`; others are heard, too."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                delivery = await self.link.receive()
                await delivery.ack()
                body = decode(delivery.data).body
                if isinstance(body, AppReport) and wanted(body):
                    return body

    async def grant(self, app: AppId) -> None:
        number = next(self.numbers)
        lease = LeaseTerms(LeaseId(f"{app}/1"), GPU, NodeId("n1"), "r1", "s0", 1, 600.0)
        said = encode(Holdings(app, 1, number, (lease,), ()), sender=ARBITER, id=f"h{number}")
        assert await self.link.send([Outgoing(Party("app", "nobody"), said)]) == [None]


@asynccontextmanager
async def gateway_site(
    folder: Path, broker: MemoryBroker, *, leads: bool = True, **fields: object
) -> AsyncIterator[Site]:
    """A gateway; unless it `leads`, an arbiter is still to come."""
    settings: dict[str, object] = {"state_dir": str(folder / "state"), "socket": str(folder / "run/control.sock")}
    chosen = GatewayConfig("login1", beat_s=0.1, **(settings | fields))  # type: ignore[arg-type]
    link = await MemoryBus(broker).connect(ARBITER)
    if leads:
        await link.lead()
        await link.provision(Party("app", "nobody"))
        await link.consume()
    ready = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(run_gateway(chosen, MemoryBus(broker, user="gateway-login1"), on_ready=ready.set))
        await ready.wait()
        try:
            yield Site(folder, link)
        finally:
            running.cancel()
    await link.close()


@needs_root
async def test_the_user_who_connects_is_the_owner_and_what_is_to_start_is_signed_for_that_user(reachable: Path) -> None:
    broker = MemoryBroker()
    spec = AppSpec(trials=(("python", "train.py"),), cwd="/srv", checkpoint_root="/srv/ckpt", env={"A": "1"})
    async with gateway_site(reachable, broker) as site:
        owner = (await site.asked(PingRequest()))["owner"]
        app = AppId((await site.asked(SubmitRequest(spec)))["app"])
        assert (owner, app.rpartition("-")[0]) == ("nobody", "nobody")
        first = await site.report(lambda report: report.app == app)
        assert [wish.launch.warrant for wish in first.jobs] == [None], "nothing is signed that cannot start yet"
        await site.grant(app)
        (wish,) = (await site.report(lambda report: bool(report.jobs and report.jobs[0].gpus))).jobs
        key = warrants.public_key(reachable / "state/gateway.key.pub")
        assert warrants.is_signed(wish.launch, key, app=app, job=wish.job, attempt=0)
        warrant = wish.launch.warrant
        assert warrant is not None
        assert (warrant.gateway, warrant.user, warrant.uid) == ("login1", "nobody", NOBODY.pw_uid)
        assert (warrant.gids, warrant.gpus) == ((NOBODY.pw_gid,), (GPU,))
        (again,) = (await site.report(lambda report: bool(report.jobs and report.jobs[0].gpus))).jobs
        assert again == wish, "a beat later it is no news"
    async with gateway_site(reachable, broker) as site:  # the next gateway goes on with what owners have submitted
        (wish,) = (await site.report(lambda report: report.app == app)).jobs
        assert wish.job == f"{app}.0"


@needs_root
async def test_a_user_whom_the_gateway_does_not_serve_gets_one_sentence(reachable: Path) -> None:
    async with gateway_site(reachable, MemoryBroker(), owners=("alice",)) as site:
        with pytest.raises(NotPermittedError, match=r"the gateway login1 does not serve nobody; an administrator adds"):
            await site.asked(PingRequest())
        assert list((reachable / "state").glob("app-*")) == []
    async with gateway_site(reachable, MemoryBroker()) as site:
        spec = AppSpec(trials=(("id",),), cwd="/", checkpoint_root="/srv/ckpt")
        with pytest.raises(NotPermittedError, match=r"serves users from number 1000 on, and yours is 0"):
            await site.asked(SubmitRequest(spec), 0)
        assert list((reachable / "state").glob("app-*")) == []


@needs_root
async def test_a_user_can_neither_end_hold_nor_read_anothers_app_at_the_gateway_that_both_use(
    reachable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users, known = {2001: "alice", 2002: "bob"}, pwd.getpwuid
    named = {uid: pwd.struct_passwd((name, "x", uid, uid, "", "/", "/bin/sh")) for uid, name in users.items()}
    monkeypatch.setattr(
        pwd, "getpwuid", lambda uid: named[uid] if uid in named else known(uid)
    )  # this host has no such
    alice, bob = users
    broker, settings = MemoryBroker(), ArbiterSettings(policy="fifo", admission_wait_s=600.0, round_pause_s=0.1)
    chosen = ArbiterConfig(str(reachable / "arbiter"), gateways=(Gateway("login1"),), arbiter=settings)
    node = NodeConfig("n1", "simulated:1", state_dir=str(reachable / "node"), beat_s=0.1, hello_s=0.1)
    program = (sys.executable, "-c", "import time; print('hers', flush=True); time.sleep(1000)")
    spec = AppSpec(trials=(program,), cwd="/", checkpoint_root=str(reachable / "checkpoints"))
    async with asyncio.TaskGroup() as group, gateway_site(reachable, broker, leads=False) as site:
        others = [run_arbiter(chosen, MemoryBus(broker)), run_node_agent(node, MemoryBus(broker), end_workers=True)]
        running = [group.create_task(each) for each in others]
        hers = (await site.asked(SubmitRequest(spec), alice))["app"]
        await site.asked(WaitRequest(hers, "running"), alice)
        await site.asked_until(lambda log: log["size"] == 5, QueryRequest("log", hers), alice)
        (before,) = (await site.asked(ListRequest(), alice))["apps"]
        for request in (CancelRequest(hers), ActRequest(hers, "hold"), ActRequest(hers, "release")):
            with pytest.raises(NotPermittedError, match="belongs to alice"):
                await site.asked(request, bob)
        with pytest.raises(ControlError, match="is for alice only"):
            await site.asked(QueryRequest("log", hers), bob)
        for request in (CancelRequest(f"{hers}.0"), WaitRequest(hers, timeout_s=0.1), ChangesRequest(app=hers)):
            with pytest.raises(NotFoundError):
                await site.asked(request, bob)
        assert ((await site.asked(ListRequest(), bob))["apps"], str(hers)[:6]) == ([], "alice-")
        assert str((await site.asked(SubmitRequest(spec), bob))["app"]).startswith("bob-")
        (after,) = (await site.asked(ListRequest(), alice))["apps"]
        assert (after["state"], after["tasks"], before["tasks"]) == ("running", [f"{hers}.0-a0"], [f"{hers}.0-a0"])
        assert (await site.asked(CancelRequest(hers), alice))["state"] == "cancelled", "the tries do work"
        for each in running:
            each.cancel()


@needs_root
async def test_a_journal_that_cannot_be_read_harms_no_other_owner_and_is_told_to_its_own(reachable: Path) -> None:
    (reachable / "state").mkdir(mode=0o700)
    (reachable / "state/app-nobody.db").write_bytes(b"no database at all" * 1000)
    async with gateway_site(reachable, MemoryBroker()) as site:
        with pytest.raises(FailedError, match=r"your apps cannot be hosted: .*app-nobody\.db.*; tell an administrator"):
            await site.asked(PingRequest())
        with pytest.raises(NotPermittedError, match="yours is 0"):  # the gateway lives on
            await site.asked(PingRequest(), 0)


# --- the arbiter and the broker -------------------------------------------------------------------------------------


def test_an_arbiters_configuration_says_for_whose_apps_a_gateway_speaks() -> None:
    fields = {"gateways": [{"name": "login1", "owners": ["*"]}, {"name": "login2", "owners": ["alice"]}]}
    owners = owners_by_gateway(arbiter.config.parse(fields, "arbiter.toml"))
    speaks = {user: [name for name in ("alice", "bob") if OwnerId(name) in whom] for user, whom in owners.items()}
    assert speaks == {"gateway-login1": ["bob"], "gateway-login2": ["alice"]}
    fields["gateways"][1]["owners"] = ["*"]
    with pytest.raises(ConfigError, match=r"gateways name '\*' twice; an owner's apps are at one gateway only"):
        arbiter.config.parse(fields, "arbiter.toml")


@pytest.mark.full
@pytest.mark.broker
async def test_the_broker_lets_a_gateway_speak_and_hear_for_owners_and_do_nothing_else() -> None:
    alice, node = Party("app", "alice"), Party("node", "n1")
    with PrivateRabbitMQ((ARBITER, node)) as broker:
        for line in gateway_commands("login1"):
            words = shlex.split(line)[1:]
            await asyncio.to_thread(broker.control, *words, *([PASSWORD] if words[0] == "add_user" else []))
        link = await patient_bus(broker.url("arbiter")).connect(ARBITER)
        await link.lead()
        for party in (alice, node):
            await link.provision(party)
        await link.consume()
        bus = patient_bus(broker.url("gateway-login1"))
        gateway_link = await bus.connect(alice)
        await gateway_link.consume()
        said = encode(wish(), sender=alice, id="1")
        assert await gateway_link.send([Outgoing(ARBITER, said)]) == [None]
        async with asyncio.timeout(PATIENCE_S):
            delivery = await link.receive()
        assert (delivery.user, decode(delivery.data).sender) == ("gateway-login1", alice)
        with pytest.raises(NotPermitted):  # another's inbox
            await (await bus.connect(node)).consume()
        (refused,) = await (await bus.connect(node)).send([Outgoing(ARBITER, encode(wish(), sender=node, id="2"))])
        assert isinstance(refused, NotPermitted), "it cannot speak for nodes"
        for each in (link, gateway_link):
            await each.close()


# --- signing --------------------------------------------------------------------------------------------------------


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def wish(**changes: object) -> AppReport:
    launch = LaunchSpec(("python",), "/srv", "/srv/ckpt")
    job = replace(JobWish(JOB, 0, (GPU,), launch), **changes)
    return AppReport(APP, TenantId("t"), "a", 1, "active", 1, 1, (job,), Requirements())


def test_a_signature_stays_until_the_attempt_or_its_gpus_change_or_it_is_old(tmp_path: Path) -> None:
    clock, hand = Clock(), Hand(tmp_path)
    signer = Signer("login1", hand.key, clock)

    def signature(report: AppReport) -> str:
        (made,) = signer.signed(report, "nobody").jobs
        assert made.launch.warrant is not None
        return made.launch.warrant.signature

    first = signature(wish())
    clock.now += gateway.RENEW_S - 1
    assert signature(wish()) == first
    assert signature(wish(attempt=1)) != first
    assert signature(wish(gpus=(GpuId("GPU-0b"),))) != signature(wish())
    before = signature(wish())
    clock.now += gateway.RENEW_S
    assert signature(wish()) != before


def test_a_user_who_is_no_more_gets_nothing_signed(tmp_path: Path) -> None:
    signed = Signer("login1", Hand(tmp_path).key).signed(wish(), "nosuchuser")
    assert [job.launch.warrant for job in signed.jobs] == [None]


def test_a_key_that_is_there_is_kept_and_one_of_others_is_refused(tmp_path: Path) -> None:
    config = GatewayConfig("login1", state_dir=str(tmp_path))
    made = gateway._key(config, tmp_path).private_bytes_raw()
    assert gateway._key(config, tmp_path).private_bytes_raw() == made
    (tmp_path / "gateway.key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        gateway._key(config, tmp_path)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "Login 1"}, "name"),
        ({"owners": ("Alice",)}, "owners"),
        ({"uid_min": 0}, "uid_min is 0; write 1000 or more"),
        ({"tenants": {"alice": "V"}}, "tenants.alice"),
    ],
)
def test_settings_of_a_gateway_that_cannot_work_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        gateway.check(replace(GatewayConfig("login1"), **settings), "gateway.toml")
