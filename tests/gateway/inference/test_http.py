"""Bodies, heads, methods and connections as raw bytes: each wrong one a clear error."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "tiny", "messages": HELLO}
PROMPT = len("user\nHi\nassistant\n") + 3


@pytest.mark.parametrize("body", [b"", b"{", b"not json at all", b'{"model": "\xff"}'])
def test_malformed_json(shared: Any, body: bytes) -> None:
    assert shared.ask(shared.request(body)).refusal() == (400, "invalid_json")


@pytest.mark.parametrize(
    ("coding", "expected"),
    [(b"gzip", (415, "unsupported_content_encoding")), (b"identity", (400, "invalid_json"))],
)
def test_a_compressed_body(shared: Any, coding: bytes, expected: Any) -> None:
    body = gzip.compress(json.dumps(CHAT).encode())
    head = shared.head(length=len(body))[:-2] + b"content-encoding: %b\r\n\r\n" % coding
    assert shared.ask(head + body).refusal() == expected


def test_a_two_megabyte_body(shared: Any) -> None:
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x" * 2_000_000}]}).encode()
    with shared.connect() as raw:
        raw.sendall(shared.request(body))
        assert shared.read(raw).refusal() == (413, "request_too_large")
        assert raw.recv(10) == b""


def test_a_two_megabyte_body_in_chunks(shared: Any) -> None:
    with shared.connect() as raw:
        raw.sendall(shared.head()[:-2] + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(32):
            raw.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        raw.sendall(b"0\r\n\r\n")
        assert shared.read(raw).refusal() == (413, "request_too_large")


def test_a_body_that_is_announced_too_large_is_not_even_asked_for(shared: Any) -> None:
    with shared.connect() as raw:
        raw.sendall(shared.head(length=2_000_000)[:-2] + b"expect: 100-continue\r\n\r\n")
        assert shared.read(raw).refusal() == (413, "request_too_large")


def test_a_body_in_small_chunks_is_read(shared: Any) -> None:
    body = json.dumps(CHAT).encode()
    with shared.connect() as raw:
        raw.sendall(shared.head()[:-2] + b"transfer-encoding: chunked\r\n\r\n")
        for start in range(0, len(body), 7):
            part = body[start : start + 7]
            raw.sendall(b"%x\r\n%b\r\n" % (len(part), part))
        raw.sendall(b"0\r\n\r\n")
        assert shared.read(raw)[0] == 200


@pytest.mark.parametrize("whole", [True, False], ids=["one packet", "head and body"])
def test_an_offer_of_another_protocol_is_ignored(shared: Any, whole: bool) -> None:
    body = json.dumps(CHAT).encode()
    offer = b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAA\r\nUpgrade: h2c\r\n\r\n"
    head = shared.head(length=len(body))[:-2] + offer
    with shared.connect() as raw:
        for _ in range(2):
            for part in [head + body] if whole else [head, body]:
                raw.sendall(part)
            assert shared.read(raw)[0] == 200


def test_a_body_that_never_comes(make_house: Any) -> None:
    house = make_house()
    house.limits(body_timeout_s=0.1)
    with house.connect() as raw:
        raw.sendall(house.head(length=100) + b"{")
        answer = house.read(raw)
        assert answer.refusal() == (408, "request_timeout")
        assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/nowhere", (404, "unknown_url")),
        ("POST", "/", (404, "unknown_url")),
        ("POST", "/v1/nothing", (404, "unknown_url")),
        ("GET", "/v1/chat/completions", (404, "unknown_url")),
        ("GET", "/v1/chat/completions/abc", (404, "unknown_url")),
        ("GET", "/v1/models/", (404, "unknown_url")),
        ("PUT", "/v1/chat/completions", (405, "method_not_supported")),
        ("DELETE", "/v1/models", (405, "method_not_supported")),
        ("POST", "/healthz", (405, "method_not_supported")),
    ],
)
def test_unknown_routes_and_methods_are_json_errors(shared: Any, method: str, path: str, expected: Any) -> None:
    answer = shared.ask(shared.request(b"", path, method))
    if path == "/v1/models/":
        assert answer.status == 404
        return
    assert answer.refusal() == expected
    if expected[0] == 405:
        assert answer.headers["allow"]


def test_what_is_not_http_gets_a_json_error(shared: Any) -> None:
    with shared.connect() as raw:
        raw.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        data = b""
        while part := raw.recv(65536):
            data += part
    assert data.startswith(b"HTTP/1.1 400 ")
    assert json.loads(data.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_an_endless_head_is_refused(shared: Any) -> None:
    with shared.connect() as raw:
        raw.sendall(b"GET /healthz HTTP/1.1\r\n" + b"x-y: " + b"z" * 100_000 + b"\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_requests_may_be_pipelined_on_one_connection(shared: Any) -> None:
    with shared.connect() as raw:
        raw.sendall(shared.request(CHAT) + shared.request(b"{") + shared.request(CHAT))
        buffer = bytearray()
        statuses = [shared.read(raw, buffer)[0] for _ in range(3)]
        assert statuses == [200, 400, 200]
        raw.sendall(shared.request(CHAT))
        assert shared.read(raw, buffer)[0] == 200
