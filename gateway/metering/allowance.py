"""How much abandoned prefill each key may still have for free today. Pure: the time is passed in."""

from __future__ import annotations

from collections.abc import Mapping

from marketplace.ledger.rules import PREFILL_ALLOWANCE, day_start


class Allowances:
    """Prompt tokens that keys had computed and abandoned, by UTC day; only the current day counts."""

    def __init__(self) -> None:
        self._used: dict[str, tuple[int, int]] = {}

    def restore(self, used: Mapping[str, int], now: int) -> None:
        """Take what each key has used today, as the ledger knows it; `now` in µs UTC."""
        today = day_start(now)
        self._used = {key_id: (today, tokens) for key_id, tokens in used.items()}

    def left(self, key_id: str, now: int) -> int:
        """Prompt tokens that the key may still abandon for free at `now`; negative when it used more than all."""
        day, used = self._used.get(key_id, (0, 0))
        return PREFILL_ALLOWANCE - used if day == day_start(now) else PREFILL_ALLOWANCE

    def use(self, key_id: str, tokens: int, now: int) -> None:
        """Count abandoned prompt tokens."""
        if tokens:
            self._used[key_id] = (day_start(now), PREFILL_ALLOWANCE - self.left(key_id, now) + tokens)
