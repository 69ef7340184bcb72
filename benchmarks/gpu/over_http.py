"""The same through the gateway: `headrace serve` in a process of its own, streamed chat completions, all of it metered.

Twice: the first gateway writes every token at once, as gaps between tokens need; the second one is as it is by default,
which is what many streams at once would meet.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu import scenarios
from benchmarks.gpu.in_process import ROOT, engine_settings, tail
from benchmarks.gpu.streams import Stream
from benchmarks.gpu.supervise import Context
from benchmarks.gpu.words import count_words, text_of
from benchmarks.gpu.workload import workload
from benchmarks.rig.cases import chat_body
from benchmarks.rig.http import Connection, Endpoint, Reply, chat
from benchmarks.rig.listener import free_port
from benchmarks.rig.processes import ServerProcess, StartFailedError

AT_ONCE = ("--flush-ms", "0")


class HttpPort:
    """Asks the gateway for streamed chat completions."""

    place = "http"

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._tasks: dict[Stream, asyncio.Task[None]] = {}

    def start(self, prompt: Sequence[int], tokens: int) -> Stream:
        """See Port. The clock starts when the request is sent, over a connection that is open already."""
        stream = Stream()
        body = chat_body(self._endpoint.model, text_of(prompt), tokens)
        task = asyncio.get_running_loop().create_task(self._ask(stream, body))
        self._tasks[stream] = task
        task.add_done_callback(lambda _: self._tasks.pop(stream, None))
        return stream

    def stop(self, stream: Stream) -> None:
        """See Port. The gateway sees that the client has gone."""
        if (task := self._tasks.get(stream)) is not None:
            task.cancel()

    async def _ask(self, stream: Stream, body: bytes) -> None:
        seen = 0

        def take(reply: Reply) -> None:
            nonlocal seen
            stream.sent = reply.sent
            for when, piece in zip(reply.contents[seen:], reply.text[seen:], strict=True):
                stream.arrived(when, count_words(piece))
            seen = len(reply.contents)

        def watch(_: Connection, reply: Reply) -> None:
            take(reply)

        reply = await chat(self._endpoint, body, watch)
        take(reply)  # what came together with the end
        if not reply.ok or reply.usage is None:
            stream.failed(reply.complaint)
            return
        stream.ended(reply.usage.prompt_tokens, reply.usage.cached)


def serve_options(settings: Mapping[str, Any]) -> list[str]:
    """EngineConfig fields as options of `headrace serve`."""
    options = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            options += [f"--{flag}", str(value)]
    return options


@asynccontextmanager
async def gateway(
    settings: Mapping[str, Any], data: Path, limit_s: float, *options: str
) -> AsyncIterator[tuple[Endpoint, float]]:
    """Run a gateway with its engine on a data folder; gives its endpoint and the seconds until it was ready. Raises
    RuntimeError with the ends of both logs."""
    port = free_port()
    argv = [sys.executable, "-m", "gateway.cli", "serve", "--port", str(port), "--data", str(data)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    log = data.with_name(f"{data.name}.log")
    server = ServerProcess([*argv, *serve_options(settings), *options], log, {"PYTHONPATH": path})
    try:
        served = Path(settings["model"]).name
        try:
            took = await server.ready(Endpoint("http", "127.0.0.1", port, served), "/readyz", limit_s)
        except StartFailedError as error:
            engines = data / "engine.log"
            raise RuntimeError(f"{error}; engine: {tail(engines) if engines.exists() else 'no log'}") from error
        key = json.loads((data / "first-run.json").read_bytes())["api_key"]
        yield Endpoint("http", "127.0.0.1", port, served, key, server.pid), took
    finally:
        await asyncio.to_thread(server.stop)


def run(context: Context) -> None:
    """Measure first tokens and gaps, then many streams."""
    gc.collect()
    gc.freeze()
    asyncio.run(_run(context))


async def _run(context: Context) -> None:
    recorder, deadline, load = context.recorder, context.deadline, workload(context.tiny)
    settings = engine_settings(context, context.fact("model"))
    data = context.work / "data"
    async with gateway(settings, data, deadline.left, *AT_ONCE) as (endpoint, took):
        recorder.figure("http.first_start_s", took)
        asked = [
            scenarios.first_tokens,
            scenarios.one_stream,
            scenarios.long_prompt_arrives,
            scenarios.chat_lengths,
            *([scenarios.saturated] if context.tiny else []),
        ]
        await scenarios.measure(HttpPort(endpoint), load, recorder, deadline, asked)
    if context.tiny:
        recorder.figure("http.start_s", took)
    elif not deadline.allows(1.5 * took):
        recorder.check("http: saturated", False, "no time was left for a second gateway")
    else:
        async with gateway(settings, data, deadline.left) as (endpoint, took):
            recorder.figure("http.start_s", took)
            await scenarios.measure(HttpPort(endpoint), load, recorder, deadline, (scenarios.saturated,))
    first, engines = recorder.record.figures.get("http.ttft_128_ms"), context.options.get("engine_ttft_128_ms")
    if first is not None and engines is not None:
        recorder.figure("http.added_to_first_token_ms", first - engines)
