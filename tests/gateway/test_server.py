"""Whose address a caller has: that of the connection, or what a proxy that is trusted says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.server import make_server

PROXIES = ("10.0.0.0/8", "fd00::1/128")


def caller(connected: str, forwarded: str | None, proxies: tuple[str, ...]) -> str:
    """The address that an application sees."""
    seen: list[str] = []

    async def app(scope: dict[str, Any], receive: object, send: object) -> None:
        seen.append(scope["client"][0])

    config = make_server(app, backlog=1, drain_s=0, trusted_proxies=proxies).config
    config.load()
    headers = [] if forwarded is None else [(b"x-forwarded-for", forwarded.encode())]
    scope: Any = {"type": "http", "client": (connected, 4711), "headers": headers, "scheme": "http"}
    asyncio.run(config.loaded_app(scope, None, None))  # type: ignore[arg-type]  # it neither reads nor answers
    return seen[0]


@pytest.mark.parametrize(
    ("connected", "forwarded", "expected"),
    [
        ("10.1.2.3", "203.0.113.7", "203.0.113.7"),
        ("fd00::1", "2001:db8::7", "2001:db8::7"),
        ("10.1.2.3", "203.0.113.7, 10.9.9.9", "203.0.113.7"),  # two proxies, one behind the other
        ("10.1.2.3", "192.0.2.1, 203.0.113.7", "203.0.113.7"),  # the first is what the caller made up
        ("10.1.2.3", None, "10.1.2.3"),
        ("203.0.113.9", "192.0.2.1", "203.0.113.9"),
    ],
)
def test_proxies_that_are_trusted_name_the_caller(connected: str, forwarded: str | None, expected: str) -> None:
    assert caller(connected, forwarded, PROXIES) == expected


@pytest.mark.parametrize("connected", ["127.0.0.1", "10.1.2.3"])
def test_nobody_is_trusted_who_is_not_named(connected: str) -> None:
    assert caller(connected, "192.0.2.1", ()) == connected
