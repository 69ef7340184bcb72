"""The engine process: how it starts, what it says when it cannot, and that it never outlives its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.generation import EngineError, GenerateRequest
from engine.process import listen, remove
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from engine.weights.sources import resolve
from tests.engine.processes import until_ready

HEAD = """
import sys
from engine.script import Script, ScriptedCore
from engine.weights.errors import WeightsError
from engine.worker import main
"""
PLAIN = HEAD + "raise SystemExit(main(load=lambda config: ScriptedCore(Script(tokens=5))))"


def raising(error: str) -> str:
    return HEAD + f"def load(config): raise {error}\nsys.exit(main(load=load))"


def outcome(code: str, *options: str) -> tuple[int, list[str]]:
    """Exit status and lines on stderr of a worker that is expected to end by itself."""
    done = subprocess.run(
        [sys.executable, "-c", code, *options], capture_output=True, text=True, timeout=30, check=False
    )
    return done.returncode, done.stderr.splitlines()


@contextlib.asynccontextmanager
async def worker(path: Path, *command: str, parent: bool = False) -> AsyncIterator[EngineClient]:
    """A client of the worker that the command starts, itself or (parent) as its child."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--socket", str(path), stderr=asyncio.subprocess.PIPE
    )
    client = EngineClient(path)
    try:
        async with asyncio.timeout(240):  # a busy machine loads a model slowly
            await until_ready(process)
            await client.connect()
            try:
                yield client
            finally:
                process.kill()
            if parent:
                await client.wait_lost()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
        await client.close()


def test_the_socket_appears_when_ready_for_this_user_alone_and_replaces_a_stale_one(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()

    def seen() -> tuple[int, list[str]]:
        return stat.S_IMODE(path.stat().st_mode), [p.name for p in tmp_path.iterdir()]

    async def main() -> tuple[tuple[int, list[str]], str]:
        async with worker(path, "-c", PLAIN, "--config", '{"model":"m","served_name":"shown"}') as client:
            assert client.welcome is not None
            return seen(), client.welcome.model

    assert asyncio.run(main()) == ((0o600, ["engine.sock"]), "shown")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("WeightsError('m.gguf: tensor x is missing')", "error: m.gguf: tensor x is missing"),
        ("ValueError('page_size\\nmust be 16, 32 or 64')", "error: page_size must be 16, 32 or 64"),
        ("FileNotFoundError(2, 'No such file', 'm')", "error: [Errno 2] No such file: 'm'"),
    ],
)
def test_what_will_never_start_says_why_in_one_line_and_exits_3(error: str, message: str, tmp_path: Path) -> None:
    status, lines = outcome(raising(error), "--socket", str(tmp_path / "s"))
    assert (status, lines[-1]) == (3, message)
    assert not any("Traceback" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_a_surprise_while_loading_is_told_with_its_traceback_and_exits_1(tmp_path: Path) -> None:
    status, lines = outcome(raising("RuntimeError('out of memory')"), "--socket", str(tmp_path / "s"))
    assert (status, lines[-1]) == (1, "error: RuntimeError: out of memory")
    assert any("Traceback" in line for line in lines)


def test_a_configuration_or_a_socket_that_cannot_be_is_refused(tmp_path: Path) -> None:
    status, lines = outcome(PLAIN, "--socket", str(tmp_path / "s"), "--config", '{"page_size":"x"}')
    assert (status, lines[-1]) == (3, "error: Expected `int`, got `str` - at `$.page_size`")
    status, lines = outcome(PLAIN, "--socket", str(tmp_path / ("x" * 120)))
    assert status == 3
    assert lines[-1].startswith("error: the path of the socket is too long for a Unix socket (107 bytes)")
    status, lines = outcome(PLAIN, "--socket", str(tmp_path / "missing" / "s"))
    assert status == 3
    assert "No such file or directory" in lines[-1]


def test_a_core_that_fails_ends_the_process_and_the_log_says_why(tmp_path: Path) -> None:
    code = HEAD + (
        "class Failing(ScriptedCore):\n"
        "    def has_work(self): return bool(self._live)\n"
        "    def step(self): raise RuntimeError('a page has two owners')\n"
        "raise SystemExit(main(load=lambda config: Failing(Script())))"
    )

    async def main() -> tuple[int, str, str]:
        path = tmp_path / "engine.sock"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, "--socket", str(path), stderr=asyncio.subprocess.PIPE
        )
        client = EngineClient(path)
        async with asyncio.timeout(30):
            await until_ready(process)
            await client.connect()
            ends: asyncio.Queue[object] = asyncio.Queue()
            client.submit("a", [1], SamplingParams(), on_progress=ends.put_nowait)
            end = await ends.get()
            _, log = await process.communicate()
        assert isinstance(end, EngineError)
        assert not path.exists()
        return await process.wait(), end.code, log.decode().splitlines()[-1]

    assert asyncio.run(main()) == (1, "engine_down", "error: RuntimeError: a page has two owners")


@pytest.mark.parametrize("orphan", ["worker", "scripted"])
def test_an_engine_ends_with_its_parent(orphan: str, tmp_path: Path) -> None:
    child: Sequence[str] = ["-c", PLAIN] if orphan == "worker" else ["-m", "engine.scripted"]
    nurse = f"import subprocess, sys; subprocess.run([sys.executable, *{list(child)!r}, *sys.argv[1:]])"

    async def main() -> int:
        async with worker(tmp_path / "engine.sock", "-c", nurse, parent=True) as client:
            assert client.welcome is not None
            return os.pidfd_open(client.welcome.pid)

    process = asyncio.run(main())
    ended, _, _ = select.select([process], [], [], 10)
    os.close(process)
    assert ended == [process]


def test_an_engine_whose_parent_is_gone_already_does_not_start(tmp_path: Path) -> None:
    status, _ = outcome(PLAIN, "--socket", str(tmp_path / "s"), "--parent", "999999999")
    assert status == 0
    assert list(tmp_path.iterdir()) == []


def test_only_its_own_socket_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    first = listen(path)
    old = path.stat().st_ino
    second = listen(path)
    remove(path, old)
    assert path.exists()
    remove(path, path.stat().st_ino)
    assert not path.exists()
    remove(path, old)
    first.close()
    second.close()


def test_the_real_model_is_served(model_path: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(resolve(str(model_path)))
    prompt = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    config = EngineConfig(model=str(model_path), threads=1, kv_memory_mib=64)

    async def main() -> None:
        path = tmp_path / "engine.sock"
        async with worker(path, "-m", "engine.worker", "--config", msgspec.json.encode(config).decode()) as bare:
            client = EngineClient(path, tokenizer)
            await client.connect()
            texts = []
            for request_id in ("a", "b"):
                params = SamplingParams(max_tokens=40, temperature=0.0, logprobs=2)
                generation = client.generate(
                    GenerateRequest(request_id=request_id, prompt_ids=prompt, params=params, n=2)
                )
                deltas = []
                while new := await generation.next():
                    deltas += new
                final = await generation.final()
                texts += ["".join(d.text for d in deltas if d.index == i) for i in range(2)]
                assert final.prompt == len(prompt)
                assert final.cached == (0 if request_id == "a" else (len(prompt) - 1) // 16 * 16)
                counted = sum(len(d.token_ids) for d in deltas)
                assert final.completion == counted + 2  # each answer ends with an end-of-sequence token
                assert sum(len(d.logprobs or []) for d in deltas) == counted
                assert {d.finish_reason for d in deltas if d.finish_reason} == {"stop"}
            assert len(set(texts)) == 1
            assert "Paris" in texts[0]

            endless = SamplingParams(max_tokens=2000, ignore_eos=True)
            long = client.generate(GenerateRequest(request_id="c", prompt_ids=prompt, params=endless))
            await long.next()
            long.abort()
            aborted = await long.final()
            usage = (await bare.usage(["a", "b#1", "c"])).known
            assert usage["c"].counters == aborted
            assert set(usage) == {"b#1", "c"}
            snapshot = await bare.snapshot()
            assert (snapshot.running, snapshot.waiting, snapshot.kv_pages_used) == (0, 0, 0)
            too_long = GenerateRequest(request_id="d", prompt_ids=prompt * 1000, params=SamplingParams())
            with pytest.raises(EngineError, match="over the context") as caught:
                await client.generate(too_long).next()
            assert caught.value.code == "too_long"
            assert bare.welcome is not None
            os.kill(bare.welcome.pid, signal.SIGTERM)
            await client.wait_lost()

    asyncio.run(main())
    assert not (tmp_path / "engine.sock").exists()
