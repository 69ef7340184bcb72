"""How a key's limits look on the wire: `x-ratelimit-*` headers and 429."""

from __future__ import annotations

from gateway.admission.limits import Allowance, Limited
from gateway.inference import errors
from gateway.inference.errors import ApiError


def headers(allowance: Allowance, kind: str = "requests") -> list[tuple[bytes, bytes]]:
    """Headers that tell how many requests or tokens are left."""
    name = kind.encode("ascii")
    return [
        (b"x-ratelimit-limit-" + name, b"%d" % allowance.limit),
        (b"x-ratelimit-remaining-" + name, b"%d" % allowance.remaining),
        (b"x-ratelimit-reset-" + name, duration(allowance.reset_us).encode("ascii")),
    ]


def refusal(limited: Limited) -> ApiError:
    """429 with the time to come back."""
    if limited.kind == "concurrency":
        message = f"Rate limit reached: this key may have {limited.limit} requests in flight at a time."
    elif limited.kind == "tokens":
        message = f"Rate limit reached: this key may use {limited.limit} tokens per minute."
        return errors.rate_limited(message, limited.retry_after_us / 1e6, "tokens")
    else:
        message = f"Rate limit reached: this key may make {limited.limit} requests per minute."
    return errors.rate_limited(message, limited.retry_after_us / 1e6)


def duration(us: int) -> str:
    """Microseconds as the durations that OpenAI's headers carry: `12ms`, `1.5s`, `6m0s`."""
    milliseconds = -(-us // 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    seconds = f"{rest / 1000:g}s"
    return f"{minutes}m{seconds}" if minutes else seconds
