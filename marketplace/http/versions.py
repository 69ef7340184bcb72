"""Protocol versions, pure: how a request names one, and which of an endpoint's versions serves it.

An endpoint has a list of versions that it serves. A request pinned to R is served by the newest of them that is not
newer than R; when there is none, the pin is older than the endpoint accepts. A request without a pin gets the newest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from marketplace.http.errors import Code, Refusal

ALL: tuple[str, ...] = tuple(f"v{number:03d}" for number in range(45, 63))
"""Every version in force, oldest first: what an endpoint serves unless it says otherwise."""
NEWEST = ALL[-1]
UPCOMING = "~upcoming"

_NAME = re.compile(r"v(\d{3})", re.ASCII)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_SINCE: tuple[tuple[str, str], ...] = (
    ("2026-09-08", "v062"),
    ("2026-08-05", "v061"),
    ("2026-06-25", "v060"),
    ("2026-05-27", "v059"),
    ("2026-05-15", "v058"),
    ("2026-04-01", "v057"),
    ("2026-03-23", "v056"),
    ("2026-03-06", "v055"),
)
_BEFORE = "v045"


def since(oldest: str) -> tuple[str, ...]:
    """The versions from `oldest` on."""
    return ALL[ALL.index(oldest) :]


def canonical(requested: str) -> str | None:
    """Return the version that a name, alias or ISO date stands for; None for anything else."""
    if requested == UPCOMING:
        return NEWEST
    if _NAME.fullmatch(requested):
        return requested
    if _DATE.fullmatch(requested):
        return next((version for date, version in _SINCE if requested >= date), _BEFORE)
    return None


def resolve(served: Sequence[str], requested: str | None, endpoint: str) -> str:
    """Return the version that serves a request. `served` is oldest first. Refusal: UnsupportedVersion.

    Names sort as their numbers do, so versions are compared as text.
    """
    if requested is None:
        return served[-1]
    wanted = canonical(requested)
    fitting = [] if wanted is None else [version for version in served if version <= wanted]
    if not fitting:
        raise Refusal(
            Code.UNSUPPORTED_VERSION,
            f"unsupported version: {endpoint} accepts {served[0]} to {served[-1]}",
            param="version",
            details={"endpoint": endpoint, "requested": requested[:40], "accepted": list(served)},
        )
    return fitting[-1]
