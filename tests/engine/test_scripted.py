"""The scripted engine in a test's own event loop: faults, back-pressure, and a thousand streams at little cost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from engine import wire
from engine.client import EngineClient
from engine.generation import EngineError, GenerateRequest, Generation
from engine.sampling_params import SamplingParams
from engine.script import Script
from engine.scripted import ScriptedEngine
from tests.engine.byte_tokenizer import ByteTokenizer
from tests.engine.processes import everything, until_ready


def generate(client: EngineClient, request_id: str, max_tokens: int = 1000) -> Generation:
    params = SamplingParams(max_tokens=max_tokens)
    return client.generate(GenerateRequest(request_id=request_id, prompt_ids=[1, 2, 3], params=params))


def serve(path: Path, script: Script, scene: Callable[[ScriptedEngine, EngineClient], Awaitable[None]]) -> bool:
    """Run a scene against the script within 60 seconds. True when it came to its end."""

    async def main() -> None:
        async with asyncio.timeout(60), ScriptedEngine(path, script) as engine:
            client = EngineClient(path, ByteTokenizer())
            await client.connect()
            await scene(engine, client)
            await client.close()
            assert not engine.sessions.live
            engine.core.check()

    asyncio.run(main())
    return not path.exists()


def test_a_death_ends_everything_and_the_next_start_is_another_epoch(tmp_path: Path) -> None:
    async def scene(engine: ScriptedEngine, client: EngineClient) -> None:
        assert client.welcome is not None
        before = client.welcome.epoch
        generation = generate(client, "a")
        with pytest.raises(EngineError, match="gone"):
            await everything(generation)
        assert generation.counters.completion == 5
        with pytest.raises(EngineError, match="cannot reach"):
            await client.connect()
        engine.core.script = Script(vocab_size=256, tokens=3)
        await engine.start()
        after = await client.connect()
        assert after.epoch != before
        assert (await client.usage(["a"])).known == {}
        assert len((await everything(generate(client, "a")))[-1].token_ids) >= 1

    assert serve(tmp_path / "s", Script(vocab_size=256, tokens=50, die_after_tokens=5), scene)


def test_a_stall_is_silent_until_it_ends(tmp_path: Path) -> None:
    async def scene(engine: ScriptedEngine, client: EngineClient) -> None:
        generation = generate(client, "a")
        seen = 0
        while seen < 4:
            seen += sum(len(d.token_ids) for d in await generation.next())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.snapshot()
        waiting = asyncio.create_task(client.snapshot())
        await asyncio.sleep(0)
        engine.resume()
        assert (await waiting).epoch == engine.core.epoch
        seen += sum(len(d.token_ids) for d in await everything(generation))
        assert seen == 20

    assert serve(tmp_path / "s", Script(vocab_size=256, tokens=20, stall_after_tokens=4), scene)


def test_faults_can_be_switched_on_and_off_while_it_runs(tmp_path: Path) -> None:
    async def scene(engine: ScriptedEngine, client: EngineClient) -> None:
        assert len(await everything(generate(client, "fine"))) >= 1
        engine.core.script = Script(vocab_size=256, refuse="queue_full")
        with pytest.raises(EngineError) as refused:
            await everything(generate(client, "refused"))
        assert refused.value.code == "queue_full"
        engine.core.script = Script(vocab_size=256, fail_token=2)
        with pytest.raises(EngineError) as failed:
            await everything(generate(client, "failed"))
        assert failed.value.code == "engine_error"
        engine.core.script = Script(vocab_size=256)
        assert len(await everything(generate(client, "fine again"))) >= 1

    assert serve(tmp_path / "s", Script(vocab_size=256), scene)


def test_a_reader_that_pauses_holds_up_an_engine_without_a_pace(tmp_path: Path) -> None:
    async def scene(engine: ScriptedEngine, client: EngineClient) -> None:
        reader, writer = await asyncio.open_unix_connection(str(engine.path), limit=1024)
        params = SamplingParams(max_tokens=20_000, logprobs=20)
        writer.write(wire.encode(wire.Submit(request_id="slow", prompt=wire.pack_tokens([1]), params=params)))
        said, before = 0, -1
        while said != before or said == 0:  # until it stands still: the socket and the reader's buffer are full
            before, said = said, (await client.snapshot()).completion_tokens
            for _ in range(50):
                await asyncio.sleep(0)
        assert 0 < said < 20_000
        frames, last = wire.FrameReader(), wire.Counters()
        while last.completion < 20_000:
            for body in frames.feed(await reader.read(65536)):
                frame = wire.decode_engine(body)
                if isinstance(frame, wire.Step):
                    last = frame.progress[-1].counters
        writer.close()
        await writer.wait_closed()

    script = Script(vocab_size=256, tokens=20_000, max_context=100_000)
    assert serve(tmp_path / "s", script, scene)


def test_a_thousand_streams_at_ten_tokens_a_second_are_cheap_and_complete(tmp_path: Path) -> None:
    async def scene(_: ScriptedEngine, client: EngineClient) -> None:
        cpu, wall = time.process_time(), time.monotonic()
        generations = [generate(client, f"r{i}", 15) for i in range(1000)]
        answers = await asyncio.gather(*(everything(g) for g in generations))
        cpu, wall = time.process_time() - cpu, time.monotonic() - wall
        assert [sum(len(d.token_ids) for d in deltas) for deltas in answers] == [15] * 1000
        assert all(deltas[-1].finish_reason == "length" for deltas in answers)
        assert wall >= 1.5
        # Engine, client and consumers in one process: well under a core even on a busy machine
        assert cpu / 15_000 < 200e-6

    assert serve(tmp_path / "s", Script(vocab_size=256, first_token_ms=100, interval_ms=100), scene)


def test_as_a_process_it_fails_to_start_and_dies_as_scripted(tmp_path: Path) -> None:
    def outcome(*options: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "engine.scripted", "--socket", str(tmp_path / "s"), *options],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return done.returncode, done.stderr.splitlines()[-1]

    assert outcome("--script", '{"fail_start":"no such model"}') == (3, "error: no such model")
    assert outcome("--script", '{"tokens":"x"}') == (3, "error: Expected `int`, got `str` - at `$.tokens`")

    async def main() -> tuple[str, int]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "engine.scripted", "--socket", str(tmp_path / "s")),
            *("--config", '{"served_name":"shown"}', "--script", '{"die_after_tokens":3,"start_ms":50}'),
            stderr=subprocess.PIPE,
        )
        client = EngineClient(tmp_path / "s")
        async with asyncio.timeout(30):
            await until_ready(process)
            await client.connect()
            assert client.welcome is not None
            client.submit("a", [1], SamplingParams(max_tokens=9), on_progress=lambda _: None)
            return client.welcome.model, await process.wait()

    assert asyncio.run(main()) == ("shown", -9)
