"""The response side of an answer: writes what its actor produced, notices that the client has left, decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from gateway.inference.answer import Answer
from gateway.inference.http import ClientGone, Exchange, Receive
from gateway.inference.outbox import Outbox
from gateway.inference.sinks import BodySink, StreamSink
from gateway.inference.sse import KEEP_ALIVE


async def respond_body(exchange: Exchange, answer: Answer, render: Callable[[BodySink, dict[str, Any]], bytes]) -> None:
    """Wait for the whole answer and send it. Raises ApiError when it failed, ClientGone."""
    watch = asyncio.create_task(_watch(exchange.receive, answer))
    try:
        await asyncio.shield(answer.over)
    except asyncio.CancelledError:
        answer.abandon("server_fault")  # only the gateway's own shutdown cancels a response
        raise
    finally:
        watch.cancel()
    if answer.error is not None:
        raise answer.error
    if answer.abandoned:
        raise ClientGone
    assert isinstance(answer.sink, BodySink)
    cost = (b"x-cost-nanousd", b"%d" % answer.cost)
    await exchange.json(200, render(answer.sink, answer.usage), (cost,))


async def respond_stream(exchange: Exchange, answer: Answer, slow_client_s: float, keep_alive_s: float) -> None:
    """Send the head with the first bytes and then whatever comes.

    Raises ApiError when the answer failed before there was anything to send, ClientGone.
    """
    assert isinstance(answer.sink, StreamSink)
    outbox = answer.sink.outbox
    watch = asyncio.create_task(_watch(exchange.receive, answer))
    guard = _Guard(exchange, answer, outbox, slow_client_s, keep_alive_s)
    try:
        data, more = await outbox.take()
        if answer.abandoned:
            raise ClientGone
        if not data and answer.error is not None:
            raise answer.error
        await exchange.start_stream()
        while True:
            guard.sending()
            await exchange.send({"type": "http.response.body", "body": data, "more_body": more})
            guard.sent()
            if not more:
                return
            data, more = await outbox.take()
            if answer.abandoned:
                raise ClientGone
    except asyncio.CancelledError:
        answer.abandon("server_fault")  # only the gateway's own shutdown cancels a response
        raise
    except OSError as error:  # servers other than uvicorn say so when they write to a client that has left
        answer.abandon("disconnected")
        raise ClientGone from error
    finally:
        guard.stop()
        watch.cancel()


async def _watch(receive: Receive, answer: Answer) -> None:
    """Abandon the answer when the client hangs up; an engine that is silent would not show it otherwise."""
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.abandon("disconnected")


class _Guard:
    """One timer per stream: speaks up when there is nothing to say, cuts a client that does not read."""

    def __init__(
        self, exchange: Exchange, answer: Answer, outbox: Outbox, slow_client_s: float, keep_alive_s: float
    ) -> None:
        self._exchange = exchange
        self._answer = answer
        self._outbox = outbox
        self._slow_client_s = slow_client_s
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._blocked_at: float | None = None
        self._spoke_at = self._loop.time()
        self._timer = self._arm(min(slow_client_s, keep_alive_s))

    def sending(self) -> None:
        """A send begins; it ends when the client has room for more."""
        self._blocked_at = self._loop.time()

    def sent(self) -> None:
        """The send ended."""
        self._blocked_at = None
        self._spoke_at = self._loop.time()

    def stop(self) -> None:
        """The response is over."""
        self._timer.cancel()

    def _arm(self, seconds: float) -> asyncio.TimerHandle:
        return self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        if self._blocked_at is not None:
            left = self._blocked_at + self._slow_client_s - now
            if left <= 0:
                self._answer.abandon("disconnected")
                self._outbox.close()
                self._exchange.cut()
                return
            self._timer = self._arm(left)
            return
        left = self._spoke_at + self._keep_alive_s - now
        if left <= 0:
            if self._answer.durable:
                self._outbox.put(KEEP_ALIVE)
            self._spoke_at = now
            left = self._keep_alive_s
        self._timer = self._arm(min(left, self._slow_client_s))
