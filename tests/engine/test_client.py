"""What a client may rely on, asked of real processes: the scripted engine, and the worker with a scripted core."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from engine import wire
from engine.answer import Delta
from engine.client import EngineClient
from engine.generation import EngineError, GenerateRequest, Generation
from engine.sampling_params import SamplingParams
from engine.script import Script
from engine.vocabulary import Vocabulary

WORKER = """
import sys, time
import msgspec
from engine.script import Script, ScriptedCore
from engine.worker import main

class Paced(ScriptedCore):
    "A step takes a millisecond, and there is one as long as a stream lives."
    def has_work(self):
        return self.due_in() is not None
    def step(self):
        time.sleep(0.001)
        return super().step()

script = msgspec.json.decode(sys.argv.pop(), type=Script)
raise SystemExit(main(load=lambda config: Paced(script)))
"""


class ByteTokenizer:
    """Fake: a token is a byte; 0 is special."""

    vocabulary = Vocabulary([bytes([i]) for i in range(256)], frozenset({0}), False)


class Engine:
    """A running engine process of either kind, and a client that is connected to it."""

    def __init__(self, process: asyncio.subprocess.Process, path: Path) -> None:
        self.process = process
        self.path = path
        self.client = EngineClient(path, ByteTokenizer())

    def generate(self, request_id: str, n: int = 1, **params: object) -> Generation:
        asked = SamplingParams(**params)  # type: ignore[arg-type]
        return self.client.generate(GenerateRequest(request_id=request_id, prompt_ids=[1, 2, 3], params=asked, n=n))

    async def settled(self) -> wire.Snapshot:
        """The gauges once nothing runs and every end has arrived."""
        while (snapshot := await self.client.snapshot()).running + snapshot.waiting + self.client.live:
            pass
        return snapshot


@contextlib.asynccontextmanager
async def engine(kind: str, folder: Path, *options: str, **script: object) -> AsyncIterator[Engine]:
    path = folder / "engine.sock"
    text = msgspec.json.encode(Script(**{"vocab_size": 256, **script})).decode()  # type: ignore[arg-type]
    command = ["-m", "engine.scripted", "--script", text] if kind == "scripted" else ["-c", WORKER]
    tail = [] if kind == "scripted" else [text]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, "--socket", str(path), *options, *tail)
    running = Engine(process, path)
    try:
        async with asyncio.timeout(20):
            while not running.client.connected:
                if path.exists():
                    with contextlib.suppress(EngineError):
                        await running.client.connect()
                assert process.returncode is None
                await asyncio.sleep(0.01)
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await running.client.close()


async def everything(generation: Generation) -> list[Delta]:
    deltas: list[Delta] = []
    while new := await generation.next():
        deltas += new
    return deltas


def run(scene: Callable[[], Awaitable[None]]) -> bool:
    """Run a scene within 30 seconds. True when it came to its end, which is what each test asserts besides."""

    async def main() -> None:
        async with asyncio.timeout(30):
            await scene()

    asyncio.run(main())
    return True


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
        async with engine(kind, tmp_path, max_context=8, max_running=1, max_queued=0, tokens=1_000_000) as it:
            generation = it.client.generate(
                GenerateRequest(request_id="long", prompt_ids=[1] * 9, params=SamplingParams())
            )
            with pytest.raises(EngineError, match="9 tokens are over the context of 8") as caught:
                await generation.next()
            assert caught.value.code == "too_long"
            pair = it.generate("pair", n=2, max_tokens=5)
            with pytest.raises(EngineError) as full:
                await everything(pair)
            assert full.value.code == "queue_full"
            await it.settled()

    assert run(scene)


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


def test_an_id_that_runs_is_not_submitted_twice_over_one_client(tmp_path: Path) -> None:
    async def scene() -> None:
        async with engine("scripted", tmp_path, tokens=50, first_token_ms=50) as it:
            generation = it.generate("a")
            with pytest.raises(EngineError) as caught:
                it.generate("a")
            assert caught.value.code == "duplicate"
            assert len(await everything(generation)) >= 1

    assert run(scene)


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
