"""Chunks are valid JSON around any text, in the shape that SDKs read, and are written at the right moments."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.inference import errors
from gateway.inference.sse import DONE, ChatChunks, CompletionChunks, Pace, failure


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


def test_the_first_flush_waits_for_nothing_and_later_ones_share_slots() -> None:
    pace = Pace(0.05)
    assert pace.delay(100.0) <= 0
    pace.wrote(100.0)
    assert pace.delay(100.0) == pytest.approx(0.05)
    assert pace.delay(100.02) == pytest.approx(0.03)
    assert pace.delay(100.06) <= 0


@given(st.lists(st.floats(0.0, 0.2), min_size=1, max_size=200))
def test_at_most_twenty_flushes_a_second(gaps: list[float]) -> None:
    now = 0.0
    pace = Pace(0.05)
    flushes: list[float] = []
    for gap in gaps:
        now += max(gap, pace.delay(now))
        flushes.append(now)
        pace.wrote(now)
    for start in flushes:
        assert sum(start <= at < start + 1.0 - 1e-6 for at in flushes) <= 20
