"""What the gateway adds to the engine, with money accounted: streamed answers through it and straight from the socket.

A scripted engine answers in a fixed time, so that nothing but the way is measured: HTTP, key, hold, journal, settlement
and events on one side, the engine's own frames on the other. Both begin with a conversation: the engine takes token
ids, so who asks it directly renders the template and tokenises, too. The same engine process answers both, in turn.
Two more in the row, for scale: a process that only passes on between client and engine, which is what this machine asks
of any gateway; and a server that answers the same request at once with ready-made chunks, which is HTTP alone.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.rig import bare, relay, results
from benchmarks.rig.cases import WORDS, chat_body
from benchmarks.rig.headrace import MODEL, House
from benchmarks.rig.http import CHAT_PATH, Connection, Endpoint
from benchmarks.rig.machine import LoadMeter, wait_until_quiet
from engine.client import EngineClient
from engine.generation import EngineError
from engine.sampling_params import SamplingParams
from engine.script import Script
from engine.tokenizer import Tokenizer
from engine.weights.sources import default_cache_dir, resolve
from engine.wire import Progress

REPLY = tuple(range(1000, 1040))
FIRST_TOKEN_MS = (10.0, 0.0)
"""Milliseconds that the engine needs for its first token: those of a fast GPU, which the bounds are about, and none at
all, where nothing hides the way of the hold to the disk."""
WAYS = ("gateway", "engine", "relay", "http")
TARGET_P50_MS, TARGET_P99_MS = 0.5, 3.0


@dataclass(slots=True)
class Times:
    """Seconds to the first token and to the end, one of each per request."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


async def through_gateway(connection: Connection, endpoint: Endpoint, body: bytes, times: Times) -> None:
    """One streamed chat completion over a kept connection."""
    reply = await connection.request("POST", CHAT_PATH, body, endpoint.key)
    if not reply.ok:
        raise RuntimeError(reply.complaint)
    times.first.append(reply.ttft)
    times.whole.append(reply.e2e)


async def straight(
    client: EngineClient, tokenizer: Tokenizer, request_id: str, text: str, tokens: int, times: Times
) -> None:
    """One request in the engine's own frames over a kept connection."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    first: list[float] = []

    def on_progress(said: Progress | EngineError) -> None:
        now = time.perf_counter()
        if isinstance(said, EngineError):
            ended.set_exception(said)
            return
        if said.tokens and not first:
            first.append(now)
        if said.finish_reason is not None:
            ended.set_result(None)

    sent = time.perf_counter()
    prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    client.submit(request_id, prompt, params, on_progress=on_progress)
    await ended
    times.first.append(first[0] - sent)
    times.whole.append(time.perf_counter() - sent)


async def alternate(
    house: House,
    endpoint: Endpoint,
    passage: Endpoint,
    plain: Endpoint,
    requests: int,
    warm_up: int,
    words: int,
    tokens: int,
) -> dict[str, Times]:
    """Ask in turn through the gateway, straight, through what only passes on, and plain HTTP; return the times of all
    without the warm-up."""
    tokenizer = Tokenizer.load(resolve(house.model, default_cache_dir()))
    text = " ".join(WORDS[i % len(WORDS)] for i in range(words))
    body = chat_body(endpoint.model, text, tokens)
    client = EngineClient(house.engine_socket, tokenizer)
    await client.connect()
    connection = await Connection.open(endpoint.host, endpoint.port)
    through = await Connection.open(passage.host, passage.port)
    at_once = await Connection.open(plain.host, plain.port)
    times = {way: Times() for way in WAYS}
    for number in range(-warm_up, requests):
        if number == 0:
            times = {way: Times() for way in WAYS}
        if number % 2:
            await through_gateway(connection, endpoint, body, times["gateway"])
        await straight(client, tokenizer, f"straight-{number + warm_up}", text, tokens, times["engine"])
        if not number % 2:
            await through_gateway(connection, endpoint, body, times["gateway"])
        await through_gateway(through, passage, body, times["relay"])
        await through_gateway(at_once, plain, body, times["http"])
    for opened in (connection, through, at_once):
        opened.close()
    await client.close()
    return times


def rows(times: dict[str, Times], first_token_ms: float) -> list[results.Row]:
    """Return the table: the ways, and the differences to the engine pair by pair, in milliseconds."""

    def line(way: str, first: Sequence[float], whole: Sequence[float]) -> results.Row:
        return {
            "engine's first token": f"{first_token_ms:g} ms",
            "way": way,
            "requests": len(first),
            "ttft p50 ms": 1000 * results.percentile(first, 0.5),
            "ttft p99 ms": 1000 * results.percentile(first, 0.99),
            "e2e p50 ms": 1000 * results.percentile(whole, 0.5),
            "e2e p99 ms": 1000 * results.percentile(whole, 0.99),
        }

    def added(way: str, by: Times) -> results.Row:
        first = [a - b for a, b in zip(by.first, times["engine"].first, strict=True)]
        return line(way, first, [a - b for a, b in zip(by.whole, times["engine"].whole, strict=True)])

    return [
        line("through the gateway", times["gateway"].first, times["gateway"].whole),
        line("straight to the engine", times["engine"].first, times["engine"].whole),
        added("added by the gateway", times["gateway"]),
        added("added by passing on alone", times["relay"]),
        line("HTTP alone", times["http"].first, times["http"].whole),
    ]


def measure(first_token_ms: float, options: argparse.Namespace) -> dict[str, Any]:
    """Measure with an engine that needs so long for a first token; return rows, load and what the audit said."""
    script = Script(tokens=8, tick_ms=0.05, first_token_ms=first_token_ms, reply=REPLY, kv_tokens=1_000_000)
    with tempfile.TemporaryDirectory(prefix="headrace-overhead-") as folder:
        house = House(Path(folder) / "data", MODEL, script)
        server, endpoint = house.start()
        beside, plain = bare.start(Path(folder), options.tokens, 0)
        between, passage = relay.start(Path(folder), MODEL, house.engine_socket)
        with server, beside, between:
            wait_until_quiet(options.quiet)
            meter = LoadMeter(server.pid)
            times = uvloop.run(
                alternate(
                    house, endpoint, passage, plain, options.requests, options.warm_up, options.words, options.tokens
                )
            )
            load = meter.stop()
        audited, said = house.audit()
    print(f"others used {100 * load.others_share:.0f} % of the machine; audit: {said.strip().splitlines()[-1:]}")
    return {
        "rows": rows(times, first_token_ms),
        "load": load,
        "audit_exit": audited,
        "seconds": {way: asdict(seen) for way, seen in times.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.overhead", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--warm-up", type=int, default=300)
    parser.add_argument("--words", type=int, default=32, help="words of the prompt")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--quiet", type=float, default=0, help="wait at most this many seconds for a quiet machine")
    options = parser.parse_args(argv)
    runs = {f"{first_token_ms:g} ms": measure(first_token_ms, options) for first_token_ms in FIRST_TOKEN_MS}
    table = [row for run in runs.values() for row in run["rows"]]
    added = table[2]
    met = float(str(added["ttft p50 ms"])) <= TARGET_P50_MS and float(str(added["ttft p99 ms"])) <= TARGET_P99_MS
    targets = {"ttft p50": TARGET_P50_MS, "ttft p99": TARGET_P99_MS, "met": met}
    results.report("overhead", table, {"rows": table, "targets_ms": targets, "runs": runs})
    return 0 if met and not any(run["audit_exit"] for run in runs.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
