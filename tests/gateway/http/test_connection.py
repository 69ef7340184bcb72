"""What a connection promises: every request its answer, in order, however the bytes come; and one end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.turn import Turn
from tests.gateway.http.scenes import GET, Client, echo, post, read, reply, run, settle


@given(st.lists(st.tuples(st.text("ab", max_size=4), st.booleans()), min_size=1, max_size=4), st.data())
def test_every_request_is_answered_in_order_however_its_bytes_come(asked: list[tuple[str, bool]], data: Any) -> None:
    raw = b""
    for number, (body, chunked) in enumerate(asked):
        if chunked:
            pieces = b"".join(b"1\r\n%b\r\n" % char.encode() for char in body) + b"0\r\n\r\n"
            raw += b"POST /%d HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" % number + pieces
        else:
            raw += post(body.encode(), b"/%d?q=%d" % (number, number))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1), max_size=6)))
    parts = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)])]
    at_once = data.draw(st.booleans())

    async def step(client: Client) -> None:
        if at_once:
            for part in parts:
                client.connection.data_received(part)
            for _ in asked:
                await settle()
        else:
            await client.feed(*parts)
            await settle()
        expected = [
            ["POST", f"/{number}", "" if chunked else f"q={number}", body]
            for number, (body, chunked) in enumerate(asked)
        ]
        assert [json.loads(answer.body) for answer in client.answers()] == expected
        assert client.state.total_requests == len(asked) and not client.transport.closed

    run(echo, step)


OFFER = (b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AAEAAEAA", b"UPGRADE: h2c")


@given(st.sampled_from([b"", b"x", b"\r\nupgrade: me"]), st.booleans(), st.data())
def test_an_offer_of_another_protocol_is_ignored_however_it_comes(body: bytes, chunked: bool, data: Any) -> None:
    if chunked:
        pieces = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        raw = b"\r\n".join([b"POST / HTTP/1.1", *OFFER, b"transfer-encoding: chunked"]) + b"\r\n\r\n" + pieces
        raw += b"0\r\n\r\n"
    else:
        raw = post(body, b"/", *OFFER)
    cut = data.draw(st.integers(1, len(raw) - 1))

    async def step(client: Client) -> None:
        for _ in range(2):
            await client.feed(raw[:cut], raw[cut:])
        assert [json.loads(answer.body)[3] for answer in client.answers()] == [body.decode()] * 2
        assert not client.transport.closed

    run(echo, step)


def test_what_follows_an_offer_at_once_is_to_be_sent_again() -> None:
    async def step(client: Client) -> None:
        await client.feed(post(b"a", b"/", *OFFER) + GET)
        assert json.loads(client.answer().body)[3] == "a"
        assert client.answer().headers["connection"] == "close" and client.transport.closed

    run(echo, step)


def test_what_an_application_is_told() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append({key: value for key, value in scope.items() if key != "state"})
        await reply(send, b"")

    async def step(client: Client) -> None:
        await client.feed(b"GET /a%20b?c=%20 HTTP/1.1\r\nX-Y: Z\r\n\r\n", b"GET http://h/p HTTP/1.1\r\n\r\n")

    run(app, step)
    assert seen[0] == {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "server": ("127.0.0.1", 80),
        "client": ("192.0.2.1", 4711),
        "scheme": "http",
        "root_path": "",
        "method": "GET",
        "path": "/a b",
        "raw_path": b"/a%20b",
        "query_string": b"c=%20",
        "headers": [(b"x-y", b"Z")],
    }
    assert seen[1]["path"] == "/p"


@pytest.mark.parametrize(
    ("raw", "closed"),
    [
        (GET, False),
        (b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n", True),
        (b"GET / HTTP/1.0\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", False),  # the offer is ignored
    ],
)
def test_a_connection_ends_after_the_answer_where_it_has_to(raw: bytes, closed: bool) -> None:
    async def step(client: Client) -> None:
        await client.feed(raw)
        answer = client.answer()
        assert answer.complete and json.loads(answer.body)[:2] == ["GET", "/"]
        assert answer.headers.get("connection") == ("close" if closed else None) and answer.headers["date"] == "today"
        assert client.transport.closed is closed and not client.transport.aborted

    run(echo, step)


@pytest.mark.parametrize(("version", "chunked"), [(b"1.1", True), (b"1.0", False)])
def test_a_body_of_unknown_length_is_sent_in_chunks_or_ends_with_the_connection(version: bytes, chunked: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"a", b"", b"bc"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"d"})

    async def step(client: Client) -> None:
        await client.feed(b"GET / HTTP/%b\r\n\r\n" % version)
        head, _, body = client.transport.sent.partition(b"\r\n\r\n")
        assert (b"transfer-encoding: chunked" in head) is chunked
        assert body == (b"1\r\na\r\n2\r\nbc\r\n1\r\nd\r\n0\r\n\r\n" if chunked else b"abcd")
        assert client.transport.closed is not chunked

    run(app, step)


@pytest.mark.parametrize(("request_line", "status"), [(b"HEAD / HTTP/1.1", 200), (b"GET / HTTP/1.1", 304)])
def test_an_answer_without_a_body_keeps_its_length_to_itself(request_line: bytes, status: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, b"abc", status)

    async def step(client: Client) -> None:
        await client.feed(request_line + b"\r\n\r\n", request_line + b"\r\n\r\n")
        assert client.transport.sent.count(b"content-length: 3\r\n") == 2
        assert b"abc" not in client.transport.sent and not client.transport.closed

    run(app, step)


def test_the_head_of_a_stream_that_is_silent_goes_out_alone() -> None:
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"x"})

    async def step(client: Client) -> None:
        await client.feed(GET)
        assert client.transport.sent.endswith(b"chunked\r\n\r\n")
        go_on.set()
        await settle()
        assert client.answer().body == b"x"

    run(app, step)


def test_a_head_that_was_prepared_begins_the_response_or_another_does() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        turn: Turn = scope["state"]["turn"]
        with pytest.raises(RuntimeError):
            turn.begin_as_prepared()
        turn.prepare(200, [(b"content-type", b"text/plain"), (b"content-length", b"1")])
        assert not turn.begun
        if scope["path"] == "/prepared":
            turn.begin_as_prepared(b"x-late: 1")
            with pytest.raises(RuntimeError):
                turn.begin_as_prepared()
            turn.end(b"x")
        else:
            turn.begin(503, [(b"content-length", b"2")])
            turn.end(b"no")

    async def step(client: Client) -> None:
        await client.feed(b"GET /prepared HTTP/1.1\r\n\r\n")
        await client.feed(b"GET /other HTTP/1.1\r\n\r\n")
        begun, other = client.answers()
        assert (begun.status, begun.body, begun.headers["x-late"]) == (200, b"x", "1")
        assert (other.status, other.body) == (503, b"no") and "x-late" not in other.headers
        assert "content-type" not in other.headers and other.complete and not client.transport.closed

    run(app, step)


def test_word_to_go_on_is_given_when_the_body_is_asked_for() -> None:
    async def step(client: Client) -> None:
        raw = post(b"{}", b"/", b"expect: 100-continue")
        await client.feed(raw[:-2])
        assert client.transport.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.feed(raw[-2:])
        assert client.answers()[-1].complete and not client.transport.closed

    run(echo, step)


def test_who_was_not_told_to_send_the_body_is_not_waited_for() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, b"no", 413)

    async def step(client: Client) -> None:
        await client.feed(post(b"{}", b"/", b"expect: 100-continue")[:-2])
        assert client.answer().status == 413 and client.transport.closed

    run(app, step)


# -- the client --------------------------------------------------------------------------------------


def test_who_leaves_is_noticed_once_and_nothing_more_is_written() -> None:
    told: list[str] = []
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        turn: Turn = scope["state"]["turn"]
        turn.on_lost = lambda: told.append("lost")
        await read(receive)
        assert (await receive())["type"] == "http.disconnect"
        await reply(send, b"too late")
        go_on.set()

    async def step(client: Client) -> None:
        await client.feed(GET)
        client.connection.connection_lost(None)
        await settle()
        assert told == ["lost"] and go_on.is_set() and client.transport.sent == b""
        assert not client.state.connections and not client.loop.timers

    run(app, step)


def test_who_does_not_read_is_waited_for() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"a", b"b"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"c"})

    async def step(client: Client) -> None:
        client.connection.pause_writing()
        await client.feed(GET)
        assert client.answer().body == b"a"
        client.connection.resume_writing()
        await settle()
        assert client.answer().body == b"abc" and client.answer().complete

    run(app, step)


def test_what_is_said_in_a_burst_goes_out_at_its_end_in_its_order() -> None:
    turns: list[Turn] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        turns.append(scope["state"]["turn"])
        turns[-1].begin(200, [])
        await receive()
        await receive()

    async def step(client: Client) -> None:
        await client.feed(GET)
        (turn,) = turns
        client.burst.begin()
        turn.write(b"a")
        turn.write(b"b")
        assert client.transport.sent == b""
        client.burst.end()
        assert client.answer().body == b"ab"
        turn.write(b"c")
        assert client.answer().body == b"abc"
        client.burst.begin()
        turn.write(b"d")
        client.transport.abort()
        client.burst.end()
        assert client.answer().body == b"abc"

    run(app, step)


# -- the end -----------------------------------------------------------------------------------------


def test_a_server_that_ends_closes_idle_connections_and_answers_what_has_come() -> None:
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        await reply(send, b"last")

    async def step(client: Client) -> None:
        await client.feed(GET, GET)
        client.connection.shutdown()
        assert not client.transport.closed
        go_on.set()
        await settle()
        assert [answer.body for answer in client.answers()] == [b"last", b"last"] and client.transport.closed
        assert client.answers()[-1].headers["connection"] == "close"

    run(app, step)

    async def idle(client: Client) -> None:
        client.connection.shutdown()
        assert client.transport.closed and not client.transport.aborted

    run(app, idle)


def test_a_task_that_is_cancelled_cuts_its_client_off() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    async def step(client: Client) -> None:
        await client.feed(GET)
        (task,) = client.state.tasks
        task.cancel()
        await settle()
        assert client.transport.aborted and not client.state.tasks

    run(app, step)
