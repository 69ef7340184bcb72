"""Typed errors of the inference surface, and the one place that renders them.

An error knows its HTTP status, the type, code and parameter of the body that OpenAI clients read, and the headers
that steer their retries. Messages never contain more of a key than its last four characters.
"""

from __future__ import annotations

import orjson

Headers = tuple[tuple[bytes, bytes], ...]

NO_RETRY: Headers = ((b"x-should-retry", b"false"),)


class ApiError(Exception):
    """A refusal or failure with everything a response needs.

    `headers` are extra response headers; `counted` names the refusal in the metrics (the code, or the type where
    there is none).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = headers

    @property
    def counted(self) -> str:
        """Label of this error in the metrics."""
        return self.code or self.type

    def body(self, request_id: str) -> bytes:
        """JSON body; all keys are always there."""
        return orjson.dumps(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                    "request_id": request_id,
                }
            }
        )


def malformed(detail: str) -> ApiError:
    """The body is not JSON."""
    return ApiError(400, f"The body is not valid JSON: {detail}.", code="invalid_json")


def encoded(coding: str) -> ApiError:
    """The body is compressed."""
    return ApiError(
        415,
        f"The request body is encoded as '{coding[:40]}'. Send it as it is, without Content-Encoding.",
        code="unsupported_content_encoding",
    )


def invalid(param: str | None, message: str) -> ApiError:
    """A value of the wrong type or out of range."""
    return ApiError(400, message, code="invalid_value", param=param)


def missing(param: str) -> ApiError:
    """A required field is not there."""
    return ApiError(400, f"Missing required parameter: '{param}'.", code="missing_required_parameter", param=param)


def unsupported(param: str, why: str) -> ApiError:
    """A known field that this server does not act on, with a value that asks it to."""
    return ApiError(400, f"Unsupported parameter: '{param}' {why}.", code="unsupported_parameter", param=param)


def context_length_exceeded(limit: int, prompt: int, completion: int | None, param: str) -> ApiError:
    """Prompt and answer do not fit the model's window; both numbers are in the message because clients parse it."""
    asked = prompt + (completion or 0)
    if completion is None:
        detail = f"your {param} resulted in {prompt} tokens. Please reduce the length of the {param}."
    else:
        detail = (
            f"you requested {asked} tokens ({prompt} in the {param}, {completion} in the completion). "
            f"Please reduce the length of the {param} or completion."
        )
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, {detail}",
        code="context_length_exceeded",
        param=param,
    )


def invalid_api_key(presented: str) -> ApiError:
    """Missing, unknown, revoked or expired key: one answer for all of them."""
    if presented:
        shown = "*" * 8 + presented[-4:] if len(presented) > 12 else "*" * 8
        message = f"Incorrect API key provided: {shown}."
    else:
        message = "You didn't provide an API key. Send it as 'Authorization: Bearer <key>' or as 'X-API-Key: <key>'."
    return ApiError(401, message, code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))


def model_not_found(name: str) -> ApiError:
    """The model does not exist or the key may not use it; the two are not told apart."""
    shown = name if len(name) <= 100 else name[:100] + "…"
    return ApiError(
        404,
        f"The model '{shown}' does not exist or you do not have access to it.",
        code="model_not_found",
        param="model",
    )


def wrong_task(model: str, route: str, why: str) -> ApiError:
    """The model exists and does something else. An embedding model is not found where it should talk, as at OpenAI."""
    shown = model if len(model) <= 100 else model[:100] + "…"
    return ApiError(
        400 if route == "embeddings" else 404,
        f"The model '{shown}' is not supported at /v1/{route}: {why}.",
        code="model_not_supported",
        param="model",
    )


def not_found(method: str, path: str) -> ApiError:
    """No such route."""
    return ApiError(404, f"Invalid URL ({method} {path[:200]}).", code="unknown_url")


def method_not_allowed(method: str, path: str, allowed: str) -> ApiError:
    """The route exists for other methods."""
    return ApiError(
        405,
        f"Not allowed to {method} on {path[:200]} (allowed: {allowed}).",
        code="method_not_supported",
        headers=((b"allow", allowed.encode("ascii")),),
    )


def too_large(limit: int) -> ApiError:
    """The body is over the limit."""
    return ApiError(
        413,
        f"The request body is larger than the limit of {limit} bytes.",
        code="request_too_large",
        headers=((b"connection", b"close"),),
    )


def request_timeout(seconds: float) -> ApiError:
    """The client did not send its body in time."""
    return ApiError(
        408,
        f"The request body did not arrive within {seconds:g} seconds.",
        code="request_timeout",
        headers=((b"connection", b"close"), *NO_RETRY),
    )


def insufficient_quota(status: int) -> ApiError:
    """The account cannot pay for the request. Retrying does not help, so clients are told not to."""
    return ApiError(
        status,
        "You exceeded your current quota: the balance does not cover this request. "
        "Add funds or lower max_completion_tokens.",
        type="insufficient_quota",
        code="insufficient_quota",
        headers=NO_RETRY,
    )


def rate_limited(message: str, retry_after_s: float, kind: str = "requests", headers: Headers = ()) -> ApiError:
    """A limit of the key or account is reached; `kind` is the dimension (requests or tokens)."""
    return ApiError(
        429, message, type=kind, code="rate_limit_exceeded", headers=(*retry_after(retry_after_s), *headers)
    )


def overloaded(message: str, retry_after_s: float = 1.0) -> ApiError:
    """The model's queue is full: the server's limit, not the caller's."""
    return _later("server_is_overloaded", message, retry_after_s)


def unavailable(message: str, retry_after_s: float = 5.0) -> ApiError:
    """The engine or the journal cannot serve now."""
    return _later("service_unavailable", message, retry_after_s)


def _later(code: str, message: str, retry_after_s: float) -> ApiError:
    return ApiError(503, message, type="service_unavailable_error", code=code, headers=retry_after(retry_after_s))


def internal(message: str = "The server had an error while processing your request.") -> ApiError:
    """Our fault; details are in the log under the request id."""
    return ApiError(500, message, type="server_error", code="internal_error")


def retry_after(seconds: float) -> Headers:
    """Retry-After in whole seconds (at least 1, as the format demands) and in milliseconds, which SDKs prefer."""
    milliseconds = max(1, round(seconds * 1000))
    return (
        (b"retry-after", str(max(1, -(-milliseconds // 1000))).encode("ascii")),
        (b"retry-after-ms", str(milliseconds).encode("ascii")),
    )
