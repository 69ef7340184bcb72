"""The load client: what counts as the first token, how streams end, and that no split of the bytes changes a reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

import orjson
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rig.http import Connection, Endpoint, Reply, chat


def event(content: str | None = None, finish: str | None = None, **more: object) -> bytes:
    delta = {} if content is None else {"content": content}
    body = {"id": "x1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}
    return b"data: " + orjson.dumps(body) + b"\n\n"


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
STREAM = b"".join(
    (
        event(""),
        b": ping\n\n",
        event("Hello"),
        event(" wörld"),
        event(None, "stop"),
        b"data: " + orjson.dumps({"id": "x1", "choices": [], "usage": USAGE}) + b"\n\n",
        b"data: [DONE]\n\n",
    )
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_split_of_the_stream_gives_the_same_reply(cuts: list[int]) -> None:
    reply = Reply(sent=0.0)
    edges = [0, *sorted(cuts), len(STREAM)]
    for number, (start, end) in enumerate(pairwise(edges)):
        reply.take_events(STREAM[start:end], float(number))
    assert "".join(reply.text) == "Hello wörld"
    assert reply.done and reply.finish_reason == "stop" and reply.id == "x1"
    assert reply.usage is not None and (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (7, 3)
    assert reply.usage.cached == 4
    assert len(reply.contents) == 2


def test_a_role_without_content_is_not_the_first_token() -> None:
    reply = Reply(sent=1.0)
    reply.take_events(event(""), 2.0)
    assert reply.contents == []
    reply.take_events(event("a"), 5.0)
    assert reply.ttft == 4.0


def test_carriage_returns_between_events_are_understood() -> None:
    reply = Reply(sent=0.0)
    reply.take_events(STREAM.replace(b"\n\n", b"\r\n\r\n"), 1.0)
    assert reply.done and "".join(reply.text) == "Hello wörld"


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def with_server(answer: Answer, use: Callable[[Endpoint], Awaitable[None]]) -> None:
    """Run `use` against a server that reads one request head after another and lets `answer` reply."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.startswith(b"content-length"))
                await reader.readexactly(length)
                await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            await use(Endpoint("test", "127.0.0.1", server.sockets[0].getsockname()[1], "m"))

    asyncio.run(main())


def chunked(body: bytes, kind: str = "text/event-stream") -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\nx-request-id: r9\r\n\r\n".encode()
    return head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


def test_a_stream_over_a_connection_that_is_used_again() -> None:
    connections = []

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        writer.write(chunked(STREAM))
        await writer.drain()

    async def use(endpoint: Endpoint) -> None:
        connection = await Connection.open(endpoint.host, endpoint.port)
        first = await connection.request("POST", "/", b"{}")
        second = await connection.request("POST", "/", b"{}")
        connection.close()
        assert first.ok and second.ok
        assert first.headers["x-request-id"] == "r9"
        assert 0 < first.ttft <= first.e2e

    with_server(answer, use)
    assert len(connections) == 2 and connections[0] is connections[1]


def test_an_error_answer_keeps_status_and_body() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = b'{"error":{"message":"no"}}'
        writer.write(b"HTTP/1.1 429 Too Many\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    async def use(endpoint: Endpoint) -> None:
        reply = await chat(endpoint, b"{}")
        assert not reply.ok and reply.status == 429
        assert reply.complaint == 'HTTP 429: {"error":{"message":"no"}}'

    with_server(answer, use)


def test_a_stream_that_breaks_off_is_a_failure_not_an_answer() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        whole = chunked(STREAM)
        writer.write(whole[: whole.index(b"[DONE]")])
        await writer.drain()
        writer.transport.abort()

    async def use(endpoint: Endpoint) -> None:
        reply = await chat(endpoint, b"{}")
        assert not reply.ok and not reply.done
        assert reply.failure is not None and reply.failure.startswith("connection lost")

    with_server(answer, use)


def test_an_error_event_and_a_missing_done_are_told_apart() -> None:
    failed = Reply(sent=0.0, status=200)
    failed.take_events(b'data: {"error":{"message":"engine died"}}\n\ndata: [DONE]\n\n', 1.0)
    silent = Reply(sent=0.0, status=200)
    silent.take_events(event("a"), 1.0)
    assert not failed.ok and "engine died" in failed.complaint
    assert not silent.ok and silent.complaint == "no [DONE]"


def test_a_watcher_can_hang_up_after_the_first_content() -> None:
    gone = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        whole = chunked(STREAM)
        writer.write(whole[: whole.index(" wörld".encode())])
        await writer.drain()
        assert await reader.read() == b""
        gone.set()

    def hang_up(connection: Connection, reply: Reply) -> None:
        if reply.contents:
            connection.close("seen enough")

    async def use(endpoint: Endpoint) -> None:
        async with asyncio.timeout(10):
            reply = await chat(endpoint, b"{}", hang_up)
            await gone.wait()
        assert reply.failure == "seen enough" and reply.text == ["Hello"]

    with_server(answer, use)


def test_a_refused_connection_is_a_reply() -> None:
    async def main() -> Reply:
        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return await chat(Endpoint("nobody", "127.0.0.1", port, "m"), b"{}")

    reply = asyncio.run(main())
    assert reply.failure is not None and reply.failure.startswith("no connection")
