"""Fetching what a renter's address names, without lending the node's place in the network to the renter."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import socket
from collections.abc import Callable
from typing import BinaryIO
from urllib.parse import SplitResult, urljoin, urlsplit, urlunsplit

import httpx2

from marketplace.agent.drivers.base import DriverError

_REDIRECTS = 5
_CONNECT_S = 15.0
_READ_S = 60.0
_CHUNK = 1 << 20


def bad(message: str) -> DriverError:
    """The error of an image that cannot be used."""
    return DriverError("BadImage", message)


class Fetcher:
    """Downloads over HTTP and HTTPS."""

    def __init__(self, *, private: bool = False, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        """`private` allows addresses that are not public; `transport` stands in for the network."""
        self._private = private
        self._transport = transport

    async def fetch(self, url: str, into: BinaryIO, reserve: Callable[[int], None]) -> str:
        """Write what the address answers to a file; return its SHA-256.

        `reserve` is told how many bytes are needed in all as soon as that is known, and as the file grows; what it
        raises ends the download. Raises DriverError in words for the renter.
        """
        timeout = httpx2.Timeout(_READ_S, connect=_CONNECT_S)
        client = httpx2.AsyncClient(transport=self._transport, timeout=timeout, trust_env=False)
        async with client:
            try:
                for _ in range(_REDIRECTS + 1):
                    await self._check(url)
                    async with client.stream("GET", url, follow_redirects=False) as answer:
                        if answer.is_redirect:
                            url = _onward(url, answer.headers["location"])
                            continue
                        return await _save(url, answer, into, reserve)
            except httpx2.TimeoutException as error:
                raise bad(f"The image at {shown(url)} does not answer in time.") from error
            except (httpx2.TransportError, httpx2.InvalidURL) as error:
                raise bad(f"The image at {shown(url)} cannot be fetched: {error or type(error).__name__}.") from error
        raise bad(f"The image at {shown(url)} is redirected more than {_REDIRECTS} times.")

    async def _check(self, url: str) -> None:
        """Refuse what is not on the public network: the node can reach places that the renter cannot."""
        parts = split(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise bad(f"The image's address {shown(url)} is not an http or https address.")
        if self._private:
            return
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:
            raise bad(f"The host of the image's address {shown(url)} is not known.") from error
        if not all(ipaddress.ip_address(str(address[4][0]).partition("%")[0]).is_global for address in found):
            raise bad(f"The image's address {shown(url)} is not a public one.")


async def _save(url: str, answer: httpx2.Response, into: BinaryIO, reserve: Callable[[int], None]) -> str:
    if answer.status_code != 200:
        raise bad(f"The image at {shown(url)} cannot be fetched: the server answers {answer.status_code}.")
    length = answer.headers.get("content-length", "")
    promised = int(length) if length.isdigit() and "content-encoding" not in answer.headers else 0
    reserve(promised)
    digest, size = hashlib.sha256(), 0
    async for data in answer.aiter_bytes(_CHUNK):
        size += len(data)
        reserve(size)
        digest.update(data)
        into.write(data)
    into.truncate(size)
    if promised and size != promised:
        raise bad(f"The image at {shown(url)} ended after {size} of {promised} bytes.")
    return digest.hexdigest()


def _onward(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError as error:
        raise bad(f"The image at {shown(url)} is redirected to what is no address.") from error


def split(url: str) -> SplitResult:
    """The parts of an image's address. Raises DriverError for what is none."""
    try:
        return urlsplit(url)
    except ValueError as error:
        raise bad(f"The image's address {shown(url)} is none: {error}.") from error


def shown(url: str) -> str:
    """An address as it may be told: whole, but for credentials, and a query, which may be one."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url.partition("?")[0].rpartition("@")[2][:200]
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))[:200]
