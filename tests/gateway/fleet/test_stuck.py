"""An engine one of whose steps hangs: the gateway says so, fails its requests, and has it back without an operator."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.generation import EngineError, GenerateRequest
from engine.sampling_params import SamplingParams
from gateway.fleet.replicas import Backoff, Patience, Replica
from gateway.inference.run import translate
from tests.engine.byte_tokenizer import ByteTokenizer

HANGS_ONCE = """
import pathlib, sys
from engine.script import Script, ScriptedCore
from engine.worker import main

mark = pathlib.Path(sys.argv.pop(1))
script = Script(vocab_size=256, tokens=50, hang_after_tokens=0 if mark.exists() else 5)
mark.touch()
raise SystemExit(main(load=lambda config: ScriptedCore(script)))
"""


def test_it_is_started_again_and_says_why_meanwhile(tmp_path: Path) -> None:
    async def main() -> None:
        back = asyncio.Event()
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            await back.wait()

        replica = Replica(
            EngineConfig(step_timeout_s=0.4),
            socket_path=tmp_path / "engine.sock",
            log_path=tmp_path / "engine.log",
            tokenizer=ByteTokenizer(),
            command=[sys.executable, "-c", HANGS_ONCE, str(tmp_path / "mark")],
            backoff=Backoff(first_s=3.0),
            sleep=sleep,
        )
        states: list[str] = []
        down = asyncio.Event()
        replica.on_state(lambda changed: (states.append(changed.state), changed.state == "down" and down.set())[0])
        params = SamplingParams(max_tokens=50)
        try:
            async with asyncio.timeout(60):
                await replica.start()
                stuck = replica.client.generate(GenerateRequest(request_id="a", prompt_ids=[1, 2, 3], params=params))
                with pytest.raises(EngineError, match="has not ended for") as caught:
                    await stuck.final()
                assert caught.value.code == "engine_error"
                answer = translate(caught.value)
                assert (answer.status, "not charged" in answer.message) == (500, True)
                await down.wait()
                assert replica.last_error == "a step has not ended for 0.4 s"
                assert slept == [3.0]
                with pytest.raises(EngineError) as refused:
                    replica.client.generate(GenerateRequest(request_id="b", prompt_ids=[1], params=params))
                answer = translate(refused.value)
                assert (answer.status, answer.code) == (503, "service_unavailable")
                back.set()
                await replica.ready()
                again = replica.client.generate(GenerateRequest(request_id="c", prompt_ids=[1, 2, 3], params=params))
                assert (await again.final()).completion == 50
        finally:
            await replica.stop(0)
        assert states == ["starting", "ready", "down", "starting", "ready", "stopped"]
        assert replica.restarts == 1

    asyncio.run(main())
    log = (tmp_path / "engine.log").read_text()
    assert '"request_id":"a"' in log


def test_the_engine_s_own_watchdog_comes_first() -> None:
    assert Patience.of(EngineConfig()).stall_s == 120
    assert Patience.of(EngineConfig(step_timeout_s=0)).stall_s == 60
