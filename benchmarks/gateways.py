"""What gateways add to a first token on this machine: Headrace before its engine, others before a mock, in one run.

The engine and the mock need the same time for a first token and nothing for the rest. Headrace knows keys, limits and
money and settles every request; nginx passes bytes on; the others are set up with as little as they take: no database,
no budgets. One gateway at a time stands beside ours: one client asks in turn through both and at both sources, and the
differences are taken pair by pair.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import uvloop

from benchmarks.overhead import REPLY, TARGET_P50_MS, TARGET_P99_MS, Times, straight, through_gateway
from benchmarks.rig import bare, results
from benchmarks.rig.cases import WORDS, chat_body
from benchmarks.rig.headrace import LABEL, MODEL, House
from benchmarks.rig.http import Connection, Endpoint
from benchmarks.rig.machine import wait_until_quiet
from benchmarks.rig.proxies import PROXIES, Proxy
from engine.client import EngineClient
from engine.script import Script
from engine.tokenizer import Tokenizer
from engine.weights.sources import default_cache_dir, resolve

ENGINE, MOCK = "engine", "mock"
_ids = itertools.count()


async def alternate(
    house: House, endpoint: Endpoint, mock: Endpoint, proxies: Mapping[str, Proxy], options: argparse.Namespace
) -> dict[str, Times]:
    """Ask in turn through every gateway and at both sources; return the times of all without the warm-up."""
    tokenizer = Tokenizer.load(resolve(house.model, default_cache_dir()))
    text = " ".join(WORDS[i % len(WORDS)] for i in range(options.words))
    client = EngineClient(house.engine_socket, tokenizer)
    await client.connect()
    open_: list[tuple[str, Endpoint, Connection]] = []
    for name, at in ((LABEL, endpoint), (MOCK, mock), *((name, proxy.endpoint) for name, proxy in proxies.items())):
        connection = await Connection.open(at.host, at.port)
        open_.append((name, at, connection))
    times: dict[str, Times] = {}
    for number in range(-options.warm_up, options.requests):
        if number == 0:
            times.clear()
        await straight(
            client, tokenizer, f"straight-{next(_ids)}", text, options.tokens, times.setdefault(ENGINE, Times())
        )
        for index, (name, at, connection) in enumerate(open_):
            if not connection.usable:  # some close theirs after so many requests
                connection = await Connection.open(at.host, at.port)
                open_[index] = (name, at, connection)
            body = chat_body(at.model, text, options.tokens)
            await through_gateway(connection, at, body, times.setdefault(name, Times()))
    for _, _, connection in open_:
        connection.close()
    await client.close()
    return times


def rows(beside: str, times: Mapping[str, Times]) -> list[results.Row]:
    """Return what both add to their sources, in milliseconds."""

    def added(name: str) -> results.Row:
        source = times[ENGINE if name == LABEL else MOCK]
        first = [1000 * (a - b) for a, b in zip(times[name].first, source.first, strict=True)]
        whole = [1000 * (a - b) for a, b in zip(times[name].whole, source.whole, strict=True)]
        return {
            "beside": beside,
            "gateway": name,
            "requests": len(first),
            "added to ttft p50 ms": results.percentile(first, 0.5),
            "p90": results.percentile(first, 0.9),
            "p99": results.percentile(first, 0.99),
            "added to e2e p50 ms": results.percentile(whole, 0.5),
        }

    return [added(name) for name in times if name not in (ENGINE, MOCK)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gateways", description=__doc__)
    parser.add_argument("--peers", type=Path, help="folder of prepared environments; without one, nginx alone")
    parser.add_argument("--only", nargs="*", choices=PROXIES, default=list(PROXIES), help="which of them")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--warm-up", type=int, default=200)
    parser.add_argument("--first-token-ms", type=float, default=10.0, help="what engine and mock need")
    parser.add_argument("--words", type=int, default=32, help="words of the prompt")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--quiet", type=float, default=0, help="wait at most this many seconds for a quiet machine")
    options = parser.parse_args(argv)
    script = Script(
        tokens=options.tokens, tick_ms=0.05, first_token_ms=options.first_token_ms, reply=REPLY, kv_tokens=1_000_000
    )
    with tempfile.TemporaryDirectory(prefix="headrace-gateways-") as made, contextlib.ExitStack() as running:
        folder = Path(made)
        house = House(folder / "data", MODEL, script)
        server, endpoint = house.start()
        running.enter_context(server)
        mocking, mock = bare.start(folder, options.tokens, 0, options.first_token_ms / 1000)
        running.enter_context(mocking)
        table: list[results.Row] = []
        for name in options.only:
            if shutil.which(name) or (options.peers is not None and (options.peers / name).is_dir()):
                proxy = PROXIES[name](options.peers or folder, folder, mock)
                with proxy.server:
                    wait_until_quiet(options.quiet)
                    table += rows(name, uvloop.run(alternate(house, endpoint, mock, {name: proxy}, options)))
    ours = [row for row in table if row["gateway"] == LABEL]
    met = bool(ours) and all(
        float(str(row["added to ttft p50 ms"])) <= TARGET_P50_MS and float(str(row["p99"])) <= TARGET_P99_MS
        for row in ours
    )
    targets = {"ttft p50": TARGET_P50_MS, "ttft p99": TARGET_P99_MS, "met": met}
    results.report("gateways", table, {"rows": table, "targets_ms": targets})
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
