"""An engine process of our own and its client: the engine's figures without a gateway, and its cold start."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu import scenarios
from benchmarks.gpu.streams import Stream, StreamError
from benchmarks.gpu.supervise import Context
from benchmarks.gpu.workload import known_settings, workload
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.generation import EngineError
from engine.sampling_params import SamplingParams
from engine.wire import Progress

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.01
END_S = 10.0


class EnginePort:
    """Asks an engine process for tokens."""

    place = "in process"

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._names: dict[Stream, str] = {}
        self._count = 0

    def start(self, prompt: Sequence[int], tokens: int) -> Stream:
        """See Port."""
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self._count += 1
        name = f"suite-{self._count}"
        stream = Stream()

        def said(progress: Progress | EngineError) -> None:
            now = time.perf_counter()
            if isinstance(progress, EngineError):
                stream.failed(str(progress))
                return
            stream.arrived(now, len(progress.tokens) // 4)
            if progress.finish_reason == "error":
                stream.failed(progress.error or "the engine failed")
            elif progress.finish_reason is not None:
                stream.ended(progress.counters.prompt, progress.counters.cached)

        self._client.submit(name, prompt, params, on_progress=said)
        self._names[stream] = name
        return stream

    def stop(self, stream: Stream) -> None:
        """See Port."""
        name = self._names.pop(stream, None)
        if name is not None and self._client.connected:
            self._client.abort(name)


def engine_settings(context: Context, model: str, **own: Any) -> dict[str, Any]:
    """EngineConfig fields of the run: the workload's, and a test's own."""
    settings = workload(context.tiny).settings | {"device": context.device, "model": model}
    return known_settings(EngineConfig.__struct_fields__, settings, own)


@asynccontextmanager
async def engine(
    settings: Mapping[str, Any], folder: Path, name: str, limit_s: float
) -> AsyncIterator[tuple[EngineClient, float]]:
    """Start an engine process; gives a connected client and the seconds from the start to its greeting.

    Raises RuntimeError with the end of its log when it does not start.
    """
    socket, log = folder / f"{name}.sock", folder / f"{name}.log"
    command = [sys.executable, "-m", "engine.worker", "--socket", str(socket), "--config", json.dumps(dict(settings))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    began = time.perf_counter()
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
    client = EngineClient(socket)
    try:
        while not socket.exists():
            if process.returncode is not None or time.perf_counter() - began > limit_s:
                raise RuntimeError(f"the engine did not start ({process.returncode}): {tail(log)}")
            await asyncio.sleep(POLL_S)
        await client.connect()
        yield client, time.perf_counter() - began
    finally:
        await client.close()
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def tail(log: Path, lines: int = 5) -> str:
    """The last lines of a log."""
    return " | ".join(log.read_text(errors="replace").splitlines()[-lines:])


def startup_lines(log: Path) -> list[str]:
    """What an engine says about its start: every GiB and every second."""
    text = log.read_text(errors="replace").splitlines()
    return [line for line in text if any(word in line for word in ("start-up took", "KV cache", "captured"))]


def run(context: Context) -> None:
    """Measure everything; then start once more, with nothing left to compile."""
    gc.collect()
    gc.freeze()  # no pause of this process for what it has imported
    asyncio.run(_run(context))


async def rest(client: EngineClient, port: EnginePort, context: Context) -> None:
    """Let the engine sleep, weights in host memory and nothing on the device, and wake it for a question."""
    recorder = context.recorder
    try:
        async with asyncio.timeout(context.deadline.left):
            recorder.figure("in process.to_sleep_s", (await client.rest(asleep=True)).seconds)
            began = time.perf_counter()
            recorder.figure("in process.to_wake_s", (await client.rest(asleep=False)).seconds)
            stream = await port.start(range(1, 33), 4).done()
            recorder.figure("in process.wake_and_answer_s", time.perf_counter() - began)
            recorder.check("an engine that slept answers", stream.tokens == 4, f"{stream.tokens} of 4 tokens")
    except (EngineError, StreamError, TimeoutError) as error:
        recorder.check("an engine that slept answers", False, f"{type(error).__name__}: {error}")


async def _run(context: Context) -> None:
    recorder, deadline, load = context.recorder, context.deadline, workload(context.tiny)
    settings = engine_settings(context, context.fact("model"))
    recorder.fact("engine_settings", settings)
    async with engine(settings, context.work, "engine", deadline.left) as (client, took):
        recorder.figure("in process.first_start_s", took)
        for line in startup_lines(context.work / "engine.log"):
            recorder.note(line)
        asked = (
            scenarios.first_tokens,
            scenarios.one_stream,
            scenarios.long_prompt_arrives,
            scenarios.chat_lengths,
            scenarios.saturated,
        )
        port = EnginePort(client)
        await scenarios.measure(port, load, recorder, deadline, asked)
        await rest(client, port, context)
    if (first := recorder.record.figures.get("in process.ttft_128_ms")) is not None:
        recorder.fact("engine_ttft_128_ms", first)
    if context.tiny:  # nothing was compiled the first time
        recorder.figure("in process.start_s", took)
        return
    if not deadline.allows(1.5 * took):
        recorder.note("no time was left for a second start")
        return
    async with engine(settings, context.work, "again", deadline.left) as (_, took):
        recorder.figure("in process.start_s", took)
