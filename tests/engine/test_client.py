"""What a client may rely on, asked of real processes: the scripted engine, and the worker with a scripted core."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine import wire
from engine.client import EngineClient
from engine.generation import EngineError, GenerateRequest
from engine.sampling_params import SamplingParams
from tests.engine.processes import engine, everything, run

both = pytest.mark.parametrize("kind", ["scripted", "worker"])


@both
def test_a_request_streams_and_its_counters_stay_readable(kind: str, tmp_path: Path) -> None:
    async def scene() -> None:
        async with engine(kind, tmp_path, tokens=12, reply=tuple(b"hello "), cached=2) as it:
            welcome = it.client.welcome
            assert welcome is not None
            assert welcome.protocol == wire.PROTOCOL
            generation = it.generate("a", max_tokens=100)
            deltas = await everything(generation)
            assert "".join(d.text for d in deltas) == "hello hello "
            assert deltas[-1].finish_reason == "stop"
            final = wire.Counters(prompt=3, cached=2, completion=12, started=True)
            assert await generation.final() == final
            reply = await it.client.usage(["a", "b"])
            assert reply.epoch == welcome.epoch
            assert reply.known == {"a": wire.Usage(final, "stop")}
            assert it.client.live == 0

    assert run(scene)


@both
def test_n_answers_stop_strings_and_log_probabilities(kind: str, tmp_path: Path) -> None:
    async def scene() -> None:
        async with engine(kind, tmp_path, tokens=200, reply=tuple(b"one two. ")) as it:
            generation = it.generate("a", n=3, max_tokens=200, stop=("two",), logprobs=1)
            deltas = await everything(generation)
            for index in range(3):
                mine = [d for d in deltas if d.index == index]
                assert "".join(d.text for d in mine) == "one "
                assert sum(len(d.logprobs or []) for d in mine) == sum(len(d.token_ids) for d in mine) == 7
                assert (mine[-1].finish_reason, mine[-1].stop_reason) == ("stop", "two")
            assert await generation.final() == wire.Counters(prompt=3, completion=21, started=True)
            await it.settled()
            assert it.client.live == 0

    assert run(scene)


@both
def test_an_abort_is_answered_with_final_counters(kind: str, tmp_path: Path) -> None:
    async def scene() -> None:
        async with engine(kind, tmp_path, tokens=1_000_000, max_context=2_000_000) as it:
            generation = it.generate("a", max_tokens=1_000_000)
            first = await generation.next()
            assert first[0].text
            generation.abort()
            final = await generation.final()
            assert final.completion >= len(first[0].token_ids)
            usage = (await it.client.usage(["a"])).known["a"]
            assert usage == wire.Usage(final, "abort")
            deltas = await everything(generation)
            assert [d.finish_reason for d in deltas if d.finish_reason] == ["abort"]
            again = await it.client.abort("a")
            assert (again.finish_reason, again.counters) == ("abort", final)
            unknown = await it.client.abort("unknown")
            assert (unknown.finish_reason, unknown.counters) == ("abort", wire.Counters())

    assert run(scene)


@both
def test_a_repeated_submit_moves_the_output_to_the_new_connection(kind: str, tmp_path: Path) -> None:
    async def scene() -> None:
        async with engine(kind, tmp_path, tokens=400) as it:
            other = EngineClient(it.path)
            await other.connect()
            here: list[wire.Progress | EngineError] = []
            there: asyncio.Queue[wire.Progress | EngineError] = asyncio.Queue()
            started = asyncio.Event()

            def listen(said: wire.Progress | EngineError) -> None:
                here.append(said)
                started.set()

            params = SamplingParams(max_tokens=400)
            it.client.submit("a", [1, 2, 3], params, on_progress=listen)
            await started.wait()
            other.submit("a", [1, 2, 3], params, on_progress=there.put_nowait)
            rest: list[wire.Progress] = []
            while not (rest and rest[-1].finish_reason):
                said = await there.get()
                assert isinstance(said, wire.Progress)
                rest.append(said)
            before = [p for p in here if isinstance(p, wire.Progress)]
            assert sum(len(p.tokens) for p in [*before, *rest]) == 400 * 4
            assert rest[-1].counters == wire.Counters(prompt=3, completion=400, started=True)
            assert (await it.client.snapshot()).prompt_tokens == 3
            other.submit("a", [1, 2, 3], params, on_progress=there.put_nowait)
            assert await there.get() == wire.Progress(
                request_id="a", counters=rest[-1].counters, finish_reason=rest[-1].finish_reason
            )
            await other.close()

    assert run(scene)


@both
def test_refusals_name_their_code(kind: str, tmp_path: Path) -> None:
    async def scene() -> None:
        async with engine(kind, tmp_path, max_context=4000, max_running=1, max_queued=0, tokens=1_000_000) as it:
            generation = it.client.generate(
                GenerateRequest(request_id="long", prompt_ids=[1] * 4001, params=SamplingParams())
            )
            with pytest.raises(EngineError, match="4001 tokens are over the context of 4000") as caught:
                await generation.next()
            assert caught.value.code == "too_long"
            pair = it.generate("pair", n=2, max_tokens=3900)  # the first still runs when the second comes
            with pytest.raises(EngineError) as full:
                await everything(pair)
            assert full.value.code == "queue_full"
            await it.settled()

    assert run(scene)


def test_an_id_that_runs_is_not_submitted_twice_over_one_client(tmp_path: Path) -> None:
    async def scene() -> None:
        async with engine("scripted", tmp_path, tokens=50, first_token_ms=50) as it:
            generation = it.generate("a")
            with pytest.raises(EngineError) as caught:
                it.generate("a")
            assert caught.value.code == "duplicate"
            assert len(await everything(generation)) >= 1

    assert run(scene)


def test_news_of_several_requests_in_one_frame_are_announced_and_concluded() -> None:
    heard: list[str] = []
    client = EngineClient("nowhere")
    client.witness = SimpleNamespace(begin=lambda: heard.append("begin"), end=lambda: heard.append("end"))
    client._send = lambda frame: None  # type: ignore[method-assign]  # nobody is asked: the answers are below
    for request_id in ("a", "b"):
        hears = partial(_hear, heard, request_id)
        client.submit(request_id, [1], SamplingParams(max_tokens=9), on_progress=hears)

    def frame(*said: wire.Progress) -> bytes:
        return wire.encode(wire.Step(list(said)))[4:]

    client.on_frame(frame(wire.Progress(request_id="a"), wire.Progress(request_id="b", finish_reason="stop")))
    assert heard == ["begin", "a", "b", "end"]
    heard.clear()
    client.on_frame(frame(wire.Progress(request_id="a")))
    assert heard == ["a"]


def _hear(heard: list[str], name: str, said: object) -> None:
    heard.append(name)
