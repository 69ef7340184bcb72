"""The node's side of the conversation: it calls the server over HTTP(S), and nobody calls it."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TypeVar

import httpx2
import msgspec

from marketplace.agent.credentials import Credentials
from marketplace.agent.wire import (
    PREFIX,
    Accepted,
    Metrics,
    Poll,
    Polled,
    Ready,
    Register,
    Registered,
    Shutdown,
)
from marketplace.relay.access import RelayAnswer, RelayGrant, Relaying

_log = logging.getLogger(__name__)
_ANSWER_S = 30.0
_LOGIN = "/api/v1/auth/login"

T = TypeVar("T")


class ServerError(Exception):
    """The server did not do what it was asked."""


class UnreachableError(ServerError):
    """There was no answer, or one that promises that another time it may work."""


class StaleSessionError(ServerError):
    """The session is over: register again."""


class RefusedError(ServerError):
    """The server refuses, and will again. `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        """`message` is the server's own."""
        super().__init__(f"{status}: {message}")
        self.status = status


class _Problem(msgspec.Struct, frozen=True):
    code: str = ""
    message: str = ""


class _Problems(msgspec.Struct, frozen=True):
    error: _Problem = _Problem()


class _Login(msgspec.Struct, frozen=True):
    token: str = ""
    partial_token: str = ""


class ServerClient:
    """One server, one credential."""

    def __init__(
        self, url: str, credentials: Credentials, *, transport: httpx2.AsyncBaseTransport | None = None
    ) -> None:
        """`url` is the server's address; `transport` stands in for the network."""
        self._url = url
        self._credentials = credentials
        self._headers = credentials.headers()
        self._http = httpx2.AsyncClient(base_url=url, transport=transport, timeout=_ANSWER_S)

    async def __aenter__(self) -> ServerClient:
        """Nothing is sent yet."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def register(self, message: Register) -> Registered:
        """Begin a session. A deprecated way of signing in is warned of each time, by us and by the server."""
        warning = self._credentials.deprecated
        if warning is not None:
            _log.warning("%s", warning)
        if not self._credentials.headers():
            await self._sign_in()
        begun = await self._call("register", message, Registered)
        for warning in begun.warnings:
            _log.warning("the server: %s", warning)
        return begun

    async def poll(self, message: Poll, *, wait_s: float) -> Polled:
        """Report, and hear what is new. The answer may take `wait_s`."""
        return await self._call("poll", message, Polled, wait_s=wait_s)

    async def ready(self, message: Ready) -> None:
        """Say that an instance is ready."""
        await self._call("ready", message, Accepted)

    async def metrics(self, message: Metrics) -> None:
        """Send samples."""
        await self._call("metrics", message, Accepted)

    async def relay(self, message: Relaying) -> RelayGrant | None:
        """Ask for a grant for the relay; None where there is no relay."""
        return (await self._call("relay", message, RelayAnswer)).access

    async def shutdown(self, message: Shutdown) -> None:
        """Say goodbye."""
        await self._call("shutdown", message, Accepted)

    async def _call(self, name: str, message: msgspec.Struct, answer: type[T], *, wait_s: float = 0.0) -> T:
        headers = {"Content-Type": "application/json", **self._headers}
        timeout = httpx2.Timeout(_ANSWER_S, read=_ANSWER_S + wait_s)
        content = msgspec.json.encode(message)
        try:
            got = await self._http.post(PREFIX + name, content=content, headers=headers, timeout=timeout)
        except httpx2.TransportError as error:
            raise UnreachableError(f"{self._url}: {type(error).__name__}: {error}") from error
        if got.status_code == 200:
            return _read(got.content, answer)
        raise _problem(got)

    async def _sign_in(self) -> None:
        """Exchange the password for a token."""
        body = {"email": self._credentials.email, "password": self._credentials.password}
        try:
            got = await self._http.post(_LOGIN, json=body)
        except httpx2.TransportError as error:
            raise UnreachableError(f"{self._url}: {type(error).__name__}: {error}") from error
        if got.status_code != 200:
            raise _problem(got)
        login = _read(got.content, _Login)
        if login.partial_token:
            raise RefusedError(
                401, "the account has a second factor, which a node cannot give: make a key of kind node"
            )
        self._headers = {"Authorization": f"Bearer {login.token}"}


def _read(content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise UnreachableError(f"the answer cannot be read: {error}") from error


def _problem(got: httpx2.Response) -> ServerError:
    try:
        problem = msgspec.json.decode(got.content, type=_Problems).error
    except msgspec.MsgspecError:
        problem = _Problem(message=got.reason_phrase)
    if got.status_code == 409 and problem.code == "StaleSession":
        return StaleSessionError(problem.message)
    if got.status_code >= 500 or got.status_code in (408, 425, 429):
        return UnreachableError(f"{got.status_code}: {problem.message}")
    return RefusedError(got.status_code, problem.message)
