"""A TCP proxy that connections go through, so that a test can cut or stall them."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager

from tests.support.patience import PATIENCE_S


class _Pipe(asyncio.Protocol):
    """One direction of one connection."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.peer: _Pipe | None = None
        self.transport: asyncio.Transport | None = None
        self.pending: list[bytes] = []
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.proxy.pipes.append(self)
        self.flush()

    def data_received(self, data: bytes) -> None:
        assert self.peer is not None
        self.peer.pending.append(data)
        self.peer.flush()

    def flush(self) -> None:
        if self.transport is not None and not self.proxy.stalled:
            for data in self.pending:
                self.transport.write(data)
            self.pending.clear()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = True
        self.hang_up()

    def hang_up(self) -> None:
        """Tell the other side of the end, unless nothing gets through."""
        if self.ended and not self.proxy.stalled and self.peer is not None and self.peer.transport is not None:
            self.peer.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            connection = self.transport.get_extra_info("socket")
            if connection is not None and not self.transport.is_closing():
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()


class Proxy:
    """Forwards `port` to the target's port on the loopback."""

    def __init__(self, target_port: int) -> None:
        self.stalled = False
        self.pipes: list[_Pipe] = []
        self.port = 0
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._joining: list[asyncio.Task[None]] = []

    async def start(self, port: int = 0) -> None:
        """Listen; by default on a port that is free."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Reset both sides."""
        for pipe in self.pipes:
            pipe.abort()
        self.pipes.clear()

    def stall(self) -> None:
        """Swallow everything until `flow`."""
        self.stalled = True

    def flow(self) -> None:
        """Let go of what was held back, and forward again."""
        self.stalled = False
        for pipe in self.pipes:
            pipe.flush()
        for pipe in self.pipes:
            pipe.hang_up()

    async def close(self) -> None:
        """Stop listening and cut what is connected."""
        self.cut()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def _accept(self) -> _Pipe:
        client, upstream = _Pipe(self), _Pipe(self)
        upstream.peer, client.peer = client, upstream
        # A protocol factory is synchronous, so there is no group for the task; it ends once connected.
        self._joining.append(asyncio.get_running_loop().create_task(self._join(upstream)))
        return client

    async def _join(self, upstream: _Pipe) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: upstream, "127.0.0.1", self._target_port)


class CuttableLink:
    """A port that leads to the broker, or nowhere while the link is cut."""

    def __init__(self, target_port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._proxy = Proxy(target_port)
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._thread.start()
        self._do(self._proxy.start())

    @property
    def port(self) -> int:
        return self._proxy.port

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self._proxy.stall)

    def mend(self) -> None:
        """Begin anew: what was on the way is lost."""
        self._loop.call_soon_threadsafe(self._proxy.cut)
        self._loop.call_soon_threadsafe(self._proxy.flow)

    def close(self) -> None:
        self._do(self._proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, what: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(PATIENCE_S)


@contextmanager
def cuttable_link(target_port: int) -> Iterator[CuttableLink]:
    link = CuttableLink(target_port)
    try:
        yield link
    finally:
        link.close()
