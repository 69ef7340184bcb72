"""When a customer is told that their balance runs out, pure.

A fall below the threshold is told once. It can be told again only after the balance has been at 1.5 times the
threshold, so that a balance that goes up and down around the threshold does not fill anybody's inbox. An account that
never had as much as the threshold has not fallen below it.
"""

from __future__ import annotations

from typing import Literal

Step = Literal["arm", "tell"]


def rearm_at(threshold: int) -> int:
    """From which balance a further fall is told again, in nano-units."""
    return threshold + threshold // 2


def step(armed: bool | None, available: int, threshold: int) -> Step | None:
    """What to do about an account that has so much available. `armed` is whether its next fall is to be told, None
    where nothing is known of it. A threshold of 0 tells nobody."""
    if threshold <= 0:
        return None
    if armed:
        return "tell" if available < threshold else None
    return "arm" if available >= (threshold if armed is None else rearm_at(threshold)) else None
