"""The response side of an answer: opens it onto the client's connection, notices that the client has left, decides
nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from gateway.inference.answer import Answer
from gateway.inference.http import ClientGone, Exchange
from gateway.inference.outbox import Outbox
from gateway.inference.sinks import BodySink, StreamSink
from gateway.inference.sse import KEEP_ALIVE


async def respond_body(
    exchange: Exchange,
    answer: Answer,
    render: Callable[[BodySink, dict[str, Any]], bytes],
    threads: Executor | None = None,
) -> None:
    """Wait for the whole answer and send it, rendered in one of the threads where it is large. Raises ApiError when it
    failed, ClientGone."""
    _watch(exchange, answer)
    try:
        await asyncio.shield(answer.over)
    except asyncio.CancelledError:
        answer.abandon("server_fault")  # only the gateway's own shutdown cancels a response
        raise
    finally:
        exchange.turn.leave()
    if answer.error is not None:
        raise answer.error
    if answer.abandoned:
        raise ClientGone
    assert isinstance(answer.sink, BodySink)
    cost = (b"x-cost-nanousd", b"%d" % answer.cost)
    if threads is None:
        body = render(answer.sink, answer.usage)
    else:
        body = await asyncio.get_running_loop().run_in_executor(threads, render, answer.sink, answer.usage)
    await exchange.json(200, body, (cost,))


async def respond_stream(exchange: Exchange, answer: Answer, slow_client_s: float, keep_alive_s: float) -> None:
    """Send the head with the first bytes, let the answer write to the connection, and end the response with its last.

    Raises ApiError when the answer failed before there was anything to send, ClientGone.
    """
    assert isinstance(answer.sink, StreamSink)
    outbox, turn = answer.sink.outbox, exchange.turn
    _watch(exchange, answer)
    guard = _Guard(exchange, answer, outbox, slow_client_s, keep_alive_s)
    exchange.prepare_stream()
    outbox.open(turn, exchange.start_stream)
    try:
        last = await outbox.closed()
        if answer.abandoned:
            raise ClientGone
        if not turn.begun:
            if answer.error is not None:
                raise answer.error
            exchange.start_stream()
        turn.end(last)
    except asyncio.CancelledError:
        answer.abandon("server_fault")  # only the gateway's own shutdown cancels a response
        raise
    finally:
        guard.stop()
        turn.leave()


def _watch(exchange: Exchange, answer: Answer) -> None:
    """Give the answer up when its client leaves, or has left while it was admitted."""
    exchange.turn.on_lost = lambda: answer.abandon("disconnected")
    if exchange.turn.gone:
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
        self._every_s = min(slow_client_s, keep_alive_s) / 4
        self._loop = asyncio.get_running_loop()
        self._writes = 0
        self._spoke_at = self._loop.time()
        self._timer = self._loop.call_later(self._every_s, self._look)

    def stop(self) -> None:
        """The response is over."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        full_since = self._exchange.turn.full_since
        if full_since is not None:
            if now - full_since >= self._slow_client_s:
                self._answer.abandon("disconnected")
                self._exchange.turn.abort()
                return
        elif self._outbox.writes != self._writes:
            self._writes, self._spoke_at = self._outbox.writes, now
        elif now - self._spoke_at >= self._keep_alive_s:
            self._spoke_at = now
            if self._answer.durable:
                self._outbox.put(KEEP_ALIVE)
        self._timer = self._loop.call_later(self._every_s, self._look)
