"""What a connection does not take: heads without end, idle clients, hoarded requests, what is no HTTP; and what becomes
of an application's defects."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from gateway.http.connection import HEAD_BYTES, HEAD_SECONDS
from gateway.http.turn import READ_AHEAD
from tests.gateway.http.scenes import GET, Client, echo, post, read, reply, run, settle


def test_a_head_that_is_too_large() -> None:
    async def step(client: Client) -> None:
        await client.feed(b"GET / HTTP/1.1\r\nx: ", b"y" * HEAD_BYTES, b"\r\n\r\n")
        answer = client.answer()
        assert answer.status == 400 and client.transport.closed
        assert str(HEAD_BYTES) in json.loads(answer.body)["error"]["message"]

    run(echo, step)


def test_a_head_that_comes_too_slowly() -> None:
    async def step(client: Client) -> None:
        client.loop.advance(HEAD_SECONDS - 1)
        await client.feed(b"GET / HT")
        client.loop.advance(HEAD_SECONDS - 1)
        assert not client.transport.closed
        client.loop.advance(1)
        assert client.transport.aborted

    run(echo, step)


def test_an_idle_connection_is_closed_and_a_busy_one_is_not() -> None:
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        await reply(send, b"")

    async def step(client: Client) -> None:
        await client.feed(GET)
        client.loop.advance(1000)
        assert not client.transport.closed
        go_on.set()
        await settle()
        client.loop.advance(99)
        assert not client.transport.closed
        client.loop.advance(1 + HEAD_SECONDS)
        assert client.transport.closed

    run(app, step, keep_alive_s=100.0)


def test_a_large_body_is_taken_as_it_is_read() -> None:
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        await reply(send, b"%d" % len(await read(receive)))

    async def step(client: Client) -> None:
        size = 3 * READ_AHEAD
        await client.feed(post(b"x" * size)[:-READ_AHEAD])
        assert not client.transport.reading
        go_on.set()
        await settle()
        assert client.transport.reading
        await client.feed(b"x" * READ_AHEAD)
        assert client.answer().body == b"%d" % size and client.transport.reading

    run(app, step)


def test_requests_that_wait_for_their_turn_are_not_hoarded() -> None:
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        await read(receive)
        await reply(send, b"")

    async def step(client: Client) -> None:
        await client.feed(GET, GET)
        assert not client.transport.reading and len(client.state.tasks) == 1
        go_on.set()
        await settle()
        assert client.transport.reading and len(client.answers()) == 2

    run(app, step)


# -- what goes wrong --------------------------------------------------------------------------------


def test_what_is_no_http_is_told_after_the_answers_before_it() -> None:
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        await reply(send, b"first")

    async def step(client: Client) -> None:
        await client.feed(GET, b"\x16\x03\x01 hello\r\n\r\n", b"more of it")
        assert client.transport.sent == b""
        go_on.set()
        await settle()
        first, second = client.answers()
        assert first.body == b"first" and second.status == 400 and client.transport.closed
        assert json.loads(second.body)["error"]["code"] == "invalid_request"

    run(app, step)


def test_a_body_that_is_no_http_ends_its_request() -> None:
    lost: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await read(receive)
        except ConnectionResetError:
            lost.append(scope["path"])

    async def step(client: Client) -> None:
        await client.feed(b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", b"no number\r\n")
        assert client.answer().status == 400 and client.transport.closed
        assert lost == ["/x"]

    run(app, step)


def test_a_defect_is_an_answer_and_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        match scope["path"]:
            case "/raises":
                raise KeyError("a defect")
            case "/header":
                await reply(send, b"", 200, (b"x-y", b"a\r\nset-cookie: b"))
            case "/good":
                await reply(send, b"good")

    async def step(client: Client) -> None:
        with caplog.at_level(logging.ERROR):
            for path in (b"/raises", b"/header", b"/silent", b"/good"):
                await client.feed(post(b"", path))
        assert [answer.status for answer in client.answers()] == [500, 500, 500, 200]
        assert b"set-cookie" not in client.transport.sent and not client.transport.closed

    run(app, step)
    assert len(caplog.records) == 2


@pytest.mark.parametrize("said", [b"abcd", b"ab"])
def test_a_body_of_another_length_than_announced_is_cut_off(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
        await send({"type": "http.response.body", "body": said})

    async def step(client: Client) -> None:
        with caplog.at_level(logging.ERROR):
            await client.feed(GET)
        assert client.transport.aborted

    run(app, step)
    assert caplog.records


def test_an_answer_that_breaks_off_is_not_taken_for_whole(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise KeyError("a defect")

    async def step(client: Client) -> None:
        await client.feed(GET)
        assert client.transport.aborted and not client.transport.sent.endswith(b"0\r\n\r\n")

    run(app, step)
    assert caplog.records
