"""The handle that a request holds on its money: made by `Meter.open`, ended exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Coroutine
from enum import Enum
from typing import Any, Protocol

import msgspec

from gateway.metering.cover import Counted, Cover, metered
from gateway.metering.journal import JournalUnavailableError
from marketplace.ledger.money import Tokens
from marketplace.ledger.records import Hold, Source
from marketplace.ledger.rules import Outcome

log = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 5.0
"""How long the final counters of an aborted request may take before the last known ones are settled."""


class InsufficientQuotaError(Exception):
    """The account cannot cover the first slice. Amounts in nano-units."""

    def __init__(self, account_id: str, needed: int, available: int) -> None:
        super().__init__(f"account {account_id}: {needed} nano-units needed, {available} available")
        self.account_id = account_id
        self.needed = needed
        self.available = available


class MeteringUnavailableError(Exception):
    """Nothing can be metered now, so nothing may run: answer 503 and try again after `retry_after_s`."""

    def __init__(self, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s


class SettlementDelayedError(Exception):
    """The settlement could not be made durable in time: the client must see an error, and will not be charged."""


class Stop(Enum):
    """Why the engine must be told to stop a running request."""

    INSUFFICIENT_QUOTA = "insufficient_quota"
    """No more money: finish_reason "length"; settle with outcome "out_of_funds"."""
    UNAVAILABLE = "unavailable"
    """Our own fault: settle with outcome "server_fault"."""


class Settlement(msgspec.Struct, frozen=True):
    """What was durably recorded about the end of a request."""

    tokens: Tokens
    outcome: Outcome
    billable: bool
    reason: str
    cost: int
    """nano-units charged"""


class Timings(msgspec.Struct, frozen=True):
    """Kept with the usage record; microseconds, and generated tokens whose text was sent to the client."""

    delivered: int = 0
    queue_us: int = 0
    ttft_us: int = 0
    duration_us: int = 0


NO_TIMINGS = Timings()


class Owner(Protocol):
    """What a charge asks of its meter, or of who stands between them."""

    def note(self, charge: Charge, tokens: Tokens) -> Stop | None:
        """Take note of what the request has consumed so far."""

    def finish(
        self, charge: Charge, outcome: Outcome, tokens: Tokens, source: Source, engine_epoch: str, timings: Timings
    ) -> None:
        """Queue the settlement; sets `charge.end`."""

    def give_back(self, charge: Charge, reason: str) -> None:
        """Queue the void; sets `charge.end`."""

    def own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run the work in a task that outlives the request."""


class Charge:
    """One request's open hold; made by `Meter.open`, ended exactly once by `settle`, `settle_when` or `void`."""

    __slots__ = (
        "_owner",
        "account_id",
        "checkpoint_at",
        "checkpoint_tokens",
        "counters",
        "cover",
        "durable",
        "end",
        "key_id",
        "model",
        "request_id",
        "seen_at",
    )

    def __init__(self, owner: Owner, hold: Hold, cover: Cover, durable: asyncio.Future[None], now: int) -> None:
        self.request_id = hold.request_id
        self.account_id = hold.account_id
        self.key_id = hold.key_id
        self.model = hold.model
        self.durable = durable
        """Resolves when the hold is on disk; fails with JournalUnavailableError when it never will be."""
        self.counters: Tokens = Tokens()
        """What is known to be consumed so far."""
        self._owner = owner
        # The rest is the meter's bookkeeping.
        self.cover = cover
        self.end: asyncio.Future[Settlement | None] | None = None
        self.seen_at = self.checkpoint_at = now
        self.checkpoint_tokens = 0

    @property
    def held(self) -> int:
        """Nano-units held for this request now."""
        return self.cover.amount

    @property
    def ended(self) -> bool:
        """True once the end is queued (or the hold was lost)."""
        return self.end is not None

    @property
    def owner(self) -> Owner:
        """Who is told of its progress and of its end: the meter, or the last that stepped between."""
        return self._owner

    def through(self, owner: Owner) -> Owner:
        """Tell `owner` from now on, which passes everything on to the owner before it: that one is returned."""
        before, self._owner = self._owner, owner
        return before

    def progress(self, counters: Counted) -> Stop | None:
        """Note cumulative counters; a Stop when the request must be ended for lack of money or of a working journal.

        Cheap enough for every flush. Counters never go back: an older reading changes nothing.
        """
        if self.end is not None or counters.completion < self.counters.completion:
            return None
        return self._owner.note(self, metered(counters))

    def settle(
        self,
        outcome: Outcome,
        counters: Counted,
        *,
        source: Source = "engine",
        engine_epoch: str = "",
        timings: Timings = NO_TIMINGS,
    ) -> asyncio.Future[Settlement | None]:
        """End the request with its final counters. The record is queued by this very call; await the future for
        durability.

        Exactly once: a later call changes nothing and returns the first one's result (None after a void). The future
        fails with SettlementDelayedError when the journal stays broken, JournalUnavailableError when the hold itself
        was never written. Cancelling the wait does not touch the settlement.
        """
        if self.end is None:
            self._owner.finish(self, outcome, metered(counters), source, engine_epoch, timings)
        assert self.end is not None
        return asyncio.shield(self.end)

    def settle_when(
        self,
        outcome: Outcome,
        final: Awaitable[Counted],
        *,
        engine_epoch: str = "",
        timings: Timings = NO_TIMINGS,
        timeout_s: float = ABORT_TIMEOUT_S,
    ) -> asyncio.Task[None]:
        """End the request when the engine's final counters arrive, in a task that the meter owns and `Meter.close`
        waits for.

        After timeout_s, or when `final` raises, the last counters that `progress` saw are settled (source
        "checkpoint").
        """
        return self._owner.own(self._settle_when(outcome, final, engine_epoch, timings, timeout_s))

    async def _settle_when(
        self, outcome: Outcome, final: Awaitable[Counted], engine_epoch: str, timings: Timings, timeout_s: float
    ) -> None:
        source: Source = "engine"
        try:
            tokens = metered(await asyncio.wait_for(final, timeout_s))
        except Exception as error:  # supervision boundary: whatever the engine's side raises, the hold must end
            log.warning(
                "request %s: no final counters (%s), settling the last known", self.request_id, error or "timeout"
            )
            tokens, source = self.counters, "checkpoint"
        if self.end is None:
            self._owner.finish(self, outcome, tokens, source, engine_epoch, timings)
        assert self.end is not None
        # A broken journal is reported through its health, and the settlement is tried again.
        with contextlib.suppress(SettlementDelayedError, JournalUnavailableError):
            await asyncio.shield(self.end)

    def void(self, reason: str) -> asyncio.Future[Settlement | None]:
        """Give the hold back: the request never reached the engine. Exactly once, like `settle`; resolves with None."""
        if self.end is None:
            self._owner.give_back(self, reason)
        assert self.end is not None
        return asyncio.shield(self.end)
