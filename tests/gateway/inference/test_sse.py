"""Chunks are valid JSON around any text, in the shape that SDKs read, and are written at the right moments."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.inference import errors
from gateway.inference.sse import DONE, ChatChunks, CompletionChunks, Pacer, failure


def event(data: bytes) -> dict[str, Any]:
    assert data.startswith(b"data: ") and data.endswith(b"\n\n") and data.count(b"\n") == 2
    decoded: dict[str, Any] = json.loads(data[6:])
    return decoded


@given(st.text(), st.text(min_size=1), st.integers(0, 127), st.booleans())
def test_chat_chunks_carry_any_text(text: str, model: str, index: int, usage: bool) -> None:
    chunks = ChatChunks("chatcmpl-1", 7, model, usage)
    got = event(chunks.text(index, text, None))
    assert got["choices"] == [{"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}]
    assert (got["id"], got["object"], got["created"], got["model"]) == ("chatcmpl-1", "chat.completion.chunk", 7, model)
    assert ("usage" in got) == usage and got.get("usage") is None


def test_role_comes_alone_and_the_end_has_an_empty_delta() -> None:
    chunks = ChatChunks("c", 1, "m", False)
    assert event(chunks.first(2))["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    end = event(chunks.finish(2, "stop", "END"))["choices"][0]
    assert end == {"index": 2, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": "END"}


def test_usage_chunk_only_when_asked() -> None:
    usage = {"prompt_tokens": 1}
    asked = event(ChatChunks("c", 1, "m", True).usage(usage))
    assert asked["choices"] == [] and asked["usage"] == usage
    assert ChatChunks("c", 1, "m", False).usage(usage) == b""
    assert event(CompletionChunks("c", 1, "m", True).usage(usage))["usage"] == usage


@given(st.text())
def test_completion_chunks_carry_any_text(text: str) -> None:
    chunks = CompletionChunks("cmpl-1", 7, "m", False)
    logprobs = {"tokens": [text], "token_logprobs": [-0.5], "top_logprobs": None, "text_offset": [0]}
    got = event(chunks.text(3, text, logprobs))
    assert got["object"] == "text_completion"
    assert got["choices"] == [{"index": 3, "text": text, "logprobs": logprobs, "finish_reason": None}]
    assert chunks.first(3) == b""
    assert event(chunks.finish(3, "length", None))["choices"][0]["finish_reason"] == "length"


def test_a_failure_is_an_error_event_and_then_done() -> None:
    data = failure(errors.internal("Broken\nhere."), "req-1")
    assert data.endswith(DONE)
    body = event(data[: -len(DONE)])["error"]
    assert body["message"] == "Broken\nhere."
    assert (body["type"], body["code"], body["param"]) == ("server_error", "internal_error", None)
    assert body["request_id"] == "req-1"


class Clock:
    """Seconds that a test moves, with timers that fire on the way."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay: float, function: Callable[[], None]) -> Any:
        entry = (self.now + delay, function)
        self.timers.append(entry)
        clock = self

        class Handle:
            def cancel(self) -> None:
                if entry in clock.timers:
                    clock.timers.remove(entry)

        return Handle()

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [t for t in self.timers if t[0] <= until + 1e-9]:
            first = min(due)
            self.timers.remove(first)
            self.now = max(self.now, first[0])
            first[1]()
        self.now = until


def paced(interval: float = 0.05) -> tuple[Clock, Pacer, list[float]]:
    clock = Clock()
    written: list[float] = []
    return clock, Pacer(interval, lambda: clock.now, clock.call_later, lambda: written.append(clock.now)), written


def test_the_first_is_written_at_once_and_later_ones_share_slots() -> None:
    clock, pacer, written = paced()
    for _ in range(100):
        pacer.offer()
        clock.advance(0.01)
    assert written[0] == 0.0
    assert len(written) <= 21
    assert all(b - a >= 0.05 - 1e-9 for a, b in zip(written, written[1:], strict=False))


def test_a_lone_offer_in_a_closed_slot_is_written_when_the_slot_opens() -> None:
    clock, pacer, written = paced()
    pacer.offer()
    clock.advance(0.02)
    pacer.offer()
    assert written == [0.0]
    clock.advance(0.03)
    assert written == pytest.approx([0.0, 0.05])
    clock.advance(1.0)
    assert len(written) == 2


def test_slow_offers_never_wait() -> None:
    clock, pacer, written = paced()
    for _ in range(5):
        pacer.offer()
        clock.advance(0.06)
    assert written == pytest.approx([0.0, 0.06, 0.12, 0.18, 0.24])


def test_the_end_does_not_wait_and_leaves_no_timer() -> None:
    clock, pacer, written = paced()
    pacer.offer()
    pacer.offer()
    assert len(clock.timers) == 1
    pacer.now()
    assert written == [0.0, 0.0]
    assert clock.timers == []
    clock.advance(1.0)
    assert len(written) == 2
