"""`headrace serve` as a process: first and second start, stopping, and everything that must not start."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from engine.script import Script
from engine.tokenizer import Tokenizer
from engine.weights.sources import ModelSource
from gateway.cli import main

START_S = 60.0


class Process:
    """One `headrace serve` with a scripted engine."""

    def __init__(self, data: Path, model: str, port: int, options: tuple[str, ...]) -> None:
        self.port = port
        argv = [sys.executable, "-m", "gateway.cli", "serve", "--port", str(port), "--data", str(data)]
        self.process = subprocess.Popen(
            [*argv, "--model", model, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._lines: list[str] = []
        self._ended = False
        self._heard = threading.Condition()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._heard:
                    self._lines.append(line)
                    self._heard.notify_all()
        with self._heard:
            self._ended = True
            self._heard.notify_all()

    @property
    def said(self) -> str:
        """Everything so far; everything at all once the process has ended."""
        if self.process.poll() is not None:
            self._listener.join(START_S)
        with self._heard:
            return "".join(self._lines)

    def until_said(self, words: str) -> None:
        """Return when it has said something. Fails when it ends before."""
        with self._heard:
            self._heard.wait_for(lambda: self._ended or any(words in line for line in self._lines), START_S)
        assert words in self.said, self.said

    def wait_ready(self) -> None:
        self.until_said("serves")

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(60)
        self._listener.join(START_S)
        return status

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            body: bytes = answer.read()
            return body


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Serve = Callable[..., Process]


@pytest.fixture
def serve(tmp_path: Path, tiny_model: ModelSource) -> Iterator[Serve]:
    """Starts gateways; all are stopped at the end."""
    reply = tuple(Tokenizer.load(tiny_model).encode("Paris. "))
    running: list[Process] = []

    def start(
        *options: str, script: dict[str, Any] | None = None, port: int = 0, data: str = "data", model: str = ""
    ) -> Process:
        described = {"tokens": 8, "reply": reply, "eos": 257, "vocab_size": 258, **(script or {})}
        text = msgspec.json.encode(Script(**described)).decode()
        engine = shlex.join([sys.executable, "-m", "engine.scripted", "--script", text])
        made = Process(
            tmp_path / data,
            model or str(tiny_model.path),
            port or free_port(),
            ("--engine-command", engine, *options),
        )
        running.append(made)
        return made

    yield start
    for one in running:
        one.stop(signal.SIGKILL)


def test_the_first_start_the_second_and_two_at_once(serve: Serve, tmp_path: Path) -> None:
    data = tmp_path / "data"
    first = serve()
    first.wait_ready()
    told = json.loads((data / "first-run.json").read_text())
    assert stat.S_IMODE((data / "first-run.json").stat().st_mode) == 0o600
    assert told["address"] == f"http://127.0.0.1:{first.port}" and told["base_url"] == told["address"] + "/v1"
    for secret in (told["admin_email"], told["admin_password"], told["api_key"]):
        assert secret in first.said
    assert json.loads(first.get("/readyz")) == {"status": "ready", "model": "tiny", "reasons": {}}
    # The printed curl line works as it is.
    (line,) = (line for line in first.said.splitlines() if line.startswith("curl "))
    words = shlex.split(line)
    headers = dict(words[i + 1].split(": ", 1) for i, word in enumerate(words) if word == "-H")
    request = urllib.request.Request(words[1], words[words.index("-d") + 1].encode(), headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert json.loads(answer.read())["choices"][0]["message"]["content"] == "Paris. "
    metrics = first.get("/metrics").decode()
    for name in (
        "headrace_time_to_first_token_seconds_bucket",
        "headrace_inter_token_latency_seconds_bucket",
        "headrace_request_duration_seconds_bucket",
        'headrace_tokens_total{kind="completion",model="tiny"} 8.0',
        'headrace_charged_nano_total{model="tiny"}',
        'headrace_engine_up{model="tiny"} 1.0',
        'headrace_engine_running{model="tiny"}',
        'headrace_engine_waiting{model="tiny"}',
        'headrace_engine_kv_pages_used{model="tiny"}',
        'headrace_engine_cached_tokens_total{model="tiny"}',
        'headrace_engine_restarts_total{model="tiny"} 0.0',
        'headrace_requests_total{route="/v1/chat/completions",status="200"} 1.0',
        "headrace_ready 1.0",
    ):
        assert name in metrics, name

    # Another process on the same data, and one on the same port, are refused; nothing happens to the first.
    second = serve()
    assert second.process.wait(START_S) == 1
    assert "another headrace is running on the data folder" in second.said
    third = serve(port=first.port, data="other")
    assert third.process.wait(START_S) == 1
    assert f"127.0.0.1:{first.port}" in third.said and "listens" in third.said
    assert json.loads(first.get("/healthz"))["status"] == "alive"

    assert first.stop() == 0
    again = serve()
    again.wait_ready()
    assert told["api_key"] not in again.said and told["admin_password"] not in again.said
    assert "first-run.json" in again.said
    assert json.loads((data / "first-run.json").read_text()) == told
    with openai.OpenAI(base_url=f"http://127.0.0.1:{again.port}/v1", api_key=told["api_key"]) as client:
        answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
    assert answer.choices[0].message.content == "Paris. "
    assert again.stop(signal.SIGINT) == 0
    audited = subprocess.run(
        [sys.executable, "-m", "gateway.cli", "audit", "--data", str(data)], capture_output=True, text=True, check=False
    )
    assert audited.returncode == 0, audited.stdout
    assert "I5   every request is charged once, for what its usage record says: 2 checked, ok" in audited.stdout


def test_sigterm_lets_streams_finish_and_takes_no_new_ones(serve: Serve, tmp_path: Path) -> None:
    house = serve("--drain-s", "20", script={"tokens": 60, "interval_ms": 20.0})
    house.wait_ready()
    key = json.loads((tmp_path / "data" / "first-run.json").read_text())["api_key"]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{house.port}/v1", api_key=key, max_retries=0) as client:
        stream = iter(
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], stream=True)
        )
        next(stream)
        house.process.send_signal(signal.SIGTERM)
        rest = list(stream)
    assert rest[-1].choices[0].finish_reason == "stop"
    assert house.stop() == 0
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", house.port)):
        pass


def test_streams_that_outlast_the_drain_end_with_an_error_free_of_charge(serve: Serve, tmp_path: Path) -> None:
    house = serve("--drain-s", "1", script={"tokens": 7000, "interval_ms": 50.0})
    house.wait_ready()
    key = json.loads((tmp_path / "data" / "first-run.json").read_text())["api_key"]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{house.port}/v1", api_key=key, max_retries=0) as client:
        stream = iter(
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], stream=True)
        )
        next(stream)
        house.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError):
            list(stream)
    assert house.stop() == 0
    audited = subprocess.run(
        [sys.executable, "-m", "gateway.cli", "audit", "--data", str(tmp_path / "data")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert audited.returncode == 0, audited.stdout


def test_a_mail_is_in_the_data_folder_and_its_link_in_the_log(serve: Serve, tmp_path: Path) -> None:
    house = serve("--public-url", "https://h.example", "--mail-from", "The House <house@h.example>")
    house.wait_ready()
    body = json.dumps({"name": "Ada", "email": "ada@example.com", "password": "correct horse battery"}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{house.port}/api/v1/users/register", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert json.loads(answer.read()) == {"accepted": True}
    until = time.monotonic() + START_S
    while "https://h.example/verify-email#token=" not in house.said:
        assert time.monotonic() < until and house.process.poll() is None, house.said
        try:
            house.process.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
    (letter,) = (tmp_path / "data" / "mail").iterdir()
    text = letter.read_text()
    assert "To: ada@example.com" in text and "From: The House <house@h.example>" in text
    assert house.said.split("#token=")[1].split()[0] in text and str(letter) in house.said
    assert house.stop() == 0 and "Traceback" not in house.said


def refused(house: Process) -> str:
    assert house.process.wait(START_S) == 1
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", house.port)):
        pass
    (line,) = (line for line in house.said.splitlines() if line.startswith("headrace: "))
    assert "Traceback" not in house.said
    return line


def test_an_engine_that_cannot_start_is_said_before_anything_listens(serve: Serve, tmp_path: Path) -> None:
    assert "the tensor is cut short" in refused(serve(script={"fail_start": "the tensor is cut short"}))
    assert not (tmp_path / "data" / "first-run.json").exists()  # the next start is still the first


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--smtp-url", "smtp://bob:hush@mail.example.com?tls=none"),
        ("--mail-from", "nobody"),
        ("--public-url", "headrace.example.com"),
    ],
)
def test_mail_that_could_not_leave_is_said_before_anything_listens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    assert main(["serve", "--data", str(tmp_path / "data"), option, value]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"headrace: {option} ")
    assert "hush" not in said.out + said.err and not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param("missing", marks=pytest.mark.slow),
        pytest.param("empty", marks=pytest.mark.slow),
        pytest.param("garbage", marks=pytest.mark.slow),
        "truncated",
    ],
)
def test_a_model_file_that_is_none_is_said_before_anything_listens(
    serve: Serve, tmp_path: Path, damage: str, request: pytest.FixtureRequest
) -> None:
    file = tmp_path / "broken.gguf"
    if damage == "empty":
        file.write_bytes(b"")
    elif damage == "garbage":
        file.write_bytes(os.urandom(5000))
    elif damage == "truncated":
        whole: Path = request.getfixturevalue("model_path")
        with whole.open("rb") as source:
            file.write_bytes(source.read(1_000_000))
    assert "broken.gguf" in refused(serve(model=str(file)))


def test_a_stop_during_the_start_is_clean(serve: Serve) -> None:
    house = serve(script={"start_ms": 60_000.0})
    house.until_said("Loading")
    assert house.stop() == 0
    assert "Traceback" not in house.said
