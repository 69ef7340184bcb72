"""The order of events in a stream, rule by rule, as the bytes on the wire show it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httptools
import openai
import pytest

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


class _Answer:
    """Collects one HTTP response."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.body = b""
        self.done = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.done = True


def fetch(house: Any, body: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own: status, headers, body."""
    answer = _Answer()
    parser = httptools.HttpResponseParser(answer)
    with house.connect() as raw:
        raw.sendall(house.request(body, path))
        while not answer.done:
            data = raw.recv(65536)
            assert data, "the connection was closed before the answer's end"
            parser.feed_data(data)
    return parser.get_status_code(), answer.headers, answer.body


def events(body: bytes) -> list[Any]:
    """The events of a stream; `[DONE]` as a string."""
    assert body.endswith(b"\n\n")
    found: list[Any] = []
    for block in body[:-2].split(b"\n\n"):
        assert block.startswith(b"data: ") and b"\n" not in block, block
        data = block[6:]
        found.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return found


def stream(house: Any, **fields: Any) -> list[Any]:
    status, headers, body = fetch(house, {"model": "tiny", "messages": HELLO, "stream": True, **fields})
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), body
    return events(body)


def deltas(found: list[Any]) -> Iterator[tuple[int, dict[str, Any], str | None]]:
    for event in found:
        if event != "[DONE]":
            for choice in event["choices"]:
                yield choice["index"], choice["delta"], choice["finish_reason"]


@pytest.mark.parametrize("n", [1, 3])
def test_rule_1_the_role_comes_first_and_exactly_once(shared: Any, n: int) -> None:
    found = list(deltas(stream(shared, n=n)))
    for index in range(n):
        own = [delta for at, delta, _ in found if at == index]
        assert own[0] == {"role": "assistant", "content": ""}
        assert all("role" not in delta for delta in own[1:])


def test_rule_2_choices_appear_in_ascending_order(shared: Any) -> None:
    order = list(dict.fromkeys(index for index, _, _ in deltas(stream(shared, n=4))))
    assert order == [0, 1, 2, 3]


def test_rules_3_and_4_nothing_but_text_is_in_a_delta(shared: Any) -> None:
    """Tool calls, whose fragments these rules order, do not exist here; no other list may be in a delta either."""
    assert all(set(delta) <= {"role", "content"} for _, delta, _ in deltas(stream(shared)))


@pytest.mark.parametrize("n", [1, 3])
def test_rule_5_the_end_is_an_empty_delta_and_nothing_follows(shared: Any, n: int) -> None:
    found = list(deltas(stream(shared, n=n)))
    for index in range(n):
        own = [(delta, reason) for at, delta, reason in found if at == index]
        assert own[-1] == ({}, "stop")
        assert all(reason is None and delta for delta, reason in own[:-1])


def test_rule_6_usage_is_the_last_event_when_asked(shared: Any) -> None:
    found = stream(shared, stream_options={"include_usage": True})
    *before, last, done = found
    assert done == "[DONE]"
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 32
    assert all(event["usage"] is None and event["choices"] for event in before)


def test_rule_6_usage_is_nowhere_when_not_asked(shared: Any) -> None:
    assert all("usage" not in event and event["choices"] for event in stream(shared)[:-1])
    assert shared.usage()[-1][4] == 32


def test_rule_7_done_ends_the_stream(shared: Any) -> None:
    found = stream(shared)
    assert found[-1] == "[DONE]" and found.count("[DONE]") == 1


def test_rule_8_id_created_and_model_never_change(shared: Any) -> None:
    found = stream(shared, n=2, stream_options={"include_usage": True})[:-1]
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in found}) == 1
    assert found[0]["object"] == "chat.completion.chunk"


def test_rule_9_a_failure_in_the_middle_is_an_error_event(make_house: Any) -> None:
    house = make_house({"tokens": 64, "interval_ms": 20.0, "fail_token": 10})
    status, _, body = fetch(house, {"model": "tiny", "messages": HELLO, "stream": True})
    assert status == 200
    *_, failure, done = events(body)
    assert done == "[DONE]"
    assert set(failure["error"]) == {"message", "type", "param", "code", "request_id"}
    assert failure["error"]["type"] == "server_error"
    with (
        pytest.raises(openai.APIError, match="engine failed"),
        house.client().chat.completions.stream(model="tiny", messages=HELLO) as sdk,
    ):
        sdk.get_final_completion()
    outcomes = {(row[0], row[1], row[5]) for row in house.usage()}
    assert outcomes == {("engine_error", 0, 0)}


def test_rule_10_silence_is_broken_by_comments(make_house: Any) -> None:
    house = make_house({"tokens": 4, "first_token_ms": 400.0})
    house.limits(keep_alive_s=0.05)
    _, _, body = fetch(house, {"model": "tiny", "messages": HELLO, "stream": True})
    assert body.startswith(b": keep-alive\n\n")
    with house.client().chat.completions.stream(model="tiny", messages=HELLO) as sdk:
        assert sdk.get_final_completion().choices[0].finish_reason == "stop"


def test_rule_10_no_comments_without_silence(shared: Any) -> None:
    _, _, body = fetch(shared, {"model": "tiny", "messages": HELLO, "stream": True})
    assert b": " not in body.replace(b"data: ", b"")


@pytest.mark.parametrize("code", ["queue_full", "too_long", "invalid", "draining"])
def test_rule_11_every_refusal_is_an_ordinary_http_error(make_house: Any, code: str) -> None:
    house = make_house({"refuse": code})
    status, headers, body = fetch(house, {"model": "tiny", "messages": HELLO, "stream": True})
    expected = {
        "queue_full": (503, "server_is_overloaded"),
        "too_long": (400, "context_length_exceeded"),
        "invalid": (400, "invalid_value"),
        "draining": (503, "service_unavailable"),
    }
    assert (status, json.loads(body)["error"]["code"]) == expected[code]
    assert headers["content-type"] == "application/json"
    assert ("retry-after" in headers) == (status == 503)
    assert [row[5] for row in house.usage()] == [0]


def test_a_failure_before_the_first_token_is_an_ordinary_http_error(make_house: Any) -> None:
    house = make_house({"fail_token": 0})
    status, _, body = fetch(house, {"model": "tiny", "messages": HELLO, "stream": True})
    assert (status, json.loads(body)["error"]["code"]) == (500, "internal_error")


def test_the_settlement_is_durable_before_done(make_house: Any) -> None:
    """While the journal cannot be written, no [DONE] is sent.

    When it stays so, the client gets an error and pays nothing.
    """
    house = make_house({"tokens": 8, "first_token_ms": 50.0, "interval_ms": 30.0})
    from gateway.metering import failpoints

    def fail() -> None:
        raise OSError("the disk is full")

    with house.connect() as raw:
        raw.sendall(house.request({"model": "tiny", "messages": HELLO, "stream": True}))
        seen = b""
        while b'"content":"H' not in seen:  # the hold is durable, and the answer has begun
            seen += raw.recv(65536)
        failpoints.arm("journal.before_insert", fail)
        while b"[DONE]" not in seen:
            seen += raw.recv(65536)
        failpoints.disarm()
    text = seen.decode()
    assert '"finish_reason":"stop"' not in text
    assert text.index('"error"') < text.index("[DONE]")
    assert "not charged" in text
    assert [(row[0], row[1], row[5]) for row in house.usage()] == [("server_fault", 0, 0)]


def test_the_first_token_is_not_kept_waiting_and_later_ones_gather(make_house: Any) -> None:
    house = make_house({"tokens": 200, "interval_ms": 2.0})
    arrivals: list[float] = []
    began = time.monotonic()
    for chunk in house.client().chat.completions.create(model="tiny", messages=HELLO, stream=True):
        if chunk.choices and chunk.choices[0].delta.content:
            arrivals.append(time.monotonic())
    lasted = time.monotonic() - began
    assert len(arrivals) <= 20 * lasted + 3
    assert len(arrivals) >= 3


def test_the_end_does_not_wait_for_a_slot(make_house: Any) -> None:
    house = make_house({"tokens": 2, "interval_ms": 1.0})
    house.limits(flush_s=30.0)
    began = time.monotonic()
    found = stream(house)
    assert found[-1] == "[DONE]"
    assert time.monotonic() - began < 10
