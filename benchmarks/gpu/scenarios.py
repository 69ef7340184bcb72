"""What is asked of an engine and what comes of it: first tokens, tokens per second, gaps beside a long prompt.

Every prompt is new, so that nothing is found in the prefix cache, but for saturated decoding: there every prompt is
computed once before, so that all streams begin at the same moment with all of their context.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from benchmarks.gpu.budget import Deadline
from benchmarks.gpu.record import Recorder
from benchmarks.gpu.streams import Port, Stream, StreamError
from benchmarks.gpu.workload import Workload
from benchmarks.rig.results import percentile

WARM_TOKENS = 16
"""Of streams that have to be under way"""
LEAST_S = 1.0
"""A scenario is not begun with less time left."""

Scenario = Callable[[Port, Workload, Recorder], Awaitable[None]]


async def measure(
    port: Port, load: Workload, recorder: Recorder, deadline: Deadline, scenarios: Sequence[Scenario]
) -> None:
    """Run the scenarios in order; each that fails or does not end in time is a broken check, and the next is run."""
    for scenario in scenarios:
        name = f"{port.place}: {scenario.__name__.replace('_', ' ')}"
        watched = _Watched(port)
        if not deadline.allows(LEAST_S):
            recorder.check(name, False, "no time was left for it")
            continue
        try:
            async with asyncio.timeout(deadline.left):
                await scenario(watched, load, recorder)
        except StreamError as error:
            recorder.check(name, False, str(error))
        except TimeoutError:
            recorder.check(name, False, "did not end in time")
        else:
            recorder.check(name, True)
        finally:
            watched.stop_all()


class _Watched:
    """A port that remembers what it started."""

    def __init__(self, port: Port) -> None:
        self.place = port.place
        self._port = port
        self._started: list[Stream] = []

    def start(self, prompt: Sequence[int], tokens: int) -> Stream:
        stream = self._port.start(prompt, tokens)
        self._started.append(stream)
        return stream

    def stop(self, stream: Stream) -> None:
        self._port.stop(stream)

    def stop_all(self) -> None:
        for stream in self._started:
            self._port.stop(stream)


async def first_tokens(port: Port, load: Workload, recorder: Recorder) -> None:
    """Idle: one prompt at a time, of each length, after one that is not counted."""
    for name, (length, times) in load.prompts.items():
        found: list[float] = []
        for i in range(times + 1):
            stream = await port.start(load.prompt(f"first/{name}/{i}", length), 1).done()
            if stream.prompt_tokens != length or stream.cached_tokens:
                raise StreamError(f"{length} new tokens: {stream.prompt_tokens}, {stream.cached_tokens} of them cached")
            found.append(1e3 * stream.ttft)
        found = found[1:]
        recorder.figure(f"{port.place}.ttft_{name}_ms", percentile(found, 0.5))
        row = {"where": port.place, "prompt": length, "n": times, "p50 ms": percentile(found, 0.5)}
        recorder.row("First tokens, idle", {**row, "least": min(found), "most": max(found)})


async def one_stream(port: Port, load: Workload, recorder: Recorder) -> None:
    """Time of a token after the first, one stream at a time."""
    found = []
    for i in range(load.answers + 1):
        stream = await port.start(load.prompt(f"one/{i}", load.chat_prompt), load.answer).done()
        found.append(1e3 * stream.tpot)
    recorder.figure(f"{port.place}.tpot_1_ms", percentile(found[1:], 0.5))


async def long_prompt_arrives(port: Port, load: Workload, recorder: Recorder) -> None:
    """Gaps of running streams between the arrival of a long prompt and its first token."""
    gaps: list[float] = []
    waits: list[float] = []
    for i in range(load.long_prompts):
        room = 10 * load.answer
        running = [port.start(load.prompt(f"gap/{i}/{n}", load.chat_prompt), room) for n in range(load.running)]
        await asyncio.gather(*(stream.until(WARM_TOKENS) for stream in running))
        late = port.start(load.prompt(f"gap/{i}/long", load.long_prompt), 1)
        await late.done()
        # The gap that ends just after the first token is the long prompt's, too
        await asyncio.gather(*(stream.until(stream.tokens + 1) for stream in running))
        end = max(stream.last for stream in running)
        gaps += [1e3 * gap for stream in running for gap in stream.gaps(late.sent, end)]
        waits.append(1e3 * late.ttft)
        for stream in running:
            port.stop(stream)
    recorder.figure(f"{port.place}.gap_p99_ms", percentile(gaps, 0.99))
    row = {"where": port.place, "streams": load.running, "gaps": len(gaps), "p50 ms": percentile(gaps, 0.5)}
    worst = {"p99": percentile(gaps, 0.99), "most": max(gaps), "long prompt's first token": percentile(waits, 0.5)}
    recorder.row(f"Gaps while a prompt of {load.long_prompt} tokens arrives", {**row, **worst})


async def chat_lengths(port: Port, load: Workload, recorder: Recorder) -> None:
    """First tokens with several clients in a closed loop, prompts and answers of the lengths of chats."""
    todo = iter(load.chats("chat"))
    found: list[float] = []

    async def client() -> None:
        for prompt, tokens in todo:
            found.append(1e3 * (await port.start(prompt, tokens).done()).ttft)

    await asyncio.gather(*(client() for _ in range(load.clients)))
    recorder.figure(f"{port.place}.ttft_mixed_ms", percentile(found, 0.5))
    recorder.figure(f"{port.place}.ttft_mixed_p99_ms", percentile(found, 0.99))


async def saturated(port: Port, load: Workload, recorder: Recorder) -> None:
    """All streams decode at once with all of their context: tokens per second between the last to begin and the first
    to end."""
    length = load.context - load.window // 2
    for name, streams in load.batches.items():
        prompts = [load.prompt(f"batch/{name}/{n}", length) for n in range(streams)]
        computed = [port.start(prompt, 1) for prompt in prompts]
        await asyncio.gather(*(stream.done() for stream in computed))
        prefill = max(stream.last for stream in computed) - min(stream.sent for stream in computed)
        found = [port.start(prompt, load.window) for prompt in prompts]
        await asyncio.gather(*(stream.done() for stream in found))
        begin, end = max(stream.first for stream in found), min(stream.last for stream in found)
        if end <= begin:  # answers so short that each came in one piece
            begin, end = min(stream.sent for stream in found), max(stream.last for stream in found)
            recorder.note(f"{port.place}: {streams} streams never ran at the same time: all of their time counts")
        rate = sum(stream.tokens_in(begin, end) for stream in found) / (end - begin)
        recorder.figure(f"{port.place}.decode_{name}_tok_s", rate)
        cached = sum(stream.cached_tokens for stream in found) / (streams * length)
        row = {"where": port.place, "streams": streams, "context": load.context, "decode tok/s": rate}
        more = {"timed s": end - begin, "prefill tok/s": streams * length / prefill, "then cached %": 100 * cached}
        recorder.row("Saturated", {**row, **more})
