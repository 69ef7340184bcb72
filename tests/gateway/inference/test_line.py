"""What a connection's line and an answer's outbox promise: order, one write for several, nothing while it is full."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.inference.line import Line
from gateway.inference.outbox import Outbox


class Wire(asyncio.Transport):
    """Remembers what was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def make() -> tuple[Wire, Line]:
    wire = Wire()
    return wire, Line(wire, lambda: 0.0)


def body(wire: Wire) -> bytes:
    """What the chunks say."""
    raw, said = b"".join(wire.writes), b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        said += raw[: int(size, 16)]
        assert raw[int(size, 16) :][:2] == b"\r\n"
        raw = raw[int(size, 16) + 2 :]
    return said


def test_a_corked_line_writes_once_and_in_order() -> None:
    wire, line = make()
    line.cork()
    line.cork()  # a second time changes nothing
    line.write(b"head")
    line.chunk(b"abc")
    assert wire.writes == []
    line.uncork()
    line.uncork()
    line.write(b"later")
    assert wire.writes == [b"head3\r\nabc\r\n", b"later"]


def test_closing_writes_what_was_gathered() -> None:
    wire, line = make()
    line.cork()
    line.write(b"head")
    line.close()
    assert wire.writes == [b"head"] and wire.closed and line.is_closing()


def test_the_loss_of_a_connection_is_told_once_and_only_to_who_still_listens() -> None:
    told: list[str] = []
    _, line = make()
    line.on_lost = lambda: told.append("lost")
    line.lost()
    line.lost()
    assert told == ["lost"]
    _, other = make()
    other.on_lost = lambda: told.append("after it left")
    other.leave()
    other.lost()
    assert told == ["lost"]


def test_nothing_is_written_before_the_response_begins_or_while_the_client_is_behind() -> None:
    wire, line = make()
    outbox = Outbox()
    outbox.put(b"a")
    assert not outbox.empty and wire.writes == []
    outbox.open(line)
    assert body(wire) == b"a" and outbox.writes == 1
    line.pause()
    outbox.put(b"b" * outbox.LIMIT)
    assert not outbox.full
    outbox.put(b"c")
    assert outbox.full and body(wire) == b"a"
    heard: list[bool] = []
    outbox.on_room.append(lambda: heard.append(outbox.full))
    line.resume()
    assert body(wire) == b"a" + b"b" * outbox.LIMIT + b"c"
    assert heard == [False]


def test_what_is_deferred_goes_out_with_what_follows_or_with_the_end() -> None:
    async def work() -> None:
        wire, line = make()
        outbox = Outbox()
        outbox.put(b"a")
        outbox.open(line)
        outbox.defer(b"b")
        assert body(wire) == b"a"
        outbox.put(b"c")
        assert body(wire) == b"abc" and len(wire.writes) == 2
        outbox.defer(b"d")
        outbox.close(b"e")
        outbox.put(b"too late")
        assert await outbox.closed() == b"de"
        assert body(wire) == b"abc"

    asyncio.run(work())


@given(st.lists(st.sampled_from(["put", "defer", "pause", "resume", "open"]), max_size=40))
def test_every_byte_goes_out_once_and_in_order(steps: list[str]) -> None:
    async def work() -> None:
        wire, line = make()
        outbox = Outbox()
        expected = b""
        for number, step in enumerate(steps):
            if step in ("put", "defer"):
                piece = b"<%d>" % number
                expected += piece
                outbox.put(piece) if step == "put" else outbox.defer(piece)
            elif step == "pause" and line.full_since is None:
                line.pause()
            elif step == "resume" and line.full_since is not None:
                line.resume()
            elif step == "open":
                outbox.open(line)
        outbox.close()
        assert body(wire) + await outbox.closed() == expected

    asyncio.run(work())
