"""A thousand streams at once, held for a minute: nothing lost, every one settled, and what a chunk costs the gateway.

A scripted engine says ten tokens a second to each. Every stream has to bring every token, in order, and its usage;
every answer has to stand in the ledger; the processor time of the gateway, and of the process that writes its ledger,
is divided by the events that clients received. The same client then reads as many streams from a server that does
nothing but send, which says what of that time is the machine's price of a small write to a socket.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from benchmarks.rig import bare, results
from benchmarks.rig.books import differences, read_books, seen
from benchmarks.rig.cases import WORDS, chat_body
from benchmarks.rig.headrace import MODEL, House
from benchmarks.rig.http import Endpoint, Reply, chat
from benchmarks.rig.machine import LoadMeter, cpu_seconds, gateway_processes, rss_mib, wait_until_quiet
from engine.script import Script
from engine.tokenizer import Tokenizer
from engine.weights.sources import default_cache_dir, resolve

REPLY = tuple(range(1000, 1040))
TARGET_US = 60.0
SAMPLE_S = 1.0


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files, which its children inherit, to at least `count` where it is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (count if hard == resource.RLIM_INFINITY else min(count, hard), hard)
        )


async def hold(
    endpoint: Endpoint, streams: int, tokens: int, ramp_s: float, gateway: int
) -> tuple[list[Reply], list[float]]:
    """Open the streams evenly over the ramp and read them to their ends; return replies and RSS samples in MiB."""
    memory: list[float] = []

    async def one(number: int) -> Reply:
        await asyncio.sleep(ramp_s * number / streams)
        prompt = " ".join(WORDS[(number + i) % len(WORDS)] for i in range(16))
        return await chat(endpoint, chat_body(endpoint.model, prompt, tokens))

    async def sample() -> None:
        while True:
            memory.append(rss_mib([gateway]))
            await asyncio.sleep(SAMPLE_S)

    sampler = asyncio.create_task(sample())
    replies = await asyncio.gather(*(one(number) for number in range(streams)))
    sampler.cancel()
    return list(replies), memory


def bare_us(options: argparse.Namespace) -> float:
    """Return the microseconds of processor time for an event of a server that only sends, from as many streams."""
    tokens = round(options.bare_seconds * options.rate)
    with tempfile.TemporaryDirectory(prefix="headrace-bare-") as folder:
        server, endpoint = bare.start(Path(folder), tokens, 1 / options.rate)
        with server:
            before = cpu_seconds([server.pid])
            replies, _ = uvloop.run(hold(endpoint, options.streams, tokens, options.ramp, server.pid))
            used = cpu_seconds([server.pid]) - before
    return 1e6 * used / max(1, sum(len(reply.contents) for reply in replies))


def check(replies: Sequence[Reply], tokens: int, text: str) -> list[str]:
    """Return what was lost: streams that failed, texts and counts that differ from what the engine said."""
    found = [f"stream {number}: {reply.complaint}" for number, reply in enumerate(replies) if not reply.ok]
    for number, reply in enumerate(replies):
        if reply.ok and reply.usage is not None and reply.usage.completion_tokens != tokens:
            found.append(f"stream {number}: {reply.usage.completion_tokens} tokens instead of {tokens}")
        if reply.ok and "".join(reply.text) != text:
            found.append(f"stream {number}: its text differs from what the engine said")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.streams", description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=10, help="tokens per second of each stream")
    parser.add_argument("--ramp", type=float, default=5, help="seconds over which the streams begin")
    parser.add_argument("--bare-seconds", type=float, default=15, help="how long the server that only sends is read")
    parser.add_argument("--quiet", type=float, default=0, help="wait at most this many seconds for a quiet machine")
    options = parser.parse_args(argv)
    tokens = round(options.seconds * options.rate)
    tokenizer = Tokenizer.load(resolve(MODEL, default_cache_dir()))
    text = tokenizer.decode([REPLY[i % len(REPLY)] for i in range(tokens)])
    allow_open_files(2 * options.streams + 200)
    script = Script(tokens=tokens, interval_ms=1000 / options.rate, reply=REPLY, kv_tokens=2_000_000, tick_ms=5)
    with tempfile.TemporaryDirectory(prefix="headrace-streams-") as folder:
        house = House(Path(folder) / "data", MODEL, script, options=("--max-running", str(options.streams)))
        server, endpoint = house.start()
        with server:
            wait_until_quiet(options.quiet)
            idle = rss_mib([server.pid])
            ours = gateway_processes(server.pid)
            meter, cpu, begun = LoadMeter(server.pid), cpu_seconds(ours), time.perf_counter()
            replies, memory = uvloop.run(hold(endpoint, options.streams, tokens, options.ramp, server.pid))
            seconds, cpu, load = time.perf_counter() - begun, cpu_seconds(ours) - cpu, meter.stop()
        books = read_books(house.database)
        audited, said = house.audit()
    floor_us = bare_us(options)
    events = sum(len(reply.contents) for reply in replies)
    findings = check(replies, tokens, text) + differences(map(seen, replies), books, len(replies))
    if audited != 0:
        findings.append(f"headrace audit ended with {audited}: {said}")
    for finding in findings[:20]:
        print(f"BROKEN: {finding}")
    gaps = [b - a for reply in replies for a, b in zip(reply.contents, reply.contents[1:])]
    first = [reply.ttft for reply in replies if reply.contents]
    steady = memory[len(memory) // 3 :]
    row: results.Row = {
        "streams": options.streams,
        "held s": options.seconds,
        "in full": sum(reply.ok for reply in replies),
        "settled": sum(record.outcome == "finished" for record in books.records.values()),
        "events": events,
        "us/event": 1e6 * cpu / max(1, events),
        "target": TARGET_US,
        "bare us/event": floor_us,
        "gateway core %": 100 * cpu / seconds,
        "ttft p50 ms": 1000 * results.percentile(first, 0.5),
        "ttft p99 ms": 1000 * results.percentile(first, 0.99),
        "gap p99 ms": 1000 * results.percentile(gaps, 0.99),
        "rss idle": idle,
        "rss steady": results.percentile(steady, 0.5),
        "rss growth": steady[-1] - steady[0] if steady else 0.0,
        "others %": 100 * load.others_share,
        "broken": len(findings),
    }
    results.report("streams", [row], {"rows": [row], "findings": findings[:50], "load": load, "rss_mib": memory})
    return 0 if not findings and float(str(row["us/event"])) <= TARGET_US else 1


if __name__ == "__main__":
    raise SystemExit(main())
