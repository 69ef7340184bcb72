"""Budgets of keys, pure: in which window of time a spending counts.

Windows are calendar days, weeks (from Monday) and months in UTC, or all time. A request counts in the window in which
it is settled.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Literal, get_args

BudgetPeriod = Literal["day", "week", "month", "total"]
PERIODS: tuple[BudgetPeriod, ...] = get_args(BudgetPeriod)
DEFAULT_PERIOD: BudgetPeriod = "total"
"""Of a budget that does not say for how long it is."""
NEVER = 2**62
"""End of the window that never ends."""

_DAY_US = 86_400_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class BudgetPeriodError(ValueError):
    """There is no such period."""


def read_period(text: str) -> BudgetPeriod:
    """The period of that name. BudgetPeriodError."""
    for period in PERIODS:
        if period == text:
            return period
    raise BudgetPeriodError(f"a budget is for a {', '.join(PERIODS[:-1])}, or total; not {text!r}")


def window(period: BudgetPeriod, at: int) -> tuple[int, int]:
    """Beginning (inclusive) and end (exclusive) of the window that contains `at`; all in µs UTC."""
    if period == "total":
        return 0, NEVER
    day = at - at % _DAY_US
    if period == "day":
        return day, day + _DAY_US
    if period == "week":
        monday = day - (day // _DAY_US + 3) % 7 * _DAY_US  # 1970 began on a Thursday
        return monday, monday + 7 * _DAY_US
    first = (_EPOCH + timedelta(microseconds=day)).replace(day=1)
    following = (first + timedelta(days=31)).replace(day=1)
    return _microseconds(first), _microseconds(following)


def _microseconds(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1)
