"""A site of processes on a private RabbitMQ, one broker for the tests of a file and a virtual host for each of them."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import rabbitmq
from tests.support.cluster import PARTIES, Cluster, running_cluster
from tests.support.needs import lack

#: One for each test, since a broker keeps what a site left there.
VHOSTS = [f"s{number}" for number in range(16)]
_vhosts = itertools.cycle(VHOSTS)


@pytest.fixture(scope="module")
def broker() -> Iterator[rabbitmq.PrivateRabbitMQ]:
    if not rabbitmq.available():
        lack(f"RabbitMQ is not installed ({rabbitmq.SERVER} is missing): run scripts/ensure-rabbitmq.sh")
    with rabbitmq.PrivateRabbitMQ(PARTIES, VHOSTS) as node:
        yield node


@pytest.fixture
def vhost() -> str:
    return next(_vhosts)


@pytest.fixture
def cluster(tmp_path: Path, broker: rabbitmq.PrivateRabbitMQ, vhost: str) -> Iterator[Cluster]:
    with running_cluster(tmp_path, broker, vhost) as made:
        yield made


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that every user can pass through to, as the gateway's own under /run is."""
    folder = Path(tempfile.mkdtemp(prefix="gateway-"))
    folder.chmod(0o755)
    (folder / "run").mkdir()
    yield folder
    shutil.rmtree(folder)
