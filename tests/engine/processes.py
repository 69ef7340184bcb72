"""Engine processes of either kind, the scripted one and the worker with a scripted core, and clients of theirs."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec

from engine import wire
from engine.answer import Delta
from engine.client import EngineClient
from engine.generation import GenerateRequest, Generation
from engine.sampling_params import SamplingParams
from engine.script import Script
from tests.engine.byte_tokenizer import ByteTokenizer

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


def worker_command(**script: object) -> list[str]:
    """The worker with a scripted core, with room for options at its end."""
    text = msgspec.json.encode(Script(**script)).decode()  # type: ignore[arg-type]
    return [sys.executable, "-c", WORKER.replace("sys.argv.pop()", repr(text))]


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


async def until_ready(process: asyncio.subprocess.Process) -> None:
    """Read what an engine process says until it says that it serves. Fails when it ends before."""
    assert process.stderr is not None
    said = ""
    while " ready" not in (line := (await process.stderr.readline()).decode()):
        assert line, f"it ended: {said}"
        said += line


@contextlib.asynccontextmanager
async def engine(kind: str, folder: Path, *options: str, **script: object) -> AsyncIterator[Engine]:
    path = folder / "engine.sock"
    text = msgspec.json.encode(Script(**{"vocab_size": 256, **script})).decode()  # type: ignore[arg-type]
    command = ["-m", "engine.scripted", "--script", text] if kind == "scripted" else ["-c", WORKER]
    tail = [] if kind == "scripted" else [text]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--socket", str(path), *options, *tail, stderr=asyncio.subprocess.PIPE
    )
    running = Engine(process, path)
    try:
        async with asyncio.timeout(20):
            await until_ready(process)
            await running.client.connect()
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        _, log = await process.communicate()
        sys.stderr.write(log.decode())
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
