"""Engines that die, clients that go, hang or talk nonsense, and drains, with real processes: nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from engine import wire
from engine.generation import EngineError
from engine.sampling_params import SamplingParams
from tests.engine.processes import engine, everything, run

both = pytest.mark.parametrize("kind", ["scripted", "worker"])


@both
def test_a_killed_engine_ends_every_request_within_two_seconds(kind: str, tmp_path: Path) -> None:
    async def scene() -> None:
        async with engine(kind, tmp_path, tokens=1_000_000, max_context=2_000_000) as it:
            generations = [it.generate(f"r{i}", max_tokens=1_000_000) for i in range(20)]
            await asyncio.gather(*(g.next() for g in generations))
            query = asyncio.create_task(it.client.snapshot())
            await query
            it.process.send_signal(signal.SIGKILL)
            async with asyncio.timeout(2):
                ends = await asyncio.gather(*(everything(g) for g in generations), return_exceptions=True)
                assert {e.code for e in ends if isinstance(e, EngineError)} == {"engine_down"}
                assert len(ends) == 20
                await it.client.wait_lost()
            with pytest.raises(EngineError, match="not running"):
                it.generate("after")
            with pytest.raises(EngineError, match="not running"):
                await it.client.snapshot()
            with pytest.raises(EngineError, match="not running"):
                await it.client.abort("r0")
            with pytest.raises(EngineError, match="cannot reach"):
                await it.client.connect()
            for generation in generations:
                with pytest.raises(EngineError):
                    await generation.final()

    assert run(scene)


@both
def test_a_thousand_aborted_streams_leave_nothing_behind(kind: str, tmp_path: Path) -> None:
    async def scene() -> None:
        async with engine(kind, tmp_path, tokens=1_000_000, max_context=2_000_000) as it:
            for wave in range(10):
                generations = [it.generate(f"w{wave}-{i}", max_tokens=1_000_000) for i in range(100)]
                await generations[-1].next()
                for i, generation in enumerate(generations[:50]):
                    if i % 2:
                        await generation.next()
                    generation.abort()
                del generation, generations  # half are let go without a word
            snapshot = await it.settled()
            assert (snapshot.kv_pages_used, it.client.live) == (0, 0)
            ids = [f"w{wave}-{i}" for wave in range(10) for i in range(100)]
            known = (await it.client.usage(ids)).known
            assert [known[r].finish_reason for r in ids] == ["abort"] * 1000

    assert run(scene)


@both
def test_requests_of_a_lost_connection_are_aborted(kind: str, tmp_path: Path) -> None:
    async def scene() -> None:
        async with engine(kind, tmp_path, tokens=1_000_000, max_context=2_000_000) as it:
            generation = it.generate("a", max_tokens=1_000_000)
            await generation.next()
            await it.client.close()
            with pytest.raises(EngineError, match="gone"):
                await everything(generation)
            await it.client.connect()
            await it.settled()
            assert (await it.client.usage(["a"])).known["a"].finish_reason == "abort"

    assert run(scene)


@both
def test_with_a_grace_a_request_is_taken_over_by_the_next_connection(kind: str, tmp_path: Path) -> None:
    async def scene() -> None:
        async with engine(kind, tmp_path, "--grace-s", "20", tokens=300) as it:
            generation = it.generate("a", max_tokens=300)
            await generation.next()
            await it.client.close()
            await it.client.connect()
            rest = await everything(it.generate("a", max_tokens=300))
            assert rest[-1].finish_reason == "length"
            assert (await it.client.usage(["a"])).known["a"].counters.completion == 300

    assert run(scene)


@both
def test_a_client_that_never_reads_is_dropped_and_others_are_served(kind: str, tmp_path: Path) -> None:
    async def scene() -> None:
        async with engine(kind, tmp_path, "--buffer-mib", "0.01", tokens=3000, max_context=100_000) as it:
            deaf_reader, deaf = await asyncio.open_unix_connection(str(it.path), limit=64)
            for i in range(30):
                params = SamplingParams(max_tokens=3000, logprobs=20)
                deaf.write(wire.encode(wire.Submit(request_id=f"deaf{i}", prompt=wire.pack_tokens([1]), params=params)))
            ids = [f"deaf{i}" for i in range(30)]
            ended: set[str | None] = set()
            while ended != {"abort"}:
                assert len(await everything(it.generate(f"{os.urandom(4).hex()}", max_tokens=20))) >= 1
                known = (await it.client.usage(ids)).known
                ended = {u.finish_reason for u in known.values()}
            assert len(known) == 30
            assert (await it.settled()).kv_pages_used == 0
            del deaf_reader
            deaf.transport.abort()

    assert run(scene)


@both
@pytest.mark.parametrize("junk", [b"\x03\x00\x00\x00abc", b"\xff\xff\xff\xff", wire.encode(wire.Step([])), b"\0\0\0\0"])
def test_a_connection_that_talks_nonsense_is_dropped_alone(kind: str, junk: bytes, tmp_path: Path) -> None:
    async def scene() -> None:
        async with engine(kind, tmp_path, tokens=8) as it:
            reader, writer = await asyncio.open_unix_connection(str(it.path))
            writer.write(junk)
            heard = await reader.read()  # the greeting, then the end
            assert isinstance(wire.decode_engine(heard[4:]), wire.Welcome)
            writer.close()
            deltas = await everything(it.generate("a"))
            assert sum(len(d.token_ids) for d in deltas) == 8

    assert run(scene)


@both
def test_sigterm_drains_what_runs_refuses_what_comes_and_exits_clean(kind: str, tmp_path: Path) -> None:
    async def scene() -> None:
        async with engine(kind, tmp_path, tokens=300, interval_ms=0 if kind == "worker" else 2) as it:
            running = it.generate("running", max_tokens=300)
            await running.next()
            it.process.send_signal(signal.SIGTERM)
            code = ""
            while code != "draining":
                late = it.generate(f"{os.urandom(4).hex()}", max_tokens=1)
                try:
                    await everything(late)
                except EngineError as error:
                    code = error.code
            deltas = await everything(running)
            assert deltas[-1].finish_reason == "length"
            assert (await running.final()).completion == 300
            assert await it.process.wait() == 0
            assert not it.path.exists()

    assert run(scene)


@both
@pytest.mark.parametrize("how", ["limit", "second signal"])
def test_a_drain_has_an_end(kind: str, how: str, tmp_path: Path) -> None:
    async def scene() -> None:
        drain = "0.1" if how == "limit" else "1000"
        endless: dict[str, object] = {"tokens": 1_000_000, "max_context": 2_000_000}
        async with engine(kind, tmp_path, "--drain-s", drain, **endless) as it:
            running = it.generate("running", max_tokens=1_000_000)
            await running.next()
            it.process.send_signal(signal.SIGTERM)
            if how == "second signal":
                with pytest.raises(EngineError, match="shutting down"):
                    while True:
                        await everything(it.generate(f"{os.urandom(4).hex()}", max_tokens=1))
                it.process.send_signal(signal.SIGTERM)
            deltas = await everything(running)
            assert deltas[-1].finish_reason == "abort"
            assert (await running.final()).completion > 0
            assert await it.process.wait() == 0

    assert run(scene)
