"""Server-sent events of the streaming answers: pre-rendered chunks, and when to write them.

A stream's chunks differ only in a few bytes, so everything around the text is rendered once and the text alone is
escaped per chunk. Order of events (what the official SDK relies on): for every choice, in ascending index, a first
delta with the role; then text; one terminal chunk with the finish reason and nothing for that choice after it; the
usage chunk; `[DONE]`.
"""

from __future__ import annotations

from typing import Any, Protocol

import orjson

from gateway.inference.errors import ApiError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

StopReason = str | int | None


class Chunks(Protocol):
    """Renders the events of one stream."""

    def first(self, index: int) -> bytes:
        """What opens a choice: nothing, or the delta that carries the role."""

    def text(self, index: int, text: str, logprobs: dict[str, Any] | None) -> bytes:
        """New text of a choice; logprobs is the rendered logprobs object."""

    def finish(self, index: int, reason: str, stop_reason: StopReason) -> bytes:
        """The end of a choice."""

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The usage chunk, empty when the client did not ask for it."""


class _Template:
    """The bytes that every chunk of a stream shares."""

    def __init__(self, id: str, object: str, created: int, model: str, include_usage: bool) -> None:
        head = orjson.dumps({"id": id, "object": object, "created": created, "model": model})
        self._plain = b"data: " + head[:-1]
        self.head = self._plain + b',"choices":[{"index":'
        self.tail = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._include_usage = include_usage

    def usage(self, usage: dict[str, Any]) -> bytes:
        if not self._include_usage:
            return b""
        return self._plain + b',"choices":[],"usage":' + orjson.dumps(usage) + b"}\n\n"


class ChatChunks:
    """Events of object `chat.completion.chunk`."""

    def __init__(self, id: str, created: int, model: str, include_usage: bool) -> None:
        self._template = _Template(id, "chat.completion.chunk", created, model, include_usage)
        self._head = self._template.head
        self._tail = self._template.tail
        plain = b'%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null'
        self._plain = self._head.replace(b"%", b"%%") + plain + self._tail

    def first(self, index: int) -> bytes:
        """The role, exactly once per choice: SDKs concatenate every string of the deltas."""
        delta = b'%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null' % index
        return self._head + delta + self._tail

    def text(self, index: int, text: str, logprobs: dict[str, Any] | None) -> bytes:
        """New text, `{"content": …}` in the delta."""
        if logprobs is None:
            return self._plain % (index, orjson.dumps(text))
        return b"".join(
            (
                self._head,
                b'%d,"delta":{"content":' % index,
                orjson.dumps(text),
                b'},"logprobs":',
                orjson.dumps(logprobs),
                b',"finish_reason":null',
                self._tail,
            )
        )

    def finish(self, index: int, reason: str, stop_reason: StopReason) -> bytes:
        """The terminal chunk: an empty delta and the reason."""
        end = b'%d,"delta":{},"logprobs":null,"finish_reason":%b' % (index, orjson.dumps(reason))
        return self._head + end + b',"stop_reason":' + orjson.dumps(stop_reason) + self._tail

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The usage chunk with no choices."""
        return self._template.usage(usage)


class CompletionChunks:
    """Events of object `text_completion`."""

    def __init__(self, id: str, created: int, model: str, include_usage: bool) -> None:
        self._template = _Template(id, "text_completion", created, model, include_usage)
        self._head = self._template.head
        self._tail = self._template.tail

    def first(self, index: int) -> bytes:
        """Text completions have no role."""
        return b""

    def text(self, index: int, text: str, logprobs: dict[str, Any] | None) -> bytes:
        """New text."""
        rendered = b"null" if logprobs is None else orjson.dumps(logprobs)
        middle = b'%d,"text":%b,"logprobs":%b,"finish_reason":null' % (index, orjson.dumps(text), rendered)
        return self._head + middle + self._tail

    def finish(self, index: int, reason: str, stop_reason: StopReason) -> bytes:
        """The terminal chunk."""
        end = b'%d,"text":"","logprobs":null,"finish_reason":%b' % (index, orjson.dumps(reason))
        return self._head + end + b',"stop_reason":' + orjson.dumps(stop_reason) + self._tail

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The usage chunk with no choices."""
        return self._template.usage(usage)


def failure(error: ApiError, request_id: str) -> bytes:
    """A failure after the first byte: the SDK raises APIError with the message when it meets this event."""
    return b"data: " + error.body(request_id) + b"\n\n" + DONE


class Pace:
    """When a stream may be written: the first flush at once, later ones at most every `interval` seconds. Times are
    those of any clock that never goes back."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._next = float("-inf")

    def wrote(self, now: float) -> None:
        """A flush was written."""
        self._next = now + self._interval

    def delay(self, now: float) -> float:
        """Seconds until the next flush may be written; not positive when it may be written now."""
        return self._next - now
