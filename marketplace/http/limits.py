"""Rate limits: token buckets as one number each (the generic cell rate algorithm), in integer microseconds.

A bucket is described by the time at which it would be full again ("theoretical arrival time"). A request costs one
interval; it is admitted while the bucket is not further behind than its burst allows. No timers, no floats.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from marketplace.settings.rules import AppSettings

RateClass = Literal["read", "write", "login", "charge", "webhook", "rent"]
SECOND = 1_000_000
MAX_BUCKETS = 100_000


@dataclass(frozen=True, slots=True)
class Rate:
    """So many requests, each earned back after `interval_us`."""

    burst: int
    interval_us: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a request is admitted, how many more are at once, and in how many seconds the bucket is full, or has
    one again."""

    admitted: bool
    limit: int
    remaining: int
    reset_s: int
    retry_after_s: int


RATES: dict[RateClass, Rate] = {
    "read": Rate(100, SECOND // 20),
    "write": Rate(20, SECOND // 5),
    "login": Rate(20, 3 * SECOND),
    "charge": Rate(200, SECOND // 50),
    "webhook": Rate(300, SECOND // 60),
    "rent": Rate(10, SECOND),
}
"""What each class has unless the settings say otherwise. A service charges for all of its customers, and a payment
provider tells of all payments from few addresses: both send much at once."""
MAIL_PER_EMAIL = Rate(5, 300 * SECOND)
"""Mails that strangers may cause for one address."""
_MINUTE = 60 * SECOND


@lru_cache(4)
def rates(settings: AppSettings) -> dict[RateClass, Rate]:
    """The rate of each class as the settings have it."""
    return {
        **RATES,
        "read": Rate(settings.read_burst, _MINUTE // settings.read_per_minute),
        "write": Rate(settings.write_burst, _MINUTE // settings.write_per_minute),
        "login": Rate(settings.login_burst, _MINUTE // settings.login_per_minute),
        "rent": Rate(settings.rent_burst, _MINUTE // settings.rent_per_minute),
    }


def login_per_email(settings: AppSettings) -> Rate:
    """How often somebody may try to sign in as one person."""
    return Rate(settings.login_email_burst, _MINUTE // settings.login_email_per_minute)


def totp_per_person(settings: AppSettings) -> Rate:
    """How often a person may send codes that switch their second factor on or off."""
    return Rate(settings.totp_burst, _MINUTE // settings.totp_per_minute)


class Buckets:
    """All buckets of this process, by name. Safe to share between threads; full buckets are forgotten."""

    def __init__(self) -> None:
        self._full_at: dict[str, int] = {}
        self._lock = threading.Lock()

    def take(self, name: str, rate: Rate, now: int) -> Verdict:
        """Take one request out of a bucket at `now` (µs); a refused one takes nothing."""
        span = rate.burst * rate.interval_us
        with self._lock:
            full_at = max(self._full_at.get(name, now), now)
            admitted = full_at + rate.interval_us - now <= span
            if admitted:
                full_at += rate.interval_us
                if len(self._full_at) >= MAX_BUCKETS and name not in self._full_at:
                    self._forget(now)
                self._full_at[name] = full_at
        behind = full_at - now
        return Verdict(
            admitted,
            rate.burst,
            (span - behind) // rate.interval_us,
            -(-behind // SECOND),
            0 if admitted else max(1, -(-(behind + rate.interval_us - span) // SECOND)),
        )

    def _forget(self, now: int) -> None:
        self._full_at = {name: full_at for name, full_at in self._full_at.items() if full_at > now}
        if len(self._full_at) >= MAX_BUCKETS:
            # So many callers at once: those who would have waited least lose their count first.
            kept = sorted(self._full_at.items(), key=lambda item: item[1])[MAX_BUCKETS // 2 :]
            self._full_at = dict(kept)
