"""The engine client: one connection from an event loop to an engine process, with any number of requests on it.

`submit` and `abort` speak in tokens and frames; `generate` (see generation.py) in text. Nothing here loads torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from engine.detokenizer import HasVocabulary
from engine.generation import EngineError, GenerateRequest, Generation
from engine.network import Caller, DeniedError, Endpoint, new_nonce, tune
from engine.sampling_params import SamplingParams
from engine.wire import (
    PROTOCOL,
    Abort,
    AdapterQuery,
    AdapterReply,
    ClientFrame,
    FrameReader,
    Progress,
    Refused,
    Rested,
    RestQuery,
    Snapshot,
    SnapshotQuery,
    Step,
    Submit,
    UsageQuery,
    UsageReply,
    Welcome,
    WireError,
    decode_engine,
    encode,
    pack_tokens,
)

OnProgress = Callable[[Progress | EngineError], None]
"""Told each Progress of a request in order; the last has a finish_reason or is an EngineError. It must not raise."""

Answer = UsageReply | Snapshot | Rested | AdapterReply
"""What the engine replies to a query."""


class Witness(Protocol):
    """Wants to know when news of several requests come together."""

    def begin(self) -> None:
        """They are about to be told, one request after the other."""

    def end(self) -> None:
        """All are told."""


UNSENT_LIMIT = 64 << 20
"""Bytes of requests that the engine may leave unread before new ones are refused."""


class EngineClient:
    """A connection to the engine at a socket. Belongs to one event loop; connect() may be called again after a loss."""

    def __init__(self, address: Path | str | Endpoint, tokenizer: HasVocabulary | None = None) -> None:
        """`address` is the path of a Unix socket, or an endpoint on a network. Without a tokenizer everything works but
        generate()."""
        self.address = address
        """Where the next connect() goes."""
        self.tokenizer = tokenizer
        self.witness: Witness | None = None
        """Told when one frame has news of several requests."""
        self.welcome: Welcome | None = None
        """The engine's greeting on the latest connection."""
        self._connection: _Connection | None = None
        self._listeners: dict[str, OnProgress] = {}
        self._aborts: dict[str, asyncio.Future[Progress]] = {}
        self._queries: dict[int, asyncio.Future[Answer]] = {}
        self._query_id = 0
        self._lost: asyncio.Event = asyncio.Event()
        self._lost.set()

    @property
    def connected(self) -> bool:
        """True between the engine's greeting and the end of the connection."""
        return self._connection is not None

    @property
    def live(self) -> int:
        """Requests submitted over this client that have not ended."""
        return len(self._listeners)

    async def connect(self, timeout_s: float = 10.0) -> Welcome:
        """Open the connection and wait for the greeting.

        Raises EngineError: "engine_down" when nobody answers in time, "protocol" when the engine speaks another one,
        "denied" when one side does not know the secret of an endpoint.
        """
        if self._connection is not None:
            raise RuntimeError("the client is connected already")
        loop = asyncio.get_running_loop()
        greeting: asyncio.Future[Welcome] = loop.create_future()
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(timeout_s):
                transport, connection = await self._open(loop, greeting)
                welcome = await greeting
        except DeniedError as error:
            raise EngineError("denied", str(error)) from error  # the connection has ended with it
        except (OSError, TimeoutError) as error:
            if transport is not None:
                transport.close()
            reason = str(error) or f"no answer within {timeout_s:g} s"
            raise EngineError("engine_down", f"cannot reach the engine: {reason}") from error
        except BaseException:  # a caller that was cancelled, too, leaves no connection open
            if transport is not None:
                transport.close()
            raise
        try:
            self._check(welcome)
            if self._connection is not None:
                raise RuntimeError("the client was connected twice at once")
            if connection.lost is not None:  # between its greeting and this line
                raise EngineError("engine_down", f"the engine has gone: {connection.lost}")
        except (EngineError, RuntimeError):
            connection.transport.abort()
            raise
        self._connection = connection
        self._lost.clear()
        self.welcome = welcome
        return welcome

    async def _open(
        self, loop: asyncio.AbstractEventLoop, greeting: asyncio.Future[Welcome]
    ) -> tuple[asyncio.BaseTransport, _Connection]:
        address = self.address
        if not isinstance(address, Endpoint):
            return await loop.create_unix_connection(lambda: _Connection(self, greeting), str(address))
        caller = Caller(address.secret, new_nonce())
        return await loop.create_connection(lambda: _Connection(self, greeting, caller), address.host, address.port)

    def _check(self, welcome: Welcome) -> None:
        if welcome.protocol != PROTOCOL:
            raise EngineError("protocol", f"the engine speaks protocol {welcome.protocol}, this client {PROTOCOL}")
        if self.tokenizer is not None and welcome.vocab_size > (known := len(self.tokenizer.vocabulary.all_bytes)):
            raise EngineError(
                "protocol", f"the engine's vocabulary of {welcome.vocab_size} is larger than the tokenizer's of {known}"
            )

    async def close(self) -> None:
        """Close the connection. Requests still live end with EngineError("engine_down"), and the engine aborts them."""
        if self._connection is not None:
            self._connection.transport.abort()
            await self._lost.wait()

    async def wait_lost(self) -> None:
        """Return when there is no connection (any more)."""
        await self._lost.wait()

    def generate(self, request: GenerateRequest) -> Generation:
        """Submit a request's n sequences and return the handle from which their text is read.

        Raises EngineError as submit() does; every later failure is raised by the Generation.
        """
        if self.tokenizer is None:
            raise RuntimeError("a client without a tokenizer cannot make text")
        return Generation.start(self, request, self.tokenizer)

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | bytes,
        params: SamplingParams,
        *,
        on_progress: OnProgress,
        priority: int = 0,
        salt: str = "",
        adapter: str = "",
        follows: bool = False,
    ) -> None:
        """Start one sequence, or take over the rest of one that the engine knows by this id. bytes are packed token
        ids.

        Raises EngineError: "engine_down" without a connection, "queue_full" when the engine does not take what is sent;
        "duplicate" when the id is live on this client. A refusal by the engine comes through on_progress.
        """
        if request_id in self._listeners:
            raise EngineError("duplicate", f"request {request_id} is running already")
        connection = self._connection
        if connection is not None and connection.transport.get_write_buffer_size() > UNSENT_LIMIT:
            raise EngineError("queue_full", "the engine does not keep up with what is sent to it")
        prompt = prompt_ids if isinstance(prompt_ids, bytes) else pack_tokens(prompt_ids)
        self._send(
            Submit(
                request_id=request_id,
                prompt=prompt,
                params=params,
                priority=priority,
                salt=salt,
                adapter=adapter,
                follows=follows,
            )
        )
        self._listeners[request_id] = on_progress

    def abort(self, request_id: str) -> asyncio.Future[Progress]:
        """End a sequence. The future's result is its last Progress, with final counters, however it ended.

        The future fails with EngineError when the connection is lost first; awaiting it may be cancelled only if
        shielded.
        """
        future = self._aborts.get(request_id)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            try:
                self._send(Abort(request_id))
            except EngineError as error:
                future.set_exception(error)
                future.exception()  # who does not ask is not interested: no "never retrieved" in the log
                return future
            self._aborts[request_id] = future
        return future

    async def usage(self, request_ids: Sequence[str]) -> UsageReply:
        """Ask for the counters of requests by id, live or ended, whichever connection they came over."""
        reply = await self._ask(lambda query_id: UsageQuery(query_id, list(request_ids)))
        assert isinstance(reply, UsageReply)
        return reply

    async def snapshot(self) -> Snapshot:
        """Ask for the engine's queues and gauges."""
        reply = await self._ask(SnapshotQuery)
        assert isinstance(reply, Snapshot)
        return reply

    async def rest(self, *, asleep: bool) -> Rested:
        """Have an engine without requests give back what memory it can, or take it again. Raises EngineError where it
        does not."""
        reply = await self._ask(lambda query_id: RestQuery(query_id, asleep))
        assert isinstance(reply, Rested)
        if reply.error:
            raise EngineError("engine_error", reply.error)
        return reply

    async def adapter(self, name: str, folder: str = "") -> list[str]:
        """Have the engine load an adapter from a folder that it can read, or with no folder unload it; requests that
        use it go on. Returns the names of those that are loaded. Raises EngineError, "invalid" with the reason where it
        was not done."""
        reply = await self._ask(lambda query_id: AdapterQuery(query_id, name, folder))
        assert isinstance(reply, AdapterReply)
        if reply.error:
            raise EngineError("invalid", reply.error)
        return reply.names

    async def _ask(self, query: Callable[[int], ClientFrame]) -> Answer:
        self._query_id += 1
        query_id = self._query_id
        self._send(query(query_id))
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = future
        try:
            return await future
        finally:
            self._queries.pop(query_id, None)

    def _send(self, frame: ClientFrame) -> None:
        if self._connection is None:
            raise EngineError("engine_down", "the engine is not running")
        self._connection.transport.write(encode(frame))

    def on_frame(self, body: bytes) -> None:
        """Route one frame from the engine. Raises WireError."""
        frame = decode_engine(body)
        if type(frame) is Step:  # nearly all are
            self._tell(frame.progress)
            return
        match frame:
            case Refused(request_id=request_id, code=code, message=message, retry_after_s=retry_after_s):
                listener = self._listeners.pop(request_id, None)
                if listener is not None:
                    listener(EngineError(code, message, retry_after_s))
            case UsageReply() | Snapshot() | Rested() | AdapterReply() as reply:
                future = self._queries.pop(reply.query_id, None)
                if future is not None and not future.done():
                    future.set_result(reply)
            case Welcome():
                raise WireError("a second greeting")

    def _tell(self, progress: Sequence[Progress]) -> None:
        witness = self.witness if len(progress) > 1 else None
        if witness is not None:
            witness.begin()
        try:
            listeners = self._listeners
            for said in progress:
                if said.finish_reason is not None:
                    self._ended(said)
                elif (listener := listeners.get(said.request_id)) is not None:
                    listener(said)
        finally:
            if witness is not None:
                witness.end()

    def _ended(self, said: Progress) -> None:
        future = self._aborts.pop(said.request_id, None)
        if future is not None and not future.done():
            future.set_result(said)
        listener = self._listeners.pop(said.request_id, None)
        if listener is not None:
            listener(said)

    def on_lost(self, connection: _Connection, reason: str) -> None:
        """The connection has ended: so has everything on it."""
        if connection is not self._connection:
            return
        self._connection = None
        error = EngineError("engine_down", f"the engine has gone: {reason}")
        listeners, self._listeners = self._listeners, {}
        aborts, self._aborts = self._aborts, {}
        queries, self._queries = self._queries, {}
        for listener in listeners.values():
            listener(error)
        waiting: list[asyncio.Future[Any]] = [*aborts.values(), *queries.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # see abort()
        self._lost.set()


class _Connection(asyncio.Protocol):
    """Cuts the stream into frames: the greeting resolves a future, the rest goes to the client."""

    transport: asyncio.Transport

    def __init__(self, client: EngineClient, greeting: asyncio.Future[Welcome], caller: Caller | None = None) -> None:
        """With a `caller`, the engine and this side prove to each other first that they know one secret."""
        self._client = client
        self._greeting = greeting
        self._caller = caller
        self._reader = FrameReader()
        self._reason = "the connection was closed"
        self.lost: str | None = None
        """Why the connection has ended; None while it has not."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are none by inheritance
        if self._caller is not None:
            tune(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        try:
            if self._caller is not None:
                answer = self._caller.feed(data)
                if answer is not None:
                    self.transport.write(answer)
                    return
                data, self._caller = self._caller.rest, None
            for body in self._reader.feed(data):
                if self._greeting.done():
                    self._client.on_frame(body)
                else:
                    self._greet(body)
        except WireError as error:
            self._reason = str(error)
            self.transport.abort()
        except DeniedError as error:
            if not self._greeting.done():  # by a caller that did not wait for it
                self._greeting.set_exception(error)
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = str(exc) if exc is not None else self._reason
        if not self._greeting.done():
            self._greeting.set_exception(ConnectionError(self.lost))
        self._client.on_lost(self, self.lost)

    def _greet(self, body: bytes) -> None:
        frame = decode_engine(body)
        if not isinstance(frame, Welcome):
            raise WireError("the first frame is not a greeting")
        self._greeting.set_result(frame)
