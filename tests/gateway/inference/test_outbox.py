"""What an answer's outbox promises: order, one head, nothing while the client is behind."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from gateway.http.turn import Turn
from gateway.inference.outbox import Outbox


class Wire:
    """Remembers what was written to it."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.full_since: float | None = None
        self.put = self.writes.append

    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return []

    def more(self) -> None:
        """Nothing is read here."""

    def enough(self) -> None:
        """Nothing is read here."""

    def ended(self, turn: Turn) -> None:
        """Nothing follows."""

    def abort(self) -> None:
        raise AssertionError("nothing goes wrong here")


class Scene:
    """An outbox and the turn that it may be opened onto."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.turn = Turn(self.wire, {"method": "POST", "http_version": "1.1"}, keep=True, expects=False)
        self.turn.whole = True
        self.outbox = Outbox()

    def open(self) -> None:
        self.outbox.open(self.turn, lambda: self.turn.begin(200, []))

    def pause(self) -> None:
        self.wire.full_since = 0.0

    def resume(self) -> None:
        self.wire.full_since = None
        self.turn.resume()

    @property
    def body(self) -> bytes:
        """What the chunks say, after one head."""
        raw, said = b"".join(self.wire.writes), b""
        if raw:
            head, _, raw = raw.partition(b"\r\n\r\n")
            assert head == b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked"
        while raw:
            size, _, raw = raw.partition(b"\r\n")
            said += raw[: int(size, 16)]
            assert raw[int(size, 16) :][:2] == b"\r\n"
            raw = raw[int(size, 16) + 2 :]
        return said


def test_nothing_is_written_before_the_response_begins_or_while_the_client_is_behind() -> None:
    async def work() -> None:
        scene = Scene()
        outbox = scene.outbox
        outbox.put(b"a")
        assert not scene.wire.writes and not scene.turn.begun
        scene.open()
        assert scene.body == b"a" and outbox.writes == 1 and len(scene.wire.writes) == 1
        scene.pause()
        outbox.put(b"b" * outbox.LIMIT)
        assert not outbox.full
        outbox.put(b"c")
        assert outbox.full and scene.body == b"a"
        heard: list[bool] = []
        outbox.on_room.append(lambda: heard.append(outbox.full))
        scene.resume()
        assert scene.body == b"a" + b"b" * outbox.LIMIT + b"c"
        assert heard == [False]

    asyncio.run(work())


def test_a_response_has_no_head_before_there_is_something_to_say() -> None:
    async def work() -> None:
        scene = Scene()
        scene.open()
        scene.outbox.defer(b"a")
        assert not scene.turn.begun and not scene.wire.writes
        scene.outbox.close(b"b")
        assert await scene.outbox.closed() == b"ab" and not scene.turn.begun

    asyncio.run(work())


def test_what_is_deferred_goes_out_with_what_follows_or_with_the_end() -> None:
    async def work() -> None:
        scene = Scene()
        outbox = scene.outbox
        outbox.put(b"a")
        scene.open()
        outbox.defer(b"b")
        assert scene.body == b"a"
        outbox.put(b"c")
        assert scene.body == b"abc" and len(scene.wire.writes) == 2
        outbox.defer(b"d")
        outbox.close(b"e")
        outbox.put(b"too late")
        assert await outbox.closed() == b"de"
        assert scene.body == b"abc"

    asyncio.run(work())


@given(st.lists(st.sampled_from(["put", "defer", "pause", "resume", "open"]), max_size=40))
def test_every_byte_goes_out_once_and_in_order(steps: list[str]) -> None:
    async def work() -> None:
        scene = Scene()
        outbox = scene.outbox
        expected = b""
        opened = False
        for number, step in enumerate(steps):
            if step in ("put", "defer"):
                piece = b"<%d>" % number
                expected += piece
                outbox.put(piece) if step == "put" else outbox.defer(piece)
            elif step == "pause":
                scene.pause()
            elif step == "resume":
                scene.resume()
            elif not opened:
                opened = True
                scene.open()
        outbox.close()
        assert scene.body + await outbox.closed() == expected

    asyncio.run(work())
