"""How much there is on a request's way to the engine: each call of ours costs its first token microseconds, cold."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from engine.client import EngineClient
from gateway.http.connection import Connection

ROOT = Path(__file__).parents[3]
OURS = tuple(str(ROOT / package) for package in ("engine", "gateway", "marketplace"))
MOST = 125
"""Calls of our functions, from the request's bytes to those that the engine is sent."""
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 2}


def test_few_calls_stand_between_a_request_and_the_engine(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[Counter[str]] = []
    arrived, sent = Connection.data_received, EngineClient._send

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            counts[-1][frame.f_code.co_qualname] += 1

    def data_received(self: Connection, data: bytes) -> None:
        counts.append(Counter())
        sys.setprofile(count)
        arrived(self, data)

    def send(self: EngineClient, frame: Any) -> None:
        sys.setprofile(None)
        sent(self, frame)

    with monkeypatch.context() as patched:
        patched.setattr(Connection, "data_received", data_received)
        patched.setattr(EngineClient, "_send", send)
        with shared.connect() as raw:
            for _ in range(3):  # the first meets a key and a template for the first time
                raw.sendall(shared.request(json.dumps(BODY).encode()))
                answer = b""
                while not answer.endswith(b"0\r\n\r\n"):
                    answer += raw.recv(65536)
                assert b"data: [DONE]" in answer
    assert len(counts) == 3 and counts[-1]["answer"] == counts[-1]["Meter.open"] == 1
    assert counts[-1].total() <= MOST, counts[-1].most_common()
