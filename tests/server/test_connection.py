"""A client that does not say what it wants is let go, whatever it has sent before."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the server needs vitrail[serve]")

import uvicorn

from vitrail.server.connection import Connection
from vitrail.server.process import take_port

begin = Connection.connection_made
WHOLE = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


def talk(seconds: float, client: Callable[..., Coroutine[Any, Any, bytes]]) -> bytes:
    """What `client(reader, writer)` returns of a server that waits `seconds` for a head."""
    protocol = type("Hasty", (Connection,), {"seconds": seconds})
    config = uvicorn.Config(hello, http=protocol, lifespan="off", log_level="error", timeout_keep_alive=60)
    server = uvicorn.Server(config)

    async def scenario() -> bytes:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.ensure_future(server._serve([listening]))
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            try:
                return await asyncio.wait_for(client(reader, writer), 30)
            finally:
                writer.close()
                server.should_exit = True
                await serving

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    "sent", [b"", b"GET /", WHOLE + b"GET / HTTP/1.1\r\nHost: he"], ids=["nothing", "part", "next"]
)
def test_a_head_that_does_not_come_ends_the_connection(sent: bytes) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        answered = b""
        if sent.startswith(WHOLE):
            writer.write(WHOLE)
            answered = await reader.readuntil(b"hello")
        writer.write(sent.removeprefix(WHOLE))
        return answered + await reader.read()  # until the server closes

    assert talk(0.05, client)[-5:] == (b"hello" if sent.startswith(WHOLE) else b"")


def test_the_clock_stops_when_the_head_is_there_and_starts_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Connection] = []
    monkeypatch.setattr(Connection, "connection_made", lambda self, t: (made.append(self), begin(self, t))[1])
    ticking = []

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        found = b""
        for _ in range(3):
            writer.write(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 2\r\n\r\n")  # the body is still to come
            found += (await reader.readuntil(b"hello"))[-5:]
            ticking.append(made[0]._timer is not None)
            writer.write(b"ok" + WHOLE[:9])
            while made[0]._timer is None:
                await asyncio.sleep(0)
            writer.write(WHOLE[9:])
            await reader.readuntil(b"hello")
        return found

    assert talk(30, client) == b"hello" * 3 and ticking == [False] * 3


def test_a_head_that_does_not_end_ends_the_connection() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(WHOLE[:-2] + b"X: ")
        try:
            while not reader.at_eof():
                writer.write(b"a" * 1000)
                await writer.drain()
                await asyncio.sleep(0)
        except ConnectionError:
            pass
        return b"closed"

    assert talk(30, client) == b"closed"


def test_idle_connections_make_room_for_new_ones() -> None:
    """70 clients, at most 20 connections: half of the others say nothing, half sent the head of a request."""
    protocol = type("Few", (Connection,), {"most": 20})
    server = uvicorn.Server(uvicorn.Config(hello, http=protocol, lifespan="off", log_level="error"))

    async def scenario() -> tuple[bytes, list[bytes | BaseException]]:
        with socket.create_server(("127.0.0.1", 0), backlog=100) as listening:
            serving = asyncio.ensure_future(server._serve([listening]))
            clients = []
            for number in range(70):
                clients.append(await asyncio.open_connection(*listening.getsockname()))
                clients[-1][1].write(b"" if number % 2 else b"POST / HTTP/1.1\r\nHost: here\r\n")
            reader, writer = clients[-1]
            writer.write(WHOLE)
            answer = await asyncio.wait_for(reader.readuntil(b"hello"), 5)
            reading = asyncio.gather(*(one.read() for one, _ in clients[:50]), return_exceptions=True)
            ends = await asyncio.wait_for(reading, 5)
            for _, one in clients:
                one.close()
            server.should_exit = True
            await serving
            return answer, ends

    answer, ends = asyncio.run(scenario())
    assert answer.startswith(b"HTTP/1.1 200")
    assert all(end == b"" or isinstance(end, ConnectionError) for end in ends)


def test_answers_are_sent_at_once() -> None:
    """Without TCP_NODELAY the second answer of a connection waits 40 ms for the client's acknowledgement."""
    with take_port("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
