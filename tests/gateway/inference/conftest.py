"""A whole gateway on a real socket, with a scripted engine behind it and a small byte-level tokenizer."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import openai
import pytest

from engine.config import EngineConfig
from engine.script import Script
from engine.scripted import ScriptedEngine
from engine.tokenizer import Tokenizer
from engine.weights.sources import ModelSource
from gateway.app import Gateway, wall_us
from gateway.bootstrap import Prepared, PriceTag, prepare
from gateway.fleet.offers import Served, offers_of
from gateway.fleet.replicas import Replica, State
from gateway.metering.clerk import ProcessClerk
from gateway.server import FrontServer, bind, make_server
from gateway.settings import Settings
from marketplace.ledger.audit import audit
from marketplace.store.db import Database

MODEL = "tiny"
T = TypeVar("T")
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Without the world's certificates, which take a tenth of a second to read"""


EOS = 257


class StandIn(Replica):
    """A replica whose engine runs elsewhere in the test."""

    def launch(self) -> None:
        self._become(State.STARTING)

    async def ready(self, *, once: bool = False) -> None:
        await self.client.connect()
        self._become(State.READY)

    async def stop(self, drain_s: float | None = None) -> None:
        await self.client.close()
        self._become(State.STOPPED)

    def lost(self) -> None:
        """The supervisor noticed that the engine has gone."""
        self._become(State.DOWN)


class Reply(NamedTuple):
    """One whole response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def refusal(self) -> tuple[int, str]:
        """Status and code of an error, whose shape is checked."""
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code", "request_id"}
        assert self.headers["content-type"] == "application/json"
        assert self.headers["x-request-id"] == error["request_id"]
        assert self.headers["openai-version"] and self.headers["openai-processing-ms"].isdigit()
        return self.status, error["code"]


class House:
    """One gateway in a thread of its own."""

    def __init__(
        self, settings: Settings, prepared: Prepared, source: ModelSource, script: Script, *, clerk: bool
    ) -> None:
        """clerk: the ledger is written by a process of its own, as where a gateway really runs; by a thread, which
        starts in no time, otherwise."""
        assert prepared.first is not None
        self.settings = settings
        self.first = prepared.first
        self.key = prepared.first.api_key
        self.database_url = settings.database
        self.source = source
        self.engine: ScriptedEngine
        self.gateway: Gateway
        self.server: FrontServer
        self.engines: list[ScriptedEngine]
        """One for each replica of each model; the first is `engine`."""
        self.replicas: list[StandIn] = []
        self._prepared = prepared
        self._script = script
        self._clerk = ProcessClerk if clerk else None
        self._folder = Path(tempfile.mkdtemp(prefix="hr-"))
        self._listener = bind("127.0.0.1", 0)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        self.port: int = self._listener.getsockname()[1]
        self._loop: asyncio.AbstractEventLoop
        self._up = threading.Event()
        self._failure: BaseException | None = None
        self._clients: list[openai.OpenAI] = []
        self._thread = threading.Thread(target=self._run, name="house", daemon=True)
        self._thread.start()
        assert self._up.wait(20), "the gateway did not start"
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # handed to the thread that waits
            self._failure = error
        finally:
            self._up.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        names = [MODEL, *self.settings.more_models]
        served = [
            Served(name=name, source=self.source, offer=offer)
            for name, offer in zip(names, offers_of(self.settings), strict=True)
        ]
        paths = {
            (one.name, index): self._folder / f"{one.name}-{index}.sock"
            for one in served
            for index in range(one.offer.replicas)
        }
        self.engines = [ScriptedEngine(path, self._script) for path in paths.values()]
        self.engine = self.engines[0]
        for engine in self.engines:
            await engine.start()

        def replica(one: Served, index: int, tokenizer: Tokenizer) -> Replica:
            path = paths[one.name, index]
            made = StandIn(EngineConfig(), socket_path=path, log_path=self._folder / "log", tokenizer=tokenizer)
            self.replicas.append(made)
            return made

        self.gateway = Gateway(self.settings, served, replica=replica, clerk=self._clerk)
        try:
            self.gateway.launch()
            await self.gateway.start(self._prepared)
            self.server = make_server(self.gateway.app(), backlog=100, drain_s=2, burst=self.gateway.burst)
            self.server.on_listening = self._up.set
            await self.server.serve(sockets=[self._listener])
        finally:
            await self.gateway.stop()
            for engine in self.engines:
                await engine.stop()

    @property
    def replica(self) -> StandIn:
        """The first replica."""
        return self.replicas[0]

    def do(self, function: Callable[[], T]) -> T:
        """Run a function on the gateway's loop."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result(10)

    def limits(self, **values: Any) -> None:
        """Change limits of the running gateway."""
        services = self.gateway.services
        self.do(lambda: setattr(services, "limits", msgspec.structs.replace(services.limits, **values)))

    def script(self, **values: Any) -> None:
        """Change what the engine does with new requests."""
        for core in [engine.core for engine in self.engines]:
            self.do(lambda core=core: setattr(core, "script", msgspec.structs.replace(core.script, **values)))  # type: ignore[misc]

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client."""
        options = {"api_key": self.key, "max_retries": 0, "timeout": 20.0, **options}
        http = openai.DefaultHttpxClient(verify=NO_TLS)
        made = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", http_client=http, **options)
        self._clients.append(made)
        return made

    def connect(self, receive_buffer: int = 0) -> socket.socket:
        """A raw connection."""
        raw = socket.socket()
        if receive_buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.settimeout(20)
        raw.connect(("127.0.0.1", self.port))
        return raw

    def head(self, method: str = "POST", path: str = "/v1/chat/completions", length: int | None = None) -> bytes:
        """A request head with the key."""
        lines = [f"{method} {path} HTTP/1.1", "host: x", f"authorization: Bearer {self.key}"]
        if length is not None:
            lines.append(f"content-length: {length}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n"

    def request(self, body: Any, path: str = "/v1/chat/completions", method: str = "POST") -> bytes:
        """A whole request with the key."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.head(method, path, len(data)) + data

    @staticmethod
    def headed(*headers: str, method: str = "POST", path: str = "/v1/chat/completions", body: bytes = b"{}") -> bytes:
        """A request with exactly these headers."""
        lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body

    @staticmethod
    def read(raw: socket.socket, buffer: bytearray | None = None) -> Reply:
        """One response with a content-length; what follows it stays in the buffer."""
        buffer = bytearray() if buffer is None else buffer
        while b"\r\n\r\n" not in buffer:
            data = raw.recv(65536)
            assert data, f"closed after {bytes(buffer)!r}"
            buffer += data
        head, _, _ = bytes(buffer).partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        end = len(head) + 4 + int(headers["content-length"])
        while len(buffer) < end:
            data = raw.recv(65536)
            assert data
            buffer += data
        body = bytes(buffer[len(head) + 4 : end])
        del buffer[:end]
        return Reply(int(lines[0].split()[1]), headers, body)

    def ask(self, request: bytes) -> Reply:
        """One request on a connection of its own."""
        with self.connect() as raw:
            raw.sendall(request)
            return self.read(raw)

    def eventually(self, condition: Callable[[], bool], what: str, limit_s: float = 10.0) -> None:
        """Wait until a condition holds on the gateway's loop."""
        until = time.monotonic() + limit_s
        pause = threading.Event()
        while not self.do(condition):
            assert time.monotonic() < until, f"it never came to be that {what}"
            pause.wait(0.005)

    def money(self, account: str) -> int:
        """What an account may spend as far as the gateway knows; 0 while it has not heard of it. On the loop only."""
        purse = self.gateway.metering.purses.get(account)
        return 0 if purse is None else purse.available

    def idle(self) -> None:
        """Wait until every request has ended, its settlement is in the ledger and the engine has nothing to do."""
        services, metering = self.gateway.services, self.gateway.metering
        stats = metering.meter.stats
        self.eventually(
            lambda: (
                not services.answers
                and stats.opened == stats.settled + stats.voided + stats.lost_holds
                and metering.journal.next_seq - 1 == metering.settler.applied_seq
                and not any(r.client.connected and e.sessions.live for r, e in zip(self.replicas, self.engines))
            ),
            "everything has ended",
        )

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows of the ledger."""
        from sqlalchemy import create_engine, text

        engine = create_engine(self.database_url)
        try:
            with engine.connect() as connection:
                return [tuple(row) for row in connection.execute(text(sql))]
        finally:
            engine.dispose()

    def usage(self) -> list[tuple[Any, ...]]:
        """(outcome, billable, prompt, cached, completion, cost, reason) of every request, in order."""
        self.idle()
        return self.rows(
            "SELECT outcome, billable, prompt, cached, completion, cost, reason FROM usage_record ORDER BY at"
        )

    def close(self) -> None:
        """Stop, and prove that nothing is wrong with the books."""
        for client in self._clients:
            client.close()
        if self._thread.is_alive():
            self.idle()
            self.do(lambda: setattr(self.server, "should_exit", True))
            self._thread.join(20)
            assert not self._thread.is_alive()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._failure is not None:
            raise self._failure
        database = Database(self.database_url)
        with database.read() as unit:
            report = audit(unit, now=wall_us())
        database.close()
        assert report.clean, "\n".join(report.lines())
        assert self.rows("SELECT coalesce(sum(held), 0) FROM account") == [(0,)]


@pytest.fixture(scope="session")
def tokenizer(tiny_model: ModelSource) -> Tokenizer:
    """The small tokenizer."""
    return Tokenizer.load(tiny_model)


MakeHouse = Callable[..., House]


@pytest.fixture(scope="session")
def house_maker(quick_folder: Path, _template: Path, tiny_model: ModelSource, tokenizer: Tokenizer) -> MakeHouse:
    """Makes gateways; the caller closes them."""

    def make(script: dict[str, Any] | None = None, *, clerk: bool = False, **settings: Any) -> House:
        data = Path(tempfile.mkdtemp(dir=quick_folder))
        shutil.copyfile(_template, data / "headrace.db")
        chosen = Settings(data=data, **settings)
        tags = [PriceTag(name) for name in (MODEL, *chosen.more_models)] if chosen.more_models else []
        prepared = prepare(chosen, MODEL, "http://127.0.0.1:1", clock=wall_us, tags=tags)
        reply = tuple(tokenizer.encode("Hello, wörld! "))
        described: dict[str, Any] = {"model": MODEL, "tokens": 32, "reply": reply, "eos": EOS, "vocab_size": 258}
        return House(chosen, prepared, tiny_model, Script(**{**described, **(script or {})}), clerk=clerk)

    return make


@pytest.fixture
def make_house(house_maker: MakeHouse) -> Iterator[MakeHouse]:
    """Makes gateways for one test; all are closed and audited at its end."""
    made: list[House] = []

    def make(*args: Any, **options: Any) -> House:
        made.append(house_maker(*args, **options))
        return made[-1]

    yield make
    for house in made:
        house.close()
        shutil.rmtree(house.settings.data)


@pytest.fixture(scope="module")
def shared(house_maker: MakeHouse) -> Iterator[House]:
    """One gateway for all tests of a file that leave it as they found it; audited at the end."""
    house = house_maker()
    yield house
    house.close()
