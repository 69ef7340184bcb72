"""Engines on a network: both sides prove that they know the secret, and nobody else gets anywhere."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from engine.client import EngineClient
from engine.generation import EngineError, GenerateRequest
from engine.network import (
    LARGEST_OPENING,
    SECRET_VARIABLE,
    Caller,
    DeniedError,
    Endpoint,
    Gate,
    listen_at,
    new_nonce,
    read_address,
    read_secret,
    shown,
)
from engine.process import LISTENING
from engine.sampling_params import SamplingParams
from engine.script import Script
from engine.wire import WireError
from tests.engine.byte_tokenizer import ByteTokenizer
from tests.engine.processes import WORKER, everything, run

SECRET = b"a secret of 24 characters"


def test_both_sides_prove_themselves_whatever_the_split_of_the_stream() -> None:
    gate, caller = Gate(SECRET, new_nonce()), Caller(SECRET, new_nonce())
    response = b"".join(said for byte in gate.challenge if (said := caller.feed(bytes([byte]))))
    opened = [gate.feed(bytes([byte])) for byte in response]
    assert opened[:-1] == [None] * (len(response) - 1)
    accepted = opened[-1]
    assert accepted is not None
    assert [caller.feed(bytes([byte])) for byte in accepted[:-1]] == [b""] * (len(accepted) - 1)
    assert caller.feed(accepted[-1:] + b"what follows") is None
    assert caller.rest == b"what follows"
    assert SECRET not in gate.challenge + response + accepted


def test_a_wrong_secret_is_noticed_by_both_sides() -> None:
    gate, caller = Gate(SECRET, new_nonce()), Caller(b"another secret, as long", new_nonce())
    response = caller.feed(gate.challenge)
    assert response
    with pytest.raises(DeniedError, match="the secret is wrong"):
        gate.feed(response)
    honest = Gate(b"another secret, as long", new_nonce())
    impostor = Gate(SECRET, new_nonce())
    caller = Caller(SECRET, new_nonce())
    response = caller.feed(impostor.challenge)
    assert response
    other = honest.feed(Caller(b"another secret, as long", new_nonce()).feed(honest.challenge) or b"")
    assert other
    with pytest.raises(DeniedError, match="who listens there does not know the secret"):
        caller.feed(other)


def test_a_response_serves_for_one_connection_and_is_no_proof_of_the_engine() -> None:
    gate, caller = Gate(SECRET, new_nonce()), Caller(SECRET, new_nonce())
    response = caller.feed(gate.challenge) or b""
    assert gate.feed(response)
    with pytest.raises(DeniedError):
        Gate(SECRET, new_nonce()).feed(response)
    with pytest.raises(WireError):
        caller.feed(response)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", LARGEST_OPENING + 1),
        struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
        struct.pack("<I", 0),
    ],
)
def test_what_is_no_opening_is_refused_at_once(said: bytes) -> None:
    with pytest.raises(WireError):
        Gate(SECRET, new_nonce()).feed(said)
    with pytest.raises(WireError):
        Caller(SECRET, new_nonce()).feed(said)


def test_nothing_may_be_sent_along_with_a_response() -> None:
    gate = Gate(SECRET, new_nonce())
    response = Caller(SECRET, new_nonce()).feed(gate.challenge) or b""
    with pytest.raises(WireError, match="does not answer the challenge"):
        gate.feed(response + b"x")


def test_addresses_are_read_and_shown() -> None:
    for text, read in (("10.0.0.1:7000", ("10.0.0.1", 7000)), ("[fd00::1]:0", ("fd00::1", 0)), ("n:1", ("n", 1))):
        assert read_address(text) == read
        assert shown(*read) == text
    for wrong in ("10.0.0.1", "10.0.0.1:", ":7000", "fd00::1:7000", "h:65536", "h:-1", "h:²", "[]:1"):
        with pytest.raises(ValueError, match=r"65535|is not an address"):
            read_address(wrong)
    with pytest.raises(OSError, match=r"cannot listen at 203\.0\.113\.1:9"):
        listen_at("203.0.113.1", 9)
    assert "secret" not in repr(Endpoint("h", 1, SECRET))


def test_the_secret_is_taken_out_of_the_environment_and_must_be_one() -> None:
    environment = {SECRET_VARIABLE: SECRET.decode()}
    assert read_secret(environment) == SECRET
    assert environment == {}
    for missing in ({}, {SECRET_VARIABLE: "short"}):
        with pytest.raises(ValueError, match="needs a secret of at least 16 characters in HEADRACE_ENGINE_SECRET"):
            read_secret(missing)


class Served(NamedTuple):
    """A worker that listens on the network and at a socket, and hurries strangers."""

    endpoint: Endpoint
    path: Path
    log: Path

    def call(self) -> socket.socket:
        return socket.create_connection((self.endpoint.host, self.endpoint.port), timeout=20)


@contextlib.contextmanager
def worker(folder: Path, *options: str) -> Iterator[Served]:
    path, log = folder / "engine.sock", folder / "engine.log"
    script = msgspec.json.encode(Script(vocab_size=256, tokens=20)).decode()
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-c", WORKER, "--socket", path, "--listen", "127.0.0.1:0", *options, script],
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, SECRET_VARIABLE: SECRET.decode()},
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline().decode().strip()
            assert line.startswith(LISTENING), log.read_text()
            yield Served(Endpoint(*read_address(line.removeprefix(LISTENING)), SECRET), path, log)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with worker(tmp_path_factory.mktemp("network"), "--stranger-s", "0.3") as it:
        yield it


def test_one_engine_answers_at_its_socket_and_over_the_network(served: Served) -> None:
    async def scene() -> None:
        told = []
        addresses: list[Path | Endpoint] = [served.path, served.endpoint]
        for number, address in enumerate(addresses):
            client = EngineClient(address, ByteTokenizer())
            welcome = await client.connect()
            request = GenerateRequest(request_id=f"r{number}", prompt_ids=[1, 2, 3], params=SamplingParams())
            deltas = await everything(client.generate(request))
            ids = [token for delta in deltas for token in delta.token_ids]
            told.append((welcome.epoch, len(ids), deltas[-1].finish_reason))
            await client.close()
        assert told[0] == told[1]
        assert told[0][1:] == (16, "length")

    assert run(scene)


def test_a_wrong_secret_is_refused_by_name_and_the_engine_serves_on(served: Served) -> None:
    async def scene() -> None:
        wrong = EngineClient(msgspec.structs.replace(served.endpoint, secret=b"x" * 16), ByteTokenizer())
        with pytest.raises(EngineError, match="the engine does not let us in: the secret is wrong") as caught:
            await wrong.connect()
        assert caught.value.code == "denied"
        assert not wrong.connected
        client = EngineClient(served.endpoint)
        await client.connect()
        assert (await client.snapshot()).running == 0
        await client.close()

    assert run(scene)
    assert "dropped a connection: the secret is wrong" in served.log.read_text()


def until_closed(sock: socket.socket) -> bytes:
    """All that is said until the other side closes."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            said += data
    return said


def test_who_says_something_else_or_nothing_is_cut_off(served: Served) -> None:
    """And has been told the challenge, nothing of the engine."""
    challenge = len(Gate(SECRET, new_nonce()).challenge)
    for words in (b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", 1 << 30), b"", b"\x01"):
        with served.call() as sock:
            sock.sendall(words)
            assert len(until_closed(sock)) in (0, challenge), words
    assert "it has not proved itself within 0.3 s" in served.log.read_text()


def test_strangers_are_few_and_a_client_is_none(tmp_path: Path) -> None:
    """Of more than 64 the oldest has to go, long before its time; who has proved itself stays."""

    async def scene() -> None:
        with worker(tmp_path, "--stranger-s", "600") as served, contextlib.ExitStack() as calls:
            client = EngineClient(served.endpoint)
            await client.connect()
            first, *_ = [calls.enter_context(served.call()) for _ in range(65)]
            until_closed(first)
            assert (await client.snapshot()).running == 0
            second = EngineClient(served.endpoint)
            await second.connect()
            await second.close()
            await client.close()

    assert run(scene)


def test_a_worker_without_a_secret_or_anywhere_to_listen_does_not_start() -> None:
    bare = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
    for options, status, said in (
        (["--listen", "127.0.0.1:0"], 3, "error: --listen needs a secret"),
        ([], 2, "give --socket, --listen or both"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", WORKER, *options, "{}"], capture_output=True, text=True, env=bare, check=False
        )
        assert (done.returncode, said in done.stderr) == (status, True), done.stderr
