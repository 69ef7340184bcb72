"""Whom a client connects to, and whom it does not."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec
import pytest

from engine import wire
from engine.client import EngineClient
from engine.generation import EngineError, GenerateRequest
from engine.sampling_params import SamplingParams
from tests.engine.byte_tokenizer import ByteTokenizer
from tests.engine.processes import engine, run


def test_who_is_not_our_engine_is_not_talked_to(tmp_path: Path) -> None:
    greeting = wire.Welcome(
        protocol=wire.PROTOCOL, epoch="e", model="m", max_context=1, vocab_size=256, kv_tokens=1, pid=1
    )
    replace = msgspec.structs.replace
    said: list[tuple[bytes, str]] = [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "over the limit"),
        (wire.encode(wire.Step([])), "not a greeting"),
        (wire.encode(replace(greeting, protocol=99)), "speaks protocol 99"),
        (wire.encode(replace(greeting, vocab_size=257)), "257 is larger than the tokenizer's of 256"),
        (b"", "closed"),
    ]

    async def scene() -> None:
        path = tmp_path / "other.sock"
        for answer, message in said:

            async def answering(_: asyncio.StreamReader, writer: asyncio.StreamWriter, words: bytes = answer) -> None:
                writer.write(words)
                writer.close()

            async with await asyncio.start_unix_server(answering, path):
                client = EngineClient(path, ByteTokenizer())
                with pytest.raises(EngineError, match=message):
                    await client.connect()
                assert not client.connected
            path.unlink(missing_ok=True)

    assert run(scene)


def test_an_engine_that_dies_with_its_greeting_is_noticed(tmp_path: Path) -> None:
    greeting = wire.encode(
        wire.Welcome(protocol=wire.PROTOCOL, epoch="e", model="m", max_context=1, vocab_size=1, kv_tokens=1, pid=1)
    )

    async def scene() -> None:
        async def dying(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(greeting)
            writer.close()

        path = tmp_path / "dying.sock"
        async with await asyncio.start_unix_server(dying, path):
            client = EngineClient(path)
            for _ in range(20):
                with contextlib.suppress(EngineError):
                    await client.connect()
                await client.wait_lost()
                assert not client.connected

    assert run(scene)


def test_two_connects_at_once_are_a_mistake(tmp_path: Path) -> None:
    async def scene() -> None:
        async with engine("scripted", tmp_path) as it:
            client = EngineClient(it.path)
            first, second = await asyncio.gather(client.connect(), client.connect(), return_exceptions=True)
            assert {type(first), type(second)} == {wire.Welcome, RuntimeError}
            with pytest.raises(RuntimeError, match="connected already"):
                await client.connect()
            assert (await client.snapshot()).running == 0
            await client.close()

    assert run(scene)


def test_a_silent_engine_is_not_waited_for_longer_than_asked(tmp_path: Path) -> None:
    async def scene() -> None:
        done = asyncio.Event()

        async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await done.wait()
            writer.close()

        path = tmp_path / "silent.sock"
        async with await asyncio.start_unix_server(silent, path):
            client = EngineClient(path)
            with pytest.raises(EngineError, match=r"no answer within 0\.05 s"):
                await client.connect(timeout_s=0.05)
            assert not client.connected
            done.set()
            await asyncio.sleep(0)

    assert run(scene)


def test_a_client_without_a_tokenizer_makes_no_text(tmp_path: Path) -> None:
    async def scene() -> None:
        client = EngineClient(tmp_path / "nobody.sock")
        with pytest.raises(RuntimeError, match="tokenizer"):
            client.generate(GenerateRequest(request_id="a", prompt_ids=[1], params=SamplingParams()))

    assert run(scene)
