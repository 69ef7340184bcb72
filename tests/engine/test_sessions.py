"""Routing of requests to connections, without sockets: owners, repeats, aborts, lost connections, drains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from engine import wire
from engine.sampling_params import SamplingParams
from engine.sessions import Sessions

WELCOME = wire.Welcome(protocol=1, epoch="e", model="m", max_context=9, vocab_size=9, kv_tokens=9, pid=1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class HandCore:
    """A core whose steps say what the test puts into `said`."""

    epoch = "e"

    def __init__(self) -> None:
        self.said: list[wire.Progress] = []
        self.submitted: list[str] = []
        self.aborted: list[str] = []
        self.known: dict[str, wire.Usage] = {}
        self.refusal: wire.Refused | None = None
        self.fault: ValueError | None = None
        self.answers: list[Callable[[], None]] = []

    def submit(self, submit: wire.Submit) -> wire.Refused | None:
        if self.fault is not None:
            raise self.fault
        if self.refusal is None:
            self.submitted.append(submit.request_id)
        return self.refusal

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def step(self) -> list[wire.Progress]:
        said, self.said = self.said, []
        return said

    def adapter(self, query: wire.AdapterQuery, answer: Callable[[wire.AdapterReply], None]) -> None:
        self.answers.append(lambda: answer(wire.AdapterReply(query.query_id, [query.name])))

    def has_work(self) -> bool:
        return bool(self.said)

    def usage(self, request_ids: Sequence[str]) -> dict[str, wire.Usage]:
        return {r: self.known[r] for r in request_ids if r in self.known}

    def snapshot(self, query_id: int) -> wire.Snapshot:
        names = [f for f in wire.Snapshot.__struct_fields__ if f not in ("query_id", "epoch")]
        return wire.Snapshot(query_id=query_id, epoch="e", **dict.fromkeys(names, 0))


class Ear:
    """A connection that keeps what it is sent."""

    def __init__(self) -> None:
        self.frames: list[wire.EngineFrame] = []

    def send(self, frame: bytes) -> None:
        self.frames.append(wire.decode_engine(frame[4:]))

    def progress(self) -> list[wire.Progress]:
        return [p for frame in self.frames if isinstance(frame, wire.Step) for p in frame.progress]


class Scene:
    def __init__(self, grace_s: float = 0.0) -> None:
        self.core, self.clock = HandCore(), Clock()
        self.sessions = Sessions(self.core, WELCOME, clock=self.clock, grace_s=grace_s)

    def ear(self) -> Ear:
        ear = Ear()
        self.sessions.join(ear)
        return ear

    def submit(self, ear: Ear, request_id: str) -> None:
        prompt = wire.pack_tokens([1])
        self.sessions.receive(ear, wire.Submit(request_id=request_id, prompt=prompt, params=SamplingParams()))

    def say(self, *progress: wire.Progress) -> None:
        self.core.said += progress
        self.sessions.step()


def tokens(request_id: str, *ids: int, finish: wire.FinishReason | None = None) -> wire.Progress:
    return wire.Progress(request_id=request_id, tokens=wire.pack_tokens(ids), finish_reason=finish)


def test_a_connection_is_greeted_and_gets_its_share_of_a_step_in_one_frame() -> None:
    scene = Scene()
    one, two = scene.ear(), scene.ear()
    scene.submit(one, "a")
    scene.submit(two, "b")
    scene.submit(one, "c")
    scene.say(tokens("a", 1), tokens("b", 2), tokens("c", 3))
    assert one.frames == [WELCOME, wire.Step([tokens("a", 1), tokens("c", 3)])]
    assert two.frames == [WELCOME, wire.Step([tokens("b", 2)])]


def test_a_repeated_submit_moves_the_output_and_computes_nothing_again() -> None:
    scene = Scene()
    one, two = scene.ear(), scene.ear()
    scene.submit(one, "a")
    scene.say(tokens("a", 1))
    scene.submit(two, "a")
    scene.say(tokens("a", 2, finish="stop"))
    assert scene.core.submitted == ["a"]
    assert one.progress() == [tokens("a", 1)]
    assert two.progress() == [tokens("a", 2, finish="stop")]
    assert scene.sessions.live == 0


def test_a_submit_of_an_ended_request_repeats_its_end() -> None:
    scene = Scene()
    ear = scene.ear()
    counters = wire.Counters(prompt=3, completion=7, started=True)
    scene.core.known["a"] = wire.Usage(counters, "length")
    scene.submit(ear, "a")
    assert ear.progress() == [wire.Progress(request_id="a", counters=counters, finish_reason="length")]
    assert scene.core.submitted == []
    assert scene.sessions.live == 0


def test_refusals_come_back_and_leave_nothing() -> None:
    scene = Scene()
    ear = scene.ear()
    scene.core.refusal = wire.Refused("a", "queue_full", "full")
    scene.submit(ear, "a")
    scene.core.refusal = None
    scene.core.fault = ValueError("temperature must be between 0 and 2")
    scene.submit(ear, "b")
    assert ear.frames[1:] == [
        wire.Refused("a", "queue_full", "full"),
        wire.Refused("b", "invalid", "temperature must be between 0 and 2"),
    ]
    assert scene.sessions.live == 0


def test_a_drain_refuses_new_requests_and_keeps_running_ones() -> None:
    scene = Scene()
    one, two = scene.ear(), scene.ear()
    scene.submit(one, "a")
    scene.sessions.draining = True
    scene.submit(one, "b")
    scene.submit(two, "a")
    scene.say(tokens("a", 1, finish="stop"))
    assert [(f.request_id, f.code) for f in one.frames if isinstance(f, wire.Refused)] == [("b", "draining")]
    assert two.progress() == [tokens("a", 1, finish="stop")]


def test_an_abort_is_due_at_once_and_answered_to_owner_and_asker() -> None:
    scene = Scene()
    owner, asker = scene.ear(), scene.ear()
    scene.submit(owner, "a")
    scene.sessions.receive(asker, wire.Abort("a"))
    assert scene.core.aborted == ["a"]
    assert scene.sessions.has_work()
    end = tokens("a", 5, finish="abort")
    scene.say(end)
    assert owner.progress() == [end]
    assert asker.progress() == [tokens("a", finish="abort")]


def test_an_abort_of_an_ended_or_unknown_request_is_answered_at_once() -> None:
    scene = Scene()
    ear = scene.ear()
    counters = wire.Counters(prompt=3, completion=7, started=True)
    scene.core.known["done"] = wire.Usage(counters, "stop")
    scene.sessions.receive(ear, wire.Abort("done"))
    scene.sessions.receive(ear, wire.Abort("never"))
    assert ear.progress() == [
        wire.Progress(request_id="done", counters=counters, finish_reason="stop"),
        wire.Progress(request_id="never", finish_reason="abort"),
    ]
    assert scene.core.aborted == []


def test_a_lost_connection_aborts_its_requests_and_only_those() -> None:
    scene = Scene()
    gone, stays = scene.ear(), scene.ear()
    scene.submit(gone, "a")
    scene.submit(stays, "b")
    scene.sessions.receive(gone, wire.Abort("b"))
    scene.sessions.leave(gone)
    assert scene.core.aborted == ["b", "a"]
    scene.say(tokens("a", finish="abort"), tokens("b", 1, finish="abort"))
    assert gone.progress() == []
    assert stays.progress() == [tokens("b", 1, finish="abort")]
    assert scene.sessions.live == 0


def test_with_a_grace_a_request_outlives_its_connection_until_it_is_taken_over() -> None:
    scene = Scene(grace_s=2.0)
    gone, new = scene.ear(), scene.ear()
    for request_id in ("taken", "left"):
        scene.submit(gone, request_id)
    scene.sessions.leave(gone)
    assert scene.core.aborted == []
    assert scene.sessions.next_deadline() == 2.0
    scene.submit(new, "taken")
    scene.clock.now = 1.9
    scene.sessions.expire()
    assert scene.core.aborted == []
    scene.clock.now = 2.0
    scene.sessions.expire()
    assert scene.core.aborted == ["left"]
    assert scene.sessions.next_deadline() is None
    scene.say(tokens("taken", 1, finish="stop"), tokens("left", finish="abort"))
    assert new.progress() == [tokens("taken", 1, finish="stop")]
    assert scene.sessions.live == 0


def test_queries_are_answered_to_who_asks() -> None:
    scene = Scene()
    ear = scene.ear()
    scene.core.known["a"] = usage = wire.Usage(wire.Counters(prompt=1), None)
    scene.sessions.receive(ear, wire.UsageQuery(5, ["a", "b"]))
    scene.sessions.receive(ear, wire.SnapshotQuery(6))
    reply, snapshot = ear.frames[1:]
    assert reply == wire.UsageReply(5, "e", {"a": usage})
    assert isinstance(snapshot, wire.Snapshot)
    assert snapshot.query_id == 6


def test_who_asks_for_an_adapter_is_answered_later_and_not_once_it_has_left() -> None:
    scene = Scene()
    stays, leaves = scene.ear(), scene.ear()
    for number, ear in enumerate((stays, leaves)):
        scene.sessions.receive(ear, wire.AdapterQuery(number, "mine", "/folder"))
    scene.sessions.leave(leaves)
    assert stays.frames == leaves.frames == [WELCOME]
    for answer in scene.core.answers:
        answer()
    assert stays.frames == [WELCOME, wire.AdapterReply(0, ["mine"])] and leaves.frames == [WELCOME]


@pytest.mark.parametrize("finish", ["stop", "length", "abort", "error"])
def test_every_end_frees_the_request(finish: wire.FinishReason) -> None:
    scene = Scene(grace_s=1.0)
    ear = scene.ear()
    scene.submit(ear, "a")
    scene.say(tokens("a", 1, finish=finish))
    scene.sessions.leave(ear)
    assert scene.sessions.live == 0
    assert scene.sessions.next_deadline() is None
    assert not scene.sessions.has_work()
