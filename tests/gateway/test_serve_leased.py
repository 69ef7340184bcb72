"""`headrace serve` on a GPU that it leases: it serves without one, and leaves it under load with its books in order."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from engine.script import Script
from engine.tokenizer import Tokenizer
from engine.weights.sources import ModelSource
from marketplace.ledger.rules import OUR_FAULT
from tests.gateway.fleet.test_leases import Node
from tests.gateway.test_serve import START_S, Process, free_port

pytestmark = pytest.mark.slow


class LiveNode(Node):
    """A node on the machine's own clock, whose agent lives in a thread."""

    now = property(lambda self: time.time_ns() // 1000, lambda self, value: None)  # type: ignore[assignment]

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        super().__init__(folder)
        self._agent = self.agent()
        self.do(self._agent.__aenter__())

    def do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(START_S)

    def close(self) -> None:
        self.do(self._agent.__aexit__(None, None, None))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def set(self, free: bool) -> None:
        self.free = free

    async def take_away(self, within_s: float) -> None:
        self.revoke(within_s)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LiveNode]:
    made = LiveNode(tmp_path)
    yield made
    made.close()


@pytest.fixture
def house(tmp_path: Path, tiny_model: ModelSource, node: LiveNode) -> Iterator[Process]:
    """A gateway that begins while the GPU is somebody else's."""
    node.do(node.set(False))
    reply = tuple(Tokenizer.load(tiny_model).encode("abcdefg "))
    script = Script(tokens=9000, reply=reply, eos=257, vocab_size=258, interval_ms=10.0, max_context=100_000)
    engine = [sys.executable, "-m", "engine.scripted", "--script", msgspec.json.encode(script).decode()]
    options = ("--engine-command", shlex.join(engine), "--lease-socket", str(node.socket), "--drain-s", "2")
    made = Process(tmp_path / "data", str(tiny_model.path), free_port(), options)
    yield made
    made.stop(signal.SIGKILL)


def reasons(house: Process) -> str:
    try:
        house.get("/readyz")
    except urllib.error.HTTPError as error:
        with error:
            return str(json.load(error)["reasons"].get("engine", ""))
    return ""


def until(house: Process, reason: str) -> None:
    end = time.monotonic() + START_S
    while reason not in (seen := reasons(house)) or bool(seen) != bool(reason):
        assert time.monotonic() < end and house.process.poll() is None, (seen, house.said)
        threading.Event().wait(0.05)


def test_a_gpu_is_left_under_load_and_no_token_is_lost(tmp_path: Path, house: Process, node: LiveNode) -> None:
    house.wait_ready()
    assert f"leases its GPU at {node.socket}" in house.said
    until(house, "it has no GPU: 1 GPUs asked for, 0 are free")
    key = json.loads((tmp_path / "data" / "first-run.json").read_text())["api_key"]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{house.port}/v1", api_key=key, max_retries=0)
    question: Any = [{"role": "user", "content": "x"}]
    with client, ThreadPoolExecutor(12) as threads:
        with pytest.raises(openai.InternalServerError, match="is starting") as caught:
            client.chat.completions.create(model="tiny", messages=question)
        assert caught.value.status_code == 503
        node.do(node.set(True))
        until(house, "")

        begun = threading.Barrier(13)

        def ask(tokens: int) -> tuple[bool, int]:
            """Whether it came to its end, and how many letters arrived."""
            letters, stream = (
                0,
                client.chat.completions.create(model="tiny", messages=question, stream=True, max_tokens=tokens),
            )
            try:
                for chunk in stream:
                    letters += len(chunk.choices[0].delta.content or "")
                    if not begun.broken and letters and letters == len(chunk.choices[0].delta.content or ""):
                        begun.wait(START_S)
            except openai.APIError:
                return False, letters
            return True, letters

        asked = [threads.submit(ask, 150 if number % 2 else 8000) for number in range(12)]
        begun.wait(START_S)
        node.do(node.take_away(7))
        until(house, "leaving: its GPUs are wanted for a rental")
        ended = [one.result(START_S) for one in asked]
        until(house, "0 are free")
        assert node.killed == [] and node.book.held() == frozenset(), "it went by itself, in time"
        assert [done for done, _ in ended] == [number % 2 == 1 for number in range(12)]
        node.do(node.set(True))
        until(house, "")
        assert client.chat.completions.create(model="tiny", messages=question, max_tokens=3).usage is not None

    assert house.stop() == 0
    with sqlite3.connect(tmp_path / "data" / "headrace.db") as books:
        rows = books.execute("SELECT outcome, billable, completion, cost FROM usage_record").fetchall()
    books.close()
    whole = [row for row in rows if row[0] not in OUR_FAULT]
    cut = [row for row in rows if row[0] in OUR_FAULT]
    assert sorted(row[2] for row in whole) == [3] + [150] * 6 and all(row[1] for row in whole)
    assert len(cut) == 6 and not any(row[1] or row[3] for row in cut), "what we cut off is free"
    letters = sorted(count for done, count in ended if not done)
    assert all(metered >= count > 0 for metered, count in zip(sorted(row[2] for row in cut), letters, strict=True))
    audited = subprocess.run(
        [sys.executable, "-m", "gateway.cli", "audit", "--data", str(tmp_path / "data")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert audited.returncode == 0, audited.stdout
