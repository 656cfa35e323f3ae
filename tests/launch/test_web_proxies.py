"""Behind a proxy the page is no longer of this host alone: without a token it is shown to none."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.core.test_reports import Books
from tests.support.patience import PATIENCE_S

pytest.importorskip("starlette", reason="the extra `web` is not installed")

import uvicorn

from launch.web.process import settings_of
from launch.web.server import FORWARDING, AsgiApp, make_app
from tests.launch.test_web import Asked, Browser

TOKEN = "a-token-of-some-length"
PATHS = ("/", "/report.csv", "/metrics", "/healthz")


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(Books(tmp_path / "ledger.db"), tmp_path / "ledger.db")


@pytest.mark.parametrize("header", FORWARDING)
def test_without_a_token_what_a_proxy_sends_on_is_refused_with_the_mend(asked: Asked, header: str) -> None:
    browser = Browser(make_app(asked), "127.0.0.1:8470", **{header: "10.0.0.7"})
    for path in PATHS:
        status, _, body = browser.get(path)
        assert status == 403, path
        assert "start gpu-arbiter web with --token-file FILE" in body
    status, _, body = Browser(make_app(asked), "gpu.example").get("/")
    assert status == 421
    assert "start gpu-arbiter web with --token-file FILE" in body, "a proxy that keeps the name is told the same"


def test_with_a_token_a_proxy_may_send_on_what_brings_it(asked: Asked) -> None:
    app = make_app(asked, token=TOKEN)
    through = {"x-forwarded-for": "10.0.0.7", "x-forwarded-proto": "https"}
    assert Browser(app, "gpu.example", **through).get("/rounds")[0] == 401
    assert Browser(app, "gpu.example", **through, authorization=f"Bearer {TOKEN}").get("/rounds")[0] == 200


@pytest.mark.parametrize(
    ("headers", "secure"),
    [
        ({}, False),
        ({"x-forwarded-proto": "http"}, False),
        ({"x-forwarded-proto": "https"}, True),
        ({"forwarded": 'for=10.0.0.7;Proto="https"'}, True),
    ],
)
def test_a_browser_that_came_by_tls_keeps_the_token_for_tls_alone(
    asked: Asked, headers: dict[str, str], *, secure: bool
) -> None:
    app = make_app(asked, token=TOKEN)
    _, told, _ = Browser(app, "gpu.example", **headers).get(f"/rounds?token={TOKEN}")
    words = [each.strip().lower() for each in told["set-cookie"].split(";")]
    assert ("secure" in words) is secure
    assert {"httponly", "samesite=strict"} <= set(words)


@contextmanager
def listening(app: AsgiApp) -> Iterator[int]:
    """Serve an application as `gpu-arbiter web` does; give its port."""
    server = uvicorn.Server(settings_of(app))
    with socket.create_server(("127.0.0.1", 0)) as door:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [door]})
        thread.start()
        try:
            yield door.getsockname()[1]
        finally:
            deadline = time.monotonic() + PATIENCE_S
            while not server.started and time.monotonic() < deadline:
                time.sleep(0.01)
            server.should_exit = True
            thread.join()


def said(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(request)
        return connection.makefile("rb").read()


def test_a_request_as_nginx_sends_one_on_by_itself_is_refused(asked: Asked) -> None:
    """Without a line on it in its configuration nginx names the upstream as Host, adds no header, and speaks HTTP/1.0.

    With `proxy_http_version 1.1` nothing tells it from a program of this host: docs/operations.md says so.
    """
    with listening(make_app(asked)) as port:
        name = f"Host: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode()
        assert said(port, b"GET /rounds HTTP/1.0\r\n" + name).split()[1] == b"403"
        assert said(port, b"GET /rounds HTTP/1.1\r\n" + name).split()[1] == b"200", "the scene: a browser is answered"
