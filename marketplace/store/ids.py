"""Identifiers: UUID version 7 (RFC 9562), so that rows created together lie together in an index."""

from __future__ import annotations

from collections.abc import Callable

Random = Callable[[int], bytes]
"""Returns that many unpredictable bytes; `os.urandom` outside of tests."""


def new_id(now_us: int, random: Random) -> str:
    """Return a UUIDv7 for a time in microseconds since 1970.

    48 bits of milliseconds, then 12 bits of the fraction of the millisecond (RFC 9562, 6.2, method 3: ids of one
    process sort by time to a quarter of a microsecond), then 62 random bits. ValueError when the time is negative or
    beyond 48 bits.
    """
    milliseconds, rest = divmod(now_us, 1000)
    if not 0 <= milliseconds < 1 << 48:
        raise ValueError(f"time {now_us} µs does not fit a UUIDv7")
    fraction = rest * 4096 // 1000
    tail = int.from_bytes(random(8), "big") & ((1 << 62) - 1)
    digits = f"{milliseconds << 80 | 0x7 << 76 | fraction << 64 | 0b10 << 62 | tail:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
