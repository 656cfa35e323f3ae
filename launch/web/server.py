"""The server of the pages: addresses, forms (HTML, JSON, CSV), and the right to read."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import SimpleCookie
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlencode

import jinja2
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from launch.faults import Fault
from launch.web import pages
from launch.web.metrics import CONTENT_TYPE, Metrics
from launch.web.sheets import Cell, Page, as_csv, as_json
from launch.web.sources import WATCH_S, Sources
from protocol.exit_codes import UNREACHABLE, USAGE
from protocol.journal import JournalError

#: Only our own style sheet; no script, no frame, no address elsewhere.
CSP = (
    "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
#: Names of this host that a browser may have used, where only this host can connect.
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
#: Headers that a proxy adds: the browser that asked it may be on any host, whatever name the proxy has for this one.
FORWARDING = ("forwarded", "via", "x-real-ip", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto")
COOKIE = "gpu_arbiter_token"
#: Addresses that tell nothing of the site, and need no token.
OPEN = frozenset({"/healthz", "/style.css", "/favicon.ico"})
#: The mend for both.
BEHIND_PROXY = "behind a proxy, or for other hosts, start gpu-arbiter web with --token-file FILE"
#: A round that is not decided for so long is one of a policy that does not answer: as the alert NoRoundWhilePending.
OVERDUE_S_MAX = 300.0
#: So the first twenty million rows of a table can be read.
PAGE_MAX = 100_000
NAME_CHARS_MAX = 200

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Answers requests that may not be answered otherwise, and adds the headers to all.

    With a `token` a reader must bring it: as ``Authorization: Bearer``, or once as ``?token=``, after which the browser
    keeps it as a cookie. Without one, only requests to this very host are answered, as a page elsewhere might have a
    browser ask by a name of its own; and none that a proxy sends on, as far as that can be seen.
    """

    def __init__(self, app: AsgiApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)

        refusal = self._refusal(Request(scope))
        await (self._app if refusal is None else refusal)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if not self._token:
            name = request.headers.get("host", "").lower()
            host = name.rpartition(":")[0] if name.rpartition(":")[2].isdecimal() else name
            if host not in LOOPBACK:
                return _sentence(f"without a token this page answers to localhost only; {BEHIND_PROXY}", 421)
            if _is_sent_on(request):
                return _sentence(f"without a token this page answers to no proxy; {BEHIND_PROXY}", 403)
            return None
        if request.url.path in OPEN or self._is_token(_brought(request)):
            return None
        if self._is_token(request.query_params.get("token", "")):
            return self._kept(request)
        return _sentence("this page needs the token that `gpu-arbiter web` printed: add ?token=... to the address", 401)

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token.encode())

    def _kept(self, request: Request) -> Response:
        """Have the browser keep the token, and come again without it in the address."""
        rest = urlencode([(key, value) for key, value in parse_qsl(request.url.query) if key != "token"])
        answer = RedirectResponse(f"{request.url.path}{'?' if rest else ''}{rest}", 303)
        secure = _came_by_tls(request)
        answer.set_cookie(COOKIE, self._token, secure=secure, httponly=True, samesite="strict")
        return answer


def _is_sent_on(request: Request) -> bool:
    """Whether a proxy sends a request on: it adds a header, or speaks HTTP/1.0, as nginx does unless it is told not to.

    No browser has done that for twenty years.
    """
    return request.scope["http_version"] == "1.0" or any(name in request.headers for name in FORWARDING)


def _came_by_tls(request: Request) -> bool:
    """Whether a browser asked by TLS, by the word of the proxy that has it: we speak plain HTTP."""
    said = request.headers.get("forwarded", "").lower().replace('"', "")
    return request.headers.get("x-forwarded-proto", "").lower() == "https" or "proto=https" in said


def _brought(request: Request) -> str:
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return text.strip()
    cookie = SimpleCookie(request.headers.get("cookie", "")).get(COOKIE)
    return str(cookie.value) if cookie else ""


def make_app(sources: Sources, *, token: str = "") -> AsgiApp:
    """Return the application; without a `token` it answers requests to this host only."""
    shown = _Shown(sources)
    routes = [
        Route("/style.css", _style),
        Route("/favicon.ico", _no_icon),
        Route("/healthz", _health),
        Route("/readyz", shown.readiness),
        Route("/metrics", shown.metrics),
        Route("/alerts.yml", _alerts),
        Route("/dashboard.json", _dashboard),
        Route("/{folder:str}/{name:str}", shown.named),
        Route("/{name:str}", shown.plain),
        Route("/", shown.plain),
    ]
    return Guard(Starlette(routes=routes), token)


class _Shown:
    """Shows pages. Its handlers are called in threads, as they read a file and wait for an answer."""

    def __init__(self, sources: Sources) -> None:
        self._sources, self._metrics = sources, Metrics(sources)
        self._template = _environment().get_template("page.html")

    def metrics(self, _: Request) -> Response:
        """Answer Prometheus."""
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE)

    def readiness(self, _: Request) -> Response:
        """Answer whether the ledger can be read, the arbiter answers, and its rounds are decided."""
        try:
            with self._sources.ledger():
                overdue_s = self._sources.present(WATCH_S)["round_overdue_s"]
        except (Fault, JournalError) as error:
            return _sentence(str(error), 503)
        if overdue_s > OVERDUE_S_MAX:
            return _sentence(f"the round that is due has not been decided for {overdue_s:.0f} s", 503)
        return _sentence("ready", 200)

    def plain(self, request: Request) -> Response:
        """Answer for a page of the whole site."""
        name, form = _split(request.path_params.get("name", ""))
        build = pages.PAGES.get(name)
        if build is None:
            return self._wrong(request, "there is no such page", 404)
        return self._answer(
            request, form, lambda number: build(self._sources, pages.Wanted(number, request.query_params))
        )

    def named(self, request: Request) -> Response:
        """Answer for a page of one app or one round."""
        name, form = _split(request.path_params["name"])
        build = pages.NAMED.get(request.path_params["folder"])
        if build is None or not 0 < len(name) <= NAME_CHARS_MAX:
            return self._wrong(request, "there is no such page", 404)
        return self._answer(request, form, lambda number: build(self._sources, name, number))

    def _answer(self, request: Request, form: str, build: Callable[[int], Page]) -> Response:
        number = request.query_params.get("page", "1")
        if not number.isascii() or not number.isdecimal() or not 0 < int(number[:9]) <= PAGE_MAX:
            return self._wrong(request, f"page is {number[:20]!r}, and must be a number from 1 to {PAGE_MAX}", 400)
        try:
            page = build(int(number[:9]))
        except pages.NoSuchPage as error:
            return self._wrong(request, str(error), 404)
        except Fault as fault:
            status = {USAGE: 400, UNREACHABLE: 503}.get(fault.code, 500)
            return self._wrong(request, f"{fault.sentence}; {fault.next_step}".rstrip("; "), status)
        except JournalError as error:
            return self._wrong(request, str(error), 503)
        return self._formed(request, page, form)

    def _formed(self, request: Request, page: Page, form: str) -> Response:
        if form == "json":
            return Response(as_json(page), media_type="application/json")
        if form == "csv":
            told = as_csv(page, request.query_params.get("table", ""))
            if told is None:
                names = ", ".join(each.name for each in page.sheets) or "none"
                return self._wrong(request, f"there is no such table; this page has {names}", 404)
            return Response(told, media_type="text/csv; charset=utf-8")
        path = request.url.path
        html = self._template.render(
            page=page,
            wishes=request.query_params,
            here="/now" if path in ("", "/") else path,
            query=_without_page(request.query_params),
        )
        return Response(html, media_type="text/html; charset=utf-8")

    def _wrong(self, request: Request, sentence: str, status: int) -> Response:
        page = Page("error", "This does not work", (), notes=(sentence,))
        html = self._template.render(page=page, wishes={}, here="", query="")
        return Response(html, status, media_type="text/html; charset=utf-8")


def _split(name: str) -> tuple[str, str]:
    """Return the name and the form of an address's last part."""
    stem, dot, form = name.rpartition(".")
    return (stem, form) if dot and form in ("json", "csv") else (name, "html")


def _without_page(wishes: QueryParams) -> str:
    return urlencode([(key, value) for key, value in wishes.multi_items() if key != "page"])


def _sentence(text: str, status: int) -> Response:
    return PlainTextResponse(f"{text}\n", status)


async def _health(_: Request) -> Response:
    return _sentence("ok", 200)


async def _no_icon(_: Request) -> Response:
    """Answer browsers, which ask for an icon by themselves: an error would stand in their console."""
    return Response(status_code=204)


async def _style(_: Request) -> Response:
    return Response((files("launch.web") / "style.css").read_text("utf-8"), media_type="text/css")


async def _alerts(_: Request) -> Response:
    return Response((files("launch.web") / "alerts.yml").read_text("utf-8"), media_type="text/yaml")


async def _dashboard(_: Request) -> Response:
    return Response((files("launch.web") / "dashboard.json").read_text("utf-8"), media_type="application/json")


def _environment() -> jinja2.Environment:
    source = (files("launch.web") / "page.html").read_text("utf-8")
    environment = jinja2.Environment(
        loader=jinja2.DictLoader({"page.html": source}), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["cell"] = _cell
    return environment


def _cell(value: Cell) -> str:
    """Return a cell as a reader sees it."""
    match value:
        case None | "":
            return "–"  # noqa: RUF001 - a dash for nothing
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.2f}"
        case _:
            return str(value)
