"""One body shape for every error, and headers that steer retries."""

from __future__ import annotations

import json

import pytest

from gateway.inference import errors
from gateway.inference.errors import ApiError

EVERY: list[tuple[ApiError, int, str, str | None]] = [
    (errors.malformed("x"), 400, "invalid_request_error", "invalid_json"),
    (errors.encoded("gzip"), 415, "invalid_request_error", "unsupported_content_encoding"),
    (errors.invalid("a.b", "x"), 400, "invalid_request_error", "invalid_value"),
    (errors.missing("a"), 400, "invalid_request_error", "missing_required_parameter"),
    (errors.unsupported("a", "x"), 400, "invalid_request_error", "unsupported_parameter"),
    (errors.context_length_exceeded(10, 8, 5, "messages"), 400, "invalid_request_error", "context_length_exceeded"),
    (errors.invalid_api_key(""), 401, "invalid_request_error", "invalid_api_key"),
    (errors.model_not_found("m"), 404, "invalid_request_error", "model_not_found"),
    (errors.not_found("GET", "/x"), 404, "invalid_request_error", "unknown_url"),
    (errors.method_not_allowed("PUT", "/x", "GET"), 405, "invalid_request_error", "method_not_supported"),
    (errors.request_timeout(30), 408, "invalid_request_error", "request_timeout"),
    (errors.too_large(5), 413, "invalid_request_error", "request_too_large"),
    (errors.insufficient_quota(429), 429, "insufficient_quota", "insufficient_quota"),
    (errors.rate_limited("x", 1.5), 429, "requests", "rate_limit_exceeded"),
    (errors.internal(), 500, "server_error", "internal_error"),
    (errors.overloaded("x"), 503, "service_unavailable_error", "server_is_overloaded"),
    (errors.unavailable("x"), 503, "service_unavailable_error", "service_unavailable"),
]


@pytest.mark.parametrize(("error", "status", "kind", "code"), EVERY, ids=[str(row[3]) for row in EVERY])
def test_every_error_has_its_status_and_all_keys(error: ApiError, status: int, kind: str, code: str) -> None:
    body = json.loads(error.body("req-9"))["error"]
    assert set(body) == {"message", "type", "param", "code", "request_id"}
    assert (error.status, body["type"], body["code"], body["request_id"]) == (status, kind, code, "req-9")
    assert body["message"]
    for name, value in error.headers:
        assert name == name.lower() and value.decode("ascii").isprintable()


def test_context_overflow_names_both_numbers() -> None:
    error = errors.context_length_exceeded(2048, 2000, 100, "messages")
    assert "2048 tokens" in error.message and "2100 tokens" in error.message and "2000 in the messages" in error.message
    assert "3000 tokens" in errors.context_length_exceeded(2048, 3000, None, "prompt").message


@pytest.mark.parametrize("key", ["hr_u_abcdefghijklmnopqrstuvwxyz", "short", "x" * 12])
def test_a_key_is_never_echoed_beyond_its_last_four(key: str) -> None:
    message = errors.invalid_api_key(key).message
    assert key not in message
    assert not any(key[i : i + 5] in message for i in range(len(key) - 4))


def test_out_of_money_is_not_retried() -> None:
    assert (b"x-should-retry", b"false") in errors.insufficient_quota(429).headers
    assert errors.insufficient_quota(402).status == 402


def test_retry_after_is_a_whole_second_at_least_and_exact_in_milliseconds() -> None:
    assert errors.retry_after(0.2) == ((b"retry-after", b"1"), (b"retry-after-ms", b"200"))
    assert errors.retry_after(1.5) == ((b"retry-after", b"2"), (b"retry-after-ms", b"1500"))
    assert errors.retry_after(0.0) == ((b"retry-after", b"1"), (b"retry-after-ms", b"1"))
